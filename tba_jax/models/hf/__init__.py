# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders, GGUF files and adapters, in and out."""
