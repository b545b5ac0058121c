# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The evaluate program: its sources, its file and its errors."""

import contextlib
import io
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import pytest
import rich.console

from tba_jax.config import variants
from tba_jax.learning import checkpoint
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import evaluate
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.system import processes
from tests.support import tiny_model

arithmetic = variants.import_config("configs/arithmetic.py")


def make_workdir(config, workdir):
  """Makes an SFT model, and checkpoints: 3 holds it, 5 holds zeros."""
  policy = policy_lib.make_policy(config, workdir, scratch=True)
  # Large, so that distributions are far from even.
  params = jax.tree.map(lambda x: 4 * x, tiny_model.init_params(policy.model))
  folder = policy_lib.sft_folder(workdir)
  hf.save(folder, policy.model.config, params, policy.tokenizer)
  mesh = sharding.make_mesh(config.mesh)
  checkpointer = checkpoint.Checkpointer(f"{workdir}/checkpoints", keep=2)
  zeros = jax.tree.map(jnp.zeros_like, params)
  for step, saved in ((3, params), (5, zeros)):
    state = train_step.init_state(config, policy.model, saved, mesh)
    state = train_step.TrainState(**{**vars(state), "step": state.step + step})
    checkpointer.save(step, state, {"any": 1})
  checkpointer.close()


def without_time(result):
  """Returns what two evaluations of the same params share."""
  drop = ("time", "step", "version", "samples")
  return {k: v for k, v in result.items() if k not in drop}


@pytest.mark.slow
class EvaluateTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = arithmetic.get_config("smoke")
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.workdir = os.path.join(cls.directory, "run")
    make_workdir(cls.config, cls.workdir)
    cls.folder = f"{cls.workdir}/sft/model"
    cls.found = evaluate.run(cls.config, cls.workdir, ["3", cls.folder])

  def read(self):
    return jsonl.read_json(f"{self.workdir}/eval.json")

  def test_evaluates_each_source(self):
    first, second = self.found.values()
    self.assertEqual(list(self.found), ["checkpoint 3", self.folder])
    # The same params by another way.
    self.assertEqual(without_time(first), without_time(second))
    self.assertEqual((first["step"], second["step"]), (3, None))
    self.assertEqual(first["num_prompts"], 16)
    # The newest: params of zeros draw tokens evenly.
    newest = evaluate.run(self.config, self.workdir, [])["checkpoint 5"]
    self.assertEqual(newest["step"], 5)
    self.assertNotEqual(newest["mean_length"], first["mean_length"])

  def test_reports_progress(self):
    told = io.StringIO()
    with mock.patch.object(evaluate, "SHOW_EVERY_S", 0.0):
      with contextlib.redirect_stderr(told):
        evaluate.run(self.config, self.workdir, ["3"])
    self.assertIn("evaluated 16/16 prompts\n", told.getvalue())

  def test_run_of_more_devices_than_are_here(self):
    config = self.config.copy_and_resolve_references()
    config.mesh.data = 2 * jax.device_count()
    actual = evaluate.run(config, self.workdir, ["3"])["checkpoint 3"]
    expected = without_time(self.found["checkpoint 3"])
    self.assertEqual(without_time(actual), expected)

  def test_adds_to_existing_results(self):
    others = {
        "before": {"pass_at_1": 0.25},
        "after": {"pass_at_1": 0.5},
        "history": [{"step": 0, "pass_at_1": 0.25}],
        "evaluate": {"elsewhere": {"pass_at_1": 0.125}},
    }
    jsonl.atomic_write_json(f"{self.workdir}/eval.json", others)
    evaluate.run(self.config, self.workdir, ["3"])
    first = self.read()
    evaluate.run(self.config, self.workdir, ["5"])
    saved = self.read()
    sources = saved.pop("evaluate")
    self.assertEqual(
        set(sources), {"elsewhere", "checkpoint 3", "checkpoint 5"}
    )
    self.assertEqual(sources["checkpoint 3"], first["evaluate"]["checkpoint 3"])
    del others["evaluate"]
    self.assertEqual(saved, others)

  def test_file_of_another_shape_is_refused_before_work(self):
    path = pathlib.Path(self.workdir, "eval.json")
    for value in ("[1]", '{"evaluate": 5}'):
      path.write_text(value)
      with mock.patch.object(evaluate, "load_source") as load:
        with self.assertRaisesRegex(ValueError, "eval.json: damaged"):
          evaluate.run(self.config, self.workdir, ["3"])
      load.assert_not_called()
      self.assertEqual(path.read_text(), value)
    path.unlink()

  def test_limits_prompts_to_split_size(self):
    config = self.config.copy_and_resolve_references()
    config.evaluate.final_prompts = 10_000
    result = evaluate.run(config, self.workdir, ["3"])["checkpoint 3"]
    self.assertEqual(result["num_prompts"], 39)

  def test_wrong_sources_are_named_and_lock_is_freed(self):
    for operand, message in (
        ("no/such/folder", "'no/such/folder': must be"),
        ("4", "no checkpoint 4"),
        (self.directory, "no tokenizer there"),
    ):
      with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
        evaluate.run(self.config, self.workdir, [operand])
    os.close(run_directory.lock(self.workdir))

  def test_sources_are_checked_before_work(self):
    for operand, message in (
        ("no/such/folder", "'no/such/folder': must be"),
        ("4", "no checkpoint 4"),
    ):
      with mock.patch.object(evaluate, "load_source") as load:
        with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
          evaluate.run(self.config, self.workdir, ["3", operand])
      load.assert_not_called()

  def test_failing_source_keeps_earlier_results(self):
    evaluate_one = evaluate.evaluate_source
    results = [mock.DEFAULT, ValueError("is broken")]
    with mock.patch.object(
        evaluate, "evaluate_source", side_effect=results, wraps=evaluate_one
    ):
      with self.assertRaisesRegex(ValueError, "is broken"):
        evaluate.run(self.config, self.workdir, ["5", "3"])
    saved = self.read()["evaluate"]["checkpoint 5"]
    self.assertGreater(saved["time"], self.found["checkpoint 3"]["time"])

  def test_refuses_workdir_without_checkpoints(self):
    empty = self.create_tempdir().full_path
    with self.assertRaisesRegex(ValueError, "there is no checkpoint"):
      evaluate.run(self.config, empty, [])
    self.assertFalse(pathlib.Path(empty, "checkpoints").exists())

  def test_workdir_in_use_is_refused(self):
    lock = run_directory.lock(self.workdir)
    try:
      with self.assertRaisesRegex(ValueError, "already runs there"):
        evaluate.run(self.config, self.workdir, ["3"])
    finally:
      os.close(lock)

  def test_exit_status(self):
    with mock.patch.object(processes, "prepare_compiling"):
      status = evaluate.run_evaluate(self.config, self.workdir, ["nowhere"])
      self.assertEqual(status, processes.EXIT_CONFIG)
      status = evaluate.run_evaluate(self.config, self.workdir, ["3"])
      self.assertEqual(status, processes.EXIT_OK)


class TableTest(absltest.TestCase):

  def test_shows_each_source_with_its_errors(self):
    result = {
        "num_prompts": 7,
        "k": 4,
        "pass_at_1": 0.25,
        "pass_at_1_interval": (0.1875, 0.3125),
        "confidence": 0.95,
        "samples": [
            {
                "prompt": "1+1=",
                "completion": "\x1b[31m2",
                "reward": 0.0,
                "reason": "gives \x1b[31m2, not 3",
            }
        ],
        "pass_at_k": 0.75,
        "distinct_correct": 1.5,
        "mean_length": 12.0,
        "stop_rate": 1.0,
    }
    table = evaluate.make_table({"a": result, "b": result})
    console = rich.console.Console(width=120)
    with console.capture() as capture:
      console.print(table)
    text = capture.get()
    self.assertIn("7 held-out prompts, k = 4", text)
    self.assertIn("intervals of 95%", text)
    self.assertEqual(text.count("0.250 (0.188 to 0.312)"), 2)
    self.assertEqual(text.count("0.750"), 2)
    self.assertNotIn("KL", text)
    self.assertNotIn("not judged", text)
    odd = {**result, "reward_failures": {"deadline": 3, "nan": 1}}
    odd |= {"no_verdict": {"exit": 2}, "new_kinds/reward/digits": 0.125}
    with console.capture() as capture:
      console.print(evaluate.make_table({"a": result, "b": odd}))
    odd = " ".join(capture.get().split())
    self.assertIn("completions not judged │ - │ 4 (3 deadline, 1 nan)", odd)
    self.assertIn("comparisons without a verdict │ - │ 2 (2 exit)", odd)
    self.assertIn("new kinds: reward, digits │ - │ 0.125", odd)
    self.assertEqual(text.count("12.000"), 2)
    with console.capture() as capture:
      console.print(evaluate.make_samples({"a": result}))
    text = capture.get()
    self.assertIn("1+1=", text)
    self.assertIn("gives ␛[31m2, not 3", text)
    self.assertNotIn("\x1b[31m2", text)  # Made visible, not obeyed.
