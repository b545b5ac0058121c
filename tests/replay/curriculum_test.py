# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the prompt order by how often prompts were solved."""

import collections
import pathlib

from absl.testing import parameterized
import numpy as np

from tba_jax.replay import curriculum
from tba_jax.replay import prompt_order
from tests.transport.groups import fake_groups

_N, _ROUND = 40, 10


def _make(weight="unsolved", seed=1, **more):
  return curriculum.CurriculumOrder(
      _N, seed=seed, weight=weight, solved_threshold=1.0, **more
  )


def _group(prompt_id, *rewards):
  tokens = [[i + 1] for i in range(len(rewards))]
  return fake_groups.make_group(prompt_id, tokens, rewards=rewards)


def _note_all(order, share_of):
  """Notes a group of 20 of each prompt, of which a share is solved."""
  for i in range(_N):
    solved = round(20 * share_of(i))
    order.note(_group(i, *[1.0] * solved, *[0.5] * (20 - solved)))


class CurriculumOrderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "replay"

  def test_first_pass_is_shuffled_one(self):
    order = _make()
    order.extend(_N)
    plain = prompt_order.PromptOrder(_N, seed=1)
    for position in range(_N):
      self.assertEqual(order.prompt(position), plain.prompt(position))
    self.assertEqual(order.prompt(_N), (-1, -1))

  @parameterized.parameters(
      # Prompts solved never, half of the time, always: a quarter of them each.
      ("unsolved", (2, 1, 0)),
      ("uncertain", (1, 2, 0)),
  )
  def test_draw_frequency_follows_solve_rate(self, weight, ranks):
    shares = (0.0, 0.5, 1.0)
    order, counts = _make(weight), collections.Counter()
    for number in range(60):
      _note_all(order, lambda i: shares[i % 3])
      order.extend(_N + (number + 1) * _ROUND)
      drawn = [order.prompt(_N + number * _ROUND + i)[0] for i in range(_ROUND)]
      self.assertLen(set(drawn), _ROUND)
      counts.update(i % 3 for i in drawn)
    by_rank = sorted(range(3), key=lambda kind: counts[kind])
    self.assertEqual([by_rank.index(kind) for kind in range(3)], list(ranks))
    # Those that are always solved, or never, keep a chance.
    self.assertGreater(min(counts.values()), 0)
    self.assertGreater(counts[by_rank[2]], 3 * counts[by_rank[0]])

  def test_visit_is_how_often_prompt_came_before(self):
    order, seen = _make(), collections.Counter()
    order.extend(_N + 7 * _ROUND)
    for position in range(_N + 7 * _ROUND):
      prompt_id, visit = order.prompt(position)
      self.assertEqual(visit, seen[prompt_id])
      seen[prompt_id] += 1

  def test_unjudged_completions_are_not_counted(self):
    order, expected = _make(), _make()
    order.note(_group(3, 1.0, np.nan, 0.0))
    expected.note(_group(3, 1.0, 0.0))
    order.note(_group(3, np.nan, np.nan))
    for name, values in order.get_state().items():
      np.testing.assert_array_equal(values, expected.get_state()[name])

  def test_newer_visit_weighs_more(self):
    order = _make()
    for rewards in ([0.0] * 4, [1.0] * 4, [1.0] * 4):
      order.note(_group(3, *rewards))
    state = order.get_state()
    # 4 + 4/2 of 4 + 4/2 + 4/4.
    self.assertEqual((state["solved"][3], state["sampled"][3]), (6, 7))

  def test_resumes_drawn_rounds(self):
    order = _make(folder=self.folder)
    _note_all(order, lambda i: i % 2)
    saved = order.get_state()
    order.extend(_N + 3 * _ROUND)
    drawn = [order.prompt(i) for i in range(_N + 3 * _ROUND)]
    # The checkpoint is older than the rounds.
    again = _make(folder=self.folder)
    again.set_state(saved)
    _note_all(again, lambda i: 1 - i % 2)
    again.extend(_N + 3 * _ROUND)
    self.assertEqual([again.prompt(i) for i in range(len(drawn))], drawn)
    order.note(_group(0, 1.0))
    again.set_state(order.get_state())
    for one in (order, again):
      one.extend(_N + 4 * _ROUND)
    last = range(len(drawn), len(drawn) + _ROUND)
    self.assertEqual(*([o.prompt(i) for i in last] for o in (order, again)))

  def test_refuses_resume_with_missing_round(self):
    order = _make(folder=self.folder)
    order.extend(_N + 2 * _ROUND)
    (self.folder / "order-000001.json").unlink()
    again = _make(folder=self.folder)
    with self.assertRaisesRegex(ValueError, "order-000001.json: is missing"):
      again.set_state(order.get_state())

  def test_refuses_file_of_another_order(self):
    _make(folder=self.folder).extend(_N + 1)
    path = self.folder / "order-000000.json"
    text = path.read_text()
    for old, new, message in (
        ("40", "41", "must be 10 of 40 prompts; it has 10 of 41"),
        ("[", "[ 77,", "must be 10 of 40 prompts; it has 11 of 40"),
        ("[", "", "damaged"),
    ):
      path.write_text(text.replace(old, new, 1))
      with self.assertRaisesRegex(ValueError, message):
        _make(folder=self.folder)

  def test_knows_ids_of_part_of_prompts(self):
    ids = [5 * i for i in range(_N)]
    order = _make(prompt_ids=ids)
    order.note(_group(ids[-1], 1.0))
    order.extend(_N + _ROUND)
    result = {order.prompt(i)[0] for i in range(_N + _ROUND)}
    self.assertEqual(result, set(ids))
