# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of the benchmarks that start no run, each at its smallest size.

tests/multi_process/benchmarks_test.py has those that start processes of runs.
"""

import functools
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import pytest

from benchmarks import decode
from benchmarks import decode_lengths
from benchmarks import delta
from benchmarks import environments
from benchmarks import objectives
from benchmarks import probe
from benchmarks import publish
from benchmarks import publish_links
from benchmarks import replay
from benchmarks import store_queue
from benchmarks import train_step
from tba_jax.config import load
from tba_jax.models.hf import hf
from tests.support import base_config
from tests.support import harness
from tests.support import tiny_model

_CONFIG = tiny_model.make_config()
_MODEL = tiny_model.make_model(num_layers=1).config
_SIZES = {"B": 2, "K": 3, "P": 4, "T": 5}
_MAKE_CHECKPOINT = """
import pathlib, shutil, sys
assert sys.argv[2:] == ["llama", "30m"], sys.argv
model = pathlib.Path(__file__).with_name("model")
shutil.copytree(model, sys.argv[1], dirs_exist_ok=True)
"""
_TRAIN_TORCH = """
import functools
import json, pathlib, sys
assert (pathlib.Path(sys.argv[1]) / "config.json").exists()
assert sys.argv[2:] == ["2", "3", "4", "5"], sys.argv
print("a warning of some library")
print(json.dumps({"tokens_per_s": 8.0}))
"""


class SmokeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Peers are compared with by hand; a test has none, or its own.
    before = os.environ.pop(train_step.PEERS_VARIABLE, None)
    self.addCleanup(self._set_peers, before)

  def _set_peers(self, folder):
    os.environ.pop(train_step.PEERS_VARIABLE, None)
    if folder is not None:
      os.environ[train_step.PEERS_VARIABLE] = str(folder)

  def test_decodes_fixed_lengths(self):
    work = decode.Work(2, 2, 3, 5, runs=1, model=_MODEL)
    out = decode.run(_CONFIG, ["1"], work)
    self.assertEqual(out["rows"], 4)
    # Whole and prefill are timed apart: on a busy machine the steps' own time,
    # their difference, may even be below 0.
    whole_s = 4 * 5 / out["tokens_per_s"]
    first_s = 2 * 3 / out["prefill_tokens_per_s"]
    self.assertGreater(min(whole_s, first_s), 0)
    steps_s = 4 * 4 / out["steps_tokens_per_s"]
    self.assertAlmostEqual(steps_s, whole_s - first_s)
    self.assertNotIn("ratio", out)

  def test_decodes_drawn_lengths(self):
    work = decode_lengths.Work(2, 4, 4, 3, 8, stop_ids=4, model=_MODEL)
    out = decode_lengths.run(_CONFIG, ["1"], work)
    self.assertEqual(out["completions"], 8)
    self.assertBetween(out["mean_length"], 1, 8)
    self.assertGreater(out["tokens_per_s"], 0)

  @pytest.mark.slow
  def test_times_delta_net_and_attention(self):
    with mock.patch.object(delta, "ROWS", ((2, 8, 8),)):
      (row,) = delta.run(_CONFIG, [])["rows"]
    self.assertEqual(row["tokens"], 24)
    self.assertGreater(min(row["delta"], row["attention"]), 0)

  @pytest.mark.slow
  def test_decodes_while_environments_sleep(self):
    work = environments.Work(4, 3, 8, 32, slowness=2.0, model=_MODEL)
    out = environments.run(_CONFIG, ["1"], work)
    self.assertEqual(out["waiting"], 8)
    self.assertGreater(out["sleep_s"], 0)
    self.assertGreater(out["ratio"], 0)
    self.assertGreater(out["ratio_by_round"], 0)

  def test_best_ratio_falls_with_environment_cost(self):
    work = environments.Work(4, 3, 8, 32, slowness=2.0)
    best, costly = (environments.best_ratios(work, cost, 20) for cost in (0, 1))
    self.assertBetween(best["ratio"], 0.8, 1)
    self.assertLess(costly["ratio"], 0.8 * best["ratio"])
    self.assertLess(best["ratio_to_the_end"], best["ratio"])
    few = environments.best_ratios(work, 0, 2)
    self.assertLess(few["ratio_to_the_end"], best["ratio_to_the_end"])

  @pytest.mark.slow
  def test_times_objective_with_two_networks(self):
    work = objectives.Work((2, 2, 3, 4), 1, model=_MODEL)
    out = objectives.run(_CONFIG, ["ppo", "gkd"], work)
    for times in out["objectives"].values():
      self.assertEqual(times["networks"], 2)
      self.assertAlmostEqual(
          times["ratio"], times["step_s"] / 2 / times["tb_step_s"]
      )
    ratios = [times["ratio"] for times in out["objectives"].values()]
    self.assertEqual(out["max_ratio"], max(ratios))

  def test_plans_memory_of_step(self):
    work = objectives.Work(
        memory_shape=(1, 2, 3, 4), memory_vocab=64, model=_MODEL
    )
    out = objectives.run(_CONFIG, ["memory"], work)
    self.assertEqual(out["all_logits_bytes"], 4 * 2 * 4 * 64)
    # Params, two moments, and the batch.
    self.assertGreater(out["argument_bytes"], 12 * out["num_params"])
    self.assertGreater(out["temporary_bytes"], 0)

  def test_asks_both_sides_for_probe(self):
    out = probe.run(load.load_config("configs/arithmetic.py:smoke"), ["1"])
    self.assertLess(out["gap"], out["limit"])
    self.assertGreater(min(out["trainer_ms"], out["searcher_ms"]), 0)

  def test_publishes_by_each_carrier_and_leaves_out_sizes_without_room(self):
    out = publish.run(base_config.make(), ["1", "100000000"])
    self.assertEqual(out["left_out_mb"], [100000000])
    self.assertLen(out["rows"], 4)
    for row in out["rows"]:
      self.assertEqual(row["mb"], 1)
      for name in ("publish", "pull"):
        self.assertGreater(row[f"{name}_s"], 0)
        self.assertAlmostEqual(
            row[f"{name}_of_copy"], row["copy_s"] / row[f"{name}_s"]
        )

  def test_follows_versions_over_links(self):
    simulate = functools.partial(
        publish_links.simulate,
        trainer_bytes_per_s=10e9,
        searcher_bytes_per_s=5e9,
        pack_bytes_per_s=20e9,
    )
    alone = simulate(10e9, 1, step_s=100.0)
    # Half a second to pack it, two on the searcher's link.
    self.assertAlmostEqual(alone["pull_s"], 2.0)
    self.assertAlmostEqual(alone["age_s"], 2.5)
    self.assertAlmostEqual(alone["used"], 1.0, delta=0.05)
    # Four share the trainer's link, of which two processes have one each.
    self.assertAlmostEqual(simulate(10e9, 4, step_s=100.0)["pull_s"], 4.0)
    both = simulate(10e9, 4, step_s=100.0, num_processes=2)
    self.assertAlmostEqual(both["pull_s"], 2.0)
    # A pull that takes two steps leaves versions out.
    busy = simulate(10e9, 4, step_s=2.0)
    self.assertAlmostEqual(busy["used"], 0.5, delta=0.05)
    self.assertAlmostEqual(busy["age_s"], 4.5)

  def test_inserts_and_draws_at_two_sizes(self):
    out = replay.run(_CONFIG, [], sizes=(100, 2_000), rounds=3)
    for part in ("insert", "draw", "total"):
      small, large = out[f"{part}_us"].values()
      self.assertAlmostEqual(out[f"{part}_ratio"], large / small, places=2)
    self.assertEqual(set(out["total_us"]), {"100", "2000"})

  @pytest.mark.slow
  def test_measures_store_and_cleans_up(self):
    # A short path, for sockets.
    with tempfile.TemporaryDirectory(prefix="tba-") as name:
      folder = pathlib.Path(name)
      out = harness.run_benchmark(
          folder, "store", *"2113", env={"TMPDIR": name}
      )
      # Journal, spool and sockets are gone, and with them their processes.
      self.assertEmpty(list(folder.iterdir()))
    self.assertAlmostEqual(
        out["share_of_raw"],
        out["completions_per_s"] / out["raw_completions_per_s"],
    )
    self.assertAlmostEqual(
        out["mb_per_s"] * 1e6,
        out["completions_per_s"] * store_queue.TOKENS * 8,
    )
    self.assertLen(out["rounds"], 1)
    self.assertEqual(out["steps"], 3)

  @pytest.mark.slow
  def test_times_update_with_and_without_peer(self):
    peers = pathlib.Path(self.create_tempdir().full_path)
    (peers / "make_checkpoint.py").write_text(_MAKE_CHECKPOINT)
    (peers / "train_torch.py").write_text(_TRAIN_TORCH)
    model = tiny_model.make_model(num_layers=1)
    hf.save(peers / "model", model.config, tiny_model.init_params(model))
    work = train_step.Work((2, 3, 4, 5), 2, 64, _MODEL)
    for folder in (None, peers):
      self._set_peers(folder)
      out = train_step.run(_CONFIG, ["1"], work)
      self.assertEqual(out["shape"], _SIZES)
      self.assertAlmostEqual(out["tokens_per_s"], 2 * 3 * 9 / out["step_s"])
      self.assertAlmostEqual(
          out["limit_tokens_per_s"],
          out["product_gflop_per_s"] * 1e9 / (6 * out["num_params"]),
      )
      if folder is None:
        self.assertIsNone(out["ratio"])
      else:
        self.assertAlmostEqual(out["ratio"], out["tokens_per_s"] / 8.0)
    (peers / "train_torch.py").write_text("raise SystemExit('no torch')")
    with self.assertRaisesRegex(RuntimeError, "(?s)train_torch.py.*no torch"):
      train_step.run(_CONFIG, ["1"], work)

  @pytest.mark.slow
  def test_times_update_without_copies(self):
    config = tiny_model.make_config(
        train__prompts_per_batch=4,
        sampling__max_prompt_tokens=4,
        sampling__max_completion_tokens=9,
    )
    config.model.update(
        num_layers=1, width=8, num_heads=2, num_kv_heads=2, mlp_width=8
    )
    out = train_step.run(config, ["copies", "1"])
    self.assertBetween(out["share_of_copies"], 0.3, 0.7)
    self.assertAlmostEqual(out["ratio"], out["whole_s"] / out["rows_s"])
    config.train.prompts_per_batch = config.train.micro_batch_prompts = 8
    config.sampling.max_prompt_tokens = 80
    config.sampling.max_completion_tokens = 9
    out = train_step.run(config, ["lengths", "1"])
    for share, own in out["lengths"].items():
      self.assertAlmostEqual(own["ratio"], own["step_s"] / out["whole_s"])
      self.assertLess(own["tokens"], 0.9 if float(share) < 1 else 1.01)
