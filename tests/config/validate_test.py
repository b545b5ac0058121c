# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every check of a config: types, ranges, relations, task, resume, hosts."""

import json
import os
import pathlib
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections
import pytest

from tba_jax.config import differences
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.environments import checks as environment_checks
from tba_jax.losses import objective_table
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.net import heads
from tba_jax.replay import buffer
from tba_jax.run import run_directory
from tba_jax.run import settings as monitor_settings
from tba_jax.run import writers
from tba_jax.system import rules
from tba_jax.tasks import arithmetic
from tba_jax.tasks import settings as task_settings
from tba_jax.tasks import task_table as build_task
from tba_jax.transport import addresses
from tests.models import hf_case
from tests.support import base_config
from tests.support import hub_cache


def _problems(config, **kwargs):
  try:
    validate.validate(config, **kwargs)
  except validate.ConfigError as error:
    return str(error).splitlines()
  return []


class TypesTest(parameterized.TestCase):

  def test_accepts_base_config(self):
    self.assertEqual(_problems(base_config.make()), [])

  def test_all_problems_are_reported_at_once(self):
    config = base_config.make(
        loss__beta=-1.0, train__num_steps="many", search__lead_steps=0
    )
    config.replay.sise = 3
    lines = _problems(config)
    self.assertLen(lines, 4)
    for path in (
        "config.loss.beta = -1.0: must be a number from 0 on",
        "config.train.num_steps = 'many': must be a whole number",
        "config.search.lead_steps = 0: must be above 0",
        "config.replay.sise = 3: there is no such key; did you mean"
        " config.replay.size",
    ):
      prefix = path.partition("; did")[0]
      self.assertTrue(any(line.startswith(prefix) for line in lines), lines)

  def test_missing_key_is_named(self):
    config = base_config.make()
    del config.loss["beta"]
    self.assertEqual(
        _problems(config),
        [
            "config.loss.beta: is missing; start from"
            " tba_jax.config.settings.get_config()"
        ],
    )

  def test_bool_is_not_number_and_int_is_float(self):
    self.assertLen(_problems(base_config.make(train__num_steps=True)), 1)
    self.assertLen(_problems(base_config.make(search__lockstep=1)), 1)
    self.assertEqual(_problems(base_config.make(loss__beta=1)), [])

  @parameterized.product(
      key=("optimizer__learning_rate", "trainer__heartbeat_s",
           "task__held_out_fraction"),
      value=(float("nan"), float("inf")),
  )  # fmt: skip
  def test_numbers_are_finite(self, key, value):
    config = base_config.make()
    config.task.update(build_task.fields("arithmetic"))
    with config.ignore_type():
      config.update_from_flattened_dict({key.replace("__", "."): value})
    (line,) = _problems(config)
    self.assertIn("a finite number", line)


class RangesTest(parameterized.TestCase):

  def test_every_number_and_bounded_text_has_range(self):
    for key, setting in settings.SETTINGS.items():
      if type(setting.default) in (int, float):
        self.assertNotIn(setting.allowed, (rules.TEXT, rules.FLAG), key)
      self.assertTrue(setting.allowed.test(setting.default), key)
      section = key.partition(".")[0]
      self.assertTrue("." not in key or section in settings.SECTIONS, key)

  def test_files_of_hosts_are_fields_of_tasks(self):
    fields = set().union(
        *(t.FIELDS for t in map(build_task.find, build_task.TASKS))
    )
    self.assertContainsSubset(task_settings.NAMING_FILES, fields)

  @parameterized.parameters(
      ("loss.name", lambda: objective_table.OBJECTIVES),
      ("model.family", lambda: family_lib.FAMILIES),
      ("replay_filter.evict", lambda: buffer.EVICTION_RULES),
  )
  def test_names_match_code(self, key, names):
    self.assertCountEqual(settings.SETTINGS[key].allowed.names, names())

  def test_writers_match_code(self):
    config = settings.get_config()
    config.log.writers = ",".join(monitor_settings.WRITERS)
    with (
        mock.patch.object(writers, "CsvWriter") as csv,
        mock.patch.object(writers, "TensorBoardWriter") as tensorboard,
        mock.patch.object(writers, "TrackioWriter") as trackio,
        mock.patch.object(writers, "WandbWriter") as wandb,
    ):
      workdir = pathlib.Path(self.create_tempdir().full_path)
      run = run_directory.RunInfo(workdir, "", workdir, b"")
      writers.Writers(config, run, 0, lambda *_: None).close()
    for made in (csv, tensorboard, trackio, wandb):
      made.assert_called_once()

  def test_mesh_axes_match_code(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    self.assertEqual(mesh.axis_names, sharding.MESH_AXES)

  @parameterized.parameters(
      ("seed", -1),
      ("store__locator", "here:99999"),
      ("loss__scale", "half"),
  )
  def test_names_setting_out_of_range(self, name, value):
    (line,) = _problems(base_config.make(**{name: value}))
    key = name.replace("__", ".")
    allowed = settings.SETTINGS[key].allowed.text
    self.assertEqual(line, f"config.{key} = {value!r}: must be {allowed}")

  @parameterized.parameters(
      ("train__num_steps", 2**31, "a whole number below 2[*][*]31"),
      ("replay__capacity", 2**40, "a whole number below 2[*][*]31"),
      ("task__max_number", 2**31, "a whole number below 2[*][*]31"),
      ("optimizer__learning_rate", 1e39, "a finite number, 0 or from"),
      ("loss__beta", 1e-50, "a finite number, 0 or from"),
      ("init", "a\0b", "UTF-8 text"),
      ("init", "\udcff", "UTF-8 text"),
  )
  def test_refuses_unrepresentable_values(self, name, value, allowed):
    lines = _problems(base_config.make(**{name: value}))
    key = name.replace("__", ".")
    self.assertRegex(lines[0], f"config.{key} ?= ?.*: must be {allowed}")

  def test_greedy_sampling_is_refused_in_training(self):
    config = base_config.make(sampling__temperature=0.0)
    for program in ("train", "plan"):
      (line,) = _problems(config, program=program)
      self.assertEndsWith(line, "above 0, or 0 in evaluate and generate")
    self.assertEqual(_problems(config, program="evaluate"), [])
    negative = base_config.make(sampling__temperature=-1.0)
    self.assertLen(_problems(negative, program="evaluate"), 1)


class RelationsTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(train__micro_batch_prompts=24, mesh__data=4, mesh__fsdp=4),
      dict(search__samples_per_prompt=8, replay__capacity_per_prompt=8),
      dict(replay__capacity=512),
      dict(search__prompts_per_round=64),
      dict(search__lockstep=True, search__lead_steps=0),
      dict(search__lockstep=True, search__lead_steps=3, replay__capacity=1024),
      dict(search__num_searchers=9),
      dict(optimizer__warmup_steps=319),
      dict(loss__beta="0.05:0.1:5:5"),
      dict(model__num_heads=8),
      dict(model__max_positions=40),
      dict(mesh__tensor=4),
      dict(init="scratch"),
      dict(mesh__data=4, trainer__num_processes=2, trainer__cpu_devices=2),
      dict(search__mesh__data=2, search__mesh__fsdp=2, search__cpu_devices=4),
      dict(store__address="127.0.0.1:9000-9010"),
      dict(publish__carrier="orbax"),
      dict(
          publish__carrier="orbax",
          publish__directory="/shared",
          store__address="127.0.0.1:7000-7009",
      ),
      dict(loss__name="grpo", loss__beta=0.0),
      dict(loss__name="grpo", loss__beta=0.0, reference__role="none"),
      dict(loss__name="oapl", reference__role="none"),
      dict(loss__name="ema_tb", loss__ema_decay=0.5, reference__role="none"),
      dict(loss__anchor="behavior", reference__role="none"),
      dict(loss__name="flowrl", loss__ratio_cap=10.0),
      dict(loss__correction="m2_mask", loss__moment_cap=0.1),
      dict(loss__ratio_clip=0.2, loss__clip_high=0.28),
      dict(loss__correction="mask_token", loss__ratio_floor=0.5),
      dict(loss__ratio_clip=0.2, sampling__top_p=0.9, sampling__top_k=64),
      dict(loss__correction="dppo_kl", loss__divergence_cap=0.05),
      dict(
          loss__name="grpo",
          loss__correction="gspo",
          loss__ratio_clip=3e-4,
          loss__clip_high=4e-4,
          loss__advantage="pass_at_k",
          loss__pass_k=3,
          loss__missing_stop="mask",
      ),
      dict(
          loss__name="ppo",
          loss__ratio_clip=0.2,
          train__completions_per_prompt=1,
      ),
      dict(
          loss__name="oapl",
          loss__behavior_logprobs="recomputed",
          loss__proximal_every_steps=2,
      ),
      dict(tempering__tau=2.0, loss__name="tb"),
      dict(tempering__tau=2.0, loss__name="ctb", loss__pair_contrast=0.5),
      dict(explore__fraction=0.5, explore__min_tokens=5),
      dict(replay_filter__similarity="edit", replay_filter__freeze_step=9),
      dict(replay_filter__evict="lowest_reward"),
  )
  def test_accepts_consistent_settings(self, **changes):
    self.assertEqual(_problems(base_config.make(**changes)), [])

  @parameterized.parameters(
      (dict(loss__name="subtb", loss__length_norm="tokens"), "grpo, dr_grpo"),
      (dict(loss__name="grpo", loss__ties="first"), "online_dpo, ipo, slic"),
      (dict(loss__subtb_lambda=0.5), "subtb"),
      (dict(loss__pair_contrast=0.5), "ctb"),
      (dict(loss__name="ctb", loss__baseline="mean"), "tb, oapl, ema_tb"),
      (dict(loss__name="grpo", loss__anchor="behavior"), "tb, tb_learned_z, "),
      (dict(loss__name="gvpo", loss__baseline="mean"), "tb, oapl, ema_tb, "),
      (
          dict(loss__name="gvpo", loss__baseline_shift=-0.1),
          "tb, oapl, ema_tb, ",
      ),
      (
          dict(loss__name="flowrl", loss__baseline_shift=-0.1),
          "tb, oapl, ema_tb, ",
      ),
      (dict(loss__ema_decay=0.5), "config.loss.anchor = ema"),
      (dict(loss__baseline_temperature=0.5), "baseline = log_mean_exp, file"),
      (dict(loss__baseline_file="x"), "config.loss.baseline = file"),
      (dict(loss__moment_cap=0.5), "m2_mask"),
      (dict(loss__ratio_floor=0.5), "mask_token, mask_sequence"),
      (dict(loss__divergence_cap=0.5), "dppo_tv, dppo_kl"),
      (dict(loss__advantage="maxrl"), "grpo, dr_grpo"),
      (dict(loss__name="grpo", loss__pass_k=3), "pass_at_k"),
      (dict(replay__age_decay_steps=5.0), "reward"),
      (dict(loss__name="flowrl", loss__ratio_clip=0.5), "clip_token"),
      (dict(loss__gae_lambda=0.9), "ppo"),
      (dict(loss__value_init="reward_model"), "subtb, flowrl, ppo"),
      (
          dict(loss__correction="truncate_token", loss__ratio_clip=0.2),
          "clip_token, clip_sequence, gspo, cispo, decoupled",
      ),
      (dict(loss__correction="none", loss__ratio_clip=0.2), "clip_token"),
      (
          dict(loss__name="ppo", loss__ratio_clip=0.2, loss__ratio_cap=2.0),
          "truncate_token, truncate_sequence, mask_token, mask_sequence",
      ),
      (dict(loss__proximal_every_steps=2), "ppo"),
      (dict(reference__every_steps=10), "reset, ema"),
      (dict(reference__mode="reset", reference__ema_decay=0.5), "ema"),
      (dict(rounds__passes=2), "config.rounds.mini_batches above 0"),
      (dict(evaluate__judge_command="x"), "command"),
  )
  def test_refuses_unread_settings(self, changes, readers):
    (problem,) = _problems(base_config.make(**changes))
    name, value = [*changes.items()][-1]
    key = f"config.{name.replace('__', '.')}"
    self.assertStartsWith(problem, f"{key} = {value!r}: must be ")
    self.assertRegex(problem, f"read with .*{re.escape(readers)}")

  @pytest.mark.slow
  def test_logged_data_have_what_loss_needs(self):
    # A log without a prompt of the task is refused, too.
    task = build_task.make_task(base_config.make().task)
    line = {"prompt": task.prompt("train", 0), "completion": "1", "reward": 1}
    path = self.create_tempfile(content=json.dumps(line)).full_path
    make = lambda **changes: base_config.make(offline__path=path, **changes)
    for name in ("tb", "gvpo", "online_dpo"):
      self.assertEqual(_problems(make(loss__name=name)), [])
    for changes in (
        dict(loss__name="rloo"),
        dict(loss__name="oapl"),
        dict(loss__name="tb", loss__ratio_clip=0.2),
        dict(loss__name="gvpo", loss__anchor="behavior"),
        dict(loss__name="tb", optimizer__sample_share_power=1.0),
    ):
      (problem,) = _problems(make(**changes))
      self.assertRegex(
          problem,
          "config.offline.path.*line 1: logprobs are missing:"
          f" config.loss.name = {changes['loss__name']!r}.*behavior policy's",
      )

  @pytest.mark.slow
  def test_only_task_s_rewards_of_log_are_weighted_or_judged_later(self):
    prompt = build_task.make_task(base_config.make().task).prompt("train", 0)
    plain = {"prompt": prompt, "completion": "1"}
    paths = [
        self.create_tempfile(content=json.dumps(line)).full_path
        for line in (plain, plain | {"reward": 1})
    ]
    make = lambda i, **own: base_config.make(offline__path=paths[i], **own)
    for i in range(2):
      own = dict(loss__reward_weight=0.5, offline__reward_field="")
      self.assertEqual(_problems(make(i, **own)), [])
    (problem,) = _problems(make(0))
    self.assertRegex(problem, "reward: must be a number.*reward_field = ''")
    for key, value in (
        ("loss__reward_weight", 0.5),
        ("reward__normalize_parts", True),
        ("loss__missing_stop", "replace"),
    ):
      told = f"config.{key.replace('__', '.')} = {value!r}: must be"
      self.assertIn(told, "".join(_problems(make(1, **{key: value}))))
    for key, value in (
        ("offline__reward_field", ""),
        ("reward__normalize_parts", True),
        ("loss__missing_stop", "add"),
    ):
      with_file = base_config.make(
          loss__baseline="file",
          loss__baseline_file=paths[1],
          **{key: value},
      )
      told = "".join(_problems(with_file))
      self.assertIn(f"config.{key.replace('__', '.')} = {value!r}", told)

  def test_loss_of_one_s_own_may_read_all_settings(self):
    own = (
        "def loss(groups, c, beta):"
        " return beta * groups.logprobs_BxKxT.sum(), {}"
    )
    loss = self.create_tempfile("own.py", own).full_path
    config = base_config.make(
        loss__name=f"{loss}:loss",
        loss__ties="first",
        loss__correction="truncate_token",
        loss__ratio_clip=0.2,
    )
    self.assertEqual(_problems(config), [])

  def test_other_hosts_need_secret(self):
    config = base_config.make(store__address="10.0.0.1:7-9")
    (line,) = _problems(config, program="searcher")
    self.assertRegex(line, "config.store.address = .*secret_file, TBA_JAX_SEC")
    with mock.patch.dict(os.environ, TBA_JAX_SECRET="5e" * 32):
      self.assertEqual(_problems(config, program="searcher"), [])

  @parameterized.parameters(
      ("reference.init", "train"),
      ("generate.model", "generate"),
      ("generate.input", "generate"),
  )
  def test_refuses_names_too_long_for_file(self, key, program):
    changes = {key.replace(".", "__"): "(" * 300}
    lines = _problems(base_config.make(**changes), program=program)
    self.assertLen([x for x in lines if x.startswith(f"config.{key} = ")], 1)

  def test_model_folder_determines_shape(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    hf = hf_config.to_hf(
        config_lib.ModelConfig.from_config(
            ml_collections.ConfigDict(
                {**settings.get_config().model, "max_positions": 512}
            ),
            40,
            pad_id=0,
            bos_id=None,
            eos_id=1,
        )
    )
    (folder / "config.json").write_text(json.dumps(hf))
    long = dict(init=str(folder), sampling__max_prompt_tokens=400)
    problems = lambda **changes: _problems(
        base_config.make(**changes), program="plan"
    )
    self.assertEqual(problems(**long), [])
    long |= dict(sampling__max_completion_tokens=113)
    (line,) = problems(**long)
    self.assertStartsWith(line, "config.sampling.max_completion_tokens = 113")
    # Sizes on the mesh are the folder's too: 64 wide, 4 heads.
    wide = dict(init=str(folder), mesh__tensor=16, model__num_heads=16)
    result = [line for line in problems(**wide) if "heads" in line]
    self.assertLen(result, 1)
    self.assertRegex(
        result[0],
        "config.mesh.tensor = 16: .* such as 1, 2, 4, because .*padded to 16",
    )
    hf["quantization_config"] = {"bits": 4}
    (folder / "config.json").write_text(json.dumps(hf))
    (line,) = _problems(base_config.make(init=str(folder)))
    self.assertRegex(line, "config.init = .*quantization_config")

  def test_hub_model_is_resolved_before_run(self):
    cache = hub_cache.make(self)
    (line,) = _problems(base_config.make(init="org/tiny"))
    self.assertStartsWith(line, "config.init = 'org/tiny': no such folder")
    self.assertIn("hf download org/tiny", line)
    # Params come to a searcher from the trainer; adapters need their base.
    folder = pathlib.Path(self.create_tempdir().full_path)
    shape, words = hf_case.make_config(), tokenizer.word_level(("a",), ".")
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    words.save(folder)
    snapshot = hub_cache.add(cache, "org/tiny", folder)
    for program, rank, result in (
        ("plan", 0, True), ("searcher", 0, True), ("export", 0, True),
        ("searcher", 4, False), ("trainer", 0, False),
    ):  # fmt: skip
      config = base_config.make(init="org/tiny", lora__rank=rank)
      self.assertEqual(
          _problems(config, program=program) == [], result, program
      )
    # Fine-tuning starts from another key.
    hf.save(snapshot, shape, hf_case.make_params(shape), words)
    config = base_config.make(init="org/tiny", sft__init="scratch")
    (line,) = _problems(config, program="sft")
    self.assertIn("--config.init=sft --config.sft.init=org/tiny", line)
    # Nothing is looked up of a section that the program does not read.
    config = base_config.make(init="scratch", sft__init="org/tiny")
    self.assertEqual(_problems(config), [])

  @parameterized.parameters("evaluate", "export", "reward_model")
  def test_model_keeps_shape_of_sft_start(self, program):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = hf_case.make_config(max_positions=4096)
    words = tokenizer.word_level(("a",), ".")
    hf.save(folder, config, hf_case.make_params(config), words)
    changes = dict(sft__init=str(folder), sampling__max_prompt_tokens=2000)
    problems = _problems(base_config.make(**changes), program=program)
    self.assertEqual(problems, [])

  @parameterized.parameters(
      ("evaluate.judge", {}),
      ("reward.model", dict(reward__backend="model")),
      ("loss.value_init", dict(loss__name="ppo", loss__ratio_clip=0.2)),
      # A setting that nothing reads.
      ("", dict(reward__model=...)),
  )
  def test_judge_needs_positions_for_completions(self, key, changes):
    words = tokenizer.word_level(("a",), ".")
    for positions, is_enough in ((39, False), (40, True)):
      folder = self.create_tempdir().full_path
      shape = hf_case.make_config(max_positions=positions)
      config = heads.config_of(shape)
      params = heads.ScalarModel(config).from_policy(hf_case.make_params(shape))
      hf.save(folder, config, params, words)
      own = {k: folder if v is ... else v for k, v in changes.items()}
      own |= {key.replace(".", "__"): folder} if key else {}
      lines = _problems(base_config.make(init="scratch", **own))
      if is_enough or not key:
        self.assertEqual(lines, [])
      else:
        (line,) = lines
        self.assertStartsWith(line, f"config.{key} = ")
        self.assertIn("a model of 40 positions or more", line)

  def _make_states_folder(self):
    folder = self.create_tempdir().full_path
    shape = next(s for s in hf_case.FAMILIES if "delta_layers" in s)
    config = hf_case.make_config(max_positions=40, **shape)
    words = tokenizer.word_level(("a",), ".")
    hf.save(folder, config, hf_case.make_params(config), words)
    return folder

  def test_states_refuse_stop_strings_of_environments(self):
    task = mock.Mock(can_demonstrate=True)
    values = {"init": self._make_states_folder(), "sampling.stop_strings": ""}
    find = lambda **others: [
        key for key, _ in environment_checks.fits({**values, **others}, task)
    ]
    self.assertEqual(find(), [])
    stop = {"sampling.stop_strings": "."}
    self.assertEqual(find(**stop), ["sampling.stop_strings"])
    self.assertEqual(find(**stop, init="scratch"), [])

  @parameterized.parameters("init", "reference__init")
  def test_states_refuse_split_sequences(self, key):
    folder = self._make_states_folder()
    make = lambda size: base_config.make(
        **{"init": "scratch", key: folder}, mesh__sequence=size
    )
    self.assertEqual(_problems(make(1)), [])
    line = next(x for x in _problems(make(2)) if "mesh.sequence" in x)
    self.assertIn(
        f"must be 1 for the model of config.{key.replace('__', '.')}", line
    )

  def test_reward_model_needs_positions_for_pairs(self):
    folder = self.create_tempdir().full_path
    shape, words = hf_case.make_config(max_positions=40), ("a",)
    hf.save(
        folder,
        shape,
        hf_case.make_params(shape),
        tokenizer.word_level(words, "."),
    )
    pairs = lambda size, **changes: base_config.make(
        sampling__max_completion_tokens=8,
        reward_model__max_completion_tokens=size,
        **changes,
    )
    trains = dict(reward__backend="model")
    for changes, most, program in (
        (dict(), 128 - 16, "reward_model"),
        (dict(sft__init=folder), 24, "reward_model"),
        (dict(reward_model__init=folder), 24, "reward_model"),
        (dict(reward_model__init=folder, **trains), 24, "train"),
        (trains, 128 - 16, "train"),
    ):
      self.assertEqual(_problems(pairs(most, **changes), program=program), [])
      (line,) = _problems(pairs(most + 1, **changes), program=program)
      self.assertStartsWith(line, "config.reward_model.max_completion_tokens =")
      self.assertIn(f"at most {most + 16}, the positions of", line)
    # Nothing trains one.
    self.assertEqual(_problems(pairs(500)), [])
    # It scores what is sampled.
    config = pairs(24, reward_model__init=folder, **trains)
    config.sampling.max_completion_tokens = 30
    (line,) = _problems(config)
    self.assertStartsWith(line, "config.reward_model.init = ")
    self.assertIn("a model of 46 positions or more", line)

  @parameterized.parameters(
      ("train", dict(reward_model__batch_size=3, mesh__data=2)),
      ("train", dict(init="scratch", sft__init="/nowhere")),
      ("sft", dict(optimizer__stable_steps=10_000)),
      ("sft", dict(train__micro_batch_prompts=99)),
      ("sft", dict(reward_model__relabel="/nowhere", search__lead_steps=0)),
      ("evaluate", dict(sft__init="/nowhere", mesh__data=3)),
      ("reward_model", dict(search__mesh__data=3)),
      ("sweep", dict(search__prompts_per_round=999, replay__capacity=1)),
      ("status", dict(init="/nowhere", task__name="gone")),
  )
  def test_unread_settings_are_unchecked(self, program, changes):
    config = base_config.make(**changes)
    if program == "status":
      del config.task["name"]
      config.task.name = "arithmetic"
    self.assertEqual(_problems(config, program=program), [])

  @parameterized.parameters(
      ("", True),
      ("127.0.0.1:0", True),
      ("localhost:0", True),
      ("[::1]:0", True),
      ("10.0.0.1:7000-7010", False),
      ("127.example.org:0", False),
  )
  def test_recognizes_loopback_addresses(self, address, expected):
    self.assertEqual(addresses.is_one_host(address), expected)

  def test_invalid_setting_does_not_break_other_checks(self):
    lines = _problems(base_config.make(mesh__data=0, publish__every_steps=0))
    self.assertLen(lines, 2)


class TaskTest(absltest.TestCase):

  def test_unknown_task_is_named_with_known_ones(self):
    config = base_config.make(task__name="count_down")
    config.task.numbers = 4
    (line,) = _problems(config)
    self.assertStartsWith(line, "config.task.name='count_down': must be")
    for name in build_task.TASKS:
      self.assertIn(name, line)

  def test_suggests_field_for_unknown_one(self):
    config = base_config.make(task__max_numbers=3)
    (line,) = _problems(config)
    self.assertIn("did you mean config.task.max_number?", line)

  def test_names_field_out_of_range_or_of_wrong_type(self):
    (line,) = _problems(base_config.make(task__max_number=-1))
    self.assertStartsWith(line, "config.task.max_number=-1: must be")
    (line,) = _problems(base_config.make(task__max_number="9"))
    self.assertIn("a whole number", line)

  def test_texts_of_task_fit(self):
    config = base_config.make(
        task__name="countdown",
        sampling__max_prompt_tokens=8,
        sampling__max_completion_tokens=17,
    )
    lines = _problems(config)
    self.assertStartsWith(
        lines[0], "config.sampling.max_prompt_tokens = 8: must be 9 or more"
    )
    self.assertStartsWith(
        lines[1], "config.sampling.max_completion_tokens = 17: must be 18"
    )

  def test_task_without_training_prompts_is_for_evaluation(self):
    no_prompts = lambda task, split: 0 if split == "train" else 8
    with mock.patch.object(arithmetic.Arithmetic, "num_prompts", no_prompts):
      for program in ("train", "plan", "searcher", "sft"):
        (line,) = _problems(base_config.make(), program=program)
        self.assertStartsWith(line, "config.task.name = 'arithmetic': needs")
        self.assertIn("--program=evaluate", line)
      self.assertEqual(_problems(base_config.make(), program="evaluate"), [])

  def test_overlong_rows_are_dropped(self):
    path = self.create_tempfile(content='{"instruction": "Sing a long song."}')
    fields = dict(name="red_team", instructions=path.full_path)
    config = base_config.make(sampling__max_completion_tokens=2)
    config.task = ml_collections.ConfigDict(fields)
    self.assertEqual(
        [p for p in _problems(config) if "max_completion_tokens" in p], []
    )
    config.task.instructions = "synthetic"
    self.assertStartsWith(
        _problems(config)[0], "config.sampling.max_completion_tokens = 2:"
    )

  def test_fluency_filter_needs_searcher_s_reference(self):
    config = base_config.make(loss__beta=0.1)
    config.task = ml_collections.ConfigDict(dict(name="red_team", min_k=7))
    config.reward.backend = "process"
    refused = [p for p in _problems(config) if "min_k" in p]
    self.assertLen(refused, 1)
    self.assertStartsWith(
        refused[0], "config.reference.role = 'trainer': must be 'searcher'"
    )
    config.reference.role = "searcher"
    self.assertEqual([p for p in _problems(config) if "min_k" in p], [])

  def test_nothing_is_evaluated_without_held_out_prompts(self):
    file = self.create_tempfile(content='{"prompt": "x", "answer": "y"}\n')
    config = base_config.make(checkpoint__keep_best=True)
    fields = dict(name="custom", train=file.full_path, held_out=0)
    config.task = ml_collections.ConfigDict(fields)
    (line,) = _problems(config)
    self.assertStartsWith(line, "config.checkpoint.keep_best = True:")
    config.checkpoint.keep_best = False
    self.assertEqual(_problems(config), [])
    (line,) = _problems(config, program="evaluate")
    self.assertStartsWith(line, "config.task.name = 'custom':")


class ResumeTest(parameterized.TestCase):

  def _saved(self, config):
    return json.loads(json.dumps(config.to_dict()))

  def test_same_config_resumes(self):
    config = base_config.make()
    differences.check_resume(self._saved(config), config)

  def test_how_run_is_watched_may_change(self):
    old = self._saved(base_config.make())
    new = base_config.make(
        log__every_steps=7,
        search__num_searchers=3,
        guards__action="off",
        mesh__fsdp=2,
        train__wall_clock_limit_s=9.0,
    )
    differences.check_resume(old, new)

  def test_setting_of_saved_state_cannot_change(self):
    old = self._saved(base_config.make())
    new = base_config.make(loss__name="rloo", model__width=128, loss__beta=0.1)
    with self.assertRaises(validate.ConfigError) as caught:
      differences.check_resume(old, new)
    lines = str(caught.exception).splitlines()
    self.assertLen(lines, 2)
    self.assertStartsWith(
        lines[1], "config.model.width = 128: the run was started with 64"
    )
    self.assertIn("params in the checkpoint have this shape", lines[1])
    self.assertIn("another --workdir", lines[1])

  @parameterized.parameters(
      ("sampling__temperature", 0.7, "reference__role", "searcher", "trainer"),
      ("loss__correction", "decoupled", "", "", ""),
      ("loss__correction", "truncate_token", "", "", None),
      ("search__lead_steps", 2, "search__lockstep", True, False),
      ("train__prompts_per_batch", 16, "rounds__mini_batches", 2, 0),
      ("search__samples_per_prompt", 16, "replay__warm_start_completions", 64,
       0),
      ("reward__backend", "model", "", "", ""),
      ("reward__backend", "pool", "", "", None),
  )  # fmt: skip
  def test_setting_is_fixed_only_if_state_depends_on_it(
      self, key, value, other, fixed, free
  ):
    both = {other: fixed} if other else {}
    old, new = base_config.make(**both), base_config.make(
        **both, **{key: value}
    )
    if free is not None:
      with self.assertRaisesRegex(ValueError, key.replace("__", ".")):
        differences.check_resume(self._saved(old), new)
    if other or free is None:
      both = {other: free} if other else {}
      old = self._saved(base_config.make(**both))
      new = base_config.make(**both, **{key: value})
      self.assertNotEmpty(differences.check_resume(old, new))

  def test_change_names_old_and_new_value(self):
    old = self._saved(base_config.make())
    new = base_config.make(loss__beta="0.1:0.01:50", train__num_steps=50)
    self.assertEqual(
        differences.check_resume(old, new),
        {
            "loss.beta": (0.05, "0.1:0.01:50"),
            "train.num_steps": (old["train"]["num_steps"], 50),
        },
    )
    back = differences.check_resume(self._saved(new), base_config.make())
    self.assertEqual(back["loss.beta"], ("0.1:0.01:50", 0.05))

  def test_missing_key_of_other_version_means_default(self):
    old = self._saved(base_config.make())
    del old["loss"]["ratio_clip"]
    self.assertEmpty(differences.check_resume(old, base_config.make()))
    changed = differences.check_resume(
        old, base_config.make(loss__ratio_clip=0.2)
    )
    self.assertEqual(changed, {"loss.ratio_clip": (0.0, 0.2)})

  def test_removed_key_asks_for_new_workdir(self):
    old = self._saved(base_config.make())
    old["sft"]["b1"] = 0.9
    with self.assertRaisesRegex(ValueError, "config.sft.b1 .* 0.9") as caught:
      differences.check_resume(old, base_config.make())
    self.assertEndsWith(str(caught.exception), "; give another --workdir")

  def test_omitted_task_field_means_default(self):
    old = self._saved(base_config.make())
    old["task"] = {"name": "gsm8k"}
    fields = {**build_task.fields("gsm8k"), "name": "gsm8k"}
    new = {**old, "task": fields}
    differences.check_resume(old, new)
    fields["train"] = "elsewhere"
    with self.assertRaisesRegex(ValueError, "task.train = 'elsewhere'"):
      differences.check_resume(old, new)


class PrecisionTest(parameterized.TestCase):

  @parameterized.product(
      program=(
          "train", "trainer", "one_process", "plan", "sft", "reward_model",
      ),
      rank=(0, 4),
  )  # fmt: skip
  def test_only_frozen_params_are_bfloat16(self, program, rank):
    config = base_config.make(
        model__param_dtype="bfloat16",
        lora__rank=rank,
        optimizer__learning_rate=1e-3,
    )
    refused = ""
    try:
      validate.validate(config, program=program)
    except ValueError as error:
      refused = str(error)
    self.assertEqual(
        rank == 0,
        "config.model.param_dtype = 'bfloat16': must be 'float32' with"
        " config.lora.rank = 0" in refused,
        refused,
    )

  def test_learned_z_is_of_one_prompt(self):
    lines = _problems(base_config.make(loss__name="tb_learned_z"))
    self.assertTrue(any("config.loss.name" in line for line in lines), lines)

  def test_accepts_loss_of_user_s_own(self):
    path = self.create_tempfile(
        "own.py",
        "def loss(g, c, beta): return g.logprobs_BxKxT.sum(), {}\n",
    )
    name = f"{path.full_path}:loss"
    self.assertEqual(_problems(base_config.make(loss__name=name)), [])
    for wrong in (f"{name}es", "/nowhere/own.py:loss"):
      (line,) = _problems(base_config.make(loss__name=wrong))
      self.assertIn("config.loss.name", line)
