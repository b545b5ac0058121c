# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The decode loop, token sampling, and the scheduler of rows."""
