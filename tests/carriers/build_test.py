# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of build.py: the rule by which a carrier is chosen."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax import config_ranges
from tba_jax import run_directory
from tba_jax.carriers import build
from tests import base_config

_BIG = build.SMALL_BYTES + 1


class BuildTest(parameterized.TestCase):

  @parameterized.parameters(
      ("auto", build.SMALL_BYTES, True, True, "store"),
      ("auto", _BIG, True, False, "files"),
      ("auto", _BIG, False, True, "files"),
      ("auto", _BIG, False, False, "store"),
      ("auto", build.STORE_BYTES + 1, False, False, "transfer"),
      ("auto", build.STORE_BYTES + 1, True, False, "files"),
      ("transfer", 1, True, True, "transfer"),
      ("store", _BIG, True, True, "store"),
      ("files", 1, False, False, "files"),
  )
  def test_rule(self, setting, num_bytes, one_host, directory_set, wanted):
    found = build.choose(
        setting,
        num_bytes=num_bytes,
        one_host=one_host,
        directory_set=directory_set,
    )
    self.assertEqual(found, wanted)

  @parameterized.parameters(
      ("", True),
      ("127.0.0.1:0", True),
      ("localhost:0", True),
      ("[::1]:0", True),
      ("10.0.0.1:7000-7010", False),
  )
  def test_one_host(self, address, wanted):
    self.assertEqual(build.is_one_host(address), wanted)

  def test_carriers_of_a_config(self):
    run = run_directory.Run(
        workdir=pathlib.Path("/nowhere"),
        run_id="r",
        spool=pathlib.Path("/nowhere/spool"),
        secret=b"s" * 32,
    )
    big = {"['w']": ((_BIG,), np.dtype(np.int8))}
    names = lambda config: [
        c.name for c in build.make_writers(config, run, big)
    ]
    # What no file has room for goes through the store.
    self.assertEqual(names(base_config.make()), ["files", "store"])
    config = base_config.make(publish__carrier="files")
    self.assertEqual(names(config), ["files"])
    # The config's names are those of the carriers.
    self.assertEqual(
        {"auto", *build.make_readers(config, run)},
        set(config_ranges.NAMES["publish.carrier"]),
    )


if __name__ == "__main__":
  absltest.main()
