# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks Hugging Face folders before a run, by their small files and headers.

Does not import JAX.
"""

from collections.abc import Sequence
import pathlib

from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files

# Numbers of labels of a head: 0 for a policy, 1 for a reward or value model.
POLICY, SCORER = (0,), (1,)


def read(folder: pathlib.Path, labels: Sequence[int]) -> config_lib.ModelConfig:
  """Returns the shape of a folder's model, whose number of labels must fit.

  Raises:
    ValueError: config.json is not supported, or the number is not in `labels`.
  """
  shape = hf_config.read(folder)
  check_labels(shape, labels)
  return shape


def check_labels(shape: config_lib.ModelConfig, labels: Sequence[int]) -> None:
  """Raises ValueError unless a head's number of labels is in `labels`."""
  if shape.num_labels not in labels:
    allowed = {
        POLICY: "a model that predicts tokens (architectures …ForCausalLM)",
        SCORER: "a model with one label (0 is one that predicts tokens)",
    }.get(tuple(labels), "a policy, or a model with one label")
    raise ValueError(
        f"its head gives {shape.num_labels} labels; must be {allowed}"
    )


def check_tokenizer(
    folder: pathlib.Path,
    shape: config_lib.ModelConfig | None,
    stop_ids: Sequence[int] = (),
) -> None:
  """Checks that a folder has a tokenizer that fits a model's vocabulary.

  Args:
    folder: tokenizer's folder.
    shape: model's shape; None if the model takes the tokenizer's vocabulary.
    stop_ids: further stop tokens.

  Raises:
    ValueError: there is no tokenizer, or it does not fit.
  """
  # Takes seconds to import.
  from tba_jax.models import tokenizer as tokenizer_lib  # pylint: disable=g-import-not-at-top

  tokenizer = tokenizer_lib.load(folder)
  if shape is not None:
    check_vocabulary(shape, tokenizer.vocab_size)
  tokenizer.add_stop_ids(stop_ids)


def check_vocabulary(shape: config_lib.ModelConfig, num_words: int) -> None:
  """Raises ValueError if a tokenizer has more words than a model."""
  if num_words > shape.vocab_size:
    raise ValueError(
        f"its vocabulary has {shape.vocab_size} entries, the tokenizer"
        f" {num_words}; must be a tokenizer of this model"
    )


def has_weights(folder: pathlib.Path) -> bool:
  """Returns whether a folder has any tensor file, complete or not."""
  return bool(hf_files.weight_files(folder))


def has_tokenizer(folder: pathlib.Path) -> bool:
  """Returns whether a folder has any tokenizer file."""
  return any((folder / name).exists() for name in hf_files.TOKENIZER_FILES)
