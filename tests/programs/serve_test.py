# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a server says while requests wait."""

import contextlib
import io

from absl.testing import absltest
import jax
import jax.numpy as jnp

from tba_jax.programs import serve
from tests.support import waiting


class CompilingTest(absltest.TestCase):

  def test_long_compilation_is_named_at_its_begin_and_end(self):
    self.addCleanup(jax.monitoring.clear_event_listeners)
    with contextlib.redirect_stderr(io.StringIO()) as said:
      serve.report_compiling(after_s=0.0)

      def twice(x):
        return 2 * x

      jax.jit(twice)(jnp.ones(7)).block_until_ready()
      self.assertIn("compiled jit(twice) in 0 s", said.getvalue())
      # The compiler would be done before the line is due.
      lowered = "/jax/core/compile/jaxpr_to_mlir_module_duration"
      jax.monitoring.record_event_duration_secs(lowered, 0.1, fun_name="f")
      waiting.wait_until(lambda: "compiling f, for" in said.getvalue())

  def test_short_compilation_is_silent(self):
    self.addCleanup(jax.monitoring.clear_event_listeners)
    with contextlib.redirect_stderr(io.StringIO()) as said:
      serve.report_compiling(after_s=60.0)
      jax.jit(lambda x: 3 * x)(jnp.ones(7)).block_until_ready()
    self.assertEmpty(said.getvalue())
