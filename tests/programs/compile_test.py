# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `compile` program: a tiny config for a slice that is not here."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIG = "--config=configs/arithmetic.py:smoke"


def run(*args: str) -> subprocess.CompletedProcess:
  """Runs the program in a process, which makes JAX's backends but once."""
  return subprocess.run(
      [sys.executable, "-m", "tba_jax.main", "--program=compile", *args],
      cwd=_ROOT,
      env={**os.environ, "COLUMNS": "80"},
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
  )


@absltest.skipIf(
    importlib.util.find_spec("libtpu") is None,
    "libtpu (650 MB) is not installed: pip install 'tba_jax[tpu]'",
)
class CompileTest(absltest.TestCase):

  def test_every_program_of_a_tiny_config(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    sizes = ("mesh.fsdp=4", "mesh.tensor=2", "sharding.vocab=",
             "reward.where=model")  # fmt: skip
    done = run(
        *(_CONFIG, f"--workdir={workdir}", "--config.init=scratch"),
        *(f"--config.{size}" for size in sizes),
        *("v5e:2x4", "v5e:2x2"),
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    found = json.loads((workdir / "compile.json").read_text())
    self.assertEqual(
        found["topology"], {"trainer": "v5e:2x4", "searcher": "v5e:2x2"}
    )
    names = ["train_step", "reference", "publish", "prefill", "decode_chunk",
             "reward_model"]  # fmt: skip
    self.assertEqual(list(found["programs"]), names)
    held = found["held"]["searcher"]
    # A copy of the policy for each, and less its head for the reward model.
    self.assertBetween(held["reward_model"] / held["params"], 0.8, 1.0)
    for name, program in found["programs"].items():
      self.assertIn(name, done.stdout)
      self.assertTrue(program["fits"])
      self.assertGreater(program["argument_bytes"], 0)
      # What the role holds counts, whoever's argument it is.
      role = "trainer" if name in names[:3] else "searcher"
      self.assertGreaterEqual(
          program["peak_bytes"], sum(found["held"][role].values())
      )
      # Only the trainer's params are split.
      split = name in ("train_step", "reference", "publish")
      self.assertEqual(program["collective_bytes"] > 0, split)
      self.assertEqual(program["flops"] > 0, name != "publish")
      self.assertIn("ENTRY", (workdir / "hlo" / f"{name}.txt").read_text())
    # The state is updated in place.
    self.assertGreater(found["programs"]["train_step"]["alias_bytes"], 0)

  def test_what_does_not_divide_is_refused(self):
    done = run(_CONFIG, "--config.init=scratch", "--config.mesh.tensor=4")
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, "config.mesh.*(.|\n)*config.sharding")


if __name__ == "__main__":
  absltest.main()
