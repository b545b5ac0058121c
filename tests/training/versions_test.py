# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of versions: params arrive whole and authenticated, or not at all."""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax.training import publication
from tba_jax.transport import carrier_store
from tba_jax.transport import wire
from tests.support import in_process

SECRET = b"s" * 32
KEYS = {"run_id": "run", "secret": SECRET}


def make_params(seed=0, size=3):
  rng = np.random.default_rng(seed)
  return {
      "embed": rng.normal(size=(size, 4)).astype(np.float32),
      # Over one chunk of 1 MiB.
      "blocks": {"w": rng.normal(size=(2, 400, 400)).astype(np.float32)},
      "scale": np.float32(seed),
  }


def publish(transport, params, *, epoch, version, **keys):
  """Packs and sends as a trainer does."""
  it = publication.pack_version(
      [carrier_store.Chunks()],
      publication.flatten(params),
      epoch=epoch,
      version=version,
      on_event=lambda *event: None,
  )
  publication.send_version(transport, it, **{**KEYS, **keys})
  return it


class VersionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(store)
    self.params = make_params()
    self.expected = publication.expected_leaves(self.params)

  def write(self, params=None, *, epoch=1, version=5, **keys):
    params = self.params if params is None else params
    return publish(self.transport, params, epoch=epoch, version=version, **keys)

  def read(self, tag=(1, 5), **keys):
    return publication.read_version(
        self.transport,
        tag,
        carriers={"store": carrier_store.Chunks()},
        expected=self.expected,
        **{**KEYS, **keys},
    )

  def test_what_was_written_comes_back_bit_for_bit(self):
    self.write()
    self.assertEqual(publication.read_pointer(self.transport, **KEYS), (1, 5))
    back = publication.unflatten(self.read(), self.params)
    np.testing.assert_array_equal(back["embed"], self.params["embed"])
    np.testing.assert_array_equal(
        back["blocks"]["w"], self.params["blocks"]["w"]
    )
    self.assertEqual(back["scale"].shape, ())

  def test_no_pointer_before_the_first_version(self):
    self.assertIsNone(publication.read_pointer(self.transport, **KEYS))

  def test_the_pointer_is_written_last(self):
    class Torn(in_process.InProcessTransport):

      def put(self, key, value, *, overwrite=True):
        if key.endswith("/meta"):
          raise in_process.base.TransportError("lost")
        return super().put(key, value, overwrite=overwrite)

    torn = Torn(in_process.InProcessStore())
    with self.assertRaises(in_process.base.TransportError):
      publish(torn, self.params, epoch=1, version=5)
    self.assertIsNone(publication.read_pointer(torn, **KEYS))

  def test_a_collected_version_is_none(self):
    self.write()
    self.transport.delete(f"p/{publication.tag_text(1, 5)}/000001")
    self.assertIsNone(self.read())
    self.transport.delete(f"p/{publication.tag_text(1, 5)}")
    self.assertIsNone(self.read())

  def test_a_torn_chunk_is_refused(self):
    self.write()
    key = f"p/{publication.tag_text(1, 5)}/000001"
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
      publication.read_version(
          self.transport, (1, 5), carriers={}, expected=self.expected, **KEYS
      )

  def test_floats_are_published_in_the_dtype_asked_for(self):
    params = {"w": jnp.ones((3,), jnp.float32) / 3, "n": jnp.arange(2)}
    expected = publication.expected_leaves(params)
    published = publication.published_specs(expected, "bfloat16")
    self.assertEqual(
        {name: dtype.name for name, (_, dtype) in published.items()},
        {"['n']": "int32", "['w']": "bfloat16"},
    )
    leaves = publication.flatten(publication.snapshot(params, dtype="bfloat16"))
    self.assertEqual(
        {n: (x.shape, x.dtype) for n, x in leaves.items()}, published
    )
    back = publication.cast_leaf(leaves, expected)
    self.assertEqual(back["['w']"].dtype, np.float32)
    np.testing.assert_allclose(back["['w']"], 1 / 3, rtol=4e-3)
    self.assertEqual(publication.published_specs(expected, ""), expected)

  def test_a_forged_manifest_or_pointer_is_refused(self):
    self.write(secret=b"f" * 32)
    with self.assertRaises(wire.WireError):
      publication.read_pointer(self.transport, **KEYS)
    with self.assertRaises(wire.WireError):
      self.read()

  def test_another_run_and_another_version_are_refused(self):
    self.write(run_id="other")
    with self.assertRaises(wire.WireError):
      publication.read_pointer(self.transport, **KEYS)
    with self.assertRaises(wire.WireError):
      self.read()
    # A manifest that was copied under another tag.
    self.write(version=5)
    meta = self.transport.get(f"p/{publication.tag_text(1, 5)}/meta")
    self.transport.put(f"p/{publication.tag_text(1, 6)}/meta", meta)
    with self.assertRaises(wire.WireError):
      self.read((1, 6))

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
    texts = [publication.tag_text(*tag) for tag in tags]
    self.assertEqual(texts, sorted(texts))


if __name__ == "__main__":
  absltest.main()
