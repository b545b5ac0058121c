# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels of accelerators, run on a CPU."""

from collections.abc import Iterator
import contextlib
import functools
from unittest import mock

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

from tba_jax.models.kernels import gpu_rows
from tba_jax.models.kernels import splash_rows

_attend_xla = jax.nn.dot_product_attention


@contextlib.contextmanager
def patch(kernel: str) -> Iterator[None]:
  """Lets a kernel run on a CPU, if it needs an accelerator.

  Interprets Splash and kernels of packed rows; replaces cuDNN's attention by
  XLA's, with cuDNN's limits.
  """
  interpreted = lambda fn: functools.partial(fn, interpret=True)
  patch = lambda module, name: mock.patch.object(
      module, name, interpreted(getattr(module, name))
  )

  def run(q, k, v, *, implementation, **kwargs):
    if q.shape[1] % 2 or k.shape[1] % 2:
      raise NotImplementedError("cuDNN's gradient of an odd length")
    return _attend_xla(q, k, v, implementation="xla", **kwargs)

  with (
      patch(splash_lib, "make_splash_mha"),
      patch(splash_rows, "attend"),
      patch(gpu_rows, "attend"),
      mock.patch.object(jax.nn, "dot_product_attention", run)
      if kernel == "cudnn"
      else contextlib.nullcontext(),
  ):
    yield
