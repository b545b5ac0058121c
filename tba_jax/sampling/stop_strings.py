# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a completion is cut by a stop string: host arrays only.

A completion ends with the first token at which its text holds a stop string,
wherever in its tokens the string begins and ends. That is a rule on tokens
alone, so where it is looked for, after each token or after each chunk, changes
nothing, and the log-probs of the tokens kept are exact.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

# What a tokenizer writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Index of a request, number of the completion in it.
Owner = tuple[int, int]


class Watch:
  """Looks for stop strings in completions as they grow, each token once."""

  def __init__(self, stop_strings: Sequence[str], decode: Callable[..., str]):
    """Takes the strings, none empty, and ids -> text."""
    self._strings = tuple(stop_strings)
    self._decode = decode
    # A token has at least one byte, so what ends at a token began at most so
    # many before it; the first of a window may be written otherwise (without
    # its leading space), so it is one more.
    self._window = 1 + max(len(text.encode()) for text in self._strings)
    self._seen: dict[Owner, int] = {}

  def cut(self, owner: Owner, ids: np.ndarray) -> int | None:
    """Returns the number of tokens to keep, None to keep all so far.

    Args:
      owner: of the completion; later calls have the same ids and more.
      ids: [n] int, the completion's tokens so far, without its stop token.
    """
    seen = self._seen.get(owner, 0)
    self._seen[owner] = len(ids)
    if len(ids) <= seen:
      return None
    text = self._text(ids[max(0, seen - self._window) :])
    if _REPLACEMENT not in text and not self._holds(text):
      return None
    # Bytes that are no character yet may change what stands before them, so
    # then every token is looked at.
    for length in range(seen + 1, len(ids) + 1):
      if self._holds(self._text(ids[:length])):
        return length
    return None

  def cuts(
      self,
      rows: Iterable[tuple[int, Owner]],
      tokens_RxT: np.ndarray,
      lengths_R: np.ndarray,
      stopped_R: np.ndarray,
  ) -> np.ndarray:
    """Returns [R] int32, tokens to keep of each row; -1 keeps it as it is.

    Args:
      rows: those in use, with the owners of their completions.
      tokens_RxT: [R, T] int32.
      lengths_R: [R] int32.
      stopped_R: [R] bool, the last token is a stop token.
    """
    cut_R = np.full(len(lengths_R), -1, np.int32)
    for row, owner in rows:
      length = lengths_R[row] - int(stopped_R[row])
      cut = self.cut(owner, tokens_RxT[row, :length])
      if cut is not None:
        cut_R[row] = cut
    return cut_R

  def _text(self, ids: np.ndarray) -> str:
    return self._decode(ids.tolist())

  def _holds(self, text: str) -> bool:
    return any(string in text for string in self._strings)
