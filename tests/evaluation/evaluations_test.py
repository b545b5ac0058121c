# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluations during training, and the best model."""

import os
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp

from tba_jax.evaluation import evaluations
from tba_jax.evaluation import evaluator
from tba_jax.system import jsonl
from tests.support import trainer_case


class EvaluationsTest(trainer_case.TrainerCase):

  def setUp(self):
    super().setUp()
    self.go = threading.Event()
    self.addCleanup(self.go.set)

  def slow(self, params, num_prompts, *, version, should_stop, **unused):
    """As `evaluate`, once it may; asks whether to stop meanwhile."""
    if num_prompts == 64:  # Before and after.
      return {"pass_at_1": 0.5, "split": "held_out"}
    while not self.go.wait(0.01):
      if should_stop():
        raise evaluator.Interrupted
    # Later steps have not changed the copy.
    self.log.append(("evaluated", version, int(params["made_by"])))
    accuracy = self.accuracy.get(version, 0.5)
    return {"pass_at_1": accuracy, "split": "held_out"}

  def recorded(self):
    return [c.args[:2] for c in self.recorder.evaluation.call_args_list]

  def test_training_continues_and_result_has_its_step(self):
    self.evaluator.run.side_effect = self.slow
    # The evaluation of step 2 ends only after step 3.
    self.recorder.step.side_effect = lambda step, *unused: (
        self.go.set() if step == 3 else None
    )
    self.assertTrue(
        self.run_it(
            evaluate__background=True,
            evaluate__every_steps=2,
            train__num_steps=8,
        )
    )
    self.assertEqual(self.logged("evaluated")[0], ("evaluated", 2, 2))
    steps = [e for e in self.log if e[0] in ("step", "evaluated")]
    self.assertGreater(
        steps.index(("evaluated", 2, 2)), steps.index(("step", 3))
    )
    self.assertEqual(
        self.recorded(),
        [("before", 0), ("", 2), ("", 4), ("", 6), ("after", 8)],
    )
    self.best.offer.assert_called()
    self.assertEqual(self.best.offer.call_args_list[0].args[0], 2)

  def slow_before(self, params, num_prompts, *, version, should_stop, **unused):
    """As `evaluate`, but the evaluation before training waits for `go`."""
    if (version, num_prompts) == (0, 64):
      while not self.go.wait(0.01):
        if should_stop():
          raise evaluator.Interrupted
    return self.evaluate(
        params, num_prompts, version=version, should_stop=should_stop
    )

  def test_steps_do_not_wait_for_evaluation_before_training(self):
    self.evaluator.run_all.side_effect = self.slow_before
    self.recorder.step.side_effect = lambda step, *unused: (
        self.log.append(("read", step)) or step == 3 and self.go.set()
    )
    self.assertTrue(
        self.run_it(evaluate__background=True, evaluate__every_steps=5)
    )
    self.assertEqual(self.recorded(), [("before", 0), ("", 5), ("after", 6)])
    order = [e for e in self.log if e[0] in ("read", "evaluate")]
    self.assertLess(order.index(("read", 3)), order.index(("evaluate", 0, 64)))

  def test_due_evaluation_waits_for_initial_one(self):
    self.evaluator.run_all.side_effect = self.slow_before
    timer = threading.Timer(0.3, self.go.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.run_it(evaluate__background=True, evaluate__every_steps=3)
    self.assertEqual(self.recorded(), [("before", 0), ("", 3), ("after", 6)])
    self.recorder.event.assert_not_called()

  def test_due_evaluation_waits_for_previous_one(self):
    self.evaluator.run.side_effect = self.slow
    timer = threading.Timer(0.3, self.go.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.run_it(evaluate__background=True, evaluate__every_steps=1)
    steps = [("", step) for step in range(1, 6)]
    self.assertEqual(self.recorded(), [("before", 0), *steps, ("after", 6)])

  def test_signal_ends_wait_for_previous_evaluation(self):
    self.evaluator.run.side_effect = self.slow
    self.stop_at = 4
    self.assertFalse(
        self.run_it(evaluate__background=True, evaluate__every_steps=2)
    )
    self.assertEqual(self.recorded(), [("before", 0)])

  def test_interrupted_evaluation_before_training_restarts(self):
    self.evaluator.run_all.side_effect = self.slow_before
    self.stop_at = 4
    self.assertFalse(self.run_it(evaluate__background=True))
    self.assertEqual(self.recorded(), [])
    # The params are those that the run started from, not step 4's.
    self.stop_at = None
    self.go.set()
    self.assertTrue(self.run_it(step=4, evaluate__background=True))
    self.assertEqual(self.recorded(), [("before", 0), ("after", 6)])
    kinds = [c.args[0] for c in self.recorder.event.call_args_list]
    self.assertEqual(kinds, ["interrupted"])

  def test_evaluation_before_training_gives_way_to_steps(self):
    batches = []

    def run_all(params, num_prompts, *, version, should_stop, **unused):
      for _ in range(3):
        should_stop()
        batches.append(version)
      return {"pass_at_1": 0.5, "split": "held_out"}

    self.evaluator.run_all.side_effect = run_all
    self.make(evaluate__background=True)
    with mock.patch.object(evaluations, "GIVE_WAY", 1e9):
      params = {"made_by": jnp.asarray(0)}
      self.evaluations.start("before", 0, params, lambda: batches.append("go"))
      self.go.wait(0.3)
      self.assertEqual(batches, ["go"])
      self.assertEqual(self.evaluations.finish()[0], 0)
    self.assertEqual(batches, ["go", 0, 0, 0])

  def test_last_evaluation_is_awaited(self):
    self.evaluator.run.side_effect = self.slow
    timer = threading.Timer(0.3, self.go.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.assertTrue(
        self.run_it(evaluate__background=True, evaluate__every_steps=5)
    )
    self.assertEqual(self.recorded(), [("before", 0), ("", 5), ("after", 6)])
    self.assertEqual(self.logged("evaluated"), [("evaluated", 5, 5)])

  def test_evaluations_are_limited_to_available_prompts(self):
    self.go.set()
    self.evaluator.run.side_effect = self.slow
    self.evaluator.run_all.side_effect = self.slow
    self.run_it(evaluate__num_prompts=10_000, evaluate__final_prompts=10_000)
    sizes = [
        call.args[1]
        for run in (self.evaluator.run, self.evaluator.run_all)
        for call in run.call_args_list
    ]
    self.assertEqual(set(sizes), {self.evaluator.num_prompts})

  def test_no_prompts_no_evaluation(self):
    self.assertTrue(
        self.run_it(evaluate__num_prompts=0, evaluate__final_prompts=0)
    )
    self.assertEqual(self.recorded(), [])
    self.assertEqual(self.recorder.event.call_args_list, [])

  def test_guards_see_result(self):
    self.accuracy = {2: 0.1}
    self.go.set()
    self.evaluator.run.side_effect = self.slow
    self.run_it(
        evaluate__background=True, evaluate__every_steps=2, train__num_steps=3
    )
    (event,) = [c.args for c in self.recorder.event.call_args_list]
    self.assertEqual(event[0], "guard")
    self.assertIn("step 2: held-out pass@1 0.100", event[1])

  def test_error_of_thread_is_raised_by_trainer(self):
    def fail(params, num_prompts, **unused):
      if num_prompts == 16:
        raise ValueError("a wrong reward")
      return {"pass_at_1": 0.5, "split": "held_out"}

    self.evaluator.run.side_effect = fail
    with self.assertRaisesRegex(ValueError, "a wrong reward"):
      self.run_it(evaluate__background=True, evaluate__every_steps=1)

  def test_late_evaluation_is_dropped_with_event(self):
    self.evaluator.run.side_effect = self.slow
    trainer = self.make(
        evaluate__background=True,
        evaluate__every_steps=2,
        evaluate__deadline_s=0.05,
    )
    self.assertTrue(trainer(lambda: False))
    events = [c.args for c in self.recorder.event.call_args_list]
    late = "step 2: not done within config.evaluate.deadline_s=0.05"
    self.assertIn(("evaluation_failed", late), events)
    self.assertEqual(self.recorded(), [("before", 0), ("after", 6)])

  def test_signal_stops_evaluation(self):
    self.evaluator.run.side_effect = self.slow
    self.stop_at = 4
    self.assertFalse(
        self.run_it(evaluate__background=True, evaluate__every_steps=2)
    )
    self.assertEqual(self.recorded(), [("before", 0)])
    self.assertFalse(
        any(t.name.startswith("evaluation") for t in threading.enumerate())
    )

  def test_signal_after_evaluation_loses_no_result(self):
    self.go.set()
    self.evaluator.run.side_effect = self.slow
    self.ready = False

    def wait_for_data(step, should_stop):
      if step < 4:
        return self.begin_step(step, should_stop)
      self.evaluations._thread.join(30)  # Data comes later than the result.
      return False

    self.source.begin_step.side_effect = wait_for_data
    self.assertFalse(
        self.run_it(evaluate__background=True, evaluate__every_steps=4)
    )
    self.assertEqual(self.recorded(), [("before", 0), ("", 4)])

  @parameterized.parameters(True, False)
  def test_resumed_run_makes_up_for_missing_evaluation(self, beside):
    self.recorder.has_evaluation.return_value = False
    self.results.update(before=0)
    self.go.set()
    self.run_it(step=3, evaluate__every_steps=3, evaluate__background=beside)
    self.assertIn(("evaluate", 3, 16), self.log)

  def test_hanging_batch_raises(self):
    self.evaluator.run.side_effect = lambda *a, **k: self.go.wait(30)
    self.make(evaluate__background=True, evaluate__deadline_s=0.01)
    self.evaluations.start("", 7, {"made_by": jnp.asarray(7)})
    with mock.patch.object(evaluations, "BATCH_S", 0.01):
      with self.assertRaisesRegex(TimeoutError, "evaluation of step 7"):
        self.evaluations.finish()
    self.go.set()


def _result(value: float) -> dict:
  return {"pass_at_1": value, "split": "validation", "samples": ["x"]}


class BestModelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "best"
    patch = mock.patch.object(evaluations.hf, "save", self.save)
    patch.start()
    self.addCleanup(patch.stop)

  def make(self) -> evaluations.BestModel:
    return evaluations.BestModel(self.folder.parent, mock.MagicMock())

  def save(self, folder, shape, params: str, tokenizer) -> None:
    folder.mkdir()
    (folder / "params").write_text(params)

  def kept(self) -> str:
    return (self.folder / "model" / "params").read_text()

  def test_only_better_params_are_kept(self):
    best = self.make()
    self.assertTrue(best.offer(10, "a", _result(0.5)))
    self.assertFalse(best.offer(20, "b", _result(0.5)))
    self.assertFalse(best.offer(30, "c", _result(0.25)))
    self.assertEqual(self.kept(), "a")
    self.assertTrue(best.offer(40, "d", _result(0.75)))
    self.assertEqual(self.kept(), "d")
    self.assertEqual(
        jsonl.read_json(self.folder / "best.json"),
        {
            "step": 40,
            "metric": "pass_at_1",
            "value": 0.75,
            "split": "validation",
        },
    )

  def test_best_of_graded_rewards_has_best_mean_reward(self):
    best = self.make()
    result = lambda reward: {**_result(0.0), "mean_reward": reward}
    self.assertTrue(best.offer(10, "a", result(0.2)))
    self.assertTrue(best.offer(20, "b", result(0.6)))
    self.assertFalse(best.offer(30, "c", result(0.4)))
    self.assertEqual(self.kept(), "b")

  def test_best_result_is_read_back(self):
    self.make().offer(1, "a", _result(0.5))
    again = self.make()
    self.assertFalse(again.offer(2, "b", _result(0.4)))
    self.assertTrue(again.offer(3, "c", _result(0.6)))
    self.assertEqual(self.kept(), "c")

  def test_best_result_by_other_metric_is_ignored(self):
    self.make().offer(1, "a", {**_result(0.0), "mean_reward": 7.0})
    again = self.make()  # With a judge from here on.
    win_rate = lambda rate: {**_result(0.0), "win_rate": rate}
    self.assertTrue(again.offer(2, "b", win_rate(0.3)))
    self.assertFalse(again.offer(3, "c", win_rate(0.2)))
    self.assertEqual(self.kept(), "b")

  def test_evaluation_without_verdict_replaces_no_win_rate(self):
    best = self.make()
    judged = lambda **found: {**_result(0.9), "no_verdict": {}, **found}
    failed = judged(no_verdict={"exit": 64})
    # Before the judge has said anything the reward is all there is.
    self.assertTrue(best.offer(1, "a", failed))
    self.assertTrue(best.offer(2, "b", judged(win_rate=0.7)))
    self.assertFalse(best.offer(3, "c", failed))
    self.assertFalse(best.offer(4, "d", judged(win_rate=0.6)))
    self.assertEqual(self.kept(), "b")
    # Without a judge from here on.
    self.assertTrue(best.offer(5, "e", _result(0.5)))

  def test_damaged_best_result_is_not_replaced(self):
    self.make().offer(1, "a", _result(0.5))
    for text in ("", "[]", '{"step": 1}'):
      (self.folder / "best.json").write_text(text)
      with self.assertRaisesRegex(ValueError, "best.json: damaged"):
        self.make()
    self.assertEqual(self.kept(), "a")

  def test_leftovers_of_kill_are_removed(self):
    (self.folder.parent / "best.partial" / "model").mkdir(parents=True)
    best = self.make()
    self.assertTrue(best.offer(1, "a", _result(0.0)))
    self.assertEqual(self.kept(), "a")
    self.assertEqual(os.listdir(self.folder.parent), ["best"])

  def test_kill_between_renames_keeps_old_model(self):
    best = self.make()
    best.offer(1, "a", _result(0.5))
    rename, partial = pathlib.Path.rename, self.folder.parent / "best.partial"

    def die(path, target):
      if path == partial:
        raise KeyboardInterrupt
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", die):
      with self.assertRaises(KeyboardInterrupt):
        best.offer(2, "b", _result(0.75))
    again = self.make()
    self.assertEqual(self.kept(), "a")
    self.assertFalse(again.offer(3, "c", _result(0.25)))
    self.assertTrue(again.offer(4, "d", _result(0.6)))
    self.assertEqual(self.kept(), "d")
    self.assertEqual(os.listdir(self.folder.parent), ["best"])
