# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records that pass between the parts of a run, and the table of columns.

A *column* holds a property of a prompt, its completions or their tokens. It is
defined once, in the record for its last consumer: `StepColumns` reach the
optimizer step, `BufferColumns` the replay buffer, and the columns of `Group`
the trainer. Messages, journal, buffer, draws, batches, checksums and step files
are derived from these definitions.

Axes: B prompts, K completions of a prompt in a batch, S completions of a
prompt as sampled, P prompt tokens, T completion tokens, N layers, A bytes that
name a token's experts, C tokens that truncated sampling keeps.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Column:
  """Definition of a column.

  axes: dimensions in a group, "" for a single integer; a batch adds B and has K
    instead of S.
  meaning: description of the value.
  mask: tokens with a value: "completion", all up to the length, or "sampled",
    those that the policy sampled (`Batch.completion_mask`); others are 0 from
    the buffer on. "" without an axis T.
  when: key of `collect.CONDITIONS` if only some runs have the column, else "";
    the ledger counts a group rejected for it under this name.
  unit: "nats", "reward" (task units) or "".
  """

  dtype: np.dtype
  axes: str
  meaning: str
  mask: str = ""
  when: str = ""
  unit: str = ""

  @property
  def batch_axes(self) -> str:
    return "B" + self.axes.replace("S", "K")


def column(dtype_and_axes: str, meaning: str, **options: str) -> Any:
  """Returns a dataclass field such as "float32[ST]"; optional with `when`."""
  dtype, _, axes = dtype_and_axes.removesuffix("]").partition("[")
  definition = Column(np.dtype(dtype), axes, meaning, **options)
  return dataclasses.field(
      default=None if definition.when else dataclasses.MISSING,
      metadata={"column": definition},
  )


def columns_of(record: type[Any]) -> dict[str, Column]:
  """Returns the columns of a record by name."""
  return {
      field.name: field.metadata["column"]
      for field in dataclasses.fields(record)
      if "column" in field.metadata
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepColumns:
  """Columns that an optimizer step reads."""

  prompt_tokens: Any = column(
      "int32[P]", "unpadded in a group, left-padded with 0 in a batch"
  )
  completion_tokens: Any = column(
      "int32[ST]", "pad after the last token", mask="completion"
  )
  behavior_logprobs: Any = column(
      "float32[ST]",
      "log-prob of each sampled token under the distribution it was drawn"
      " from: at the sampling temperature, after top-k, top-p and exploration",
      mask="sampled",
      unit="nats",
  )
  ref_logprobs: Any = column(
      "float32[ST]",
      "log π_ref of each counted token, at the sampling temperature",
      mask="sampled",
      unit="nats",
  )
  rewards: Any = column(
      "float32[S]",
      "NaN of completions that could not be judged",
      unit="reward",
  )
  routes: Any = column(
      "uint8[STNA]",
      "experts of each completion token in each layer with experts, a byte"
      " each, or two of a model with more than 256, the low one first; 0 at the"
      " last token, which was not fed to the model, and after it",
      mask="completion",
      when="routes",
  )
  prompt_routes: Any = column(
      "uint8[PNA]", "experts of the prompt's tokens", when="routes"
  )
  kept_ids: Any = column(
      "int32[STC]",
      "ids of the tokens that truncated sampling kept for each sampled token,"
      " -1 after the last; log-probs are relative to them",
      mask="sampled",
      when="kept_ids",
  )
  turn_rewards: Any = column(
      "float32[ST]",
      "reward of each turn at its last token; a row sums to its reward",
      mask="completion",
      when="turn_rewards",
      unit="reward",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferColumns(StepColumns):
  """Columns of completions in the replay buffer."""

  completion_lengths: Any = column(
      "int32[S]", "tokens, including the stop token and an environment's"
  )
  sampled_mask: Any = column(
      "bool[ST]", "True on tokens that the policy sampled", mask="completion"
  )
  stopped: Any = column(
      "bool[S]",
      "whether a stop token or stop string ended the completion; if not, it was"
      " cut off at its maximum length",
  )
  versions: Any = column(
      "int32[S]", "oldest params version that sampled a token of the row"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group(BufferColumns):
  """A prompt and its S completions, sampled by one searcher; host arrays."""

  prompt_id: int = column(
      "int64", "index of the prompt in the task's training split"
  )
  visit: int = column(
      "int64", "number of earlier occurrences of the prompt in the order"
  )
  position: int = column(
      "int64", "index in the prompt order; identifies (prompt_id, visit)"
  )
  epoch: int = column(
      "int64", "start count of the trainer that published the params"
  )
  ref_logprobs: Any = column(
      "float32[ST]",
      "as in a batch; None if the trainer computes them, NaN throughout if no"
      " batch takes the group (`collect.draws_equal_groups`)",
      mask="sampled",
      when="reference",
      unit="nats",
  )

  @property
  def num_completions(self) -> int:
    return len(self.rewards)

  @property
  def is_never_drawn(self) -> bool:
    """Whether reference log-probs were skipped, so that no loss can use it."""
    ref_logprobs = self.ref_logprobs
    return ref_logprobs is not None and bool(np.isnan(ref_logprobs).all())

  @property
  def failure_share(self) -> float:
    """Share of completions without a reward."""
    return float(np.isnan(self.rewards).mean())

  def rewarded(self, fallback: float | None = None) -> "Group":
    """Returns the group reduced to completions with a reward, 0 or more.

    With a fallback, completions without a reward get that instead.
    """
    has_reward_S = ~np.isnan(self.rewards)
    if has_reward_S.all():
      return self
    changed = {}
    for name, definition in COLUMNS.items():
      value = getattr(self, name)
      if definition.axes[:1] != "S" or value is None:
        continue
      if fallback is None:
        changed[name] = value[has_reward_S]
      elif definition.unit == "reward":
        changed[name] = np.where(np.isnan(value), np.float32(fallback), value)
    return dataclasses.replace(self, **changed)

  @property
  def num_tokens(self) -> int:
    """Number of sampled tokens, stop tokens included."""
    return int(self.sampled_mask.sum())


# Columns of a group, by name.
COLUMNS: Mapping[str, Column] = columns_of(Group)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Packed rows, in which forward passes compute distinct completions.

  A batch has N micro-batches of R rows, computed one after another; the last
  ones may be empty.

  token_indices: [R, N, L] int32, token of each place. Index b P + p names the
    prompt token that is fed. Index B P + (b K + k) T + t names the completion
    token that is predicted; the token before it is fed. -1 is an empty place.
  place_indices: [B, K, T] int32, place that predicts each completion token, as
    (n R + r) L + l (micro-batches first, unlike the array's axes); R N L if no
    place does.
  """

  token_indices: Any
  place_indices: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
  """Experts that each token used during sampling.

  prompts: [B, P, N, A] uint8, experts of left-padded prompts, 0 at padding.
  completions: [B, K, T, N, A] uint8, 0 at a completion's last token, which was
    not fed to the model, and at padding.
  """

  prompts: Any
  completions: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(StepColumns):
  """Data of one optimizer step: columns [B, P, ...] and [B, K, ...].

  prepared: [B, ...] float32 by name, values that the loss needs from the whole
    batch: baselines, targets, log-probs of the proximal policy.
  rows: packed rows of the forward pass; None computes the padded batch.
  """

  prompt_mask: Any = column("float32[P]", "1 on prompt tokens")
  completion_mask: Any = column(
      "float32[ST]",
      "1 on the tokens that the loss counts: those sampled, stop tokens"
      " included unless the config excludes them",
      mask="sampled",
  )
  staleness_steps: Any = column("float32[S]", "step minus the sampling version")
  prepared: Any = dataclasses.field(default_factory=dict)
  rows: Rows | None = None

  @property
  def experts(self) -> Routes | None:
    """Experts for the policy to use again; None lets the routers choose."""
    if self.routes is None:
      return None
    return Routes(self.prompt_routes, self.routes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw(Batch, BufferColumns):
  """A batch as drawn from the buffer, on the host, with its origin.

  completion_mask: None; `batches.of_draw` derives it from `sampled_mask`.
  ref_logprobs: [B, K, T] float32, 0 if not cached.
  ids: [B, K] int64, ids of the completions; never reused.
  recent: [B] bool, drawn from the recent window.
  fresh: [B, K] bool, the completion's first use in training.
  prompt_ids: [B] int64.
  ref_versions: [B, K] int32, reference policy of `ref_logprobs`, -1 if not
    cached.
  epochs: [B, K] int32, start count of the trainer that published the params.
  staleness_steps: [B, K] int32, number of updates between the sampling params
    and the trainer's; 0 is on-policy. See `buffer.staleness`.
  step: optimizer step that will use the batch.
  """

  completion_mask: None = None
  ids: np.ndarray
  recent: np.ndarray
  fresh: np.ndarray
  prompt_ids: np.ndarray
  ref_versions: np.ndarray
  epochs: np.ndarray
  step: int

  def stats(self) -> dict[str, Any]:
    """Returns statistics of the batch.

    fresh_share: share of completions used for the first time. recent_share:
    share of prompts from the recent window. unique_share: distinct completion
    ids per completion. staleness_steps: mean staleness. unique_completions:
    mean number of distinct texts in a group. completion_tokens: mean number of
    sampled tokens. stop_rate: share of completions ended by a stop token or
    stop string.
    """
    texts = [
        {
            tokens[:length].tobytes()
            for tokens, length in zip(*group, strict=True)
        }
        for group in zip(
            self.completion_tokens, self.completion_lengths, strict=True
        )
    ]
    return {
        "fresh_share": float(self.fresh.mean()),
        "recent_share": float(self.recent.mean()),
        "unique_share": len(np.unique(self.ids)) / self.ids.size,
        "staleness_steps": float(self.staleness_steps.mean()),
        "unique_completions": sum(map(len, texts)) / len(texts),
        "completion_tokens": float(self.sampled_mask.sum(axis=-1).mean()),
        "stop_rate": float(self.stopped.mean()),
    }


def abstract_batch(
    sizes: Mapping[str, int],
    columns: Mapping[str, tuple[int, ...]] | None = None,
) -> Batch:
  """Returns the shapes and dtypes of a batch without packed rows.

  Args:
    sizes: values of B, K, P and T.
    columns: optional columns, see `collect.optional_columns`.
  """
  columns = columns or {}
  arrays = {}
  for name, definition in columns_of(Batch).items():
    if not definition.when or name in columns:
      shape = [sizes[a] for a in definition.batch_axes if a in sizes]
      shape += columns.get(name, ())
      arrays[name] = jax.ShapeDtypeStruct(shape, definition.dtype)
  return Batch(**arrays)


def named_leaves(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by name, such as "rows.place_indices"."""
  return {
      jax.tree_util.keystr(path, simple=True, separator="."): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def batch_of(leaves: Mapping[str, Any]) -> Batch:
  """Returns the batch with these `named_leaves`."""
  fields: dict[str, Any] = {}
  for name, leaf in leaves.items():
    field, _, inner = name.partition(".")
    if inner:
      fields.setdefault(field, {})[inner] = leaf
    else:
      fields[field] = leaf
  if "rows" in fields:
    fields["rows"] = Rows(**fields["rows"])
  return Batch(**fields)


@dataclasses.dataclass(frozen=True)
class Completions:
  """S sampled completions of one prompt, from the sampler.

  tokens: [S, T] int32, pad after the stop token.
  lengths: [S] int32, completion lengths with the stop token and an
    environment's tokens.
  sampled_mask: [S, T] bool, True on policy tokens.
  logprobs: [S, T] float32, nats, under the sampling distribution, 0 where not
    sampled.
  plain_logprobs: [S, T] float32, nats, before top-k, top-p and min-p, at the
    sampler's `plain_temperature`.
  stopped: [S] bool, True if a stop token or stop string ended the completion,
    False if it was cut off at its maximum length.
  versions: [S] int32, oldest params version that sampled a token of the row.
  token_versions: [S, T] int32, params version that sampled the token, -1 where
    not sampled.
  routes, prompt_routes: experts of each token, see `Group`.
  kept_ids: tokens that truncated sampling kept, see `Group`.
  rewards: [S] float32, known rewards, as in offline data; None to judge them.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  sampled_mask: np.ndarray
  logprobs: np.ndarray
  plain_logprobs: np.ndarray
  stopped: np.ndarray
  versions: np.ndarray
  token_versions: np.ndarray
  routes: np.ndarray | None = None
  prompt_routes: np.ndarray | None = None
  kept_ids: np.ndarray | None = None
  rewards: np.ndarray | None = None
