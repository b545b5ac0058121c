# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of settings of the store, its hosts and the carriers."""

import importlib.util
import os
import socket

from tba_jax.system import rules
from tba_jax.transport import addresses
from tba_jax.transport import wire
from tba_jax.transport.kv import certificates
from tba_jax.transport.params import carriers

_ALL_INTERFACES = ("0.0.0.0", "::")


def _publish(c: rules.Values) -> rules.Problems:
  """Params must be written where all hosts can read them."""
  carrier, directory = c["publish.carrier"], c["publish.directory"]
  if c["publish.address"].rpartition(":")[0].strip("[]") in _ALL_INTERFACES:
    yield "publish.address", "must be one interface: searchers connect to it"
  if os.path.exists(directory) and not os.path.isdir(directory):
    yield "publish.directory", "must be a directory"
  if "://" in directory:
    if not directory.startswith("gs://"):
      yield "publish.directory", "must be a path, or gs://BUCKET/PATH"
    elif carrier != "auto" and not carriers.CARRIERS[carrier].takes_urls:
      able = (n for n, entry in carriers.CARRIERS.items() if entry.takes_urls)
      yield "publish.directory", (
          "must be a path of a file system with config.publish.carrier ="
          f" {carrier!r}; gs:// needs {', '.join(map(repr, able))} or 'auto'"
      )
    elif importlib.util.find_spec("gcsfs") is None:
      yield "publish.directory", (
          "must be a path without gcsfs; gs:// needs pip install 'tba_jax[gcs]'"
      )
  elif (
      carrier != "auto"
      and carriers.CARRIERS[carrier].shares_directory
      and not (directory or addresses.is_one_host(c["store.address"]))
  ):
    yield "publish.directory", (
        "must be a directory that all hosts share, or gs://BUCKET/PATH, with"
        f" config.publish.carrier = {carrier!r} and a store.address of other"
        " hosts"
    )


_TLS = ("store.tls_cert_file", "store.tls_key_file", "store.tls_ca_file")


def _store(c: rules.Values) -> rules.Problems:
  has_tls = any(c[key] for key in _TLS)
  secret = c["store.secret_file"] or os.environ.get(wire.SECRET_VARIABLE)
  safe = has_tls or secret or c["store.insecure"]
  for key in ("store.address", "store.locator"):
    host = c[key].rpartition(":")[0].strip("[]")
    if host in _ALL_INTERFACES:
      yield key, "must be one interface: clients receive its address"
    elif not safe and not addresses.is_one_host(c[key]):
      yield key, (
          "must be this host alone without config.store.secret_file,"
          f" {wire.SECRET_VARIABLE}, config.store.tls_* or"
          " config.store.insecure: docs/guides/scaling.md"
      )
  if has_tls:
    for key in _TLS:
      if not os.path.isfile(os.path.expanduser(c[key])):
        yield key, "must be a file that exists, for all of config.store.tls_*"
    if not certificates.is_supported():
      yield _TLS[0], (
          f"must be '' with jaxlib {certificates.jaxlib_version()}: mutual TLS"
          f" needs {certificates.NEEDED}"
      )
    if not c["store.address"]:
      yield "store.address", "must be a TCP address with config.store.tls_*"


def _local_addresses(c: rules.Values) -> rules.Problems:
  """The addresses must belong to the machine that starts the store."""
  if c.program not in ("train", "store"):
    return
  for key in ("store.address", "store.locator"):
    host = c[key].rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
      if host:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
          probe.bind((host, 0))
    except OSError as error:
      yield key, f"must be an address of this machine; {host}: {error.strerror}"


CHECKS = (_publish, _store, _local_addresses)
