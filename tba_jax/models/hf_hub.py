# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a model or of data: a local one, or ORG/NAME of the hub.

What the Hugging Face hub has is taken from its cache (`HF_HOME`), and
downloaded into it if it is not there. Does not import JAX.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import re

from tba_jax.models import hf_files

# A folder that exists comes first. The hub has no organizations of these names.
_LOCAL = r"(?!(?:data|models|runs)/)"
_NAME = r"[\w-][\w.-]*"
_MODEL = re.compile(rf"{_LOCAL}({_NAME}/{_NAME})(?:@([\w./-]+))?")
# Of data also a folder in it; the path of a file is none of the hub's names.
_DATA = re.compile(
    rf"(?!.*\.(?:jsonl|parquet|arrow|gz|json)$){_LOCAL}({_NAME}/{_NAME})"
    r"(?:@([\w.-]+))?((?:/[\w.-]+)*)"
)
_SMALL = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["model*.safetensors"]
_ROWS = ["*.parquet", "*.jsonl", "*.jsonl.gz", "*.arrow", "*dataset_dict.json",
         "*state.json"]  # fmt: skip
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
  match = _MODEL.fullmatch(os.fspath(name))
  if match is None or path.exists():
    return path
  folder, fetch = _snapshot(
      name,
      *match.groups(),
      kind="model",
      patterns=_SMALL + _WEIGHTS * weights,
      is_whole=lambda f: _has_model(f, weights) and _has_tokenizer(f),
  )
  # Without a network huggingface_hub also returns a part of a model.
  if not _has_model(folder, weights):
    what = "safetensors" if weights else "config.json"
    message = f"{name}: {folder} has no or not all {what}; {fetch}"
    if (folder / "config.json").is_file() and not list(folder.glob("model*")):
      message += f". {hf_files.conversion(folder, match[1])}"
    raise ValueError(message)
  return folder


def find_data(name: str) -> pathlib.Path:
  """Returns the local folder or file of data; a missing path as it is.

  Args:
    name: a path, or a data set of the hub, ORG/NAME, ORG/NAME@REVISION or
      ORG/NAME/FOLDER.

  Raises:
    ValueError: the data set is not in the cache and cannot be downloaded.
  """
  path = pathlib.Path(name).expanduser()
  match = _DATA.fullmatch(name)
  if match is None or path.exists():
    return path
  repo, revision, inside = match.groups()
  has_rows = lambda folder: any(
      p.match(pattern) for p in folder.rglob("*") for pattern in _ROWS
  )
  folder, fetch = _snapshot(
      name, repo, revision, kind="dataset", patterns=_ROWS, is_whole=has_rows
  )
  if not has_rows(folder):
    raise ValueError(f"{name}: {folder} has no Parquet or JSONL files; {fetch}")
  return folder / inside.strip("/")


def _snapshot(
    name: str | os.PathLike[str],
    repo: str,
    revision: str | None,
    *,
    kind: str,
    patterns: Sequence[str],
    is_whole: Callable[[pathlib.Path], bool],
) -> tuple[pathlib.Path, str]:
  """Returns the folder in the hub's cache, and how to fetch it by hand.

  Downloads what the cache lacks. `kind` is "model" or "dataset".
  """
  # Takes a moment to import.
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top

  option = "" if kind == "model" else f" --repo-type {kind}"
  option += f" --revision {revision}" if revision else ""
  fetch = f"fetch it with  hf download {repo}{option}  where there is a network"

  def snapshot(local_files_only: bool) -> pathlib.Path:
    return pathlib.Path(
        huggingface_hub.snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            allow_patterns=patterns,
            local_files_only=local_files_only,
        )
    )

  try:
    folder = snapshot(local_files_only=True)
    if is_whole(folder):
      return folder, fetch
  except errors.LocalEntryNotFoundError:
    pass
  try:
    return snapshot(local_files_only=False), fetch
  except errors.GatedRepoError as error:
    raise ValueError(
        f"{name}: accept the licence at https://huggingface.co/"
        f"{'datasets/' * (kind == 'dataset')}{repo}, then `hf auth login`"
    ) from error
  except (
      errors.RepositoryNotFoundError,
      errors.RevisionNotFoundError,
  ) as error:
    raise ValueError(
        f"{name}: neither a folder nor a {kind} of the hub (a private one needs"
        " `hf auth login`)"
    ) from error
  except Exception as error:  # Those of the HTTP client, which may change.
    raise ValueError(
        f"{name}: no such folder, not in the hub's cache"
        f" {constants.HF_HUB_CACHE}, and the hub cannot be reached; {fetch}"
    ) from error


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
