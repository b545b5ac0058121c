# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives advice on a run's settings from its metrics."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

from tba_jax.monitor import metrics
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables
from tba_jax.monitor.report import verdict as verdict_lib

Rows = Sequence[Mapping[str, Any]]

# A role that waits for less than this share of its time is busy.
_LITTLE = 0.1
# If both wait for more than this, neither is the bottleneck.
_IDLE = 0.25
_MANY_EQUAL = 0.5
_MANY_COPIES = 0.1
# Effective sample shares below which staleness costs much, or some.
_LOW_EFFECTIVE, _SOME_EFFECTIVE = 0.7, 0.9


def _seconds(rows: Rows, role: str, counts: Callable[[str], bool]) -> float:
  """Returns a role's seconds in main lanes, in the kinds that `counts`."""
  return sum(
      s
      for row in rows
      if row["role"] == role and not row["lane"]
      for kind, s in row["seconds"].items()
      if counts(kind)
  )


def _share(
    rows: Rows, role: str, counts: Callable[[str], bool] = metrics.is_wait
) -> float | None:
  """Returns that as a share of the role's time; None without spans."""
  elapsed = sum(
      r["elapsed_s"] for r in rows if r["role"] == role and not r["lane"]
  )
  return _seconds(rows, role, counts) / elapsed if elapsed > 0 else None


def _setting(run: load.Run, *keys: str) -> float | None:
  value = run.setting(*keys)
  return value if text.is_number(value) else None


def _bound(run: load.Run, rows: Rows) -> list[str]:
  """Names the bottleneck, and what would balance the roles."""
  trainer, searcher = (_share(rows, role) for role in ("trainer", "searcher"))
  if trainer is None or searcher is None:
    return []
  waits = (
      f"The trainer waited {trainer:.0%} of its time, the searchers"
      f" {searcher:.0%} of theirs"
  )
  if max(trainer, searcher) < _LITTLE:
    return [f"{waits}: they are in balance."]
  if min(trainer, searcher) > _IDLE:
    return [
        f"{waits}: neither bounds the run, but what passes between them, or too"
        " few processors for both."
    ]
  count = len({r["index"] for r in rows if r["role"] == "searcher"})
  # Number of busy searchers that keep a busy trainer supplied.
  balance = max(1, math.ceil(count * (1 - searcher) / max(1 - trainer, 0.01)))
  if trainer > searcher:
    line = (
        f"{waits}: sampling bounds the run. At their speed {balance} searchers"
        f" instead of {count} would balance it (search.num_searchers)"
    )
    fresh = _setting(run, "search", "prompts_per_step")
    fewer = fresh and math.floor(fresh * (1 - trainer) / (1 - searcher))
    if fewer and fewer < fresh:
      line += (
          f", or {fewer} fresh prompts a step instead of {fresh:.0f}"
          " (search.prompts_per_step), each used more often"
      )
    return [f"{line}."]
  tail = "More searchers would not make it faster."
  if balance < count:
    tail = f"{balance} searchers instead of {count} would do."
  return [f"{waits}: the trainer bounds the run. {tail}"]


def _coupling(run: load.Run, rows: Rows) -> list[str]:
  """Tells whether the roles wait for each other, and which lead would help."""
  waits = [_share(rows, role) for role in ("trainer", "searcher")]
  lead = _setting(run, "search", "lead_steps")
  if None in waits or min(waits) < _LITTLE or lead is None or not run.records:
    return []
  decode = [k for k, kind in enumerate(run.span_kinds) if kind == "decode"]
  rounds = sum(
      kind in decode
      for lane in run.lanes.values()
      if lane.role == "searcher" and not lane.lane
      for kind in lane.kinds
  )
  seldom = ("compile", "evaluate", "checkpoint")
  work = lambda kind: not metrics.is_wait(kind) and kind not in seldom
  trainer, searcher = (_seconds(rows, r, work) for r in ("trainer", "searcher"))
  if not rounds or not trainer:
    return []
  step_s = trainer / (run.records[-1]["step"] + 1)
  wanted = math.ceil(searcher / rounds / step_s)
  if wanted <= lead:
    return []
  return [
      "Both sides waited for each other: a round of a searcher takes as long as"
      f" {wanted} steps, and it may be {lead:.0f} ahead. With"
      f" search.lead_steps={wanted} the two would overlap, on older data."
  ]


def _store(run: load.Run, rows: Rows) -> list[str]:
  lines = []
  queue = _share(rows, "searcher", lambda kind: kind == "wait_credit")
  if queue is not None and queue > _LITTLE:
    lines.append(
        f"Searchers waited {queue:.0%} of their time for room in the queue: the"
        " store or its draining bounds the run (more search.credits, or fewer"
        " and larger rounds)."
    )
  publish = [r for r in rows if r["lane"] == "publish"]
  share = sum(r["seconds"].get("publish", 0.0) for r in publish) / max(
      sum(r["elapsed_s"] for r in publish), 1e-9
  )
  if publish and share > 1 - _LITTLE:
    lines.append(
        f"Params were being published {share:.0%} of the time: searchers get"
        " them as fast as the store takes them (a larger publish.every_steps"
        " costs nothing then)."
    )
  lost = sum(1 for event in run.events if event.get("kind") == "store_lost")
  if lost:
    times = "once" if lost == 1 else f"{lost} times"
    lines.append(f"The store was lost and found again {times}.")
  return lines


def _mean(run: load.Run, name: str) -> float | None:
  _, values = load.column(run.records, name)
  return float(values.mean()) if len(values) else None


def _staleness(run: load.Run) -> list[str]:
  lines = []
  age = _mean(run, "replay/staleness_steps")
  if age is not None:
    lines.append(f"Data was {age:.1f} steps old on average when it was used.")
  names = "replay/reward_young", "replay/reward_old"
  both = [
      r for r in run.records if all(text.is_number(r.get(n)) for n in names)
  ]
  if len(both) >= 2:
    # Paired by step, so that progress during the run does not matter.
    young, old = (load.column(both, name)[1] for name in names)
    gap = float((young - old).mean())
    error = float((young - old).std(ddof=1)) / math.sqrt(len(both))
    said = (
        "Within a batch, younger completions had a mean reward of"
        f" {young.mean():.3g}, older ones {old.mean():.3g}"
    )
    if gap > verdict_lib.CLEAR * error:
      said += (
          ": age costs reward. Lower search.lead_steps or publish.every_steps,"
          " or raise replay.recent_fraction."
      )
    elif gap < -verdict_lib.CLEAR * error:
      said += ": replay leans to the good ones, age did not hurt."
    else:
      said += f": no clear difference (± {verdict_lib.CLEAR * error:.2g})."
    lines.append(said)
  effective = _mean(run, "train/effective_sample_share")
  if effective is not None and age:
    line = (
        "Weighed by how far the policy has moved since they were sampled,"
        f" batches were worth {effective:.0%} of their completions"
    )
    if clipped := _mean(run, "train/ratio_clip_share"):
      line += f"; the trust region held back {clipped:.1%}"
    if effective < _LOW_EFFECTIVE:
      line += ": staleness hurt."
    elif effective < _SOME_EFFECTIVE:
      line += ": staleness cost some of them."
    else:
      line += ": staleness hardly mattered."
    lines.append(line)
  return lines


def _equal(run: load.Run) -> list[str]:
  equal = _mean(run, "train/equal_reward_groups")
  if equal is None:
    return []
  line = (
      f"{equal:.0%} of the groups had equal rewards throughout: they only"
      " pull the policy towards its reference."
  )
  if equal > _MANY_EQUAL:
    line += (
        " More completions a prompt (search.samples_per_prompt,"
        " train.completions_per_prompt) or other prompts would waste less."
    )
  return [line]


def _copies(run: load.Run) -> list[str]:
  """Tells how many completions taught nothing new."""
  lines = []
  unique = _mean(run, "replay/unique_share")
  if unique is not None and 1 - unique > _MANY_COPIES:
    lines.append(
        f"{1 - unique:.0%} of a batch's places went to a completion that stood"
        " in it already: a prompt had fewer different completions than a group"
        " draws (more search.samples_per_prompt, or fewer"
        " train.completions_per_prompt)."
    )
  terms = [
      run.ledger.get(term)
      for term in ("generated", "evicted_untrained", "in_buffer_untrained")
  ]
  counts = [
      t.get("completions") if isinstance(t, dict) else None for t in terms
  ]
  if all(map(text.is_number, counts)) and counts[0]:
    generated, evicted, left = counts
    lines.append(
        f"Of {generated:,} sampled completions {(evicted + left):,}"
        f" ({(evicted + left) / generated:.0%}) were never trained on:"
        f" {evicted:,} replaced by an equal one or evicted, {left:,} still in"
        " the buffer."
    )
  return lines


_NOT_LEARNED = {
    "overfitted": (
        "It learned its training prompts alone: check that held-out prompts"
        " are of the same kind and that the tokenizer has seen their words;"
        " more prompts, fewer steps or a larger loss.beta help."
    ),
    "worse": "A larger loss.beta or a lower optimizer.learning_rate is safer.",
    "nothing": (
        "Before its speed matters it must learn: more steps, a higher"
        " optimizer.learning_rate, a smaller loss.beta, fine-tuning first"
        " (init=sft), or easier prompts."
    ),
}


def verdict(run: load.Run) -> verdict_lib.Verdict:
  """Returns whether a run learned; see `verdict.verdict`."""
  return verdict_lib.verdict(*tables.evaluations(run), run.records)


def advice(run: load.Run, rows: Rows) -> list[str]:
  """Returns sentences on what bounds a run and what it wastes.

  Leaves out throughput if the run did not learn; ignores missing parts. `rows`
  are those of `timeline.where_time_went`.
  """
  found = verdict(run)
  first = [_NOT_LEARNED[found.kind]] if found.kind in _NOT_LEARNED else []
  if found.learned:
    first = [*_bound(run, rows), *_coupling(run, rows), *_store(run, rows)]
  return [*first, *_staleness(run), *_equal(run), *_copies(run)]
