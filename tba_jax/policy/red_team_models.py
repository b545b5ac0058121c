# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the victim, encoder and classifier of red-teaming.

`mesh` None is one device.
"""

import functools

import jax
import ml_collections

from tba_jax import types
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.net import encoder as encoder_lib
from tba_jax.models.net import transformer
from tba_jax.policy import frozen_models
from tba_jax.rewards import echo_model
from tba_jax.rewards import red_team_judge
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import samplers
from tba_jax.tasks import red_team as task_lib

# Tokenizers of tasks begin with <pad>, <eos> and <unk>.
_NUM_SPECIAL = 3


def _load_policy(
    config: ml_collections.ConfigDict,
    folder: str,
    mesh: jax.sharding.Mesh | None,
) -> tuple[transformer.Model, types.PyTree, tokenizer_lib.Tokenizer]:
  """Returns a model, its params, and its tokenizer with the model's stops."""
  tokenizer = tokenizer_lib.load(folder)
  shape = hf_config.read(folder, attention=frozen_models.attention(config))
  tokenizer.add_turn_ends(shape.turn_ends)
  model = transformer.make_model(shape)
  return model, frozen_models.load_params(folder, model, mesh), tokenizer


def load_victim(
    config: ml_collections.ConfigDict,
    task: task_lib.RedTeam,
    mesh: jax.sharding.Mesh | None = None,
) -> red_team_judge.Victim:
  """Returns the victim of a task; ValueError if it cannot be read."""
  folder = task.setting("victim")
  if folder != task_lib.SYNTHETIC:
    return _victim(config, task, *_load_policy(config, folder, mesh))
  tokenizer = tokenizer_lib.word_level(
      task.tokenizer_words(), task.tokenizer_pattern
  )
  lengths = ("victim_max_prompt_tokens", "victim_max_tokens")
  model = transformer.make_model(
      echo_model.echo_config(
          tokenizer.vocab_size,
          pad_id=tokenizer.pad_id,
          eos_id=tokenizer.eos_id,
          max_positions=sum(map(task.setting, lengths)),
      )
  )
  params = echo_model.echo_params(
      model.init(jax.random.PRNGKey(0)), range(_NUM_SPECIAL)
  )
  return _victim(config, task, model, params, tokenizer)


def _victim(
    config: ml_collections.ConfigDict,
    task: task_lib.RedTeam,
    model: transformer.Model,
    params: types.PyTree,
    tokenizer: tokenizer_lib.Tokenizer,
) -> red_team_judge.Victim:
  """Returns a victim whose sampler compiles once."""
  max_tokens = task.setting("victim_max_tokens")
  sampler = samplers.make_here(
      model,
      requests_lib.SamplingSettings(
          temperature=task.setting("victim_temperature"),
          top_k=0,
          top_p=task.setting("victim_top_p"),
          stop_ids=tokenizer.stop_ids,
          max_prompt_tokens=task.setting("victim_max_prompt_tokens"),
          max_completion_tokens=max_tokens,
          num_rows=task.setting("victim_rows"),
          chunk_steps=max_tokens,
          pad_id=tokenizer.pad_id,
          seed=config.seed,
      ),
  )
  return red_team_judge.Victim(task, sampler, sampler.put(params), tokenizer)


def load_embed(
    task: task_lib.RedTeam,
    mesh: jax.sharding.Mesh | None = None,
) -> red_team_judge.EmbedFn:
  """Returns the task's sentence encoder; ValueError if it cannot be read."""
  folder = task.setting("encoder")
  if folder == task_lib.WORDS:
    return red_team_judge.word_embeddings
  encoder, params = _load_encoder(folder, mesh)
  return red_team_judge.encoder_embeddings(
      sharding.split_rows(encoder.mean_pooled, mesh),
      params,
      tokenizer_lib.load_texts(folder),
      _batch_shape(task, "encoder_max_tokens", encoder),
  )


def load_classifier(
    config: ml_collections.ConfigDict,
    task: task_lib.RedTeam,
    mesh: jax.sharding.Mesh | None = None,
) -> red_team_judge.Classifier:
  """Returns the task's classifier of answers.

  Raises:
    ValueError: the folder cannot be read, or lacks the label or positions.
  """
  kind = task.setting("classifier")
  if kind == task_lib.WORDS:
    return red_team_judge.word_share_classifier(task.words)
  folder = task.setting("classifier_folder")
  if kind == "first_token":
    model, params, tokenizer = _load_policy(config, folder, mesh)
    return red_team_judge.first_token_classifier(
        sharding.split_rows(model.last_logits, mesh),
        params,
        tokenizer,
        token=task.setting("classifier_token"),
        shape=_batch_shape(task, "classifier_max_tokens"),
    )
  encoder, params = _load_encoder(folder, mesh)
  shape = _batch_shape(task, "classifier_max_tokens", encoder)
  label = task.setting("classifier_label")
  if label >= encoder.config.num_labels:
    raise ValueError(
        f"config.task.classifier_label={label}: {folder} has"
        f" {encoder.config.num_labels} labels, counted from 0"
    )
  return red_team_judge.sequence_classifier(
      sharding.split_rows(encoder.label_scores, mesh),
      params,
      tokenizer_lib.load_texts(folder),
      label=label,
      shape=shape,
  )


def _load_encoder(
    folder: str,
    mesh: jax.sharding.Mesh | None,
) -> tuple[encoder_lib.Encoder, types.PyTree]:
  of_encoder = functools.partial(sharding.frozen_shardings, mesh)
  return encoder_lib.load_encoder(folder, of_encoder)


def _batch_shape(
    task: task_lib.RedTeam, key: str, encoder: encoder_lib.Encoder | None = None
) -> tuple[int, int]:
  """Returns B and L; ValueError if an encoder has too few positions."""
  num_tokens = task.setting(key)
  if encoder is not None and num_tokens > encoder.config.max_tokens:
    raise ValueError(
        f"config.task.{key}={num_tokens}: must be at most the"
        f" {encoder.config.max_tokens} positions of the encoder"
    )
  return task.setting("classifier_rows"), num_tokens
