# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Published versions are pulled; a lost store is survived."""

import contextlib
import functools
import pathlib
import threading
import types
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.learning import published
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import manifest
from tba_jax.transport.params import publish
from tba_jax.transport.params import pull
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import store_chunks
from tba_jax.transport.params import version as version_lib
from tests.support import base_config
from tests.support import in_process
from tests.support import waiting

RUN = types.SimpleNamespace(run_id="run", secret=b"s" * 32)
KEYS = {"run_id": RUN.run_id, "secret": RUN.secret}
WAIT_S = 20.0


def tag_of(step):
  return version_lib.Version(1, step).tag


def send(transport, params, step):
  """Sends a version as a trainer of epoch 1 does."""
  leaves = published.flatten(params)
  version = version_lib.Version(1, step)
  packed = store_chunks.StoreChunks().pack(version, leaves)
  manifest.send_version(transport, packed, RUN)


def _params(value):
  return {"w": jnp.full((8, 8), value, jnp.float32), "b": jnp.zeros(())}


class PublishTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()
    self.events: list[tuple[str, str]] = []
    self.spans: list[str] = []
    self.connect = lambda: in_process.InProcessTransport(self.store)
    self.transport = self.connect()

  def make_publisher(
      self,
      *,
      epoch=1,
      keep=2,
      carriers=None,
      dtype="",
      base_name="",
      lag_steps=0,
  ):
    config = base_config.make(publish__dtype=dtype, publish__keep_versions=keep)
    publisher = publish.Publisher(
        config,
        RUN,
        make_transport=self.connect,
        carriers=carriers or [store_chunks.StoreChunks()],
        copy=published.make_copy(config),
        epoch=epoch,
        lag_steps=lag_steps,
        base_name=base_name,
        on_event=self.note,
        span=self.span,
    )
    self.addCleanup(publisher.close)
    return publisher

  @contextlib.contextmanager
  def span(self, kind, lane):
    self.spans.append(kind)
    yield

  def note(self, kind, message):
    self.events.append((kind, message))

  def make_puller(self, *, carriers=(), base_name="", lag_steps=0):
    carriers = {c.name: c for c in carriers or [store_chunks.StoreChunks()]}
    with mock.patch.object(pull, "_PAUSE_S", 0.002):
      puller = pull.Puller(
          base_config.make(),
          RUN,
          version_lib.specs_of(published.by_path(_params(0.0))),
          make_transport=self.connect,
          carriers=carriers,
          lag_steps=lag_steps,
          on_event=self.note,
          base_name=base_name,
      )
    self.addCleanup(puller.close)
    return puller

  def wait_until(self, condition):
    waiting.wait_until(condition, lambda: f"events: {self.events}", WAIT_S)

  def test_published_version_is_pulled(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(3, _params(1.5))
    tag, leaves = puller.wait_for(3, WAIT_S)
    self.assertEqual(tag, (1, 3))
    params = published.unflatten(leaves, _params(0.0))
    np.testing.assert_array_equal(params["w"], np.full((8, 8), 1.5))

  def test_adapters_of_another_base_are_refused(self):
    publisher = self.make_publisher(base_name="model 12")
    puller = self.make_puller(base_name="model 12")
    other = self.make_puller(base_name="model 13")
    publisher.submit(3, _params(1.5))
    self.assertIsNotNone(puller.wait_for(3, WAIT_S))
    self.wait_until(lambda: other.stats.refused)
    self.assertIsNone(other.latest())

  def test_submit_copies_so_params_may_be_donated(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    params = _params(2.0)
    publisher.submit(0, params)
    consume = jax.jit(
        lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0
    )
    consume(params)
    _, leaves = puller.wait_for(0, WAIT_S)
    self.assertEqual(leaves["['w']"][0, 0], 2.0)

  def test_submit_returns_skipped_version(self):
    class Slow(store_chunks.StoreChunks):

      def pack(self, tag, leaves):
        entered.set()
        go_on.wait(WAIT_S)
        return super().pack(tag, leaves)

    entered, go_on = threading.Event(), threading.Event()
    publisher = self.make_publisher(carriers=[Slow()])
    self.assertIsNone(publisher.submit(0, _params(0.0)))
    self.assertTrue(entered.wait(WAIT_S))
    self.assertIsNone(publisher.submit(1, _params(1.0)))
    self.assertEqual(publisher.submit(2, _params(2.0)), 1)
    go_on.set()
    publisher.wait(2, waiting.after(WAIT_S))
    self.assertIsNone(publisher.submit(3, _params(3.0)))

  def test_exact_lag_skips_no_version(self):
    class Slow(store_chunks.StoreChunks):

      def pack(self, tag, leaves):
        go_on.wait(WAIT_S)
        return super().pack(tag, leaves)

    go_on = threading.Event()
    publisher = self.make_publisher(carriers=[Slow()], lag_steps=2)
    for version in range(3):
      self.assertIsNone(publisher.submit(version, _params(version)))
    go_on.set()
    publisher.wait(2, waiting.after(WAIT_S))
    self.assertEqual(self._stored_tags(), {tag_of(v) for v in range(3)})

  def test_exact_lag_reads_requested_version(self):
    publisher = self.make_publisher(lag_steps=2)
    puller = self.make_puller(lag_steps=2)
    for version in range(6):
      publisher.submit(version, _params(version))
      publisher.wait(version, waiting.after(WAIT_S))
      # The puller keeps up, before anything is asked for.
      tag = 1, version
      self.wait_until(lambda: (puller.latest() or [None])[0] == tag)  # noqa: B023
    self.assertEqual(puller.wait_for(5, WAIT_S)[0], (1, 5))
    # Readers: one that pulled along, and one that came late.
    for reader in (puller, self.make_puller(lag_steps=2)):
      for version in (3, 4, 5, 3):
        tag, leaves = reader.wait_for(version, WAIT_S)
        self.assertEqual(tag, (1, version))
        self.assertEqual(leaves["['w']"][0, 0], version)
      self.assertEqual(reader.latest()[0], (1, 5))
      self.assertIsNone(reader.wait_for(0, 0.05))

  def test_new_store_gets_versions_of_exact_lag_again(self):
    publisher = self.make_publisher(lag_steps=1)
    for version in range(3):
      publisher.submit(version, _params(version))
      publisher.wait(version, waiting.after(WAIT_S))
    self.store.lose()
    late = self.make_puller(lag_steps=1)
    self.assertEqual(late.wait_for(1, WAIT_S)[0], (1, 1))

  def test_only_newest_versions_stay_readable(self):
    publisher = self.make_publisher(keep=2)
    for version in range(4):
      publisher.submit(version, _params(version))
      publisher.wait(version, waiting.after(WAIT_S))
    self.wait_until(lambda: len(self._stored_tags()) == 2)
    self.assertEqual(self._stored_tags(), {tag_of(v) for v in (2, 3)})
    # Checking the pointer is not counted as publishing.
    self.assertEqual(self.spans, 4 * ["publish"])

  def test_new_store_gets_last_version_again(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(7, _params(7.0))
    self.assertIsNotNone(puller.wait_for(7, WAIT_S))
    self.store.lose()
    late = self.make_puller()
    tag, _ = late.wait_for(7, WAIT_S)
    self.assertEqual(tag, (1, 7))
    self.assertIn("store_lost", {kind for kind, _ in self.events})

  def test_nonfinite_version_is_not_written(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(1, _params(1.0), jnp.asarray(0.0))
    publisher.wait(1, waiting.after(WAIT_S))
    publisher.submit(2, _params(np.nan), jnp.asarray(1.0))
    self.wait_until(lambda: not publisher._submitted)
    publisher.submit(3, _params(3.0))
    self.assertEqual(puller.wait_for(3, WAIT_S)[0], (1, 3))
    self.assertEqual(self.spans.count("publish"), 2)

  def test_invalid_pointer_is_replaced(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(4, _params(4.0))
    puller.wait_for(4, WAIT_S)
    lease = {"run": "run", "key": "live/s", "sid": "s"}
    for data in (b"", wire.encode_message(lease, RUN.secret)):
      self.transport.put("p_cur", data)
      self.wait_until(
          lambda d=data: self.transport.get("p_cur") not in (d, None)
      )
    publisher.submit(5, _params(5.0))
    self.assertEqual(puller.wait_for(5, WAIT_S)[0], (1, 5))

  @pytest.mark.slow
  def test_resends_overwritten_or_deleted_version(self):
    publisher = self.make_publisher()
    publisher.submit(4, _params(4.0))
    publisher.wait(4, waiting.after(WAIT_S))
    folder = f"p/{tag_of(4)}"
    damages = (
        lambda: self.transport.put(f"{folder}/000000", b"forged"),
        lambda: self.transport.put(f"{folder}/meta", b"forged"),
        lambda: self.transport.delete(f"{folder}/000000"),
        lambda: self.transport.delete("p"),
    )
    with mock.patch.object(publish, "_REPEAT_EVERY_S", 0.1):
      for damage in damages:
        damage()
        late = self.make_puller()
        self.assertEqual(late.wait_for(4, WAIT_S)[0], (1, 4))
    # Nobody without the key makes the trainer send it.
    sent = self.spans.count("publish")
    self.transport.put("ask/params/forged", b"forged")
    self.wait_until(lambda: not self.transport.list("ask"))
    self.assertEqual(self.spans.count("publish"), sent)

  def test_older_epoch_never_replaces_newer_one(self):
    publisher, puller = self.make_publisher(epoch=2), self.make_puller()
    publisher.submit(4, _params(4.0))
    puller.wait_for(4, WAIT_S)
    # A replaced trainer still runs: more steps, but an older epoch.
    send(self.transport, _params(9.0), 90)
    read = lambda: manifest.read_pointer(self.transport, RUN)
    self.wait_until(lambda: read() == (2, 4))
    self.assertEqual(puller.latest()[0], (2, 4))
    self.assertEqual(self.make_puller().wait_for(-1, WAIT_S)[0], (2, 4))

  def test_torn_version_is_refused_and_old_one_stays(self):
    puller = self.make_puller()
    write = lambda version: send(self.transport, _params(version), version)
    write(1)
    puller.wait_for(1, WAIT_S)
    self.transport.delete("p_cur")
    write(2)
    key = f"p/{tag_of(2)}/000000"
    self.transport.put(key, b"\0" * len(self.transport.get(key)))
    pointer = {"run": "run", "key": "p_cur", "epoch": 1, "version": 3}
    self.transport.put("p_cur", wire.encode_message(pointer, RUN.secret))
    meta = self.transport.get(f"p/{tag_of(2)}/meta")
    self.transport.put(f"p/{tag_of(3)}/meta", meta)
    self.wait_until(lambda: puller.stats.refused > 0)
    self.assertIn("refused_version", {kind for kind, _ in self.events})
    self.assertLess(puller.latest()[0], (1, 3))
    write(4)
    self.assertEqual(puller.wait_for(4, WAIT_S)[0], (1, 4))

  def test_full_disk_falls_back_to_next_carrier(self):
    class Full(store_chunks.StoreChunks):
      name = "full"

      def pack(self, tag, leaves):
        raise OSError(28, "no space left")

    publisher = self.make_publisher(
        carriers=[Full(), store_chunks.StoreChunks()]
    )
    puller = self.make_puller()
    publisher.submit(3, _params(3.0))
    self.assertEqual(puller.wait_for(3, WAIT_S)[0], (1, 3))
    kinds = {kind: message for kind, message in self.events}
    self.assertIn("no space", kinds["carrier_full"])

  def test_failed_version_is_tried_again(self):
    class Flaky(store_chunks.StoreChunks):
      attempts = 0

      def write(self, tag, leaves):
        self.attempts += 1
        if self.attempts < 4:
          raise OSError(5, "the share is away; config.publish.directory")
        return super().write(tag, leaves)

    self.enter_context(mock.patch.object(publish, "FIRST_PAUSE_S", 0.01))
    # Also one that no other may replace.
    for lag_steps in (0, 1):
      publisher = self.make_publisher(carriers=[Flaky()], lag_steps=lag_steps)
      publisher.submit(4 + lag_steps, _params(4.0))
      publisher.wait(4 + lag_steps, waiting.after(WAIT_S))
      publisher.close()
    failed = [text for kind, text in self.events if kind == "publish_failed"]
    self.assertLen(failed, 6)
    self.assertRegex(failed[2], "version 4.*attempt 3 of.*publish.directory")
    self.assertEqual(self._stored_tags(), {tag_of(4), tag_of(5)})

  def test_newer_version_replaces_failed_one(self):
    class Away(store_chunks.StoreChunks):
      is_away = True

      def write(self, tag, leaves):
        if self.is_away:
          raise OSError(5, "the share is away")
        return super().write(tag, leaves)

    self.enter_context(mock.patch.object(publish, "FIRST_PAUSE_S", 0.01))
    carrier = Away()
    publisher = self.make_publisher(carriers=[carrier])
    publisher.submit(4, _params(4.0))
    self.wait_until(lambda: self.events)
    publisher.submit(5, _params(5.0))
    carrier.is_away = False
    publisher.wait(5, waiting.after(WAIT_S))
    # An attempt for version 4 may have succeeded meanwhile.
    self.assertIn(tag_of(5), self._stored_tags())

  def test_trainer_ends_after_many_failures_in_row(self):
    class Full(store_chunks.StoreChunks):

      def write(self, tag, leaves):
        raise OSError(28, "no space left; config.publish.directory")

    self.enter_context(mock.patch.object(publish, "LONGEST_PAUSE_S", 0.01))
    publisher = self.make_publisher(carriers=[Full()])
    publisher.submit(4, _params(4.0))
    with self.assertRaisesRegex(byte_store.TransportError, "publish.directory"):
      publisher.wait(4, waiting.after(WAIT_S))
    self.assertLen(self.events, publish.MOST_FAILURES)

  def test_full_carrier_holds_versions_back(self):
    class Held(store_chunks.StoreChunks):
      full = False

      def is_full(self):
        return self.full

    carrier = Held()
    self.enter_context(mock.patch.object(publish, "LATE_S", 0.0))
    publisher = self.make_publisher(carriers=[carrier])
    publisher.submit(1, _params(1.0))
    publisher.wait(1, waiting.after(WAIT_S))
    carrier.full = True
    publisher.submit(2, _params(2.0))
    self.assertEqual(publisher.submit(3, _params(3.0)), 2)
    publisher.wait(3, waiting.after(0.3))
    self.assertEqual(self._stored_tags(), {tag_of(1)})
    carrier.full = False
    publisher.wait(3, waiting.after(WAIT_S))
    self.assertEqual(self._stored_tags(), {tag_of(1), tag_of(3)})
    kinds = dict(self.events)
    self.assertRegex(kinds["version_skipped"], "version 2.*publish.every_steps")

  def test_params_arrive_as_they_are_published(self):
    publisher = self.make_publisher(dtype="bfloat16")
    puller = self.make_puller()
    publisher.submit(1, _params(1 / 3))
    _, leaves = puller.wait_for(1, WAIT_S)
    self.assertEqual(leaves["['w']"].dtype, jnp.bfloat16)
    self.assertEqual(leaves["['w']"][0, 0], jnp.bfloat16(1 / 3))

  def test_files_last_as_long_as_they_are_mapped(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "params"
    make = functools.partial(shared_files.SharedFiles, folder, **KEYS)
    publisher = self.make_publisher(carriers=[make()])
    puller = self.make_puller(carriers=[make()])
    publisher.submit(0, _params(0.5))
    _, first = puller.wait_for(0, WAIT_S)
    for version in range(1, 5):
      publisher.submit(version, _params(float(version)))
      publisher.wait(version, waiting.after(WAIT_S))
    tag, newest = puller.wait_for(4, WAIT_S)
    self.assertEqual(tag, (1, 4))
    self.wait_until(lambda: len(list(folder.iterdir())) == 2)
    np.testing.assert_array_equal(first["['w']"], np.full((8, 8), 0.5))
    np.testing.assert_array_equal(newest["['w']"], np.full((8, 8), 4.0))
    # A new store gets the manifest again; the file still exists.
    self.store.lose()
    late = self.make_puller(carriers=[make()])
    self.assertEqual(late.wait_for(4, WAIT_S)[0], (1, 4))
    publisher.close()
    self.assertEmpty(list(folder.iterdir()))

  def test_wait_for_gives_up_in_time(self):
    self.assertIsNone(self.make_puller().wait_for(1, 0.05))

  def test_wait_ends_at_stop(self):
    publisher = self.make_publisher()
    stopped = threading.Event()
    threading.Timer(0.05, stopped.set).start()
    publisher.wait(5, stopped.is_set)
    self.assertEmpty(self._stored_tags())

  def test_error_of_thread_reaches_its_owner(self):
    error = byte_store.DeadlineExceededError("the store is away")
    self.connect = mock.Mock(side_effect=error)
    puller = self.make_puller()
    with self.assertRaises(byte_store.TransportError) as raised:
      puller.wait_for(1, WAIT_S)
    self.assertIn("away", str(raised.exception.__cause__))

  def _stored_tags(self):
    return {key.split("/")[1] for key in self.transport.list("p")}
