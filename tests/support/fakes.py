# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model, tokenizers and a task with known answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.tasks import base


@dataclasses.dataclass(frozen=True)
class FakeConfig:
  vocab_size: int
  max_positions: int
  num_experts: int = 0
  has_states: bool = False


class FakeModel:
  """Scripted logits with the interface of `models.transformer.Model`.

  The logits after a sequence are the sum over its tokens of a table's entries
  for (position, token), so a lost, repeated or misplaced token changes them.
  Positions start at 0 in the prompt and continue in the completion.

  params: {"table": [num_positions, V, V] float32, "bias": [V] float32}.
  """

  def __init__(self, vocab_size: int, num_positions: int):
    self.config = FakeConfig(vocab_size, num_positions)

  def init(self, rng: jax.Array):
    V, L = self.config.vocab_size, self.config.max_positions
    table_rng, bias_rng = jax.random.split(rng)
    return {
        "table": jax.random.normal(table_rng, (L, V, V)),
        "bias": jax.random.normal(bias_rng, (V,)),
    }

  def init_cache(
      self,
      num_rows,
      lengths,
      num_parts=None,
      rows_per_prompt=1,
      has_routes=False,
  ):
    del num_parts, rows_per_prompt
    V = self.config.vocab_size
    return [jnp.zeros((num_rows, length, V)) for length in lengths]

  def fill_cache(self, cache, prompt_cache, slots):
    filled, start = [], 0
    for block in cache:
      end = start + block.shape[1]
      if end <= prompt_cache.shape[1]:
        new = prompt_cache[jnp.maximum(slots, 0), start:end]
        block = jnp.where((slots >= 0)[:, None, None], new, block)
      filled.append(block)
      start = end
    return filled

  def decode_params(self, params, num_positions):
    del num_positions
    return params

  def logits(self, params, tokens, mask):
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1).astype(int) - 1, 0)
    seen_BxLxV = params["table"][positions, tokens] * mask[..., None]
    return jnp.cumsum(seen_BxLxV, axis=1) + params["bias"][None, None]

  def prefill(self, params, tokens, mask):
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1).astype(int) - 1, 0)
    seen_BxPxV = params["table"][positions, tokens] * mask[..., None]
    logits_BxV = seen_BxPxV.sum(1) + params["bias"][None]
    # Padding in the cache must have no effect.
    poisoned = jnp.where(mask[..., None] > 0, seen_BxPxV, 1e6)
    return logits_BxV, poisoned

  def decode_step(
      self, params, tokens, positions, cache, cache_mask, write_index
  ):
    new_RxV = params["table"][positions, tokens]
    lengths = [block.shape[1] for block in cache]
    columns = jnp.concatenate(cache, axis=1)
    columns = columns.at[jnp.arange(len(tokens)), write_index].set(
        new_RxV, mode="drop"
    )
    seen_RxV = jnp.where(cache_mask[..., None] > 0, columns, 0.0).sum(1)
    cache = jnp.split(columns, np.cumsum(lengths)[:-1], axis=1)
    return seen_RxV + params["bias"][None], cache

  def feed(self, params, tokens, positions, cache, cache_mask, write_index):
    del cache_mask  # The cache stores tokens.
    new_RxQxV = params["table"][positions, tokens]
    lengths = [block.shape[1] for block in cache]
    columns = jnp.concatenate(cache, axis=1)
    rows_Rx1 = jnp.arange(len(tokens))[:, None]
    columns = columns.at[rows_Rx1, write_index].set(new_RxQxV, mode="drop")
    return jnp.split(columns, np.cumsum(lengths)[:-1], axis=1)


def next_logprobs(params, tokens: list[int], temperature: float) -> np.ndarray:
  """Returns log-probs [V] after `tokens`, in NumPy float64."""
  table = np.asarray(params["table"], np.float64)
  logits_V = np.asarray(params["bias"], np.float64)
  for position, token in enumerate(tokens):
    logits_V = logits_V + table[position, token]
  logits_V = logits_V / temperature
  largest = logits_V.max()
  return logits_V - largest - np.log(np.exp(logits_V - largest).sum())


class FakeTokenizer:
  """Maps digits to equal ids; 0 is the pad and 1 the stop token."""

  vocab_size = 10
  pad_id = 0
  eos_id = 1
  bos_id = None
  stop_ids = frozenset((1,))
  stop_strings = ()

  def encode_prompt(self, text: str) -> list[int]:
    return self.encode(text)

  def prompt_text(self, text: str) -> str:
    return text

  def encode(self, text: str, after=()) -> list[int]:
    return [int(c) for c in text]

  def decode(self, ids, *, within=False) -> str:
    return "".join(str(int(i)) for i in ids)

  def pieces(self, ids) -> list[str]:
    return [str(int(i)) for i in ids]

  def decode_completion(
      self, ids, length: int, stopped: bool, sampled=None
  ) -> str:
    del sampled
    ends = stopped and ids[length - 1] in self.stop_ids
    return self.decode(ids[: length - ends])

  def decode_completions(self, completions) -> list[str]:
    return [
        self.decode_completion(tokens, length, stopped)
        for tokens, length, stopped in zip(
            completions.tokens, completions.lengths, completions.stopped
        )
    ]


class FakeTask(base.Task):
  """A task with a list of correct completions per prompt.

  A correct completion's reward is its number of tokens, any other's 0. Its key
  is its set of digits, so "23" and "32" are one solution.
  """

  name = "fake"
  FIELDS = {}
  tokenizer_pattern = "."
  max_prompt_tokens = 3
  max_completion_tokens = 4

  def __init__(self, right: dict[int, set[str]], num_prompts: int = 20):
    self._right = right
    self._num_prompts = num_prompts

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return self._num_prompts

  def prompt(self, split: str, index: int) -> str:
    return str(2 + index % 8) * (1 + index % 3)

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    if completion not in self._right.get(index, ()):
      return None
    return "".join(sorted(set(completion)))

  def reward(self, split: str, index: int, completion: str) -> float:
    right = self.solution_key(split, index, completion) is not None
    return float(len(completion)) if right else 0.0

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    return sorted(self._right[index])[0]

  def tokenizer_words(self) -> list[str]:
    return [str(digit) for digit in range(10)]


class Characters:
  """A tokenizer with one token per character."""

  encode = encode_prompt = staticmethod(list)

  def encode_answered(self, prompt: str, answer: str) -> tokenizer_lib.Answered:
    ids = [*answer, "<eos>"]
    return tokenizer_lib.Answered(list(prompt), ids, [True] * len(ids))
