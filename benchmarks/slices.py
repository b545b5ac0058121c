# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled memory, traffic and FLOP of the paper configs on TPUs and GPUs.

    python -m benchmarks slices [CONFIG TRAINER_TARGET SEARCHER_TARGET …]

compiles each config (`--program=compile`; default: `ROWS`) without the devices,
and prints it as Markdown to standard error. Shapes come from
`tests/models/published_configs.json`; no weights are needed. The maximum
utilization assumes that arithmetic and communication overlap perfectly, so a
step takes the longer of both.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import ml_collections

_ROOT = pathlib.Path(__file__).parent.parent
SHAPES = _ROOT / "tests" / "models" / "published_configs.json"
# Config, devices of its trainer, and devices of a searcher.
ROWS = (
    ("gsm8k/tba.py:hardware=v5e-16", "v5e:4x4", "v5e:2x2"),
    ("gsm8k/tba.py:hardware=v6e-8", "v6e:2x4", "v6e:2x4"),
    ("tldr/tba.py:hardware=v5e-16", "v5e:4x4", "v5e:2x2"),
    ("tldr/async_rlhf.py:hardware=v5e-16", "v5e:4x4", "v5e:2x2"),
    ("red_team.py:model=llama,hardware=v5e-16", "v5e:4x4", "v5e:2x4"),
    ("math.py:hardware=v5e-64", "v5e:8x8", "v5e:2x4"),
    ("no_robots.py:hardware=v5p-16", "v5p:2x2x2", "v5p:2x2x1"),
    ("gsm8k/tba.py:hardware=4xa100", "a100:4", "a100:4"),
    ("gsm8k/async_rlhf.py:hardware=4xa100", "a100:4", "a100:4"),
    ("gsm8k/async_rlhf.py:method=ppo,hardware=4xa100", "a100:4", "a100:4"),
    ("tldr/tba.py:hardware=4xa100", "a100:4", "a100:4"),
    ("tldr/async_rlhf.py:hardware=4xa100", "a100:4", "a100:4"),
    ("red_team.py:hardware=4xa100", "a100:4", "a100:4"),
    ("red_team.py:model=llama,hardware=8xh100", "h100:8", "h100:8"),
    ("math.py:hardware=8xh100", "h100:8", "h100:8"),
    ("no_robots.py:hardware=8xh100", "h100:8", "h100:8"),
)
# Model -> published model with its shape, and differences in its config.
_SAME = {
    "realtreetune/rho-1b-sft-GSM8K": ("microsoft/rho-math-1b-v0.1", {}),
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": (
        "EleutherAI/pythia-6.9b-deduped",
        {"architectures": ["GPTNeoXForSequenceClassification"],
         "num_labels": 1},
    ),
}  # fmt: skip
_COLUMNS = (
    "config", "devices", "params", "train step, GB", "decoding, GB", "fits",
    "received, GB", "arithmetic, s", "links, s", "HFU at most",
)  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of each row, and prints them as Markdown."""
  del config
  rows = list(zip(*[iter(operands)] * 3, strict=True)) or ROWS
  out = {}
  print_row(_COLUMNS)
  print_row(["---"] * len(_COLUMNS))
  with tempfile.TemporaryDirectory() as cache:
    make_hub(pathlib.Path(cache))
    for name, *slices in rows:
      out[name] = figures = _compile(name, slices, cache)
      print_row([f"`{name}`", *_cells(figures)])
  return {"rows": out}


def make_hub(cache: pathlib.Path) -> None:
  """Creates a hub cache with only the published shapes."""
  shapes = json.loads(SHAPES.read_text())
  shapes |= {
      name: shapes[other] | changes for name, (other, changes) in _SAME.items()
  }
  for name, shape in shapes.items():
    folder = cache / f"models--{name.replace('/', '--')}"
    for path, content in (
        ("refs/main", "0" * 40),
        (f"snapshots/{'0' * 40}/config.json", json.dumps(shape)),
    ):
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      (folder / path).write_text(content)


def _compile(name: str, slices: Sequence[str], cache: str) -> dict[str, Any]:
  """Returns the content of a config's compile.json; {} if it is refused."""
  with tempfile.TemporaryDirectory() as workdir:
    subprocess.run(
        [
            *(sys.executable, "-m", "tba_jax.main", "--program=compile"),
            *(f"--config={_ROOT / 'configs' / name}", f"--workdir={workdir}"),
            *slices,
        ],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    path = pathlib.Path(workdir, "compile.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _cells(figures: dict[str, Any]) -> list[str]:
  """Returns the cells that follow the config's name in a row."""
  if not figures:
    return ["refused"] * (len(_COLUMNS) - 1)
  programs = figures["programs"]
  step, chunk = programs["train_step"], programs["decode_chunk"]
  failed = [name for name, program in programs.items() if not program["fits"]]
  shown = lambda value, form=".3g", unit=1.0: (
      "" if value is None else f"{value / unit:{form}}"
  )
  arithmetic_s, links_s = step["arithmetic_s"], step["links_s"]
  return [
      ", ".join(figures["topology"].values()),
      f"{figures['model']['params'] / 1e9:.2f} B",
      shown(step["peak_bytes"], unit=2**30),
      shown(chunk["peak_bytes"], unit=2**30),
      f"no: {', '.join(failed)}" if failed else "yes",
      shown(step["collective_bytes"], unit=1e9),
      shown(arithmetic_s),
      shown(links_s),
      shown(
          arithmetic_s and arithmetic_s / max(arithmetic_s, links_s), form=".0%"
      ),
  ]


def print_row(cells: Sequence[str]) -> None:
  """Prints a row of Markdown to standard error."""
  print("|", " | ".join(cells), "|", file=sys.stderr, flush=True)
