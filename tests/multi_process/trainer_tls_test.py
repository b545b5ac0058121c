# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between a trainer's processes, with certificates of openssl.

Skips where jaxlib does not offer it.
"""

import tempfile

from absl.testing import absltest

from tba_jax.system import processes
from tests.multi_process import tls_child
from tests.support import harness
from tests.transport import tls_test

setUpModule = tls_test.setUpModule


class TrainerTlsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tls_test.need_openssl()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ours = tls_test.make_tls(folder, "ours")
    cls.other = tls_test.make_tls(folder, "other")

  def join(self, *tls):
    """Returns what each process printed, and its status."""
    address = f"127.0.0.1:{processes.free_port()}"
    return harness.run_together(
        [tls_child.__file__, i, address, one.cert_file, one.key_file]
        + [one.ca_file]
        for i, one in enumerate(tls)
    )

  def test_processes_of_one_authority_join(self):
    first, second = self.join(self.ours, self.ours)
    self.assertEqual(first[2], 0, first[1])
    self.assertEqual(second[::2], ("heard over TLS\n", 0), second[1])

  def test_process_of_another_authority_is_refused(self):
    for out, err, status in self.join(self.ours, self.other):
      self.assertEqual((out, status), ("", 1), err)
      self.assertIn("not all of config.trainer.num_processes = 2 came", err)
