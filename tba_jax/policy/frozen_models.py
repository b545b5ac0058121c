# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the frozen models that judge completions, onto the mesh of their role.

They are sharded by the policy's rules (`sharding.RULES`), and a process reads
leaf by leaf what its own devices hold. `mesh` None is one device.
"""

import os
import pathlib

import jax
import ml_collections

from tba_jax import types
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tba_jax.rewards import reward_scorer


def load_params(
    folder: str | os.PathLike[str],
    model: transformer.Model | heads.ScalarModel,
    mesh: jax.sharding.Mesh | None,
) -> types.PyTree:
  """Returns the params of a Hugging Face folder, in the model's dtype."""
  shardings = sharding.frozen_shardings(mesh, model)
  dtype = model.config.param_dtype
  return hf.load(folder, dtype=dtype, shardings=shardings)[1]


def load_reference(
    config: ml_collections.ConfigDict,
    tokenizer: tokenizer_lib.Tokenizer,
    mesh: jax.sharding.Mesh | None,
) -> tuple[transformer.Model, types.PyTree]:
  """Returns the model of `reference.init`, and its params in its own dtype.

  Raises:
    ValueError: the folder cannot be read, or has another tokenizer than the
      policy.
  """
  folder = config.reference.init
  try:
    shape = hf_config.read(
        folder,
        compute_dtype=config_lib.compute_dtype(
            config.model, jax.default_backend()
        ),
        attention=attention(config),
    )
    folders.check_labels(shape, folders.POLICY)
    folders.check_vocabulary(shape, tokenizer.vocab_size)
    if folders.has_tokenizer(hf_hub.find(folder)):
      _check_tokens(tokenizer, tokenizer_lib.load(folder))
  except ValueError as error:
    raise ValueError(f"config.reference.init={folder!r}: {error}") from error
  model = transformer.make_model(shape)
  return model, load_params(folder, model, mesh)


def _check_tokens(
    mine: tokenizer_lib.Tokenizer, its: tokenizer_lib.Tokenizer
) -> None:
  """Raises ValueError unless two tokenizers have the same tokens."""
  if mine.vocab_size != its.vocab_size:
    raise ValueError(
        f"its tokenizer has {its.vocab_size} tokens, the policy's"
        f" {mine.vocab_size}; must be a model with the policy's tokenizer"
    )
  ids = range(mine.vocab_size)
  for i, (own, other) in enumerate(zip(mine.tokens(ids), its.tokens(ids))):
    if own != other:
      raise ValueError(
          f"token {i} of its tokenizer is {other!r}, of the policy's {own!r};"
          " must be a model with the policy's tokenizer"
      )


def load_scorer(
    config: ml_collections.ConfigDict,
    key: str,
    folder: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
) -> reward_scorer.RewardScorer:
  """Returns the scorer of a Hugging Face folder with a scalar head.

  Args:
    config: reads `reward.batch_size`, `sampling`, `sharding`, `tokenizer.bos`
      and `model.compute_dtype`.
    folder: the params keep its dtype.
    mesh: the role's mesh.

  Raises:
    ValueError: the folder is missing or cannot be read, or its head does not
      return one number.
  """
  path = hf_hub.find(folder)
  if not (path / "config.json").is_file():
    raise ValueError(
        f"config.{key}={str(folder)!r}: no model is there; must be a Hugging"
        " Face folder with a scalar head, such as --program=reward_model makes"
    )
  compute_dtype = config_lib.compute_dtype(config.model, jax.default_backend())
  shape = hf_config.read(
      path,
      compute_dtype=compute_dtype,
      attention=attention(config),
  )
  try:
    folders.check_labels(shape, folders.SCORER)
  except ValueError as error:
    raise ValueError(f"config.{key}={str(folder)!r}: {error}") from error
  model = heads.ScalarModel(shape)
  return reward_scorer.RewardScorer(
      sharding.split_rows(model.rewards, mesh),
      load_params(path, model, mesh),
      tokenizer_lib.load_configured(path, config.tokenizer),
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
      batch_size=config.reward.batch_size,
  )


def attention(config: ml_collections.ConfigDict) -> str:
  """Returns "auto" or "plain"; what the policy names may not serve a judge."""
  return "plain" if config.model.attention == "plain" else "auto"
