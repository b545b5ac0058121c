# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the model's shape and of its tokenizer."""

import json

from tba_jax.models.families import family as family_lib
from tba_jax.system import rules

_s = rules.Setting


# Arguments of a chat template that renderings set themselves.
_OWN_ARGUMENTS = frozenset(
    ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template")
)


def _is_object(text: str) -> bool:
  """Returns whether a text is "" or a JSON object without arguments of ours."""
  try:
    value = json.loads(text or "{}")
  except ValueError:
    return False
  return isinstance(value, dict) and not _OWN_ARGUMENTS & value.keys()


# fmt: off
SECTIONS = {
    "tokenizer": rules.Section("", fixed="tokens in the buffer are this"
        " tokenizer's"),
    "model": rules.Section("Shape of the policy. A Hugging Face folder in"
        " `init` (or `sft.init`) brings its own, except for the two dtypes.",
        fixed="params in the checkpoint have this shape"),
}

SETTINGS = {
    "tokenizer.source": _s("task", rules.TEXT, "'task': the initial"
        " model's tokenizer, or the task's with init='scratch'; or a folder"
        " with Hugging Face tokenizer files", hosts="own", files=True),
    "tokenizer.bos": _s("auto", rules.one_of("auto", "always", "never"),
        "whether a prompt starts with BOS: 'auto' if the tokenizer itself adds"
        " it, 'always' if it has one"),
    "tokenizer.chat": _s(False, rules.FLAG, "whether a prompt given as a text"
        " is a user's message in the tokenizer's chat template; prompts given"
        " as messages always are in it"),
    "tokenizer.template_arguments": _s("",
        rules.Allowed("'' or a JSON object without messages or tools",
        _is_object), "further arguments of"
        " the chat template, such as {\"enable_thinking\": false}"),

    "model.family": _s("llama", rules.one_of(*family_lib.FAMILIES),
        "family of the model, see tba_jax/models/"),
    "model.num_layers": _s(3, rules.COUNT, ""),
    "model.width": _s(64, rules.COUNT, "width of the residual stream"),
    "model.num_heads": _s(4, rules.COUNT, "query heads"),
    "model.num_kv_heads": _s(4, rules.COUNT, "key-value heads; grouped-query"
        " attention below num_heads"),
    "model.head_dim": _s(
        16, rules.Allowed(
            "an even number from 2 on", lambda v: v > 1 and v % 2 == 0),
        "width of one head"),
    "model.mlp_width": _s(172, rules.COUNT, "hidden units of a block's MLP"),
    "model.num_experts": _s(0, rules.FROM_0, "experts per layer, in families"
        " with experts"),
    "model.experts_per_token": _s(0, rules.FROM_0, "experts that a token uses"),
    "model.tie_embeddings": _s(False, rules.FLAG, "share the embedding table"
        " with the head"),
    "model.max_positions": _s(128, rules.COUNT, "longest sequence, prompt and"
        " completion together, tokens"),
    "model.param_dtype": _s("float32", rules.DTYPE, "dtype of a frozen base"
        " (lora.rank); trained params are float32, since bfloat16 rounds small"
        " updates away", fixed="the run began with it"),
    "model.compute_dtype": _s("auto",
        rules.one_of("auto", "float32", "bfloat16"), "dtype of activations;"
        " 'auto' is bfloat16 on an accelerator, float32 on a CPU, where `train`"
        " begins runs of models of width 256 and above in bfloat16 if the CPU"
        " has AVX512_BF16 or AMX",
        fixed="log-probs in the buffer were computed in it"),
    "model.attention": _s("auto",
        rules.one_of("auto", "plain", "splash", "cudnn"),
        "kernel of training and prefill: 'auto' is splash attention on TPU,"
        " cuDNN's or Triton's on GPU where they serve the model, else plain;"
        " 'auto' alone also has kernels of decode steps with mixed lengths",
        fixed=""),
}
# fmt: on
