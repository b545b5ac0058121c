# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/config.py: what a config.json may say and may not."""

import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from configs import common
from tba_jax.models import config as model_config_lib

ModelConfig = model_config_lib.ModelConfig

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.08,
    "intermediate_size": 160,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0",
    "use_cache": True,
    "vocab_size": 512,
}


def _from_config(**overrides) -> ModelConfig:
  settings = common.get_config().model
  settings.update(overrides)
  return ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)


class FromHfTest(parameterized.TestCase):

  def test_reads_every_field(self):
    self.assertEqual(
        ModelConfig.from_hf(_LLAMA),
        ModelConfig(
            family="llama",
            vocab_size=512,
            num_layers=2,
            width=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_width=160,
            rope_theta=5000.0,
            norm_epsilon=1e-6,
            tie_embeddings=False,
            max_positions=1024,
            param_dtype="float32",
            compute_dtype="float32",
            pad_id=0,
            bos_id=1,
            eos_id=2,
        ),
    )

  def test_older_spelling_and_omitted_settings(self):
    hf = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_theta": 7000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    config = ModelConfig.from_hf(hf)
    self.assertEqual(config.rope_theta, 7000.0)
    self.assertEqual(config.param_dtype, "bfloat16")
    self.assertEqual((config.num_kv_heads, config.head_dim), (4, 16))
    self.assertEqual(config.norm_epsilon, 1e-6)
    self.assertIsNone(config.pad_id)

  def test_dtype_overrides_the_file(self):
    config = ModelConfig.from_hf(_LLAMA, dtype="bfloat16")
    self.assertEqual(config.param_dtype, "bfloat16")
    self.assertEqual(config.compute_dtype, "bfloat16")

  @parameterized.parameters(
      ("model_type", "mamba", "'llama'"),
      ("hidden_act", "gelu", "'silu'"),
      ("attention_bias", True, "False"),
      ("mlp_bias", True, "False"),
      ("attention_dropout", 0.1, "0.0"),
      ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "None"),
      ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "'default'"),
      (
          "rope_parameters",
          {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
          "none",
      ),
      ("is_encoder_decoder", True, "False"),
      ("eos_token_id", [1, 2], "int"),
      ("rms_norm_eps", "small", "float"),
      ("tie_word_embeddings", 1, "bool"),
      ("quantization_config", {"bits": 4}, "not a setting that we know"),
      ("sliding_window", 32, "not a setting that we know"),
  )
  def test_refuses_by_name(self, name, value, supported):
    with self.assertRaises(ValueError) as caught:
      ModelConfig.from_hf({**_LLAMA, name: value})
    self.assertIn(name, str(caught.exception))
    self.assertIn(supported, str(caught.exception))

  def test_lists_every_problem_at_once(self):
    hf = {**_LLAMA, "hidden_act": "relu", "mlp_bias": True, "novelty": 1}
    del hf["hidden_size"]
    with self.assertRaises(ValueError) as caught:
      ModelConfig.from_hf(hf)
    for name in ("hidden_act", "mlp_bias", "novelty", "hidden_size is missing"):
      self.assertIn(name, str(caught.exception))

  def test_two_thetas_that_differ_are_refused(self):
    with self.assertRaisesRegex(ValueError, "rope_theta"):
      ModelConfig.from_hf({**_LLAMA, "rope_theta": 1.0})

  @parameterized.parameters(False, True)
  def test_to_hf_and_back(self, tie_embeddings):
    config = _from_config(
        num_kv_heads=2,
        tie_embeddings=tie_embeddings,
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
        rope_theta=123.0,
    )
    self.assertEqual(ModelConfig.from_hf(config.to_hf()), config)


class FromConfigTest(parameterized.TestCase):

  def test_takes_the_base_config(self):
    config = _from_config()
    self.assertEqual(config.vocab_size, 30)
    self.assertEqual(config.eos_id, 1)
    self.assertEqual(config.width, common.get_config().model.width)

  @parameterized.parameters(
      ("num_heads", 3),
      ("num_kv_heads", 0),
      ("head_dim", 15),
      ("param_dtype", "int8"),
      ("compute_dtype", "float64"),
      ("norm_epsilon", 0.0),
      ("num_layers", 2.5),
  )
  def test_refuses_a_wrong_setting(self, name, value):
    settings = common.get_config().model.to_dict()
    settings[name] = value
    if name == "num_heads":
      settings["num_kv_heads"] = 2
    with self.assertRaisesRegex(ValueError, f"config.model.{name}={value!r}"):
      ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)

  def test_refuses_missing_and_unknown_settings(self):
    settings = common.get_config().model.to_dict()
    del settings["width"]
    settings["qk_norm"] = True
    with self.assertRaisesRegex(ValueError, r"'width'.*'qk_norm'"):
      ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)


class ImportTest(absltest.TestCase):

  def test_does_not_import_jax(self):
    code = (
        "import sys, tba_jax.models.config;"
        "sys.exit(any(m in sys.modules for m in ('jax', 'torch')))"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


if __name__ == "__main__":
  absltest.main()
