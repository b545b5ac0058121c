# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting once: default, range and meaning; loading and checks."""
