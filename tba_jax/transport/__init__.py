# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The key-value store, its wire format, and how parameters travel."""
