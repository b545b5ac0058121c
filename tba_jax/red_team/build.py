# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From `config.task` of red-teaming to its frozen models and its judge."""

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING

import jax
import ml_collections

from tba_jax import types
from tba_jax.red_team import classifiers
from tba_jax.red_team import embeddings
from tba_jax.red_team import judge as judge_lib
from tba_jax.red_team import made_up
from tba_jax.red_team import victim as victim_lib
from tba_jax.rewards import judges
from tba_jax.tasks import red_team

if TYPE_CHECKING:
  from tba_jax import tokenizer as tokenizer_lib
  from tba_jax.models import build
  from tba_jax.models import config as model_config_lib
  from tba_jax.models import encoder as encoder_lib
  from tba_jax.sampling import decode


@dataclasses.dataclass(frozen=True)
class Loaders:
  """How frozen models are made; handed in, so that this stays low.

  make_model: (shape) -> model.
  make_tokenizer: (words, pattern) -> tokenizer.
  load_model: (folder) -> model, params, tokenizer with the model's stops.
  load_encoder: (folder) -> encoder, params, tokenizer.
  make_sampler: of `decode.Sampler`.
  """

  make_model: "Callable[[model_config_lib.ModelConfig], build.Model]"
  make_tokenizer: "Callable[..., tokenizer_lib.Tokenizer]"
  load_model: Callable[
      [str],
      "tuple[build.Model, types.PyTree, tokenizer_lib.Tokenizer]",
  ]
  load_encoder: Callable[
      [str],
      "tuple[encoder_lib.Encoder, types.PyTree, tokenizer_lib.TextTokenizer]",
  ]
  make_sampler: "Callable[..., decode.Sampler]"


def make_judge(
    config: ml_collections.ConfigDict,
    task: red_team.RedTeam,
    loaders: Loaders,
    on_event: judges.OnEvent | None = None,
) -> judge_lib.RedTeamJudge:
  """Returns the judge of a run.

  Args:
    config: reads `seed` and `reward.fallback`.
    task: its fields name the models.
    loaders: of the models.
    on_event: receives what failed.

  Raises:
    ValueError: a folder cannot be read, or does not fit what it is for.
  """
  return judge_lib.RedTeamJudge(
      _make_victim(config, task, loaders),
      _make_classifier(task, loaders),
      make_embed(task, loaders),
      success_threshold=task.setting("success_threshold"),
      fallback=config.reward.fallback,
      on_event=on_event,
  )


def make_embed(task: red_team.RedTeam, loaders: Loaders) -> embeddings.EmbedFn:
  """Returns the sentence embeddings of a task."""
  folder = task.setting("encoder")
  if folder == red_team.WORDS:
    return embeddings.of_words
  encoder, params, tokenizer = loaders.load_encoder(folder)
  _check_length(encoder, task, "encoder_max_tokens")
  return embeddings.of_encoder(
      encoder.mean_pooled,
      params,
      tokenizer,
      max_tokens=task.setting("encoder_max_tokens"),
      num_rows=task.setting("classifier_rows"),
  )


def _make_victim(
    config: ml_collections.ConfigDict,
    task: red_team.RedTeam,
    loaders: Loaders,
) -> victim_lib.Victim:
  max_prompt_tokens = task.setting("victim_max_prompt_tokens")
  max_tokens = task.setting("victim_max_tokens")
  if task.setting("victim") == red_team.MADE_UP:
    tokenizer = loaders.make_tokenizer(
        task.tokenizer_words(), task.tokenizer_pattern
    )
    model = loaders.make_model(
        made_up.echo_config(
            tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            eos_id=tokenizer.eos_id,
            max_positions=max_prompt_tokens + max_tokens,
        )
    )
    params = made_up.echo_params(
        model.init(jax.random.PRNGKey(0)), range(made_up.NUM_SPECIAL)
    )
  else:
    model, params, tokenizer = loaders.load_model(task.setting("victim"))
  sampler = loaders.make_sampler(
      model,
      temperature=task.setting("victim_temperature"),
      top_k=0,
      top_p=task.setting("victim_top_p"),
      stop_ids=tokenizer.stop_ids,
      max_prompt_tokens=max_prompt_tokens,
      max_completion_tokens=max_tokens,
      num_rows=task.setting("victim_rows"),
      chunk_steps=max_tokens,
      eos_id=tokenizer.eos_id,
      pad_id=tokenizer.pad_id,
      seed=config.seed,
  )
  return victim_lib.Victim(
      sampler,
      params,
      tokenizer,
      template=task.setting("victim_template"),
      num_samples=task.setting("victim_samples"),
      max_prompt_tokens=max_prompt_tokens,
  )


def _make_classifier(
    task: red_team.RedTeam, loaders: Loaders
) -> classifiers.Words | classifiers.Sequences | classifiers.FirstToken:
  kind = task.setting("classifier")
  if kind == red_team.WORDS:
    return classifiers.Words(task.words)
  folder = task.setting("classifier_folder")
  sizes = {
      "max_tokens": task.setting("classifier_max_tokens"),
      "num_rows": task.setting("classifier_rows"),
  }
  if kind == "first_token":
    model, params, tokenizer = loaders.load_model(folder)
    return classifiers.FirstToken(
        lambda *inputs: model.prefill(*inputs)[0],
        params,
        tokenizer,
        token=task.setting("classifier_token"),
        **sizes,
    )
  encoder, params, tokenizer = loaders.load_encoder(folder)
  _check_length(encoder, task, "classifier_max_tokens")
  label = task.setting("classifier_label")
  if label >= encoder.config.num_labels:
    raise ValueError(
        f"config.task.classifier_label={label}: {folder} has"
        f" {encoder.config.num_labels} labels, counted from 0"
    )
  return classifiers.Sequences(
      encoder.label_scores, params, tokenizer, label=label, **sizes
  )


def _check_length(
    encoder: "encoder_lib.Encoder", task: red_team.RedTeam, key: str
) -> None:
  """Raises ValueError where an encoder has too few positions."""
  if task.setting(key) > encoder.config.max_tokens:
    raise ValueError(
        f"config.task.{key}={task.setting(key)}: allowed up to the"
        f" {encoder.config.max_tokens} positions of the encoder"
    )
