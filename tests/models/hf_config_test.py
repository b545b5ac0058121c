# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/hf_config.py: what a config.json may say and may not."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import settings as settings_lib
from tba_jax.models import config as config_lib
from tba_jax.models import hf_config

ModelConfig = config_lib.ModelConfig

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

# As on their authors' pages.
_PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "classifier_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_dropout": 0.0,
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rope_scaling": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 50257,
}
_CLASSIFIER = "LlamaForSequenceClassification"


def _from_config(**overrides) -> ModelConfig:
  settings = settings_lib.get_config().model
  settings.update(overrides)
  return ModelConfig.from_config(settings, 30, pad_id=0, bos_id=None, eos_id=1)


# The keys that only some published folders carry, with their values there.
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3 = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_PUBLISHED = {
    "Qwen2.5 base": {**_QWEN2, "use_mrope": False},
    "Qwen2.5 Instruct": {**_QWEN2, "eos_token_id": 151645},
    "Qwen2.5 Math": {**_QWEN2, "use_mrope": False, "sliding_window": 4096},
    "DeepSeek R1 Distill Qwen": {**_QWEN2, "use_mrope": False},
    "DeepSeek R1 Distill Llama": _LLAMA3,
    "Qwen3": _QWEN3,
    "Llama 3.2": {**_LLAMA3, "head_dim": 64},
    "Llama 3.1": _LLAMA3,
    "SmolLM2": {
        **_LLAMA3,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
    },
    "Mistral v0.1": _MISTRAL,
    "Mistral v0.3": {
        **_MISTRAL,
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Pythia": _PYTHIA,
    "GPT-2": _GPT2,
    "distilgpt2": {**_GPT2, "_num_labels": 1},
    "fine-tuned": {
        **_LLAMA3,
        "_attn_implementation_autoset": True,
        "_name_or_path": "base",
        "auto_map": {"AutoConfig": "base--config.LlamaConfig"},
        "gradient_checkpointing": False,
        "unsloth_fixed": True,
        "unsloth_version": "2025.1",
    },
}


class FromHfTest(parameterized.TestCase):

  @parameterized.parameters(_PUBLISHED.items())
  def test_reads_published_configs(self, _, hf):
    config = hf_config.from_hf(hf)
    self.assertEqual(config.family, hf["model_type"])
    self.assertEqual(config.vocab_size, hf["vocab_size"])

  @parameterized.parameters(
      (_LLAMA3, "quantization_config", {"bits": 4}),
      (_QWEN2, "rope_scaling", {"type": "yarn", "factor": 4.0}),
      (_QWEN2, "use_mrope", True),
      (_QWEN2, "use_sliding_window", True),
      (_LLAMA3, "rope_interleaved", True),
      (_LLAMA, "model_type", "gemma2"),
      (_LLAMA, "model_type", "phi"),
      (_LLAMA, "model_type", "olmo2"),
  )
  def test_refuses_what_changes_the_computation(self, hf, name, value):
    key = "rope_type" if name == "rope_scaling" else name
    with self.assertRaisesRegex(ValueError, key):
      hf_config.from_hf({**hf, name: value})

  def test_reads_every_field(self):
    self.assertEqual(
        hf_config.from_hf(_LLAMA),
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
            **config_lib.PLAIN,
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
    config = hf_config.from_hf(hf)
    self.assertEqual(config.rope_theta, 7000.0)
    self.assertEqual(config.param_dtype, "bfloat16")
    self.assertEqual((config.num_kv_heads, config.head_dim), (4, 16))
    self.assertEqual(config.norm_epsilon, 1e-6)
    self.assertIsNone(config.pad_id)

  def test_dtype_overrides_the_file(self):
    config = hf_config.from_hf(_LLAMA, dtype="bfloat16")
    self.assertEqual(config.param_dtype, "bfloat16")
    self.assertEqual(config.compute_dtype, "bfloat16")

  @parameterized.parameters(
      ("model_type", "mamba", "'llama'"),
      ("hidden_act", "gelu", "'silu'"),
      ("architectures", ["LlamaModel"], "ForSequenceClassification"),
      ("attention_bias", 1, "bool"),
      ("attention_dropout", 0.1, "0.0"),
      ("rope_scaling", {"rope_type": "dynamic", "factor": 8.0}, "'default'"),
      ("rope_scaling", {"type": "yarn"}, "'default' or 'linear' or 'llama3'"),
      ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "float"),
      ("rope_parameters", {"rope_type": "linear", "factor": None}, "float"),
      ("rope_parameters", {"rope_type": "linear", "factor": 2, "n": 1}, "none"),
      (
          "rope_parameters",
          {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
          "1.0",
      ),
      ("is_encoder_decoder", True, "False"),
      ("eos_token_id", [1, "</s>"], "a token id or a list of them"),
      ("eos_token_id", [], "a token id or a list of them"),
      ("eos_token_id", 1.5, "int"),
      ("rms_norm_eps", "small", "float"),
      ("tie_word_embeddings", 1, "bool"),
      ("quantization_config", {"bits": 4}, "an unknown setting"),
      ("sliding_window", 32, "an unknown setting"),
  )
  def test_refuses_by_name(self, name, value, supported):
    with self.assertRaises(ValueError) as caught:
      hf_config.from_hf({**_LLAMA, name: value})
    self.assertIn(name, str(caught.exception))
    self.assertIn(supported, str(caught.exception))

  def test_lists_every_problem_at_once(self):
    hf = {**_LLAMA, "hidden_act": "relu", "mlp_bias": 1, "novelty": 1}
    del hf["hidden_size"]
    with self.assertRaises(ValueError) as caught:
      hf_config.from_hf(hf)
    for name in ("hidden_act", "mlp_bias", "novelty", "hidden_size is missing"):
      self.assertIn(name, str(caught.exception))

  def test_two_thetas_that_differ_are_refused(self):
    with self.assertRaisesRegex(ValueError, "rope_theta"):
      hf_config.from_hf({**_LLAMA, "rope_theta": 1.0})

  @parameterized.parameters(False, True)
  def test_to_hf_and_back(self, tie_embeddings):
    config = _from_config(
        num_kv_heads=2,
        tie_embeddings=tie_embeddings,
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
        rope_theta=123.0,
    )
    self.assertEqual(hf_config.from_hf(hf_config.to_hf(config)), config)

  @parameterized.parameters(
      ("llama", dict(attention_bias=True, mlp_bias=True)),
      ("llama", dict(rope_type="linear", rope_factor=4.0)),
      (
          "llama",
          dict(
              rope_type="llama3",
              rope_factor=8.0,
              rope_low_freq_factor=1.0,
              rope_high_freq_factor=4.0,
              rope_original_positions=64,
          ),
      ),
      ("mistral", dict(sliding_window=9)),
      ("mistral", dict(sliding_window=0)),
      ("qwen2", {}),
      ("qwen3", dict(attention_bias=True, head_dim=32)),
      ("gpt_neox", dict(activation="gelu")),
      (
          "gpt_neox",
          dict(
              activation="gelu_new",
              attention_bias=True,
              parallel_residual=True,
              rotary_fraction=0.25,
              rope_theta=50.0,
              rope_type="linear",
              rope_factor=2.0,
          ),
      ),
      ("gpt2", dict(activation="gelu_new", tie_embeddings=True)),
      (
          "gpt2",
          dict(
              activation="relu",
              scale_attention=False,
              scale_attention_by_layer=True,
          ),
      ),
  )
  def test_each_family_to_hf_and_back(self, family, changes):
    config = _from_config(**{"family": family, **changes})
    found = hf_config.to_hf(config)
    self.assertEqual(found["model_type"], family)
    self.assertEqual(hf_config.from_hf(found), config)

  @parameterized.parameters(
      (dict(architectures=["LlamaForCausalLM"], id2label={"0": "good"}), 0),
      (dict(architectures=None), 0),
      (dict(architectures=[_CLASSIFIER], id2label={"0": "good"}), 1),
      (dict(architectures=[_CLASSIFIER], num_labels=3), 3),
      # transformers does not write the number that is its default.
      (dict(architectures=[_CLASSIFIER]), 2),
  )
  def test_scalar_heads(self, settings, num_labels):
    config = hf_config.from_hf({**_LLAMA, **settings})
    self.assertEqual(config.num_labels, num_labels)
    found = hf_config.to_hf(config)
    self.assertEqual(hf_config.from_hf(found), config)
    self.assertEqual(found["architectures"] == [_CLASSIFIER], num_labels > 0)

  def test_several_ends_of_a_text(self):
    config = hf_config.from_hf({**_LLAMA, "eos_token_id": [7, 5]})
    self.assertEqual((config.eos_id, config.stop_ids), (7, (7, 5)))
    found = hf_config.to_hf(config)
    self.assertEqual(found["eos_token_id"], [7, 5])
    self.assertEqual(hf_config.from_hf(found), config)
    self.assertEqual(hf_config.from_hf(_LLAMA).stop_ids, ())

  def test_older_spelling_of_scaling(self):
    scaled = {**_LLAMA, "rope_theta": 50.0}
    del scaled["rope_parameters"]
    scaled["rope_scaling"] = {"type": "linear", "factor": 2.0}
    config = hf_config.from_hf(scaled)
    self.assertEqual((config.rope_type, config.rope_factor), ("linear", 2.0))
    self.assertEqual(config.rope_theta, 50.0)

  def test_pythia_as_it_was_published(self):
    config = hf_config.from_hf(_PYTHIA)
    self.assertEqual(
        (config.rope_theta, config.rotary_fraction), (10000.0, 0.25)
    )
    self.assertTrue(config.parallel_residual and config.attention_bias)
    self.assertEqual((config.num_kv_heads, config.head_dim), (8, 64))
    self.assertEqual(config.activation, "gelu")
    self.assertEqual((config.num_labels, config.eos_id), (0, 0))

  @parameterized.parameters(
      ("hidden_dropout", 0.1, "0.0"),
      ("hidden_act", "quick_gelu", "'gelu_new'"),
      ("rotary_emb_base", "large", "int or float"),
      ("rope_theta", 5.0, "the same as rotary_emb_base=10000"),
      ("partial_rotary_factor", 0.5, "the same as rotary_pct=0.25"),
      ("rope_parameters", {"partial_rotary_factor": 0.5}, "0.25"),
      ("rope_scaling", {"rope_type": "yarn"}, "rope_type='yarn'.*'linear'"),
      ("num_key_value_heads", 2, "an unknown setting"),
  )
  def test_neox_refuses_by_name(self, name, value, supported):
    with self.assertRaisesRegex(ValueError, supported) as caught:
      hf_config.from_hf({**_PYTHIA, name: value})
    named = name if name != "rope_scaling" else "rope_parameters.rope_type"
    self.assertIn(named, str(caught.exception))

  def test_gpt2_as_it_was_published(self):
    config = hf_config.from_hf(_GPT2)
    self.assertEqual((config.mlp_width, config.max_positions), (3072, 1024))
    self.assertTrue(config.tie_embeddings and config.scale_attention)
    self.assertEqual(config.activation, "gelu_new")

  @parameterized.parameters(
      ("add_cross_attention", True, "False"),
      ("activation_function", "mish", "'gelu_new'"),
      ("scale_attn_weights", 1, "bool"),
      ("n_ctx", 512, "1024"),
      ("n_inner", "wide", "int"),
      ("n_head", 7, "head_dim"),
  )
  def test_gpt2_refuses_by_name(self, name, value, supported):
    with self.assertRaises(ValueError) as caught:
      hf_config.from_hf({**_GPT2, name: value})
    if name != "n_head":
      self.assertIn(name, str(caught.exception))
    self.assertIn(supported, str(caught.exception))

  @parameterized.parameters(
      ("use_sliding_window", True),
      ("layer_types", ["full_attention", "sliding_attention"]),
      ("head_dim", "wide"),
  )
  def test_qwen_refuses_by_name(self, name, value):
    for model_type in ("qwen2", "qwen3"):
      qwen = {**_LLAMA, "model_type": model_type, name: value}
      for other in ("attention_bias", "mlp_bias", "pretraining_tp"):
        del qwen[other]
      with self.assertRaisesRegex(ValueError, name):
        hf_config.from_hf(qwen)


if __name__ == "__main__":
  absltest.main()
