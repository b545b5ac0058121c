# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the trainer's records of a run: metrics, status, results."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import threading
import time
from typing import Any, Protocol

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import ledger as ledger_lib
from tba_jax.rewards import judges
from tba_jax.run import failures as failures_lib
from tba_jax.run import metrics as metrics_lib
from tba_jax.run import run_directory
from tba_jax.run import writers
from tba_jax.system import background
from tba_jax.tasks import base
from tba_jax.transport.groups import receiver as receiver_lib

_STATUS_EVERY_S = 1.0
NUM_SAMPLES = 8  # Completions per write to samples.jsonl.
# Totals of the training loop, over all starts of the trainer.
_TOTALS = ("wall_s", "train_s", "generate_s", "staleness_sum", "trained",
           "timed_steps", "loop_completions", "mixed_completions")  # fmt: skip
# Fields of a searcher's lease that `status.json` shows.
_LEASE = ("index", "unacked", "credits", "age_s")


class SearcherTotals:
  """Sums the counters that searchers report in their leases.

  A lease holds totals since its searcher started. Searchers come and go and
  outlive a trainer, so each one's last report is part of the state.
  """

  def __init__(self):
    self._last_totals: dict[str, dict[str, float]] = {}
    self.failures: dict[str, int] = {}
    # Completions, tokens, seconds and costs, by kind of searcher.
    self.by_kind: dict[str, dict[str, float]] = {}
    self._reward_sums: dict[str, float] = {}
    self._reward_counts: dict[str, float] = {}

  def update(self, leases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns each counter's growth since the last call, over all searchers.

    busy_s: seconds not spent waiting; completions: completions submitted;
    mixed_completions: completions with tokens of several versions.
    """
    out = dict.fromkeys(("busy_s", "completions", "mixed_completions"), 0.0)
    for sid, lease in leases.items():
      new, old = self._counters(lease), self._last_totals.get(sid, {})
      for name, value in new.items():
        out[name] = out.get(name, 0.0) + max(0.0, value - old.get(name, 0.0))
      self._last_totals[sid] = new
    for name, value in out.items():
      kind, _, key = name.partition("/")
      if kind == "sampled":
        unit, _, key = key.partition("/")
        amounts = self.by_kind.setdefault(key, {})
        amounts[unit] = amounts.get(unit, 0.0) + value
      elif kind == "failed" and value:
        self.failures[key] = self.failures.get(key, 0) + int(value)
      elif kind == "sum":
        self._reward_sums[key] = self._reward_sums.get(key, 0.0) + value
      elif kind == "count":
        self._reward_counts[key] = self._reward_counts.get(key, 0.0) + value
    return out

  def _counters(self, lease: Mapping[str, Any]) -> dict[str, float]:
    stats = lease["stats"]
    out = {
        "busy_s": float(stats.get("busy_s", 0.0)),
        "completions": lease["totals"]["completions"],
        "mixed_completions": stats.get("mixed_completions", 0),
    }
    if kind := stats.get("kind"):
      amounts = {u: lease["totals"][u] for u in ("completions", "tokens")}
      amounts |= {u: float(stats[u]) for u in ("wall_s", "cost")}
      out |= {f"sampled/{u}/{kind}": n for u, n in amounts.items()}
    if rewards := stats.get("rewards"):
      out |= {f"failed/{k}": n for k, n in rewards["failures"].items()}
      out |= {f"sum/{k}": v for k, v in rewards["sums"].items()}
      out |= {f"count/{k}": n for k, n in rewards["counts"].items()}
    return out

  def take_rewards(self) -> dict[str, float]:
    """Returns mean reward parts since the last call, and failure counts.

    Failures (completions that could not be judged) count over the whole run.
    """
    sums, counts = self._reward_sums, self._reward_counts
    out = {name: sums[name] / n for name, n in counts.items() if n}
    self._reward_sums, self._reward_counts = {}, {}
    return out | {f"failed_{cause}": n for cause, n in self.failures.items()}

  def get_by_kind(self) -> dict[str, dict[str, float]]:
    """Returns a copy of `by_kind`, for other threads."""
    return {kind: dict(amounts) for kind, amounts in self.by_kind.items()}

  def get_state(self) -> dict[str, Any]:
    return {
        "failures": dict(self.failures),
        "by_kind": self.get_by_kind(),
        "seen": dict(self._last_totals),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    self.failures = dict(state["failures"])
    self.by_kind = {k: dict(v) for k, v in state["by_kind"].items()}
    self._last_totals = dict(state["seen"])


def _by_age(
    staleness_BxK: np.ndarray, rewards_BxK: np.ndarray
) -> dict[str, float]:
  """Returns mean rewards of completions below and above the mean staleness.

  Split within a batch, so that progress during the run does not matter; {} if
  all are equally stale.
  """
  old_BxK = staleness_BxK > staleness_BxK.mean()
  if not old_BxK.any():
    return {}
  return {
      "reward_young": float(rewards_BxK[~old_BxK].mean()),
      "reward_old": float(rewards_BxK[old_BxK].mean()),
  }


def step_record(
    metrics: Mapping[str, float],
    draw: types.Draw,
    *,
    seconds: Mapping[str, float],
    buffer: Mapping[str, Any],
    generated: ledger_lib.Amount,
) -> dict[str, Any]:
  """Returns the record of one optimizer step in `metrics.jsonl`.

  Args:
    metrics: output of the train step, without prefix.
    draw: the batch's trajectories.
    seconds: trainer's time since the last step, by kind of span.
    buffer: `ReplayBuffer.stats`.
    generated: amount sampled since the start of the run.
  """
  staleness_BxK = draw.staleness_steps
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
      # A custom loss names its own `loss/NAME`.
      **{
          name if "/" in name else f"train/{name}": value
          for name, value in metrics.items()
      },
      **{f"replay/{name}": value for name, value in data.items()},
      "time/step_s": seconds.get("step", 0.0),
      "time/wait_s": seconds.get("wait_fresh", 0.0),
      "time/draw_s": seconds.get("draw", 0.0),
      "total/completions": generated.completions,
      "total/tokens": generated.tokens,
  }


def samples_of(
    step: int, draw: types.Draw, num_samples: int, tokenizer: Any
) -> list[dict[str, Any]]:
  """Returns records for `samples.jsonl`: at most two completions per prompt."""
  num_prompts, num_completions = draw.rewards.shape
  per_prompt = min(2, num_completions)
  out = []
  for i in range(min(num_samples, num_prompts * per_prompt)):
    b, k = divmod(i, per_prompt)
    length = int(draw.completion_lengths[b, k])
    sampled = draw.sampled_mask[b, k, :length].tolist()
    logprobs = draw.behavior_logprobs[b, k, :length].tolist()
    tokens = draw.completion_tokens[b, k, :length].tolist()
    prompt = draw.prompt_tokens[b][draw.prompt_mask[b] > 0].tolist()
    # The strings of an environment's tokens need not give their ids.
    ids = {} if all(sampled) else {"token_ids": tokens}
    out.append(
        {
            "step": step,
            "prompt_id": int(draw.prompt_ids[b]),
            "prompt": tokenizer.decode(prompt),
            "completion": tokenizer.decode_completion(
                tokens, length, bool(draw.stopped[b, k]), sampled
            ),
            "reward": float(draw.rewards[b, k]),
            "version": int(draw.versions[b, k]),
            "finish_reason": "stop" if draw.stopped[b, k] else "length",
            "tokens": tokenizer.pieces(tokens),
            "logprobs": [x if s else None for x, s in zip(logprobs, sampled)],
            **ids,
        }
    )
  return out


class StepSource(Protocol):
  """Source of the data that a step records; see `service.ReplayService`."""

  buffer: Any

  def generated(self) -> Mapping[str, Any]:
    ...

  def account(self) -> Mapping[str, Any]:
    ...


class Recorder:
  """Writes the trainer's files of the run directory, or keeps them in memory.

  A thread writes in order, so that the next step need not wait. A file that
  cannot be written (full disk) is reported once and skipped; other errors of
  the thread are raised by the next call. Totals are part of the checkpoint.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.RunInfo,
      *,
      epoch: int,
      queue: receiver_lib.Receiver,
      tokenizer: Any,
      judge: judges.Judge,
  ):
    """Opens the files for appending and starts the threads.

    Args:
      run: identity and paths of the run to record.
      epoch: start count of the trainer.
      queue: source of the searchers' leases, which also publishes the status to
        other hosts.
      tokenizer: decoder of sampled completions.
      judge: source of reasons why completions are wrong.
    """
    self._config = config
    self._num_steps = config.train.num_steps
    self._files = run.files
    self._queue = queue
    self._events = metrics_lib.EventLog(self._files.lines("events.jsonl"))
    self._writers = writers.Writers(config, run, epoch, self.event)
    self._profiler = writers.Profiler(config, run.workdir, self.event)
    self._samples = self._files.lines("samples.jsonl")
    self._tokenizer = tokenizer
    self._judge = judge
    self._clock = metrics_lib.BusyClock()
    self._spans = metrics_lib.SpanWriter(
        self._files.text("spans/trainer-0.jsonl"),
        "trainer",
        clock=self._clock,
    )
    self._results = self._files.read("eval.json") or {}
    self._status: dict[str, Any] = {
        "phase": "warm-up",
        "num_steps": self._num_steps,
        "started": time.time(),
    }
    self._status_at = self._ledger_at = -_STATUS_EVERY_S
    self._progress_at = time.monotonic()
    self._doing = ""
    self._totals = dict.fromkeys(_TOTALS, 0)
    self._searchers = SearcherTotals()
    self._loop_started = False
    self._last_error = ""
    self._failed_files: set[str] = set()
    self._report_damage(run, epoch)
    self._background = background.JobQueue("recorder")
    # A judge may take long to start, or to explain.
    self._explaining = background.JobQueue("samples")
    self._refresher = background.Thread("status", self._refresh)

  def _report_damage(self, run: run_directory.RunInfo, epoch: int) -> None:
    """Reports unreadable lines, except for one torn by each crash."""
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl"):
      skipped = self._files.records(name).skipped
      if skipped >= max(1, epoch):
        message = f"{run.workdir / name}: {skipped} lines are damaged"
        self.event("damaged", message)

  @contextlib.contextmanager
  def span(self, kind: str, *, lane: str = "", **fields: Any) -> Iterator[None]:
    """Records the time of its body in the trainer's timeline."""
    outer = self._doing
    if not lane:
      self._doing = kind
    try:
      with self._spans.span(kind, lane=lane, **fields):
        yield
    finally:
      if not lane:
        self._doing = outer

  def event(self, kind: str, message: str) -> None:
    """Writes an event, such as a guard's alarm or a lost store."""
    self._events.write(kind, message, role="trainer")
    if metrics_lib.is_error(kind, message):
      self._last_error = message

  def capture_profile(self) -> None:
    """Profiles the next steps; safe in a signal handler."""
    self._profiler.ask()

  def phase(self, name: str) -> None:
    """Sets the run's phase and shows it at once."""
    self._status["phase"] = name
    self._progressed()
    self._show(force=True)

  def progress(self, done: int, total: int) -> None:
    """Shows the progress of an evaluation."""
    self._status["evaluate"] = {"done": done, "total": total}
    self._progressed()
    self._show()

  def step(
      self,
      step: int,
      metrics: dict[str, float],
      draw: types.Draw,
      service: StepSource,
      failures: failures_lib.FailureShare,
  ) -> None:
    """Records one step.

    Args:
      metrics: output of the train step, without prefix.
      draw: the batch's trajectories.
      service: source of the buffer's statistics and the ledger.
      failures: share of training completions that could not be judged.
    """
    self._progressed()
    seconds, totals = self._account(), self._totals
    totals["timed_steps"] += self._loop_started
    # A process's first step compiles; timing starts after it.
    self._loop_started = True
    staleness_BxK = draw.staleness_steps
    totals["staleness_sum"] += float(staleness_BxK.sum())
    totals["trained"] += staleness_BxK.size
    self._profiler.after_step(step)
    every = self._config.log.every_steps
    if step % every == 0 or step + 1 == self._num_steps:
      # The next step changes these statistics, so they are read now.
      make = functools.partial(
          step_record,
          metrics,
          draw,
          seconds=seconds,
          buffer=service.buffer.stats(),
          generated=service.generated(),
      )
      rewards = self._searchers.take_rewards()
      if (share := failures.take()) is not None:
        rewards["failure_share"] = share
      more = {f"reward/{name}": value for name, value in rewards.items()}
      if totals["mixed_completions"]:
        more["sampler/mixed_version_share"] = self._mixed_version_share()
      self._submit("metrics", lambda: self._writers.write(step, make() | more))
    self._status.update(
        phase="train",
        step=step + 1,
        reward=metrics["reward_mean"],
        kl=metrics.get("kl"),
        entropy=metrics["entropy"],
        staleness_steps=float(staleness_BxK.mean()),
        eta_s=self._eta_s(step + 1),
        buffer={
            "size": len(service.buffer),
            "capacity": service.buffer.capacity,
        },
        trainer={
            "busy_share": self._share("train_s"),
            "step_s": seconds.get("step", 0.0),
            "wait_s": seconds.get("wait_fresh", 0.0),
        },
        searchers_busy_share=self._share("generate_s"),
        overlap_of_ideal=self._overlap(),
        sampled_by=self._searchers.get_by_kind(),
        reward_failures=self._searchers.failures,
        failure_share={"first": failures.first, "newest": failures.newest},
    )
    every = self._config.log.samples_every_steps
    if every and (step % every == 0 or step + 1 == self._num_steps):
      self._submit("samples", lambda: self._write_samples(step, draw))
    self._show()
    if time.monotonic() - self._ledger_at >= _STATUS_EVERY_S:
      self._ledger_at = time.monotonic()
      write = functools.partial(
          self._files.write, "ledger.json", service.account()
      )
      self._submit("state", write)

  def has_result(self, name: str, step: int | None = None) -> bool:
    """Returns whether `eval.json` has this evaluation (at this step)."""
    result = self._results.get(name)
    return result is not None and step in (None, result["step"])

  def has_evaluation(self, step: int) -> bool:
    """Returns whether the history has an evaluation of this step."""
    return any(r["step"] == step for r in self._results.get("history", ()))

  def evaluations(self, until: int) -> list[dict[str, Any]]:
    """Returns the history's evaluations of steps up to `until`, in order."""
    return [r for r in self._results.get("history", ()) if r["step"] <= until]

  def evaluation(self, name: str, step: int, result: dict[str, Any]) -> None:
    """Records an evaluation in the history, and under `name` unless ""."""
    self._account()
    self._progressed()
    result = {"step": step, **result}
    samples = result.pop("samples", [])
    if name:
      self._results[name] = {**result, "samples": samples}
    history = [r for r in self._results.get("history", ()) if r["step"] != step]
    self._results["history"] = sorted(
        [*history, result], key=lambda r: r["step"]
    )
    with self._leave_out_unwritable("eval.json"):
      self._files.write("eval.json", self._results)
    numbers = {
        f"eval/{key}": value
        for key, value in result.items()
        if isinstance(value, int | float) and key != "step"
    }
    self._submit(
        "metrics", lambda: self._writers.write(max(step - 1, 0), numbers)
    )
    self._status.pop("evaluate", None)
    self._status["pass_at_1"] = result["pass_at_1"]
    metric = metrics_lib.deciding_metric(result)
    # None if no completion could be judged.
    self._status["held_out"] = {"metric": metric, "value": result.get(metric)}
    self._show(force=True)

  def train_ended(self) -> None:
    """Ends the timing of the training loop."""
    self._account()
    self._loop_started = False

  def finish(
      self, step: int, ledger: dict[str, Any], stopped_by: str | None
  ) -> None:
    """Writes the final `eval.json`, `ledger.json` and `result.json`.

    Raises OSError if one of them cannot be written.
    """
    self.flush()
    self._searchers.update(self._queue.heard())
    self._files.write("eval.json", self._results)
    self._files.write("ledger.json", ledger)
    totals = self._totals
    result = {
        "steps": step,
        "num_steps": self._num_steps,
        "stopped_by": stopped_by,
        "completions": ledger["generated"]["completions"],
        "trained_completions": totals["trained"],
        "train_wall_s": totals["wall_s"],
        # None if searchers reported no completions while steps were timed.
        "completions_per_s": (
            totals["loop_completions"] / max(totals["wall_s"], 1e-9)
            if totals["loop_completions"]
            else None
        ),
        "generate_busy_s": totals["generate_s"],
        "train_busy_s": totals["train_s"],
        "searchers_busy_share": self._share("generate_s"),
        "trainer_busy_share": self._share("train_s"),
        "overlap_of_ideal": self._overlap(),
        "overlap_formula": metrics_lib.OVERLAP_FORMULA,
        "staleness_mean": totals["staleness_sum"] / max(totals["trained"], 1),
        "ledger_closed": ledger["closed"],
        "lost": {k: part["completions"] for k, part in ledger["lost"].items()},
        "unknown": ledger["unknown"],
        "damage": metrics_lib.damage(self._files.records("events.jsonl")),
        "sampled_by": self._searchers.get_by_kind(),
        "reward_failures": self._searchers.failures,
        "mixed_version_share": self._mixed_version_share(),
    }
    for name in ("before", "after"):
      evaluation = dict(self._results.get(name, {}))
      evaluation.pop("samples", None)
      result[name] = evaluation
    self._files.write("result.json", result)
    self.phase("done")

  def sync(self) -> None:
    """Waits until the metrics recorded so far are written."""
    self._background.flush()

  def flush(self) -> None:
    """Waits until everything recorded so far is written."""
    self._background.flush()
    self._explaining.flush()

  def close(self) -> None:
    """Writes the rest and closes the files."""
    try:
      self._refresher.close()
      self._background.close()
      self._explaining.close()
    finally:
      for part in (
          *(self._profiler, self._writers, self._events),
          *(self._samples, self._spans),
      ):
        part.close()

  def get_state(self) -> dict[str, Any]:
    return {**self._totals, "searchers": self._searchers.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._totals = {name: state[name] for name in _TOTALS}
    self._searchers.set_state(state["searchers"])

  def _account(self) -> dict[str, float]:
    """Adds the time since the last call to totals; returns seconds by kind."""
    seconds, busy_s, elapsed_s = self._clock.take()
    added = self._searchers.update(self._queue.heard())
    if self._loop_started:
      totals = self._totals
      totals["wall_s"] += elapsed_s
      totals["train_s"] += busy_s
      num_searchers = self._config.search.num_searchers
      totals["generate_s"] += added["busy_s"] / num_searchers
      totals["loop_completions"] += int(added["completions"])
      totals["mixed_completions"] += int(added["mixed_completions"])
    return seconds

  def _write_samples(self, step: int, draw: types.Draw) -> None:
    """Writes the first completions of a step's batch, with a reason each."""
    samples = samples_of(step, draw, NUM_SAMPLES, self._tokenizer)
    reasons = self._judge.explain(
        [
            judges.JudgeRequest(base.TRAIN, s["prompt_id"], s["completion"])
            for s in samples
        ]
    )
    for sample, reason in zip(samples, reasons, strict=True):
      self._samples.write({**sample, "reason": reason})

  def _overlap(self) -> float | None:
    totals = self._totals
    return metrics_lib.overlap_of_ideal(
        totals["generate_s"], totals["train_s"], totals["wall_s"]
    )

  def _share(self, name: str) -> float:
    """Returns a total of seconds as a share of the training loop's time."""
    return self._totals[name] / max(self._totals["wall_s"], 1e-9)

  def _mixed_version_share(self) -> float:
    totals = self._totals
    return totals["mixed_completions"] / max(totals["loop_completions"], 1)

  def _eta_s(self, done: int) -> float | None:
    totals = self._totals
    if not totals["timed_steps"]:
      return None
    return (self._num_steps - done) * totals["wall_s"] / totals["timed_steps"]

  def _progressed(self) -> None:
    self._spans.progress()
    self._progress_at = time.monotonic()

  def _refresh(self, stop: threading.Event) -> None:
    """Keeps `status.json` current while the main thread is busy."""
    while not stop.wait(_STATUS_EVERY_S):
      if time.monotonic() - self._status_at >= 2 * _STATUS_EVERY_S:
        self._show(force=True)

  def _show(self, force: bool = False) -> None:
    """Writes the live state, at most once a second unless forced."""
    now = time.monotonic()
    if not force and now - self._status_at < _STATUS_EVERY_S:
      return
    self._status_at = now
    searchers = {
        sid: {name: lease[name] for name in _LEASE} | lease["stats"]
        for sid, lease in self._queue.heard().items()
        if lease["alive"]
    }
    status = {
        "time": time.time(),
        **self._status,
        "doing": self._doing,
        "step_age_s": now - self._progress_at,
        "searchers": searchers,
        "store": {"generation": self._queue.generation},
        "last_error": self._last_error,
    }
    self._queue.set_status(status)
    write = functools.partial(self._files.write, "status.json", status)
    self._submit("state", write)

  def _submit(self, kind: str, job: Callable[[], None]) -> None:
    """Runs a job in the thread, as a span in the lane `write`."""

    def run() -> None:
      start, cpu_s = time.time(), time.thread_time()
      with self._leave_out_unwritable(kind):
        job()
      # CPU time, since the span includes waiting for a core.
      cpu_s = time.thread_time() - cpu_s
      self._spans.add(kind, start, time.time(), lane="write", cpu_s=cpu_s)

    jobs = self._explaining if kind == "samples" else self._background
    jobs.submit(run)

  @contextlib.contextmanager
  def _leave_out_unwritable(self, what: str) -> Iterator[None]:
    """Reports the first failure to write each kind of file."""
    try:
      yield
      self._failed_files.discard(what)
    except OSError as error:
      if what not in self._failed_files:
        self._failed_files.add(what)
        self.event(
            "not_written", f"{what} left out, the run continues: {error}"
        )
