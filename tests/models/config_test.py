# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/config.py: shapes that are allowed."""

from absl.testing import parameterized

from tba_jax.config import settings as settings_lib
from tba_jax.models import config as config_lib

ModelConfig = config_lib.ModelConfig


def _from_config(**overrides) -> ModelConfig:
  settings = settings_lib.get_config().model
  settings.update(overrides)
  return ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)


class FromConfigTest(parameterized.TestCase):

  def test_takes_the_base_config(self):
    config = _from_config()
    self.assertEqual(config.vocab_size, 30)
    self.assertEqual(config.eos_id, 1)
    self.assertEqual(config.width, settings_lib.get_config().model.width)

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
    settings = settings_lib.get_config().model.to_dict()
    settings[name] = value
    if name == "num_heads":
      settings["num_kv_heads"] = 2
    with self.assertRaisesRegex(ValueError, f"config.model.{name}={value!r}"):
      ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)

  @parameterized.parameters(
      ("llama", "sliding_window", 8),
      ("llama", "rotary_fraction", 0.5),
      ("mistral", "attention_bias", True),
      ("qwen2", "mlp_bias", True),
      ("qwen3", "parallel_residual", True),
      ("llama", "rope_type", "dynamic"),
      ("llama", "rope_beta_fast", 0.5),
      ("llama", "rope_beta_slow", 0.0),
      ("llama", "rope_attention_factor", 0.0),
      ("llama", "rope_mscale", -1.0),
      ("llama", "rope_mscale_all_dim", -1.0),
      ("gemma3_text", "rope_truncate", False),
      ("llama", "query_growth", 0.1),
      ("ministral3", "query_growth", -0.1),
      ("llama", "rotary_layers", (True, False, True)),
      ("smollm3", "rotary_layers", (True, False)),
      ("gpt2", "rope_truncate", False),
      ("llama", "rope_factor", 0.5),
      ("llama", "rope_low_freq_factor", 4.0),
      ("llama", "activation", "gelu"),
      ("mistral", "sliding_window", -1),
  )
  def test_refuses_what_the_family_has_not(self, family, name, value):
    wrong = {"family": family, name: value}
    with self.assertRaisesRegex(ValueError, "must be") as caught:
      _from_config(**wrong)
    self.assertIn(f"{name}={value!r}", str(caught.exception))

  def test_latents_come_from_a_folder(self):
    with self.assertRaisesRegex(
        ValueError, "latent_rank=0: must be 1 or more .* a folder .config.init"
    ):
      _from_config(family="deepseek_v3", num_experts=4, experts_per_token=2)

  def test_refuses_yarn_with_rope_theta_1(self):
    with self.assertRaisesRegex(ValueError, "rope_theta=1.0: must be above 0"):
      _from_config(rope_type="yarn", rope_theta=1.0)

  def test_refuses_missing_and_unknown_settings(self):
    settings = settings_lib.get_config().model.to_dict()
    del settings["width"]
    settings["qk_norm"] = True
    with self.assertRaisesRegex(ValueError, r"'width'.*'qk_norm'"):
      ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)
