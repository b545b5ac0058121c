# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives, importance weights and log-probs: pure functions on arrays."""
