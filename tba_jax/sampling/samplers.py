# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Samplers that a config may name, and what each can do.

A sampler is a class with the interface `requests.Sampler` in a file with a
function `make`, and a row of `SAMPLERS`.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import importlib
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Facts:
  """A sampler, and what a config may ask of it.

  module: module whose `make(config, model, settings, home)` makes it; "" for a
    log, which wraps another sampler.
  settings: settings that it alone reads.
  addresses: setting with an address for each searcher; "" without any.
  is_here: whether the searcher's devices decode, and hold what that takes.
  is_exact: whether the given params sample all tokens, with the log-probs that
    are returned.
  has_turns: environments may answer completions.
  has_routes: it records the experts that tokens use.
  has_waiting: a completion may leave its row while its environment works.
  has_filters: top-k, top-p and min-p.
  has_stop_strings: texts may end completions.
  explores: temperatures and lengths of exploration.
  recomputes_cache: newer params may recompute the KV cache.
  quantizes: weights in other dtypes than the model's.
  shards: params on a mesh of several devices.
  """

  module: str
  settings: tuple[str, ...] = ()
  addresses: str = ""
  is_here: bool = True
  is_exact: bool = True
  has_turns: bool = True
  has_routes: bool = True
  has_waiting: bool = True
  has_filters: bool = True
  has_stop_strings: bool = True
  explores: bool = True
  recomputes_cache: bool = True
  quantizes: bool = True
  shards: bool = True


SAMPLERS: Mapping[str, Facts] = {
    "own": Facts("tba_jax.sampling.decode"),
    # The server draws from the tempered model, up to a stop token.
    "vllm": Facts(
        "tba_jax.sampling.vllm",
        settings=("search.vllm_urls", "search.vllm_folder"),
        addresses="search.vllm_urls",
        is_here=False,
        has_turns=False,
        has_routes=False,
        has_waiting=False,
        has_filters=False,
        has_stop_strings=False,
        explores=False,
        recomputes_cache=False,
        quantizes=False,
        shards=False,
    ),
}
# A log takes the place of samples; all else is up to the sampler of the others.
LOG = Facts("", is_exact=False, has_turns=False, has_routes=False)

# Capability -> settings that ask for it, and their values that do not.
ASKED_BY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "has_waiting": {"sampling.num_waiting": (0,)},
    "has_filters": {
        "sampling.top_k": (0,),
        "sampling.top_p": (1,),
        "sampling.min_p": (0,),
    },
    "has_stop_strings": {"sampling.stop_strings": ("",)},
    "explores": {
        f"explore.{key}": (0,)
        for key in ("fraction", "min_tokens", "max_tokens")
    },
    "recomputes_cache": {"sampling.in_flight": ("off", "keep_cache")},
    "quantizes": {"search.weights": ("",)},
    "shards": {
        f"search.mesh.{axis}": (1,) for axis in ("data", "fsdp", "tensor")
    },
}


def readers() -> dict[str, tuple[str, ...]]:
  """Returns, by setting, the samplers that alone read it."""
  found: dict[str, tuple[str, ...]] = {}
  for name, facts in SAMPLERS.items():
    for key in facts.settings:
      found[key] = (*found.get(key, ()), name)
  return found


def in_use(sampler: str, log: str) -> dict[str, Facts]:
  """Returns the samplers of a config by the setting that names them.

  Args:
    sampler: `search.sampler`.
    log: `logged.path`.
  """
  used = {"search.sampler": SAMPLERS[sampler]}
  return used | {"logged.path": LOG} if log else used


def is_exact(sampler: str, log: str) -> bool:
  """Returns whether all samplers in use are exact; see `Facts` and `in_use`."""
  return all(facts.is_exact for facts in in_use(sampler, log).values())


def without(
    capability: str, sampler: str, log: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
  """Yields the settings whose samplers lack it, and the values allowed.

  Args:
    capability: field of `Facts`.
    sampler, log: arguments of `in_use`.
  """
  for key, facts in in_use(sampler, log).items():
    if not getattr(facts, capability):
      able = [n for n, other in SAMPLERS.items() if getattr(other, capability)]
      yield key, tuple(able) if key == "search.sampler" else ("",)


@dataclasses.dataclass(frozen=True)
class Home:
  """The searcher that a sampler is of.

  workdir: run directory.
  index: index of the searcher.
  on_event: function called with (kind, message).
  on_progress: called while a server is at work.
  """

  workdir: pathlib.Path
  index: int
  on_event: Callable[[str, str], None]
  on_progress: Callable[[], None] = lambda: None


def make(config: Any, model: Any, settings: Any, home: Home | None) -> Any:
  """Returns the `requests.Sampler` of `config.search.sampler`.

  Args:
    config: config of the run.
    model: model of the policy.
    settings: `requests.Settings`.
    home: searcher that it is of; None for a sampler that decodes here.

  Raises:
    ValueError: it cannot have such params or settings.
  """
  module = SAMPLERS[config.search.sampler].module
  return importlib.import_module(module).make(config, model, settings, home)
