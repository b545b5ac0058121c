# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by chunks of packed rows against its steps."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.net import delta
from tba_jax.models.net import packed
from tests.support import rows
from tests.support import tiny_model

_CONFIG = tiny_model.make_model(
    **dict(tiny_model.STATES, delta_key_heads=2, delta_value_heads=4),
    delta_taps=4,
).config


def _places():
  """Returns rows of several groups, some of whose prompts have one token."""
  return rows.make_places(B=5, K=3, P=7, T=11, length=64, seed=1)


def _inputs(R, L, seed=0):
  """Returns what the projections of a layer give: channels, kernel, α and β."""
  rng = np.random.default_rng(seed)
  H, X = _CONFIG.delta_value_heads, _CONFIG.delta_channels
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  uniform = lambda *shape: jnp.asarray(rng.random(shape), jnp.float32)
  return normal(R, L, X), normal(X, 4), -uniform(R, L, H), uniform(R, L, H)


def _by_steps(places, mixed, conv, log_decay, beta):
  """Returns each place's result and the last states, by the steps of paths."""
  R, L = places.group.shape
  group, owner = np.asarray(places.group), np.asarray(places.owner)
  is_same = lambda x: x[:, :, None] == x[:, None]
  is_own = is_same(owner) | (owner[:, None] == 0)
  is_real = (group >= 0)[:, :, None]
  is_fed = is_same(group) & is_own & is_real & np.tri(L, dtype=bool)
  held = {
      "state": jnp.zeros((R * L, 4, 4, 6)),
      "conv": jnp.zeros((R * L, 3, _CONFIG.delta_channels)),
  }
  each = lambda x: jnp.repeat(x, L, axis=0)
  out, held = delta.steps(
      _CONFIG, held, is_fed.reshape(-1, L), each(mixed), conv,
      each(log_decay), each(beta),
  )  # fmt: skip
  index = np.arange(L)
  states = held["state"].reshape(R, L, 4, 4, 6)
  last = np.where(group >= 0, index, -1).max(axis=1)
  out = out.reshape(R, L, L, 4, 6)[:, index, index]
  return out, states[np.arange(R), last]


class DeltaTest(parameterized.TestCase):

  def over_rows(self, places, inputs, size=64, has_completions=True):
    with mock.patch.object(delta, "CHUNK", size):
      # A new function, since the one of another chunk size is in jit's cache.
      run = lambda *args: delta.over_rows(
          _CONFIG, args[0], has_completions, *args[1:]
      )
      return jax.jit(run)(places, *inputs)

  @parameterized.parameters(4, 8, 64)
  def test_chunks_of_packed_rows_equal_the_steps_of_each_path(self, size):
    places = _places()
    inputs = _inputs(*places.group.shape)
    out, held = self.over_rows(places, inputs, size)
    is_real = np.asarray(places.group >= 0)
    expected, state = jax.jit(functools.partial(_by_steps, places))(*inputs)
    chex.assert_trees_all_close(
        (np.asarray(out)[is_real], held["state"]),
        (np.asarray(expected)[is_real], state),
        rtol=1e-5,
        atol=1e-5,
    )

  @parameterized.product(size=(4, 64), is_packed=(True, False))
  def test_gradients_equal_gradients_of_the_steps(self, size, is_packed):
    places = rows.make_places(B=3, K=2, P=5, T=6, length=32, seed=1)
    if not is_packed:
      places = packed.whole(jnp.arange(11)[None] < jnp.array([[11], [6]]))
    is_real = (places.group >= 0)[..., None, None]

    def by_chunks(*inputs):
      out, held = delta.over_rows(_CONFIG, places, is_packed, *inputs)
      return out, held["state"]

    def grads(run):
      def loss(*inputs):
        out, state = run(*inputs)
        out = jnp.where(is_real, out, 0)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state))

      grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
      return grad(*_inputs(*places.group.shape))

    expected = grads(functools.partial(_by_steps, places))
    with mock.patch.object(delta, "CHUNK", size):
      found = grads(by_chunks)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)

  def test_gradient_calls_no_library(self):
    # On a CPU, calls of LAPACK in parallel can wait for each other's threads.
    places = _places()
    loss = lambda *x: jnp.sum(delta.over_rows(_CONFIG, places, True, *x)[0])
    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    text = grad.lower(*_inputs(*places.group.shape)).as_text()
    self.assertNotIn("custom_call", text)
    self.assertNotIn("triangular_solve", text)

  @parameterized.parameters(4, 64)
  def test_no_bit_of_a_completion_depends_on_another(self, size):
    places = _places()
    inputs = _inputs(*places.group.shape)
    out = np.asarray(self.over_rows(places, inputs, size)[0])
    changed = 0
    for owner in np.unique(np.asarray(places.owner[0])):
      # Tokens planted in place of a whole sequence.
      is_planted = np.asarray(places.owner == owner)
      plant = lambda x, is_it=is_planted: jnp.where(
          is_it[..., None], 1.7 * x, x
      )
      mixed, conv, log_decay, beta = inputs
      found = self.over_rows(
          places, (plant(mixed), conv, plant(log_decay), plant(beta)), size
      )[0]
      is_other = np.asarray(places.group >= 0) & ~is_planted
      if owner == 0:  # Prompts, whose completions do depend on them.
        continue
      np.testing.assert_array_equal(np.asarray(found)[is_other], out[is_other])
      self.assertTrue((np.asarray(found) != out)[is_planted].any())
      changed += 1
    self.assertGreater(changed, 2)

  @parameterized.parameters(4, 64)
  def test_padding_changes_neither_results_nor_states(self, size):
    mixed, conv, log_decay, beta = inputs = _inputs(2, 11)
    whole = packed.whole(jnp.ones((2, 11), bool))
    out, states = self.over_rows(whole, inputs, size, False)
    pad = lambda x: jnp.pad(x, [(0, 0), (5, 3)] + [(0, 0)] * (x.ndim - 2),
                            constant_values=2.0)  # fmt: skip
    mask = np.zeros((2, 19), bool)
    mask[:, 5:16] = True
    padded = pad(mixed), conv, pad(log_decay), pad(beta)
    found, of_padded = self.over_rows(
        packed.whole(jnp.asarray(mask)), padded, size, False
    )
    chex.assert_trees_all_close(found[:, 5:16], out, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(of_padded, states, rtol=1e-5, atol=1e-6)

  def test_states_go_on_with_steps_and_idle_rows_keep_theirs(self):
    mixed, conv, log_decay, beta = inputs = _inputs(2, 12)
    part = lambda stop: [x[:, :stop] if x.ndim == 3 else x for x in inputs]
    expected, _ = self.over_rows(
        packed.whole(jnp.ones((2, 12), bool)), inputs, 4, False
    )
    # The second row has two tokens, fewer than the taps.
    mask = np.arange(9) < np.array([[9], [2]])
    _, held = self.over_rows(packed.whole(jnp.asarray(mask)), part(9), 4, False)
    is_fed = np.array([True, False])
    token = lambda x: x[:, 9:]
    out, after = delta.steps(
        _CONFIG, held, np.stack([is_fed] * 3, axis=1), token(mixed), conv,
        token(log_decay), token(beta),
    )  # fmt: skip
    chex.assert_trees_all_close(out[0], expected[0, 9:], rtol=1e-5, atol=1e-5)
    row = lambda tree: jax.tree.map(lambda x: x[1], tree)
    chex.assert_trees_all_equal(row(after), row(held))
    out, _ = delta.step(
        _CONFIG, held, ~is_fed, mixed[:, 2], conv, log_decay[:, 2], beta[:, 2]
    )
    chex.assert_trees_all_close(out[1], expected[1, 2], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
