# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of worker processes: a faulty reward costs one completion."""

from collections.abc import Sequence
import math
import os
import pathlib
import socket
import subprocess
import threading
from unittest import mock

from absl.testing import parameterized
import ml_collections
import numpy as np
import psutil

from tba_jax.config import settings
from tba_jax.rewards import judges
from tba_jax.rewards import pool as pool_lib
from tba_jax.system import sandbox
from tests.support import waiting


def _request(text: str) -> judges.JudgeRequest:
  return judges.JudgeRequest("train", 5, text)


def _settings(**changes) -> ml_collections.ConfigDict:
  config = settings.get_config().reward
  config.num_workers, config.deadline_s = 1, 20.0
  config.update(changes)
  return config


class PoolTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.events = []
    self.unconfined = []  # Depends on the system.
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.folder.chmod(0o777)  # Workers may have a user of their own.
    self.pool = self.make()

  def make(self, **changes) -> pool_lib.Pool:
    folder = changes.pop("folder", str(self.folder))
    pool = pool_lib.Pool(
        {"name": "trouble", "folder": folder},
        _settings(**changes),
        module="tests.multi_process.reward_trouble",
        on_event=self.on_event,
    )
    self.addCleanup(pool.close)
    return pool

  def on_event(self, kind: str, message: str) -> None:
    if kind == "sandbox_limited":
      self.unconfined.append(message)
    else:
      self.events.append((kind, message))

  def assert_ended(self, started: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(started, timeout=30)
    self.assertEmpty([p for p in alive if p.status() != psutil.STATUS_ZOMBIE])

  def judge(self, *texts: str, pool=None) -> list:
    return (pool or self.pool).judge([_request(text) for text in texts])

  def test_answers_in_order_of_requests(self):
    pool = self.make(num_workers=3)
    result = self.judge(*(f"ok {i}" for i in range(40)), pool=pool)
    self.assertEqual([j.reward for j in result], list(range(40)))
    self.assertEqual(result[7].key, "ok 7")
    self.assertEqual(result[7].parts, {"part": 7.0, "other": 2.0})
    self.assertEqual(
        pool.totals(),
        {
            "completions": 40,
            "failures": {},
            "sums": {"part": 780.0, "other": 80.0},
            "counts": {"part": 40, "other": 40},
        },
    )

  def test_judges_truncated_completion_as_truncated(self):
    asked = [
        judges.JudgeRequest("train", 5, "ok 1", stopped) for stopped in (1, 0)
    ]
    self.assertEqual([j.reward for j in self.pool.judge(asked)], [1.0, 0.25])

  def test_takes_reasons_from_workers(self):
    asked = [_request(text) for text in ("a", "raise", "b")]
    result = self.pool.explain(asked)
    self.assertEqual([result[0], result[2]], ["5: a is wrong", "5: b is wrong"])
    self.assertRegex(
        result[1], r"no reason: error, .*py:\d+: ZeroDivisionError"
    )
    self.assertEqual(self.pool.totals()["failures"], {})

  def test_hanging_explanation_costs_one_deadline(self):
    pool = self.make(deadline_s=3.0)
    result = pool.explain([_request(t) for t in ("a", "hang", "b", "c")])
    self.assertEqual(result[0], "5: a is wrong")
    self.assertIn("no reason: deadline, no answer in 3 s", result[1])
    self.assertEqual(set(result[2:]), {"(no reason: another one was late)"})
    self.assertEqual(self.judge("ok 3", pool=pool)[0].reward, 3.0)

  def test_loses_one_completion_to_trouble(self):
    cases = [
        ("die", "crash", "status 7"),
        ("exit", "crash", "status 0"),
        ("raise", "error", "a bug of the user's"),
        ("named", "refused", "as the task calls it"),
        ("ok nan", "nan", "the reward returned nan"),
        ("nothing", "nan", "returned None"),
    ]
    texts = [text for case in cases for text in ("ok 1", case[0])]
    result = self.judge(*texts)
    rewards = [j.reward for j in result]
    np.testing.assert_array_equal(rewards, [1.0, math.nan] * len(cases))
    self.assertIsNone(result[1].key)
    self.assertEqual(
        self.pool.totals(),
        {
            "completions": 12,
            "failures": {"crash": 2, "error": 1, "refused": 1, "nan": 2},
            "sums": {"part": 6.0, "other": 12.0},
            "counts": {"part": 6, "other": 6},
        },
    )
    said = "\n".join(message for _, message in self.events)
    for judged, (_, cause, message) in zip(result[1::2], cases):
      self.assertEqual(judged.failure, cause)
      self.assertIn(message, said)
    self.assertEqual({kind for kind, _ in self.events}, {"reward_failed"})
    self.assertIn("prompt 5 of 'train'", said)

  def test_ends_hanging_reward_with_its_children(self):
    os.mkfifo(self.folder / "child")
    (self.folder / "child").chmod(0o666)
    pipe = os.open(self.folder / "child", os.O_RDWR)
    self.addCleanup(os.close, pipe)
    pool = self.make(deadline_s=3.0)
    started, names = [], []

    def look() -> None:
      os.read(pipe, 100)  # The worker has started its child.
      started.extend(psutil.Process().children(recursive=True))
      names.extend(process.name() for process in started)

    watcher = threading.Thread(target=look)
    watcher.start()
    result = self.judge("hang_child", "hang", "ok 2", pool=pool)
    watcher.join(30)
    self.assertEqual([j.failure for j in result], ["deadline", "deadline", ""])
    self.assertEqual(result[2].reward, 2.0)
    self.assertEqual(pool.totals()["failures"], {"deadline": 2})
    self.assertIn("sleep", names)
    self.assert_ended([p for p, n in zip(started, names) if n == "sleep"])

  def test_healthy_worker_is_kept(self):
    texts = ("start", "raise", "ok nan", "start", "die", "start")
    first, _, _, second, _, third = self.judge(*texts)
    self.assertEqual(first.reward, second.reward)
    self.assertEqual(first.reward, third.reward)

  def test_nothing_stays_in_memory(self):
    remembers = (
        "exec task.seen = getattr(task, 'seen', 0) + 1; print(task.seen)"
    )
    self.assertEqual(
        [j.key for j in self.judge(remembers, remembers)], ["1\n"] * 2
    )

  def test_reports_threads_before_fork(self):
    pool = self.make(deadline_s=3.0, folder="threads")
    (result,) = self.judge("hang", pool=pool)
    self.assertEqual(result.failure, "deadline")
    self.assertIn("it had 2 threads before it forked", self.events[0][1])

  def test_takes_no_printed_text_for_answer(self):
    result = self.judge("print 4", "ok 5")
    self.assertEqual([j.reward for j in result], [4.0, 5.0])

  def test_long_and_odd_texts_arrive(self):
    text = "é\x00\ud800\n" * 100_000
    (result,) = self.judge("long " + text)
    self.assertEqual(result.reward, len(text))

  def test_bounds_memory(self):
    pool = self.make(memory_mb=1500)
    result = self.judge("memory", "ok 1", pool=pool)
    self.assertEqual([j.failure for j in result], ["error", ""])
    self.assertIn("MemoryError", self.events[0][1])

  def test_loads_task_before_judging(self):
    (result,) = self.judge("prepared")
    self.assertEqual(result.reward, 1.0)

  def test_reports_failed_worker_start(self):
    pool = self.make(folder="none")
    result = self.judge("ok 1", "ok 2", pool=pool)
    self.assertEqual([j.failure for j in result], ["start", "start"])
    self.assertIn("the task cannot be made", self.events[0][1])

  def test_secret_is_out_of_reach(self):
    secret = "5e" * 32
    self.enter_context(
        mock.patch.dict(os.environ, TBA_JAX_SECRET=secret, MINE="1", OTHER="2")
    )
    # Also in the memory of a process that has it, of the same user at first.
    keeper = subprocess.Popen(["sleep", "60"])
    self.addCleanup(keeper.kill)
    result, environment = self.judge(
        f"secret {keeper.pid} {secret}",
        "environment",
        pool=self.make(env_vars="MINE,TBA_JAX_SECRET"),
    )
    names = environment.key.split()
    self.assertContainsSubset(["HOME", "PATH", "MINE"], names)
    self.assertNoCommonElements(["TBA_JAX_SECRET", "OTHER"], names)
    if os.geteuid() == 0:  # Another user may not read it.
      self.assertEqual(result.key, "out of reach")
    self.assertNotEqual(result.key, "in its own environment")

  def test_no_descriptor_is_inherited(self):
    with open(self.folder / "open", "w") as f:
      os.set_inheritable(f.fileno(), True)
      (result,) = self.judge(f"descriptor {f.fileno()}")
    self.assertEqual(result.key, "closed")

  def test_ends_processes_without_end(self):
    if os.geteuid() and not self.judge("ok 1"):
      self.skipTest("needs a limit that holds")
    (result,) = self.judge("fork")
    self.assertLess(result.reward, 1000)
    self.assertEqual(self.judge("ok 1")[0].reward, 1.0)

  def test_ends_process_outside_its_group(self):
    self.assertEqual([j.failure for j in self.judge("leave")], [""])
    left = psutil.Process().children(recursive=True)
    self.assertNotIn("sleep", [p.name() for p in left])

  def test_ends_file_without_end(self):
    (result,) = self.judge("fill")
    self.assertEqual(result.reward, sandbox.MAX_FILE_BYTES)

  def test_disks_cannot_be_filled(self):
    if "disk" in "".join(self.unconfined):
      self.skipTest("neither bubblewrap nor root confines its disks")
    path = self.folder / "outside"
    filled, outside = self.judge("fill_disk .", f"write {path}")
    self.assertBetween(filled.reward, 1 << 26, sandbox.MAX_DISK_BYTES)
    self.assertEqual(outside.failure, "error")
    self.assertFalse(path.exists())

  def test_gives_worker_private_directory_and_removes_it(self):
    (result,) = self.judge("directory")
    home = pathlib.Path(result.key)
    workers = psutil.Process().children(recursive=True)
    views = [pathlib.Path(f"/proc/{p.pid}/root{home}") for p in workers]
    self.assertTrue(any(view.is_dir() for view in views))
    if home.exists():  # In bubblewrap only its own processes can see it.
      self.assertEqual(home.stat().st_mode & 0o077, 0)
    self.pool.close()
    self.assertFalse(home.exists())

  @parameterized.parameters((False, "no network"), (True, "network"))
  def test_reaches_no_network(self, network, key):
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
      pool = self.make(network=network)
      (result,) = self.judge(f"network {port}", pool=pool)
    if not network and result.key == "network":
      self.skipTest("this system does not permit network namespaces")
    self.assertEqual(result.key, key)

  def test_writes_few_events_for_many_failures(self):
    self.judge(*(["raise"] * 9))
    self.assertLen(self.events, 4)  # The first, second, fourth and eighth.
    self.assertEqual(self.pool.totals()["failures"], {"error": 9})

  def test_close_leaves_no_process(self):
    self.judge("ok 1")
    started = psutil.Process().children(recursive=True)
    self.assertNotEmpty(started)
    self.pool.close()
    self.assert_ended(started)

  def test_worker_killed_while_idle_costs_no_completion(self):
    self.judge("ok 1")
    (process,) = psutil.Process().children()
    process.kill()
    waiting.wait_until(lambda: not waiting.is_running(process.pid))
    self.assertEqual(self.judge("ok 2")[0].reward, 2.0)
    self.assertEmpty(self.events)

  def test_closed_worker_starts_no_process(self):
    with self.pool._workers.hold() as worker:
      self.pool.close()
      answer = worker.call(["judge", "train", 5, "ok 1"])
    self.assertEqual(answer["failure"], "start")
    self.assertEmpty(psutil.Process().children())

  def test_default_worker_judges_task_of_ours(self):
    pool = pool_lib.Pool({"name": "arithmetic", "max_number": 3}, _settings())
    self.addCleanup(pool.close)
    result = self.judge("no number", pool=pool)
    self.assertEqual([j.reward for j in result], [0.0])
    self.assertFalse(math.isnan(result[0].reward))
    self.assertEqual(pool.totals()["failures"], {})
