# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of completions by a frozen reward model, in fixed shapes."""

from collections.abc import Sequence
import dataclasses
import pathlib

import jax
import ml_collections
import numpy as np

from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.models import build
from tba_jax.models import config as model_config_lib
from tba_jax.models import heads
from tba_jax.models import hf

# A text is padded to the shortest of the full length, its half and its quarter
# that it fits into.
_NUM_LENGTHS = 3


@dataclasses.dataclass(frozen=True)
class Text:
  """A completion to score.

  prompt: text, as the policy sees it.
  completion: text, without its stop token.
  stopped: whether it ended with one: the model then sees its own.
  """

  prompt: str
  completion: str
  stopped: bool = True


class RewardScorer:
  """The scalar head's number at the last token of prompt and completion."""

  def __init__(
      self,
      model: heads.ScalarModel,
      params: types.PyTree,
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      batch_size: int,
  ):
    """Takes the model; it is compiled when it is first used.

    Args:
      model: with one label, or the one that it was made for.
      params: of the model.
      tokenizer: of the model, which may be another one than the policy's.
      max_prompt_tokens: a prompt keeps its last so many tokens.
      max_completion_tokens: a completion keeps its first so many.
      batch_size: texts scored at a time.
    """
    self._params = params
    self._tokenizer = tokenizer
    self._max_tokens = max_prompt_tokens, max_completion_tokens
    self._batch_size = batch_size
    self._rewards = jax.jit(model.rewards)
    full = max_prompt_tokens + max_completion_tokens
    self._lengths = sorted({-(-full // 2**i) for i in range(_NUM_LENGTHS)})

  def score(self, texts: Sequence[Text]) -> np.ndarray:
    """Returns the scores [N] float32, as they come: no norm, no offset.

    A text's score is of a shape that its own length decides, whatever else is
    scored with it.
    """
    rows = [self._encode(text) for text in texts]
    scores_N = np.zeros(len(rows), np.float32)
    for i, length in enumerate(self._lengths):
      above = self._lengths[i - 1] if i else 0
      fit = [n for n, row in enumerate(rows) if above < len(row) <= length]
      for start in range(0, len(fit), self._batch_size):
        some = fit[start : start + self._batch_size]
        scores_N[some] = self._score_batch([rows[n] for n in some], length)
    return scores_N

  def _score_batch(self, rows: list[list[int]], length: int) -> np.ndarray:
    shape = self._batch_size, length
    tokens_BxL = np.full(shape, self._tokenizer.pad_id, np.int32)
    mask_BxL = np.zeros(shape, np.float32)
    mask_BxL[:, 0] = 1  # Of rows that nothing fills.
    for b, row in enumerate(rows):
      tokens_BxL[b, : len(row)] = row
      mask_BxL[b, : len(row)] = 1
    scores_B = self._rewards(self._params, tokens_BxL, mask_BxL)
    return np.asarray(scores_B)[: len(rows)]

  def _encode(self, text: Text) -> list[int]:
    max_prompt, max_completion = self._max_tokens
    prompt = self._tokenizer.encode_prompt(text.prompt)[-max_prompt:]
    completion = self._tokenizer.encode(text.completion)
    if text.stopped:
      completion.append(self._tokenizer.eos_id)
    # Of two empty texts there is no last token.
    return prompt + completion[:max_completion] or [self._tokenizer.eos_id]


def load(
    config: ml_collections.ConfigDict, key: str, folder: str | pathlib.Path
) -> RewardScorer:
  """Returns the scorer of a Hugging Face folder with a scalar head.

  Args:
    config: reads `reward.batch_size`, `sampling`, `tokenizer.bos` and
      `model.compute_dtype`.
    key: the setting that names the folder, for messages.
    folder: params keep its dtype.

  Raises:
    ValueError: there is no such folder, it cannot be read, or its head does not
      give one number.
  """
  path = pathlib.Path(folder).expanduser()
  if not (path / "config.json").is_file():
    raise ValueError(
        f"config.{key}={str(folder)!r}: no model is there; allowed a Hugging"
        " Face folder with a scalar head, such as --program=reward_model makes"
    )
  compute_dtype = model_config_lib.compute_dtype(
      config.model, jax.default_backend()
  )
  shape = hf.read_config(path, compute_dtype=compute_dtype)
  if shape.num_labels != 1:
    raise ValueError(
        f"config.{key}={str(folder)!r}: its head gives {shape.num_labels}"
        " labels; allowed a model with one (0 is one that predicts tokens)"
    )
  tokenizer = tokenizer_lib.load(path, bos=config.tokenizer.bos)
  return RewardScorer(
      build.make_scalar_model(shape),
      hf.load(path)[1],
      tokenizer,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
      batch_size=config.reward.batch_size,
  )
