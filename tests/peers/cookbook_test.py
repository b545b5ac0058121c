# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Tinker cookbook, as they are, train on this server."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
import numpy as np

from tests.peers import chat_server

_RL = "tinker_cookbook.recipes.math_rl.train"
_SUPERVISED = "tinker_cookbook.recipes.chat_sl.train"
_REWARD = "env/all/reward/total"
_RECIPE_S = 270.0


class CookbookTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.server = chat_server.start(cls, cls.workdir)

  def run_recipe(self, recipe, name, **arguments):
    """Returns the lines of a recipe's metrics."""
    folder = self.workdir / name
    arguments = {
        "base_url": self.server.url,
        "model_name": self.server.model,
        "log_path": folder,
        **arguments,
    }
    ended = subprocess.run(
        [
            *(sys.executable, "-m", recipe),
            *(f"{key}={value}" for key, value in arguments.items()),
        ],
        env=os.environ
        | {"TINKER_API_KEY": self.server.key, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RECIPE_S,
    )
    self.assertEqual(ended.returncode, 0, ended.stdout[-5000:])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def test_arithmetic_raises_its_reward(self):
    metrics = self.run_recipe(
        _RL,
        "rl",
        renderer_name="qwen3_instruct",
        loss_fn="importance_sampling",
        groups_per_batch=16,
        learning_rate=1e-2,
        max_steps=8,
        max_tokens=2,
    )
    # 0.1 of it is for answers that end, which the model learns at once.
    rewards = [m[_REWARD] for m in metrics if _REWARD in m]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    self.assertLen(rewards, 8)
    self.assertGreater(rewards[-1], rewards[0] + 0.01)

  def test_supervised_from_file_and_on_from_its_checkpoint(self):
    rng = np.random.default_rng(0)
    file = self.workdir / "conversations.jsonl"
    with file.open("w") as out:
      for a, b in rng.integers(0, 101, (256, 2)):
        messages = [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": str(a + b)},
        ]
        out.write(json.dumps({"messages": messages}) + "\n")
    metrics = self.run_recipe(
        _SUPERVISED,
        "supervised",
        renderer_name="qwen3_instruct",
        dataset=file,
        batch_size=32,
        num_epochs=3,
        learning_rate=1e-2,
    )
    nlls = [m["train_mean_nll"] for m in metrics if "train_mean_nll" in m]
    print(f"nats a token {nlls[0]:.3f} -> {nlls[-1]:.3f}")
    self.assertLess(nlls[-1], nlls[0] - 0.5)

    checkpoints = (self.workdir / "supervised/checkpoints.jsonl").read_text()
    state = json.loads(checkpoints.splitlines()[-1])["state_path"]
    # The renderer is the one that the checkpoint's run was made with.
    ended = {
        name: self.run_recipe(
            _RL,
            name,
            **given,
            loss_fn="importance_sampling",
            groups_per_batch=64,
            max_steps=1,
        )[0]["env/all/format"]
        for name, given in {
            "before": {"renderer_name": "qwen3_instruct"},
            "on": {"load_checkpoint_path": state},
        }.items()
    }
    print(f"answers that end {ended['before']:.3f} -> {ended['on']:.3f}")
    # Equal shares of 256 answers each differ by less in 19 of 20 runs.
    self.assertGreater(ended["on"], ended["before"] + 0.08)
