# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""APIs that agents call: requests, answers, and tool calls in turns."""
