# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor files of a folder: reads slices, writes shards with an index.

Files are safetensors; a folder made from a GGUF file is read from that file.

Does not import JAX.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import ctypes
import hashlib
import json
import os
import pathlib
import shutil
import threading
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from tba_jax.models.hf import gguf_tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The default of Hugging Face's tools.
MAX_FILE_BYTES = 5 * 10**9

# Files of a folder's tokenizer; the last is a folder of additional named chat
# templates.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates",
)  # fmt: skip
DTYPES = ("BF16", "F16", "F32", "F64")
REMEDY = "fetch or save the folder again"
# Metadata entry of a file: JSON that maps each tensor's name to its digest.
_DIGESTS = "blake2b"
# Edge of a block of FP8 matrices, safetensors' name of their type, and the end
# of the name of a tensor with a factor per block. Blocks at the edges of a
# matrix may be smaller. Source: DeepSeek-AI 2024 (arXiv:2412.19437, section
# 3.3.2), as read by Hugging Face's `Fp8Dequantize`.
_BLOCK, _FP8, _SCALE = 128, "F8_E4M3", "_scale_inv"
# Maximum number of a folder's problems that a message lists.
_MAX_PROBLEMS = 3


def read_json(path: pathlib.Path) -> Any:
  """Returns a JSON file's content; raises ValueError if it cannot be read."""
  if not path.exists():
    raise ValueError(f"{path}: there is no such file")
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f"{path}: not readable as JSON: {error}") from error


def first_of(problems: Sequence[str]) -> str:
  """Returns the first few problems, and how many more there are."""
  rest = len(problems) - _MAX_PROBLEMS
  more = [f"and {rest} more"] if rest > 0 else []
  return "; ".join([*problems[:_MAX_PROBLEMS], *more])


class WeightFiles:
  """The tensors of a folder by name.

  Files are opened for each read: an open file stays memory-mapped, and the
  pages read would count as the process's memory.

  shapes: tensor name -> dimensions.
  dtypes: tensor name -> safetensors' name of the type.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the headers.

    Raises:
      ValueError: there are no weights, or files are missing, damaged or
        truncated; the message lists all of them.
    """
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    self._path_of: dict[str, pathlib.Path] = {}
    self._digests: dict[str, str] = {}
    listed = _listed(folder)
    problems = []
    for file in sorted(set(listed.values()) or {WEIGHTS}):
      try:
        self._add(folder / file, listed)
      except (OSError, ValueError, safetensors.SafetensorError) as error:
        if (folder / file).is_file():
          problems.append(f"{file}: damaged or cut off ({error}); {REMEDY}")
        else:
          problems.append(f"{file}: no such file, {INDEX} names it; {REMEDY}")
    if not problems:
      problems += [
          f"{file}: lacks tensor {name}, which {INDEX} puts there"
          for name, file in sorted(listed.items())
          if self._path_of.get(name) != folder / file
      ]
    if problems:
      raise ValueError(first_of(problems))

  def _add(self, path: pathlib.Path, listed: Mapping[str, str]) -> None:
    with safetensors.safe_open(str(path), framework="np") as file:
      digests = json.loads((file.metadata() or {}).get(_DIGESTS, "{}"))
      for name in file.keys():
        if listed.get(name, path.name) != path.name:
          continue  # The index assigns it to another file.
        tensor = file.get_slice(name)
        self.shapes[name] = tuple(tensor.get_shape())
        self.dtypes[name] = tensor.get_dtype()
        self._path_of[name] = path
        if name in digests:
          self._digests[name] = digests[name]

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, as a copy; bytes of FP8."""
    path = self._path_of[name]
    if self.dtypes[name] == _FP8:  # numpy has no such type.
      return np.array(_bytes(path, name)[index])
    with safetensors.safe_open(str(path), framework="np") as file:
      return file.get_slice(name)[index]

  def damaged(self, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns the names of tensors that differ from what `write_files` wrote.

    Files written by other programs have no digests and are skipped.

    Args:
      part: index of the part of the tensors to check.
    """
    return [
        name
        for name in sorted(self._digests)[part::num_parts]
        if _digest(self._whole(name)) != self._digests[name]
    ]

  def _whole(self, name: str) -> np.ndarray:
    with safetensors.safe_open(str(self._path_of[name]), framework="np") as f:
      return f.get_tensor(name)


def _bytes(path: pathlib.Path, name: str) -> np.ndarray:
  """Returns a tensor of 8-bit numbers as uint8, mapped from its file."""
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    entry = json.loads(file.read(size))[name]
  start = 8 + size + entry["data_offsets"][0]
  return np.memmap(path, np.uint8, "r", start, tuple(entry["shape"]))


def _fp8_values() -> np.ndarray:
  """Returns the 256 numbers: sign, 4 exponent bits and 3 mantissa bits."""
  exponent, mantissa = np.divmod(np.arange(128), 8)
  values = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1))
  values[-1] = np.nan
  return np.float32(np.concatenate([values, -values]) / 2.0**10)


_FP8_VALUES = _fp8_values()


def dequantize_fp8(
    codes: np.ndarray, scales: np.ndarray, first: tuple[int, int] = (0, 0)
) -> np.ndarray:
  """Returns [..., F, D] float32.

  Args:
    codes: [..., F, D] uint8, part of a matrix.
    scales: [..., f, d], factors of the blocks that the part reaches into.
    first: row and column of the part's first entry in its first block.
  """
  rows, columns = (
      (np.arange(size) + start) // _BLOCK
      for size, start in zip(codes.shape[-2:], first)
  )
  factors = scales.astype(np.float32)[..., rows, :][..., columns]
  return _FP8_VALUES[codes] * factors


class Fp8Files:
  """The tensors of a folder, with floats in place of FP8.

  Tensors that are not in FP8 are read as by `WeightFiles`.

  shapes: tensor name -> dimensions.
  dtypes: tensor name -> safetensors' name of the type.
  """

  def __init__(self, files: Any):
    """Wraps a folder's tensors, such as `WeightFiles`.

    Raises:
      ValueError: a tensor's factors are missing or do not match.
    """
    self._files = files
    self.shapes, self.dtypes = dict(files.shapes), dict(files.dtypes)
    packed = [n for n, dtype in files.dtypes.items() if dtype == _FP8]
    self._packed = set(packed)
    for name in sorted(packed):
      shape = files.shapes[name]
      blocks = *shape[:-2], *(-(-size // _BLOCK) for size in shape[-2:])
      scales = self.shapes.pop(name + _SCALE, None)
      dtype = self.dtypes.pop(name + _SCALE, None)
      if scales != blocks or dtype not in DTYPES or len(shape) < 2:
        actual = "missing" if scales is None else f"{list(scales)} of {dtype}"
        raise ValueError(
            f"tensor {name} {list(shape)} in FP8: {name}{_SCALE} is {actual};"
            f" must be {list(blocks)} of {', '.join(DTYPES)}, with a"
            f" factor per block of {_BLOCK} x {_BLOCK}"
        )
      self.dtypes[name] = "F32"

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, as a copy."""
    codes = self._files.read(name, index)
    if name not in self._packed:
      return codes
    ranges = [s.indices(n) for s, n in zip(index, self.shapes[name])][-2:]
    blocks = [slice(a // _BLOCK, -(-b // _BLOCK)) for a, b, _ in ranges]
    scales = self._files.read(name + _SCALE, (*index[:-2], *blocks))
    return dequantize_fp8(
        codes, scales, tuple(a % _BLOCK for a, _, _ in ranges)
    )

  def damaged(self, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns the names of tensors that changed since they were written."""
    return self._files.damaged(part, num_parts)


def damage(path: pathlib.Path) -> Iterator[str]:
  """Yields a line for each tensor in a file that differs from its digest."""
  try:
    with safetensors.safe_open(str(path), framework="np") as file:
      digests = json.loads((file.metadata() or {}).get(_DIGESTS, "{}"))
      for name, digest in digests.items():
        if _digest(file.get_tensor(name)) != digest:
          yield f"tensor {name} is damaged"
  except safetensors.SafetensorError as error:
    yield f"damaged or cut off: {error}"


def _digest(tensor: np.ndarray) -> str:
  data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
  return hashlib.blake2b(data, digest_size=16).hexdigest()


# What a folder's tensors are read from.
AnyFiles = WeightFiles | gguf_tensors.GgufFiles


def open_files(folder: pathlib.Path) -> AnyFiles:
  """Returns the tensors of a folder; raises as `WeightFiles`."""
  if (folder / gguf_tensors.INDEX).is_file():
    return gguf_tensors.GgufFiles(folder)
  return WeightFiles(folder)


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns a folder's tensor files, complete or not."""
  return sorted(
      path
      for pattern in ("*.safetensors", gguf_tensors.WEIGHTS)
      for path in folder.glob(pattern)
  )


def _listed(folder: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor according to the index; {} without one.

  An index whose files are gone counts as missing if a single file has all
  tensors: `save_pretrained` of transformers leaves such an index behind.
  """
  if not (folder / INDEX).is_file():
    if not (folder / WEIGHTS).is_file():
      old = any(folder.glob("pytorch_model*.bin"))
      remedy = f". {conversion(folder, str(folder))}" if old else f"; {REMEDY}"
      raise ValueError(f"has neither {WEIGHTS} nor {INDEX}{remedy}")
    return {}
  index = read_json(folder / INDEX)
  listed = index.get("weight_map") if isinstance(index, dict) else None
  # A path could point to any file on the machine.
  if not (listed and isinstance(listed, dict)) or any(
      not isinstance(file, str) or pathlib.PurePath(file).name != file
      for file in listed.values()
  ):
    raise ValueError(
        f"{INDEX}: weight_map: must be tensor names with names of"
        " files in that folder"
    )
  files = {folder / file for file in listed.values()}
  is_old = (folder / WEIGHTS).is_file() and not any(
      map(pathlib.Path.is_file, files)
  )
  return {} if is_old else listed


def conversion(folder: pathlib.Path, name: str) -> str:
  """Returns advice on how to convert a model that only has pytorch_model.bin.

  Args:
    folder: directory with the model's config.json.
    name: argument for `transformers`: the folder, or the hub's name.
  """
  config = read_json(folder / "config.json")
  kind = (config.get("architectures") or ["AutoModel"])[0]
  return (
      "If it has pytorch_model.bin alone, convert it where torch is installed:"
      f'  python -c "import transformers as t; [c.from_pretrained({name!r})'
      f".save_pretrained('NEW_FOLDER') for c in (t.AutoTokenizer, t.{kind})]\""
      "  and name NEW_FOLDER instead"
  )


def write_files(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    make: Callable[[str], np.ndarray],
    *,
    max_file_bytes: int,
) -> None:
  """Writes tensors into one file, or into several with an index.

  Only the tensors of one file are in memory at a time. The metadata of a file
  has a digest of each tensor.

  Args:
    sizes: bytes of each tensor, in file order.
    make: (name) -> the tensor, C-contiguous.
    max_file_bytes: maximum number of bytes of tensors in a file; a larger
      tensor gets a file to itself.
  """
  parts: list[list[str]] = [[]]
  held = 0
  for name, size in sizes.items():
    if parts[-1] and held + size > max_file_bytes:
      parts.append([])
      held = 0
    parts[-1].append(name)
    held += size
  weight_map = {}
  for number, names in enumerate(parts, start=1):
    file = WEIGHTS
    if len(parts) > 1:
      file = f"model-{number:05}-of-{len(parts):05}.safetensors"
    tensors = {name: make(name) for name in names}
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    # transformers refuses a file that does not name its framework.
    metadata = {"format": "pt", _DIGESTS: json.dumps(digests)}
    path = folder / file
    safetensors.numpy.save_file(tensors, str(path), metadata=metadata)
    _sort_metadata(path)
    weight_map.update(dict.fromkeys(names, file))
  if len(parts) > 1:
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": weight_map,
    }
    write_json(folder / INDEX, index)


def _sort_metadata(path: pathlib.Path) -> None:
  """Sorts a file's metadata, whose order safetensors varies by process."""
  with path.open("r+b") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    file.seek(8)
    file.write(text.encode().ljust(size))


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  text = json.dumps(content, indent=2, sort_keys=True) + "\n"
  path.write_text(text, encoding="utf-8")


def save_tokenizer(fast: Any, folder: pathlib.Path) -> None:
  """Writes a fast tokenizer's files such that transformers 4 can read them."""
  fast.save_pretrained(str(folder))
  path = folder / "tokenizer_config.json"
  settings = json.loads(path.read_text("utf-8"))
  settings["tokenizer_class"] = "PreTrainedTokenizerFast"
  if isinstance(settings.get("extra_special_tokens"), list):
    # Name in transformers 4.
    extra = settings.pop("extra_special_tokens")
    settings["additional_special_tokens"] = extra
  path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def copy_files(
    names: Iterable[str], source: pathlib.Path, target: pathlib.Path
) -> None:
  """Copies the named files and folders that exist."""
  for name in names:
    if (source / name).is_dir():
      shutil.copytree(
          source / name, target / name, copy_function=shutil.copyfile
      )
    elif (source / name).is_file():
      shutil.copyfile(source / name, target / name)


def sync(folder: pathlib.Path) -> None:
  """Flushes a folder's files to disk, so that a rename can follow."""
  for path in (*folder.rglob("*"), folder):
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def replace(new: pathlib.Path, path: pathlib.Path) -> None:
  """Moves the folder `new` to `path`, and an old folder there to `new`.

  The exchange is atomic if the file system supports it.
  """
  if not path.exists():
    new.rename(path)
    return
  libc = ctypes.CDLL(None, use_errno=True)
  at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of renameat2(2).
  names = os.fsencode(new), os.fsencode(path)
  if hasattr(libc, "renameat2"):
    if not libc.renameat2(at_cwd, names[0], at_cwd, names[1], exchange):
      return
  # Elsewhere (macOS, some network file systems) the folder is missing for a
  # moment.
  aside = path.with_name(f"{new.name}.old")
  path.rename(aside)
  new.rename(path)
  aside.rename(new)


# transformers replaces its own module during import: another thread that
# imports it meanwhile would get the discarded module.
_importing = threading.Lock()


def import_transformers() -> Any:
  """Returns transformers, whose import takes a fifth of a role's start time."""
  # Silences its advice to install torch, which this package does not need.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  with _importing:
    import transformers  # pylint: disable=g-import-not-at-top

  return transformers
