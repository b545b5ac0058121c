# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of Inspect on a checkpoint of a run, and their curve in its report.

`TBA_JAX_PEER_PYTHON` is an interpreter with Inspect, which this process lacks.
"""

import json
import os
import pathlib
import subprocess
import tempfile

from absl.testing import absltest

from tests.support import chat_model
from tests.support import harness

_TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import Score, accuracy, match, scorer, stderr

@scorer(metrics=[accuracy(), stderr()])
def answered():
  async def score(state, target):
    return Score(value=float(bool(state.output.completion)))
  return score

@scorer(metrics=[accuracy()])
def broken():
  async def score(state, target):
    raise RuntimeError("the scorer is broken")
  return score

@task
def exam():
  return Task(json_dataset("rows.jsonl"), scorer=[match(), answered()])

@task
def unscorable():
  return Task(json_dataset("rows.jsonl"), scorer=broken())
"""
_ROWS = [{"input": f"{n}+{n}=", "target": str(2 * n)} for n in range(6)]


class InspectTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.workdir = cls.folder / "run"
    cls.tasks = cls.folder / "exam.py"
    cls.tasks.write_text(_TASKS)
    rows = cls.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    settings = {
        "init": chat_model.make(cls.folder / "model"),
        "train.num_steps": 2,
        "sampling.max_prompt_tokens": 32,
    }
    program = harness.command(
        "train",
        cls.workdir,
        config="configs/arithmetic.py:smoke",
        overrides=settings,
    )
    ended = cls.run_program(program)
    assert not ended.returncode, ended.stdout[-5000:]

  @classmethod
  def run_program(cls, program):
    command = pathlib.Path(os.environ["TBA_JAX_PEER_PYTHON"]).with_name(
        "inspect"
    )
    return subprocess.run(
        program,
        env=harness.environment(TBA_JAX_INSPECT=str(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )

  def evaluate(self, arguments):
    return self.run_program(
        harness.command("evaluate", self.workdir, f"--inspect={arguments}")
    )

  def test_scores_enter_report(self):
    ended = self.evaluate(f"{self.tasks}@exam --limit 4 --temperature 0")
    self.assertEqual(ended.returncode, 0, ended.stdout[-5000:])
    self.assertIn("checkpoint 2: exam/answered/accuracy 1", ended.stdout)
    last = harness.lines(self.workdir / "metrics.jsonl")[-1]
    self.assertEqual(last["step"], 1)
    self.assertContainsSubset(
        {
            "inspect/exam/samples": 4,
            "inspect/exam/errors": 0,
            "inspect/exam/answered/accuracy": 1.0,
            "inspect/exam/answered/accuracy_stderr": 0.0,
            "inspect/exam/match/accuracy": 0.0,
        },
        last,
    )
    logs = self.workdir / "inspect" / "checkpoint-2"
    (log,) = logs.glob("*_exam_*.json")
    model = json.loads(log.read_text())["eval"]["model"]
    self.assertEqual(model, "openai-api/tba_jax/checkpoint-2")
    for program in ("report", "verify"):
      ended = self.run_program(harness.command(program, self.workdir))
      self.assertEqual(ended.returncode, 0, ended.stdout[-5000:])
    report = (self.workdir / "report.html").read_text()
    self.assertIn("inspect/exam/answered/accuracy", report)

  def test_failures_have_causes(self):
    for arguments, cause in (
        (f"{self.tasks}@unscorable", "the scorer is broken"),
        (f"{self.tasks}@missing", "missing"),
        (f"{self.tasks}@exam --limit x --epochs y", "Invalid value"),
    ):
      ended = self.evaluate(arguments)
      self.assertNotEqual(ended.returncode, 0, ended.stdout[-5000:])
      error = ended.stdout[ended.stdout.rindex("error: ") :]
      self.assertIn("checkpoint 2 has no scores", error)
      self.assertIn(cause, error)


if __name__ == "__main__":
  absltest.main()
