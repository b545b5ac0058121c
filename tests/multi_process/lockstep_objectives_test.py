# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""At staleness 0 objectives have the bits of the single-process loop.

Those that differ from one of these in a function of the batch alone are left to
`tests/losses` and `tests/learning/objectives_test.py`.

Store, trainer and searcher are processes of their own. Trainer and searcher
play their roles in one run after the other; each run has a store of its own.
"""

import contextlib
import itertools
import json
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import parameterized
import numpy as np

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tests.support import harness

_SETTINGS = {
    "init": "scratch",
    "train.num_steps": 5,
    "search.lockstep": "true",
    "search.lead_steps": 0,
    "checkpoint.every_steps": 2,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 8,
    "evaluate.batch_prompts": 8,
    "loss.ratio_clip": 0.2,
    "loss.missing_stop": "replace",
}
# What an objective holds for some steps must outlive an interruption, which
# comes at the second of these steps or a little later.
_INTERRUPTED = {"train.num_steps": 12}
_OWN = {
    "ppo": {
        "loss.correction": "decoupled",
        "loss.proximal_every_steps": 2,
        **_INTERRUPTED,
    }
}
_CHANGES = {
    # Its values come from the rewards of a file, which are as they stand.
    "a_star_po": {"loss.missing_stop": "keep"},
    # Its own correction reads no clip.
    "flowrl": {"loss.ratio_clip": 0.0},
}
_OF_VALUES = ("ppo", "subtb", "flowrl")
_DEADLINE_S = 120.0
# Residuals with and without values, reference and file; policy gradients with
# and without values; pairs; the best alone.
_NAMES = (
    "tb", "subtb", "oapl", "ema_tb", "a_star_po", "flowrl", "grpo", "ppo",
    "online_dpo", "best_of_n",
)  # fmt: skip


class _Server:
  """A `role_server`, and the file with what it logs."""

  def __init__(self, folder: str, name: str, core: str):
    self.log = pathlib.Path(folder) / f"{name}.log"
    with self.log.open("wb") as log:
      self.process = subprocess.Popen(
          [sys.executable, "-m", "tests.multi_process.role_server", core],
          cwd=harness.ROOT,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          text=True,
      )

  def start(self, *command: str) -> None:
    self.process.stdin.write(" ".join(command) + "\n")
    self.process.stdin.flush()

  def status(self) -> int:
    stdout = self.process.stdout
    ready, _, _ = select.select([stdout], [], [], _DEADLINE_S)
    line = stdout.readline() if ready else "no answer"
    if not ready:
      # It writes where its threads are.
      self.process.send_signal(signal.SIGABRT)
      self.process.wait()
    if not line.startswith("status "):
      raise AssertionError(f"ended: {line}\n{self.text()}")
    return int(line.split()[1])

  def text(self) -> str:
    return self.log.read_text()[-10000:]

  def close(self) -> None:
    self.process.kill()
    self.process.wait()
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.close()
    self.process.stdout.close()


class LockstepObjectivesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = folder.name
    cores = [str(core) for core in processes.available_cores()]
    names = cores[:2] if len(cores) > 1 else ["", ""]
    cls.trainer, cls.searcher = (
        _Server(cls.folder, role, core)
        for role, core in zip(("trainer", "searcher"), names)
    )
    cls.addClassCleanup(cls.trainer.close)
    cls.addClassCleanup(cls.searcher.close)

  def make_run(self, name: str, **changes: float) -> str:
    workdir = f"{self.folder}/{'-'.join([name, *changes])}"
    settings = {**_SETTINGS, "loss.name": name, **_OWN.get(name, {})}
    settings |= _CHANGES.get(name, {}) | changes
    if name == "a_star_po":
      settings["loss.baseline_file"] = self.write_values()
    config = load.load_config(
        harness.CONFIG, [f"{k}={v}" for k, v in settings.items()]
    )
    validate.validate(config)
    run_directory.create(workdir, config)
    return workdir

  def write_values(self) -> str:
    """Returns a file with a reward for each training prompt."""
    task = task_table.make_task(load.load_config(harness.CONFIG, []).task)
    lines = [
        json.dumps(
            {
                "prompt": task.prompt(base.TRAIN, i),
                "completion": "1",
                "reward": i % 2,
            }
        )
        for i in range(task.num_prompts(base.TRAIN))
    ]
    path = pathlib.Path(self.folder) / "values.jsonl"
    path.write_text("\n".join(lines))
    return str(path)

  def start_store(self, workdir: str) -> None:
    store = harness.Process(
        harness.command("store", workdir), pathlib.Path(workdir) / "store.log"
    )
    self.addCleanup(store.close)

  def train(self, workdir: str, *, interrupted: bool) -> None:
    if interrupted:
      # SIGTERM between two checkpoints; the trainer lets the searcher go.
      self.start_both(workdir)
      deadline = time.monotonic() + _DEADLINE_S
      while not self.steps_of(workdir)[1:]:
        self.assertLess(time.monotonic(), deadline, self.trainer.text())
        time.sleep(0.02)
      self.trainer.process.send_signal(signal.SIGTERM)
      self.assert_ended(processes.EXIT_INTERRUPTED)
    # The store still has the goodbye of the trainer that was interrupted.
    self.start_both(workdir)
    self.assert_ended(processes.EXIT_OK)

  def start_both(self, workdir: str) -> None:
    self.searcher.start("searcher", workdir)
    self.trainer.start("trainer", workdir)

  def assert_ended(self, status: int) -> None:
    self.assertEqual(self.trainer.status(), status, self.trainer.text())
    self.assertEqual(self.searcher.status(), status, self.searcher.text())

  def steps_of(self, workdir: str) -> list[dict]:
    path = pathlib.Path(workdir) / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [r for r in records if "train/loss" in r]

  def assert_same_bits(self, workdir: str, num_steps: int) -> None:
    out = f"{workdir}/single.npz"
    self.trainer.start("single", workdir, out)
    self.assertEqual(self.trainer.status(), 0, self.trainer.text())
    actual = harness.params_of(workdir, num_steps)
    expected = dict(np.load(out, allow_pickle=False))
    self.assertCountEqual(actual, expected)
    for name, leaf in expected.items():
      self.assertTrue(np.isfinite(leaf).all(), name)
      np.testing.assert_array_equal(actual[name], leaf, err_msg=name)
    self.found = actual

  params: dict[str, dict[str, np.ndarray]] = {}

  @parameterized.parameters(*_NAMES)
  def test_equals_single_process_bit_for_bit(self, name):
    workdir = self.make_run(name)
    self.start_store(workdir)
    self.train(workdir, interrupted=name in _OWN)
    steps = self.steps_of(workdir)
    num_steps = _OWN.get(name, _SETTINGS)["train.num_steps"]
    self.assertEqual({r["step"] for r in steps}, set(range(num_steps)))
    for record in steps:
      self.assertEqual(list(record["replay/staleness_histogram"]), ["0"])
      if name in _OF_VALUES:
        self.assertGreater(record["train/value_grad_norm"], 0.0)
    self.assert_same_bits(workdir, num_steps)
    # Equal bits are no accident: other objectives end elsewhere.
    self.params[name] = self.found
    for one, other in itertools.combinations(self.params.values(), 2):
      same = [np.array_equal(one[leaf], other[leaf]) for leaf in one]
      self.assertFalse(all(same))

  def test_equals_single_process_bit_for_bit_with_adapters(self):
    workdir = self.make_run("tb", **{"lora.rank": 2}, **_INTERRUPTED)
    self.start_store(workdir)
    self.train(workdir, interrupted=True)
    self.assert_same_bits(workdir, _INTERRUPTED["train.num_steps"])
    for name in self.found:
      self.assertRegex(name, r"\['[ab]'\]$")
