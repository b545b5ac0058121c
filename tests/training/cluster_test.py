# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of a trainer: what is told is heard, in order, or is an error."""

import threading
import time

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.system import processes
from tba_jax.training import cluster
from tba_jax.transport import base
from tba_jax.transport import jax_kv

_SECRET = b"s" * 32
_NEVER = lambda: False


class FakeClient:
  """The key-value store of a coordinator, in this process."""

  def __init__(self):
    self.values = {}
    self.changed = threading.Condition()

  def key_value_set_bytes(self, key, value):
    with self.changed:
      self.values[key] = value
      self.changed.notify_all()

  def blocking_key_value_get_bytes(self, key, timeout_ms):
    with self.changed:
      if not self.changed.wait_for(
          lambda: key in self.values or None in self.values, timeout_ms / 1e3
      ):
        raise jax_kv.KvError("DEADLINE_EXCEEDED: nothing came")
      if None in self.values:
        raise jax_kv.KvError("UNAVAILABLE: the service is gone")
      return self.values[key]

  def key_value_dir_get_bytes(self, directory):
    with self.changed:
      found = dict(self.values)
    return [(k, v) for k, v in found.items() if k.startswith(directory + "/")]

  def key_value_delete(self, key):
    with self.changed:
      del self.values[key]


class ClusterTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.client = FakeClient()
    # Whoever still listens at the end of a test goes.
    self.addCleanup(self.client.key_value_set_bytes, None, b"")

  def make(self, process, num_processes=3, deadline_s=20.0, secret=_SECRET):
    return cluster.Cluster(
        process,
        num_processes,
        secret=secret,
        deadline_s=deadline_s,
        client=self.client,
    )

  def test_each_process_hears_all_commands_in_order(self):
    leader, others = self.make(0), [self.make(1), self.make(2)]
    leader.broadcast("place", {"step": 4})
    leader.broadcast("train")
    for follower in others:
      first, second = follower.receive(_NEVER), follower.receive(_NEVER)
      self.assertEqual((first.name, first.fields), ("place", {"step": 4}))
      self.assertEqual((second.name, second.fields), ("train", {}))
    # What was heard does not fill the coordinator's memory.
    self.assertEmpty(self.client.values)

  def test_who_follows_tells_nothing(self):
    self.make(2).broadcast("gather", {"field": "params"})
    self.assertEqual(self.client.values, {})

  def test_alone_there_is_nobody_to_tell(self):
    alone = cluster.Cluster()
    alone.broadcast("train")
    alone.end(0)
    self.assertFalse(alone.stopper(_NEVER)())
    self.assertTrue(alone.stopper(lambda: True)())
    with alone:
      pass

  def test_who_wants_to_stop_tells_process_0(self):
    leader, follower = self.make(0), self.make(2)
    should_stop = leader.stopper(_NEVER)
    self.assertFalse(should_stop())
    leader.broadcast("train")
    follower.receive(lambda: True)
    leader._polled_at -= 60  # A look a second.
    self.assertTrue(should_stop())
    self.assertTrue(should_stop())

  def test_the_others_begin_once_process_0_says_so(self):
    leader, follower, late = self.make(0), self.make(1), self.make(2)
    leader.begin()
    follower.begin()
    late.begin()
    leader.end(2)
    with self.assertRaises(cluster.Ended) as caught:
      follower.begin()
    self.assertEqual(caught.exception.status, 2)

  def test_process_0_collects_what_the_others_send(self):
    leader, others = self.make(0), [self.make(1), self.make(2)]
    for process, one in enumerate(others, 1):
      self.assertEqual(one.collect("settings", {"a": process}), {})
    found = leader.collect("settings", {"a": 0})
    self.assertEqual(found, {1: {"a": 1}, 2: {"a": 2}})
    self.assertEqual(cluster.Cluster().collect("settings", {"a": 0}), {})

  def test_process_0_names_who_sent_nothing_or_was_not_of_the_run(self):
    leader = self.make(0, deadline_s=0.1)
    with self.assertRaisesRegex(
        base.TransportError, "^process 1 of the trainer sent no settings: "
    ):
      leader.collect("settings", {})
    self.make(1, secret=b"x" * 32).collect("settings", {})
    with self.assertRaisesRegex(base.TransportError, "^process 1 .*hash"):
      leader.collect("settings", {})

  def test_silence_ends_at_a_deadline_and_a_word_renews_it(self):
    leader, follower = self.make(0), self.make(1, deadline_s=0.3)
    should_stop = leader.stopper(_NEVER)
    leader._sent_at -= 60
    leader._polled_at -= 60
    should_stop()
    started = time.monotonic()
    with self.assertRaisesRegex(
        base.DeadlineExceededError, "said nothing .*trainer.deadline_s"
    ):
      follower.receive(_NEVER)
    self.assertGreater(time.monotonic() - started, 0.3)
    self.assertNotIn(cluster._key(1, 0), self.client.values)

  def test_the_first_end_counts(self):
    leader, follower = self.make(0), self.make(1)
    leader.end(75)
    leader.end(0)
    self.assertEqual(follower.receive(_NEVER).fields, {"status": 75})
    self.assertNotIn(cluster._key(1, 1), self.client.values)

  def test_a_forged_command_and_a_lost_coordinator_are_errors(self):
    forger, follower = self.make(0, secret=b"x" * 32), self.make(1)
    forger.broadcast("train")
    with self.assertRaisesRegex(base.TransportError, "hash"):
      follower.receive(_NEVER)
    other = self.make(3, num_processes=4)  # Which nobody told anything.
    self.client.key_value_set_bytes(None, b"")
    with self.assertRaisesRegex(base.TransportError, "UNAVAILABLE"):
      other.receive(_NEVER)

  def test_a_command_of_another_place_is_an_error(self):
    leader, follower = self.make(0), self.make(1)
    leader._count = 7
    leader.broadcast("train")
    data = self.client.values[cluster._key(1, 7)]
    self.client.key_value_set_bytes(cluster._key(1, 0), data)
    with self.assertRaisesRegex(base.TransportError, "count 7"):
      follower.receive(_NEVER)

  @parameterized.parameters(
      (None, processes.EXIT_OK),
      (ValueError(), processes.EXIT_CONFIG),
      (FloatingPointError(), processes.EXIT_FATAL),
      (base.TransportError(), 1),
  )
  def test_status_of_an_error(self, error, status):
    self.assertEqual(cluster.status_of(error), status)


if __name__ == "__main__":
  absltest.main()
