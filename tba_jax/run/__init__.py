# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run writes: its directory, metrics, events, and their writers."""
