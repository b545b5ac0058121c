# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of config_hosts.py: settings of processes and hosts that do not fit."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import relations
from tests.support import base_config


def _problems(**changes):
  values = load.flatten(base_config.make(**changes))
  return [key for key, _ in relations.problems(values)]


class ConfigHostsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(store__probe_timeout_s=60.0), "store.probe_timeout_s"),
      (dict(store__tls_cert_file="/none"), "store.tls_key_file"),
      (dict(store__tls_cert_file="/none"), "store.address"),
      (dict(trainer__num_processes=2), "trainer.num_processes"),
      (dict(mesh__data=4, trainer__num_processes=2, trainer__cpu_devices=4),
       "trainer.cpu_devices"),
      (dict(search__mesh__data=3), "sampling.num_rows"),
      (dict(search__mesh__fsdp=4, sampling__num_rows=18), "sampling.num_rows"),
      (dict(search__mesh__data=4, search__cpu_devices=2), "search.cpu_devices"),
      (dict(publish__directory="gs://b", publish__carrier="files"),
       "publish.directory"),
      (dict(publish__directory="s3://b"), "publish.directory"),
      (dict(publish__carrier="orbax", store__address="10.0.0.1:7000",
            store__insecure=True), "publish.directory"),
  )  # fmt: skip
  def test_wrong_together(self, changes, key):
    self.assertIn(key, _problems(**changes))

  @parameterized.parameters(
      dict(mesh__data=4, trainer__num_processes=2, trainer__cpu_devices=2),
      dict(search__mesh__data=2, search__mesh__fsdp=2, search__cpu_devices=4),
      dict(store__address="127.0.0.1:9000-9010"),
      dict(publish__carrier="orbax"),
      dict(
          publish__carrier="orbax",
          publish__directory="/shared",
          store__address="10.0.0.1:7000",
      ),
  )
  def test_right_together(self, **changes):
    self.assertEqual(_problems(**changes), [])

  @parameterized.parameters(
      ("", True),
      ("127.0.0.1:0", True),
      ("localhost:0", True),
      ("[::1]:0", True),
      ("10.0.0.1:7000-7010", False),
  )
  def test_one_host(self, address, wanted):
    self.assertEqual(relations.is_one_host(address), wanted)


if __name__ == "__main__":
  absltest.main()
