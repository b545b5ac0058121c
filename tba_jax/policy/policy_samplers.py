# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Samplers of a policy, with the settings of a config."""

import dataclasses
import functools
from typing import Any

import ml_collections

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.net import transformer
from tba_jax.policy import policy as policy_lib
from tba_jax.sampling import requests
from tba_jax.sampling import samplers
from tba_jax.sampling import sharing
from tba_jax.tasks import task_table as tasks_build

# Separates the evaluations' random numbers from the run's.
_EVALUATION_SEED = 0x5EED
_REFERENCE_SEED = 0x4EF


def make_searcher_sampler(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    home: samplers.SamplerHome | None = None,
) -> requests.Sampler:
  """Returns the sampler of a searcher; see `samplers.make`."""
  settings = searcher_settings(config, policy)
  return samplers.make(config, policy.model, settings, home)


def searcher_settings(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> requests.SamplingSettings:
  """Returns the settings of a searcher's sampler."""
  most = sharing.most_rows_of_stream(
      config.sampling.num_slots,
      config.search.samples_per_prompt,
      config.sampling.max_prompt_tokens,
      config.sampling.max_completion_tokens,
  )
  return _sampler_settings(
      config,
      policy.tokenizer,
      num_rows=config.sampling.num_slots,
      num_waiting=config.sampling.num_waiting,
      most_rows_per_prompt=most,
      seed=config.seed,
      explore=requests.Explore(**config.explore),
      has_routes=config.train.router_replay,
      num_kept=samplers.num_kept(config),
      weights=config.search.quantization,
  )


def make_sampler(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> requests.Sampler:
  """Returns a searcher's sampler for any number of completions per prompt."""
  settings = searcher_settings(config, policy)
  settings = dataclasses.replace(settings, most_rows_per_prompt=1)
  return samplers.make_here(policy.model, settings)


def make_evaluation_sampler(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    reference_model: transformer.Model | None = None,
) -> requests.Sampler:
  """Returns the evaluator's sampler, with separate random numbers.

  It samples from `reference_model`, or by default from the policy's model.
  """
  return build_sampler(
      config,
      reference_model or policy.model,
      policy.tokenizer,
      num_rows=config.evaluate.batch_prompts * config.evaluate.num_completions,
      most_rows_per_prompt=config.evaluate.num_completions,
      seed=config.seed
      ^ (_REFERENCE_SEED if reference_model else _EVALUATION_SEED),
  )


def make_greedy_sampler(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> requests.Sampler:
  """Returns the greedy sampler of evaluations: one completion per prompt."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.sampling.temperature = 0.0
  return build_sampler(
      config,
      policy.model,
      policy.tokenizer,
      num_rows=config.evaluate.batch_prompts,
      seed=config.seed,
  )


def build_sampler(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    tokenizer: tokenizer_lib.Tokenizer,
    **kwargs: Any,
) -> requests.Sampler:
  """Returns a sampler of a model with the settings of `config.sampling`.

  Without `explore`, only the length limits of `config.explore` apply.
  """
  settings = _sampler_settings(config, tokenizer, **kwargs)
  return samplers.make_here(model, settings)


def _sampler_settings(
    config: ml_collections.ConfigDict,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    num_rows: int,
    seed: int,
    num_waiting: int = 0,
    most_rows_per_prompt: int = 1,
    explore: requests.Explore | None = None,
    has_routes: bool = False,
    num_kept: int = 0,
    weights: str = "",
) -> requests.SamplingSettings:
  return requests.SamplingSettings(
      temperature=config.sampling.temperature,
      top_k=config.sampling.top_k,
      top_p=config.sampling.top_p,
      min_p=config.sampling.min_p,
      num_kept=num_kept,
      stop_ids=tokenizer.stop_ids,
      stop_strings=tokenizer.stop_strings,
      text_fn=functools.partial(tokenizer.decode, within=True),
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
      num_rows=num_rows,
      num_waiting=num_waiting,
      most_rows_per_prompt=most_rows_per_prompt,
      chunk_steps=config.sampling.chunk_steps,
      prompt_buckets=config.sampling.prompt_buckets,
      has_routes=has_routes,
      has_turns=tasks_build.facts(config.task.name).has_turns,
      recompute_cache=config.sampling.in_flight == "recompute_cache",
      pad_id=tokenizer.pad_id,
      seed=seed,
      explore=explore
      or requests.Explore(
          min_tokens=config.explore.min_tokens,
          max_tokens=config.explore.max_tokens,
      ),
      weights=weights,
  )
