# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of each objective relative to trajectory balance, and step memory.

`objectives [NAME …]` alternates between the updates of an objective and of TB,
on a Llama of 25.7 M params in float32 and 2 prompts x 8 completions of 32 + 32
tokens. This batch is small, so the loss weighs more than in a real run. An
objective with a value model or teacher has two networks, so costs are per
forward-backward pass of a network.

`objectives memory` compiles TB's update, from shapes alone, for 64 completions
of 256 tokens, a vocabulary of 150,000 and one layer, so that logits would
dominate memory, and reports the memory that XLA plans.
"""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax
import ml_collections

from benchmarks import peer_model
from tba_jax import types
from tba_jax.learning import train_step
from tba_jax.losses import objective_table
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer
from tba_jax.policy import value_model as value_model_lib

_BASE = "tb"


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is measured; reported figures use the defaults.

  shape: B, K, P and T of the steps that are timed.
  rounds: turns of each pair of objectives, of which the fastest counts.
  memory_shape: B, K, P and T of the step whose memory is planned.
  memory_vocab: vocabulary of that step.
  model: shape of the model.
  """

  shape: tuple[int, int, int, int] = (2, 8, 32, 32)
  rounds: int = 3
  memory_shape: tuple[int, int, int, int] = (1, 64, 64, 256)
  memory_vocab: int = 150_000
  model: config_lib.ModelConfig = peer_model.SHAPE


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns times of objectives, or bytes of the step.

  Args:
    config: only `optimizer` is read.
    operands: names of objectives, default all; or "memory".
    work: sizes of what is measured.

  Returns:
    For each objective `step_s` and `tb_step_s` (the best of a few alternating
    runs), `networks` (2 with a value model or a teacher), and `ratio`, step_s
    per network over tb_step_s; `max_ratio` over all. For "memory":
    `temporary_bytes` and `argument_bytes` of the compiled step, and
    `all_logits_bytes`, the size of an array of all logits.

  Raises:
    ValueError: an operand is not an objective.
  """
  if list(operands) == ["memory"]:
    return _memory(config, work)
  names = list(operands or objective_table.OBJECTIVES)
  if unknown := sorted(set(names) - set(objective_table.OBJECTIVES)):
    raise ValueError(
        f"unknown objectives {unknown}; must be one of"
        f" {sorted(objective_table.OBJECTIVES)}"
    )
  model = transformer.make_model(work.model, remat=config.train.remat)
  params = jax.jit(model.init)(jax.random.PRNGKey(0))
  base = _step(config, _BASE, model, params, work.shape)
  results_of = {}
  for name in names:
    step = _step(config, name, model, params, work.shape)
    seconds = [(base(), step()) for _ in range(work.rounds)]
    tb_s, step_s = (min(column) for column in zip(*seconds, strict=True))
    row = objective_table.find(name)
    networks = 1 + row.has_values + row.has_teacher
    results_of[name] = {
        "step_s": step_s,
        "tb_step_s": tb_s,
        "networks": networks,
        "ratio": step_s / networks / tb_s,
    }
  return {
      "objectives": results_of,
      "max_ratio": max(result["ratio"] for result in results_of.values()),
      "shape": dict(zip("BKPT", work.shape, strict=True)),
  }


def _step(
    config: ml_collections.ConfigDict,
    name: str,
    model: transformer.Model,
    params: types.PyTree,
    shape: tuple[int, int, int, int],
) -> Callable[[], float]:
  """Returns a function that runs a compiled step and returns its seconds."""
  config = _settings(config, name, shape)
  mesh = sharding.make_mesh(config.mesh)
  value_model = value_model_lib.make_model(config, model)
  state = train_step.init_state(
      config, model, params, mesh, value_model=value_model
  )
  # The teacher is as large as the policy.
  has_teacher = objective_table.find(name).has_teacher
  step_fn = train_step.make_train_step(
      config,
      model,
      mesh,
      value_model=value_model,
      teacher=model if has_teacher else None,
      teacher_params=params if has_teacher else None,
  )
  batch = sharding.shard_batch(
      peer_model.make_batch(shape, model.config.vocab_size),
      mesh,
  )

  def run_step() -> float:
    nonlocal state
    start = time.perf_counter()
    state, metrics = step_fn(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start

  run_step()
  return run_step


def _memory(config: ml_collections.ConfigDict, work: Work) -> dict[str, Any]:
  """Returns the memory that XLA plans for one update of TB."""
  config = _settings(config, _BASE, work.memory_shape)
  model = transformer.make_model(
      dataclasses.replace(
          work.model, vocab_size=work.memory_vocab, num_layers=1
      ),
      remat=config.train.remat,
  )
  mesh = sharding.make_mesh(config.mesh)
  over_batch = sharding.batch_sharding(mesh)
  batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_batch),
      peer_model.make_batch(work.memory_shape, work.memory_vocab),
  )
  step_fn = train_step.make_train_step(config, model, mesh)
  state = train_step.abstract_state(config, model, mesh)
  plan = step_fn.lower(state, batch).compile().memory_analysis()
  B, K, _, T = work.memory_shape
  return {
      "temporary_bytes": plan.temp_size_in_bytes,
      "argument_bytes": plan.argument_size_in_bytes,
      "all_logits_bytes": 4 * B * K * T * work.memory_vocab,
      "num_params": sum(x.size for x in jax.tree.leaves(state.params)),
      "vocab_size": work.memory_vocab,
      "shape": dict(zip("BKPT", work.memory_shape, strict=True)),
  }


def _settings(
    config: ml_collections.ConfigDict, name: str, shape: Sequence[int]
) -> ml_collections.ConfigDict:
  """Returns the config with one objective, whose batch is one micro-batch."""
  config = config.copy_and_resolve_references()
  config.loss.name = name
  config.loss.ratio_clip = 0.2
  config.loss.correction = ""
  config.loss.value_init = "policy"
  config.train.num_steps = 1000
  config.train.micro_batch_prompts = shape[0]
  config.optimizer.warmup_steps = 0
  config.mesh.update(data=1, fsdp=1, sequence=1, tensor=1)
  return config
