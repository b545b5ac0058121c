# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads a model to sample from, score with or export.

A source is a Hugging Face folder, a hub model, a run directory (meaning its
newest checkpoint), or a checkpoint of a run, `RUN/checkpoints/STEP`.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import math
import os
import pathlib

from etils import epath
import jax
import ml_collections

from tba_jax import types
from tba_jax.config import load as load_lib
from tba_jax.learning import checkpoint
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import value_model as value_model_lib
from tba_jax.run import run_directory
from tba_jax.system import bucket

# Setting that distinguishes models with the same path.
IDENTITY = "weights"

_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """A model with its params and its tokenizer.

  name: path of the source, including a checkpoint's step.
  identity: a checkpoint's run id, or `lora.base_name` of a folder.
  model: pure functions.
  params: model params on the requested mesh.
  """

  name: str
  identity: str
  model: transformer.Model
  params: types.PyTree
  tokenizer: tokenizer_lib.Tokenizer


def restore(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike[str],
    step: int | None,
    mesh: jax.sharding.Mesh,
    *,
    needs_task: bool = True,
) -> tuple[policy_lib.Policy, types.PyTree, int]:
  """Returns the policy, params and step of a run's checkpoint.

  Adapters are merged into their base, which must be unchanged.

  Args:
    step: checkpoint to read; None reads the newest.
    needs_task: whether to make the task, see `policy.make_policy`.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: the run has no checkpoints, or it does not fit the config.
  """
  policy, state, base = _restore_state(
      config, workdir, step, mesh, needs_task=needs_task
  )
  shardings = sharding.param_shardings(mesh, policy.model)
  merger = lora.make_merger(
      policy.adapters,
      policy.folder,
      config.seed,
      lambda: jax.device_put(
          policy_lib.initial_params(policy, config.seed, shardings), shardings
      ),
  )
  lora.check_base(base, merger.base)
  return policy, merger.params(state.params), int(state.step)


def _restore_state(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike[str],
    step: int | None,
    mesh: jax.sharding.Mesh,
    *,
    needs_task: bool,
) -> tuple[policy_lib.Policy, train_step.TrainState, str]:
  """Returns (policy, state, name of the base); raises as `restore`."""
  folder = _checkpoints(workdir)
  # A Checkpointer would create the folder.
  if not folder.is_dir():
    raise ValueError(f"{folder}: there is no checkpoint; train first, or name a"
                     " Hugging Face folder")  # fmt: skip
  policy = policy_lib.make_policy(config, workdir, needs_task=needs_task)
  checkpointer = checkpoint.Checkpointer(
      str(folder), keep=config.checkpoint.keep, read_only=True
  )
  try:
    state, saved = checkpointer.restore(
        train_step.abstract_state(
            config,
            policy.trained,
            mesh,
            value_model=value_model_lib.make_model(
                config, policy.model, policy.value_folder
            ),
        ),
        step,
    )
  finally:
    checkpointer.close()
  return policy, state, saved.get("base", "")


def check_checkpoint(workdir: str | os.PathLike[str], step: int) -> None:
  """Raises FileNotFoundError if a run has no checkpoint of this step."""
  folder = _checkpoints(workdir)
  if not (folder / str(step)).is_dir():
    raise FileNotFoundError(f"no checkpoint {step} in {folder}")


def adapters_of_checkpoint(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike[str],
    step: int | None,
    mesh: jax.sharding.Mesh,
) -> tuple[policy_lib.Policy, types.PyTree, str]:
  """Returns policy, adapters and name of a checkpoint, without the base.

  Args and raises: see `of_checkpoint`.
  """
  with _held(workdir):
    policy, state, base = _restore_state(
        config, workdir, step, mesh, needs_task=False
    )
  lora.check_base(base, lora.base_name(policy.folder, config.seed))
  name = str(_checkpoints(workdir) / str(int(state.step)))
  return policy, state.params, name


def of_checkpoint(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike[str],
    step: int | None,
    mesh: jax.sharding.Mesh,
) -> ModelSource:
  """Returns the model of a run's checkpoint.

  Holds the workdir's lock while reading, because a run in progress may delete
  the checkpoint.

  Args and raises: see `restore`; also ValueError while the run is in progress.
  """
  with _held(workdir):
    policy, params, step = restore(
        config, workdir, step, mesh, needs_task=False
    )
  name = str(_checkpoints(workdir) / str(step))
  run = f"run {run_directory.run_id(str(workdir))}"
  return ModelSource(name, run, policy.model, params, policy.tokenizer)


def _held(workdir: str | os.PathLike[str]) -> contextlib.closing:
  """Returns a context that holds a run's lock; ValueError if it is taken."""
  if not _checkpoints(workdir).is_dir():
    raise ValueError(f"{workdir}: there is no checkpoint; train first")
  return contextlib.closing(
      bucket.hold(run_directory.lock(str(workdir)), workdir)
  )


def _checkpoints(workdir: str | os.PathLike[str]) -> epath.Path:
  """Returns the folder of a run's checkpoints, which may be in a bucket."""
  folder = pathlib.Path(workdir).absolute() / _CHECKPOINTS
  return epath.Path(bucket.place(folder))


def one_device() -> jax.sharding.Mesh:
  """Returns a mesh with only the default device."""
  return sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1))


def mesh_here(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
  """Returns a run's mesh, cut to the available devices if it needs more.

  Args:
    sizes: `config.mesh`.
  """
  if math.prod(sizes.values()) > jax.device_count():
    sizes = sharding.cut_rows(sizes, jax.device_count())
  return sharding.make_mesh(sizes)


def initial_params(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> types.PyTree:
  """Returns the params that training starts from, on a mesh.

  Raises:
    ValueError: the model cannot be read, or does not divide over the mesh.
  """
  if mesh.size == 1:
    return policy_lib.initial_params(policy, config.seed)
  shardings = sharding.param_shardings(mesh, policy.model)
  params = policy_lib.initial_params(policy, config.seed, shardings)
  return jax.device_put(params, shardings)


def load(
    key: str,
    path: str,
    *,
    bos: str,
    dtype: str | None,
    chat: bool = False,
    template_arguments: str = "",
    mesh: jax.sharding.Mesh | None = None,
) -> ModelSource:
  """Returns the model of a folder, a run or a checkpoint.

  Args:
    key: setting that holds `path`, for messages.
    path: source, see the module docstring.
    bos, chat, template_arguments: settings of `config.tokenizer` for a folder;
      a run uses its own config.
    dtype: type of a folder's params and activations; None keeps its own.
    mesh: placement of the params; None uses the default device.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: the path is not a source, cannot be read, or does not divide
      over the mesh.
  """
  local = bucket.stage_model(path, key=f"config.{key}")
  folder = pathlib.Path(local).expanduser()
  run, step = folder, None
  if folder.name.isdecimal() and folder.parent.name == _CHECKPOINTS:
    run, step = folder.parent.parent, int(folder.name)
  saved = _checkpoints(run)
  if saved.is_dir() and (step is None or (saved / str(step)).is_dir()):
    config = run_directory.load_config(str(run))
    return of_checkpoint(
        load_lib.complete(config), run, step, mesh or one_device()
    )
  if not bucket.is_remote(path):
    folder = hf_hub.find(path)
  if not folder.is_dir() or bucket.is_remote(path):
    raise ValueError(
        f"config.{key}={path!r}: no such folder; must be a Hugging Face folder,"
        " a GGUF file, a hub name ORG/NAME, a run directory or"
        " RUN/checkpoints/STEP; runs may be in gs://"
    )
  # Check the small files before reading the weights.
  try:
    shape = hf_config.read(folder, dtype=dtype)
    folders.check_labels(shape, folders.POLICY)
    tokenizer = tokenizer_lib.load_configured(
        folder, dict(bos=bos, chat=chat, template_arguments=template_arguments)
    )
    folders.check_vocabulary(shape, tokenizer.vocab_size)
  except ValueError as error:
    why = str(error).removeprefix(f"{folder}: ")
    raise ValueError(f"config.{key}={path!r}: {why}") from error
  tokenizer.add_turn_ends(shape.turn_ends)
  model, shardings = transformer.make_model(shape), None
  if mesh is not None:
    shardings = sharding.param_shardings(mesh, model)
  _, params = hf.load(folder, dtype=dtype, shardings=shardings)
  identity = lora.base_name(folder, 0)
  return ModelSource(str(folder.absolute()), identity, model, params, tokenizer)


def of_config(config: ml_collections.ConfigDict) -> ModelSource:
  """Returns the model that `config.generate` names, on `config.mesh`.

  Raises: see `load`.
  """
  source = load(
      "generate.model",
      config.generate.model,
      bos=config.tokenizer.bos,
      chat=config.tokenizer.chat,
      template_arguments=config.tokenizer.template_arguments,
      dtype=config.generate.dtype or None,
      mesh=sharding.make_mesh(config.mesh),
  )
  policy_lib.add_stops(config, source.tokenizer)
  return source


def settings(
    config: ml_collections.ConfigDict, source: ModelSource
) -> dict[str, object]:
  """Returns the settings that determine log-probs under a source's model."""
  mesh = config.mesh.to_dict()
  return {
      "model": source.name,
      IDENTITY: source.identity,
      "config.generate.dtype": config.generate.dtype,
      # The mesh affects the order of summation.
      **({"config.mesh": mesh} if set(mesh.values()) != {1} else {}),
  }
