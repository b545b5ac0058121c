# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Initial value models: from the policy, or from a folder."""

import pathlib

from absl.testing import absltest
import chex
import jax
import numpy as np

from tba_jax.losses import objective
from tba_jax.models import heads
from tba_jax.models import hf
from tba_jax.training import policy
from tests.support import tiny_model

_POLICY = tiny_model.make_model(num_layers=1)


def _config(**loss):
  return tiny_model.make_config(**{f"loss__{k}": v for k, v in loss.items()})


class ValueModelTest(absltest.TestCase):

  def folder(self, **changes):
    """Saves a random model; with `num_labels` 0 it predicts tokens."""
    shape = tiny_model.make_model(num_layers=1).config
    labels = changes.pop("num_labels", 1)
    if labels:
      model = heads.make_scalar_model(heads.config_of(shape, labels))
    else:
      model = _POLICY
    folder = self.create_tempdir().full_path
    params = tiny_model.init_params(model, seed=3)
    hf.save(f"{folder}/model", model.config, params)
    return f"{folder}/model", params

  def test_none_without_a_learned_value(self):
    self.assertIsNone(policy.make_value_model(_config(name="tb"), _POLICY))
    self.assertIsNone(
        policy.find_value_folder(_config(name="tb", value_init="x"), "run")
    )

  def test_from_the_policy_with_a_head_of_zeros(self):
    config = _config(name="ppo")
    model = policy.make_value_model(config, _POLICY)
    self.assertIsNone(policy.find_value_folder(config, "run"))
    params = tiny_model.init_params(_POLICY)
    value = objective.make_loss_params(config, model, params)["value"]
    np.testing.assert_array_equal(value["score"]["kernel"], 0.0)
    chex.assert_trees_all_equal(value["blocks"], params["blocks"])

  def test_from_a_folder(self):
    folder, params = self.folder()
    config = _config(name="subtb", value_init=folder)
    self.assertEqual(str(policy.find_value_folder(config, "run")), folder)
    model = policy.make_value_model(config, _POLICY, pathlib.Path(folder))
    self.assertEqual(model.config.num_labels, 1)
    loaded = hf.load(folder)[1]
    chex.assert_trees_all_equal(loaded, params)
    value = objective.make_loss_params(config, model, None, loaded)["value"]
    chex.assert_trees_all_equal_shapes(
        value, jax.eval_shape(model.init, jax.random.key(0))
    )

  def test_from_the_reward_model_of_the_run(self):
    config = _config(name="ppo", value_init="reward_model")
    self.assertEqual(
        policy.find_value_folder(config, "runs/a"),
        pathlib.Path("runs/a/reward_model/model"),
    )

  def test_refuses_by_key(self):
    for labels in (0, 2):
      folder, _ = self.folder(num_labels=labels)
      with self.assertRaisesRegex(ValueError, f"loss.value_init=.*{labels} la"):
        policy.make_value_model(
            _config(name="ppo"), _POLICY, pathlib.Path(folder)
        )
    folder, _ = self.folder()
    wide = tiny_model.make_model(num_layers=1, vocab_size=99)
    with self.assertRaisesRegex(
        ValueError, "loss.value_init=.*the policy's 99"
    ):
      policy.make_value_model(_config(name="ppo"), wide, pathlib.Path(folder))


if __name__ == "__main__":
  absltest.main()
