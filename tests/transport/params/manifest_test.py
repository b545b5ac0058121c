# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A version arrives complete and authentic, or is refused."""

import types

from absl.testing import parameterized
import numpy as np

from tba_jax.learning import published
from tba_jax.transport import wire
from tba_jax.transport.params import manifest
from tba_jax.transport.params import store_chunks
from tba_jax.transport.params import version as version_lib
from tests.support import in_process

SECRET = b"s" * 32


def make_run(run_id="run", secret=SECRET):
  return types.SimpleNamespace(run_id=run_id, secret=secret)


RUN = make_run()
VERSION = version_lib.Version(1, 5)


def make_params(seed=0, size=3):
  rng = np.random.default_rng(seed)
  return {
      "embed": rng.normal(size=(size, 4)).astype(np.float32),
      # Over one chunk of 1 MiB.
      "blocks": {"w": rng.normal(size=(2, 400, 400)).astype(np.float32)},
      "scale": np.float32(seed),
  }


def publish(transport, params, version=VERSION, run=RUN, **keys):
  """Packs and sends as a trainer does."""
  leaves = published.flatten(params)
  packed = store_chunks.StoreChunks().pack(version, leaves)
  manifest.send_version(transport, packed, run, **keys)
  return packed


class ManifestTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(store)
    self.params = make_params()
    self.expected = version_lib.specs_of(published.by_path(self.params))

  def write(self, params=None, **keys):
    params = self.params if params is None else params
    return publish(self.transport, params, **keys)

  def read(self, version=VERSION, **keys):
    return manifest.read_version(
        self.transport,
        version,
        RUN,
        **{
            "carriers": {"store": store_chunks.StoreChunks()},
            "expected": self.expected,
            **keys,
        },
    )

  def test_round_trip_is_exact(self):
    self.write()
    self.assertEqual(manifest.read_pointer(self.transport, RUN), (1, 5))
    back = published.unflatten(self.read(), self.params)
    np.testing.assert_array_equal(back["embed"], self.params["embed"])
    np.testing.assert_array_equal(
        back["blocks"]["w"], self.params["blocks"]["w"]
    )
    self.assertEqual(back["scale"].shape, ())

  def test_has_no_pointer_before_first_version(self):
    self.assertIsNone(manifest.read_pointer(self.transport, RUN))

  def test_pointer_is_written_last(self):
    class Torn(in_process.InProcessTransport):

      def put(self, key, value, *, overwrite=True):
        if key.endswith("/meta"):
          raise in_process.byte_store.TransportError("lost")
        return super().put(key, value, overwrite=overwrite)

    torn = Torn(in_process.InProcessStore())
    with self.assertRaises(in_process.byte_store.TransportError):
      publish(torn, self.params)
    self.assertIsNone(manifest.read_pointer(torn, RUN))

  def test_collected_version_is_none(self):
    self.write()
    self.transport.delete(f"p/{VERSION.tag}/000001")
    self.assertIsNone(self.read())
    self.transport.delete(f"p/{VERSION.tag}")
    self.assertIsNone(self.read())

  def test_torn_chunk_is_refused(self):
    self.write()
    key = f"p/{VERSION.tag}/000001"
    chunk = self.transport.get(key)
    self.transport.put(key, chunk[:-1] + bytes([chunk[-1] ^ 1]))
    # The leaf is named: the others are small.
    with self.assertRaisesRegex(wire.WireError, r"000001 is torn.*'w'"):
      self.read()

  def test_dropped_version_goes_with_its_chunks(self):
    packed = self.write()
    manifest.drop_version(self.transport, packed)
    self.assertIsNone(self.read())
    self.assertEqual(self.transport.list("p"), {})

  def test_unknown_carrier_is_named(self):
    self.write()
    with self.assertRaisesRegex(wire.WireError, "carrier.*'store'"):
      self.read(carriers={})

  def test_forged_manifest_or_pointer_is_refused(self):
    self.write(run=make_run(secret=b"f" * 32))
    with self.assertRaises(wire.WireError):
      manifest.read_pointer(self.transport, RUN)
    with self.assertRaises(wire.WireError):
      self.read()

  def test_another_run_and_another_version_are_refused(self):
    self.write(run=make_run("other"))
    with self.assertRaises(wire.WireError):
      manifest.read_pointer(self.transport, RUN)
    with self.assertRaises(wire.WireError):
      self.read()
    # A manifest copied to another tag.
    self.write()
    meta = self.transport.get(f"p/{VERSION.tag}/meta")
    other = version_lib.Version(1, 6)
    self.transport.put(f"p/{other.tag}/meta", meta)
    with self.assertRaises(wire.WireError):
      self.read(other)

  def test_signed_message_of_another_place_or_shape_is_refused(self):
    self.write()
    lease = {"run": "run", "key": "live/s", "sid": "s", "totals": {}}
    meta_key = f"p/{VERSION.tag}/meta"
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
          manifest.read_pointer(self.transport, RUN)
          self.read()
        self.transport.put(key, kept)

  def test_adapters_match_only_their_base(self):
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
  def test_leaves_must_be_expected_ones(self, change):
    params = make_params()
    change(params)
    self.write(params)
    with self.assertRaisesRegex(wire.WireError, "embed|more"):
      self.read()

  def test_tags_sort_as_numbers(self):
    versions = [(1, 9), (1, 10), (2, 0), (10, 3)]
    texts = [version_lib.Version(*version).tag for version in versions]
    self.assertEqual(texts, sorted(texts))
