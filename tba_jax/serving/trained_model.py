# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model under training: passes add to its gradient, a step consumes it."""

from collections.abc import Mapping, Sequence
import functools

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models.net import transformer
from tba_jax.serving import group_passes
from tba_jax.serving import pass_settings
from tba_jax.serving import protobufs
from tba_jax.serving import schemas
from tba_jax.serving import token_losses
from tba_jax.serving import token_passes
from tba_jax.serving import trainable as trainable_lib

PyTree = types.PyTree


class TrainPrograms:
  """Compiled programs of all models with the same trained part.

  trainable: the trained part; see `Trainable` for the arguments.
  tokens, groups: passes of token losses, and of group objectives.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      model: transformer.Model,
      base: PyTree,
      *,
      rank: int,
      targets: str,
  ):
    self.trainable = trainable_lib.Trainable(
        config, model, base, rank=rank, targets=targets
    )
    self.tokens = token_passes.TokenPasses(self.trainable)
    self.groups = group_passes.GroupPasses(
        self.trainable,
        functools.partial(pass_settings.objective_config, config),
    )

  def check(self, data: Sequence[protobufs.Datum]) -> None:
    """Raises ValueError for a sequence that the model cannot take."""
    sampling = self.trainable.config.sampling
    most = sampling.max_prompt_tokens + sampling.max_completion_tokens
    last = self.trainable.model.config.vocab_size - 1
    for n, datum in enumerate(data):
      if len(datum.tokens) > most:
        raise ValueError(
            f"data[{n}] has {len(datum.tokens)} tokens: must be up to {most},"
            " config.sampling.max_prompt_tokens + max_completion_tokens"
        )
      ids = np.concatenate([datum.tokens, datum.targets])
      if not 0 <= ids.min() <= ids.max() <= last:
        raise ValueError(f"data[{n}]: must be token ids from 0 to {last}")


class TrainedModel:
  """A model under training: params, optimizer state, gradient."""

  def __init__(
      self, programs: TrainPrograms, params: PyTree, opt_state: PyTree
  ):
    self.programs = programs
    self.params = params
    self.opt_state = opt_state
    self._grads: PyTree | None = None

  @property
  def num_steps(self) -> int:
    return int(self.opt_state.count)

  def merged(self) -> PyTree:
    """Returns the model's params, adapters merged into their base."""
    return self.programs.trainable.merged(self.params)

  def run_pass(self, request: protobufs.Pass) -> protobufs.PassResult:
    """Runs a pass; adds its gradient, unless it is a forward pass only.

    Raises:
      ValueError: the pass is invalid; the gradient is unchanged.
    """
    self.programs.check(request.data)
    is_of_tokens = request.loss in token_losses.LOSSES
    passes = self.programs.tokens if is_of_tokens else self.programs.groups
    if request.forward_only:
      return passes.run(self.params, None, request)[1]
    self._grads, result = passes.run(self.params, self._gradient(), request)
    return result

  def run_batch(
      self, name: str, changes: Mapping[str, float | str], batch: types.Batch
  ) -> float:
    """Adds the gradient of a group objective; returns the loss.

    The reference is the base model. Raises what `run_pass` raises.
    """
    self._grads, loss, _ = self.programs.groups.run_batch(
        self.params, self._gradient(), name, changes, batch, has_reference=False
    )
    return loss

  def step(self, adam: schemas.AdamParams) -> dict[str, float]:
    """Takes a step with the gradient, and drops it; returns metrics.

    Raises:
      ValueError: there is no gradient, or it is not finite; the params are
        unchanged.
    """
    if self._grads is None:
      raise ValueError(
          "optim_step without a gradient: call forward_backward first"
      )
    grads, self._grads = self._grads, None
    self.params, self.opt_state, norm = self.programs.trainable.update(
        self.params, self.opt_state, grads, adam
    )
    norm = float(norm)
    if not np.isfinite(norm):
      raise ValueError(
          f"the gradient has norm {norm}: no step was taken, and the gradient"
          " is dropped"
      )
    return {"grad_norm:mean": norm, "step:max": float(self.num_steps)}

  def load(self, params: PyTree, opt_state: PyTree | None) -> None:
    """Replaces the params, and drops the gradient.

    Args:
      opt_state: optimizer state of `params`; None starts a new one.
    """
    self.params, self._grads = params, None
    if opt_state is None:
      opt_state = self.programs.trainable.init_optimizer(params)
    self.opt_state = opt_state

  def _gradient(self) -> PyTree:
    if self._grads is None:
      return self.programs.trainable.zeros(self.params)
    return self._grads
