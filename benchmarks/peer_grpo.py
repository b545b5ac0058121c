# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of other libraries, each in its own interpreter.

`run` starts `trl_grpo.py`, `tunix_grpo.py` or another script with the
interpreter in `TBA_JAX_TRL` or `TBA_JAX_TUNIX` (default: this one). The script
reads FOLDER/settings.json, trains, and writes snapshots (Hugging Face folders
such as FOLDER/step20) and FOLDER/result.json. Apart from the library it needs
only the packages of `tba_jax.tasks`.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tba_jax.system import processes
from tba_jax.tasks import countdown

# Packages that the interpreters can import.
PEERS = ("trl", "tunix")


def variable(peer: str) -> str:
  """Returns the environment variable that names a peer's interpreter."""
  return f"TBA_JAX_{peer.upper()}"


def python(peer: str) -> str:
  """Returns the interpreter that `run` uses."""
  return os.environ.get(variable(peer), sys.executable)


def is_installed(peer: str) -> bool:
  # A folder of that name also has a spec, but no origin.
  code = (
      "import importlib.util as u, sys; spec = u.find_spec(sys.argv[1]);"
      " sys.exit(spec is None or spec.origin is None)"
  )
  command = [python(peer), "-c", code, peer]
  return subprocess.run(command, check=False).returncode == 0


def run(
    peer: str,
    folder: pathlib.Path,
    settings: Mapping[str, Any],
    deadline_s: float = 1200.0,
    *,
    script: str = "",
) -> dict[str, Any]:
  """Trains in a separate process; returns its result.

  Args:
    peer: name in `PEERS`.
    folder: folder to make, for settings, snapshots, log and result.
    settings: learning_rate (decays linearly to a tenth), beta (of the KL),
      model (a Hugging Face folder), prompts (in the order of training),
      prompts_per_batch, completions_per_prompt, max_completion_tokens,
      full_length (whether every completion has that length), num_steps,
      snapshot_steps, seed, and keywords of one peer. For tasks other than
      countdown, `trl` takes task (as `config.task`) and prompt_ids; it also
      takes micro_batch_prompts, and limit_s and snapshot_s in seconds of
      training.
    deadline_s: time limit of the process.
    script: module of this package to run instead of PEER_grpo, with its own
      settings.

  Returns:
    `step_ends`, the Unix time in seconds at the end of each step, excluding the
    time for snapshots; `versions`.

  Raises:
    RuntimeError: the process failed or took too long; the message has the end
      of its log.
  """
  folder.mkdir(parents=True)
  (folder / "settings.json").write_text(json.dumps(settings))
  with (folder / "log.txt").open("w") as log:
    try:
      end = subprocess.run(
          [
              python(peer),
              "-m",
              f"benchmarks.{script or f'{peer}_grpo'}",
              str(folder),
          ],
          stdout=log,
          stderr=subprocess.STDOUT,
          env=processes.package_environment(),
          timeout=deadline_s,
          check=False,
      ).returncode
    except subprocess.TimeoutExpired:
      end = f"nothing after {deadline_s:.0f} s"
  if end:
    tail = (folder / "log.txt").read_text()[-2000:]
    raise RuntimeError(f"{folder} ended with {end}: {tail}")
  return json.loads((folder / "result.json").read_text())


class Clock:
  """Clock of a peer's steps that pauses during snapshots.

  is_over: whether the last step or the time limit is reached.
  step_ends: Unix time in seconds, minus the time of earlier snapshots.
  snapshots: step -> what `take_snapshot` returned.
  """

  def __init__(
      self,
      settings: Mapping[str, Any],
      take_snapshot: Callable[[], Any],
      now: Callable[[], float] = time.time,
  ):
    self._now = now
    self._every = settings.get("snapshot_steps", settings["num_steps"])
    self._every_s = settings.get("snapshot_s", math.inf)
    self._last = settings["num_steps"]
    self._limit_s = settings.get("limit_s", math.inf)
    self._take_snapshot = take_snapshot
    self._paused_s = 0.0
    self.is_over = False
    self.step_ends: list[float] = []
    self.snapshots: dict[int, Any] = {}

  def end_step(self) -> None:
    now = self._now()
    self.step_ends.append(now - self._paused_s)
    step = len(self.step_ends)
    passed_s = self.step_ends[-1] - self.step_ends[0]
    self.is_over = step == self._last or passed_s >= self._limit_s
    is_due = step % self._every == 0
    if passed_s >= self._every_s * (len(self.snapshots) + 1):
      is_due = True
    if is_due or self.is_over:
      self.snapshots[step] = self._take_snapshot()
      self._paused_s += self._now() - now

  def write(self, folder: pathlib.Path, packages: Sequence[str]) -> None:
    """Writes the result of `run`, with the versions of the packages."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    result = {"step_ends": self.step_ends, "versions": versions}
    (folder / "result.json").write_text(json.dumps(result))


def rewards(
    prompts: Sequence[str], completions: Sequence[str], **_: Any
) -> list[float]:
  """Returns 1 for a correct completion, else 0."""
  return [
      float(_is_correct(*texts))
      for texts in zip(prompts, completions, strict=True)
  ]


def make_task_rewards(
    settings: Mapping[str, Any],
) -> Callable[..., list[float]]:
  """Returns the reward function of `settings["task"]`, for chat prompts.

  A completion that does not end with a stop token gets no reward, as in ours.
  """
  # tunix's interpreter lacks the packages of these modules.
  import ml_collections  # pylint: disable=g-import-not-at-top

  from tba_jax.tasks import base  # pylint: disable=g-import-not-at-top
  from tba_jax.tasks import task_table  # pylint: disable=g-import-not-at-top

  task = task_table.make_task(ml_collections.ConfigDict(settings["task"]))
  stop_ids = set(settings["stop_ids"])

  def task_rewards(
      completions: Sequence[Sequence[Mapping[str, str]]],
      completion_ids: Sequence[Sequence[int]],
      prompt_id: Sequence[int],
      **_: Any,
  ) -> list[float]:
    out = []
    for (message,), ids, index in zip(
        completions, completion_ids, prompt_id, strict=True
    ):
      judge = task.judge if ids[-1] in stop_ids else task.judge_cut_off
      out.append(judge(base.TRAIN, index, message["content"]).reward)
    return out

  return task_rewards


def _is_correct(prompt: str, completion: str) -> bool:
  numbers, target = prompt.split(">")
  numbers = [int(number) for number in numbers.split(",")]
  key = countdown.solution_key(numbers, int(target), completion)
  return key is not None
