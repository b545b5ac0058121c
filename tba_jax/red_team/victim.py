# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The victim: a frozen model that answers attacks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
import zlib

import numpy as np

from tba_jax import types
from tba_jax.sampling import requests

if TYPE_CHECKING:
  from tba_jax import tokenizer as tokenizer_lib
  from tba_jax.sampling import decode

# In place of a template: that of the tokenizer.
CHAT = "chat"


class Victim:
  """Answers attacks, each several times, with one compiled sampler."""

  def __init__(
      self,
      sampler: "decode.Sampler",
      params: types.PyTree,
      tokenizer: "tokenizer_lib.Tokenizer",
      *,
      template: str,
      num_samples: int,
      max_prompt_tokens: int,
  ):
    """Takes the parts; nothing is compiled yet.

    Args:
      sampler: of the model's answers.
      params: of the model.
      tokenizer: its own.
      template: a text with {attack} in it, or `CHAT`.
      num_samples: answers to each attack.
      max_prompt_tokens: of a template with its attack.
    """
    self._sampler = sampler
    self._params = params
    self._tokenizer = tokenizer
    self._template = template
    self._num_samples = num_samples
    self._max_prompt_tokens = max_prompt_tokens

  def answer(
      self, attacks: Sequence[str], *, visit: int
  ) -> list[list[str] | None]:
    """Returns the answers to each attack; None where it is too long, or empty.

    The answers are a pure function of an attack and the visit, so that what an
    attack is worth does not depend on who asks for it, and when.

    Args:
      attacks: texts.
      visit: other visits have other random numbers.
    """
    tokens = {attack: self._encode(attack) for attack in attacks}
    asked = [attack for attack, ids in tokens.items() if ids is not None]
    if not asked:
      return [None] * len(attacks)
    found = self._sampler.sample(
        self._params,
        [
            requests.Request(
                prompt_tokens=tokens[attack],
                prompt_id=zlib.crc32(attack.encode()),
                visit=visit,
                num_completions=self._num_samples,
            )
            for attack in asked
        ],
        version=0,
    )
    answers = {
        attack: [
            self._tokenizer.decode_completion(ids, int(length), bool(stopped))
            for ids, length, stopped in zip(
                completions.tokens,
                completions.lengths,
                completions.stopped,
                strict=True,
            )
        ]
        for attack, completions in zip(asked, found, strict=True)
    }
    return [answers.get(attack) for attack in attacks]

  def _encode(self, attack: str) -> np.ndarray | None:
    if self._template == CHAT:
      message = {"role": "user", "content": attack.strip()}
      ids = self._tokenizer.encode_chat([message])
    else:
      text = self._template.replace("{attack}", attack)
      ids = self._tokenizer.encode_prompt(text)
    if not 1 <= len(ids) <= self._max_prompt_tokens:
      return None
    return np.asarray(ids, np.int32)
