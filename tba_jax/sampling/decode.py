# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: many completions of many prompts, decoded side by side.

R rows decode at the same time, each one completion. A prompt is prefilled once
and its keys and values are copied into the rows of its completions. Between
chunks of decode steps the rows that ended take the next completions of the
queue, so a long completion does not hold up the others. When none is left, the
last completions go on in half the rows, and then in a quarter.

    prompts → prefill [B, P] → first tokens → R rows → chunk of steps ┐
                                               ▲                      │
                                               └── rows that ended ◄──┘

The host (`flight.py`) sees R flags per chunk; tokens come over when rows are
reused and at the end, and with stop strings after each chunk. All shapes are
fixed: each program (`rows.py`) compiles once, a prefill once a bucket, and that
of decode steps once for each number of cache blocks that it may read.

Randomness: the uniform number of a token is a pure function of (seed, prompt
id, visit, sample index, position), and no operation mixes rows. So a
completion, the bits of its log-probs included, does not depend on its batch
mates, its row, the chunks or the order of the requests.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import jax
import numpy as np

from tba_jax import types
from tba_jax.sampling import explore as explore_lib
from tba_jax.sampling import flight
from tba_jax.sampling import logits as logits_lib
from tba_jax.sampling import placement
from tba_jax.sampling import prefill as prefill_lib
from tba_jax.sampling import requests
from tba_jax.sampling import rows as rows_lib
from tba_jax.sampling import shrink

if TYPE_CHECKING:
  from tba_jax.models import build

# Rows per prompt of a prefill: with 16 completions a prompt, one prefill fills
# all rows.
_ROWS_PER_PREFILL = 16

Request = requests.Request


@dataclasses.dataclass(frozen=True)
class Programs:
  """The jitted programs for params that lie in one place.

  row_counts: R, and the fewer that rows may be cut down to.
  """

  empty_state: Callable[..., rows_lib.DecodeState]
  decode_params: Callable[[types.PyTree], types.PyTree]
  prefill: Callable[..., tuple[jax.Array, types.PyTree, jax.Array]]
  refill: Callable[..., rows_lib.DecodeState]
  decode_chunk: Callable[..., tuple[rows_lib.DecodeState, tuple[Any, ...]]]
  recompute: Callable[..., rows_lib.DecodeState]
  cut: Callable[..., tuple[rows_lib.DecodeState, jax.Array]]
  collect: Callable[..., tuple[jax.Array, ...]]
  take: Callable[..., rows_lib.DecodeState]
  row_counts: tuple[int, ...]


class Sampler:
  """Samples completions with a model whose params come with each call.

  One thread at a time may call it. `sample` is deterministic: the same params,
  settings, seed and requests give the same completions. With params
  on a mesh, rows are split over its data and fsdp axes, where they divide, and
  so are the heads of their caches over its tensor axis.
  """

  def __init__(
      self,
      model: "build.Model",
      *,
      temperature: float,
      top_k: int,
      top_p: float,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      num_rows: int,
      chunk_steps: int,
      eos_id: int | None,
      pad_id: int,
      seed: int,
      min_p: float = 0.0,
      stop_ids: Sequence[int] = (),
      stop_strings: Sequence[str] = (),
      text_fn: Callable[[Sequence[int]], str] | None = None,
      recompute_cache: bool = False,
      prompt_buckets: int = 1,
      explore: explore_lib.Explore = explore_lib.NONE,
  ):
    """Makes a sampler; nothing is compiled or allocated yet.

    Args:
      model: the model's pure functions.
      temperature: of token sampling; 0 is greedy.
      top_k: how many of the likeliest tokens to sample from; 0 is off.
      top_p: the probability that the tokens sampled from reach; 1 is off.
      max_prompt_tokens: P, what prompts are padded to.
      max_completion_tokens: T; a completion ends there, unstopped.
      num_rows: R, completions decoded at the same time.
      chunk_steps: decode steps between refills while completions wait.
      eos_id: the stop token; None decodes all completions to T tokens.
      pad_id: what fills a completion after its end.
      seed: of all random numbers of this sampler, in [0, 2^32), but those of a
        request that has its own.
      min_p: the least probability, as a share of the likeliest token's; 0 is
        off.
      stop_ids: other tokens that end a completion, beside eos_id.
      stop_strings: end a completion with the token at which its text holds one
        of them; they are looked for every `chunk_steps` tokens.
      text_fn: ids -> text; needed with stop strings.
      recompute_cache: whether newer params, swapped in under way, make the
        caches of the rows in flight again.
      prompt_buckets: number of lengths that prompts are padded to for their
        prefill: P, half of it, a quarter, …
      explore: what is drawn from instead of the model, as `sampling/explore.py`
        has it; nothing where it is greedy.

    Raises:
      ValueError: a setting is out of range.
    """
    logits_lib.check_settings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    requests.check_sizes(
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        num_rows=num_rows,
        chunk_steps=chunk_steps,
        prompt_buckets=prompt_buckets,
        max_positions=model.config.max_positions,
    )
    if not 0 <= seed < requests.UINT32:
      raise ValueError(f"seed={seed} of a sampler: allowed 0 to 2^32 - 1")
    self._model = model
    self._settings = rows_lib.Settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_rows=num_rows,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        pad_id=pad_id,
        min_p=min_p,
        stop_ids=tuple(sorted({*stop_ids, eos_id} - {None})),
        explore=explore if temperature else explore_lib.NONE,
    )
    self._host = flight.Settings(
        buckets=flight.bucket_lengths(max_prompt_tokens, prompt_buckets),
        prefill_size=max(1, num_rows // _ROWS_PER_PREFILL),
        chunk_steps=chunk_steps,
        seed=seed,
        stop_strings=tuple(stop_strings),
        text_fn=text_fn,
        recompute_cache=recompute_cache,
    )
    self._programs: dict[jax.sharding.Sharding, Programs] = {}

  def warm_up(self, params: types.PyTree) -> None:
    """Compiles everything, so that `sample` never does.

    Blocks until the programs have run once. Later params must have the same
    shapes, dtypes and devices.
    """
    requests_of_each_bucket = [
        Request(np.zeros(length, np.int32), length, 0, num_completions=1)
        for length in self._host.buckets
    ]
    self.sample(params, requests_of_each_bucket, version=0)
    self._flight(params, [], 0, None).warm_up()

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[Request],
      *,
      version: int,
      newer: flight.NewerFn | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt, in the order of `prompts`.

    Blocks until all are sampled. Compiles in the first call, if `warm_up` was
    not called.

    Args:
      params: of the model; host arrays are copied to the device once.
      prompts: any number of requests with any number of completions.
      version: of `params`, noted with every token.
      newer: called between chunks; the params it returns are gone on with, and
        must lie where `params` do. A token's log-prob is under the params that
        drew it, with the cache that they found or made again.

    Raises:
      ValueError: a request is empty, too long or out of range; the message
        names its prompt id.
    """
    for request in prompts:
      requests.check(
          request,
          max_prompt_tokens=self._settings.max_prompt_tokens,
          max_completion_tokens=self._settings.max_completion_tokens,
          vocab_size=self._model.config.vocab_size,
      )
    return self._flight(params, prompts, version, newer).run()

  def _flight(
      self,
      params: types.PyTree,
      prompts: Sequence[Request],
      version: int,
      newer: flight.NewerFn | None,
  ) -> flight.Flight:
    return flight.Flight(
        self._get_programs(placement.of_params(params)),
        self._settings,
        self._host,
        params,
        prompts,
        version=version,
        newer=newer,
    )

  def _get_programs(self, place: jax.sharding.Sharding) -> Programs:
    """Returns the programs for params at `place`; they compile when called."""
    if place not in self._programs:
      model, settings = self._model, self._settings
      bind = functools.partial
      num_positions = (
          settings.max_prompt_tokens + settings.max_completion_tokens
      )
      # Outputs are told where to lie: a program whose inputs lie where they did
      # before is not compiled again.
      empty_state = bind(rows_lib.empty_state, model.init_cache, settings)
      rows = placement.of_state(place, jax.eval_shape(empty_state))
      jit = functools.partial(jax.jit, out_shardings=place)
      rows_jit = functools.partial(jax.jit, out_shardings=rows)
      pair_jit = functools.partial(jax.jit, out_shardings=(rows, place))
      self._programs[place] = Programs(
          empty_state=rows_jit(empty_state),
          decode_params=jax.jit(
              bind(model.decode_params, num_positions=num_positions)
          ),
          prefill=jit(
              bind(
                  prefill_lib.prefill, model.prefill, settings.max_prompt_tokens
              )
          ),
          refill=rows_jit(
              bind(rows_lib.refill, model.fill_cache, settings),
              donate_argnums=0,
          ),
          decode_chunk=pair_jit(
              bind(rows_lib.decode_chunk, model.decode_step, settings),
              donate_argnums=1,
              static_argnums=4,
          ),
          recompute=rows_jit(
              bind(prefill_lib.recompute, model.prefill, model.fill_cache),
              donate_argnums=1,
          ),
          cut=pair_jit(rows_lib.cut, donate_argnums=0),
          collect=jit(bind(rows_lib.collect, settings)),
          take=rows_jit(shrink.take),
          row_counts=shrink.row_counts(place, settings.num_rows),
      )
    return self._programs[place]
