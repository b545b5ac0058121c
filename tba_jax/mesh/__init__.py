# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices of a role: sharding rules, and the processes of a cluster."""
