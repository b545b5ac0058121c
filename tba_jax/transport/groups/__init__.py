# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups from searchers to the trainer: queues, leases, journal, threads."""
