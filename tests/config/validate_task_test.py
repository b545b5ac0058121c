# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a config against its task: fields, lengths, held-out prompts."""

from absl.testing import absltest
import ml_collections

from tba_jax.config import validate
from tba_jax.tasks import build
from tests.support import base_config


def _problems(config, **kwargs):
  try:
    validate.validate(config, **kwargs)
  except validate.ConfigError as error:
    return str(error).splitlines()
  return []


class TaskTest(absltest.TestCase):

  def test_unknown_task(self):
    config = base_config.make(task__name="count_down")
    config.task.numbers = 4
    (line,) = _problems(config)
    self.assertStartsWith(line, "config.task.name='count_down': allowed")
    for name in build.TASKS:
      self.assertIn(name, line)

  def test_unknown_field(self):
    config = base_config.make(task__max_numbers=3)
    (line,) = _problems(config)
    self.assertIn("did you mean config.task.max_number?", line)

  def test_field_out_of_range_and_of_wrong_type(self):
    (line,) = _problems(base_config.make(task__max_number=-1))
    self.assertStartsWith(line, "config.task.max_number=-1: allowed")
    (line,) = _problems(base_config.make(task__max_number="9"))
    self.assertIn("a whole number", line)

  def test_texts_of_the_task_fit(self):
    config = base_config.make(
        task__name="countdown",
        sampling__max_prompt_tokens=8,
        sampling__max_completion_tokens=17,
    )
    lines = _problems(config)
    self.assertStartsWith(
        lines[0], "config.sampling.max_prompt_tokens = 8: allowed 9 or more"
    )
    self.assertStartsWith(
        lines[1], "config.sampling.max_completion_tokens = 17: allowed 18"
    )

  def test_of_rows_what_is_too_long_is_left_out(self):
    path = self.create_tempfile(content='{"instruction": "Sing a long song."}')
    fields = dict(name="red_team", instructions=path.full_path)
    config = base_config.make(sampling__max_completion_tokens=2)
    config.task = ml_collections.ConfigDict(fields)
    self.assertEqual(
        [p for p in _problems(config) if "max_completion_tokens" in p], []
    )
    config.task.instructions = "made_up"
    self.assertStartsWith(
        _problems(config)[0], "config.sampling.max_completion_tokens = 2:"
    )

  def test_held_out_prompts_are_enough(self):
    task = build.make_task(ml_collections.ConfigDict({"name": "arithmetic"}))
    size = task.num_prompts("held_out")
    self.assertEqual(
        _problems(base_config.make(evaluate__final_prompts=size)), []
    )
    for key in ("num_prompts", "final_prompts"):
      (line,) = _problems(base_config.make(**{f"evaluate__{key}": size + 1}))
      self.assertStartsWith(
          line, f"config.evaluate.{key} = {size + 1}: allowed up to {size}"
      )

  def test_a_task_from_outside_takes_the_place_of_the_named_one(self):
    config = base_config.make(task__name="mine")
    config.task.my_field = 1
    task = build.make_task(ml_collections.ConfigDict({"name": "countdown"}))
    self.assertEqual(_problems(config, task=task), [])
    config.sampling.max_prompt_tokens = 8
    self.assertLen(_problems(config, task=task), 1)


if __name__ == "__main__":
  absltest.main()
