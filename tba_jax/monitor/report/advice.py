# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives advice on a run's settings from its metrics."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

from tba_jax.losses import build as losses
from tba_jax.monitor import metrics
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables
from tba_jax.monitor.report import timeline
from tba_jax.monitor.report import verdict

Rows = Sequence[Mapping[str, Any]]

# A role that waits for less than this share of its time is busy.
_LITTLE = 0.1
# Roles that both wait for more than this are no bottleneck.
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
  """Returns the same as a share of the role's time; None without spans."""
  elapsed = sum(
      r["elapsed_s"] for r in rows if r["role"] == role and not r["lane"]
  )
  return _seconds(rows, role, counts) / elapsed if elapsed > 0 else None


def _setting(run: load.Run, *keys: str) -> float | None:
  value = run.setting(*keys)
  return value if text.is_number(value) else None


def _mean(run: load.Run, name: str) -> float | None:
  _, values = load.column(run.records, name)
  return float(values.mean()) if len(values) else None


# Work that takes this share of a busy role's time is worth a word.
_MUCH = 0.1
# Kinds of work that a setting makes rarer, and the setting.
_SAVINGS = {
    "evaluate": "evaluate less (evaluate.every_steps, evaluate.num_prompts)",
    "publish": "publish less often (publish.every_steps)",
    "checkpoint": "save less often (checkpoint.every_steps)",
}


def _idle(run: load.Run) -> tuple[float, float] | None:
  """Returns the shares of time that trainer and searchers waited, or None."""
  known = tables.outcome(run)
  names = "trainer_busy_share", "searchers_busy_share"
  if not all(text.is_number(known.get(name)) for name in names):
    return None
  trainer, searchers = (max(0.0, 1.0 - known[name]) for name in names)
  return trainer, searchers


def _work(
    per_step: Mapping[str, Mapping[str, float]], roles: Sequence[str]
) -> str:
  """Returns what fills a step on the cores of some roles."""
  parts = []
  for role in roles:
    work = sorted(per_step.get(role, {}).items(), key=lambda item: -item[1])
    if work:
      shown = ", ".join(
          f"{kind} {text.duration(s)}"
          for kind, s in work
          if s >= _MUCH / 2 * sum(s for _, s in work)
      )
      parts.append(f"{role} {shown}")
  return f" Work of a step: {'; '.join(parts)}." if parts else ""


def _savings(per_step: Mapping[str, Mapping[str, float]]) -> list[str]:
  """Returns what the trainer could do less of."""
  work = per_step.get("trainer", {})
  return [
      f"{words} for up to {work[kind] / sum(work.values()):.0%} of its time"
      for kind, words in _SAVINGS.items()
      if work.get(kind, 0.0) > _MUCH * sum(work.values())
  ]


def _bottleneck(run: load.Run) -> list[str]:
  """Names the bottleneck, what fills it, and what would help."""
  idle = _idle(run)
  if idle is None:
    return []
  trainer, searcher = idle
  waits = (
      f"The trainer waited {trainer:.0%} of its time, the searchers"
      f" {searcher:.0%} of theirs"
  )
  per_step = timeline.seconds_per_step(run)
  savings = _savings(per_step)
  reference = [run.setting("reference", name) for name in ("role", "mode")]
  one_process = any(event.get("kind") == "one_process" for event in run.events)
  if max(trainer, searcher) < _LITTLE:
    could = f" The trainer could {', or '.join(savings)}." if savings else ""
    return [
        f"{waits}: both are busy. More searchers on the same cores would not"
        f" make it faster; more or faster cores would.{could}"
        + _work(per_step, ("trainer", "searcher"))
    ]
  if min(trainer, searcher) > _IDLE:
    return [
        f"{waits}: the exchange between them is the bottleneck, or there are"
        " too few processors."
    ]
  count = int(_setting(run, "search", "num_searchers") or 1)
  # Number of busy searchers that keep a busy trainer supplied.
  balance = max(1, math.ceil(count * (1 - searcher) / max(1 - trainer, 0.01)))
  if trainer <= searcher:
    tail = "More searchers would not make it faster."
    if balance < count:
      tail = f"{balance} searchers instead of {count} would be enough."
    if savings:
      tail += f" The trainer could {', or '.join(savings)}."
    if reference == ["trainer", "fixed"] and not one_process:
      tail += (
          " The searchers could compute the reference's log-probs"
          " (reference.role='searcher')."
      )
    return [
        f"{waits}: the trainer is the bottleneck. {tail}"
        + _work(per_step, ("trainer",))
    ]
  line = f"{waits}: sampling is the bottleneck."
  if balance > count:
    line += (
        f" At this speed, {balance} searchers instead of {count}, on cores of"
        " their own, would balance the roles (search.num_searchers)."
    )
  fresh = _setting(run, "search", "prompts_per_step")
  fewer = fresh and math.floor(fresh * (1 - trainer) / (1 - searcher))
  if fewer and fewer < fresh:
    line += (
        f" Or {fewer} fresh prompts a step instead of {fresh:.0f}, each used"
        " more often (search.prompts_per_step)."
    )
  if reference[0] == "searcher" and not one_process:
    line += (
        " The trainer could compute the reference's log-probs"
        " (reference.role='trainer')."
    )
  return [line + _work(per_step, ("searcher",))]


def _lead(run: load.Run, rows: Rows) -> list[str]:
  """Suggests a larger lead if the roles wait for each other."""
  idle = _idle(run)
  lead = _setting(run, "search", "lead_steps")
  if idle is None or min(idle) < _LITTLE or lead is None or not run.records:
    return []
  rounds = sum(
      run.span_kinds[kind] == "decode"
      for lane in run.lanes.values()
      if lane.role == "searcher" and not lane.lane
      for kind in lane.kinds
  )
  rare = ("compile", "evaluate", "checkpoint")
  work = lambda kind: not metrics.is_wait(kind) and kind not in rare
  trainer, searcher = (_seconds(rows, r, work) for r in ("trainer", "searcher"))
  if not rounds or not trainer:
    return []
  step_s = trainer / (run.records[-1]["step"] + 1)
  wanted = math.ceil(searcher / rounds / step_s)
  if wanted <= lead:
    return []
  return [
      f"The roles waited for each other: a searcher's round takes {wanted}"
      f" steps, and its lead is {lead:.0f}. With search.lead_steps={wanted}"
      " they would overlap, on staler data."
  ]


def _store(run: load.Run, rows: Rows) -> list[str]:
  lines = []
  queue = _share(rows, "searcher", lambda kind: kind == "wait_credit")
  if queue is not None and queue > _LITTLE:
    lines.append(
        f"Searchers waited {queue:.0%} of their time for room in the queue:"
        " raise search.credits, or make fewer and larger rounds."
    )
  publish = [r for r in rows if r["lane"] == "publish"]
  share = sum(r["seconds"].get("publish", 0.0) for r in publish) / max(
      sum(r["elapsed_s"] for r in publish), 1e-9
  )
  if publish and share > 1 - _LITTLE:
    lines.append(
        f"Params were being published {share:.0%} of the time; a larger"
        " publish.every_steps would cost nothing."
    )
  lost = sum(1 for event in run.events if event.get("kind") == "store_lost")
  if lost:
    times = "once" if lost == 1 else f"{lost} times"
    lines.append(f"The store was lost {times}; the run continued.")
  return lines


def _staleness(run: load.Run) -> list[str]:
  lines = []
  age = _mean(run, "replay/staleness_steps")
  if age is not None:
    lines.append(f"Data was {age:.1f} steps old on average when it was used.")
  names = "replay/reward_young", "replay/reward_old"
  both = [
      r for r in run.records if all(text.is_number(r.get(n)) for n in names)
  ]
  if len(both) >= 2 and _learns_from_rewards(run):
    # Paired by step, so that progress during the run does not matter.
    young, old = (load.column(both, name)[1] for name in names)
    gap = float((young - old).mean())
    error = float((young - old).std(ddof=1)) / math.sqrt(len(both))
    line = (
        "Within a batch, younger completions had a mean reward of"
        f" {young.mean():.3g}, older ones {old.mean():.3g}: "
    )
    if gap > verdict.CLEAR * error:
      line += (
          "staleness costs reward. Lower search.lead_steps or"
          " publish.every_steps, or raise replay.recent_fraction."
      )
    elif gap < -verdict.CLEAR * error:
      line += "replay prefers good ones, staleness did not hurt."
    else:
      line += f"no clear difference (± {verdict.CLEAR * error:.2g})."
    lines.append(line)
  effective = _mean(run, "train/effective_sample_share")
  if effective is not None and age and not _is_taught(run):
    effect = "hardly mattered"
    if effective < _LOW_EFFECTIVE:
      effect = "hurt"
    elif effective < _SOME_EFFECTIVE:
      effect = "cost some of them"
    clipped = _mean(run, "train/ratio_clip_share")
    lines.append(
        f"The effective sample size of batches was {effective:.0%} of their"
        " completions"
        + (f", with {clipped:.1%} of the ratios corrected" if clipped else "")
        + f": staleness {effect}."
    )
  return lines


def _learns_from_rewards(run: load.Run) -> bool:
  """Returns whether rewards count; in distillation, all may be 0."""
  return run.setting("loss", "reward_weight") != 0 and not _is_taught(run)


def _compares(run: load.Run) -> bool:
  """Returns whether a group of equal rewards has nothing to learn from."""
  loss = {"name": "", "baseline": "", **(run.setting("loss") or {})}
  return losses.min_completions(loss) > 1


def _is_taught(run: load.Run) -> bool:
  """Returns whether distributions are matched, at prefixes of any policy."""
  return losses.find(run.setting("loss", "name")).has_teacher


def _log_alone(run: load.Run) -> list[str]:
  """Returns what may help a policy that is trained on a log alone."""
  loss, logged = (run.setting(name) or {} for name in ("loss", "logged"))
  is_alone = logged.get("path") and logged.get("share") == 1
  if not is_alone or loss.get("name") != "tb" or loss.get("baseline_shift"):
    return []
  return [
      "All data came from a log: loss.baseline_shift=-0.1 keeps the policy"
      " nearer to it, and may teach more (docs/logged_data.md)."
  ]


def _groups(run: load.Run) -> list[str]:
  """Returns the shares of data without a learning signal."""
  lines = []
  equal = _mean(run, "train/equal_reward_groups")
  _, skipped = load.column(run.records, "replay/skipped_groups")
  if len(skipped) and skipped[-1]:
    lines.append(
        f"{skipped[-1]:,.0f} groups of equal rewards were left out of batches"
        " (replay.skip_equal_rewards)."
    )
  elif equal is not None and _learns_from_rewards(run) and _compares(run):
    line = (
        f"{equal:.0%} of the groups had equal rewards: they only pull the"
        " policy towards its reference."
    )
    if equal > _MANY_EQUAL:
      line += (
          " More completions per prompt (search.samples_per_prompt,"
          " train.completions_per_prompt), other prompts or"
          " replay.skip_equal_rewards would waste less."
      )
    lines.append(line)
  unique = _mean(run, "replay/unique_share")
  if unique is not None and 1 - unique > _MANY_COPIES:
    more = "raise search.samples_per_prompt"
    if run.setting("logged", "path"):
      more = "log more of each prompt, lower logged.share"
    lines.append(
        f"{1 - unique:.0%} of a batch was copies: prompts had fewer distinct"
        f" completions than a group draws ({more}, or"
        " lower train.completions_per_prompt)."
    )
  terms = ("generated", "evicted_untrained", "in_buffer_untrained")
  counts = [
      term.get("completions") if isinstance(term, dict) else None
      for term in map(run.ledger.get, terms)
  ]
  if all(map(text.is_number, counts)) and counts[0]:
    generated, evicted, left = counts
    lines.append(
        f"Of {generated:,} completions, {evicted + left:,}"
        f" ({(evicted + left) / generated:.0%}) were never trained on:"
        f" {evicted:,} were evicted or replaced by an equal one, {left:,} are"
        " still in the buffer."
    )
  return lines


_NOT_LEARNED = {
    "overfitted": (
        "It learned its training prompts alone: check that held-out prompts"
        " are of the same kind, with words that the tokenizer knows. More"
        " prompts, fewer steps or a larger loss.beta help."
    ),
    "unjudged": (
        "The policy may be learning to break its judge: see the events"
        " reward_failed, and make the reward's code judge such completions."
    ),
    "worse": "A larger loss.beta or a lower optimizer.learning_rate is safer.",
    "nothing": (
        "To learn, it may need more steps, a higher optimizer.learning_rate, a"
        " smaller loss.beta, fine-tuning first (init=sft), or easier prompts."
    ),
}


def advice(run: load.Run, rows: Rows) -> list[str]:
  """Returns sentences on a run's bottleneck and on what it wastes.

  Leaves out throughput if the run did not learn; ignores missing parts. `rows`
  are those of `timeline.where_time_went`.
  """
  conclusion = verdict.of_run(run)
  kind = conclusion.kind
  first = [_NOT_LEARNED[kind]] if kind in _NOT_LEARNED else []
  if conclusion.learned:
    first = [*_bottleneck(run), *_lead(run, rows), *_store(run, rows)]
  return [*first, *_log_alone(run), *_staleness(run), *_groups(run)]
