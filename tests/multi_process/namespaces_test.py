# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links between network namespaces, each with an address, are cut for a while.

The run goes on, and its ledger closes. Making namespaces takes rights that not
every machine gives; without them the test says so and is skipped.
"""

import subprocess
import time

from absl.testing import absltest

from tests.multi_process import cut_links_case

_HOSTS = ("store-0", *cut_links_case.ROLES)


class NamespacesTest(cut_links_case.CutLinksTestCase):

  def setUp(self):
    super().setUp()
    self.prefix = f"tba{time.monotonic_ns() % 10**6}"
    self.hub = f"{self.prefix}-hub"
    try:
      self.add_namespace(self.hub)
      self.ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
      self.ip("-n", self.hub, "link", "set", "br0", "up")
      for number, name in enumerate(_HOSTS, start=1):
        self.add_host(name, number)
    except (OSError, subprocess.CalledProcessError) as error:
      output = getattr(error, "stderr", "") or error
      self.skipTest(f"network namespaces may not be made here: {output}")

  def ip(self, *args):
    subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True, timeout=20
    )

  def add_namespace(self, name):
    self.ip("netns", "add", name)
    self.addCleanup(self.ip, "netns", "del", name)
    self.ip("-n", name, "link", "set", "lo", "up")

  def add_host(self, name, number):
    """Makes a namespace with an address, on a cable to the hub's bridge."""
    space = f"{self.prefix}-{name}"
    self.add_namespace(space)
    self.ip("-n", self.hub, "link", "add", f"to{number}", "type", "veth",
            "peer", "name", "eth0", "netns", space)  # fmt: skip
    self.ip("-n", self.hub, "link", "set", f"to{number}", "master", "br0")
    self.ip("-n", self.hub, "link", "set", f"to{number}", "up")
    self.ip("-n", space, "addr", "add", f"10.199.7.{number}/24", "dev", "eth0")
    self.ip("-n", space, "link", "set", "eth0", "up")

  def test_a_searcher_s_link_then_the_store_s(self):
    locator = "10.199.7.1:7000"
    for name in _HOSTS:
      program, _, index = name.partition("-")
      settings = (
          {"address": "10.199.7.1:7001-7009"} if program == "store" else {}
      )
      space = ["ip", "netns", "exec", f"{self.prefix}-{name}"]
      self.roles.start(
          program, locator, index=int(index), prefix=space, **settings
      )

    def switch(names, state):
      # The store's link is the one cable that all need.
      some = ["store-0"] if len(names) > 1 else names
      for name in some:
        number = _HOSTS.index(name) + 1
        self.ip("-n", self.hub, "link", "set", f"to{number}", state)

    self.cut_searcher_then_store(
        lambda names, *, reset: switch(names, "down"),
        lambda names: switch(names, "up"),
    )
    self.assert_all_ended_well()


if __name__ == "__main__":
  absltest.main()
