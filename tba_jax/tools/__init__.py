# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that inspect configs and runs: plan, compile, report, verify, …"""
