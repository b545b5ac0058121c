# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults and floods in their short form; the auditor on altered runs."""

import io
import json
import pathlib
import shutil
import socket
import tempfile

from absl.testing import absltest
import numpy as np

from tba_jax.transport.groups import journal
from tests.chaos import auditor
from tests.support import harness

_CONFIG = "configs/arithmetic.py:smoke"
_OVERRIDES = {
    "init": "scratch",
    "run.processes": "one",
    "train.num_steps": 12,
    "checkpoint.keep_journal": True,
    "replay.dedupe": False,
    "replay.capacity": 1_000_000,
    "replay.capacity_per_prompt": 1_000_000,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 4,
    "evaluate.batch_prompts": 4,
}


class AuditorTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory(prefix="tba_audit_")
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.sound = cls.folder / "sound"
    run = harness.Run(cls.sound, _OVERRIDES, _CONFIG)
    if run.wait():
      raise AssertionError(run.text())

  def setUp(self):
    super().setUp()
    self.run_ = self.folder / self.id().rpartition(".")[2]
    shutil.copytree(self.sound, self.run_)

  def check_finds(self, pattern):
    _, faults = auditor.audit(self.run_, self.sound)
    self.assertRegex("\n".join(faults), pattern)

  def segment(self):
    (path,) = (self.run_ / "replay").glob("segment-*.journal")
    return path

  def test_finds_finished_run_sound(self):
    figures, faults = auditor.audit(self.run_, self.sound)
    self.assertEmpty(faults)
    self.assertEqual(figures["steps"], 12)
    self.assertGreater(figures["completions_trained"], 0)

  def test_finds_block_missing_from_journal(self):
    path = self.segment()
    data = path.read_bytes()
    place = data.find(b"tbarec\0\n", len(data) // 2)
    path.write_bytes(data[:place] + b"\0" + data[place + 1 :])
    self.check_finds(r"acknowledged blocks \[\d+\] of .* are nowhere")
    self.check_finds("completions of the buffer are not in the journal")

  def test_finds_duplicate_block_in_journal(self):
    path = self.segment()
    payload = next(
        span.payload
        for span in journal.read_segment(path, 0)[0]
        if span.payload
    )
    record = journal.encode_record(path.stat().st_size, payload)
    with path.open("ab") as file:
      file.write(record)
    self.check_finds("journaled twice")

  def test_finds_wrong_ledger_counts(self):
    path = self.run_ / "ledger.json"
    ledger = json.loads(path.read_text())
    ledger["trained_first_time"]["tokens"] += 1
    ledger["in_buffer_untrained"]["tokens"] -= 1
    path.write_text(json.dumps(ledger))
    self.check_finds("trained first time: .* must be")

  def test_finds_untrained_step(self):
    path = self.run_ / "metrics.jsonl"
    lines = path.read_text().splitlines()
    kept = [one for one in lines if json.loads(one).get("step") != 5]
    path.write_text("\n".join(kept) + "\n")
    self.check_finds(r"no metrics of steps \[5\]")

  def test_finds_completion_counted_as_fresh_twice(self):
    path = self.run_ / "metrics.jsonl"
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    for record in lines:
      if record.get("step") == 11 and "train/loss" in record:
        record["replay/fresh_share"] += 1 / 32
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    self.check_finds("first uses of all steps")

  def test_finds_altered_completion(self):
    path = self.run_ / "checkpoints" / "12" / "host" / "process-00000.npz"
    with np.load(path, allow_pickle=False) as members:
      arrays = {name: members[name].copy() for name in members.files}
    structure = json.loads(arrays["structure"].tobytes())
    rows = structure["host_state"]["data"]["buffer"]["rows"]
    arrays[rows["rewards"]["__array__"]][3] += 1
    out = io.BytesIO()
    np.savez(out, **arrays)
    path.write_bytes(out.getvalue())
    self.check_finds("1 completions of the buffer are not in the journal")

  def test_finds_leaked_socket(self):
    left = socket.socket(socket.AF_UNIX)
    self.addCleanup(left.close)
    left.bind(str(self.run_ / "left.sock"))
    self.check_finds("left behind: .*left.sock")


class ChaosTest(absltest.TestCase):

  def test_audits_run_of_four_kills_and_other_faults(self):
    out = harness.run_benchmark(
        pathlib.Path(self.create_tempdir().full_path),
        *("chaos", "3", "4", "many"),
        package="tests.chaos",
        config=_CONFIG,
        overrides={"init": "scratch"},
    )
    run = out["runs"]["many"]
    # Steps of milliseconds may end before the last fault.
    self.assertBetween(run["done"]["kill"], 2, 4)
    self.assertEqual(run["audit"]["steps"], out["steps"])
    self.assertLen(out["pass_at_1_undisturbed"], 1)

  def test_floods_store_of_run(self):
    out = harness.run_benchmark(
        pathlib.Path(self.create_tempdir().full_path),
        *("strangers", "12", "200"),
        package="tests.chaos",
    )
    self.assertEqual(
        list(out), ["ran", "alone", "beside", "flooded", "machine"]
    )
    for name in ("alone", "beside", "flooded"):
      self.assertGreater(out[name]["completions_per_s"], 0)
      self.assertEqual(out[name]["lost"], {})
    self.assertEmpty(out["alone"]["operations_per_s"])
    self.assertLen(out["flooded"]["operations_per_s"], 2)
