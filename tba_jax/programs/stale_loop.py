# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training in one process with an exact staleness: the runs of a sweep.

Losses and train step are those of the trainer. What step t trains on was
sampled with the version that the run's `Lag` names; each batch is held to it.
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
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.programs import sweep
from tba_jax.replay import prompt_order
from tba_jax.sampling import decode
from tba_jax.tasks import base
from tba_jax.training import batches
from tba_jax.training import policy
from tba_jax.training import reference as reference_lib
from tba_jax.training import sharding
from tba_jax.training import train_step as train_step_lib

# Batches and evaluations straight from params, for the runs of a sweep.
#
# The sampler, the reference policy and the reward are those of the roles;
# store,
# journal and replay buffer are left out.


# Visits of held-out prompts stand above those of training, so that the two
# never share random numbers.
_EVALUATION_VISIT = 2**31


class Samples:
  """Samples completions and gives them rewards and reference log-probs."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      mesh: jax.sharding.Mesh,
      *,
      task: base.Task,
      tokenizer: tokenizer_lib.Tokenizer,
      sampler: decode.Sampler,
      reference: reference_lib.Reference,
  ):
    """Takes the parts, which are those of the config."""
    self._config = config
    self._mesh = mesh
    self._task = task
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._reference = reference

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[tuple[int, int]],
      num_completions: int,
      *,
      version: int,
      seed: int,
      split: str = base.TRAIN,
  ) -> types.Batch:
    """Returns completions of prompts; blocks until they are sampled.

    Args:
      params: of the policy that samples.
      prompts: (prompt id, visit) of each, B in all.
      num_completions: K.
      version: of `params`.
      seed: of the random numbers.
      split: of the task.

    Returns:
      A host batch. Its `staleness_steps` are 0 and its `ref_logprobs` are
      missing; `finish` puts them in.
    """
    tokenizer, task = self._tokenizer, self._task
    asked = [
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
    found = self._sampler.sample(params, asked, version=version)
    rewards_BxK = [
        [
            task.reward(split, index, text)
            for text in _texts(tokenizer, completions)
        ]
        for (index, _), completions in zip(prompts, found)
    ]
    stack = lambda name: np.stack([getattr(c, name) for c in found])
    tokens_BxKxT = stack("tokens")
    prompt_tokens_BxP, prompt_mask_BxP = self._pad(asked)
    return types.Batch(
        prompt_tokens=prompt_tokens_BxP,
        prompt_mask=prompt_mask_BxP,
        completion_tokens=tokens_BxKxT,
        completion_mask=batches.completion_mask(
            tokens_BxKxT,
            stack("lengths"),
            () if self._config.loss.include_stop_token else tokenizer.stop_ids,
        ),
        behavior_logprobs=stack("logprobs"),
        ref_logprobs=np.zeros(tokens_BxKxT.shape, np.float32),
        rewards=np.asarray(rewards_BxK, np.float32),
        staleness_steps=np.zeros(tokens_BxKxT.shape[:2], np.float32),
    )

  def finish(self, batch: types.Batch, staleness_steps: int) -> types.Batch:
    """Returns a host batch on the mesh, with what `sample` leaves out."""
    staleness_BxK = np.full_like(batch.staleness_steps, staleness_steps)
    placed = sharding.shard_batch(
        types.Batch(**{**vars(batch), "staleness_steps": staleness_BxK}),
        self._mesh,
        self._config.sharding,
    )
    ref_logprobs = self._reference.logprobs(
        placed.prompt_tokens,
        placed.prompt_mask,
        placed.completion_tokens,
        placed.completion_mask,
    )
    return types.Batch(**{**vars(placed), "ref_logprobs": ref_logprobs})

  def evaluate(
      self, params: types.PyTree, *, version: int, seed: int
  ) -> dict[str, float]:
    """Returns what the policy does on held-out prompts; blocks.

    Args:
      params: of the policy.
      version: of `params`.
      seed: of the random numbers.

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
      # The last batch reaches back: all have one shape.
      start = max(min(start, c.final_prompts - c.batch_prompts), 0)
      indices = range(start, min(start + c.batch_prompts, c.final_prompts))
      batch = self.finish(
          self.sample(
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

  def _pad(
      self, asked: Sequence[decode.Request]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts' tokens and mask, left-padded."""
    shape = (len(asked), self._config.sampling.max_prompt_tokens)
    tokens_BxP = np.full(shape, self._tokenizer.pad_id, np.int32)
    mask_BxP = np.zeros(shape, np.float32)
    for b, request in enumerate(asked):
      length = len(request.prompt_tokens)
      tokens_BxP[b, -length:] = request.prompt_tokens
      mask_BxP[b, -length:] = 1
    return tokens_BxP, mask_BxP


def _texts(
    tokenizer: tokenizer_lib.Tokenizer, completions: types.Completions
) -> list[str]:
  """Returns the K texts, each without its final stop token."""
  return [
      tokenizer.decode_completion(tokens, int(length), bool(stopped))
      for tokens, length, stopped in zip(
          completions.tokens, completions.lengths, completions.stopped
      )
  ]


# Metrics of a step whose means over the last quarter of a run are kept.
_KEPT = ("reward_mean", "entropy", "ratio_clip_share", "grad_norm",
         "effective_sample_share", "equal_reward_groups")  # fmt: skip


class Interrupted(Exception):
  """`should_stop` was true before the run was done."""


@dataclasses.dataclass(frozen=True)
class Sampled:
  """What a step will train on.

  version: steps that the policy had done when it sampled.
  batch: on the host, as `Samples.sample` gives it.
  """

  version: int
  batch: types.Batch


class Bench:
  """Makes the runs of a sweep one after the other, on compiled parts.

  Policy, reference and sampler serve all runs, an objective's train step all
  its lags and seeds: nothing is compiled twice.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    """Loads the policy that all runs start from.

    Raises:
      ValueError: WORKDIR/sft/model is missing or disagrees with the config.
    """
    self._policy = policy.make_policy(config, workdir)
    self._params = policy.initial_params(self._policy, config.seed)
    self._mesh = sharding.make_mesh(config.mesh)
    self._samples = Samples(
        config,
        self._mesh,
        task=self._policy.task,
        tokenizer=self._policy.tokenizer,
        sampler=policy.make_sampler(config, self._policy),
        reference=reference_lib.Reference(
            self._policy.model,
            self._params,
            temperature=config.sampling.temperature,
        ),
    )
    # By objective: its step, and its state before step 0.
    self._objectives: dict[
        str, tuple[train_step_lib.TrainStep, train_step_lib.TrainState]
    ] = {}

  def run(
      self,
      run: sweep.Run,
      *,
      should_stop: Callable[[], bool] = lambda: False,
      on_step: Callable[[train_step_lib.TrainState], None] = lambda state: None,
  ) -> dict[str, Any]:
    """Trains and evaluates; returns the result as plain JSON types.

    Args:
      run: of this sweep.
      should_stop: asked before each step.
      on_step: called with the state before each step, which may not be kept.

    Returns:
      `curve`: evaluations on held-out prompts by step, the first before the
      run; `versions`: that sampled the batch of each step; `train`: means over
      the last quarter of the steps; `diverged_step`: where the loss was not
      finite, which ends the run, or None; `wall_s`.

    Raises:
      Interrupted: `should_stop` was true.
      RuntimeError: a batch is not of the version that the lag names.
    """
    started = time.perf_counter()
    train_step, first_state = self._objective(run)
    # The step donates its state, and the next run needs the first one.
    state = jax.tree.map(jnp.copy, first_state)
    order = prompt_order.PromptOrder(
        self._policy.task.num_prompts(base.TRAIN), seed=run.seed
    )
    num_steps = run.config.train.num_steps
    every = run.config.evaluate.every_steps or num_steps
    evaluate = lambda step: {
        "step": step,
        **self._samples.evaluate(state.params, version=step, seed=run.seed),
    }
    curve, metrics, used = [evaluate(0)], [], []
    ahead: dict[int, Sampled] = {}
    diverged_step = None
    for step in range(num_steps):
      if should_stop():
        raise Interrupted(f"{run.name}: stopped at step {step}")
      on_step(state)
      # What several steps train on waits on the host; no old params are kept.
      while (next_step := step + len(ahead)) < num_steps and run.lag.version_of(
          next_step
      ) <= step:
        ahead[next_step] = self._sample(run, state, order, next_step)
      sampled = ahead.pop(step)
      _check_version(run, int(state.step), sampled.version)
      used.append(sampled.version)
      batch = self._samples.finish(sampled.batch, step - sampled.version)
      state, found = train_step(state, batch)
      metrics.append({k: float(found[k]) for k in _KEPT})
      if not np.isfinite(found["loss"]):
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
      self, run: sweep.Run
  ) -> tuple[train_step_lib.TrainStep, train_step_lib.TrainState]:
    if run.objective not in self._objectives:
      model = self._policy.model
      value_model = policy.make_value_model(run.config, model)
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
              value_params=policy.load_value_params(run.config),
          ),
      )
    return self._objectives[run.objective]

  def _sample(
      self,
      run: sweep.Run,
      state: train_step_lib.TrainState,
      order: prompt_order.PromptOrder,
      step: int,
  ) -> Sampled:
    """Returns what `step` will train on, sampled with the present params."""
    size = run.config.train.prompts_per_batch
    version = int(state.step)
    batch = self._samples.sample(
        state.params,
        [order.prompt(step * size + i) for i in range(size)],
        run.config.train.completions_per_prompt,
        version=version,
        seed=run.seed,
    )
    return Sampled(version, batch)


def _check_version(run: sweep.Run, step: int, version: int) -> None:
  """A staleness that is not exact would make the whole study wrong."""
  expected = run.lag.version_of(step)
  if version != expected:
    raise RuntimeError(
        f"{run.name}: the batch of step {step} was sampled with version"
        f" {version}, not {expected}"
    )
