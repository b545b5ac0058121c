# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One-process runs with an exact staleness and any amount of search a step.

Sampler, replay buffer, batches, train step and evaluator are those of the
roles. Step t inserts `search.prompts_per_step` groups, sampled with the params
of step max(t - s, 0), and trains on a draw of the buffer. Results by step do
not depend on the machine's speed, so several may run beside each other.
"""

import collections
from collections.abc import Mapping, Sequence
import pathlib
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import results
from tba_jax import types
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.programs import sft
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import prompt_order
from tba_jax.sampling import decode
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.training import batches
from tba_jax.training import cluster
from tba_jax.training import device_work
from tba_jax.training import policy as policy_lib
from tba_jax.training import reward_judge
from tba_jax.training import schedules
from tba_jax.training import sharding

# Of an evaluation: what a run's curve has at each of its steps.
EVALUATED = ("pass_at_1", "pass_at_k", "distinct_correct_per_solved",
              "distinct_correct")  # fmt: skip


def run_all(
    config: ml_collections.ConfigDict,
    settings: Mapping[str, Sequence[str]],
    operands: Sequence[str],
    folder: pathlib.Path,
) -> list[dict[str, Any]]:
  """Makes the runs that have no result in the folder yet, at staleness 1.

  Args:
    config: of all runs; its `init` is set to the policy that all start from,
      fine-tuned once.
    settings: overrides (`KEY=VALUE`) of each setting, by name.
    operands: seeds of prompts and samples, and names of settings, as
      `results.parse` reads them; a whole seed comes before the next.
    folder: keeps a result per setting and seed.

  Returns:
    All results in the folder.
  """
  seeds, names = results.parse(operands, settings)
  processes.enable_compilation_cache()
  config = fine_tune(config, folder)

  def train(name: str, seed: int) -> dict[str, Any]:
    own = config.copy_and_resolve_references()
    load.apply_overrides(own, [*settings[name], f"seed={seed}"])
    validate.validate(own, program="sweep")
    return run(own, staleness_steps=1)

  results.measure(seeds, names, folder, train)
  return results.read(settings, folder)


def fine_tune(
    config: ml_collections.ConfigDict, folder: pathlib.Path
) -> ml_collections.ConfigDict:
  """Returns a copy that starts from FOLDER/start, fine-tuned if missing."""
  start = folder / "start"
  if not policy_lib.sft_folder(start).exists():
    folder.mkdir(parents=True, exist_ok=True)
    sft.run(config, str(start), stop=threading.Event())
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.init = str(policy_lib.sft_folder(start).absolute())
  return config


def run(
    config: ml_collections.ConfigDict, staleness_steps: int
) -> dict[str, Any]:
  """Trains; evaluates at the start and every `evaluate.every_steps`.

  Args:
    config: of the run; `evaluate.final_prompts` held-out prompts are evaluated.
    staleness_steps: s.

  Returns:
    Lists with an item per evaluation: `steps`; `completions` and `solutions`,
    sampled and distinct correct ones found until then; and `EVALUATED`. And
    `rewards` by step and `wall_s`.
  """
  started = time.monotonic()
  config = config.copy_and_resolve_references()
  config.reference.role = "trainer"  # There is one process.
  policy = policy_lib.make_policy(config, "")
  work = _make_work(config, policy)
  buffer = buffer_lib.ReplayBuffer(
      config,
      reward_temperature=schedules.reward_temperature(
          config.replay, per_round_steps=0
      ),
  )
  buffer.begin_epoch(0, 0)
  maker = batches.BatchMaker(config, policy.tokenizer, buffer, work)
  evaluator = reward_judge.make_evaluator(config, "", policy)
  searcher = _Searcher(config, policy)
  num_steps, train = config.train.num_steps, config.train
  found: dict[str, list[float]] = {
      name: [] for name in ("steps", "completions", "solutions", *EVALUATED)
  }
  rewards = []
  past = collections.deque(maxlen=staleness_steps + 1)
  try:
    for step in range(num_steps + 1):
      if step % config.evaluate.every_steps == 0 or step == num_steps:
        result = evaluator.run(
            work.state.params, config.evaluate.final_prompts, version=step
        )
        found["steps"].append(step)
        found["completions"].append(
            step * config.search.prompts_per_step
            * config.search.samples_per_prompt
        )  # fmt: skip
        found["solutions"].append(len(searcher.solutions))
        for name in EVALUATED:
          found[name].append(result[name])
      if step == num_steps:
        break
      # The step donates its state.
      past.append((step, jax.tree.map(jnp.copy, work.state.params)))
      arrived = searcher.search(*past[0])
      rewards.append(float(np.mean([group.rewards for group in arrived])))
      for group in arrived:
        buffer.insert(group, step)
      draw = buffer.sample(
          train.prompts_per_batch, train.completions_per_prompt, step
      )
      metrics = work.train(maker.make(draw))
      buffer.mark_trained(draw.rows)
      maker.flush()
      if metrics["nonfinite"]:
        raise FloatingPointError(f"step {step}: loss or gradient is not finite")
  finally:
    evaluator.close()
  return {**found, "rewards": rewards, "wall_s": time.monotonic() - started}


def _make_work(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> device_work.DeviceWork:
  """Returns the state owner, which saves and publishes nothing."""
  params = policy_lib.initial_params(policy, config.seed)
  mesh = sharding.make_mesh(config.mesh)
  return device_work.DeviceWork(
      config,
      state=device_work.init_state(config, policy, params, mesh),
      train_step=device_work.make_train_step(config, policy, mesh, params),
      reference=device_work.make_reference(config, policy, params, mesh),
      merger=None,
      checkpointer=None,
      cluster=cluster.Cluster(),
  )


class _Searcher:
  """Samples and scores the fresh groups of a step.

  solutions: (prompt id, key) of all that were found.
  """

  def __init__(
      self, config: ml_collections.ConfigDict, policy: policy_lib.Policy
  ):
    self._config = config
    self._task, self._tokenizer = policy.task, policy.tokenizer
    self._sampler = policy_lib.make_sampler(config, policy)
    self._order = prompt_order.PromptOrder(
        policy.task.num_prompts(base.TRAIN), seed=config.seed
    )
    self._position = 0
    self.solutions: set[tuple[int, str]] = set()

  def search(self, version: int, params: types.PyTree) -> list[types.Group]:
    search = self._config.search
    first = self._position
    self._position += search.prompts_per_step
    requests = []
    for position in range(first, self._position):
      prompt_id, visit = self._order.prompt(position)
      text = self._task.prompt(base.TRAIN, prompt_id)
      requests.append(
          decode.Request(
              prompt_tokens=np.asarray(
                  self._tokenizer.encode_prompt(text), np.int32
              ),
              prompt_id=prompt_id,
              visit=visit,
              num_completions=search.samples_per_prompt,
              seed=self._config.seed,
          )
      )
    found = self._sampler.sample(params, requests, version=version)
    return [
        self._group(first + i, request, completions)
        for i, (request, completions) in enumerate(
            zip(requests, found, strict=True)
        )
    ]

  def _group(
      self,
      position: int,
      request: decode.Request,
      completions: types.Completions,
  ) -> types.Group:
    judgements = [
        self._task.judge(base.TRAIN, request.prompt_id, text)
        for text in policy_lib.decode_texts(self._tokenizer, completions)
    ]
    self.solutions.update(
        (request.prompt_id, j.key) for j in judgements if j.key is not None
    )
    return types.Group(
        prompt_id=request.prompt_id,
        visit=request.visit,
        position=position,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=completions.tokens,
        completion_lengths=completions.lengths,
        sampled_mask=completions.sampled_mask,
        stopped=completions.stopped,
        behavior_logprobs=completions.logprobs,
        rewards=np.asarray([j.reward for j in judgements], np.float32),
        versions=completions.versions,
        epoch=0,
    )
