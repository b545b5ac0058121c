# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose links are cut for a while; how they are cut is the test's."""

import pathlib
import tempfile
import time

from absl.testing import absltest

from tests.multi_process import role_programs

_CUT_S = 20.0
# In which a searcher starts and reads what the store holds.
_EARLY_S = 20.0
ROLES = ("trainer-0", "searcher-0", "searcher-1", "searcher-2")


class CutLinksTestCase(absltest.TestCase):
  """What both ways have in common."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_cut_")
    self.addCleanup(folder.cleanup)
    self.roles = role_programs.Roles(pathlib.Path(folder.name))
    self.addCleanup(self.roles.close)

  def cut_searcher_then_store(self, cut, mend):
    """Plays it all; `cut` and `mend` take the names of roles."""
    roles = self.roles
    roles.wait_for(lambda: roles.step() >= 3, "step 3")
    before = roles.step()
    cut(["searcher-0"], reset=False)
    time.sleep(_CUT_S)
    self.assertGreater(roles.step(), before, roles.text())
    # Its prompts went to others meanwhile.
    self.assertNotEmpty(roles.events("searcher_gone"))
    mend(["searcher-0"])
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 3, "step after the first")
    cut(ROLES, reset=True)
    time.sleep(_CUT_S)
    mend(ROLES)
    before = roles.step()
    roles.wait_for(lambda: roles.step() >= before + 10, "step after the second")
    # The trainer comes back from its checkpoint, to end some steps later.
    roles.interrupt("trainer-0")
    searchers = [name for name in ROLES if name != "trainer-0"]
    for name in searchers:
      self.assertEqual(roles.wait(name, 60), 75, roles.text())
    # They may come back first: they wait for the next trainer.
    for name in searchers:
      roles.resume(name)
    time.sleep(_EARLY_S)
    self.assertTrue(all(map(roles.is_running, searchers)), roles.text())
    roles.resume("trainer-0", **{"train.num_steps": roles.step() + 8})

  def assert_all_ended_well(self):
    roles = self.roles
    self.assertEqual(roles.wait("trainer-0", 120), 0, roles.text())
    for i in range(role_programs.NUM_SEARCHERS):
      self.assertEqual(roles.wait(f"searcher-{i}", 60), 0, roles.text())
    role_programs.check_ledger(roles.read("ledger.json"))
    result = roles.read("result.json")
    self.assertTrue(result["ledger_closed"])
    # The links were away; the store was not.
    self.assertLen(roles.events("store_started"), 1)
    self.assertNotEmpty(roles.events("store_lost"))
