# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guards: when each fires, when it fires again, and what a run restores."""

import json

from absl.testing import parameterized
import numpy as np

from tba_jax.config import settings
from tba_jax.learning import guards as guards_lib
from tba_jax.run import failures

GOOD = {
    "entropy": 1.0,
    "kl": 5.0,
    "logprob_gap": 1e-6,
    "on_policy_share": 1.0,
}


def make_guards(
    action="warn",
    max_logprob_gap=1e-3,
    state=None,
    unchecked_step=-1,
    **changes,
):
  config = settings.get_config()
  config.guards.update(
      action=action,
      min_entropy=0.1,
      max_kl=50.0,
      max_accuracy_drop=0.2,
      max_logprob_gap=max_logprob_gap,
  )
  config.update_from_flattened_dict(changes)
  return guards_lib.Guards(
      config, state, backend="cpu", unchecked_step=unchecked_step
  )


class GuardsTest(parameterized.TestCase):

  @parameterized.parameters(
      ("entropy", 0.05, "0.0500.*min_entropy=0.1"),
      ("kl", 51.0, "51.00.*max_kl=50.0"),
      ("logprob_gap", 0.002, "2.00e-03.*0.001 .*max_logprob_gap"),
  )
  def test_a_crossed_limit_fires(self, name, value, message):
    (alarm,) = make_guards().check_step(7, {**GOOD, name: value})
    self.assertEqual(alarm.name, name)
    self.assertRegex(alarm.message, f"^step 7: .*{message}")

  def test_gap_is_unchecked_on_first_step_with_changed_settings(self):
    guards, wide = make_guards(unchecked_step=7), {**GOOD, "logprob_gap": 1.0}
    self.assertEmpty(guards.check_step(7, wide))
    (alarm,) = guards.check_step(8, wide)
    self.assertEqual(alarm.name, "logprob_gap")

  def test_the_limits_themselves_are_allowed(self):
    at_limit = {**GOOD, "entropy": 0.1, "kl": 50.0, "logprob_gap": 1e-3}
    self.assertEmpty(make_guards().check_step(0, at_limit))

  @parameterized.parameters(
      (2e-3, 1, {}),
      (2e-2, 0, {"model.compute_dtype": "bfloat16"}),
      (0.2, 1, {"model.compute_dtype": "bfloat16"}),
      (2e-2, 0, {"publish.dtype": "bfloat16"}),
      (2e-2, 0, {"search.quantization": "int8"}),
      (0.9, 1, {"search.quantization": "int8"}),
      (2e-2, 1, {"model.param_dtype": "bfloat16"}),
      (2e-2, 0, {"model.param_dtype": "bfloat16", "lora.rank": 2}),
      # Log-probs are relative to the kept tokens.
      (1.0, 1, {"sampling.top_p": 0.9}),
      # Completions that are not drawn from the policy itself.
      (1.0, 0, {"explore.fraction": 0.5}),
      (1.0, 0, {"explore.min_tokens": 3}),
      (1.0, 1, {"explore.fraction": 0.5, "guards.max_logprob_gap": 0.5}),
  )
  def test_the_limit_of_the_gap_follows_the_settings(self, gap, num, changes):
    guards = make_guards(**{"guards.max_logprob_gap": 0.0, **changes})
    self.assertLen(guards.check_step(0, {**GOOD, "logprob_gap": gap}), num)

  def test_the_gap_is_checked_on_policy_only(self):
    guards = make_guards()
    old = {**GOOD, "logprob_gap": 1.0, "on_policy_share": 0.0}
    self.assertEmpty(guards.check_step(0, old))
    self.assertLen(guards.check_step(1, {**old, "on_policy_share": 0.01}), 1)

  def test_fires_again_only_after_recovering(self):
    guards = make_guards()
    count = lambda kl: len(guards.check_step(0, {**GOOD, "kl": kl}))
    self.assertEqual([count(kl) for kl in (60, 70, 40, 60)], [1, 0, 0, 1])

  def test_guards_are_independent(self):
    guards = make_guards()
    guards.check_step(0, {**GOOD, "kl": 60.0})
    both = guards.check_step(1, {**GOOD, "kl": 60.0, "entropy": 0.0})
    self.assertEqual([alarm.name for alarm in both], ["entropy"])
    # A good accuracy does not reset the other guards.
    guards.check_accuracy(1, 0.5, "held_out")
    self.assertEmpty(guards.check_step(2, {**GOOD, "kl": 60.0, "entropy": 0}))

  def test_accuracy_is_compared_with_its_first_value(self):
    guards = make_guards()
    check = lambda *args: guards.check_accuracy(*args, "held_out")
    self.assertEmpty(check(0, 0.5))
    # Accuracy on other prompts may be lower from the start.
    self.assertEmpty(guards.check_accuracy(3, 0.2, "validation"))
    self.assertEmpty(guards.check_accuracy(4, 0.1, "validation"))
    self.assertEmpty(check(5, 0.9))
    self.assertEmpty(check(10, 0.31))
    (alarm,) = check(15, 0.29)
    self.assertEqual(alarm.name, "accuracy")
    self.assertRegex(
        alarm.message, "step 15: held-out pass@1 0.290 is below 0.300"
    )

  def test_an_evaluation_counts_once(self):
    guards = make_guards()
    guards.check_accuracy(0, 0.5, "held_out")
    self.assertLen(guards.check_accuracy(5, 0.1, "held_out"), 1)
    again = make_guards()
    again.set_state(guards.get_state())
    for step, accuracy in ((0, 0.5), (5, 0.1)):
      self.assertEmpty(again.check_accuracy(step, accuracy, "held_out"))
    self.assertEmpty(again.check_accuracy(10, 0.1, "held_out"))
    # Splits are evaluated at the same step.
    again.check_accuracy(10, 0.4, "validation")
    self.assertIn("validation", again.get_state()["first_accuracy_by_split"])

  def test_off_never_fires(self):
    guards = make_guards("off")
    self.assertEmpty(guards.check_step(0, {**GOOD, "kl": 60.0}))
    guards.check_accuracy(0, 1.0, "held_out")
    self.assertEmpty(guards.check_accuracy(1, 0.0, "held_out"))

  def test_state_is_restored(self):
    first = make_guards()
    first.check_accuracy(0, 0.5, "held_out")
    first.check_step(3, {**GOOD, "kl": 60.0})
    second = make_guards()
    second.set_state(first.get_state())
    self.assertEmpty(second.check_step(4, {**GOOD, "kl": 60.0}))
    self.assertLen(second.check_accuracy(4, 0.29, "held_out"), 1)
    self.assertEqual(
        second.get_state(),
        {
            "firing": ["accuracy", "kl"],
            "first_accuracy_by_split": {"held_out": 0.5},
            "evaluated_by_split": {"held_out": 4},
            "failures": failures.FailureShare().get_state(),
        },
    )

  @parameterized.parameters("warn", "lower_learning_rate", "stop")
  def test_rising_failures_stop_a_run_whatever_the_action(self, action):
    guards, rng = make_guards(action), np.random.default_rng(0)
    state, alarms = guards.get_state(), []
    for step in range(60):
      rate = 0.1 + 0.3 * step / 60
      shares = rng.binomial(8, rate, 32) / 8
      # Each step begins where a checkpoint ended.
      guards = make_guards(action, state=json.loads(json.dumps(state)))
      positions = range(32 * step, 32 * (step + 1))
      alarms += guards.check_failures(step, [*zip(positions, shares)])
      state = guards.get_state()
    (alarm,) = alarms
    self.assertEqual((alarm.name, alarm.action), ("failures", "stop"))
    self.assertRegex(alarm.message, "judged.*max_failure_rise=0.05.*num_steps")

  def test_failures_do_not_fire(self):
    """A rise within the limit, of chosen prompts, or with no guards at all."""
    rng = np.random.default_rng(0)
    for first, last, action, num_sampled_by_chance, limit in (
        (0.1, 0.4, "warn", 64, 0.05),
        (0.1, 0.4, "off", 1e9, 0.05),
        (0.0, 0.04, "stop", 1e9, 0.05),
        (0.1, 0.4, "stop", 1e9, 1.0),
    ):
      config = settings.get_config()
      config.guards.update(action=action, max_failure_rise=limit)
      guards = guards_lib.Guards(
          config, backend="cpu", num_sampled_by_chance=num_sampled_by_chance
      )
      shares = [*rng.binomial(8, first, 64), *rng.binomial(8, last, 5000)]
      found = guards.check_failures(
          9, [(i, n / 8) for i, n in enumerate(shares)]
      )
      self.assertEmpty(found)
