# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An audit of a finished run that shares no code with the package.

    python -m tests.chaos.auditor RUN [REFERENCE]

It reads journal, messages, leases, checkpoint and logs with parsers of its own,
written from the formats as `tba_jax/transport/groups/journal.py`,
`tba_jax/transport/wire.py` and `tba_jax/learning/host_state.py` tell them, and
proves:

  - what was acknowledged is in the journal, once, or counted as lost;
  - what is in the journal is in the buffer of the last checkpoint, once, or
    counted as rejected;
  - each step was trained once, and no completion as new twice;
  - every prompt was visited as often as the order says, and as in the
    reference run; where prompts are drawn by how often they were solved
    (`search.order`), each round is the one in its file;
  - the terms of the ledger, in prompts, completions and tokens;
  - no process, socket or shared memory is left.

The run must have `checkpoint.keep_journal=True` and a buffer that holds
everything. Exit status 1 if anything is not so. What it cannot check of a run
is in the figures, under `not_checked`.
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import json
import pathlib
import re
import struct
import sys
from typing import Any
import zlib

import numpy as np
import safetensors.numpy

_UNITS = ("prompts", "completions", "tokens")
_SLOT_BYTES = 4096  # Size of each of a lease file's two slots.
# Rounds of drawn prompts in a pass over all of them.
_ROUNDS_OF_A_PASS = 4
# Prompts at the end of the order that may be in flight when a run ends, in
# multiples of those of a step.
_IN_FLIGHT_STEPS = 4


@dataclasses.dataclass
class _Journal:
  """What the journal has, in its order.

  blocks: headers and arrays of blocks by (sid, sequence).
  order: (sid, sequence) of the blocks as journaled.
  gone: sid -> totals with which a searcher was written off.
  unknown: reasons why something may be lost.
  end: position after the newest record.
  records: number of records.
  """

  blocks: dict[tuple[str, int], tuple[dict[str, Any], dict[str, np.ndarray]]]
  order: list[tuple[str, int]]
  gone: dict[str, list[int]]
  unknown: list[str]
  end: int = 0
  records: int = 0


class Audit:
  """An audit in progress.

  faults: violations found so far, a line each.
  not_checked: claims that no file of the run tells, a line each.
  """

  def __init__(self, workdir: pathlib.Path):
    self.folder = workdir
    self.faults: list[str] = []
    self.not_checked: list[str] = []
    document = json.loads((workdir / "config.json").read_text())
    self.run_id, self.config = document["run_id"], document["config"]
    secret = workdir / "spool" / "secret"
    self.secret = secret.read_bytes() if secret.exists() else None
    self.events = list(_lines(workdir / "events.jsonl"))

  def check(self, holds: Any, fault: str) -> None:
    if not holds:
      self.faults.append(fault)

  def equal(self, found: Any, expected: Any, what: str) -> None:
    self.check(found == expected, f"{what}: {found}, must be {expected}")


def audit(
    workdir: pathlib.Path, reference: pathlib.Path | None = None
) -> tuple[dict[str, Any], list[str]]:
  """Returns figures of a finished run, and what is wrong with it.

  Args:
    workdir: run directory.
    reference: run directory of a run without faults, whose order of prompts
      must be the same; None to leave that out.
  """
  run = Audit(workdir)
  journal = _read_journal(run)
  kept, duplicates = _check_blocks(run, journal)
  _check_acknowledged(run, journal)
  step, data = _read_checkpoint(run)
  trained, untrained = _check_buffer(run, data, kept)
  _check_ledger(run, journal, data, trained, untrained, duplicates)
  redone = _check_steps(run, step, data, trained)
  holes = check_order(run, kept, reference)
  for name in leftovers(workdir, run.run_id):
    run.check(False, f"left behind: {name}")
  figures = {
      "steps": step,
      "steps_redone": redone,
      "journal_records": journal.records,
      "prompts": len(kept),
      "prompts_in_flight_at_the_end": holes,
      "duplicate_prompts_refused": duplicates[0],
      "completions_trained": trained[1],
      "not_checked": run.not_checked,
  }
  return figures, run.faults


# Formats.


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the records of a JSONL file, without lines that a crash has cut."""
  if path.exists():
    for line in path.read_bytes().split(b"\n"):
      try:
        record = json.loads(line)
      except ValueError:
        continue
      if isinstance(record, dict):
        yield record


def _records(path: pathlib.Path, first: int) -> Iterator[tuple[int, bytes]]:
  """Yields end and payload of a segment's intact records."""
  data = path.read_bytes()
  fields = data[:20]
  magic, _, start = struct.unpack("<8sIQ", fields)
  digest = hashlib.blake2b(fields, digest_size=16).digest()
  if magic != b"tbajrnl\n" or start != first or data[20:36] != digest:
    raise ValueError(f"{path.name}: no segment at {first}")
  offset = 36
  while offset < len(data):
    if len(data) - offset >= 40:
      fields, digest = data[offset : offset + 24], data[offset + 24 :][:16]
      magic, length, position = struct.unpack("<8sQQ", fields)
      payload = data[offset + 40 : offset + 40 + length]
      state = hashlib.blake2b(fields + payload, digest_size=16)
      if (
          magic == b"tbarec\0\n"
          and position == first + offset
          and len(payload) == length
          and state.digest() == digest
      ):
        offset += 40 + length
        yield first + offset, payload
        continue
    # Damage: the next record begins with the next magic number.
    following = data.find(b"tbarec\0\n", offset + 1)
    offset = len(data) if following < 0 else following


def _message(
    run: Audit, data: bytes
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of a message of this run, or ValueError."""
  magic, schema, _, size = struct.unpack("<4sHHQ", data[:16])
  body = data[48:]
  if magic != b"TBAJ" or schema != 2 or len(body) != size:
    raise ValueError("no message")
  if run.secret is not None:
    state = hashlib.blake2b(data[:16], digest_size=32, key=run.secret)
    state.update(body)
    if state.digest() != data[16:48]:
      raise ValueError("forged message")
  (length,) = struct.unpack("<Q", body[:8])
  header = json.loads(
      json.loads(body[8 : 8 + length])["__metadata__"]["header"]
  )
  if header.get("run", run.run_id) != run.run_id:
    raise ValueError("message of another run")
  return header, safetensors.numpy.load(body)


def _read_journal(run: Audit) -> _Journal:
  journal = _Journal({}, [], {}, [])
  for path in sorted((run.folder / "replay").glob("segment-*.journal")):
    first = int(re.fullmatch(r"segment-(\d{20})\.journal", path.name)[1])
    run.check(
        first >= journal.end,
        f"{path.name} begins within the segment before it",
    )
    for end, payload in _records(path, first):
      journal.end, journal.records = end, journal.records + 1
      header, arrays = _message(run, payload)
      kind = header.get("kind")
      if kind == "gone":
        journal.gone[header["sid"]] = [header["totals"][u] for u in _UNITS]
      elif kind == "unknown":
        journal.unknown.append(header["reason"])
      elif kind is None:
        key = header["sid"], header["sequence"]
        run.check(key not in journal.blocks, f"block {key} journaled twice")
        journal.blocks[key] = header, arrays
        journal.order.append(key)
  return journal


def _read_checkpoint(run: Audit) -> tuple[int, dict[str, Any]]:
  """Returns step and state of replay of the newest checkpoint."""
  folder = run.folder / "checkpoints"
  step = max(int(p.name) for p in folder.iterdir() if p.name.isdecimal())
  with np.load(
      folder / str(step) / "host" / "process-00000.npz", allow_pickle=False
  ) as members:
    arrays = {name: members[name] for name in members.files}
  text = arrays.pop("structure").tobytes().decode()
  state = json.loads(
      text,
      object_hook=lambda value: (
          arrays[value["__array__"]] if "__array__" in value else value
      ),
  )
  return step, state["host_state"]["data"]


# Checks.


def _completions(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Iterator[tuple[int, list[tuple[Any, ...]], int]]:
  """Yields position, completions and tokens of each group of a block."""
  for i, position in enumerate(header["position"]):
    group = []
    for j, length in enumerate(arrays["completion_lengths"][i].tolist()):
      group.append(
          (
              header["prompt_id"][i],
              int(arrays["versions"][i, j]),
              header["epoch"][i],
              float(arrays["rewards"][i, j]),
              arrays["completion_tokens"][i, j, :length].tobytes(),
          )
      )
    yield position, group, int(arrays["sampled_mask"][i].sum())


def _check_blocks(
    run: Audit, journal: _Journal
) -> tuple[dict[int, tuple[int, int, list[tuple[Any, ...]]]], list[int]]:
  """Returns kept groups by position, and the amount of duplicates.

  A group is its prompt, its visit and its completions.
  """
  kept, duplicates = {}, [0, 0, 0]
  for key in journal.order:
    header, arrays = journal.blocks[key]
    amount = [0, 0, 0]
    for i, (position, group, tokens) in enumerate(_completions(header, arrays)):
      size = [1, len(group), tokens]
      amount = [a + b for a, b in zip(amount, size)]
      if position in kept:
        duplicates = [a + b for a, b in zip(duplicates, size)]
      else:
        kept[position] = header["prompt_id"][i], header["visit"][i], group
    run.equal(
        amount, [header["amount"][u] for u in _UNITS], f"amount of block {key}"
    )
  return kept, duplicates


def _acknowledged(run: Audit) -> Iterator[tuple[str, int, list[int]]]:
  """Yields searcher, number of blocks and their totals, by acknowledgement."""
  path = run.folder / "replay" / "acknowledged.jsonl"
  for line in filter(None, path.read_bytes().split(b"\n")):
    try:
      sid, following, *totals, crc = json.loads(line)
    except (ValueError, TypeError):
      continue  # Cut by a crash.
    text = json.dumps([sid, following, *totals]).encode()
    if crc == zlib.crc32(text):
      yield sid, following, totals


def _check_acknowledged(run: Audit, journal: _Journal) -> None:
  """Blocks up to a searcher's last acknowledgement are there, or told lost."""
  marks = {sid: following for sid, following, _ in _acknowledged(run)}
  told = " ".join(
      e["message"] for e in run.events if e["kind"] == "journal_lost"
  )
  for sid, following in marks.items():
    missing = [s for s in range(following) if (sid, s) not in journal.blocks]
    run.check(
        not missing or sid in told,
        f"acknowledged blocks {missing[:5]} of {sid} are nowhere",
    )


def _check_buffer(
    run: Audit,
    data: Mapping[str, Any],
    kept: Mapping[int, tuple[int, int, list[tuple[Any, ...]]]],
) -> tuple[list[int], list[int]]:
  """Compares buffer and journal; returns the trained and untrained amounts."""
  rows = data["buffer"]["rows"]
  ends = np.cumsum(rows["completion_lengths"])
  starts = ends - rows["completion_lengths"]
  tokens = rows["completion_tokens"].astype(np.int32)
  stored = collections.Counter(
      (
          int(rows["prompt_ids"][i]),
          int(rows["versions"][i]),
          int(rows["epochs"][i]),
          float(rows["rewards"][i]),
          tokens[starts[i] : ends[i]].tobytes(),
      )
      for i in range(len(ends))
  )
  journaled = collections.Counter(
      one for _, _, group in kept.values() for one in group
  )
  run.check(
      stored == journaled,
      f"{(stored - journaled).total()} completions of the buffer are not in the"
      f" journal, {(journaled - stored).total()} of the journal not in the"
      " buffer",
  )
  run.equal(len(set(rows["ids"].tolist())), len(ends), "distinct ids")
  used = rows["use_counts"] > 0
  sampled = (
      np.add.reduceat(rows["sampled_mask"].astype(np.int64), starts)
      if len(ends)
      else np.zeros(0, np.int64)
  )
  groups = set(rows["groups"].tolist())
  used_groups = set(rows["groups"][used].tolist())
  trained = [len(used_groups), int(used.sum()), int(sampled[used].sum())]
  untrained = [
      len(groups - used_groups),
      int((~used).sum()),
      int(sampled[~used].sum()),
  ]
  return trained, untrained


def _announced(run: Audit, journal: _Journal) -> dict[str, list[int]]:
  """Returns the totals that each searcher announced, as far as files tell."""
  announced = {sid: list(totals) for sid, totals in journal.gone.items()}

  def note(sid: str, totals: Mapping[str, int]) -> None:
    known = announced.get(sid, [0, 0, 0])
    announced[sid] = [max(k, totals[u]) for k, u in zip(known, _UNITS)]

  for (sid, _), (header, _) in journal.blocks.items():
    note(sid, header["totals"])
  for sid, _, totals in _acknowledged(run):
    note(sid, dict(zip(_UNITS, totals)))
  for path in (run.folder / "leases").glob("*.lease"):
    data = path.read_bytes()
    for start in (0, _SLOT_BYTES):
      try:
        header, _ = _message(run, data[start:][:_SLOT_BYTES].rstrip(b"\0"))
      except (ValueError, struct.error):
        continue  # Torn, or not used yet.
      note(header["sid"], header["totals"])
  return announced


def _check_ledger(
    run: Audit,
    journal: _Journal,
    data: Mapping[str, Any],
    trained: list[int],
    untrained: list[int],
    duplicates: list[int],
) -> None:
  """Computes the terms of the ledger, and compares."""
  ledger = json.loads((run.folder / "ledger.json").read_text())
  term = lambda table: [table[u] for u in _UNITS]
  run.check(ledger["closed"], "the ledger is not closed")
  run.equal(ledger["unknown"], journal.unknown, "unknown losses")
  run.equal(term(ledger["trained_first_time"]), trained, "trained first time")
  run.equal(term(ledger["in_buffer_untrained"]), untrained, "untrained")
  run.equal(term(ledger["evicted_untrained"]), [0, 0, 0], "evicted untrained")
  run.equal(term(ledger["queued"]), [0, 0, 0], "queued at the end")
  refused = ledger["rejected"].get("duplicate", dict.fromkeys(_UNITS, 0))
  run.equal(term(refused), duplicates, "rejected duplicates")
  run.equal(set(ledger["rejected"]) - {"duplicate"}, set(), "other rejections")
  run.check(
      set(ledger["lost"]) <= {"searcher", "journal"},
      f"lost for other causes: {ledger['lost']}",
  )
  delivered = collections.defaultdict(lambda: [0, 0, 0])
  for (sid, _), (header, _) in journal.blocks.items():
    amount = [header["amount"][u] for u in _UNITS]
    delivered[sid] = [a + b for a, b in zip(delivered[sid], amount)]
  # What was announced and is not in the journal was lost with its searcher, or
  # with the end of a journal that was cut after its acknowledgement.
  announced = _announced(run, journal)
  lost = [
      sum(totals[i] - delivered[sid][i] for sid, totals in announced.items())
      for i in range(3)
  ]
  told = [sum(t[u] for t in ledger["lost"].values()) for u in _UNITS]
  run.equal(told, lost, "lost")
  total = [sum(totals[i] for totals in announced.values()) for i in range(3)]
  run.equal(term(ledger["generated"]), total, "generated")
  sums = [sum(parts) for parts in zip(trained, untrained, duplicates, lost)]
  run.equal(sums, total, "sum of all terms")
  run.check(data["applied"] <= journal.end, "applied beyond the journal")


def _check_steps(
    run: Audit, step: int, data: Mapping[str, Any], trained: list[int]
) -> int:
  """Checks that each step counts once; returns how many were done again."""
  train = run.config["train"]
  run.equal(step, train["num_steps"], "last checkpoint")
  size = train["prompts_per_batch"] * train["completions_per_prompt"]
  uses = int(data["buffer"]["rows"]["use_counts"].sum())
  run.equal(uses, step * size, "uses of all completions")
  surviving, redone = {}, 0
  for record in _lines(run.folder / "metrics.jsonl"):
    if "train/loss" not in record:
      continue
    if any(s >= record["step"] for s in surviving):
      later = [s for s in surviving if s >= record["step"]]
      redone += len(later)
      for s in later:
        del surviving[s]
    surviving[record["step"]] = record
  missing = sorted(set(range(step)) - set(surviving))
  told = any(event["kind"] == "not_written" for event in run.events)
  run.check(not missing or told, f"no metrics of steps {missing[:5]}")
  if not missing:
    fresh = sum(r["replay/fresh_share"] * size for r in surviving.values())
    run.equal(round(fresh), trained[1], "first uses of all steps")
  return redone


def check_order(
    run: Audit,
    kept: Mapping[int, tuple[int, int, Any]],
    reference: pathlib.Path | None,
) -> int:
  """Checks the visits; returns the number of prompts missing at the end."""
  last = max(kept)
  holes = sorted(set(range(last)) - set(kept))
  window = _IN_FLIGHT_STEPS * run.config["search"]["prompts_per_step"]
  old = [p for p in holes if p < last - window]
  run.check(not old, f"prompts at positions {old[:5]} were never sampled")
  by_visit = collections.defaultdict(list)
  for prompt, visit, _ in kept.values():
    by_visit[visit].append(prompt)
  for visit, prompts in by_visit.items():
    run.equal(len(set(prompts)), len(prompts), f"prompts of pass {visit}")
  is_drawn = run.config["search"]["order"] != "shuffled"
  if is_drawn:
    first = _check_rounds(run, kept)
    run.not_checked.append(
        "whether each round's prompts were drawn by the shares that were"
        " solved by then"
    )
  elif not holes:
    whole = [set(prompts) for _, prompts in sorted(by_visit.items())[:-1]]
    run.check(
        all(prompts == whole[0] for prompts in whole),
        "passes over the prompts differ in their prompts",
    )
  if reference is not None:
    other = Audit(reference)
    expected, _ = _check_blocks(other, _read_journal(other))
    common = set(kept) & set(expected)
    if is_drawn:
      # What was solved by then depends on when groups arrived.
      common = {position for position in common if position < first}
      run.not_checked.append(
          f"the order of the reference run from position {first} on"
      )
      kept = {p: kept[p] for p in kept if p < first}
      expected = {p: expected[p] for p in expected if p < first}
    run.check(
        len(common) >= min(len(kept), len(expected)) - window,
        "the reference run has other positions",
    )
    differing = [p for p in common if kept[p][:2] != expected[p][:2]]
    run.check(
        not differing, f"another prompt or visit at positions {differing[:5]}"
    )
  return len(holes)


def _check_rounds(run: Audit, kept: Mapping[int, tuple[int, int, Any]]) -> int:
  """Checks drawn prompts against the files of their rounds.

  Returns the number of prompts: the first position that was drawn.
  """
  files = sorted((run.folder / "replay").glob("order-*.json"))
  rounds = [json.loads(path.read_text()) for path in files]
  if not rounds:
    late = sorted(p for p, (_, visit, _) in kept.items() if visit)
    run.check(not late, f"positions {late[:5]} are of no round's file")
    return max(kept) + 1
  num_prompts = rounds[0]["num_prompts"]
  size = -(-num_prompts // _ROUNDS_OF_A_PASS)
  visits, expected = [1] * num_prompts, {}
  for number, (path, drawn) in enumerate(zip(files, rounds)):
    prompts = drawn["prompts"]
    run.equal(path.name, f"order-{number:06d}.json", "file of a round")
    run.check(
        drawn["num_prompts"] == num_prompts
        and len(set(prompts)) == len(prompts) == size
        and all(0 <= prompt < num_prompts for prompt in prompts),
        f"{path.name}: not {size} of {num_prompts} prompts",
    )
    for place, prompt in enumerate(prompts):
      expected[num_prompts + number * size + place] = prompt, visits[prompt]
      visits[prompt] += 1
  differing = [
      position
      for position, (prompt, visit, _) in sorted(kept.items())
      if (prompt, visit) != expected.get(position, (prompt, 0))
  ]
  run.check(
      not differing,
      f"prompts at positions {differing[:5]} are not those of their rounds",
  )
  late = [p for p in kept if p >= num_prompts + len(rounds) * size]
  run.check(not late, f"positions {late[:5]} are of no round's file")
  return num_prompts


def leftovers(workdir: pathlib.Path, run_id: str) -> list[str]:
  """Returns processes, sockets and shared memory of a run that has ended."""
  names = [str(p) for p in workdir.rglob("*") if p.is_socket()]
  names += [str(p) for p in pathlib.Path("/dev/shm").glob(f"**/*{run_id}*")]
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      command = path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
      continue
    if f"--workdir={workdir}" in command:
      names.append(f"process {path.parent.name}: {command}")
  return names


def main() -> int:
  figures, faults = audit(*map(pathlib.Path, sys.argv[1:3]))
  print(json.dumps(figures, indent=2))
  for fault in faults:
    print(f"fault: {fault}")
  return 1 if faults else 0


if __name__ == "__main__":
  sys.exit(main())
