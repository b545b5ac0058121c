# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The contract of groups, kept by the store's channel."""

from tests.transport.groups import groups_contract
from tests.transport.groups import queue_case


class StoreGroupsTest(groups_contract.GroupsContract, queue_case.QueueTestCase):

  def kill(self, trainer):
    trainer.close()
