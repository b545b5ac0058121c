# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Single-process training with an exact staleness, for the runs of a sweep.

Sampler, reference policy, rewards and train step are those of the roles,
without store, journal and replay buffer. The batch of step t is sampled with
the version that the run's `Lag` gives; each batch is checked.
"""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import prompt_order
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.tasks import base
from tba_jax.training import batches
from tba_jax.training import frozen
from tba_jax.training import packing
from tba_jax.training import policy as policy_lib
from tba_jax.training import reference as reference_lib
from tba_jax.training import sharding
from tba_jax.training import train_step as train_step_lib

# Visits of held-out prompts are above those of training, so that the two share
# no random numbers.
_EVALUATION_VISIT = 2**31
# Step metrics whose means over the last quarter of a run are saved.
_KEPT = ("reward_mean", "entropy", "ratio_clip_share", "grad_norm",
         "effective_sample_share", "equal_reward_groups")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lag:
  """The version that samples the batch of step t.

  staleness_steps: s, for version max(t - s, 0).
  mini_batches: N; from 2 on rounds of N steps, for version t - t mod N.
  """

  staleness_steps: int = 0
  mini_batches: int = 1

  @property
  def label(self) -> str:
    if self.mini_batches > 1:
      return f"N={self.mini_batches}"
    return f"s={self.staleness_steps}"

  def version_of(self, step: int) -> int:
    """Returns the version that samples what `step` trains on."""
    if self.mini_batches > 1:
      return step - step % self.mini_batches
    return max(step - self.staleness_steps, 0)


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a sweep.

  objective: name in `config.sweep.objectives`.
  lag: of its samples.
  seed: of its prompts and samples.
  config: with the settings of its objective.
  """

  objective: str
  lag: Lag
  seed: int
  config: ml_collections.ConfigDict

  @property
  def name(self) -> str:
    lag = self.lag.label.replace("=", "")
    return f"{self.objective}-{lag}-seed{self.seed}"


class Interrupted(Exception):
  """`should_stop` was true before the run was done."""


class Bench:
  """Makes the runs of a sweep one after the other; compiles nothing twice.

  All runs share policy, reference and sampler; all lags and seeds of an
  objective share its train step.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    """Loads the policy that all runs start from.

    Raises:
      ValueError: WORKDIR/sft/model is missing or disagrees with the config.
    """
    self._config = config
    self._policy = policy_lib.make_policy(config, workdir)
    self._params = policy_lib.initial_params(self._policy, config.seed)
    self._mesh = sharding.make_mesh(config.mesh)
    self._sampler = policy_lib.make_sampler(config, self._policy)
    self._reference = reference_lib.Reference(
        self._policy.model,
        self._params,
        temperature=config.sampling.temperature,
    )
    # By objective: its step, and its state before step 0.
    self._objectives: dict[
        str, tuple[train_step_lib.TrainStep, train_step_lib.TrainState]
    ] = {}

  def run(
      self,
      run: Run,
      *,
      should_stop: Callable[[], bool] = lambda: False,
      on_step: Callable[[train_step_lib.TrainState], None] = lambda state: None,
  ) -> dict[str, Any]:
    """Trains and evaluates; returns the result as plain JSON types.

    Args:
      run: of this sweep.
      should_stop: called before each step.
      on_step: called with the state before each step, which is then donated.

    Returns:
      `curve`: evaluations on held-out prompts, the first at step 0;
      `versions` that sampled the batch of each step; `train`: means over the
      last quarter of the steps; `diverged_step`: the step whose loss or
      gradient was not finite, which ends the run, or None; `wall_s`.

    Raises:
      Interrupted: `should_stop` was true.
      RuntimeError: a batch is not of the lag's version.
    """
    started = time.perf_counter()
    train_step, first_state = self._objective(run)
    # The step donates its state; the next run needs the first one.
    state = jax.tree.map(jnp.copy, first_state)
    order = prompt_order.PromptOrder(
        self._policy.task.num_prompts(base.TRAIN), seed=run.seed
    )
    num_steps = run.config.train.num_steps
    every = run.config.evaluate.every_steps or num_steps
    evaluate = lambda step: {
        "step": step,
        **self._evaluate(state.params, version=step, seed=run.seed),
    }
    curve, metrics, used = [evaluate(0)], [], []
    ahead: dict[int, tuple[int, types.Batch]] = {}
    diverged_step = None
    for step in range(num_steps):
      if should_stop():
        raise Interrupted(f"{run.name}: stopped at step {step}")
      on_step(state)
      # Sample all batches of this version; they wait on the host.
      while (next_step := step + len(ahead)) < num_steps and run.lag.version_of(
          next_step
      ) <= step:
        ahead[next_step] = self._sample_step(run, state, order, next_step)
      version, batch = ahead.pop(step)
      _check_version(run, int(state.step), version)
      used.append(version)
      batch = self._finish(batch, step - version)
      state, found = train_step(state, batch)
      metrics.append({k: float(found[k]) for k in _KEPT})
      if found["nonfinite"]:
        diverged_step = step
        break
      if (step + 1) % every == 0 or step + 1 == num_steps:
        curve.append(evaluate(step + 1))
    last = metrics[-max(num_steps // 4, 1) :]
    return {
        "curve": curve,
        "versions": used,
        "train": {k: float(np.mean([m[k] for m in last])) for k in _KEPT},
        "diverged_step": diverged_step,
        "wall_s": time.perf_counter() - started,
    }

  def _objective(
      self, run: Run
  ) -> tuple[train_step_lib.TrainStep, train_step_lib.TrainState]:
    if run.objective not in self._objectives:
      model = self._policy.model
      folder = policy_lib.find_value_folder(run.config, "")
      value_model = policy_lib.make_value_model(run.config, model, folder)
      self._objectives[run.objective] = (
          train_step_lib.make_train_step(
              run.config, model, self._mesh, value_model=value_model
          ),
          train_step_lib.init_state(
              run.config,
              model,
              self._params,
              self._mesh,
              value_model=value_model,
              value_params=folder
              and frozen.load_params(
                  folder, value_model, self._mesh, run.config.sharding
              ),
          ),
      )
    return self._objectives[run.objective]

  def _sample_step(
      self,
      run: Run,
      state: train_step_lib.TrainState,
      order: prompt_order.PromptOrder,
      step: int,
  ) -> tuple[int, types.Batch]:
    """Returns the current version, and the batch of `step` that it samples."""
    size = run.config.train.prompts_per_batch
    version = int(state.step)
    batch = self._sample(
        state.params,
        [order.prompt(step * size + i) for i in range(size)],
        run.config.train.completions_per_prompt,
        version=version,
        seed=run.seed,
    )
    rows = packing.pack(
        run.config, batch.prompt_tokens, batch.completion_tokens
    )
    return version, dataclasses.replace(batch, rows=rows)

  def _sample(
      self,
      params: types.PyTree,
      prompts: Sequence[tuple[int, int]],
      num_completions: int,
      *,
      version: int,
      seed: int,
      split: str = base.TRAIN,
  ) -> types.Batch:
    """Returns completions of prompts as a host batch, with their rewards.

    Args:
      params: of the policy that samples.
      prompts: (prompt id, visit) of each, B in all.
      num_completions: K.
      version: of `params`.
      seed: of the random numbers.
      split: of the task.

    Returns:
      A batch without `staleness_steps` and `ref_logprobs`; `_finish` adds them.
    """
    tokenizer, task = self._policy.tokenizer, self._policy.task
    requests = [
        decode.Request(
            prompt_tokens=np.asarray(
                tokenizer.encode_prompt(task.prompt(split, index)), np.int32
            ),
            prompt_id=index,
            visit=visit,
            num_completions=num_completions,
            seed=seed,
        )
        for index, visit in prompts
    ]
    found = self._sampler.sample(params, requests, version=version)
    judged_BxK = [
        [
            task.judge(split, index, text)
            for text in policy_lib.decode_texts(tokenizer, c)
        ]
        for (index, _), c in zip(prompts, found)
    ]
    if split == base.TRAIN:
      rewards_BxK = [
          judges.final_rewards(self._config.loss, judged_K, c.stopped)
          for judged_K, c in zip(judged_BxK, found)
      ]
    else:
      rewards_BxK = [[j.reward for j in judged_K] for judged_K in judged_BxK]
    stack = lambda name: np.stack([getattr(c, name) for c in found])
    batch = batches.pad_sequences(
        [(r.prompt_tokens, c.tokens) for r, c in zip(requests, found)],
        (len(prompts),),
        num_completions=num_completions,
        max_prompt_tokens=self._config.sampling.max_prompt_tokens,
        max_completion_tokens=self._config.sampling.max_completion_tokens,
    )
    counts = self._config.loss.include_stop_token
    return dataclasses.replace(
        batch,
        completion_mask=batches.completion_mask(
            batch.completion_tokens,
            stack("sampled_mask"),
            None if counts else tokenizer,
        ),
        behavior_logprobs=stack("logprobs"),
        rewards=np.asarray(rewards_BxK, np.float32),
    )

  def _finish(self, batch: types.Batch, staleness_steps: int) -> types.Batch:
    """Puts a host batch on the mesh; adds staleness and ref log-probs."""
    staleness_BxK = np.full_like(batch.staleness_steps, staleness_steps)
    placed = sharding.shard_batch(
        dataclasses.replace(batch, staleness_steps=staleness_BxK),
        self._mesh,
        self._config.sharding,
    )
    ref_logprobs = self._reference.logprobs(
        placed.prompt_tokens,
        placed.prompt_mask,
        placed.completion_tokens,
        placed.completion_mask,
        rows=placed.rows,
    )
    return dataclasses.replace(placed, ref_logprobs=ref_logprobs)

  def _evaluate(
      self, params: types.PyTree, *, version: int, seed: int
  ) -> dict[str, float]:
    """Returns means over completions of held-out prompts.

    Returns:
      reward: mean over completions, task units.
      kl: mean over completions of Σ_t (log π - log π_ref), nats.
      ref_perplexity: exp of the mean of -log π_ref over all tokens.
      length: mean, tokens with the stop token.
      distinct: share of distinct completions among those of a prompt.
    """
    c = self._config.evaluate
    sums, num_completions = np.zeros(5), 0
    for start in range(0, c.final_prompts, c.batch_prompts):
      # The last batch overlaps the one before: all have one shape.
      start = max(min(start, c.final_prompts - c.batch_prompts), 0)
      indices = range(start, min(start + c.batch_prompts, c.final_prompts))
      batch = self._finish(
          self._sample(
              params,
              [(index, _EVALUATION_VISIT) for index in indices],
              c.num_completions,
              version=version,
              seed=seed,
              split=base.HELD_OUT,
          ),
          0,
      )
      mask_BxKxT = batch.completion_mask
      kl_BxKxT = mask_BxKxT * (batch.behavior_logprobs - batch.ref_logprobs)
      distinct = [
          len({tokens.tobytes() for tokens in group})
          for group in np.asarray(batch.completion_tokens)
      ]
      sums += [
          float(batch.rewards.sum()),
          float(kl_BxKxT.sum()),
          float(batch.ref_logprobs.sum()),
          float(mask_BxKxT.sum()),
          sum(distinct),
      ]
      num_completions += len(indices) * c.num_completions
    reward, kl, ref_logprob, num_tokens, num_distinct = sums
    return {
        "reward": reward / num_completions,
        "kl": kl / num_completions,
        "ref_perplexity": float(np.exp(-ref_logprob / num_tokens)),
        "length": num_tokens / num_completions,
        "distinct": num_distinct / num_completions,
    }


def _check_version(run: Run, step: int, version: int) -> None:
  """Raises RuntimeError if a batch's staleness is not exact."""
  expected = run.lag.version_of(step)
  if version != expected:
    raise RuntimeError(
        f"{run.name}: the batch of step {step} was sampled with version"
        f" {version}, not {expected}"
    )
