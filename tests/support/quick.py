# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A `jax.jit` for programs that take longer to compile than to run."""

import functools

import jax
import jaxlib

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jaxlib.__version__ < "0.11":  # Later ones compile fusions in one way.
  OPTIONS["xla_cpu_use_fusion_emitters"] = False

# Outermost only: JAX refuses options of a function that another one calls.
jit = functools.partial(jax.jit, compiler_options=OPTIONS)
