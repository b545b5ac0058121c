# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""config.json and generation_config.json: what is read, and what is refused.

`published_configs.json` has configs of models on the hub. Held against copies
in public repositories, key for key: Qwen2.5 0.5B, 0.5B Instruct, 1.5B, 1.5B
Instruct and 7B Instruct, Qwen3 0.6B, 8B and 30B-A3B, Llama 3.1 8B and 8B
Instruct, Llama 3.2 1B and 1B Instruct (a copy saved in float16), Mistral 7B
v0.1 and v0.3 (its Instruct's), Pythia 1B (not the deduped one's), GPT-2, MiniLM
and SmolLM2 135M.
SmolLM3 3B has the keys and values of a public test of its config.json. OLMo 3
7B Instruct and 32B Think are taken from a public survey, their token ids from
their tokenizer. Ministral 3, Qwen3.5 and Qwen3-Next are put together from
public code.
The larger Qwen2.5 base, Math and distilled models have the keys of
R1-Distill-Qwen 7B, the other Pythias those of the 1B. Gemma 3 1B, rho-math,
Llama Guard 3 and the RoBERTa classifier have those of copies on the hub that
others fine-tuned or quantized, but for the rotary scaling of Llama Guard 3 8B,
which is the 1B's, and rho-math's dtype, told by the size of its weights;
gpt2-alpaca those of gpt2-alpaca-gpt4, and three added tokens like it.
"""

import dataclasses
import inspect
import json
import pathlib
import re
import types

from absl.testing import parameterized
import transformers

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_names
from tba_jax.models.net import encoder
from tests.models import hf_case

ModelConfig = config_lib.ModelConfig
_PUBLISHED = json.loads(
    (pathlib.Path(__file__).parents[1] / "published_configs.json").read_text()
)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 1024,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "vocab_size": 512,
}
_QWEN = {**_LLAMA, "model_type": "qwen3", "rope_theta": 5000.0}
_MOE = _PUBLISHED["Qwen/Qwen3-30B-A3B"]
_OSS = _PUBLISHED["openai/gpt-oss-20b"]
_DEEPSEEK = _PUBLISHED["deepseek-ai/DeepSeek-V3"]
_GLM = _PUBLISHED["zai-org/GLM-4.5-Air"]
_KIMI = _PUBLISHED["moonshotai/Kimi-K2-Instruct"]
_SMOL = _PUBLISHED["HuggingFaceTB/SmolLM3-3B"]
_OLMO = _PUBLISHED["allenai/Olmo-3-7B-Instruct"]
# The multimodal model's, without the sizes of its vision tower.
_MINISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "transformers_version": "5.0.0.dev0",
    "vision_config": {"model_type": "pixtral"},
    "vision_feature_layer": -1,
}
_NEOX = _PUBLISHED["EleutherAI/pythia-410m-deduped"]
_GPT2 = _PUBLISHED["openai-community/gpt2"]
_ROBERTA = "facebook/roberta-hate-speech-dynabench-r4-target"
_YARN = {"type": "yarn", "factor": 4.0}
# The settings of a published model, of fewer layers.
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": [
            *("linear_attention",) * 3, "full_attention",
            *("linear_attention",) * 3, "full_attention",
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}  # fmt: skip
GEMMA4_SHAPE = dict(
    num_layers=4,
    sliding_window=9,
    global_layers=(False, True, False, True),
    global_head_dim=24,
    local_rope_theta=7.0,
    rope_theta=99.0,
    rope_type="proportional",
    rotary_fraction=0.5,
    activation="gelu_new",
)
# E2B; see `GEMMA4_31B` for 31B.
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {"model_type": "gemma4_audio"},
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.5.0.dev0",
    "video_token_id": 258884,
    "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}
GEMMA4_31B = {
    **GEMMA4,
    "audio_config": None,
    "text_config": {
        **GEMMA4["text_config"],
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    },
}
GEMMA4_26B = {
    **GEMMA4_31B,
    "text_config": {
        **GEMMA4_31B["text_config"],
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
}
QWEN3_5_MOE = {
    **_QWEN3_5,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "language_model_only": False,
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{k: v for k, v in _QWEN3_5["text_config"].items()
           if k != "intermediate_size"},
        "bos_token_id": 248044,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
}  # fmt: skip
_NEXT = _PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]
_CLASSIFIER = "LlamaForSequenceClassification"


def _class_of(hf):
  """Returns transformers' class for a config.json; Kimi K2 is DeepSeek-V3."""
  kind = hf["model_type"]
  kind = "deepseek_v3" if kind == "kimi_k2" else kind
  return transformers.CONFIG_MAPPING[kind]


class PublishedTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name.replace("/", "_"), hf) for name, hf in _PUBLISHED.items()
  )
  def test_reads_what_transformers_reads(self, hf):
    theirs = _class_of(hf)(**hf)
    if hf["model_type"] in encoder.FAMILIES:
      config = encoder.encoder_config_from_hf(hf)
      epsilon = theirs.layer_norm_eps
    else:
      config = hf_config.from_hf(hf)
      kv_heads = getattr(theirs, "num_key_value_heads", config.num_heads)
      self.assertEqual(config.num_kv_heads, kv_heads)
      self.assertEqual(config.tie_embeddings, theirs.tie_word_embeddings)
      if config.family != "gpt2":
        rope = theirs.rope_parameters
        if config.family == "gemma3_text":
          scalar = theirs.query_pre_attn_scalar
          self.assertEqual(config.score_dim, scalar)
        if "sliding_attention" in rope:
          local = rope["sliding_attention"]["rope_theta"]
          self.assertEqual(config.local_rope_theta, local)
          kinds = [kind == "full_attention" for kind in theirs.layer_types]
          self.assertEqual(list(config.global_layers), kinds)
          rope = rope["full_attention"]
        self.assertEqual(
            config.rope_attention_factor, rope.get("attention_factor")
        )
        flags = getattr(theirs, "no_rope_layers", [1] * config.num_layers)
        self.assertEqual(config.rotary_layers or (1,) * len(flags), (*flags,))
        self.assertEqual(config.rope_theta, rope["rope_theta"])
        self.assertEqual(config.rope_type, rope["rope_type"])
        self.assertEqual(config.rope_factor, rope.get("factor", 1.0))
        fraction = rope.get("partial_rotary_factor", 1.0)
        self.assertEqual(config.rotary_fraction, fraction)
      stops = theirs.eos_token_id
      self.assertEqual(list(config.stop_ids) or config.eos_id, stops)
      window = getattr(theirs, "sliding_window", None) or 0
      self.assertEqual(config.sliding_window, window)
      names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
      epsilon = next(getattr(theirs, n) for n in names if hasattr(theirs, n))
    self.assertEqual(
        (
            config.vocab_size, config.width, config.num_layers,
            config.num_heads, config.max_positions, config.norm_epsilon,
        ),
        (
            theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers,
            theirs.num_attention_heads, theirs.max_position_embeddings, epsilon,
        ),
    )  # fmt: skip

  @parameterized.named_parameters(
      (name.replace("/", "_"), hf) for name, hf in _PUBLISHED.items()
  )
  def test_copy_saved_by_transformers_reads_the_same(self, hf):
    """As fine-tuned models are published, whose own files we do not have."""
    read = hf_config.from_hf
    if hf["model_type"] in encoder.FAMILIES:
      read = encoder.encoder_config_from_hf
    theirs = _class_of(hf)(**hf)
    saved = json.loads(theirs.to_json_string())
    self.assertNotEqual(saved, hf)
    self.assertEqual(read(saved), read(hf))

  def test_pythia_reward_model_saved_by_transformers_4(self):
    config = hf_config.from_hf(_NEOX)
    saved = {
        **_NEOX,
        "_name_or_path": "EleutherAI/pythia-410m-deduped",
        "architectures": ["GPTNeoXForSequenceClassification"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.1,
        "hidden_dropout": 0.0,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": 1,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000,
    }
    self.assertEqual(
        hf_config.from_hf(saved),
        dataclasses.replace(config, num_labels=1, pad_id=1),
    )

  @parameterized.parameters(*family_lib.FAMILIES)
  def test_defaults_are_those_of_transformers(self, family):
    theirs = transformers.CONFIG_MAPPING[family]()
    if family == "gemma4_text":
      # Its class keeps the shape of global layers apart.
      width = theirs.per_layer_config[5].head_dim
      settings = {**theirs.to_dict(), "global_head_dim": width}
      theirs = types.SimpleNamespace(**settings)
    for name, _, default in family_lib.FAMILIES[family].keys.values():
      if default is not ... and default is not None:
        self.assertEqual(default, getattr(theirs, name), name)

  @parameterized.parameters(
      ("_attn_implementation_autoset", True),
      ("_num_labels", 1),
      ("auto_map", {"AutoConfig": "base--config.LlamaConfig"}),
      ("gradient_checkpointing", False),
      ("temperature", 0.6),
      ("transformers.js_config", {"dtype": "q4"}),
      ("unsloth_fixed", True),
      ("unsloth_version", "2025.1"),
      ("use_mrope", False),
  )
  def test_keys_added_by_tools_are_harmless(self, name, value):
    self.assertEqual(
        hf_config.from_hf({**_LLAMA, name: value}), hf_config.from_hf(_LLAMA)
    )

  def test_sampling_settings_of_transformers_4_are_harmless(self):
    """All of its defaults, as in a file saved with `use_diff=False`."""
    sampling = dict(
        bad_words_ids=None, begin_suppress_tokens=None, diversity_penalty=0.0,
        do_sample=False, early_stopping=False, encoder_no_repeat_ngram_size=0,
        exponential_decay_length_penalty=None, forced_bos_token_id=None,
        forced_eos_token_id=None, length_penalty=1.0, max_length=20,
        min_length=0, no_repeat_ngram_size=0, num_beam_groups=1, num_beams=1,
        num_return_sequences=1, output_scores=False, repetition_penalty=1.0,
        remove_invalid_values=False, return_dict_in_generate=False,
        suppress_tokens=None, temperature=1.0, top_k=50, top_p=1.0,
        typical_p=1.0,
    )  # fmt: skip
    others = dict(
        add_cross_attention=False, chunk_size_feed_forward=0,
        cross_attention_hidden_size=None, decoder_start_token_id=None,
        finetuning_task=None, is_decoder=False, is_encoder_decoder=False,
        output_attentions=False, output_hidden_states=False, prefix=None,
        problem_type=None, pruned_heads={}, return_dict=True, sep_token_id=None,
        task_specific_params=None, tf_legacy_loss=False,
        tie_encoder_decoder=False, tokenizer_class=None, torchscript=False,
        use_bfloat16=False,
    )  # fmt: skip
    self.assertEqual(
        hf_config.from_hf({**_LLAMA, **sampling, **others}),
        hf_config.from_hf(_LLAMA),
    )


def _settings_of_class(family: str) -> set[str]:
  """Returns all settings that a family's class of `transformers` knows.

  Those that it writes, its own and its parent's arguments with the names that
  stand for them, the older names that it converts, and those of sampling, which
  it takes out.
  """
  theirs = transformers.CONFIG_MAPPING[family]
  documented = re.findall(
      r"^        (\w+) \(`", transformers.PretrainedConfig.__doc__, re.M
  )
  arguments = [
      name
      for c in (theirs, transformers.PretrainedConfig)
      for name in inspect.signature(c).parameters
      if name != "kwargs"
  ]
  return {
      *documented,
      *arguments,
      *theirs().to_dict(),
      *transformers.GenerationConfig._get_default_generation_params(),
      *("attn_implementation", "experts_implementation", "num_labels"),
      *("per_layer_config", "quantization_config", "rope_parameters"),
      *("rope_scaling", "rope_theta", "torch_dtype", "unk_token_id"),
  }


class EverySettingTest(parameterized.TestCase):
  """Settings of the families' classes: ignored, or a wrong value refused."""

  @parameterized.parameters(
      ("deepseek_v3", _DEEPSEEK),
      ("gemma3_text", _PUBLISHED["google/gemma-3-1b-it"]),
      ("gemma4_text", hf_config.language_model(GEMMA4)),
      ("glm4_moe", _GLM),
      ("gpt2", _GPT2),
      ("gpt_neox", _NEOX),
      ("gpt_oss", _OSS),
      ("llama", _LLAMA),
      ("ministral3", hf_config.language_model(_MINISTRAL)),
      ("mistral", _PUBLISHED["mistralai/Mistral-7B-v0.1"]),
      ("olmo3", _OLMO),
      ("qwen2", _PUBLISHED["Qwen/Qwen2.5-0.5B"]),
      ("qwen3", _PUBLISHED["Qwen/Qwen3-0.6B"]),
      ("qwen3_5_text", hf_config.language_model(_QWEN3_5)),
      ("qwen3_5_moe_text", hf_config.language_model(QWEN3_5_MOE)),
      ("qwen3_next", _NEXT),
      ("qwen3_moe", _PUBLISHED["Qwen/Qwen3-30B-A3B"]),
      ("smollm3", _PUBLISHED["HuggingFaceTB/SmolLM3-3B"]),
      ("bert", _PUBLISHED["sentence-transformers/all-MiniLM-L6-v2"]),
      ("roberta", _PUBLISHED[_ROBERTA]),
  )
  def test_is_ignored_or_refused(self, family, hf):
    hf = {k: v for k, v in hf.items() if k not in ("dtype", "torch_dtype")}
    read, names = hf_config.from_hf, _settings_of_class(family)
    # Settings of a scalar head, which this file has not.
    names -= {"id2label", "num_labels"}
    if family.startswith(("qwen", "smollm")) and "_5_" not in family:
      names -= {"sliding_window"}  # Only with use_sliding_window, refused.
    if family in encoder.FAMILIES:
      read = encoder.encoder_config_from_hf
      # An encoder is float32, stops nowhere, and needs no head.
      names -= {
          "architectures", "bos_token_id", "dtype", "eos_token_id",
          "tie_word_embeddings", "torch_dtype",
      }  # fmt: skip
    right, ignored = read(hf), hf_config.ignored(names)
    self.assertContainsSubset(
        ("initializer_range", "unk_token_id", "use_cache"), ignored
    )
    for name in sorted(names - {"model_type"}):
      with self.subTest(name):
        wrong = {**hf, name: "a wrong value"}
        if name in ignored:
          self.assertEqual(read(wrong), right)
        else:
          with self.assertRaisesRegex(ValueError, "a wrong value"):
            read(wrong)

  def test_one_line_of_the_log_names_the_ignored_ones(self):
    folder = self.create_tempdir()
    hf = {**_LLAMA, "unk_token_id": 0, "use_cache": True, "_commit": "1"}
    folder.create_file("config.json", json.dumps(hf))
    with self.assertLogs(level="INFO") as logs:
      for _ in range(2):
        config = hf_config.read(folder)
    self.assertEqual(config, hf_config.from_hf(_LLAMA))
    (line,) = logs.output
    self.assertEndsWith(line, "on the logits: unk_token_id, use_cache")

  def test_run_folder_error_names_export_command(self):
    run = pathlib.Path(self.create_tempdir().full_path)
    step = run / "checkpoints" / "80"
    step.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    for folder, operand in ((run, ""), (step.parent, ""), (step, " 80")):
      with self.assertRaisesRegex(
          ValueError,
          f"{folder}: .*; it is a run: .*--program=export --workdir={run}"
          f"{operand}` writes its model to {run}/export$",
      ):
        hf_config.read(folder)
    with self.assertRaisesRegex(ValueError, "there is no such file$"):
      hf_config.read(run.parent)

  def test_multimodal_config_reads_as_copy_saved_by_transformers(self):
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    saved = json.loads(transformers.Gemma3Config(**hf).to_json_string())
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    config = read(hf)
    self.assertEqual(read(saved), config)
    self.assertEqual((config.num_layers, config.vocab_size), (34, 262208))
    self.assertEqual((config.rope_factor, config.stop_ids), (8.0, (1, 106)))
    self.assertEqual(config.windows[:7], (1024,) * 5 + (0, 1024))
    with self.assertRaisesRegex(ValueError, "novelty=1 is an unknown setting"):
      read({**hf, "novelty": 1})

  def test_reads_ministral_3_and_copies_saved_by_transformers(self):
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    config = read(_MINISTRAL)
    theirs = transformers.Mistral3Config(**_MINISTRAL)
    self.assertEqual(read(json.loads(theirs.to_json_string())), config)
    text = {**_MINISTRAL["text_config"], "dtype": "bfloat16"}
    own = transformers.Ministral3Config(**text)
    self.assertEqual(read(json.loads(own.to_json_string())), config)
    self.assertEqual(config.eos_id, own.eos_token_id)
    self.assertEqual((config.pad_id, config.bos_id), (11, 1))
    self.assertEqual((config.query_growth, config.rope_factor), (0.1, 16.0))
    self.assertEqual(config.rope_original_positions, 16384)
    # The class's own settings have a key that it does not read.
    default = json.loads(transformers.Ministral3Config().to_json_string())
    self.assertIn("max_position_embeddings", default["rope_parameters"])
    sizes = {**text, "model_type": "ministral3", **default}
    self.assertEqual(read(sizes).query_growth, 0.1)

  @parameterized.parameters(
      ("text_config", {"model_type": "mistral"}, "model_type='ministral3'"),
      # A missing one is "mistral".
      ("text_config", {}, "model_type='ministral3'"),
      ("architectures", ["Ministral3ForConditionalGeneration"], "architectur"),
      ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
  )
  def test_multimodal_models_of_other_kinds_are_refused(
      self, name, value, message
  ):
    with self.assertRaisesRegex(ValueError, message):
      hf = hf_config.language_model({**_MINISTRAL, name: value})
      hf_config.from_hf(hf)

  def test_text_config_decides_about_head(self):
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    tie = "tie_word_embeddings"
    self.assertFalse(read({**_MINISTRAL, tie: True}).tie_embeddings)
    text = {**_MINISTRAL["text_config"], tie: True}
    tied = {**_MINISTRAL, "text_config": text}
    self.assertTrue(read(tied).tie_embeddings)
    with self.assertRaisesRegex(ValueError, f"contradicts text_config.{tie}"):
      read({**tied, tie: False})

  @parameterized.parameters(
      "llama_4_scaling_beta", "original_max_position_embeddings"
  )
  def test_growth_of_queries_is_required(self, name):
    text = hf_config.language_model(_MINISTRAL)
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 64, name: None}
    with self.assertRaisesRegex(ValueError, f"{name}=None is not supported"):
      hf_config.from_hf({**text, "rope_parameters": rope})

  @parameterized.parameters(
      ("HuggingFaceTB/SmolLM3-3B", 3.075),
      ("allenai/Olmo-3-7B-Instruct", 7.298),
      ("allenai/Olmo-3-32B-Think", 32.234),
      ("Ministral 3 8B", 8.490),
      ("Qwen3.5 35B A3B", 34.661),
      ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79.674),
      # Without multi-token prediction; the papers have 671B and 1T.
      ("deepseek-ai/DeepSeek-V3", 671.026),
      ("moonshotai/Kimi-K2-Instruct", 1026.408),
      ("zai-org/GLM-4.5-Air", 106.852),
      # Without towers, which have 0.5B of the 5.1B.
      ("Gemma 4 E2B", 4.629),
      ("Gemma 4 31B", 30.697),
  )
  def test_sizes_are_those_of_the_published_models(self, name, billions):
    others = {
        "Ministral 3 8B": _MINISTRAL, "Qwen3.5 35B A3B": QWEN3_5_MOE,
        "Gemma 4 E2B": GEMMA4, "Gemma 4 31B": GEMMA4_31B,
    }  # fmt: skip
    hf = {**_PUBLISHED, **others}[name]
    config = hf_config.from_hf(hf_config.language_model(hf))
    size = hf_names.num_params(config) / 1e9
    self.assertAlmostEqual(size, billions, delta=0.001)

  @parameterized.parameters((GEMMA4,), (GEMMA4_31B,), (GEMMA4_26B,))
  def test_reads_gemma_4_as_transformers_does(self, hf):
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    config, theirs = read(hf), transformers.Gemma4Config(**hf)
    saved = json.loads(theirs.to_json_string())
    self.assertIn("per_layer_config", saved["text_config"])
    self.assertEqual(read(saved), config)
    text = theirs.text_config
    for n, theirs in enumerate(text.per_layer_config):
      heads = theirs.num_key_value_heads, theirs.head_dim
      self.assertEqual(config.kv_shape(n), heads)
    modes = [mode == "reuse" for mode in text.kv_sharing_modes]
    own = list(range(config.num_layers))
    self.assertEqual([n != m for n, m in zip(config.kv_sources, own)], modes)
    self.assertEqual(text.final_logit_softcapping, config.logit_cap)
    # What the class leaves out has its defaults.
    plain = json.loads(transformers.Gemma4TextConfig().to_json_string())
    self.assertEqual(hf_config.from_hf({"model_type": "gemma4_text"}),
                     hf_config.from_hf(plain))  # fmt: skip

  def test_gemma_4_saved_by_transformers_has_settings_of_its_layers_alone(self):
    hf = hf_config.language_model(GEMMA4_31B)
    layers = {str(n): {"head_dim": 256} for n in range(5, 60, 6)}
    hf = {**hf, "per_layer_config": layers}
    theirs = transformers.Gemma4TextConfig(**hf).per_layer_config[5]
    self.assertEqual(
        hf_config.from_hf(hf).kv_shape(5),
        (theirs.num_key_value_heads, theirs.head_dim),
    )

  def test_shared_layers_read_last_own_layer_of_their_type(self):
    config = hf_config.from_hf(hf_config.language_model(GEMMA4))
    self.assertEqual(config.kv_sources[:15], tuple(range(15)))
    self.assertEqual(config.kv_sources[15:], (13, 13, 13, 13, 14) * 4)
    # 12 local layers with a head of 256 and 3 global ones with one of 512.
    self.assertEqual(config.cached_numbers, 2 * (12 * 256 + 3 * 512))
    self.assertEqual(config.num_own_layers, 15)

  @parameterized.parameters(
      (dict(enable_moe_block=True), "num_experts and top_k_experts must be 1"),
      (dict(enable_moe_block=True, num_experts=8, top_k_experts=2,
            moe_intermediate_size=64), "without experts, the last"),
      (dict(use_bidirectional_attention="all"), "use_bidirectional_attention"),
      (dict(vocab_size_per_layer_input=7), "vocab_size_per_layer_input=7"),
      (dict(num_kv_shared_layers=35), "num_shared_layers=35"),
      (dict(num_kv_shared_layers=31), "num_shared_layers=31"),
      (dict(num_kv_shared_layers=-1), "num_shared_layers=-1"),
      (dict(global_head_dim=15), "global_head_dim=15"),
      (dict(sliding_window=0), "sliding_window=0"),
      (dict(rope_theta=5.0), "rope_theta=5.0 is an unknown setting"),
      (dict(attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0"),
      (dict(per_layer_config={"3": {"head_dim": 8}}), "per_layer_config"),
      (dict(per_layer_config={"4": {"head_dim": 8}}), "per_layer_config"),
      (dict(per_layer_config={str(n): {"num_key_value_heads": 2}
                              for n in range(4, 35, 5)}), "per_layer_config"),
      (dict(attention_k_eq_v=True, num_global_key_value_heads=3),
       "global_kv_heads=3"),
      (dict(rope_parameters={"full_attention":
       {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}),
       "partial_rotary_factor=1.0, or rope_type='proportional'"),
      (dict(rope_parameters={"sliding_attention":
       {"rope_type": "proportional"}}), "proportional"),
  )  # fmt: skip
  def test_refuses_other_gemma_4(self, changes, named):
    hf = hf_config.language_model(GEMMA4)
    with self.assertRaisesRegex(ValueError, named):
      hf_config.from_hf({**hf, **changes})

  def test_reads_delta_nets_as_transformers_does(self):
    theirs = transformers.Qwen3_5Config(**_QWEN3_5).text_config
    saved = json.loads(theirs.to_json_string())
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    config = read(_QWEN3_5)
    self.assertEqual(read(saved), dataclasses.replace(config, stop_ids=()))
    kinds = [kind == "linear_attention" for kind in theirs.layer_types]
    self.assertEqual(list(config.delta_layers), kinds)
    self.assertEqual(config.layers_with("attention"), (3, 7))
    self.assertEqual(config.layers_with("mlp"), tuple(range(8)))
    self.assertEqual(config.rotary_dim, 64)
    self.assertEqual(config.delta_channels, 2 * 16 * 128 + 32 * 128)
    # What the class leaves out has its defaults.
    plain = json.loads(transformers.Qwen3_5TextConfig().to_json_string())
    self.assertEqual(hf_config.from_hf({"model_type": "qwen3_5_text"}),
                     hf_config.from_hf(plain))  # fmt: skip

  @parameterized.parameters(
      (dict(attn_output_gate=False), "attn_output_gate"),
      (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype"),
      (dict(full_attention_interval=3), "contradicts full_attention_interval"),
      (dict(full_attention_interval=0), "full_attention_interval"),
      (dict(layer_types=["linear_attention"] * 8), "layer_types"),
      (dict(layer_types=["full_attention"] * 7), "layer_types"),
      (dict(linear_num_value_heads=24), "delta_value_heads=24"),
      (dict(linear_conv_kernel_dim=0), "delta_taps=0"),
      (dict(hidden_act="gelu"), "hidden_act"),
  )
  def test_refuses_other_delta_nets(self, changes, named):
    hf = hf_config.language_model(_QWEN3_5)
    with self.assertRaisesRegex(ValueError, named):
      hf_config.from_hf({**hf, **changes})

  def test_reads_experts_of_qwen3_5_as_transformers_does(self):
    theirs = transformers.Qwen3_5MoeConfig(**QWEN3_5_MOE).text_config
    read = lambda hf: hf_config.from_hf(hf_config.language_model(hf))
    config = read(QWEN3_5_MOE)
    saved = json.loads(theirs.to_json_string())
    self.assertEqual(read(saved), dataclasses.replace(config, stop_ids=()))
    self.assertEqual(
        (config.mlp_width, config.shared_expert_width, config.norm_router),
        (theirs.moe_intermediate_size, 512, True),
    )
    self.assertEqual(config.kinds[3], ("attention", "mlp", "shared_mlp"))
    plain = json.loads(transformers.Qwen3_5MoeTextConfig().to_json_string())
    self.assertEqual(
        hf_config.from_hf({"model_type": "qwen3_5_moe_text"}),
        hf_config.from_hf(plain),
    )

  @parameterized.parameters(
      (dict(mlp_only_layers=[1, 3]), {1, 3}),
      (dict(decoder_sparse_step=2), {0, 2}),
      (dict(decoder_sparse_step=2, mlp_only_layers=[1]), {0, 1, 2}),
      (dict(mlp_only_layers=[7]), set()),
      (dict(mlp_only_layers=None), set()),
  )
  def test_reads_layers_without_experts_as_transformers_does(
      self, settings, dense
  ):
    for hf, family in ((_NEXT, "qwen3_next"), (_MOE, "qwen3_moe")):
      small = dict(num_experts=4, num_experts_per_tok=1, hidden_size=8,
                   vocab_size=8, head_dim=2, moe_intermediate_size=2,
                   intermediate_size=2, num_hidden_layers=4)  # fmt: skip
      config = hf_config.from_hf({**hf, **small, **settings})
      is_dense = config.dense_layers or (False,) * 4
      self.assertEqual({n for n in range(4) if is_dense[n]}, dense, family)
      self.assertEqual(config.num_expert_layers, 4 - len(dense))
      again = hf_config.from_hf(hf_config.to_hf(config))
      self.assertEqual(again, config)

  def test_reads_latents_as_transformers_does(self):
    without = {k: v for k, v in _DEEPSEEK.items() if k != "auto_map"}
    theirs = transformers.DeepseekV3Config(**without)
    saved = json.loads(theirs.to_json_string())
    config = hf_config.from_hf(_DEEPSEEK)
    self.assertEqual(hf_config.from_hf(saved), config)
    self.assertEqual((config.head_dim, config.rotary_dim), (192, 64))
    # 1,152 bytes in bfloat16; keys and values of all heads have 81,920.
    self.assertEqual(config.cached_numbers, 61 * (512 + 64))
    self.assertEqual(config.kinds[2:4], (
        ("attention", "dense_mlp"), ("attention", "mlp", "shared_mlp")
    ))  # fmt: skip
    # The technical report has 37B active params, with embeddings.
    active = (hf_names.num_params(config) - config.idle_params) / 1e9
    self.assertAlmostEqual(active, 37.5, delta=0.1)
    # Null is no latent of queries, and what the class leaves out has defaults.
    plain = json.loads(transformers.DeepseekV3Config().to_json_string())
    default = hf_config.from_hf({"model_type": "deepseek_v3"})
    self.assertEqual(hf_config.from_hf(plain), default)
    self.assertEqual(default.query_rank, 1536)
    config = hf_config.from_hf({**_DEEPSEEK, "q_lora_rank": None})
    self.assertEqual(config.query_rank, 0)
    self.assertIsNone(hf_config.to_hf(config)["q_lora_rank"])

  def test_kimi_k2_is_read_and_written_as_deepseek_v3(self):
    config = hf_config.from_hf(_KIMI)
    self.assertEqual(config.family, "deepseek_v3")
    self.assertEqual((config.num_experts, config.num_dense_layers), (384, 1))
    saved = hf_config.to_hf(config)
    self.assertEqual(saved["model_type"], "deepseek_v3")
    self.assertEqual(hf_config.from_hf(saved), config)

  @parameterized.parameters(
      (dict(rope_interleave=False), "rope_interleave"),
      (dict(scoring_func="softmax"), "scoring_func"),
      (dict(topk_method="group_limited_greedy"), "topk_method"),
      (dict(moe_layer_freq=2), "moe_layer_freq"),
      (dict(head_dim=128), "head_dim=128"),
      (dict(qk_head_dim=128), "qk_head_dim=128"),
      (dict(num_key_value_heads=8), "num_kv_heads=8"),
      (dict(n_group=3), "num_expert_groups=3"),
      (dict(n_group=256, topk_group=8), "num_expert_groups=256"),
      (dict(topk_group=9), "groups_per_token=9"),
      (dict(n_group=128, topk_group=2), "groups_per_token=2"),
      (dict(first_k_dense_replace=61), "first_k_dense_replace=61"),
      (dict(n_shared_experts=-1), "n_shared_experts=-1"),
      (dict(kv_lora_rank=0), "latent_rank=0"),
      (dict(v_head_dim=0), "value_dim=0"),
      (dict(qk_rope_head_dim=7), "rope_dim=7"),
      (dict(quantization_config={"quant_method": "awq"}), "awq"),
  )
  def test_refuses_other_latents_and_routers(self, changes, named):
    with self.assertRaisesRegex(ValueError, named):
      hf_config.from_hf({**_DEEPSEEK, **changes})

  def test_null_is_no_setting(self):
    hf = {**_LLAMA, "quantization_config": None, "novelty": None}
    self.assertEqual(hf_config.from_hf(hf), hf_config.from_hf(_LLAMA))


class FromHfTest(parameterized.TestCase):

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
            pad_id=0,
            bos_id=1,
            eos_id=2,
        ),
    )

  def test_omitted_settings_get_their_defaults(self):
    optional = ("head_dim", "num_key_value_heads", "pad_token_id")
    hf = {k: v for k, v in _LLAMA.items() if k not in optional}
    config = hf_config.from_hf(hf)
    self.assertEqual((config.num_kv_heads, config.head_dim), (4, 16))
    self.assertIsNone(config.pad_id)

  def test_dtype_overrides_the_file(self):
    config = hf_config.from_hf({**_LLAMA, "torch_dtype": "float16"})
    self.assertEqual(config.param_dtype, "float32")
    config = hf_config.from_hf(_LLAMA, dtype="bfloat16")
    self.assertEqual(config.param_dtype, "bfloat16")
    self.assertEqual(config.compute_dtype, "bfloat16")

  @parameterized.parameters(
      (_LLAMA, "model_type", "mamba"),
      (_LLAMA, "model_type", "gemma2"),
      (_LLAMA, "hidden_act", "gelu"),
      (_LLAMA, "architectures", ["LlamaModel"]),
      (_LLAMA, "attention_bias", 1),
      (_LLAMA, "attention_dropout", 0.1),
      (_LLAMA, "rope_scaling", {"rope_type": "dynamic", "factor": 8.0}),
      (_LLAMA, "rope_scaling", {"type": "yarn"}),
      (_LLAMA, "rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
      (_LLAMA, "rope_parameters", {"rope_type": "linear", "factor": None}),
      (_LLAMA, "rope_parameters", {"rope_type": "linear", "factor": 2, "n": 1}),
      (_LLAMA, "rope_theta", 1.0),
      (_LLAMA, "rope_interleaved", True),
      (_LLAMA, "is_encoder_decoder", True),
      (_LLAMA, "tie_encoder_decoder", True),
      (_LLAMA, "eos_token_id", [1, "</s>"]),
      (_LLAMA, "eos_token_id", []),
      (_LLAMA, "eos_token_id", 1.5),
      (_LLAMA, "rms_norm_eps", "small"),
      (_LLAMA, "tie_word_embeddings", 1),
      (_LLAMA, "quantization_config", {"bits": 4}),
      (_LLAMA, "sliding_window", 32),
      (_QWEN, "use_sliding_window", True),
      (_QWEN, "use_mrope", True),
      (_QWEN, "layer_types", ["full_attention", "sliding_attention"]),
      (_QWEN, "head_dim", "wide"),
      (_MOE, "decoder_sparse_step", 0),
      (_MOE, "decoder_sparse_step", 49),
      (_MOE, "mlp_only_layers", [-1]),
      (_MOE, "mlp_only_layers", [*range(48)]),
      (_NEXT, "shared_expert_intermediate_size", "wide"),
      (hf_config.language_model(QWEN3_5_MOE), "mlp_only_layers", [1]),
      (hf_config.language_model(QWEN3_5_MOE), "norm_topk_prob", False),
      (hf_config.language_model(QWEN3_5_MOE), "output_gate_type", "sigmoid"),
      (_MOE, "num_local_experts", 64),
      (_OLMO, "sliding_window", None),
      (_OLMO, "sliding_window_pattern", 4),
      (_OLMO, "rope_local_base_freq", 1e4),
      (_OLMO, "rope_theta", 1e4),
      (_OLMO, "layer_types", ["full_attention"] * 31),
      (_OLMO, "rope_parameters", {"rope_type": "yarn", "factor": 8.0}),
      (
          _OLMO,
          "rope_parameters",
          {"sliding_attention": {"rope_type": "linear", "factor": 8.0}},
      ),
      (_SMOL, "no_rope_layers", [1] * 35),
      (_SMOL, "no_rope_layers", [2] * 36),
      (_SMOL, "no_rope_layers", [True] * 36),
      (_SMOL, "no_rope_layer_interval", 0),
      (_SMOL, "layer_types", ["sliding_attention"] * 36),
      (_SMOL, "use_sliding_window", True),
      (_NEOX, "hidden_dropout", 0.1),
      (_NEOX, "hidden_act", "quick_gelu"),
      (_NEOX, "hidden_act", ["gelu"]),
      (_NEOX, "rotary_emb_base", "large"),
      (_NEOX, "rope_theta", 5.0),
      (_NEOX, "partial_rotary_factor", 0.5),
      (_NEOX, "rope_parameters", {"partial_rotary_factor": 0.5}),
      (_NEOX, "rope_scaling", {"rope_type": "yarn"}),
      (_NEOX, "num_key_value_heads", 2),
      (_GPT2, "add_cross_attention", True),
      (_GPT2, "activation_function", "mish"),
      (_GPT2, "scale_attn_weights", 1),
      (_GPT2, "n_ctx", 512),
      (_GPT2, "n_inner", "wide"),
  )
  def test_refuses_by_name(self, hf, name, value):
    # Rotary settings are named as in "rope_parameters".
    rotary = ("rope_p", "rope_s", "rope_t", "rotary", "partial")
    named = "rope_|rotary_" if name.startswith(rotary) else name
    with self.assertRaisesRegex(ValueError, named):
      hf_config.from_hf({**hf, name: value})

  @parameterized.parameters(
      ("attention_factor", "large", "attention_factor='large' is not supp"),
      ("attention_factor", 0.0, "rope_attention_factor=0.0: must be"),
      ("attn_factor", 0.88, "rope_parameters.attn_factor=0.88 is an unknown"),
      ("beta_fast", 0.5, "rope_beta_fast=0.5: must be rope_beta_slow=1.0 or"),
      ("beta_slow", [1.0], r"beta_slow=\[1.0\] is not supported"),
      ("beta_slow", 0.0, "rope_beta_slow=0.0: must be above 0"),
      ("factor", 0.5, "rope_factor=0.5: must be 1 or more"),
      ("mscale", True, "mscale=True is not supported; supported: float"),
      ("mscale_all_dim", -1.0, "rope_mscale_all_dim=-1.0: must be 0 or more"),
      ("original_max_position_embeddings", 8.5, "embeddings=8.5 is not supp"),
      ("original_max_position_embeddings", 0, "rope_original_positions=0: mu"),
      ("rope_theta", 1.0, "rope_theta=1.0: must be above 0, or above 1"),
      ("truncate", 0, "truncate=0 is not supported; supported: bool"),
  )
  def test_refuses_yarn_settings_by_name(self, name, value, message):
    rope = {**_YARN, name: value}
    for spelling in ("rope_parameters", "rope_scaling"):
      hf = {**_LLAMA, "rope_parameters": None, spelling: rope}
      with self.assertRaisesRegex(ValueError, message):
        hf_config.from_hf(hf)

  def test_fields_missing_in_family_are_refused(self):
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with self.assertRaisesRegex(ValueError, "rotary_fraction=0.5"):
      hf_config.from_hf({**_LLAMA, "rope_parameters": rope})
    with self.assertRaisesRegex(ValueError, "head_dim"):
      hf_config.from_hf({**_GPT2, "n_head": 7})

  def test_lists_every_problem_at_once(self):
    hf = {**_LLAMA, "hidden_act": "relu", "mlp_bias": 1, "novelty": 1}
    del hf["hidden_size"]
    with self.assertRaises(ValueError) as caught:
      hf_config.from_hf(hf)
    for name in ("hidden_act", "mlp_bias", "novelty", "hidden_size is missing"):
      self.assertIn(name, str(caught.exception))

  def test_reads_the_older_spelling_of_scaling(self):
    scaled = {**_LLAMA, "rope_theta": 50.0}
    del scaled["rope_parameters"]
    scaled["rope_scaling"] = {"type": "linear", "factor": 2.0}
    config = hf_config.from_hf(scaled)
    self.assertEqual((config.rope_type, config.rope_factor), ("linear", 2.0))
    self.assertEqual(config.rope_theta, 50.0)

  def test_gpt_oss_has_yarn_and_windows_unless_it_says_otherwise(self):
    names = ("rope_scaling", "layer_types", "swiglu_limit", "sliding_window")
    left = {k: v for k, v in _OSS.items() if k not in names}
    config = hf_config.from_hf(left)
    self.assertEqual(config, hf_config.from_hf(_OSS))
    self.assertEqual(config.windows[:4], (128, 0, 128, 0))
    self.assertEqual((config.rope_type, config.rope_factor), ("yarn", 32.0))
    self.assertFalse(config.rope_truncate)
    default = {"rope_type": "default", "rope_theta": 150000}
    config = hf_config.from_hf({**left, "rope_parameters": default})
    self.assertEqual(config.rope_type, "default")

  @parameterized.parameters(
      ("quantization_config", {"quant_method": "fp8"},
       "'fp8'.*supported: None or {'quant_method': 'mxfp4'}"),
      ("quantization_config", {"quant_method": "mxfp4", "bits": 4}, "'bits'"),
      ("initial_context_length", 8192, "length=8192 .* None or 4096"),
      ("experts_per_token", 8, "experts_per_token=8 contradicts num_experts_p"),
      ("swiglu_limit", 0.0, "swiglu_limit=0.0: must be above 0"),
      ("num_experts_per_tok", 64, "=(64|4)"),
  )  # fmt: skip
  def test_refuses_settings_of_gpt_oss_by_name(self, name, value, message):
    with self.assertRaisesRegex(ValueError, message):
      hf_config.from_hf({**_OSS, name: value})

  def test_mxfp4_leaves_the_dtype_of_other_tensors(self):
    self.assertEqual(hf_config.from_hf(_OSS).param_dtype, "bfloat16")
    self.assertEqual(
        hf_config.from_hf(_OSS, dtype="float32").param_dtype, "float32"
    )
    self.assertNotIn(
        "quantization_config", hf_config.to_hf(hf_config.from_hf(_OSS))
    )

  @parameterized.parameters("rope_scaling", "rope_parameters")
  def test_reads_yarn_as_qwen_publishes_it(self, spelling):
    """The settings that the model cards of Qwen2.5 and Qwen3 have users add."""
    yarn = {**_YARN, "original_max_position_embeddings": 32768}
    for model in ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B"):
      hf = {**_PUBLISHED[model], spelling: yarn}
      config = hf_config.from_hf(hf)
      self.assertEqual(
          config,
          dataclasses.replace(
              hf_config.from_hf(_PUBLISHED[model]),
              rope_type="yarn",
              rope_factor=4.0,
              rope_original_positions=32768,
          ),
      )
      # Tools that derive the factor of attention by themselves still do so.
      self.assertEqual(
          hf_config.to_hf(config)["rope_scaling"],
          {
              "factor": 4.0,
              "original_max_position_embeddings": 32768,
              "rope_type": "yarn",
          },
      )

  def test_yarn_stretches_the_longest_sequence_if_no_other_is_named(self):
    config = hf_config.from_hf({**_LLAMA, "rope_parameters": _YARN})
    self.assertEqual(config.rope_original_positions, 1024)

  @parameterized.parameters(
      (dict(architectures=["LlamaForCausalLM"], id2label={"0": "good"}), 0),
      (dict(architectures=None), 0),
      (dict(architectures=[_CLASSIFIER], id2label={"0": "good"}), 1),
      (dict(architectures=[_CLASSIFIER], num_labels=3), 3),
      # transformers does not write the number that is its default.
      (dict(architectures=[_CLASSIFIER]), 2),
  )
  def test_reads_and_writes_scalar_heads(self, settings, num_labels):
    config = hf_config.from_hf({**_LLAMA, **settings})
    self.assertEqual(config.num_labels, num_labels)
    found = hf_config.to_hf(config)
    self.assertEqual(hf_config.from_hf(found), config)
    self.assertEqual(found["architectures"] == [_CLASSIFIER], num_labels > 0)

  def test_scales_positions_of_layers_without_a_window_alone(self):
    config = hf_config.from_hf(_OLMO)
    self.assertEqual(config.windows[:5], (4096, 4096, 4096, 0, 4096))
    self.assertEqual((config.rope_type, config.rope_factor), ("yarn", 8.0))
    hf = {k: v for k, v in _OLMO.items() if k != "layer_types"}
    self.assertEqual(hf_config.from_hf(hf), config)
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 7.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
    }
    hf = {**_OLMO, "rope_parameters": both}
    del hf["rope_theta"], hf["rope_scaling"]
    config = hf_config.from_hf(hf)
    self.assertEqual((config.rope_theta, config.local_rope_theta), (7.0, 5.0))

  def test_reads_layers_without_positions(self):
    hf = {**_SMOL, "num_hidden_layers": 5, "layer_types": None}
    for flags, every, rotary in (
        ([1, 0, 0, 1, 1], 4, (True, False, False, True, True)),
        ([0, 1, 1, 1, 1, 0], 4, (False, True, True, True, True)),
        ([1, 1, 1, 1, 1], 2, ()),
        (None, 2, (True, False, True, False, True)),
        (None, 6, ()),
    ):
      settings = {"no_rope_layers": flags, "no_rope_layer_interval": every}
      config = hf_config.from_hf(hf | settings)
      self.assertEqual(config.rotary_layers, rotary)

  def test_several_stop_tokens(self):
    config = hf_config.from_hf({**_LLAMA, "eos_token_id": [7, 5]})
    self.assertEqual((config.eos_id, config.stop_ids), (7, (7, 5)))
    found = hf_config.to_hf(config)
    self.assertEqual(found["eos_token_id"], [7, 5])
    self.assertEqual(hf_config.from_hf(found), config)
    self.assertEqual(hf_config.from_hf(_LLAMA).stop_ids, ())


class ToHfTest(parameterized.TestCase):

  @parameterized.parameters(
      ("llama", dict(attention_bias=True, mlp_bias=True)),
      ("llama", dict(tie_embeddings=True, param_dtype="bfloat16",
                     compute_dtype="bfloat16", rope_theta=123.0)),
      ("llama", dict(rope_type="linear", rope_factor=4.0)),
      ("llama", dict(rope_type="llama3", rope_factor=8.0,
                     rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
                     rope_original_positions=64)),
      ("llama", dict(rope_type="yarn", rope_factor=8.0,
                     rope_original_positions=64, rope_beta_fast=16.0,
                     rope_beta_slow=2.0, rope_mscale=0.5,
                     rope_mscale_all_dim=0.7, rope_truncate=False)),
      ("qwen3", dict(rope_type="yarn", rope_factor=4.0,
                     rope_attention_factor=1.0)),
      ("gemma3_text", dict(global_layers=(True, False), sliding_window=9,
                           score_dim=12, rope_type="yarn", rope_factor=8.0)),
      ("mistral", dict(sliding_window=9)),
      ("mistral", dict(sliding_window=0)),
      ("qwen2", {}),
      ("qwen3", dict(attention_bias=True, head_dim=32)),
      ("qwen3_5_text", dict(delta_layers=(False, True), delta_key_heads=3,
                            delta_value_heads=9, delta_key_dim=5,
                            delta_value_dim=7, delta_taps=2,
                            rotary_fraction=0.5, attention_bias=True)),
      ("qwen3_5_text", {}),
      ("qwen3_moe", dict(num_experts=6, experts_per_token=3, norm_router=False,
                         dense_mlp_width=96)),
      ("qwen3_moe", dict(num_experts=6, experts_per_token=3,
                         dense_layers=(False, True))),
      ("qwen3_5_moe_text", dict(num_experts=6, experts_per_token=3,
                                shared_expert_width=7,
                                delta_layers=(False, True))),
      ("qwen3_next", dict(num_experts=6, experts_per_token=3, delta_taps=3,
                          shared_expert_width=7, norm_router=False,
                          dense_layers=(True, False), dense_mlp_width=9)),
      ("gemma3_text", dict(sliding_window=9, activation="gelu_new",
                           score_dim=16)),
      ("gemma3_text", dict(global_layers=(True, False), sliding_window=9,
                           score_dim=12, rope_theta=99.0, rope_type="linear",
                           rope_factor=8.0, local_rope_theta=7.0)),
      ("gemma3_text", dict(sliding_window=0, score_dim=8)),
      ("gemma4_text", dict(GEMMA4_SHAPE, layer_input_width=8,
                           num_shared_layers=2, dense_mlp_width=96,
                           dense_layers=(False, False, True, True))),
      ("gemma4_text", dict(GEMMA4_SHAPE, global_kv_heads=1, logit_cap=9.0,
                           keys_as_values=True, rope_factor=3.0)),
      ("gemma4_text", dict(GEMMA4_SHAPE, rope_type="yarn", rope_factor=2.0,
                           rotary_fraction=1.0, attention_bias=True,
                           global_layers=(False, True, True, True))),
      ("gpt_oss", dict(num_experts=6, experts_per_token=3, sliding_window=9,
                       global_layers=(True, False), attention_bias=True,
                       swiglu_alpha=1.5, swiglu_limit=3.0, rope_type="yarn",
                       rope_factor=8.0, rope_truncate=False)),
      ("gpt_oss", dict(num_experts=6, experts_per_token=3)),
      ("olmo3", dict(global_layers=(True, False), sliding_window=9,
                     attention_bias=True, local_rope_theta=7.0,
                     rope_type="yarn", rope_factor=2.0)),
      ("olmo3", dict(sliding_window=9)),
      ("olmo3", dict(global_layers=(True, True), sliding_window=9,
                     tie_embeddings=True)),
      ("ministral3", {}),
      ("ministral3", dict(query_growth=0.1, rope_type="yarn", rope_factor=16.0,
                          rope_original_positions=64, rope_mscale=1.0,
                          rope_mscale_all_dim=1.0, sliding_window=5)),
      ("smollm3", {}),
      ("smollm3", dict(rotary_layers=(False, True), attention_bias=True,
                       mlp_bias=True, rope_type="yarn", rope_factor=2.0)),
      ("gpt_neox", dict(activation="gelu")),
      ("gpt_neox", dict(activation="gelu_new", attention_bias=True,
                        parallel_residual=True, rotary_fraction=0.25,
                        rope_theta=50.0, rope_type="linear", rope_factor=2.0)),
      ("deepseek_v3", hf_case.DEEPSEEK),
      ("glm4_moe", hf_case.GLM),
      ("gpt2", dict(activation="gelu_new", tie_embeddings=True)),
      ("gpt2", dict(activation="relu", scale_attention=False,
                    scale_attention_by_layer=True)),
  )  # fmt: skip
  def test_writes_each_family_and_reads_it_back(self, family, changes):
    if not family_lib.FAMILIES[family].has_grouped_heads:
      changes = dict(num_kv_heads=4, head_dim=8) | changes
    config = hf_case.make_config(**(dict(family=family) | changes))
    found = hf_config.to_hf(config)
    self.assertEqual(found["model_type"], family)
    self.assertEqual(hf_config.from_hf(found), config)


class GenerationConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, None, (7, ())),
      ({}, 7, (7, ())),
      ({}, [5, 7], (7, (7, 5))),
      ({"eos_token_id": [7, 5]}, [9, 5], (7, (7, 5, 9))),
      ({"eos_token_id": None}, 4, (4, (4,))),
  )
  def test_stop_tokens_of_generation_config_are_added(
      self, settings, value, found
  ):
    config = hf_config.from_hf({**_LLAMA, "eos_token_id": 7, **settings})
    generation = {"eos_token_id": value, "temperature": 0.6, "top_p": 0.9}
    config = hf_config.with_generation(config, generation)
    self.assertEqual((config.eos_id, config.stop_ids), found)

  @parameterized.parameters(("2",), ([[1]],), ([-1],), ([True],), (1.5,))
  def test_others_are_refused(self, value):
    config = hf_config.from_hf(_LLAMA)
    with self.assertRaisesRegex(ValueError, "generation_config.*eos_token_id"):
      hf_config.with_generation(config, {"eos_token_id": value})
