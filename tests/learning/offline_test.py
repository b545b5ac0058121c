# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Order of the examples; exit statuses of `sft` and `reward_model`."""

import contextlib
import io
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax.learning import offline
from tba_jax.losses import objective
from tba_jax.system import jsonl
from tba_jax.system import processes
from tests.support import tiny_model

_DONE = {"interrupted": False, "step": 3, "model": "a/model"}


class ExamplesTest(absltest.TestCase):

  def examples(self, **changes):
    settings = dict(
        seed=0,
        batch_size=2,
        num_rows=5,
        encode=lambda row, epoch: ([row], [[10 * epoch + row], [7, 7]]),
        num_completions=2,
        max_prompt_tokens=3,
        max_completion_tokens=2,
    )
    return offline.Examples(**{**settings, **changes})

  def test_an_epoch_has_every_row_once(self):
    chunk = self.examples().chunk(0, 5)
    self.assertEqual(chunk.prompt_tokens.shape, (25, 2, 3))
    self.assertEqual(chunk.prompt_mask[0, 0].tolist(), [0, 0, 1])
    self.assertEqual(chunk.completion_mask[0, 0].tolist(), [[1, 0], [1, 1]])
    self.assertEqual(chunk.completion_mask[5:].sum(), 0)
    rows = chunk.prompt_tokens[:5, :, -1].reshape(-1)
    first, second = rows[:5].tolist(), rows[5:].tolist()
    self.assertEqual(sorted(first), list(range(5)))
    self.assertEqual(sorted(second), list(range(5)))
    self.assertNotEqual(first, second)
    drawn = chunk.completion_tokens[:5, :, 0, 0].reshape(-1)
    np.testing.assert_array_equal(drawn - rows, [0] * 5 + [10] * 5)

  def test_a_step_does_not_depend_on_its_chunk(self):
    whole = self.examples(num_rows=50).chunk(0, 9)
    part = self.examples(num_rows=50).chunk(6, 9)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[6:9], y[:3]), whole, part
    )
    other = self.examples(num_rows=50, seed=1).chunk(6, 9)
    self.assertFalse((other.prompt_tokens == part.prompt_tokens).all())


class NonfiniteTest(absltest.TestCase):

  def train(self, nonfinite):
    """Takes 4 steps, of which row 2's has a loss of 0 and a gradient of NaN."""
    config = tiny_model.make_config(train__nonfinite=nonfinite)
    config.sft.update(
        num_steps=4, batch_size=1, warmup_steps=0, log_every_steps=1
    )

    def loss_fn(params, loss_params, batch, beta):
      scale = jnp.where(batch.prompt_tokens[0, -1] == 2, 0.0, 1.0)
      leaf = jax.tree.leaves(params)[0]
      # The square root has an infinite slope at 0.
      return jnp.sqrt(scale * (1 + leaf**2)).mean(), {}

    self.folder = pathlib.Path(self.create_tempdir().full_path)
    model = tiny_model.BIGRAM
    job = offline.Job(
        name="sft",
        folder=self.folder,
        model=model,
        init_params=lambda: model.init(jax.random.key(0)),
        loss_fn=loss_fn,
        examples=offline.Examples(
            seed=0,
            batch_size=1,
            num_rows=4,
            encode=lambda row, epoch: ([row], [[3]]),
            num_completions=1,
            max_prompt_tokens=1,
            max_completion_tokens=1,
        ),
        evaluate=lambda params, step: {},
        metric_names=("grad_norm",),
        save=lambda params, evaluation: evaluation,
    )
    with contextlib.redirect_stderr(io.StringIO()) as self.stderr:
      return offline.train(config, job, stop=threading.Event())

  def test_nonfinite_gradient_stops(self):
    with self.assertRaisesRegex(FloatingPointError, r"sft: .* steps \[\d\]"):
      self.train("stop")

  def test_nonfinite_step_is_skipped(self):
    params, done = self.train("skip")
    self.assertEqual(done["step"], 4)
    chex.assert_tree_all_finite(params)
    self.assertRegex(self.stderr.getvalue(), r"steps \[\d\] .* skipped")
    records = jsonl.read_jsonl(self.folder / "metrics.jsonl")
    self.assertEqual([r["step"] for r in records], [1, 2, 3, 4])
    self.assertEqual(sum("train/loss" in r for r in records), 3)


class MicroBatchSizeTest(parameterized.TestCase):

  @parameterized.parameters(
      (16, 0, 4, 16),
      (16, 4, 4, 4),
      (16, 2, 4, 4),
      (16, 1, 8, 8),
      (24, 4, 3, 6),
      (128, 8, 1, 8),
  )
  def test_grows_until_it_divides_over_the_shards(
      self, batch_size, asked, shards, expected
  ):
    settings = ml_collections.ConfigDict(
        {"batch_size": batch_size, "micro_batch_size": asked}
    )
    self.assertEqual(offline.micro_batch_size(settings, shards), expected)


class OptimizerTest(absltest.TestCase):

  def test_a_stage_has_an_optimizer_of_its_own(self):
    config = tiny_model.make_config(optimizer__epsilon=1e-5, optimizer__b1=0.5)
    config.sft.weight_decay = 0.1
    config.reward_model.grad_clip_norm = 0.5
    for section, own in (
        (config.sft, dict(b2=0.99, weight_decay=0.1, grad_clip_norm=1.0)),
        (config.reward_model, dict(b2=0.999, weight_decay=0.0,
                                   grad_clip_norm=0.5)),
    ):  # fmt: skip
      optimizer = offline.make_step_config(config, section, 1).optimizer
      rates = dict(
          learning_rate=section.learning_rate, warmup_steps=section.warmup_steps
      )
      expected = dict(own, b1=0.9, epsilon=1e-8, **rates)
      self.assertEqual({k: optimizer[k] for k in expected}, expected)


class MicroBatchTest(absltest.TestCase):

  def train(self, micro_batch_size):
    """Takes a step on completions of 1, 2, 3 and 4 tokens."""
    config = tiny_model.make_config()
    config.sft.update(
        num_steps=1,
        batch_size=4,
        micro_batch_size=micro_batch_size,
        warmup_steps=0,
        grad_clip_norm=0.0,
        log_every_steps=1,
    )
    model = tiny_model.BIGRAM
    job = offline.Job(
        name="sft",
        folder=pathlib.Path(self.create_tempdir().full_path),
        model=model,
        init_params=lambda: model.init(jax.random.key(0)),
        loss_fn=objective.make_supervised_loss_fn(model),
        examples=offline.Examples(
            seed=0,
            batch_size=4,
            num_rows=4,
            encode=lambda row, epoch: ([row], [[5] * (row + 1)]),
            num_completions=1,
            max_prompt_tokens=1,
            max_completion_tokens=4,
        ),
        evaluate=lambda params, step: {},
        metric_names=("grad_norm",),
        save=lambda params, evaluation: evaluation,
    )
    offline.train(config, job, stop=threading.Event())
    (record,) = jsonl.read_jsonl(job.folder / "metrics.jsonl")
    return record["train/loss"], record["train/grad_norm"]

  def test_a_token_counts_the_same_in_each(self):
    whole = self.train(0)
    for size in (1, 2):
      np.testing.assert_allclose(self.train(size), whole, rtol=1e-5)


class RunProgramTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.stop = threading.Event()
    self.patch("prepare_compiling")
    self.patch("stop_on_signals", return_value=self.stop)

  def patch(self, name, **arguments):
    return self.enter_context(
        mock.patch.object(processes, name, autospec=True, **arguments)
    )

  def run_program(self, work, cpu_devices=0):
    """Returns the exit status, and what was printed."""
    config = ml_collections.ConfigDict(
        {"trainer": {"cpu_devices": cpu_devices, "num_processes": 4}}
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = offline.run_program("sft", config, work)
    return status, out.getvalue(), err.getvalue()

  def test_it_has_the_virtual_devices_of_all_processes(self):
    with mock.patch.object(jax.config, "update") as update:
      self.run_program(lambda **_: _DONE, cpu_devices=2)
    update.assert_any_call("jax_num_cpu_devices", 8)

  def test_progress_and_end(self):
    def work(*, stop, on_progress):
      self.assertIs(stop, self.stop)
      on_progress(2, 3, {"train/loss": 0.25})
      return _DONE

    status, out, err = self.run_program(work)
    self.assertEqual((status, err), (0, ""))
    self.assertEqual(out, "sft 2/3  train/loss 0.25\nmodel: a/model\n")
    status, _, _ = self.run_program(lambda **_: {**_DONE, "interrupted": True})
    self.assertEqual(status, processes.EXIT_INTERRUPTED)

  @parameterized.parameters(
      (ValueError("a setting"), processes.EXIT_CONFIG),
      (FileNotFoundError("a file"), processes.EXIT_CONFIG),
      (FloatingPointError("a loss"), processes.EXIT_FATAL),
  )
  def test_an_error_is_a_line_and_a_status(self, error, wanted):
    status, _, err = self.run_program(mock.Mock(side_effect=error))
    self.assertEqual((status, err), (wanted, f"error: {error}\n"))
