# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop without processes, store or threads, as a reference.

    python -m tests.support.single_process CONFIG.json WORKDIR OUT.npz

samples, draws and steps in turn, and writes the params after the last step. A
lockstep run of the same config must give the same bits.
"""

from collections.abc import Sequence
import json
import os
import sys

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.programs import searcher
from tba_jax.programs import trainer
from tba_jax.rewards import judges
from tba_jax.sampling import requests
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.training import batches
from tba_jax.training import cluster
from tba_jax.training import device_work
from tba_jax.training import lora
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reward_judge
from tba_jax.training import sharding


def train(
    config: ml_collections.ConfigDict, workdir: str
) -> dict[str, np.ndarray]:
  """Returns the leaves of the params after the last step."""
  policy = policy_lib.make_policy(config, workdir)
  mesh = sharding.make_mesh(config.mesh)
  params = policy_lib.initial_params(policy, config.seed)
  work = device_work.DeviceWork(
      config,
      state=device_work.init_state(config, policy, params, mesh),
      train_step=device_work.make_train_step(config, policy, mesh, params),
      reference=device_work.make_reference(config, policy, params, mesh),
      merger=None,
      checkpointer=None,
      cluster=cluster.Cluster(),
  )
  merger = lora.make_merger(
      policy.adapters,
      policy.folder,
      config.seed,
      searcher.make_load_start(config, policy),
  )
  params_fn = searcher.make_params_fn(policy, merger)
  sampler = policy_lib.make_sampler(config, policy)
  buffer = trainer.make_buffer(config, policy)
  order = trainer.make_prompt_order(config, policy)
  batch_maker = batches.BatchMaker(config, policy.tokenizer, buffer, work)
  scorer = reward_judge.for_trainer(config, workdir, policy)
  per_step = config.search.prompts_per_step
  for step in range(config.train.num_steps):
    sampled = params_fn(publication.flatten(work.state.params))
    positions = range(step * per_step, (step + 1) * per_step)
    groups = _sample(config, policy, sampler, sampled, order, positions, step)
    for group in scorer.score(groups):
      buffer.insert(group, step)
    draw = buffer.sample(
        config.train.prompts_per_batch,
        config.train.completions_per_prompt,
        step,
    )
    buffer.mark_trained(draw.rows)
    work.train(batch_maker.make(draw))
    batch_maker.flush()
  return publication.flatten(work.state.params)


def _sample(
    config, policy, sampler, params, order, positions, step
) -> Sequence[types.Group]:
  prompts = [order.prompt(p) for p in positions]
  asked = [
      requests.Request(
          prompt_tokens=np.asarray(
              policy.tokenizer.encode(
                  policy.task.prompt(base.TRAIN, prompt_id)
              ),
              np.int32,
          ),
          prompt_id=prompt_id,
          visit=visit,
          num_completions=config.search.samples_per_prompt,
      )
      for prompt_id, visit in prompts
  ]
  found = sampler.sample(params, asked, version=step)
  groups = []
  for position, request, completions in zip(positions, asked, found):
    texts = policy_lib.decode_texts(policy.tokenizer, completions)
    judged = [
        policy.task.judge(base.TRAIN, request.prompt_id, text) for text in texts
    ]
    groups.append(
        types.Group(
            prompt_id=request.prompt_id,
            visit=request.visit,
            position=position,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=completions.tokens,
            completion_lengths=completions.lengths,
            sampled_mask=completions.sampled_mask,
            stopped=completions.stopped,
            behavior_logprobs=completions.logprobs,
            rewards=judges.final_rewards(
                config.loss, judged, completions.stopped
            ),
            versions=completions.versions,
            epoch=1,
        )
    )
  return groups


def main(argv: Sequence[str]) -> None:
  config_path, workdir, out, core = argv
  if core:
    os.sched_setaffinity(0, processes.parse_cores(core))
  processes.enable_compilation_cache()
  with open(config_path) as file:
    config = ml_collections.ConfigDict(json.load(file)["config"])
  np.savez(out, **train(config, workdir))


if __name__ == "__main__":
  main(sys.argv[1:])
