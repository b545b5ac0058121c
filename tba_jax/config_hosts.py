# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What settings of processes and hosts must be to each other. No JAX here."""

from collections.abc import Iterator, Mapping
import importlib.metadata
import importlib.util
import math
import pathlib
from typing import Any

_Problems = Iterator[tuple[str, str]]


def trainer(c: Mapping[str, Any]) -> _Problems:
  """The mesh is of all devices of all processes of the trainer."""
  axes = ("data", "fsdp", "sequence", "tensor")
  size = math.prod(c[f"mesh.{axis}"] for axis in axes)
  num_processes, cpu_devices = (
      c["trainer.num_processes"],
      c["trainer.cpu_devices"],
  )
  if size % num_processes:
    yield "trainer.num_processes", (
        f"allowed a divisor of {size}, the devices of config.mesh"
    )
  elif cpu_devices and cpu_devices * num_processes != size:
    yield "trainer.cpu_devices", (
        f"allowed 0 or {size // num_processes}: the devices of all processes"
        f" are the {size} of config.mesh"
    )


def searcher(c: Mapping[str, Any]) -> _Problems:
  """A searcher's rows divide over its mesh, which is of its own devices."""
  sizes = {a: c[f"search.mesh.{a}"] for a in ("data", "fsdp", "tensor")}
  rows, devices = sizes["data"] * sizes["fsdp"], math.prod(sizes.values())
  if c["sampling.num_rows"] % rows:
    yield "sampling.num_rows", (
        f"allowed a multiple of {rows}: a searcher's rows are split over"
        " config.search.mesh.data * config.search.mesh.fsdp devices"
    )
  if c["search.cpu_devices"] not in (0, devices):
    yield "search.cpu_devices", (
        f"allowed 0 or {devices}, the devices of config.search.mesh"
    )


def store(c: Mapping[str, Any]) -> _Problems:
  """A client must outlive the probe of its store."""
  if c["store.probe_timeout_s"] >= c["store.deadline_s"]:
    yield "store.probe_timeout_s", (
        f"allowed less than config.store.deadline_s = {c['store.deadline_s']}:"
        " an operation must outlive the change of generation"
    )


def tls(c: Mapping[str, Any]) -> _Problems:
  """All files of TLS or none, with a jaxlib that has it and an address."""
  keys = ("store.tls_cert_file", "store.tls_key_file", "store.tls_ca_file")
  if not any(c[key] for key in keys):
    return
  for key in keys:
    if not pathlib.Path(c[key]).expanduser().is_file():
      yield key, "allowed a file that exists, for all of config.store.tls_*"
  found = importlib.metadata.version("jaxlib")
  if tuple(map(int, found.split(".")[:2])) < (0, 11):
    yield keys[0], f"allowed '' with jaxlib {found}: mutual TLS needs 0.11"
  if not c["store.address"]:
    yield "store.address", "allowed a TCP address with config.store.tls_*"


def publish(c: Mapping[str, Any]) -> _Problems:
  """Params lie where their carrier writes and all hosts read."""
  carrier, directory = c["publish.carrier"], c["publish.directory"]
  if "://" in directory:
    if not directory.startswith("gs://"):
      yield "publish.directory", "allowed a path, or gs://BUCKET/PATH"
    elif carrier not in ("auto", "orbax"):
      yield "publish.directory", (
          "allowed a path of a file system with config.publish.carrier ="
          f" {carrier!r}; gs:// needs 'orbax' or 'auto'"
      )
    elif importlib.util.find_spec("gcsfs") is None:
      yield "publish.directory", (
          "allowed a path without gcsfs; gs:// needs  pip install tba_jax[gcs]"
      )
  elif carrier == "orbax" and not (
      directory or is_one_host(c["store.address"])
  ):
    yield "publish.directory", (
        "allowed a directory that all hosts share, or gs://BUCKET/PATH, with"
        " config.publish.carrier = 'orbax' and a store.address of other hosts"
    )


def is_one_host(address: str) -> bool:
  """Tells whether a store at `address` is reached from its own host alone."""
  host = address.rpartition(":")[0].strip("[]")
  return (
      not host
      or host == "localhost"
      or host.startswith("127.")
      or host == "::1"
  )
