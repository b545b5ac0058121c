# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of shard_peers.py: what is asked is written, by all, or an error."""

import time
from unittest import mock

from absl.testing import absltest
from etils import epath
import numpy as np

from tba_jax.transport import carrier_orbax
from tests.training import cluster_test

_SECRET = b"s" * 32


def tag(version):
  return f"00000001.{version:010d}"


class ShardPeersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.client = cluster_test.FakeClient()
    self.written = []
    # What Orbax does with several processes is for tests/multi_process.
    self.enter_context(
        mock.patch.object(carrier_orbax, "write_folder", side_effect=self.write)
    )

  def write(self, path, leaves):
    (value,) = leaves.values()
    if value < 0:
      raise ValueError("RESOURCE_EXHAUSTED: no space left")
    self.written.append((path, value))
    return {"w": [[[[0, 2]], f"digest {value}"]]}

  def make_leader(self, num_processes=2, deadline_s=20.0):
    return carrier_orbax.Leader(
        self.client, num_processes, secret=_SECRET, deadline_s=deadline_s
    )

  def make_helper(self, process=1, deadline_s=20.0):
    helper = carrier_orbax.Helper(
        self.client,
        process,
        lambda params: {"w": np.asarray(params)},
        secret=_SECRET,
        deadline_s=deadline_s,
    )
    self.addCleanup(helper.close)
    return helper

  def test_what_is_asked_for_is_written_and_answered(self):
    leader, helper = self.make_leader(), self.make_helper()
    for version in (3, 4, 6):
      helper.submit(version, version)
    # Process 0 has left one out, which it tells.
    helper.forget(4)
    for version in (3, 6):
      leader.begin(tag(version), f"gs://b/{version}")
      found = leader.collect()
      self.assertEqual(found, [{"w": [[[[0, 2]], f"digest {version}"]]}])
    self.assertEqual(
        self.written, [(epath.Path("gs://b/3"), 3), (epath.Path("gs://b/6"), 6)]
    )
    self.assertEmpty(helper._held)
    deadline = time.monotonic() + 20
    while self.client.values:
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.01)

  def test_of_one_version_that_came_twice_the_older_goes_first(self):
    leader, helper = self.make_leader(), self.make_helper()
    helper.submit(3, 10)
    helper.submit(3, 20)
    helper.forget(3)
    leader.begin(tag(3), "/f")
    leader.collect()
    self.assertEqual(self.written, [(epath.Path("/f"), 20)])

  def test_a_version_may_come_after_it_was_asked_for(self):
    leader, helper = self.make_leader(), self.make_helper()
    leader.begin(tag(3), "/f")
    helper.submit(3, 10)
    self.assertLen(leader.collect(), 1)

  def test_who_could_not_write_is_named_with_the_cause(self):
    leader = self.make_leader(num_processes=3)
    good, bad = self.make_helper(1), self.make_helper(2)
    good.submit(3, 1)
    bad.submit(3, -1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, "process 2 .*no space left"):
      leader.collect()
    # The next version has an answer of its own.
    for helper in (good, bad):
      helper.submit(4, 1)
    leader.begin(tag(4), "/f")
    self.assertLen(leader.collect(), 2)

  def test_who_does_not_answer_in_time_is_named(self):
    leader = self.make_leader(deadline_s=0.1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, f"process 1 .*{tag(3)} within 0 s"):
      leader.collect()

  def test_a_version_that_never_comes_is_told(self):
    leader, _ = self.make_leader(), self.make_helper(deadline_s=0.1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, "version 3 did not come to be"):
      leader.collect()

  def test_what_others_ask_is_not_written(self):
    leader = carrier_orbax.Leader(
        self.client, 2, secret=b"x" * 32, deadline_s=20.0
    )
    self.make_helper().submit(3, 1)
    leader.begin(tag(3), "/f")
    with self.assertRaises(OSError):
      leader.collect()
    self.assertEmpty(self.written)


if __name__ == "__main__":
  absltest.main()
