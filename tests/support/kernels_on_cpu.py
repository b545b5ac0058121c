# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels of accelerators, run on a CPU."""

import functools
from unittest import mock

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

_attend_xla = jax.nn.dot_product_attention


def patch(kernel: str) -> mock._patch:
  """Returns a patch that lets a kernel run on a CPU; others need none.

  Splash is interpreted; cuDNN's attention is XLA's, with cuDNN's limits.
  """
  if kernel == "splash":
    make = functools.partial(splash_lib.make_splash_mha, interpret=True)
    return mock.patch.object(splash_lib, "make_splash_mha", make)

  def run(q, k, v, *, implementation, **kwargs):
    if q.shape[1] % 2 or k.shape[1] % 2:
      raise NotImplementedError("cuDNN's gradient of an odd length")
    return _attend_xla(q, k, v, implementation="xla", **kwargs)

  return mock.patch.object(jax.nn, "dot_product_attention", run)
