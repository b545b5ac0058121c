# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts: a router, and gated MLPs of which each token uses a few.

No token is dropped: the copies of a token, one per expert, are sorted by
expert, and each expert multiplies its own run of copies (`grouped_matmul.py`).

Sources: Yang et al. 2025 (arXiv:2505.09388), OpenAI 2025 (arXiv:2508.10925) and
DeepSeek-AI 2024 (arXiv:2412.19437), as computed by Hugging Face's
`Qwen3MoeSparseMoeBlock`, `GptOssMLP` and `DeepseekV3MoE`.

Axes: T tokens, A experts per token, R = T * A copies, E experts, D width, F
hidden units per expert. Leading axes written `...` are free.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.kernels import grouped_matmul
from tba_jax.models.net import activations
from tba_jax.models.net import layers
from tba_jax.models.net import products
from tba_jax.models.net import quantized
from tba_jax.models.net import sequence
from tba_jax.models.net import unpadded as kept_lib

# Up to this many tokens per device, an accelerator multiplies all of them by
# every expert: reading the weights takes longer.
_FEW = 128


class Experts(nnx.Module):
  """Σ_e w_e down_e(activation(gate_e(x)) * up_e(x)) over a token's experts.

  A token uses the A experts with the largest softmax(router x), or sigmoids in
  families with `has_sigmoid_router`. Their values are the weights w, divided by
  their sum with `config.norm_router` (`route`).
  gpt-oss has a different activation (`_gated`).

  router: [E, D].
  gate, up: [E, F, D].
  down: [E, D, F].
  router_bias: [E], gate_bias, up_bias: [E, F], down_bias: [E, D], initially
    zeros; only in families with `has_expert_biases`.
  router_norm, expert_factor: [D] and [E], initially ones, scale of the norm of
    the router's inputs and factor of the weights; only in families with
    `norms_experts`.
  choice_bias: [E] float32, initially zeros; only in families with
    `has_sigmoid_router`. No gradient reaches it: DeepSeek-V3's pretraining
    moves it to balance experts, and it is fixed here.
  """

  def __init__(
      self,
      config: config_lib.ModelConfig,
      *,
      rngs: nnx.Rngs,
      out_scale: float,
  ):
    self.config = config
    E, D, F = config.num_experts, config.width, config.mlp_width

    def make(
        shape: tuple[int, ...], axes: tuple[str, ...], scale: float = 1.0
    ) -> nnx.Param:
      stddev = scale / math.sqrt(shape[-1])
      value = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
      dtype = jnp.dtype(config.param_dtype)
      return nnx.Param(value.astype(dtype), logical_axes=axes)

    self.router = make((E, D), ("experts", "width"))
    self.gate = make((E, F, D), ("experts", "mlp", "width"))
    self.up = make((E, F, D), ("experts", "mlp", "width"))
    self.down = make((E, D, F), ("experts", "width", "mlp"), out_scale)
    family = family_lib.FAMILIES[config.family]
    self.has_biases = family.has_expert_biases
    self.has_choice_bias = family.has_sigmoid_router
    self.has_norm = family.norms_experts
    if self.has_norm:
      ones = lambda size, axis: nnx.Param(
          jnp.ones((size,), jnp.dtype(config.param_dtype)), logical_axes=(axis,)
      )
      self.router_norm = ones(D, "width")
      self.expert_factor = ones(E, "experts")
    if self.has_choice_bias:
      self.choice_bias = nnx.Param(
          jnp.zeros((E,), jnp.float32), logical_axes=("experts",)
      )
    if self.has_biases:
      zeros = lambda *shape, axes: nnx.Param(
          jnp.zeros(shape, jnp.dtype(config.param_dtype)), logical_axes=axes
      )
      self.router_bias = zeros(E, axes=("experts",))
      self.gate_bias = zeros(E, F, axes=("experts", "mlp"))
      self.up_bias = zeros(E, F, axes=("experts", "mlp"))
      self.down_bias = zeros(E, D, axes=("experts", "width"))

  def __call__(
      self,
      x: jax.Array,
      routes: jax.Array | None = None,
      read: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the layer's output, and the indices of each token's experts.

    Args:
      x: [..., D].
      routes: [..., `config.route_bytes`] uint8, experts to use instead of those
        with the largest weights; their weights still come from the router.
      read: [..., D], stream that the router normalizes; None if it reads x.

    Returns:
      [..., D], and [..., A] of `config.route_dtype`.
    """
    is_whole = lambda leaf: isinstance(leaf, quantized.Quantized)
    cast = lambda *params: [
        jax.tree.map(
            lambda leaf: leaf if is_whole(leaf) else leaf.astype(x.dtype),
            p.get_value(),
            is_leaf=is_whole,
        )
        for p in params
    ]
    router, *kernels = cast(self.router, self.gate, self.up, self.down)
    router_bias, biases, factor_E = None, None, None
    if self.has_norm:
      read = layers.normalized(read, self.config.norm_epsilon)
      scale = self.router_norm[...].astype(jnp.float32)
      read *= products.expand_to(scale, read.ndim) / math.sqrt(read.shape[-1])
      read = read.astype(x.dtype)
      factor_E = self.expert_factor[...].astype(jnp.float32)
    if self.has_biases:
      router_bias = self.router_bias[...].astype(jnp.float32)
      biases = cast(self.gate_bias, self.up_bias, self.down_bias)
    if self.has_choice_bias:
      router_bias = self.choice_bias[...]
    params = (router, router_bias, factor_E), kernels, biases
    parts = sequence.current_split()
    run = functools.partial(_apply, config=self.config, platform=parts.platform)
    if parts.mesh is None or parts.mesh.size == 1:
      return run(x, routes, read, *params, first_expert=0)
    return _over_mesh(run, parts, x, routes, read, params)


def _over_mesh(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    parts: sequence.Split,
    x: jax.Array,
    routes: jax.Array | None,
    read: jax.Array | None,
    params: tuple[Any, Sequence[Any], Sequence[jax.Array] | None],
) -> tuple[jax.Array, jax.Array]:
  """Returns the layer's output, computed from each device's own tokens.

  The compiler cannot split the products of sorted copies. Devices that hold
  different experts for the same tokens sum their results; along all other mesh
  axes, weights are gathered.
  """
  mesh = parts.mesh
  axes = parts.experts
  count = math.prod(mesh.shape[a] for a in axes)
  if _num_experts(params[1][0]) % count:
    axes, count = (), 1
  length = (parts.length or None,) if parts.count > 1 else ()
  tokens = PartitionSpec(parts.batch or None, *length)
  split = PartitionSpec(axes or None)

  def own(
      x: jax.Array,
      routes: jax.Array | None,
      read: jax.Array | None,
      router: Any,
      kernels: Sequence[Any],
      biases: Sequence[jax.Array] | None,
  ) -> tuple[jax.Array, jax.Array]:
    index = jax.lax.axis_index(axes) if axes else 0
    first_expert = index * _num_experts(kernels[0])
    out, chosen = run(
        x, routes, read, router, kernels, biases, first_expert=first_expert
    )
    return out[None], chosen

  out, chosen = jax.shard_map(
      own,
      mesh=mesh,
      in_specs=(*[tokens] * 3, PartitionSpec(), split, split),
      out_specs=(PartitionSpec(axes or None, *tokens), tokens),
      check_vma=False,
  )(x, routes, read, *params)
  return jnp.sum(out, axis=0), chosen


def route(
    x_TxD: jax.Array,
    router_ExD: jax.Array,
    config: config_lib.ModelConfig,
    routes: jax.Array | None = None,
    bias_E: jax.Array | None = None,
    factor_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns weights [T, A] float32 of each token's experts, and their indices.

  The indices are those in `routes` [T, `config.route_bytes`] if given. The
  router's bias is added to its logits, or with sigmoids only to the scores that
  choose experts. The last factors of weights are `factor_E`.

  Source of sigmoids and groups: DeepSeek-AI 2024 (arXiv:2412.19437, section
  2.1.2), as computed by Hugging Face's `DeepseekV3TopkRouter`.
  """
  logits_TxE = products.product(x_TxD, router_ExD, jnp.float32)
  if family_lib.FAMILIES[config.family].has_sigmoid_router:
    probs_TxE = jax.nn.sigmoid(logits_TxE)
    scores_TxE = probs_TxE + bias_E[None]
  else:
    if bias_E is not None:
      logits_TxE += bias_E[None]
    scores_TxE = probs_TxE = jax.nn.softmax(logits_TxE)
  if routes is None:
    scores_TxE = _of_best_groups(jax.lax.stop_gradient(scores_TxE), config)
    _, chosen_TxA = jax.lax.top_k(scores_TxE, config.experts_per_token)
  else:
    shape = len(x_TxD), config.experts_per_token, -1
    low, *high = jnp.moveaxis(routes.astype(jnp.int32).reshape(shape), 2, 0)
    chosen_TxA = low + 256 * high[0] if high else low
  # A comparison and a sum have an elementwise gradient; the gradient of values
  # returned by `top_k` would be a scatter.
  is_chosen_TxAxE = _one_hot(chosen_TxA, config.num_experts)
  weights_TxA = jnp.sum(
      jnp.where(is_chosen_TxAxE, probs_TxE[:, None], 0.0), axis=-1
  )
  if config.norm_router:
    # All sigmoids may vanish.
    weights_TxA /= jnp.sum(weights_TxA, axis=-1, keepdims=True) + 1e-20
  if factor_E is not None:
    own = jnp.where(is_chosen_TxAxE, factor_E[None, None], 0.0)
    weights_TxA *= jnp.sum(own, axis=-1)
  return weights_TxA * config.router_scale, chosen_TxA


def _of_best_groups(
    scores_TxE: jax.Array, config: config_lib.ModelConfig
) -> jax.Array:
  """Returns the scores, -∞ outside of the best groups of adjacent experts.

  A group's own score is the sum of its two largest.
  """
  G = config.num_expert_groups
  if config.groups_per_token == G:
    return scores_TxE
  scores_TxGx = scores_TxE.reshape(len(scores_TxE), G, -1)
  best_TxGx2, _ = jax.lax.top_k(scores_TxGx, 2)
  _, chosen = jax.lax.top_k(best_TxGx2.sum(axis=-1), config.groups_per_token)
  is_chosen_TxG = jnp.any(_one_hot(chosen, G), axis=1)
  scores_TxGx = jnp.where(is_chosen_TxG[..., None], scores_TxGx, -jnp.inf)
  return scores_TxGx.reshape(scores_TxE.shape)


def _one_hot(numbers: jax.Array, size: int) -> jax.Array:
  """Returns [..., size] bool, True at each number; all False out of range."""
  places = jax.lax.broadcasted_iota(
      numbers.dtype, (*numbers.shape, size), numbers.ndim
  )
  return numbers[..., None] == places


def _apply(
    x: jax.Array,
    routes: jax.Array | None,
    read: jax.Array | None,
    router: tuple[jax.Array, jax.Array | None, jax.Array | None],
    kernels: Sequence[jax.Array | products.Adapted | quantized.Quantized],
    biases: Sequence[jax.Array] | None,
    *,
    first_expert: jax.Array | int,
    config: config_lib.ModelConfig,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
  """Returns the sum over the experts whose weights are given, and the routes.

  Args:
    x: [..., D].
    routes: argument of `Experts`; None lets the router choose.
    read: [..., D], input of the router; None is x.
    router: kernel, bias and factors of the router (`route`), over all experts.
    kernels: gate, up and down kernels of a range of experts.
    biases: vectors added to these products, in the same order; None if absent.
    first_expert: index of the first expert in the range.
    platform: JAX's name of the backend.

  Returns:
    [..., D], and [..., A] of `config.route_dtype`.
  """
  x_TxD = x.reshape(-1, x.shape[-1])
  if routes is not None:
    routes = routes.reshape(len(x_TxD), -1)
  router_ExD, *others = router
  read_TxD = x_TxD if read is None else read.reshape(x_TxD.shape)
  weights_TxA, chosen_TxA = route(read_TxD, router_ExD, config, routes, *others)
  hidden_fn = _gated(config)
  compute = _sorted
  is_adapted = any(isinstance(kernel, products.Adapted) for kernel in kernels)
  if platform != "cpu" and len(x_TxD) <= _FEW and not is_adapted:
    compute = _dense
  own_TxA = chosen_TxA - first_expert
  product = functools.partial(grouped_matmul.product, platform)
  scales = None
  if isinstance(kernels[0], quantized.Quantized):
    scales = [kernel.scale for kernel in kernels]
    kernels = [kernel.values for kernel in kernels]
  out_TxD = compute(
      x_TxD, weights_TxA, own_TxA, kernels, scales, biases, hidden_fn, product
  )
  chosen = chosen_TxA.astype(config.route_dtype)
  return out_TxD.reshape(x.shape), chosen.reshape(*x.shape[:-1], -1)


def _gated(
    config: config_lib.ModelConfig,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns (gate, up) -> hidden units of an expert.

  In gpt-oss, with alpha and limit from `config`, they are

      min(gate, limit) · σ(alpha · min(gate, limit)) · (clip(up, ±limit) + 1)

  (OpenAI 2025, arXiv:2508.10925), else activation(gate) · up.
  """
  if not family_lib.FAMILIES[config.family].clamps_experts:
    activation = activations.ACTIVATIONS[config.activation]
    return lambda gate, up: activation(gate) * up
  alpha, limit = config.swiglu_alpha, config.swiglu_limit

  def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)

  return clamped


def _num_experts(kernel: jax.Array | products.Adapted) -> int:
  return jax.tree.leaves(kernel)[0].shape[0]


def _adapted(
    times: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    kernel: jax.Array | products.Adapted,
) -> jax.Array:
  """Returns times(x, kernel), or times(x, W) + times(times(x, A), B)."""
  if not isinstance(kernel, products.Adapted):
    return times(x, kernel)
  return times(x, kernel.kernel) + times(times(x, kernel.a), kernel.b)


def _dense(
    x_TxD, weights_TxA, own_TxA, kernels, scales, biases, hidden_fn, product
):
  """Returns the sum, multiplying all tokens by every expert.

  `scales` [E, F] are factors of hidden units: of gate's and up's results, and
  of down's inputs.
  """
  del product
  scaled = lambda x, n: x
  if scales is not None:
    scaled = lambda x, n: (x * scales[n][None]).astype(x.dtype)
  gate, up, down = (kernel.astype(x_TxD.dtype) for kernel in kernels)
  is_own_TxAxE = _one_hot(own_TxA, len(gate))
  weights_TxE = jnp.sum(
      jnp.where(is_own_TxAxE, weights_TxA[..., None], 0.0), axis=1
  )
  weights_TxE = weights_TxE.astype(x_TxD.dtype)
  hidden = [jnp.einsum("td,efd->tef", x_TxD, kernel) for kernel in (gate, up)]
  hidden = [scaled(x, n) for n, x in enumerate(hidden)]
  if biases is not None:
    hidden = [x + bias[None] for x, bias in zip(hidden, biases)]
  hidden_TxExF = scaled(hidden_fn(*hidden) * weights_TxE[..., None], 2)
  out_TxD = jnp.einsum("tef,edf->td", hidden_TxExF, down)
  if biases is not None:
    out_TxD += weights_TxE @ biases[2]
  return out_TxD


def _sorted(
    x_TxD, weights_TxA, own_TxA, kernels, scales, biases, hidden_fn, product
):
  """Returns the sum, multiplying each expert by its own tokens only."""
  (T, A), E = own_TxA.shape, _num_experts(kernels[0])
  own_R = own_TxA.reshape(-1)
  # Copies for experts on other devices come last, in no group.
  own_R = jnp.where((own_R >= 0) & (own_R < E), own_R, E)
  sizes_E = jnp.sum(_one_hot(own_R, E), axis=0, dtype=jnp.int32)
  order_R = jnp.argsort(own_R)
  copies_RxD = jnp.repeat(x_TxD, A, axis=0)
  kept = kept_lib.find(order_R[None], T * A)
  rows_RxD = kept_lib.take(copies_RxD[None], kept)[0]
  is_own_RxE = _one_hot(own_R[order_R], E).astype(x_TxD.dtype)

  def scaled(x: jax.Array, n: int) -> jax.Array:
    if scales is None:
      return x
    # Scales need no gradient. Copies of no group get 0.
    scale_RxF = jnp.take(
        scales[n], own_R[order_R], axis=0, mode="fill", fill_value=0.0
    )
    return (x * scale_RxF).astype(x.dtype)

  def of_rows(x: jax.Array, n: int) -> jax.Array:
    x = scaled(x, n) if n == 2 else x
    out = _adapted(lambda x, k: product(x, k, sizes_E), x, kernels[n])
    out = out if n == 2 else scaled(out, n)
    if biases is None:
      return out
    # A product's gradient is a product, whereas a gather's is a scatter.
    return out + jnp.dot(is_own_RxE, biases[n], precision="highest")

  hidden_RxF = hidden_fn(of_rows(rows_RxD, 0), of_rows(rows_RxD, 1))
  out_RxD = of_rows(hidden_RxF, 2)
  out_TxAxD = kept_lib.put(out_RxD[None], kept)[0].reshape(T, A, -1)
  out_TxD = jnp.sum(
      out_TxAxD.astype(jnp.float32) * weights_TxA[..., None], axis=1
  )
  return out_TxD.astype(x_TxD.dtype)
