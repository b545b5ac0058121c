# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler with the kernels of decode steps, interpreted."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest

from tba_jax.sampling import decode
from tba_jax.sampling import slots as slots_lib
from tests.support import sampler_case
from tests.support import tiny_model


class RaggedTest(parameterized.TestCase):

  @parameterized.parameters(
      # The kernel, parts of the heads, and what else differs.
      ("pages", 1, {}),
      ("splits", 2, dict(family="mistral", sliding_window=6)),
      ("pages", 2, dict(family="gpt_oss", num_experts=4, experts_per_token=2)),
  )
  @pytest.mark.slow
  def test_completions_are_those_of_plain_attention(self, kernel, parts, shape):
    # Twelve completions of all lengths go through four rows.
    model = tiny_model.make_model(
        num_layers=1, num_kv_heads=2, head_dim=16, max_positions=80, **shape
    )
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    rng = np.random.default_rng(0)
    requests = [
        decode.Request(
            rng.integers(2, tiny_model.VOCAB, length), length, 0, 2,
            max_tokens=most,
        )
        for length, most in ((1, 50), (2, 3), (5, 9), (9, 1), (16, 12), (3, 5))
    ]  # fmt: skip
    chex.clear_trace_counter()
    decode_chunk, found = slots_lib.decode_chunk, {}
    for name in ("plain", kernel):
      sampler = sampler_case.make(
          model,
          num_rows=4,
          max_prompt_tokens=16,
          max_completion_tokens=64,
          temperature=0.0,
      )
      with (
          mock.patch.object(slots_lib, "num_head_shards", lambda *_: parts),
          mock.patch.object(slots_lib, "decode_kernel", lambda *_, n=name: n),
          mock.patch.object(slots_lib, "decode_chunk", decode_chunk),
      ):
        found[name] = sampler.sample(params, requests, version=0)
        (programs,) = sampler._programs.values()
      # Lengths change, and a kernel's program stays.
      decode_chunk = chex.assert_max_traces(decode_chunk, n=1)
    self.assertEqual(programs.segment_lengths, (16, 64))
    lengths = np.concatenate([f.lengths for f in found[kernel]])
    self.assertGreater(len(set(lengths.tolist())), 3)
    for one, other in zip(found["plain"], found[kernel], strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
