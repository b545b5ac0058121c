# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A custom loss (docs/reference/objectives.md): contrastive policy gradient.

    python -m tba_jax.main --config=configs/arithmetic.py:smoke \\
        --config.loss.name=examples/copg.py:copg_loss --workdir=/tmp/copg
"""

import jax.numpy as jnp


def copg_loss(groups, c, beta):
  """Returns the contrastive policy gradient loss over all pairs of a group.

      loss = 1/B Σ_b 1/(K-1) Σ_{i>j} (R(y_i) - R(y_j))²,   R = r - β ρ

  with ρ = log π - log π_ref. Source: Flet-Berliac et al. 2024
  (arXiv:2406.19185). As Σ_{i>j} (a_i - a_j)² = K Σ_i (a_i - ā)², its gradient
  is β² K²/(K-1) times that of the paper's trajectory balance. The unit scale,
  ours, is 1/(2βK) times that: K/(K-1) times the gradient of `tb`.

  Args:
    groups: `tba_jax.losses.groups.Groups`.
    c: `config.loss`; reads `scale`.
    beta: [] float32, reward per nat.

  Returns:
    Loss, [] float32, and no arrays for metrics.
  """
  left_BxK = groups.rewards_BxK - beta * groups.rho_BxK
  K = left_BxK.shape[1]
  pairs_BxKxK = left_BxK[:, :, None] - left_BxK[:, None, :]
  # Each pair occurs twice in the sum.
  loss = jnp.mean(jnp.square(pairs_BxKxK).sum(axis=(1, 2))) / (2 * (K - 1))
  return (loss / (2 * beta * K) if c.scale == "unit" else loss), {}
