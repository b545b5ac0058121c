# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a model or data set: local, or ORG/NAME on the hub.

A model may also be a GGUF file (`gguf_folder.py`), or have a short name
(`packaged_models.py`). Models and data from the Hugging Face hub are read from
its cache (`HF_HOME`). Missing models are downloaded into the cache here,
missing data by `tasks/data_sets.py`. Does not import JAX.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import re

from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import gguf_folder
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import packaged_models
from tba_jax.system import processes

# Existing folders take precedence. No organization on the hub has these names.
_LOCAL = r"(?!(?:data|models|runs)/)"
_NAME = r"[\w-][\w.-]*"
_MODEL = re.compile(rf"{_LOCAL}({_NAME}/{_NAME})(?:@([\w./-]+))?")
# A data set's name may include a subset; a file's path is never a hub name.
_DATA = re.compile(
    rf"(?!.*\.(?:jsonl|parquet|arrow|gz|json|csv|tsv)$){_LOCAL}"
    rf"({_NAME}/{_NAME})(?:@([\w.-]+))?(?:/([\w.-]+(?:/[\w.-]+)*|\*))?"
)
_SMALL = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["model*.safetensors"]
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json",
               "vocab.txt", "tokenizer.model")  # fmt: skip
_INDEX = "model.safetensors.index.json"


def find(name: str | os.PathLike[str], *, weights: bool = True) -> pathlib.Path:
  """Returns the local folder of a model; a missing path is returned unchanged.

  For a `peft` adapter, this is a folder in the user's cache with the adapter
  merged into its base.

  Args:
    name: path of a folder or a GGUF file, ORG/NAME or ORG/NAME@REVISION, or a
      short name of `packaged_models.py`.
    weights: False if only the config and the tokenizer are needed.

  Raises:
    ValueError: the model is not in the cache and cannot be downloaded, or an
      adapter or a GGUF file is not supported.
  """
  path = pathlib.Path(name).expanduser()
  if os.fspath(name) in packaged_models.MODELS and not path.exists():
    path = packaged_models.find(os.fspath(name))
  if path.suffix == ".gguf" and path.is_file():
    return gguf_folder.find(path)
  match = _MODEL.fullmatch(os.fspath(name))
  if match is None or path.exists():
    return _merged(path, weights)
  folder, fetch = _snapshot(
      name,
      *match.groups(),
      patterns=_SMALL + _WEIGHTS * weights,
      is_whole=lambda f: _has_model(f, weights) and _has_tokenizer(f),
  )
  # Offline, huggingface_hub may return an incomplete model.
  if not _has_model(folder, weights):
    what = "safetensors" if weights else "config.json"
    message = f"{name}: {folder} has no or not all {what}; {fetch}"
    if (folder / "config.json").is_file() and not list(folder.glob("model*")):
      message += f". {hf_files.conversion(folder, match[1])}"
    raise ValueError(message)
  return folder


def _merged(path: pathlib.Path, weights: bool) -> pathlib.Path:
  """Returns a folder; for an adapter, the folder of the merged model."""
  if not adapter_folder.is_adapter(path):
    return path
  root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return adapter_folder.find(
      path,
      lambda base: find(base, weights=weights),
      pathlib.Path(root).expanduser() / "tba_jax" / "models",
      weights=weights,
  )


def data_name(name: str) -> tuple[str, str | None, str] | None:
  """Returns ORG/NAME, revision and subset of a data set on the hub.

  Returns None if `name` is a path: it exists, or does not have the form
  ORG/NAME[@REVISION][/SUBSET].
  """
  match = _DATA.fullmatch(name)
  if match is None or pathlib.Path(name).exists():
    return None
  return match[1], match[2], match[3] or ""


def cached_data(repo: str, revision: str | None) -> pathlib.Path | None:
  """Returns the folder of a data set in the hub's cache, or None.

  A folder without README.md, which names the configurations, does not count.
  """
  # Takes a moment to import.
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top

  try:
    folder = pathlib.Path(
        huggingface_hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, local_files_only=True
        )
    )
  except errors.LocalEntryNotFoundError:
    return None
  return folder if (folder / "README.md").is_file() else None


def cache_folders(repo: str) -> dict[str, str]:
  """Returns the cache folders of a data set, by path below HF_HOME.

  They hold the hub's files, and what `datasets` made from them.
  """
  # Takes a moment to import.
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top

  owner, _, name = repo.partition("/")
  made = os.environ.get("HF_DATASETS_CACHE")
  places = {
      "hub": (constants.HF_HUB_CACHE, f"datasets--{owner}--{name}"),
      # The package `datasets` spells names differently.
      "datasets": (made or f"{constants.HF_HOME}/datasets", f"{owner}___*"),
  }
  return {
      f"{place}/{folder.name}": str(folder.resolve())
      for place, (cache, pattern) in places.items()
      for folder in pathlib.Path(cache).expanduser().glob(pattern)
  }


def _snapshot(
    name: str | os.PathLike[str],
    repo: str,
    revision: str | None,
    *,
    patterns: Sequence[str],
    is_whole: Callable[[pathlib.Path], bool],
) -> tuple[pathlib.Path, str]:
  """Returns the model's folder in the hub's cache, and a download command.

  Downloads what the cache lacks.
  """
  # Takes a moment to import.
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top

  option = f" --revision {revision}" if revision else ""
  fetch = f"fetch it with  hf download {repo}{option}  on a networked machine"

  def snapshot(local_files_only: bool) -> pathlib.Path:
    return pathlib.Path(
        huggingface_hub.snapshot_download(
            repo,
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
    with processes.shared():
      return snapshot(local_files_only=False), fetch
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
  except Exception as error:  # Error types of the HTTP client may change.
    raise ValueError(
        f"{name}: no such folder, not in the hub's cache"
        f" {constants.HF_HUB_CACHE}, and the hub cannot be reached; {fetch}"
    ) from error


def _has_tokenizer(folder: pathlib.Path) -> bool:
  return any((folder / name).is_file() for name in _TOKENIZERS)


def _has_model(folder: pathlib.Path, weights: bool) -> bool:
  """Returns whether a cached snapshot has config.json and all weights."""
  has = lambda name: (folder / name).is_file()
  if not weights or not has("config.json"):
    return has("config.json")
  if has("model.safetensors") or list(folder.glob("*.bin")):
    return True  # `hf_files` explains how to convert .bin files.
  try:
    index = json.loads((folder / _INDEX).read_text("utf-8"))
    return all(map(has, index["weight_map"].values()))
  except (OSError, ValueError, LookupError, TypeError, AttributeError):
    return False
