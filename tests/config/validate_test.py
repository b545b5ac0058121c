# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of validate.py, config_ranges.py and config_relations.py."""

import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import ranges
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.losses import build
from tba_jax.losses import corrections
from tba_jax.losses import groups
from tba_jax.models import config as config_lib
from tba_jax.models import transformer
from tba_jax.monitor import writers
from tba_jax.replay import buffer
from tba_jax.training import reference
from tba_jax.training import schedules
from tba_jax.training import sharding
from tba_jax.training import train_step
from tests.support import base_config


def _problems(config, **kwargs):
  try:
    validate.validate(config, **kwargs)
  except validate.ConfigError as error:
    return str(error).splitlines()
  return []


class TypesTest(parameterized.TestCase):

  def test_right_config(self):
    self.assertEqual(_problems(base_config.make()), [])

  def test_all_problems_are_told_at_once(self):
    config = base_config.make(
        loss__beta=-1.0, train__num_steps="many", search__lead_steps=0
    )
    config.replay.sise = 3
    lines = _problems(config)
    self.assertLen(lines, 4)
    for path in (
        "config.loss.beta = -1.0: allowed a number above 0",
        "config.train.num_steps = 'many': allowed a whole number",
        "config.search.lead_steps = 0: allowed 1 or more",
        "config.replay.sise = 3: there is no such key; did you mean"
        " config.replay.size",
    ):
      prefix = path.partition("; did")[0]
      self.assertTrue(any(line.startswith(prefix) for line in lines), lines)

  def test_unknown_key_names_the_nearest(self):
    config = base_config.make()
    config.train.num_step = 3
    self.assertEqual(
        _problems(config),
        [
            "config.train.num_step = 3: there is no such key; did you mean"
            " config.train.num_steps?"
        ],
    )

  def test_missing_key_is_named(self):
    config = base_config.make()
    del config.loss["beta"]
    self.assertEqual(
        _problems(config),
        ["config.loss.beta: is missing; tba_jax/config/settings.py has it"],
    )

  def test_bool_is_no_number_and_int_is_a_float(self):
    self.assertLen(_problems(base_config.make(train__num_steps=True)), 1)
    self.assertLen(_problems(base_config.make(search__lockstep=1)), 1)
    self.assertEqual(_problems(base_config.make(loss__beta=1)), [])

  @parameterized.parameters(float("nan"), float("inf"))
  def test_numbers_are_finite(self, value):
    self.assertLen(
        _problems(base_config.make(optimizer__learning_rate=value)), 1
    )


class RangesTest(parameterized.TestCase):

  def test_every_number_and_name_has_a_range(self):
    free = {
        "evaluate.judge",
        "evaluate.judge_command",
        "evaluate.variants",
        "generate.input",
        "generate.model",
        "generate.output",
        "init",
        "loss.value_init",
        "publish.directory",
        "reward.model",
        "reward_model.held_out",
        "reward_model.init",
        "reward_model.relabel",
        "reward_model.train",
        "sft.init",
        "store.secret_file",
        "store.spool_dir",
        "store.tls_ca_file",
        "store.tls_cert_file",
        "store.tls_key_file",
        "sweep.objectives",
        "task.name",
        "tokenizer.source",
    }
    for key, value in load.flatten(settings.get_config()).items():
      if not isinstance(value, bool) and key not in free:
        self.assertTrue(key in ranges.RANGES or key in ranges.NAMES, key)

  def test_every_range_is_of_a_key(self):
    keys = set(load.flatten(settings.get_config()))
    self.assertLessEqual(set(ranges.RANGES), keys)
    self.assertLessEqual(set(ranges.NAMES), keys)

  @parameterized.parameters(
      ("loss.correction", lambda: ("", *corrections.CORRECTIONS)),
      ("loss.length_norm", lambda: ("", *groups.LENGTH_NORMS)),
      ("loss.name", lambda: build.OBJECTIVES),
      ("loss.behavior_logprobs", lambda: train_step.BEHAVIORS),
      ("model.activation", lambda: config_lib.ACTIVATIONS),
      ("model.family", lambda: transformer.FAMILIES),
      ("reference.mode", lambda: reference.MODES),
      ("replay_filter.evict", lambda: buffer.RULES),
      ("model.rope_type", lambda: config_lib.ROPE_TYPES),
      ("optimizer.schedule", lambda: schedules.LEARNING_RATES),
  )
  def test_names_are_those_of_the_code(self, key, names):
    self.assertCountEqual(ranges.NAMES[key], names())

  def test_writers_are_those_of_the_code(self):
    config = settings.get_config()
    config.log.writers = ",".join(ranges.WRITER_NAMES)
    with (
        mock.patch.object(writers, "CsvWriter") as csv,
        mock.patch.object(writers, "TensorBoardWriter") as tensorboard,
        mock.patch.object(writers, "WandbWriter") as wandb,
    ):
      workdir = pathlib.Path(self.create_tempdir().full_path)
      writers.Writers(config, workdir, 0, lambda *_: None).close()
    for made in (csv, tensorboard, wandb):
      made.assert_called_once()

  def test_mesh_axes_are_those_of_the_code(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    self.assertEqual(mesh.axis_names, ranges.MESH_AXES)

  @parameterized.parameters(
      ("seed", -1, "from 0 to 2**32 - 1"),
      ("cores__trainer", "0-", "0  0,2  0-3"),
      ("guards__action", "panic", "'off', 'warn'"),
      ("guards__learning_rate_factor", 1.0, "above 0 and below 1"),
      ("loss__ratio_clip", 1.0, "from 0 to below 1"),
      ("loss__scale", "half", "'unit', 'paper'"),
      ("loss__gae_lambda", 1.5, "from 0 to 1"),
      ("loss__gae_gamma", -0.1, "from 0 to 1"),
      ("loss__value_clip", -0.1, "from 0 on"),
      ("loss__value_weight", -0.1, "from 0 on"),
      ("loss__value_learning_rate", 0.0, "above 0"),
      ("loss__subtb_lambda", 0.0, "above 0 and up to 1"),
      ("loss__missing_stop", "drop", "'keep', 'replace', 'add'"),
      ("loss__behavior_logprobs", "mine", "'sampler', 'recomputed'"),
      ("model__head_dim", 15, "even"),
      ("optimizer__b2", 1.0, "from 0 to below 1"),
      ("publish__keep_versions", 1, "2 or more"),
      ("replay__recent_fraction", 1.5, "from 0 to 1"),
      ("sampling__temperature", 0.0, "above 0"),
      ("sampling__top_p", 0.0, "above 0 and up to 1"),
      ("sharding__mlp", "tensor,tensor", "mesh axes of data, fsdp, sequence"),
      ("sharding__mlp", "model", "mesh axes of data, fsdp, sequence"),
      ("store__address", "localhost", "host:first-last"),
  )
  def test_out_of_range(self, name, value, allowed):
    (line,) = _problems(base_config.make(**{name: value}))
    key = name.replace("__", ".")
    self.assertStartsWith(line, f"config.{key} = {value!r}: ")
    self.assertIn(allowed, line)

  @parameterized.parameters("", "all", "0", "0,2", "0-3")
  def test_cores_that_are_right(self, text):
    self.assertEqual(_problems(base_config.make(cores__searcher=text)), [])

  def test_greedy_is_for_programs_that_do_not_train(self):
    config = base_config.make(sampling__temperature=0.0)
    self.assertLen(_problems(config), 1)
    self.assertEqual(_problems(config, program="evaluate"), [])
    negative = base_config.make(sampling__temperature=-1.0)
    self.assertLen(_problems(negative, program="evaluate"), 1)


class RelationsTest(parameterized.TestCase):

  @parameterized.parameters(
      # Batches.
      (dict(train__micro_batch_prompts=24), "train.prompts_per_batch"),
      (
          dict(train__micro_batch_prompts=2, mesh__data=2, mesh__fsdp=2),
          "train.micro_batch_prompts",
      ),
      (dict(sft__batch_size=63, mesh__data=2), "sft.batch_size"),
      # Groups.
      (dict(train__completions_per_prompt=1), "train.completions_per_prompt"),
      (
          dict(loss__name="rloo", train__completions_per_prompt=1),
          "train.completions_per_prompt",
      ),
      (dict(loss__name="proximal_rloo"), "loss.ratio_clip"),
      (dict(loss__correction="cispo"), "loss.ratio_clip"),
      (dict(loss__correction="decoupled"), "loss.ratio_clip"),
      (dict(loss__name="ppo"), "loss.ratio_clip"),
      (dict(loss__name="ppo", loss__value_init="/no/such"), "loss.value_init"),
      (dict(loss__behavior_logprobs="recomputed"), "loss.behavior_logprobs"),
      (
          dict(rounds__mini_batches=4, loss__proximal_every_steps=3),
          "loss.proximal_every_steps",
      ),
      (dict(search__samples_per_prompt=7), "search.samples_per_prompt"),
      (dict(replay__capacity_per_prompt=7), "replay.capacity_per_prompt"),
      # Two steps of 32 prompts with 8 samples may be ahead.
      (dict(replay__capacity=511), "replay.capacity"),
      (
          dict(replay__capacity=600, replay__warm_start_completions=601),
          "replay.capacity",
      ),
      # Admission.
      (dict(search__prompts_per_round=65), "search.prompts_per_round"),
      (dict(search__starvation_s=15.0), "search.starvation_s"),
      (dict(search__lead_steps=0), "search.lead_steps"),
      (dict(search__lockstep=True), "search.lead_steps"),
      (
          dict(
              search__lockstep=True,
              search__lead_steps=0,
              sampling__in_flight="keep_cache",
          ),
          "search.lockstep",
      ),
      (
          dict(
              search__lockstep=True,
              search__lead_steps=0,
              search__wait_for_fresh=False,
          ),
          "search.wait_for_fresh",
      ),
      (
          dict(
              search__lockstep=True,
              search__lead_steps=0,
              publish__every_steps=2,
          ),
          "publish.every_steps",
      ),
      # Rounds: all that does not fit is named.
      (dict(rounds__mini_batches=2), "replay.dedupe"),
      (dict(rounds__mini_batches=2), "publish.every_steps"),
      (
          dict(rounds__mini_batches=7, train__per_round_steps=3),
          "train.per_round_steps",
      ),
      (dict(rounds__mini_batches=7), "train.num_steps"),
      # Schedules.
      (dict(optimizer__warmup_steps=320), "optimizer.warmup_steps"),
      (dict(sft__warmup_steps=2400), "sft.warmup_steps"),
      (dict(reward_model__warmup_steps=300), "reward_model.warmup_steps"),
      (dict(sft__micro_batch_size=3), "sft.batch_size"),
      (dict(reward_model__micro_batch_size=5), "reward_model.batch_size"),
      (dict(evaluate__judge="/nowhere"), "evaluate.judge"),
      (dict(evaluate__judge="command"), "evaluate.judge_command"),
      (dict(reward__model="/nowhere"), "reward.model"),
      (dict(reward_model__init="scratch"), "reward_model.init"),
      (dict(reward_model__relabel="/nowhere"), "reward_model.relabel"),
      (
          dict(optimizer__warmup_steps=20, optimizer__stable_steps=300),
          "optimizer.stable_steps",
      ),
      (dict(loss__beta_decay_steps=5), "loss.beta_stop_steps"),
      (
          dict(loss__beta_decay_steps=5, loss__beta_stop_steps=6),
          "loss.beta_stop_steps",
      ),
      # Model.
      (dict(model__num_heads=6), "model.num_heads"),
      (dict(model__max_positions=39), "model.max_positions"),
      (dict(mesh__tensor=8), "model.mlp_width"),
      (dict(search__mesh__tensor=8), "model.num_heads"),
      (dict(mesh__tensor=3, sharding__mlp="", sharding__vocab=""),
       "model.num_heads"),
      # Places.
      (dict(init="/no/such/folder"), "init"),
      (dict(tokenizer__source="/no/such/folder"), "tokenizer.source"),
  )  # fmt: skip
  def test_wrong_together(self, changes, key):
    lines = _problems(base_config.make(**changes))
    self.assertTrue(
        any(line.startswith(f"config.{key} = ") for line in lines), lines
    )

  @parameterized.parameters(
      dict(train__micro_batch_prompts=8, mesh__data=4, mesh__fsdp=2),
      dict(search__samples_per_prompt=8, replay__capacity_per_prompt=8),
      dict(replay__capacity=512),
      dict(search__prompts_per_round=64),
      dict(search__lockstep=True, search__lead_steps=0),
      dict(search__num_searchers=9),
      dict(optimizer__warmup_steps=319),
      dict(loss__beta_decay_steps=5, loss__beta_stop_steps=5),
      dict(model__num_heads=8),
      dict(model__max_positions=40),
      dict(mesh__tensor=4),
      dict(init="scratch"),
      dict(loss__name="tb_learned_z", train__completions_per_prompt=1),
      dict(
          loss__name="ppo",
          loss__ratio_clip=0.2,
          train__completions_per_prompt=1,
      ),
      dict(loss__behavior_logprobs="recomputed", loss__proximal_every_steps=2),
  )
  def test_right_together(self, **changes):
    self.assertEqual(_problems(base_config.make(**changes)), [])

  def test_a_folder_that_exists(self):
    folder = self.create_tempdir().full_path
    self.assertEqual(_problems(base_config.make(init=folder)), [])

  def test_what_is_wrong_alone_does_not_break_the_rest(self):
    lines = _problems(base_config.make(mesh__data=0, publish__every_steps=0))
    self.assertLen(lines, 2)


if __name__ == "__main__":
  absltest.main()
