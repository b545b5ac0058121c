# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training on data that is there: what `sft` and `reward_model` share.

A batch is a pure function of the seed and the step. So an interrupted run,
started again, ends with the same bits as one that was not interrupted.
"""

from collections.abc import Callable
import dataclasses
import pathlib
import sys
import threading
import time
from typing import Any, TYPE_CHECKING

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.monitor import metrics as metrics_lib
from tba_jax.system import bucket
from tba_jax.system import processes
from tba_jax.training import checkpoint
from tba_jax.training import sharding

if TYPE_CHECKING:
  from tba_jax.training import train_step as train_step_lib


# Steps handed to the device at once: enough to hide what a dispatch costs, few
# enough to stop soon.
CHUNK_STEPS = 25
Progress = Callable[[int, int, dict[str, float]], None]

_OPTIMIZER_KEYS = (
    "learning_rate", "schedule", "warmup_steps", "weight_decay", "b1", "b2",
    "grad_clip_norm",
)  # fmt: skip


def run_program(
    name: str,
    trainer: ml_collections.ConfigDict,
    work: Callable[..., dict[str, Any]],
    on_end: Callable[[dict[str, Any]], None] = lambda result: None,
) -> int:
  """Runs such a program; returns its exit status.

  Args:
    name: of the program, before each line of progress.
    trainer: `config.trainer`. This is one process: where the trainer's have
      virtual devices, it has as many as all of them.
    work: called with `stop`, an event that a signal sets, and `on_progress`;
      its result has `interrupted`, `step` and `model`.
    on_end: called with the result of work that came to its end.
  """
  if trainer.cpu_devices:
    count = trainer.cpu_devices * trainer.num_processes
    jax.config.update("jax_num_cpu_devices", count)
  processes.die_with_supervisor()
  processes.enable_compilation_cache()
  stop = processes.stop_on_signals()

  def show(step: int, num_steps: int, metrics: dict[str, float]) -> None:
    values = "  ".join(f"{key} {v:.4g}" for key, v in metrics.items())
    print(f"{name} {step}/{num_steps}  {values}", flush=True)

  try:
    result = work(stop=stop, on_progress=show)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return processes.EXIT_CONFIG
  except FloatingPointError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return processes.EXIT_FATAL
  if result["interrupted"]:
    print(f"saved at step {result['step']}; the same command continues")
    return processes.EXIT_INTERRUPTED
  on_end(result)
  print(f"model: {result['model']}")
  return processes.EXIT_OK


@dataclasses.dataclass(frozen=True)
class Job:
  """What one such program trains.

  name: "sft" or "reward_model": the section of the config with its settings.
  folder: WORKDIR/name, for checkpoints and metrics.jsonl.
  init_state: () -> the state before step 0.
  abstract_state: its shapes, dtypes and shardings.
  train_step: of `train_step.make_train_step`, with the config of `step_config`.
  chunk: (first, last, size) -> batches of steps first … last - 1 on the host,
    leaves [size, B, …].
  evaluate: (params, step) -> metrics; {} where it was stopped or there is
    nothing to evaluate.
  metric_names: metrics of a step that are written, the loss among them.
  """

  name: str
  folder: pathlib.Path
  init_state: "Callable[[], train_step_lib.TrainState]"
  abstract_state: "train_step_lib.TrainState"
  train_step: "train_step_lib.TrainStep"
  chunk: Callable[[int, int, int], types.Batch]
  evaluate: Callable[[types.PyTree, int], dict[str, float]]
  metric_names: tuple[str, ...]


def train(
    config: ml_collections.ConfigDict,
    job: Job,
    *,
    stop: threading.Event,
    on_progress: Progress | None = None,
) -> tuple[types.PyTree, dict[str, Any]]:
  """Trains to the last step, or saves once `stop` is set; continues a run.

  Args:
    config: reads the section of the job's name, `mesh`, `sharding` and
      `checkpoint.keep`.
    job: what is trained.
    stop: once set, the present chunk of steps is finished and saved.
    on_progress: called with (step, num_steps, metrics) at each log line.

  Returns:
    The params, and `interrupted`, `step` (steps done) and `evaluation`, the
    last one's metrics, {} where there was none.

  Raises:
    FloatingPointError: a loss is not finite; names the steps.
    OSError: a file cannot be written.
  """
  settings = config[job.name]
  num_steps = settings.num_steps
  run_chunk = _make_run_chunk(config, job)
  writer = metrics_lib.MetricsWriter(job.folder / "metrics.jsonl")
  checkpointer = checkpoint.Checkpointer(
      bucket.place(job.folder / "checkpoints"), keep=config.checkpoint.keep
  )

  # State.
  if checkpointer.latest_step() is None:
    state = job.init_state()
  else:
    state, _ = checkpointer.restore(job.abstract_state)
    logging.info("%s continues at step %d", job.name, int(state.step))
  step = saved_step = int(state.step)

  # Loop.
  means, evaluation = metrics_lib.Means(), {}
  end = _chunk_end(settings, step)
  chunk = job.chunk(step, end, CHUNK_STEPS)
  try:
    while step < num_steps and not stop.is_set():
      chunk_started = time.perf_counter()
      state, chunk_metrics = run_chunk(state, chunk, end - step)
      # The host makes the next examples while the device works on these.
      next_end = _chunk_end(settings, end)
      chunk = job.chunk(end, next_end, CHUNK_STEPS)
      means.add(_host_means(job, chunk_metrics, step, end), weight=end - step)
      step_s = (time.perf_counter() - chunk_started) / (end - step)
      means.add({"time/step_s": step_s}, weight=end - step)
      step, end = end, next_end
      found = {}
      if _is_due(settings.evaluate_every_steps, step, num_steps):
        found = job.evaluate(state.params, step)
        evaluation = found or evaluation
      if found or _is_due(settings.log_every_steps, step, num_steps):
        record = means.take() | {f"eval/{k}": v for k, v in found.items()}
        writer.write(step, record)
        if on_progress is not None:
          on_progress(step, num_steps, record)
      if step % settings.checkpoint_every_steps == 0 and step < num_steps:
        checkpointer.save(step, state, {})
        saved_step = step
    if saved_step < step < num_steps:
      checkpointer.save(step, state, {}, wait=True)
  finally:
    checkpointer.close()
    writer.close()
  return state.params, {
      "interrupted": step < num_steps,
      "step": step,
      "evaluation": evaluation,
  }


def step_config(
    config: ml_collections.ConfigDict, name: str
) -> ml_collections.ConfigDict:
  """Returns the config of a job's steps: its optimizer in place of RL's.

  Args:
    config: of the run.
    name: of the job, and of its section.
  """
  settings = config[name]
  out = config.copy_and_resolve_references()
  with out.unlocked():
    for name in _OPTIMIZER_KEYS:
      out.optimizer[name] = settings[name]
    out.optimizer.learning_rate_final = 0.0
    out.optimizer.stable_steps = 0
    out.optimizer.decay_steps = 0
    out.train.per_round_steps = 0
    out.reference.mode = "fixed"
    out.rounds.mini_batches = 0
    out.train.num_steps = settings.num_steps
    out.train.micro_batch_prompts = (
        settings.micro_batch_size or settings.batch_size
    )
    # A loss without parameters of its own, and nothing held.
    out.loss.name = "tb"
    out.loss.proximal_every_steps = 1
    out.loss.behavior_logprobs = "sampler"
  return out


def _make_run_chunk(
    config: ml_collections.ConfigDict, job: Job
) -> "Callable[..., tuple[train_step_lib.TrainState, dict[str, jax.Array]]]":
  """Returns (state, chunk, n) -> (state, metrics [25] each) after n steps."""
  train_step = job.train_step

  def run_chunk(state, chunk, num_active):
    batch = lambda i: jax.tree.map(lambda x: x[i], chunk)
    _, shapes = jax.eval_shape(train_step, state, batch(0))
    metrics = {name: jnp.zeros(CHUNK_STEPS) for name in shapes}

    def body(i, carry):
      state, metrics = carry
      state, new = train_step(state, batch(i))
      return state, {k: m.at[i].set(new[k]) for k, m in metrics.items()}

    # One program for chunks of any length: its steps have the same bits,
    # wherever the chunks are cut.
    return jax.lax.fori_loop(0, num_active, body, (state, metrics))

  mesh = sharding.make_mesh(config.mesh)
  spec = sharding.batch_sharding(mesh, config.sharding).spec
  chunk_sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(None, *spec)
  )
  state_shardings = jax.tree.map(lambda x: x.sharding, job.abstract_state)
  return jax.jit(
      run_chunk,
      donate_argnums=0,
      in_shardings=(state_shardings, chunk_sharding, None),
      out_shardings=(state_shardings, sharding.replicated(mesh)),
  )


def _chunk_end(settings: ml_collections.ConfigDict, step: int) -> int:
  """Returns where the chunk from `step` on ends: at what is due first."""
  periods = (
      settings.evaluate_every_steps,
      settings.checkpoint_every_steps,
      settings.log_every_steps,
  )
  ends = [step - step % period + period for period in periods]
  return min(*ends, step + CHUNK_STEPS, settings.num_steps)


def _is_due(period: int, step: int, num_steps: int) -> bool:
  return step % period == 0 or step == num_steps


def _host_means(
    job: Job, metrics: dict[str, jax.Array], first: int, last: int
) -> dict[str, float]:
  """Waits for a chunk's metrics; returns their means over its steps.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  values = {k: np.asarray(v)[: last - first] for k, v in metrics.items()}
  if not np.isfinite(values["loss"]).all():
    bad = first + np.flatnonzero(~np.isfinite(values["loss"]))
    raise FloatingPointError(
        f"the loss of {job.name} steps {bad.tolist()} is not finite; a lower"
        f" config.{job.name}.learning_rate may help"
    )
  return {
      f"train/{name}": float(values[name].mean()) for name in job.metric_names
  }
