# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Frozen models on eight devices: each holds its part and the scores agree.

Runs in a process of its own, for its XLA flag.
"""

import pathlib
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np

from tba_jax.learning import work_parts
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_files
from tba_jax.models.net import encoder as encoder_lib
from tba_jax.models.net import heads
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import red_team_models
from tba_jax.rewards import reward_scorer
from tba_jax.system import hlo
from tba_jax.tasks import task_table
from tests.support import base_config
from tests.support import cpu_devices
from tests.support import tiny_model

cpu_devices.make(8)

jax.config.update("jax_numpy_rank_promotion", "raise")

_TOKENIZER = tokenizer_lib.word_level(list("abcdefghijklm"), ".")


def setUpModule():
  cpu_devices.skip_without(8)


def _mesh(**sizes):
  return sharding.make_mesh({**dict.fromkeys(sharding.MESH_AXES, 1), **sizes})


class FrozenTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = base_config.make()
    self.config.reward.batch_size = 3
    # The policy's kernel, which none of these models can have on a CPU.
    self.config.model.attention = "splash"
    self.folder = pathlib.Path(self.create_tempdir().full_path, "model")
    shape = tiny_model.make_model(vocab_size=_TOKENIZER.vocab_size).config
    self.model = heads.ScalarModel(heads.config_of(shape))
    self.params = tiny_model.init_params(self.model)
    hf.save(self.folder, self.model.config, self.params, _TOKENIZER)
    self.sizes = [x.nbytes for x in jax.tree.leaves(self.params)]
    # Bytes that were read of the files, by call.
    self.read, whole = [], hf_files.WeightFiles.read

    def count(files, name, index):
      result = whole(files, name, index)
      self.read.append(result.nbytes)
      return result

    self.enter_context(mock.patch.object(hf_files.WeightFiles, "read", count))

  def held(self, params):
    """Returns the bytes of params that each device holds."""
    shards = [s for x in jax.tree.leaves(params) for s in x.addressable_shards]
    return [
        sum(s.data.nbytes for s in shards if s.device == device)
        for device in jax.devices()
    ]

  @parameterized.parameters(
      (dict(data=2, fsdp=4), 4),
      (dict(fsdp=4, tensor=2), 8),
      (dict(fsdp=2, sequence=2, tensor=2), 8),
  )
  def test_reward_model_scores_as_on_one_device(self, sizes, parts):
    texts = [
        reward_scorer.Text("abcdefgh"[: n % 8 + 1], "ijk"[: n % 3 + 1])
        for n in range(7)
    ]
    load = lambda *mesh: frozen_models.load_scorer(
        self.config, "reward.model", self.folder, *mesh
    )
    expected = load().score(texts)
    self.read.clear()
    scorer = load(_mesh(**sizes))
    self.assertEqual(sum(self.read), sum(self.sizes))
    self.assertLess(max(self.read), max(self.sizes))
    # The norms' scales, and a vocabulary that tensor does not divide, are
    # whole in part.
    for each in self.held(scorer.params):
      self.assertBetween(each / sum(self.sizes), 1 / parts, 1.5 / parts)
    np.testing.assert_allclose(scorer.score(texts), expected, atol=1e-5)

  def test_start_of_value_model(self):
    self.config.init = "scratch"
    self.config.tokenizer.source = str(self.folder)
    self.config.loss.name = "ppo"
    self.config.loss.value_init = str(self.folder)
    self.config.mesh.fsdp = 4
    mesh = sharding.make_mesh(self.config.mesh, jax.devices()[:4])
    policy = policy_lib.make_policy(self.config, "/nowhere")
    state = work_parts.init_state(
        self.config,
        policy,
        jax.jit(policy.model.init)(jax.random.PRNGKey(0)),
        mesh,
    )
    self.assertEqual(sum(self.read), sum(self.sizes))
    self.assertLess(max(self.read), max(self.sizes))
    jax.tree.map(
        np.testing.assert_array_equal, state.loss_params["value"], self.params
    )

  def test_models_of_red_teaming_judge_as_on_one_device(self):
    """A victim, a guard and an encoder from folders judge as on one device."""
    shape = tiny_model.make_model(vocab_size=_TOKENIZER.vocab_size)
    hf.save(
        self.folder, shape.config, tiny_model.init_params(shape), _TOKENIZER
    )
    task = task_table.make_task(
        dict(
            name="red_team",
            victim=str(self.folder),
            victim_template="{attack}",
            victim_samples=2,
            victim_max_tokens=4,
            victim_max_prompt_tokens=6,
            victim_rows=3,
        )
    )
    victim = lambda *mesh: red_team_models.load_victim(self.config, task, *mesh)
    expected = victim().answer(["ab", "cde"], visit=0)
    actual = victim(_mesh(fsdp=4, tensor=2))
    self.assertLess(max(self.held(actual._params)), sum(self.sizes) / 4)
    self.assertEqual(actual.answer(["ab", "cde"], visit=0), expected)

  def test_encoder_has_axes_of_its_params(self):
    config = encoder_lib.EncoderConfig(
        *("roberta", 11, 2, 8, 2, 16, 12, 1, 1e-5, "gelu", 1), num_labels=2
    )
    encoder = encoder_lib.Encoder(config)
    params = jax.jit(encoder.init)(jax.random.key(0))
    mesh = _mesh(fsdp=4, tensor=2)
    placed = jax.device_put(
        params,
        sharding.frozen_shardings(mesh, encoder),
    )
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    self.assertLess(max(self.held(placed)), size / 4)
    tokens = np.arange(2, 17, dtype=np.int32).reshape(3, 5) % 11
    mask = np.ones_like(tokens)
    run = sharding.split_rows(encoder.label_scores, mesh)
    np.testing.assert_allclose(
        jax.jit(run)(placed, tokens, mask),
        jax.jit(encoder.label_scores)(params, tokens, mask),
        atol=1e-5,
    )

  def test_encoder_gathers_params_and_no_activations(self):
    config = encoder_lib.EncoderConfig(
        *("bert", 32, 2, 64, 2, 256, 64, 1, 1e-5, "gelu", 1), num_labels=0
    )
    encoder = encoder_lib.Encoder(config)
    shapes = jax.eval_shape(encoder.init, jax.random.key(0))
    mesh = _mesh(fsdp=8)
    run = jax.jit(
        sharding.split_rows(encoder.mean_pooled, mesh),
        in_shardings=(
            sharding.frozen_shardings(mesh, encoder),
            *[sharding.replicated(mesh)] * 2,
        ),
    )
    texts = jax.ShapeDtypeStruct((128, 64), np.int32)
    text = run.lower(shapes, texts, texts).compile().as_text()
    num_params = sum(x.size for x in jax.tree.leaves(shapes))
    received = hlo.costs(text).collective_bytes
    self.assertLess(received / num_params, 5)
