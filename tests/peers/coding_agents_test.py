# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Coding agents, unmodified, as environments that repair files."""

import base64
import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized

from examples import repairs
from tba_jax.tasks import base
from tests.support import episodes

_FILE = pathlib.Path(repairs.__file__)
_NPM = (
    pathlib.Path(os.environ["TBA_JAX_PEER_PYTHON"]).parents[1] / "node_modules"
)
# The first without the scripts of its installation.
_BINARIES = ("opencode-linux-x64/bin", ".bin")
# Tool of each agent that executes a command, its arguments, and a turn that
# ends an episode.
_AGENTS = {
    "MiniSwe": (
        "bash",
        lambda command: {"command": command},
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ),
    "Codex": ("exec_command", lambda command: {"cmd": command}, ""),
    "OpenCode": (
        "bash",
        lambda command: {"command": command, "description": "A command."},
        "",
    ),
}


class CodingAgentsTest(parameterized.TestCase):

  def make(self, agent):
    folders = [f"{_NPM}/{name}" for name in _BINARIES]
    path = ":".join([*folders, os.environ["PATH"]])
    self.enter_context(mock.patch.dict(os.environ, PATH=path))
    self._tool, self._arguments, submit = _AGENTS[agent]
    self.submit = self.call(submit) if submit else "I am done."
    return episodes.make(
        self,
        f"{_FILE}:{agent}",
        max_prompt_tokens=80_000,
        deadline_s=100.0,
        readable=str(_NPM),
    )

  def call(self, command):
    function = {"name": self._tool, "arguments": self._arguments(command)}
    return f"<tool_call>{json.dumps(function)}</tool_call>"

  def write(self, text):
    encoded = base64.b64encode(text.encode()).decode()
    return self.call(f"echo {encoded} | base64 -d > task.py && cat task.py")

  @parameterized.parameters(
      ("MiniSwe", len(repairs.TASKS)), ("Codex", 2), ("OpenCode", 2)
  )
  def test_repairs_files_with_right_turns(self, agent, count):
    found = self.make(agent)
    (prompt,) = found.prompts(base.TRAIN, [0])
    self.assertIsNone(prompt.failure)
    names = [tool["function"]["name"] for tool in prompt.tools]
    self.assertIn(self._tool, names)
    tasks = repairs.TASKS[:count]
    players = [
        [f"I repair it. {self.write(source.format(right))}", self.submit]
        for _, source, right, _, _ in tasks
    ]
    answers, outcomes = episodes.play(found, *players, indices=range(count))
    for task, said, outcome in zip(tasks, answers, outcomes):
      with self.subTest(task[0]):
        self.assertEqual(outcome.failure, "", outcome.message)
        self.assertEqual((outcome.reward, outcome.num_turns), (1.0, 2))
        ((message,),) = map(json.loads, said)
        self.assertIn(task[1].format(task[2]).strip(), message["content"])

  @parameterized.parameters(*_AGENTS)
  def test_rewards_unrepaired_and_unfinished_files(self, agent):
    found = self.make(agent)
    _, source, right, _, _ = repairs.TASKS[0]
    _, (submitted, cut) = episodes.play(
        found,
        [self.submit],
        [self.write(source.format(right)), self.call("ls"), self.call("ls")],
    )
    self.assertEqual((submitted.reward, submitted.failure), (0.0, ""))
    # After `task.max_turns` turns the file counts as it is.
    self.assertEqual((cut.reward, cut.failure), (1.0, ""), cut.message)
    self.assertEqual(cut.num_turns, 3)
