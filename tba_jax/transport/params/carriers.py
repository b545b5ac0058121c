# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of carriers, by `config.publish.carrier`; does not import JAX.

To add a carrier, write its class into a file of this folder and an entry into
`CARRIERS`: settings and checks of configs read names and facts from it.
"""

from collections.abc import Mapping
import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class CarrierEntry:
  """A carrier, with the facts that checks of a config need.

  made_by: MODULE:CLASS in this folder.
  suits: places where it can be used, for `docs/reference/settings.md`.
  takes_urls: whether `publish.directory` may be in an object store.
  shares_directory: whether other hosts need `publish.directory`.
  moves_shards: whether each process of a trainer sends its devices' shards.
  """

  made_by: str
  suits: str
  takes_urls: bool = False
  shares_directory: bool = False
  moves_shards: bool = False


CARRIERS: Mapping[str, CarrierEntry] = {
    "store": CarrierEntry(
        "store_chunks:StoreChunks", "any hosts, small params"
    ),
    "files": CarrierEntry(
        "shared_files:SharedFiles", "one host, or a shared directory"
    ),
    "network": CarrierEntry(
        "network:Network",
        "any hosts, from each trainer process to each searcher",
        moves_shards=True,
    ),
    "orbax": CarrierEntry(
        "orbax_shards:OrbaxShards",
        "shards, in a shared directory or on gs://",
        takes_urls=True,
        shares_directory=True,
        moves_shards=True,
    ),
}


def make(name: str, place: Any) -> Any:
  """Returns a carrier at a `carrier.CarrierPlace`; imports its module."""
  module, _, attribute = CARRIERS[name].made_by.partition(":")
  in_module = importlib.import_module(f"tba_jax.transport.params.{module}")
  return getattr(in_module, attribute).make(place)
