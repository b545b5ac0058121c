# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random `transformers` models of every family, small enough for tests.

Needs torch.
"""

import numpy as np
import torch
import transformers

VOCAB = 64
LENGTHS = np.array([24, 7, 13, 1])
_ROPE = dict(rope_type="linear", factor=4.0, rope_theta=500.0)
_ROPE_3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_GATED = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
# Name of a case -> class of transformers' and its settings.
CASES = {
    "llama": ("Llama", _GATED),
    "llama_bias": ("Llama", dict(_GATED, attention_bias=True, mlp_bias=True)),
    "llama_linear": ("Llama", dict(_GATED, rope_parameters=_ROPE)),
    "llama3": (
        "Llama",
        dict(_GATED, rope_parameters=_ROPE_3, tie_word_embeddings=True),
    ),
    "mistral": ("Mistral", dict(_GATED, sliding_window=6)),
    "mistral_wide": ("Mistral", dict(_GATED, sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", dict(_GATED, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(_GATED, head_dim=16)),
    "qwen3_bias": ("Qwen3", dict(_GATED, head_dim=16, attention_bias=True)),
}
# Of the cases where seed 0 has a step whose two best tokens nearly tie.
SEEDS = dict(llama_bias=1, llama_linear=1, llama3=1, mistral=1, qwen2=2)


def make(case: str, num_labels: int = 0) -> torch.nn.Module:
  """Returns a case's model; norms are not 1 and biases not 0.

  With labels it has a scalar head in place of the token head.
  """
  name, settings = CASES[case]
  torch.manual_seed(SEEDS.get(case, 0))
  config = getattr(transformers, f"{name}Config")(
      vocab_size=VOCAB,
      initializer_range=0.2,
      pad_token_id=0,
      bos_token_id=None,
      eos_token_id=1,
      **settings,
  )
  auto = transformers.AutoModelForCausalLM
  if num_labels:
    config.num_labels = num_labels
    auto = transformers.AutoModelForSequenceClassification
  model = auto.from_config(config).eval()
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for param in model.parameters():
      if param.ndim == 1:
        param.add_(0.3 * torch.randn(param.shape, generator=generator))
  return model


def batch(length: int = 24) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and mask, left-padded prompts of unequal lengths."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, VOCAB, (len(LENGTHS), length))
  mask = np.arange(length)[None] >= length - LENGTHS[:, None]
  return tokens, mask.astype(np.int64)


def logits(model: torch.nn.Module, tokens, mask) -> np.ndarray:
  """Returns the model's logits; positions count real tokens."""
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  with torch.no_grad():
    return model(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
    ).logits.numpy()


def values(model: torch.nn.Module, tokens, mask) -> np.ndarray:
  """Returns what a scalar head gives at every position [B, L, labels]."""
  found = []
  hook = model.score.register_forward_hook(lambda *args: found.append(args[-1]))
  logits(model, tokens, mask)
  hook.remove()
  return found[0].numpy()


def greedy(
    model: torch.nn.Module, tokens, mask, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns `generate`'s greedy tokens and the top-two margin of each."""
  with torch.no_grad():
    out = model.generate(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
  top = torch.stack(out.logits, 1).topk(2, -1).values.numpy()
  return out.sequences.numpy()[:, tokens.shape[1] :], top[..., 0] - top[..., 1]
