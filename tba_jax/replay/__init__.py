# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The replay buffer, its ledger, the prompt order, and recorded decisions."""
