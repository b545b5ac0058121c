# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/hf.py and hf_names.py: folders in and out, without torch."""

import dataclasses
import json
import math
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from configs import common
from tba_jax import sharding
from tba_jax import tokenizer as tokenizer_lib
from tba_jax.models import build
from tba_jax.models import config as model_config_lib
from tba_jax.models import hf
from tba_jax.models import hf_names

# One shape of each family, as itself.
_FAMILIES = (
    dict(family="llama", attention_bias=True, mlp_bias=True),
    dict(family="mistral", sliding_window=4),
    dict(family="qwen2"),
    dict(family="qwen3"),
)


def _config(**overrides) -> model_config_lib.ModelConfig:
  settings = common.get_config().model
  settings.update(num_kv_heads=2, num_layers=2, width=32, mlp_width=48)
  settings.update(overrides)
  return model_config_lib.ModelConfig.from_config(
      settings, 40, pad_id=0, bos_id=None, eos_id=1
  )


def _params(config, seed=0):
  """Returns distinct numbers in every entry, norms included."""
  shapes = jax.eval_shape(build.make_model(config).init, jax.random.key(0))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )


class HfNamesTest(parameterized.TestCase):

  @parameterized.parameters(dict(tie_embeddings=True), *_FAMILIES)
  def test_rows_cover_the_params_exactly(self, **settings):
    config = _config(**settings)
    shapes = jax.eval_shape(build.make_model(config).init, jax.random.key(0))
    found = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    named = {
        row.path: (config.num_layers,) * row.stacked + row.shape
        for row in hf_names.rows(config)
    }
    self.assertEqual(named, found)

  def test_file_shapes_hold_the_same_elements(self):
    for row in hf_names.rows(_config()):
      self.assertEqual(math.prod(row.shape), math.prod(row.hf_shape), row)

  def test_axes_are_those_of_the_model(self):
    for settings in _FAMILIES:
      config = _config(**settings)
      node = build.make_model(config).logical_axes
      for row in hf_names.rows(config):
        axes = node
        for key in row.path:
          axes = axes[key]
        self.assertEqual(axes, ("layers",) * row.stacked + row.axes, row.path)


class RoundTripTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "a" / "model"

  @parameterized.parameters(
      dict(tie_embeddings=True),
      dict(param_dtype="bfloat16", compute_dtype="bfloat16"),
      *_FAMILIES,
  )
  def test_is_bit_exact(self, **settings):
    config = _config(**settings)
    params = _params(config)
    hf.save(self.folder, config, params)
    loaded_config, loaded = hf.load(self.folder)
    self.assertEqual(loaded_config, config)
    chex.assert_trees_all_equal(loaded, params)
    chex.assert_trees_all_equal_dtypes(loaded, params)

  def test_dtype_is_applied(self):
    hf.save(self.folder, _config(), _params(_config()))
    config, params = hf.load(self.folder, dtype="bfloat16")
    self.assertEqual(config.param_dtype, "bfloat16")
    for leaf in jax.tree.leaves(params):
      self.assertEqual(leaf.dtype, jnp.bfloat16)

  def test_puts_leaves_where_the_shardings_say(self):
    config = _config()
    hf.save(self.folder, config, _params(config))
    mesh = sharding.make_mesh(
        {"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1]
    )
    shardings = sharding.param_shardings(
        mesh,
        common.get_config().sharding,
        build.make_model(config).logical_axes,
    )
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

  def test_a_failed_save_leaves_the_old_model(self):
    config, params = _config(), _params(_config())
    hf.save(self.folder, config, params)

    class Broken:

      def save(self, folder):
        raise OSError("disk full")

    with self.assertRaisesRegex(OSError, "disk full"):
      hf.save(self.folder, config, _params(config, seed=1), Broken())
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)
    self.assertEqual([p.name for p in self.folder.parent.iterdir()], ["model"])

  def test_foreign_files_are_not_deleted(self):
    config, params = _config(), _params(_config())
    self.folder.mkdir(parents=True)
    (self.folder / "thesis.txt").write_text("years of work")
    with self.assertRaisesRegex(ValueError, "thesis.txt"):
      hf.save(self.folder, config, params)
    self.assertTrue((self.folder / "thesis.txt").exists())


class RefusalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "model"
    self.config = _config()
    hf.save(self.folder, self.config, _params(self.config))

  def _rewrite(self, change):
    path = self.folder / hf.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})

  def test_lists_missing_unused_and_wrongly_shaped_tensors(self):
    def change(tensors):
      del tensors["model.layers.1.mlp.up_proj.weight"]
      tensors["model.norm.weight"] = np.zeros((7,), np.float32)
      tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)

    self._rewrite(change)
    with self.assertRaises(ValueError) as caught:
      hf.load(self.folder)
    message = str(caught.exception)
    self.assertIn("missing tensor model.layers.1.mlp.up_proj.weight", message)
    self.assertIn("tensor model.norm.weight has shape [7]", message)
    self.assertIn(
        "unused tensor model.layers.0.self_attn.q_proj.bias [64]", message
    )

  def test_names_a_tensor_that_is_not_finite(self):
    self._rewrite(lambda t: t["model.norm.weight"].put(3, np.nan))
    with self.assertRaisesRegex(ValueError, "model.norm.weight has NaN"):
      hf.load(self.folder)

  def test_stored_rotary_frequencies_are_no_problem(self):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    self._rewrite(lambda t: t.update({name: np.zeros(8, np.float32)}))
    hf.load(self.folder)

  def test_a_head_beside_tied_embeddings_is_no_problem_only_there(self):
    tied = _config(tie_embeddings=True)
    hf.save(self.folder, tied, _params(tied))
    add_head = lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"].copy()}
    )
    self._rewrite(add_head)
    self.assertNotIn("head", hf.load(self.folder)[1])
    config = json.loads((self.folder / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (self.folder / "config.json").write_text(json.dumps(config))
    with self.assertRaisesRegex(ValueError, "unused tensor model.layers.1"):
      hf.load(self.folder)

  def test_unsupported_config_names_the_folder_and_setting(self):
    config = json.loads((self.folder / "config.json").read_text())
    config["hidden_act"] = "gelu"
    (self.folder / "config.json").write_text(json.dumps(config))
    with self.assertRaisesRegex(ValueError, f"{self.folder}.*hidden_act"):
      hf.load(self.folder)

  @parameterized.parameters("config.json", hf.WEIGHTS)
  def test_names_a_file_that_is_not_there(self, name):
    (self.folder / name).unlink()
    with self.assertRaisesRegex(ValueError, name):
      hf.load(self.folder)

  @parameterized.parameters(100, -1)
  def test_names_a_file_that_was_cut_off(self, size):
    data = (self.folder / hf.WEIGHTS).read_bytes()
    (self.folder / hf.WEIGHTS).write_bytes(data[:size])
    with self.assertRaisesRegex(ValueError, f"{hf.WEIGHTS}.*cut off"):
      hf.load(self.folder)

  def test_names_all_missing_and_cut_off_shards(self):
    params = _params(self.config)
    hf.save(self.folder, self.config, params, max_file_bytes=5000)
    first, second, third, *_ = sorted(self.folder.glob("*.safetensors"))
    first.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    with self.assertRaises(ValueError) as caught:
      hf.load(self.folder)
    message = str(caught.exception)
    self.assertRegex(message, f"{first.name}: .*index.json names it: .*No such")
    self.assertRegex(message, f"{third.name}: .*cut off")
    self.assertNotIn(second.name, message)

  def test_names_what_the_index_has_wrong(self):
    hf.save(self.folder, self.config, _params(self.config), max_file_bytes=5000)
    index = json.loads((self.folder / hf.INDEX).read_text())
    first, last = min(index["weight_map"].values()), "model.norm.weight"
    for weight_map, message in (
        (
            {**index["weight_map"], last: first},
            f"{first}: tensor {last} is not",
        ),
        ({**index["weight_map"], last: "gone"}, "gone: not readable.*names it"),
        ({**index["weight_map"], last: f"../model/{first}"}, "weight_map"),
        ({}, "weight_map"),
        (None, "weight_map"),
    ):
      index["weight_map"] = weight_map
      (self.folder / hf.INDEX).write_text(json.dumps(index))
      with self.assertRaisesRegex(ValueError, message):
        hf.load(self.folder)
    (self.folder / hf.INDEX).write_text("{")
    with self.assertRaisesRegex(ValueError, f"{hf.INDEX}: not readable"):
      hf.load(self.folder)

  def test_names_a_tensor_that_is_no_float(self):
    name = "model.norm.weight"
    self._rewrite(lambda t: t.update({name: t[name].astype(np.int8)}))
    with self.assertRaisesRegex(ValueError, f"{name} has dtype I8, allowed"):
      hf.load(self.folder)

  def test_names_a_tensor_that_is_too_large_for_the_dtype(self):
    self._rewrite(lambda t: t["model.norm.weight"].put(3, 1e6))
    hf.load(self.folder)
    with self.assertRaisesRegex(ValueError, "norm.weight has .* in float16"):
      hf.load(self.folder, dtype="float16")

  def test_save_refuses_params_of_another_shape(self):
    params = _params(self.config)
    params["final_norm"]["scale"] = jnp.zeros((3,))
    del params["head"]
    with self.assertRaisesRegex(ValueError, "final_norm/scale.*head/kernel"):
      hf.save(self.folder, self.config, params)

  def test_save_refuses_params_that_would_be_dropped(self):
    tied = dataclasses.replace(self.config, tie_embeddings=True)
    with self.assertRaisesRegex(ValueError, "does not name"):
      hf.save(self.folder, tied, _params(self.config))


if __name__ == "__main__":
  absltest.main()
