# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluating beside the steps: whose result it is, and how it can fail."""

import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp

from tba_jax.training import evaluator
from tests.support import trainer_case


class EvaluationsTest(trainer_case.TrainerCase):

  def setUp(self):
    super().setUp()
    self.go = threading.Event()
    self.addCleanup(self.go.set)

  def slow(self, params, num_prompts, *, version, should_stop, **unused):
    """As `evaluate`, once it may; asks whether to stop meanwhile."""
    if num_prompts == 64:  # Before and after.
      return {"pass_at_1": 0.5}
    while not self.go.wait(0.01):
      if should_stop():
        raise evaluator.Interrupted
    # Training has gone on, and has not changed what was copied.
    self.log.append(("evaluated", version, int(params["made_by"])))
    return {"pass_at_1": self.accuracy.get(version, 0.5)}

  def recorded(self):
    return [c.args[:2] for c in self.recorder.evaluation.call_args_list]

  def test_steps_go_on_and_the_result_is_that_of_its_own_step(self):
    self.evaluator.run.side_effect = self.slow
    # Done once step 4 was made: that of step 2 was due long ago.
    self.recorder.step.side_effect = lambda step, *unused: (
        self.go.set() if step == 4 else None
    )
    self.assertTrue(
        self.run_it(
            evaluate__beside=True, evaluate__every_steps=2, train__num_steps=8
        )
    )
    self.assertEqual(self.logged("evaluated")[0], ("evaluated", 2, 2))
    steps = [e for e in self.log if e[0] in ("step", "evaluated")]
    self.assertGreater(
        steps.index(("evaluated", 2, 2)), steps.index(("step", 4))
    )
    self.assertIn(("", 2), self.recorded())
    # That of step 4 found the other one at work.
    events = [c.args for c in self.recorder.event.call_args_list]
    self.assertEqual(events[0][0], "evaluation_skipped")
    self.assertIn("step 4: the evaluation of step 2 is not", events[0][1])
    self.assertNotIn(("", 4), self.recorded())
    self.best.offer.assert_called()
    self.assertEqual(self.best.offer.call_args_list[0].args[0], 2)

  def test_the_last_one_is_awaited_before_the_end(self):
    self.evaluator.run.side_effect = self.slow
    timer = threading.Timer(0.3, self.go.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.assertTrue(self.run_it(evaluate__beside=True, evaluate__every_steps=5))
    self.assertEqual(self.recorded(), [("before", 0), ("", 5), ("after", 6)])
    self.assertEqual(self.logged("evaluated"), [("evaluated", 5, 5)])

  def test_the_next_batch_is_drawn_across_an_evaluation(self):
    self.go.set()
    self.evaluator.run.side_effect = self.slow
    self.run_it(
        evaluate__beside=True, evaluate__every_steps=2, train__num_steps=4
    )
    self.assertLess(self.log.index(("draw", 2)), self.log.index(("flush", 2)))

  def test_guards_see_the_result(self):
    self.accuracy = {2: 0.1}
    self.go.set()
    self.evaluator.run.side_effect = self.slow
    self.run_it(
        evaluate__beside=True, evaluate__every_steps=2, train__num_steps=3
    )
    (event,) = [c.args for c in self.recorder.event.call_args_list]
    self.assertEqual(event[0], "guard")
    self.assertIn("step 2: held-out pass@1 0.100", event[1])

  def test_an_error_of_the_thread_is_the_trainer_s(self):
    def fail(params, num_prompts, **unused):
      if num_prompts == 16:
        raise ValueError("a wrong reward")
      return {"pass_at_1": 0.5}

    self.evaluator.run.side_effect = fail
    with self.assertRaisesRegex(ValueError, "a wrong reward"):
      self.run_it(evaluate__beside=True, evaluate__every_steps=1)

  def test_one_that_is_late_is_given_up_and_told(self):
    self.evaluator.run.side_effect = self.slow
    trainer = self.make(
        evaluate__beside=True,
        evaluate__every_steps=2,
        evaluate__deadline_s=0.05,
    )
    self.assertTrue(trainer.run(lambda: False))
    events = [c.args for c in self.recorder.event.call_args_list]
    late = "step 2: not done within config.evaluate.deadline_s=0.05"
    self.assertIn(("evaluation_failed", late), events)
    self.assertEqual(self.recorded(), [("before", 0), ("after", 6)])

  def test_a_signal_stops_it(self):
    self.evaluator.run.side_effect = self.slow
    self.stop_at = 4
    self.assertFalse(
        self.run_it(evaluate__beside=True, evaluate__every_steps=2)
    )
    self.assertEqual(self.recorded(), [("before", 0)])
    self.assertFalse(any(t.name == "evaluate" for t in threading.enumerate()))

  @parameterized.parameters(True, False)
  def test_a_continued_run_does_what_was_not_done(self, beside):
    self.recorder.has_evaluation.return_value = False
    self.results.update(before=0)
    self.go.set()
    self.run_it(step=3, evaluate__every_steps=3, evaluate__beside=beside)
    self.assertIn(("evaluate", 3, 16), self.log)

  def test_a_batch_that_hangs_is_named(self):
    self.evaluator.run.side_effect = lambda *a, **k: self.go.wait(30)
    self.make(evaluate__beside=True)
    self.evaluations.start(7, {"made_by": jnp.asarray(7)})
    with mock.patch.object(
        self.evaluations._thread, "join", side_effect=lambda s: time.sleep(0)
    ):
      with self.assertRaisesRegex(TimeoutError, "evaluation of step 7 hangs"):
        self.evaluations.finish()
    self.go.set()


if __name__ == "__main__":
  absltest.main()
