# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts, reference completions, and rule-based rewards."""
