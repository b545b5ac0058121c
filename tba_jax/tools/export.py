# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `export` program: a checkpoint as a Hugging Face folder.

    python -m tba_jax.main --program=export --workdir=runs/countdown
    python -m tba_jax.main --program=export --workdir=runs/countdown \\
        --config.export.dtype=bfloat16 240 models/countdown

Operands are the step of a checkpoint (default: the newest) and the folder to
write (default: WORKDIR/export), which `transformers` loads. A folder elsewhere
is readable as the user's umask allows. With `export.adapter` it has only the
factors of `lora.rank`, for `peft`.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import sys

import jax.numpy as jnp
import ml_collections

from tba_jax.learning import model_source
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.policy import lora
from tba_jax.system import processes


def run_export(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  try:
    folder = run(config, workdir, operands)
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  print(folder)
  return processes.EXIT_OK


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> pathlib.Path:
  """Writes the folder and returns it; replaces an existing model.

  Args:
    config: only `export` is read.
    workdir: directory of the run; no process may run there.
    operands: step and folder, see the module docstring.

  Raises:
    ValueError: the operands are invalid, the checkpoint cannot be read, or the
      folder has files that do not belong to a model.
    OSError: the checkpoint does not exist, or the folder cannot be written.
  """
  step, folder = _parse(workdir, operands)
  inside = folder.absolute().is_relative_to(pathlib.Path(workdir).absolute())
  written = contextlib.nullcontext() if inside else processes.shared()
  if config.export.adapter:
    return _write_adapter(config, workdir, step, folder, written)
  source = model_source.of_checkpoint(
      config, workdir, step, model_source.one_device()
  )
  shape = source.model.config
  if config.export.dtype:
    shape = dataclasses.replace(
        shape,
        param_dtype=config.export.dtype,
        compute_dtype=config.export.dtype,
    )
  print(
      f"{source.name}: {shape.family}, {shape.num_layers} layers of width"
      f" {shape.width}, in {shape.param_dtype}",
      file=sys.stderr,
  )
  with written:
    hf.save(folder, shape, source.params, source.tokenizer)
  return folder


def _write_adapter(
    config: ml_collections.ConfigDict,
    workdir: str,
    step: int | None,
    folder: pathlib.Path,
    written: contextlib.AbstractContextManager[None],
) -> pathlib.Path:
  """Writes adapters for `peft`; returns the folder; raises like `run`."""
  policy, adapters, name = model_source.adapters_of_checkpoint(
      config, workdir, step, model_source.one_device()
  )
  if policy.folder is None:
    raise ValueError(
        "config.init='scratch': adapters need a base in a folder; must be"
        " config.export.adapter=False"
    )
  if adapter_folder.is_adapter(policy.folder):
    raise ValueError(
        f"config.init={str(policy.folder)!r}: the base has an adapter already,"
        " which only config.export.adapter=False merges with the new one"
    )
  if hf_config.is_multimodal(policy.folder):
    raise ValueError(
        f"config.init={str(policy.folder)!r}: the base is the language model of"
        " a multimodal one, where its matrices have other names; must be"
        " config.export.adapter=False"
    )
  tensors = lora.peft_tensors(policy.model.config, adapters)
  if config.export.dtype:
    dtype = jnp.dtype(config.export.dtype)
    tensors = {key: x.astype(dtype) for key, x in tensors.items()}
  print(f"{name}: adapters of {policy.folder}", file=sys.stderr)

  def fill(new: pathlib.Path) -> None:
    adapter_folder.write(
        new,
        tensors,
        base=policy.folder,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
    )
    policy.tokenizer.save(new)

  with written:
    hf.replace_folder(folder, fill)
  return folder


def _parse(
    workdir: str, operands: Sequence[str]
) -> tuple[int | None, pathlib.Path]:
  """Returns the step, None for the newest, and the folder to write."""
  rest = list(operands)
  step = int(rest.pop(0)) if rest and rest[0].isdecimal() else None
  if len(rest) > 1 or (rest and rest[0].isdecimal()):
    raise ValueError(
        f"operands {' '.join(operands)}: must be the step of a checkpoint and"
        " the folder to write, each at most once"
    )
  folder = rest[0] if rest else str(pathlib.Path(workdir) / "export")
  return step, pathlib.Path(folder).expanduser()
