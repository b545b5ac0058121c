# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run or a server writes is for its user alone, whatever the umask."""

from collections.abc import Mapping, Sequence
import pathlib
import stat
import subprocess
import tempfile
import urllib.request

from absl.testing import absltest

from tba_jax.system import processes
from tests.support import harness
from tests.support import waiting

_CONFIG = "configs/arithmetic.py:smoke"
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 6,
    "checkpoint.every_steps": 3,
    "evaluate.every_steps": 3,
    "evaluate.num_prompts": 4,
    "evaluate.final_prompts": 4,
    "reward.backend": "pool",
    "reward.num_workers": 1,
}


class ModesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Short: sockets are in it.
    root = self.enter_context(tempfile.TemporaryDirectory(prefix="tba_m_"))
    self.root = pathlib.Path(root)
    self.workdir = self.root / "runs" / "mine"
    for name in ("tmp", "cache"):
      (self.root / name).mkdir()

  def options(self, umask: int) -> dict[str, object]:
    return {
        "cwd": harness.ROOT,
        "env": harness.environment(
            TMPDIR=str(self.root / "tmp"),
            XDG_CACHE_HOME=str(self.root / "cache"),
        ),
        "umask": umask,
    }

  def run_program(
      self,
      umask: int,
      program: str,
      *operands: str,
      config: str = "",
      overrides: Mapping[str, object] | None = None,
  ) -> None:
    process = subprocess.run(
        harness.command(
            program,
            self.workdir,
            *operands,
            config=config,
            overrides=overrides,
        ),
        **self.options(umask),
        capture_output=True,
        text=True,
        timeout=300,
    )
    self.assertEqual(process.returncode, 0, process.stdout + process.stderr)

  def assert_private(self, *folders: pathlib.Path) -> Sequence[pathlib.Path]:
    paths = [path for folder in folders for path in folder.rglob("*")]
    open_ = {
        str(path): oct(status.st_mode)
        for path in paths
        if not stat.S_ISLNK((status := path.lstat()).st_mode)
        and status.st_mode & 0o077
    }
    self.assertEqual(open_, {})
    return paths

  def test_run(self):
    spool = self.root / "spool"
    # It hides nothing.
    umask = 0o000
    self.run_program(
        umask,
        "train",
        config=_CONFIG,
        overrides={**_OVERRIDES, "store.spool_dir": spool},
    )
    for program in ("evaluate", "export", "report"):
      self.run_program(umask, program)
    paths = self.assert_private(
        self.root / "runs", self.root / "tmp", self.root / "cache", spool
    )
    self.assertContainsSubset(
        "config.json eval.json metrics.jsonl samples.jsonl report.html"
        " model.safetensors".split(),
        [path.name for path in paths],
    )
    # A folder that the user names is as the user makes files.
    for umask in (0o000, 0o022):
      named = self.root / f"named_{umask}"
      self.run_program(umask, "export", str(named))
      for path in named.iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        self.assertEqual(mode, 0o666 & ~umask, path)

  def test_server(self):
    port = processes.free_port()
    log = self.root / "log"
    command = harness.command(
        "serve",
        self.workdir,
        config="configs/serve.py:smoke",
        overrides={"serve.port": port},
    )
    with log.open("w") as out:
      server = subprocess.Popen(
          command, **self.options(umask=0o000), stdout=out, stderr=out
      )
    self.addCleanup(server.wait, 60)
    self.addCleanup(server.terminate)
    waiting.wait_until(
        lambda: "\nkey " in log.read_text(),
        log.read_text,
        180.0,
        is_lost=lambda: server.poll() is not None,
    )
    key = log.read_text().split("\nkey ")[1].strip()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1/create_session",
        b'{"tags": ["a"], "sdk_version": "1"}',
        {"X-API-Key": key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
      self.assertEqual(answer.status, 200)
    paths = self.assert_private(
        self.root / "runs", self.root / "tmp", self.root / "cache"
    )
    self.assertIn("key", [path.name for path in paths])
