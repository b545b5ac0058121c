# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes, locks, JSON files, threads, buckets. No JAX here."""
