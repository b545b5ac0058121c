# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Base model of a server: its params, and the programs compiled for it."""

import collections
from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

import jax
import ml_collections

from tba_jax import types
from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.learning import model_source
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import schemas
from tba_jax.serving import token_passes
from tba_jax.serving import trained_model

# Most sets of compiled programs kept, keyed by adapters.
_PROGRAMS = 8
# Sections of the config on which the results of repeated requests depend.
_SECTIONS = ("model", "tokenizer", "sampling", "loss", "lora")


class ServedBase:
  """The base model of a server.

  base_name: identity of the model, recorded in checkpoints.
  tokenizer_id: name or folder that clients load the tokenizer from.

  Args:
    folder: root of the server's files in `workdir`.
    registry: store of the settings that must not change.
    source: policy and params on the devices; None = those that the config
      names.

  Raises:
    ValueError: the model cannot be loaded, or the directory belongs to a server
      with other settings.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      workdir: str,
      folder: pathlib.Path,
      registry: registry_lib.Registry,
      source: tuple[policy_lib.Policy, types.PyTree] | None = None,
  ):
    self.config = config
    self.policy, self.params = source or (
        policy_lib.make_policy(config, workdir, needs_task=False),
        None,
    )
    self.name = config.serve.model_name or str(self.policy.folder or "scratch")
    self.base_name = lora.base_name(self.policy.folder, config.seed)
    check_settings(config, self.base_name, registry, workdir)
    self.tokenizer_id = self._place_tokenizer(folder / "tokenizer")
    if self.params is None:
      mesh = sharding.make_mesh(config.mesh)
      self.params = jax.device_put(
          model_source.initial_params(config, self.policy, mesh),
          sharding.param_shardings(mesh, self.policy.model),
      )
    self._programs: collections.OrderedDict[
        tuple[int, str], trained_model.TrainPrograms
    ] = collections.OrderedDict()

  @property
  def family(self) -> str:
    """Family of the model, as `llama`."""
    return self.policy.model.config.family

  @property
  def max_tokens(self) -> int:
    """Maximum length of a sequence, in tokens."""
    sampling = self.config.sampling
    return sampling.max_prompt_tokens + sampling.max_completion_tokens

  def programs(self, spec: Mapping[str, Any]) -> trained_model.TrainPrograms:
    """Returns the programs of models with a spec's adapters."""
    key = (spec["rank"], spec["targets"])
    if key in self._programs:
      self._programs.move_to_end(key)
    else:
      while len(self._programs) >= _PROGRAMS:
        self._programs.popitem(last=False)
      self._programs[key] = trained_model.TrainPrograms(
          self.config,
          self.policy.model,
          self.params,
          rank=spec["rank"],
          targets=spec["targets"],
      )
    return self._programs[key]

  def abstract_state(self, spec: Mapping[str, Any]) -> dict[str, types.PyTree]:
    """Returns shapes and shardings of the state of a spec's models."""
    return self.programs(spec).trainable.abstract_state()

  def scorer(self) -> token_passes.TokenPasses:
    """Returns passes that score with a full model's params, not adapters."""
    return self.programs({"rank": 0, "targets": "all"}).tokens

  def spec_of(
      self, model: str, adapters: schemas.LoraConfig | None
  ) -> dict[str, Any]:
    """Returns the spec of a new model.

    Args:
      adapters: LoRA settings; None trains all params, as rank 0 does.

    Raises:
      ValueError: nothing would be trained.
    """
    adapters = adapters or schemas.LoraConfig(rank=0)
    is_mlp = lora.kernel_names(self.policy.model)
    targets = [
        name
        for name in sorted(is_mlp)
        if (adapters.train_mlp if is_mlp[name] else adapters.train_attn)
    ]
    if adapters.rank and not targets:
      raise ValueError(
          "lora_config: train_mlp or train_attn must be true, since this server"
          " has no adapters of the unembedding"
      )
    seed = seed_of(model) if adapters.seed is None else adapters.seed
    return {
        "base_model": self.name,
        "rank": adapters.rank,
        "targets": ",".join(targets) if adapters.rank else "all",
        "train_mlp": any(is_mlp[n] for n in targets),
        "train_attn": not all(is_mlp[n] for n in targets),
        "seed": seed % 2**32,
    }

  def _place_tokenizer(self, source: pathlib.Path) -> str:
    """Returns a name or folder that clients can load the tokenizer from."""
    folder = self.policy.folder
    if folder is not None and not folder.exists():
      if len(folder.parts) == 2:
        return str(folder)  # ORG/NAME on the hub.
    if not source.is_dir():
      hf.replace_folder(source, self.policy.tokenizer.save)
    return str(source.absolute())


def check_settings(
    config: ml_collections.ConfigDict,
    base_name: str,
    registry: registry_lib.Registry,
    workdir: str,
) -> None:
  """Raises ValueError if a server with other settings owns the directory."""
  facts = {
      f"config.{key}": value
      for key, value in load.flatten(config).items()
      if key.partition(".")[0] in _SECTIONS or key in ("seed", "train.remat")
  }
  facts["base"] = base_name
  saved = registry.fact("settings", facts)
  for name, value in json.loads(json.dumps(facts)).items():
    before = saved.get(name)
    if name not in saved:
      # The setting is newer than the version that first started the server.
      key = name.removeprefix("config.")
      before = settings_lib.SETTINGS[key].default
    if before != value:
      raise ValueError(
          f"{name} was {before!r} when this server began, now it is"
          f" {value!r}: restore it, or give another --workdir than {workdir}"
      )


def seed_of(text: str) -> int:
  """Returns a 32-bit seed derived from a text."""
  digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
  return int.from_bytes(digest, "big")
