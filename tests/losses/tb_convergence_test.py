# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What trajectory balance converges to, where it can be enumerated.

The behavior policy is uniform and never changes: as off-policy as it gets.
"""

from collections.abc import Callable

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax.losses import build
from tba_jax.losses import groups
from tba_jax.losses import policy_gradient
from tba_jax.losses import tb

NUM_OUTCOMES = 8
K = 16
BETA = 0.5
REF_LOGPROBS = jax.nn.log_softmax(
    jnp.asarray(np.random.default_rng(0).normal(size=NUM_OUTCOMES), jnp.float32)
)
REWARDS = jnp.asarray(
    np.random.default_rng(1).uniform(size=NUM_OUTCOMES), jnp.float32
)
TARGET = jax.nn.softmax(REF_LOGPROBS + REWARDS / BETA)


def train(loss_fn: Callable[..., jax.Array], num_steps: int = 3000):
  """Returns what is learned from uniform samples, and its TV to the target."""
  tx = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
  params = {"logits": jnp.zeros(NUM_OUTCOMES), "log_z": jnp.zeros((1, 1))}

  def loss_of(params, outcomes_1xK):
    logprobs = jax.nn.log_softmax(params["logits"])
    take = lambda x: x[outcomes_1xK]
    return loss_fn(
        take(logprobs), take(REF_LOGPROBS), take(REWARDS), params["log_z"]
    )

  def step(carry, rng):
    params, opt_state = carry
    outcomes_1xK = jax.random.randint(rng, (1, K), 0, NUM_OUTCOMES)
    grads = jax.grad(loss_of)(params, outcomes_1xK)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), None

  (params, _), _ = jax.jit(
      lambda: jax.lax.scan(
          step,
          (params, tx.init(params)),
          jax.random.split(jax.random.PRNGKey(2), num_steps),
      )
  )()
  learned = jax.nn.softmax(params["logits"])
  return params, float(jnp.abs(learned - TARGET).sum() / 2)


class TbConvergenceTest(absltest.TestCase):

  def test_the_start_is_far_from_the_target(self):
    uniform = np.full(NUM_OUTCOMES, 1 / NUM_OUTCOMES)
    self.assertGreater(np.abs(uniform - TARGET).sum() / 2, 0.2)

  def test_vargrad_reaches_the_target(self):
    for scale in tb.SCALES:
      with self.subTest(scale):
        _, distance = train(
            lambda s, f, r, z, scale=scale: tb.vargrad_tb_loss(
                s, f, r, beta=BETA, scale=scale
            )[0]
        )
        self.assertLess(distance, 0.01)

  def test_its_other_forms_reach_the_target(self):
    def tba_prime(s, f, r, z):
      del z
      one = jnp.ones((1, K, 1))
      some = groups.Groups(s[..., None], one, f[..., None], one, one, r)
      row = build.OBJECTIVES["tba_prime"]
      return row.loss(some, {}, beta=BETA, scale="unit")[0]

    forms = {"tba_prime": tba_prime}
    for loss_fn in (tb.copg_loss, tb.gvpo_loss):
      forms[loss_fn.__name__] = lambda s, f, r, z, loss_fn=loss_fn: loss_fn(
          s, f, r, beta=BETA, scale="unit"
      )[0]
    for name, form in forms.items():
      with self.subTest(name):
        self.assertLess(train(form)[1], 0.01)

  def test_learned_z_reaches_the_target_and_its_normalizer(self):
    params, distance = train(
        lambda s, f, r, z: tb.learned_z_tb_loss(
            s, f, r, z, beta=BETA, scale="paper"
        )[0]
    )
    self.assertLess(distance, 0.01)
    log_z = jax.nn.logsumexp(REF_LOGPROBS + REWARDS / BETA)
    self.assertAlmostEqual(params["log_z"][0, 0], log_z, delta=0.05)

  def test_reinforce_without_a_ratio_does_not(self):
    def reinforce(seq, ref_seq, rewards, log_z):
      del ref_seq, log_z
      return policy_gradient.reinforce_loss(seq, rewards)[0]

    _, distance = train(reinforce)
    self.assertGreater(distance, 0.2)


if __name__ == "__main__":
  absltest.main()
