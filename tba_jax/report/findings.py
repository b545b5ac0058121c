# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of possible findings in a run, by topic.

`diagnosis` has the queries, `incidents` the rows of events. A difference counts
from two standard errors, a loss from three: see `evidence`.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from tba_jax.losses import objective_table
from tba_jax.report import evidence
from tba_jax.report import run_reader
from tba_jax.report import tables
from tba_jax.report import timeline
from tba_jax.run import metrics
from tba_jax.run import text


def outcomes(run: run_reader.RunData) -> evidence.Rows:
  """Returns whether the policy got better; the first row that holds counts."""
  sides = tables.evaluations(run)
  key = metrics.deciding_metric(*sides)
  held_out = evidence.evaluated(sides, key)
  greedy = evidence.evaluated(sides, f"greedy_{key}")
  graded = "pass_at_1" if key == "mean_reward" else None
  right = evidence.evaluated(sides, graded)
  # Batches drawn by reward get better while the buffer grows.
  is_recent = run.setting("replay", "recent_fraction") in (None, 1, 1.0)
  training = evidence.trend(run.records if is_recent else ())
  name = key and tables.EVALUATIONS[key][0]
  words = f"held-out {name} {held_out}"
  trained = f"training reward rose from {training.before} to {training.after}"
  # A win rate has other units than the reward.
  is_behind = key != "win_rate" and (
      training.by - held_out.by > math.hypot(training.margin, held_out.margin)
  )
  remarks = (
      ": little is left to learn" * held_out.after.is_full,
      f"; with greedy decoding it fell from {greedy.before} to"
      f" {greedy.after}: samples became less random, not better" * greedy.fell,
      f"; pass@1 did not rise: {right.before} before, {right.after} after"
      * (
          right.by <= right.margin
          and right.before.value + right.after.value > 0
      ),
  )
  why = "no evaluation before and after training"
  if 1.0 in (side.get("failure_share") for side in sides):
    why = "no held-out completion could be judged"
  return {
      "unknown": (key is None, f"Not known yet: {why}."),
      "learned": (held_out.rose, f"Learned: {words}{''.join(remarks)}."),
      "saturated": (
          held_out.before.is_full and not held_out.fell,
          f"Saturated: held-out {name} was {held_out.before} before training,"
          f" and is {held_out.after}.",
      ),
      "overfitted": (
          training.rose and (held_out.fell or is_behind),
          f"Overfitted: {trained}, but {words}.",
          "It fits its training prompts alone: check that held-out prompts are"
          " of the same kind, and covered by the tokenizer. More prompts, fewer"
          " steps or a larger loss.beta help.",
      ),
      "worse": (
          held_out.fell,
          f"Got worse: {words}.",
          "A larger loss.beta or a lower optimizer.learning_rate is safer.",
      ),
      "unclear": (
          training.rose,
          f"Not clear yet: {words}, which may be chance, and the {trained}."
          " More held-out prompts (evaluate.final_prompts) would settle it.",
      ),
      "nothing": (
          True,
          f"No measurable improvement: {words}"
          + ", and the training reward did not rise" * training.is_known
          + ".",
          "To learn, it may need more steps, a higher optimizer.learning_rate,"
          " a smaller loss.beta, fine-tuning first (init=sft), or easier"
          " prompts.",
      ),
  }


def unjudged(run: run_reader.RunData) -> evidence.Rows:
  """Returns findings on unjudged completions; the first that holds counts."""
  name = "failure_share"
  shares = {
      "held-out": evidence.evaluated(tables.evaluations(run), name),
      "training": evidence.trend(run.records, f"reward/{name}", "percent"),
  }
  words = " and ".join(
      f"{share.before} to {share.after} of {what} completions"
      for what, share in shares.items()
      if share.before.value > 0 or share.after.value > 0
  )
  return {
      "unjudged": (
          any(share.rose for share in shares.values()),
          f"A growing share could not be judged: {words}. Among the rest:",
          "The policy may be learning to break its judge: see the reward_failed"
          " events, and make the reward handle such completions.",
      ),
      "some unjudged": (bool(words), f"Not judged: {words}."),
  }


# A role that waits for less than the first share of its time is busy; if both
# roles wait for more than the second, neither is the bottleneck.
_LITTLE, _IDLE = 0.1, 0.25
# Work that takes this share of a role's time is mentioned.
_MUCH = 0.1
# Kinds of work that settings make less frequent, with these settings.
_SAVINGS = {
    "evaluate": "evaluate less (evaluate.every_steps, evaluate.num_prompts)",
    "publish": "publish less often (publish.every_steps)",
    "checkpoint": "save less often (checkpoint.every_steps)",
}


def bottlenecks(run: run_reader.RunData) -> evidence.Rows:
  """Returns what limits the speed; the first row that holds counts."""
  trainer, searcher = evidence.idle(run)
  waits = (
      f"The trainer waited {trainer:.0%} of its time, the searchers"
      f" {searcher:.0%} of theirs:"
  )
  work_s = timeline.seconds_per_step(run)
  saved = _savings(work_s.get("trainer", {}))
  is_one = any(event.get("kind") == "one_process" for event in run.events)
  role, mode = (run.setting("reference", name) for name in ("role", "mode"))
  count = int(run.setting("search", "num_searchers") or 1)
  # Busy searchers, and prompts a step, that would supply a busy trainer.
  supply = count * (1 - searcher) / max(1 - trainer, 0.01)
  balance = max(1, math.ceil(supply)) if supply >= 0 else count
  fresh = evidence.number(run.setting("search", "prompts_per_step"))
  fewer = fresh * (1 - trainer) // max(1 - searcher, 0.01)
  return {
      "both busy": (
          max(trainer, searcher) < _LITTLE,
          f"{waits} both are busy. More searchers on the same cores would not"
          " make it faster; more or faster cores would.",
          _join(saved, _work(work_s, "trainer", "searcher")),
      ),
      "both wait": (
          min(trainer, searcher) > _IDLE,
          f"{waits} the exchange between them is the bottleneck, or there are"
          " too few processors.",
      ),
      "training limits": (
          trainer <= searcher,
          f"{waits} the trainer is the bottleneck.",
          _join(
              f"{balance} searchers instead of {count} would be enough."
              if balance < count
              else "More searchers would not make it faster.",
              saved,
              "The searchers could compute the reference's log-probs"
              " (reference.role='searcher')."
              * ((role, mode, is_one) == ("trainer", "fixed", False)),
              _work(work_s, "trainer"),
          ),
      ),
      "sampling limits": (
          trainer > searcher,
          f"{waits} sampling is the bottleneck.",
          _join(
              f"At this speed, {balance} searchers instead of {count}, on their"
              " own cores, would balance the roles (search.num_searchers)."
              * (balance > count),
              f"Or {fewer:.0f} fresh prompts a step instead of {fresh:.0f},"
              " each used more often (search.prompts_per_step)."
              * (0 < fewer < fresh),
              "The trainer could compute the reference's log-probs"
              " (reference.role='trainer')."
              * ((role, is_one) == ("searcher", False)),
              _work(work_s, "searcher"),
          ),
      ),
  }


def _join(*sentences: str) -> str:
  return " ".join(filter(None, sentences))


def _work(work_s: Mapping[str, Mapping[str, float]], *roles: str) -> str:
  """Returns the main kinds of work in a step of some roles."""
  parts = []
  for role in roles:
    work = sorted(work_s.get(role, {}).items(), key=lambda item: -item[1])
    least = _MUCH / 2 * sum(s for _, s in work)
    shown = [f"{kind} {text.duration(s)}" for kind, s in work if s >= least]
    parts += [f"{role} {', '.join(shown)}"] if work else []
  return f"Work per step: {'; '.join(parts)}." if parts else ""


def _savings(work_s: Mapping[str, float]) -> str:
  """Returns what the trainer could do less often."""
  total = sum(work_s.values())
  could = [
      f"{words} to save up to {work_s[kind] / total:.0%} of its time"
      for kind, words in _SAVINGS.items()
      if work_s.get(kind, 0.0) > _MUCH * total
  ]
  return f"The trainer could {', or '.join(could)}." if could else ""


def waits(run: run_reader.RunData) -> evidence.Rows:
  """Returns further findings on what costs time."""
  rows = timeline.where_time_went(run)
  queue = _share(rows, "searcher", "wait_credit")
  publish = _share(rows, "trainer", "publish", "publish")
  lead = evidence.number(run.setting("search", "lead_steps"))
  steps = _round_steps(run, rows)
  num_losses = sum(event.get("kind") == "store_lost" for event in run.events)
  return {
      "lead too small": (
          min(evidence.idle(run)) >= _LITTLE and steps > lead,
          f"The roles waited for each other: a searcher's round takes {steps}"
          f" steps, and its lead is {lead:.0f}.",
          f"With search.lead_steps={steps} they would overlap, on staler data.",
      ),
      "queue full": (
          queue > _LITTLE,
          f"Searchers waited {queue:.0%} of their time for room in the queue:",
          "raise search.credits, or make fewer and larger rounds.",
      ),
      "always publishing": (
          publish > 1 - _LITTLE,
          f"Params were being published {publish:.0%} of the time;",
          "a larger publish.every_steps would cost nothing.",
      ),
      "store lost": (
          num_losses > 0,
          f"The store was lost {text.times(num_losses)}; the run continued.",
      ),
  }


def _share(
    rows: Sequence[Mapping[str, Any]], role: str, kind: str, lane: str = ""
) -> float:
  """Returns the share of a lane's time that a kind of span takes."""
  rows = [r for r in rows if (r["role"], r["lane"]) == (role, lane)]
  elapsed = sum(r["elapsed_s"] for r in rows)
  spent = sum(r["seconds"].get(kind, 0.0) for r in rows)
  return spent / elapsed if elapsed > 0 else math.nan


def _round_steps(
    run: run_reader.RunData, rows: Sequence[Mapping[str, Any]]
) -> float:
  """Returns how many steps the trainer takes during a searcher's round."""
  rare = ("compile", "evaluate", "checkpoint")
  seconds = {"trainer": 0.0, "searcher": 0.0}
  for row in rows:
    if row["role"] in seconds and not row["lane"]:
      seconds[row["role"]] += sum(
          s
          for kind, s in row["seconds"].items()
          if not metrics.is_wait(kind) and kind not in rare
      )
  size = math.prod(
      evidence.number(run.setting("search", key))
      for key in ("prompts_per_round", "samples_per_prompt")
  )
  last = run.records[-1] if run.records else {}
  num_rounds = last.get("total/completions", 0) / size
  if not (num_rounds > 0 and seconds["trainer"]):
    return math.nan
  step_s = seconds["trainer"] / (last["step"] + 1)
  return math.ceil(seconds["searcher"] / num_rounds / step_s)


def data(run: run_reader.RunData) -> evidence.Rows:
  """Returns findings on the value of the data."""
  loss, offline = (run.setting(name) or {} for name in ("loss", "offline"))
  only_offline = bool(offline.get("path")) and offline.get("fraction") == 1
  is_plain_tb = loss.get("name") == "tb" and not loss.get("baseline_shift")
  # A teacher's distributions are matched at prefixes from any policy.
  is_taught = objective_table.find(loss.get("name")).has_teacher
  counts_rewards = loss.get("reward_weight") != 0 and not is_taught
  age = evidence.mean(run, "replay/staleness_steps")
  ages = evidence.by_age(run)
  young_and_old = (
      "Within a batch, younger completions had a mean reward of"
      f" {ages.after.value:.3g}, older ones {ages.before.value:.3g}:"
  )
  effective = evidence.mean(run, "train/effective_sample_share")
  clipped = evidence.mean(run, "train/ratio_clip_share")
  clipped = (
      f", with {clipped:.1%} of the ratios corrected" if clipped > 0 else ""
  )
  # Shares below which staleness costs many, or some, of the completions.
  effects = {0.7: "hurt", 0.9: "cost some of them", math.inf: "hardly mattered"}
  effect = next((e for s, e in effects.items() if effective < s), "")
  skipped = run_reader.column(run.records, "replay/skipped_groups")[1]
  skipped = skipped[-1] if len(skipped) else 0
  equal = evidence.mean(run, "train/equal_reward_groups")
  whole_loss = {"name": "", "baseline": "", **loss}
  compares = counts_rewards and objective_table.min_completions(whole_loss) > 1
  copies = 1 - evidence.mean(run, "replay/unique_share")
  terms = "generated", "evicted_untrained", "in_buffer_untrained"
  generated, evicted, untrained = (
      evidence.number(tables.mapping(run.ledger.get(term)).get("completions"))
      for term in terms
  )
  return {
      "log alone": (
          only_offline and is_plain_tb,
          "All data came from a log:",
          "loss.baseline_shift=-0.1 keeps the policy nearer to it, and may"
          " teach more (docs/guides/offline_data.md).",
      ),
      "age": (
          age >= 0,
          f"Data was {age:.1f} steps old on average when it was used.",
      ),
      "old data is worse": (
          counts_rewards and ages.rose,
          f"{young_and_old} staleness costs reward.",
          "Lower search.lead_steps or publish.every_steps, or raise"
          " replay.recent_fraction.",
      ),
      "old data is better": (
          counts_rewards and ages.fell,
          f"{young_and_old} replay prefers good completions; staleness did not"
          " hurt.",
      ),
      "old data is alike": (
          counts_rewards and abs(ages.by) <= ages.margin,
          f"{young_and_old} no clear difference (± {ages.margin:.2g}).",
      ),
      "effective sample size": (
          effective >= 0 and age > 0 and not is_taught,
          f"The effective sample size of batches was {effective:.0%} of their"
          f" completions{clipped}: staleness {effect}.",
      ),
      "groups left out": (
          skipped > 0,
          f"{skipped:,.0f} groups of equal rewards were left out of batches"
          " (replay.skip_equal_rewards).",
      ),
      "equal groups": (
          equal >= 0.01 and not skipped and compares,
          f"{equal:.0%} of the groups had equal rewards: they only pull the"
          " policy towards its reference.",
          "More completions per prompt (search.samples_per_prompt,"
          " train.completions_per_prompt), other prompts or"
          " replay.skip_equal_rewards would waste less." * (equal > 0.5),
      ),
      "copies": (
          copies > 0.1,
          f"{copies:.0%} of a batch were duplicates: prompts had fewer distinct"
          " completions than a group draws",
          "(log more of each prompt, lower offline.fraction, or lower"
          " train.completions_per_prompt)."
          if offline.get("path")
          else "(raise search.samples_per_prompt, or lower"
          " train.completions_per_prompt).",
      ),
      "never trained on": (
          generated > 0 and evicted + untrained >= 0,
          f"{evicted + untrained:,} of {generated:,} completions"
          f" ({(evicted + untrained) / (generated or 1):.0%}) were never"
          f" trained on: {evicted:,} were evicted or replaced by an equal one,"
          f" {untrained:,} are still in the buffer.",
      ),
  }


def causes(m: evidence.Moment) -> evidence.Rows:
  """Returns causes of a lost reward; the first of simultaneous ones counts.

  Entropy and KL show how far the policy has moved: a long way without a gain is
  enough. Length needs a reward that rose; the others, a reward or held-out
  metric that fell.
  """
  metric = m.start_and_now
  gap = metric("train/logprob_gap")
  share = metric("train/effective_sample_share")
  clipped = metric("train/ratio_clip_share")
  length, stops = map(metric, ("replay/completion_tokens", "replay/stop_rate"))
  entropy, kl = metric("train/entropy"), metric("train/kl_per_token")
  batch = metric(evidence.BATCH)[1]
  best = max(v.get("train/effective_sample_share", 0.0) for v in m.values)
  runs_on = stops[1] < stops[0] / 2 and not m.is_good
  lost = str(m)
  what = lambda words, values, unit="", style="number": (
      f"{words} went from {text.number(values[0], style)} to"
      f" {text.number(values[1], style)}{unit}, {lost}"
  )
  nats = " nats a token"
  return {
      # At staleness 0; the guards' limit for bfloat16. Yao et al. 2025, "Your
      # efficient RL framework secretly brings you off-policy RL training".
      "log-prob gap": (
          gap[1] > 0.1 and m.fell,
          what("the gap between trainer and sampler", gap, nats),
          "compare both in float32; see masks, temperature and dtypes",
      ),
      # Share of a batch that importance weights leave: up to 5 % or two
      # completions, and below a third of its best. VCPO (arXiv:2602.17616)
      # scales the learning rate by this share.
      "effective sample size": (
          (share[1] <= 0.05 or share[1] * max(batch, 1.0) <= 2)
          and share[1] < best / 3
          and m.fell,
          what("the share of the batch that counts", share, style="percent"),
          "lower search.lead_steps or publish.every_steps, or set"
          " optimizer.sample_share_power",
      ),
      # GSPO runs well at .15 (Zheng et al. 2025, arXiv:2507.18071).
      "clipped share": (
          clipped[1] > max(0.2, 2 * clipped[0]) and m.fell,
          what("tokens with a corrected gradient", clipped, style="percent"),
          "fresher data, or a lower optimizer.learning_rate",
      ),
      # Singhal et al. 2023 (arXiv:2310.03716): much of a reward model's reward
      # is length.
      "length": (
          (length[1] > 2 * length[0] or length[1] < length[0] / 2)
          and (runs_on or m.held_out_fell)
          and m.reward_rose,
          what("a completion", length, " tokens"),
          "see samples.jsonl: the reward pays for length; judge it by another"
          " measure or set a penalty",
      ),
      # Cui et al. 2025 (arXiv:2505.22617): a policy without entropy has nothing
      # left to learn from.
      "entropy": (
          (entropy[1] < 0.1 * entropy[0] or entropy[1] > 3 * entropy[0])
          and m.is_lost,
          what("it", entropy, nats),
          "raise loss.beta or loss.entropy_weight, lower"
          " optimizer.learning_rate",
      ),
      # KL beyond the entropy lost, which is the most that sharpening alone
      # explains: the policy's tokens have become that unlikely under the
      # reference. Gao et al. 2022 (arXiv:2210.10760): past some KL the true
      # reward falls.
      "KL": (
          kl[1] - max(0.0, entropy[0] - entropy[1]) > 0.5 and m.is_lost,
          what("the distance from the reference", kl, nats),
          "raise loss.beta, lower optimizer.learning_rate, stop earlier",
      ),
  }
