# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of `train` on one machine, and of the files of `generate`."""

import os
import pathlib

from tba_jax.environments import checks as environments
from tba_jax.models import checks as models
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_tensors
from tba_jax.policy import settings as policy
from tba_jax.system import rules


def _line_program(c: rules.Values) -> rules.Problems:
  """Checks the files of `generate` and `score`."""
  source, target = (
      pathlib.Path(c[f"generate.{name}"]).expanduser()
      for name in ("input", "output")
  )
  name = c["generate.model"]
  try:
    remote = name.startswith("gs://")
    if not name or not (remote or hf_hub.find(name).is_dir()):
      yield "generate.model", (
          "must be a Hugging Face folder, a GGUF file or ORG/NAME of the hub, a"
          " run directory, or RUN/checkpoints/STEP of one; runs also in gs://"
      )
    elif not remote:
      _check_source(c, hf_hub.find(name))
  except (ValueError, OSError) as error:
    yield "generate.model", str(error)
  if c.program == "score" and c["offline.path"]:
    for name in ("input", "output"):
      if c[f"generate.{name}"]:
        yield f"generate.{name}", (
            "must be '' with offline.path, where score only prints a report on"
            " the log"
        )
    return
  if not c["generate.input"] or not os.path.isfile(source):
    yield "generate.input", "must be a file that exists, a JSON object a line"
  if not c["generate.output"] or os.path.isdir(target):
    yield "generate.output", "must be the name of a file"
  elif target.absolute() == source.absolute():
    yield "generate.output", "must be another file than config.generate.input"
  elif not os.path.isdir(
      next(filter(os.path.exists, target.absolute().parents))
  ):
    yield "generate.output", "must be a file in a folder"


def _check_source(c: rules.Values, folder: pathlib.Path) -> None:
  """Raises ValueError if a folder has neither a run nor a usable model."""
  is_checkpoint = (
      folder.name.isdecimal() and folder.parent.name == "checkpoints"
  )
  if is_checkpoint or (folder / "checkpoints").is_dir():
    return
  shape = folders.read(folder, folders.POLICY)
  hf_tensors.check_model(folder, shape)
  folders.check_tokenizer(folder, shape, models.stop_ids(c))


# fmt: off
CHECKS = (
    # Threads of one process share a device: collectives of two threads could
    # deadlock. They have no store that other processes could join.
    rules.require("run.processes", lambda v: v == "one",
                  {"trainer.num_processes": (1,), "trainer.cpu_devices": (0,),
                   "search.cpu_devices": (0,), "devices.searcher": ("",),
                   "store.address": ("",), "store.locator": ("",),
                   **{f"mesh.{axis}": (1,) for axis in policy.MESH_AXES},
                   **{f"search.mesh.{axis}": (1,)
                      for axis in ("data", "fsdp", "tensor")}}),
)
# fmt: on
# Checks of `generate` and `score`, whose model comes from a folder.
OF_LINES = (_line_program, environments.played)
