# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Seeded mutations of bytes and of JSON, for `fuzz`."""

from collections.abc import Sequence
import copy
import json
import random
import struct
from typing import Any

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
            0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # fmt: skip
# Values that stand where another kind of value belongs.
_VALUES = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5),
    *(-0.0, 1e308, float("nan"), float("inf"), "", "0", "a", "\0", "\ud800"),
    *("None", "../..", "/", "é" * 50, "x" * 5000, [], {}, [[]], [None]),
    *([0] * 100, {"": 0}, {"a": {"b": []}}),
)
_MAX_ROUNDS = 4
_DEPTH = 2000


def of_bytes(
    rng: random.Random, data: bytes, others: Sequence[bytes] = (b"",)
) -> bytes:
  """Returns bytes that differ from `data` in one to four places.

  Bits flip; spans are removed, repeated, swapped, replaced by noise or by a
  number that tends to be an edge, or taken from one of `others`.
  """
  mutant = bytearray(data)
  for _ in range(rng.randint(1, _MAX_ROUNDS)):
    size = len(mutant)
    start = rng.randrange(size + 1)
    # Most spans are short, some are as long as the rest.
    end = min(size, start + int(2 ** rng.uniform(0, 12)))
    kind = rng.randrange(9)
    if kind <= 1 and start < size:
      mutant[start] ^= 1 << rng.randrange(8)
    elif kind == 2:
      del mutant[start:end]
    elif kind == 3:
      mutant[start:start] = mutant[start:end]
    elif kind == 4:
      mutant[start:end] = rng.randbytes(end - start)
    elif kind == 5:
      number = struct.pack("<Q", rng.choice(_NUMBERS))
      width = rng.choice((1, 2, 4, 8))
      mutant[start : start + width] = number[:width]
    elif kind == 6:
      other = rng.choice(others)
      begin = rng.randrange(len(other) + 1)
      mutant[start:end] = other[begin : begin + end - start]
    elif kind == 7:
      del mutant[start:]
    else:
      place = rng.randrange(len(mutant) + 1)
      span = mutant[start:end]
      del mutant[start:end]
      mutant[place:place] = span
  return bytes(mutant)


def of_json(rng: random.Random, value: Any) -> Any:
  """Returns a copy of a JSON value with one to four nodes changed.

  Values become others of another kind, items are removed, repeated, renamed and
  moved.
  """
  root = [copy.deepcopy(value)]
  for _ in range(rng.randint(1, _MAX_ROUNDS)):
    parent, key = rng.choice(_places(root))
    kind = rng.randrange(6)
    if kind <= 2:
      parent[key] = copy.deepcopy(rng.choice(_VALUES))
    elif kind == 3 and parent is not root:
      del parent[key]
    elif kind == 4 and isinstance(parent, dict):
      parent[rng.choice(("", "é", str(key) + "_", "x" * 300))] = parent.pop(key)
    elif isinstance(parent, list) and parent is not root:
      parent.append(copy.deepcopy(parent[key]))
    else:
      other, place = rng.choice(_places(root))
      parent[key] = copy.deepcopy(other[place])
  return root[0]


def json_text(rng: random.Random, value: Any) -> bytes:
  """Returns a changed JSON value as text; rarely, one that nests deep."""
  if rng.random() < 0.01:
    return b"[" * _DEPTH + b"]" * _DEPTH
  return json.dumps(of_json(rng, value)).encode()


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
  """Returns (container, key) of all nodes, at most a few hundred per list."""
  result, todo = [], [root]
  while todo and len(result) < 2000:
    node = todo.pop()
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in list(keys)[:200]:
      result.append((node, key))
      if isinstance(node[key], dict | list):
        todo.append(node[key])
  return result
