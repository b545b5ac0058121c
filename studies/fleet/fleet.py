# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run with searchers of several kinds, compared with equal searchers.

    TBA_JAX_PEER_PYTHON=.venv/peers/vllm/bin/python \\
        python -m studies fleet [SEED,… [same] [mixed]]

`same` has three float32 searchers; `mixed` a float32 one, an int8 one, and one
that decodes with a vLLM server (its interpreter is `TBA_JAX_PEER_PYTHON`). All
learn to guess numbers through an agent, a program that calls Anthropic's
Messages (`agent.py`), from one fine-tuned policy. In `mixed` every searcher and
the vLLM server are killed once and started again. Runs are in runs/fleet.
"""

from collections.abc import Sequence
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any
import urllib.error
import urllib.request

import ml_collections

from benchmarks import results
from studies.fleet import agent
from tba_jax.sampling import vllm
from tba_jax.system import jsonl

RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "fleet"
_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "guess.py"
SETTINGS = ("same", "mixed")
_NUM_STEPS = 50
# Steps after which a process is killed.
_KILLS = {"searcher": 8, "int8": 14, "vllm": 20, "server": 26}
# Prices per hour, of a rented machine's order.
_PRICES = {"float32": 2.0, "int8": 1.0, "vllm": 3.0}
_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
_START_S = 600.0
_RUN_S = 3600.0
_ENDS = {
    "mean_reward": ("reward", 3),
    "pass_at_1": ("found", 3),
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and kinds.md into the folder.

  Args:
    config: unused; the runs have their own.
    operands: seeds separated by commas (default 0), and names of `SETTINGS`.

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.

  Raises:
    RuntimeError: a run failed.
  """
  del config
  seeds, names = results.parse(operands, SETTINGS)
  results.measure(seeds, names, RESULTS, _train)
  rows = results.read(SETTINGS, RESULTS)
  table = [["searchers", "seeds", *(title for title, _ in _ENDS.values())]]
  for name in SETTINGS:
    if own := results.of_name(rows, name):
      values = [
          results.mean_and_range([r[key][-1] for r in own], digits)
          for key, (_, digits) in _ENDS.items()
      ]
      table.append([name, str(len(own)), *values])
  results.print_table(table, RESULTS / "table.md")
  kinds = [["seed", "kind", "completions", "tokens", "seconds", "price"]]
  for row in results.of_name(rows, "mixed"):
    for kind, amounts in sorted(row["sampled_by"].items()):
      units = ("completions", "tokens", "wall_s")
      numbers = [f"{amounts[unit]:,.0f}" for unit in units]
      kinds.append([str(row["seed"]), kind, *numbers, f"{amounts['cost']:.2f}"])
  results.print_table(kinds, RESULTS / "kinds.md")
  return results.summarize(rows, _ENDS, RESULTS)


def _train(name: str, seed: int) -> dict[str, Any]:
  """Returns the evaluations of a run, and what each kind sampled."""
  workdir = _RUNS / f"{name}-seed{seed}"
  with contextlib.ExitStack() as closing:
    train = _program("train", workdir, _overrides(name, seed))
    closing.callback(_end, train)
    if name == "mixed":
      _add_others(train, workdir, closing)
    status = train.wait(_RUN_S)
  if status:
    raise RuntimeError(f"{workdir}: status {status}")
  summary = jsonl.read_json(workdir / "summary.json")
  history = jsonl.read_json(workdir / "eval.json")["history"]
  return {
      "steps": [row["step"] for row in history],
      **{key: [row[key] for row in history] for key in _ENDS},
      "ledger_closed": [summary["ledger_closed"]],
      "restarts": summary["restarts"],
      "lost": summary["lost"],
      "sampled_by": summary["sampled_by"],
      "wall_s": [summary["wall_s"]],
  }


def _add_others(
    train: subprocess.Popen, workdir: pathlib.Path, closing: Any
) -> None:
  """Starts the int8 and vLLM searchers, and kills each process once."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  url = f"http://127.0.0.1:{port}"
  changes = {
      "int8": ["search.quantization=int8"],
      "vllm": ["search.sampler=vllm", f"search.vllm_urls={url}"],
  }
  starts = {
      "server": lambda: _serve(port),
      **{
          kind: lambda index=index, kind=kind: _program(
              "searcher",
              workdir,
              [*changes[kind], f"search.price_per_hour={_PRICES[kind]}"],
              str(index),
          )
          for index, kind in enumerate(changes, 1)
      },
  }
  _wait(lambda: (workdir / "config.json").exists(), train, _START_S)
  running = {}
  for kind, start in starts.items():
    running[kind] = start()
    closing.callback(lambda kind=kind: _end(running[kind]))
    if kind == "server":
      _wait(lambda: _answers(url), train, _START_S)
  for kind, step in _KILLS.items():
    _wait(lambda step=step: _step(workdir) >= step, train, _RUN_S)
    if kind == "searcher":  # Supervised: `train` starts it again.
      os.kill(_pid_of(workdir), signal.SIGKILL)
      continue
    _end(running[kind], signal.SIGKILL)
    running[kind] = starts[kind]()


def _overrides(name: str, seed: int) -> list[str]:
  return [
      f"init={_start_model().absolute()}",
      f"seed={seed}",
      f"task.source={agent.__file__}:Guess",
      f"reward.readable={agent.__file__},{agent.GAME}",
      "reward.num_workers=8",
      f"search.num_searchers={3 if name == 'same' else 1}",
      f"search.price_per_hour={_PRICES['float32']}",
      "search.prompts_per_round=4",
      "search.prompts_per_step=8",
      "sampling.num_slots=32",
      "train.prompts_per_batch=8",
      "train.micro_batch_prompts=8",
      f"train.num_steps={_NUM_STEPS}",
      # Batches are half as large as the config's.
      "optimizer.learning_rate=5e-4",
      "evaluate.every_steps=0",
  ]


def _start_model() -> pathlib.Path:
  """Returns the common fine-tuned policy with a chat template, made once."""
  folder = _RUNS / "start" / "sft" / "model"
  template = folder / "chat_template.jinja"
  if not template.exists():
    sft = _program("sft", _RUNS / "start", ["model.head_dim=32"])
    if status := sft.wait(_RUN_S):
      raise RuntimeError(f"{_RUNS / 'start'}: status {status}")
    template.write_text(_TEMPLATE)
  return folder


def _program(
    program: str,
    workdir: pathlib.Path,
    overrides: Sequence[str],
    *operands: str,
) -> subprocess.Popen:
  config = [] if program == "searcher" else [f"--config={_CONFIG}:quick"]
  return subprocess.Popen(
      [
          *(sys.executable, "-m", "tba_jax.main", f"--program={program}"),
          *(*config, f"--workdir={workdir}"),
          *(f"--config.{override}" for override in overrides),
          *operands,
      ],
      stdout=sys.stderr,
      stdin=subprocess.DEVNULL,
  )


def _serve(port: int) -> subprocess.Popen:
  """Starts a vLLM server of the common policy."""
  folder = _RUNS / "start" / "vllm"
  if not folder.exists():
    vllm.write_model(str(_start_model()), str(folder))
  with (_RUNS / "vllm.log").open("ab") as log:
    return subprocess.Popen(
        [
            os.environ["TBA_JAX_PEER_PYTHON"],
            *("-m", "vllm.entrypoints.openai.api_server"),
            *(f"--model={folder}", "--dtype=float32", "--enforce-eager"),
            *(f"--port={port}", "--host=127.0.0.1", "--enable-scale-out"),
            "--max-model-len=64",
        ],
        env=os.environ
        | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _answers(url: str) -> bool:
  try:
    with urllib.request.urlopen(f"{url}/health", timeout=5):
      return True
  except (urllib.error.URLError, OSError):
    return False


def _step(workdir: pathlib.Path) -> int:
  with contextlib.suppress(OSError, ValueError):
    return jsonl.read_json(workdir / "status.json").get("step") or 0
  return 0


def _pid_of(workdir: pathlib.Path) -> int:
  """Returns the process of the supervised searcher."""
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      words = path.read_bytes().decode().split("\0")
      if "searcher-0" in words and f"--workdir={workdir.absolute()}" in words:
        return int(path.parent.name)
  raise RuntimeError(f"{workdir}: no process of its searcher")


def _wait(is_met: Any, train: subprocess.Popen, deadline_s: float) -> None:
  """Waits; raises RuntimeError if the run ends first, or at the deadline."""
  deadline = time.monotonic() + deadline_s
  while not is_met():
    if train.poll() is not None or time.monotonic() > deadline:
      raise RuntimeError(f"the run ended first, status {train.poll()}")
    time.sleep(0.5)


def _end(process: subprocess.Popen, sign: int = signal.SIGTERM) -> None:
  """Ends a process, and the group of a vLLM server."""
  if process.poll() is not None:
    return
  if os.getpgid(process.pid) == process.pid:
    os.killpg(process.pid, sign)
  else:
    process.send_signal(sign)
  try:
    process.wait(60)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
