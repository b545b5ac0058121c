# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trainer tells the user: metrics, live state, samples, results."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import pathlib
import time
from typing import Any

import numpy as np

from tba_jax.monitor import metrics as metrics_lib
from tba_jax.monitor import writers
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import service as service_lib
from tba_jax.rewards import judges
from tba_jax.system import jsonl
from tba_jax.system import worker
from tba_jax.tasks import base

# What searchers that come and go have done, in sum.


class LeaseTotals:
  """Turns totals of single searchers into what they did since the last look."""

  def __init__(self):
    self._seen: dict[str, dict[str, float]] = {}

  def added(self, leases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the sums over searchers since the last call.

    busy_s: seconds in which they did not wait.
    completions: that they handed over.
    mixed_completions: of these, with tokens of more than one version.

    Args:
      leases: by searcher, with `totals` and `stats`.
    """
    out = dict.fromkeys(("busy_s", "completions", "mixed_completions"), 0.0)
    for sid, lease in leases.items():
      new = {
          "busy_s": float(lease["stats"].get("busy_s", 0.0)),
          "completions": lease["totals"]["completions"],
          "mixed_completions": lease["stats"].get("mixed_completions", 0),
      }
      old = self._seen.get(sid, {})
      for name, value in new.items():
        out[name] += max(0.0, value - old.get(name, 0.0))
      self._seen[sid] = new
    return out


# What the judges of searchers that come and go counted, in sum.


class RewardLog:
  """Turns totals of single searchers into metrics and into totals of a run."""

  def __init__(self):
    self._seen: dict[str, dict[str, Any]] = {}
    self._failures: dict[str, int] = {}
    self._since_take: dict[str, float] = {}
    self._judged_since_take = 0

  @property
  def failures(self) -> dict[str, int]:
    """Completions of the run that have no reward of the task's, by cause."""
    return dict(self._failures)

  def add(self, leases: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes in what the leases say since the last call.

    Args:
      leases: by searcher; `stats` may have `rewards`, the totals of a judge.
    """
    for sid, lease in leases.items():
      new = lease["stats"].get("rewards")
      if not new:
        continue
      old = self._seen.get(sid, {"completions": 0, "failures": {}, "sums": {}})
      self._seen[sid] = new
      failed = 0
      for cause, count in new["failures"].items():
        more = count - old["failures"].get(cause, 0)
        failed += more
        self._failures[cause] = self._failures.get(cause, 0) + more
      for name, value in new["sums"].items():
        more = value - old["sums"].get(name, 0.0)
        self._since_take[name] = self._since_take.get(name, 0.0) + more
      judged = new["completions"] - old["completions"]
      self._judged_since_take += judged - failed

  def take(self) -> dict[str, float]:
    """Returns metrics over what came since the last call, by bare name.

    The mean of each part of the reward, and, once there were any, the
    completions that could not be judged, counted over the run.
    """
    out = {}
    if self._judged_since_take:
      out = {
          name: value / self._judged_since_take
          for name, value in self._since_take.items()
      }
    out |= {f"failed_{cause}": n for cause, n in self._failures.items()}
    self._since_take, self._judged_since_take = {}, 0
    return out

  def get_state(self) -> dict[str, Any]:
    return {"failures": dict(self._failures), "seen": dict(self._seen)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._failures = dict(state["failures"])
    # Searchers outlive a trainer: what they said before is not counted again.
    self._seen = dict(state.get("seen", {}))  # Older checkpoints have none.


# What `metrics.jsonl` holds of one optimizer step.


def _by_age(
    staleness_BxK: np.ndarray, rewards_BxK: np.ndarray
) -> dict[str, float]:
  """Returns the mean reward of the completions younger and older than usual.

  Split at the batch's mean staleness, so that a policy that learns does not
  make the old data of a run look worse; {} where all are of one age.
  """
  old_BxK = staleness_BxK > staleness_BxK.mean()
  if not old_BxK.any():
    return {}
  return {
      "reward_young": float(rewards_BxK[~old_BxK].mean()),
      "reward_old": float(rewards_BxK[old_BxK].mean()),
  }


def step_record(
    step: int,
    metrics: Mapping[str, float],
    draw: buffer_lib.Draw,
    *,
    seconds: Mapping[str, float],
    buffer: Mapping[str, Any],
    generated: ledger_lib.Amount,
) -> dict[str, Any]:
  """Returns the record of a step.

  Args:
    step: that was made.
    metrics: of the train step, bare names.
    draw: what it learned from.
    seconds: of the trainer by kind of span.
    buffer: `ReplayBuffer.stats`.
    generated: by all searchers since the start of the run.
  """
  staleness_BxK = np.maximum(step - draw.versions, 0)
  values, counts = np.unique(staleness_BxK, return_counts=True)
  data = {
      "staleness_steps": float(staleness_BxK.mean()),
      "staleness_histogram": {
          str(int(v)): int(c) for v, c in zip(values, counts, strict=True)
      },
      **_by_age(staleness_BxK, draw.rewards),
      **draw.stats(),
      **buffer,
  }
  return {
      **{f"train/{name}": value for name, value in metrics.items()},
      **{f"replay/{name}": value for name, value in data.items()},
      "time/step_s": seconds.get("step", 0.0),
      "time/wait_s": seconds.get("wait_fresh", 0.0),
      "time/draw_s": seconds.get("draw", 0.0),
      "total/completions": generated.completions,
      "total/tokens": generated.tokens,
  }


# Writes `samples.jsonl`: completions as text, and why one is wrong.


class SampleLog:
  """Writes some completions of a draw."""

  def __init__(
      self,
      path: pathlib.Path,
      *,
      num_samples: int,
      tokenizer: Any,
      judge: judges.Judge,
  ):
    """Opens the file for appending.

    Args:
      path: the file.
      num_samples: completions of a draw, at most two of a prompt.
      tokenizer: shows completions as text.
      judge: says why a completion is wrong.
    """
    self._lines = jsonl.LineWriter(path)
    self._num_samples = num_samples
    self._tokenizer = tokenizer
    self._judge = judge

  def write(self, step: int, draw: buffer_lib.Draw) -> None:
    """Writes the first completions of what a step learned from."""
    samples = self._samples(step, draw)
    reasons = self._judge.explain(
        [
            judges.Request(base.TRAIN, s["prompt_id"], s["completion"])
            for s in samples
        ]
    )
    for sample, reason in zip(samples, reasons, strict=True):
      self._lines.write({**sample, "reason": reason})

  def close(self) -> None:
    self._lines.close()

  def _samples(self, step: int, draw: buffer_lib.Draw) -> list[dict[str, Any]]:
    num_prompts, num_completions = draw.rewards.shape
    per_prompt = min(2, num_completions)
    out = []
    for i in range(min(self._num_samples, num_prompts * per_prompt)):
      b, k = divmod(i, per_prompt)
      length = int(draw.completion_lengths[b, k])
      tokens = draw.completion_tokens[b, k, :length].tolist()
      prompt = draw.prompt_tokens[b][draw.prompt_mask[b] > 0].tolist()
      out.append(
          {
              "step": step,
              "prompt_id": int(draw.prompt_ids[b]),
              "prompt": self._tokenizer.decode(prompt),
              "completion": self._tokenizer.decode_completion(
                  tokens, length, bool(draw.stopped[b, k])
              ),
              "reward": float(draw.rewards[b, k]),
              "version": int(draw.versions[b, k]),
              "tokens": self._tokenizer.tokens(tokens),
              "logprobs": draw.behavior_logprobs[b, k, :length],
          }
      )
    return out


_STATUS_EVERY_S = 1.0
# Of the training loop, over all of the run's processes.
_TOTALS = ("wall_s", "train_s", "generate_s", "staleness_sum", "trained",
           "timed_steps", "loop_completions", "mixed_completions")  # fmt: skip
# Of a searcher's lease, in the live state.
_LEASE = ("index", "unacked", "credits", "age_s")


class Recorder:
  """Writes the files of the run directory that the trainer owns.

  What a step leaves to be written is written by a thread, in order, so that the
  next step need not wait for it; an error of that thread is raised by the next
  call. Its totals (completions, staleness, busy seconds) are part of a
  checkpoint, so that a continued run reports all of itself.
  """

  def __init__(
      self,
      workdir: pathlib.Path,
      *,
      metrics: writers.Writers,
      num_steps: int,
      num_searchers: int,
      log_every: int,
      samples_every: int,
      samples: SampleLog,
      leases: Callable[[], dict[str, dict[str, Any]]],
      store_generation: Callable[[], int],
      set_status: Callable[[dict[str, Any]], None],
  ):
    """Opens the files for appending.

    Args:
      workdir: of the run.
      metrics: receive the record of a step, and are closed with this.
      num_steps: of the run.
      num_searchers: expected; G is the busy time of the mean one.
      log_every, samples_every: periods in steps.
      samples: receives the draws of which some are shown, closed with this.
      leases: the searchers' last leases by sid, of those that left too.
      store_generation: of the store that the trainer speaks to.
      set_status: receives the live state for other hosts.
    """
    self._workdir = workdir
    self._num_steps = num_steps
    self._num_searchers = num_searchers
    self._log_every = log_every
    self._samples_every = samples_every
    self._leases = leases
    self._store_generation = store_generation
    self._set_status = set_status
    self._metrics = metrics
    self._events = metrics_lib.EventLog(workdir / "events.jsonl")
    self._samples = samples
    self._clock = metrics_lib.BusyClock()
    self._spans = metrics_lib.SpanWriter(
        workdir / "spans" / "trainer-0.jsonl", "trainer", clock=self._clock
    )
    self._results = jsonl.read_json(workdir / "eval.json") or {}
    self._status: dict[str, Any] = {
        "phase": "warm-up",
        "num_steps": num_steps,
        "started": time.time(),
    }
    self._status_at = 0.0
    self._wall_s = 0.0
    self._train_s = 0.0
    self._generate_s = 0.0
    self._staleness_sum = 0.0
    self._trained = self._timed_steps = 0
    self._loop_completions = 0
    self._mixed_completions = 0
    self._rewards = RewardLog()
    self._searchers = LeaseTotals()
    self._loop_started = False
    self._last_error = ""
    self._background = worker.JobQueue("recorder")

  @property
  def events(self) -> metrics_lib.EventLog:
    return self._events

  def span(self, kind: str, **fields: Any) -> contextlib.AbstractContextManager:
    """Records the time of a body in the trainer's timeline."""
    return self._spans.span(kind, **fields)

  def event(self, kind: str, message: str) -> None:
    """Records what a user should know: guards, refusals, a lost store."""
    self._events.write(kind, message, role="trainer")
    self._last_error = message

  def phase(self, name: str) -> None:
    """Shows another phase at once."""
    self._status["phase"] = name
    self._show(force=True)

  def progress(self, done: int, total: int) -> None:
    """Shows how far an evaluation is."""
    self._status["evaluate"] = {"done": done, "total": total}
    self._show()

  def step(
      self,
      step: int,
      metrics: dict[str, float],
      draw: buffer_lib.Draw,
      service: service_lib.ReplayService,
  ) -> None:
    """Records one step.

    Args:
      step: that was made.
      metrics: of the train step, bare names.
      draw: what it learned from.
      service: whose buffer and ledger are shown.
    """
    seconds = self._account()
    self._timed_steps += self._loop_started
    # The first step of a process compiles; times begin after it.
    self._loop_started = True
    staleness_BxK = np.maximum(step - draw.versions, 0)
    self._staleness_sum += float(staleness_BxK.sum())
    self._trained += staleness_BxK.size
    self._metrics.after_step(step)
    if step % self._log_every == 0 or step + 1 == self._num_steps:
      # Read here is what the next step changes.
      make = functools.partial(
          step_record,
          step,
          metrics,
          draw,
          seconds=seconds,
          buffer=service.buffer.stats(),
          generated=service.generated(),
      )
      more = {f"reward/{k}": v for k, v in self._rewards.take().items()}
      if self._mixed_completions:
        more["sampler/mixed_version_share"] = self._mixed_version_share()
      self._submit("metrics", lambda: self._metrics.write(step, make() | more))
    self._status.update(
        phase="train",
        step=step + 1,
        reward=metrics["reward_mean"],
        kl=metrics["kl"],
        entropy=metrics["entropy"],
        staleness_steps=float(staleness_BxK.mean()),
        eta_s=self._eta_s(step + 1),
        buffer={
            "size": len(service.buffer),
            "capacity": service.buffer.capacity,
        },
        trainer={
            "busy_share": self._train_s / max(self._wall_s, 1e-9),
            "step_s": seconds.get("step", 0.0),
            "wait_s": seconds.get("wait_fresh", 0.0),
        },
        overlap_of_ideal=self._overlap(),
        reward_failures=self._rewards.failures,
    )
    if self._samples_every and step % self._samples_every == 0:
      self._submit("samples", lambda: self._samples.write(step, draw))
    if self._show():
      path, account = self._workdir / "ledger.json", service.account()
      self._submit("state", lambda: jsonl.atomic_write_json(path, account))

  def has_result(self, name: str, step: int | None = None) -> bool:
    """True where `eval.json` has an evaluation of this name (of this step)."""
    result = self._results.get(name)
    return result is not None and step in (None, result["step"])

  def has_evaluation(self, step: int) -> bool:
    """True where `eval.json` has an evaluation of this step."""
    return any(r["step"] == step for r in self._results.get("history", ()))

  def evaluation(self, name: str, step: int, result: dict[str, Any]) -> None:
    """Records an evaluation: as `name` where given, and in the history."""
    self._account()
    result = {"step": step, **result}
    samples = result.pop("samples", [])
    if name:
      self._results[name] = {**result, "samples": samples}
    history = [r for r in self._results.get("history", ()) if r["step"] != step]
    self._results["history"] = sorted(
        [*history, result], key=lambda r: r["step"]
    )
    jsonl.atomic_write_json(self._workdir / "eval.json", self._results)
    numbers = {
        f"eval/{key}": value
        for key, value in result.items()
        if isinstance(value, int | float) and key != "step"
    }
    self._submit(
        "metrics", lambda: self._metrics.write(max(step - 1, 0), numbers)
    )
    self._status.pop("evaluate", None)
    self._status["pass_at_1"] = result["pass_at_1"]
    self._show(force=True)

  def train_ended(self) -> None:
    """The training loop is over: what follows is not part of its times."""
    self._account()
    self._loop_started = False

  def finish(
      self, step: int, ledger: dict[str, Any], stopped_by: str | None
  ) -> None:
    """Writes `ledger.json` and `result.json`: the run is done."""
    self.flush()
    self._rewards.add(self._leases())
    jsonl.atomic_write_json(self._workdir / "ledger.json", ledger)
    result = {
        "steps": step,
        "num_steps": self._num_steps,
        "stopped_by": stopped_by,
        "completions": ledger["generated"]["completions"],
        "trained_completions": self._trained,
        "train_wall_s": self._wall_s,
        "completions_per_s": self._loop_completions / max(self._wall_s, 1e-9),
        "generate_busy_s": self._generate_s,
        "train_busy_s": self._train_s,
        "overlap_of_ideal": self._overlap(),
        "overlap_formula": (
            "max(G, T) / W: busy seconds of the mean searcher (G) and of the"
            " trainer (T) in the W wall-clock seconds of the training loop"
        ),
        "staleness_mean": self._staleness_sum / max(self._trained, 1),
        "ledger_closed": ledger["closed"],
        "reward_failures": self._rewards.failures,
        "mixed_version_share": self._mixed_version_share(),
        **{
            name: {
                key: value
                for key, value in self._results[name].items()
                if key != "samples"
            }
            for name in ("before", "after")
        },
    }
    jsonl.atomic_write_json(self._workdir / "result.json", result)
    self.phase("done")

  def flush(self) -> None:
    """Waits until all is written that was told."""
    self._background.flush()

  def close(self) -> None:
    """Writes the rest and closes the files."""
    try:
      self._background.close()
    finally:
      for writer in (self._metrics, self._events, self._samples, self._spans):
        writer.close()

  def get_state(self) -> dict[str, Any]:
    totals = {name: getattr(self, f"_{name}") for name in _TOTALS}
    return {**totals, "rewards": self._rewards.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    for name in _TOTALS:
      setattr(self, f"_{name}", state.get(name, 0))
    if "rewards" in state:  # Older checkpoints have none.
      self._rewards.set_state(state["rewards"])

  def _account(self) -> dict[str, float]:
    """Adds what passed since the last call to the loop's totals."""
    seconds, elapsed_s = self._clock.take()
    leases = self._leases()
    self._rewards.add(leases)
    added = self._searchers.added(leases)
    if not self._loop_started:
      return seconds
    self._wall_s += elapsed_s
    self._train_s += sum(
        s for kind, s in seconds.items() if not metrics_lib.is_wait(kind)
    )
    self._generate_s += added["busy_s"] / self._num_searchers
    self._loop_completions += int(added["completions"])
    self._mixed_completions += int(added["mixed_completions"])
    return seconds

  def _overlap(self) -> float | None:
    if self._wall_s <= 0:
      return None
    return max(self._generate_s, self._train_s) / self._wall_s

  def _mixed_version_share(self) -> float:
    return self._mixed_completions / max(self._loop_completions, 1)

  def _eta_s(self, done: int) -> float | None:
    if not self._timed_steps:
      return None
    return (self._num_steps - done) * self._wall_s / self._timed_steps

  def _show(self, force: bool = False) -> bool:
    now = time.monotonic()
    if not force and now - self._status_at < _STATUS_EVERY_S:
      return False
    self._status_at = now
    searchers = {
        sid: {name: lease[name] for name in _LEASE} | lease["stats"]
        for sid, lease in self._leases().items()
        if lease["alive"]
    }
    status = {
        **self._status,
        "searchers": searchers,
        "store": {"generation": self._store_generation()},
        "last_error": self._last_error,
    }
    self._set_status({"time": time.time(), **status})
    path = self._workdir / "status.json"
    self._submit("state", lambda: metrics_lib.write_status(path, status))
    return True

  def _submit(self, kind: str, job: Callable[[], None]) -> None:
    """Leaves something to be written to the thread, a span of its lane."""

    def run() -> None:
      start, cpu_s = time.time(), time.thread_time()
      job()
      # Its own work; the span also holds its waiting for a core.
      cpu_s = time.thread_time() - cpu_s
      self._spans.add(kind, start, time.time(), lane="write", cpu_s=cpu_s)

    self._background.submit(run)
