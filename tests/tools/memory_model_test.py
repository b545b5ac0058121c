# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""All that a device holds counts towards whether a run fits."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized
import jax
import pytest

from tba_jax.config import settings
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf_config
from tba_jax.models.net import transformer
from tba_jax.programs import model_sizes
from tba_jax.tasks import red_team
from tba_jax.tools import memory_model

_ENCODER = {
    "model_type": "bert", "vocab_size": 100, "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 32, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip


def _bytes(shape):
  """Returns the bytes of the params of a model on one device."""
  model = transformer.make_model(shape, scalar=bool(shape.num_labels))
  params = jax.eval_shape(model.init, jax.random.key(0))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


class ResidentTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()
    self.shape = model_sizes.model_of(self.config)
    self.params = _bytes(self.shape)
    # A head of one row in place of 17.
    self.scorer = self.params - 4 * 16 * 64

  def trainer(self, platform="cpu"):
    mesh = sharding.abstract_mesh(self.config.mesh, platform)
    return memory_model.trainer(self.config, mesh)

  def searcher(self, platform="cpu"):
    mesh = sharding.abstract_mesh(
        memory_model.searcher_sizes(self.config), platform
    )
    return memory_model.searcher(self.config, mesh)

  def totals(self):
    """Returns the bytes that a trainer's and a searcher's device hold."""
    roles = self.trainer(), self.searcher()
    return tuple(sum(role.resident.values()) for role in roles)

  def added(self, before):
    return tuple(now - was for now, was in zip(self.totals(), before))

  def make_folder(self, dtype="float32", num_labels=1):
    """Makes a folder without weights, of a model of fewer layers.

    Returns it and the bytes of its params.
    """
    shape = dataclasses.replace(
        self.shape, num_layers=1, num_labels=num_labels, param_dtype=dtype
    )
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    return str(folder), _bytes(shape)

  def test_mesh_splits_params(self):
    before = self.trainer().resident
    self.assertEqual(before["params"], self.params)
    self.assertBetween(before["optimizer"] / self.params, 2.0, 2.001)
    self.config.mesh.fsdp = 2
    self.assertBetween(
        self.trainer().resident["params"] / self.params, 0.5, 0.6
    )

  def test_evaluation_runs_on_devices_of_one_process(self):
    self.config.evaluate.update(batch_prompts=4096, num_completions=64)
    self.config.mesh.fsdp = 8
    alone = self.trainer().evaluation
    self.config.trainer.num_processes = 4
    several = self.trainer().evaluation
    # Process 0 has 2 of 8 devices.
    name = "params, gathered for an evaluation"
    self.assertBetween(several[name] / self.params, 0.5, 0.6)
    rows = "KV cache of an evaluation, 262144 rows"
    self.assertEqual(several[rows], 4 * alone[rows])

  def test_evaluations_and_steps_take_turns(self):
    self.config.evaluate.update(every_steps=10, batch_prompts=2**20)
    # Beside training the evaluation has a copy of the params.
    peak = self.trainer().peak
    self.assertEqual(peak["params, copied for an evaluation"], self.params)
    self.assertIn("gradients", peak)
    self.config.search.lockstep = True
    self.assertNotIn("gradients", self.trainer().peak)
    self.config.evaluate.batch_prompts = 1
    self.assertIn("gradients", self.trainer().peak)

  def test_step_keeps_activations(self):
    name = "activations kept for them, at least"
    dots = self.trainer().step[name]
    self.config.train.remat = "none"
    everything = self.trainer().step[name]
    self.config.train.remat = "full"
    full = self.trainer().step[name]
    self.assertLess(full, dots)
    self.assertLess(dots, everything)
    self.config.train.micro_batch_prompts //= 4
    self.assertBetween(full / self.trainer().step[name], 3.0, 4.1)

  def test_step_keeps_stream_of_teacher(self):
    name = "activations kept for them, at least"
    alone = self.trainer().step[name]
    self.config.reference.init, _ = self.make_folder(num_labels=0)
    self.config.loss.name = "gkd"
    c = self.config
    num_tokens = (
        c.train.micro_batch_prompts
        * c.train.completions_per_prompt
        * c.sampling.max_completion_tokens
    )
    stream = num_tokens * self.shape.width * 4
    self.assertGreaterEqual(self.trainer().step[name], alone + stream)

  def test_role_holds_reference(self):
    self.assertEqual(self.trainer().resident["reference"], self.params)
    self.assertNotIn("reference", self.searcher().resident)
    self.config.reference.role = "searcher"
    self.assertNotIn("reference", self.trainer().resident)
    self.assertEqual(self.searcher().resident["reference"], self.params)
    # Adapters have their base there already.
    self.config.lora.rank = 2
    self.assertNotIn("reference", self.searcher().resident)

  def test_searcher_of_unmerged_adapters_holds_no_params(self):
    self.config.search.sampler = "vllm"
    # Params are sent from the host.
    self.assertEqual(self.searcher().resident, {})
    self.config.lora.rank = 2
    # A model from scratch has no folder that a server could have loaded.
    self.assertEqual([*self.searcher().resident.values()], [self.params] * 2)
    self.config.init, size = self.make_folder(num_labels=0)
    self.assertEqual(self.searcher().resident, {})
    self.config.reference.role = "searcher"
    self.assertEqual(self.searcher().resident, {"reference": size})

  def test_state_holds_copies_of_params(self):
    self.config.reference.mode = "ema"
    parts = self.trainer().resident
    self.assertEqual(parts["reference that moves"], self.params)
    self.assertNotIn("reference", parts)
    self.config.rounds.update(mini_batches=2, lag_rounds=1)
    self.config.loss.behavior_logprobs = "recomputed"
    parts = self.trainer().resident
    self.assertEqual(parts["params of a round ago"], self.params)
    self.assertEqual(parts["params of the proximal policy"], self.params)

  def test_adapters_have_moments(self):
    self.config.lora.rank = 2
    self.config.lora.targets = "q,down"
    parts = self.trainer().resident
    self.assertNotIn("reference", parts)
    # 3 layers, of each 2 (64 + 4 x 16) and 2 (172 + 64), two moments.
    count = 3 * (2 * 128 + 2 * 236)
    self.assertEqual(parts["adapters"], 4 * count)
    self.assertEqual(parts["base of the adapters"], self.params)
    self.assertBetween(parts["optimizer"], 8 * count, 8 * count + 100)

  def test_devices_of_searcher_share_cache_and_params(self):
    name = "rows and KV cache"
    # Keys and values of 3 layers of 64, float32; tokens, masks and the rest.
    token, others = 2 * 3 * 64 * 4, 256 * 16 * 30
    own = self.searcher().resident[name]
    self.assertBetween(own - 256 * 40 * token, 0, others)
    # Where 8 completions share a prompt that may be as long, in bfloat16.
    self.config.search.prompts_per_round = 32
    self.config.sampling.max_prompt_tokens = 24
    self.config.sampling.max_completion_tokens = 16
    shared = self.searcher("gpu").resident[name]
    self.assertBetween(shared - (32 * 24 + 256 * 16) * token // 2, 0, others)
    self.config.search.mesh.update(data=2, tensor=2)
    parts = self.searcher().resident
    self.assertBetween(parts[name] - 64 * 40 * token, 0, others)
    self.assertBetween(parts["params"] / self.params, 0.5, 0.6)

  def test_searcher_holds_matrices_of_int8(self):
    self.config.search.quantization = "int8"
    for mesh, least in ((dict(), 1 / 4), (dict(data=2, tensor=2), 1 / 8)):
      self.config.search.mesh.update(mesh)
      parts = self.searcher().resident
      # Scales, norms, embeddings and tables of positions beside them.
      share = parts["params"] / self.params
      self.assertBetween(share, least, 1.4 * least)
    self.assertEqual(self.trainer().resident["params"], self.params)

  def test_scales_of_experts_are_split_like_their_axes(self):
    self.config.search.quantization = "int8"
    model = dict(family="qwen3_moe", num_experts=4, experts_per_token=2)
    self.config.model.update(model)
    self.config.search.mesh.fsdp = 2
    mlp = self.searcher().decode_params.layers[0]["mlp"]
    shard = lambda x: x.sharding.shard_shape(x.shape)
    for name in ("gate", "down"):
      E, F = mlp[name].scale.shape
      self.assertEqual(shard(mlp[name].scale), (E, F))
    self.assertLess(shard(mlp["down"].values), mlp["down"].values.shape)
    self.config.search.mesh.update(fsdp=1, tensor=2)
    mlp = self.searcher().decode_params.layers[0]["mlp"]
    self.assertEqual(shard(mlp["down"].scale), (E // 2, F))

  @pytest.mark.slow
  def test_reward_model_is_on_mesh_of_its_role(self):
    before = self.totals()
    self.config.reward.backend = "model"
    # One that is trained later has the policy's shape.
    self.assertEqual(self.added(before), (self.scorer, self.scorer))
    self.config.reward.model, size = self.make_folder("bfloat16")
    self.assertEqual(self.added(before), (size, size))
    # None of the policy's vocabulary of 17 is split.
    self.config.mesh.tensor = 2
    split = self.trainer().resident["reward_model"]
    self.assertBetween(split / size, 0.5, 0.55)

  def test_trainer_holds_gold_model(self):
    before = self.totals()
    self.config.evaluate.judge, size = self.make_folder()
    self.assertEqual(self.added(before), (size, 0))

  def test_both_roles_hold_models_of_red_teaming(self):
    with self.config.unlocked():
      self.config.task = {"name": "red_team", **red_team.RedTeam.FIELDS}
    before = self.totals()
    self.config.task.victim, victim = self.make_folder(num_labels=0)
    self.assertEqual(self.added(before), (victim, victim))
    self.config.task.classifier = "first_token"
    task = self.config.task
    task.classifier_folder, guard = self.make_folder(num_labels=0)
    self.assertEqual(self.added(before), (victim + guard, victim + guard))
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(_ENCODER))
    task.classifier = red_team.RedTeam.FIELDS["classifier"]
    task.classifier_folder = red_team.RedTeam.FIELDS["classifier_folder"]
    task.encoder = str(folder)
    encoder = self.added(before)[0] - victim
    # Encoders are float32 whatever the files have: tables, the block, norms.
    count = (100 + 32 + 2) * 8 + 4 * 8 * 8 + 2 * 8 * 16
    self.assertBetween(encoder / (4 * count), 1.0, 1.2)
    self.config.replay_filter.similarity = "cosine"
    more = (victim + 2 * encoder, victim + encoder)
    self.assertEqual(self.added(before), more)

  def test_value_model_is_trained(self):
    before = self.trainer()
    self.config.loss.name = "ppo"
    own = self.trainer()
    name = "value model with its optimizer"
    self.assertBetween(own.resident[name] / self.scorer, 3.0, 3.001)
    added = own.step["gradients"] - before.step["gradients"]
    self.assertEqual(added, self.scorer)
    self.config.loss.value_init, size = self.make_folder()
    self.assertBetween(self.trainer().resident[name] / size, 3.0, 3.001)

  def test_refuses_folder_without_model(self):
    self.config.evaluate.judge = self.create_tempdir().full_path
    with self.assertRaisesRegex(ValueError, "config.evaluate.judge="):
      self.totals()
