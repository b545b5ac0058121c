# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer families, the KV cache, and Hugging Face folders in and out."""
