# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any process dies at any moment: the run goes on, and nothing counts twice."""

import collections
import contextlib
import os
import pathlib
import random
import signal
import tempfile
import time

from absl.testing import absltest
import pytest

from tba_jax.run import run_directory
from tba_jax.tools import verify
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import leases
from tba_jax.transport.groups import messages
from tba_jax.transport.kv import kv_client
from tests.support import harness
from tests.support import waiting

_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 100_000,
    "checkpoint.every_steps": 20,
    "evaluate.every_steps": 0,
    "replay.recent_fraction": 0.75,
    "search.lease_s": 5.0,
}
# Twice each: a role that dies three times within a minute ends the run. The
# key-value service is a child of the store, which starts it again.
_SHOTS = (
    ("searcher", signal.SIGKILL),
    ("searcher", signal.SIGKILL),
    ("trainer", signal.SIGKILL),
    ("trainer", signal.SIGKILL),
    ("kvservice", signal.SIGKILL),
    ("kvservice", signal.SIGSTOP),
    ("store", signal.SIGKILL),
    ("store", signal.SIGSTOP),
)
_STOPPED_S = 6.0
# Longest time that a process outlives its supervisor: the start of an
# interpreter, on a busy machine.
_END_S = 2.0


def _journaled(workdir: pathlib.Path) -> int:
  """Returns how many completions searchers had made by their newest blocks."""
  completions = {}
  for _, payload in journal.read_records(workdir / "replay", 0):
    header, _ = wire.decode_unverified(payload)
    completions[header["sid"]] = header["totals"]["completions"]
  return sum(completions.values())


class RunFaultsTest(absltest.TestCase):

  def start(self, **changes):
    run = harness.Run(self.workdir, {**_OVERRIDES, **changes})
    self.addCleanup(run.close)
    return run

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_faults_")
    self.addCleanup(folder.cleanup)
    self.workdir = pathlib.Path(folder.name) / "run"

  @pytest.mark.timeout(600)
  def test_deleted_workdir_ends_run_with_one_line_error(self):
    log = self.workdir.with_name("out.txt")
    command = harness.command(
        "train", self.workdir, config=harness.CONFIG, overrides=_OVERRIDES
    )
    process = harness.Process(command, log)
    self.addCleanup(process.close)
    waiting.wait_until(
        (self.workdir / "metrics.jsonl").exists,
        log.read_text,
        180.0,
        is_lost=lambda: not process.is_running,
    )
    self.workdir.rename(self.workdir.with_name("elsewhere"))
    self.assertEqual(process.wait(120), 1)
    self.assertNotIn("Traceback", log.read_text())
    last = log.read_text().splitlines()[-1]
    self.assertRegex(last, f"^error: --workdir={self.workdir}: .* was deleted")
    self.assertFalse((self.workdir / "report.html").exists())

  def test_survives_random_kills_and_stops_of_each_role(self):
    run = self.start()
    run.wait_for_step(3)
    second = self.start()
    self.assertEqual(second.wait(60), 2)
    shots = list(_SHOTS)
    random.Random(7).shuffle(shots)
    rng = random.Random(8)
    for role, number in shots:
      time.sleep(rng.uniform(0.0, 1.0))
      pid = run.wait_for(lambda: _living(run, role), role)  # noqa: B023
      os.kill(pid, number)
      if (role, number) == ("store", signal.SIGSTOP):
        # Nobody waits for the host; it goes on where it was.
        time.sleep(_STOPPED_S)
        os.kill(pid, signal.SIGCONT)
        continue
      # Its successor must be up, or the next shot would hit nothing.
      run.wait_for(
          lambda: _living(run, role) not in (None, pid),  # noqa: B023
          f"successor of {role}",
      )
    last = run.steps()[-1]["step"]
    run.wait_for(lambda: run.steps()[-1]["step"] > last, "step after all")
    run.process.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(120), 128 + signal.SIGTERM, run.text())
    died = collections.Counter(e["role"] for e in run.events("died"))
    self.assertEqual(died, {"searcher": 2, "trainer": 2, "store": 1})
    num_steps = max(r["step"] for r in run.steps()) + 4
    more = {"train.num_steps": num_steps}
    run = self.start(**more)
    self.assertEqual(run.wait(), 0, run.text())
    summary = run.read("summary.json")
    self.assertEqual(summary["steps"], num_steps)
    self.assertTrue(summary["ledger_closed"])
    ledger = run.read("ledger.json")
    harness.check_ledger(ledger)
    # Surviving history: each step once, and no completion as new twice.
    fresh = sum(
        round(r["replay/fresh_share"] * 8 * 4)
        for r in _surviving(run.steps(), num_steps)
    )
    self.assertEqual(fresh, ledger["trained_first_time"]["completions"])
    self.assertEmpty(harness.leftovers(self.workdir))
    parts, _ = verify.audit(self.workdir)
    self.assertEmpty([one for part in parts for one in part.problems])
    # A finished run says so; another config is refused.
    again = self.start(**more)
    self.assertEqual(again.wait(60), 0, again.text())
    other = self.start(**more, **{"model.width": 48})
    self.assertEqual(other.wait(60), 2)
    self.assertIn("config.model.width", other.text())

  @pytest.mark.timeout(300)
  def test_counts_announced_completions_after_all_roles_died(
      self,
  ):
    run = self.start(**{"train.num_steps": 120, "search.lead_steps": 100})
    replay = self.workdir / "replay"
    run.wait_for(
        lambda: replay.exists() and _journaled(self.workdir) > 300,
        "completions",
    )
    pids = {role: run.pids(role)[0] for role in ("trainer", "searcher")}
    # No trainer comes back before the searcher dies, and the searcher has work
    # left when the trainer dies, however slow that is to start.
    waiting.stop(run.process.pid)
    os.kill(pids["searcher"], signal.SIGSTOP)
    run.wait_for_step(1)
    info = run_directory.open_run(
        str(self.workdir), run_directory.load_config(str(self.workdir))
    )
    store = kv_client.connect(
        info, run_directory.load_config(run.workdir).store.deadline_s
    )
    announced = {}

    def read():
      """Reads the leases in the store; returns the completions so far."""
      with contextlib.suppress(byte_store.TransportError):
        for key, data in store.list("live").items():
          lease, _ = messages.decode(info, key, data, "lease")
          completions = lease["totals"]["completions"]
          sid = lease["sid"]
          announced[sid] = max(announced.get(sid, 0), completions)
      return sum(announced.values())

    os.kill(pids["trainer"], signal.SIGKILL)
    waiting.wait_until(lambda: not waiting.is_running(pids["trainer"]))
    # The searcher samples on, and no trainer reads its lease.
    delivered = _journaled(self.workdir)
    os.kill(pids["searcher"], signal.SIGCONT)
    run.wait_for(lambda: read() > delivered, "announcement")
    os.kill(pids["searcher"], signal.SIGKILL)
    run.kill("kvservice")
    run.process.send_signal(signal.SIGCONT)
    store.close()
    self.assertEqual(run.wait(), 0, run.text())
    ledger = run.read("ledger.json")
    harness.check_ledger(ledger)
    self.assertTrue(ledger["closed"])
    self.assertGreater(ledger["lost"]["searcher"]["completions"], 0)
    # Every searcher's lease is on disk, or in the last checkpoint's ledger.
    kept, damaged = leases.read_files(info)
    self.assertEmpty(damaged)
    totals = {
        sid: lease["totals"]["completions"] for sid, (lease, _) in kept.items()
    }
    for sid, completions in announced.items():
      totals[sid] = max(totals.get(sid, 0), completions)
    self.assertEqual(ledger["generated"]["completions"], sum(totals.values()))

  @pytest.mark.timeout(300)
  def test_replaces_permanently_suspended_roles(self):
    run = self.start(**{"search.starvation_s": 40.0, "store.deadline_s": 40.0})
    run.wait_for_step(3)
    # No lease and no status tells of a stopped process for long, and the
    # trainer waits 40 s for data, and for a store.
    run.kill("searcher", signal.SIGSTOP)
    run.kill("store", signal.SIGSTOP)
    run.kill("kvservice")
    run.wait_for(lambda: len(run.events("stalled")) == 2, "two replaced")
    last = run.steps()[-1]["step"]
    run.wait_for(lambda: run.steps()[-1]["step"] > last + 3, "further steps")
    # A whole machine that is suspended has no fault.
    pids = [row["pid"] for row in run.read("processes.json")]
    for pid in (*pids, run.process.pid):
      os.kill(pid, signal.SIGSTOP)
    time.sleep(15.0)
    for pid in (*pids, run.process.pid):
      os.kill(pid, signal.SIGCONT)
    last = run.steps()[-1]["step"]
    run.wait_for(lambda: run.steps()[-1]["step"] > last + 3, "further steps")
    run.process.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(120), 128 + signal.SIGTERM, run.text())
    self.assertEqual(
        {e["message"].partition(":")[0] for e in run.events("stalled")},
        {"searcher-0", "store-0"},
    )
    died = collections.Counter(e["role"] for e in run.events("died"))
    self.assertEqual(died, {"searcher": 1, "store": 1})
    num_steps = max(r["step"] for r in run.steps()) + 4
    run = self.start(**{"train.num_steps": num_steps})
    self.assertEqual(run.wait(), 0, run.text())
    self.assertTrue(run.read("summary.json")["ledger_closed"])

  @pytest.mark.timeout(120)
  def test_ends_starting_roles_with_their_supervisor(self):
    rng = random.Random(5)
    for _ in range(6):
      run = self.start()
      run.wait_for(lambda: run.pids("searcher"), "processes")  # noqa: B023
      time.sleep(rng.uniform(0.0, 3.0))
      run.process.kill()
      run.process.wait()
      waiting.wait_until(
          lambda: not _running(self.workdir),
          lambda: f"the end of {_running(self.workdir)}",
          _END_S,
      )


def _running(workdir):
  return [p for p in harness.leftovers(workdir) if not p.endswith(".sock")]


def _living(run, role):
  """Returns the pid of a role's process that runs, None where none does."""
  for pid in run.pids(role):
    if waiting.is_running(pid):
      return pid
  return None


def _surviving(records, num_steps):
  """The last record of each step; the metrics of an undone history go."""
  by_step = {}
  for record in records:
    for step in [s for s in by_step if s >= record["step"]]:
      if by_step[step]["epoch"] < record["epoch"]:
        del by_step[step]
    by_step[record["step"]] = record
  return [by_step[step] for step in range(num_steps)]
