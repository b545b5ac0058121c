# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Audit of the journal: records, their blocks, and acknowledgements."""

from collections.abc import Mapping
import dataclasses
import hashlib
import math
import pathlib
from typing import NamedTuple

from tba_jax.replay import ledger
from tba_jax.system import auditing
from tba_jax.transport import wire
from tba_jax.transport.groups import journal

_ACKS = "replay/acknowledged.jsonl"
_UNITS = ledger.Amount._fields
_DIGEST_BYTES = 16


class _JournaledBlock(NamedTuple):
  """A block of a searcher; `end` is the offset of its record."""

  place: str
  end: int
  sid: str
  sequence: int
  amount: list[int]
  totals: list[int]


@dataclasses.dataclass
class _Journal:
  """Content of the journal.

  segments: files by offset, in order.
  blocks: journaled blocks, in order.
  ends: offsets of records and segments.
  end: offset after the last segment.
  num_records, num_bytes: counts over all segments.
  explained: whether problems were found that may explain later ones.
  """

  segments: Mapping[int, pathlib.Path]
  blocks: list[_JournaledBlock] = dataclasses.field(default_factory=list)
  ends: set[int] = dataclasses.field(default_factory=lambda: {0})
  end: int = 0
  num_records: int = 0
  num_bytes: int = 0
  explained: bool = False


def audit(run: auditing.AuditedRun) -> auditing.Findings:
  """Checks segments, records, blocks and their acknowledgements."""
  folder, has_problems = run.folder / "replay", False
  content = _Journal(journal.find_segments(folder) if folder.exists() else {})
  for check in (_segments, _sequences, _applied, _marks):
    for finding in check(run, content):
      has_problems |= len(finding) == 3
      yield finding
    content.explained = has_problems
  yield (
      f"{len(content.segments)} segments, {content.num_records} records,"
      f" {content.num_bytes:,} bytes"
  )


def audit_acks(run: auditing.AuditedRun) -> auditing.Findings:
  """Reads acknowledged.jsonl."""
  path = run.folder / _ACKS
  if not path.exists():
    return
  damaged = []
  for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
    if not line.strip():
      continue
    ack = journal.parse_ack(line)
    if ack is None:
      damaged.append(number)
      continue
    sid, mark = ack
    if mark < run.marks.get(sid, []):
      what = f"{sid} goes back from {run.marks[sid]} to {mark}"
      yield f"{_ACKS}, line {number}", what, auditing.COPY
    run.marks[sid] = mark
  yield from run.cut_lines(_ACKS, damaged)
  yield f"searchers: {len(run.marks)}"


def _segments(run: auditing.AuditedRun, content: _Journal) -> auditing.Findings:
  """Reads all segments."""
  starts = list(content.segments)
  content.ends.update(starts)
  content.end = before = starts[0] if starts else 0
  for start, path in content.segments.items():
    name = f"replay/{path.name}"
    run.show(name)
    try:
      data = path.read_bytes()
    except FileNotFoundError:  # A live run drops segments.
      continue
    if start < content.end:
      yield (
          f"{name}, offset {start}",
          f"the previous segment extends to offset {content.end}",
          "records of both are replayed; truncate it there",
      )
    elif start > content.end:
      yield _hole(run, before, content.end, start)
    content.num_bytes += len(data)
    before, content.end = start, start + len(data)
    try:
      spans = journal.split_segment(path, data, start)
    except ValueError as error:
      yield f"{name}, header", str(error), "use that version"
      continue
    header = journal.header_error(data, start)
    size = min(journal.HEADER_BYTES, len(data))
    records, rest = [], []
    for span in spans:
      if _is_intact(data, span):
        records.append(span)
      elif (begin := max(span.start, size)) < span.end:
        rest.append((begin, span.end))
    if start == starts[-1] and not run.finished:
      if rest and rest[-1][1] == len(data):
        yield name, f"an unfinished write from byte {rest.pop()[0]} on"
      header = header if records else ""
    if header:
      yield f"{name}, header", header, "its records are found all the same"
    for begin, stop in rest:
      yield (
          f"{name}, byte {begin}",
          f"{stop - begin} bytes to offset {start + stop} are no record",
          _advice(run, start + stop),
      )
    for span in records:
      place, end = f"{name}, byte {span.start}", start + span.end
      try:
        if block := _read_block(run, span.payload):
          content.blocks.append(_JournaledBlock(place, end, *block))
      except (ValueError, LookupError, TypeError) as error:
        yield place, f"the message is wrong: {error}", _advice(run, end)
      content.ends.add(end)
    content.num_records += len(records)


def _is_intact(data: bytes, span: journal.RecordSpan) -> bool:
  """Returns whether a span is a record whose digest matches, checked again."""
  if span.payload is None:
    return False
  split = span.end - len(span.payload)
  digest = data[split - _DIGEST_BYTES : split]
  body = data[span.start : split - _DIGEST_BYTES] + span.payload
  return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() == digest


def _hole(
    run: auditing.AuditedRun, before: int, end: int, start: int
) -> tuple[str, ...]:
  """Returns the damage of missing offsets between segments.

  A restart cuts an unfinished write off the last segment and begins the next
  segment after it; the event gives the file, number of bytes and offset.
  """
  name = f"segment-{before:020d}.journal"
  cut = f"cut {start - end} bytes after byte {end - before}"
  for event in run.events:
    if event["kind"] == "journal_torn" and event["message"].endswith(
        f"{name}: {cut}"
    ):
      return f"replay/{name}", f"{cut}, at a restart after a crash"
  return (
      f"replay/{name}",
      f"offsets {end} to {start} are missing: the file was cut, or a segment"
      " after it deleted",
      _advice(run, start),
  )


def _advice(run: auditing.AuditedRun, offset: int) -> str:
  """Returns the consequence of losing the record up to an offset."""
  restorable = run.restorable
  needing = [n for n, data in restorable.items() if data["applied"] < offset]
  if restorable and not needing:
    return "no restart reads it: all checkpoints are newer. Nothing to do"
  when = ""
  if restorable and needing[-1] != [*restorable][-1]:
    when = f" from {needing[-1]}, which is not the newest,"
  return (
      f"a restart{when} counts its completions as lost{{journal}} and samples"
      f" the prompts again; to keep them, {auditing.COPY}"
  )


def _read_block(
    run: auditing.AuditedRun, data: bytes
) -> tuple[str, int, list[int], list[int]] | None:
  """Returns a block's sid, sequence, amount and totals; None without a block.

  Raises:
    ValueError, LookupError, TypeError: the message is not as documented.
  """
  header, arrays = wire.decode_unverified(data)
  if "sequence" not in header:
    if header["kind"] not in ("gone", "missing", "unknown"):
      raise ValueError(f"kind {header['kind']!r}")
    return None
  amount, totals = (
      [header[key][unit] for unit in _UNITS] for key in ("amount", "totals")
  )
  mask = arrays["sampled_mask"]
  counts = [len(mask), math.prod(mask.shape[:2]), int(mask.sum())]
  if counts != amount:
    raise ValueError(
        f"has {counts} {', '.join(_UNITS)}; its header states {amount}"
    )
  if max(header["epoch"]) > run.epoch > 0:
    raise ValueError(f"epoch {max(header['epoch'])} of {run.epoch}")
  newest = int(arrays["versions"].max())
  if run.finished and newest > run.json["result.json"]["steps"]:
    raise ValueError(f"version {newest} is of no step")
  return header["sid"], header["sequence"], amount, totals


def _sequences(
    run: auditing.AuditedRun, content: _Journal
) -> auditing.Findings:
  """Checks that each searcher's blocks are present once, without gaps."""
  last: dict[str, _JournaledBlock] = {}
  is_whole = list(content.segments)[:1] == [0]  # No segment was dropped yet.
  for block in content.blocks:
    before = last.get(block.sid)
    expected = before.sequence + 1 if before else 0
    if before and block.sequence < expected:
      yield (
          block.place,
          f"block {block.sequence} of {block.sid} is there again, after"
          f" {before.place}",
          f"a restart would count it twice; {auditing.COPY}",
      )
      continue
    last[block.sid] = block
    if block.sequence > expected:
      if (before or is_whole) and not content.explained:
        yield (
            block.place,
            f"blocks {expected} to {block.sequence - 1} of {block.sid} before"
            " it are missing",
            _advice(run, block.end),
        )
    elif before:
      summed = [a + b for a, b in zip(before.totals, block.amount, strict=True)]
      if summed != block.totals:
        yield (
            block.place,
            f"totals of {block.sid} are {block.totals}, the blocks add up to"
            f" {summed}",
            f"the ledger does not close; {auditing.COPY}",
        )


def _applied(run: auditing.AuditedRun, content: _Journal) -> auditing.Findings:
  """Checks the offset from which each checkpoint continues."""
  first = next(iter(content.segments), content.end)
  for name, data in run.restorable.items():
    applied = data["applied"]
    place = f"replay, offset {applied}"
    if applied < first:
      yield (
          place,
          f"{name} continues here, the journal begins at {first}: older"
          " segments were deleted",
          f"a restart from {name} counts the rest as lost{{journal}}",
      )
    elif applied > content.end:
      yield (
          place,
          f"{name} has applied the journal to here, it ends at {content.end}:"
          " the last segments are missing",
          f"{name} has what they held before; what came after it counts as"
          " lost{journal} at a restart",
      )
    elif applied not in content.ends and not content.explained:
      yield place, f"{name} continues here, amid a record", auditing.COPY


def _marks(run: auditing.AuditedRun, content: _Journal) -> auditing.Findings:
  """Compares acknowledgements with the journal's blocks and checkpoints."""
  if not (run.folder / _ACKS).exists():
    acknowledged = any(d["acknowledged"] for d in run.restorable.values())
    if acknowledged or (content.blocks and run.finished):
      yield (
          _ACKS,
          "is missing",
          "after a restart it is unknown what was acknowledged since the newest"
          f" checkpoint; {auditing.COPY}",
      )
    return
  last = {block.sid: block for block in content.blocks}
  lack = "blocks after it are not missed if the journal loses them"
  for sid, (sequence, *totals) in run.marks.items():
    what, there = "", last[sid].sequence + 1 if sid in last else 0
    states = run.restorable.values()
    marks = [state["watermarks"].get(sid, 0) for state in states]
    if sequence > (most := max([there, *marks])):
      what = (
          f"acknowledges blocks up to {sequence - 1}, journal and checkpoints"
          f" have them up to {most - 1}"
      )
      advice = (
          "a restart counts the others as lost{journal}; the searcher does not"
          " send them again. To keep them, restore the journal from a copy"
      )
    elif sequence == there and totals != last[sid].totals:
      what = f"has totals {totals}, block {sequence - 1} {last[sid].totals}"
      advice = f"the ledger may not close after a loss; {auditing.COPY}"
    elif run.finished and sequence < there:
      what = f"ends at block {sequence - 1}, the journal at {there - 1}"
      advice = f"{lack}; {auditing.COPY}"
    if what:
      yield f"{_ACKS}, {sid}", what, advice
  for name, data in run.restorable.items():
    for sid, mark in data["acknowledged"].items():
      if mark > run.marks.get(sid, []):
        what = f"ends at {run.marks.get(sid)}, {name} has {mark}"
        advice = f"{lack}; {auditing.COPY}"
        yield f"{_ACKS}, {sid}", what, advice
