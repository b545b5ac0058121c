# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands, joining and the save barrier of a trainer's processes."""

import socket
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from tba_jax.config import settings as settings_lib
from tba_jax.mesh import cluster
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import jax_kv

_SECRET = b"s" * 32
_NEVER = lambda: False


class FakeClient:
  """The key-value store of a coordinator, in this process."""

  def __init__(self):
    self.values = {}
    self.changed = threading.Condition()

  def key_value_set_bytes(self, key, value, allow_overwrite=False):
    with self.changed:
      if key and key in self.values and not allow_overwrite:
        raise jax_kv.KvError(f"ALREADY_EXISTS: {key}")
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
    self.now = 0.0
    # Ends threads that still listen.
    self.addCleanup(self.client.key_value_set_bytes, None, b"")

  def make(self, process, num_processes=3, deadline_s=20.0, secret=_SECRET):
    return cluster.Cluster(
        process,
        num_processes,
        secret=secret,
        deadline_s=deadline_s,
        client=self.client,
        clock=lambda: self.now,
    )

  def test_each_process_receives_all_commands_in_order(self):
    leader, others = self.make(0), [self.make(1), self.make(2)]
    leader.broadcast("place", {"step": 4})
    leader.broadcast("train")
    for follower in others:
      first, second = follower.receive(_NEVER), follower.receive(_NEVER)
      self.assertEqual((first.name, first.fields), ("place", {"step": 4}))
      self.assertEqual((second.name, second.fields), ("train", {}))
    # Received commands are deleted from the coordinator.
    self.assertEmpty(self.client.values)

  def test_followers_broadcast_nothing(self):
    self.make(2).broadcast("gather", {"field": "params"})
    self.assertEqual(self.client.values, {})

  def test_a_single_process_needs_no_client(self):
    alone = cluster.Cluster()
    alone.broadcast("train")
    alone.end(0)
    self.assertFalse(alone.stopper(_NEVER)())
    self.assertTrue(alone.stopper(lambda: True)())
    with alone:
      pass

  def test_stop_requests_reach_process_0(self):
    leader, follower = self.make(0), self.make(2)
    should_stop = leader.stopper(_NEVER)
    self.assertFalse(should_stop())
    leader.broadcast("train")
    follower.receive(lambda: True)
    self.now += 60  # It polls once a second.
    self.assertTrue(should_stop())
    self.assertTrue(should_stop())

  def test_forged_stop_requests_are_ignored(self):
    leader, follower = self.make(0), self.make(2)
    should_stop = leader.stopper(_NEVER)
    leader.broadcast("train")
    follower.receive(lambda: True)
    ((key, genuine),) = self.client.key_value_dir_get_bytes("tba_trainer/stop")
    copy = key[:-1] + "1"
    for values, wanted in (
        ({key: b"1"}, False),
        ({copy: genuine}, False),
        ({copy: b"", key: genuine}, True),
    ):
      self.client.values = dict(values)
      self.now += 60
      self.assertEqual(should_stop(), wanted)

  def test_followers_begin_when_process_0_does(self):
    leader, follower, late = self.make(0), self.make(1), self.make(2)
    leader.begin()
    follower.begin()
    late.begin()
    leader.end(2)
    with self.assertRaises(cluster.Ended) as caught:
      follower.begin()
    self.assertEqual(caught.exception.status, 2)

  def test_process_0_collects_from_all(self):
    leader, others = self.make(0), [self.make(1), self.make(2)]
    for process, one in enumerate(others, 1):
      self.assertEqual(one.collect("settings", {"a": process}), {})
    found = leader.collect("settings", {"a": 0})
    self.assertEqual(found, {1: {"a": 1}, 2: {"a": 2}})
    self.assertEqual(cluster.Cluster().collect("settings", {"a": 0}), {})

  def test_collect_names_missing_and_forged_senders(self):
    leader = self.make(0, deadline_s=0.1)
    with self.assertRaisesRegex(
        byte_store.TransportError,
        "^process 1 of the trainer sent no settings: ",
    ):
      leader.collect("settings", {})
    self.make(1, secret=b"x" * 32).collect("settings", {})
    with self.assertRaisesRegex(byte_store.TransportError, "^process 1 .*hash"):
      leader.collect("settings", {})

  def test_a_heartbeat_renews_the_deadline(self):
    leader, follower = self.make(0), self.make(1, deadline_s=0.3)
    should_stop = leader.stopper(_NEVER)
    self.now += 60
    should_stop()
    started = time.monotonic()
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError, "sent nothing for 0 s"
    ):
      follower.receive(_NEVER)
    self.assertGreater(time.monotonic() - started, 0.3)
    self.assertNotIn(cluster.key_of(1, 0), self.client.values)

  def test_only_the_first_end_is_sent(self):
    leader, follower = self.make(0), self.make(1)
    leader.end(75)
    leader.end(0)
    self.assertEqual(follower.receive(_NEVER).fields, {"status": 75})
    self.assertNotIn(cluster.key_of(1, 1), self.client.values)

  def test_a_forged_command_and_a_lost_coordinator_are_errors(self):
    forger, follower = self.make(0, secret=b"x" * 32), self.make(1)
    forger.broadcast("train")
    with self.assertRaisesRegex(byte_store.TransportError, "hash"):
      follower.receive(_NEVER)
    other = self.make(3, num_processes=4)  # Nobody told it anything.
    self.client.key_value_set_bytes(None, b"")
    with self.assertRaisesRegex(byte_store.TransportError, "UNAVAILABLE"):
      other.receive(_NEVER)

  def test_a_replayed_command_is_an_error(self):
    leader, follower = self.make(0), self.make(1)
    leader.count = 7
    leader.broadcast("train")
    data = self.client.values[cluster.key_of(1, 7)]
    self.client.key_value_set_bytes(cluster.key_of(1, 0), data)
    with self.assertRaisesRegex(byte_store.TransportError, "count 7"):
      follower.receive(_NEVER)

  @parameterized.parameters(
      (None, processes.EXIT_OK),
      (ValueError(), processes.EXIT_CONFIG),
      (FloatingPointError(), processes.EXIT_FATAL),
      (byte_store.TransportError(), 1),
  )
  def test_status_follows_the_error(self, error, status):
    self.assertEqual(cluster.status_of(error), status)


class JoinTest(parameterized.TestCase):

  def settings(self, num_processes, coordinator=""):
    settings = settings_lib.get_config().trainer
    settings.num_processes = num_processes
    settings.coordinator = coordinator
    return settings

  @parameterized.parameters(("2",), ("-1",), ("one",))
  def test_process_numbers_have_a_range(self, operand):
    with self.assertRaisesRegex(ValueError, f"operand '{operand}'.*0 to 1"):
      cluster.join(self.settings(2, "host:1"), [operand], _SECRET)

  def test_several_processes_need_a_coordinator(self):
    with self.assertRaisesRegex(ValueError, "trainer.coordinator = ''"):
      cluster.join(self.settings(2), ["0"], _SECRET)

  def test_an_operand_overrides_the_setting(self):
    parse = cluster._parse
    self.assertEqual(parse(self.settings(2), []), (None, None))
    settings = self.settings(2, "host:1")
    self.assertEqual(parse(settings, ["1"]), (1, "host:1"))
    self.assertEqual(parse(settings, ["1", "other:2"]), (1, "other:2"))

  def test_a_coordinator_s_address_must_be_free(self):
    with socket.socket() as taken:
      taken.bind(("127.0.0.1", 0))
      taken.listen()
      address = f"127.0.0.1:{taken.getsockname()[1]}"
      with self.assertRaisesRegex(ValueError, f"'{address}': .*cannot listen"):
        cluster.join(self.settings(2, address), ["0"], _SECRET)

  def test_a_single_process_does_not_join(self):
    tls = certificates.Tls("cert", "key", "ca")
    alone = cluster.join(self.settings(1), [], _SECRET, tls)
    self.assertEqual((alone.num_processes, alone.leads), (1, True))

  def test_tls_is_never_silently_dropped(self):
    tls = certificates.Tls("cert", "key", "ca")
    settings = self.settings(2, "host:1")
    without = lambda coordinator_address: None
    with mock.patch.object(jax.distributed, "initialize", without):
      with self.assertRaisesRegex(ValueError, "tls_cert_file = 'cert': .*0.11"):
        cluster.join(settings, ["1"], _SECRET, tls)
    offers = lambda mtls_cert_file, mtls_key_file, mtls_ca_file: None
    with mock.patch.object(jax.distributed, "initialize", offers):
      found = cluster.tls_options(tls)
    self.assertEqual(
        found,
        dict(
            mtls_cert_file="cert",
            mtls_key_file="key",
            mtls_ca_file="ca",
            verify_secure_credentials=True,
        ),
    )


class SaveBarrierTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.client = FakeClient()
    self.met = []
    self.raised = {}

  def run_all(self, *bodies):
    """Runs a body for each process; notes what it raises."""

    def run(process, body):
      barrier = cluster.SaveBarrier(
          self.client, process, len(bodies), secret=_SECRET, deadline_s=9
      )
      try:
        body(barrier)
      except cluster.SaveError as error:
        self.raised[process] = str(error)
        self.assertIs(barrier.failure, error)
      else:
        self.assertIsNone(barrier.failure)

    threads = [
        threading.Thread(target=run, args=item) for item in enumerate(bodies)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def meet(self, barrier, key, timeout_ms=9000):
    barrier(key=key, timeout_ms=timeout_ms)
    self.met.append(key)

  def test_waits_for_all_processes(self):

    def slow(barrier):
      for key in "abc":
        self.met.append("came")
        self.meet(barrier, key)

    def fast(barrier):
      for key in "abc":
        self.meet(barrier, key)

    self.run_all(slow, fast, fast)
    self.assertEqual(self.raised, {})
    for i, key in enumerate("abc"):
      self.assertLess(self.met.index("came"), self.met.index(key))
      self.met.remove("came")
      self.assertEqual(self.met.count(key), 3, i)
    # Passed barriers are deleted; each process has one left.
    self.assertLen(self.client.values, 3)

  def test_forged_texts_are_ignored(self):
    for name in ("0", "1", "7", "-1", "x", "1/x"):
      self.client.key_value_set_bytes(f"tba_save/000000000000/{name}", b"bad")
    self.run_all(*[lambda barrier: self.meet(barrier, "a")] * 2)
    self.assertEqual(self.raised, {})
    self.assertEqual(self.met, ["a", "a"])

  def test_an_error_is_raised_in_all_processes(self):

    def fails(barrier):
      self.meet(barrier, "begun")
      try:
        raise OSError("no space")
      finally:
        # A later barrier than that of the others.
        barrier(key="over", timeout_ms=9000)

    def writes(barrier):
      self.meet(barrier, "begun")
      self.meet(barrier, "written")

    self.run_all(writes, fails, writes)
    self.assertEqual(
        self.raised,
        dict.fromkeys(range(3), "process 1 of the trainer: no space"),
    )
    self.assertEqual(self.met, ["begun"] * 3)

  def test_a_timeout_names_the_setting(self):

    def slow(barrier):
      try:
        raise TimeoutError("1 of 2 are done")
      finally:
        barrier(key="over", timeout_ms=9000)

    self.run_all(slow, slow)
    for message in self.raised.values():
      self.assertRegex(
          message,
          r"process [01] of the trainer: not done within 9 s"
          r" \(config.trainer.save_deadline_s\): 1 of 2 are done",
      )

  def test_a_missing_process_is_an_error_in_all(self):

    def waits(barrier):
      try:
        self.meet(barrier, "written", timeout_ms=100)
      finally:
        # Orbax calls it so; here a late process learns of the error.
        barrier(key="over", timeout_ms=9000)

    gone = threading.Event()

    def late(barrier):
      gone.wait()
      self.meet(barrier, "written")
      self.meet(barrier, "committed")

    def watched(barrier):
      try:
        waits(barrier)
      finally:
        gone.set()

    self.run_all(watched, late)
    self.assertLen(set(self.raised.values()), 1)
    self.assertRegex(
        self.raised[1],
        "process 1 of the trainer did not reach written within 0 s .*save_d",
    )
    self.assertEqual(self.met, ["written"])
