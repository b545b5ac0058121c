# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links between processes are cut for a while by a proxy before each of them.

The run goes on, and its ledger closes.
"""

import threading

from absl.testing import absltest

from tba_jax.transport import locator
from tests.multi_process import cut_links_case
from tests.transport import tcp_proxy


class _ProxiedLink:
  """What one process sees of the store: an announcer and proxies of its own."""

  def __init__(self, store: str, secret: bytes):
    self._store = store
    self._secret = secret
    self._proxies: dict[int, tcp_proxy.TcpProxy] = {}
    self._is_cut = False
    self._lock = threading.Lock()
    self._told = locator.Announcer("127.0.0.1:0", secret, self._find)
    self.address = f"127.0.0.1:{self._told.port}"

  def close(self) -> None:
    self._told.close()
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

  def _find(self) -> locator.Locator | None:
    real = (
        None
        if self._is_cut
        else locator.ask_announcer(self._store, self._secret)
    )
    if real is None:
      return None
    # The announcer answers each question in a thread of its own.
    with self._lock:
      if real.generation not in self._proxies:
        target = locator.split_address(real.address)
        self._proxies[real.generation] = tcp_proxy.TcpProxy(target)
      address = self._proxies[real.generation].address
    return locator.Locator(real.run, real.generation, address, real.pid)


class ProxyTest(cut_links_case.CutLinksTestCase):

  def test_a_searcher_s_link_then_the_store_s(self):
    roles = self.roles
    secret = roles.secret_file.read_bytes()
    told = locator.Announcer("127.0.0.1:0", secret, lambda: None)
    store = f"127.0.0.1:{told.port}"
    told.close()
    roles.start("store", store, address="127.0.0.1:0")
    links = {name: _ProxiedLink(store, secret) for name in cut_links_case.ROLES}
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


if __name__ == "__main__":
  absltest.main()
