# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain attention of packed rows, whole and by blocks."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.net import attention
from tba_jax.models.net import packed
from tba_jax.models.net import row_attention
from tests.support import rows

_SIZE = 16


class RowAttentionTest(parameterized.TestCase):

  @parameterized.product(window=[0, 9], platform=["cpu", "gpu"])
  def test_blocks_equal_whole_rows_with_gradients(self, window, platform):
    places = rows.make_places()
    q, k, v = rows.make_inputs(places)
    sinks = rows.make_sinks(q) if window else None
    is_real = (places.group >= 0)[..., None, None, None]

    def run(whole):
      def fn(q, k, v, sinks):
        out = row_attention.attend_rows(
            q, k, v, places, places, window, platform, sinks
        )
        out = jnp.where(is_real, out, 0)
        return jnp.sum(jnp.sin(out)), out

      with (
          mock.patch.object(row_attention, "WHOLE", 999 * whole),
          mock.patch.dict(row_attention.BLOCK, cpu=_SIZE, short=_SIZE),
      ):
        grad = jax.value_and_grad(fn, (0, 1, 2, 3), has_aux=True)
        return jax.jit(grad)(q, k, v, sinks)

    chex.assert_trees_all_close(run(False), run(True), rtol=1e-5, atol=1e-6)

  @parameterized.product(
      window=[0, 5],
      shape=[(9, 18), (3, 20), (14, 6), (1, 7)],
      has_padding=[False, True],
  )
  def test_short_rows_equal_all_scores_with_gradients(
      self, window, shape, has_padding
  ):
    P, T = shape
    places = rows.make_places(K=4, P=P, T=T)
    if has_padding:
      prompt_mask = jnp.arange(P)[None] >= jnp.arange(5)[:, None] % P
      tokens = packed.unpacked(prompt_mask, (5, 4, T), 19)
      places = packed.places_of(tokens, prompt_mask, (5, 4, T))
    q, k, v = rows.make_inputs(places)
    is_real = (places.group >= 0)[..., None, None, None]

    def all_scores(q, k, v, queries, keys, window, platform):
      del platform
      seen = packed.sees(queries, keys, window)
      return attention.attend_self(q, k, v, seen)

    def compile_with(attend):
      def fn(q, k, v):
        out = attend(q, k, v, places, places, window, "cpu")
        out = jnp.where(is_real, out, 0)
        return jnp.sum(jnp.sin(out)), out

      grad = jax.value_and_grad(fn, (0, 1, 2), has_aux=True)
      return jax.jit(grad).lower(q, k, v).compile()

    ours, reference = map(compile_with, (row_attention.attend_rows, all_scores))
    chex.assert_trees_all_close(
        ours(q, k, v), reference(q, k, v), rtol=1e-5, atol=1e-6
    )
    if not has_padding:
      flops = [x.cost_analysis()["flops"] for x in (ours, reference)]
      self.assertLess(flops[0], 0.7 * flops[1])

  def test_scores_of_long_rows_are_not_held(self):

    def memory(L):
      array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
      places = packed.Places(
          *[jax.ShapeDtypeStruct((1, L), jnp.int32)] * 7,
          num_prompt=64,
          num_completion=64,
      )

      def loss(q, k, v, places):
        out = row_attention.attend_rows(q, k, v, places, places, 0, "cpu")
        return out.sum()

      inputs = array(1, L, 1, 1, 8), *[array(1, L, 1, 8)] * 2, places
      compiled = jax.jit(jax.grad(loss)).lower(*inputs).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    self.assertLess(memory(4096), 2.5 * memory(2048))

  @parameterized.parameters(0, 9)
  def test_visits_all_blocks_with_a_key_and_few_others(self, window):
    places = rows.make_places()
    needed = rows.needed_blocks(places, window, _SIZE)
    R, num, _ = needed.shape
    blocks = jax.tree.map(lambda x: x.reshape(R, num, _SIZE), places)
    prompt, num_prompt, start, num_own = map(
        np.asarray, packed.seen_blocks(blocks, window, _SIZE)
    )
    visited = np.zeros((R, num, num), bool)
    for r, i in np.ndindex(R, num):
      visited[r, i, prompt[r, i] : prompt[r, i] + num_prompt[r, i]] = True
      visited[r, i, start[r, i] : start[r, i] + num_own[r, i]] = True
    self.assertFalse((needed & ~visited).any())
    self.assertLess(visited.sum(), 1.15 * needed.sum())


if __name__ == "__main__":
  absltest.main()
