# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `sft` program: supervised fine-tuning on a task's reference completions.

A step learns from `sft.batch_size` training prompts drawn with replacement,
each with a right completion drawn anew; both are a pure function of the seed
and the step. So an interrupted run, started again, ends with the same bits as
one that was not interrupted.

Files, all below WORKDIR/sft: `settings.json` (what the model depends on),
`checkpoints/`, `metrics.jsonl`, and at the end `model/`, a Hugging Face folder.
"""

from collections.abc import Callable, Sequence
import sys
import threading
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import checkpoint as checkpoint_lib
from tba_jax import evaluator as evaluator_lib
from tba_jax import metrics as metrics_lib
from tba_jax import objective
from tba_jax import policy as policy_lib
from tba_jax import processes
from tba_jax import sft_examples
from tba_jax import sft_settings
from tba_jax import sharding
from tba_jax import train_step as train_step_lib
from tba_jax import types
from tba_jax.models import hf

# Steps handed to the device at once: enough to hide what a dispatch costs, few
# enough to stop soon.
_CHUNK_STEPS = 25
Progress = Callable[[int, int, dict[str, float]], None]


def run_sft(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  processes.die_with_supervisor()
  processes.enable_compilation_cache()
  stop = processes.stop_on_signals()

  def show(step: int, num_steps: int, metrics: dict[str, float]) -> None:
    values = "  ".join(f"{name} {v:.4g}" for name, v in metrics.items())
    print(f"sft {step}/{num_steps}  {values}", flush=True)

  try:
    result = run(config, workdir, stop=stop, on_progress=show)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return processes.EXIT_CONFIG
  except FloatingPointError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return processes.EXIT_FATAL
  if result["interrupted"]:
    print(f"saved at step {result['step']}; the same command continues")
    return processes.EXIT_INTERRUPTED
  print(f"model: {result['model']}")
  return processes.EXIT_OK


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    stop: threading.Event,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
  """Makes WORKDIR/sft/model, or finds it there; continues what was begun.

  Args:
    config: reads `seed`, `task`, `tokenizer`, `model`, `sft`, `mesh`,
      `sharding`, `sampling`, `evaluate` and `checkpoint.keep`.
    workdir: of the run, local.
    stop: once set, the present chunk of steps is finished and saved.
    on_progress: called with (step, num_steps, metrics) at each log line.

  Returns:
    `model`: the folder; `interrupted`; `skipped`, True where the model was
    there; `step`, steps done; `num_steps`; `wall_s` of this call; `evaluation`,
    the last one's metrics on held-out prompts, {} where there was none.

  Raises:
    ValueError: what is in WORKDIR/sft was made with other settings, or an
      example is longer than `sampling` allows.
    FloatingPointError: a loss is not finite; names the steps.
    OSError: a file cannot be written.
  """
  started = time.perf_counter()
  num_steps = config.sft.num_steps
  folder = policy_lib.sft_folder(workdir)
  sft_settings.check(config, folder.parent)
  result = {
      "model": str(folder),
      "interrupted": False,
      "skipped": False,
      "step": num_steps,
      "num_steps": num_steps,
      "evaluation": {},
  }
  if (folder / "config.json").exists():
    return {**result, "skipped": True, "wall_s": time.perf_counter() - started}

  # Parts.
  policy = policy_lib.make(config, workdir, scratch=True)
  train_config = _train_config(config)
  mesh = sharding.make_mesh(config.mesh)
  examples = sft_examples.Examples(
      policy.task,
      policy.tokenizer,
      seed=config.seed,
      batch_size=config.sft.batch_size,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
  )
  run_chunk = _make_run_chunk(train_config, policy, mesh)
  evaluate = _make_evaluate(config, policy, stop)
  writer = metrics_lib.MetricsWriter(folder.parent / "metrics.jsonl")
  checkpointer = checkpoint_lib.Checkpointer(
      str(folder.parent / "checkpoints"), keep=config.checkpoint.keep
  )

  # State.
  if checkpointer.latest_step() is None:
    params = policy_lib.initial_params(policy, config.seed)
    state = train_step_lib.init_state(train_config, policy.model, params, mesh)
  else:
    state, _ = checkpointer.restore(
        train_step_lib.abstract_state(train_config, policy.model, mesh)
    )
    logging.info("sft continues at step %d", int(state.step))
  step = saved_step = int(state.step)

  # Loop.
  means = metrics_lib.Means()
  end = _chunk_end(config.sft, step)
  chunk = examples.chunk(step, end, _CHUNK_STEPS)
  try:
    while step < num_steps and not stop.is_set():
      chunk_started = time.perf_counter()
      state, chunk_metrics = run_chunk(state, chunk, end - step)
      # The host makes the next examples while the device works on these.
      next_end = _chunk_end(config.sft, end)
      chunk = examples.chunk(end, next_end, _CHUNK_STEPS)
      means.add(_host_means(chunk_metrics, step, end), weight=end - step)
      step_s = (time.perf_counter() - chunk_started) / (end - step)
      means.add({"time/step_s": step_s}, weight=end - step)
      step, end = end, next_end
      found = {}
      if _is_due(config.sft.evaluate_every_steps, step, num_steps):
        found = evaluate(state.params, step)
        result["evaluation"] = found or result["evaluation"]
      if found or _is_due(config.sft.log_every_steps, step, num_steps):
        record = means.take() | {f"eval/{k}": v for k, v in found.items()}
        writer.write(step, record)
        if on_progress is not None:
          on_progress(step, num_steps, record)
      if step % config.sft.checkpoint_every_steps == 0 and step < num_steps:
        checkpointer.save(step, state, {})
        saved_step = step
    if step < num_steps:
      if step > saved_step:
        checkpointer.save(step, state, {}, wait=True)
      result |= {"interrupted": True, "step": step}
    else:
      hf.save(folder, policy.model.config, state.params, policy.tokenizer)
  finally:
    checkpointer.close()
    writer.close()
  return {**result, "wall_s": time.perf_counter() - started}


def _train_config(
    config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """Returns the config with SFT's optimizer in place of the trainer's."""
  sft = config.sft
  out = config.copy_and_resolve_references()
  with out.unlocked():
    for name in ("learning_rate", "warmup_steps", "weight_decay", "b1", "b2",
                 "grad_clip_norm"):  # fmt: skip
      out.optimizer[name] = sft[name]
    out.optimizer.schedule = "cosine"
    out.optimizer.stable_steps = 0
    out.train.per_round_steps = 0
    out.reference.mode = "fixed"
    out.rounds.mini_batches = 0
    out.optimizer.learning_rate_final = 0.0
    out.train.num_steps = sft.num_steps
    out.train.micro_batch_prompts = sft.batch_size
    # A loss without parameters of its own, and nothing held.
    out.loss.name = "tb"
    out.loss.proximal_every_steps = 1
    out.loss.behavior_logprobs = "sampler"
  return out


def _make_run_chunk(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> Callable[..., tuple[train_step_lib.TrainState, dict[str, jax.Array]]]:
  """Returns (state, chunk, n) -> (state, metrics [25] each) after n steps."""
  train_step = train_step_lib.make_train_step(
      config,
      policy.model,
      mesh,
      loss_fn=objective.make_supervised_loss_fn(policy.model),
  )

  def run_chunk(state, chunk, num_active):
    batch = lambda i: jax.tree.map(lambda x: x[i], chunk)
    _, shapes = jax.eval_shape(train_step, state, batch(0))
    metrics = {name: jnp.zeros(_CHUNK_STEPS) for name in shapes}

    def body(i, carry):
      state, metrics = carry
      state, new = train_step(state, batch(i))
      return state, {k: m.at[i].set(new[k]) for k, m in metrics.items()}

    # One program for chunks of any length: its steps have the same bits,
    # wherever the chunks are cut.
    return jax.lax.fori_loop(0, num_active, body, (state, metrics))

  spec = sharding.batch_sharding(mesh, config.sharding).spec
  chunk_sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(None, *spec)
  )
  state_shardings = jax.tree.map(
      lambda x: x.sharding,
      train_step_lib.abstract_state(config, policy.model, mesh),
  )
  return jax.jit(
      run_chunk,
      donate_argnums=0,
      in_shardings=(state_shardings, chunk_sharding, None),
      out_shardings=(state_shardings, sharding.replicated(mesh)),
  )


def _make_evaluate(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    stop: threading.Event,
) -> Callable[[types.PyTree, int], dict[str, float]]:
  """Returns (params, step) -> metrics on held-out prompts, {} once stopped."""
  evaluator = policy_lib.make_evaluator(
      config, policy, "held_out"
  ).while_training()

  num_prompts = min(
      config.evaluate.num_prompts, policy.task.num_prompts(evaluator.split)
  )

  def evaluate(params: types.PyTree, step: int) -> dict[str, float]:
    try:
      found = evaluator.run(
          params, num_prompts, version=step, should_stop=stop.is_set
      )
    except evaluator_lib.Interrupted:
      return {}
    return {
        name: value for name, value in found.items() if isinstance(value, float)
    }

  return evaluate


def _chunk_end(config_sft: ml_collections.ConfigDict, step: int) -> int:
  """Returns where the chunk from `step` on ends: at what is due first."""
  ends = [step + _CHUNK_STEPS, config_sft.num_steps]
  ends += [
      step - step % config_sft[p] + config_sft[p] for p in sft_settings.PERIODS
  ]
  return min(ends)


def _is_due(period: int, step: int, num_steps: int) -> bool:
  return step % period == 0 or step == num_steps


def _host_means(
    metrics: dict[str, jax.Array], first: int, last: int
) -> dict[str, float]:
  """Waits for a chunk's metrics; returns their means over its steps.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  values = {k: np.asarray(v)[: last - first] for k, v in metrics.items()}
  if not np.isfinite(values["loss"]).all():
    bad = first + np.flatnonzero(~np.isfinite(values["loss"]))
    raise FloatingPointError(
        f"the loss of sft steps {bad.tolist()} is not finite; a lower"
        " config.sft.learning_rate may help"
    )
  names = ("loss", "token_accuracy", "grad_norm", "learning_rate")
  return {f"train/{name}": float(values[name].mean()) for name in names}
