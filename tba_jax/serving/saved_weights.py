# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients' checkpoints: training states, versions to sample from, exports.

A checkpoint's path is tinker://MODEL/KIND/NAME; it enters the registry once its
files are complete.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import pathlib
import shutil
from typing import Any, Protocol

from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import schemas

SCHEME = "tinker://"
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
EXTERNAL_WEIGHTS = "external_weights"
# Most unnamed versions of each model on disk.
_UNNAMED = 8


class ModelState(Protocol):
  """The parts of a model under training that are saved."""

  params: types.PyTree
  opt_state: types.PyTree
  num_steps: int

  def merged(self) -> types.PyTree:
    """Returns the model's params, adapters merged into their base."""


@dataclasses.dataclass
class SavedWeights:
  """The checkpoints of a server.

  `place`, `delete` and `step` are for any thread.

  lora_alpha: `config.lora.alpha`.
  abstract_state: function from a spec to the shapes and shardings of its
    models' state.
  insist: function that repeats a write until it succeeds.
  """

  policy: policy_lib.Policy
  lora_alpha: float
  base_name: str
  abstract_state: Callable[[Mapping[str, Any]], dict[str, types.PyTree]]
  registry: registry_lib.Registry
  folder: pathlib.Path
  insist: Callable[..., None]

  def model_folder(self, model: str) -> pathlib.Path:
    return self.folder / "models" / model.replace(":", "_")

  def place(self, path: str) -> tuple[str, pathlib.Path]:
    """Returns kind and folder of a path; raises ValueError if unknown."""
    parts = path.removeprefix(SCHEME).split("/")
    # The parts of a registered path are known to be valid.
    if not path.startswith(SCHEME) or self.registry.checkpoint(path) is None:
      raise ValueError(
          f"{path}: there is no such checkpoint; must be a path that"
          " save_weights or save_weights_for_sampler has returned, of which the"
          f" newest {_UNNAMED} without a name are kept"
      )
    model, kind, name = parts
    return kind, self.model_folder(model) / kind / name

  def step(self, path: str) -> int:
    """Returns the optimizer steps of a version; 0 for the base model."""
    spec = self.registry.checkpoint(path) if path else None
    return (spec or {}).get("step", 0)

  def read(self, path: str) -> tuple[dict[str, Any], types.PyTree]:
    """Returns spec and state of a checkpoint; raises ValueError if unknown."""
    kind, folder = self.place(path)
    if kind == EXTERNAL_WEIGHTS:
      raise ValueError(f"{path}: an export is for other programs")
    spec = self.registry.checkpoint(path)
    state = self.abstract_state(spec)
    if kind == SAMPLER_WEIGHTS:
      del state["opt_state"]
    saver = checkpoint.Checkpointer(str(folder), keep=1)
    try:
      return spec, saver.restore(state)[0]
    finally:
      saver.close()

  def save(
      self,
      request: request_journal.ServerRequest,
      body: schemas.SaveWeights,
      run: ModelState,
  ) -> str:
    """Saves a checkpoint to continue training from; returns its path."""
    name = body.path or f"seq-{request.seq}"
    path, folder = self._new_path(request, WEIGHTS, name, body.overwrite)
    state = {"params": run.params, "opt_state": run.opt_state}
    self._write(folder, state)
    self.insist(self._note, path, request, run)
    return path

  def save_version(
      self,
      request: request_journal.ServerRequest,
      body: schemas.SaveWeights,
      run: ModelState,
  ) -> str:
    """Saves a version to sample from; returns its path.

    Of a model's unnamed versions, only the newest are kept.
    """
    name = body.path or f"{schemas.UNNAMED}{request.seq}"
    path, folder = self._new_path(request, SAMPLER_WEIGHTS, name)
    self._write(folder, {"params": run.params})
    self.insist(self._note, path, request, run)
    if not body.path:
      self._drop_unnamed(request.owner)
    return path

  def export(
      self,
      request: request_journal.ServerRequest,
      body: schemas.SaveWeights,
      run: ModelState,
  ) -> tuple[str, int]:
    """Writes a model folder for transformers, or an adapter folder for peft.

    Returns:
      Path, and size in bytes.
    """
    name = body.path or f"seq-{request.seq}"
    path, folder = self._new_path(request, EXTERNAL_WEIGHTS, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove(folder)  # A repeat after a kill may find its own folder.
    policy = self.policy
    rank = self.registry.model(request.owner)["rank"]
    tensors = None
    if rank:
      tensors = lora.peft_tensors_or_none(
          self.policy.model.config, self.policy.folder, run.params
      )
    if tensors is not None:

      def fill(new: pathlib.Path) -> None:
        adapter_folder.write(
            new,
            tensors,
            base=policy.folder,
            rank=rank,
            alpha=self.lora_alpha,
        )
        policy.tokenizer.save(new)

      hf.replace_folder(folder, fill)
    else:
      hf.save(
          folder,
          policy.model.config,
          run.merged(),
          policy.tokenizer,
      )
    self._note(path, request, run)
    return path, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())

  def delete(self, path: str) -> None:
    """Deletes a checkpoint; raises ValueError if unknown."""
    _, folder = self.place(path)
    self.registry.drop_checkpoint(path)
    shutil.rmtree(folder, ignore_errors=True)

  def _drop_unnamed(self, model: str) -> None:
    """Deletes the oldest unnamed versions."""
    unnamed = [
        path
        for path, _ in self.registry.checkpoints_of(model)
        if f"/{SAMPLER_WEIGHTS}/{schemas.UNNAMED}" in path
    ]
    for path in unnamed[:-_UNNAMED]:
      # A client may delete it at the same time.
      with contextlib.suppress(ValueError):
        self.delete(path)

  def _new_path(
      self,
      request: request_journal.ServerRequest,
      kind: str,
      name: str,
      overwrite: bool = False,
  ) -> tuple[str, pathlib.Path]:
    """Returns path and folder of a new checkpoint."""
    model = request.owner
    path = f"{SCHEME}{model}/{kind}/{name}"
    before = self.registry.checkpoint(path)
    # The same request may have written the checkpoint before a kill.
    if before and before.get("request") != request.id and not overwrite:
      or_overwrite = ", or give overwrite" * (kind == WEIGHTS)
      raise ValueError(
          f"{path}: there is a checkpoint already; name another one"
          + or_overwrite
      )
    return path, self.model_folder(model) / kind / name

  def _write(self, folder: pathlib.Path, state: types.PyTree) -> None:
    """Writes a checkpoint; an old one stays until the new one is complete."""
    new = folder.with_name(f".{folder.name}")  # Clients may not give this name.
    _remove(new)
    try:
      saver = checkpoint.Checkpointer(str(new), keep=1)
      try:
        saver.save(0, state, {}, wait=True)
      finally:
        saver.close()
      _remove(folder)
      new.rename(folder)
    finally:
      _remove(new)

  def _note(
      self,
      path: str,
      request: request_journal.ServerRequest,
      run: ModelState,
  ) -> None:
    self.registry.add_checkpoint(
        path,
        request.owner,
        {
            **self.registry.model(request.owner),
            "base": self.base_name,
            "request": request.id,
            "step": run.num_steps,
        },
    )


def _remove(folder: pathlib.Path) -> None:
  if folder.exists():
    shutil.rmtree(folder)
