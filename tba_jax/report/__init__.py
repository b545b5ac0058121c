# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run shows: the report page, the panel, and the diagnosis."""
