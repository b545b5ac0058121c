# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled train steps of an 8 B model on long completions.

    python -m benchmarks long_completions [DEVICES TOKENS REMAT MESH …]

compiles the train step of each row (default: `ROWS`) without the devices, and
prints it as Markdown to standard error. A MESH such as `fsdp=16,sequence=4`
splits params over both axes. The model has the shape of Qwen3-8B. A step is one
micro-batch: for each `fsdp` shard, a prompt of 1,024 tokens with 8 completions
of TOKENS. A row takes minutes on one core.

Figures are per device, next to lower bounds. The FLOP bound is 6 per weight and
token plus 12 per layer, head entry, query and visible key; a second one adds
the required recomputation.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import ml_collections

from benchmarks import slices
from tba_jax.config import settings
from tba_jax.models import config as config_lib
from tba_jax.tools import compile as compile_lib

_MODEL = "Qwen/Qwen3-8B"
_NUM_PROMPT, _NUM_COMPLETIONS = 1024, 8
# Devices, completion tokens, rematerialization and mesh of the trainer.
ROWS = (
    ("h200:8", "8192", "full", "fsdp=8"),
    ("h200:8", "8192", "dots", "sequence=8"),
    ("h200:8", "32768", "full", "fsdp=8"),
    ("h200:8", "32768", "full", "sequence=8"),
    ("h200:8", "32768", "dots", "sequence=8"),
)
_COLUMNS = (
    "devices", "tokens", "mesh", "remat", "held, GiB", "kept, GiB",
    "peak, GiB", "fits", "FLOP / ideal", "/ with recomputation",
    "received, GB (least)", "memory, GB", "arithmetic, s", "links, s",
    "kernels", "compiled in, s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ideal:
  """Lower bounds on the figures of a device.

  flops: FLOP of a step without recomputation.
  recomputed_flops: FLOP of a step that recomputes logits, attention scores and
    everything that `train.remat` does not keep.
  received_bytes: traffic from other devices: bfloat16 weights forward and
    backward, their gradients, and all-to-alls.
  """

  flops: float
  recomputed_flops: float
  received_bytes: float


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of each row, and prints them as Markdown."""
  del config
  rows = list(zip(*[iter(operands)] * 4, strict=True)) or ROWS
  out = []
  slices.print_row(_COLUMNS)
  slices.print_row(["---"] * len(_COLUMNS))
  with tempfile.TemporaryDirectory() as folder:
    shape = json.loads(slices.SHAPES.read_text())[_MODEL]
    pathlib.Path(folder, "config.json").write_text(json.dumps(shape))
    for devices, tokens, remat, mesh in rows:
      run_config = settings.get_config()
      run_config.init = folder
      set_row(run_config, int(tokens), remat, mesh)
      figures = _compile(run_config, devices)
      out.append({"row": [devices, tokens, remat, mesh], **figures})
      slices.print_row([devices, tokens, mesh, remat, *_cells(figures)])
  return {"rows": out}


def set_row(
    c: ml_collections.ConfigDict, num_tokens: int, remat: str, mesh: str
) -> None:
  """Sets the values of a row."""
  c.model.param_dtype, c.model.compute_dtype = "float32", "bfloat16"
  c.sampling.max_prompt_tokens = _NUM_PROMPT
  c.sampling.max_completion_tokens = num_tokens
  c.mesh.update(
      {
          name: int(size)
          for name, size in (part.split("=") for part in mesh.split(","))
      }
  )
  c.train.remat = remat
  c.train.completions_per_prompt = _NUM_COMPLETIONS
  c.search.samples_per_prompt = _NUM_COMPLETIONS
  num_prompts = c.mesh.data * c.mesh.fsdp
  c.train.prompts_per_batch = c.train.micro_batch_prompts = num_prompts


def ideal(shape: config_lib.ModelConfig, c: ml_collections.ConfigDict) -> Ideal:
  """Returns the lower bounds for a device in a train step of one micro-batch.

  All devices have equal parts; `tensor` is 1.
  """
  P, T = c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens
  K, S = c.train.completions_per_prompt, c.mesh.sequence
  L, D, Dh = shape.num_layers, shape.width, shape.head_dim
  H, G = shape.num_heads, shape.num_kv_heads
  layer = 2 * (H + G) * Dh * D + 3 * D * shape.mlp_width
  head, num_tokens = shape.vocab_size * D, P + K * T
  pairs = P * P / 2 + K * (P * T + T * T / 2)
  layers, heads = 2 * L * layer * num_tokens / S, 2 * head * K * T / S
  attention = 4 * L * H * Dh * pairs / S
  count = S * c.mesh.fsdp
  remote_share = lambda n: (n - 1) / n
  # Forward, recomputed and backward: queries, keys, values and results.
  swapped = 3 * L * 2 * (2 * H + 2 * G) * Dh * num_tokens / S * remote_share(S)
  recomputed = heads + attention / 2
  if c.train.remat == "full":
    # A layer's last product need not be recomputed.
    last = 2 * L * D * shape.mlp_width * num_tokens / S
    recomputed += layers - last + attention
  least = 3 * (layers + heads + attention)
  return Ideal(
      least,
      least + recomputed,
      6 * remote_share(count) * (L * layer + head) + swapped,
  )


def _compile(config: ml_collections.ConfigDict, devices: str) -> dict[str, Any]:
  """Returns the compiler's figures for a train step, and the lower bounds."""
  (_, chips), _ = compile_lib.devices_of(config, [devices])
  role = compile_lib.trainer(config, chips)
  memory = compile_lib.memory_model.trainer(
      config, compile_lib.sharding.make_mesh(config.mesh, chips)
  )
  program = role.programs["train_step"]
  other_bytes = sum(role.resident.values()) - program.argument_bytes
  compiled, _ = compile_lib.compile_program(program, other_bytes, chips[0])
  return {
      **dataclasses.asdict(compiled),
      "held": role.resident,
      "step": memory.step,
      "ideal": dataclasses.asdict(ideal(memory.model.config, config)),
  }


def _cells(figures: dict[str, Any]) -> list[str]:
  """Returns the cells that follow the settings in a row."""
  gib = lambda x: "" if x is None else f"{x / 2**30:.3g}"
  best = figures["ideal"]
  out = [
      gib(sum(figures["held"].values())),
      gib(figures["step"]["activations kept for them, at least"]),
      gib(figures["peak_bytes"]),
      "yes" if figures["fits"] else "no",
  ]
  if figures["flops"] is None:
    return out
  received = figures["collective_bytes"] / 1e9
  return [
      *out,
      f"{figures['flops'] / best['flops']:.2f}",
      f"{figures['flops'] / best['recomputed_flops']:.2f}",
      f"{received:.3g} ({best['received_bytes'] / 1e9:.3g})",
      f"{figures['memory_bytes'] / 1e9:.3g}",
      f"{figures['arithmetic_s']:.3g}",
      f"{figures['links_s']:.3g}",
      ", ".join(figures["kernels"]),
      f"{figures['compile_s']:.0f}",
  ]
