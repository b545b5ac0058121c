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

  def test_reads_sharded_files(self):
    config, params = _config(), _params(_config())
    hf.save(self.folder, config, params)
    tensors = safetensors.numpy.load_file(self.folder / hf.WEIGHTS)
    names, files = sorted(tensors), ("one.safetensors", "two.safetensors")
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
      part = {n: tensors[n] for n in names if weight_map[n] == file}
      safetensors.numpy.save_file(part, self.folder / file)
    (self.folder / hf.WEIGHTS).unlink()
    (self.folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    chex.assert_trees_all_equal(hf.load(self.folder)[1], params)

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

  def test_names_a_damaged_file(self):
    data = (self.folder / hf.WEIGHTS).read_bytes()
    (self.folder / hf.WEIGHTS).write_bytes(data[:100])
    with self.assertRaisesRegex(ValueError, hf.WEIGHTS):
      hf.load(self.folder)

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
