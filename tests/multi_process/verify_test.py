# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of a run: a real one is sound, and each damage is named."""

import contextlib
import io
import json
import os
import pathlib
import random
import shutil
import tempfile
from unittest import mock

from absl.testing import parameterized
import numpy as np

from tba_jax.models.hf import hf
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.tools import verify
from tba_jax.transport.groups import journal
from tests.models import hf_case
from tests.support import harness

_STEPS = 12
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": _STEPS,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 6,
    "evaluate.num_prompts": 4,
    "evaluate.final_prompts": 4,
    # Several segments, and several blocks in each.
    "replay.max_segment_mb": 0.003,
    "search.prompts_per_round": 4,
}


def _payload_at(data, offset, start):
  """Returns the payload as the journal does, without looking at the digest."""
  if len(data) - offset < journal.RECORD_BYTES:
    return None, 0
  _, length, _ = journal._RECORD.unpack_from(data, offset)
  begin = offset + journal.RECORD_BYTES
  return data[begin : begin + length], length


class VerifyTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    run = harness.Run(
        f"{folder}/run", _OVERRIDES, "configs/arithmetic.py:smoke"
    )
    cls.addClassCleanup(run.close)
    if run.wait() != 0:
      raise AssertionError(run.text())
    cls.run_folder = run.workdir

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "copy"
    shutil.copytree(self.run_folder, self.folder)

  def audit(self):
    """Returns (place, text) of the problems, and the parts by name."""
    parts, live = verify.audit(self.folder)
    self.assertFalse(live)
    problems = [one for part in parts for one in part.problems]
    return (
        [(one.place, one.what) for one in problems],
        {part.name: part for part in parts},
    )

  def assert_wrong(self, *expected):
    """Checks that the problems are these (place, text) patterns, in order."""
    problems, _ = self.audit()
    self.assertLen(problems, len(expected), problems)
    for (place, what), (wanted_place, wanted) in zip(problems, expected):
      self.assertRegex(place, wanted_place)
      self.assertRegex(what, wanted)

  def segments(self):
    return sorted((self.folder / "replay").glob("segment-*"))

  def flip(self, path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)

  def test_passes_untouched_run(self):
    problems, parts = self.audit()
    self.assertEmpty(problems)
    self.assertEqual([note for p in parts.values() for note in p.notes], [])
    self.assertEqual(parts["checkpoints"].summary, "steps 8, 12")
    self.assertIn(f"{_STEPS} steps", parts["metrics"].summary)
    self.assertGreater(len(self.segments()), 2)

  def test_finds_damaged_tensor_of_best_model(self):
    model = self.folder / "best" / "model"
    config = hf_case.make_config()
    hf.save(model, config, hf_case.make_params(config))
    self.assertEmpty(self.audit()[0])
    self.flip(model / "model.safetensors", -1)
    self.assert_wrong(("best/model/model.safetensors", "tensor .* is damaged"))

  def test_finds_wrong_journal_record(self):
    second = self.segments()[1]
    middle = second.stat().st_size // 2
    self.flip(second, middle)
    self.assert_wrong((f"replay/{second.name}, byte ", "are no record"))

  def test_finds_invalid_record_with_valid_digest(self):
    """The digest is not the journal's own."""
    second = self.segments()[1]
    self.flip(second, second.stat().st_size // 2)
    with mock.patch.object(journal, "_payload_at", _payload_at):
      spans, _ = journal.read_segment(second, int(second.stem.split("-")[1]))
      self.assertNotIn(None, [span.payload for span in spans])
      self.assert_wrong((f"replay/{second.name}, byte ", "are no record"))

  @parameterized.parameters(
      ("magic", 3, "is damaged"), ("digest", 30, "is damaged")
  )
  def test_finds_wrong_header_of_segment(self, _, offset, what):
    second = self.segments()[1]
    self.flip(second, offset)
    self.assert_wrong((f"replay/{second.name}, header", what))

  def test_finds_header_of_another_offset(self):
    first, second, *_ = self.segments()
    size = journal.HEADER_BYTES
    data = first.read_bytes()[:size] + second.read_bytes()[size:]
    second.write_bytes(data)
    start = int(first.stem.split("-")[1])
    self.assert_wrong((f"replay/{second.name}, header", f"has offset {start}$"))

  def test_names_segment_of_newer_format(self):
    second = self.segments()[1]
    with mock.patch.object(journal, "FORMAT", journal.FORMAT + 1):
      header = journal._encode_header(int(second.stem.split("-")[1]))
    second.write_bytes(header + second.read_bytes()[len(header) :])
    problems, _ = self.audit()
    self.assertEqual(problems[0][0], f"replay/{second.name}, header")
    self.assertIn(f"format {journal.FORMAT + 1}", problems[0][1])

  def test_finds_segment_cut_in_half(self):
    second = self.segments()[1]
    os.truncate(second, second.stat().st_size // 2)
    self.assert_wrong(
        (f"replay/{second.name}, byte ", "are no record"),
        (f"replay/{second.name}$", r"offsets \d+ to \d+ are missing"),
    )

  @parameterized.parameters(
      (0, "checkpoints/8 continues here, the journal begins at"),
      (1, r"offsets \d+ to \d+ are missing"),
      (-1, "checkpoints/12 has applied the journal to here"),
  )
  def test_finds_deleted_segment(self, index, what):
    self.segments()[index].unlink()
    self.assert_wrong(("replay", what))

  def test_finds_repeated_block(self):
    # The last segment may hold no block, only that the searcher has left.
    first, *_, last = self.segments()
    (span, *_), _ = journal.read_segment(first, int(first.stem.split("-")[1]))
    start, data = int(last.stem.split("-")[1]), last.read_bytes()
    again = journal.encode_record(start + len(data), span.payload)
    last.write_bytes(data + again)
    self.assert_wrong((f"replay/{last.name}, byte {len(data)}", "there again"))

  def test_passes_remains_of_crash(self):
    """A torn record and lines; a restart cuts the record and goes on."""
    for name in ("result.json", "summary.json"):
      (self.folder / name).unlink()
    last = self.segments()[-1]
    with last.open("ab") as file:
      file.write(b"tbarec")
    for name in ("metrics.jsonl", "events.jsonl", "replay/acknowledged.jsonl"):
      with (self.folder / name).open("ab") as file:
        file.write(b'\n["')
    (self.folder / "checkpoints/16.orbax-checkpoint-tmp").mkdir()
    problems, parts = self.audit()
    self.assertEmpty(problems)
    self.assertLen([n for part in parts.values() for n in part.notes], 5)
    events = metrics.EventLog(
        jsonl.LineWriter(self.folder / "events.jsonl"), role="trainer"
    )
    journal.Journal(
        self.folder / "replay", max_segment_bytes=3000, on_event=events.write
    ).close()
    events.close()
    problems, parts = self.audit()
    self.assertEmpty(problems)
    self.assertIn("cut 6 bytes", parts["journal"].notes[0])

  def test_finds_forged_acknowledgement(self):
    path = self.folder / "replay/acknowledged.jsonl"
    sid, *mark, _ = json.loads(path.read_bytes().splitlines()[-1])
    line = journal._ack_line(sid, [mark[0] + 7, *mark[1:]])
    with path.open("a") as file:
      file.write("\n" + line)
    self.assert_wrong(
        (f"acknowledged.jsonl, {sid}", f"blocks up to {mark[0] + 6}, ")
    )

  def test_finds_missing_acknowledgements(self):
    (self.folder / "replay/acknowledged.jsonl").unlink()
    self.assert_wrong(("replay/acknowledged.jsonl", "is missing"))

  @parameterized.parameters("state/d", "state/ocdbt.process_0/d")
  def test_finds_wrong_bit_of_array(self, folder):
    files = (self.folder / "checkpoints/12" / folder).iterdir()
    path = max(files, key=lambda path: path.stat().st_size)
    # Files may hold superseded nodes that no array refers to.
    size = path.stat().st_size
    for offset in range(size // 16, size, size // 8):
      self.flip(path, offset)
    self.assert_wrong(("checkpoints/12/state", "saved checksum|cannot be read"))

  def test_finds_wrong_host_state(self):
    path = self.folder / "checkpoints/8/host/process-00000.npz"
    self.flip(path, path.stat().st_size // 2)
    self.assert_wrong(("checkpoints/8/host/process-00000.npz", "cannot be"))

  def test_finds_unbalanced_checkpoint_ledger(self):
    path = self.folder / "checkpoints/8/host/process-00000.npz"
    members = dict(np.load(path, allow_pickle=False))
    structure = json.loads(members["structure"].tobytes())
    structure["host_state"]["data"]["ledger"]["trained"][1] += 1
    text = json.dumps(structure).encode()
    members["structure"] = np.frombuffer(text, np.uint8)
    np.savez(path, **members)
    self.assert_wrong(("checkpoints/8/host", "accounted for"))

  def test_finds_missing_commit_marker(self):
    (self.folder / "checkpoints/8/commit_success.txt").unlink()
    self.assert_wrong(("checkpoints/8/commit_success.txt", "is missing"))

  def test_finds_deleted_checkpoints(self):
    """An older one is not missed; the newest and the last one are."""
    shutil.rmtree(self.folder / "checkpoints/8")
    problems, parts = self.audit()
    self.assertEmpty(problems)
    self.assertRegex(
        parts["checkpoints"].notes[0],
        "checkpoints/8: deleted; a restart continues from checkpoints/12",
    )
    shutil.rmtree(self.folder / "checkpoints/12")
    self.assertIn("checkpoints", dict(self.audit()[0]))

  def test_finds_newest_checkpoint_deleted(self):
    shutil.rmtree(self.folder / "checkpoints/12")
    problems, _ = self.audit()
    self.assertIn("result.json", dict(problems))

  @parameterized.parameters("config", "epoch", "eval", "ledger", "summary")
  def test_finds_non_json_file(self, name):
    (self.folder / f"{name}.json").write_bytes(b"\x00garbage")
    problems, _ = self.audit()
    self.assertIn(f"{name}.json", dict(problems))

  def test_finds_open_ledger(self):
    path = self.folder / "ledger.json"
    ledger = jsonl.read_json(path)
    ledger["evicted_untrained"]["tokens"] += 5
    jsonl.atomic_write_json(path, ledger)
    self.assert_wrong(
        ("ledger.json", "0 prompts, 0 completions, -5 tokens are unaccounted")
    )

  def edit_metrics(self, edit):
    path = self.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    steps = [i for i, line in enumerate(lines) if "train/loss" in line]
    edit(lines, steps)
    path.write_text("".join(lines))

  @parameterized.parameters((0, 0), (5, 5), (-1, _STEPS - 1))
  def test_finds_step_without_its_line(self, index, step):
    self.edit_metrics(lambda lines, steps: lines.pop(steps[index]))
    self.assert_wrong(("metrics.jsonl", f"steps {step} to {step} have no line"))

  def test_finds_step_out_of_order(self):
    self.edit_metrics(lambda lines, steps: lines.insert(-1, lines[steps[3]]))
    problems, _ = self.audit()
    self.assertRegex(problems[0][1], "step 3 comes after step")

  @parameterized.parameters(
      "config.json",
      "eval.json",
      "result.json",
      "metrics.jsonl",
      "events.jsonl",
      "samples.jsonl",
      "replay/decisions.jsonl",
  )
  def test_finds_bit(self, name):
    path = self.folder / name
    data = path.read_bytes()
    chosen = random.Random(name)
    for _ in range(10):
      offset, bit = chosen.randrange(len(data)), chosen.randrange(8)
      changed = bytearray(data)
      changed[offset] ^= 1 << bit
      path.write_bytes(changed)
      with self.subTest(offset=offset, bit=bit):
        places = [place for place, _ in self.audit()[0]]
        self.assertIn(name, "".join(places))

  def test_finds_non_json_line(self):
    def edit(lines, steps):
      lines[steps[5]] = lines[steps[5]].replace(":", ";", 1)

    self.edit_metrics(edit)
    problems, _ = self.audit()
    self.assertIn("1 lines are damaged", dict(problems).values())

  def test_ends_with_status_and_changes_nothing(self):
    before = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}
    self.assertEqual(self.run_program(), (0, f"{self.folder}: sound"))
    lock = run_directory.lock(str(self.folder))
    self.assertEqual(
        self.run_program(), (0, f"{self.folder}: sound so far; the run is live")
    )
    os.close(lock)
    after = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}
    del before[self.folder / ".lock"], after[self.folder / ".lock"]
    self.assertEqual(after, before)
    self.assertEqual(self.run_program("8")[0], 2)
    empty = self.create_tempdir().full_path
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(verify.run(None, empty), 2)

  def test_refuses_run_of_another_version_in_one_line(self):
    path = self.folder / "config.json"
    saved = json.loads(path.read_bytes())
    path.write_text(json.dumps({**saved, "format": saved["format"] - 1}))
    status, line = self.run_program()
    self.assertEqual(status, 2)
    self.assertRegex(
        line,
        "^error: .*config.json has format 2, .* use the version of tba_jax",
    )

  def run_program(self, *operands):
    """Returns its exit status and last line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
      status = verify.run(None, str(self.folder), operands)
    return status, out.getvalue().splitlines()[-1]

  def test_verifies_run_unreadable_to_other_programs(self):
    (self.folder / "eval.json").write_text("[")
    process = harness.Process(
        harness.command("verify", self.folder), self.folder / "out.txt"
    )
    self.assertEqual(process.wait(), 1, process.text())
    self.assertIn("wrong: eval.json: not JSON", process.text())
