# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The value model of objectives that have one."""

import dataclasses
import pathlib

import ml_collections

from tba_jax.losses import objective_table
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf_config
from tba_jax.models.net import heads
from tba_jax.models.net import transformer


def make_model(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    folder: pathlib.Path | None = None,
) -> heads.ScalarModel | None:
  """Returns the value model; None if `config.loss.name` has none.

  It has the shape of the policy's `model`, or of the model in `folder`
  (`policy.find_value_folder`), the policy's compute dtype and float32 params;
  ValueError unless the folder has one scalar head and the policy's vocabulary.
  """
  if not objective_table.find(config.loss.name).has_values:
    return None
  if folder is None:
    shape = heads.config_of(model.config)
    shape = dataclasses.replace(shape, param_dtype="float32")
    return heads.ScalarModel(shape, remat=config.train.remat)
  shape = hf_config.read(
      folder,
      dtype="float32",
      compute_dtype=model.config.compute_dtype,
      attention=config.model.attention,
  )
  try:
    folders.check_labels(shape, folders.SCORER)
  except ValueError as error:
    raise ValueError(f"config.loss.value_init={folder}: {error}") from error
  if shape.vocab_size < model.config.vocab_size:
    raise ValueError(
        f"loss.value_init={folder}: its vocabulary has {shape.vocab_size}"
        f" entries, fewer than the policy's {model.config.vocab_size}"
    )
  return heads.ScalarModel(shape, remat=config.train.remat)
