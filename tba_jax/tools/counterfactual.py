# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counterfactual reruns: changed settings, or some groups left out.

Completions, rewards and the order of arrival stay as recorded, so only settings
that do not affect sampling may change. See docs/reference/replay.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import pathlib
import re
from typing import Any
import zlib

import ml_collections
import numpy as np

from tba_jax import collect
from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.config import validate
from tba_jax.replay import decisions
from tba_jax.replay import records as records_lib
from tba_jax.report import run_reader
from tba_jax.run import text as text_lib
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import rules
from tba_jax.transport.groups import inbox as inbox_lib

# Sections and keys that a counterfactual may change.
_SECTIONS = ("loss", "tempering", "optimizer", "replay", "replay_filter")
_KEYS = (
    "train.prompts_per_batch", "train.completions_per_prompt",
    "train.micro_batch_prompts", "train.micro_batch_completions",
    "train.per_round_steps",
)  # fmt: skip
# Sections that completions or their rewards depend on, "" for top-level keys.
_OF_SAMPLING = (
    "", "task", "tokenizer", "model", "lora", "sampling", "explore", "search",
    "publish", "offline", "reward", "reference", "rounds",
)  # fmt: skip
SAMPLED = (
    "recorded completions depend on it, and what would have been sampled"
    " otherwise is unknown"
)
UNITS = ("group", "searcher", "version")
_UNKNOWN = -1
# Metrics and most rows of the table, and most listed changes of draws.
_METRICS = ("loss", "grad_norm", "reward_mean", "kl")
_MAX_ROWS = 8
_MAX_REDRAWN = 5
_MAX_NAME = 80


def apply_settings(
    config: ml_collections.ConfigDict, settings: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns a recorded config with `KEY=VALUE` settings of `--set`.

  Raises:
    ValueError: a key must stay as recorded, or a value is invalid.
  """
  if not settings:
    return config
  changed = load.apply_overrides(config.copy_and_resolve_references(), settings)
  for item in settings:
    key = item.removeprefix("config.").partition("=")[0]
    if why := why_fixed(config, changed, key):
      raise ValueError(
          f"--set {key}: must stay as recorded, because {why}; settings of"
          f" {', '.join(_SECTIONS)} and {', '.join(_KEYS)} may change"
      )
  validate.validate(changed, program="trainer")
  return changed


def undo(
    config: ml_collections.ConfigDict, old: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns a recorded config with the old values of some settings.

  Raises:
    ValueError: the other settings do not allow these values.
  """
  if not old:
    return config
  changed = load.set_values(config.copy_and_resolve_references(), old)
  validate.validate(changed, program="trainer")
  return changed


def why_fixed(
    config: ml_collections.ConfigDict,
    changed: ml_collections.ConfigDict,
    key: str,
) -> str:
  """Returns why a setting must stay as recorded, or ""; may be `SAMPLED`."""
  section, fixed = rules.section(key), settings_lib.fixed(key)
  if section in _OF_SAMPLING:
    return SAMPLED
  if section not in _SECTIONS and key not in _KEYS:
    return "recorded steps do not depend on it"
  if fixed is not None and fixed.holds(
      load.flatten(config), load.flatten(changed)
  ):
    return fixed.why
  if any(bool(f(config)) != bool(f(changed)) for f in _CONDITIONS):
    return "with another value, steps need other columns than were recorded"
  return ""


_CONDITIONS = tuple(collect.CONDITIONS.values())


@dataclasses.dataclass(frozen=True)
class Origin:
  """Origin of a journaled group.

  version: oldest params version that sampled one of its tokens.
  """

  searcher: str
  version: int
  prompt_id: int


class GroupIndex:
  """Groups of the journal by id, which is their position in the prompt order.

  origins: origin of each group by id; of a repeated id, the first to arrive.
  """

  def __init__(self, records: Iterable[inbox_lib.Record]):
    self.origins: dict[int, Origin] = {}
    # Digest of a completion -> (journal offset, id) of groups that contain it.
    self._places: dict[bytes, list[tuple[int, int]]] = {}
    for record in records:
      for group in record.groups or ():
        if group.position in self.origins:
          continue
        self.origins[group.position] = Origin(
            record.header["sid"], int(group.versions.min()), group.prompt_id
        )
        count = group.num_completions
        for digest in _digests(
            np.full(count, group.prompt_id),
            np.full(count, group.epoch),
            group.versions,
            group.completion_lengths,
            group.completion_tokens,
            np.where(group.sampled_mask, group.behavior_logprobs, 0),
        ):
          place = record.offset, group.position
          self._places.setdefault(digest, []).append(place)

  def finder(
      self, table: records_lib.RecordTable, applied: Callable[[], int]
  ) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from rows of a table, [n] int64, to ids of groups.

    An id is -1 if the journal no longer has the group. Of groups that share a
    completion, the newest counts.

    Args:
      applied: function that returns the journal offset applied so far.
    """
    groups: dict[int, int] = {}

    def find(rows: np.ndarray) -> np.ndarray:
      new = np.array(
          [
              r
              for r, i in zip(rows, table.ids[rows].tolist())
              if i not in groups
          ],
          np.int64,
      )
      digests = _digests(
          table.prompt_ids[new],
          table.epochs[new],
          table.versions[new],
          table.completion_lengths[new],
          table.tokens("completion_tokens", new),
          table.tokens("behavior_logprobs", new),
      )
      for i, digest in zip(table.ids[new].tolist(), digests):
        places = self._places.get(digest, ())
        at = [group for offset, group in places if offset <= applied()]
        groups[i] = at[-1] if at else _UNKNOWN
      return np.array([groups[i] for i in table.ids[rows].tolist()], np.int64)

    return find

  def names(self, group: int, unit: str) -> list[str]:
    """Returns the names of a group, or of its searcher or version."""
    origin = self.origins[group]
    if unit == "searcher":
      return [origin.searcher, origin.searcher.partition("-")[0]]
    return [str(group if unit == "group" else origin.version)]

  def select(self, items: Sequence[str]) -> frozenset[int]:
    """Returns the ids of the groups that `--without` names.

    Args:
      items: `group=N,…`, `searcher=ID,…` or `version=V,…`; the slot of a
        searcher, such as s000, names all its processes.

    Raises:
      ValueError: wrong syntax, or the journal has no such group.
    """
    chosen: set[int] = set()
    for item in items:
      unit, _, values = item.partition("=")
      if unit not in UNITS or not values:
        raise ValueError(
            f"--without {item}: must be group=N,…, searcher=ID,… or version=V,…"
        )
      for value in values.split(","):
        groups = [n for n in self.origins if value in self.names(n, unit)]
        if not groups:
          known = dict.fromkeys(
              self.names(n, unit)[0] for n in sorted(self.origins)
          )
          raise ValueError(
              f"--without {unit}={value}: must be a {unit} in the journal:"
              f" {_shorten(list(known)) or 'it has none'}"
          )
        chosen.update(groups)
    return frozenset(chosen)

  def describe(self, group: int) -> str:
    """Returns a group's id, prompt, searcher and version."""
    if group not in self.origins:
      return "group older than the journal"
    origin = self.origins[group]
    return (
        f"group {group} (prompt {origin.prompt_id}, searcher"
        f" {origin.searcher}, version {origin.version})"
    )


def _shorten(names: Sequence[str]) -> str:
  if len(names) > _MAX_ROWS:
    names = [*names[:3], "…", *names[-3:]]
  return ", ".join(names)


def _digests(
    prompt_ids: np.ndarray,
    epochs: np.ndarray,
    versions: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray,
) -> list[bytes]:
  """Returns digests of completions, [n] and [n, T]."""
  integers = np.stack([prompt_ids, epochs, versions], axis=-1).astype(np.int64)
  tokens = tokens.astype(np.int32)
  logprobs = logprobs.astype(np.float32) + 0.0  # -0 equals 0.
  digests = []
  for i, length in enumerate(lengths.tolist()):
    parts = integers[i], tokens[i, :length], logprobs[i, :length]
    data = b"".join(part.tobytes() for part in parts)
    digests.append(hashlib.blake2b(data, digest_size=16).digest())
  return digests


@dataclasses.dataclass
class Outcome:
  """Result of training recorded steps again.

  metrics: values by step and name, without "train/".
  difference: message about the first difference from the record, or "".
  drawn: ids of the groups in each step's recorded draw, [B, K] int64.
  redrawn: ids of the groups in each step's draw, if it differs.
  checkpoints: steps of checkpoints whose params are the same.
  """

  metrics: dict[int, Mapping[str, float]] = dataclasses.field(
      default_factory=dict
  )
  difference: str = ""
  first_different: int | None = None
  drawn: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
  redrawn: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
  checkpoints: list[int] = dataclasses.field(default_factory=list)

  def groups(self) -> list[int]:
    """Returns the ids of all known groups in the recorded draws."""
    drawn = np.unique(np.concatenate([d.ravel() for d in self.drawn.values()]))
    return [group for group in drawn.tolist() if group != _UNKNOWN]

  def unknown_note(self) -> str:
    """Returns a note on drawn completions of unknown groups, or ""."""
    unknown = sum(int((d == _UNKNOWN).sum()) for d in self.drawn.values())
    if not unknown:
      return ""
    return (
        f"note: {unknown} drawn completions are older than the journal, so"
        " their groups cannot be left out; config.checkpoint.keep_journal=True"
        " keeps the journal of all"
    )


def label(settings: Sequence[str], without: Sequence[str]) -> str:
  return ", ".join([*settings, *(f"without {item}" for item in without)])


def report(
    folder: pathlib.Path,
    recording: decisions.Recording,
    outcome: Outcome,
    index: GroupIndex,
    settings: Sequence[str],
    without: Sequence[str],
) -> None:
  """Prints a counterfactual, and writes it for the run's report."""
  first, last = min(outcome.metrics), max(outcome.metrics)
  name = label(settings, without)
  print(f"{folder}: steps {first} to {last}, {name}")
  print(
      "data: as recorded; no completion was sampled again, so settings of"
      f" {', '.join(filter(None, _OF_SAMPLING))} cannot change"
  )
  _print_draws(outcome, index)
  if not outcome.difference:
    print("no step differs from the record")
  else:
    print(f"first difference: {outcome.difference}")
    step = outcome.first_different
    before = recording.steps[step].metrics
    pairs = [
        f"{key} {outcome.metrics[step][key]:.6g}, was {before[key]:.6g}"
        for key in ("loss", "grad_norm")
        if key in before
    ]
    print(f"  step {step}: {'; '.join(pairs)}")
  print(*_table(recording, outcome), sep="\n")
  file = re.sub(r"[^\w.=,-]+", "_", f"{first}-{last}_{name}")
  if len(file) > _MAX_NAME:
    file = f"{file[:_MAX_NAME]}-{zlib.crc32(file.encode()):08x}"
  path = folder / run_reader.COUNTERFACTUALS / f"{file}.json"
  jsonl.atomic_write_json(
      path,
      {
          "label": text_lib.printable(name, _MAX_NAME),
          "set": list(settings),
          "without": list(without),
          "first_different": outcome.first_different,
          "steps": [
              {"step": step, **{f"train/{k}": v for k, v in metrics.items()}}
              for step, metrics in outcome.metrics.items()
          ],
      },
  )
  bucket.send(folder, str(path.relative_to(folder)))
  print(path)


def _print_draws(outcome: Outcome, index: GroupIndex) -> None:
  """Prints which drawn groups were left out, and what was drawn instead."""
  swaps = [
      (step, old, new)
      for step, groups in outcome.redrawn.items()
      for old, new in zip(outcome.drawn[step], groups, strict=True)
      if (old != new).any()
  ]
  for step, old, new in swaps[:_MAX_REDRAWN]:
    old, new = (
        " and ".join(index.describe(g) for g in np.unique(side).tolist())
        for side in (old, new)
    )
    print(f"  step {step}: {new}\n    instead of {old}")
  if len(swaps) > _MAX_REDRAWN:
    print(f"  and {len(swaps) - _MAX_REDRAWN} more slots of batches")
  if note := outcome.unknown_note():
    print(note)


def _table(recording: decisions.Recording, outcome: Outcome) -> list[str]:
  """Returns lines of the main metrics, recorded and counterfactual."""
  steps = list(outcome.metrics)
  places = np.linspace(0, len(steps) - 1, min(_MAX_ROWS, len(steps)))
  names = [n for n in _METRICS if n in outcome.metrics[steps[0]]]
  rows = [["step"] + [cell for n in names for cell in (n, "recorded")]]
  for step in (steps[round(place)] for place in places):
    sides = outcome.metrics[step], recording.steps[step].metrics
    rows.append(
        [str(step)]
        + [f"{side.get(n, np.nan):.4g}" for n in names for side in sides]
    )
  widths = [max(map(len, column)) for column in zip(*rows)]
  return [
      "  ".join(cell.rjust(width) for cell, width in zip(row, widths))
      for row in rows
  ]
