# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of a run: the report page, the panel, and the diagnosis."""
