# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings left open follow the model, the data and the machine."""

import contextlib
import copy
import dataclasses
import io
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import ml_collections
import pytest

from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.mesh import sharding
from tba_jax.models import checks
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_names
from tba_jax.models.net import transformer
from tba_jax.programs import defaults
from tba_jax.programs import settle
from tba_jax.system import accelerators
from tba_jax.tools import memory_model
from tba_jax.tools import plan
from tests.models import tokenizer_test
from tests.models.hf import hf_config_test

_SHAPES = json.loads(
    (
        pathlib.Path(__file__).parents[1] / "models" / "published_configs.json"
    ).read_text()
)
_CPU = defaults.Machine(hardware.Hardware("cpu", 24, 1), "a CPU")


def _model(name="Qwen/Qwen3-0.6B", *, is_chat=True, thinks=False, **changes):
  shape = dataclasses.replace(hf_config.from_hf(_SHAPES[name]), **changes)
  return defaults.ModelFacts(name, shape, is_chat, thinks)


def _is_ours(name):
  try:
    hf_config.from_hf(_SHAPES[name])
  except ValueError:
    return False
  return True


class OpenTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()

  def is_open(self, key):
    return key in settings.open_keys(self.config)

  def test_auto_value_is_number(self):
    key = "optimizer.learning_rate"
    self.assertEqual(self.config.optimizer.learning_rate, 1e-4)
    self.assertTrue(self.is_open(key))
    self.config.optimizer.learning_rate = 1e-4
    self.assertFalse(self.is_open(key))
    self.config.optimizer.learning_rate = settings.AUTO
    self.assertTrue(self.is_open(key))
    self.assertEqual(self.config.optimizer.learning_rate, 1e-4)

  def test_auto_settings_are_open_but_not_in_copy(self):
    marked = [key for key, s in settings.SETTINGS.items() if s.auto]
    self.assertEqual(settings.open_keys(self.config), marked)
    self.assertIn("mesh.fsdp", marked)
    copy = self.config.copy_and_resolve_references()
    self.assertEqual(settings.open_keys(copy), [])

  def test_deep_copy_keeps_set_keys(self):
    self.config.optimizer.learning_rate = 3e-4
    other = copy.deepcopy(self.config)
    self.assertEqual(load.flatten(other), load.flatten(self.config))
    self.assertEqual(settings.open_keys(other), settings.open_keys(self.config))
    other.sampling.num_slots = 3
    self.assertEqual(self.config.sampling.num_slots, 256)
    self.assertTrue(self.is_open("sampling.num_slots"))

  def test_overrides_set_and_open(self):
    config = self.config
    load.apply_overrides(config, ["sampling.num_slots=256"])
    self.assertFalse(self.is_open("sampling.num_slots"))
    load.apply_overrides(config, ["sampling.num_slots=auto"])
    self.assertTrue(self.is_open("sampling.num_slots"))
    with self.assertRaisesRegex(load.ConfigError, "loss.moment_cap = 'auto'"):
      load.apply_overrides(config, ["loss.moment_cap=auto"])

  def test_values_of_another_type_are_refused(self):
    with self.assertRaises(TypeError):
      self.config.sampling.num_slots = "many"


class RulesTest(parameterized.TestCase):

  @parameterized.parameters(
      # The longest is left out; it is near; what the model reads.
      ([10] * 95 + [40] * 5, 16),
      ([40] * 95 + [49] * 5, 64),
      ([100] * 10, 112),
      ([5000] * 10, 3072),
  )
  def test_prompt_length_covers_most_prompts(self, lengths, expected):
    model = _model(max_positions=4096)
    data = defaults.DataFacts(len(lengths), lengths)
    value, why = defaults.max_prompt_tokens(model, data)
    self.assertEqual(value, expected)
    self.assertIn(f"the longest {max(lengths)}", why)

  @parameterized.parameters(
      (dict(is_chat=False), [], 128),
      (dict(is_chat=True), [3] * 9, 256),
      (dict(is_chat=True, thinks=True), [3] * 9, 1024),
      (dict(is_chat=True), [400] * 9, 416),
      (dict(is_chat=True, max_positions=300), [400] * 9, 200),
  )
  def test_completions_have_room_by_kind_of_model(self, kind, answers, tokens):
    data = defaults.DataFacts(9, [1], answers)
    value, _ = defaults.max_completion_tokens(_model(**kind), data, 100)
    self.assertEqual(value, tokens)

  @parameterized.parameters(
      ("Qwen/Qwen3-8B", 0, 1e-6),
      ("Qwen/Qwen3-8B", 16, 1e-5),
      ("Qwen/Qwen3-0.6B", 0, 9.7e-6),
      ("HuggingFaceTB/SmolLM2-135M", 0, 2.5e-5),
  )
  def test_rate_falls_with_width_and_rises_tenfold_for_lora(
      self, name, rank, rate
  ):
    self.assertAlmostEqual(
        defaults.learning_rate(_model(name), rank)[0], rate, delta=1e-9
    )

  @parameterized.parameters(
      # Name, hardware, tokens -> remat, prompts, completions at a time.
      ("Qwen/Qwen3-0.6B", "1xh100", 352, ("dots", 4, 0)),
      ("Qwen/Qwen3-0.6B", "1xh100", 4096, ("full", 4, 0)),
      ("Qwen/Qwen3-0.6B", "v5p-8", 352, ("dots", 4, 0)),
      ("Qwen/Qwen2.5-1.5B", "1xh100", 4096, ("full", 1, 1)),
      ("Qwen/Qwen3-8B", "v5e-16", 352, ("full", 1, 1)),
  )
  def test_micro_batch_fits_in_remaining_memory(
      self, name, where, length, sizes
  ):
    config = settings.get_config()
    config.sampling.update(max_prompt_tokens=96, max_completion_tokens=length)
    here = dataclasses.replace(hardware.HARDWARE[where], devices=1)
    machine = defaults.Machine(here, where)
    *result, _ = defaults.micro_batch(config, _model(name), machine)
    self.assertEqual(tuple(result), sizes)

  def test_micro_batch_has_prompt_for_each_shard(self):
    config = settings.get_config()
    config.sampling.update(max_prompt_tokens=96, max_completion_tokens=256)
    config.mesh.update(data=2, fsdp=4)
    machine = defaults.hardware_machine("8xh100")
    _, prompts, _, _ = defaults.micro_batch(
        config, _model("Qwen/Qwen3-8B"), machine
    )
    self.assertEqual(prompts % 8, 0)
    self.assertEqual(config.train.prompts_per_batch % prompts, 0)

  def test_slots_cover_round_or_memory(self):
    config = settings.get_config()
    config.sampling.update(max_prompt_tokens=96, max_completion_tokens=256)
    slots = lambda: defaults.num_slots(
        config, _model(), defaults.hardware_machine("1xh100")
    )[0]
    self.assertEqual(slots(), 256)
    config.sampling.max_completion_tokens = 4000
    few = slots()
    self.assertBetween(few, 8, 100)
    self.assertEqual(few % config.search.samples_per_prompt, 0)

  def test_steps_on_cpu_are_small(self):
    self.assertEqual(defaults.prompts_per_batch(_CPU, 32)[0], 4)
    gpu = defaults.hardware_machine("1xh100")
    self.assertEqual(defaults.prompts_per_batch(gpu, 32)[0], 32)


class SizesTest(parameterized.TestCase):

  @parameterized.parameters(*filter(_is_ours, _SHAPES))
  def test_number_of_params(self, name):
    shape = hf_config.from_hf(_SHAPES[name])
    model = transformer.make_model(shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    self.assertEqual(
        hf_names.num_params(shape),
        sum(x.size for x in jax.tree.leaves(params)),
    )

  @parameterized.product(
      remat=["dots", "full"],
      name=[
          "Qwen/Qwen3-0.6B",
          "Qwen/Qwen2.5-7B",
          "Qwen/Qwen3-30B-A3B",
          "Qwen/Qwen3-Next-80B-A3B-Instruct",
          "google/gemma-4-E2B",
          "google/gemma-4-26B-A4B",
      ],
  )
  @pytest.mark.slow
  def test_activations_are_at_least_those_saved(self, remat, name):
    config = settings.get_config()
    config.reference.role = "none"
    config.loss.name = "grpo"
    config.sampling.update(max_prompt_tokens=64, max_completion_tokens=192)
    config.train.prompts_per_batch, config.train.remat = 8, remat
    folder = pathlib.Path(self.create_tempdir().full_path)
    config.init = str(folder)
    mesh = sharding.abstract_mesh(config.mesh, "gpu")
    shape = {
        **_SHAPES,
        "google/gemma-4-E2B": hf_config_test.GEMMA4,
        "google/gemma-4-26B-A4B": hf_config_test.GEMMA4_26B,
    }[name]
    (folder / "config.json").write_text(json.dumps(shape))
    saved = []
    for prompts in (2, 4):
      config.train.micro_batch_prompts = prompts
      parts = memory_model.trainer(config, mesh).step
      saved.append(parts["activations kept for them, at least"])
    # What does not grow with the batch has memory of its own.
    token = (saved[1] - saved[0]) / (2 * 8 * 256)
    ours = defaults.activation_bytes(hf_config.read(folder), remat, 2)
    self.assertBetween(ours / token, 1.0, 2.0)


class ProposeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.config = settings.get_config()
    self.config.init = str(self.folder)

  def use(self, name):
    shapes = {**_SHAPES, "Qwen3.5-35B-A3B": hf_config_test.QWEN3_5_MOE}
    (self.folder / "config.json").write_text(json.dumps(shapes[name]))

  def test_known_models_have_size_of_their_shape(self):
    for name, (billions, most) in hardware.MODELS.items():
      if name in _SHAPES:
        self.use(name)
        result = hardware.size_of(self.config)
        self.assertAlmostEqual(result[0], billions, delta=0.006, msg=name)
        self.assertEqual(result[1], most, name)

  @parameterized.parameters(
      ("Qwen/Qwen3-0.6B", "8xh100", dict(fsdp=2, searchers=6, tensor=1)),
      ("Qwen/Qwen3-8B", "8xh100", dict(fsdp=4, searchers=4, tensor=1)),
      ("Qwen/Qwen3-0.6B", "v5e-16", dict(fsdp=16, searchers=1, tensor=1)),
  )
  def test_any_model_gets_mesh(self, name, where, sizes):
    self.use(name)
    result = hardware.propose(self.config, hardware.HARDWARE[where])
    self.assertEqual(set(result), set(hardware.MESH_KEYS))
    self.assertEqual(result["mesh.fsdp"], sizes["fsdp"])
    self.assertEqual(result["search.num_searchers"], sizes["searchers"])
    self.assertEqual(result["search.mesh.tensor"], sizes["tensor"])
    self.assertEqual(self.config.mesh.fsdp, 1)  # Proposed alone.

  @parameterized.parameters(
      # A searcher's 277 GB fit on four devices, but only tightly.
      ("Qwen3.5-35B-A3B", "8xh100", dict(fsdp=4, searchers=1, devices=4)),
      # The trainer needs two devices and takes those left over.
      ("Qwen3.5-35B-A3B", "8xh200", dict(fsdp=4, searchers=1, devices=4)),
      # 66 GB would leave one device's cache no room.
      ("Qwen/Qwen3-8B", "8xh100", dict(fsdp=2, searchers=3, devices=2)),
  )
  def test_adapters_get_mesh(self, name, where, sizes):
    self.use(name)
    self.config.lora.rank = 16
    self.config.model.param_dtype = "bfloat16"
    result = hardware.propose(self.config, hardware.HARDWARE[where])
    self.assertEqual(result["mesh.fsdp"], sizes["fsdp"])
    self.assertEqual(result["search.num_searchers"], sizes["searchers"])
    devices = result["search.mesh.fsdp"] * result["search.mesh.tensor"]
    self.assertEqual(devices, sizes["devices"])

  def test_searchers_with_vllm_have_one_device(self):
    self.use("Qwen/Qwen3-30B-A3B")
    self.config.search.sampler = "vllm"
    self.config.lora.update(rank=16, targets="q,k,v,o")
    self.config.model.param_dtype = "bfloat16"
    result = hardware.propose(self.config, hardware.HARDWARE["8xh100"])
    self.assertEqual(result["mesh.fsdp"], 4)
    # A server's 61 GB take two of the other devices.
    self.assertEqual(result["search.num_searchers"], 2)
    self.assertEqual({result[key] for key in hardware.SEARCHER_MESH}, {1})
    self.config.lora.targets = "all"  # Experts' adapters are merged.
    with self.assertRaisesRegex(ValueError, "a searcher's 183 GB"):
      hardware.propose(self.config, hardware.HARDWARE["8xh100"])

  def test_evaluation_fits_on_one_host(self):
    self.use("openai/gpt-oss-20b")
    with self.assertRaisesRegex(ValueError, "an evaluation needs 27 GB"):
      hardware.propose(self.config, hardware.HARDWARE["v5e-64"])

  def test_error_suggests_fitting_hardware(self):
    self.use("Qwen/Qwen3-8B")
    with self.assertRaisesRegex(
        ValueError, "v6e-8: .*fits 8xh100, 8xh200, v5p"
    ):
      hardware.propose_or_name(self.config, "v6e-8")

  def test_plan_takes_names_of_hardware(self):
    self.use("Qwen/Qwen3-0.6B")
    sections = dict(plan.plan(self.config, None, ["8xh100"]))
    proposal = dict(sections["proposed for 8xh100"])
    self.assertIn("--config.mesh.fsdp=2", proposal["settings of the trainer"])
    self.assertStartsWith(dict(sections["devices"])["trainer"], "2: ")
    fits = dict(sections["memory of a trainer device"])["fits"]
    self.assertStartsWith(fits, "yes")


class ChooseTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    shape = _SHAPES["HuggingFaceTB/SmolLM2-135M"]
    (self.folder / "config.json").write_text(json.dumps(shape))
    fast = tokenizer_test._byte_level(bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(self.folder)
    row = lambda i: {"prompt": "x" * 30 + f"{i:02}", "answer": "y" * 300}
    rows = "".join(json.dumps(row(i)) + "\n" for i in range(20))
    (self.folder / "rows.jsonl").write_text(rows)
    self.config = settings.get_config()
    self.config.init = str(self.folder)
    self.config.task = ml_collections.ConfigDict(
        dict(name="custom", train=f"{self.folder}/rows.jsonl")
    )

  def test_chooses_open_settings_and_keeps_set_ones(self):
    config = self.config
    config.optimizer.learning_rate = 3e-4
    config.evaluate.num_prompts = 256
    before = load.flatten(config.copy_and_resolve_references())
    choices = defaults.choose(config, _CPU)
    after = load.flatten(config)
    changed = {key for key in after if after[key] != before[key]}
    self.assertLessEqual(changed, {choice.key for choice in choices})
    self.assertEqual(config.sampling.max_prompt_tokens, 32)
    self.assertEqual(config.sampling.max_completion_tokens, 304)
    self.assertEqual(config.optimizer.learning_rate, 3e-4)
    self.assertEqual(config.optimizer.learning_rate_final, 3e-4)
    self.assertEqual(config.train.prompts_per_batch, 4)
    self.assertEqual(config.evaluate.num_prompts, 256)
    self.assertEqual(config.evaluate.every_steps, 8)
    self.assertEqual(config.log.samples_every_steps, 8)
    # Two completions each, in the 32 slots of a searcher.
    self.assertEqual(config.evaluate.batch_prompts, 16)
    for choice in choices:
      self.assertEqual(after[choice.key], choice.value)
      self.assertNotEmpty(choice.why)
    self.assertEqual(defaults.choose(config, _CPU), [])

  def test_fine_tuning_of_pretrained_model_gets_defaults(self):
    config = self.config
    config.init, config.sft.init = "sft", config.init
    config.sft.batch_size = 8
    defaults.choose(config, _CPU)
    self.assertAlmostEqual(config.sft.learning_rate, 2.5e-4, delta=1e-9)
    # Three passes over 18 prompts.
    self.assertEqual(config.sft.num_steps, 7)
    self.assertEqual(config.sft.warmup_steps, 0)
    self.assertEqual(8 % config.sft.micro_batch_size, 0)

  @parameterized.parameters("scratch", "sft", "no/such-folder")
  def test_nothing_changes_without_pretrained_model(self, init):
    self.config.init = init
    before = load.flatten(self.config.copy_and_resolve_references())
    self.assertEqual(defaults.choose(self.config, _CPU), [])
    self.assertEqual(load.flatten(self.config), before)

  def test_resumed_run_keeps_chosen_values(self):
    first = self.config.copy_and_resolve_references()
    defaults.choose(self.config, _CPU)
    saved = load.flatten(self.config.copy_and_resolve_references())
    again = settings.get_config()
    again.init, again.task = first.init, first.task
    again.optimizer.learning_rate = 1e-5
    gpu = defaults.hardware_machine("8xh100")
    choices = defaults.choose(again, gpu, saved)
    expected = {**saved, "optimizer.learning_rate": 1e-5}
    self.assertEqual(load.flatten(again), expected)
    (line,) = defaults.lines(again, choices, gpu)
    self.assertIn("as when the run began", line)

  def test_another_mesh_keeps_nothing_of_one_before(self):
    saved = {"mesh.data": 2, "mesh.tensor": 2, "trainer.num_processes": 2}
    self.config.mesh.data = 4
    defaults.choose(self.config, _CPU, saved)
    self.assertEqual(self.config.mesh.tensor, 1)
    self.assertEqual(self.config.trainer.num_processes, 1)

  def test_wrong_data_is_left_to_validation(self):
    self.config.task.train = "nowhere.jsonl"
    defaults.choose(self.config, _CPU)
    self.assertEqual(self.config.sampling.max_prompt_tokens, 1024)

  def test_prompts_of_environment_are_played(self):
    source = self.folder / "environment.py"
    source.write_text(
        "class Echo:\n"
        "  def reset(self, seed):\n    return 'x' * (20 + seed)\n"
        "  def step(self, text):\n    return '', 1.0, True, {}\n"
    )
    self.config.task = ml_collections.ConfigDict(
        dict(name="environment", source=f"{source}:Echo")
    )
    choices = defaults.choose(self.config, _CPU)
    # Twice the 34 tokens of the eighth even seed, in multiples of 16.
    self.assertEqual(self.config.sampling.max_prompt_tokens, 80)
    (why,) = [c.why for c in choices if c.key == "sampling.max_prompt_tokens"]
    self.assertEqual(why, "twice the longest of 8 first observations")

  def test_hosts_play_no_environment(self):
    self.config.task = ml_collections.ConfigDict(
        dict(name="environment", source=f"{self.folder}/none.py:Echo")
    )
    with mock.patch.object(defaults.episode_pool, "make") as play:
      defaults.choose(self.config, defaults.cluster_machine())
    play.assert_not_called()
    self.assertEqual(self.config.sampling.max_prompt_tokens, 1024)

  def test_failing_environment_is_left_to_validation(self):
    self.config.task = ml_collections.ConfigDict(
        dict(name="environment", source="nowhere.py:Echo")
    )
    defaults.choose(self.config, _CPU)
    self.assertEqual(self.config.sampling.max_prompt_tokens, 1024)

  def test_hosts_choose_same_defaults(self):
    result = []
    for devices in (("gpu", 80, 8, "eight"), ("cpu", 4, 1, "a CPU")):
      config = settings.get_config()
      config.init, config.task = self.config.init, self.config.task
      with mock.patch.object(accelerators, "memory", return_value=devices):
        config = settle.settle(config, None, "searcher")
      result.append(load.flatten(config))
    self.assertEqual(*result)
    self.assertEqual(result[0]["mesh.fsdp"], 1)

  def test_machine_with_several_devices_gets_mesh(self):
    devices = "gpu", 80, 8, "eight GPUs"
    with (
        mock.patch.object(accelerators, "memory", return_value=devices),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
      config = settle.settle(self.config, None, "train")
    self.assertEqual(config.mesh.fsdp, 2)
    self.assertEqual(config.search.num_searchers, 6)
    # The caller's is as it was.
    self.assertEqual(self.config.mesh.fsdp, 1)
    self.assertIn("mesh.fsdp", settings.open_keys(self.config))
    self.assertIn("mesh.fsdp = 2", out.getvalue())
    self.assertIn("proposed for eight GPUs", out.getvalue())
    # What no rule knows is said, too.
    self.assertIn("train.num_steps = 320", out.getvalue())

  def test_mesh_in_part_set_is_users(self):
    self.config.mesh.data = 1
    with mock.patch.object(
        accelerators, "memory", return_value=("gpu", 80, 8, "")
    ):
      config = settle.settle(self.config, None, "train")
    self.assertEqual(config.mesh.fsdp, 1)
    self.assertEqual(config.search.num_searchers, 1)

  def test_config_with_chosen_values_is_valid(self):
    defaults.choose(self.config, _CPU)
    with mock.patch.object(checks, "check_folder", autospec=True):
      validate.validate(self.config)
