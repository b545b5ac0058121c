# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run's numbers say about its settings, in plain sentences."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from tba_jax.monitor import metrics
from tba_jax.monitor.report import load

Rows = Sequence[Mapping[str, Any]]

# A role that waits less than this share of its time is taken to be busy.
_BUSY = 0.9
# Where both wait for more than this, neither is what bounds the run.
_IDLE = 0.25
_MANY_EQUAL = 0.5
_MANY_COPIES = 0.1
# Below these shares of effective samples the data's age costs much of a batch,
# or some of it.
_LOW_EFFECTIVE, _SOME_EFFECTIVE = 0.7, 0.9
# A mean difference beyond so many standard errors is no accident.
_CLEAR = 2.0


def _share(rows: Rows, role: str, counts: Any) -> float | None:
  """Returns the share of a role's time in kinds that count, main lanes."""
  mine = [r for r in rows if r["role"] == role and not r["lane"]]
  elapsed = sum(r["elapsed_s"] for r in mine)
  spent = sum(
      s for r in mine for kind, s in r["seconds"].items() if counts(kind)
  )
  return spent / elapsed if elapsed > 0 else None


def _setting(run: load.Run, section: str, name: str) -> float | None:
  value = run.config.get("config")
  for key in (section, name):
    value = value.get(key) if isinstance(value, dict) else None
  return value if load.is_number(value) else None


def _bound(run: load.Run, rows: Rows) -> list[str]:
  trainer, searcher = (
      _share(rows, role, metrics.is_wait) for role in ("trainer", "searcher")
  )
  if trainer is None or searcher is None:
    return []
  waits = (
      f"The trainer waited {trainer:.0%} of its time, the searchers"
      f" {searcher:.0%} of theirs"
  )
  if max(trainer, searcher) < 1 - _BUSY:
    return [f"{waits}: they are in balance."]
  if min(trainer, searcher) > _IDLE:
    return [
        f"{waits}: neither bounds the run, but what passes between them, or too"
        " few processors for both."
    ]
  count = len({r["index"] for r in rows if r["role"] == "searcher"})
  # Busy searchers a busy trainer needs: both rates scale with their work.
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
  tail = (
      f" {balance} searchers instead of {count} would do."
      if balance < count
      else " More searchers would not make it faster."
  )
  return [f"{waits}: the trainer bounds the run.{tail}"]


def _coupling(run: load.Run, rows: Rows) -> list[str]:
  """Says whether the roles wait for each other, and which lead would help."""
  waits = [_share(rows, r, metrics.is_wait) for r in ("trainer", "searcher")]
  lead = _setting(run, "search", "lead_steps")
  if None in waits or min(waits) < 1 - _BUSY or lead is None:
    return []
  decode = [k for k, kind in enumerate(run.span_kinds) if kind == "decode"]
  lanes = [x for (role, _, side), x in run.lanes.items() if not side
           and role == "searcher"]  # fmt: skip
  rounds = sum(1 for lane in lanes for kind in lane.kinds if kind in decode)
  work = lambda kind: not metrics.is_wait(kind) and kind not in (
      "compile", "evaluate", "checkpoint")  # fmt: skip
  mine = {
      role: sum(
          s
          for r in rows
          if r["role"] == role and not r["lane"]
          for kind, s in r["seconds"].items()
          if work(kind)
      )
      for role in ("trainer", "searcher")
  }
  if not rounds or not run.records or not mine["trainer"]:
    return []
  step_s = mine["trainer"] / (run.records[-1]["step"] + 1)
  wanted = math.ceil(mine["searcher"] / rounds / step_s)
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
  if queue is not None and queue > 1 - _BUSY:
    lines.append(
        f"Searchers waited {queue:.0%} of their time for room in the queue: the"
        " store or its draining bounds the run (more search.credits, or fewer"
        " and larger rounds)."
    )
  publish = [r for r in rows if r["lane"] == "publish"]
  share = sum(r["seconds"].get("publish", 0.0) for r in publish) / max(
      sum(r["elapsed_s"] for r in publish), 1e-9
  )
  if publish and share > _BUSY:
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


def _values(run: load.Run, name: str) -> list[float]:
  return [r[name] for r in run.records if load.is_number(r.get(name))]


def _mean(run: load.Run, name: str) -> float | None:
  values = _values(run, name)
  return sum(values) / len(values) if values else None


def _difference(run: load.Run) -> tuple[float, float, float, float] | None:
  """Returns mean reward of younger and older data, difference, its error.

  Paired by step, so that learning over the run does not enter.
  """
  names = "replay/reward_young", "replay/reward_old"
  pairs = [
      (r[names[0]], r[names[1]])
      for r in run.records
      if all(load.is_number(r.get(name)) for name in names)
  ]
  if len(pairs) < 2:
    return None
  young, old = (sum(p) / len(pairs) for p in zip(*pairs, strict=True))
  gaps = [a - b for a, b in pairs]
  mean = young - old
  variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
  return young, old, mean, math.sqrt(variance / len(gaps))


def _staleness(run: load.Run) -> list[str]:
  lines = []
  age = _mean(run, "replay/staleness_steps")
  if age is not None:
    lines.append(f"Data was {age:.1f} steps old on average when it was used.")
  found = _difference(run)
  if found is not None:
    young, old, gap, error = found
    said = (
        f"Within a batch, younger completions had a mean reward of {young:.3g},"
        f" older ones {old:.3g}"
    )
    if gap > _CLEAR * error:
      said += (
          ": age costs reward. Lower search.lead_steps or publish.every_steps,"
          " or raise replay.recent_fraction."
      )
    elif gap < -_CLEAR * error:
      said += ": replay leans to the good ones, age did not hurt."
    else:
      said += f": no clear difference (± {_CLEAR * error:.2g})."
    lines.append(said)
  effective = _mean(run, "train/effective_sample_share")
  if effective is not None and age:
    clipped = _mean(run, "train/ratio_clip_share")
    line = (
        f"Weighed by how far the policy has moved since they were sampled,"
        f" batches were worth {effective:.0%} of their completions"
    )
    if clipped:
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
  """Says what of a batch and of what was sampled taught nothing new."""
  lines = []
  unique = _mean(run, "replay/unique_share")
  if unique is not None and 1 - unique > _MANY_COPIES:
    lines.append(
        f"{1 - unique:.0%} of a batch's places went to a completion that stood"
        " in it already: a prompt had fewer different completions than a group"
        " draws (more search.samples_per_prompt, or fewer"
        " train.completions_per_prompt)."
    )
  count = lambda term: (run.ledger.get(term) or {}).get("completions")
  terms = ("generated", "evicted_untrained", "in_buffer_untrained")
  if all(isinstance(run.ledger.get(term), dict) for term in terms):
    generated, evicted, left = map(count, terms)
    if generated and all(map(load.is_number, (generated, evicted, left))):
      lines.append(
          f"Of {generated:,} sampled completions {(evicted + left):,}"
          f" ({(evicted + left) / generated:.0%}) were never trained on:"
          f" {evicted:,} replaced by an equal one or evicted, {left:,} still in"
          " the buffer."
      )
  return lines


def advice(run: load.Run, rows: Rows) -> list[str]:
  """Returns sentences on what bounds a run and what it wastes.

  Args:
    run: what its directory holds; what is missing is not spoken of.
    rows: of `timeline.where_time_went`.
  """
  return [
      *_bound(run, rows),
      *_coupling(run, rows),
      *_store(run, rows),
      *_staleness(run),
      *_equal(run),
      *_copies(run),
  ]
