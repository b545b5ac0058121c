# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets read by Hugging Face `datasets`, from the hub or from folders.

The package finds the subsets (configurations), splits and files of a data set,
from the `configs:` of its README.md or from file names, and reads all formats
except JSON and Parquet, which `tasks/rows.py` reads. Folders and the hub's
cache are read in place; other data sets on the hub are downloaded and kept in
the package's own cache.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import importlib
import os
import pathlib
import re
import sys
import tempfile
import types
from typing import Any

from tba_jax.models.hf import hf_hub
from tba_jax.system import processes

ALL = "*"  # names all subsets
# JSON and Parquet files, or rows.
Content = Sequence[pathlib.Path] | Iterable[Mapping[str, Any]]
_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
# Options of a subset in README.md that only the package interprets.
_OPTIONS = ("columns", "filters", "field", "features")
_SHARD = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})(.*)")


def read(
    name: str, split: str, preferred: str = ""
) -> Iterator[tuple[str, pathlib.Path, Content]]:
  """Yields label, folder and content of each subset that a name refers to.

  Args:
    name: a folder, FOLDER/SUBSET, ORG/NAME[@REVISION] or
      ORG/NAME[@REVISION]/SUBSET; the subset "*" stands for all of them.
    split: name of the split; "" = train.
    preferred: subset to take if it exists and `name` has none.

  Raises:
    ValueError: there is no such data set, subset or split; there are several
      subsets without a default; or the package is missing.
  """
  path = pathlib.Path(name).expanduser()
  if _is_saved(path):
    yield _saved(path, path.name, split)
    return
  local, hub = _local(path, preferred), hf_hub.data_name(name)
  if local is not None:
    yield from _from_folder(*local, split or "train", preferred)
    return
  if hub is None:
    raise ValueError(
        f"there is no such file or folder{_has(path.parent)}; it may also be"
        " ORG/NAME of the Hugging Face hub"
    )
  repo, revision, subset = hub
  folder = hf_hub.cached_data(repo, revision)
  why = f"no such folder{_has(path.parent)}"
  if folder is not None and _is_saved(folder):
    yield _saved(folder, repo.partition("/")[2], split)
    return
  split = split or "train"
  if folder is not None:
    try:
      yield from [*_from_folder(folder, subset, split, preferred, repo)]
      return
    except ValueError as error:  # Perhaps the cache is incomplete.
      why = str(error)
  yield from _from_hub(repo, revision, subset, split, preferred, why)


def read_file(path: pathlib.Path) -> Iterable[Mapping[str, Any]]:
  """Returns the rows of a CSV, TSV, JSON or Arrow file.

  Raises ValueError if the package is missing or cannot read it.
  """
  builder = _local_builder(
      str(path.absolute().parent), None, path.name, data_files=path.name
  )
  return _streamed(builder, "train")


def _package() -> types.ModuleType:
  """Imports `datasets` quietly and without torch, which takes two seconds."""
  before = os.environ.get("USE_TORCH")
  if "torch" not in sys.modules:
    os.environ["USE_TORCH"] = "0"  # Reading would import an installed torch.
  try:
    datasets = importlib.import_module("datasets")
  except ImportError as error:
    raise ValueError(
        f"needs the package `datasets` ({error}): pip install 'tba_jax[data]'"
    ) from error
  finally:
    os.environ.pop("USE_TORCH", None)
    if before is not None:
      os.environ["USE_TORCH"] = before
  datasets.logging.set_verbosity(datasets.logging.CRITICAL)
  datasets.disable_progress_bars()
  return datasets


@contextlib.contextmanager
def _errors() -> Iterator[None]:
  """Re-raises the errors of readers of many formats as ValueError."""
  try:
    yield
  except ValueError:
    raise
  except Exception as error:
    raise ValueError(f"{type(error).__name__}: {error}") from error


def _builder(path: str, subset: str | None, shown: str, **options: Any) -> Any:
  """Returns the package's builder for a folder or ORG/NAME.

  Raises ValueError with a list of the subsets if the name is unknown, or if no
  subset is the default.
  """
  datasets = _package()
  load = functools.partial(datasets.load_dataset_builder, path, **options)
  try:
    return load(subset)
  except ValueError as error:
    names = datasets.get_dataset_config_names(
        path, revision=options.get("revision")
    )
    if subset and names == ["default"]:  # A folder of a README without subsets.
      with contextlib.suppress(ValueError, FileNotFoundError):
        return load(data_dir=subset)
    if subset in names or len(names) == 1 and subset is None:
      raise
    raise ValueError(
        f"must be one of its subsets, {', '.join(names)}, as"
        f" {shown}/{names[0]}, or all of them, {shown}/{ALL}"
    ) from error


def _local_builder(
    path: str, subset: str | None, shown: str, **options: Any
) -> Any:
  """Returns the builder for a folder; leaves no files behind."""
  with tempfile.TemporaryDirectory() as cache, _errors():
    return _builder(path, subset, shown, cache_dir=cache, **options)


def _streamed(builder: Any, split: str) -> Iterator[Mapping[str, Any]]:
  """Yields the rows of a split; texts in CSV files are kept unchanged."""
  config = builder.config
  if hasattr(config, "keep_default_na"):
    # "NA" and "None" are texts.
    config.keep_default_na = False
    # "007" is not a number, unless README.md declares it as one.
    if builder.info.features is None:
      text = _package().Value("string")
      first = next(iter(builder.as_streaming_dataset(split)), {})
      config.features = _package().Features(dict.fromkeys(first, text))
  yield from builder.as_streaming_dataset(split)


def _is_saved(path: pathlib.Path) -> bool:
  """Returns whether the package's `save_to_disk` wrote a folder."""
  names = ("dataset_dict.json", "state.json")
  return any((path / name).is_file() for name in names)


def _saved(
    path: pathlib.Path, label: str, split: str
) -> tuple[str, pathlib.Path, Content]:
  with _errors():
    saved = _package().load_from_disk(str(path))
  if not isinstance(saved, dict):
    if split:
      raise ValueError("this data set has no splits")
    return label, path, saved
  if split not in saved:
    raise ValueError(
        f"must be a split in brackets, one of {', '.join(sorted(saved))}"
    )
  return f"{label}[{split}]", path, saved[split]


def _has_configs(folder: pathlib.Path) -> bool:
  """Returns whether a folder's README.md lists subsets."""
  readme = folder / "README.md"
  if (folder / ".huggingface.yaml").is_file():
    return True
  if not readme.is_file():
    return False
  # Takes a moment to import.
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  with _errors():
    return bool((huggingface_hub.metadata_load(readme) or {}).get("configs"))


def _local(
    path: pathlib.Path, preferred: str
) -> tuple[pathlib.Path, str] | None:
  """Returns the folder and subset that a path names, None if there is none."""
  if path.is_dir():
    inside = path / preferred
    is_inside = preferred and inside.is_dir() and not _has_configs(path)
    return (inside if is_inside else path), ""
  parent = path.parent
  if parent.is_dir() and (path.name == ALL or _has_configs(parent)):
    return parent, path.name
  return None


def _has(folder: pathlib.Path) -> str:
  """Returns a note on the contents of a folder; "" if there is no folder."""
  if not folder.is_dir():
    return ""
  names = sorted(p.name for p in folder.glob("[!.]*"))
  listed = ", ".join(names[:5]) + ", …" * (len(names) > 5)
  return f"; {folder} has {listed or 'nothing'}"


def _subsets(
    path: str, revision: str | None, subset: str, preferred: str
) -> list[str | None]:
  """Returns the subsets to read; None = the default one."""
  if subset != ALL and (subset or not preferred):
    return [subset or None]
  names = _package().get_dataset_config_names(path, revision=revision)
  if subset == ALL:
    return names
  return [preferred if preferred in names else None]


def _check_split(split: str, splits: Sequence[str], where: str) -> None:
  if split not in splits:
    listed = ", ".join(map(str, splits))
    raise ValueError(
        f"{where} has no split {split!r}; must be a split in brackets, one of"
        f" {listed or '(none has files)'}"
    )


def _from_folder(
    folder: pathlib.Path,
    subset: str,
    split: str,
    preferred: str,
    shown: str = "",
) -> Iterator[tuple[str, pathlib.Path, Content]]:
  shown = shown or str(folder)
  folder = folder.resolve()
  path = str(folder)
  with _errors():
    subsets = _subsets(path, None, subset, preferred)
  for name in subsets:
    builder = _local_builder(path, name, shown)
    data_files = builder.config.data_files or {}
    label = name or pathlib.Path(shown).name
    splits = [s for s, files in data_files.items() if files]
    _check_split(split, splits, label)
    files = [pathlib.Path(file) for file in data_files[split]]
    _check_files(folder, files, shown if subset != ALL else "")
    has_options = any(getattr(builder.config, o, None) for o in _OPTIONS)
    if all(f.name.endswith(_FILES) for f in files) and not has_options:
      yield label, folder, files
    else:
      yield f"{label}[{split}]", folder, _streamed(builder, split)


def _check_files(
    folder: pathlib.Path, files: Sequence[pathlib.Path], shown: str
) -> None:
  """Refuses incomplete shards, and several data sets mistaken for one.

  Without a README.md, the package combines the files of all folders.
  """
  shards: dict[tuple[str, str, str], int] = {}
  for file in files:
    if match := _SHARD.fullmatch(str(file)):
      shards[match.groups()] = shards.get(match.groups(), 0) + 1
  for (stem, total, end), count in shards.items():
    if count < int(total):
      raise ValueError(f"has {count} of the {int(total)} files {stem}-*{end}")
  seen: dict[str, pathlib.Path] = {}
  for file in files if shown and not _has_configs(folder) else ():
    other = seen.setdefault(file.name, file)
    if other != file:
      inside = [p.relative_to(folder).as_posix() for p in (other, file)]
      raise ValueError(
          f"{inside[0]} and {inside[1]} may be of different data sets, and no"
          f" README.md selects one; must be a folder with files of one,"
          f" such as {shown}/{inside[0].partition('/')[0]}, or all of them,"
          f" {shown}/{ALL}"
      )


def _from_hub(
    repo: str,
    revision: str | None,
    subset: str,
    split: str,
    preferred: str,
    why: str,
) -> Iterator[tuple[str, pathlib.Path, Content]]:
  """Yields a data set on the hub, from the package's cache or downloaded.

  `why` is the reason that no local folder can be used.
  """
  datasets = _package()
  try:
    for name in _subsets(repo, revision, subset, preferred):
      with processes.shared():
        builder = _builder(repo, name, repo, revision=revision)
      if revision and builder.name == "cache":
        raise ConnectionError  # The package's cache ignores revisions.
      with processes.shared():
        builder.download_and_prepare()
      label = name or repo.partition("/")[2]
      _check_split(split, list(builder.info.splits), label)
      rows = builder.as_dataset(split=split)
      yield f"{label}[{split}]", pathlib.Path(), rows
  except datasets.exceptions.DatasetNotFoundError as error:
    raise ValueError(
        f"neither a folder nor a data set of the hub that can be read: {error}"
        " (a private one needs `hf auth login`)"
    ) from error
  except datasets.exceptions.DatasetsError as error:
    raise ValueError(f"{error} {error.__cause__ or ''}") from error
  except ConnectionError as error:
    options = " --repo-type dataset"
    options += f" --revision {revision}" if revision else ""
    raise ValueError(
        f"{why}; not in the hub's cache or the `datasets` cache"
        f" {datasets.config.HF_CACHE_HOME}, and the hub cannot be reached;"
        f" fetch it with  hf download {repo}{options}  on a host with network"
        " access"
    ) from error
  except FileNotFoundError as error:  # The data set has no files.
    raise ValueError(str(error)) from error
  except OSError as error:
    raise ValueError(
        f"{error}; the caches in {datasets.config.HF_CACHE_HOME} have to be"
        " writable, HF_HOME names another folder"
    ) from error
