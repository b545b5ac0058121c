# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What happened to a run: findings on its events and on pauses of training."""

import collections
from collections.abc import Mapping
import statistics
import time
from typing import Any

from tba_jax.report import evidence
from tba_jax.report import run_reader
from tba_jax.run import metrics
from tba_jax.run import text

# A pause is this many times longer than the median time between two steps, and
# at least so many seconds long; at most so many pauses are shown.
_PAUSE_TIMES, _PAUSE_S, _MAX_PAUSES = 10, 5.0, 5
_MAX_MESSAGE = 160
# Kind of event | meaning | advice to the user.
_EVENTS = """
carrier_full | no room for published params | free some space
checkpoint_damaged | a damaged checkpoint was set aside
checkpoint_failed | a checkpoint could not be written \
 | free the disk: until the next one more would be trained again
damaged | a file of the run was damaged | see --program=verify
evaluation_failed | an evaluation was given up \
 | raise evaluate.deadline_s or lower evaluate.num_prompts
evaluation_lost | an evaluation was lost
gap | blocks of a searcher were lost
guard | a guard fired | see docs/guides/troubleshooting.md
journal_damaged | the journal was damaged \
 | the ledger counts what it had; check the disk
journal_full | the journal was full: no data was accepted | free the disk
journal_lost | acknowledged completions were missing in the journal \
 | the ledger counts them as lost; check the disk
journal_missing | the log of acknowledgements was missing
journal_refused | the journal had records of another secret \
 | restore spool/secret from a copy
journal_torn | a crash cut off the end of the journal
journal_unclean | a failed write to the journal was cut off
not_written | a file could not be written: it lacks entries from then on \
 | free the disk
publish_failed | new params could not be published \
 | the message names the setting
refused_block | a block was refused | update that searcher
refused_message | messages were refused: forged, or of another run or version \
 | check who can reach the store's port
refused_version | published params were refused
rejected | completions were rejected | ledger.json has the reasons
sampler_lost | a vLLM server did not answer | see its log
searcher_gone | a searcher was written off
searcher_lost | completions were lost with their searcher
step_skipped | a non-finite step was skipped \
 | lower optimizer.learning_rate if it recurs
store_lost | the store was lost and found again
version_skipped | params came faster than they could be published \
 | raise publish.every_steps, or choose a faster publish.carrier
wrong_params | published params did not reproduce the trainer's log-probs \
and were refused | see "which params sampled" in docs/reference/faults.md
"""
_EVENTS = {
    kind: (what, *to_do)
    for line in _EVENTS.strip().splitlines()
    for kind, what, *to_do in [map(str.strip, line.split("|"))]
}


def _name(event: Mapping[str, Any]) -> str:
  role = text.printable(event.get("role") or "", 40, one_line=True)
  return f"{role}-{event.get('index', 0)}" if role else "train"


def _kinds(run: run_reader.RunData) -> list[Mapping[str, Any]]:
  return [event for event in run.events if isinstance(event.get("kind"), str)]


def errors(run: run_reader.RunData) -> evidence.Rows:
  """Returns what went wrong, once for each kind, process and cause."""
  groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
  hung: set[str] = set()
  for event in _kinds(run):
    kind, message = event["kind"], str(event.get("message") or "")
    if not metrics.is_error(kind, message):
      continue
    name = _name(event)
    if kind == "died" and name in hung:  # Killed because it hung.
      hung.discard(name)
      continue
    if kind == "stalled":
      hung.add(name)
    cause = ""
    if kind == "died":  # The exit status is the cause, whatever the last words.
      cause = message.partition(": ")[2].partition(", ")[0]
    groups.setdefault((kind, name, cause), []).append(event)
  return {str(key): _error(*key[:2], group) for key, group in groups.items()}


def _error(
    kind: str, name: str, events: list[Mapping[str, Any]]
) -> tuple[bool, str, str]:
  message = text.printable(
      events[-1].get("message") or "", _MAX_MESSAGE, one_line=True
  )
  times = text.times(len(events))
  when, last = events[-1].get("time"), ""
  if text.is_number(when):
    last = time.strftime(", last at %H:%M:%S", time.localtime(when))
  cause = f"{times} ({message.partition(': ')[2]}{last})"
  what, *to_do = _EVENTS.get(kind, ("",))
  sentences = {
      "died": f"{name} died {cause} and was restarted; logs/{name}.log has its"
      " last words.",
      "stalled": f"{name} hung {cause} and was killed and restarted.",
  }
  sentence = f"{name}: {what}, {times}{last}: {message}."
  is_known = kind in _EVENTS or kind in sentences
  return (
      is_known,
      sentences.get(kind, sentence),
      *(f"To do: {words}." for words in to_do),
  )


def pauses(run: run_reader.RunData) -> evidence.Rows:
  """Returns the longest pauses of training, the longest last."""
  # As written: evaluations and redone steps have separate times.
  lines = [r for r in run.lines if text.is_number(r.get("time"))]
  events = [e for e in _kinds(run) if text.is_number(e.get("time"))]
  steps = [
      r for r in lines if "train/loss" in r and text.is_number(r.get("step"))
  ]
  pairs = [(b["time"] - a["time"], a, b) for a, b in zip(steps, steps[1:])]
  usual = statistics.median(s for s, _, _ in pairs) if pairs else 0.0
  limit = max(_PAUSE_TIMES * usual, _PAUSE_S)
  # The run was stopped, or evaluated: neither is an incident.
  planned = [e for e in events if e["kind"] == "interrupted"] + [
      r
      for r in lines
      if "train/loss" not in r and any(key.startswith("eval/") for key in r)
  ]
  within = lambda long_pauses, a, b: [
      r for r in long_pauses if a["time"] <= r["time"] <= b["time"]
  ]
  long_pauses = [
      p for p in pairs if p[0] > limit and not within(planned, *p[1:])
  ]
  longest = sorted(long_pauses, key=lambda pair: pair[0])[-_MAX_PAUSES:]
  rows = {}
  for seconds, a, b in longest:
    between = f"between steps {a['step']} and {b['step']}"
    why = _causes(a, b, within(events, a, b))
    sentence = f"Training paused for {text.duration(seconds)} {between}: {why}."
    rows[f"pause {len(rows)}"] = True, sentence
  return rows


def _causes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    events: list[Mapping[str, Any]],
) -> str:
  """Returns the most frequent errors between two steps."""
  causes = collections.Counter()
  for event in events:
    kind, message = event["kind"], event.get("message") or ""
    what = _EVENTS.get(kind, (text.printable(kind, 40),))[0]
    cause = f"{what} ({_name(event)})"
    if kind in ("died", "stalled"):
      cause = text.printable(message, 80, one_line=True)
    causes[cause] += metrics.is_error(kind, message)
  if why := ", ".join(cause for cause, n in causes.most_common(3) if n):
    return why
  if before.get("epoch") != after.get("epoch"):
    return "the trainer was started again"
  return "no event explains it; the clock may have been set"
