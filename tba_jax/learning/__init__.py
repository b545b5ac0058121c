# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Train step, batches, optimizer, checkpoints and trainer processes."""
