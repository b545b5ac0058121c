# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of use, which changes nothing else."""

import dataclasses
import logging
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np

from tba_jax.learning import compile_ahead
from tba_jax.learning import device_work
from tba_jax.learning import packing
from tba_jax.learning import work_parts
from tba_jax.mesh import cluster
from tba_jax.mesh import sharding
from tba_jax.policy import policy as policy_lib
from tba_jax.system import processes
from tests.support import tiny_model

SIZES = [packing.Size(rows, 2, 16) for rows in (9, 7, 5)]
_DEADLINE_S = 20


class CompileAheadTest(absltest.TestCase):

  def make(self, compile_size):
    ahead = compile_ahead.CompileAhead(SIZES, compile_size)
    self.addCleanup(ahead.close)
    return ahead

  def test_compiles_each_size_once_and_a_use_waits_for_its_own(self):
    may_go_on, compiled = threading.Event(), []

    def compile_size(size):
      if size == SIZES[1]:
        may_go_on.wait(_DEADLINE_S)
      compiled.append(size)

    ahead = self.make(compile_size)
    self.addCleanup(may_go_on.set)
    ahead.wait(SIZES[0])
    self.assertEqual(compiled, SIZES[:1])
    threading.Thread(target=may_go_on.set).start()
    ahead.wait(SIZES[2])
    ahead.wait(SIZES[1])
    self.assertEqual(compiled, SIZES)

  def test_a_failure_is_left_to_the_step(self):
    compiled = []

    def compile_size(size):
      if size == SIZES[0]:
        raise MemoryError("too large")
      compiled.append(size)

    with self.assertLogs(level=logging.WARNING) as logs:
      ahead = self.make(compile_size)
      ahead.wait(SIZES[0])
    self.assertIn("too large", logs.output[0])
    ahead.wait(SIZES[2])
    self.assertEqual(compiled, SIZES[1:])

  def test_close_neither_waits_nor_begins_another(self):
    begun, may_end, compiled = threading.Event(), threading.Event(), []

    def compile_size(size):
      begun.set()
      may_end.wait(_DEADLINE_S)
      compiled.append(size)

    ahead = self.make(compile_size)
    self.addCleanup(may_end.set)
    self.assertTrue(begun.wait(_DEADLINE_S))
    ahead.close()
    self.assertEqual(compiled, [])
    self.assertTrue(ahead.jobs[SIZES[1]].cancelled())
    names = [thread.name for thread in threading.enumerate()]
    self.assertIn(f"{processes.LEFT_BEHIND}_0", names)


def make_batch(config, num_different):
  """Returns a batch of 4 prompts with so many different completions each."""
  batch = tiny_model.make_batch(num_completions=8, seed=num_different)
  tokens = batch.completion_tokens[:, np.arange(8) % num_different]
  rows = packing.pack(
      packing.make(config), batch.prompt_mask, tokens, batch.completion_mask
  )
  return dataclasses.replace(batch, completion_tokens=tokens, rows=rows)


class DeviceWorkTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # Several sizes of rows of few tokens.
    for name, value in (
        ("_SHORT_LENGTH", 8), ("_LENGTH", 1), ("_LEAST_TOKENS", 1),
        ("_MICRO_BATCH_TOKENS", 20),
    ):  # fmt: skip
      self.enter_context(mock.patch.object(packing, name, value))

  def train(self, is_ahead, role):
    """Returns the state, and what the main thread compiled for a new size."""
    config = tiny_model.make_config(
        reference__role=role,
        train__prompts_per_batch=4,
        sampling__max_prompt_tokens=5,
        sampling__max_completion_tokens=6,
    )
    mesh = sharding.make_mesh(config.mesh)
    model = tiny_model.BIGRAM
    policy = policy_lib.Policy(None, None, model, None, None)
    params = jax.device_put(
        model.init(jax.random.key(0)), sharding.replicated(mesh)
    )
    train_step = work_parts.make_train_step(config, policy, mesh, params)
    reference = work_parts.make_reference(config, policy, params, mesh)
    ahead = None
    if is_ahead:
      ahead = work_parts.make_ahead(config, policy, mesh, train_step, reference)
    work = device_work.DeviceWork(
        config,
        state=work_parts.init_state(config, policy, params, mesh),
        train_step=train_step,
        reference=reference,
        merger=None,
        checkpointer=None,
        cluster=cluster.Cluster(),
        ahead=ahead,
    )
    self.addCleanup(work.close)
    used = []
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        for num_different in (8, 1, 8):
          batch = make_batch(config, num_different)
          used.append(packing.size_of(batch.rows))
          missing = batch.rows if role == "trainer" else None
          batch, _ = work.place(batch, missing)
          work.train(batch)
          if len(used) == 1:
            first = len(logs.records)
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertNotEqual(used[0], used[1])
    main = threading.current_thread().name
    return jax.device_get(work.state), [
        record.getMessage()
        for record in logs.records[first:]
        if record.threadName == main
    ]

  @parameterized.parameters("trainer", "searcher")
  def test_has_the_same_bits_and_compiles_beside_the_main_thread(self, role):
    expected, compiled = self.train(is_ahead=False, role=role)
    self.assertNotEmpty(compiled)
    state, compiled = self.train(is_ahead=True, role=role)
    self.assertEqual(compiled, [])
    chex.assert_trees_all_equal(state, expected)
