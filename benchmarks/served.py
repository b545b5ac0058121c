# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step of this package's Tinker server, versus SkyRL's.

    TBA_JAX_SKYRL=SKYRL_VENV/bin/python \\
        python -m benchmarks served MODEL 4

starts `--program=serve` and then SkyRL's JAX backend (`pip install
'skyrl[jax,tinker]==0.4.0' aiohttp`, Python 3.12) on the same Hugging Face
folder. The same loop of the `tinker` SDK trains an adapter on each, on sums as
in the cookbook's math_rl, with completions of equal length. Logs, table and
result are in runs/served.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any
import urllib.error
import urllib.request

import ml_collections
import numpy as np

from benchmarks import peak_memory
from benchmarks import peer_grpo
from benchmarks import results
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.system import jsonl
from tba_jax.system import processes

_ROOT = pathlib.Path(__file__).parents[1]
_RESULTS = pathlib.Path("runs") / "served"
_PROMPTS, _COMPLETIONS, _TOKENS, _RANK = 8, 4, 32, 16
_LEARNING_RATE = 1e-4
# Maximum wait for an answer.
DEADLINE_S = 600.0
# Servers with their losses; a row each.
_ROWS = (
    ("tba_jax", "importance_sampling"),
    ("tba_jax", "tb"),
    ("skyrl", "importance_sampling"),
)


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the times of a step with each server and loss.

  Args:
    config: not used; the server's is configs/serve.py with `quick`.
    operands: folder of the model, and number of timed steps after two that
      compile (default 4).

  Returns:
    runs, one per server and loss: server, loss, and over the counted steps the
    medians sampling_s, training_s, step_s and tokens_per_s (sampled);
    first_step_s, from the start of the process to the end of the first step;
    peak_gb, the peak memory of the server's processes.

  Raises:
    ValueError: an operand is invalid, or a package is missing.
    RuntimeError: a server ended or did not answer.
  """
  del config
  model, num_steps = _parse(operands)
  if importlib.util.find_spec("tinker") is None:
    raise ValueError("served needs the client: pip install tinker")
  if not peer_grpo.is_installed("skyrl"):
    raise ValueError(
        f"{peer_grpo.python('skyrl')} cannot import skyrl; set TBA_JAX_SKYRL to"
        " an interpreter that can: pip install 'skyrl[jax,tinker]==0.4.0'"
        " aiohttp"
    )
  _RESULTS.mkdir(parents=True, exist_ok=True)
  runs = [_measure(*row, model, num_steps) for row in _ROWS]
  result = {"runs": runs, "steps": num_steps, "machine": results.machine()}
  jsonl.atomic_write_json(_RESULTS / "result.json", result)
  table = _make_table(runs)
  (_RESULTS / "table.md").write_text(table)
  print(table, file=sys.stderr)
  return result


def _parse(operands: Sequence[str]) -> tuple[pathlib.Path, int]:
  if not 1 <= len(operands) <= 2:
    raise ValueError(f"served {operands}: must be MODEL and a number of steps")
  model = pathlib.Path(operands[0]).resolve()
  if not (model / "config.json").exists():
    raise ValueError(f"served {operands[0]}: must be a Hugging Face folder")
  steps = operands[1] if len(operands) > 1 else "4"
  if not steps.isdecimal() or not int(steps):
    raise ValueError(f"served {steps!r}: must be a number of steps, from 1")
  return model, int(steps)


def _measure(
    server: str, loss: str, model: pathlib.Path, num_steps: int
) -> dict[str, Any]:
  """Returns a row of the result."""
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as name:
    folder = pathlib.Path(name)
    began = time.monotonic()
    with peak_memory.PeakMemory(folder / "memory.json") as memory:
      log = _RESULTS / f"{server}-{loss}.log"
      with _START[server](folder, model, log) as (url, key):
        steps = list(_train(url, key, model, loss, 2 + num_steps))
  ends = [end for _, _, _, end in steps]
  sampling_s, training_s, tokens = np.array(
      [step[:3] for step in steps[2:]], np.float64
  ).T
  return {
      "server": server,
      "loss": loss,
      "sampling_s": statistics.median(sampling_s),
      "training_s": statistics.median(training_s),
      "step_s": statistics.median(sampling_s + training_s),
      "tokens_per_s": float(tokens.sum() / sampling_s.sum()),
      "first_step_s": ends[0] - began,
      "peak_gb": memory.peak_bytes / 1e9,
  }


@contextlib.contextmanager
def _serve_own(
    folder: pathlib.Path, model: pathlib.Path, log: pathlib.Path
) -> Iterator[tuple[str, str]]:
  """Runs this package's server; yields its address and key."""
  port = processes.free_port()
  command = [
      *(sys.executable, "-m", "tba_jax.main", "--program=serve"),
      f"--config={_ROOT / 'configs' / 'serve.py'}:quick",
      f"--workdir={folder}",
      f"--config.init={model}",
      f"--config.serve.port={port}",
      f"--config.sampling.num_slots={_PROMPTS * _COMPLETIONS}",
  ]
  with _process(command, log, port) as url:
    yield url, (folder / "serve" / "key").read_text().strip()


@contextlib.contextmanager
def serve_skyrl(
    folder: pathlib.Path,
    model: pathlib.Path,
    log: pathlib.Path,
    *,
    rank: int = _RANK,
    num_rows: int = _PROMPTS * _COMPLETIONS,
) -> Iterator[tuple[str, str]]:
  """Runs SkyRL's server; yields its address and a key, which it ignores.

  Args:
    folder: place of the database and of the folder `checkpoints`.
    model: Hugging Face folder of the model.
    log: file for the server's output.
    rank: rank of the adapters.
    num_rows: number of sequences sampled at a time.
  """
  port = processes.free_port()
  backend = {
      "max_lora_adapters": 2,  # One is the base model.
      "max_lora_rank": rank,
      "sample_max_num_sequences": num_rows,
  }
  command = [
      *(peer_grpo.python("skyrl"), "-m", "benchmarks.skyrl_server"),
      *(str(model), str(folder), str(port), json.dumps(backend)),
  ]
  with _process(command, log, port) as url:
    yield url, "tml-any"


_START: dict[str, Callable[..., Any]] = {
    "tba_jax": _serve_own,
    "skyrl": serve_skyrl,
}


@contextlib.contextmanager
def _process(
    command: Sequence[str], log: pathlib.Path, port: int
) -> Iterator[str]:
  """Runs a server; yields its address once it responds."""
  url = f"http://127.0.0.1:{port}"
  with log.open("w") as file:
    process = subprocess.Popen(
        command,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=processes.package_environment(),
        start_new_session=True,
    )
  try:
    deadline = time.monotonic() + DEADLINE_S
    while not _answers(url):
      if process.poll() is not None or time.monotonic() > deadline:
        raise TimeoutError("no answer")
      time.sleep(0.5)
    yield url
  except Exception as error:
    ended = "ended" if process.poll() is not None else "failed"
    raise RuntimeError(
        f"the server {ended} ({error!r}); the end of {log}:"
        f" {log.read_text()[-2000:]}"
    ) from error
  finally:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(30.0)
    # Includes SkyRL's engine, which is a separate process.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
  try:
    with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=10.0):
      return True
  except urllib.error.HTTPError:  # The server asks for a key.
    return True
  except OSError:
    return False


def make_client(url: str, key: str, model: pathlib.Path, rank: int) -> Any:
  """Returns a training client of a new adapter, by the `tinker` SDK."""
  import tinker
  from tinker.lib.public_interfaces import sampling_client

  # SkyRL's server follows tinker 0.25, whose sequences have no ids; newer
  # clients require them, but nothing here reads them.
  sampling_client._attach_sequence_ids = lambda response, _: response
  service = tinker.ServiceClient(base_url=url, api_key=key)
  client = service.create_lora_training_client(str(model), rank=rank)
  return client.result(DEADLINE_S)


def _train(
    url: str, key: str, model: pathlib.Path, loss: str, num_steps: int
) -> Iterator[tuple[float, float, int, float]]:
  """Yields seconds of sampling and training, tokens, and the end of steps."""
  from tinker import types

  tokenizer = tokenizer_lib.load(str(model))
  training = make_client(url, key, model, _RANK)
  sampling = types.SamplingParams(
      max_tokens=_TOKENS,
      temperature=1.0,
      stop=[tokenizer.vocab_size - 1],  # So rare that all lengths are equal.
  )
  rng = random.Random(0)
  for _ in range(num_steps):
    sums = [(rng.randint(0, 100), rng.randint(0, 100)) for _ in range(_PROMPTS)]
    prompts = [
        tokenizer.encode_chat(
            [{"role": "user", "content": f"What is {a} + {b}?"}]
        )
        for a, b in sums
    ]
    began = time.monotonic()
    sampler = training.save_weights_and_get_sampling_client().result(DEADLINE_S)
    futures = [
        sampler.sample(types.ModelInput.from_ints(ids), _COMPLETIONS, sampling)
        for ids in prompts
    ]
    groups = [future.result(DEADLINE_S).sequences for future in futures]
    sampled = time.monotonic()
    data = []
    for i, ((a, b), prompt, group) in enumerate(zip(sums, prompts, groups)):
      rewards = [
          float(str(a + b) in re.findall(r"\d+", tokenizer.decode(s.tokens)))
          for s in group
      ]
      data += [
          datum(loss, prompt, s, reward, statistics.mean(rewards), i)
          for s, reward in zip(group, rewards)
      ]
    passed = training.forward_backward(data, loss)
    stepped = training.optim_step(
        types.AdamParams(learning_rate=_LEARNING_RATE)
    )
    passed.result(DEADLINE_S)
    stepped.result(DEADLINE_S)
    end = time.monotonic()
    tokens = sum(len(s.tokens) for group in groups for s in group)
    yield sampled - began, end - sampled, tokens, end


def datum(
    loss: str,
    prompt: list[int],
    sequence: Any,
    reward: float,
    mean: float = 0.0,
    group: int = 0,
) -> Any:
  """Returns a sequence for `loss` with advantage `reward` - `mean`."""
  from tinker import types

  ids = prompt + list(sequence.tokens)
  before = [0.0] * (len(prompt) - 1)
  num = len(sequence.tokens)
  logprobs = np.array(before + list(sequence.logprobs), np.float32)
  inputs = {"target_tokens": np.array(ids[1:]), "logprobs": logprobs}
  if loss == "tb":
    weights = np.array(before + [1.0] * num, np.float32)
    inputs |= {"weights": weights, "reward": np.array([reward], np.float32)}
    inputs["group"] = np.array([group])
  else:
    advantages = before + [reward - mean] * num
    inputs["advantages"] = np.array(advantages, np.float32)
  return types.Datum(
      model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs
  )


def _make_table(runs: Sequence[dict[str, Any]]) -> str:
  lines = [
      "| server | loss | s a step | sampling, s | training, s | tokens/s"
      " sampled | first step, s | peak memory, GB |",
      "|---|---|---|---|---|---|---|---|",
  ]
  for r in runs:
    lines.append(
        f"| {r['server']} | `{r['loss']}` | {r['step_s']:.1f}"
        f" | {r['sampling_s']:.1f} | {r['training_s']:.1f}"
        f" | {r['tokens_per_s']:.0f} | {r['first_step_s']:.0f}"
        f" | {r['peak_gb']:.1f} |"
    )
  return "\n".join(lines) + "\n"
