# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of a Python program that ends, is killed and begins again."""

import os
import pathlib
import signal
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import pytest

import tba_jax
from tba_jax.system import jsonl
from tests.programs import api_test
from tests.support import chat_model
from tests.support import fake_hub
from tests.support import harness
from tests.support import waiting

_PROGRAM = """
import pathlib, sys, time
import tba_jax
from tests.programs import api_test

model, workdir, wait = sys.argv[1:]
bonus = 0.25

def near(completions, answer, **kwargs):
  return [bonus + (c == a) for c, a in zip(completions, answer)]

run = tba_jax.train(
    model=model, data=api_test._DATA, reward=near, workdir=workdir,
    wait=wait == "wait",
    **{**api_test.SMALL, "num_steps": 500, "checkpoint.every_steps": 2})
while not list(pathlib.Path(workdir, "checkpoints").glob("[0-9]*")):
  time.sleep(0.2)
raise ValueError("a bug of the program")
"""


def near(completions, answer, **kwargs):
  return [0.25 + (c == a) for c, a in zip(completions, answer)]


class PythonRunsTest(absltest.TestCase):

  @pytest.mark.timeout(900)
  def test_run_outlives_kill_and_error_of_its_program(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.workdir, self.model = folder / "run", chat_model.make(folder / "model")
    killed = self.start("wait")
    waiting.wait_until(
        lambda: self.checkpoints(), "no checkpoint was written", 300.0
    )
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    reached = max(self.checkpoints())
    config = jsonl.read_json(self.workdir / "config.json")["config"]
    self.assertTrue(os.path.exists(config["task"]["rewards"].split(":")[0]))
    self.check_shell_is_refused()

    # It continues, and is saved when an error ends the program.
    failed = self.start("live")
    self.assertEqual(failed.wait(), 1, failed.text())
    self.assertIn("ValueError: a bug of the program", failed.text())
    events = jsonl.read_jsonl(self.workdir / "events.jsonl")
    self.assertIn("signal", [event["kind"] for event in events])
    self.assertFalse(os.path.exists(config["task"]["rewards"].split(":")[0]))
    saved = max(self.checkpoints())
    self.assertGreaterEqual(saved, reached)

    run = tba_jax.train(
        model=self.model,
        data=api_test._DATA,
        reward=near,
        workdir=self.workdir,
        **{
            **api_test.SMALL,
            "num_steps": saved + 20,
            "checkpoint.every_steps": 2,
        },
    )
    self.assertEqual(run.status, 0)
    self.assertEqual(list(run.metrics["step"]), [*range(saved + 20)])
    self.assertGreaterEqual(run.metrics["reward/near"].min(), 0.25)
    self.assertEqual(run.evaluate()["step"], saved + 20)
    hub = fake_hub.FakeHub()
    self.addCleanup(hub.close)
    endpoint = "huggingface_hub.constants.ENDPOINT"
    self.enter_context(mock.patch(endpoint, hub.url))
    self.enter_context(mock.patch.dict(os.environ, NO_PROXY="127.0.0.1"))
    run.push_to_hub("me/near", token="hf_mine")
    self.assertIn("model.safetensors", hub.models["me/near"])

  def start(self, mode):
    argv = [sys.executable, "-c", _PROGRAM, str(self.model)]
    return harness.Process(
        [*argv, str(self.workdir), mode], self.workdir.parent / f"{mode}.txt"
    )

  def checkpoints(self):
    folder = self.workdir / "checkpoints"
    return [int(p.name) for p in folder.glob("[0-9]*") if p.name.isdigit()]

  def check_shell_is_refused(self):
    process = subprocess.run(
        harness.command("evaluate", self.workdir),
        capture_output=True, text=True, check=False, env=harness.environment(),
    )  # fmt: skip
    self.assertEqual(process.returncode, 2)
    self.assertIn("near is a function of a Python program", process.stderr)
    # Nothing of an export is judged.
    out = self.workdir.parent / "exported"
    process = subprocess.run(
        harness.command("export", self.workdir, str(out)),
        capture_output=True, text=True, check=False, env=harness.environment(),
    )  # fmt: skip
    self.assertTrue((out / "config.json").exists(), process.stderr)
