# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's folder: a local one, or ORG/NAME of the Hugging Face hub.

A model of the hub is taken from the cache (`HF_HOME`), and downloaded into it
if it is not there. Does not import JAX.
"""

import json
import os
import pathlib
import re

# A folder that exists comes first. The hub has no organization "models".
_ID = re.compile(r"(?!models/)([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
_SMALL = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["model*.safetensors"]
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json",
               "vocab.txt", "tokenizer.model")  # fmt: skip
_INDEX = "model.safetensors.index.json"


def find(name: str | os.PathLike[str], *, weights: bool = True) -> pathlib.Path:
  """Returns the local folder of a model; a missing path is returned as it is.

  Args:
    name: a path, ORG/NAME or ORG/NAME@REVISION.
    weights: False needs the config and the tokenizer only.

  Raises:
    ValueError: the model is not in the cache and cannot be downloaded.
  """
  path = pathlib.Path(name).expanduser()
  match = _ID.fullmatch(os.fspath(name))
  if match is None or path.exists():
    return path
  # Takes a moment to import.
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top

  repo, revision = match.groups()

  option = f" --revision {revision}" if revision else ""
  fetch = f"fetch it with  hf download {repo}{option}  where there is a network"

  def snapshot(local_files_only: bool) -> pathlib.Path:
    return pathlib.Path(
        huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_SMALL + _WEIGHTS * weights,
            local_files_only=local_files_only,
        )
    )

  try:
    folder = snapshot(local_files_only=True)
    if _has_model(folder, weights) and _has_tokenizer(folder):
      return folder
  except errors.LocalEntryNotFoundError:
    pass
  try:
    folder = snapshot(local_files_only=False)
  except errors.GatedRepoError as error:
    raise ValueError(
        f"{name}: accept the licence at https://huggingface.co/{repo}, then"
        " `hf auth login`"
    ) from error
  except (
      errors.RepositoryNotFoundError,
      errors.RevisionNotFoundError,
  ) as error:
    raise ValueError(
        f"{name}: neither a folder nor a model of the hub (a private one needs"
        " `hf auth login`)"
    ) from error
  except Exception as error:  # Those of the HTTP client, which may change.
    raise ValueError(
        f"{name}: no such folder, not in the hub's cache"
        f" {constants.HF_HUB_CACHE}, and the hub cannot be reached; {fetch}"
    ) from error
  # Without a network huggingface_hub also returns a part of a model.
  if not _has_model(folder, weights):
    what = "safetensors" if weights else "config.json"
    raise ValueError(f"{name}: {folder} has no or not all {what}; {fetch}")
  return folder


def _has_tokenizer(folder: pathlib.Path) -> bool:
  return any((folder / name).is_file() for name in _TOKENIZERS)


def _has_model(folder: pathlib.Path, weights: bool) -> bool:
  """Tells whether a cached snapshot has config.json and all weights."""
  has = lambda name: (folder / name).is_file()
  if not weights or not has("config.json"):
    return has("config.json")
  if has("model.safetensors") or list(folder.glob("*.bin")):
    return True  # `hf_files` says how to convert .bin files.
  try:
    index = json.loads((folder / _INDEX).read_text("utf-8"))
    return all(map(has, index["weight_map"].values()))
  except (OSError, ValueError, LookupError, TypeError, AttributeError):
    return False
