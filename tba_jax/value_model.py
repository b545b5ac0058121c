# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The value model of the objectives that have one, and where it starts."""

import pathlib
from typing import Any

import ml_collections

from tba_jax import types
from tba_jax.losses import build as losses_build
from tba_jax.models import build
from tba_jax.models import heads
from tba_jax.models import hf

OF_POLICY = "policy"


def make(
    config: ml_collections.ConfigDict, model: Any
) -> heads.ScalarModel | None:
  """Returns the value model; None where `config.loss.name` learns none.

  Args:
    config: reads `loss` and `train.remat`.
    model: of the policy; the value model has its shape, or that of the folder
      in `loss.value_init`.

  Raises:
    ValueError: the folder has no scalar head, or knows fewer tokens.
  """
  if not losses_build.find(config.loss.name).has_values:
    return None
  source = config.loss.value_init
  if source == OF_POLICY:
    shape = heads.config_of(model.config)
    return build.make_scalar_model(shape, remat=config.train.remat)
  shape = hf.read_config(pathlib.Path(source).expanduser())
  if shape.num_labels != 1:
    raise ValueError(
        f"loss.value_init={source!r}: its head gives {shape.num_labels} labels;"
        " allowed a model with one (0 is a model that predicts tokens)"
    )
  if shape.vocab_size < model.config.vocab_size:
    raise ValueError(
        f"loss.value_init={source!r}: its vocabulary has {shape.vocab_size}"
        f" entries, the policy's {model.config.vocab_size}"
    )
  return build.make_scalar_model(shape, remat=config.train.remat)


def load(config: ml_collections.ConfigDict) -> types.PyTree | None:
  """Returns params of the folder in `loss.value_init`; None for the policy's.

  Raises:
    ValueError: the folder cannot be read.
  """
  row = losses_build.find(config.loss.name)
  if not row.has_values or config.loss.value_init == OF_POLICY:
    return None
  return hf.load(pathlib.Path(config.loss.value_init).expanduser())[1]
