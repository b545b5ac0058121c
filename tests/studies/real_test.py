# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a real model: its clock, its table and its configs."""

import json
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized

from benchmarks import peak_memory
from benchmarks import results
from studies.real import real
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.replay import prompt_order
from tba_jax.tasks import task_table

instructions = variants.import_config("configs/instructions.py")


class RealTest(parameterized.TestCase):

  def test_keeps_run_of_claims_and_tabulates_it(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = instructions.get_config("smoke")
    config.init = "scratch"
    sample = {"prompt": "p", "completion": "c", "reward": 0.0}
    evaluated = {
        **dict.fromkeys(("mean_reward", "kl", "mean_length", "stop_rate"), 0.1),
        **{"distinct_share": 0.9, "k": 8, "mean_reward_interval": [0.0, 0.2]},
        **{"pass_at_1": 0.1, "pass_at_k": 0.5, "reward/case": 0.3},
        **{"distinct_correct_per_solved": 1.5, "samples": [sample] * 8},
    }
    trained = {"step_s": [0.0, 4.0, 6.0], "first_end": 0.0, "kept": [1, 3]}
    for name, value in (
        ("_RUNS", folder / "runs"),
        ("RESULTS", folder / "results"),
        ("_train_ours", lambda *_: trained),
        ("_evaluate", lambda config, folder, sources: [evaluated] * 3),
    ):
      self.enter_context(mock.patch.object(real, name, value))
    real.run(config, ["5", "1", "ours_tb"])
    (kept,) = results.read_rows(folder / "results")
    self.assertEqual((kept["name"], kept["seed"]), ("ours_tb", 5))
    self.assertEqual((kept["k"], kept["pass_at_k"]), (8, [0.5] * 3))
    self.assertEqual(kept["seconds"], [0.0, 0.0, 10.0])
    self.assertGreater(kept["memory_gb"]["trainer"][1], 0)
    _, _, row = (folder / "results/levels.md").read_text().splitlines()
    self.assertIn("| ours_tb | 5 | 0.100, end | 0.2 | 3 | 0.10 |", row)
    # It is there already; of a longer run it is not.
    with mock.patch.object(real, "measure_run", return_value=kept) as measure:
      real.run(config, ["5", "1", "ours_tb"])
      measure.assert_not_called()
      real.run(config, ["5", "2", "ours_tb"])
      measure.assert_called_once()

  def test_reads_memory_of_role(self):
    path = pathlib.Path(self.create_tempdir().full_path) / "peaks.json"
    code = "b = bytearray(50_000_000); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, "tba_jax.system.role", "trainer-0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
      child.stdout.readline()
      with peak_memory.PeakMemory(path) as memory:
        pass
      child.communicate(b"\n")
    self.assertBetween(memory.of_roles["trainer"], 50e6, 80e6)
    self.assertGreaterEqual(memory.peak_bytes, memory.of_roles["trainer"])
    self.assertEqual(set(memory.of_roles), {"trainer"})
    # Peaks of earlier processes come from the file.
    with peak_memory.PeakMemory(path) as later:
      pass
    self.assertEqual(later.of_roles, memory.of_roles)

  def test_plans_memory_of_roles_by_shapes(self):
    config = instructions.get_config("smoke")
    config.init = "scratch"
    planned = real.planned_bytes(config)
    config.run.processes = "one"
    self.assertEqual(
        real.planned_bytes(config), {"trainer": sum(planned.values())}
    )
    self.assertGreater(min(planned.values()), 0)

  def test_times_steps_without_saves_and_starts(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.assertEqual(real.step_seconds(folder), [])
    (folder / "spans").mkdir()
    # The second process redoes step 2.
    steps = [(0, 100.0, 1), (1, 110.0, 1), (2, 123.0, 1), (2, 400.0, 2),
             (3, 410.0, 2)]  # fmt: skip
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "time": t, "epoch": e, "train/loss": 0.0})
            + "\n"
            for s, t, e in steps
        )
    )
    span = {"kind": "checkpoint", "t0": 405.0, "t1": 407.0}
    (folder / "spans/trainer-0.jsonl").write_text(json.dumps(span) + "\n")
    self.assertEqual(real.step_seconds(folder), [0.0, 10.0, 9.0, 8.0])

  @parameterized.parameters(*real.OURS)
  def test_makes_valid_configs_with_saved_params(self, name):
    config = real.make_config(instructions.get_config("smoke"), name, 7, 2.0)
    config.init = "scratch"
    validate.validate(config)
    self.assertEqual(config.seed, 7)
    if not name.startswith("ours_lag"):
      self.assertEqual(config.checkpoint.every_s, 30.0)
    rates = config.optimizer
    self.assertEqual(rates.learning_rate, rates.learning_rate_final)

  def test_refuses_run_without_final_params(self):
    folder = pathlib.Path(self.create_tempdir())
    for name in ("init", "10", "2", "25.orbax-checkpoint-tmp"):
      (folder / "checkpoints" / name).mkdir(parents=True)
    self.assertEqual(real.kept_steps(folder, 10), [2, 10])
    with self.assertRaisesRegex(RuntimeError, "its last step, 25, were not"):
      real.kept_steps(folder, 25)

  def test_runs_of_claims_differ_in_objective_or_lag(self):
    whole = instructions.get_config()
    make = lambda name: real.make_config(whole, name, 0, 8.0)
    self.assertEqual(make("ours_tb").loss.to_dict(), whole.loss.to_dict())
    self.assertEqual(make("ours_grpo").loss.name, "grpo")
    by_reward = (
        "ours",
        "ours_double_rate",
        "ours_bounded_double_rate",
        "ours_lora",
    )
    for name in (name for name in real.OURS if name not in by_reward):
      config = make(name)
      self.assertEqual(config.evaluate.num_completions, 8)
      is_lag = name.startswith("ours_lag")
      self.assertEqual(config.checkpoint.every_s, 0 if is_lag else 120.0)
      self.assertEqual(config.search.lockstep, is_lag, name)
    config = make("ours_lag16")
    self.assertEqual(config.search.lead_steps, 16)
    self.assertEqual(config.loss.to_dict(), whole.loss.to_dict())
    bounded = make("ours_lag16_bounded")
    self.assertEqual(bounded.loss.correction, "bounded_sequence")
    self.assertEqual(bounded.search.lead_steps, 16)
    # A step has the prompts of one step alone.
    self.assertEqual(config.search.prompts_per_step, 2)
    self.assertEqual(config.train.num_steps, 160)
    self.assertEqual(config.replay.recent_window_steps, 1)

  def test_gives_trl_prompts_and_sizes_of_ours(self):
    config = real.make_config(instructions.get_config(), "grpo_kl", 3, 25.0)
    settings = real.peer_settings(config, "grpo_kl", 25.0)
    task = task_table.make_task(config.task)
    order = prompt_order.PromptOrder(task.num_prompts("train"), seed=3)
    for i in range(5):
      prompt_id, _ = order.prompt(i)
      self.assertEqual(settings["prompt_ids"][i], prompt_id)
      ((message,),) = settings["prompts"][i : i + 1]
      self.assertEqual(message["content"], task.prompt("train", prompt_id))
    self.assertEqual(settings["prompts_per_batch"], 4)
    self.assertEqual(settings["completions_per_prompt"], 8)
    self.assertEqual(settings["beta"], 0.02)
    self.assertEqual(settings["limit_s"], 1500.0)
