# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop: what happens after which step, and how it ends."""

import contextlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax import batches
from tba_jax import checkpoint as checkpoint_lib
from tba_jax import evaluator as evaluator_lib
from tba_jax import guards as guards_lib
from tba_jax import publication
from tba_jax import recorder as recorder_lib
from tba_jax import train_step as train_step_lib
from tba_jax import trainer as trainer_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import service as service_lib
from tests import tiny_model
from tests.replay import fake_groups

METRICS = {
    "loss": 1.0,
    "entropy": 1.0,
    "kl": 1.0,
    "logprob_gap": 0.0,
    "on_policy_share": 1.0,
}


class TrainerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.log = []
    self.metrics = {}  # step -> what differs from METRICS
    self.accuracy = {}  # step -> pass@1
    self.stop_at = None  # `should_stop` is true from this step on
    self.ready = True
    self.results = {}
    self.saved = {}
    self.step = 0
    self.make_parts()

  def make_parts(self):
    note = lambda name: lambda *args, **kwargs: self.log.append((name, args[0]))
    autospec = lambda cls: mock.create_autospec(cls, instance=True)
    self.publisher = autospec(publication.Publisher)
    self.publisher.submit.side_effect = lambda step, params: self.log.append(
        ("publish", step, int(params["made_by"]))
    )
    self.service = autospec(service_lib.ReplayService)
    self.service.buffer = fake_groups.make_buffer()
    for i in range(4):
      group = fake_groups.make_group(i, [[2, 0], [3, 0]], version=i)
      self.service.buffer.insert(group, 0)
    self.service.open.side_effect = note("open")
    self.service.begin_step.side_effect = self.begin_step
    self.service.is_ready.side_effect = lambda step: self.ready
    self.service.get_state.side_effect = lambda: {"applied": 100 * self.step}
    self.service.finish.side_effect = lambda step, deadline_s: (
        self.log.append(("finish", step)) or {"closed": True}
    )
    self.service.stop_searchers.side_effect = note("stop_searchers")
    self.maker = autospec(batches.BatchMaker)
    self.maker.make.side_effect = lambda draw, step: self.log.append(
        ("draw", step)
    )
    self.maker.flush.side_effect = lambda: self.log.append(("flush", self.step))
    self.checkpointer = autospec(checkpoint_lib.Checkpointer)
    self.checkpointer.latest_step.return_value = None
    self.checkpointer.save.side_effect = self.save
    # The newest may still be under way.
    self.checkpointer.complete_steps.side_effect = lambda: sorted(self.saved)[
        -3:-1
    ]
    self.journal = autospec(journal_lib.Journal)
    self.evaluator = autospec(evaluator_lib.Evaluator)
    self.evaluator.run.side_effect = self.evaluate
    self.recorder = autospec(recorder_lib.Recorder)
    self.recorder.span.side_effect = lambda *a, **k: contextlib.nullcontext()
    self.recorder.get_state.return_value = {}
    self.recorder.has_result.side_effect = lambda name, step=None: (
        name in self.results and step in (None, self.results[name])
    )
    self.recorder.evaluation.side_effect = self.record_evaluation

  def begin_step(self, step, should_stop):
    if should_stop():
      return False
    self.log.append(("begin", step))
    return True

  def save(self, step, state, host_state, *, wait):
    self.log.append(("save", step))
    self.saved[step] = (state, host_state, wait)

  def evaluate(self, params, num_prompts, *, version, should_stop, on_progress):
    if should_stop():
      raise evaluator_lib.Interrupted
    self.log.append(("evaluate", version, num_prompts))
    return {"pass_at_1": self.accuracy.get(version, 0.5)}

  def record_evaluation(self, name, step, result):
    if name:
      self.results[name] = step

  def train_step(self, state, batch):
    step = int(state.step)
    self.log.append(("step", step))
    self.scales.append(float(state.learning_rate_scale))
    state = train_step_lib.TrainState(
        **{
            **vars(state),
            "step": state.step + 1,
            "params": {"made_by": jnp.asarray(step + 1)},
        }
    )
    self.step = step + 1
    metrics = {**METRICS, **self.metrics.get(step, {})}
    return state, {k: np.float32(v) for k, v in metrics.items()}

  def make(self, *, action="warn", step=0, history=(), **changes):
    periods = dict(
        num_steps=6,
        num_prompts=3,
        num_completions=2,
        publish_every=1,
        checkpoint_every=0,
        evaluate_every=0,
        evaluate_prompts=16,
        final_prompts=64,
        wall_clock_limit_s=0.0,
    )
    self.scales = []
    self.step = step
    state = train_step_lib.TrainState(
        step=jnp.asarray(step),
        params={"made_by": jnp.asarray(step)},
        opt_state=(),
        loss_params={},
        loss_opt_state=(),
        learning_rate_scale=jnp.asarray(1.0),
        rng=jnp.zeros(2, jnp.uint32),
    )
    return trainer_lib.Trainer(
        state=state,
        train_step=self.train_step,
        service=self.service,
        batch_maker=self.maker,
        publisher=self.publisher,
        checkpointer=self.checkpointer,
        journal=self.journal,
        evaluator=self.evaluator,
        guards=guards_lib.Guards(
            tiny_model.make_config(guards__action=action).guards
        ),
        recorder=self.recorder,
        periods=trainer_lib.Periods(**{**periods, **changes}),
        applied_history=list(history),
    )

  def should_stop(self):
    return self.stop_at is not None and self.step >= self.stop_at

  def run_it(self, **changes):
    return self.make(**changes).run(self.should_stop)

  def logged(self, *names):
    return [entry for entry in self.log if entry[0] in names]

  def steps(self, name):
    return [entry[1] for entry in self.logged(name)]

  def test_a_whole_run(self):
    self.assertTrue(self.run_it())
    self.assertEqual(self.steps("step"), list(range(6)))
    # Searchers get params and admission before the first evaluation is over.
    self.assertEqual(
        self.log[:4],
        [("publish", 0, 0), ("open", 0), ("evaluate", 0, 64), ("begin", 0)],
    )
    self.assertEqual(
        [entry[:2] for entry in self.log[-3:]],
        [("finish", 6), ("save", 6), ("evaluate", 6)],
    )
    self.publisher.wait.assert_called_once_with(0, mock.ANY)
    self.recorder.finish.assert_called_once_with(6, {"closed": True}, None)
    self.assertTrue(self.saved[6][2], "the last save is waited for")
    self.recorder.train_ended.assert_called_once_with()
    self.assertEqual(self.recorder.step.call_count, 6)

  @parameterized.parameters((1, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 4, 6]))
  def test_publishes_every_k_steps_and_at_the_end(self, every, expected):
    self.run_it(publish_every=every)
    # Each under the step that made it.
    self.assertEqual(
        self.logged("publish"), [("publish", s, s) for s in expected]
    )

  def test_checkpoints_and_evaluations_have_periods(self):
    self.run_it(checkpoint_every=2, evaluate_every=3)
    self.assertEqual(self.steps("save"), [2, 4, 6])
    self.assertEqual(
        self.logged("evaluate"),
        [("evaluate", 0, 64), ("evaluate", 3, 16), ("evaluate", 6, 64)],
    )
    self.assertFalse(self.saved[2][2], "a periodic save is in the background")

  def test_the_next_batch_is_drawn_while_the_device_works(self):
    self.run_it(num_steps=3)
    order = self.logged("step", "draw", "flush")
    self.assertEqual(
        order,
        [
            ("draw", 0),
            ("step", 0),
            ("draw", 1),
            ("flush", 1),
            ("step", 1),
            ("draw", 2),
            ("flush", 2),
            ("step", 2),
            ("flush", 3),
        ],
    )

  def test_a_batch_that_is_not_there_yet_is_awaited_after_the_step(self):
    self.ready = False
    self.run_it(num_steps=2)
    self.assertEqual(
        self.logged("step", "draw", "flush"),
        [("draw", 0), ("step", 0), ("flush", 1)]
        + [("draw", 1), ("step", 1), ("flush", 2)],
    )

  @parameterized.parameters("checkpoint_every", "evaluate_every")
  def test_nothing_is_drawn_across_a_checkpoint_or_evaluation(self, period):
    self.run_it(num_steps=4, **{period: 2})
    due = ("save", 2) if period == "checkpoint_every" else ("evaluate", 2, 16)
    self.assertLess(self.log.index(due), self.log.index(("begin", 2)))
    self.assertLess(self.log.index(("flush", 2)), self.log.index(due))
    # Elsewhere it is.
    self.assertLess(self.log.index(("draw", 1)), self.log.index(("flush", 1)))

  def test_what_is_drawn_is_counted_as_trained(self):
    self.run_it()
    self.assertEqual(self.service.mark_trained.call_count, 6)
    self.assertEqual(len(self.steps("draw")), len(self.steps("step")))
    draw = self.maker.make.call_args.args[0]
    self.assertEqual(draw.rewards.shape, (3, 2))

  def test_a_signal_saves_and_a_continued_run_goes_on(self):
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
    self.assertTrue(self.run_it(step=3, history=[(3, 300)]))
    self.assertEqual(self.steps("step"), [3, 4, 5])
    # It has its first evaluation already.
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])

  def test_a_signal_while_evaluating(self):
    self.stop_at = 0
    self.assertFalse(self.run_it())
    self.assertEqual(self.steps("save"), [0])
    self.assertEmpty(self.steps("step"))
    self.recorder.evaluation.assert_not_called()

  def test_a_signal_with_a_batch_in_hand_trains_it_first(self):
    # True once the batch of step 1 was drawn.
    self.make().run(lambda: ("draw", 1) in self.log)
    self.assertEqual(self.steps("step"), self.steps("draw"))
    self.assertEqual(self.steps("step"), [0, 1])
    self.assertEqual(self.steps("save"), [2])

  def test_a_signal_in_the_last_evaluation(self):
    self.results["before"] = 0
    self.stop_at = 6
    self.assertFalse(self.run_it())
    self.assertEqual(self.steps("save"), [6])
    self.recorder.finish.assert_not_called()
    # The same command ends it.
    self.stop_at = None
    self.checkpointer.latest_step.return_value = 6
    self.log.clear()
    self.assertTrue(self.run_it(step=6))
    self.assertEmpty(self.logged("step", "save"))
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])
    self.recorder.finish.assert_called_once()

  def test_a_finished_run_is_evaluated_once(self):
    self.results.update(before=0, after=6)
    self.checkpointer.latest_step.return_value = 6
    self.assertTrue(self.run_it(step=6))
    self.evaluator.run.assert_not_called()

  def test_a_longer_run_is_evaluated_at_its_own_end(self):
    self.results.update(before=0, after=4)
    self.run_it(step=4)
    self.assertEqual(self.logged("evaluate"), [("evaluate", 6, 64)])

  @parameterized.parameters(float("nan"), float("inf"))
  def test_a_loss_that_is_not_finite_ends_the_run(self, loss):
    self.metrics[2] = {"loss": loss}
    with self.assertRaisesRegex(
        FloatingPointError, r"step 2: the loss is .*prompts \[\d.*versions \d"
    ):
      self.run_it(checkpoint_every=3)
    self.assertEmpty(self.saved)

  def test_a_guard_that_warns(self):
    self.metrics[1] = {"entropy": 0.0}
    self.assertTrue(self.run_it())
    self.recorder.event.assert_called_once()
    kind, message = self.recorder.event.call_args.args
    self.assertEqual(kind, "guard")
    self.assertRegex(message, r"step 1: entropy .* \(warn\)")
    self.assertEqual(self.scales, [1.0] * 6)

  def test_a_guard_that_lowers_the_learning_rate(self):
    self.metrics[1] = {"kl": 1e3}
    self.metrics[4] = {"kl": 1e3}
    self.run_it(action="lower_learning_rate", evaluate_every=1)
    self.assertEqual(self.scales, [1, 1, 0.5, 0.5, 0.5, 0.25])

  def test_no_learning_rate_mends_a_gap(self):
    self.metrics[1] = {"logprob_gap": 1.0}
    self.run_it(action="lower_learning_rate")
    self.assertEqual(self.scales, [1.0] * 6)
    self.assertEqual(self.recorder.event.call_args.args[0], "guard")

  def test_a_guard_that_stops(self):
    self.metrics[1] = {"kl": 1e3}
    self.assertTrue(self.run_it(action="stop", checkpoint_every=5))
    # The batch that was drawn meanwhile counts as trained, and is.
    self.assertEqual(self.steps("step"), [0, 1, 2])
    self.assertEqual(self.steps("draw"), [0, 1, 2])
    self.assertEqual(self.saved[3][1]["stopped_by"], "guard kl")
    self.recorder.finish.assert_called_once_with(3, mock.ANY, "guard kl")
    self.assertIn(("evaluate", 3, 64), self.log)

  def test_a_fallen_accuracy_is_a_guard(self):
    self.accuracy[2] = 0.1
    self.run_it(action="stop", evaluate_every=2)
    self.assertEqual(self.steps("step"), [0, 1])
    self.recorder.finish.assert_called_once_with(2, mock.ANY, "guard accuracy")

  def test_the_wall_clock_limit(self):
    with mock.patch.object(
        trainer_lib.time, "monotonic", side_effect=lambda: 10.0 * self.step
    ):
      self.assertTrue(self.run_it(wall_clock_limit_s=25.0, checkpoint_every=1))
    self.assertEqual(self.steps("step"), [0, 1, 2])
    self.recorder.finish.assert_called_once_with(
        3, mock.ANY, "wall_clock_limit_s"
    )

  def test_the_journal_keeps_what_the_oldest_checkpoint_needs(self):
    self.run_it(checkpoint_every=1, history=[(0, 0)])
    cuts = [c.args[0] for c in self.journal.truncate_before.call_args_list]
    # After the save of step n, of which n-1 and n-2 are complete.
    self.assertEqual(cuts, [100, 100, 200, 300, 400])
    self.assertEqual(
        self.saved[6][1]["applied_history"],
        [[3, 300], [4, 400], [5, 500], [6, 600]],
    )

  def test_a_save_that_fails_keeps_the_journal(self):
    def fail(step, state, host_state, *, wait):
      if step == 2:
        raise OSError("disk full")
      self.save(step, state, host_state, wait=wait)

    self.checkpointer.save.side_effect = fail
    self.assertTrue(self.run_it(checkpoint_every=2))
    self.recorder.event.assert_called_once_with(
        "checkpoint_failed", "disk full"
    )
    self.assertEqual(self.saved[4][1]["applied_history"], [[4, 400]])
    self.assertEqual(
        self.journal.truncate_before.call_args_list, [mock.call(400)]
    )

  def test_a_last_save_that_fails_is_an_error(self):
    self.checkpointer.save.side_effect = OSError("disk full")
    with self.assertRaisesRegex(OSError, "disk full"):
      self.run_it()


if __name__ == "__main__":
  absltest.main()
