# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The replay buffer, journal and ledger, and the two ends of the queue."""
