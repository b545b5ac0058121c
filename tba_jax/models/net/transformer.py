# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model as pure functions over plain params: `make_model`.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, L
tokens, D width, N layers, G key-value heads, M query heads per key-value head,
Dh head width, V vocabulary, A experts per token.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.kernels import kernels
from tba_jax.models.kernels import ragged_attention
from tba_jax.models.net import attention
from tba_jax.models.net import blocks
from tba_jax.models.net import cache as cache_lib
from tba_jax.models.net import delta
from tba_jax.models.net import layers as layers_lib
from tba_jax.models.net import packed
from tba_jax.models.net import products
from tba_jax.models.net import quantized
from tba_jax.models.net import sequence
from tba_jax.models.net import spread
from tba_jax.models.net import stacks

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class Definitions:
  """A shape's module definitions without arrays, for `nnx.merge`.

  model: definition of the whole stack.
  blocks: definition of one block of each kind.
  logical_axes: params with a tuple of axis names in place of each leaf.
  no_blocks: params["blocks"] without arrays: each block is merged by itself.
  """

  model: nnx.GraphDef
  blocks: dict[tuple[str, ...], nnx.GraphDef]
  logical_axes: PyTree
  no_blocks: PyTree


@functools.cache
def definitions_of(config: ModelConfig) -> Definitions:
  """Returns the definitions of a shape's modules."""
  model_def, state = nnx.split(
      nnx.eval_shape(lambda: blocks.Decoder(config, nnx.Rngs(params=0)))
  )

  def block_def(kind: tuple[str, ...]) -> nnx.GraphDef:
    make = lambda: blocks.Block(config, nnx.Rngs(params=0), kind)
    return nnx.split(nnx.eval_shape(make))[0]

  block_defs = {kind: block_def(kind) for kind in dict.fromkeys(config.kinds)}
  axes = layers_lib.logical_axes(state)
  no_blocks = nnx.to_pure_dict(state["blocks"])
  return Definitions(model_def, block_defs, axes, no_blocks)


# Value of `train.remat` -> policy of `jax.checkpoint` for a layer. "dots" keeps
# the results of matrix products and attention, "full" only the layer's input.
REMATS = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(
        products.PRODUCT, layers_lib.ATTENTION
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _remat_layer(
    layer: Callable, remat: str, platform: str, is_repeated: bool = True
) -> Callable:
  """Returns a layer of a scan with the rematerialization of `REMATS`.

  Without repetitions, there is no loop that would stop the compiler from
  reusing results of the forward pass.
  """
  if REMATS[remat] is None:
    return layer

  def keep_bits(*args: PyTree) -> PyTree:
    token = products.KEEPS_BITS.set(platform == "cpu")
    try:
      return layer(*args)
    finally:
      products.KEEPS_BITS.reset(token)

  return jax.checkpoint(
      keep_bits, policy=REMATS[remat], prevent_cse=not is_repeated
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeParams:
  """Params of a sampler: layers are separate, matrices are cast once.

  A scan over a stack would copy each layer's weights and cache out of it for
  every token, which takes longer than the products.

  layers: params of each layer, with matrices in the compute dtype.
  others: params outside the blocks, with matrices in the compute dtype.
  tables: rotary tables for positions from 0 on, by sliding window.
  """

  layers: list[PyTree]
  others: PyTree
  tables: PyTree


@dataclasses.dataclass(frozen=True)
class Model:
  """A model as pure functions; params are nested dicts of arrays.

  Masks are 1 (or True) on real tokens. Positions count real tokens, so padding
  does not change a sequence's logits.

  init: (rng) -> params; the leaves of params["blocks"] are [N, ...], or have
    one entry for each layer that has their module (`stacks.py`).
  logits: (params, tokens_BxL, mask_BxL) -> logits_BxLxV float32; entry l
    predicts token l + 1. Padding may be left or right; logits at padding are
    finite but meaningless.
  completion_stream: (params, prompt_tokens_BxP, prompt_mask_BxP,
    completion_tokens_BxKxT, token_indices_RxL=None, routes=None) ->
    stream_BxKxTxD, from which `unembed` predicts completion token t. Prompts
    are left-padded, completions right-padded. Each prompt is computed once and
    shared by its K completions. With token_indices_RxL (a micro-batch of
    `types.Rows.token_indices`) the result is stream_RxLxD at these places. With
    routes (`types.Routes`) tokens use the given experts.
  stream_and_routes: arguments of completion_stream -> stream_BxKxTxD,
    routes_BxKxTxNxA, the experts that predict each completion token in each of
    the N layers with experts; or both for rows. None for a model without
    experts.
  unembed: (params, stream_...xD) -> logits_...xV float32.
  completion_logits: arguments of completion_stream -> logits_BxKxTxV float32.
  last_logits: (params, tokens_BxL, mask_BxL) -> logits_BxV float32 that predict
    the token after the last one.
  decode_params: (params, num_positions) -> `DecodeParams`, with tables for that
    many positions. Host arrays are sliced and cast on the host.
  quantize: (decode_params) -> `DecodeParams` with int8 matrices, including a
    tied head and experts (`quantized.py`). Some layers or other
    params may be missing.
  prefill: (decode_params, prompt_tokens_BxP, prompt_mask_BxP) -> (logits_BxV
    float32 that predict the first completion token, prompt_cache).
  init_cache: (num_rows, lengths, num_parts=None, rows_per_prompt=1,
    has_routes=False) -> KV cache of zeros with blocks of these lengths; the
    first block is for prompts, each shared by rows_per_prompt adjacent rows
    (`cache.py`).
  fill_cache: (cache, prompt_cache, slots_R) -> cache. Copies prompt slots_R[r]
    to row r; a slot below 0 keeps the row.
  decode_step: (decode_params, tokens_R, positions_R, cache, cache_mask_RxC,
    write_index, kernel="plain") -> (logits_RxV float32, cache). Runs one token
    of each row and writes its key and value at column write_index ([R] or []
    int32, never in the first block). cache_mask_RxC is True on the columns that
    the row sees, including the written one. The cache may be the first blocks
    of a longer one. The kernel is a result of `ragged_attention.choose`.
  feed: (decode_params, tokens_RxQ, positions_RxQ, cache, cache_mask_RxQxC,
    write_index_RxQ) -> cache. Runs Q tokens of each row, equivalent to Q decode
    steps; no rows may share a prompt.
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


class _Layer(NamedTuple):
  """A layer to run.

  index: traced in a scan.
  like: index of a layer of the same kind, which is the same outside of one.
  """

  index: jax.Array | int
  like: int


class _Forward:
  """The forward passes of one shape."""

  def __init__(self, config: ModelConfig, remat: str):
    self.config = config
    self.remat = remat
    self.definitions = definitions_of(config)

  def module(self, params: PyTree) -> nnx.Module:
    """Returns the decoder without arrays in its blocks."""
    others = params.others if isinstance(params, DecodeParams) else params
    return nnx.merge(
        self.definitions.model, {**others, "blocks": self.definitions.no_blocks}
    )

  def block(self, index: int, layer_params: PyTree) -> nnx.Module:
    """Returns a block of the layer's kind with the given params.

    If the mesh does not divide its heads, they are as in `spread.model_over`.
    """
    parts = sequence.current_split()
    axes = self.definitions.logical_axes["blocks"]
    layer_params = spread.layer_params(self.config, layer_params, axes, parts)
    definitions = definitions_of(spread.model_over(self.config, parts))
    return nnx.merge(definitions.blocks[self.config.kinds[index]], layer_params)

  def init(self, rng: jax.Array) -> PyTree:
    module = blocks.Decoder(self.config, nnx.Rngs(params=rng))
    return nnx.to_pure_dict(nnx.state(module))

  def by_window(
      self, layer: "_Layer", fn: Callable[..., PyTree], *args: PyTree
  ) -> PyTree:
    """Returns fn(*args, window=...) with the sliding window of a layer.

    In a scan, where the layer's index is traced, this branches on the window if
    layers of its kind differ in it, because kernels need to know it at compile
    time.
    """
    windows, kinds = self.config.windows, self.config.kinds
    kind = kinds[layer.like]
    branches = {
        w: functools.partial(fn, window=w)
        for w, other in zip(windows, kinds)
        if other == kind
    }
    if isinstance(layer.index, int) or len(branches) == 1:
      return branches[windows[layer.like]](*args)
    is_local_N = jnp.asarray([w > 0 for w in windows])
    local = branches[self.config.sliding_window]
    return jax.lax.cond(is_local_N[layer.index], local, branches[0], *args)

  def tables_of(
      self, layer: "_Layer", tables: PyTree
  ) -> tuple[jax.Array, ...] | None:
    """Returns the rotary tables of a layer from the tables by window.

    A layer without positions gets None, or, in a scan, tables that rotate by 0.
    """
    found = self.by_window(layer, lambda tables, window: tables[window], tables)
    is_rotary = self.config.rotary_layers
    if all(is_rotary):
      return found
    if isinstance(layer.index, int):
      return found if is_rotary[layer.index] else None
    is_rotary = jnp.asarray(is_rotary)[layer.index]
    cos, sin, *factors = found
    cos = jnp.where(is_rotary, cos, 1.0)
    return cos, jnp.where(is_rotary, sin, 0.0), *factors

  def run_blocks(
      self,
      params: PyTree,
      x: jax.Array,
      tables: PyTree,
      attend: Callable[..., tuple[jax.Array, object]],
      recur: delta.RecurFn,
      inputs_Nx: jax.Array | None = None,
      routes_Nx: jax.Array | None = None,
  ) -> tuple[jax.Array, PyTree, PyTree]:
    """Returns the stream [..., D], the mixers' outputs, and tokens' experts.

    With decode params, the outputs are a list over layers, otherwise None. The
    experts are a list over layers, or otherwise [N, ..., A] for the N layers
    with experts; None without any.

    Args:
      x: [..., D].
      tables: rotary tables by window.
      attend: `layers.AttendFn` with the layer as `layer`; keys and values of a
        shared layer are of its source.
      recur: function that runs layers with a state.
      inputs_Nx: [N, ..., P], results of `Decoder.layer_inputs`.
      routes_Nx: [N, ..., A], experts to use; None lets the routers choose.
    """

    sources = self.config.kv_sources
    shared = sources[self.config.num_own_layers :]
    is_source = [n in shared for n in range(self.config.num_layers)]
    stored = {}  # Keys and values of a source.

    def run(
        x: jax.Array,
        layer: _Layer,
        layer_params: PyTree,
        extras: dict[str, jax.Array],
    ) -> tuple[jax.Array, PyTree, PyTree, tuple[jax.Array, ...]]:
      source, pair = sources[layer.like], ()

      def attend_n(q, k, v, sinks):
        nonlocal pair
        if k is None:
          out, _ = attend(q, *stored[source], sinks, layer=layer)
          return out, {}
        if is_source[layer.like]:
          pair = k, v
        return attend(q, k, v, sinks, layer=layer)

      block = self.block(layer.like, layer_params)
      x, kept, chosen = block(
          x,
          self.tables_of(layer, tables),
          attend_n,
          layer.index,
          extras.get("mlp"),
          recur,
          extras.get("layer_input"),
      )
      return x, kept, chosen, pair

    # By the names of params: like these, they may exist in some layers only.
    extras = {"mlp": routes_Nx, "layer_input": inputs_Nx}
    extras = {name: x for name, x in extras.items() if x is not None}
    if isinstance(params, DecodeParams):
      # Unrolled like decode steps: a scan would need stacked params.
      kept, chosen = [], []
      for n, layer_params in enumerate(params.layers):
        own = {name: x[n] for name, x in extras.items()}
        x, kept_n, chosen_n, stored[n] = run(x, _Layer(n, n), layer_params, own)
        kept.append(kept_n)
        chosen.append(chosen_n)
      return x, kept, chosen
    parts, dtype = sequence.current_split(), x.dtype
    # The stream before each layer is saved too, see `products.keep`.
    stream = jnp.float32 if parts.platform == "cpu" else dtype

    def step(like, x, layer):
      n, *others = layer
      x, _, *kept = run(x.astype(dtype), _Layer(n, like), *others)
      return parts.place(x.astype(stream), "batch", "length"), tuple(kept)

    def run_segment(x, segment):
      start, period = segment.start, segment.period
      step_of = lambda place: _remat_layer(
          functools.partial(step, start + place),
          self.remat,
          parts.platform,
          segment.count > 1,
      )

      def steps(x, layers):
        first, period_params, extras = layers
        chosen = []
        for place in range(period):
          pick = functools.partial(
              stacks.pick, self.config, segment=segment, place=place
          )
          layer = first + place, pick(period_params), pick(extras)
          x, (own, _) = step_of(place)(x, layer)
          if own is not None:
            chosen.append(own)
        return x, (jnp.stack(chosen) if chosen else None, ())

      run = steps if period > 1 else step_of(0)
      first = jnp.arange(start, segment.stop, period, dtype=jnp.int32)
      cut = functools.partial(stacks.cut, self.config, segment=segment)
      layers = first, cut(params["blocks"]), cut(extras)
      x, (chosen, pair) = jax.lax.scan(run, x, layers)
      stored[start] = [leaf[0] for leaf in pair]
      if chosen is not None and period > 1:
        chosen = chosen.reshape(-1, *chosen.shape[2:])
      return x, chosen

    x, chosen = x.astype(stream), []
    # A source is a segment of its own, whose keys and values leave the scan.
    for segment in stacks.segments([*zip(self.config.kinds, is_source)]):
      x, own = run_segment(x, segment)
      if own is not None:
        chosen.append(own)
    return x.astype(dtype), None, jnp.concatenate(chosen) if chosen else None

  def run_self(
      self, params: PyTree, tokens_BxL: jax.Array, mask_BxL: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Returns the stream [B, L, D] after all blocks.

    With decode params, also returns the prompt cache, see `cache.fill`.
    """
    module, parts = self.module(params), sequence.current_split()
    positions_BxL = attention.positions_of(mask_BxL)
    if isinstance(params, DecodeParams):
      tables = jax.tree.map(lambda x: x[positions_BxL], params.tables)
    else:
      tables = module.tables(positions_BxL)

    mask = mask_BxL.astype(bool)

    def attend_within(q, k, v, sinks, window):
      return kernels.attend_causal(
          self.config, parts, q, k, v, mask, window, sinks
      )

    def attend(q, k, v, sinks, layer: _Layer):
      out = self.by_window(layer, attend_within, q, k, v, sinks)
      return out, {"k": k, "v": v}

    recur = functools.partial(
        delta.over_rows, self.config, packed.whole(mask), False
    )
    x_BxLxD = module.embed_tokens(tokens_BxL, positions_BxL)
    inputs_Nx = module.layer_inputs(tokens_BxL, x_BxLxD)
    x_BxLxD, kept, chosen = self.run_blocks(
        params, x_BxLxD, tables, attend, recur, inputs_Nx
    )
    if isinstance(params, DecodeParams):
      kept = [
          kv if routes is None else {**kv, "routes": routes}
          for kv, routes in zip(kept, chosen)
      ]
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
      token_indices_RxL: jax.Array | None = None,
      routes: types.Routes | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    module, parts = self.module(params), sequence.current_split()
    P, shape = prompt_tokens.shape[1], completion_tokens.shape
    rows = token_indices_RxL
    if rows is None:
      rows = packed.unpacked(prompt_mask, shape, parts.count)
    places = packed.places_of(rows, prompt_mask, shape)
    tables = module.tables(places.position)

    def attend_within(q, k, v, sinks, window):
      return kernels.attend_rows(
          self.config, parts, q, k, v, places, window, sinks
      )

    def attend(*inputs, layer: _Layer):
      return self.by_window(layer, attend_within, *inputs), None

    recur = functools.partial(delta.over_rows, self.config, places, True)
    inputs_RxL = packed.fed(rows, prompt_tokens, completion_tokens)
    # Each device looks up only its own tokens.
    inputs_RxL = parts.place(inputs_RxL, "batch", "length")
    x_RxLxD = module.embed_tokens(inputs_RxL, places.position)
    x_RxLxD = parts.place(x_RxLxD, "batch", "length")
    inputs_Nx = module.layer_inputs(inputs_RxL, x_RxLxD)
    if inputs_Nx is not None:
      inputs_Nx = parts.place(inputs_Nx, None, "batch", "length")
    routes_NxRxLxA = None
    if routes is not None:
      fed = packed.fed(rows, routes.prompts, routes.completions)
      routes_NxRxLxA = jnp.moveaxis(fed, 2, 0)
    x_RxLxD, _, chosen_NxRxLxA = self.run_blocks(
        params, x_RxLxD, tables, attend, recur, inputs_Nx, routes_NxRxLxA
    )

    def predicting(x_RxLx: jax.Array) -> jax.Array:
      if token_indices_RxL is not None:
        return x_RxLx
      own = x_RxLx[:, P - 1 : P - 1 + shape[1] * shape[2]]
      return own.reshape(*shape, *x_RxLx.shape[2:])

    if chosen_NxRxLxA is None:
      return predicting(x_RxLxD), None
    return predicting(x_RxLxD), predicting(jnp.moveaxis(chosen_NxRxLxA, 0, 2))

  def unembed(self, params: PyTree, stream: jax.Array) -> jax.Array:
    return self.module(params).unembed(stream)

  def completion_logits(
      self, params: PyTree, *inputs: jax.Array | None
  ) -> jax.Array:
    return self.unembed(params, self.completion_stream(params, *inputs))

  def decode_params(self, params: PyTree, num_positions: int) -> DecodeParams:
    dtype = jnp.dtype(self.config.compute_dtype)
    # Matrices are cast once, instead of at every token. Norms are computed in
    # float32 from weights in their own dtype.
    cast = lambda x: x.astype(dtype, copy=False) if x.ndim > 1 else x
    layer = lambda n: jax.tree.map(
        cast, stacks.layer(self.config, params["blocks"], n)
    )
    others = {name: x for name, x in params.items() if name != "blocks"}
    # Each step looks these up: otherwise the compiler would recompute the
    # cosines for every head of every layer. Computed eagerly, even when traced,
    # so that host and devices give the same bits.
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
            quantized.quantize_tree(
                layer, {name: self.num_outs["blocks"][name] for name in layer}
            )
            for layer in decode_params.layers
        ],
        others=others,
    )

  @functools.cached_property
  def num_outs(self) -> PyTree:
    """Number of output axes of each quantized decode param, 0 for others."""

    def count(path: Any, axes: tuple[str, ...]) -> int:
      names = tuple(entry.key for entry in path)
      own = axes[1:] if names[0] == "blocks" else axes
      is_tied = names[0] == "embed" and self.config.tie_embeddings
      is_expert = own[:1] == ("experts",) and len(own) == 3
      # Decode steps use `kv_b` in other products.
      if names[-1] == "kernel" and own[-1] != "latent" or is_tied or is_expert:
        return quantized.num_out(own)
      return 0

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
    attend, recur = cache_lib.attend, delta.step
    if kernel != "plain":
      attend = functools.partial(ragged_attention.attend, kernel)
    x_RxD, cache = self._run_cached(
        (attend, recur),
        decode_params,
        tokens,
        positions,
        cache,
        cache_mask,
        write_index,
    )
    return self.module(decode_params).unembed(x_RxD), cache

  def feed(self, decode_params: DecodeParams, *inputs: PyTree) -> PyTree:
    fns = cache_lib.attend_many, delta.steps
    _, cache = self._run_cached(fns, decode_params, *inputs)
    return cache

  def _run_cached(
      self,
      fns: tuple[Callable[..., tuple[jax.Array, PyTree]], delta.RecurFn],
      decode_params: DecodeParams,
      tokens: jax.Array,
      positions: jax.Array,
      cache: PyTree,
      cache_mask: jax.Array,
      write_index: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the stream after all blocks, and the cache with new columns.

    `fns` run layers with a KV cache and those with a state.
    """
    attend_fn, recur_fn = fns
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
    inputs_Nx = module.layer_inputs(tokens, x)
    updates = [updates[window] for window in self.config.windows]
    sources = self.config.kv_sources
    is_fed = cache_lib.writes(updates[0])
    for n, layer_params in enumerate(decode_params.layers):
      layer = [b["layers"][n] for b in cache]
      # The columns of a source may still have to be written.
      read = layer if sources[n] == n else layers[sources[n]]
      attend = functools.partial(attend_fn, read, updates[n])
      recur = functools.partial(
          cache_lib.recur, self.config, layer, is_fed, recur_fn
      )
      block = self.block(n, layer_params)
      own = self.tables_of(_Layer(n, n), tables)
      own_input = None if inputs_Nx is None else inputs_Nx[n]
      x, written, chosen = block(
          *(x, own, attend, n, None, recur, own_input), absorbs=True
      )
      layers.append(written if sources[n] == n else layer)
      routes.append(chosen)
    x, layers = cache_lib.write_columns(x, layers, updates)
    layers = list(map(cache_lib.put_routes, layers, updates, routes))
    cache = [
        {**block, "layers": [layer[b] for layer in layers]}
        for b, block in enumerate(cache)
    ]
    return x, cache


def make_model(
    model_config: ModelConfig, *, scalar: bool = False, remat: str = "none"
) -> Model:
  """Returns the model of a shape.

  Args:
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
