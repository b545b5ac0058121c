# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every process writes its shards of a version, or is named."""

import time
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax.transport.params import pace as pace_lib
from tba_jax.transport.params import peers
from tests.mesh import cluster_test
from tests.support import waiting

_SECRET = b"s" * 32


def tag(version):
  return f"00000001.{version:010d}"


class PeersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.client = cluster_test.FakeClient()
    self.written = []
    self.is_full = False
    self.enter_context(mock.patch.object(peers, "_POLL_S", 0.1))

  def write(self, tag, leaves, path, keep):
    (value,) = leaves.values()
    if value < 0 or self.is_full:
      raise ValueError("RESOURCE_EXHAUSTED: no space left")
    self.written.append((path, value))
    return {"w": f"digest {value}", "keep": keep}

  def make_leader(self, num_processes=2, deadline_s=20.0):
    return peers.Leader(
        self.client,
        num_processes,
        secret=_SECRET,
        pace=pace_lib.Pace(deadline_s),
    )

  def make_helper(self, process=1, deadline_s=20.0):
    helper = peers.Helper(
        self.client,
        process,
        lambda params: {"w": np.asarray(params)},
        self.write,
        secret=_SECRET,
        deadline_s=deadline_s,
    )
    self.addCleanup(helper.close)
    return helper

  def test_requested_versions_are_written(self):
    leader, helper = self.make_leader(), self.make_helper()
    for version in (3, 4, 6):
      helper.submit(version, version)
    # Process 0 has skipped one.
    helper.forget(4)
    for version in (3, 6):
      leader.begin(tag(version), path=f"gs://b/{version}", keep=["k"])
      result = leader.collect(0)
      self.assertEqual(result, [{"w": f"digest {version}", "keep": ["k"]}])
    self.assertEqual(self.written, [("gs://b/3", 3), ("gs://b/6", 6)])
    waiting.wait_until(lambda: not self.client.values, "an empty store")

  def test_forget_drops_older_of_two_copies(self):
    leader, helper = self.make_leader(), self.make_helper()
    helper.submit(3, 10)
    helper.submit(3, 20)
    helper.forget(3)
    leader.begin(tag(3), path="/f")
    leader.collect(0)
    self.assertEqual(self.written, [("/f", 20)])

  def test_version_may_be_submitted_after_request(self):
    leader, helper = self.make_leader(), self.make_helper()
    leader.begin(tag(3), path="/f")
    helper.submit(3, 10)
    self.assertLen(leader.collect(0), 1)

  def test_reports_process_and_cause_of_failed_write(self):
    leader = self.make_leader(num_processes=3)
    good, bad = self.make_helper(1), self.make_helper(2)
    good.submit(3, 1)
    bad.submit(3, -1)
    leader.begin(tag(3), path="/f")
    with self.assertRaisesRegex(OSError, "process 2 .*no space left"):
      leader.collect(0)
    # The next version is independent.
    for helper in (good, bad):
      helper.submit(4, 1)
    leader.begin(tag(4), path="/f")
    self.assertLen(leader.collect(0), 2)

  def test_reports_silent_process(self):
    leader = self.make_leader(deadline_s=0.1)
    leader.begin(tag(3), path="/f")
    with self.assertRaisesRegex(OSError, f"process 1 .*{tag(3)} within 0 s"):
      leader.collect(0)

  def test_missing_version_is_error(self):
    leader, _ = self.make_leader(), self.make_helper(deadline_s=0.1)
    leader.begin(tag(3), path="/f")
    with self.assertRaisesRegex(OSError, "version 3 was not submitted"):
      leader.collect(0)

  def test_failed_version_is_written_again(self):
    leader = self.make_leader(num_processes=3)
    for process in (1, 2):
      self.make_helper(process).submit(3, 7)
    self.is_full = True
    leader.begin(tag(3))
    with self.assertRaisesRegex(OSError, "no space left"):
      leader.collect(0)
    self.is_full = False
    for _ in range(2):  # Also one that another process has not written.
      leader.begin(tag(3))
      self.assertLen(leader.collect(0), 2)

  def test_copy_is_freed_with_next_version(self):
    leader, helper = self.make_leader(), self.make_helper()
    helper.submit(3, 3)
    leader.begin(tag(3))
    leader.collect(0)
    helper.submit(4, 4)
    # Process 0 asks for no older version.
    leader = self.make_leader()
    with self.assertRaises(ValueError):
      helper.forget(3)

  def test_thread_error_is_raised(self):
    helper = self.make_helper()
    helper.submit(3, 1)
    leader = self.make_leader()
    with mock.patch.object(
        self.client, "key_value_delete", side_effect=TypeError("no such call")
    ):
      leader.begin(tag(3), path="/f")
      until = time.monotonic() + 20
      while helper._worker.is_alive():
        self.assertLess(time.monotonic(), until)
        time.sleep(0.01)
    with self.assertRaisesRegex(TypeError, "no such call"):
      helper.submit(4, 1)
    with self.assertRaisesRegex(TypeError, "no such call"):
      helper.close()
    helper._worker._error = None  # The cleanup would raise it.

  def test_forged_requests_are_refused(self):
    leader = peers.Leader(
        self.client, 2, secret=b"x" * 32, pace=pace_lib.Pace(2.0)
    )
    self.make_helper().submit(3, 1)
    leader.begin(tag(3), path="/f")
    with self.assertRaises(OSError):
      leader.collect(0)
    self.assertEmpty(self.written)
