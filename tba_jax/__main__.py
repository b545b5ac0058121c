# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax` is `tba_jax`, the command."""

from tba_jax import main

if __name__ == "__main__":
  main.run()
