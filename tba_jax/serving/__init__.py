# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training and sampling over HTTP: the Tinker API, an engine, its journal."""
