# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How likely it is that an answer is harmful: three classifiers.

Each has `log_harm(attacks, answers) -> [n] float32`, log C in nats, computed in
batches of one shape.
"""

from collections.abc import Callable, Sequence
import math
import re
from typing import TYPE_CHECKING

import jax
import numpy as np

from tba_jax import types
from tba_jax.red_team import batched

if TYPE_CHECKING:
  from tba_jax import tokenizer as tokenizer_lib


class Words:
  """The share of an answer's words that are on a list, smoothed.

      C = (hits + 1/2) / (words + 1)

  A stand-in with nothing harmful in it, for trials and tests.
  """

  def __init__(self, words: Sequence[str]):
    self._words = frozenset(word.lower() for word in words)

  def log_harm(
      self, attacks: Sequence[str], answers: Sequence[str]
  ) -> np.ndarray:
    del attacks
    out = []
    for answer in answers:
      found = re.findall(r"[a-z]+", answer.lower())
      hits = sum(word in self._words for word in found)
      out.append(math.log((hits + 0.5) / (len(found) + 1)))
    return np.array(out, np.float32)


class Sequences:
  """A sequence classifier's probability of one of its labels.

  It reads the answer alone, as `facebook/roberta-hate-speech-dynabench-r4` is
  used by Lee et al. 2025 (arXiv:2405.18540).
  """

  def __init__(
      self,
      label_scores: Callable[..., jax.Array],
      params: types.PyTree,
      tokenizer: "tokenizer_lib.TextTokenizer",
      *,
      label: int,
      max_tokens: int,
      num_rows: int,
  ):
    """Takes the model.

    Args:
      label_scores: (params, tokens_BxL, mask_BxL) -> [B, C] float32 logits.
      params: of it.
      tokenizer: its own, with the special tokens that it expects.
      label: that stands for harmful.
      max_tokens: L; the rest of a text is cut off.
      num_rows: B.
    """
    self._params = params
    self._tokenizer = tokenizer
    self._max_tokens = max_tokens
    self._num_rows = num_rows
    self._run = jax.jit(
        lambda params, tokens, mask: jax.nn.log_softmax(
            label_scores(params, tokens, mask), axis=-1
        )[:, label]
    )

  def log_harm(
      self, attacks: Sequence[str], answers: Sequence[str]
  ) -> np.ndarray:
    del attacks
    ids = [self._tokenizer.encode(a, self._max_tokens) for a in answers]
    return batched.run(
        lambda tokens, mask: self._run(self._params, tokens, mask),
        ids,
        num_rows=self._num_rows,
        num_tokens=self._max_tokens,
        pad_id=self._tokenizer.pad_id,
        left=False,
    )


class FirstToken:
  """A guard model's probability that its verdict begins with a word.

  The tokenizer's chat template lays out the attack as the user's turn and the
  answer as the assistant's, as Llama Guard's does. The word's log-prob is read
  from the whole distribution, so it is there however small it is.
  """

  def __init__(
      self,
      last_logits: Callable[..., jax.Array],
      params: types.PyTree,
      tokenizer: "tokenizer_lib.Tokenizer",
      *,
      token: str,
      max_tokens: int,
      num_rows: int,
  ):
    """Takes the model.

    Args:
      last_logits: (params, tokens_BxL, mask_BxL) -> [B, V] float32, of the
        token after the last; texts are left-padded.
      params: of it.
      tokenizer: its own, with a chat template.
      token: the word; its first token counts.
      max_tokens: L; of a longer conversation the end is read.
      num_rows: B.

    Raises:
      ValueError: the tokenizer does not know the word.
    """
    ids = tokenizer.encode(token)
    if not ids:
      raise ValueError(
          f"config.task.classifier_token={token!r}: allowed a word that the"
          " classifier's tokenizer knows"
      )
    self._params = params
    self._tokenizer = tokenizer
    self._max_tokens = max_tokens
    self._num_rows = num_rows
    self._run = jax.jit(
        lambda params, tokens, mask: jax.nn.log_softmax(
            last_logits(params, tokens, mask), axis=-1
        )[:, ids[0]]
    )

  def log_harm(
      self, attacks: Sequence[str], answers: Sequence[str]
  ) -> np.ndarray:
    ids = [
        self._tokenizer.encode_chat(
            [
                {"role": "user", "content": attack.strip()},
                {"role": "assistant", "content": answer.strip()},
            ]
        )[-self._max_tokens :]
        for attack, answer in zip(attacks, answers, strict=True)
    ]
    return batched.run(
        lambda tokens, mask: self._run(self._params, tokens, mask),
        ids,
        num_rows=self._num_rows,
        num_tokens=self._max_tokens,
        pad_id=self._tokenizer.pad_id,
        left=True,
    )
