# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of packed rows are those of each sequence computed alone."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pytest

from tba_jax.learning import train_step
from tba_jax.models.net import delta
from tba_jax.models.net import row_attention
from tba_jax.policy import lora
from tests.support import packed_gradients
from tests.support import rows
from tests.support import tiny_model

_WINDOWS = dict(
    family="gemma3_text", sliding_window=3, global_layers=(False, True)
)
_SINKS = dict(_WINDOWS, family="gpt_oss", num_experts=4, experts_per_token=2)
_FAMILIES = (
    dict(family="ministral3", query_growth=0.5, rope_original_positions=3),
    dict(family="olmo3", sliding_window=3, global_layers=(False, True)),
    dict(family="smollm3", rotary_layers=(True, False)),
)
_WIDE_VALUES = dict(tiny_model.LATENTS, value_dim=14, query_rank=0)
_EXPERTS = dict(family="qwen3_moe", num_experts=6, experts_per_token=2)
# Two periods of layers with experts, without any, and with them.
_SPARSE = dict(
    tiny_model.SPARSE,
    num_experts=6,
    num_layers=6,
    delta_layers=(True, False, False) * 2,
    dense_layers=(False, True, False) * 2,
)


class PackedGradientsTest(parameterized.TestCase):

  def check(
      self, model, batch, micro_completions=0, expected=None, adapters=None,
      **loss,
  ):  # fmt: skip
    config = packed_gradients.make_config()
    config.loss.update(loss)
    params, others = tiny_model.init_params(model), {}
    if adapters is not None:
      others = dict(adapters=adapters, base=params)
      start = jax.jit(adapters.init)(jax.random.key(0))
      params = jax.tree.map(lambda x: x + 0.1, start)
    packed = rows.pack(batch, 1, micro_completions, packed_gradients.ROW_LENGTH)
    self.assertGreater(rows.num_micro_batches(packed), 1)
    found = packed_gradients.of_rows(
        *(config, model, params, packed),
        cuts_groups=bool(micro_completions),
        **others,
    )
    expected = expected or packed_gradients.of_sequences
    expected = expected(config, model, params, batch, **others)
    gap = packed_gradients.relative_gap(found, expected)
    self.assertLess(gap, packed_gradients.TOLERANCE)

  @parameterized.parameters("tb", "grpo")
  def test_objectives_agree(self, name):
    self.check(
        tiny_model.make_model(), packed_gradients.make_batch(), name=name
    )

  # One of each kind: objectives_test has all, with a tabular policy.
  @parameterized.parameters(
      "tb", "tb_learned_z", "subtb", "a_star_po", "flowrl", "proximal_rloo",
      "grpo", "ppo", "online_dpo", "gkd",
  )  # fmt: skip
  @pytest.mark.slow
  def test_objectives_agree_with_turns(self, name):
    batch = packed_gradients.make_batch(has_turns=True)
    self.check(tiny_model.make_model(), batch, name=name, ratio_clip=0.2)

  @pytest.mark.slow
  def test_cut_groups_agree(self):
    batch = packed_gradients.make_batch()
    self.check(tiny_model.make_model(), batch, micro_completions=2, name="tb")

  @parameterized.product(
      by_blocks=[False, True],
      shape=[
          _WINDOWS,
          _SINKS,
          tiny_model.LATENTS,
          _WIDE_VALUES,
          tiny_model.SHARED,
      ],
  )
  @pytest.mark.slow
  def test_layers_with_windows_or_latents_agree(self, by_blocks, shape):
    with (
        mock.patch.object(row_attention, "WHOLE", 0 if by_blocks else 512),
        mock.patch.dict(row_attention.BLOCK, cpu=8),
    ):
      self.check(tiny_model.make_model(**shape), packed_gradients.make_batch())

  @parameterized.parameters(*_FAMILIES)
  @pytest.mark.slow
  def test_kinds_of_layers_agree(self, **shape):
    self.check(tiny_model.make_model(**shape), packed_gradients.make_batch())

  @parameterized.parameters(4, 64)
  @pytest.mark.slow
  def test_layers_with_states_agree(self, chunk):
    model = tiny_model.make_model(
        **dict(tiny_model.STATES, delta_layers=(True, False) * 2),
        num_layers=4,
    )
    with mock.patch.object(delta, "CHUNK", chunk):
      self.check(model, packed_gradients.make_batch(has_turns=True))
      self.check(model, packed_gradients.make_batch(), micro_completions=2)

  @pytest.mark.slow
  def test_adapters_agree(self):
    model = tiny_model.make_model()
    adapters = lora.make(dict(rank=2, alpha=4.0, targets="all"), model)
    self.check(model, packed_gradients.make_batch(), adapters=adapters)

  @parameterized.product(
      shape=[_EXPERTS, _SPARSE, tiny_model.LATENTS, tiny_model.BOTH],
      is_replayed=[False, True],
  )
  @pytest.mark.slow
  def test_experts_agree_chosen_and_replayed(self, shape, is_replayed):
    model = tiny_model.make_model(**shape)
    if not is_replayed:
      self.check(model, packed_gradients.make_batch())
      return
    c = model.config
    route_shape = c.num_expert_layers, c.experts_per_token, c.num_experts
    batch = packed_gradients.make_batch(route_shape=route_shape)

    def padded(config, model, params, batch):
      batch = train_step.in_rows(batch)
      return packed_gradients.of_rows(config, model, params, batch)

    self.check(model, batch, expected=padded)


if __name__ == "__main__":
  absltest.main()
