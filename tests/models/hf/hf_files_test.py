# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/hf/hf.py and hf_files.py: folders that cannot be used."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax.models.hf import hf
from tests.models import hf_case

_config, _params = hf_case.make_config, hf_case.make_params


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

  def test_refuses_huge_number_of_layers(self):
    path = self.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 2**63}))
    with self.assertRaisesRegex(ValueError, "layers=9[0-9]{18}: .*at most"):
      hf.load(self.folder)

  def test_names_nonfinite_tensor(self):
    self._rewrite(lambda t: t["model.norm.weight"].put(3, np.nan))
    with self.assertRaisesRegex(ValueError, "model.norm.weight has NaN"):
      hf.load(self.folder)

  def test_names_tensor_changed_after_writing(self):
    path = self.folder / hf.WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # Last tensor of the file.
    path.write_bytes(data)
    with self.assertRaisesRegex(ValueError, "damaged, .* written: model"):
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

  def test_head_different_from_tied_embeddings_is_refused(self):
    # transformers 4 takes the embedding for it, transformers 5 does not.
    tied = _config(tie_embeddings=True)
    hf.save(self.folder, tied, _params(tied))
    name = "model.embed_tokens.weight"
    for change in (
        lambda x: np.where(np.arange(len(x))[:, None] == len(x) - 1, 0.5, x),
        lambda x: x[:-1],
    ):
      self._rewrite(
          lambda t, change=change: t.update(
              {"lm_head.weight": change(t[name]).astype(np.float32)}
          )
      )
      with self.assertRaisesRegex(
          ValueError, f"lm_head.weight .* {name}.*tie_word_embeddings"
      ):
        hf.load(self.folder)

  def test_unsupported_config_names_the_folder_and_setting(self):
    config = json.loads((self.folder / "config.json").read_text())
    config["hidden_act"] = "gelu"
    (self.folder / "config.json").write_text(json.dumps(config))
    with self.assertRaisesRegex(ValueError, f"{self.folder}.*hidden_act"):
      hf.load(self.folder)

  @parameterized.parameters("config.json", hf.WEIGHTS)
  def test_names_missing_file(self, name):
    (self.folder / name).unlink()
    with self.assertRaisesRegex(ValueError, name):
      hf.load(self.folder)

  def test_a_folder_with_pytorch_files_alone_says_how_to_convert_it(self):
    (self.folder / hf.WEIGHTS).unlink()
    (self.folder / "pytorch_model.bin").touch()
    with self.assertRaisesRegex(
        ValueError, f"'{self.folder}'.*t.AutoTokenizer, t.LlamaForCausalLM"
    ):
      hf.load(self.folder)

  @parameterized.parameters(100, -1)
  def test_names_truncated_file(self, size):
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
    self.assertRegex(message, f"{first.name}: no such file, .*json names it")
    self.assertRegex(message, f"{third.name}: .*cut off")
    self.assertNotIn(second.name, message)

  def test_index_without_its_shards_is_stale(self):
    # `save_pretrained` leaves it, and a file that shards have replaced.
    second = _params(self.config, seed=1)
    hf.save(self.folder, self.config, _params(self.config))
    plain = (self.folder / hf.WEIGHTS).read_bytes()
    hf.save(self.folder, self.config, second, max_file_bytes=5000)
    (self.folder / hf.WEIGHTS).write_bytes(plain)
    chex.assert_trees_all_equal(hf.load(self.folder)[1], second)
    for shard in self.folder.glob("model-*"):
      shard.unlink()
    found = hf.load(self.folder)[1]
    chex.assert_trees_all_equal(found, _params(self.config))

  def test_names_what_the_index_has_wrong(self):
    hf.save(
        self.folder,
        self.config,
        _params(self.config),
        max_file_bytes=5000,
    )
    index = json.loads((self.folder / hf.INDEX).read_text())
    first, last = min(index["weight_map"].values()), "model.norm.weight"
    for weight_map, message in (
        (
            {**index["weight_map"], last: first},
            f"{first}: lacks tensor {last}",
        ),
        ({**index["weight_map"], last: "gone"}, "gone: no such file.*names it"),
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

  def test_names_tensor_of_other_type_than_float(self):
    name = "model.norm.weight"
    self._rewrite(lambda t: t.update({name: t[name].astype(np.int8)}))
    with self.assertRaisesRegex(ValueError, f"{name} has dtype I8, must be"):
      hf.load(self.folder)

  def test_names_tensor_out_of_dtype_range(self):
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

  def test_save_refuses_extra_params(self):
    tied = dataclasses.replace(self.config, tie_embeddings=True)
    with self.assertRaisesRegex(ValueError, "leaves that the family lacks"):
      hf.save(self.folder, tied, _params(self.config))
