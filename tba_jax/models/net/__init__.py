# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transformer: layers, attention, KV cache, experts, heads."""
