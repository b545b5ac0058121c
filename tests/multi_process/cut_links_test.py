# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose links are cut for a while continues, and its ledger closes.

Links are cut by proxies, and between network namespaces.
"""

import dataclasses
import pathlib
import subprocess
import tempfile
import time

from absl.testing import absltest

from tba_jax.system import processes
from tba_jax.transport import locator
from tests.support import harness
from tests.transport import tcp_proxy

_CUT_S = 8.0
# A searcher starts and reads the store in this time.
_EARLY_S = 8.0
ROLES = ("trainer-0", "searcher-0", "searcher-1", "searcher-2")
_HOSTS = ("store-0", *ROLES)


class CutLinksTestCase(absltest.TestCase):
  """Base of the tests, which cut links in different ways."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_cut_")
    self.addCleanup(folder.cleanup)
    self.roles = harness.Roles(pathlib.Path(folder.name))
    self.addCleanup(self.roles.close)

  def cut_searcher_then_store(self, cut, mend):
    """Cuts and mends links; `cut` and `mend` take the names of roles."""
    roles = self.roles
    roles.wait_for(lambda: roles.step() >= 3, "step 3")
    cut(["searcher-0"], reset=False)
    # Others get its prompts meanwhile.
    roles.wait_for(lambda: roles.events("searcher_gone"), "searcher_gone")
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step without it")
    mend(["searcher-0"])
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step after the first")
    cut(ROLES, reset=True)
    roles.wait_for(lambda: roles.events("store_lost"), "store_lost")
    time.sleep(_CUT_S)
    mend(ROLES)
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 10, "step after the second")
    # The trainer resumes from its checkpoint, for a few steps.
    roles.interrupt("trainer-0")
    searchers = [name for name in ROLES if name != "trainer-0"]
    for name in searchers:
      self.assertEqual(roles.wait(name, 60), 75, roles.text())
    # Searchers that reconnect first wait for the next trainer.
    for name in searchers:
      roles.resume(name)
    time.sleep(_EARLY_S)
    self.assertTrue(all(map(roles.is_running, searchers)), roles.text())
    roles.resume("trainer-0", **{"train.num_steps": roles.step() + 8})

  def assert_all_ended_well(self):
    roles = self.roles
    self.assertEqual(roles.wait("trainer-0", 120), 0, roles.text())
    for i in range(harness.NUM_SEARCHERS):
      self.assertEqual(roles.wait(f"searcher-{i}", 60), 0, roles.text())
    harness.check_ledger(roles.read("ledger.json"))
    result = roles.read("result.json")
    self.assertTrue(result["ledger_closed"])
    # The store was never lost.
    self.assertLen(roles.events("store_started"), 1)
    self.assertNotEmpty(roles.events("store_lost"))


class _ProxiedLink(locator.Announcer):
  """A process's link to the store: an announcer, and proxies to announce."""

  def __init__(self, store: str, secret: bytes):
    self._store = store
    self._proxies: dict[int, tcp_proxy.TcpProxy] = {}
    self._is_cut = False
    super().__init__("127.0.0.1:0", secret, "")
    self.address = f"127.0.0.1:{self.port}"

  def close(self) -> None:
    super().close()
    for proxy in self._proxies.values():
      proxy.__exit__()

  def cut(self, *, reset: bool) -> None:
    self._is_cut = True
    for proxy in self._proxies.values():
      proxy.cut(reset=reset)

  def mend(self) -> None:
    self._is_cut = False
    for proxy in self._proxies.values():
      proxy.mend()

  def find(self) -> locator.Locator | None:
    """Returns the store's locator, with the address of a proxy."""
    if self._is_cut:
      return None
    real = locator.ask_announcer(self._store, self._secret)
    if real is None:
      return None
    if real.generation not in self._proxies:
      target = locator.split_address(real.address)
      self._proxies[real.generation] = tcp_proxy.TcpProxy(target)
    proxy = self._proxies[real.generation]
    return dataclasses.replace(real, address=proxy.address)


class ProxyTest(CutLinksTestCase):

  def test_link_of_a_searcher_then_of_the_store(self):
    roles = self.roles
    secret = roles.secret_file.read_bytes()
    store = f"127.0.0.1:{processes.free_port()}"
    roles.start("store", store, address="127.0.0.1:0")
    links = {name: _ProxiedLink(store, secret) for name in ROLES}
    for name, link in links.items():
      self.addCleanup(link.close)
      program, _, index = name.partition("-")
      roles.start(program, link.address, index=int(index))

    def cut(names, *, reset):
      for name in names:
        links[name].cut(reset=reset)

    def mend(names):
      for name in names:
        links[name].mend()

    self.cut_searcher_then_store(cut, mend)
    self.assert_all_ended_well()


class NamespacesTest(CutLinksTestCase):
  """Links between network namespaces, each with an address.

  Making namespaces takes rights that not every machine gives; without them the
  test says so and is skipped.
  """

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

  def test_link_of_a_searcher_then_of_the_store(self):
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
      # All need the store's link.
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
