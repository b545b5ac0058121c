# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trained part of a model: adapters, or all of its params."""

from collections.abc import Iterator
import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from tba_jax import types
from tba_jax.learning import optimizer
from tba_jax.mesh import sharding
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.serving import schemas

PyTree = types.PyTree


class Trainable:
  """Compiled programs that models with the same trained part share.

  base: params of the base model, which adapters adapt; also the reference
    policy.
  adapters: LoRA adapters; None if all params are trained.

  Args:
    config, model, base: the attributes.
    rank: width of the adapters; 0 trains all params.
    targets: matrices that have adapters, as `config.lora.targets`.
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
    self.config = config
    self.model = model
    self.base = base
    self.adapters = lora.make(
        {"rank": rank, "alpha": config.lora.alpha, "targets": targets}, model
    )
    self._mesh = sharding.make_mesh(config.mesh)
    trained = self.adapters or model
    self._shapes = jax.eval_shape(trained.init, jax.random.PRNGKey(0))
    self._shardings = sharding.param_shardings(self._mesh, trained)
    self._init = jax.jit(trained.init, out_shardings=self._shardings)
    self._merge = jax.jit(self.adapters.merge) if self.adapters else None
    self._update = jax.jit(_update, donate_argnums=(0, 1))
    self._zeros = jax.jit(
        lambda params: jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), params
        )
    )

  def init(self, seed: int) -> PyTree:
    """Returns new params to train: adapters, or a copy of the base."""
    if self.adapters is None:
      return jax.tree.map(jnp.copy, self.base)
    return self._init(jax.random.PRNGKey(seed))

  def init_optimizer(self, params: PyTree) -> PyTree:
    """Returns the state of Adam before its first step."""
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
    init = jax.jit(
        optax.scale_by_adam().init, out_shardings=shardings["opt_state"]
    )
    return init(params)

  def abstract_state(self) -> dict[str, PyTree]:
    """Returns shapes and shardings of `params` and `opt_state`."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    adam = jax.eval_shape(optax.scale_by_adam().init, self._shapes)
    like = functools.partial(jax.tree.map, place)
    return {
        "params": like(self._shapes, self._shardings),
        "opt_state": optax.ScaleByAdamState(
            count=place(adam.count, sharding.replicated(self._mesh)),
            mu=like(adam.mu, self._shardings),
            nu=like(adam.nu, self._shardings),
        ),
    }

  def zeros(self, params: PyTree) -> PyTree:
    """Returns a gradient of zeros, float32."""
    return self._zeros(params)

  def merged(self, params: PyTree) -> PyTree:
    """Returns the model's params, adapters merged into their base."""
    return params if self._merge is None else self._merge(self.base, params)

  def attach(self, base: PyTree, params: PyTree) -> PyTree:
    """As `merged`, inside a program."""
    return self.adapters.attach(base, params) if self.adapters else params

  def place_rows(self, arrays: PyTree) -> PyTree:
    """Returns arrays [B, ...] on the devices."""
    return sharding.shard_batch(arrays, self._mesh)

  def update(
      self,
      params: PyTree,
      opt_state: PyTree,
      grads: PyTree,
      adam: schemas.AdamParams,
  ) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns params and state after a step, and the gradient's norm.

    Params and state are donated, and unchanged if the norm is not finite.
    """
    numbers = np.array([*dict(adam).values()], np.float32)
    return self._update(params, opt_state, grads, numbers)


@contextlib.contextmanager
def donating() -> Iterator[None]:
  """Converts a ValueError to a RuntimeError, since the gradient is lost.

  After a ValueError, a caller may continue with the gradient.
  """
  try:
    yield
  except ValueError as error:
    raise RuntimeError(str(error)) from error


def _update(
    params: PyTree, opt_state: PyTree, grads: PyTree, settings: jax.Array
) -> tuple[PyTree, PyTree, jax.Array]:
  """Returns params and state after a step, and the gradient's norm."""
  rate, beta1, beta2, eps, decay, clip = settings
  norm = optax.tree.norm(grads)
  factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
  tx = optax.chain(
      optax.scale_by_adam(beta1, beta2, eps), optax.add_decayed_weights(decay)
  )
  as_params = jax.tree.map(
      lambda g, p: (factor * g).astype(p.dtype), grads, params
  )
  updates, (adam, _) = tx.update(
      as_params, (opt_state, optax.EmptyState()), params
  )
  new = optax.apply_updates(
      params,
      jax.tree.map(
          lambda u: (-rate * u).astype(u.dtype),
          optimizer.without_fixed(updates),
      ),
  )
  keep = lambda new, old: jnp.where(jnp.isfinite(norm), new, old)
  return (
      jax.tree.map(keep, new, params),
      jax.tree.map(keep, adam, opt_state),
      norm,
  )
