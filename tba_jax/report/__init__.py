# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run directory to one HTML file."""

from tba_jax.report import build

write_report = build.write_report
conclude = build.conclude
