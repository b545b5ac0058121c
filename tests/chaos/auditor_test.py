# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The auditor knows the rounds of prompts that are drawn by difficulty."""

import json
import pathlib

from absl.testing import parameterized
import numpy as np

from tba_jax import types
from tba_jax.replay import curriculum
from tests.chaos import auditor

N, S = 10, 4  # Prompts, and completions of each.


def group(prompt_id, visit, position, solved):
  return types.Group(
      prompt_id=prompt_id,
      visit=visit,
      position=position,
      prompt_tokens=np.zeros(1, np.int32),
      completion_tokens=np.zeros((S, 1), np.int32),
      completion_lengths=np.ones(S, np.int32),
      sampled_mask=np.ones((S, 1), bool),
      stopped=np.ones(S, bool),
      behavior_logprobs=np.zeros((S, 1), np.float32),
      rewards=(np.arange(S) < solved).astype(np.float32),
      versions=np.zeros(S, np.int32),
      epoch=1,
  )


class OrderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def run_order(self, weight, num_positions):
    """Returns the kept positions of a run that samples in order."""
    order = curriculum.CurriculumOrder(
        N,
        seed=3,
        weight=weight,
        solved_threshold=1.0,
        folder=self.folder / "replay",
    )
    kept = {}
    for position in range(num_positions):
      order.extend(position + 1)
      prompt, visit = order.prompt(position)
      order.note(group(prompt, visit, position, solved=prompt % (S + 1)))
      kept[position] = prompt, visit, None
    config = {"search": {"order": weight, "prompts_per_step": 1}}
    document = {"run_id": "run", "config": config}
    (self.folder / "config.json").write_text(json.dumps(document))
    return kept

  def faults(self, kept):
    run = auditor.Audit(self.folder)
    auditor.check_order(run, kept, None)
    self.assertLen(run.not_checked, 1)
    return "\n".join(run.faults)

  @parameterized.product(
      weight=("unsolved", "uncertain"), num_positions=(7, 10, 12, 29)
  )
  def test_finds_rounds_sound(self, weight, num_positions):
    self.assertEmpty(self.faults(self.run_order(weight, num_positions)))

  def test_finds_another_prompt_or_visit(self):
    kept = self.run_order("unsolved", 29)
    prompt, visit, _ = kept[20]
    for wrong in ((prompt, visit + 7, None), ((prompt + 1) % N, visit, None)):
      self.assertRegex(
          self.faults(kept | {20: wrong}),
          r"prompts at positions \[20\] are not those of their rounds",
      )
    prompt, _, _ = kept[5]
    self.assertRegex(self.faults(kept | {5: (prompt, 1, None)}), r"\[5\]")

  def test_finds_round_without_its_file(self):
    kept = self.run_order("unsolved", 29)
    last = max((self.folder / "replay").glob("order-*.json"))
    content = last.read_text()
    last.unlink()
    self.assertRegex(self.faults(kept), "are of no round's file")
    last.write_text(content.replace("[", "[0, "))
    self.assertRegex(self.faults(kept), "not 3 of 10 prompts")
