# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Order of events in a trainer's run, its end, and resuming."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np

from tba_jax import hooks
from tba_jax import loop
from tba_jax.learning import device_work
from tba_jax.learning import train_step as train_step_lib
from tba_jax.mesh import sharding
from tests.support import tiny_model
from tests.support import trainer_case


class TrainerTest(trainer_case.TrainerCase):

  def test_trains_by_loop(self):
    with (
        mock.patch.object(loop, "run", side_effect=ZeroDivisionError),
        self.assertRaises(ZeroDivisionError),
    ):
      self.run_it()

  def test_whole_run(self):
    self.assertTrue(self.run_it())
    self.assertEqual(self.steps("step"), list(range(6)))
    # Searchers get params and admission before the first evaluation ends.
    self.assertEqual(
        self.log[:4],
        [("publish", 0, 0), ("open", 0), ("evaluate", 0, 64), ("begin", 0)],
    )
    self.assertEqual(
        [entry[:2] for entry in self.log[-3:]],
        [("finish", 6), ("save", 6), ("evaluate", 6)],
    )
    self.sink.wait.assert_called_once_with(0, mock.ANY)
    self.recorder.finish.assert_called_once_with(6, {"closed": True}, None)
    self.assertTrue(self.saved[6][2], "the last save is waited for")
    self.recorder.train_ended.assert_called_once_with()
    self.assertEqual(self.recorder.step.call_count, 6)

  @parameterized.parameters((1, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 4, 6]))
  def test_publishes_every_k_steps_and_at_end(self, every, expected):
    self.run_it(publish__every_steps=every)
    # Each version has the number of its step.
    self.assertEqual(
        self.logged("publish"), [("publish", s, s) for s in expected]
    )

  def test_checkpoints_and_evaluations_have_periods(self):
    self.run_it(checkpoint__every_steps=2, evaluate__every_steps=3)
    self.assertEqual(self.steps("save"), [2, 4, 6])
    self.assertEqual(
        self.logged("evaluate"),
        [("evaluate", 0, 64), ("evaluate", 3, 16), ("evaluate", 6, 64)],
    )
    self.assertFalse(self.saved[2][2], "a periodic save is in the background")

  def test_next_step_is_dispatched_before_metrics_are_read(self):
    self.run_it(train__num_steps=3)
    self.assertEqual(
        [entry[:2] for entry in self.logged("step", "draw", "publish", "read")],
        [
            ("publish", 0),
            *(("draw", 0), ("step", 0), ("publish", 1)),
            *(("draw", 1), ("step", 1), ("publish", 2), ("read", 0)),
            *(("draw", 2), ("step", 2), ("publish", 3), ("read", 1)),
            ("read", 2),
        ],
    )

  def test_unready_batch_is_read_after_step(self):
    self.ready = False
    self.run_it(train__num_steps=2)
    self.assertEqual(
        self.logged("step", "draw", "read"),
        [("draw", 0), ("step", 0), ("read", 0)]
        + [("draw", 1), ("step", 1), ("read", 1)],
    )

  def test_batch_arriving_during_step_is_drawn_at_once(self):
    pending = mock.MagicMock(**{"is_ready.return_value": False})
    step = self.learner.step.side_effect
    self.learner.step.side_effect = lambda draw: {**step(draw), "loss": pending}

    def is_ready(step):
      self.log.append(("look", step))
      return len(self.logged("look")) > 2

    self.source.is_ready.side_effect = is_ready
    self.run_it(train__num_steps=2)
    self.assertEqual(
        self.logged("step", "look", "draw", "read"),
        [("draw", 0), ("step", 0), *[("look", 1)] * 3]
        + [("draw", 1), ("step", 1), ("read", 0), ("read", 1)],
    )

  @parameterized.parameters("checkpoint__every_steps", "evaluate__every_steps")
  def test_nothing_is_drawn_across_checkpoint_or_evaluation(self, period):
    self.run_it(train__num_steps=4, **{period: 2})
    due = (
        ("save", 2)
        if period == "checkpoint__every_steps"
        else ("evaluate", 2, 16)
    )
    self.assertLess(self.log.index(due), self.log.index(("begin", 2)))
    self.assertLess(self.log.index(("read", 1)), self.log.index(due))
    # Between other steps, the next draw comes first.
    self.assertLess(self.log.index(("draw", 1)), self.log.index(("read", 0)))

  def test_decisions_about_each_step_are_recorded(self):
    self.metrics[1] = {"kl": 1e3}
    self.run_it(
        action="lower_learning_rate",
        evaluate__every_steps=4,
        train__num_steps=5,
    )
    # Step 2 was dispatched before the alarm of step 1.
    self.assertEqual(
        [(step, d.applied, d.ahead, d.scale) for step, d in self.decided],
        [
            (0, 100, False, 1.0),
            (1, 200, True, 1.0),
            (2, 300, True, 1.0),
            (3, 400, True, 0.5),
            (4, 500, False, 0.5),
        ],
    )

  def test_disk_has_record_before_checkpoint(self):
    self.decisions.sync.side_effect = lambda: self.log.append(("sync", 0))
    self.recorder.sync.side_effect = lambda: self.log.append(("metrics", 0))
    self.run_it(checkpoint__every_steps=2)
    order = [name for name, *_ in self.logged("sync", "metrics", "save")]
    self.assertEqual(order, ["sync", "metrics", "save"] * 3)

  def test_drawn_groups_are_counted_as_trained(self):
    self.run_it()
    self.assertEqual(self.source.mark_drawn.call_count, 6)
    self.assertEqual(len(self.steps("draw")), len(self.steps("step")))
    draw = self.learner.make.call_args.args[0]
    self.assertEqual(draw.rewards.shape, (3, 2))


class NonfiniteTest(trainer_case.TrainerCase):
  """Uses the real train step; rewards of step 2 give a NaN gradient."""

  def setUp(self):
    super().setUp()
    config = tiny_model.make_config(train__nonfinite="skip")
    mesh = sharding.make_mesh(config.mesh)
    model = tiny_model.BIGRAM
    self.model_state = train_step_lib.init_state(
        config, model, model.init(jax.random.key(0)), mesh
    )
    self.step_fn = train_step_lib.make_train_step(config, model, mesh)
    self.learner.make.side_effect = self.make_batch
    self.published = []

  def make_batch(self, draw):
    batch = tiny_model.make_batch(seed=draw.step)
    if draw.step == 2:
      batch.rewards[0, 0] = np.nan
    return batch

  def train_step(self, state, batch):
    state, _ = super().train_step(state, batch)
    self.model_state, metrics = self.step_fn(self.model_state, batch)
    state.params["model"] = jax.device_get(self.model_state.params)
    return state, {**trainer_case.METRICS, **metrics}

  def publish(self, step, params, nonfinite=0):
    super().publish(step, params, nonfinite)
    self.published.append(params.get("model"))

  def test_step_with_nan_gradient_is_skipped_and_run_continues(self):
    self.assertTrue(self.run_it(train__nonfinite="skip", action="off"))
    self.assertEqual(self.steps("step"), list(range(6)))
    recorded = [c.args[1] for c in self.recorder.step.call_args_list]
    self.assertEqual([m["nonfinite"] for m in recorded], [0, 0, 1, 0, 0, 0])
    kinds = [call.args[0] for call in self.recorder.event.call_args_list]
    self.assertEqual(kinds, ["step_skipped"])
    # Version 3 equals version 2, and training continues from it.
    versions = self.published[1:]
    chex.assert_tree_all_finite(versions)
    chex.assert_trees_all_equal(versions[1], versions[2])
    moved = np.abs(versions[3]["head"] - versions[2]["head"]).max()
    self.assertGreater(moved, 0)


class RoundsTest(trainer_case.TrainerCase):

  def test_round_params_are_published_after_its_data_arrives(self):
    self.ready = False
    self.run_it(
        rounds__mini_batches=2,
        rounds__lag_rounds=1,
        publish__every_steps=2,
        train__num_steps=4,
    )
    expected = self.logged("publish", "begin", "step")
    # The first version is the restored state, here before any step.
    self.assertEqual(
        [entry[:2] for entry in expected],
        [
            ("publish", 0),
            *(("begin", 0), ("publish", 0), ("step", 0)),
            *(("begin", 1), ("step", 1)),
            *(("begin", 2), ("publish", 2), ("step", 2)),
            *(("begin", 3), ("step", 3)),
        ],
    )

  @parameterized.parameters((0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4))
  def test_restart_publishes_start_of_current_round(self, at, first):
    self.stop_at = 0
    self.run_it(
        step=at,
        rounds__mini_batches=2,
        rounds__lag_rounds=1,
        publish__every_steps=2,
    )
    self.assertEqual(self.logged("publish")[0][1], first)


class TrainerEndsTest(trainer_case.TrainerCase):

  def test_signal_saves_and_continued_run_continues(self):
    self.stop_at = 3
    self.assertFalse(self.run_it())
    self.assertEqual(self.steps("step"), [0, 1, 2])
    self.assertEqual(
        [entry[0] for entry in self.log[-2:]], ["stop_searchers", "save"]
    )
    state, host_state, wait = self.saved[3]
    self.assertTrue(wait)
    self.assertEqual(int(state.step), 3)
    self.assertEqual(host_state["data"], {"applied": 300})
    self.assertEqual(host_state["applied_history"], [[3, 300]])
    self.assertEqual(self.recorder.event.call_args.args[0], "interrupted")
    self.log.clear()
    self.stop_at = None
    self.checkpointer.latest_step.return_value = 3
    self.assertTrue(self.run_it(step=3, saved={"applied_history": [(3, 300)]}))
    self.assertEqual(self.steps("step"), [3, 4, 5])
    # The first evaluation was already recorded.
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])

  def test_signal_while_evaluating(self):
    self.stop_at = 0
    self.assertFalse(self.run_it())
    self.assertEqual(self.steps("save"), [0])
    self.assertEmpty(self.steps("step"))
    self.recorder.evaluation.assert_not_called()

  def test_signal_trains_drawn_batch_first(self):
    # True once the batch of step 1 is drawn.
    self.make()(lambda: ("draw", 1) in self.log)
    self.assertEqual(self.steps("step"), self.steps("draw"))
    self.assertEqual(self.steps("step"), [0, 1])
    self.assertEqual(self.steps("save"), [2])

  def test_signal_in_last_evaluation(self):
    self.results["before"] = 0
    self.stop_at = 6
    self.assertFalse(self.run_it())
    self.assertEqual(self.steps("save"), [6])
    self.recorder.finish.assert_not_called()
    # The same command finishes the run.
    self.stop_at = None
    self.checkpointer.latest_step.return_value = 6
    self.log.clear()
    self.assertTrue(self.run_it(step=6))
    self.assertEmpty(self.logged("step", "save"))
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])
    self.recorder.finish.assert_called_once()

  def test_stopped_run_does_not_train(self):
    self.metrics[2] = {"kl": 1e9}
    self.make(action="stop")(lambda: False)
    ((step, (_, host_state, _)),) = self.saved.items()
    self.assertEqual(host_state["config"]["train"]["num_steps"], 6)
    by = host_state["stopped_by"]
    self.assertEqual(by, "guard kl")
    # The run was killed before writing its last evaluation.
    del self.results["after"]
    self.checkpointer.latest_step.return_value = step
    self.log.clear()
    self.assertTrue(self.run_it(step=step, saved=host_state))
    self.assertEqual(self.logged("evaluate"), [("evaluate", step, 64)])
    self.assertEmpty(self.logged("step", "save"))
    self.assertEqual(self.recorder.finish.call_args.args[2], by)

  def test_finished_run_is_evaluated_once(self):
    self.results.update(before=0, after=6)
    self.checkpointer.latest_step.return_value = 6
    self.assertTrue(self.run_it(step=6))
    self.evaluator.run.assert_not_called()

  def test_longer_run_is_evaluated_at_its_own_end(self):
    self.results.update(before=0, after=4)
    self.run_it(step=4)
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])

  def test_nonfinite_step_is_not_published_or_saved(self):
    self.metrics[2] = {"loss": float("nan"), "nonfinite": 1.0}
    with self.assertRaisesRegex(
        FloatingPointError, r"step 2: .* nan.*prompts \[\d.*versions \d"
    ):
      self.run_it(checkpoint__every_steps=3)
    self.assertEmpty(self.saved)
    self.assertEqual(self.steps("publish"), [0, 1, 2])
    # Recorded decisions allow a rerun.
    self.assertEqual([step for step, _ in self.decided], [0, 1, 2])

  def test_skipped_step_is_published_with_event(self):
    self.metrics[2] = {"grad_norm": float("inf"), "nonfinite": 1.0}
    self.assertTrue(self.run_it(train__nonfinite="skip"))
    self.assertEqual(self.steps("publish"), [0, 1, 2, 3, 4, 5, 6])
    self.recorder.event.assert_called_once()
    self.assertEqual(self.recorder.event.call_args.args[0], "step_skipped")

  def test_guard_warns(self):
    self.metrics[1] = {"entropy": 0.0}
    self.assertTrue(self.run_it())
    self.recorder.event.assert_called_once()
    kind, message = self.recorder.event.call_args.args
    self.assertEqual(kind, "guard")
    self.assertRegex(message, r"step 1: entropy .* \(warn\)")
    self.assertEqual(self.scales, [1.0] * 6)

  def test_guard_lowers_learning_rate(self):
    self.metrics[1] = {"kl": 1e3}
    self.metrics[4] = {"kl": 1e3}
    self.run_it(action="lower_learning_rate", evaluate__every_steps=1)
    self.assertEqual(self.scales, [1, 1, 0.5, 0.5, 0.5, 0.25])

  def test_no_learning_rate_mends_gap(self):
    self.metrics[1] = {"logprob_gap": 1.0}
    self.run_it(action="lower_learning_rate")
    self.assertEqual(self.scales, [1.0] * 6)
    self.assertEqual(self.recorder.event.call_args.args[0], "guard")

  def test_guard_stops_run(self):
    self.metrics[1] = {"kl": 1e3}
    self.assertTrue(self.run_it(action="stop", checkpoint__every_steps=5))
    # The batch drawn meanwhile counts as trained, so it is trained.
    self.assertEqual(self.steps("step"), [0, 1, 2])
    self.assertEqual(self.steps("draw"), [0, 1, 2])
    self.assertEqual(self.saved[3][1]["stopped_by"], "guard kl")
    self.recorder.finish.assert_called_once_with(3, mock.ANY, "guard kl")
    self.assertIn(("evaluate", 3, 64), self.log)

  def test_fallen_accuracy_is_guard(self):
    self.accuracy[2] = 0.1
    self.run_it(action="stop", evaluate__every_steps=2)
    self.assertEqual(self.steps("step"), [0, 1])
    self.recorder.finish.assert_called_once_with(2, mock.ANY, "guard accuracy")

  @parameterized.parameters(0, 2)
  def test_guard_sees_evaluation_before_kill(self, step):
    # The run was killed before a checkpoint contained the evaluation.
    self.recorder.evaluations.return_value = [
        {"step": 0, "pass_at_1": 0.5, "split": "held_out"},
        {"step": 2, "pass_at_1": 0.1, "split": "held_out"},
    ][: 1 + (step == 2)]
    self.results["before"] = 0
    self.accuracy[4] = 0.1
    self.run_it(
        step=step, action="lower_learning_rate", evaluate__every_steps=4
    )
    expected = {0: [1, 1, 1, 1, 0.5, 0.5], 2: [0.5, 0.5, 0.5, 0.5]}
    self.assertEqual(self.scales, expected[step])
    self.recorder.evaluations.assert_called_once_with(step)

  def test_guard_at_last_step_does_not_stop_run(self):
    self.metrics[5] = {"kl": 1e3}
    self.accuracy[6] = 0.1
    self.assertTrue(self.run_it(action="stop"))
    kinds = [call.args[0] for call in self.recorder.event.call_args_list]
    self.assertEqual(kinds, ["guard", "guard"])
    self.recorder.finish.assert_called_once_with(6, mock.ANY, None)

  def test_first_cause_of_end_is_reported(self):
    self.metrics[1] = {"kl": 1e3}
    self.accuracy[3] = 0.1
    self.assertTrue(self.run_it(action="stop"))
    self.recorder.finish.assert_called_once_with(3, mock.ANY, "guard kl")

  def test_wall_clock_limit(self):
    with mock.patch.object(
        hooks.time, "monotonic", side_effect=lambda: 10.0 * self.step
    ):
      self.assertTrue(
          self.run_it(train__wall_clock_limit_s=25.0, checkpoint__every_steps=1)
      )
    self.assertEqual(self.steps("step"), [0, 1, 2])
    self.recorder.finish.assert_called_once_with(
        3, mock.ANY, "wall_clock_limit_s"
    )

  @parameterized.parameters(("guard kl", ()), ("", ("loss.beta",)))
  def test_changed_settings_resume_stopped_run(self, stopped_by, changed):
    saved = {"stopped_by": "guard kl"}
    self.assertTrue(self.run_it(saved=saved, changed=changed))
    self.assertEqual(self.steps("step"), [] if stopped_by else [*range(6)])
    self.assertEqual(self.recorder.finish.call_args.args[2] or "", stopped_by)

  @parameterized.parameters(
      ("optimizer.learning_rate", 1.0), ("loss.beta", 0.25)
  )
  def test_changed_learning_rate_ends_guards_factor(self, key, scale):
    run = self.make(changed=[key])
    self.work.scale_learning_rate(0.25)
    run(lambda: False)
    self.assertEqual(self.work.learning_rate_scale, scale)
    self.assertEqual(self.work.state.learning_rate_scale, scale)

  def test_checkpoint_may_be_due_by_clock(self):
    self.ready = False
    with mock.patch.object(
        hooks.time, "monotonic", side_effect=lambda: 10.0 * self.step
    ):
      self.run_it(
          train__num_steps=8,
          checkpoint__every_steps=4,
          checkpoint__every_s=25.0,
      )
    # Saves at 30 s, by steps, and 30 s after that.
    self.assertEqual(self.steps("save"), [3, 4, 7, 8])

  def test_nothing_is_drawn_across_checkpoint_by_clock(self):
    clock = lambda: 10.0 * self.step + 10.0 * (("draw", 3) in self.log)
    with mock.patch.object(hooks.time, "monotonic", side_effect=clock):
      self.run_it(train__num_steps=5, checkpoint__every_s=35.0)
    # The save fell due after step 3, when the next draw had been made.
    self.assertEqual(self.steps("save"), [4, 5])
    self.assertLess(self.log.index(("save", 4)), self.log.index(("begin", 4)))

  def test_journal_keeps_records_for_oldest_checkpoint(self):
    self.run_it(checkpoint__every_steps=1, saved={"applied_history": [(0, 0)]})
    cuts = [c.args[0] for c in self.source.drop_journal_before.call_args_list]
    # Cuts after the save of step n, once steps n-1 and n-2 are saved.
    self.assertEqual(cuts, [100, 100, 200, 300, 400])
    self.assertEqual(
        self.saved[6][1]["applied_history"],
        [[3, 300], [4, 400], [5, 500], [6, 600]],
    )

  def test_keep_journal_drops_no_segment(self):
    self.run_it(
        checkpoint__every_steps=1,
        checkpoint__keep_journal=True,
        saved={"applied_history": [(0, 0)]},
    )
    self.source.drop_journal_before.assert_not_called()

  def test_failed_save_keeps_journal(self):
    def fail(step, state, host_state, *, wait):
      if step == 2:
        raise OSError("disk full")
      self.save(step, state, host_state, wait=wait)

    self.checkpointer.save.side_effect = fail
    self.assertTrue(self.run_it(checkpoint__every_steps=2))
    self.recorder.event.assert_called_once_with(
        "checkpoint_failed", "disk full"
    )
    self.assertEqual(self.saved[4][1]["applied_history"], [[4, 400]])
    self.assertEqual(
        self.source.drop_journal_before.call_args_list, [mock.call(400)]
    )

  def test_one_of_several_processes_leaves_no_save_out(self):
    self.checkpointer.save.side_effect = OSError("disk full")
    with mock.patch.object(
        device_work.DeviceWork, "may_leave_out", new=False
    ), self.assertRaisesRegex(OSError, "disk full"):
      self.run_it(checkpoint__every_steps=2)
    self.assertEqual(self.steps("step"), [0, 1])

  def test_failed_last_save_raises(self):
    self.checkpointer.save.side_effect = OSError("disk full")
    with self.assertRaisesRegex(OSError, "disk full"):
      self.run_it()
