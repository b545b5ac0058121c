# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed of a searcher if a few completions are very long.

    python -m benchmarks long_tail_searcher [MEAN LONGEST]

Completions are cut off at lognormal lengths (`long_tail.py`), by default with
mean 128 and maximum 1,024. 32 slots decode 12 blocks of 4 prompts x 8
completions in two alternating modes: block after block, each until its longest
completion ends, and as a stream, in which a block joins while slots are free.
A stream's tokens count until its last block has joined, since a searcher's
stream has no end. `config.init` names the model; the default is a Llama of
25.7 M random params in float32.

With PyTorch and transformers installed, Hugging Face's `generate` samples
batches of 32 rows on the same cores. It decodes as many tokens as a block's
longest completion has on average; only tokens within each length count.

`idle` is the share of slot steps that decode nothing until the last block has
joined, measured in the run and simulated for `IDLE_LENGTHS`. The simulation
runs the sampler's bookkeeping on lengths alone.
"""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import sys
import tempfile
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import long_tail
from benchmarks import peer_model
from benchmarks import real_speed
from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tba_jax.sampling import decode
from tba_jax.sampling import slots

# (mean, longest) in tokens of what is simulated.
IDLE_LENGTHS = ((64, 512), (128, 1024), *long_tail.LENGTHS[1:])
_FIRST_ID, _LAST_ID = 3, 250


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  rows: number of slots.
  completions: number for each prompt.
  blocks: number of blocks of as many completions as slots.
  prompt_tokens: tokens of each prompt.
  chunk_steps: decode steps between two refills.
  model: shape of the model where the config names none.
  """

  rows: int = 32
  completions: int = 8
  blocks: int = 12
  prompt_tokens: int = 64
  chunk_steps: int = 8
  model: config_lib.ModelConfig = peer_model.SHAPE


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
    has_peer: bool = True,
) -> dict[str, Any]:
  """Returns tokens/s of blocks, stream and peer, their ratios, and idle shares.

  Args:
    config: only `init` is read.
    operands: mean and longest length (default 128 and 1,024).
    work: sizes of what is timed.
    has_peer: whether to time the peer if it is installed.

  Raises:
    ValueError: the operands are not lengths.
    RuntimeError: the peer failed.
  """
  mean, longest = (int(operand) for operand in operands or (128, 1024))
  shape, params = _load_model(config, work, longest)
  model, settings = transformer.make_model(shape), _settings(work, longest)
  blocks, lengths_PxS = _blocks(work, mean, longest)
  plain = decode.JaxSampler(model, settings)
  host, params = params, plain.put(params)
  plain.warm_up(params)
  sampler = CountedSampler(model, settings, lengths_PxS, plain.programs)
  lengths = lengths_PxS.reshape(work.blocks, work.rows)
  out = {
      "mean": mean,
      "longest": longest,
      "rows": work.rows,
      "mean_length": float(lengths.mean()),
      "longest_of_block": float(lengths.max(axis=1).mean()),
  }
  start = time.perf_counter()
  for block in blocks:
    sampler.sample(params, block, version=0)
  out["blocks_tokens_per_s"] = lengths.sum() / (time.perf_counter() - start)
  counts = stream(sampler, params, blocks)
  out["tokens_per_s"] = counts.num_tokens / counts.seconds
  out["ratio_to_blocks"] = out["tokens_per_s"] / out["blocks_tokens_per_s"]
  out["idle"] = counts.idle
  out["idle_simulated"] = {
      f"{m}/{n}": simulate(m, n, work) for m, n in IDLE_LENGTHS
  }
  if has_peer and importlib.util.find_spec("torch"):
    out["hf_tokens_per_s"] = (
        lengths.mean()
        * work.rows
        / _peer_s(shape, host, work, round(out["longest_of_block"]))
    )
    out["ratio_to_hf"] = out["tokens_per_s"] / out["hf_tokens_per_s"]
  return out


@dataclasses.dataclass
class Counts:
  """Work of a stream until its last block has joined.

  row_steps: slots times decode steps.
  num_decoded: slot steps that decoded a token.
  num_begun: completions, whose first token takes no decode step.
  seconds: elapsed time.
  """

  row_steps: int = 0
  num_decoded: int = 0
  num_begun: int = 0
  seconds: float = 0.0

  @property
  def idle(self) -> float:
    return 1 - self.num_decoded / self.row_steps

  @property
  def num_tokens(self) -> int:
    return self.num_decoded + self.num_begun


class _Counting:
  """Sampler programs that cut off completions and count tokens."""

  def __init__(
      self,
      programs: Any,
      num_rows: int,
      lengths_PxS: np.ndarray,
      counts: Counts,
  ):
    self._programs, self._counts = programs, counts
    self._lengths_PxS = lengths_PxS
    self._lengths_R = np.zeros(num_rows, np.int64)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._programs, name)

  def refill(
      self, state: Any, prefilled: Any, source_R: Any, ids_Rx4: Any, _: Any
  ) -> Any:
    self._lengths_R[source_R >= 0] = 1
    self._counts.num_begun += int((source_R >= 0).sum())
    limit_R = self._lengths_PxS[ids_Rx4[:, 1], ids_Rx4[:, 3]].astype(np.int32)
    return self._programs.refill(state, prefilled, source_R, ids_Rx4, limit_R)

  def decode_chunk(self, *args: Any) -> Any:
    state, (num_steps, ends) = self._programs.decode_chunk(*args)
    lengths_R = np.asarray(ends.lengths, np.int64)
    self._counts.row_steps += int(num_steps) * len(lengths_R)
    # Slots that were never in use have length 1.
    used_R = self._lengths_R > 0
    self._counts.num_decoded += int((lengths_R - self._lengths_R)[used_R].sum())
    self._lengths_R[used_R] = lengths_R[used_R]
    return state, (num_steps, ends)

  def take(self, state: Any, rows: np.ndarray) -> Any:
    self._lengths_R = self._lengths_R[rows]
    return self._programs.take(state, rows)


class CountedSampler(decode.JaxSampler):
  """Sampler of completions with given lengths that counts its work.

  counts: figures of the last call, by name.
  """

  def __init__(
      self,
      model: transformer.Model,
      settings: decode.Settings,
      lengths_PxS: np.ndarray,
      programs_of: Callable[[Any], Any],
  ):
    """Wraps a sampler, given lengths by prompt id and programs for params."""
    super().__init__(model, settings)
    self._lengths_PxS, self._programs_of = lengths_PxS, programs_of

  def programs(self, params: Any) -> Any:
    self.counts = Counts()
    return _Counting(
        self._programs_of(params),
        self.settings.num_rows,
        self._lengths_PxS,
        self.counts,
    )


def stream(
    sampler: CountedSampler,
    params: Any,
    blocks: Sequence[Sequence[decode.Request]],
) -> Counts:
  """Samples blocks as a stream; counts until the last has joined."""
  left = list(blocks)[::-1]
  counts = []
  start = time.perf_counter()

  def more() -> Sequence[decode.Request] | None:
    if left:
      return left.pop()
    if not counts:
      now = dataclasses.replace(sampler.counts)
      counts.append(
          dataclasses.replace(now, seconds=time.perf_counter() - start)
      )
    return None

  for _ in sampler.stream(params, more, version=0):
    pass
  return counts[0]


class _Simulated:
  """Sampler programs that only decode lengths.

  The state of R rows: lengths, limits and whether they are active, [R].
  """

  rows_per_prompt = num_row_shards = 1
  feed_lengths = ()

  def __init__(self, settings: decode.Settings):
    self._settings = settings
    self.segment_lengths = slots.segment_lengths(
        settings.max_prompt_tokens, settings.max_completion_tokens
    )

  def fewer_rows(self, num_rows: int) -> int:
    del num_rows
    return 0

  def empty_state(self) -> tuple[np.ndarray, ...]:
    R = self._settings.num_rows
    return np.ones(R, int), np.ones(R, int), np.zeros(R, bool)

  def prefill(self, *unused: Any) -> tuple[()]:
    return ()

  def refill(self, state, prefilled, source_R, ids_Rx4, limit_R):
    del prefilled, ids_Rx4
    lengths_R, limits_R, active_R = state
    new_R = source_R >= 0
    limits_R = np.where(new_R, limit_R, limits_R)
    active_R = np.where(new_R, limit_R > 1, active_R)
    return np.where(new_R, 1, lengths_R), limits_R, active_R

  def decode_chunk(self, params, state, num_steps, num_idle, num_segments):
    del params, num_segments
    lengths_R, limits_R, active_R = state
    left = np.sort((limits_R - lengths_R)[active_R])
    # The chunk ends once this many rows are idle.
    last = int(num_idle) - int((~active_R).sum())
    steps = int(num_steps) if last > 0 else 0
    if steps:
      steps = min(steps, int(left[last - 1]))
    lengths_R = lengths_R + np.where(active_R, steps, 0)
    lengths_R = np.minimum(lengths_R, np.maximum(limits_R, 1))
    active_R = active_R & (lengths_R < limits_R)
    ends = slots.Ends(~active_R, lengths_R, np.zeros_like(active_R))
    return (lengths_R, limits_R, active_R), (np.int32(steps), ends)

  def collect(self, state: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
    lengths_R, _, _ = state
    zeros = np.broadcast_to(
        0, (len(lengths_R), self._settings.max_completion_tokens)
    )
    stopped_R = np.zeros(len(lengths_R), bool)
    return zeros, zeros, None, lengths_R, stopped_R, None, None


def simulate(mean: int, longest: int, work: Work) -> float:
  """Returns the share of idle slots in a stream with such lengths."""
  shape = dataclasses.replace(
      work.model, max_positions=work.prompt_tokens + longest
  )
  settings = _settings(work, longest)
  blocks, lengths_PxS = _blocks(work, mean, longest)
  sampler = CountedSampler(
      transformer.make_model(shape),
      settings,
      lengths_PxS,
      lambda params: _Simulated(settings),
  )
  params = transformer.DecodeParams([], {}, {})
  return stream(sampler, params, blocks).idle


def _settings(work: Work, longest: int) -> decode.Settings:
  return decode.Settings(
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      max_prompt_tokens=work.prompt_tokens,
      max_completion_tokens=longest,
      num_rows=work.rows,
      chunk_steps=work.chunk_steps,
      stop_ids=(),
      pad_id=0,
      seed=0,
  )


def _blocks(
    work: Work, mean: int, longest: int
) -> tuple[list[list[decode.Request]], np.ndarray]:
  """Returns blocks of requests, and lengths by prompt id, [prompts, S]."""
  num_prompts = work.rows // work.completions
  lengths_PxS = long_tail.lognormal_lengths(
      mean, longest, (work.blocks * num_prompts, work.completions), seed=0
  )
  rng = np.random.default_rng(0)
  ids = _FIRST_ID, min(_LAST_ID, work.model.vocab_size)
  blocks = [
      [
          decode.Request(
              rng.integers(*ids, work.prompt_tokens),
              prompt_id=block * num_prompts + index,
              visit=0,
              num_completions=work.completions,
          )
          for index in range(num_prompts)
      ]
      for block in range(work.blocks)
  ]
  return blocks, lengths_PxS


def _load_model(
    config: ml_collections.ConfigDict, work: Work, longest: int
) -> tuple[config_lib.ModelConfig, types.PyTree]:
  if config.init not in ("scratch", "sft"):
    shape, params = hf.load(config.init)
    return shape, params
  shape = dataclasses.replace(
      work.model,
      max_positions=max(work.model.max_positions, work.prompt_tokens + longest),
  )
  return shape, jax.jit(transformer.make_model(shape).init)(jax.random.key(0))


def _peer_s(
    shape: config_lib.ModelConfig,
    params: types.PyTree,
    work: Work,
    longest: int,
) -> float:
  """Returns the seconds in which the peer samples a batch."""
  sizes = (
      work.rows // work.completions,
      work.completions,
      work.prompt_tokens,
      longest,
  )
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    hf.save(folder, shape, params)
    return real_speed.run_peer(
        sys.executable, "generate", folder, "float32", sizes, runs=1
    )
