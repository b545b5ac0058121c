# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions arrive complete and authentic or not; a lost store is survived."""

import contextlib
import pathlib
import threading
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config import settings
from tba_jax.learning import publication
from tba_jax.monitor import metrics
from tba_jax.monitor import recorder as recorder_lib
from tba_jax.monitor import run_directory
from tba_jax.transport import base
from tba_jax.transport import carrier_files
from tba_jax.transport import carrier_store
from tba_jax.transport import wire
from tests.support import base_config
from tests.support import in_process
from tests.support import tiny_model
from tests.support import waiting

SECRET = b"s" * 32


def make_run(run_id="run", secret=SECRET):
  return types.SimpleNamespace(run_id=run_id, secret=secret)


RUN = make_run()


def make_params(seed=0, size=3):
  rng = np.random.default_rng(seed)
  return {
      "embed": rng.normal(size=(size, 4)).astype(np.float32),
      # Over one chunk of 1 MiB.
      "blocks": {"w": rng.normal(size=(2, 400, 400)).astype(np.float32)},
      "scale": np.float32(seed),
  }


def publish(transport, params, tag, run=RUN, **keys):
  """Packs and sends as a trainer does."""
  it = publication.pack_version(
      [carrier_store.Chunks()],
      publication.flatten(params),
      tag,
      lambda *event: None,
  )
  publication.send_version(transport, it, run, **keys)
  return it


class VersionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(store)
    self.params = make_params()
    self.expected = publication.specs_of(self.params)

  def write(self, params=None, *, tag=(1, 5), **keys):
    params = self.params if params is None else params
    return publish(self.transport, params, tag, **keys)

  def read(self, tag=(1, 5), **keys):
    return publication.read_version(
        self.transport,
        tag,
        RUN,
        **{
            "carriers": {"store": carrier_store.Chunks()},
            "expected": self.expected,
            **keys,
        },
    )

  def test_round_trip_is_exact(self):
    self.write()
    self.assertEqual(publication.read_pointer(self.transport, RUN), (1, 5))
    back = publication.unflatten(self.read(), self.params)
    np.testing.assert_array_equal(back["embed"], self.params["embed"])
    np.testing.assert_array_equal(
        back["blocks"]["w"], self.params["blocks"]["w"]
    )
    self.assertEqual(back["scale"].shape, ())

  def test_has_no_pointer_before_the_first_version(self):
    self.assertIsNone(publication.read_pointer(self.transport, RUN))

  def test_the_pointer_is_written_last(self):
    class Torn(in_process.InProcessTransport):

      def put(self, key, value, *, overwrite=True):
        if key.endswith("/meta"):
          raise in_process.base.TransportError("lost")
        return super().put(key, value, overwrite=overwrite)

    torn = Torn(in_process.InProcessStore())
    with self.assertRaises(in_process.base.TransportError):
      publish(torn, self.params, (1, 5))
    self.assertIsNone(publication.read_pointer(torn, RUN))

  def test_a_collected_version_is_none(self):
    self.write()
    self.transport.delete(f"p/{publication.tag_text((1, 5))}/000001")
    self.assertIsNone(self.read())
    self.transport.delete(f"p/{publication.tag_text((1, 5))}")
    self.assertIsNone(self.read())

  def test_a_torn_chunk_is_refused(self):
    self.write()
    key = f"p/{publication.tag_text((1, 5))}/000001"
    chunk = self.transport.get(key)
    self.transport.put(key, chunk[:-1] + bytes([chunk[-1] ^ 1]))
    # The leaf is named: the others are small.
    with self.assertRaisesRegex(wire.WireError, r"000001 is torn.*'w'"):
      self.read()

  def test_a_dropped_version_goes_with_its_chunks(self):
    it = self.write()
    publication.drop_version(self.transport, it)
    self.assertIsNone(self.read())
    self.assertEqual(self.transport.list("p"), {})

  def test_an_unknown_carrier_is_named(self):
    self.write()
    with self.assertRaisesRegex(wire.WireError, "carrier.*'store'"):
      self.read(carriers={})

  @parameterized.parameters(
      # publish.dtype, compute dtype on a backend, rank -> matrices, vectors.
      ("bfloat16", "float32", 0, "bfloat16", "bfloat16"),
      ("", "bfloat16", 0, "float32", "float32"),
      ("auto", "bfloat16", 0, "bfloat16", "float32"),
      ("auto", "float32", 0, "float32", "float32"),
      # Adapters are merged in float32.
      ("auto", "bfloat16", 2, "float32", "float32"),
  )
  def test_publishes_floats_by_the_setting(
      self, dtype, compute, rank, matrices, vectors
  ):
    params = {
        "embed": jnp.ones((3, 2)) / 3,
        "norm": jnp.ones((3,)) / 3,
        "blocks": {"w": jnp.ones((2, 3, 4)), "norm": jnp.ones((2, 3))},
        "n": jnp.arange(2),
        "probe": {"logprobs": jnp.ones((2, 3)) / 3},
    }
    dtypes = publication.published_dtypes(
        base_config.make(
            publish__dtype=dtype, model__compute_dtype=compute, lora__rank=rank
        )
    )
    copy = publication.snapshot(params, dtypes=dtypes)
    self.assertEqual(
        {
            name: leaf.dtype.name
            for name, leaf in publication.by_path(copy).items()
        },
        {
            "['blocks']['norm']": vectors,
            "['blocks']['w']": matrices,
            "['embed']": matrices,
            "['n']": "int32",
            "['norm']": vectors,
            "['probe']['logprobs']": "float32",
        },
    )

  def test_auto_loses_nothing_that_the_sampler_uses(self):
    model = tiny_model.make_model(
        family="qwen2", compute_dtype="bfloat16", num_kv_heads=2
    )
    params = tiny_model.init_params(model)
    auto = publication.published_dtypes(
        base_config.make(publish__dtype="auto", model__compute_dtype="auto"),
        backend="tpu",
    )
    published = publication.snapshot(params, dtypes=auto)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    self.assertLess(size(published), 0.6 * size(params))
    tokens, mask = np.full((2, 5), 3), np.ones((2, 5), np.float32)
    for run in (
        lambda params: model.last_logits(params, tokens, mask),
        lambda params: model.decode_params(params, 8),
    ):
      chex.assert_trees_all_equal(run(published), run(params))

  def test_a_forged_manifest_or_pointer_is_refused(self):
    self.write(run=make_run(secret=b"f" * 32))
    with self.assertRaises(wire.WireError):
      publication.read_pointer(self.transport, RUN)
    with self.assertRaises(wire.WireError):
      self.read()

  def test_another_run_and_another_version_are_refused(self):
    self.write(run=make_run("other"))
    with self.assertRaises(wire.WireError):
      publication.read_pointer(self.transport, RUN)
    with self.assertRaises(wire.WireError):
      self.read()
    # A manifest copied to another tag.
    self.write()
    meta = self.transport.get(f"p/{publication.tag_text((1, 5))}/meta")
    self.transport.put(f"p/{publication.tag_text((1, 6))}/meta", meta)
    with self.assertRaises(wire.WireError):
      self.read((1, 6))

  def test_a_signed_message_of_another_place_or_shape_is_refused(self):
    self.write()
    lease = {"run": "run", "key": "live/s", "sid": "s", "totals": {}}
    meta_key = f"p/{publication.tag_text((1, 5))}/meta"
    whole = wire.decode_message(self.transport.get(meta_key), SECRET)
    pointer = {"run": "run", "key": "p_cur"}
    messages = [
        ("p_cur", lease),
        ("p_cur", pointer),
        ("p_cur", {**pointer, "epoch": 1, "version": "5"}),
        (meta_key, lease),
        *(
            (meta_key, {k: v for k, v in whole.items() if k != name})
            for name in whole
        ),
        *((meta_key, {**whole, name: 7}) for name in whole),
        (meta_key, {**whole, "leaves": [["w", [1]]]}),
        (meta_key, {**whole, "leaves": [["w", [1], "no dtype"]]}),
        (meta_key, {**whole, "leaves": [[True, [1], "float32"]]}),
        (meta_key, {**whole, "carried": {}}),
        *(
            (meta_key, {**whole, "carried": {**whole["carried"], name: wrong}})
            for name in whole["carried"]
            for wrong in ("text", [1], {"a": "b"}, None)
        ),
    ]
    for key, message in messages:
      with self.subTest(key=key, message=message):
        kept = self.transport.get(key)
        self.transport.put(key, wire.encode_message(message, SECRET))
        with self.assertRaises(wire.WireError):
          publication.read_pointer(self.transport, RUN)
          self.read()
        self.transport.put(key, kept)

  def test_adapters_are_for_their_base_alone(self):
    self.write(base_name="model 12")
    self.assertIsNotNone(self.read(base_name="model 12"))
    for other in ("", "model 13"):
      with self.assertRaisesRegex(wire.WireError, "base.*model 12.*init"):
        self.read(base_name=other)

  @parameterized.named_parameters(
      ("missing", lambda p: p.pop("embed")),
      ("unknown", lambda p: p.update(more=np.zeros(1, np.float32))),
      ("shape", lambda p: p.update(embed=np.zeros((4, 3), np.float32))),
      ("dtype", lambda p: p.update(embed=np.zeros((3, 4), np.int32))),
  )
  def test_leaves_must_be_the_expected_ones(self, change):
    params = make_params()
    change(params)
    self.write(params)
    with self.assertRaisesRegex(wire.WireError, "embed|more"):
      self.read()

  def test_tags_sort_as_numbers(self):
    tags = [(1, 9), (1, 10), (2, 0), (10, 3)]
    texts = [publication.tag_text(tag) for tag in tags]
    self.assertEqual(texts, sorted(texts))


WAIT_S = 20.0


def _params(value):
  return {"w": jnp.full((8, 8), value, jnp.float32), "b": jnp.zeros(())}


class PublicationTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()
    self.events: list[tuple[str, str]] = []
    self.spans: list[str] = []
    connect = lambda config, run: in_process.InProcessTransport(self.store)
    self.transport = connect(None, None)
    patch = mock.patch.object(publication, "connect", side_effect=connect)
    self.connect = patch.start()
    self.addCleanup(patch.stop)

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
    config = base_config.make(
        publish__dtype=dtype,
        publish__keep_versions=keep,
        search__lockstep=lag_steps > 0,
        search__lead_steps=lag_steps,
    )
    recorder = mock.create_autospec(recorder_lib.Recorder, instance=True)
    recorder.event.side_effect = lambda *event: self.events.append(event)
    recorder.span.side_effect = self.span
    carriers = carriers or [carrier_store.Chunks()]
    with mock.patch.object(
        publication, "make_write_carriers", return_value=carriers
    ):
      publisher = publication.Publisher(
          config,
          RUN,
          epoch=epoch,
          params=_params(0.0),
          base_name=base_name,
          peers=None,
          recorder=recorder,
      )
    self.addCleanup(publisher.close)
    return publisher

  @contextlib.contextmanager
  def span(self, kind, lane):
    self.spans.append(kind)
    yield

  def make_puller(self, *, carriers=(), dtype="", base_name="", lag_steps=0):
    config = base_config.make(
        publish__dtype=dtype,
        search__lockstep=lag_steps > 0,
        search__lead_steps=lag_steps,
    )
    events = mock.create_autospec(metrics.EventLog, instance=True)
    events.write.side_effect = lambda *event: self.events.append(event)
    carriers = {c.name: c for c in carriers or [carrier_store.Chunks()]}
    with mock.patch.object(
        publication, "make_read_carriers", return_value=carriers
    ), mock.patch.object(publication, "_PAUSE_S", 0.002):
      puller = publication.Puller(
          config, RUN, _params(0.0), events=events, base_name=base_name
      )
    self.addCleanup(puller.close)
    return puller

  def wait_until(self, condition):
    waiting.wait_until(condition, lambda: f"events: {self.events}", WAIT_S)

  def test_a_published_version_is_pulled(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(3, _params(1.5))
    tag, leaves = puller.wait_for(3, WAIT_S)
    self.assertEqual(tag, (1, 3))
    params = publication.unflatten(leaves, _params(0.0))
    np.testing.assert_array_equal(params["w"], np.full((8, 8), 1.5))

  def test_adapters_of_another_base_are_refused(self):
    publisher = self.make_publisher(base_name="model 12")
    puller = self.make_puller(base_name="model 12")
    other = self.make_puller(base_name="model 13")
    publisher.submit(3, _params(1.5))
    self.assertIsNotNone(puller.wait_for(3, WAIT_S))
    self.wait_until(lambda: other.stats.refused)
    self.assertIsNone(other.latest())

  def test_submit_copies_so_the_params_may_be_donated(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    params = _params(2.0)
    publisher.submit(0, params)
    consume = jax.jit(
        lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0
    )
    consume(params)
    _, leaves = puller.wait_for(0, WAIT_S)
    self.assertEqual(leaves["['w']"][0, 0], 2.0)

  def test_submit_returns_the_skipped_version(self):
    class Slow(carrier_store.Chunks):

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
    publisher.wait(2, WAIT_S)
    self.assertIsNone(publisher.submit(3, _params(3.0)))

  def test_an_exact_lag_skips_no_version(self):
    class Slow(carrier_store.Chunks):

      def pack(self, tag, leaves):
        go_on.wait(WAIT_S)
        return super().pack(tag, leaves)

    go_on = threading.Event()
    publisher = self.make_publisher(carriers=[Slow()], lag_steps=2)
    for version in range(3):
      self.assertIsNone(publisher.submit(version, _params(version)))
    go_on.set()
    publisher.wait(2, WAIT_S)
    self.assertEqual(
        self._stored_tags(), {publication.tag_text((1, v)) for v in range(3)}
    )

  def test_an_exact_lag_reads_the_version_that_it_names(self):
    publisher = self.make_publisher(lag_steps=2)
    puller = self.make_puller(lag_steps=2)
    for version in range(6):
      publisher.submit(version, _params(version))
      publisher.wait(version, WAIT_S)
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

  def test_a_new_store_gets_the_versions_of_an_exact_lag_again(self):
    publisher = self.make_publisher(lag_steps=1)
    for version in range(3):
      publisher.submit(version, _params(version))
      publisher.wait(version, WAIT_S)
    self.store.lose()
    late = self.make_puller(lag_steps=1)
    self.assertEqual(late.wait_for(1, WAIT_S)[0], (1, 1))

  def test_only_the_newest_versions_stay_readable(self):
    publisher = self.make_publisher(keep=2)
    for version in range(4):
      publisher.submit(version, _params(version))
      publisher.wait(version, WAIT_S)
    self.wait_until(lambda: len(self._stored_tags()) == 2)
    self.assertEqual(
        self._stored_tags(), {publication.tag_text((1, v)) for v in (2, 3)}
    )
    # Checking the pointer is not counted as publishing.
    self.assertEqual(self.spans, 4 * ["publish"])

  def test_a_new_store_gets_the_last_version_again(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(7, _params(7.0))
    self.assertIsNotNone(puller.wait_for(7, WAIT_S))
    self.store.lose()
    late = self.make_puller()
    tag, _ = late.wait_for(7, WAIT_S)
    self.assertEqual(tag, (1, 7))
    self.assertIn("store_lost", {kind for kind, _ in self.events})

  def test_a_version_that_is_not_finite_is_not_written(self):
    publisher, puller = self.make_publisher(), self.make_puller()
    publisher.submit(1, _params(1.0), jnp.asarray(0.0))
    publisher.wait(1, WAIT_S)
    publisher.submit(2, _params(np.nan), jnp.asarray(1.0))
    self.wait_until(lambda: not publisher._submitted)
    publisher.submit(3, _params(3.0))
    self.assertEqual(puller.wait_for(3, WAIT_S)[0], (1, 3))
    self.assertEqual(self.spans.count("publish"), 2)

  def test_an_invalid_pointer_is_replaced(self):
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
  def test_a_version_that_was_overwritten_or_deleted_is_sent_again(self):
    publisher = self.make_publisher()
    publisher.submit(4, _params(4.0))
    publisher.wait(4, WAIT_S)
    folder = f"p/{publication.tag_text((1, 4))}"
    damages = (
        lambda: self.transport.put(f"{folder}/000000", b"forged"),
        lambda: self.transport.put(f"{folder}/meta", b"forged"),
        lambda: self.transport.delete(f"{folder}/000000"),
        lambda: self.transport.delete("p"),
    )
    with mock.patch.object(publication, "_REPEAT_EVERY_S", 0.1):
      for damage in damages:
        damage()
        late = self.make_puller()
        self.assertEqual(late.wait_for(4, WAIT_S)[0], (1, 4))
    # Nobody without the key makes the trainer send it.
    sent = self.spans.count("publish")
    self.transport.put("ask/params/forged", b"forged")
    self.wait_until(lambda: not self.transport.list("ask"))
    self.assertEqual(self.spans.count("publish"), sent)

  def test_an_older_epoch_never_replaces_a_newer_one(self):
    publisher, puller = self.make_publisher(epoch=2), self.make_puller()
    publisher.submit(4, _params(4.0))
    puller.wait_for(4, WAIT_S)
    # A replaced trainer still runs: more steps, but an older epoch.
    publish(self.transport, _params(9.0), (1, 90))
    read = lambda: publication.read_pointer(self.transport, RUN)
    self.wait_until(lambda: read() == (2, 4))
    self.assertEqual(puller.latest()[0], (2, 4))
    self.assertEqual(self.make_puller().wait_for(-1, WAIT_S)[0], (2, 4))

  def test_a_torn_version_is_refused_and_the_old_one_stays(self):
    puller = self.make_puller()
    write = lambda version: publish(
        self.transport, _params(version), (1, version)
    )
    write(1)
    puller.wait_for(1, WAIT_S)
    self.transport.delete("p_cur")
    write(2)
    key = f"p/{publication.tag_text((1, 2))}/000000"
    self.transport.put(key, b"\0" * len(self.transport.get(key)))
    pointer = {"run": "run", "key": "p_cur", "epoch": 1, "version": 3}
    self.transport.put("p_cur", wire.encode_message(pointer, RUN.secret))
    meta = self.transport.get(f"p/{publication.tag_text((1, 2))}/meta")
    self.transport.put(f"p/{publication.tag_text((1, 3))}/meta", meta)
    self.wait_until(lambda: puller.stats.refused > 0)
    self.assertIn("refused_version", {kind for kind, _ in self.events})
    self.assertLess(puller.latest()[0], (1, 3))
    write(4)
    self.assertEqual(puller.wait_for(4, WAIT_S)[0], (1, 4))

  def test_a_full_disk_falls_back_to_the_next_carrier(self):
    class Full(carrier_store.Chunks):
      name = "full"

      def pack(self, tag, leaves):
        raise OSError(28, "no space left")

    publisher = self.make_publisher(carriers=[Full(), carrier_store.Chunks()])
    puller = self.make_puller()
    publisher.submit(3, _params(3.0))
    self.assertEqual(puller.wait_for(3, WAIT_S)[0], (1, 3))
    kinds = {kind: message for kind, message in self.events}
    self.assertIn("no space", kinds["carrier_full"])
    alone = self.make_publisher(carriers=[Full()])
    alone.submit(4, _params(4.0))
    with self.assertRaises(base.TransportError):
      alone.wait(4, WAIT_S)

  def test_params_arrive_as_they_are_published(self):
    publisher = self.make_publisher(dtype="bfloat16")
    puller = self.make_puller(dtype="bfloat16")
    publisher.submit(1, _params(1 / 3))
    _, leaves = puller.wait_for(1, WAIT_S)
    self.assertEqual(leaves["['w']"].dtype, jnp.bfloat16)
    self.assertEqual(leaves["['w']"][0, 0], jnp.bfloat16(1 / 3))

  def test_files_last_as_long_as_they_are_mapped(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "params"
    publisher = self.make_publisher(carriers=[carrier_files.Files(folder)])
    puller = self.make_puller(carriers=[carrier_files.Files(folder)])
    publisher.submit(0, _params(0.5))
    _, first = puller.wait_for(0, WAIT_S)
    for version in range(1, 5):
      publisher.submit(version, _params(float(version)))
      publisher.wait(version, WAIT_S)
    tag, newest = puller.wait_for(4, WAIT_S)
    self.assertEqual(tag, (1, 4))
    self.wait_until(lambda: len(list(folder.iterdir())) == 2)
    np.testing.assert_array_equal(first["['w']"], np.full((8, 8), 0.5))
    np.testing.assert_array_equal(newest["['w']"], np.full((8, 8), 4.0))
    # A new store gets the manifest again; the file still exists.
    self.store.lose()
    late = self.make_puller(carriers=[carrier_files.Files(folder)])
    self.assertEqual(late.wait_for(4, WAIT_S)[0], (1, 4))
    publisher.close()
    self.assertEmpty(list(folder.iterdir()))

  def test_wait_for_gives_up_in_time(self):
    self.assertIsNone(self.make_puller().wait_for(1, 0.05))

  def test_wait_names_the_missing_version(self):
    publisher = self.make_publisher()
    with self.assertRaisesRegex(base.DeadlineExceededError, "version 5"):
      publisher.wait(5, 0.05)

  def test_the_error_of_a_thread_reaches_its_owner(self):
    self.connect.side_effect = base.DeadlineExceededError("the store is away")
    puller = self.make_puller()
    with self.assertRaises(base.TransportError) as raised:
      puller.wait_for(1, WAIT_S)
    self.assertIn("away", str(raised.exception.__cause__))

  def _stored_tags(self):
    return {key.split("/")[1] for key in self.transport.list("p")}


_BIG = publication.SMALL_BYTES + 1


class BuildTest(parameterized.TestCase):

  @parameterized.parameters(
      ("auto", publication.SMALL_BYTES, True, "/d", 1, "store"),
      ("auto", _BIG, True, "", 1, "files"),
      ("auto", _BIG, True, "/d", 2, "files"),
      ("auto", _BIG, False, "/d", 1, "files"),
      ("auto", _BIG, False, "/d", 2, "orbax"),
      ("auto", _BIG, False, "gs://b/d", 1, "orbax"),
      ("auto", _BIG, True, "gs://b/d", 1, "orbax"),
      ("auto", _BIG, False, "", 2, "store"),
      ("auto", _BIG, False, "", 1, "store"),
      ("auto", _BIG, True, "", 1, "files"),
      ("store", _BIG, True, "/d", 1, "store"),
      ("files", 1, False, "", 1, "files"),
      ("orbax", 1, True, "", 1, "orbax"),
  )
  def test_chooses_a_carrier_by_size_and_place(
      self, setting, num_bytes, one_host, directory, num_processes, wanted
  ):
    config = base_config.make(
        publish__carrier=setting,
        publish__directory=directory,
        store__address="127.0.0.1:0" if one_host else "10.0.0.1:8000",
        trainer__num_processes=num_processes,
    )
    self.assertEqual(publication.choose_carrier(config, num_bytes), wanted)

  def test_makes_the_carriers_of_a_config(self):
    run = run_directory.Run(
        workdir=pathlib.Path("/nowhere"),
        run_id="r",
        spool=pathlib.Path("/nowhere/spool"),
        secret=b"s" * 32,
    )
    big = {"['w']": ((_BIG,), np.dtype(np.int8))}
    names = lambda config: [
        c.name for c in publication.make_write_carriers(config, run, big)
    ]
    # The store is the fallback for full disks.
    self.assertEqual(names(base_config.make()), ["files", "store"])
    config = base_config.make(publish__carrier="files")
    self.assertEqual(names(config), ["files"])
    # The config's names are those of the carriers.
    self.assertEqual(
        {"auto", *publication.make_read_carriers(config, run)},
        set(settings.SETTINGS["publish.carrier"].allowed.names),
    )


if __name__ == "__main__":
  absltest.main()
