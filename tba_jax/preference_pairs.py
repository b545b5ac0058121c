# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of completions, one of them preferred: read, relabelled, in batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from tba_jax import jsonl
from tba_jax import offline_batches
from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.tasks import base
from tba_jax.tasks import examples as examples_lib
from tba_jax.tasks import rows as rows_lib

# Tells these random numbers from others of the same seed.
_STREAM = 0xB7
_PROMPT_FIELDS = ("prompt", "query")
# Pairs are labelled, and written, so many at a time.
_LABEL_PAIRS = 256


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two completions of a prompt, texts without stop token.

  place: where the pair came from.
  chosen: the better one by the label.
  agrees: whether the label is the one that was read; True before relabelling.
  """

  place: str
  prompt: str
  chosen: str
  rejected: str
  agrees: bool = True


def read(
    rows: Iterable[examples_lib.Row],
    split: str,
    report: examples_lib.Report,
    *,
    fits: Callable[[Pair], str],
    stop_text: str,
) -> list[Pair]:
  """Returns the pairs of rows; the report gets those that are left out.

  A row has `prompt` (or `query`), `chosen` and `rejected`, texts. A stop token
  that is written out at the end of a completion is taken off.

  Args:
    rows: of the split.
    split: its name in the report.
    report: counts and places.
    fits: pair -> "", or a reason of `examples.REASONS` to leave it out.
    stop_text: of the tokenizer.
  """
  pairs, num_rows = [], 0
  for row in rows:
    num_rows += 1
    found = _pair(row, stop_text)
    reason = found if isinstance(found, str) else fits(found)
    if reason:
      report.leave_out(split, reason, row.place)
    else:
      pairs.append(found)
  report.read[split], report.used[split] = num_rows, len(pairs)
  return pairs


def _pair(row: examples_lib.Row, stop_text: str) -> Pair | str:
  """Returns the pair of a row, or what is wrong with it."""
  if row.fields is None:
    return "malformed"
  prompt = next((row.fields[f] for f in _PROMPT_FIELDS if f in row.fields), "")
  texts = [row.fields.get(name) for name in ("chosen", "rejected")]
  if not isinstance(prompt, str) or not prompt.strip():
    return "no_prompt"
  if not all(isinstance(text, str) for text in texts):
    return "no_answer"
  chosen, rejected = (text.removesuffix(stop_text) for text in texts)
  if not chosen.strip() or not rejected.strip():
    return "no_answer"
  if chosen == rejected:
    return "equal"
  return Pair(row.place, prompt, chosen, rejected)


def load(
    source: str,
    key: str,
    split: str,
    task: base.Task,
    report: examples_lib.Report,
    *,
    fits: Callable[[Pair], str],
    stop_text: str,
) -> list[Pair]:
  """Returns the pairs of a source; see `read`.

  Args:
    source: of rows, or "task": those that the task makes.
    key: of the setting that names it, for messages.
    split: "train" or "held_out".
    task: of the run.
    report, fits, stop_text: as `read`.

  Raises:
    ValueError: the source is not there, or no pair of it can be used.
  """
  if source == "task":
    found = enumerate(task.pairs(split), 1)
    rows = [
        examples_lib.Row(f"pair {i}", {"prompt": p, "chosen": c, "rejected": r})
        for i, (p, c, r) in found
    ]
  else:
    rows = rows_lib.read(key, source)
  pairs = read(rows, split, report, fits=fits, stop_text=stop_text)
  if not pairs:
    raise ValueError(
        f"{key}={source!r}: no pair can be used. {'; '.join(report.lines())}"
    )
  return pairs


def relabel(
    pairs: Sequence[Pair],
    score: Callable[[Sequence[tuple[str, str]]], np.ndarray],
    path: pathlib.Path,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Pair] | None:
  """Returns the pairs in the order of a gold model; None where it was stopped.

  The completion with the higher score is the chosen one, the first of equals.
  Pairs with both scores are written to a file of JSON lines as they come; what
  stands there already is not scored again.

  Source: Noukhovitch et al. 2024 (arXiv:2410.18252), the controlled setting.

  Args:
    pairs: in the order of the file.
    score: [(prompt, completion)] -> scores [N], higher is better.
    path: of the file, made or continued.
    on_progress: called with (pairs done, pairs in all).
    should_stop: asked before each part.

  Raises:
    ValueError: the file is of other pairs.
  """
  done = jsonl.read_jsonl(path)
  out = [_labelled(pair, line, path) for pair, line in zip(pairs, done)]
  writer = jsonl.LineWriter(path)
  try:
    while len(out) < len(pairs):
      if should_stop():
        return None
      some = pairs[len(out) : len(out) + _LABEL_PAIRS]
      scores_Nx2 = score(
          [(p.prompt, text) for p in some for text in (p.chosen, p.rejected)]
      ).reshape(-1, 2)
      for pair, (first, second) in zip(some, scores_Nx2.tolist()):
        record = {**dataclasses.asdict(pair), "scores": [first, second]}
        record["agrees"] = first >= second
        if not record["agrees"]:
          record |= {"chosen": pair.rejected, "rejected": pair.chosen}
        writer.write(record)
        out.append(_labelled(pair, record, path))
      if on_progress is not None:
        on_progress(len(out), len(pairs))
  finally:
    writer.close()
  return out


def _labelled(
    pair: Pair, record: Mapping[str, Any], path: pathlib.Path
) -> Pair:
  """Returns the pair as a line has it."""
  texts = {record.get("chosen"), record.get("rejected")}
  if record.get("prompt") != pair.prompt or texts != {
      pair.chosen,
      pair.rejected,
  }:
    raise ValueError(
        f"{path} has other pairs than the data ({pair.place}); remove it to"
        " label them anew"
    )
  names = ("place", "prompt", "chosen", "rejected", "agrees")
  return Pair(**{name: record[name] for name in names})


class Examples:
  """Batches of pairs, a pure function of the seed and the step."""

  def __init__(
      self,
      pairs: Sequence[Pair],
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      seed: int,
      batch_size: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
  ):
    """Takes the pairs, all of which fit.

    Args:
      pairs: each pass over them is in a new order.
      tokenizer: its stop token ends a completion.
      seed: of the order.
      batch_size: B.
      max_prompt_tokens: P.
      max_completion_tokens: T, with the stop token.
    """
    self._pairs = pairs
    self._tokenizer = tokenizer
    self._seed = seed
    self._batch_size = batch_size
    self._lengths = max_prompt_tokens, max_completion_tokens

  def chunk(self, first: int, last: int, size: int) -> types.Batch:
    """Returns the batches of steps first … last - 1, on the host.

    Args:
      first: step.
      last: step after the last one, at most first + size.
      size: C, batches that the result has room for.

    Returns:
      A batch whose leaves are [C, B, …], with K = 2: the chosen completion and
      the rejected one. What no step fills is 0.
    """
    B, count = self._batch_size, len(self._pairs)
    places = np.arange(first * B, last * B)
    chosen = []
    for epoch in np.unique(places // count):
      order = np.random.default_rng(
          [self._seed, _STREAM, int(epoch)]
      ).permutation(count)
      chosen += order[places[places // count == epoch] % count].tolist()
    return self._pad([self._pairs[i] for i in chosen], (size, B))

  def batch(self, pairs: Sequence[Pair], size: int) -> types.Batch:
    """Returns pairs as a batch with room for `size`, on the host."""
    return self._pad(pairs, (size,))

  def _pad(self, pairs: Sequence[Pair], shape: tuple[int, ...]) -> types.Batch:
    max_prompt_tokens, max_completion_tokens = self._lengths
    encoded = (encode(pair, self._tokenizer) for pair in pairs)
    return offline_batches.pad(
        [(prompt, texts) for prompt, *texts in encoded],
        shape,
        num_completions=2,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
    )


def encode(
    pair: Pair, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[list[int], list[int], list[int]]:
  """Returns the ids of prompt, chosen and rejected, these with stop token."""
  ids = lambda text: [*tokenizer.encode(text), tokenizer.eos_id]
  return (
      tokenizer.encode_prompt(pair.prompt),
      ids(pair.chosen),
      ids(pair.rejected),
  )
