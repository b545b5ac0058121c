# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Table of samplers and their capabilities.

A sampler is a class that implements `requests.Sampler`, a function `make` in
the same file, and a row of `SAMPLERS`.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import importlib
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Facts:
  """A sampler and its capabilities.

  module: Python module whose `make(config, model, settings, home)` returns the
    sampler; "" for a log, which wraps another sampler.
  settings: config keys that no other sampler reads.
  addresses: setting with one address per searcher, or "".
  allows: setting -> the only supported values.
  is_here: whether it decodes on the searcher's devices.
  is_exact: whether all tokens are sampled by the given params, with exact
    log-probs.
  has_routes: whether it records the experts of tokens.
  takes_adapters: whether `put` takes an `adapter_folder.Adapter`, unmerged.
  """

  module: str
  settings: tuple[str, ...] = ()
  addresses: str = ""
  allows: Mapping[str, tuple[Any, ...]] = dataclasses.field(
      default_factory=dict
  )
  is_here: bool = True
  is_exact: bool = True
  has_routes: bool = True
  takes_adapters: bool = False


SAMPLERS: Mapping[str, Facts] = {
    "jax": Facts("tba_jax.sampling.decode"),
    "vllm": Facts(
        "tba_jax.sampling.vllm",
        settings=("search.vllm_urls", "search.vllm_folder"),
        addresses="search.vllm_urls",
        allows={
            "sampling.num_waiting": (0,),
            "sampling.in_flight": ("off", "keep_cache"),
            "search.quantization": ("",),
            "explore.fraction": (0,),
            "explore.min_tokens": (0,),
            "explore.max_tokens": (0,),
            "search.mesh.data": (1,),
            "search.mesh.fsdp": (1,),
            "search.mesh.tensor": (1,),
        },
        is_here=False,
        has_routes=False,
        takes_adapters=True,
    ),
}
# A log replaces samples; everything else depends on the wrapped sampler.
LOG = Facts("", is_exact=False, has_routes=False)


def kind(config: Any, dtype: str) -> str:
  """Returns how a searcher of a compute dtype decodes: "int8", "vllm", …."""
  if SAMPLERS[config.search.sampler].is_here:
    return config.search.quantization or dtype
  return config.search.sampler


def without(
    capability: str, sampler: str, log: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
  """Yields settings whose sampler lacks a capability, and allowed values.

  Args:
    capability: field of `Facts`.
    sampler: `search.sampler`.
    log: `offline.path`.
  """
  if not getattr(SAMPLERS[sampler], capability):
    yield "search.sampler", tuple(
        name for name, facts in SAMPLERS.items() if getattr(facts, capability)
    )
  if log and not getattr(LOG, capability):
    yield "offline.path", ("",)


_KEPT = ("top_k", "top_p", "min_p", "max_kept_tokens")


def num_kept(config: Any) -> int:
  """Returns `num_kept_of` of `config.sampling` and `config.offline`."""
  keys = [f"sampling.{name}" for name in _KEPT]
  keys += ["offline.path", "offline.fraction"]
  parts = {key: key.split(".") for key in keys}
  return num_kept_of({k: config[a][b] for k, (a, b) in parts.items()})


def num_kept_of(c: Mapping[str, Any]) -> int:
  """Returns C, most tokens that truncated sampling keeps; 0 if it is off.

  Completions that all come from a log are not truncated.
  """
  top_k, top_p, min_p, most = (c[f"sampling.{name}"] for name in _KEPT)
  if c["offline.path"] and c["offline.fraction"] == 1:
    return 0
  if not top_k and top_p == 1 and not min_p:
    return 0
  return min(most, top_k) if top_k else most


@dataclasses.dataclass(frozen=True)
class SamplerHome:
  """The searcher that owns a sampler.

  index: the searcher's index.
  on_event: function called with (kind, message).
  on_progress: function called while the sampler works.
  """

  workdir: pathlib.Path
  index: int
  on_event: Callable[[str, str], None]
  on_progress: Callable[[], None] = lambda: None


def make(
    config: Any, model: Any, settings: Any, home: SamplerHome | None
) -> Any:
  """Returns the `requests.Sampler` of `config.search.sampler`.

  Args:
    settings: `requests.SamplingSettings`.
    home: its searcher; None for a sampler that decodes in this process.

  Raises:
    ValueError: the sampler does not support a setting or the model.
  """
  module = SAMPLERS[config.search.sampler].module
  return importlib.import_module(module).make(config, model, settings, home)


def make_here(model: Any, settings: Any) -> Any:
  """Returns a sampler that decodes on this process's devices."""
  module = importlib.import_module(SAMPLERS["jax"].module)
  return module.make(None, model, settings, None)
