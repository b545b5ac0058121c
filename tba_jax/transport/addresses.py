# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forms of an address, and which hosts can reach it."""

import ipaddress
import re

from tba_jax.system import rules

_HOST = r"(?:[^:\s\[\]]+|\[[^\]\s]+\])"


def _is_host_port(text: str) -> bool:
  """Returns whether a text is "" or "host:port"."""
  match = re.fullmatch(rf"{_HOST}:(\d+)", text)
  return not text or (match is not None and int(match[1]) < 2**16)


def _is_host_ports(text: str) -> bool:
  """Returns whether a text is "", "host:0" or "host:first-last"."""
  match = re.fullmatch(rf"{_HOST}:(?:0|(\d+)-(\d+))", text)
  if match is None or match[1] is None:
    return not text or match is not None
  return 0 < int(match[1]) < int(match[2]) < 2**16


HOST_PORT = rules.Allowed("'' or 'host:port'", _is_host_port)
HOST_PORTS = rules.Allowed(
    "'', 'host:0' (a free port) or 'host:first-last'",
    _is_host_ports,
)


def is_loopback(host: str) -> bool:
  """Returns whether a host name or IP address is loopback."""
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def is_one_host(address: str) -> bool:
  """Returns whether only its own host can reach a store at `address`."""
  host = address.rpartition(":")[0].strip("[]")
  return not host or is_loopback(host)


def split_range(address: str) -> tuple[str, list[int]]:
  """Returns host and ports of "host:port" or "host:first-last"; 0 = any."""
  host, _, text = address.rpartition(":")
  first, _, last = text.partition("-")
  ports = list(range(int(first), int(last or first) + 1))
  return host.strip("[]"), ports


def join_address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
