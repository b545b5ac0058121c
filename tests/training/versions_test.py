# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of versions: params arrive whole and authenticated, or not at all."""

import types

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax.training import publication
from tba_jax.transport import carrier_store
from tba_jax.transport import wire
from tests.support import in_process

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

  def test_what_was_written_comes_back_bit_for_bit(self):
    self.write()
    self.assertEqual(publication.read_pointer(self.transport, RUN), (1, 5))
    back = publication.unflatten(self.read(), self.params)
    np.testing.assert_array_equal(back["embed"], self.params["embed"])
    np.testing.assert_array_equal(
        back["blocks"]["w"], self.params["blocks"]["w"]
    )
    self.assertEqual(back["scale"].shape, ())

  def test_no_pointer_before_the_first_version(self):
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

  def test_floats_are_published_in_the_dtype_asked_for(self):
    params = {"w": jnp.ones((3,), jnp.float32) / 3, "n": jnp.arange(2)}
    expected = publication.specs_of(params)
    published = publication.published_specs(expected, "bfloat16")
    self.assertEqual(
        {name: dtype.name for name, (_, dtype) in published.items()},
        {"['n']": "int32", "['w']": "bfloat16"},
    )
    leaves = publication.flatten(publication.snapshot(params, dtype="bfloat16"))
    self.assertEqual(
        {n: (x.shape, x.dtype) for n, x in leaves.items()}, published
    )
    self.assertEqual(publication.published_specs(expected, ""), expected)

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
    # A manifest that was copied under another tag.
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
        (meta_key, {**whole, "carried": {}}),
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


if __name__ == "__main__":
  absltest.main()
