# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The roles refuse what does not fit before they begin, and get their parts."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.learning import buffers
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.programs import roles
from tba_jax.replay import curriculum
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.sampling import samplers
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tests.support import base_config


class TrainerRefusedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = load.load_config("configs/countdown.py:smoke")
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.run_info, _ = run_directory.create(str(self.workdir), self.config)

  def refused(self, pattern):
    # `main` prints the message of this error alone.
    with (
        mock.patch.object(processes, "start_role", autospec=True),
        self.assertRaisesRegex(run_directory.NoRunError, pattern),
    ):
      roles.run_trainer(self.config, str(self.workdir), ())

  def test_another_computation_in_same_directory(self):
    self.config.loss.name = "rloo"
    self.refused(r"^config.loss.name = 'rloo': the run was started with 'tb'")
    saved = run_directory.load_config(str(self.workdir))
    self.assertEqual(saved.loss.name, "tb")

  def test_lost_start_count_is_not_reset(self):
    (self.workdir / "metrics.jsonl").write_text('{"step": 0}\n')
    self.refused("epoch.json is missing")
    self.assertFalse((self.workdir / "epoch.json").exists())

  def test_second_trainer(self):
    self.addCleanup(os.close, run_directory.lock(str(self.workdir), "trainer"))
    self.refused(f"process {os.getpid()} already runs there as the trainer")

  def test_directory_in_place_of_file(self):
    (self.workdir / "samples.jsonl").mkdir()
    self.refused("samples.jsonl: damaged: is a directory; remove it")

  def test_refuses_restart_without_checkpoints(self):
    self.config.checkpoint.every_steps = 3
    path = self.workdir / "metrics.jsonl"
    path.write_text('{"step": 4}\n{"step": 5}\n')
    roles.check_is_new(self.config, self.run_info)
    path.write_text('{"step": 5}\n{"step": 6}\n')
    with self.assertRaisesRegex(
        run_directory.NoRunError, "checkpoints: .*step 6"
    ):
      roles.check_is_new(self.config, self.run_info)


class TrainerEndTest(absltest.TestCase):

  def test_first_error_is_the_cause(self):
    config = load.load_config("configs/countdown.py:smoke")
    workdir = self.create_tempdir().full_path
    run_info, _ = run_directory.create(workdir, config)
    starved = byte_store.DeadlineExceededError("step 0 has 0 of 4 prompts")
    # In a real run an evaluation hangs.
    hangs = mock.Mock(side_effect=TimeoutError("did not end within 60 s"))

    def make(config, run, cluster, closing, channel):
      closing.callback(hangs)
      return trains

    with (
        mock.patch.object(roles, "_take_run", autospec=True),
        mock.patch.object(roles.agreement, "check_processes", autospec=True),
        mock.patch.object(roles, "make_trainer", make),
    ):
      for error in (starved, None):
        trains = mock.Mock(side_effect=error, return_value=True)
        with self.assertRaises((type(error or hangs.side_effect),)):
          roles.train(config, run_info, (), lambda: False)
    self.assertEqual(hangs.call_count, 2)


class PartsTest(absltest.TestCase):

  def make_config(self, *overrides):
    return load.load_config("configs/countdown.py:smoke", overrides)

  def test_prompt_order_is_of_training_prompts_and_seed(self):
    orders = []
    for seed in (0, 0, 1):
      config = self.make_config("init=scratch", f"seed={seed}")
      policy = policy_lib.make_policy(config, "/nowhere")
      order = curriculum.make_order(config, policy.task, policy.tokenizer)
      num = policy.task.num_prompts("train")
      orders.append([order.prompt(i)[0] for i in range(num)])
      self.assertCountEqual(orders[-1], range(num))
    self.assertEqual(orders[0], orders[1])
    self.assertNotEqual(orders[0], orders[2])

  def test_buffers_temperature_is_of_schedule(self):
    config = self.make_config(
        "replay.reward_temperature=0.25:0.75:4",
    )
    temperature = buffers.make_buffer(config).reward_temperature
    self.assertEqual([temperature(s) for s in (0, 2, 4)], [0.25, 0.5, 0.75])

  def test_adapters_and_reference_share_params_of_start(self):
    policy, config = mock.Mock(), base_config.make()
    with mock.patch.object(
        roles.policy_lib, "initial_params", autospec=True
    ) as load:
      load_start = roles.make_load_start(config, policy)
      load.assert_not_called()
      self.assertIs(load_start(), load_start())
    load.assert_called_once_with(policy, config.seed, None)

  def test_searchers_have_vllm_server_each(self):
    config = self.make_config(
        "init=scratch",
        "search.sampler=vllm",
        "search.num_searchers=2",
        "search.vllm_urls=http://a:1,http://b:2",
        "search.starvation_s=77.0",
    )
    policy = policy_lib.make_policy(config, "/nowhere")
    workdir = pathlib.Path(self.create_tempdir().full_path)
    (left := workdir / "vllm/searcher-1/version").mkdir(parents=True)
    homes = [
        samplers.SamplerHome(workdir, index, mock.Mock()) for index in (0, 1)
    ]
    made = [
        policy_samplers.make_searcher_sampler(config, policy, home)
        for home in homes
    ]
    self.assertEqual([s.server.url for s in made], ["http://a:1", "http://b:2"])
    self.assertEqual(made[1].deadline_s, 77.0)
    self.assertFalse(left.exists())
    config.search.vllm_folder = "gs://bucket/folder"
    with self.assertRaisesRegex(ValueError, "must be a local folder"):
      policy_samplers.make_searcher_sampler(config, policy, homes[0])


class SearcherRefusedTest(absltest.TestCase):

  def refused(self, pattern, *operands):
    config = load.load_config("configs/countdown.py:smoke")
    workdir = self.create_tempdir().full_path
    run_directory.create(workdir, config)
    with mock.patch.object(processes, "start_role", autospec=True):
      with self.assertRaisesRegex(run_directory.NoRunError, pattern):
        roles.run_searcher(config, workdir, operands)

  def test_refuses_non_numeric_operand(self):
    for operands in (("first",), ("-1",), ("0", "1")):
      self.refused("must be one whole number", *operands)

  def test_no_model_to_start_from(self):
    with mock.patch.object(metrics, "EventLog", autospec=True) as log:
      self.refused("sft/model", "0")
    log.return_value.close.assert_called_once_with()
