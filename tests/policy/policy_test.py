# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies, their samplers, and initial value models."""

import dataclasses
import json
import pathlib
from unittest import mock

from absl.testing import absltest
import chex
import jax
import ml_collections
import numpy as np

from tba_jax.config import load
from tba_jax.losses import objective
from tba_jax.models import tokenizer
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.net import heads
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.policy import value_model as value_model_lib
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tests.support import tiny_model

_POLICY = tiny_model.make_model(num_layers=1)


def _config(**loss):
  return tiny_model.make_config(**{f"loss__{k}": v for k, v in loss.items()})


class ValueModelTest(absltest.TestCase):

  def folder(self, **changes):
    """Saves a random model; with `num_labels` 0 it predicts tokens."""
    labels = changes.pop("num_labels", 1)
    shape = tiny_model.make_model(num_layers=1, **changes).config
    if labels:
      model = heads.ScalarModel(dataclasses.replace(shape, num_labels=labels))
    else:
      model = _POLICY
    folder = self.create_tempdir().full_path
    params = tiny_model.init_params(model, seed=3)
    hf.save(f"{folder}/model", model.config, params)
    return f"{folder}/model", params

  def test_makes_none_without_a_learned_value(self):
    self.assertIsNone(value_model_lib.make_model(_config(name="tb"), _POLICY))
    self.assertIsNone(
        policy_lib.find_value_folder(_config(name="tb", value_init="x"), "run")
    )

  def test_starts_from_the_policy_with_a_head_of_zeros(self):
    config = _config(name="ppo")
    model = value_model_lib.make_model(config, _POLICY)
    self.assertIsNone(policy_lib.find_value_folder(config, "run"))
    params = tiny_model.init_params(_POLICY)
    value = objective.make_loss_params(config, model, params)["value"]
    np.testing.assert_array_equal(value["score"]["kernel"], 0.0)
    chex.assert_trees_all_equal(value["blocks"], params["blocks"])

  def test_starts_from_a_folder(self):
    folder, params = self.folder()
    config = _config(name="subtb", value_init=folder)
    self.assertEqual(str(policy_lib.find_value_folder(config, "run")), folder)
    model = value_model_lib.make_model(config, _POLICY, pathlib.Path(folder))
    self.assertEqual(model.config.num_labels, 1)
    loaded = hf.load(folder)[1]
    chex.assert_trees_all_equal(loaded, params)
    value = objective.make_loss_params(config, model, None, loaded)["value"]
    chex.assert_trees_all_equal_shapes(
        value, jax.eval_shape(model.init, jax.random.key(0))
    )

  def test_the_folder_s_dtype_is_not_trained_in(self):
    for base in ("float32", "bfloat16"):
      folder, _ = self.folder(param_dtype="bfloat16")
      config = _config(name="ppo", value_init=folder)
      policy = dataclasses.replace(
          _POLICY,
          config=dataclasses.replace(_POLICY.config, param_dtype=base),
      )
      for path in (None, pathlib.Path(folder)):
        model = value_model_lib.make_model(config, policy, path)
        self.assertEqual(model.config.param_dtype, "float32")
      self.assertEqual(model.config.compute_dtype, "float32")

  def test_starts_from_the_reward_model_of_the_run(self):
    config = _config(name="ppo", value_init="reward_model")
    self.assertEqual(
        policy_lib.find_value_folder(config, "runs/a"),
        pathlib.Path("runs/a/reward_model/model"),
    )

  def test_refuses_by_key(self):
    for labels in (0, 2):
      folder, _ = self.folder(num_labels=labels)
      with self.assertRaisesRegex(ValueError, f"loss.value_init=.*{labels} la"):
        value_model_lib.make_model(
            _config(name="ppo"), _POLICY, pathlib.Path(folder)
        )
    folder, _ = self.folder()
    wide = tiny_model.make_model(num_layers=1, vocab_size=99)
    with self.assertRaisesRegex(
        ValueError, "loss.value_init=.*the policy's 99"
    ):
      value_model_lib.make_model(
          _config(name="ppo"), wide, pathlib.Path(folder)
      )


_CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/countdown.py:smoke")


def make_config(*overrides):
  return load.load_config(_CONFIG, ["init=scratch", *overrides])


class PolicyTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def export(self, folder, config, seed=1):
    """Leaves a Hugging Face folder with the config's model of another seed."""
    policy = policy_lib.make_policy(config, self.workdir, scratch=True)
    params = policy_lib.initial_params(policy, seed)
    hf.save(folder, policy.model.config, params, policy.tokenizer)
    return params

  def test_stops_at_model_tokens_missing_in_tokenizer(self):
    words = policy_lib.make_policy(make_config(), self.workdir).tokenizer
    stop, size = words.vocab_size, words.vocab_size + 2
    shape = tiny_model.make_model(vocab_size=size, stop_ids=(stop, size)).config
    words.add_turn_ends(shape.turn_ends)
    self.assertEqual(words.stop_ids, {words.eos_id, stop})

  def test_starts_from_scratch(self):
    config = make_config()
    policy = policy_lib.make_policy(config, self.workdir)
    self.assertIsNone(policy.folder)
    self.assertEqual(policy.task.name, "countdown")
    model = policy.model.config
    self.assertEqual(model.width, config.model.width)
    self.assertEqual(model.vocab_size, policy.tokenizer.vocab_size)
    self.assertEqual(
        (model.pad_id, model.eos_id),
        (policy.tokenizer.pad_id, policy.tokenizer.eos_id),
    )
    first, again, other = (
        policy_lib.initial_params(policy, seed) for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(first, again)
    differs = jax.tree.map(
        lambda x, y: bool(np.any(np.asarray(x) != np.asarray(y))), first, other
    )
    self.assertTrue(any(jax.tree.leaves(differs)))

  def test_starts_from_fine_tuning_in_the_workdir(self):
    config = make_config("init=sft")
    folder = policy_lib.sft_folder(self.workdir)
    self.assertEqual(folder, self.workdir / "sft" / "model")
    params = self.export(folder, config)
    policy = policy_lib.make_policy(config, self.workdir)
    self.assertEqual(policy.folder, folder)
    chex.assert_trees_all_close(policy_lib.initial_params(policy, 0), params)
    # Fine-tuning itself starts from scratch.
    self.assertIsNone(
        policy_lib.make_policy(config, self.workdir, scratch=True).folder
    )

  def test_the_folder_overrides_the_configs_model(self):
    folder = self.workdir / "mine"
    self.export(folder, make_config("model.width=16"))
    policy = policy_lib.make_policy(make_config(f"init={folder}"), self.workdir)
    self.assertEqual(policy.model.config.width, 16)

  def test_the_config_overrides_the_folders_dtype(self):
    folder = self.workdir / "half"
    half = self.export(folder, make_config("model.param_dtype=bfloat16"))
    masters = jax.tree.map(lambda x: x.astype(np.float32), half)
    for name, backend, compute_dtype in (
        ("auto", "gpu", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float32", "gpu", "float32"),
    ):
      config = make_config(f"init={folder}", f"model.compute_dtype={name}")
      with mock.patch.object(jax, "default_backend", return_value=backend):
        policy = policy_lib.make_policy(config, self.workdir)
        self.assertEqual(policy.model.config.compute_dtype, compute_dtype)
        scratch = policy_lib.make_policy(config, self.workdir, scratch=True)
        self.assertEqual(scratch.model.config.compute_dtype, compute_dtype)
    self.assertEqual(policy.model.config.param_dtype, "float32")
    found = policy_lib.initial_params(policy, 0)
    chex.assert_trees_all_equal(found, masters)
    chex.assert_trees_all_equal_dtypes(found, masters)

  def test_takes_a_tokenizer_of_its_own(self):
    words = tokenizer.word_level(["a", "b"], ".")
    words.save(self.workdir / "words")
    config = make_config(f"tokenizer.source={self.workdir / 'words'}")
    policy = policy_lib.make_policy(config, self.workdir)
    self.assertEqual(policy.tokenizer.vocab_size, words.vocab_size)
    self.assertEqual(policy.model.config.vocab_size, words.vocab_size)

  def test_a_vocabulary_too_small_is_refused(self):
    folder = self.workdir / "small"
    config = make_config()
    self.export(folder, config)
    small = hf_config.read(folder)
    small = dataclasses.replace(small, vocab_size=3)
    with mock.patch.object(hf_config, "read", return_value=small):
      with self.assertRaisesRegex(ValueError, "vocabulary has 3 entries"):
        policy_lib.make_policy(make_config(f"init={folder}"), self.workdir)

  def test_unseen_held_out_words_give_warning(self):
    for name, word in (("train", "ab"), ("test", "xy")):
      row = json.dumps({"prompt": word, "answer": word})
      (self.workdir / f"{name}.jsonl").write_text(row + "\n")
    config = make_config()
    config.task = ml_collections.ConfigDict(
        dict(
            name="custom",
            train=f"{self.workdir}[train]",
            test=f"{self.workdir}[test]",
        )
    )
    policy = policy_lib.make_policy(config, self.workdir)
    (warning,) = policy.task.report.warnings
    self.assertIn("['x', 'y']", warning)

  def test_samplers_have_their_settings(self):
    config = make_config(
        "sampling.temperature=0.7",
        "sampling.top_k=5",
        "sampling.top_p=0.9",
        'sampling.stop_strings=["x", "+"]',
        "sampling.num_slots=24",
        "search.samples_per_prompt=6",
        "search.prompts_per_round=4",
        "search.quantization=int8",
        "sampling.in_flight=recompute_cache",
        "explore.fraction=0.5",
        "explore.min_tokens=2",
    )
    policy = policy_lib.make_policy(config, self.workdir)
    with mock.patch.object(decode, "JaxSampler", autospec=True) as made:
      policy_samplers.make_searcher_sampler(config, policy)
      policy_samplers.make_evaluation_sampler(config, policy)
      policy_samplers.make_sampler(config, policy)
    searchers, evaluators, others = (
        vars(call.args[1]) for call in made.call_args_list
    )
    shared = "most_rows_per_prompt"
    self.assertEqual(
        [s[shared] for s in (searchers, evaluators, others)], [1, 4, 1]
    )
    self.assertEqual(
        {k: searchers[k] for k in ("temperature", "top_k", "top_p")},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    )
    self.assertEqual(searchers["num_rows"], 24)
    self.assertTrue(searchers["recompute_cache"])
    self.assertEqual(searchers["stop_strings"], ("x", "+"))
    self.assertEqual(searchers["text_fn"]([3]), policy.tokenizer.decode([3]))
    self.assertEqual(searchers["stop_ids"], policy.tokenizer.stop_ids)
    self.assertEqual(searchers["pad_id"], policy.tokenizer.pad_id)
    self.assertEqual(searchers["max_prompt_tokens"], 7)
    self.assertEqual(searchers["max_completion_tokens"], 12)
    self.assertEqual(evaluators["num_rows"], 16 * 4)
    self.assertEqual(searchers["seed"], config.seed)
    # Evaluations do not explore, but keep the least length.
    self.assertEqual(searchers["explore"].fraction, 0.5)
    self.assertEqual(evaluators["explore"], requests.Explore(min_tokens=2))
    # The model that is evaluated is the trainer's.
    self.assertEqual(
        [s["weights"] for s in (searchers, evaluators, others)],
        ["int8", "", "int8"],
    )
    # Held-out samples share no random numbers with training's.
    self.assertNotEqual(evaluators["seed"], searchers["seed"])
