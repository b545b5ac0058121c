# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO of an adapter on SkyRL's server, by the `tinker` client.

The loop follows the client's examples: sample with the newest adapter, then a
forward and backward pass, then a step of Adam, without overlap.
"""

from collections.abc import Mapping, Sequence
import pathlib
import statistics
import subprocess
import tarfile
from typing import Any

from benchmarks import peer_grpo
from benchmarks import served
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.system import jsonl

# Added to the standard deviation of a group's rewards, as in TRL.
_EPSILON = 1e-4


def run(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Trains from the start; returns the result of `peer_grpo.run`.

  Args:
    folder: new folder for settings, the server's log, snapshots (`step20`, an
      adapter in PEFT's format) and the result.
    settings: settings of `peer_grpo.run` for a task, and the adapter's rank.

  Raises:
    RuntimeError: the server ended or did not answer.
  """
  folder.mkdir(parents=True)
  jsonl.atomic_write_json(folder / "settings.json", dict(settings))
  model = pathlib.Path(settings["model"])
  num_rows = settings["prompts_per_batch"] * settings["completions_per_prompt"]
  with served.serve_skyrl(
      folder.absolute(),
      model,
      folder / "log.txt",
      rank=settings["rank"],
      num_rows=num_rows,
  ) as (url, key):
    training = served.make_client(url, key, model, settings["rank"])
    clock = peer_grpo.Clock(settings, lambda: _save(training, folder))
    train(training, settings, clock)
    training.holder.close()  # Its heartbeats would fail without the server.
  for step, file in clock.snapshots.items():
    with tarfile.open(file) as packed:
      packed.extractall(folder / f"step{step}", filter="data")
  code = "import importlib.metadata as m; print(m.version('skyrl'))"
  version = subprocess.run(
      [peer_grpo.python("skyrl"), "-c", code],
      check=True,
      timeout=served.DEADLINE_S,
      capture_output=True,
      text=True,
  ).stdout.strip()
  result = {"step_ends": clock.step_ends, "versions": {"skyrl": version}}
  jsonl.atomic_write_json(folder / "result.json", result)
  return result


def train(
    training: Any, settings: Mapping[str, Any], clock: peer_grpo.Clock
) -> None:
  """Trains through a client until the clock ends."""
  from tinker import types

  tokenizer = tokenizer_lib.load(settings["model"])
  reward_fn = peer_grpo.make_task_rewards(settings)
  sampling = types.SamplingParams(
      max_tokens=settings["max_completion_tokens"],
      temperature=1.0,
      stop=settings["stop_ids"],
  )
  prompts = [tokenizer.encode_chat(p) for p in settings["prompts"]]
  adam = types.AdamParams(learning_rate=settings["learning_rate"])
  num, at = settings["prompts_per_batch"], 0
  while not clock.is_over:
    rows = [(at + i) % len(prompts) for i in range(num)]
    at += num
    sampler = training.save_weights_and_get_sampling_client().result(
        served.DEADLINE_S
    )
    task_prompts = [
        sampler.sample(
            types.ModelInput.from_ints(prompts[row]),
            settings["completions_per_prompt"],
            sampling,
        )
        for row in rows
    ]
    data = []
    for row, future in zip(rows, task_prompts):
      group = future.result(served.DEADLINE_S).sequences
      ids = [list(s.tokens) for s in group]
      rewards = reward_fn(
          completions=[
              [{"content": tokenizer.decode(_text_of(i, settings["stop_ids"]))}]
              for i in ids
          ],
          completion_ids=ids,
          prompt_id=[settings["prompt_ids"][row]] * len(ids),
      )
      data += [
          served.datum("importance_sampling", prompts[row], s, advantage)
          for s, advantage in zip(group, advantages(rewards))
      ]
    passed = training.forward_backward(data, "importance_sampling")
    stepped = training.optim_step(adam)
    passed.result(served.DEADLINE_S)
    stepped.result(served.DEADLINE_S)
    clock.end_step()


def advantages(rewards: Sequence[float]) -> list[float]:
  """Returns a group's rewards, centered and divided by their deviation."""
  mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
  return [(reward - mean) / (spread + _EPSILON) for reward in rewards]


def _text_of(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
  """Returns a completion's tokens without its stop token."""
  return ids[:-1] if ids[-1] in stop_ids else ids


def _save(training: Any, folder: pathlib.Path) -> pathlib.Path:
  """Saves the server's adapter; returns the file."""
  name = f"kept{len(list(folder.glob('checkpoints/*/sampler_weights/kept*')))}"
  saved = training.save_weights_for_sampler(name).result(served.DEADLINE_S)
  model_id = saved.path.removeprefix("tinker://").split("/")[0]
  places = folder / "checkpoints" / model_id / "sampler_weights"
  return places / f"{name}.tar.gz"
