# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapter folders of the `peft` package: LoRA factors for a base model.

    W + s · B A      s = alpha / rank, or alpha / √rank with `use_rslora`

A folder has adapter_config.json, which names the base, and
adapter_model.safetensors with A, [rank, in], and B, [out, rank]. `find` merges
them into the base's tensors once, in a folder in the user's cache that loads
like any Hugging Face folder. Merged matrices, and FP8, are float32 there.

Source: Hu et al. 2021 (arXiv:2106.09685); √rank from Kalajdzievski 2023
(arXiv:2312.03732). Does not import JAX.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import safetensors.numpy

from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf_files
from tba_jax.system import processes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_DONE = ".merged"
_HEAD = "lm_head.weight"
# Longest wait for another process that merges the same adapter.
_DEADLINE_S = 900.0
_PREFIX = "base_model.model."
# Factors, and the copy of the full matrix that `peft` sometimes saves.
_TENSOR = re.compile(
    re.escape(_PREFIX) + r"(.+)\.(?:lora_(A|B)|base_layer)\.weight"
)
# Changed whenever the cached files change.
_VERSION = "4"
# Settings that change what the adapter computes, with their allowed values.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "SEQ_CLS", None),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "megatron_config": (None,),
    # Other methods change the base at initialization.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


@dataclasses.dataclass(frozen=True)
class Adapter:
  """An adapter in memory; its fields are the arguments of `write`."""

  tensors: Mapping[str, np.ndarray]
  base: str | os.PathLike[str]
  rank: int
  alpha: float

  def write(self, folder: pathlib.Path) -> None:
    write(folder, **self.__dict__)


def is_adapter(folder: pathlib.Path) -> bool:
  """Returns whether a folder has an adapter but no full model."""
  # Unlike pathlib, os.path accepts names that are too long for a file.
  has = lambda name: os.path.isfile(folder / name)
  return has(CONFIG) and not has("config.json")


def find(
    folder: pathlib.Path,
    find_base: Callable[[str], pathlib.Path],
    cache: pathlib.Path,
    *,
    weights: bool,
) -> pathlib.Path:
  """Returns the folder of the base with the adapter merged in.

  Args:
    find_base: (name) -> local folder of the base.
    cache: parent of the merged folder.
    weights: False if only the config and the tokenizer are needed.

  Raises:
    ValueError: the adapter is not supported, or its base is not found.
  """
  try:
    settings = _read_config(folder)
    base = find_base(_base_name(folder, settings))
    if not (base / "config.json").is_file():
      raise ValueError(
          f"{CONFIG}: base_model_name_or_path={str(base)!r}: no model is there;"
          " must be a folder, or ORG/NAME of the Hugging Face hub"
      )
    target = cache / f"adapter-{_digest(folder, base)}"
    cache.mkdir(parents=True, exist_ok=True)
    # The roles of a run start at the same time.
    path = cache / f".{target.name}.lock"
    try:
      lock = processes.lock_file(path, wait_s=_DEADLINE_S)
    except processes.LockedError as error:
      raise ValueError(
          f"process {error} has been merging it for {_DEADLINE_S:g} s; end it"
          " and try again"
      ) from error
    with open(lock, "rb"):
      if not target.is_dir():
        _make(target, lambda new: _copy_small(folder, base, new))
      if weights and not (target / _DONE).is_file():
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
          _merge(folder, settings, base, pathlib.Path(new))
          hf_files.sync(pathlib.Path(new))
          for file in pathlib.Path(new).iterdir():
            os.rename(file, target / file.name)
        (target / _DONE).touch()
  except (ValueError, OSError, safetensors.SafetensorError) as error:
    raise ValueError(f"{folder}: {error}") from error
  return target


def write(
    folder: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    *,
    base: str | os.PathLike[str],
    rank: int,
    alpha: float,
) -> None:
  """Writes an adapter's config and tensors into an existing folder.

  Args:
    tensors: A, [rank, in], and B, [out, rank], by `tensor_name`.
    base: folder or name of the base; an existing folder is recorded as an
      absolute path.
    rank: inner dimension of all products.
    alpha: scale of the products, times the rank.
  """
  local = pathlib.Path(base).absolute()
  name, _, revision = os.fspath(base).partition("@")
  if local.exists():
    name, revision = str(local), ""
  modules = {_TENSOR.fullmatch(name)[1] for name in tensors}
  settings = {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": name,
      "revision": revision or None,
      "r": rank,
      "lora_alpha": alpha,
      "target_modules": sorted({m.rpartition(".")[2] for m in modules}),
      "lora_dropout": 0.0,
      "bias": "none",
      "fan_in_fan_out": False,
      "use_rslora": False,
      "use_dora": False,
      "init_lora_weights": True,
      "modules_to_save": None,
      "inference_mode": True,
  }
  hf_files.write_json(folder / CONFIG, settings)
  safetensors.numpy.save_file(
      {name: np.ascontiguousarray(x) for name, x in tensors.items()},
      folder / WEIGHTS,
      metadata={"format": "pt"},
  )


def tensor_name(hf_name: str, factor: str) -> str:
  """Returns the name of factor "A" or "B" of a model's tensor."""
  return f"{_PREFIX}{hf_name.removesuffix('.weight')}.lora_{factor}.weight"


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
  settings = hf_files.read_json(folder / CONFIG)
  if not isinstance(settings, dict):
    raise ValueError(f"{CONFIG}: must be an object")
  for key, allowed in _ONLY.items():
    value = settings.get(key)
    if key in settings and value not in allowed:
      raise ValueError(f"{CONFIG}: {key}={value!r}: must be {allowed[0]!r}")
  for key, value in settings.items():
    # Later versions of peft may enable features that are unknown here.
    if key.startswith("use_") and key not in (*_ONLY, "use_rslora") and value:
      raise ValueError(f"{CONFIG}: {key}={value!r}: must be False")
  alpha = settings.get("lora_alpha")
  is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
  if not is_number or not math.isfinite(alpha):
    raise ValueError(f"{CONFIG}: lora_alpha={alpha!r}: must be a number")
  return settings


def _base_name(folder: pathlib.Path, settings: Mapping[str, Any]) -> str:
  """Returns the base's name, with its revision if it is on the hub.

  A relative path may be relative to the adapter's folder.
  """
  name = settings.get("base_model_name_or_path")
  if not isinstance(name, str) or not name:
    raise ValueError(
        f"{CONFIG}: base_model_name_or_path={name!r}: must be the base's"
        " folder or GGUF file, or ORG/NAME of the Hugging Face hub"
    )
  nested = folder / name
  is_model = nested.is_file() or (nested / "config.json").is_file()
  if is_model:
    return str(nested)
  revision = settings.get("revision")
  is_local = pathlib.Path(name).expanduser().exists()
  return f"{name}@{revision}" if revision and not is_local else name


def _digest(folder: pathlib.Path, base: pathlib.Path) -> str:
  """Returns a digest of the adapter's and the base's files."""
  digest = hashlib.blake2b(_VERSION.encode(), digest_size=12)
  names = (CONFIG, WEIGHTS, *hf_files.TOKENIZER_FILES)
  for path in (folder / name for name in names):
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
      if file.is_file():
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
  for path in sorted(base.resolve().iterdir()):
    stat = path.stat()
    digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
  return digest.hexdigest()


def _make(target: pathlib.Path, fill: Callable[[pathlib.Path], object]) -> None:
  """Creates a folder atomically: fills a temporary folder and moves it."""
  with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as new:
    path = pathlib.Path(new) / target.name
    path.mkdir()
    fill(path)
    hf_files.sync(path)
    os.rename(path, target)


def _copy_small(
    folder: pathlib.Path, base: pathlib.Path, new: pathlib.Path
) -> None:
  """Copies the base's configs, and the adapter's tokenizer or the base's."""
  own = (folder / hf_files.TOKENIZER_FILES[0]).is_file()
  hf_files.copy_files(("config.json", "generation_config.json"), base, new)
  hf_files.copy_files(
      (*hf_files.TOKENIZER_FILES, "vocab.txt"), folder if own else base, new
  )
  hf = hf_files.read_json(new / "config.json")
  settings = isinstance(hf, dict) and hf.get("quantization_config")
  # `_merge` writes floats in place of FP8.
  if isinstance(settings, dict) and settings.get("quant_method") == "fp8":
    del hf["quantization_config"]
    if not hf.get("dtype") and not hf.get("torch_dtype"):
      hf["dtype"] = "bfloat16"  # As read from a config.json with FP8.
    hf_files.write_json(new / "config.json", hf)


def _family(hf: Mapping[str, Any]) -> family_lib.Family | None:
  """Returns the family of a config.json's language model, None if unknown."""
  kind = hf.get("model_type")
  return family_lib.FAMILIES.get(kind) or next(
      (f for f in family_lib.FAMILIES.values() if kind and f.part_of == kind),
      None,
  )


def _names(name: str, family: family_lib.Family | None) -> Iterator[str]:
  """Yields the names that a base may use for a tensor of `peft`'s model."""
  yield name
  # A model saved without its head lacks the first part.
  yield name.partition(".")[2]
  # A multimodal model's files and classes name its language model differently.
  if family is not None and family.part_of:
    prefixes = (*family.part_prefixes, family.prefix)
    for old, new in itertools.permutations(prefixes, 2):
      if name.startswith(old):
        yield new + name.removeprefix(old)


def _has_tied_head(
    hf: Mapping[str, Any], family: family_lib.Family | None
) -> bool:
  """Returns whether a model's head is tied to its embedding."""
  name, _, default = (family.keys if family else family_lib.SIZES)[
      "tie_embeddings"
  ]
  return bool(hf.get(name, default))


def _merge(
    folder: pathlib.Path,
    settings: Mapping[str, Any],
    base: pathlib.Path,
    new: pathlib.Path,
) -> None:
  """Writes the base's tensors with the adapter's products added."""
  if not (folder / WEIGHTS).is_file():
    raise ValueError(f"has no {WEIGHTS}; must be an adapter in safetensors")
  tensors = safetensors.numpy.load_file(folder / WEIGHTS)
  files = hf_files.Fp8Files(hf_files.open_files(base))
  hf = hf_files.read_json(base / "config.json")
  family = _family(hf)
  factors: dict[str, dict[str, np.ndarray]] = {}
  for name, tensor in tensors.items():
    match = _TENSOR.fullmatch(name)
    if match is None and ".lora_embedding_" in name:
      raise ValueError(
          f"{WEIGHTS}: tensor {name}: adapters of embeddings are not"
          " supported; must be an adapter without embed_tokens"
      )
    if match is None:
      raise ValueError(
          f"{WEIGHTS}: tensor {name}: must be lora_A and lora_B of matrices"
      )
    whole = f"{match[1]}.weight"
    if family is not None and re.fullmatch(family.part_others, whole):
      continue  # The matrix itself is not read either.
    names = _names(whole, family)
    target = next((name for name in names if name in files.shapes), None)
    if _HEAD in (whole, target) and _has_tied_head(hf, family):
      raise ValueError(
          f"{WEIGHTS}: tensor {name}: the head of the base is its embedding"
          " (tie_word_embeddings), which has no adapter of its own; must be a"
          " base with a head, or an adapter without lm_head"
      )
    if target is None:
      raise ValueError(
          f"{WEIGHTS}: tensor {name}: the base has no {match[1]}.weight"
      )
    if match[2] is None:
      own = files.read(target, (slice(None),) * len(files.shapes[target]))
      if not np.array_equal(own.astype(tensor.dtype), tensor):
        raise ValueError(
            f"{WEIGHTS}: tensor {name}: differs from the base's {target};"
            " must be an adapter of a base that was not changed"
        )
      continue
    factors.setdefault(target, {})[match[2]] = tensor.astype(np.float32)
    if not np.isfinite(factors[target][match[2]]).all():
      raise ValueError(
          f"{WEIGHTS}: tensor {name}: has NaN or infinite entries; must be an"
          " adapter of finite numbers, such as an earlier checkpoint's"
      )
  if not factors:
    raise ValueError(
        f"{WEIGHTS}: has no lora_A and lora_B of a matrix of the base; must be"
        " an adapter that was saved with its weights"
    )
  for target, pair in factors.items():
    _check_shapes(target, pair, files.shapes[target], settings)

  def make(name: str) -> np.ndarray:
    whole = (slice(None),) * len(files.shapes[name])
    tensor = files.read(name, whole)
    if name not in factors:
      return np.ascontiguousarray(tensor)
    a, b = factors[name]["A"], factors[name]["B"]
    rank = len(a)
    root = math.sqrt(rank) if settings.get("use_rslora") else rank
    product = settings["lora_alpha"] / root * (b @ a)
    if settings.get("fan_in_fan_out"):
      product = product.T
    # A smaller dtype would round small products away.
    merged = np.ascontiguousarray(tensor.astype(np.float32) + product)
    if not np.isfinite(merged).all():
      raise ValueError(f"{name}: has NaN or infinite entries once merged")
    return merged

  bytes_of = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8}
  sizes = {
      name: math.prod(shape)
      * (4 if name in factors else bytes_of.get(files.dtypes[name], 8))
      for name, shape in files.shapes.items()
  }
  hf_files.write_files(new, sizes, make, max_file_bytes=hf_files.MAX_FILE_BYTES)


def _check_shapes(
    name: str,
    pair: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    settings: Mapping[str, Any],
) -> None:
  """Raises ValueError unless factors fit a base's matrix."""
  out_in = shape[::-1] if settings.get("fan_in_fan_out") else shape
  shapes = {factor: x.shape for factor, x in pair.items()}
  ranks = {shapes.get("A", (0,))[0], shapes.get("B", (0,))[-1]}
  fits = len(ranks) == 1 and shapes == {
      "A": (*ranks, out_in[-1]),
      "B": (out_in[0], *ranks),
  }
  if not fits or len(shape) != 2:
    raise ValueError(
        f"{WEIGHTS}: factors of {name} have the shapes {shapes}: must be A"
        f" [rank, in] and B [out, rank] of {list(shape)}"
    )
  patterns = settings.get("rank_pattern") or {}
  allowed = {settings.get("r", *ranks), *patterns.values()}
  if not ranks <= allowed:
    raise ValueError(
        f"{WEIGHTS}: factors of {name} have rank {min(ranks)}: must be one of"
        f" {sorted(allowed)}, as in {CONFIG}"
    )
