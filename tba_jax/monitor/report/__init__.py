# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders a run directory as one HTML page that needs no network."""
