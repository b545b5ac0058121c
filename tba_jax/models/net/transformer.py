# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model as pure functions over plain params: `make_model`.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R decode
rows, L tokens, D width, N layers, G key-value heads, M query heads of one
key-value head, Dh head width, V vocabulary, A experts of a token.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax.extend import core as jex_core
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.kernels import kernels
from tba_jax.models.kernels import ragged_attention
from tba_jax.models.net import attention
from tba_jax.models.net import blocks
from tba_jax.models.net import cache as cache_lib
from tba_jax.models.net import layers as layers_lib
from tba_jax.models.net import products
from tba_jax.models.net import quantized
from tba_jax.models.net import sequence
from tba_jax.models.net import unpadded as kept_lib

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class Definitions:
  """A shape's module definitions without arrays, for `nnx.merge`.

  model: definition of the whole stack.
  block: definition of one block.
  logical_axes: params with a tuple of axis names in place of each leaf.
  no_blocks: params["blocks"] without arrays: each block is merged by itself.
  """

  model: nnx.GraphDef
  block: nnx.GraphDef
  logical_axes: PyTree
  no_blocks: PyTree


def definitions_of(config: ModelConfig) -> Definitions:
  """Returns the definitions of a shape's modules."""
  model_def, state = nnx.split(
      nnx.eval_shape(lambda: blocks.Decoder(config, nnx.Rngs(params=0)))
  )
  block_def, _ = nnx.split(
      nnx.eval_shape(lambda: blocks.Block(config, nnx.Rngs(params=0)))
  )
  axes = layers_lib.logical_axes(state)
  no_blocks = nnx.to_pure_dict(state["blocks"])
  return Definitions(model_def, block_def, axes, no_blocks)


_is_named = jax.checkpoint_policies.save_only_these_names(
    products.PRODUCT, layers_lib.ATTENTION
)


def _is_product(
    primitive: jex_core.Primitive, *args: Any, **params: Any
) -> bool:
  """Returns whether "dots" keeps the results of an operation."""
  # JAX gives what its cuDNN attention keeps for the gradient no name.
  is_cudnn = primitive.name == "dot_product_attention_fwd_wrapper"
  return is_cudnn or _is_named(primitive, *args, **params)


# `train.remat` -> policy of `jax.checkpoint` for a layer. "dots" keeps the
# results of matrix products and of attention's kernels, "full" only the layer's
# input.
REMATS = {
    "none": None,
    "dots": _is_product,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _remat_layer(layer: Callable, remat: str, platform: str) -> Callable:
  """Returns a layer of a scan with the rematerialization of `REMATS`."""
  if REMATS[remat] is None:
    return layer

  def keep_bits(*args: PyTree) -> PyTree:
    token = products.KEEPS_BITS.set(platform == "cpu")
    try:
      return layer(*args)
    finally:
      products.KEEPS_BITS.reset(token)

  return jax.checkpoint(keep_bits, policy=REMATS[remat], prevent_cse=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeParams:
  """Params as a sampler holds them: layers apart, matrices cast once.

  A scan over a stack would copy each layer's weights and cache out of it at
  every token, which takes longer than the products.

  layers: params of each layer, matrices in the compute dtype.
  others: params beside the blocks, likewise.
  tables: attention's tables of positions from 0 on, by the layers' windows.
  """

  layers: list[PyTree]
  others: PyTree
  tables: PyTree


@dataclasses.dataclass(frozen=True)
class Model:
  """A model as pure functions; params are nested dicts of arrays.

  Masks are 1 (or True) on real tokens. Positions count real tokens, so padding
  does not change a sequence's logits.

  config: the shape.
  init: (rng) -> params; the leaves of params["blocks"] are [N, ...].
  logits: (params, tokens_BxL, mask_BxL) -> logits_BxLxV float32; entry l
    predicts token l + 1. Padding may be left or right; logits at padding are
    finite but meaningless.
  completion_stream: (params, prompt_tokens_BxP, prompt_mask_BxP,
    completion_tokens_BxKxT, tokens_BxC=None, routes=None) -> stream_BxKxTxD,
    from which `unembed` predicts completion token t. Prompts are left-padded,
    completions right-padded. Each prompt is computed once and shared by its K
    completions. With tokens_BxC (`types.Rows.tokens`) it is stream_Bx1xCxD of
    these tokens. With routes (`types.Routes`) tokens use these experts. Under
    sequence parallelism (`sequence.py`) T is padded to divide.
  stream_and_routes: arguments of completion_stream -> stream_BxKxTxD,
    routes_BxKxTxNxA, the experts that predict each completion token. None for a
    model without experts.
  unembed: (params, stream_...xD) -> logits_...xV float32.
  completion_logits: arguments of completion_stream -> logits_BxKxTxV float32.
  last_logits: (params, tokens_BxL, mask_BxL) -> logits_BxV float32 that predict
    the token after the last one.
  decode_params: (params, num_positions) -> `DecodeParams`, with tables of that
    many positions. Host arrays are cut and cast on the host.
  quantize: (decode_params) -> `DecodeParams` with matrices in int8, also those
    of a tied head (`quantized.py`); experts stay as they are. Some layers, or
    others, may be missing.
  prefill: (decode_params, prompt_tokens_BxP, prompt_mask_BxP) -> (logits_BxV
    float32 that predict the first completion token, prompt_cache).
  init_cache: (num_rows, lengths, num_parts=None, rows_per_prompt=1,
    has_routes=False) -> KV cache of zeros: blocks with that many columns, of
    which the first is for prompts, each shared by that many adjacent rows
    (`cache.py`).
  fill_cache: (cache, prompt_cache, slots_R) -> cache. Copies prompt slots_R[r]
    to row r; a slot below 0 keeps the row.
  decode_step: (decode_params, tokens_R, positions_R, cache, cache_mask_RxC,
    write_index, kernel="plain") -> (logits_RxV float32, cache). Runs one token
    of each row and writes its key and value at column write_index ([R] or []
    int32, not of the first block). cache_mask_RxC is True on the columns that
    the row sees, the written one included. The cache may be the first blocks of
    a longer one. The kernel is of `ragged_attention.choose`.
  feed: (decode_params, tokens_RxQ, positions_RxQ, cache, cache_mask_RxQxC,
    write_index_RxQ) -> cache. Runs Q tokens of each row, as so many decode
    steps would; none of the rows share a prompt.
  logical_axes: params with a tuple of axis names in place of each leaf.
  """

  config: ModelConfig
  init: Callable[..., PyTree]
  logits: Callable[..., jax.Array]
  completion_stream: Callable[..., jax.Array]
  stream_and_routes: Callable[..., tuple[jax.Array, jax.Array]] | None
  unembed: Callable[[PyTree, jax.Array], jax.Array]
  completion_logits: Callable[..., jax.Array]
  last_logits: Callable[..., jax.Array]
  decode_params: Callable[[PyTree, int], DecodeParams]
  quantize: Callable[[DecodeParams], DecodeParams]
  prefill: Callable[..., tuple[jax.Array, PyTree]]
  init_cache: Callable[..., PyTree]
  fill_cache: Callable[..., PyTree]
  decode_step: Callable[..., tuple[jax.Array, PyTree]]
  feed: Callable[..., PyTree]
  logical_axes: PyTree


class _Forward:
  """The forward passes of one shape."""

  def __init__(self, config: ModelConfig, remat: str):
    self.config = config
    self.remat = remat
    self.definitions = definitions_of(config)

  def module(self, params: PyTree) -> nnx.Module:
    """Returns the stack without arrays in its blocks."""
    others = params.others if isinstance(params, DecodeParams) else params
    return nnx.merge(
        self.definitions.model, {**others, "blocks": self.definitions.no_blocks}
    )

  def block(self, layer_params: PyTree) -> nnx.Module:
    return nnx.merge(self.definitions.block, layer_params)

  def init(self, rng: jax.Array) -> PyTree:
    module = blocks.Decoder(self.config, nnx.Rngs(params=rng))
    return nnx.to_pure_dict(nnx.state(module))

  def by_window(
      self, layer: jax.Array | int, fn: Callable[..., PyTree], *args: PyTree
  ) -> PyTree:
    """Returns fn(*args, window=...) with the sliding window of a layer.

    A scan, whose index of the layer is traced, takes one of two branches:
    kernels need to know the window when they are compiled.
    """
    windows = self.config.windows
    branches = {w: functools.partial(fn, window=w) for w in windows}
    if isinstance(layer, int):
      return branches[windows[layer]](*args)
    if len(branches) == 1:
      return branches[windows[0]](*args)
    is_local_N = jnp.asarray([w > 0 for w in windows])
    local = branches[self.config.sliding_window]
    return jax.lax.cond(is_local_N[layer], local, branches[0], *args)

  def run_blocks(
      self,
      params: PyTree,
      x: jax.Array,
      tables: PyTree,
      attend: Callable[..., tuple[jax.Array, object]],
      routes_Nx: jax.Array | None = None,
  ) -> tuple[jax.Array, PyTree, PyTree]:
    """Returns the stream [..., D] after all blocks, and `attend`'s outputs.

    These are a list of those of each layer, or stacked as `params` is; so are
    the third, the experts of each token.

    Args:
      params: params of the model.
      x: [..., D].
      tables: rotary tables by window.
      attend: `layers.AttendFn` with the layer's index as a fourth argument.
      routes_Nx: [N, ..., A], experts to use; None has the routers choose.
    """

    def run(
        x: jax.Array,
        n: jax.Array | int,
        layer_params: PyTree,
        routes: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree, PyTree]:
      own = self.by_window(n, lambda tables, window: tables[window], tables)
      attend_n = functools.partial(attend, layer=n)
      return self.block(layer_params)(x, own, attend_n, n, routes)

    if isinstance(params, DecodeParams):
      # Unrolled, as decode steps are: a scan would need the stack.
      kept, chosen = [], []
      for n, layer_params in enumerate(params.layers):
        x, kept_n, chosen_n = run(x, n, layer_params)
        kept.append(kept_n)
        chosen.append(chosen_n)
      return x, kept, chosen
    parts, dtype = sequence.current_split(), x.dtype
    # The stream before each layer is kept too, see `products.keep`.
    stream = jnp.float32 if parts.platform == "cpu" else dtype

    def step(x, layer):
      x, *kept = run(x.astype(dtype), *layer)
      return parts.place(x.astype(stream), "batch", "length"), kept

    indices_N = jnp.arange(self.config.num_layers, dtype=jnp.int32)
    step = _remat_layer(step, self.remat, parts.platform)
    x, (kept, chosen) = jax.lax.scan(
        step, x.astype(stream), (indices_N, params["blocks"], routes_Nx)
    )
    return x.astype(dtype), kept, chosen

  def run_self(
      self, params: PyTree, tokens_BxL: jax.Array, mask_BxL: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Returns the stream [B, L, D] after all blocks, and the KV cache."""
    module, parts = self.module(params), sequence.current_split()
    positions_BxL = attention.positions_of(mask_BxL)
    if isinstance(params, DecodeParams):
      tables = jax.tree.map(lambda x: x[positions_BxL], params.tables)
    else:
      tables = module.tables(positions_BxL)

    mask = mask_BxL.astype(bool)

    def attend_within(q, k, v, window):
      return kernels.attend_causal(self.config, parts, q, k, v, mask, window)

    def attend(q, k, v, layer):
      out = self.by_window(layer, attend_within, q, k, v)
      return out, {"k": k, "v": v}

    x_BxLxD = module.embed_tokens(tokens_BxL, positions_BxL)
    x_BxLxD, kept, chosen = self.run_blocks(params, x_BxLxD, tables, attend)
    if self.config.num_experts and isinstance(params, DecodeParams):
      kept = [{**kv, "routes": routes} for kv, routes in zip(kept, chosen)]
    cache = {"layers": kept}
    if self.config.sliding_window:
      cache["position"] = positions_BxL
    return x_BxLxD, cache

  def logits(
      self, params: PyTree, tokens_BxL: jax.Array, mask_BxL: jax.Array
  ) -> jax.Array:
    x_BxLxD, _ = self.run_self(params, tokens_BxL, mask_BxL)
    return self.module(params).unembed(x_BxLxD)

  def prefill(
      self, params: PyTree, prompt_tokens: jax.Array, prompt_mask: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    x_BxPxD, cache = self.run_self(params, prompt_tokens, prompt_mask)
    return self.module(params).unembed(x_BxPxD[:, -1]), cache

  def last_logits(self, *inputs: PyTree) -> jax.Array:
    return self.prefill(*inputs)[0]

  def completion_stream(self, *inputs: PyTree, **others: PyTree) -> jax.Array:
    return self.stream_and_routes(*inputs, **others)[0]

  def stream_and_routes(
      self,
      params: PyTree,
      prompt_tokens: jax.Array,
      prompt_mask: jax.Array,
      completion_tokens: jax.Array,
      tokens_BxC: jax.Array | None = None,
      routes: types.Routes | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    # Prompt and completions run through the blocks on one long token axis
    # [P | K x S], for large matrix products; only attention separates them.
    # Tokens that are left out come back for attention alone: [P | 1 x C].
    module, parts = self.module(params), sequence.current_split()
    K, T = completion_tokens.shape[1:]
    prompt_tokens, prompt_mask, seen_mask, inputs_BxKxS, first_B = (
        sequence.completion_inputs(
            prompt_tokens, prompt_mask.astype(bool), completion_tokens
        )
    )
    (B, P), S = prompt_tokens.shape, inputs_BxKxS.shape[-1]
    # Padding keeps the position of the last token.
    steps_S = jnp.minimum(jnp.arange(S), T - 1)
    own_BxKxS = jnp.broadcast_to(
        first_B[:, None, None] + steps_S[None, None], (B, K, S)
    )
    leave_out = put_back = lambda own: own
    if tokens_BxC is not None:
      leave_out, put_back = _without_others(tokens_BxC, T, (B, K, S))
    positions_BxP = attention.positions_of(prompt_mask)
    positions_BxL = parts.join(positions_BxP, leave_out(own_BxKxS))
    tables = module.tables(positions_BxL)
    num_own = K if tokens_BxC is None else 1

    def attend_within(q, k, v, window):
      (q_p, q_o), (k_p, k_o), (v_p, v_o) = (
          parts.cut(x, P, num_own) for x in (q, k, v)
      )
      q_o, k_o, v_o = map(put_back, (q_o, k_o, v_o))
      out = kernels.attend_causal(
          self.config, parts, q_p, k_p, v_p, prompt_mask, window
      )
      shared = kernels.attend_completions(
          self.config, parts, q_o, (k_p, v_p, seen_mask), (k_o, v_o), window
      )
      return parts.join(out, leave_out(shared))

    def attend(q, k, v, layer):
      return self.by_window(layer, attend_within, q, k, v), None

    x_BxLxD = module.embed_tokens(
        parts.join(prompt_tokens, leave_out(inputs_BxKxS)), positions_BxL
    )
    x_BxLxD = parts.place(x_BxLxD, "batch", "length")
    routes_NxBxLxA = None
    if routes is not None:
      prompts, own = sequence.fed(routes.prompts, routes.completions)
      routes_BxLxNxA = parts.join(prompts, leave_out(own))
      routes_NxBxLxA = jnp.moveaxis(routes_BxLxNxA, 2, 0)
    x_BxLxD, _, chosen_NxBxLxA = self.run_blocks(
        params, x_BxLxD, tables, attend, routes_NxBxLxA
    )

    def before(x_BxLx: jax.Array) -> jax.Array:
      """Returns [B, K, T, ...], what the token before each has."""
      x_BxPx, own_BxKxSx = parts.cut(x_BxLx, P, num_own)
      rest = x_BxLx.shape[2:]
      if tokens_BxC is not None:
        # The token before is next to each, but a completion's first follows its
        # prompt.
        last_Bx1x, own_BxCx = x_BxPx[:, -1:], own_BxKxSx[:, 0]
        before_BxCx = jnp.concatenate([last_Bx1x, own_BxCx[:, :-1]], axis=1)
        is_first_BxC = tokens_BxC % T == 0
        is_first_BxCx = is_first_BxC.reshape(B, -1, *[1] * len(rest))
        return jnp.where(is_first_BxCx, last_Bx1x, before_BxCx)[:, None]
      if S >= T:
        return own_BxKxSx
      first_BxKx1x = jnp.broadcast_to(x_BxPx[:, None, -1:], (B, K, 1, *rest))
      return jnp.concatenate([first_BxKx1x, own_BxKxSx], axis=2)

    if chosen_NxBxLxA is None:
      return before(x_BxLxD), None
    return before(x_BxLxD), before(jnp.moveaxis(chosen_NxBxLxA, 0, 2))

  def unembed(self, params: PyTree, stream: jax.Array) -> jax.Array:
    return self.module(params).unembed(stream)

  def completion_logits(
      self, params: PyTree, *inputs: jax.Array | None
  ) -> jax.Array:
    logits = self.unembed(params, self.completion_stream(params, *inputs))
    num_tokens = inputs[2].shape[-1]
    # Fewer are padded to divide; others are as many as are asked for.
    return logits if inputs[3:] else logits[:, :, :num_tokens]

  def decode_params(self, params: PyTree, num_positions: int) -> DecodeParams:
    dtype = jnp.dtype(self.config.compute_dtype)
    # Matrices are cast once, where a step would cast them at each token. Norms
    # are computed in float32, with weights as they are.
    cast = lambda x: x.astype(dtype, copy=False) if x.ndim > 1 else x
    layer = lambda n: jax.tree.map(lambda x: cast(x[n]), params["blocks"])
    others = {name: x for name, x in params.items() if name != "blocks"}
    # Looked up by each step: otherwise the compiler would recompute the cosines
    # for every head of every layer. Computed now, also where this is traced, so
    # that host and devices give the same bits.
    with jax.ensure_compile_time_eval():
      positions_L = jnp.arange(num_positions, dtype=jnp.int32)
      tables = self.module(params).tables(positions_L)
    return DecodeParams(
        layers=[layer(n) for n in range(self.config.num_layers)],
        others=jax.tree.map(cast, others),
        tables=tables,
    )

  def quantize(self, decode_params: DecodeParams) -> DecodeParams:
    others = {
        name: quantized.quantize_tree(part, self.num_outs[name])
        for name, part in decode_params.others.items()
    }
    return dataclasses.replace(
        decode_params,
        layers=[
            quantized.quantize_tree(layer, self.num_outs["blocks"])
            for layer in decode_params.layers
        ],
        others=others,
    )

  @functools.cached_property
  def num_outs(self) -> PyTree:
    """Output axes of each param of decoding that is quantized, 0 elsewhere."""

    def count(path: Any, axes: tuple[str, ...]) -> int:
      names = tuple(entry.key for entry in path)
      is_tied = names[0] == "embed" and self.config.tie_embeddings
      if names[-1] != "kernel" and not is_tied:
        return 0
      return quantized.num_out(axes[1:] if names[0] == "blocks" else axes)

    return jax.tree_util.tree_map_with_path(
        count,
        self.definitions.logical_axes,
        is_leaf=lambda axes: isinstance(axes, tuple),
    )

  def decode_step(
      self,
      decode_params: DecodeParams,
      tokens: jax.Array,
      positions: jax.Array,
      cache: PyTree,
      cache_mask: jax.Array,
      write_index: jax.Array,
      kernel: str = "plain",
  ) -> tuple[jax.Array, PyTree]:
    attend = cache_lib.attend
    if kernel != "plain":
      attend = functools.partial(ragged_attention.attend, kernel)
    x_RxD, cache = self._run_cached(
        attend,
        decode_params,
        tokens,
        positions,
        cache,
        cache_mask,
        write_index,
    )
    return self.module(decode_params).unembed(x_RxD), cache

  def feed(self, decode_params: DecodeParams, *inputs: PyTree) -> PyTree:
    _, cache = self._run_cached(cache_lib.attend_many, decode_params, *inputs)
    return cache

  def _run_cached(
      self,
      attend_fn: Callable[..., tuple[jax.Array, list[PyTree]]],
      decode_params: DecodeParams,
      tokens: jax.Array,
      positions: jax.Array,
      cache: PyTree,
      cache_mask: jax.Array,
      write_index: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the stream after all blocks, and the cache with new columns."""
    module = self.module(decode_params)
    tables = jax.tree.map(lambda x: x[positions], decode_params.tables)
    cache, updates = cache_lib.plan_updates(
        cache,
        cache_mask.astype(bool),
        positions,
        write_index,
        self.config.windows,
    )
    layers, routes = [], []
    x = module.embed_tokens(tokens, positions)
    updates = [updates[window] for window in self.config.windows]
    for n, layer_params in enumerate(decode_params.layers):
      layer = [b["layers"][n] for b in cache]
      attend = functools.partial(attend_fn, layer, updates[n])
      block = self.block(layer_params)
      x, layer, chosen = block(x, tables[self.config.windows[n]], attend, n)
      layers.append(layer)
      routes.append(chosen)
    x, layers = cache_lib.write_columns(x, layers, updates)
    layers = list(map(cache_lib.put_routes, layers, updates, routes))
    cache = [
        {**block, "layers": [layer[b] for layer in layers]}
        for b, block in enumerate(cache)
    ]
    return x, cache


def _without_others(
    tokens_BxC: jax.Array, num_tokens: int, shape: tuple[int, int, int]
) -> tuple[Callable[[jax.Array], jax.Array], ...]:
  """Returns [B, K, S, ...] -> [B, 1, C, ...] of some tokens, and its inverse.

  Args:
    tokens_BxC: `types.Rows.tokens`.
    num_tokens: T of those.
    shape: B, K, S; tokens from S on are left out too.
  """
  B, K, S = shape
  m_BxC, t_BxC = tokens_BxC // num_tokens, tokens_BxC % num_tokens
  places_BxC = jnp.where((m_BxC < K) & (t_BxC < S), m_BxC * S + t_BxC, K * S)
  kept = kept_lib.find(places_BxC, K * S)

  def leave_out(own: jax.Array) -> jax.Array:
    return kept_lib.take(own.reshape(B, K * S, *own.shape[3:]), kept)[:, None]

  def put_back(own: jax.Array) -> jax.Array:
    return kept_lib.put(own[:, 0], kept).reshape(B, K, S, *own.shape[3:])

  return leave_out, put_back


def make_model(
    model_config: ModelConfig, *, scalar: bool = False, remat: str = "none"
) -> Model:
  """Returns the model of a shape.

  Args:
    model_config: the shape.
    scalar: whether it has a scalar head; logits are then its outputs.
    remat: `config.train.remat`.

  Raises:
    ValueError: `model_config.num_labels` contradicts `scalar`.
  """
  if scalar != bool(model_config.num_labels):
    raise ValueError(
        f"num_labels={model_config.num_labels}: must be"
        f" {'1 or more' if scalar else '0, a model that predicts tokens'}"
    )
  forward = _Forward(model_config, remat)
  return Model(
      config=model_config,
      init=forward.init,
      logits=forward.logits,
      completion_stream=forward.completion_stream,
      stream_and_routes=(
          forward.stream_and_routes if model_config.num_experts else None
      ),
      unembed=forward.unembed,
      completion_logits=forward.completion_logits,
      last_logits=forward.last_logits,
      decode_params=forward.decode_params,
      quantize=forward.quantize,
      prefill=forward.prefill,
      init_cache=functools.partial(cache_lib.empty, model_config),
      fill_cache=cache_lib.fill,
      decode_step=forward.decode_step,
      feed=forward.feed,
      logical_axes=forward.definitions.logical_axes,
  )
