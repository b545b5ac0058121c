# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What reward code cannot do, as root and as an ordinary user."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl.testing import parameterized
import datasets
import psutil

from tba_jax.system import sandbox
from tests.support import ordinary_user

_SECRET = "5e" * 32
_BWRAP = shutil.which("bwrap")
_BROKEN = "#!/bin/sh\necho 'bwrap: no permissions' >&2\nexit 1\n"
# Before 0.7 it cannot limit the size of a directory.
_OLD = f'#!/bin/sh\n[ "$1" = --help ] && exit\nexec {_BWRAP} "$@"\n'
# Reads a file beside it, and the user's key.
_REWARDS = """
import pathlib
def words(*_):
  return float(pathlib.Path(__file__).with_name("words.txt").read_text())
def leak(*_):
  try:
    return float(bool(pathlib.Path({key!r}).read_text()))
  except OSError:
    return 0.0
if __name__ == "__main__":
  print(2)
"""


class Confined(parameterized.TestCase):
  """Judges in a pool as root or an ordinary user, in a project of its own."""

  deadline_s = 60.0

  def setUp(self):
    super().setUp()
    root = self.enter_context(tempfile.TemporaryDirectory())
    self.root = pathlib.Path(root)
    self.root.chmod(0o755)
    self.home = self.root / "home"
    self.project = self.home / "project"
    self.workdir = self.project / "runs" / "mine"
    (self.workdir / "spool").mkdir(parents=True)
    (self.project / "data").mkdir()
    self.secrets = [
        self.home / "key",
        self.workdir / "spool" / "secret",
        self.project / ".env",
    ]
    for path in self.secrets:
      path.write_text(_SECRET)
      path.chmod(0o600)
    (self.project / "data" / "rows.txt").write_text("a row")
    self.task = {}
    self.folder = self.project  # The run starts in it.
    self.programs = self.root / "bin"
    self.programs.mkdir()
    (self.programs / "sleep").symlink_to(shutil.which("sleep"))

  def install(self, bubblewrap: str) -> None:
    """Puts no bwrap, the system's or a script of that content on the PATH."""
    path = self.programs / "bwrap"
    self.bubblewrap = bubblewrap
    if bubblewrap in ("system", _OLD) and _BWRAP is None:
      self.skipTest("needs bubblewrap")
    if bubblewrap == "system":
      path.symlink_to(_BWRAP)
    elif bubblewrap:
      path.write_text(bubblewrap)
      path.chmod(0o755)

  def start(self, user: str, *texts: str) -> subprocess.Popen:
    request = json.dumps(
        {
            "texts": texts,
            "workdir": str(self.workdir),
            "readable": str(self.programs),
            "task": self.task,
            "deadline_s": self.deadline_s,
        }
    )
    return self.run_python(user, "tests.multi_process.confined_run", request)

  def run_python(self, user: str, *words: str) -> subprocess.Popen:
    words = [sys.executable, "-m", *words]
    if user == "root" and os.geteuid():
      self.skipTest("needs root")
    if user == "ordinary":
      ordinary_user.give(self.home)
      try:
        words = ordinary_user.command(words)
      except ordinary_user.NotPossibleError as error:
        self.skipTest(str(error))
      trial = [_BWRAP, "--ro-bind", "/", "/", "--unshare-pid", "true"]
      if self.bubblewrap in ("system", _OLD) and subprocess.call(
          ordinary_user.command(trial)
      ):
        self.skipTest("this system forbids bubblewrap to ordinary users")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HOME": str(self.home),
        "PATH": str(self.programs),
        "PYTHONPATH": str(ordinary_user.CHECKOUT),
        "TBA_JAX_SECRET": _SECRET,
    }
    process = subprocess.Popen(
        # By their paths: PATH is that of the programs to find.
        [shutil.which(words[0]), *(shutil.which(w) if w == "setpriv" else w
                                   for w in words[1:])],
        cwd=self.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    self.addCleanup(process.communicate, timeout=60)
    self.addCleanup(process.kill)
    return process

  def judge(self, user: str, *texts: str) -> tuple[list[Any], str]:
    """Returns the answers, and the message of what is not confined."""
    process = self.start(user, *texts)
    out, err = process.communicate(timeout=600)
    self.assertEqual(process.returncode, 0, err)
    result = json.loads(out)
    messages = [m for kind, m in result["events"] if kind == "sandbox_limited"]
    self.assertLessEqual(len(messages), 1)
    return result["answers"], "".join(messages)

  def keys(self, user: str, *texts: str) -> tuple[list[str | None], str]:
    answers, message = self.judge(user, *texts)
    self.assertEqual([failure for _, _, failure in answers], [""] * len(texts))
    return [key for _, key, _ in answers], message


class ConfinementTest(Confined):

  @parameterized.product(
      user=("ordinary", "root"), bubblewrap=("system", "", _BROKEN)
  )
  def test_hides_secrets(self, user, bubblewrap):
    self.install(bubblewrap)
    texts = [f"read {path}" for path in self.secrets]
    texts += [f"read {self.project}/data/rows.txt", "read data/rows.txt"]
    (*seen, row, relative), message = self.keys(user, *texts)
    if "read your files" in message:
      self.assertEqual(seen, [_SECRET] * 3)
    else:
      self.assertEqual(seen, ["out of reach"] * 3)
    # Its own directory is another one.
    self.assertEqual([row, relative], ["a row", "out of reach"])
    if bubblewrap == "system":
      self.assertEqual(message, "")
    elif user == "ordinary":
      self.assertIn("reward code can read your files, change files", message)
      cause = "no permissions" if bubblewrap else "apt-get install bubblewrap"
      self.assertIn(cause, message)

  @parameterized.product(
      user=("ordinary", "root"),
      bubblewrap=("system", ""),
      folder=("home", "home/project"),
  )
  def test_reads_files_of_task(self, user, bubblewrap, folder):
    self.install(bubblewrap)
    self.folder = self.root / folder
    rewards = _REWARDS.format(key=str(self.home / "key"))
    (self.folder / "in_folder.py").write_text(rewards)
    beside = self.home / "beside"
    beside.mkdir()
    (beside / "mine.py").write_text(rewards)
    (beside / "words.txt").write_text("0.5")
    row = json.dumps({"prompt": "p", "answer": "a"})
    (self.home / "rows.jsonl").write_text(row)
    # The hub's cache has links to files elsewhere in it.
    cached = self.home / ".cache/huggingface/hub/datasets--org--rows"
    for name in ("refs", "blobs", "snapshots/abc"):
      (cached / name).mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc" / "README.md").write_text("Rows")
    (cached / "blobs" / "1").write_text(row.replace('"p"', '"q"'))
    link = cached / "snapshots" / "abc" / "test.jsonl"
    link.symlink_to("../../blobs/1")
    self.task = {
        "name": "custom",
        "train": "~/rows.jsonl",
        "test": "org/rows[test]",
        "rewards": "~/beside/mine.py:words, in_folder:leak * 10",
        "verifier": f"{sys.executable} ~/beside/mine.py",
    }
    (answer,), message = self.judge(user, "x")
    is_open = "read your files" in message
    self.assertEqual(answer, [0.5 + 2 + 10 * is_open, "x", ""])

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_reads_prepared_data_of_hub(self, user, bubblewrap):
    self.install(bubblewrap)
    rows = self.root / "rows"
    rows.mkdir()
    for split in ("train", "test"):
      row = json.dumps({"prompt": split, "answer": split})
      (rows / f"{split}.jsonl").write_text(row)
    builder = datasets.load_dataset_builder(
        str(rows), cache_dir=str(self.root / "other")
    )
    builder.dataset_name = "rows"
    cache = self.home / ".cache/huggingface/datasets"
    builder.download_and_prepare(str(cache / "org___rows/default/0.0.0/0a1b"))
    source = "org/rows[{}]".format
    self.task = {
        "name": "custom",
        "train": source("train"),
        "test": source("test"),
    }
    (answer,), _ = self.judge(user, "train")
    self.assertEqual(answer, [1.0, "train", ""])

  @parameterized.parameters("system", "")
  def test_plan_names_limits_of_confinement(self, bubblewrap):
    self.install(bubblewrap)
    config = ordinary_user.CHECKOUT / "configs" / "arithmetic.py"
    process = self.run_python(
        "ordinary", "tba_jax.main", "--program=plan",
        f"--config={config}:smoke", "--config.reward.backend=pool",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    self.assertEqual(process.returncode, 0, err)
    told = "warning: reward code can read your files, change files" in out
    self.assertEqual(told, not bubblewrap)

  @parameterized.product(
      user=("ordinary", "root"), bubblewrap=("system", "", _OLD)
  )
  def test_writes_to_no_disk(self, user, bubblewrap):
    self.install(bubblewrap)
    outside = [self.home / "outside", self.project / "data" / "outside"]
    texts = [f"write {path}" for path in outside]
    if bubblewrap == "system":
      texts += ["fill_disk .", "fill_disk /tmp", "fill_disk /dev/shm"]
    answers, message = self.judge(user, *texts)
    is_confined = "change files" not in message
    self.assertEqual([p.exists() for p in outside], [not is_confined] * 2)
    for reward, _, failure in answers[2:]:
      self.assertEqual(failure, "")
      self.assertBetween(reward, 1 << 26, sandbox.MAX_DISK_BYTES)
    self.assertEqual("fill the memory" in message, bubblewrap == _OLD)
    if user == "ordinary":
      self.assertEqual(is_confined, bool(bubblewrap))

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_sees_no_other_process(self, user, bubblewrap):
    self.install(bubblewrap)
    texts = ["signal {own}", "signal {child}", f"secret {{own}} {_SECRET}"]
    seen, message = self.keys(user, *texts)
    if "end your processes" in message:
      self.assertEqual((user, bubblewrap), ("ordinary", ""))
      self.assertEqual(seen[:2], ["reached", "reached"])
    else:
      self.assertEqual(seen, ["out of reach"] * 3)
    ((forks, _, _), (count, _, _)), _ = self.judge(user, "fork", "processes")
    self.assertLess(forks, 1000)
    if bubblewrap:
      self.assertLess(count, 5)

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_reaches_no_network(self, user, bubblewrap):
    self.install(bubblewrap)
    seen, message = self.keys(user, "network {port}", "abstract {name}")
    if "use the network" in message:
      self.assertEqual(bubblewrap, "")
    else:
      self.assertEqual(seen, ["no network"] * 2)

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_all_processes_end_with_caller(self, user, bubblewrap):
    self.install(bubblewrap)
    os.mkfifo(self.project / "data" / "child")
    (self.project / "data" / "child").chmod(0o666)
    pipe = os.open(self.project / "data" / "child", os.O_RDWR | os.O_NONBLOCK)
    self.addCleanup(os.close, pipe)
    process = self.start(user, "hang_child")
    deadline, told = time.monotonic() + 60, b""
    while not told and process.poll() is None and time.monotonic() < deadline:
      time.sleep(0.05)
      try:
        told = os.read(pipe, 100)
      except BlockingIOError:
        continue
    self.assertNotEmpty(told, "it did not start")
    started = psutil.Process(process.pid).children(recursive=True)
    started.append(psutil.Process(process.pid))
    (asks,) = (
        p
        for p in started
        if "tests.multi_process.confined_run" in p.cmdline()
        and p.name() not in ("bwrap", "setpriv")
    )
    of_pool = asks.children(recursive=True)
    child = [p for p in asks.children() if p.name() == "sleep"]
    self.assertIn("sleep", [p.name() for p in of_pool if p not in child])
    asks.send_signal(signal.SIGKILL)
    for p in child:  # It is none of the pool's.
      p.kill()
    _, alive = psutil.wait_procs(of_pool, timeout=30)
    alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    names = [p.name() for p in alive]
    for p in alive:
      p.kill()
    self.assertEqual(names, [])
