# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Learner: trains on draws from the replay buffer."""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.learning import batches
from tba_jax.learning import device_work
from tba_jax.learning import packing
from tba_jax.losses import objective_table
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.tasks import offline_completions


class Learner:
  """Turns a draw into a batch and trains on it.

  Reference log-probs stay on the devices until `finish` caches them in the
  buffer, so starting a step never waits for a device.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      tokenizer: tokenizer_lib.Tokenizer,
      buffer: buffer_lib.ReplayBuffer,
      work: device_work.DeviceWork,
      *,
      baselines: np.ndarray | None = None,
      span: Callable[..., Any] = lambda kind, step: contextlib.nullcontext(),
  ):
    """Initializes the learner.

    Args:
      config: reads `loss.include_stop_token`, `loss.missing_stop` and the
        settings of `packing.make` and `objective_table.has_reference_pass`.
      tokenizer: source of stop tokens and stop strings.
      buffer: source of the draws; caches the reference log-probs.
      work: owner of train state and reference.
      baselines: [prompts] float32, value of each training prompt; None without
        a baseline file.
      span: (kind, step) -> context manager that records host work.
    """
    self._config = config
    self._span = span
    self._buffer = buffer
    self.work = work
    self._baselines = baselines
    counts = config.loss.include_stop_token
    self._tokenizer = None if counts else tokenizer
    self._unsaved: list[tuple[np.ndarray, np.ndarray, jax.Array, int]] = []

  @property
  def params(self) -> types.PyTree:
    """The model's params, adapters merged; the next step donates them."""
    return self.work.gather_model()

  def step(self, draw: types.Draw) -> dict[str, jax.Array]:
    """Dispatches a step on a draw; returns its metrics, on the devices."""
    with self._span("draw", step=draw.step):
      batch = self.make(draw)
    with self._span("step", step=draw.step):
      return self.work.train(batch)

  def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """Returns metrics on the host, once the devices have computed them."""
    return {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}

  def make(self, draw: types.Draw) -> types.Batch:
    """Returns the batch of a draw on the mesh, with all reference log-probs.

    Must be called between the previous step and the draw's own step.
    """
    version = self.work.reference.version(draw.step)
    missing_B = (draw.ref_versions != version).any(axis=1)
    if not objective_table.has_reference_pass(self._config):
      missing_B[:] = False
    masks_cut_off = self._config.loss.missing_stop == "mask"
    batch = batches.of_draw(draw, self._tokenizer, masks_cut_off)
    pack = lambda mask_BxKxT: packing.pack(
        packing.make(self._config),
        batch.prompt_mask,
        batch.completion_tokens,
        mask_BxKxT,
        batch.routes,
        batch.kept_ids,
    )
    rows, missing = pack(batch.completion_mask), None
    if missing_B.any():
      missing = pack(batch.completion_mask * missing_B[:, None, None])
    batch = dataclasses.replace(
        batch, rows=rows, prepared=self._prepared(draw.prompt_ids)
    )
    batch, computed_BxKxT = self.work.place(batch, missing)
    if computed_BxKxT is not None:
      self._unsaved.append((draw.ids, missing_B, computed_BxKxT, version))
    return batch

  def _prepared(self, prompt_ids_B: np.ndarray) -> dict[str, np.ndarray]:
    if self._baselines is None:
      return {}
    return {"baselines_Bx1": self._baselines[prompt_ids_B][:, None]}

  def finish(self) -> None:
    """Caches the computed reference log-probs in the buffer.

    Blocks until the devices have computed them.
    """
    unsaved, self._unsaved = self._unsaved, []
    # The reference may have moved since, so each entry has its own version.
    for ids_BxK, missing_B, values_BxKxT, version in unsaved:
      self._buffer.set_ref_logprobs(
          ids_BxK[missing_B], np.asarray(values_BxKxT)[missing_B], version
      )


def make_learner(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    buffer: buffer_lib.ReplayBuffer,
    work: device_work.DeviceWork,
    **kwargs: Any,
) -> Learner:
  """Returns the learner of a run; `kwargs` go to `Learner`.

  Raises:
    ValueError: `loss.baseline_file` is invalid or lacks a prompt.
  """
  baselines = None
  if objective_table.baseline(config.loss) == "file":
    baselines = offline_completions.values(
        config.loss.baseline_file,
        policy.task,
        policy.tokenizer,
        reward_field=config.offline.reward_field,
        temperature=config.loss.baseline_temperature,
    )
  return Learner(
      config, policy.tokenizer, buffer, work, baselines=baselines, **kwargs
  )
