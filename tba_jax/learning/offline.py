# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training on fixed data, for `sft` and `reward_model`.

A batch is a pure function of seed and step, so interrupted and uninterrupted
runs are bitwise equal.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import pathlib
import sys
import threading
import time
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import loop
from tba_jax import types
from tba_jax.config import stages
from tba_jax.learning import batches
from tba_jax.learning import checkpoint
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.run import metrics as metrics_lib
from tba_jax.system import bucket
from tba_jax.system import heartbeat
from tba_jax.system import jsonl
from tba_jax.system import processes

# Steps per dispatch: enough to hide its cost, few enough to stop quickly.
CHUNK_STEPS = 25
Progress = Callable[[int, int, dict[str, float]], None]

# Separates these random numbers from others with the same seed.
_STREAM = 0x5F7
# AdamW settings that a stage's section lacks.
_ADAMW = {"b1": 0.9, "epsilon": 1e-8}


def run_program(
    name: str,
    config: ml_collections.ConfigDict,
    work: Callable[..., dict[str, Any]],
) -> int:
  """Runs `sft` or `reward_model`; returns its exit status.

  Args:
    name: prefix of progress lines.
    config: run config. With `trainer.cpu_devices`, this process gets the
      virtual devices of all trainer processes.
    work: function of `stop`, an event set by a signal, and `on_progress`; its
      result has `interrupted`, `step` and `model`.
  """
  if config.trainer.cpu_devices:
    count = config.trainer.cpu_devices * config.trainer.num_processes
    jax.config.update("jax_num_cpu_devices", count)
  processes.prepare_compiling()
  stop = processes.stop_on_signals()

  def show(step: int, num_steps: int, metrics: dict[str, float]) -> None:
    values = "  ".join(f"{key} {v:.4g}" for key, v in metrics.items())
    print(f"{name} {step}/{num_steps}  {values}", flush=True)

  try:
    result = work(stop=stop, on_progress=show)
  except (ValueError, OSError, FloatingPointError) as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    if isinstance(error, FloatingPointError):
      return processes.EXIT_FATAL
    return processes.EXIT_CONFIG
  if result["interrupted"]:
    print(f"saved at step {result['step']}; the same command continues")
    return processes.EXIT_INTERRUPTED
  print(f"model: {result['model']}")
  return processes.EXIT_OK


@dataclasses.dataclass(frozen=True)
class Examples:
  """Rows of data, batched epoch by epoch without replacement.

  seed: shuffling seed; each epoch has its own permutation.
  batch_size: B.
  num_rows: number of rows, at least 1.
  encode: (row, epoch) -> encoded prompt and K completions.
  num_completions: K.
  max_prompt_tokens: P.
  max_completion_tokens: T.
  """

  seed: int
  batch_size: int
  num_rows: int
  encode: Callable[[int, int], batches.BatchRow]
  num_completions: int
  max_prompt_tokens: int
  max_completion_tokens: int

  def chunk(self, first: int, last: int) -> types.Batch:
    """Returns the batches of steps [first, last), on the host.

    Leaves are [CHUNK_STEPS, B, …], zero from `last` on.
    """
    encoded = []
    for place in range(first * self.batch_size, last * self.batch_size):
      epoch, index = divmod(place, self.num_rows)
      row = _permutation(self.seed, epoch, self.num_rows)[index]
      encoded.append(self.encode(int(row), epoch))
    return self.pad(encoded, (CHUNK_STEPS, self.batch_size))

  def pad(
      self, encoded: list[batches.BatchRow], shape: tuple[int, ...]
  ) -> types.Batch:
    """Pads encoded rows into a batch with leaves [*shape, …], on the host."""
    return batches.pad_sequences(
        encoded,
        shape,
        num_completions=self.num_completions,
        max_prompt_tokens=self.max_prompt_tokens,
        max_completion_tokens=self.max_completion_tokens,
    )


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
  return np.random.default_rng([seed, _STREAM, epoch]).permutation(num_rows)


@dataclasses.dataclass(frozen=True)
class Job:
  """A training job of `sft` or `reward_model`.

  name: "sft" or "reward_model", its section of the config.
  folder: WORKDIR/name, for checkpoints and metrics.jsonl.
  model: object with `init` and `logical_axes`.
  init_params: () -> params before step 0.
  loss_fn: loss, see `train_step.make_train_step`.
  evaluate: (params, step) -> metrics; {} if stopped or without evaluation.
  metric_names: step metrics to write in addition to `loss`.
  save: (final params, metrics of the last evaluation) -> evaluation to report;
    writes WORKDIR/name/model.
  """

  name: str
  folder: pathlib.Path
  model: Any
  init_params: Callable[[], types.PyTree]
  loss_fn: Callable[..., Any]
  examples: Examples
  evaluate: Callable[[types.PyTree, int], dict[str, float]]
  metric_names: tuple[str, ...]
  save: Callable[[types.PyTree, dict[str, Any]], dict[str, Any]]


def run(
    name: str,
    config: ml_collections.ConfigDict,
    workdir: str,
    prepare: Callable[
        [pathlib.Path, threading.Event], contextlib.AbstractContextManager
    ],
    *,
    stop: threading.Event,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
  """Trains WORKDIR/name/model unless it exists; resumes interrupted training.

  Args:
    name: "sft" or "reward_model", name of the stage and of its section.
    workdir: local directory of the run.
    prepare: (WORKDIR/name, stop) -> context manager of the job, or of None if
      stopped.
    stop: event; once set, the current chunk of steps is finished and saved.
    on_progress: function called with (step, num_steps, metrics) at each log
      line.

  Returns:
    `model`: folder of the model; `interrupted`; `skipped`: whether the model
    existed; `step`; `num_steps`; `wall_s` of this call; `evaluation`: the job's
    metrics on held-out data, {} if skipped.

  Raises:
    ValueError: the folder was made with other settings, or data is missing,
      invalid or too long.
    FloatingPointError: non-finite loss or gradient; names the steps.
    OSError: a file cannot be written.
  """
  started = time.perf_counter()
  folder, num_steps = pathlib.Path(workdir) / name, config[name].num_steps
  stages.check(config, folder, section=name)
  skipped = (folder / "model" / "config.json").exists()
  done = {"interrupted": False, "step": num_steps, "evaluation": {}}
  if not skipped:
    with prepare(folder, stop) as job:
      if job is None:
        done |= {"interrupted": True, "step": 0}
      else:
        params, done = train(config, job, stop=stop, on_progress=on_progress)
        if not done["interrupted"]:
          done["evaluation"] = job.save(params, done["evaluation"])
  return {
      "model": str(folder / "model"),
      "skipped": skipped,
      "num_steps": num_steps,
      "wall_s": time.perf_counter() - started,
      **done,
  }


def train(
    config: ml_collections.ConfigDict,
    job: Job,
    *,
    stop: threading.Event,
    on_progress: Progress | None = None,
) -> tuple[types.PyTree, dict[str, Any]]:
  """Trains to the last step, or saves once `stop` is set; resumes a checkpoint.

  Args:
    config: reads the job's section, `optimizer`, `train`, `mesh` and
      `checkpoint.keep`.
    stop: event; once set, the current chunk of steps is finished and saved.
    on_progress: function called with (step, num_steps, metrics) at each log
      line.

  Returns:
    The params, and `interrupted`, `step` (steps done) and `evaluation` (metrics
    of the last evaluation, or {}).

  Raises:
    FloatingPointError: non-finite loss or gradient with
      `train.nonfinite="stop"`; names the steps.
    OSError: a file cannot be written.
  """
  settings = config[job.name]
  num_steps = settings.num_steps
  mesh = sharding.make_mesh(config.mesh)
  num_shards = sharding.num_batch_shards(mesh)
  micro = micro_batch_size(settings, num_shards)
  if settings.micro_batch_size not in (0, micro):
    print(
        f"{job.name}: using micro-batches of {micro}, to divide over"
        f" {num_shards} devices (config.{job.name}.micro_batch_size ="
        f" {settings.micro_batch_size})",
        flush=True,
    )
  step_config = make_step_config(config, settings, micro)
  abstract = train_step.abstract_state(step_config, job.model, mesh)
  run_chunk = _make_run_chunk(
      train_step.make_train_step(
          step_config, job.model, mesh, loss_fn=job.loss_fn
      ),
      abstract,
      mesh,
  )
  writer = metrics_lib.MetricsWriter(
      jsonl.LineWriter(job.folder / "metrics.jsonl")
  )
  checkpointer = checkpoint.Checkpointer(
      bucket.place(job.folder / "checkpoints"), keep=config.checkpoint.keep
  )

  # State.
  if checkpointer.latest_step() is None:
    state = train_step.init_state(
        step_config, job.model, job.init_params(), mesh
    )
  else:
    state, _ = checkpointer.restore(abstract)
    logging.info("%s continues at step %d", job.name, int(state.step))
  step = saved_step = int(state.step)

  # Loop.
  activity = heartbeat.Activity(f"{job.name}-0")
  means, evaluation = metrics_lib.Means(), {}
  learner = _Learner(run_chunk, state)
  chunks = _Chunks(job, settings, step, stop, activity)

  def finish(
      first: int, chunk: _Chunk, chunk_metrics: Mapping[str, jax.Array]
  ) -> None:
    nonlocal step, saved_step, evaluation
    step = chunk.end
    step_means, num_finite = _host_means(
        config, job, chunk_metrics, first, step
    )
    means.add(step_means, weight=num_finite)
    step_s = (time.perf_counter() - chunks.started) / (step - first)
    means.add({"time/step_s": step_s}, weight=step - first)
    evaluated = {}
    activity.mark("evaluate")
    if _is_due(settings.evaluate_every_steps, step, num_steps):
      evaluated = job.evaluate(learner.state.params, step)
      evaluation = evaluated or evaluation
    if evaluated or _is_due(settings.log_every_steps, step, num_steps):
      record = means.take() | {f"eval/{k}": v for k, v in evaluated.items()}
      writer.write(step, record)
      if on_progress is not None:
        on_progress(step, num_steps, record)
    if step % settings.checkpoint_every_steps == 0 and step < num_steps:
      activity.mark("checkpoint")
      checkpointer.save(step, learner.state, {})
      saved_step = step

  try:
    loop.run(chunks, learner, [chunks.make_next, finish])
    if saved_step < step < num_steps:
      checkpointer.save(step, learner.state, {}, wait=True)
  finally:
    activity.close()
    checkpointer.close()
    writer.close()
  return learner.state.params, {
      "interrupted": step < num_steps,
      "step": step,
      "evaluation": evaluation,
  }


class _Chunk(NamedTuple):
  """Examples of steps [first, end), which are dispatched together."""

  first: int
  end: int
  examples: types.Batch


class _Chunks:
  """Iterates over chunks until the last step or until `stop` is set.

  started: start time of the newest chunk.
  """

  def __init__(
      self,
      job: Job,
      settings: ml_collections.ConfigDict,
      first: int,
      stop: threading.Event,
      activity: heartbeat.Activity,
  ):
    """Initializes the iterator at step `first`."""
    self._job = job
    self._settings = settings
    self._stop = stop
    self._activity = activity
    self._next = self._make(first)

  def __iter__(self) -> Iterator[tuple[int, _Chunk]]:
    while self._next.first < self._settings.num_steps:
      if self._stop.is_set():
        return
      self._activity.mark("train")
      self.started = time.perf_counter()
      yield self._next.first, self._next

  def make_next(self, first: int, chunk: _Chunk, metrics: Any) -> None:
    """Prepares the next chunk while the device works on this one."""
    del first, metrics
    self._next = self._make(chunk.end)

  def _make(self, first: int) -> _Chunk:
    end = _chunk_end(self._settings, first)
    return _Chunk(first, end, self._job.examples.chunk(first, end))


class _Learner:
  """Trains on chunks; `state` includes all dispatched steps."""

  def __init__(
      self, run_chunk: Callable[..., Any], state: train_step.TrainState
  ):
    self.state = state
    self._run_chunk = run_chunk

  def step(self, chunk: _Chunk) -> Mapping[str, jax.Array]:
    self.state, metrics = self._run_chunk(
        self.state, chunk.examples, chunk.end - chunk.first
    )
    return metrics


def micro_batch_size(
    settings: ml_collections.ConfigDict, num_shards: int
) -> int:
  """Returns the number of examples per forward-backward pass.

  The smallest divisor of the batch size that is at least the setting and a
  multiple of `num_shards`, which must divide the batch size.
  """
  size = settings.micro_batch_size or settings.batch_size
  while size % num_shards or settings.batch_size % size:
    size += 1
  return size


def make_step_config(
    config: ml_collections.ConfigDict,
    settings: ml_collections.ConfigDict,
    micro: int,
) -> ml_collections.ConfigDict:
  """Returns the config of the train step: the job's optimizer, without RL."""
  out = config.copy_and_resolve_references()
  with out.unlocked():
    given = {k: v for k, v in settings.items() if k in out.optimizer}
    out.optimizer.update({**_ADAMW, **given})
    out.optimizer.learning_rate_final = 0.0
    out.optimizer.stable_steps = 0
    out.optimizer.decay_steps = 0
    out.optimizer.full_lag_steps = out.optimizer.sample_share_power = 0.0
    out.train.per_round_steps = 0
    out.reference.mode = "fixed"
    out.rounds.mini_batches = 0
    out.train.num_steps = settings.num_steps
    out.train.prompts_per_batch = settings.batch_size
    out.train.micro_batch_completions = 0
    out.train.micro_batch_prompts = micro
    # An objective without loss params or proximal policy. Its length norm gives
    # tokens the same weight in all micro-batches.
    out.loss.name = "tb"
    out.loss.length_norm = "mean_tokens"
    out.loss.proximal_every_steps = 1
    out.loss.behavior_logprobs = "sampler"
  return out


def _make_run_chunk(
    step_fn: train_step.TrainStep,
    abstract_state: train_step.TrainState,
    mesh: jax.sharding.Mesh,
) -> Callable[..., tuple[train_step.TrainState, dict[str, jax.Array]]]:
  """Returns a jitted (state, chunk, n) -> (state, metrics [CHUNK_STEPS])."""

  def run_chunk(state, chunk, num_active):
    batch = lambda i: jax.tree.map(lambda x: x[i], chunk)
    _, shapes = jax.eval_shape(step_fn, state, batch(0))
    metrics = {name: jnp.zeros(CHUNK_STEPS) for name in shapes}

    def body(i, carry):
      state, metrics = carry
      state, new = step_fn(state, batch(i))
      return state, {k: m.at[i].set(new[k]) for k, m in metrics.items()}

    # Chunks of all lengths share one program, so a step's bits do not depend on
    # how steps are grouped into chunks.
    return jax.lax.fori_loop(0, num_active, body, (state, metrics))

  spec = sharding.batch_sharding(mesh).spec
  chunk_sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(None, *spec)
  )
  state_shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
  return jax.jit(
      run_chunk,
      donate_argnums=0,
      in_shardings=(state_shardings, chunk_sharding, None),
      out_shardings=(state_shardings, sharding.replicated(mesh)),
  )


def _chunk_end(settings: ml_collections.ConfigDict, step: int) -> int:
  """Returns the end of the chunk that starts at `step`."""
  periods = (
      settings.evaluate_every_steps or settings.num_steps,
      settings.checkpoint_every_steps,
      settings.log_every_steps,
  )
  ends = [step - step % period + period for period in periods]
  return min(*ends, step + CHUNK_STEPS, settings.num_steps)


def _is_due(period: int, step: int, num_steps: int) -> bool:
  return period > 0 and (step % period == 0 or step == num_steps)


def _host_means(
    config: ml_collections.ConfigDict,
    job: Job,
    metrics: dict[str, jax.Array],
    first: int,
    last: int,
) -> tuple[dict[str, float], int]:
  """Waits for a chunk; returns means over its finite steps, and their number.

  Raises:
    FloatingPointError: non-finite loss or gradient, see `train`.
  """
  values = {k: np.asarray(v)[: last - first] for k, v in metrics.items()}
  finite = values["nonfinite"] == 0
  if not finite.all():
    message = (
        f"{job.name}: loss or gradient of steps"
        f" {(first + np.flatnonzero(~finite)).tolist()} is not finite; try a"
        f" lower config.{job.name}.learning_rate"
    )
    if config.train.nonfinite == "stop":
      raise FloatingPointError(message)
    # The step left the params unchanged.
    print(f"{message}; these steps are skipped", file=sys.stderr, flush=True)
  if not finite.any():
    return {}, 0
  means = {
      f"train/{name}": float(values[name][finite].mean())
      for name in ("loss", *job.metric_names)
  }
  return means, int(finite.sum())
