# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carriers of a config: which one the trainer writes with, all to read with."""

from collections.abc import Callable, Mapping
from typing import Any, TYPE_CHECKING

import ml_collections

from tba_jax import config_hosts
from tba_jax import run_directory
from tba_jax.carriers import base
from tba_jax.carriers import chunks
from tba_jax.carriers import directory as directories
from tba_jax.carriers import files
from tba_jax.carriers import shard_peers
from tba_jax.carriers import shards
from tba_jax.carriers import transfer

if TYPE_CHECKING:
  from tba_jax import cluster as cluster_lib

# Up to here the store is as fast as a file, and needs no directory.
SMALL_BYTES = 4 << 20
# Beyond, the store is slow for all who use it.
STORE_BYTES = 100 << 20


def choose(
    setting: str,
    *,
    num_bytes: int,
    one_host: bool,
    directory: str,
    num_processes: int,
) -> str:
  """Returns the name of the carrier that a trainer writes with.

  Args:
    setting: `publish.carrier`; "auto" follows the rule below.
    num_bytes: of one version.
    one_host: whether all processes are on one host.
    directory: `publish.directory`.
    num_processes: of the trainer.

  Returns:
    The setting, or: "store" for small params; Orbax's shards where a directory
    is given that is in an object store, or that several processes of a trainer
    share with other hosts; files where all can read them; else the store again
    up to what it can bear, and then "transfer".
  """
  if setting != "auto":
    return setting
  if num_bytes <= SMALL_BYTES:
    return "store"
  if directories.is_remote(directory):
    return "orbax"
  if one_host:
    return "files"
  if directory:
    return "orbax" if num_processes > 1 else "files"
  return "store" if num_bytes <= STORE_BYTES else "transfer"


def make_writers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    specs: base.Specs,
    peers: shard_peers.Leader | None = None,
) -> list[base.Carrier]:
  """Returns the carriers to write with, each for where the one before is full.

  Args:
    config: reads `publish` and `store.address`.
    run: whose params they are.
    specs: of the published leaves.
    peers: from `make_peers`; then no process has all params, and none but
      "orbax" can carry them.
  """
  name = chosen(config, specs)
  names = [name]
  if config.publish.carrier == "auto" and name != "store" and peers is None:
    names.append("store")
  made = make_readers(config, run, peers=peers)
  return [made[name] for name in names]


def make_peers(
    config: ml_collections.ConfigDict,
    specs: base.Specs,
    cluster: "cluster_lib.Cluster",
    *,
    secret: bytes,
    copy: Callable[[Any], Mapping[str, Any]],
) -> shard_peers.Leader | shard_peers.Helper | None:
  """Returns what has a trainer's processes write their shards themselves.

  Args:
    config: reads `publish`, `store` and `trainer.num_processes`.
    specs: of the published leaves.
    cluster: this process among the others.
    secret: key of the run's messages.
    copy: returns what is published of params, by path.

  Returns:
    Process 0's end or another's; None where process 0 writes all.
  """
  if cluster.num_processes == 1 or chosen(config, specs) != "orbax":
    return None
  settings = {"secret": secret, "deadline_s": config.store.deadline_s}
  if cluster.leads:
    return shard_peers.Leader(cluster.client, cluster.num_processes, **settings)
  return shard_peers.Helper(cluster.client, cluster.process, copy, **settings)


def chosen(config: ml_collections.ConfigDict, specs: base.Specs) -> str:
  """Returns the name of the carrier that versions of `specs` go by."""
  return choose(
      config.publish.carrier,
      num_bytes=base.num_bytes(specs),
      one_host=config_hosts.is_one_host(config.store.address),
      directory=config.publish.directory,
      num_processes=config.trainer.num_processes,
  )


def make_readers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    *,
    peers: shard_peers.Leader | None = None,
    placement: base.Placement | None = None,
) -> dict[str, base.Carrier]:
  """Returns every carrier by name; the manifest says which one is needed.

  Args:
    config: reads `publish` and `store`.
    run: whose params they are.
    peers: of the trainer's other processes, from `make_peers`.
    placement: of leaves that come to devices; None = on one.
  """
  place = config.publish.directory, run.workdir, run.run_id
  # The way to the store is the way to the trainer's host too.
  near = config.store.locator or config.store.address or "127.0.0.1:0"
  host = near.rpartition(":")[0].strip("[]")
  made = (
      chunks.Chunks(),
      files.Files(directories.path_of(*place)),
      transfer.Transfer(
          run_id=run.run_id,
          secret=run.secret,
          find_host=lambda: transfer.own_address(host),
          deadline_s=config.store.deadline_s,
          placement=placement,
      ),
      shards.OrbaxShards(
          directories.shards_of(*place),
          run_id=run.run_id,
          secret=run.secret,
          deadline_s=config.store.deadline_s,
          placement=placement,
          peers=peers,
      ),
  )
  return {carrier.name: carrier for carrier in made}
