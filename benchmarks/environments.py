# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with environments that take ten times a turn's decoding.

Completions have 128 tokens and pass through 64 rows. The model assigns all
tokens about the same probability. In runs with several turns, a sixteenth of
the tokens end a turn, and the environment sleeps (it uses no CPU) and then
answers with one token. With `sampling.num_waiting`, waiting completions give
their rows to others; otherwise they keep them.

The cost of a decode step depends on the longest row. Single-turn completions
that begin together all have the same length at any time; several turns mix
lengths. There are therefore two single-turn baselines: `together`, and
`staggered`, whose first 64 completions end in eight groups, one after another.

All tokens count, since each takes a decode step. `ratio` compares several turns
with `staggered`, and `ratio_to_together` with `together`, while completions
still wait to begin, as in a searcher with back-to-back rounds. `ratio_by_round`
times a single round, with as many completions as rows and waiting places hold,
to its end, when rows idle because the last environments sleep. Runs of each
kind alternate; ratios are medians.
"""

import collections
from collections.abc import Sequence
import dataclasses
import heapq
import math
import random
import statistics
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import peer_model
from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer
from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib

_STOP_SHARE = 16
_OF_TURNS = ("turns", "turns_by_round", "turns_in_rows")
# The default of `sampling.chunk_steps`.
_CHUNK_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  rows: rows that are decoded at a time.
  prompt_tokens: tokens of each prompt.
  completion_tokens: tokens of each completion.
  vocab_size: vocabulary size of the model.
  model: remaining shape of the model.
  slowness: sleep after a turn, as a multiple of a turn's mean decoding time.
  rounds: number of completions, as a multiple of rows and waiting places.
  """

  rows: int = 64
  prompt_tokens: int = 16
  completion_tokens: int = 128
  vocab_size: int = 256
  slowness: float = 10.0
  rounds: int = 2
  model: config_lib.ModelConfig = dataclasses.replace(
      peer_model.SHAPE, num_layers=4, width=128, head_dim=16, mlp_width=512
  )

  @property
  def num_waiting(self) -> int:
    """Number of sleeping completions per decoding row, plus a tenth."""
    return int(1.1 * self.slowness * self.rows)


class Asleep:
  """Environments that answer with one token after some seconds of sleep.

  ended_s: completion -> `time.monotonic` at the end of its first turn.
  lengths: tokens of completions at the ends of turns, with the times.
  """

  def __init__(self, sleep_s: float, token: int, max_tokens: int):
    self._sleep_s = sleep_s
    self._answer = np.array([token], np.int32)
    self._max_tokens = max_tokens
    self._due: list[tuple[float, requests_lib.Owner]] = []
    self.ended_s: dict[requests_lib.Owner, float] = {}
    self.lengths: list[tuple[float, requests_lib.Owner, int]] = []

  def end(self, owner: requests_lib.Owner, tokens: np.ndarray) -> None:
    due_s = self._note(owner, len(tokens)) + self._sleep_s
    heapq.heappush(self._due, (due_s, owner))

  def cut(self, owner: requests_lib.Owner, tokens: np.ndarray | None) -> None:
    self._note(owner, self._max_tokens)

  def _note(self, owner: requests_lib.Owner, length: int) -> float:
    now_s = time.monotonic()
    self.ended_s.setdefault(owner, now_s)
    self.lengths.append((now_s, owner, length))
    return now_s

  def num_tokens(self, until_s: float) -> int:
    """Returns the tokens of all turns that ended by a time."""
    tokens_of = {owner: n for at, owner, n in self.lengths if at <= until_s}
    return sum(tokens_of.values())

  def answers(
      self, wait_s: float
  ) -> list[tuple[requests_lib.Owner, np.ndarray | None]]:
    if wait_s > 0:
      time.sleep(min(wait_s, max(0.0, self._due[0][0] - time.monotonic())))
    out = []
    while self._due and self._due[0][0] <= time.monotonic():
      out.append((heapq.heappop(self._due)[1], self._answer))
    return out


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns tokens/s with one turn and with several, and their ratios.

  Args:
    config: not read.
    operands: repeats (default 3), or `best`.
    work: sizes of what is timed.
  """
  del config
  if operands == ["best"]:
    return {"best": [best_ratios(work, cost, rounds)
                     for cost in (0, 1, 2) for rounds in (2, 8)]}  # fmt: skip
  repeats = int(operands[0]) if operands else 3
  model = transformer.make_model(
      dataclasses.replace(work.model, vocab_size=work.vocab_size)
  )
  samplers = {
      "together": _make_sampler(model, work),
      "turns": _make_sampler(model, work, num_waiting=work.num_waiting),
      "turns_in_rows": _make_sampler(model, work, num_waiting=0),
  }
  params = _flat_params(model)
  for sampler in samplers.values():
    sampler.warm_up(params)
  count = work.rounds * (work.rows + work.num_waiting)
  runs = []
  for _ in range(repeats):
    one_turn = lambda **how: _measure(
        samplers["together"], params, count, work, 0.0, **how
    )[0]
    speeds = {"together": one_turn(), "staggered": one_turn(staggers=True)}
    sleep_s = work.slowness * _STOP_SHARE * work.rows / speeds["staggered"]
    _, speeds["turns"] = _measure(
        samplers["turns"], params, count, work, sleep_s
    )
    speeds["turns_by_round"], _ = _measure(
        samplers["turns"], params, work.rows + work.num_waiting, work, sleep_s
    )
    # Fewer completions, because waiting in their rows takes so long.
    _, speeds["turns_in_rows"] = _measure(
        samplers["turns_in_rows"], params, 2 * work.rows, work, sleep_s
    )
    runs.append({"sleep_s": sleep_s, **speeds})
  ratios_to = lambda name, base: [run[name] / run[base] for run in runs]
  ratios = ratios_to("turns", "staggered")
  median = sorted(zip(ratios, runs), key=lambda pair: pair[0])[repeats // 2][1]
  return {
      "rows": work.rows,
      "waiting": work.num_waiting,
      "completions": count,
      "sleep_s": median["sleep_s"],
      **{
          f"{name}_tokens_per_s": median[name]
          for name in ("together", "staggered", *_OF_TURNS)
      },
      "ratio": statistics.median(ratios),
      "ratios": ratios,
      **{
          f"ratio_{what}": statistics.median(ratios_to(*pair))
          for what, pair in {
              "to_together": ("turns", "together"),
              "by_round": ("turns_by_round", "staggered"),
              "in_rows": ("turns_in_rows", "staggered"),
          }.items()
      },
  }


def best_ratios(work: Work, chunk_cost: float, rounds: int) -> dict[str, Any]:
  """Returns the ratios if only decode steps and sleep took time.

  Args:
    work: sizes of the work.
    chunk_cost: overhead of a chunk, in steps.
    rounds: number of completions, as a multiple of rows and waiting places.
  """
  rng = random.Random(0)
  sleep = work.slowness * _STOP_SHARE
  most_live = work.rows + work.num_waiting
  num_queued = rounds * most_live
  # Tokens left, and whether the next token is the environment's.
  rows: list[tuple[int, bool]] = []
  asleep: list[tuple[float, int]] = []
  ready: collections.deque[int] = collections.deque()
  time_steps, num_tokens, ratio = 0.0, 0, math.nan
  speed = lambda: num_tokens / work.rows / time_steps
  while num_queued or rows or asleep or ready:
    while asleep and asleep[0][0] <= time_steps:
      ready.append(heapq.heappop(asleep)[1])
    while len(rows) < work.rows and ready:
      rows.append((ready.popleft(), True))
    room = most_live - 1 - len(asleep) - len(ready) - len(rows)
    fresh = min(num_queued, work.rows - len(rows), room)
    rows += [(work.completion_tokens, False)] * fresh
    if fresh and fresh == num_queued and time_steps:
      ratio = speed()
    num_queued -= fresh
    if not rows:
      time_steps = asleep[0][0]
      continue
    # Chunks end as in the sampler.
    least = len(rows) - -(-len(rows) // decode.TURN_SHARE)
    for _ in range(_CHUNK_STEPS):
      going = []
      time_steps += 1
      num_tokens += len(rows)
      for remaining, is_given in rows:
        if remaining > 1 and not is_given and rng.random() < 1 / _STOP_SHARE:
          if remaining > 2:  # Otherwise the answer would not fit.
            heapq.heappush(asleep, (time_steps + sleep, remaining - 1))
        elif remaining > 1:
          going.append((remaining - 1, False))
      rows = going
      if len(rows) <= least:
        break
    time_steps += chunk_cost
  return {
      "chunk_cost_steps": chunk_cost,
      "rounds": rounds,
      "ratio": ratio,
      "ratio_to_the_end": speed(),
  }


def _make_sampler(
    model: transformer.Model, work: Work, num_waiting: int | None = None
) -> decode.JaxSampler:
  """Returns a sampler; with a single turn if `num_waiting` is None."""
  has_turns = num_waiting is not None
  stop_ids = range(work.vocab_size // _STOP_SHARE) if has_turns else ()
  return decode.JaxSampler(
      model,
      decode.Settings(
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          max_prompt_tokens=work.prompt_tokens,
          max_completion_tokens=work.completion_tokens,
          num_rows=work.rows,
          num_waiting=num_waiting or 0,
          has_turns=has_turns,
          chunk_steps=_CHUNK_STEPS,
          stop_ids=stop_ids,
          pad_id=0,
          seed=0,
      ),
  )


def _flat_params(model: transformer.Model) -> types.PyTree:
  """Returns params for which all tokens are about equally likely."""
  params = model.init(jax.random.key(0))
  return jax.tree.map(lambda leaf: 0.1 * leaf, params)


def _measure(
    sampler: decode.JaxSampler,
    params: types.PyTree,
    count: int,
    work: Work,
    sleep_s: float,
    *,
    staggers: bool = False,
) -> tuple[float, float]:
  """Returns tokens/s in total, and until all completions have begun."""
  prompt = np.arange(work.prompt_tokens) % work.vocab_size
  per_prompt = 8
  # Prompts of the first rows, which end one after another if staggered.
  first = work.rows // per_prompt if staggers else 0
  requests = [
      decode.Request(
          prompt,
          index,
          0,
          per_prompt,
          max_tokens=(index + 1) * work.completion_tokens // first
          if index < first
          else None,
      )
      for index in range(count // per_prompt)
  ]
  turns = None
  if sampler.settings.has_turns:
    turns = Asleep(sleep_s, work.vocab_size - 1, work.completion_tokens)
  start_s = time.monotonic()
  sampled = sampler.sample(params, requests, version=0, turns=turns)
  seconds = time.monotonic() - start_s
  num_tokens = sum(int(completions.lengths.sum()) for completions in sampled)
  speed = num_tokens / seconds
  if turns is None:
    return speed, speed
  # Completions begin in order.
  until_s = turns.ended_s[len(requests) - 1, per_prompt - 1]
  return speed, turns.num_tokens(until_s) / (until_s - start_s)
