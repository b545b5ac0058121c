# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Synthetic runs by name; `findings.json` has their diagnoses.

A run is a mapping of the nonempty fields of `run_reader.RunRecords`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.report import run_reader

_KINDS = "step evaluate publish decode wait_work wait_credit reference reward"
KINDS = _KINDS.split()


def history(count, **values):
  """Returns records with values that are numbers or functions of the step."""
  rng = np.random.default_rng(0)
  base = {"train/reward_mean": lambda i: 0.5 + 0.02 * rng.normal()}
  return [
      {
          "step": i,
          **{
              name: value(i) if callable(value) else value
              for name, value in (base | values).items()
          },
      }
      for i in range(count)
  ]


def training(first, last, noise=0.02, num_steps=40):
  """Returns records whose mean batch reward moves from `first` to `last`."""
  slope = (last - first) / (num_steps - 1)
  return [
      {"step": i, "train/reward_mean": first + i * slope + noise * (-1) ** i}
      for i in range(num_steps)
  ]


def sides(error=0.01, **metrics):
  """Returns evaluations before and after, each metric with its error."""
  out = {}, {}
  for key, values in metrics.items():
    for side, value in zip(out, values, strict=True):
      side |= {key: value, f"{key}_stderr": error}
  return out


def lanes(*works, num_rounds=1, round_s=10.0):
  """Returns lanes from (role, lane, {kind: seconds}) of each round."""
  out = {}
  for role, name, seconds in works:
    spans = run_reader.Lane(role, 0, name)
    for number in range(num_rounds):
      start = round_s * number
      for kind, s in seconds.items():
        spans.kinds.append(KINDS.index(kind))
        spans.t0.append(start)
        start += s
        spans.t1.append(start)
    out[role, 0, name] = spans
  return out


def event(time, kind, message="", role="", index=0):
  names = "time", "kind", "message", "role", "index"
  return dict(zip(names, (time, kind, message, role, index), strict=True))


def timed(*times):
  """Returns records of steps with these end times."""
  return [
      {"step": i, "time": time, "train/loss": 1.0}
      for i, time in enumerate(times)
  ]


def roles(trainer=None, searchers=None):
  """Returns `status.json` of roles with these busy shares."""
  return {
      "trainer": {"busy_share": trainer},
      "searchers_busy_share": searchers,
  }


# Runs with evaluations before and after.
JUDGED = {
    "right or wrong, rose": (
        sides(pass_at_1=(0.29, 0.68), mean_reward=(0.29, 0.68)),
        training(0.3, 0.7),
    ),
    "rose within noise": (
        sides(0.03, pass_at_1=(0.50, 0.57), mean_reward=(0.50, 0.57)),
        training(0.5, 0.6),
    ),
    "stayed, training flat": (
        sides(pass_at_1=(0.30, 0.31), mean_reward=(0.30, 0.31)),
        training(0.4, 0.4),
    ),
    "stayed far behind training": (
        sides(pass_at_1=(0.30, 0.32), mean_reward=(0.30, 0.32)),
        training(0.4, 0.9),
    ),
    "never right, training rose": (
        sides(pass_at_1=(0.0, 0.0), mean_reward=(0.0, 0.0)),
        training(0.0, 0.5),
    ),
    "fell while training rose": (
        sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        training(0.4, 0.6),
    ),
    "fell with training": (
        sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        training(0.4, 0.3),
    ),
    "fell, training flat": (
        sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        training(0.4, 0.4),
    ),
    "right before": (
        sides(0.003, pass_at_1=(0.99, 0.99), mean_reward=(0.99, 0.99)),
        training(0.97, 0.99, 0.001),
    ),
    "right after": (
        sides(pass_at_1=(0.80, 0.99), mean_reward=(0.80, 0.99)),
        training(0.8, 0.99),
    ),
    "graded, never right": (
        sides(pass_at_1=(0.0, 0.0), mean_reward=(0.2, 0.8)),
        training(0.2, 0.8),
    ),
    "graded, right as often": (
        sides(pass_at_1=(0.30, 0.30), mean_reward=(0.4, 0.6)),
        training(0.4, 0.6),
    ),
    "graded, right more often": (
        sides(pass_at_1=(0.30, 0.60), mean_reward=(0.4, 0.7)),
        training(0.4, 0.7),
    ),
    "graded, fell": (
        sides(pass_at_1=(0.30, 0.35), mean_reward=(0.6, 0.4)),
        training(0.6, 0.4),
    ),
    "graded, stayed far behind": (
        sides(pass_at_1=(0.30, 0.30), mean_reward=(0.40, 0.41)),
        training(0.4, 0.9),
    ),
    "reward without a scale": (
        sides(0.1, mean_reward=(-1.5, 0.7)),
        training(-1.5, 0.9),
    ),
    "wins more": (
        sides(win_rate=(0.50, 0.70), mean_reward=(-0.5, 1.2)),
        training(-0.5, 1.3),
    ),
    "wins more, greedy less": (
        sides(win_rate=(0.40, 0.70), greedy_win_rate=(0.89, 0.80)),
        training(0.1, 0.5),
    ),
    "wins less for more reward": (
        sides(win_rate=(0.50, 0.40), mean_reward=(-0.5, 2.0)),
        training(-0.5, 2.1),
    ),
    "wins as often for more reward": (
        sides(win_rate=(0.50, 0.51), mean_reward=(-0.5, 2.0)),
        training(-0.5, 2.1),
    ),
    "errors unknown": (({"pass_at_1": 0.2}, {"pass_at_1": 0.3}), []),
    "a step or two": (
        sides(pass_at_1=(0.30, 0.31)),
        training(0.4, 0.5)[:5],
    ),
    "not evaluated after": (({"pass_at_1": 0.5}, {}), training(0.4, 0.9)),
    "nothing could be judged": (
        ({"failure_share": 1.0}, {"failure_share": 1.0}),
        [],
    ),
}


def failing(held_out, trained, rates=(0.3, 0.9)):
  """Returns a run with these shares of unjudged completions."""
  metrics = {"pass_at_1": rates, "mean_reward": (-0.6, -0.1)}
  if held_out:
    metrics["failure_share"] = held_out
  records = training(-0.6, -0.1)
  if trained:
    for record, share in zip(records, training(*trained), strict=True):
      record["reward/failure_share"] = share["train/reward_mean"]
  return sides(**metrics), records


FAILING = {
    "failures rose, held-out": failing((0.125, 0.455), (0.1, 0.1)),
    "failures rose, training": failing((0.125, 0.130), (0.1, 0.4)),
    "failures rose, training alone": failing(None, (0.1, 0.4)),
    "failures stayed": failing((0.125, 0.130), (0.1, 0.1)),
    "failures fell": failing((0.455, 0.125), (0.4, 0.1)),
    "no failures": failing((0.0, 0.0), (0.0, 0.0)),
    "failures held-out alone": failing((0.5, 0.5), None),
    "worse, failures rose": (
        sides(pass_at_1=(0.9, 0.3), failure_share=(0.1, 0.5)),
        [],
    ),
    "right before, failures rose": (
        sides(pass_at_1=(0.99, 0.99), failure_share=(0.1, 0.5)),
        [],
    ),
    "nothing, failures rose": (
        sides(pass_at_1=(0.3, 0.3), failure_share=(0.1, 0.5)),
        [],
    ),
}


def _mean(**values):
  """Returns a run of two equal steps with metrics, "__" for "/"."""
  record = {name.replace("__", "/"): v for name, v in values.items()}
  return {"lines": [{"step": i} | record for i in range(2)]}


def _young(*pairs):
  names = "replay/reward_young", "replay/reward_old"
  lines = [{"step": i, **dict(zip(names, p))} for i, p in enumerate(pairs)]
  return {"lines": lines}


def _config(**config):
  return {"config": {"config": config}}


def _round(**search):
  sizes = {"prompts_per_round": 32, "samples_per_prompt": 8}
  return _config(search=sizes | search)


def _ledger(**counts):
  return {"ledger": {k: {"completions": n} for k, n in counts.items()}}


_BUSY = {
    # A step of 86 ms on two cores, with different waits of the main loops.
    "lanes": lanes(
        ("trainer", "", {"step": 0.063}),
        ("trainer", "evaluate", {"evaluate": 0.013}),
        ("trainer", "publish", {"publish": 0.007}),
        ("searcher", "", {"decode": 0.045, "wait_work": 0.030}),
        ("searcher", "judge", {"reference": 0.024, "reward": 0.012}),
        num_rounds=11,
        round_s=0.086,
    ),
    "span_kinds": KINDS,
    "lines": [{"step": i, "time/step_s": 0.06} for i in range(11)],
}
_LEAD = {
    # A round takes 3 s, a step 0.5 s.
    "status": roles(0.4, 0.6),
    "lines": [{"step": i, "total/completions": 64 * (i + 1)} for i in range(8)],
    "span_kinds": KINDS,
    "lanes": lanes(
        ("trainer", "", {"step": 2.0, "wait_work": 3.0}),
        ("searcher", "", {"decode": 3.0, "wait_work": 2.0}),
        num_rounds=2,
        round_s=5.0,
    ),
}
_COPIES = _mean(replay__unique_share=0.7)
_STALE = {
    "replay__staleness_steps": 2.0,
    "train__effective_sample_share": 0.5,
}
ADVISED = {
    "empty": {},
    "one share unknown": {"status": roles(0.5)},
    "sampling limits": {"status": roles(0.4, 1.0)},
    "sampling limits, 4 searchers": {"status": roles(0.4, 1.0)}
    | _config(search={"num_searchers": 4}),
    "sampling limits, 32 prompts": {"status": roles(0.4, 1.0)}
    | _config(search={"prompts_per_step": 32}, reference={"role": "searcher"}),
    "sampling limits, with work": _BUSY | {"status": roles(0.4, 1.0)},
    "training limits": {"status": roles(1.0, 0.4)},
    "training limits, 2 searchers": {"status": roles(1.0, 0.4)}
    | _config(
        search={"num_searchers": 2},
        reference={"role": "trainer", "mode": "fixed"},
    ),
    "training limits, one process": {
        "status": roles(1.0, 0.4),
        "events": [{"kind": "one_process"}],
    }
    | _config(reference={"role": "trainer", "mode": "fixed"}),
    "training limits, reference moves": {"status": roles(1.0, 0.4)}
    | _config(reference={"role": "trainer", "mode": "ema"}),
    "training limits, with work": _BUSY | {"status": roles(1.0, 0.5)},
    "both wait": {"status": roles(0.5, 0.2)},
    "both busy": {"status": roles(0.97, 0.93)},
    "both busy, with work": _BUSY | {"status": roles(0.97, 0.94)},
    "lead too small": _LEAD | _round(lead_steps=1),
    "lead large enough": _LEAD | _round(lead_steps=6),
    "store limits": {
        "events": [{"kind": "store_lost"}, {"kind": "guard"}],
        "span_kinds": KINDS,
        "lanes": lanes(
            ("trainer", "", {"step": 9.5, "wait_work": 0.5}),
            ("trainer", "publish", {"publish": 9.5, "wait_work": 0.5}),
            ("searcher", "", {"decode": 8.0, "wait_credit": 2.0}),
        ),
    },
    "store lost twice": {"events": 2 * [{"kind": "store_lost"}]},
    "equal groups": _mean(
        train__equal_reward_groups=0.7, replay__staleness_steps=1.5
    ),
    "few equal groups": _mean(train__equal_reward_groups=0.2),
    "equal groups, alone": _mean(train__equal_reward_groups=1.0)
    | _config(loss={"name": "ppo"}),
    "equal groups, no reward": _mean(
        train__equal_reward_groups=1.0,
        replay__reward_young=0.0,
        replay__reward_old=0.0,
    )
    | _config(loss={"reward_weight": 0.0}),
    "no groups left out": _mean(
        train__equal_reward_groups=0.2, replay__skipped_groups=0
    ),
    "groups left out": _mean(
        train__equal_reward_groups=0.0, replay__skipped_groups=1200
    ),
    "older are worse": _young((0.5, 0.3), (0.6, 0.41)),
    "older are better": _young((0.3, 0.5), (0.4, 0.61)),
    "older are alike": _young((0.5, 0.3), (0.3, 0.45)),
    "older in one step": _young((0.5, 0.3)),
    "few effective, clipped": _mean(**_STALE, train__ratio_clip_share=0.25),
    "some effective": _mean(**_STALE | {"train__effective_sample_share": 0.8}),
    "all effective": _mean(**_STALE | {"train__effective_sample_share": 0.99}),
    "fresh": _mean(**_STALE | {"replay__staleness_steps": 0.0}),
    "taught": _mean(**_STALE) | _config(loss={"name": "gkd"}),
    "logged alone": _config(
        loss={"name": "tb", "baseline_shift": 0.0},
        offline={"path": "a.jsonl", "fraction": 1.0},
    ),
    "logged in part": _config(
        loss={"name": "tb", "baseline_shift": 0.0},
        offline={"path": "a.jsonl", "fraction": 0.5},
    ),
    "logged alone, oapl": _config(
        loss={"name": "oapl"}, offline={"path": "a.jsonl", "fraction": 1.0}
    ),
    "logged alone, shifted": _config(
        loss={"name": "tb", "baseline_shift": -0.05},
        offline={"path": "a.jsonl", "fraction": 1.0},
    ),
    "copies": _COPIES
    | _ledger(generated=1000, evicted_untrained=100, in_buffer_untrained=150),
    "copies of a log": _COPIES
    | _config(offline={"path": "a.jsonl", "fraction": 0.5}),
    "few copies": _mean(replay__unique_share=0.95),
    "nothing learned": {
        "status": roles(0.4, 1.0),
        "eval": dict(
            zip(("before", "after"), sides(0.0, pass_at_1=(0.0, 0.0)))
        ),
    },
}


def _low(start, low=0.01, high=1.0):
  return lambda i: low if i >= start else high


def _dip(low):
  return lambda i: low if 40 <= i < 70 else 1.0 + i / 1000


def _evaluated(lines, value, error):
  """Adds an evaluation to every tenth record."""
  for record in lines[::10]:
    record["eval/mean_reward"] = value(record["step"])
    record["eval/mean_reward_stderr"] = error
  return lines


def _restarted():
  entropy = {"train/entropy": _low(50)}
  before = [r | {"epoch": 1} for r in history(100, **entropy)]
  redone = history(100, **{"train/entropy": 1.0})[50:]
  return before + [r | {"epoch": 2} for r in redone]


_FELL = {
    "train/reward_mean": _low(30, 0.3, 0.5),
    "train/entropy": _low(30),
}
_SKIPS = {
    "train/entropy": _low(30),
    "replay/skipped_groups": lambda i: 4 * i,
}
COLLAPSED = {
    "9 steps": history(9),
    "50 steps": history(50),
    "no rewards": [{"step": i, "train/reward_mean": "x"} for i in range(50)],
    "no numbers": history(
        50, **{"train/entropy": None, "replay/stop_rate": float("nan")}
    ),
    "ages unknown": history(50, **{"replay/staleness_histogram": {"0": None}}),
    "dip": history(
        100, **{"train/reward_mean": _dip(0.1), "train/entropy": _dip(0.01)}
    ),
    "one block dips": history(
        50, **{"train/reward_mean": _dip(0.1), "train/entropy": _dip(0.01)}
    ),
    "clipped share, then entropy": history(
        100,
        **{
            "train/reward_mean": _low(30),
            "train/entropy": _low(60),
            "train/ratio_clip_share": lambda i: 0.6 if i >= 40 else 0.0,
        },
    ),
    "entropy rose": history(
        60,
        **{
            "train/reward_mean": _low(30, 0.1, 0.5),
            "train/entropy": _low(30, 3.0, 0.5),
        },
    ),
    "harder batches, unknown": history(100, **_FELL),
    "harder batches, held-out rose": _evaluated(
        history(100, **_FELL), lambda i: i / 100, 0.01
    ),
    "groups left out, no evaluation": history(100, **_SKIPS),
    "groups left out, held-out fell": _evaluated(
        history(100, **_SKIPS), _low(40, 0.1, 0.5), 0.02
    ),
    "KL rose": history(
        100, **{"train/entropy": 1.0, "train/kl_per_token": lambda i: i / 100}
    ),
    "gap rose": history(
        100,
        **{
            "train/reward_mean": _low(30, 0.1, 0.5),
            "train/on_policy_share": lambda i: i % 2,
            "train/logprob_gap": _low(30, 0.2, 0.0),
        },
    ),
    "sample size fell": history(
        100,
        **{
            "train/reward_mean": _low(30, 0.1, 0.5),
            "train/effective_sample_share": _low(30, 0.02, 0.9),
            "replay/staleness_histogram": {"0": 40, "1": 24},
        },
    ),
    "length doubled": history(
        100,
        **{
            "train/reward_mean": lambda i: i / 100,
            "replay/completion_tokens": _low(50, 99.0, 30.0),
            "replay/stop_rate": _low(50, 0.2, 0.9),
        },
    ),
    "restarted before its end": _restarted(),
}

_DIED = event(4.5, "died", "trainer-0: SIGKILL", "trainer")
# Events and records.
EVENTFUL = {
    "quiet": (
        [
            event(1.0, "store_started", "generation 1", "store"),
            event(2.0, "searcher_gone", "s000 (finished)", "trainer"),
            event(3.0, "limit", "step 3", "trainer"),
        ],
        timed(1, 2, 3, 4),
    ),
    "stopped and evaluated": (
        [event(60.0, "interrupted", "by SIGINT", "trainer")],
        [
            *timed(*range(20), 100, *range(101, 110), 200),
            {"step": 29, "time": 150.0, "eval/pass_at_1": 0.5},
        ],
    ),
    "paused twice": ([], timed(*range(20), 100, *range(101, 110), 200)),
    "died five times": (
        [
            event(1, "died", "searcher-1: SIGKILL", "searcher", 1),
            event(2, "restart", "searcher-1 (after SIGKILL)", "searcher", 1),
            event(3, "died", "searcher-1: SIGKILL", "searcher", 1),
            event(4, "died", "searcher-0: SIGKILL", "searcher", 0),
            event(5, "died", "searcher-1: status 1", "searcher", 1),
            event(6, "died", "searcher-1: status 1, no room", "searcher", 1),
        ],
        [],
    ),
    "hung and died": (
        [
            event(1, "stalled", "store-0: no sign of life for 15 s", "store"),
            event(2, "died", "store-0: SIGKILL", "store"),
            event(3, "died", "store-0: SIGKILL", "store"),
        ],
        [],
    ),
    "no room": (
        3 * [event(1, "journal_full", "no data is accepted", "trainer")],
        [],
    ),
    "causes of pauses": (
        [_DIED, event(60.0, "died", "searcher-0: SIGKILL", "searcher")],
        timed(1, 2, 3, 4, 38, 39, 50, 51),
    ),
    "started again": (
        [],
        [r | {"epoch": 1 + (r["step"] > 2)} for r in timed(1, 2, 3, 99)],
    ),
    "collapsed and died": (
        [_DIED],
        [
            record | {"train/reward_mean": reward, "train/entropy": entropy}
            for i, record in enumerate(timed(*range(60)))
            for reward, entropy in [(0.5, 1.0) if i < 30 else (0.1, 0.02)]
        ],
    ),
    "damaged": (
        [{"kind": 3}, {"kind": "guard"}, {"kind": "died", "time": "x"}],
        [
            {"train/loss": 1},
            {"step": "a", "time": None, "train/loss": 1},
        ],
    ),
    "each kind": (
        [
            event(i, kind, f"message {i}", "trainer")
            for i, kind in enumerate(
                "carrier_full checkpoint_damaged checkpoint_failed damaged"
                " evaluation_failed evaluation_lost gap guard journal_damaged"
                " journal_full journal_lost journal_missing journal_refused"
                " journal_torn journal_unclean not_written publish_failed"
                " refused_block refused_message refused_version rejected"
                " sampler_lost searcher_gone searcher_lost step_skipped"
                " store_lost version_skipped wrong_params reward_failed".split()
            )
        ],
        [],
    ),
    "pause of many causes": (
        [
            event(10 + i, kind, "x-0: why", "x")
            for i, kind in enumerate(
                "store_lost store_lost gap reward_failed died stalled".split()
            )
        ],
        timed(1, 2, 3, 90),
    ),
}

RUNS: Mapping[str, Mapping[str, Any]] = {
    **{
        name: {
            "eval": {"before": before, "after": after},
            "lines": lines,
        }
        for name, ((before, after), lines) in (JUDGED | FAILING).items()
    },
    "drawn by reward": {
        "eval": dict(
            zip(("before", "after"), JUDGED["fell while training rose"][0])
        ),
        "lines": training(0.4, 0.6),
    }
    | _config(replay={"recent_fraction": 0.5}),
    **ADVISED,
    **{name: {"lines": lines} for name, lines in COLLAPSED.items()},
    **{
        name: {"events": events, "lines": lines}
        for name, (events, lines) in EVENTFUL.items()
    },
}  # fmt: skip
