# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The train program: its processes, the supervisor's decisions, the call."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import signal
import sys
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import rich.console

import tba_jax
from tba_jax.config import differences
from tba_jax.config import variants
from tba_jax.programs import model_sizes
from tba_jax.programs import train
from tba_jax.report import page as report
from tba_jax.report import panel
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.system import processes
from tests.support import supervise_case
from tests.support import waiting

countdown = variants.import_config("configs/countdown.py")
_NO_DEATHS_COUNT = dataclasses.replace(
    supervise_case.LIMITS, deaths_within_s=0.0
)

# Stands in for the interpreter: what a role would be, it is told by its index.
_SCRIPT = """#!{python}
import os, signal, sys, time
role, index = sys.argv[5].split("=")[1], int(sys.argv[7])
print("args", *sys.argv[1:])
print("cores", *sorted(os.sched_getaffinity(0)))
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"))
print("session", os.getsid(0) == os.getpid())
if role == "deaf":
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "polite":
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
signal.signal(signal.SIGUSR1, lambda *_: print("more", flush=True))
if role == "short":
  sys.exit(index)
print("ready", flush=True)

while True:
  time.sleep(60)
"""
_WAIT_S = 20.0
_WRITTEN = """
    events.jsonl ledger.json logs/trainer-0.log metrics.csv metrics.jsonl
    processes.json replay/segment-00000000000000000000.journal result.json
    samples.jsonl sft/metrics.jsonl spans/trainer-0.jsonl spool/generation
    spool/locator.json status.json summary.json totals.json
""".split()


class ChildrenTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    script = self.workdir / "role"
    script.write_text(_SCRIPT.format(python=sys.executable))
    script.chmod(0o700)
    patch = mock.patch.object(sys, "executable", str(script))
    patch.start()
    self.addCleanup(patch.stop)
    self.children = self.make_children()
    self.addCleanup(self.kill_all)

  def make_children(self, **limits):
    return train.Children(self.workdir, train.Limits(together_s=0.1, **limits))

  def kill_all(self):
    for child in self.children.all:
      if child.process.poll() is None:
        child.process.kill()
        child.process.wait()

  def add(self, role, index=0, cores=()):
    """Starts a child and waits until it is ready for signals."""
    child = self.children.add(role, index, cores)
    waiting.wait_until(lambda: "ready" in self.log(child))
    return child

  def log(self, child):
    return self.children.log_path(child).read_text()

  def table(self):
    rows = json.loads((self.workdir / "processes.json").read_text())
    return [(row["role"], row["index"], row["pid"]) for row in rows]

  def test_gives_child_its_role_cores_and_log(self):
    own = processes.available_cores()
    child = self.add("polite", 3, own[-1:])
    self.assertEqual(child.name, "polite-3")
    log = self.log(child)
    self.assertIn(
        "args -m tba_jax.system.role polite-3 tba_jax.main --program=polite"
        f" --workdir={self.workdir} 3\n",
        log,
    )
    self.assertIn(f"cores {own[-1]}\n", log)
    # A signal to the terminal's group does not reach it.
    self.assertIn("session True", log)
    # The supervisor itself stays where it was.
    self.assertEqual(processes.available_cores(), own)

  def test_starts_program_other_than_role(self):
    child = self.children.add("trainer", 0, (), program="short")
    child.process.wait(_WAIT_S)
    self.assertEqual(child.name, "trainer-0")
    self.assertIn("--program=short ", self.log(child))

  def test_leaves_child_without_cores_unpinned(self):
    child = self.add("polite")
    own = " ".join(map(str, processes.available_cores()))
    self.assertIn(f"cores {own}\n", self.log(child))

  def test_failed_start_restores_core_affinity(self):
    own = processes.available_cores()
    with mock.patch.object(sys, "executable", str(self.workdir / "missing")):
      with self.assertRaises(FileNotFoundError):
        self.children.add("polite", 0, own[-1:])
    self.children.all.clear()
    self.assertEqual(processes.available_cores(), own)

  def test_continues_log_after_restart(self):
    child = self.children.add("short", 4, ())
    self.assertEqual(child.process.wait(_WAIT_S), 4)
    self.children.start(child)
    child.process.wait(_WAIT_S)
    self.assertEqual(self.log(child).count("args "), 2)
    self.assertEqual(self.children.all, [child])

  def test_rotates_long_log_while_its_process_writes(self):
    child = self.add("polite")
    path = self.children.log_path(child)
    self.children.rotate_logs()
    self.assertIn("ready", self.log(child))
    self.children = self.make_children(max_log_bytes=10)
    self.children.all.append(child)
    self.children.rotate_logs()
    self.assertIn("ready", path.with_name("polite-0.log.1").read_text())
    self.assertEqual(self.log(child), "")
    child.process.send_signal(signal.SIGUSR1)
    waiting.wait_until(lambda: "more" in self.log(child))
    self.assertEqual(self.log(child), "more\n")

  def test_starts_group_together_with_one_address(self):
    group = self.children.add_group("short", (), [{}, {}])
    for index, child in enumerate(group):
      self.assertEqual(child.process.wait(_WAIT_S), index)
    first = {child.operands for child in group}
    self.assertLen(first, 1)
    address = first.pop()[0]
    self.assertStartsWith(address, "127.0.0.1:")
    self.assertIn(f"1 {address}\n", self.log(group[1]))
    group[0].finished = True
    self.children.start_again(group[1])
    for child in group:
      child.process.wait(_WAIT_S)
      self.assertEqual(self.log(child).count("args "), 2)
      self.assertFalse(child.finished)
    self.assertEqual(self.children.all, group)

  def test_shows_processes_their_own_devices(self):
    group = self.children.add_group(
        "short", (), [{"CUDA_VISIBLE_DEVICES": f"{i}"} for i in range(2)]
    )
    for index, child in enumerate(group):
      child.process.wait(_WAIT_S)
      self.assertIn(f"devices {index}\n", self.log(child))

  def test_treats_group_of_one_as_child(self):
    (child,) = self.children.add_group("short", (), [{}])
    child.process.wait(_WAIT_S)
    self.assertIn(f" --workdir={self.workdir} 0\n", self.log(child))
    self.assertIs(self.children.end_group(child), child)

  def test_ends_whole_group_and_returns_failed_process(self):
    group = self.children.add_group("deaf", (), [{}] * 3)
    for child in group:
      waiting.wait_until(lambda child=child: "ready" in self.log(child))
    group[1].process.kill()
    self.assertIs(self.children.end_group(group[1]), group[1])
    for child in group:
      self.assertIsNotNone(child.process.poll())

  def test_prefers_exit_status_to_abort_as_cause(self):
    group = self.children.add_group("short", (), [{}] * 4)
    for child in group:
      child.process.wait(_WAIT_S)
    for expected, *codes in (
        (2, 1, -signal.SIGABRT, processes.EXIT_FATAL, 1),
        (3, -signal.SIGABRT, -signal.SIGABRT, -signal.SIGABRT, 1),
        # Process 0 has done what was asked.
        (0, 0, -signal.SIGABRT, 1, 1),
    ):
      for child, code in zip(group, codes, strict=True):
        child.process.returncode = code
      self.assertEqual(self.children.end_group(group[1]).index, expected)

  def test_ends_by_sigterm_first(self):
    child = self.add("polite")
    other = self.add("other")
    self.children.end(["polite"], 10.0)
    self.assertEqual(child.process.returncode, 5)
    self.assertIsNone(other.process.poll())

  def test_kills_processes_ignoring_sigterm(self):
    deaf, stopped = self.add("deaf"), self.add("polite")
    waiting.stop(stopped.process.pid)
    polite = self.add("polite", 1)
    self.children.end(["deaf", "polite"], 0.5)
    self.assertEqual(deaf.process.returncode, -signal.SIGKILL)
    self.assertEqual(stopped.process.returncode, -signal.SIGKILL)
    # One deadline for all: who listens is not killed for the others' sake.
    self.assertEqual(polite.process.returncode, 5)

  def test_urgent_end_kills_at_once(self):
    deaf, polite = self.add("deaf"), self.add("polite")
    asked = iter([False] * 5)
    self.children.end(["deaf"], _WAIT_S, lambda: next(asked, True))
    self.assertEqual(deaf.process.returncode, -signal.SIGKILL)
    self.assertIsNone(polite.process.poll())

  def test_ignores_ended_processes(self):
    child = self.children.add("short", 6, ())
    child.process.wait(_WAIT_S)
    self.children.end(["short", "never_started"], 0.0)
    self.assertEqual(child.process.returncode, 6)

  def test_counts_three_deaths_within_minute(self):
    child = train.Child("trainer", 0, ())

    def died(now):
      with mock.patch.object(time, "monotonic", return_value=now):
        return self.children.died_too_often(child)

    self.assertFalse(died(100.0))
    self.assertFalse(died(130.0))
    self.assertFalse(died(161.0))  # The first is more than a minute ago.
    self.assertTrue(died(189.0))

  def test_tabulates_running_processes(self):
    child = self.add("polite", 2)
    gone = self.children.add("short", 0, ())
    gone.process.wait(_WAIT_S)
    self.children.write_table(None)
    self.assertEqual(self.table(), [("polite", 2, child.process.pid)])
    self.children.write_table(77)
    self.assertEqual(self.table()[1:], [("kvservice", 0, 77)])

  def test_returns_tail_of_log(self):
    child = train.Child("role", 0, ())
    self.assertIn("no log", self.children.tail(child))
    path = self.children.log_path(child)
    path.write_text("".join(f"line {i}\n" for i in range(5000)) + "\xff")
    self.assertEqual(self.children.tail(child, 3), "line 4998\nline 4999\n\xff")
    path.write_bytes(b"\xff\xfe bytes")
    self.assertIn("bytes", self.children.tail(child))


class ComputeDtypeTest(absltest.TestCase):

  def test_resumed_run_keeps_compute_dtype(self):
    workdir = self.create_tempdir().full_path
    config = countdown.get_config("smoke")
    config.model.width = 512
    fast = lambda value: mock.patch.object(
        accelerators, "multiplies_bfloat16", lambda: value
    )
    choose = lambda: model_sizes.with_compute_dtype(config, workdir)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
      with fast(False):
        self.assertEqual(choose().model.compute_dtype, "auto")
      with fast(True):
        chosen = choose()
      self.assertEqual(chosen.model.compute_dtype, "bfloat16")
      self.assertEqual(config.model.compute_dtype, "auto")
      run_directory.create(workdir, chosen)
      with fast(False):  # Continued on another CPU.
        again = choose()
    differences.check_resume(
        run_directory.load_config(workdir).to_dict(), again.to_dict()
    )
    first, second = stdout.getvalue().splitlines()
    self.assertIn("bfloat16, width 512 on a CPU", first)
    self.assertIn("as when the run began", second)
    # And the other way round.
    other = self.create_tempdir().full_path
    run_directory.create(other, config)
    with fast(True):
      kept = model_sizes.with_compute_dtype(config, other)
    self.assertEqual(kept.model.compute_dtype, "auto")


class SuperviseTest(supervise_case.SuperviseCase):

  def test_runs_to_end(self):
    supervisor = self.make(trainer_0=[0])
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(
        self.children.started,
        ["store-0", "trainer-0", "searcher-0", "searcher-1"],
    )
    # The trainer may still save and speak to the store, which goes last.
    self.assertEqual(
        self.children.ended,
        [("trainer", "sft", "reward_model"), ("searcher",), ("store",)],
    )
    summary = self.read("summary.json")
    self.assertEqual(
        {k: summary[k] for k in supervise_case.RESULT}, supervise_case.RESULT
    )
    self.assertEqual(
        summary["restarts"], {"trainer": 0, "searcher": 0, "store": 0}
    )
    self.assertFalse((self.workdir / "processes.json").exists())
    self.assertIn("TABLE", self.stdout.getvalue())
    self.assertIn("• *", self.stdout.getvalue())
    report.conclude.assert_called_once_with(self.workdir)
    panel.final_table.assert_called_once_with(mock.ANY, "Learned: much.")

  def test_restarts_and_counts_dead_processes(self):
    supervisor = self.make(
        trainer_0=[-signal.SIGKILL, 75, 0], searcher_1=[1, None], store_0=[0]
    )
    self.assertEqual(self.run_to_end(supervisor), 0)
    restarts = self.read("summary.json")["restarts"]
    self.assertEqual((restarts["trainer"], restarts["searcher"]), (2, 1))
    # A store has no reason to leave: even status 0 is an unplanned end.
    self.assertEqual(self.children.started.count("store-0"), 2)
    told = [(e["kind"], e["message"], e["index"]) for e in self.events()]
    self.assertIn(("died", "trainer-0: SIGKILL", 0), told)
    self.assertIn(("restart", "trainer-0 (after status 75)", 0), told)
    self.assertIn(("restart", "searcher-1 (after status 1)", 1), told)

  @parameterized.parameters(
      (4, {"sft-0": "0", "store-0": None, "trainer-0": "0",
           "searcher-0": "1", "searcher-1": "2"}),
      (1, {"sft-0": "0", "trainer-0": "0"}),
  )  # fmt: skip
  def test_gives_each_role_its_accelerators(self, count, expected):
    gpus = accelerators.Accelerators("gpu", tuple(map(str, range(count))))
    self.config.init = "sft"
    supervisor = self.make(sft_0=[0], trainer_0=[0])
    with mock.patch.object(accelerators, "find", return_value=gpus):
      self.assertEqual(self.run_to_end(supervisor), 0)
    seen = {
        child.name: child.environment.get("CUDA_VISIBLE_DEVICES")
        for child in self.children.all
    }
    self.assertEqual(seen, expected)

  def test_restarts_processes_of_trainer_together(self):
    self.config.trainer.num_processes = 2
    supervisor = self.make(
        trainer_0=[-signal.SIGABRT, 0], trainer_1=[-signal.SIGKILL, 0]
    )
    self.assertEqual(self.run_to_end(supervisor), 0)
    started = self.children.started
    self.assertEqual(started[:3], ["store-0", "trainer-0", "trainer-1"])
    self.assertEqual([started.count(f"trainer-{i}") for i in range(2)], [2, 2])
    # Searchers and store go on.
    self.assertEqual(started.count("searcher-0"), 1)
    self.assertEqual(started.count("store-0"), 1)
    self.assertEqual(self.read("summary.json")["restarts"]["trainer"], 1)
    told = [(e["kind"], e["message"]) for e in self.events()]
    self.assertIn(("died", "trainer-1: SIGKILL"), told)

  def test_counts_further_generations_as_restarts_of_store(self):
    supervisor = self.make()
    generations = iter([4, 4, 6])

    def trainer(child):
      if child.name != "trainer-0":
        return
      result = next(generations, None)
      if result is None:
        child.process.status = 0
        self.write("result.json", supervise_case.RESULT)
      else:
        self.run_info.locator.write_text(
            json.dumps({"generation": result, "pid": 900 + result})
        )

    self.children.on_poll = trainer
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(self.read("summary.json")["restarts"]["store"], 2)

  def test_updates_table_of_processes_for_new_service(self):
    supervisor = self.make()
    rows = []

    def trainer(child):
      # The first table is written while this asks.
      there = (self.workdir / "processes.json").exists()
      if child.name == "trainer-0" and there:
        rows.append({r["role"]: r["pid"] for r in self.read("processes.json")})
        self.run_info.locator.write_text('{"generation": 1, "pid": 77}')
        if "kvservice" in rows[-1]:
          child.process.status = 0

    self.children.on_poll = trainer
    self.run_to_end(supervisor)
    self.assertEqual(rows[-1]["kvservice"], 77)
    self.assertContainsSubset({"store", "trainer", "searcher"}, rows[-1])

  def test_does_not_restart_finished_searcher(self):
    supervisor = self.make(searcher_0=[0])
    looks = iter(range(5))

    def trainer(child):
      self.write("status.json", {"phase": "finish"})
      if child.name == "trainer-0" and next(looks, None) is None:
        child.process.status = 0
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = trainer
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(self.children.started.count("searcher-0"), 1)

  @parameterized.parameters("train", "")
  def test_restarts_prematurely_finished_searcher(self, phase):
    interrupted = processes.EXIT_INTERRUPTED
    supervisor = self.make(searcher_0=[interrupted, 0, None])
    # Written by the trainer before this one.
    self.write("status.json", {"phase": "finish"})

    def trainer(child):
      if phase:
        self.write("status.json", {"phase": phase})
      if (
          child.name == "trainer-0"
          and self.children.started.count("searcher-0") > 2
      ):
        child.process.status = 0
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = trainer
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(self.children.started.count("searcher-0"), 3)
    self.assertEqual(self.read("summary.json")["restarts"]["searcher"], 0)

  def test_ends_run_if_failing_child_makes_no_progress(self):
    self.write("status.json", {"step": 7})
    supervisor = self.make(_NO_DEATHS_COUNT, trainer_0=[1, 1, 1, 1])
    self.assertEqual(self.run_to_end(supervisor, result=None), 1)
    self.assertEqual(self.children.started.count("trainer-0"), 3)
    self.assertIn("no further than step 7", self.stderr.getvalue())

  def test_death_is_told_with_last_error(self):
    supervisor = self.make(trainer_0=[1, 0], searcher_1=[1, None])
    words = {"trainer-0": "error: step 0 has 0 of 4 prompts"}
    tail = lambda child, _: words.get(child.name, "Traceback")
    with mock.patch.object(self.children, "tail", tail):
      self.assertEqual(self.run_to_end(supervisor), 0)
    died = [e["message"] for e in self.events() if e["kind"] == "died"]
    why = "trainer-0: status 1, step 0 has 0 of 4 prompts"
    self.assertCountEqual(died, [why, "searcher-1: status 1"])

  def test_continues_if_failing_child_makes_progress(self):
    supervisor = self.make(_NO_DEATHS_COUNT, trainer_0=[1, 1, 1, 1, 0])
    steps = iter(range(100))

    def trainer(child):
      if child.name == "trainer-0":
        self.write("status.json", {"step": next(steps)})
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = trainer
    self.assertEqual(self.run_to_end(supervisor), 0)

  @parameterized.parameters(
      (processes.EXIT_CONFIG, 2), (processes.EXIT_FATAL, 1)
  )
  def test_does_not_retry_permanent_failure(self, status, program_status):
    supervisor = self.make(searcher_1=[status])
    self.assertEqual(self.run_to_end(supervisor, result=None), program_status)
    self.assertEqual(self.children.started.count("searcher-1"), 1)
    self.assertRegex(
        self.stderr.getvalue(),
        rf"error: searcher-1 ended with status {status}[^$]*"
        "logs/searcher-1.log[^$]*last words of searcher-1",
    )
    # Nobody is left behind, and the report shows how far the run came.
    self.assertLen(self.children.ended, 3)
    self.assertIn("The run has failed: saving.", self.stdout.getvalue())
    report.conclude.assert_called_once()
    self.assertFalse((self.workdir / "summary.json").exists())

  def test_ends_run_after_three_deaths_within_minute(self):
    supervisor = self.make(trainer_0=[1, 1, 1, 0])
    self.assertEqual(self.run_to_end(supervisor, result=None), 1)
    self.assertEqual(self.children.started.count("trainer-0"), 3)
    self.assertIn("died three times within", self.stderr.getvalue())

  def test_fails_without_result(self):
    self.assertEqual(self.run_to_end(self.make(trainer_0=[0]), result=None), 1)
    self.assertIn("without a result", self.stderr.getvalue())

  def test_fails_with_damaged_result(self):
    supervisor = self.make(trainer_0=[0])
    self.assertEqual(self.run_to_end(supervisor, result={"steps": "many"}), 1)
    self.assertIn("result.json: damaged", self.stderr.getvalue())

  def test_fails_with_open_ledger(self):
    open_ledger = {**supervise_case.RESULT, "ledger_closed": False}
    status = self.run_to_end(self.make(trainer_0=[0]), result=open_ledger)
    self.assertEqual(status, 1)
    self.assertIn("ledger does not close", self.stderr.getvalue())
    self.assertFalse(self.read("summary.json")["ledger_closed"])

  def test_succeeds_despite_failed_report(self):
    report.conclude.side_effect = KeyError("curve")
    self.assertEqual(self.run_to_end(self.make(trainer_0=[0])), 0)
    self.assertIn("no report could be written", self.stderr.getvalue())

  def test_delays_profile_until_trainer_trains(self):
    supervisor = self.make()
    trainer, phases = [], ["compile", "compile", "train", "train"]

    def look(child):
      if child.name == "trainer-0" and phases:
        trainer.append(list(child.process.signals))
        self.write("status.json", {"phase": phases.pop(0)})
        child.finished = not phases

    self.children.on_poll = look
    signal.raise_signal(signal.SIGUSR1)
    self.run_to_end(supervisor, result=None)
    self.assertEqual(trainer, [[], [], [], [signal.SIGUSR1]])

  def test_starts_nothing_for_finished_run(self):
    self.write("summary.json", supervise_case.RESULT)
    supervisor = self.make()
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEmpty(self.children.started)
    self.assertRegex(self.stdout.getvalue(), r"finished \(100 steps\)")

  def saved_beta(self):
    saved = run_directory.load_config(str(self.workdir))
    return saved.loss.beta

  def resumed(self, **statuses):
    """Returns a supervisor of the run with another loss.beta."""
    self.make()
    self.config.loss.beta = 0.5
    return self.make(changes={"loss.beta": (0.05, 0.5)}, **statuses)

  def test_changed_settings_are_saved_before_any_process_starts(self):
    supervisor, seen = self.resumed(trainer_0=[0]), []
    self.assertEqual(self.saved_beta(), 0.05)
    start = self.children.start

    def note(child):
      seen.append((child.name, self.saved_beta()))
      start(child)

    with mock.patch.object(self.children, "start", note):
      self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(seen[:2], [("store-0", 0.5), ("trainer-0", 0.5)])
    self.assertIn("config.loss.beta = 0.5, was 0.05", self.stdout.getvalue())

  def test_changed_settings_resume_stopped_run(self):
    stopped = {**supervise_case.RESULT, "steps": 7}
    self.write("summary.json", stopped)
    self.assertEqual(self.run_to_end(self.resumed(trainer_0=[0])), 0)
    self.assertIn("trainer-0", self.children.started)
    self.assertEqual(self.saved_beta(), 0.5)

  def test_changed_settings_are_not_applied_without_steps_left(self):
    self.write("summary.json", supervise_case.RESULT)
    self.assertEqual(self.run_to_end(self.resumed()), 0)
    self.assertEmpty(self.children.started)
    self.assertEqual(self.saved_beta(), 0.05)
    self.assertIn("not applied", self.stdout.getvalue())

  def test_kill_before_changed_settings_are_saved_leaves_run_unfinished(self):
    self.write("summary.json", {**supervise_case.RESULT, "steps": 7})
    with mock.patch.object(run_directory, "update", side_effect=KeyError):
      with self.assertRaises(KeyError):
        self.run_to_end(self.resumed())
    self.assertEqual(self.saved_beta(), 0.05)
    self.assertFalse((self.workdir / "summary.json").exists())

  def test_gives_trainer_time_to_save_until_second_signal(self):
    supervisor, asked = self.make(), []

    def end(roles, deadline_s, is_urgent=None):
      if "trainer" in roles:
        asked.append((deadline_s, is_urgent()))
        signal.raise_signal(signal.SIGINT)
        asked.append((deadline_s, is_urgent()))

    self.children.on_poll = lambda child: signal.raise_signal(signal.SIGINT)
    with mock.patch.object(self.children, "end", end):
      self.assertEqual(self.run_to_end(supervisor), 130)
    # Twice search.starvation_s.
    self.assertEqual(asked, [(360.0, False), (360.0, True)])

  def test_unlocks_directory_of_refused_run(self):
    with mock.patch.object(train.run_directory, "create") as create:
      create.side_effect = ValueError("another run")
      with contextlib.redirect_stderr(self.stderr):
        self.assertEqual(train.run(self.config, str(self.workdir), []), 2)
    os.close(run_directory.lock(str(self.workdir)))

  def test_restores_callers_signal_handlers(self):
    own, seen = lambda *_: None, []
    for number in supervise_case.SIGNALS:
      signal.signal(number, own)

    def run(supervisor):
      seen.extend(signal.getsignal(number) for number in supervise_case.SIGNALS)
      return 7

    with mock.patch.object(train.Supervisor, "run", run):
      self.assertEqual(train.run(self.config, str(self.workdir), []), 7)
    self.assertNotIn(own, seen)
    self.assertEqual(
        [signal.getsignal(n) for n in supervise_case.SIGNALS], [own] * 3
    )

  def test_adds_times_and_restarts_over_supervisors(self):
    self.write("summary.json", {**supervise_case.RESULT, "num_steps": 50})
    self.write("result.json", {"steps": "old"})
    restarts = {"trainer": 2, "searcher": 0, "store": 1}
    self.write("totals.json", {"wall_s": 1000.0, "restarts": restarts})
    # A trainer that a signal ends adds its part too.
    interrupted = self.make(trainer_0=[75, None])
    self.children.on_poll = lambda child: (
        self.children.started.count("trainer-0") > 1
        and signal.raise_signal(signal.SIGINT)
    )
    self.assertEqual(self.run_to_end(interrupted, None), 130)
    self.assertEqual(self.read("totals.json")["restarts"]["trainer"], 3)
    with self.subTest("the earlier summary is not that of a run that goes on"):
      self.assertFalse((self.workdir / "summary.json").exists())
    self.assertEqual(self.run_to_end(self.make(trainer_0=[75, 0])), 0)
    summary = self.read("summary.json")
    self.assertEqual(
        summary["restarts"], {"trainer": 4, "searcher": 0, "store": 1}
    )
    self.assertGreaterEqual(summary["wall_s"], 1000.0)

  def watch(self, num_looks=3, **heard):
    """Returns the messages on stalled children.

    Args:
      num_looks: number of times that the trainer is polled.
      heard: lines of the pulse of a child, or the seconds without any, by name
        of the child, as `trainer_0`.
    """
    for name in ("summary.json", "events.jsonl"):
      (self.workdir / name).unlink(missing_ok=True)
    supervisor = self.make()
    looks = iter(range(num_looks))

    def look(child):
      news = heard.get(child.name.replace("-", "_"), [])
      if self.children.started.count(child.name) > 1:
        news = []
      child.listener.silent = 0 if isinstance(news, list) else news
      child.listener.look.return_value = news if isinstance(news, list) else []
      if child.name == "trainer-0":
        self.write("result.json", supervise_case.RESULT)
        if next(looks, None) is None:
          child.process.status = 0

    self.children.on_poll = look
    self.assertEqual(self.run_to_end(supervisor), 0)
    return [e["message"] for e in self.events() if e["kind"] == "stalled"]

  # search.starvation_s is 180 s, store.deadline_s 60 s.
  @parameterized.parameters(
      ("searcher_1", 91, 90), ("trainer_0", 361, 360), ("store_0", 31, 30)
  )
  def test_restarts_child_without_progress(self, child, late, in_time):
    name = child.replace("_", "-")
    self.assertEmpty(self.watch(**{child: in_time}))
    self.assertEmpty(self.watch(**{child: [(in_time, name, "work")]}))
    self.assertEqual(
        self.watch(**{child: late}),
        [f"{name}: no sign of life for {late} s"],
    )
    self.assertEqual(
        self.watch(**{child: [(0, name, "work"), (late, name, "work")]}),
        [f"{name}: no progress for {late} s (work)"],
    )

  def test_leaves_time_for_start_under_short_deadlines(self):
    self.config.search.starvation_s = 16.0
    self.assertEmpty(self.watch(searcher_0=10))
    self.assertLen(self.watch(searcher_0=11), 1)

  def test_blames_silent_process_of_group(self):
    self.config.trainer.num_processes = 2
    self.config.mesh.data = 2
    stuck = [(400, "trainer-0", "step")]
    self.assertEqual(
        self.watch(trainer_0=stuck, trainer_1=400),
        ["trainer-1: no sign of life for 400 s"],
    )

  def test_restarts_run_in_one_process_as_whole(self):
    self.config.run.processes = "one"
    lines = [(91, "trainer-0", "step"), (91, "searcher-1", "reward")]
    self.assertEqual(
        self.watch(trainer_0=lines),
        ["trainer-0: searcher-1: no progress for 91 s (reward)"],
    )
    restarts = self.read("summary.json")["restarts"]
    self.assertEqual((restarts["trainer"], restarts["searcher"]), (1, 0))
    # There is no store.
    self.assertEqual([child.name for child in self.children.all], ["trainer-0"])

  @parameterized.parameters(
      ("summary.json", [1]),
      ("summary.json", {"steps": 3, "num_steps": "many"}),
      ("totals.json", {"wall_s": None, "restarts": {}}),
      ("epoch.json", {"epoch": "one"}),
      ("eval.json", {"history": {"a": 1}}),
      ("eval.json", {"before": 3}),
      ("config.json", {"format": 1, "config": 7}),
      ("replay", 3),
      ("logs", 3),
      *((f"{name}/", 3) for name in _WRITTEN),
  )
  def test_refuses_damaged_file_before_start(self, name, value):
    run, _ = run_directory.create(str(self.workdir), self.config)
    if name.endswith("/"):
      name = name[:-1]
      is_spooled = name.startswith("spool/")
      folder = run.spool.parent if is_spooled else self.workdir
      (folder / name).mkdir(parents=True)
    else:
      self.write(name, value)
    with contextlib.redirect_stderr(self.stderr):
      self.assertEqual(train.run(self.config, str(self.workdir), []), 2)
    self.assertIn(f"/{name}: ", self.stderr.getvalue())
    self.assertEqual(self.stderr.getvalue().count("\n"), 1)

  @parameterized.parameters("pwrite", "fsync")
  def test_names_full_disk_at_start(self, function):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, function, side_effect=full),
        contextlib.redirect_stderr(self.stderr),
    ):
      self.assertEqual(train.run(self.config, str(self.workdir), []), 2)
    self.assertRegex(
        self.stderr.getvalue(),
        f"^error: .*No space left on device: '?{self.workdir}/.*\n$",
    )

  def test_refuses_file_of_another_user_before_start(self):
    run_directory.create(str(self.workdir), self.config)
    self.write("metrics.jsonl", {})
    with (
        mock.patch.object(os, "access", return_value=False),
        contextlib.redirect_stderr(self.stderr),
    ):
      self.assertEqual(train.run(self.config, str(self.workdir), []), 2)
    self.assertIn("this user may change", self.stderr.getvalue())

  @parameterized.parameters("garbage", "[1]", "null", "", "/")
  def test_continues_despite_damaged_files(self, content):
    supervisor = self.make(searcher_0=[1, None])
    looks = iter(range(4))

    def look(child):
      if child.name != "trainer-0":
        return
      names = "status.json", "totals.json", "processes.json"
      paths = [self.workdir / name for name in names]
      for path in (self.run_info.locator, *paths):
        if content != "/":
          path.write_text(content)
        elif not path.is_dir():
          path.unlink(missing_ok=True)
          path.mkdir()
      if next(looks, None) is None:
        child.process.status = 0
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = look
    self.assertEqual(self.run_to_end(supervisor), 0)

  @parameterized.parameters(("mesh", "trainer"), ("search.mesh", "search"))
  def test_refuses_mesh_larger_than_machine(self, key, section):
    (self.config.mesh if key == "mesh" else self.config.search.mesh).data = 4
    counted = mock.Mock(returncode=0, stdout="1 cpu\n")
    run = mock.patch.object(train.subprocess, "run", return_value=counted)
    with run, contextlib.redirect_stderr(self.stderr):
      self.assertEqual(train.run(self.config, str(self.workdir), []), 2)
    self.assertIn(f"config.{key} = ", self.stderr.getvalue())
    self.assertIn(f"config.{section}.cpu_devices=4 ", self.stderr.getvalue())
    self.assertFalse(self.workdir.exists())
    counted.stdout = "4 gpu\n"
    with run:
      train.check_devices(self.config)

  def test_counts_devices_of_this_machine(self):
    three = "--xla_force_host_platform_device_count=3"
    self.config.mesh.data = 3
    with mock.patch.dict(os.environ, XLA_FLAGS=three):
      train.check_devices(self.config)
      self.config.mesh.data = 4
      with self.assertRaisesRegex(ValueError, r"needs 4 .* has 3 \(cpu\)"):
        train.check_devices(self.config)

  def test_reports_full_disk_once_and_continues(self):
    supervisor = self.make(trainer_0=[None], searcher_0=[1, None])
    looks = iter(range(4))

    def look(child):
      if child.name == "trainer-0" and next(looks, None) is None:
        child.process.status = 0
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = look
    full = lambda name, *effects: mock.patch.object(
        self.children,
        name,
        side_effect=[*effects, *[OSError("full")] * 9],
    )
    with (
        mock.patch.object(run_directory, "update", autospec=True),
        full("rotate_logs"),
        full("write_table", None) as table,
        mock.patch.object(
            train.jsonl, "atomic_write_json", side_effect=OSError("full")
        ),
    ):
      self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertGreater(table.call_count, 1)
    self.assertIn("summary.json is not written", self.stderr.getvalue())
    kinds = [e["kind"] for e in self.events()]
    self.assertEqual(kinds.count("not_written"), 1)

  def test_ignores_result_of_earlier_trainer(self):
    self.write("result.json", supervise_case.RESULT)
    self.assertEqual(self.run_to_end(self.make(trainer_0=[0]), result=None), 1)

  @parameterized.parameters(*supervise_case.SIGNALS)
  def test_ends_all_processes_at_signal(self, number):
    supervisor = self.make()
    self.children.on_poll = lambda child: signal.raise_signal(number)
    self.assertEqual(self.run_to_end(supervisor, None), 128 + number)
    for child in self.children.all:
      self.assertEqual(child.process.signals, [signal.SIGTERM], child.name)
    self.assertIn("signal", [e["kind"] for e in self.events()])
    self.assertIn("the same command continues", self.stdout.getvalue())

  def test_fine_tunes_first_and_once(self):
    self.config.init = "sft"
    supervisor = self.make(sft_0=[0], trainer_0=[75, 0])
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(
        self.children.started[:3], ["sft-0", "store-0", "trainer-0"]
    )
    self.assertEqual(self.children.started.count("sft-0"), 1)

  def test_does_not_remake_model(self):
    self.config.init = "sft"
    supervisor = self.make(trainer_0=[0])
    self.write("sft/model/config.json", {})
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertNotIn("sft-0", self.children.started)

  def test_restarts_fine_tuning_without_progress(self):
    self.config.init = "sft"
    supervisor = self.make(sft_0=[None, 0], trainer_0=[0])

    def look(child):
      child.listener.silent = 361 * (child.name == "sft-0")
      if child.name == "trainer-0":
        self.write("result.json", supervise_case.RESULT)

    self.children.on_poll = look
    self.assertEqual(self.run_to_end(supervisor), 0)
    stalled = [e for e in self.events() if e["kind"] == "stalled"]
    self.assertEqual(
        [e["message"] for e in stalled], ["sft-0: no sign of life for 361 s"]
    )

  def test_rotates_log_of_fine_tuning(self):
    self.config.init = "sft"
    limits = dataclasses.replace(supervise_case.LIMITS, max_log_bytes=8)
    supervisor = self.make(limits, sft_0=[None], trainer_0=[0])
    log = self.workdir / "logs/sft-0.log"

    def write(child):
      if child.name == "trainer-0":
        self.write("result.json", supervise_case.RESULT)
      elif child.name == "sft-0" and log.with_suffix(".log.1").exists():
        child.process.status = 0
      elif child.name == "sft-0":
        log.write_text("x" * 9)

    self.children.on_poll = write
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(log.with_suffix(".log.1").read_text(), "x" * 9)

  def test_failed_fine_tuning_ends_run(self):
    self.config.init = "sft"
    supervisor = self.make(sft_0=[processes.EXIT_FATAL])
    self.assertEqual(self.run_to_end(supervisor, None), 1)
    self.assertEqual(self.children.started, ["sft-0"])
    self.assertIn("last words of sft-0", self.stderr.getvalue())

  def test_restarts_dead_fine_tuning(self):
    self.config.init = "sft"
    supervisor = self.make(sft_0=[-signal.SIGKILL, 75, 0], trainer_0=[0])
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(self.children.started.count("sft-0"), 3)

  def test_refuses_model_of_other_settings(self):
    self.config.init = "sft"
    self.write("sft/settings.json", {"seed": 5})
    supervisor = self.make()
    self.assertEqual(self.run_to_end(supervisor, None), 2)
    self.assertEmpty(self.children.started)
    self.assertIn("made with other settings", self.stderr.getvalue())

  def test_makes_reward_model_after_sft_model(self):
    self.config.init = "sft"
    self.config.reward.backend = "model"
    supervisor = self.make(sft_0=[0], reward_model_0=[75, 0], trainer_0=[0])
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertEqual(
        self.children.started[:4],
        ["sft-0", "reward_model-0", "reward_model-0", "store-0"],
    )

  def test_skips_training_existing_reward_model(self):
    self.config.reward.backend = "model"
    self.config.reward.model = self.create_tempdir().full_path
    supervisor = self.make(trainer_0=[0])
    self.assertEqual(self.run_to_end(supervisor), 0)
    self.assertNotIn("reward_model-0", self.children.started)

  def test_ends_fine_tuning_at_signal(self):
    self.config.init = "sft"
    supervisor = self.make(sft_0=[None])
    self.children.on_poll = lambda child: signal.raise_signal(signal.SIGINT)
    self.assertEqual(self.run_to_end(supervisor, None), 130)
    self.assertEqual(self.children.started, ["sft-0"])


class PythonTest(absltest.TestCase):

  def test_runs_train_program_in_directory(self):
    config = countdown.get_config("smoke")
    workdir = self.create_tempdir()
    with self.mock_supervise() as supervise:
      run = tba_jax.train(config, workdir=workdir)
    supervise.assert_called_once_with(mock.ANY, workdir.full_path, None)
    self.assertEqual(supervise.call_args[0][0].to_dict(), config.to_dict())
    self.assertEqual(run.status, 0)

  def mock_supervise(self, status=0, failure=""):
    return mock.patch.object(
        train, "supervise", autospec=True, return_value=(status, failure)
    )

  def test_failed_run_raises_and_interrupted_run_returns(self):
    config, workdir = countdown.get_config("smoke"), self.create_tempdir()
    with self.mock_supervise(1, "the disk is full"):
      with self.assertRaisesRegex(RuntimeError, "the disk is full"):
        tba_jax.train(config, workdir=workdir)
    with self.mock_supervise(2, "another seed"):
      with self.assertRaisesRegex(ValueError, "another seed"):
        tba_jax.train(config, workdir=workdir)
    with self.mock_supervise(130):
      self.assertEqual(tba_jax.train(config, workdir=workdir).status, 130)

  def test_prints_plain_lines_in_notebook(self):
    config = countdown.get_config("smoke")
    with (
        mock.patch.object(rich.console, "_is_jupyter", return_value=True),
        mock.patch.object(train, "Supervisor", autospec=True) as made,
    ):
      made.return_value.run.return_value = 0
      made.return_value.failure = ""
      tba_jax.train(config, workdir=self.create_tempdir())
      (_, _, console), _ = made.call_args
      self.assertFalse(console.is_jupyter)
      self.assertFalse(console.is_terminal)

  def test_refuses_wrong_setting_before_start(self):
    config = countdown.get_config("smoke")
    config.loss.beta = -1.0
    with self.mock_supervise() as supervise:
      with self.assertRaisesRegex(ValueError, "config.loss.beta"):
        tba_jax.train(config, workdir=self.create_tempdir())
    supervise.assert_not_called()
