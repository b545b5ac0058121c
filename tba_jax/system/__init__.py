# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a process needs of its operating system and its files. No JAX here."""
