# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the replay buffer and its admission, made from a config."""

from collections.abc import Callable
import math
import os
import secrets
import socket
import time

import ml_collections

from tba_jax import agreement
from tba_jax import policy as policy_lib
from tba_jax import rounds
from tba_jax import run_directory
from tba_jax import schedules
from tba_jax import searcher as searcher_lib
from tba_jax.replay import admission
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import claim
from tba_jax.replay import flow as flow_lib
from tba_jax.replay import prompt_order
from tba_jax.replay import similarity
from tba_jax.transport import base
from tba_jax.transport import kv_client


def make_flow(config: ml_collections.ConfigDict) -> flow_lib.Flow:
  """Returns the admission that a config asks for."""
  return flow_lib.Flow(
      prompts_per_step=config.search.prompts_per_step,
      warm_prompts=math.ceil(
          config.replay.warm_start_completions
          / config.search.samples_per_prompt
      ),
      lead_steps=config.search.lead_steps,
      num_steps=config.train.num_steps,
      lockstep=config.search.lockstep,
      wait_for_fresh=config.search.wait_for_fresh,
      starvation_s=config.search.starvation_s,
      round_prompts=config.rounds.mini_batches * config.train.prompts_per_batch,
      round_steps=rounds.num_steps(config),
      lag_rounds=config.rounds.lag_rounds,
  )


def make_claim(run: run_directory.Run) -> claim.Claim:
  """Returns what makes a store that of a run directory's trainer."""
  return claim.Claim(
      run_id=run.run_id,
      secret=run.secret,
      owner=run_directory.owner(run),
      place=f"{socket.gethostname()}:{run.workdir}",
  )


def make_agreement(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
    check: Callable[..., None],
    on_event: Callable[[str, str], None],
) -> agreement.Agreement:
  """Returns what holds a searcher to its trainer; `check` as there."""
  return agreement.Agreement(
      agreement.Terms.make(config, run, policy),
      run_id=run.run_id,
      secret=run.secret,
      check=check,
      on_event=on_event,
  )


def make_announcement(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
) -> Callable[[base.Transport], None]:
  """Returns what a trainer does to a new store: claims it, tells its terms."""
  taken = make_claim(run)
  terms = agreement.Terms.make(config, run, policy)

  def announce(transport: base.Transport) -> None:
    taken.take(transport)
    agreement.put(transport, terms, run_id=run.run_id, secret=run.secret)

  return announce


def transport_maker(
    config: ml_collections.ConfigDict, run: run_directory.Run
) -> Callable[[], kv_client.KvTransport]:
  """Returns what makes clients of a run's store."""
  return lambda: kv_client.KvTransport(
      run.finder,
      deadline_s=config.store.deadline_s,
      run_id=run.run_id,
      tls=run.tls,
  )


def make_sid(index: int) -> str:
  """Returns a searcher's name: none had it before; readable in a log."""
  unique = f"{int(time.time()):x}-{os.getpid():x}-{secrets.token_hex(4)}"
  return f"s{index:03d}-{unique}"


def make_prompt_order(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> prompt_order.PromptOrder:
  """Returns the order over the task's training prompts."""
  return prompt_order.PromptOrder(
      policy.task.num_prompts(searcher_lib.SPLIT), seed=config.seed
  )


def make_buffer(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy | None = None
) -> buffer_lib.ReplayBuffer:
  """Returns the empty buffer of a config.

  Args:
    config: reads `replay`, `replay_filter`, `sampling` and `seed`.
    policy: its tokenizer and task are needed where sentence embeddings are
      compared.
  """
  replay = config.replay
  return buffer_lib.ReplayBuffer(
      capacity_per_prompt=replay.capacity_per_prompt,
      capacity=replay.capacity,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
      recent_fraction=replay.recent_fraction,
      recent_window_steps=replay.recent_window_steps,
      selection=replay.selection,
      reward_temperature=schedules.reward_temperature(
          replay, per_round_steps=config.train.per_round_steps
      ),
      dedupe=replay.dedupe,
      seed=config.seed,
      rules=_make_rules(config.replay_filter, policy),
  )


def _make_rules(
    c: ml_collections.ConfigDict, policy: policy_lib.Policy | None
) -> admission.Rules:
  """Returns who the buffer takes in, by `config.replay_filter`."""
  make = None
  if c.similarity == "edit":
    make = lambda table: similarity.EditDistance(table, c.similarity_limit)
  elif c.similarity == "cosine":
    embed = policy_lib.make_embed(policy)
    make = lambda table: similarity.Cosine(embed, c.similarity_limit)
  return admission.Rules(
      duplicates=c.duplicates,
      evict=c.evict,
      freeze_step=c.freeze_step,
      make_similarity=make,
  )
