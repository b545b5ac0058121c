# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face in and out, without torch."""

import json
import math
import pathlib
from unittest import mock

from absl import logging
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_names
from tba_jax.models.net import transformer
from tests.models import hf_case

_config, _params = hf_case.make_config, hf_case.make_params


class HfNamesTest(parameterized.TestCase):

  @parameterized.parameters(dict(tie_embeddings=True), *hf_case.FAMILIES)
  def test_rows_cover_the_params_exactly(self, **settings):
    config = _config(**settings)
    shapes = jax.eval_shape(
        transformer.make_model(config).init, jax.random.key(0)
    )
    found = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    named = {
        row.path: row.stack(config.num_layers) + row.shape
        for row in hf_names.rows(config)
    }
    self.assertEqual(named, found)

  def test_file_shapes_hold_the_same_elements(self):
    for row in hf_names.rows(_config()):
      self.assertEqual(math.prod(row.shape), math.prod(row.hf_shape), row)

  def test_axes_are_those_of_the_model(self):
    for settings in hf_case.FAMILIES:
      config = _config(**settings)
      node = transformer.make_model(config).logical_axes
      for row in hf_names.rows(config):
        axes = node
        for key in row.path:
          axes = axes[key]
        self.assertEqual(axes, row.stacked_axes + row.axes, row.path)


class RoundTripTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "a" / "model"

  @parameterized.parameters("", "language_model.")
  def test_keys_of_shared_layers_are_not_read(self, prefix):
    config = _config(**hf_case.GEMMA4)
    params = _params(config)
    hf.save(self.folder, config, params)
    path = self.folder / "model.safetensors"
    tensors = {
        name.replace("model.", f"model.{prefix}", 1): tensor
        for name, tensor in safetensors.numpy.load_file(path).items()
    }
    # Published folders have them.
    for name in ("k_proj", "v_proj", "k_norm"):
      unread = f"model.{prefix}layers.3.self_attn.{name}.weight"
      tensors[unread] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, path)
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)
    tensors[f"model.{prefix}layers.2.self_attn.k_proj.bias"] = np.ones(3)
    safetensors.numpy.save_file(tensors, path)
    with self.assertRaisesRegex(ValueError, "unused tensor .*layers.2"):
      hf.load(self.folder)

  @parameterized.parameters("language_model.model.", "model.language_model.")
  def test_reads_the_language_model_of_a_multimodal_one(self, prefix):
    config = _config(**hf_case.FAMILIES[0])
    params = _params(config)
    hf.save(self.folder, config, params)
    text = json.loads((self.folder / "config.json").read_text())
    stops = text.pop("eos_token_id")
    settings = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": stops,
        "image_token_index": 30,
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 16},
    }
    (self.folder / "config.json").write_text(json.dumps(settings))
    path = self.folder / "model.safetensors"
    tensors = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in safetensors.numpy.load_file(path).items()
    }
    tensors["vision_tower.post_layernorm.weight"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, path)
    loaded_config, loaded = hf.load(self.folder)
    self.assertEqual(loaded_config, config)
    chex.assert_trees_all_equal(loaded, params)

    tensors["novelty.weight"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, path)
    with self.assertRaisesRegex(ValueError, "unused tensor novelty.weight"):
      hf.load(self.folder)
    settings["architectures"] = ["Gemma3ForSequenceClassification"]
    (self.folder / "config.json").write_text(json.dumps(settings))
    with self.assertRaisesRegex(ValueError, "architectures.*not supported"):
      hf.load(self.folder)

  def test_reads_the_head_of_a_multimodal_model(self):
    config = _config(family="ministral3", query_growth=0.5)
    params = _params(config)
    hf.save(self.folder, config, params)
    path = self.folder / "config.json"
    text = json.loads(path.read_text())
    settings = {"model_type": "mistral3", "text_config": text}
    path.write_text(json.dumps(settings))
    path = self.folder / "model.safetensors"
    saved = safetensors.numpy.load_file(path)
    tensors = {f"language_model.{name}": x for name, x in saved.items()}
    safetensors.numpy.save_file(tensors, path)
    loaded_config, loaded = hf.load(self.folder)
    self.assertEqual(loaded_config, config)
    chex.assert_trees_all_equal(loaded, params)

  @parameterized.parameters(
      dict(tie_embeddings=True),
      dict(param_dtype="bfloat16", compute_dtype="bfloat16"),
      *hf_case.FAMILIES,
  )
  def test_is_bit_exact(self, **settings):
    config = _config(**settings)
    params = _params(config)
    hf.save(self.folder, config, params)
    loaded_config, loaded = hf.load(self.folder)
    self.assertEqual(loaded_config, config)
    chex.assert_trees_all_equal(loaded, params)
    chex.assert_trees_all_equal_dtypes(loaded, params)

  @parameterized.parameters("qwen3_5_moe_text", "qwen3_next", "qwen3_moe")
  def test_reads_experts_stacked_in_a_tensor(self, family):
    """As Qwen3.5-MoE is published; multi-token prediction is not read."""
    settings = next(s for s in hf_case.FAMILIES if s["family"] == family)
    config = _config(**settings)
    params = _params(config)
    hf.save(self.folder, config, params)
    path = self.folder / hf.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    for layer in config.expert_layers:
      experts = f"model.layers.{layer}.mlp.experts"
      stack = lambda name, experts=experts: np.stack(
          [
              tensors.pop(f"{experts}.{i}.{name}_proj.weight")
              for i in range(config.num_experts)
          ]
      )
      pair = np.concatenate([stack("gate"), stack("up")], axis=1)
      tensors[f"{experts}.gate_up_proj"] = pair
      tensors[f"{experts}.down_proj"] = stack("down")
    has_others = family != "qwen3_moe"
    if has_others:
      tensors["mtp.layers.0.mlp.gate.weight"] = np.ones((4, 8), np.float32)
    safetensors.numpy.save_file(tensors, path)
    with self.assertLogs(level="INFO") as logs:
      logging.info("a line")
      chex.assert_trees_all_equal(hf.load(self.folder)[1], params)
    named = [x for x in logs.output if "1 tensors are not read: mtp." in x]
    self.assertLen(named, has_others)

  def test_a_stack_saved_without_its_head_loads(self):
    # GPT-2's own files leave "transformer." out of all names.
    config = _config(tie_embeddings=True, **hf_case.FAMILIES[-1])
    params = _params(config)
    hf.save(self.folder, config, params)
    path = self.folder / hf.WEIGHTS
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in safetensors.numpy.load_file(path).items()
    }
    self.assertIn("wte.weight", tensors)
    # They also hold the causal mask of each layer.
    tensors["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    safetensors.numpy.save_file(tensors, path)
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)

  def test_dtype_is_applied(self):
    hf.save(self.folder, _config(), _params(_config()))
    config, params = hf.load(self.folder, dtype="bfloat16")
    self.assertEqual(config.param_dtype, "bfloat16")
    for leaf in jax.tree.leaves(params):
      self.assertEqual(leaf.dtype, jnp.bfloat16)

  def test_places_leaves_by_shardings(self):
    config = _config()
    hf.save(self.folder, config, _params(config))
    mesh = sharding.make_mesh(
        {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1}, jax.devices()[:1]
    )
    shardings = sharding.param_shardings(mesh, transformer.make_model(config))
    _, params = hf.load(self.folder, shardings=shardings)
    jax.tree.map(
        lambda x, s: self.assertEqual(x.sharding, s), params, shardings
    )

  def test_large_models_are_cut_into_files_with_an_index(self):
    config, params = _config(), _params(_config())
    whole = self.folder.with_name("whole")
    hf.save(whole, config, params)
    limit = 5000
    hf.save(self.folder, config, params, max_file_bytes=limit)
    files = sorted(self.folder.glob("*.safetensors"))
    self.assertGreater(len(files), 3)
    count = len(files)
    self.assertEqual(
        [f.name for f in files],
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)],
    )
    index, found = json.loads((self.folder / hf.INDEX).read_text()), {}
    for file in files:
      part = safetensors.numpy.load_file(file)
      sizes = [tensor.nbytes for tensor in part.values()]
      self.assertTrue(sum(sizes) <= limit or len(sizes) == 1, sizes)
      for name in part:
        self.assertEqual(index["weight_map"][name], file.name)
      found.update(part)
    expected = safetensors.numpy.load_file(whole / hf.WEIGHTS)
    chex.assert_trees_all_equal(found, expected)
    self.assertLen(index["weight_map"], len(expected))
    self.assertEqual(
        index["metadata"]["total_size"],
        sum(tensor.nbytes for tensor in expected.values()),
    )
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)
    # Fewer files take the place of many.
    hf.save(self.folder, config, params)
    self.assertEqual(
        {p.name for p in self.folder.iterdir()},
        {"config.json", "generation_config.json", hf.WEIGHTS},
    )

  def test_each_tensor_may_have_its_own_dtype(self):
    config, params = _config(), _params(_config())
    hf.save(self.folder, config, params)
    path = self.folder / hf.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    norm = "model.norm.weight"
    expected = tensors[norm].astype(jnp.bfloat16)
    tensors[norm] = expected
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float64)
    safetensors.numpy.save_file(tensors, path)
    _, loaded = hf.load(self.folder)
    np.testing.assert_array_equal(
        loaded["final_norm"]["scale"], expected.astype(np.float32)
    )
    np.testing.assert_array_equal(
        loaded["head"]["kernel"], params["head"]["kernel"]
    )

  def test_compute_dtype_stands_apart(self):
    hf.save(self.folder, _config(), _params(_config()))
    config, params = hf.load(self.folder, compute_dtype="bfloat16")
    self.assertEqual(config.param_dtype, "float32")
    self.assertEqual(config.compute_dtype, "bfloat16")
    self.assertEqual(params["head"]["kernel"].dtype, jnp.float32)

  def test_an_existing_model_is_replaced_whole(self):
    config = _config()
    tokenizer = tokenizer_lib.word_level(["a", "b"], ".")
    hf.save(self.folder, config, _params(config), tokenizer)
    self.assertTrue((self.folder / "tokenizer.json").is_file())
    second = _params(config, seed=1)
    hf.save(self.folder, config, second)
    self.assertFalse((self.folder / "tokenizer.json").exists())
    chex.assert_trees_all_equal(hf.load(self.folder)[1], second)
    self.assertEqual([p.name for p in self.folder.parent.iterdir()], ["model"])

  def test_templates_of_a_chat_in_a_folder_of_their_own(self):
    config = _config()
    tokenizer = tokenizer_lib.word_level(["a"], ".")
    tokenizer.chat_template = {"default": "a", "tool_use": "aa"}
    save = lambda: hf.save(self.folder, config, _params(config), tokenizer)
    save()
    save()  # Replaced.
    self.assertEqual(
        {p.stat().st_mode & 0o111 for p in self.folder.iterdir() if p.is_dir()},
        {0o111},
    )
    found = tokenizer_lib.load(self.folder)
    self.assertEqual(found.chat_template, tokenizer.chat_template)

  def test_what_ends_a_turn_ends_it_for_transformers_too(self):
    config = _config()
    tokenizer = tokenizer_lib.word_level(["a", "|"], ".")
    fast = tokenizer._fast._theirs
    fast.add_special_tokens({"additional_special_tokens": ["|"]})
    fast.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    tokenizer = tokenizer_lib.Tokenizer(fast)
    end = fast.convert_tokens_to_ids("|")
    self.assertEqual(tokenizer.stop_ids, {config.eos_id, end})
    hf.save(self.folder, config, _params(config), tokenizer)
    path = self.folder / "generation_config.json"
    found = json.loads(path.read_text())["eos_token_id"]
    self.assertEqual(found, [config.eos_id, end])
    # The model's own stays alone where it is the same.
    hf.save(self.folder, config, _params(config))
    found = json.loads(path.read_text())["eos_token_id"]
    self.assertEqual(found, config.eos_id)

  def test_a_failed_save_leaves_the_old_model(self):
    config, params = _config(), _params(_config())
    hf.save(self.folder, config, params)

    class Broken:
      turn_ends = ()

      def save(self, folder):
        raise OSError("disk full")

    with self.assertRaisesRegex(OSError, "disk full"):
      hf.save(self.folder, config, _params(config, seed=1), Broken())
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)
    self.assertEqual([p.name for p in self.folder.parent.iterdir()], ["model"])

  def test_the_folder_is_there_throughout(self):
    config = _config()
    save = lambda: hf.save(self.folder, config, _params(config))
    save()
    seen = []
    rename = pathlib.Path.rename

    def watch(path, target):
      seen.append(path)
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", watch):
      save()
    # Exchanged in one step: a rename would leave a moment without it.
    self.assertEmpty(seen)
    self.assertLen([*self.folder.parent.iterdir()], 1)

  def test_files_follow_the_umask(self):
    config = _config()
    save = lambda: hf.save(self.folder, config, _params(config))
    save()
    modes = {p.stat().st_mode for p in self.folder.iterdir()}
    probe = self.folder / "probe"
    probe.touch()
    self.assertEqual(modes, {probe.stat().st_mode})

  def test_foreign_files_are_not_deleted(self):
    config, params = _config(), _params(_config())
    self.folder.mkdir(parents=True)
    (self.folder / "thesis.txt").write_text("years of work")
    with self.assertRaisesRegex(ValueError, "thesis.txt"):
      hf.save(self.folder, config, params)
    self.assertTrue((self.folder / "thesis.txt").exists())
