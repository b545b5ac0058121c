# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of use, which changes nothing else."""

import dataclasses
import logging
import threading

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

SIZES = [None, (9, 1, 2, 0), (7, 1, 2, 0), (5, 1, 2, 0)]
_DEADLINE_S = 20


class CompileAheadTest(absltest.TestCase):

  def make(self, compile_size, neighbors=True):
    ahead = compile_ahead.CompileAhead(SIZES, compile_size, neighbors=neighbors)
    self.addCleanup(ahead.close)
    return ahead

  def count(self, ahead, size):
    for _ in range(compile_ahead.STEPS_BEFORE_NEXT):
      ahead.count(size)

  def test_the_first_size_then_neighbors_of_used_ones_once_each(self):
    compiled = []
    ahead = self.make(compiled.append)
    ahead.count(SIZES[1])
    self.count(ahead, SIZES[2])
    self.count(ahead, SIZES[2])
    self.count(ahead, SIZES[1])
    self.count(ahead, SIZES[0])
    for size in SIZES:
      ahead.wait(size)
    # The step itself has compiled for the two that were used first.
    self.assertEqual(compiled, [SIZES[0], SIZES[3]])

  def test_compiles_the_first_size_alone_without_neighbors(self):
    compiled = []
    ahead = self.make(compiled.append, neighbors=False)
    self.count(ahead, SIZES[0])
    for size in SIZES:
      ahead.wait(size)
    self.assertEqual(compiled, SIZES[:1])

  def test_a_size_in_progress_is_waited_for_and_an_unasked_one_is_not(self):
    may_end, compiled = threading.Event(), []

    def compile_size(size):
      may_end.wait(_DEADLINE_S)
      compiled.append(size)

    ahead = self.make(compile_size)
    self.addCleanup(may_end.set)
    ahead.wait(SIZES[1])
    self.assertEqual(compiled, [])
    threading.Thread(target=may_end.set).start()
    ahead.wait(SIZES[0])
    self.assertEqual(compiled, [SIZES[0]])

  def test_a_failure_is_left_to_the_step(self):
    compiled = []

    def compile_size(size):
      if size is None:
        raise MemoryError("too large")
      compiled.append(size)

    with self.assertLogs(level=logging.WARNING) as logs:
      ahead = self.make(compile_size)
      ahead.wait(SIZES[0])
    self.assertIn("too large", logs.output[0])
    self.count(ahead, SIZES[0])
    ahead.wait(SIZES[1])
    self.assertEqual(compiled, [SIZES[1]])

  def test_close_neither_waits_nor_begins_another(self):
    begun, may_end, compiled = threading.Event(), threading.Event(), []

    def compile_size(size):
      begun.set()
      may_end.wait(_DEADLINE_S)
      compiled.append(size)

    ahead = self.make(compile_size)
    self.addCleanup(may_end.set)
    self.count(ahead, SIZES[0])
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
      config, batch.prompt_tokens, tokens, batch.completion_mask
  )
  return dataclasses.replace(batch, completion_tokens=tokens, rows=rows)


class DeviceWorkTest(parameterized.TestCase):

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
      ahead = work_parts.make_ahead(
          config, policy, mesh, train_step, reference, neighbors=True
      )
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
    used, steps = [], compile_ahead.STEPS_BEFORE_NEXT
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        for num_different in (*[8] * steps, 4, 8):
          batch = make_batch(config, num_different)
          used.append(packing.size_of(batch.rows))
          batch, _ = work.place(batch, 4 if role == "trainer" else 0)
          work.train(batch)
          if len(used) == steps:
            first = len(logs.records)
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertEqual(used, [SIZES[0]] * steps + [SIZES[1], SIZES[0]])
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
