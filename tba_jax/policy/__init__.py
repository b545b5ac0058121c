# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model of a run on its mesh: policy, LoRA, reference, frozen models."""
