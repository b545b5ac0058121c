# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention and matrix products in kernels of accelerators and CPUs."""
