# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carriers of a config: which one the trainer writes with, all to read with."""

import ml_collections

from tba_jax import run_directory
from tba_jax.carriers import base
from tba_jax.carriers import chunks
from tba_jax.carriers import directory
from tba_jax.carriers import files
from tba_jax.carriers import transfer

# Up to here the store is as fast as a file, and needs no directory.
SMALL_BYTES = 4 << 20
# Beyond, the store is slow for all who use it.
STORE_BYTES = 100 << 20


def choose(
    setting: str, *, num_bytes: int, one_host: bool, directory_set: bool
) -> str:
  """Returns the name of the carrier that a trainer writes with.

  Args:
    setting: `publish.carrier`; "auto" follows the rule below.
    num_bytes: of one version.
    one_host: whether all processes are on one host.
    directory_set: whether `publish.directory` names a place.

  Returns:
    The setting, or: "store" for small params; files where all can read them;
    else the store again up to what it can bear, and then "transfer".
  """
  if setting != "auto":
    return setting
  if num_bytes <= SMALL_BYTES:
    return "store"
  if one_host or directory_set:
    return "files"
  return "store" if num_bytes <= STORE_BYTES else "transfer"


def make_writers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    specs: base.Specs,
) -> list[base.Carrier]:
  """Returns the carriers to write with, each for where the one before is full.

  Args:
    config: reads `publish` and `store.address`.
    run: whose params they are.
    specs: of the published leaves.
  """
  name = choose(
      config.publish.carrier,
      num_bytes=base.num_bytes(specs),
      one_host=is_one_host(config.store.address),
      directory_set=bool(config.publish.directory),
  )
  names = [name]
  if config.publish.carrier == "auto" and name != "store":
    names.append("store")
  made = make_readers(config, run)
  return [made[name] for name in names]


def make_readers(
    config: ml_collections.ConfigDict, run: run_directory.Run
) -> dict[str, base.Carrier]:
  """Returns every carrier by name; the manifest says which one is needed."""
  path = directory.path_of(config.publish.directory, run.workdir, run.run_id)
  # The way to the store is the way to the trainer's host too.
  near = config.store.locator or config.store.address or "127.0.0.1:0"
  host = near.rpartition(":")[0].strip("[]")
  made = (
      chunks.Chunks(),
      files.Files(path),
      transfer.Transfer(
          run_id=run.run_id,
          secret=run.secret,
          find_host=lambda: transfer.own_address(host),
          deadline_s=config.store.deadline_s,
      ),
  )
  return {carrier.name: carrier for carrier in made}


def is_one_host(address: str) -> bool:
  """Tells whether a store at `address` is reached from its own host alone."""
  host = address.rpartition(":")[0].strip("[]")
  return (
      not host
      or host == "localhost"
      or host.startswith("127.")
      or host == "::1"
  )
