# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Jumps in a record, and their causes, with steps trained by arithmetic."""

import contextlib
import io
import itertools

from absl.testing import parameterized
import numpy as np

from tba_jax.config import load
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import decisions
from tba_jax.report import run_reader
from tba_jax.tools import bisection
from tba_jax.tools import counterfactual

# Steps, and groups of a step; a searcher samples every other group.
_STEPS, _PER_STEP, _FIRST = 30, 8, 16


def _recording(values, **changes):
  """Returns a record with a metric, whose settings change at step 20."""
  config = load.load_config("configs/countdown.py:smoke", [])
  changed = load.set_values(
      config.copy_and_resolve_references(),
      {key.replace("__", "."): value for key, value in changes.items()},
  )
  starts = [
      decisions.Start(n, step, 0, c.to_dict(), {})
      for n, (step, c) in enumerate(((0, config), (20, changed)))
  ]
  steps = {
      step: decisions.Step(
          decisions.Decision(0, False, 1.0),
          {},
          {"reward_mean": np.float32(value)},
          starts[step >= 20],
      )
      for step, value in enumerate(values)
  }
  return decisions.Recording(starts, steps)


def _values(at=None, value=9.0):
  """Returns a metric from 0 to 1, but `value` from step `at` on."""
  rng = np.random.default_rng(0)
  return [
      value if at is not None and step >= at else rng.random()
      for step in range(_STEPS)
  ]


def _index():
  index = counterfactual.GroupIndex([])
  index.origins = {
      n: counterfactual.Origin(f"s{n % 2:03}-x", n // _PER_STEP, n)
      for n in range(_STEPS * _PER_STEP)
  }
  return index


class FindTest(parameterized.TestCase):

  def find(self, values, **changes):
    return bisection.find(
        run_reader.RunData(),
        _recording(values, **changes),
        {0, 8, 16, 20, 24},
        "any",
    )

  def test_takes_first_jump_and_checkpoint_before(self):
    found = self.find(_values(22))
    self.assertEqual((found.metric, found.before), ("reward_mean", 22))
    self.assertEqual((found.first, found.last), (16, 26))
    self.assertLess(found.normal[1], 9)

  @parameterized.parameters((23, 16), (25, 20))
  def test_begins_before_changes_of_settings(self, at, first):
    found = self.find(_values(at), loss__beta=0.7)
    self.assertEqual(found.first, first)

  @parameterized.parameters(
      ([_values()],), ([[0.0] * 20 + [0.5] * 10],), ([_values(5)],)
  )
  def test_finds_none(self, values):
    self.assertIsNone(self.find(*values))

  def test_refuses_run_without_collapse(self):
    with self.assertRaisesRegex(ValueError, "report names no collapse"):
      bisection.find(
          run_reader.RunData(), _recording(_values()), {0}, "collapse"
      )


class CausesTest(parameterized.TestCase):

  def bisect(self, is_bad, unit="all", steps=range(22, 26), **changes):
    """Returns the exit status and the output.

    Args:
      is_bad: function from step, drawn groups and undone changes to whether the
        metric jumps.
      steps: numbers of those that the rerun may show outside the band.
    """
    recording = _recording(_values(22), **changes)
    every = range(_FIRST * _PER_STEP, _STEPS * _PER_STEP)

    def train(undone=(), left_out=()):
      outcome = counterfactual.Outcome()
      if {*every} <= {*left_out}:
        raise buffer_lib.NothingLeftError
      for step in range(_FIRST, 26):
        drawn = [step * _PER_STEP + n for n in range(_PER_STEP)]
        outcome.drawn[step] = np.array(drawn)[:, None]
        left = [n for n in drawn if n not in left_out]
        bad = step in steps and is_bad(step, left, undone)
        outcome.metrics[step] = {"reward_mean": 9.0 if bad else 0.5}
      return outcome

    out = io.StringIO()
    jumped = bisection.Jump("reward_mean", _FIRST, 26, 22, (-1.0, 2.0))
    with contextlib.redirect_stdout(out):
      status = bisection.run(train, _index(), recording, jumped, unit)
    lines = out.getvalue().splitlines()
    causes = itertools.dropwhile(lambda line: "jump is gone" not in line, lines)
    return status, [line.strip() for line in causes], out.getvalue()

  def test_poisoned_group_comes_before_its_version_and_searcher(self):
    status, causes, out = self.bisect(
        lambda step, left, _: 181 in left, steps=[22]
    )
    self.assertEqual(status, 0)
    self.assertRegex(causes[0], r"1\. .* without one group")
    self.assertIn("group 181 (prompt 181", causes[1])
    self.assertRegex(causes[3], r"version 22 \(8 drawn groups\)")
    self.assertIn("searcher s001-x", causes[5])
    self.assertLess(out.count("rerun "), 40)

  def test_wrong_version_comes_before_its_groups(self):
    _, causes, _ = self.bisect(
        lambda step, left, _: any(176 <= n < 184 for n in left), steps=[22]
    )
    self.assertRegex(causes[0], r"1\. .* without one version")
    self.assertIn("version 22", causes[1])

  def test_searcher_comes_before_versions_of_long_jump(self):
    _, causes, _ = self.bisect(lambda step, left, _: any(n % 2 for n in left))
    self.assertRegex(causes[0], r"1\. .* without one searcher")
    self.assertIn("s001-x", causes[1])

  def test_changed_setting_is_undone(self):
    key = (20, "loss.beta")
    _, causes, out = self.bisect(
        lambda step, left, undone: key not in undone,
        loss__beta=0.7,
        optimizer__learning_rate=0.5,
        train__num_steps=77,
    )
    self.assertLen(causes, 2)
    self.assertIn("without one setting", causes[0])
    self.assertIn("config.loss.beta = 0.7 since step 20, was", causes[1])
    self.assertNotIn("num_steps", out)

  def test_changed_setting_is_undone_with_its_data(self):
    key = (20, "loss.beta")
    is_later = lambda left: any(n >= 21 * _PER_STEP for n in left)
    _, causes, out = self.bisect(
        lambda step, left, undone: key not in undone or is_later(left),
        loss__beta=0.7,
    )
    self.assertIn("config.loss.beta = 0.7 since step 20, was", causes[1])
    self.assertIn("72 later groups: 0.5, gone", out)

  def test_bad_data_is_not_ascribed_to_setting(self):
    is_later = lambda left: any(n >= 21 * _PER_STEP for n in left)
    _, causes, _ = self.bisect(
        lambda step, left, undone: is_later(left), loss__beta=0.7
    )
    self.assertNotIn("config.loss.beta", "".join(causes))

  def test_data_of_changed_temperature_is_left_out(self):
    _, causes, _ = self.bisect(
        lambda step, left, _: bool(left),
        unit="setting",
        sampling__temperature=0.5,
    )
    self.assertIn("config.sampling.temperature = 0.5 since step 20", causes[1])

  def test_chance_is_no_cause(self):
    status, _, out = self.bisect(
        lambda step, left, _: len(left) == _PER_STEP, unit="group", steps=[22]
    )
    self.assertEqual(status, 1)
    self.assertIn("also gone without others: by chance", out)
    self.assertIn("no set of groups", out)

  def test_lasting_jump_has_no_cause(self):
    status, _, out = self.bisect(lambda *_: True)
    self.assertEqual(status, 1)
    self.assertIn("no set of units", out)
    self.assertLess(out.count("rerun "), 8)

  def test_repeats_no_jump(self):
    status, _, out = self.bisect(lambda *_: False)
    self.assertEqual(status, 1)
    self.assertIn("the rerun has no jump", out)

  def test_names_completions_older_than_journal(self):
    outcome = counterfactual.Outcome(drawn={3: np.array([[-1, 5], [-1, 6]])})
    self.assertIn("note: 2 drawn completions", outcome.unknown_note())
    outcome.drawn = {3: np.array([[5]])}
    self.assertEqual(outcome.unknown_note(), "")
