# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of one trajectory balance update, versus PyTorch.

A Llama of 25.7 M params in float32, or `--config.model.compute_dtype=bfloat16`,
learns from 2 prompts x 16 completions of 64 + 64 tokens. The folder
`TBA_JAX_PEERS` has scripts for comparison: `make_checkpoint.py DIR llama 30m`
writes the model for both programs, and `train_torch.py DIR B K P T` prints a
JSON line with `tokens_per_s` of the same update in float32, computed as in the
paper's code. The two programs alternate, so other load slows both; the fastest
step of each counts.

Tokens are counted as B·K·(P+T), a prompt once per completion, however often it
is computed. The limit is 6·params flops per token at the speed of a 2048³
product; sharing prompts can exceed it.

The operand `copies` times the config's step (default `configs/countdown.py`: 32
x 4 completions of 18 tokens) on batches in which nearly half of the completions
are repeats, alternately with and without packing distinct completions.

The operand `lengths` times the config's step on packed rows of completions that
fill a share of `max_completion_tokens`, compared with a fully padded batch.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import peer_model
from tba_jax import types
from tba_jax.learning import model_source
from tba_jax.learning import packing
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer

PEERS_VARIABLE = "TBA_JAX_PEERS"

_TEMPERATURE = 0.7
_COPIES_VOCAB = 64
_ROUNDS = 2
# Mean lengths for `lengths`, as shares of `max_completion_tokens`.
_SHARES = (1.0, 0.67, 0.44, 0.3, 0.2)
_PEER_DEADLINE_S = 600.0


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  shape: B, K, P and T of the step.
  steps: steps of a turn, of which the fastest counts.
  product_size: rows and columns of the product whose speed is the limit.
  model: shape of the model if no peer makes it.
  """

  shape: tuple[int, int, int, int] = (2, 16, 64, 64)
  steps: int = 4
  product_size: int = 2048
  model: config_lib.ModelConfig = peer_model.SHAPE


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns both speeds, their ratio and the limit.

  Args:
    config: `optimizer`, `loss` and `model.compute_dtype` are read; `copies` and
      `lengths` read all settings.
    operands: optionally `copies` or `lengths`, then optionally the number of
      rounds of turns (default 2).
    work: sizes of what is timed.

  Returns:
    For `copies`: share_of_copies, whole_s, rows_s (medians) and ratio. For
    `lengths`: whole_s (median), and for each share of the tokens step_s, its
    ratio to whole_s, and the share of tokens computed by the layers. Otherwise
    tokens_per_s, step_s (best), peer_tokens_per_s, ratio (of the best), ratios
    (of each turn), limit_tokens_per_s, share_of_limit, product_gflop_per_s,
    num_params, and the shape. Without `TBA_JAX_PEERS`, `peer_tokens_per_s` and
    `ratio` are None, `ratios` is empty, and the model is random.

  Raises:
    RuntimeError: a comparison script failed; the message has the end of its
      output.
  """
  if operands and operands[0] in ("copies", "lengths"):
    rounds = int(operands[1]) if operands[1:] else _ROUNDS
    run_it = _run_copies if operands[0] == "copies" else _run_lengths
    return run_it(config, rounds, work.steps)
  rounds = int(operands[0]) if operands else _ROUNDS
  peers = os.environ.get(PEERS_VARIABLE)
  B, K, P, T = work.shape
  with tempfile.TemporaryDirectory() as folder:
    if peers:
      _run_script(peers, "make_checkpoint.py", folder, "llama", "30m")
      shape, params = hf.load(folder)
    else:
      shape = work.model
      params = jax.jit(transformer.make_model(shape).init)(
          jax.random.PRNGKey(0)
      )
    dtype = config_lib.compute_dtype(config.model, jax.default_backend())
    shape = dataclasses.replace(shape, compute_dtype=dtype)
    model = transformer.make_model(shape, remat=config.train.remat)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    config = config.copy_and_resolve_references()
    config.sampling.temperature = _TEMPERATURE
    config.train.micro_batch_prompts = B
    batch = peer_model.make_batch(work.shape, model.config.vocab_size)
    update = Update(config, model, params, batch)
    del params
    step_s, peer_tokens_per_s, product = [], [], []
    for _ in range(rounds):
      step_s.append(update.time(work.steps))
      product.append(_product_flop_per_s(work.product_size))
      if peers:
        line = _run_script(
            peers, "train_torch.py", folder, *map(str, work.shape)
        ).splitlines()[-1]
        peer_tokens_per_s.append(json.loads(line)["tokens_per_s"])
  tokens_per_s = B * K * (P + T) / min(step_s)
  peer = max(peer_tokens_per_s, default=None)
  ratios = [
      B * K * (P + T) / ours_s / peer_speed
      for ours_s, peer_speed in zip(step_s, peer_tokens_per_s, strict=False)
  ]
  limit = max(product) / (6 * num_params)
  return {
      "tokens_per_s": tokens_per_s,
      "step_s": min(step_s),
      "peer_tokens_per_s": peer,
      "ratio": peer and tokens_per_s / peer,
      "ratios": ratios,
      "limit_tokens_per_s": limit,
      "share_of_limit": tokens_per_s / limit,
      "product_gflop_per_s": max(product) / 1e9,
      "num_params": num_params,
      "shape": dict(zip("BKPT", work.shape, strict=True)),
  }


def _run_copies(
    config: ml_collections.ConfigDict, rounds: int, num_steps: int
) -> dict[str, Any]:
  model, params = _scratch_model(config)
  K = config.train.completions_per_prompt
  batch = peer_model.make_batch(packing.batch_shape(config), _COPIES_VOCAB)
  # K draws from about .65 K completions, as from a replay buffer.
  rng = np.random.default_rng(0)
  batches = [
      tokens[rng.integers(0, max(rng.binomial(K, 0.65), 1), K)]
      for tokens in batch.completion_tokens
  ]
  whole = dataclasses.replace(batch, completion_tokens=np.stack(batches))
  packed = _packed(config, whole)
  updates = [Update(config, model, params, batch) for batch in (whole, packed)]
  turns = [
      [update.time(num_steps) for update in updates] for _ in range(rounds)
  ]
  whole_s, rows_s = np.median(turns, axis=0)
  num_distinct = len(np.unique(packed.rows.place_indices[..., 0]))
  return {
      "share_of_copies": 1 - num_distinct / packed.rewards.size,
      "whole_s": whole_s,
      "rows_s": rows_s,
      "ratio": whole_s / rows_s,
  }


def _run_lengths(
    config: ml_collections.ConfigDict, rounds: int, num_steps: int
) -> dict[str, Any]:
  if config.init in ("scratch", "sft"):
    model, params = _scratch_model(config)
  else:
    source = model_source.load(
        "init", config.init, bos=config.tokenizer.bos, dtype=None
    )
    dtype = config_lib.compute_dtype(config.model, jax.default_backend())
    shape = dataclasses.replace(source.model.config, compute_dtype=dtype)
    model = transformer.make_model(shape, remat=config.train.remat)
    params = source.params
  B, K, P, T = packing.batch_shape(config)
  whole = peer_model.make_batch((B, K, P, T), _COPIES_VOCAB)
  updates = {"whole": Update(config, model, params, whole)}
  for share in _SHARES:
    mask = np.broadcast_to(np.arange(T) < share * T, (B, K, T))
    batch = dataclasses.replace(whole, completion_mask=mask.astype(np.float32))
    updates[f"{share:.2f}"] = Update(
        config, model, params, _packed(config, batch)
    )
  turns = [
      [update.time(num_steps) for update in updates.values()]
      for _ in range(rounds)
  ]
  seconds = dict(zip(updates, np.median(turns, axis=0), strict=True))
  whole_s = seconds.pop("whole")
  return {
      "whole_s": whole_s,
      "lengths": {
          share: {
              "step_s": step_s,
              "ratio": step_s / whole_s,
              "tokens": (P + float(share) * K * T) / (P + K * T),
          }
          for share, step_s in seconds.items()
      },
  }


def _packed(
    config: ml_collections.ConfigDict, batch: types.Batch
) -> types.Batch:
  rows = packing.pack(
      packing.make(config),
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )
  return dataclasses.replace(batch, rows=rows)


def _scratch_model(
    config: ml_collections.ConfigDict,
) -> tuple[transformer.Model, types.PyTree]:
  shape = config_lib.ModelConfig.from_config(
      config.model,
      vocab_size=_COPIES_VOCAB,
      pad_id=0,
      bos_id=None,
      eos_id=1,
      backend=jax.default_backend(),
  )
  model = transformer.make_model(shape, remat=config.train.remat)
  return model, jax.jit(model.init)(jax.random.PRNGKey(0))


class Update:
  """The jitted step on one batch, compiled when made."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      model: transformer.Model,
      params: types.PyTree,
      batch: types.Batch,
  ):
    config = config.copy_and_resolve_references()
    config.train.num_steps = 1000
    config.optimizer.warmup_steps = 0
    config.mesh.update(data=1, fsdp=1, sequence=1, tensor=1)
    mesh = sharding.make_mesh(config.mesh)
    self._state = train_step.init_state(config, model, params, mesh)
    self._step = train_step.make_train_step(config, model, mesh)
    self._batch = sharding.shard_batch(batch, mesh)
    self.time(1)

  def time(self, num_steps: int) -> float:
    """Returns the seconds of the fastest step."""
    seconds = []
    for _ in range(num_steps):
      start = time.perf_counter()
      self._state, metrics = self._step(self._state, self._batch)
      jax.block_until_ready((self._state, metrics))
      seconds.append(time.perf_counter() - start)
    return min(seconds)


def _product_flop_per_s(n: int) -> float:
  """Returns the speed of a float32 product of [n, n], the best of a few."""
  x_NxN = jnp.ones((n, n), jnp.float32)
  product = jax.jit(lambda x: x @ x)
  product(x_NxN).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(x_NxN).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * n**3 / min(seconds)


def _run_script(peers: str, name: str, *args: str) -> str:
  """Runs a comparison script; returns its output."""
  command = [sys.executable, str(pathlib.Path(peers) / name), *args]
  process = subprocess.run(
      command,
      capture_output=True,
      text=True,
      timeout=_PEER_DEADLINE_S,
      check=False,
  )
  if process.returncode:
    raise RuntimeError(
        f"{' '.join(command)} ended with {process.returncode}:"
        f" {(process.stdout + process.stderr)[-2000:]}"
    )
  return process.stdout
