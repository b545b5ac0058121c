# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Another model as the reference: a policy learns a teacher's distribution."""

import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import group_reference
from tba_jax.learning import host_state
from tba_jax.learning import work_parts
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import inline
from tba_jax.tools import step_file
from tba_jax.tools import sweep

staleness = variants.import_config("configs/staleness.py")
_FILE = str(pathlib.Path(staleness.__file__))


def make_config(*overrides):
  return load.load_config(f"{_FILE}:smoke", ["init=scratch", *overrides])


class DistillationTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Wider and deeper than the policy, and far from it.
    config = make_config("model.width=24", "model.num_layers=2")
    teacher = policy_lib.make_policy(config, "")
    params = teacher.model.init(jax.random.PRNGKey(7))
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder) / "teacher"
    cls.tokenizer = teacher.tokenizer
    hf.save(cls.folder, teacher.model.config, params, teacher.tokenizer)

  def make_taught(self, *overrides):
    config = make_config(
        f"reference.init={self.folder}",
        "loss.reward_weight=0",
        "loss.beta=1",
        "optimizer.learning_rate=0.02",
        "train.num_steps=40",
        *overrides,
    )
    validate.validate(config, program="train")
    return sweep.set_exact_lag(config, 2)

  def find_kls(self, *overrides):
    """Returns the KL to the teacher before and after training.

    Also how often the reference's log-probs were computed in between.
    """
    config = self.make_taught(*overrides)
    maker = inline.LoopMaker(config)
    self.addCleanup(maker.close)
    loop = maker.make(config)
    kl = lambda: maker.evaluator.run(loop.learner.params, 4, version=0)["kl"]
    before, rewards = kl(), []
    reference = loop.learner.work.reference
    with mock.patch.object(
        reference, "logprobs", wraps=reference.logprobs
    ) as passes:
      loop.train(lambda step, draw, metrics: rewards.append(draw.rewards))
    self.assertEqual({r for some in rewards for r in some.flat}, {0.0})
    return before, kl(), passes.call_count

  @pytest.mark.slow
  def test_the_kl_to_a_larger_teacher_falls_without_a_reward(self):
    before, after, num_passes = self.find_kls()
    self.assertGreater(before, 1.0)
    self.assertLess(after, 0.75 * before)
    self.assertGreater(num_passes, 0)

  @pytest.mark.slow
  def test_distributions_teach_without_a_pass_of_the_reference(self):
    before, after, num_passes = self.find_kls("loss.name=gkd")
    self.assertLess(after, 0.6 * before)
    self.assertEqual(num_passes, 0)  # The step has the teacher's logits.

  @pytest.mark.slow
  def test_a_step_s_file_has_the_teacher(self):
    config = self.make_taught("loss.name=gkd")
    maker = inline.LoopMaker(config)
    self.addCleanup(maker.close)
    loop = maker.make(config)
    draws = []
    loop.train(
        lambda step, draw, metrics: draws.append(draw),
        should_stop=lambda: bool(draws),
    )
    (draw,) = draws
    work, batch = loop.learner.work, loop.learner.make(draw)
    path = self.folder.parent / "step.npz"
    step_file.write(path, config, maker.policy, work, draw, batch, {})
    with path.open("rb") as file:
      found = step_file.compute(host_state.read(file))
    expected = jax.device_get(work.train(batch))
    self.assertGreater(expected["kl"], 1.0)
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)

  def test_refuses_what_distributions_of_a_teacher_do_not_have(self):
    taught = [f"reference.init={self.folder}", "loss.name=gkd"]
    for key, value in (
        ("reference.role", "searcher"),
        ("reference.mode", "ema"),
        ("reference.init", ""),
        ("loss.correction", "m2_mask"),
        ("replay.skip_equal_rewards", "True"),
        ("search.order", "unsolved"),
    ):
      with self.subTest(key), self.assertRaisesRegex(
          ValueError, f"config.{key} = .*: must be"
      ):
        config = make_config(*taught, f"{key}={value}")
        validate.validate(config, program="train")

  def test_searchers_and_trainer_have_the_same_teacher(self):
    config = self.make_taught()
    policy = policy_lib.make_policy(config, "")
    trainer = work_parts.make_reference(config, policy, None, None)
    config.reference.role = "searcher"
    searcher = group_reference.make_group_reference(
        config, policy, self.fail, None
    )
    S = config.search.samples_per_prompt
    T = config.sampling.max_completion_tokens
    tokens = np.random.default_rng(0).integers(3, 10, (S, T), np.int32)
    prompt, whole = np.array([3, 4, 9], np.int32), np.ones((S, T), np.bool_)
    (found,) = searcher.start(
        [prompt], [tokens], [np.full(S, T)], [whole], [None]
    )()
    expected = trainer.logprobs(
        prompt[None], np.ones((1, 3)), tokens[None], whole[None]
    )
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)
    # Far from uniform: it is not a new model.
    self.assertGreater(found.std(), 1.0)

  def test_refuses_a_teacher_with_another_tokenizer(self):
    config = make_config(f"reference.init={self.folder}")
    other = tokenizer_lib.word_level(list("zyxwvut"), r"\w")
    with self.assertRaisesRegex(
        ValueError, "reference.init=.*token.*must be a model with the policy's"
    ):
      frozen_models.load_reference(config, other, None)
    same, _ = frozen_models.load_reference(config, self.tokenizer, None)
    self.assertEqual(same.config.width, 24)

  def test_refuses_moving_or_unused_teacher(self):
    for override in ("reference.mode=ema", "reference.role=none"):
      config = make_config(
          f"reference.init={self.folder}", override, "loss.name=oapl"
      )
      key = override.split("=", maxsplit=1)[0]
      with self.assertRaisesRegex(ValueError, f"config.{key} = .*: must be"):
        validate.validate(config, program="train")
    config = make_config(
        f"reference.init={self.folder}",
        "sampling.max_completion_tokens=20",
        "model.max_positions=32",
    )
    with self.assertRaisesRegex(
        ValueError, "config.reference.init = .*: must be .* 23 positions"
    ):
      validate.validate(config, program="train")
