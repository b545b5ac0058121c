# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Distillation beside a peer: its table, and the settings of both."""

from absl.testing import parameterized

from benchmarks import time_to_reward
from configs import countdown
from studies.distill import distill
from tba_jax.config import validate
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tests.support import tiny_model


def _result(name, seed, kl):
  return {
      "name": name,
      "seed": seed,
      "kl": kl,
      "pass_at_1": [0.2, 0.4, 0.5],
      "seconds": [0.0, 10.0, 20.0],
      "steps": [0, 20, 40],
      "step_s": 0.5,
  }


class DistillTest(parameterized.TestCase):

  def test_seconds_until_kl_falls(self):
    result = [
        _result("tb", 0, [16.0, 8.0, 2.0]),
        _result("tb", 1, [16.0, 12.0, 4.0]),
        _result("trl_gkd", 0, [16.0, 12.0, 10.0]),
    ]
    heads, tb, gkd = distill.make_table(result)
    cells = dict(zip(heads, tb))
    self.assertEqual(cells["seeds"], "0, 1")
    self.assertEqual(cells["s to 8.0 nats"], "15 (10 to 15)")
    self.assertEqual(cells["s to 2.0 nats"], "never (20 to never)")
    self.assertEqual(cells["KL at the end"], "3.000 (2.000 to 4.000)")
    self.assertEqual(gkd[2:5], ["never"] * 3)

  @parameterized.parameters(*distill.OURS)
  def test_runs_of_ours_are_valid(self, name):
    config = time_to_reward.make_config(countdown.get_config(), 3)
    config.reference.init = self.create_tempdir().full_path
    model = tiny_model.make_model(max_positions=512)
    hf.save(
        config.reference.init,
        model.config,
        tiny_model.init_params(model),
        tokenizer_lib.word_level(["a"], "a"),
    )
    config.update_from_flattened_dict(distill.SETTINGS | distill.OURS[name])
    validate.validate(config)

  def test_peer_takes_players_completions_of_same_prompts(self):
    config = time_to_reward.make_config(countdown.get_config(), 3)
    config.reference.init = "teacher"
    task = task_table.make_task(config.task)
    settings = distill.peer_settings(config, task, "trl_gkd")
    ids = {
        task.prompt(base.TRAIN, i): i for i in range(task.num_prompts("train"))
    }
    for prompt, completion in list(
        zip(settings["prompts"], settings["completions"], strict=True)
    )[:50]:
      judged = task.judge(base.TRAIN, ids[prompt], completion)
      self.assertIn(judged.reward, (0.0, 1.0))
      self.assertNotEmpty(completion)
    self.assertEqual(settings["teacher"], "teacher")
