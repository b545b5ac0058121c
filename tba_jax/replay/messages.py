# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups to one header with flat arrays, and back with every shape checked.

A message of the queue holds one *block*: the groups of one sampling round.
Arrays are stacked over its groups (axis n), so that a block of 32 small groups
costs the wire as much as one large one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.transport import base
from tba_jax.transport import wire

_STACKED = {
    "completion_tokens": (np.int32, 3),
    "completion_lengths": (np.int32, 2),
    "stopped": (np.bool_, 2),
    "behavior_logprobs": (np.float32, 3),
    "rewards": (np.float32, 2),
    "versions": (np.int32, 2),
}
_SCALARS = ("prompt_id", "visit", "position", "epoch")


def pack_groups(
    groups: Sequence[types.Group],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the header fields and arrays of one block.

  Args:
    groups: at least one group; all with the same S and T.

  Raises:
    ValueError: no group, or groups of unequal shapes.
  """
  if not groups:
    raise ValueError("a block needs at least one group")
  arrays = {}
  for name, (dtype, _) in _STACKED.items():
    arrays[name] = np.stack([getattr(g, name) for g in groups]).astype(
        dtype, copy=False
    )
  arrays["prompt_tokens"] = np.concatenate(
      [g.prompt_tokens for g in groups]
  ).astype(np.int32, copy=False)
  header = {name: [int(getattr(g, name)) for g in groups] for name in _SCALARS}
  header["prompt_lengths"] = [len(g.prompt_tokens) for g in groups]
  return header, arrays


def unpack_groups(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[types.Group]:
  """Returns the groups of a block, every shape and dtype checked.

  Args:
    header: as `pack_groups` made it; further fields are ignored.
    arrays: as `pack_groups` made them.

  Raises:
    ValueError: a field is missing, of another type, or shapes disagree.
  """
  columns = {name: _integers(header, name) for name in _SCALARS}
  lengths = _integers(header, "prompt_lengths")
  num_groups = len(lengths)
  if not num_groups or any(len(c) != num_groups for c in columns.values()):
    raise ValueError("header lists of unequal length, or no group")
  for name, (dtype, ndim) in _STACKED.items():
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != ndim:
      raise ValueError(f"{name}: want {ndim} axes of {np.dtype(dtype)}")
  leading = arrays["completion_tokens"].shape
  for name, (_, ndim) in _STACKED.items():
    if arrays[name].shape != leading[:ndim] or leading[0] != num_groups:
      raise ValueError(f"{name}: shape {arrays[name].shape} of {leading}")
  prompts = arrays.get("prompt_tokens")
  if prompts is None or prompts.dtype != np.int32 or prompts.ndim != 1:
    raise ValueError("prompt_tokens: want one axis of int32")
  if min(lengths) < 1 or sum(lengths) != len(prompts):
    raise ValueError("prompt_lengths do not add up to prompt_tokens")
  ends = np.cumsum(lengths)
  return [
      types.Group(
          prompt_tokens=prompts[ends[i] - lengths[i] : ends[i]],
          **{name: column[i] for name, column in columns.items()},
          **{name: arrays[name][i] for name in _STACKED},
      )
      for i in range(num_groups)
  ]


def check_group(
    group: types.Group, *, vocab_size: int, max_prompt_tokens: int
) -> str | None:
  """Returns why a group's content can't be trained on, None where it can.

  The reason is one word, a key of the ledger's `rejected`.
  """
  if not np.isfinite(group.rewards).all():
    return "reward"
  if not np.isfinite(group.behavior_logprobs).all():
    return "logprob"
  num_tokens = group.completion_tokens.shape[1]
  lengths = group.completion_lengths
  if (lengths < 1).any() or (lengths > num_tokens).any():
    return "length"
  if len(group.prompt_tokens) > max_prompt_tokens:
    return "length"
  for tokens in (group.completion_tokens, group.prompt_tokens):
    if (tokens < 0).any() or (tokens >= vocab_size).any():
      return "token"
  return None


def _integers(header: Mapping[str, Any], name: str) -> list[int]:
  value = header.get(name)
  if not isinstance(value, list) or any(type(v) is not int for v in value):
    raise ValueError(f"header field {name!r}: want a list of integers")
  return value


# What the trainer tells its searchers: one message for each of them.
#
# It holds all that a searcher asks for, the blocks that it is granted and how
# far
# its own have come, so that one look of the searcher brings both.


def reply_key(sid: str) -> str:
  """Returns the key of a searcher's message."""
  return f"work/{sid}"


class Replies:
  """Writes messages that only this trainer can have written, in its epoch."""

  def __init__(self, *, run_id: str, secret: bytes, epoch: int):
    """Writes nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      epoch: the trainer's start count.
    """
    self._run_id = run_id
    self._secret = secret
    self._epoch = epoch
    self._count = 0

  def put(
      self, transport: base.Transport, key: str, message: Mapping[str, Any]
  ) -> None:
    """Writes one message."""
    transport.put(key, self._seal(key, message))

  def put_work(
      self,
      transport: base.Transport,
      work: Mapping[str, Sequence[Any]],
      watermarks: Mapping[str, int],
  ) -> None:
    """Writes to several searchers what they hold, and what came of them.

    Args:
      transport: of the calling thread.
      work: sid -> all blocks that it holds, as of `Grants.assign`.
      watermarks: next sequence of each searcher; those below are acknowledged.
    """
    messages = {}
    for sid, blocks in work.items():
      # A later message has a higher count, whatever it is about.
      self._count += 1
      message = {
          "count": self._count,
          "blocks": blocks,
          "acked": watermarks.get(sid, 0),
      }
      messages[reply_key(sid)] = self._seal(reply_key(sid), message)
    transport.put_all(messages)

  def _seal(self, key: str, message: Mapping[str, Any]) -> bytes:
    # The key, so that no message can stand in the place of another.
    about = {"run": self._run_id, "epoch": self._epoch, "key": key}
    return wire.encode_message({**about, **message}, self._secret)
