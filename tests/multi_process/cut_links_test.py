# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose links are cut for a while continues, and its ledger closes.

Links are cut between network namespaces where these may be made, else by
proxies.
"""

import dataclasses
import pathlib
import subprocess
import tempfile
import time

from absl.testing import absltest
import pytest

from tba_jax.system import processes
from tba_jax.transport.kv import locator
from tests.support import harness
from tests.transport import tcp_proxy

_CUT_S = 8.0
# A searcher starts and reads the store in this time.
_EARLY_S = 8.0
_SEARCHERS = tuple(f"searcher-{i}" for i in range(harness.NUM_SEARCHERS))
_ROLES = ("trainer-0", *_SEARCHERS)
_HOSTS = ("store-0", *_ROLES)


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


class _Proxies:
  """Links through a proxy of each role."""

  def __init__(self, roles: harness.Roles):
    secret = roles.secret_file.read_bytes()
    store = f"127.0.0.1:{processes.free_port()}"
    roles.start("store", store, address="127.0.0.1:0")
    self._links = {name: _ProxiedLink(store, secret) for name in _ROLES}
    for name, link in self._links.items():
      program, _, index = name.partition("-")
      roles.start(program, link.address, index=int(index))

  def cut(self, *names: str, reset: bool) -> None:
    for name in names:
      self._links[name].cut(reset=reset)

  def mend(self, *names: str) -> None:
    for name in names:
      self._links[name].mend()

  def close(self) -> None:
    for link in self._links.values():
      link.close()


class _Namespaces:
  """Links between network namespaces, each with an address.

  Raises OSError or CalledProcessError without the right to make namespaces.
  """

  def __init__(self, roles: harness.Roles):
    self._prefix = f"tba{time.monotonic_ns() % 10**6}"
    self._hub = f"{self._prefix}-hub"
    self._spaces: list[str] = []
    try:
      self._add_namespace(self._hub)
      self._ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
      self._ip("-n", self._hub, "link", "set", "br0", "up")
      for number, name in enumerate(_HOSTS, start=1):
        self._add_host(name, number)
    except BaseException:
      self.close()
      raise
    for name in _HOSTS:
      program, _, index = name.partition("-")
      settings = (
          {"address": "10.199.7.1:7001-7009"} if program == "store" else {}
      )
      roles.start(
          program,
          "10.199.7.1:7000",
          index=int(index),
          prefix=["ip", "netns", "exec", f"{self._prefix}-{name}"],
          # Params pass the links, too.
          changes={"publish.carrier": "network"},
          **settings,
      )

  def _ip(self, *args: str) -> None:
    subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True, timeout=20
    )

  def _add_namespace(self, name: str) -> None:
    self._ip("netns", "add", name)
    self._spaces.append(name)
    self._ip("-n", name, "link", "set", "lo", "up")

  def _add_host(self, name: str, number: int) -> None:
    """Makes a namespace with an address, on a cable to the hub's bridge."""
    space = f"{self._prefix}-{name}"
    self._add_namespace(space)
    self._ip("-n", self._hub, "link", "add", f"to{number}", "type", "veth",
             "peer", "name", "eth0", "netns", space)  # fmt: skip
    self._ip("-n", self._hub, "link", "set", f"to{number}", "master", "br0")
    self._ip("-n", self._hub, "link", "set", f"to{number}", "up")
    address = f"10.199.7.{number}/24"
    self._ip("-n", space, "addr", "add", address, "dev", "eth0")
    self._ip("-n", space, "link", "set", "eth0", "up")

  def _switch(self, names: tuple[str, ...], state: str) -> None:
    # All need the store's link.
    for name in ["store-0"] if len(names) > 1 else names:
      number = _HOSTS.index(name) + 1
      self._ip("-n", self._hub, "link", "set", f"to{number}", state)

  def cut(self, *names: str, reset: bool) -> None:
    del reset  # A cable that is pulled is silent.
    self._switch(names, "down")

  def mend(self, *names: str) -> None:
    self._switch(names, "up")

  def close(self) -> None:
    for name in self._spaces:
      self._ip("netns", "del", name)


class CutLinksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_cut_")
    self.addCleanup(folder.cleanup)
    self.roles = harness.Roles(pathlib.Path(folder.name))
    try:
      self.links = _Namespaces(self.roles)
    except (OSError, subprocess.CalledProcessError):
      self.links = _Proxies(self.roles)
    self.addCleanup(self.links.close)
    self.addCleanup(self.roles.close)

  @pytest.mark.timeout(600)
  def test_continues_after_cut_link_of_searcher_then_of_store(self):
    roles, links = self.roles, self.links
    roles.wait_for(lambda: roles.step() >= 3, "step 3")
    links.cut("searcher-0", reset=False)
    # Others get its prompts meanwhile.
    roles.wait_for(lambda: roles.events("searcher_gone"), "searcher_gone")
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step without it")
    links.mend("searcher-0")
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step after the first")
    links.cut(*_ROLES, reset=True)
    roles.wait_for(lambda: roles.events("store_lost"), "store_lost")
    time.sleep(_CUT_S)
    links.mend(*_ROLES)
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step after the second")
    # The trainer resumes from its checkpoint, for a few steps.
    roles.interrupt("trainer-0")
    for name in _SEARCHERS:
      self.assertEqual(roles.wait(name, 60), 75, roles.text())
    # Searchers that reconnect first wait for the next trainer.
    for name in _SEARCHERS:
      roles.resume(name)
    time.sleep(_EARLY_S)
    self.assertTrue(all(map(roles.is_running, _SEARCHERS)), roles.text())
    roles.resume("trainer-0", **{"train.num_steps": roles.step() + 8})
    self.assertEqual(roles.wait("trainer-0", 120), 0, roles.text())
    for name in _SEARCHERS:
      self.assertEqual(roles.wait(name, 60), 0, roles.text())
    harness.check_ledger(roles.read("ledger.json"))
    self.assertTrue(roles.read("result.json")["ledger_closed"])
    # The store was never lost.
    self.assertLen(roles.events("store_started"), 1)
    self.assertNotEmpty(roles.events("store_lost"))
