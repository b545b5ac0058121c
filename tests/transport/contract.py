# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that every transport must pass, as a mixin."""

import random
import threading

from tba_jax.transport import byte_store


class TransportContract:
  """Needs `make_client()` and `lose_generation()` of the test case."""

  def test_put_get_delete(self):
    client = self.make_client()
    self.assertIsNone(client.get("a/b"))
    value = bytes(range(256))
    self.assertTrue(client.put("a/b", value))
    self.assertEqual(client.get("a/b"), value)
    self.assertTrue(client.put("a/b", b""))
    self.assertEqual(client.get("a/b"), b"")
    client.delete("a/b")
    self.assertIsNone(client.get("a/b"))
    client.delete("a/b")

  def test_put_without_overwrite_keeps_first(self):
    first, second = self.make_client(), self.make_client()
    self.assertTrue(first.put("once", b"1", overwrite=False))
    self.assertFalse(second.put("once", b"2", overwrite=False))
    self.assertEqual(second.get("once"), b"1")
    second.delete("once")
    self.assertTrue(second.put("once", b"2", overwrite=False))

  def test_list(self):
    client = self.make_client()
    numbers = list(range(0, 120, 7))
    random.Random(0).shuffle(numbers)
    for number in numbers:
      client.put(f"order/{number:08d}", str(number).encode())
    client.put("order", b"key of the directory itself")
    client.put("orders/1", b"not in the directory")
    listed = client.list("order")
    self.assertEqual(
        list(listed), [f"order/{number:08d}" for number in sorted(numbers)]
    )
    self.assertEqual(listed["order/00000007"], b"7")
    self.assertEqual(client.list("order/00000007"), {})
    self.assertEqual(client.list("nothing"), {})

  def test_list_sorts_bytewise(self):
    client = self.make_client()
    names = ["b", "a/z", "a", "B", "10", "2", "é", "a.b"]
    for name in names:
      client.put(f"sorted/{name}", b"x")
    expected = sorted((f"sorted/{name}" for name in names), key=str.encode)
    self.assertEqual(list(client.list("sorted")), expected)

  def test_delete_is_recursive(self):
    client = self.make_client()
    for key in ("tree", "tree/a", "tree/a/b", "trees", "tree2/a"):
      client.put(key, b"x")
    client.delete("tree/a")
    self.assertEqual(client.list("tree"), {})
    self.assertEqual(client.get("tree"), b"x")
    client.put("tree/c", b"x")
    client.delete("tree")
    self.assertIsNone(client.get("tree"))
    self.assertEqual(client.list("tree"), {})
    self.assertEqual(client.get("trees"), b"x")
    self.assertEqual(client.get("tree2/a"), b"x")

  def test_many(self):
    client = self.make_client()
    values = {f"many/{i:03d}": str(i).encode() for i in range(40)}
    client.put_all(values)
    self.assertEqual(client.list("many"), values)
    client.put_all({"many/000": b"again", "many/100": b""})
    self.assertEqual(client.get("many/000"), b"again")
    client.delete_all([*values, "many/nothing"])
    self.assertEqual(client.list("many"), {"many/100": b""})
    client.put_all({})
    client.delete_all([])
    with self.assertRaises(ValueError):
      client.put_all({"fine": b"x", "a//b": b"x"})
    with self.assertRaises(ValueError):
      client.delete_all(["a//b"])

  def test_many_after_loss(self):
    client = self.make_client()
    self.lose_generation()
    with self.assertRaises(byte_store.TransportError):
      client.put_all({f"lost/{i}": b"x" for i in range(9)})
    with self.assertRaises(byte_store.TransportError):
      client.delete_all(["lost/0", "lost/1"])
    client.reconnect()
    client.put_all({f"lost/{i}": b"x" for i in range(9)})
    self.assertLen(client.list("lost"), 9)

  def test_invalid_keys_and_values(self):
    client = self.make_client()
    for key in ("", "/", "/a", "a/", "a//b", "a\0b"):
      for operation in (client.get, client.list, client.delete):
        with self.assertRaises(ValueError):
          operation(key)
      with self.assertRaises(ValueError):
        client.put(key, b"x")
    with self.assertRaises(TypeError):
      client.put("a", memoryview(b"x"))

  def test_lost_generation_raises_until_reconnect(self):
    client = self.make_client()
    old = client.generation
    client.put("held", b"x")
    self.assertEqual(client.reconnect(), old)
    self.assertEqual(client.get("held"), b"x")
    self.lose_generation()
    for _ in range(2):
      with self.assertRaises(byte_store.TransportError):
        client.put("held", b"y")
      with self.assertRaises(byte_store.TransportError):
        client.get("held")
    self.assertEqual(client.reconnect(), old + 1)
    self.assertEqual(client.generation, old + 1)
    # The new generation is empty.
    self.assertIsNone(client.get("held"))
    self.assertTrue(client.put("held", b"z", overwrite=False))

  def test_reconnect_without_failed_call(self):
    client = self.make_client()
    old = client.generation
    self.lose_generation()
    self.assertEqual(client.reconnect(), old + 1)
    self.assertTrue(client.put("a", b"x"))

  def test_clients_of_several_threads(self):
    num_threads, num_keys = 4, 25
    errors, wins = [], []

    def work(index: int) -> None:
      try:
        client = self.make_client()
        for i in range(num_keys):
          client.put(f"threads/{index}/{i:04d}", bytes([index]))
          if client.put(f"race/{i:04d}", bytes([index]), overwrite=False):
            wins.append(i)
        client.close()
      except Exception as error:
        errors.append(error)

    threads = [
        threading.Thread(target=work, args=(i,)) for i in range(num_threads)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    self.assertEqual(errors, [])
    client = self.make_client()
    self.assertLen(client.list("threads"), num_threads * num_keys)
    self.assertEqual(sorted(wins), list(range(num_keys)))

  def test_closed_client(self):
    client = self.make_client()
    client.close()
    client.close()
    with self.assertRaisesRegex(byte_store.TransportError, "closed"):
      client.get("a")
    with self.assertRaisesRegex(byte_store.TransportError, "closed"):
      client.reconnect()
