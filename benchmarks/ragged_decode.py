# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory traffic of a decode step with rows of mixed lengths.

    python -m benchmarks ragged_decode [DEVICES TENSOR …]

compiles a searcher's decode steps with plain attention and with the kernel
(`models/kernels/ragged_attention.py`) for each row (default: `ROWS`), and
prints it as Markdown to standard error. The model has the shape of Llama 3.2
1B. Slot r of 64 is filled to (r / 64)³ of 512 + 2,048 tokens, a quarter on
average; prompt and completion lengths are combined independently.

Figures are per device: weights, keys and values of present tokens, traffic
outside the layers (mostly logits), and traffic of the layers besides their
weights. The difference between compiled models of four and two layers, times
eight, gives 16 layers. The compiler cannot count the pages that a kernel reads,
so these come from the kernel's grid. Nothing runs, so times are unknown.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import slices
from tba_jax.config import settings
from tba_jax.models.kernels import ragged_attention
from tba_jax.tools import compile as compile_lib

_MODEL = "meta-llama/Llama-3.2-1B"
_NUM_ROWS, _NUM_PROMPT, _NUM_TOKENS = 64, 512, 2048
# Devices, and size of the mesh axis that splits the heads.
ROWS = (("v5e:2x2", "1"), ("h100:1", "1"))
_COLUMNS = (
    "devices", "tensor", "weights, GB", "live tokens, GB", "outside, GB",
    "plain, GB", "/ live", "kernel, GB", "/ live", "its pages / live",
)  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of each row, and prints them as Markdown."""
  del config
  rows = list(zip(*[iter(operands)] * 2, strict=True)) or ROWS
  out = []
  slices.print_row(_COLUMNS)
  slices.print_row(["---"] * len(_COLUMNS))
  with tempfile.TemporaryDirectory() as folder:
    for devices, tensor in rows:
      figures = _measure(folder, devices, int(tensor))
      out.append({"row": [devices, tensor], **figures})
      gb = {name: f"{value / 1e9:.2f}" for name, value in figures.items()}
      times = {
          name: f"{figures[name] / figures['live']:.2f}"
          for name in ("plain", "kernel", "pages")
      }
      slices.print_row([
          *(devices, tensor, gb["weights"], gb["live"], gb["outside"]),
          *(gb["plain"], times["plain"], gb["kernel"], times["kernel"]),
          times["pages"],
      ])  # fmt: skip
  return {"rows": out}


def spans(
    num_rows: int, lengths: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns the columns of prompts and of completions that each row sees."""
  share = ((1 + np.arange(num_rows)) / num_rows) ** 3
  prompt, completion = (np.ceil(C * share).astype(int) for C in lengths)
  prompt = np.random.default_rng(0).permutation(prompt)
  P = lengths[0]
  return [
      (P - prompt, np.full(num_rows, P)),
      (np.zeros_like(completion), completion),
  ]


def _measure(folder: str, devices: str, tensor: int) -> dict[str, float]:
  """Returns the bytes that a device touches in a step, by purpose."""
  shape = json.loads(slices.SHAPES.read_text())[_MODEL]
  num_layers, depths, results_of = shape["num_hidden_layers"], (2, 4), {}
  for depth in depths:
    shape["num_hidden_layers"] = depth
    pathlib.Path(folder, "config.json").write_text(json.dumps(shape))
    for attention in ("plain", "auto"):
      memory, chips, step = _searcher(folder, devices, tensor, attention)
      costs, _ = compile_lib.compile_program(step, 0, chips[0])
      if costs.memory_bytes is None:
        raise ValueError(costs.error)
      results_of[attention, depth] = costs.memory_bytes - costs.cache_bytes
    if not costs.cache_bytes:
      raise ValueError(f"{devices}: decode steps have no kernel")
  layer = {
      name: (results_of[name, 4] - results_of[name, 2]) / 2
      for name in ("plain", "auto")
  }
  c, num_bytes = memory.model.config, compile_lib.memory_model.num_bytes
  weights = num_bytes(memory.decode_params.layers[0])
  other_params = dict(memory.decode_params.others)
  if not c.tie_embeddings:
    # A step reads only its tokens' rows of the embedding.
    del other_params["embed"]
  lengths = _NUM_PROMPT, _NUM_TOKENS
  rows = spans(_NUM_ROWS, lengths)
  column = c.num_kv_heads // tensor * c.head_dim * 2
  kernel = "pages" if chips[0].platform == "tpu" else "splits"
  read = ragged_attention.num_read(kernel, lengths, rows, column)
  live = sum(int((end - start).sum()) for start, end in rows)
  layer_bytes = 2 * num_layers * column
  outside = results_of["auto", 2] - 2 * layer["auto"] - num_bytes(other_params)
  return {
      "weights": num_layers * weights + num_bytes(other_params),
      "live": live * layer_bytes,
      "outside": outside,
      "plain": num_layers * (layer["plain"] - weights),
      "kernel": num_layers * (layer["auto"] - weights) + read * layer_bytes,
      "pages": read * layer_bytes,
  }


def _searcher(
    folder: str, devices: str, tensor: int, attention: str
) -> tuple[Any, Sequence[jax.Device], compile_lib.Program]:
  """Returns a searcher's arrays, devices and decode steps."""
  c = settings.get_config()
  c.init = folder
  c.model.attention, c.model.compute_dtype = attention, "bfloat16"
  c.search.mesh.tensor = tensor
  c.sampling.num_slots = _NUM_ROWS
  c.sampling.max_prompt_tokens = _NUM_PROMPT
  c.sampling.max_completion_tokens = _NUM_TOKENS
  # Completions wait for rows, so rows have mixed lengths.
  c.search.samples_per_prompt = 2 * _NUM_ROWS
  _, (_, chips) = compile_lib.devices_of(c, [devices])
  mesh = compile_lib.sharding.make_mesh(
      compile_lib.memory_model.searcher_sizes(c), chips
  )
  memory = compile_lib.memory_model.searcher(c, mesh)
  lower = functools.partial(
      memory.programs.decode_chunk.lower,
      memory.decode_params,
      memory.programs.abstract_state,
      np.int32(memory.settings.chunk_steps),
      np.int32(_NUM_ROWS),
      memory.programs.num_segments,
  )
  return memory, chips, compile_lib.Program(lower, 0, "")
