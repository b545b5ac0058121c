# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recorded steps with other settings or without groups, and their bisection."""

import dataclasses
import json
import pathlib
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax import collect
from tba_jax import types
from tba_jax.config import load
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import work_parts
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import decisions
from tba_jax.run import run_directory
from tba_jax.tools import jump
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tests.tools import reruns

_STEPS, _FROM, _POISONED = 12, 6, 75
_OVERRIDES = (
    "checkpoint.every_steps=3",
    f"checkpoint.keep_every_steps={_FROM}",
    # Each step has a ninth group, the only one left for another draw.
    "search.lockstep=True",
    "search.lead_steps=0",
    "search.prompts_per_step=9",
    "search.prompts_per_round=9",
    "replay.recent_window_steps=1",
    "replay.dedupe=False",
)


def _record(workdir):
  """Trains a run whose rewards are 0 or 1, but 40 in one group."""
  make = collect.Collector.groups

  def poisoned(self, *args):
    return [
        dataclasses.replace(
            group,
            rewards=np.float32([1, 0, group.position % 2, 0])
            * (40 if group.position == _POISONED else 1),
        )
        for group in make(self, *args)
    ]

  with mock.patch.object(collect.Collector, "groups", poisoned):
    return reruns.train(workdir, _OVERRIDES)


def _groups(workdir):
  """Returns the journal's groups by id."""
  groups = {}
  for _, payload in journal.read_records(workdir / "replay", 0):
    header, arrays = wire.decode_unverified(payload)
    if "sequence" in header:
      for group in messages.unpack_groups(header, arrays):
        groups[group.position] = group
  return groups


@pytest.mark.slow
@pytest.mark.timeout(600)
class CounterfactualTest(reruns.TestCase):

  record = staticmethod(_record)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.recording = decisions.read(cls.workdir)

  def result(self, *operands):
    """Returns the file of a counterfactual, and its metrics by step."""
    status, out, errors = self.rerun(*operands)
    self.assertEqual(status, 0, out + errors)
    value = json.loads(pathlib.Path(out.splitlines()[-1]).read_text())
    return value, {step["step"]: step for step in value["steps"]}

  def draws(self, first, last):
    """Returns the recorded draws of steps `first` to `last` (exclusive)."""
    draws = []
    make = learner_lib.Learner.make

    def logged(self, draw):
      draws.append(draw)
      return make(self, draw)

    with mock.patch.object(learner_lib.Learner, "make", logged):
      status, out, _ = self.rerun(str(first), str(last))
    self.assertEqual(status, 0, out)
    return draws

  @parameterized.parameters(
      # The loss changes at once, but a rate acts on the next step's loss.
      ("loss.beta=0.2", _FROM),
      ("optimizer.learning_rate=0.01", _FROM + 1),
  )
  def test_changed_setting_changes_loss_from_its_first_step_on(
      self, setting, first
  ):
    value, steps = self.result(str(_FROM), "10", f"--set={setting}")
    self.assertEqual(value["set"], [setting])
    self.assertEqual(value["first_different"], _FROM)
    self.assertEqual(list(steps), [*range(_FROM, 10)])
    for step in range(_FROM, 10):
      is_same = steps[step]["train/loss"] == float(
          self.recording.steps[step].metrics["loss"]
      )
      self.assertEqual(is_same, step < first, step)

  def test_left_out_group_gives_result_of_training_without_it(self):
    draws = self.draws(0, 3)
    groups = _groups(self.workdir)
    at_step = {n: g for n, g in groups.items() if 9 <= n < 18}
    drawn = draws[1].prompt_ids.tolist()
    by_prompt = {g.prompt_id: n for n, g in at_step.items()}
    self.assertLen(by_prompt, 9)
    left_out = by_prompt[drawn[0]]
    (other,) = set(by_prompt) - set(drawn)
    # By hand: the slot of the left-out group has the ninth group.
    config = load.complete(run_directory.load_config(str(self.workdir)))
    policy = policy_lib.make_policy(config, self.workdir)
    buffer = buffer_lib.ReplayBuffer(
        config, reward_temperature=lambda step: 1.0
    )
    buffer.begin_epoch(1, 0)
    buffer.insert(at_step[by_prompt[other]], 1)
    changed = buffer.draw(1, 4, 1)
    for field in dataclasses.fields(types.Draw):
      array = getattr(draws[1], field.name)
      if isinstance(array, np.ndarray):
        array[0] = getattr(changed, field.name)[0]
    info = run_directory.open_run(str(self.workdir), config)
    cluster = cluster_lib.join(config.trainer, (), info.secret)
    work, _ = work_parts.make_work(config, info, policy, cluster, None, 0)
    self.addCleanup(work.close)
    learner = learner_lib.make_learner(config, policy, buffer, work)
    expected = [jax.device_get(learner.step(draw)) for draw in draws]
    value, steps = self.result("0", "3", f"--without=group={left_out}")
    self.assertEqual(value["first_different"], 1)
    for step, metrics in enumerate(expected):
      for name in ("loss", "grad_norm", "reward_mean", "kl"):
        self.assertAlmostEqual(
            steps[step][f"train/{name}"], float(metrics[name]), 5
        )
    recorded = self.recording.steps[2].metrics["loss"]
    self.assertNotAlmostEqual(steps[2]["train/loss"], float(recorded), 5)

  def test_bisection_finds_poisoned_group(self):
    (step,) = [
        draw.step
        for draw in self.draws(_FROM, _STEPS)
        if draw.rewards.max() == 40
    ]
    status, out, errors = self.rerun(
        str(_FROM), str(step + 1), "--bisect=train/loss"
    )
    self.assertEqual(status, 0, out + errors)
    lines = out.splitlines()
    self.assertRegex(lines[-2], r"gone without one group \(\d+ reruns\)")
    self.assertIn(f"group {_POISONED} (", lines[-1])
    status, out, _ = self.rerun(
        str(_FROM), str(step + 1), "--bisect=loss", "--by=all"
    )
    self.assertEqual(status, 0, out)
    self.assertRegex(
        out,
        r"1\. the jump is gone without one group.*\n"
        rf"  group {_POISONED} .*\n"
        r"2\. the jump is gone without one version.*\n"
        rf"  version {_POISONED // 9} \(",
    )

  def test_jump_of_all_groups_is_not_ascribed_to_any(self):
    with mock.patch.object(jump, "band", return_value=(-2.0, -1.0)):
      status, out, _ = self.rerun(str(_FROM), "9", "--bisect=grad_norm")
    self.assertEqual(status, 1)
    self.assertIn("no set of groups without which the jump is gone", out)

  @parameterized.parameters(
      (["--set=sampling.temperature=0.5"], "unknown; settings of loss"),
      (["--set=seed=3"], "unknown; settings of loss"),
      (["--set=loss.reward_weight=2"], "rewards in the buffer were computed"),
      (["--set=guards.action=stop"], "do not depend on it"),
      (["--set=loss.betta=1"], "did you mean config.loss.beta"),
      (["--set=loss.beta=-1"], "config.loss.beta = -1.0: must be"),
      (["--without=group=999"], "must be a group in the journal: 0, 1, 2, …"),
      (["--without=searcher=s9"], "must be a searcher in the journal: s"),
      (["--without=7"], "must be group=N"),
      (["--bisect=los"], "los: must be any, collapse or a metric of step 11"),
      (["--bisect=any"], "must come without steps"),
      (["--bisect=beta"], "must jump at step 11"),
      (["--by=group"], "must come with --bisect"),
      (["--bisect=loss", "--by=prompt"], "must be group or searcher"),
      (["--bisect=loss", "--set=loss.beta=1"], "must not be combined"),
      (["99", "--set=loss.beta=1"], "must be an end of 7 to 12"),
  )
  def test_refuses(self, operands, error):
    with mock.patch.object(policy_lib, "make_policy") as make_policy:
      status, _, errors = self.rerun(str(_FROM), *operands)
    self.assertEqual(status, 2)
    self.assertIn(error, errors)
    make_policy.assert_not_called()

  def test_refuses_bisection_after_too_few_steps(self):
    status, _, errors = self.rerun("0", "10", "--bisect=loss")
    self.assertEqual(status, 2)
    self.assertIn("step 0: must begin after 5 or more", errors)
