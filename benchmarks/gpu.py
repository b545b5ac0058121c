# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy and speed of this package's programs on the first GPU.

    python -m benchmarks gpu [PART …]

runs the named parts (default: all) and prints results to standard error as they
arrive:

- peers: Hugging Face's `generate` and PyTorch's gradient on the first rows of
  `DECODE` and `STEPS`, if PyTorch is installed;
- limits: FLOP/s of bfloat16 products [8192, 8192], and bytes read and written
  per second in a pass over 4 GiB;
- values: relative error (norm of the difference) of attention and its gradients
  versus plain float32 attention, by cuDNN for `ATTENTION` and in packed rows
  for `ROWS`; plain attention in bfloat16 shows the error of rounding alone;
- decode: decode steps of `DECODE`, versus the time to read weights and cache at
  the speed of `limits`;
- step: train steps of `STEPS`, versus their minimum FLOP
  (`long_completions.ideal`).

Models have published shapes and random weights; nothing is downloaded.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import gc
import importlib.util
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import decode
from benchmarks import long_completions
from benchmarks import long_tail
from benchmarks import peer_model
from benchmarks import real_speed
from benchmarks import slices
from benchmarks import train_step
from tba_jax import types
from tba_jax.config import settings
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.kernels import gpu_rows
from tba_jax.models.kernels import kernels
from tba_jax.models.net import attention
from tba_jax.models.net import packed
from tba_jax.models.net import transformer
from tba_jax.system import accelerators
from tba_jax.tools import memory_model

_GSM8K, _LARGE = "microsoft/rho-math-1b-v0.1", "Qwen/Qwen3-8B"
# Sequences, tokens before the queries, queries, key-value heads, query heads
# per key-value head, head width and window.
ATTENTION = (
    (2, 64, 63, 2, 4, 64, 0),
    (2, 64, 64, 2, 4, 64, 0),
    (3, 0, 128, 4, 1, 128, 0),
    (2, 100, 37, 1, 8, 128, 0),
    (2, 64, 64, 2, 2, 64, 40),
    (2, 64, 64, 1, 4, 256, 0),
    (2, 64, 33, 2, 4, 80, 0),
    (1, 512, 512, 8, 4, 128, 0),
)
# Mean and maximum tokens of a completion in packed rows, key-value heads, query
# heads per key-value head, head width and window.
ROWS = (
    (60, 200, 2, 7, 64, 0),
    (300, 1024, 2, 4, 128, 0),
    (60, 200, 2, 4, 64, 100),
    (60, 200, 1, 4, 256, 0),
    (60, 200, 2, 4, 80, 0),
)
# Model, prompts, completions per prompt, tokens of a prompt and a completion.
DECODE = (
    (_GSM8K, 3, 24, 256, 512),
    (_GSM8K, 32, 8, 256, 512),
    (_LARGE, 8, 8, 512, 512),
)
# Model, prompts per step and per micro-batch, completions per prompt, tokens of
# a prompt and of a completion.
STEPS = ((_GSM8K, 7, 1, 20, 256, 512), (_GSM8K, 8, 4, 20, 256, 512))


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  product_size: rows and columns of a product.
  copied: float32 numbers in a pass over memory.
  attention, rows, decode, steps: rows of `ATTENTION`, `ROWS`, `DECODE` and
    `STEPS`.
  runs: number of runs of each, of which the fastest counts.
  shape: changes to the shape of every model.
  """

  product_size: int = 8192
  copied: int = 1 << 30
  attention: Sequence[Sequence[int]] = ATTENTION
  rows: Sequence[Sequence[int]] = ROWS
  decode: Sequence[tuple[str, int, int, int, int]] = DECODE
  steps: Sequence[tuple[str, int, int, int, int, int]] = STEPS
  runs: int = 3
  shape: Any = dataclasses.field(default_factory=dict)


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns the device, the JAX version, and the rows of each part.

  Raises:
    RuntimeError: a peer failed; the message has the end of its output.
    ValueError: an operand does not name a part.
  """
  del config
  parts = list(operands) or list(PARTS)
  if wrong := set(parts) - set(PARTS):
    raise ValueError(
        f"operand {wrong.pop()}: must be one of {', '.join(PARTS)}"
    )
  accelerators.prepare()
  out = {}
  for name, part in PARTS.items():
    if name not in parts:
      continue
    out[name] = []
    for row in part(work):
      out[name].append(row)
      print(json.dumps({"part": name, **row}), file=sys.stderr, flush=True)
  return {
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      **out,
  }


def _limits(work: Work):
  n = work.product_size
  x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  product_s = _best_s(jax.jit(lambda x, y: x @ y), (x, x + 1), 10)
  x = jnp.zeros(work.copied, jnp.float32)
  pass_s = _best_s(jax.jit(lambda x: x + 1), (x,), 10)
  yield {
      "product_flops_per_s": 2 * n**3 / product_s,
      "memory_bytes_per_s": 2 * x.nbytes / pass_s,
  }


def _values(work: Work):
  for row in work.attention:
    N, before, Q, G, M, Dh, window = row
    S = before + Q
    shapes = (N, Q, G, M, Dh), (N, S, G, Dh), (N, S, G, Dh)
    mask = jnp.arange(S)[None] >= 7 * jnp.arange(N)[:, None]
    seen = attention.sees(before + jnp.arange(Q), jnp.arange(S), window)
    errors = _errors(
        shapes,
        mask[:, before:],
        seen[None] & mask[:, None],
        functools.partial(kernels.cudnn, mask=mask, window=window),
    )
    yield {"row": row, **errors}
  for row in work.rows:
    mean, longest, G, M, Dh, window = row
    prompt_mask, lengths, packed_rows = long_tail.make_batch(mean, longest, 1)
    places = packed.places_of(
        jnp.asarray(packed_rows.token_indices[:2, 0]),
        jnp.asarray(prompt_mask),
        (*lengths.shape, longest),
    )
    R, L = places.group.shape
    errors = _errors(
        ((R, L, G, M, Dh), (R, L, G, Dh), (R, L, G, Dh)),
        places.group >= 0,
        packed.sees(places, places, window),
        functools.partial(gpu_rows.attend, places=places, window=window),
    )
    yield {"packed_row": row, **errors}


def _errors(
    shapes: Sequence[tuple[int, ...]],
    is_real: jax.Array,
    seen: jax.Array,
    kernel: Callable[..., jax.Array],
) -> dict[str, list[float]]:
  """Returns the errors of a result and its gradients, by method.

  Args:
    shapes: dimensions of queries, keys and values.
    is_real: [N, Q], queries that have a token.
    seen: [N, Q, S], keys that each query sees.
    kernel: attention function of these arrays.
  """
  keys = jax.random.split(jax.random.key(1), 4)
  *qkv, gradient = map(jax.random.normal, keys, (*shapes, shapes[0]))
  is_real = is_real[..., None, None, None]
  plain = lambda q, k, v: attention.attend_self(q, k, v, seen)

  def all_of(attend, dtype):
    def fn(gradient, *qkv):
      out, vjp = jax.vjp(attend, *qkv)
      return jnp.where(is_real, out, 0), *vjp(gradient)

    inputs = jnp.where(is_real, gradient, 0), *qkv
    return jax.jit(fn)(*(x.astype(dtype) for x in inputs))

  with jax.default_matmul_precision("highest"):
    expected = all_of(plain, jnp.float32)
  return {
      name: [
          _relative(x, y)
          for x, y in zip(all_of(attend, jnp.bfloat16), expected)
      ]
      for name, attend in (("kernel", kernel), ("plain", plain))
  }


def _relative(x: jax.Array, expected: jax.Array) -> float:
  """Returns the norm of the difference over the norm of `expected`."""
  x, expected = (np.asarray(a, np.float64) for a in (x, expected))
  return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


def _decode(work: Work):
  (limits,) = _limits(work)
  for row in work.decode:
    name, B, K, P, T = row
    shape = _shape(name, work)
    params = _random_params(shape, "bfloat16")
    ours = decode.make_ours(
        transformer.make_model(shape),
        params,
        decode.Work(
            prompts=B, completions=K, prompt_tokens=P, completion_tokens=T
        ),
    )
    least = lambda tokens, ours=ours: min(
        ours(tokens) for _ in range(work.runs)
    )
    least(T)
    whole_s, first_s = least(T), least(1)
    step_s = (whole_s - first_s) / (T - 1)
    weights = memory_model.num_bytes(params)
    if not shape.tie_embeddings:
      weights -= 2 * shape.vocab_size * shape.width
    column = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    num_bytes = weights + column * (B * P + B * K * T / 2)
    yield {
        "row": row,
        "tokens_per_s": B * K * T / whole_s,
        "step_s": step_s,
        "weights_and_cache_bytes": num_bytes,
        "read_s": num_bytes / limits["memory_bytes_per_s"],
    }
    del params, ours, least
    gc.collect()


def _step(work: Work):
  (limits,) = _limits(work)
  for row in work.steps:
    name, num_prompts, micro_batch, K, P, T = row
    shape = _shape(name, work)
    c = settings.get_config()
    c.loss.name = "tb"
    c.model.compute_dtype = "bfloat16"
    c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens = P, T
    c.train.prompts_per_batch = num_prompts
    c.train.micro_batch_prompts = micro_batch
    c.train.completions_per_prompt = c.search.samples_per_prompt = K
    model = transformer.make_model(shape, remat=c.train.remat)
    batch = peer_model.make_batch((num_prompts, K, P, T), shape.vocab_size)
    params = _random_params(shape, "float32")
    update = train_step.Update(c, model, params, batch)
    del params
    step_s = update.time(1 + work.runs)
    # The minimum assumes one prompt per device.
    flops = num_prompts * long_completions.ideal(shape, c).flops
    stats = jax.devices()[0].memory_stats() or {}
    yield {
        "row": row,
        "step_s": step_s,
        "completion_tokens_per_s": num_prompts * K * T / step_s,
        "flops": flops,
        "flops_per_s": flops / step_s,
        "share_of_product": flops / step_s / limits["product_flops_per_s"],
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }
    del update
    gc.collect()


def _peers(work: Work):
  if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
    yield {"skipped": "torch or transformers is not installed"}
    return
  shapes = json.loads(slices.SHAPES.read_text())
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    path = pathlib.Path(folder, "config.json")
    name, *sizes = work.decode[0]
    path.write_text(json.dumps(shapes[name]))
    seconds = real_speed.run_peer(
        sys.executable, "generate", folder, "bfloat16", sizes, work.runs
    )
    B, K, _, T = sizes
    yield {"generate": work.decode[0], "tokens_per_s": B * K * T / seconds}
    name, _, micro_batch, K, P, T = work.steps[0]
    path.write_text(json.dumps(shapes[name]))
    sizes = micro_batch, K, P, T
    seconds = real_speed.run_peer(
        sys.executable, "gradient", folder, "bfloat16", sizes, work.runs
    )
    yield {
        "gradient": (name, *sizes),
        "completion_tokens_per_s": micro_batch * K * T / seconds,
    }


# Peers run first, because this process later occupies the GPU's memory.
PARTS = {
    "peers": _peers,
    "limits": _limits,
    "values": _values,
    "decode": _decode,
    "step": _step,
}


def _shape(name: str, work: Work) -> config_lib.ModelConfig:
  shape = hf_config.from_hf(json.loads(slices.SHAPES.read_text())[name])
  return dataclasses.replace(
      shape, param_dtype="float32", compute_dtype="bfloat16", **work.shape
  )


def _random_params(shape: config_lib.ModelConfig, dtype: str) -> types.PyTree:
  init = transformer.make_model(shape).init

  @jax.jit
  def draw():
    return jax.tree.map(lambda x: x.astype(dtype), init(jax.random.key(0)))

  return draw()


def _best_s(
    fn: Callable[..., jax.Array], args: Sequence[jax.Array], runs: int
) -> float:
  jax.block_until_ready(fn(*args))
  seconds = []
  for _ in range(runs):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    seconds.append(time.perf_counter() - start)
  return min(seconds)
