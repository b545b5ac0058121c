# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells what happened to a run: restarts, losses, pauses, a collapse.

Events of one process and cause make one sentence, which names the culprit, how
often and when last, and what to do where something is to be done.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import statistics
import time
from typing import Any

from tba_jax.monitor import collapse
from tba_jax.monitor import metrics
from tba_jax.monitor import text

# Kind of event -> what it says, and what the user may do.
_KINDS = {
    "carrier_full": ("published params had no room", "free some"),
    "checkpoint_damaged": ("a damaged checkpoint was set aside", ""),
    "checkpoint_failed": (
        "a checkpoint could not be written",
        "free the disk: until the next one more would be trained again",
    ),
    "damaged": ("a file of the run was damaged", "see --program=verify"),
    "evaluation_failed": (
        "an evaluation was given up",
        "raise evaluate.deadline_s or lower evaluate.num_prompts",
    ),
    "evaluation_lost": ("an evaluation was lost", ""),
    "gap": ("blocks of a searcher were lost", ""),
    "guard": ("a guard fired", "see docs/troubleshooting.md"),
    "journal_damaged": (
        "the journal was damaged",
        "the ledger counts what it had; check the disk",
    ),
    "journal_full": (
        "the journal had no room: no data came in",
        "free the disk",
    ),
    "journal_lost": (
        "acknowledged completions were missing in the journal",
        "the ledger counts them as lost; check the disk",
    ),
    "journal_missing": ("the log of acknowledgements was missing", ""),
    "journal_refused": (
        "the journal had records of another secret",
        "restore spool/secret from a copy",
    ),
    "journal_torn": ("the end of the journal was cut off by a crash", ""),
    "journal_unclean": ("a failed write to the journal was cut off", ""),
    "not_written": (
        "a file could not be written: it lacks entries from then on",
        "free the disk",
    ),
    "refused_block": ("a block was refused", "update that searcher"),
    "refused_message": (
        "messages of another run or version, or forged, were refused",
        "see who reaches the store's port",
    ),
    "refused_version": ("params that were published were refused", ""),
    "rejected": ("completions were rejected", "ledger.json has the reasons"),
    "sampler_lost": ("a vLLM server did not answer", "see its log"),
    "searcher_gone": ("a searcher was written off", ""),
    "searcher_lost": ("completions were lost with their searcher", ""),
    "step_skipped": (
        "a step was not finite and was skipped",
        "lower optimizer.learning_rate if there are more",
    ),
    "store_lost": ("the store was lost and found again", ""),
    "wrong_params": (
        "published params did not give the trainer's log-probs here and were"
        " refused",
        'see "which params sampled" in docs/faults.md',
    ),
}
# Kinds that tell of a process, in an event of its supervisor.
_PROCESS_KINDS = ("died", "stalled")
# A pause is this many times longer than the median between two steps, and no
# shorter than so many seconds.
_PAUSE_TIMES, _PAUSE_S = 10, 5.0
_MAX_PAUSES = 5
_MAX_MESSAGE = 160


def sentences(
    events: Iterable[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
  """Returns what happened, [] for a quiet run.

  A collapse comes first, the costliest pauses last.

  Args:
    events: records of `events.jsonl`, oldest first.
    records: records of steps in `metrics.jsonl`, oldest first.
  """
  events = [event for event in events if isinstance(event.get("kind"), str)]
  groups: dict[tuple[str, str], list[Mapping[str, Any]]] = (
      collections.defaultdict(list)
  )
  hung: set[tuple[Any, Any]] = set()
  for event in events:
    kind, message = event["kind"], str(event.get("message") or "")
    process = event.get("role"), event.get("index")
    if kind == "stalled":
      hung.add(process)
      groups["stalled", _name(event)].append(event)
    elif kind == "died":
      # A process that hung was killed for it.
      if process not in hung:
        cause = message.partition(": ")[2]
        groups["died", f"{_name(event)}: {cause}"].append(event)
      hung.discard(process)
    elif kind in _KINDS and metrics.is_error(kind, message):
      groups[kind, _name(event)].append(event)
  collapsed = collapse.find(records)
  out = [collapsed.sentence] if collapsed else []
  out += [_sentence(kind, who, some) for (kind, who), some in groups.items()]
  return out + _pauses(records, events)


def _name(event: Mapping[str, Any]) -> str:
  role = text.printable(event.get("role") or "", 40, one_line=True)
  return f"{role}-{event.get('index', 0)}" if role else "train"


def _times(count: int) -> str:
  return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _clock(event: Mapping[str, Any]) -> str:
  when = event.get("time")
  if not text.is_number(when):
    return ""
  return time.strftime("%H:%M:%S", time.localtime(when))


def _sentence(kind: str, who: str, some: Sequence[Mapping[str, Any]]) -> str:
  last = some[-1]
  count, when = _times(len(some)), _clock(last)
  message = text.printable(
      last.get("message") or "", _MAX_MESSAGE, one_line=True
  )
  when = f", last at {when}" if when else ""
  if kind == "died":
    name, _, cause = who.partition(": ")
    return (
        f"{name} died {count} ({cause}{when}) and was restarted;"
        f" logs/{name}.log has its last words."
    )
  if kind == "stalled":
    why = message.partition(": ")[2]
    return f"{who} hung {count} ({why}{when}) and was killed and restarted."
  what, advice = _KINDS[kind]
  advice = f" To do: {advice}." if advice else ""
  return f"{who}: {what}, {count}{when}: {message}.{advice}"


def _pauses(
    records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[str]:
  """Returns the longest pauses between two steps, with what came in them."""
  steps = [
      (r["time"], r["step"], r.get("epoch"))
      for r in records
      if "train/loss" in r
      and text.is_number(r.get("time"))
      and text.is_number(r.get("step"))
  ]
  gaps = [
      (after[0] - before[0], before, after)
      for before, after in zip(steps, steps[1:])
  ]
  if not gaps:
    return []
  usual = statistics.median(gap for gap, _, _ in gaps)
  limit = max(_PAUSE_TIMES * usual, _PAUSE_S)
  # The run was stopped, or evaluated: neither is an incident.
  planned = [e for e in events if e["kind"] == "interrupted"] + [
      r
      for r in records
      if "train/loss" not in r and any(key.startswith("eval/") for key in r)
  ]
  pauses = [
      (gap, before, after)
      for gap, before, after in gaps
      if gap > limit
      and not any(_is_between(one, before[0], after[0]) for one in planned)
  ]
  pauses = sorted(pauses, key=lambda g: g[0])[-_MAX_PAUSES:]
  out = []
  for gap, (begin, first, epoch), (end, following, next_epoch) in pauses:
    causes = collections.Counter(
        _cause(event)
        for event in events
        if _is_between(event, begin, end)
        and metrics.is_error(event["kind"], event.get("message"))
    )
    why = ", ".join(cause for cause, _ in causes.most_common(3))
    if epoch != next_epoch:
      why = why or "the trainer was started again"
    why = why or "no event tells why; the clock may have been set"
    out.append(
        f"Training paused for {text.duration(gap)} between steps {first} and"
        f" {following}: {why}."
    )
  return out


def _is_between(record: Mapping[str, Any], begin: float, end: float) -> bool:
  """Returns whether a record or event was written between two times."""
  written = record.get("time")
  return text.is_number(written) and begin <= written <= end


def _cause(event: Mapping[str, Any]) -> str:
  kind = event["kind"]
  if kind in _PROCESS_KINDS:
    message = event.get("message") or ""
    return text.printable(message, 80, one_line=True)
  what, _ = _KINDS.get(kind, (text.printable(kind, 40), ""))
  return f"{what} ({_name(event)})"
