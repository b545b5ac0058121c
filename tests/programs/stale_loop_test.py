# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The staleness of a run is exact, and its parts are compiled once."""

import dataclasses
import json
import pathlib
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np

from tba_jax.config import load
from tba_jax.config import variants
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.programs import stale_loop
from tba_jax.programs import sweep
from tba_jax.training import policy
from tba_jax.training import train_step

staleness = variants.import_config("configs/staleness.py")

_FILE = str(pathlib.Path(staleness.__file__))


_STEPS = 6


class BenchTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = load.load_config(
        f"{_FILE}:smoke",
        [
            "init=scratch",
            # Steps large enough to tell one version from the next.
            "sweep.objectives=rloo: loss.name=rloo"
            " optimizer.learning_rate=0.03;"
            "ppo: loss.name=ppo loss.ratio_clip=0.2",
            "sweep.staleness_steps=0,2",
            "sweep.mini_batches=3",
            "sweep.seeds=0,1",
            "evaluate.every_steps=0",
        ],
    )
    cls.runs = {run.name: run for run in sweep.expand_runs(cls.config)}
    cls.batches = []
    make = train_step.make_train_step

    def make_and_watch(*args, **kwargs):
      step = make(*args, **kwargs)

      def watched(state, batch):
        cls.batches.append(jax.device_get(batch))
        return step(state, batch)

      return watched

    with mock.patch.object(train_step, "make_train_step", make_and_watch):
      cls.bench = stale_loop.Bench(cls.config, "")
      cls.bench._objective(cls.runs["rloo-s0-seed0"])
    cls.model = policy.make_policy(cls.config, "").model

    def logprobs(params, batch):
      found = logprobs_lib.completion_logprobs(
          cls.model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=1.0,
      )
      return found * batch.completion_mask

    cls.logprobs = staticmethod(jax.jit(logprobs))

  def run_and_watch(self, name):
    """Returns the result, the params before each step, and the batches."""
    self.batches.clear()
    params = []
    result = self.bench.run(
        self.runs[name],
        on_step=lambda state: params.append(jax.device_get(state.params)),
    )
    return result, params, list(self.batches)

  def check_samples(self, name, versions):
    result, params, batches = self.run_and_watch(name)
    self.assertEqual(result["versions"], versions)
    self.assertLen(batches, _STEPS)
    gap = lambda version, batch: np.abs(
        self.logprobs(params[version], batch) - batch.behavior_logprobs
    ).max()
    for step, (version, batch) in enumerate(zip(versions, batches)):
      self.assertLess(gap(version, batch), 1e-4)
      for other in {*range(_STEPS)} - {version}:
        self.assertGreater(gap(other, batch), 1e-2)
      self.assertEqual(set(batch.staleness_steps.ravel()), {step - version})

  def test_samples_are_of_their_version(self):
    self.check_samples("rloo-s2-seed0", [0, 0, 0, 1, 2, 3])

  def test_tokens_that_were_not_sampled_do_not_count(self):
    sampler = self.bench._sampler
    masks = []

    def sample(params, requests, **kwargs):
      sampled = sampler.sample(params, requests, **kwargs)
      # As if an environment had written the first token of each completion.
      masks.append(
          [
              c.sampled_mask & (np.arange(len(c.sampled_mask[0])) > 0)
              for c in sampled
          ]
      )
      return [
          dataclasses.replace(c, sampled_mask=mask)
          for c, mask in zip(sampled, masks[-1], strict=True)
      ]

    fake = mock.Mock(wraps=sampler)
    fake.sample.side_effect = sample
    with mock.patch.object(self.bench, "_sampler", fake):
      _, _, batches = self.run_and_watch("rloo-s0-seed0")
    self.assertLen(batches, _STEPS)
    for batch in batches:
      counts = [
          np.array_equal(batch.completion_mask, np.stack(m)) for m in masks
      ]
      self.assertIn(True, counts)

  def test_on_policy(self):
    self.check_samples("rloo-s0-seed0", [0, 1, 2, 3, 4, 5])

  def test_rounds(self):
    self.check_samples("rloo-N3-seed0", [0, 0, 0, 3, 3, 3])

  def test_one_compile_for_all_lags_and_seeds(self):
    self.bench.run(self.runs["rloo-s0-seed0"])
    with mock.patch.object(train_step, "hold_params") as traced:
      for name in ("rloo-s2-seed1", "rloo-N3-seed0"):
        self.bench.run(self.runs[name])
    traced.assert_not_called()

  def test_prompts_and_samples_are_the_same_whatever_the_lag(self):
    _, _, batches = self.run_and_watch("rloo-s0-seed0")
    _, _, late = self.run_and_watch("rloo-s2-seed0")
    for now, then in zip(batches, late):
      np.testing.assert_array_equal(now.prompt_tokens, then.prompt_tokens)
    np.testing.assert_array_equal(
        batches[0].completion_tokens, late[0].completion_tokens
    )
    _, _, other = self.run_and_watch("rloo-s0-seed1")
    self.assertNotEqual(
        batches[0].completion_tokens.tolist(),
        other[0].completion_tokens.tolist(),
    )

  def test_the_result(self):
    run = self.runs["rloo-s2-seed0"]
    result = self.bench.run(run)
    again = self.bench.run(run)
    self.assertEqual(result["curve"], again["curve"])
    self.assertEqual(result, json.loads(json.dumps(result)))
    before, after = result["curve"]
    self.assertEqual((before["step"], after["step"]), (0, _STEPS))
    self.assertAlmostEqual(before["kl"], 0.0, places=4)
    self.assertGreater(after["kl"], 1e-3)
    # An untrained model knows nothing of 6 letters, ":" and the other tokens.
    self.assertBetween(before["ref_perplexity"], 6, 12)
    self.assertIsNone(result["diverged_step"])

  def test_an_objective_with_a_value_model(self):
    values = []
    result = self.bench.run(
        self.runs["ppo-s2-seed0"],
        on_step=lambda state: values.append(
            jax.device_get(state.loss_params["value"])
        ),
    )
    self.assertEqual(result["versions"], [0, 0, 0, 1, 2, 3])
    self.assertIsNone(result["diverged_step"])
    # Each step learns values, too.
    for before, after in zip(values, values[1:]):
      gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
      self.assertGreater(max(jax.tree.leaves(gaps)), 1e-5)

  def test_a_batch_of_another_version_ends_the_run(self):
    sample = stale_loop.Bench._sample_step

    def too_late(self, *args):
      version, batch = sample(self, *args)
      return version + 1, batch

    with mock.patch.object(stale_loop.Bench, "_sample_step", too_late):
      with self.assertRaisesRegex(RuntimeError, "step 0 was sampled .* 1, not"):
        self.bench.run(self.runs["rloo-s2-seed0"])

  def test_a_step_that_is_not_finite_ends_the_run(self):
    name = "rloo-s0-seed0"
    step, state = self.bench._objectives["rloo"]

    def broken(state, batch):
      broken_now = int(state.step) == 2
      state, metrics = step(state, batch)
      # A gradient may be infinite while the loss is not.
      return state, metrics | ({"nonfinite": 1.0} if broken_now else {})

    with mock.patch.dict(self.bench._objectives, rloo=(broken, state)):
      result = self.bench.run(self.runs[name])
    self.assertEqual(result["diverged_step"], 2)
    self.assertEqual(result["versions"], [0, 1, 2])
    self.assertLen(result["curve"], 1)

  def test_stops_when_asked(self):
    asked = iter([False, False, True])
    with self.assertRaisesRegex(stale_loop.Interrupted, "at step 2"):
      self.bench.run(
          self.runs["rloo-s0-seed0"], should_stop=lambda: next(asked)
      )


if __name__ == "__main__":
  absltest.main()
