# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluations by Inspect, with a stand-in for its command."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock
import weakref

from absl.testing import absltest
from absl.testing import parameterized
import jax

from tba_jax.learning import checkpoint
from tba_jax.learning import model_source
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import evaluate
from tba_jax.programs import inspect_tasks
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes
from tests.support import chat_model
from tests.support import fake_inspect
from tests.support import serving_case


class InspectTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    model = chat_model.make(cls.folder / "model")
    cls.config = serving_case.make_config(str(model))
    cls.config.sampling.max_prompt_tokens = 32
    cls.command = cls.folder / "inspect"
    cls.command.write_text(
        f'#!/bin/sh\nexec {sys.executable} {fake_inspect.__file__} "$@"\n'
    )
    cls.command.chmod(0o700)
    cls.exam = cls.folder / "exam.py"
    cls.exam.touch()
    cls.workdir = cls.folder / "run"
    # Checkpoints 3 and 5 have params of different signs.
    policy = policy_lib.make_policy(cls.config, cls.workdir)
    mesh = sharding.make_mesh(cls.config.mesh)
    params = model_source.initial_params(cls.config, policy, mesh)
    saver = checkpoint.Checkpointer(f"{cls.workdir}/checkpoints", keep=2)
    for step, sign in ((3, 4), (5, -4)):
      saved = jax.tree.map(lambda x, s=sign: s * x, params)
      state = train_step.init_state(cls.config, policy.model, saved, mesh)
      state = train_step.TrainState(**vars(state) | {"step": state.step + step})
      saver.save(step, state, {"any": 1})
    saver.close()

  def setUp(self):
    super().setUp()
    variable = {inspect_tasks.COMMAND_VARIABLE: str(self.command)}
    self.enterContext(mock.patch.dict(os.environ, variable))
    self.metrics = self.workdir / "metrics.jsonl"
    lines = [{"step": n, "epoch": 2, "train/loss": 0.5} for n in range(6)]
    self.metrics.write_text("".join(map(jsonl.json_line, lines)))

  def run_task(self, name, *operands):
    with contextlib.redirect_stderr(io.StringIO()) as self.shown:
      return inspect_tasks.run(
          self.config, str(self.workdir), operands, f"{self.exam}@{name}"
      )

  def write(self, log):
    path = self.folder / "log.json"
    path.write_text(json.dumps(log))
    return path

  def answers(self, model):
    """Returns the answers in the newest log of a model."""
    path = max((self.workdir / "inspect" / model).glob("*.json"))
    return [s["output"] for s in json.loads(path.read_text())["samples"]]

  def test_scores_are_recorded_at_steps_of_checkpoints(self):
    scores = {
        "good/samples": 2,
        "good/errors": 0,
        "good/match/accuracy": 0.5,
        "good/match/accuracy_stderr": 0.25,
    }
    results = self.run_task("good", "3", "5")
    self.assertEqual(results, {"checkpoint 3": scores, "checkpoint 5": scores})
    self.assertIn("running good\n", self.shown.getvalue())
    records = metrics.last_per_step(jsonl.read_jsonl(self.metrics))
    self.assertEqual([record["step"] for record in records], [*range(6)])
    recorded = [r for r in records if "inspect/good/match/accuracy" in r]
    self.assertEqual([record["step"] for record in recorded], [2, 4])
    for record in recorded:
      # The step's own metrics stay.
      self.assertEqual(record["train/loss"], 0.5)
      self.assertContainsSubset(
          {f"inspect/{key}": value for key, value in scores.items()}, record
      )
    # Each checkpoint has answered, and the newest is the default.
    first, second = map(self.answers, ("checkpoint-3", "checkpoint-5"))
    self.assertNotEqual(first, second)
    self.assertEqual(list(self.run_task("good")), ["checkpoint 5"])
    self.assertEqual(self.answers("checkpoint-5"), second)

  def test_one_checkpoint_at_a_time_is_in_memory(self):
    leaves, alive, load = [], [], evaluate.load_source

    def load_source(*args):
      alive.append([leaf() is not None for leaf in leaves])
      source = load(*args)
      leaves.append(weakref.ref(jax.tree.leaves(source[2])[0]))
      return source

    with mock.patch.object(evaluate, "load_source", load_source):
      self.run_task("good", "3", "5")
    self.assertEqual(alive, [[], [False]])

  def test_run_in_bucket_is_held(self):
    lock = run_directory.lock(str(self.workdir))
    self.addCleanup(os.close, lock)
    place = bucket.place

    def place_metrics(path):
      is_metrics = path.name == "metrics.jsonl"
      return "gs://bucket/metrics.jsonl" if is_metrics else place(path)

    with mock.patch.object(bucket, "place", place_metrics):
      with self.assertRaisesRegex(ValueError, "already runs there"):
        self.run_task("good", "3")

  def test_model_without_chat_template_is_reported(self):
    template = self.folder / "model" / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    self.addCleanup(template.write_text, text)
    with self.assertRaisesRegex(ValueError, "checkpoint 3 must have a chat te"):
      self.run_task("good", "3")

  def test_run_in_progress_is_evaluated_and_left_as_it_is(self):
    unfinished = self.workdir / "checkpoints" / "7.orbax-checkpoint-tmp"
    unfinished.mkdir()
    self.addCleanup(unfinished.rmdir)
    lock = run_directory.lock(str(self.workdir))
    self.addCleanup(os.close, lock)
    self.assertEqual(list(self.run_task("good")), ["checkpoint 5"])
    self.assertTrue(unfinished.exists())
    self.assertFalse((self.workdir / "serve").exists())

  @parameterized.parameters(
      ("failed", "status error, 0 of 0 samples done: the sandbox is gone"),
      ("unwritten", "ended with status 1: .*there is no task unwritten"),
  )
  def test_failure_is_reported_and_not_recorded(self, name, cause):
    before = self.metrics.read_bytes()
    message = f"(?s)--inspect=.*@{name}: checkpoint 3 has no scores: .*{cause}"
    with self.assertRaisesRegex(subprocess.SubprocessError, message):
      self.run_task(name, "3")
    self.assertEqual(self.metrics.read_bytes(), before)

  @parameterized.parameters(
      ("cancelled", "status cancelled, 0 of 0 samples done: no scores"),
      ("partial", "status success, 1 of 2 samples done: no room for the"),
      ("empty", "status success, 0 of 2 samples done: no room for the"),
      ("unscored", "status success, 2 of 2 samples done: no scores"),
      ("nan", "has no metric that is a number"),
  )
  def test_log_of_failure_has_no_scores(self, name, cause):
    with self.assertRaisesRegex(ValueError, cause):
      inspect_tasks.read_scores(self.write(fake_inspect.log_of(name)))

  def test_quiet_command_is_ended(self):
    self.config = self.config.copy_and_resolve_references()
    self.config.evaluate.deadline_s = 1.0
    children = processes.descendants(os.getpid())
    message = "made no call for 1 s, config.evaluate.deadline_s, after 0"
    with self.assertRaisesRegex(subprocess.SubprocessError, message):
      self.run_task("quiet", "3")
    self.assertEqual(processes.descendants(os.getpid()), children)

  @parameterized.parameters(
      ("", "must begin with a task"),
      ("--limit 5", "must begin with a task"),
      ("nowhere.py@exam", "there is no file nowhere.py"),
      ("{exam}@good 'x", "No closing quotation"),
      ("{exam}@good --model=openai/gpt", "must leave out --model=openai/gpt"),
  )
  def test_wrong_arguments_are_reported_before_loading(self, text, message):
    text = text.format(exam=self.exam)
    stderr = self.enterContext(contextlib.redirect_stderr(io.StringIO()))
    with (
        mock.patch.object(evaluate, "load_source") as load,
        mock.patch.object(processes, "prepare_compiling"),
    ):
      status = evaluate.run_evaluate(
          self.config, str(self.workdir), ["3", f"--inspect={text}"]
      )
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn(message, stderr.getvalue())
    load.assert_not_called()

  @parameterized.parameters(
      ("4", {}, "no checkpoint 4"),
      ("3", {"TBA_JAX_INSPECT": "/no/inspect"}, "pip install inspect-ai"),
      ("3", {"TBA_JAX_INSPECT": "", "PATH": "/no"}, "not on the PATH; pip"),
  )
  def test_missing_parts_are_reported_before_loading(
      self, operand, environment, message
  ):
    self.enterContext(mock.patch.dict(os.environ, environment))
    load = self.enterContext(mock.patch.object(evaluate, "load_source"))
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      self.run_task("good", operand)
    load.assert_not_called()

  def test_tolerated_errors_are_counted(self):
    log = fake_inspect.log_of("partial")
    log["eval"]["config"]["fail_on_error"] = 0.5
    scores = inspect_tasks.read_scores(self.write(log))
    counts = scores["partial/samples"], scores["partial/errors"]
    self.assertEqual(counts, (1, 1))
    self.assertEqual(scores["partial/match/accuracy"], 0.5)


if __name__ == "__main__":
  absltest.main()
