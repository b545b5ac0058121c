# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""All programs train by `loop.run`."""

import ast
import json
import pathlib
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
import pytest

import tba_jax
from tba_jax import loop
from tba_jax.chat_api import strict_json
from tba_jax.config import load
from tba_jax.programs import inline
from tba_jax.programs import one_process
from tba_jax.programs import replica
from tba_jax.programs import roles
from tba_jax.programs import sft
from tba_jax.run import run_directory
from tba_jax.serving import kinds
from tba_jax.serving import schemas
from tba_jax.serving import served_models
from tba_jax.serving import served_replay
from tba_jax.system import processes
from tba_jax.tools import rerun as replay
from tba_jax.tools import sweep

_ROOT = pathlib.Path(__file__).parents[1]
_OVERRIDES = (
    "init=scratch",
    "train.num_steps=2",
    "evaluate.every_steps=0",
    "evaluate.final_prompts=4",
    "evaluate.num_completions=1",
    "checkpoint.keep_journal=True",
    "search.num_searchers=1",
)


class _Reached(Exception):
  """Raised instead of training."""


def _make_config(*overrides):
  return load.load_config(
      "configs/arithmetic.py:smoke", [*_OVERRIDES, *overrides]
  )


@pytest.mark.slow
@pytest.mark.timeout(300)
class OneLoopTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    for module, name in (
        (processes, "pin"),
        (processes, "prepare_compiling"),
    ):
      self.enterContext(mock.patch.object(module, name))
    # Searchers may be compiling when the trainer ends.
    self.enterContext(mock.patch.object(one_process, "_LEAVE_S", 100.0))
    self.enterContext(
        mock.patch.object(
            processes, "start_role", lambda role: threading.Event()
        )
    )

  def assert_reached(self, program, *args):
    with mock.patch.object(loop, "run", side_effect=_Reached):
      with self.assertRaises(_Reached):
        program(*args)

  def test_run_and_its_replay(self):
    config = _make_config()
    run_directory.create(self.workdir, config)
    self.assert_reached(one_process.run, config, self.workdir, ())
    self.assertEqual(one_process.run(config, self.workdir, ()), 0)
    self.assert_reached(replay.run, None, self.workdir, ["0"])

  def test_run_without_directory(self):
    self.assert_reached(tba_jax.train, _make_config())

  def test_trainer_alone(self):
    config = _make_config()
    run_directory.create(self.workdir, config)
    # Same trainer as in a single-process run, with another channel.
    with mock.patch.object(roles, "train", side_effect=_Reached):
      with self.assertRaises(_Reached):
        roles.run_trainer(config, self.workdir, ())
      with self.assertRaises(_Reached):
        one_process.run(config, self.workdir, ())

  def test_other_processes_of_trainer(self):
    follower = replica.Replica(mock.Mock(), mock.MagicMock())
    self.assert_reached(follower, lambda: False)

  def test_stages_before_run(self):
    config = _make_config("init=sft")
    run = lambda: sft.run(config, self.workdir, stop=threading.Event())
    self.assert_reached(run)

  def test_sweep_and_benchmarks(self):
    config = _make_config("sweep.objectives=tb: loss.name=tb")
    first, *_ = sweep.expand_runs(config)
    bench = sweep.Bench(config, "")
    self.addCleanup(bench.close)
    self.assert_reached(bench.run, first)
    made = bench.loops.make(first.lag.apply(first.config), "tb")
    self.assertIsInstance(made, inline.Loop)
    self.assert_reached(made.train)


class ServerTest(absltest.TestCase):

  def test_replay_of_server(self):
    body = {
        "prompts_per_batch": 1,
        "completions_per_prompt": 2,
        "num_steps": 1,
        "adam_params": {"learning_rate": 0.01},
    }
    body |= {"session_id": "s", "replay_seq_id": 0, "base_model": "m"}
    replay = served_replay.ServedReplay(
        _make_config(),
        strict_json.read(schemas.CreateReplay, body),
        mock.Mock(),
    )
    served = served_models.ServedModel(mock.Mock(num_steps=0), None, replay)
    with mock.patch.object(loop, "run", side_effect=_Reached):
      with self.assertRaises(_Reached):
        served.execute(kinds.TRAIN, b"{}")


class StepsTest(absltest.TestCase):

  def test_nothing_else_takes_steps(self):
    """Only the loop steps learners, and only learners step a state."""
    files = [*(_ROOT / "tba_jax").rglob("*.py")]
    result = {"step": set(), "train": set()}
    for path in files:
      for node in ast.walk(ast.parse(path.read_text())):
        match node:
          case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            words = ast.unparse(owner).lower()
            if (name, words.rpartition(".")[2].strip("_")) in (
                ("step", "learner"),
                ("train", "work"),
            ):
              result[name].add(path.relative_to(_ROOT / "tba_jax").as_posix())
    self.assertEqual(result["step"], {"loop.py"})
    self.assertEqual(
        result["train"],
        {"learning/learner.py", "programs/replica.py", "tools/rerun.py"},
    )
    colabs = [
        line
        for path in (_ROOT / "colabs").glob("*.ipynb")
        for cell in json.loads(path.read_text())["cells"]
        for line in cell["source"]
    ]
    self.assertFalse([line for line in colabs if "learner.step(" in line])
