# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What moves groups and params between the roles: ports, and their channels."""
