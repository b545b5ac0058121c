# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that cannot join a trainer's others says what is wrong."""

import socket
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from tba_jax.config import settings as settings_lib
from tba_jax.training import cluster
from tba_jax.transport import locator

_SECRET = b"s" * 32


class JoinTest(parameterized.TestCase):

  def settings(self, num_processes, coordinator=""):
    settings = settings_lib.get_config().trainer
    settings.num_processes = num_processes
    settings.coordinator = coordinator
    return settings

  @parameterized.parameters(("2",), ("-1",), ("one",))
  def test_a_process_that_is_not_one_of_them(self, operand):
    with self.assertRaisesRegex(ValueError, f"operand '{operand}'.*0 to 1"):
      cluster.join(self.settings(2, "host:1"), [operand], _SECRET)

  def test_several_processes_need_a_coordinator(self):
    with self.assertRaisesRegex(ValueError, "trainer.coordinator = ''"):
      cluster.join(self.settings(2), ["0"], _SECRET)

  def test_an_operand_stands_before_the_setting(self):
    parse = cluster._parse
    self.assertEqual(parse(self.settings(2), []), (None, None))
    settings = self.settings(2, "host:1")
    self.assertEqual(parse(settings, ["1"]), (1, "host:1"))
    self.assertEqual(parse(settings, ["1", "other:2"]), (1, "other:2"))

  def test_a_coordinator_s_address_must_be_free(self):
    with socket.socket() as taken:
      taken.bind(("127.0.0.1", 0))
      taken.listen()
      address = f"127.0.0.1:{taken.getsockname()[1]}"
      with self.assertRaisesRegex(ValueError, f"'{address}': .*cannot listen"):
        cluster.join(self.settings(2, address), ["0"], _SECRET)

  def test_one_process_joins_nobody(self):
    tls = locator.Tls("cert", "key", "ca")
    alone = cluster.join(self.settings(1), [], _SECRET, tls)
    self.assertEqual((alone.num_processes, alone.leads), (1, True))

  def test_tls_is_never_left_out(self):
    tls = locator.Tls("cert", "key", "ca")
    settings = self.settings(2, "host:1")
    without = lambda coordinator_address: None
    with mock.patch.object(jax.distributed, "initialize", without):
      with self.assertRaisesRegex(ValueError, "tls_cert_file = 'cert': .*0.11"):
        cluster.join(settings, ["1"], _SECRET, tls)
    offers = lambda mtls_cert_file, mtls_key_file, mtls_ca_file: None
    with mock.patch.object(jax.distributed, "initialize", offers):
      found = cluster._tls_options(tls)
    self.assertEqual(
        found,
        dict(
            mtls_cert_file="cert",
            mtls_key_file="key",
            mtls_ca_file="ca",
            verify_secure_credentials=True,
        ),
    )


if __name__ == "__main__":
  absltest.main()
