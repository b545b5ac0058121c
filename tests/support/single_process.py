# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Independent training loop: the oracle for bits in lockstep.

    python -m tests.support.single_process CONFIG.json WORKDIR OUT.npz CORE

samples, rewards, draws and steps in turn, and writes the params after the last
step. It shares no loop, schedule or collector with the package; instead of
sampling ahead it keeps old params. `--loop` before CONFIG.json runs `loop.run`
instead.
"""

from collections.abc import Sequence
import json
import os
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.learning import buffers
from tba_jax.learning import device_work
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import published
from tba_jax.learning import work_parts
from tba_jax.mesh import cluster
from tba_jax.mesh import sharding
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.programs import inline
from tba_jax.replay import curriculum
from tba_jax.rewards import judges
from tba_jax.sampling import requests
from tba_jax.system import processes
from tba_jax.tasks import base


def train(
    config: ml_collections.ConfigDict, workdir: str
) -> dict[str, np.ndarray]:
  """Returns the leaves of the params after the last step."""
  policy = policy_lib.make_policy(config, workdir)
  mesh = sharding.make_mesh(config.mesh)
  params = policy_lib.initial_params(policy, config.seed)
  work = device_work.DeviceWork(
      config,
      state=work_parts.init_state(config, policy, params, mesh),
      train_step=work_parts.make_train_step(config, policy, mesh, params),
      reference=work_parts.make_reference(config, policy, params, mesh),
      merger=work_parts.make_merger(config, policy, params),
      checkpointer=None,
      cluster=cluster.Cluster(),
  )
  buffer = buffers.make_buffer(config, policy)
  learner = learner_lib.make_learner(config, policy, buffer, work)
  sampler = policy_samplers.make_sampler(config, policy)
  order = curriculum.make_order(config, policy.task, policy.tokenizer)
  per_step, kept = config.search.prompts_per_step, []
  for step in range(config.train.num_steps):
    # The step donates its params.
    kept.append(jax.tree.map(jnp.copy, learner.params))
    version = max(step - config.search.lead_steps, 0)
    prompts = [
        (position, *order.prompt(position))
        for position in range(step * per_step, (step + 1) * per_step)
    ]
    groups = _sample(config, policy, sampler, kept[version], prompts, version)
    for group in groups:
      buffer.insert(group, step)
    draw = buffer.sample(
        config.train.prompts_per_batch,
        config.train.completions_per_prompt,
        step,
    )
    buffer.mark_drawn(draw.ids)
    work.train(learner.make(draw))
    learner.finish()
  return published.flatten(work.state.params)


def _sample(
    config, policy, sampler, params, prompts, version
) -> Sequence[types.Group]:
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
      for _, prompt_id, visit in prompts
  ]
  sampled = sampler.sample(params, asked, version=version)
  groups = []
  for (position, _, _), request, completions in zip(prompts, asked, sampled):
    judged = [
        policy.task.judge(base.TRAIN, request.prompt_id, text)
        for text in policy.tokenizer.decode_completions(completions)
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


def train_by_loop(
    config: ml_collections.ConfigDict, workdir: str
) -> dict[str, np.ndarray]:
  """Returns the result of `train`, computed by the package's loop."""
  maker = inline.LoopMaker(config, workdir)
  loop = maker.make(config)
  loop.train()
  maker.close()
  return published.flatten(loop.learner.work.state.params)


def main(argv: Sequence[str]) -> None:
  run = train
  if argv[0] == "--loop":
    run, argv = train_by_loop, argv[1:]
  config_path, workdir, out, core = argv
  if core:
    os.sched_setaffinity(0, processes.parse_cores(core))
  processes.prepare_compiling()
  with open(config_path) as file:
    config = ml_collections.ConfigDict(json.load(file)["config"])
  np.savez(out, **run(config, workdir))


if __name__ == "__main__":
  main(sys.argv[1:])
