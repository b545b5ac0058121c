# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop: what happens after which step."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tests.support import trainer_case


class TrainerTest(trainer_case.TrainerCase):

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
    self.run_it(publish__every_steps=every)
    # Each under the step that made it.
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

  def test_the_next_batch_is_drawn_while_the_device_works(self):
    self.run_it(train__num_steps=3)
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
    self.run_it(train__num_steps=2)
    self.assertEqual(
        self.logged("step", "draw", "flush"),
        [("draw", 0), ("step", 0), ("flush", 1)]
        + [("draw", 1), ("step", 1), ("flush", 2)],
    )

  @parameterized.parameters("checkpoint__every_steps", "evaluate__every_steps")
  def test_nothing_is_drawn_across_a_checkpoint_or_evaluation(self, period):
    self.run_it(train__num_steps=4, **{period: 2})
    due = (
        ("save", 2)
        if period == "checkpoint__every_steps"
        else ("evaluate", 2, 16)
    )
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


class RoundsTest(trainer_case.TrainerCase):

  def setUp(self):
    super().setUp()
    self.service.open_next.side_effect = lambda step: self.log.append(
        ("open_next", step)
    )

  def test_a_round_s_params_are_published_once_its_data_is_here(self):
    self.ready = False
    self.run_it(
        rounds__mini_batches=2,
        rounds__lag_rounds=1,
        publish__every_steps=2,
        train__num_steps=4,
    )
    wanted = self.logged("publish", "begin", "open_next", "step")
    # The first of all is what the state held; here that of no step.
    self.assertEqual(
        [entry[:2] for entry in wanted],
        [
            ("publish", 0),
            *(("begin", 0), ("publish", 0), ("open_next", 0), ("step", 0)),
            *(("begin", 1), ("open_next", 1), ("step", 1)),
            *(("begin", 2), ("publish", 2), ("open_next", 2), ("step", 2)),
            *(("begin", 3), ("open_next", 3), ("step", 3)),
        ],
    )

  @parameterized.parameters((0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4))
  def test_a_restart_publishes_what_began_the_last_begun_round(self, at, first):
    self.stop_at = 0
    self.run_it(
        step=at,
        rounds__mini_batches=2,
        rounds__lag_rounds=1,
        publish__every_steps=2,
    )
    self.assertEqual(self.logged("publish")[0][1], first)


if __name__ == "__main__":
  absltest.main()
