# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The carrier that a config chooses."""

import pathlib

from absl.testing import parameterized
import numpy as np

from tba_jax.config import settings
from tba_jax.run import run_directory
from tba_jax.transport.params import carrier
from tests.support import base_config

_BIG = carrier.SMALL_BYTES + 1


class CarriersTest(parameterized.TestCase):

  @parameterized.parameters(
      ("auto", carrier.SMALL_BYTES, True, "/d", 1, "store"),
      ("auto", _BIG, True, "", 1, "files"),
      ("auto", _BIG, True, "/d", 2, "files"),
      ("auto", _BIG, False, "/d", 1, "files"),
      ("auto", _BIG, False, "/d", 2, "orbax"),
      ("auto", _BIG, False, "gs://b/d", 1, "orbax"),
      ("auto", _BIG, True, "gs://b/d", 1, "orbax"),
      ("auto", _BIG, False, "", 2, "network"),
      ("auto", _BIG, False, "", 1, "network"),
      ("auto", _BIG, True, "", 1, "files"),
      ("store", _BIG, True, "/d", 1, "store"),
      ("files", 1, False, "", 1, "files"),
      ("orbax", 1, True, "", 1, "orbax"),
  )
  def test_chooses_carrier_by_size_and_place(
      self, setting, num_bytes, one_host, directory, num_processes, expected
  ):
    config = base_config.make(
        publish__carrier=setting,
        publish__directory=directory,
        store__address="127.0.0.1:0" if one_host else "10.0.0.1:8000",
        trainer__num_processes=num_processes,
    )
    self.assertEqual(carrier.choose_carrier(config, num_bytes), expected)

  def test_store_announced_elsewhere_is_on_another_host(self):
    config = base_config.make(store__locator="10.0.0.1:7000")
    self.assertEqual(carrier.choose_carrier(config, _BIG), "network")

  @parameterized.parameters(
      ("10.0.0.9:7011-7019", "", "127.0.0.1:0", "10.0.0.9:7011-7019"),
      ("", "", "", "127.0.0.1:0"),
      ("", "127.0.0.1:7000", "10.0.0.1:7001-7009", "127.0.0.1:0"),
      ("", "", "127.0.0.1:7001-7009", "127.0.0.1:0"),
      ("", "", "[::1]:0", "[::1]:0"),
  )
  def test_serves_at_interface_of_store(
      self, address, store_locator, store, expected
  ):
    config = base_config.make(
        publish__address=address,
        store__locator=store_locator,
        store__address=store,
    )
    self.assertEqual(carrier.serve_address(config), expected)

  def test_unknown_store_host_names_setting(self):
    config = base_config.make(store__address="nowhere.invalid:0")
    with self.assertRaisesRegex(OSError, "publish.address.*nowhere.invalid"):
      carrier.serve_address(config)

  def test_makes_carriers_of_config(self):
    run = run_directory.RunInfo(
        workdir=pathlib.Path("/nowhere"),
        run_id="r",
        spool=pathlib.Path("/nowhere/spool"),
        secret=b"s" * 32,
    )
    big = {"['w']": ((_BIG,), np.dtype(np.int8))}
    names = lambda config: [
        c.name for c in carrier.make_write_carriers(config, run, big)
    ]
    # The network is the fallback for a full disk.
    self.assertEqual(names(base_config.make()), ["files", "network"])
    config = base_config.make(publish__carrier="files")
    self.assertEqual(names(config), ["files"])
    # The config's names are those of the carrier.
    self.assertEqual(
        {"auto", *carrier.make_read_carriers(config, run)},
        set(settings.SETTINGS["publish.carrier"].allowed.names),
    )
