# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests that fail: alone, once, and on every start after a kill."""

import contextlib
import itertools
import json
import threading
from unittest import mock

from absl.testing import absltest

from tba_jax.serving import engine as engine_lib
from tba_jax.serving import journal as journal_lib
from tests.support import serving_case
from tests.support import waiting

_ASK = [{"role": "user", "content": "1+2"}]


def _call(temperature=1.0, **fields):
  return json.dumps(
      {
          "model": "scratch",
          "messages": _ASK,
          "max_tokens": 2,
          "temperature": temperature,
          **fields,
      }
  ).encode()


def _sample(**fields):
  return json.dumps(
      {
          "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
          "sampling_params": {"max_tokens": 2},
          **fields,
      }
  ).encode()


def _fails_second(error):
  """Returns `Engine._answer` whose second call raises."""
  answer, count = engine_lib.Engine._answer, itertools.count(1)

  def fail_second(*args):
    if next(count) == 2:
      raise error
    return answer(*args)

  return fail_second


class FailuresTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.engine = None
    self.addCleanup(self._close)
    self._start()

  def _start(self, *, runs=True):
    self.engine = engine_lib.Engine(
        serving_case.make_config(), self.workdir, lambda ids: None
    )
    self.engine._policy.tokenizer.chat_template = serving_case.TEMPLATE
    self.journal = self.engine.journal
    self.thread = threading.Thread(target=self.engine.run, daemon=True)
    if runs:
      self.thread.start()

  def _close(self):
    self.engine.stop()
    if self.thread.is_alive():
      self.thread.join(60)

  def _restart(self):
    self._close()
    self._start()

  def _wait(self, *ids):
    """Returns the error, or None, of each request."""
    done = lambda: all(self.journal.outcome(id).is_done for id in ids)
    waiting.wait_until(
        done,
        lambda: f"no outcome of {ids}",
        120.0,
        is_lost=lambda: not self.thread.is_alive(),
    )
    return [(self.journal.outcome(id).failure or {}).get("error") for id in ids]

  def _submit(self, *requests):
    """Returns the ids of requests that come at the same time."""
    with self.engine._changed:
      return [self.engine.submit(*request).id for request in requests]

  def _episode(self, id, **spec):
    spec = {"sampler": "", "path": "", "together": "", "replay": "",
            "num_episodes": 0, **spec}  # fmt: skip
    self.journal.add_episode(
        id, "", spec, together=spec["together"], size=spec["num_episodes"]
    )

  def _works(self, owner="works"):
    self.journal.add_sampler(owner, "", "")
    ids = self._submit((engine_lib.SAMPLE, owner, None, _sample()))
    self.assertEqual(self._wait(*ids), [None])

  def test_calls_at_once_are_read_again_in_the_order_of_their_answers(self):
    """They are decoded by temperature: first and third, then the second."""
    self._episode("e")
    calls = [(engine_lib.CALL, "e", None, _call(t)) for t in (1.0, 0.5, 1.0)]
    ids = self._submit(*calls)
    self.assertEqual(self._wait(*ids), [None] * 3)
    rows = self.engine._episode("e").to_json()
    self.assertLen(rows["rows"], 3)
    self._restart()
    self.assertEqual(self.engine.read_episode("e") | rows, rows | {
        "reward": None, "finished": False,
    })  # fmt: skip
    ends = self._submit((engine_lib.FINISH, "e", None, b'{"reward": 1.0}'))
    self.assertEqual(self._wait(*ends), [None])
    self.assertEqual(self.engine.read_episode("e")["rows"], rows["rows"])

  def test_a_call_whose_batch_fails_is_in_no_episode(self):
    for error in (ValueError("of the request"), RuntimeError("no memory")):
      with self.subTest(type(error).__name__):
        id = f"e-{type(error).__name__}"
        self._episode(id)
        with mock.patch.object(
            engine_lib.Engine, "_answer", _fails_second(error)
        ):
          calls = [(engine_lib.CALL, id, None, _call(seed=n)) for n in range(2)]
          ids = self._submit(*calls)
          for said in self._wait(*ids):
            self.assertIn(str(error), said)
        self.assertEqual(self.engine.read_episode(id)["calls"], 0)
        (again,) = self._submit((engine_lib.CALL, id, None, _call(seed=2)))
        self.assertEqual(self._wait(again), [None])
        self.assertLen(self.engine.read_episode(id)["rows"], 1)

  def test_whatever_a_request_raises_is_its_failure(self):
    class OddError(Exception):
      pass

    self._episode("e")
    for name, request in (
        ("_end_episode", (engine_lib.FINISH, "e", None, b'{"reward": 1.0}')),
        ("_parse_sample", (engine_lib.SAMPLE, "s", None, _sample())),
        ("_decode", (engine_lib.ANSWER, engine_lib.ANSWERS, None, _call())),
        ("_execute", (engine_lib.CREATE, "m", 0, b"{}")),
    ):
      self.journal.add_sampler("s", "", "")
      with self.subTest(name), mock.patch.object(
          engine_lib.Engine, name, side_effect=OddError("odd")
      ):
        (id,) = self._submit(request)
        self.assertEqual(self._wait(id), ["OddError: odd"])
    self._works()

  def test_starts_with_a_journal_of_requests_that_nobody_can_do(self):
    """As an older version, or a damaged one, may have left them."""
    self._close()
    journal = journal_lib.Journal(self.engine._folder / "journal.sqlite")
    spec = {"sampler": "", "path": "", "together": "r/g", "replay": "r"}
    # A group that had all its episodes when one with another size came.
    for id, size in (("a", 2), ("b", 2)):
      journal.add_episode(
          id, "", {**spec, "num_episodes": size}, together="r/g", size=size
      )
      journal.finish_episode(id, {"reward": 1.0, "rows": []})
    journal._write(
        "INSERT INTO episodes VALUES ('c', '', 'r/g', ?, NULL)",
        json.dumps({**spec, "num_episodes": 3}),
    )
    journal.add_model("m", "", {"rank": "x"})
    journal.add_sampler("s", "", "tinker://gone/weights/a")
    poison = [
        (engine_lib.FINISH, "none", b'{"reward": 1}'),
        (engine_lib.FINISH, "none", b"["),
        (engine_lib.CALL, "none", _call()),
        (engine_lib.CALL, "c", b"\xff"),
        (engine_lib.ANSWER, engine_lib.ANSWERS, b"{}"),
        (engine_lib.SAMPLE, "s", _sample()),
        (engine_lib.SAMPLE, "none", _sample()),
        (engine_lib.CREATE, "m", b"{}"),
        (engine_lib.TRAIN, "m", b"{}"),
        (engine_lib.FORWARD_BACKWARD, "m3", b"\xff"),
        ("of_another_version", "m2", b"{}"),
    ]
    ids, seqs = [], {}
    for kind, owner, body in poison:
      seq = seqs[owner] = seqs.get(owner, -1) + 1
      ids.append(f"{owner}:{seq}")
      journal.accept(ids[-1], owner, seq, kind, body)
    journal.accept("c:end", "c", 9, engine_lib.FINISH, b'{"reward": 1.0}')
    journal.set_running("m", True, "")
    journal.close()
    with self.assertLogs(level="ERROR") as logs:
      self._start()
      for id, said in zip(ids, self._wait(*ids)):
        self.assertIsNotNone(said, id)
      self.assertEqual(self._wait("c:end"), [None])
    self.assertIn("none:0 failed", "\n".join(logs.output))
    self.assertIn("no request 'of_another_version'", self._wait(ids[-1])[0])
    self.assertIn("KeyError", self.journal.running("m")[1])
    self._works()
    with self.subTest("and once more"):
      before = [self.journal.outcome(id) for id in ids]
      self._restart()
      self._works("again")
      self.assertEqual([self.journal.outcome(id) for id in ids], before)

  def test_leaves_out_a_request_that_ends_the_process(self):
    """Those that came with it are done, one by one."""
    self._close()
    journal = journal_lib.Journal(self.engine._folder / "journal.sqlite")
    ids = [f"s:{n}" for n in range(3)]
    journal.add_sampler("s", "", "")
    for n, id in enumerate(ids):
      journal.accept(id, "s", n, engine_lib.SAMPLE, _sample())
    journal.close()

    class KilledError(BaseException):
      pass

    def die(engine, requests):
      deadly = [r for r in requests if r.id == "s:1"]
      return sample(engine, requests) if not deadly else kill()

    def kill():
      raise KilledError

    sample = engine_lib.Engine._sample
    with mock.patch.object(engine_lib.Engine, "_sample", die):
      for _ in range(engine_lib._MOST_DEATHS):
        self._start(runs=False)
        with contextlib.suppress(KilledError):
          self.engine.run()
          self.fail("was not killed")
        self.journal.close()
      with self.assertLogs(level="ERROR") as logs:
        self._start()
        said = self._wait(*ids)
    self.assertEqual((said[0], said[2]), (None, None))
    self.assertIn("s:1: the server was killed 3 times", said[1])
    self.assertIn("s:1 (sample) is left out", logs.output[0])

  def test_an_end_in_order_is_no_death_of_what_is_under_way(self):
    self._works()
    self.assertTrue(self.engine._under_way.exists())
    self._close()
    self.assertFalse(self.engine._under_way.exists())

  def test_outcomes_wait_for_room_on_the_disk(self):
    self.journal.add_sampler("s", "", "")
    finish, tries = self.journal.finish, []

    def full_at_first(outcomes):
      tries.append(list(outcomes))
      if len(tries) < 3:
        raise OSError("disk full")
      finish(outcomes)

    with mock.patch.object(engine_lib, "_DISK_S", 0.01), mock.patch.object(
        self.journal, "finish", full_at_first
    ):
      (id,) = self._submit((engine_lib.SAMPLE, "s", 0, _sample()))
      self.assertEqual(self._wait(id), [None])
    self.assertEqual(tries, [[id]] * 3)

  def test_takes_no_more_than_fits_in_memory(self):
    """A request waits for its predecessor, and is in memory meanwhile."""
    self.journal.add_model("m", "", {})
    late = (engine_lib.OPTIM_STEP, "m", 2, b"x" * 60)
    with mock.patch.object(engine_lib, "_MOST_QUEUED", 100):
      (id,) = self._submit(late)
      with self.assertRaisesRegex(engine_lib.BusyError, "60 bytes of requests"):
        self._submit((engine_lib.OPTIM_STEP, "m", 3, b"x" * 60))
      self.assertEqual(self._submit(late), [id])
    self._works()

  def test_a_save_that_fails_leaves_what_was_there(self):
    self.journal.add_session("s")
    self.journal.add_model("s:m", "s", self.engine.spec_of("s:m", {"rank": 2}))
    save = b'{"path": "a", "overwrite": true}'
    ids = self._submit(
        (engine_lib.CREATE, "s:m", 0, b"{}"),
        (engine_lib.SAVE, "s:m", 1, save),
    )
    self.assertEqual(self._wait(*ids), [None, None])
    path = "tinker://s:m/weights/a"
    before = self.journal.checkpoint(path)
    with mock.patch.object(
        engine_lib.checkpoint.Checkpointer, "save", side_effect=OSError("full")
    ):
      (id,) = self._submit((engine_lib.SAVE, "s:m", 2, save))
      self.assertEqual(self._wait(id), ["OSError: full"])
    self.assertEqual(self.journal.checkpoint(path), before)
    self.assertIn("opt_state", self.engine._read(path)[1])
    folder = self.engine._place(path)[2]
    self.assertEqual([f.name for f in folder.parent.iterdir()], ["a"])

  def test_a_model_whose_checkpoint_was_not_read_is_not_served(self):
    self.journal.add_model("s:m", "s", self.engine.spec_of("s:m", {"rank": 2}))
    body = json.dumps({"path": "tinker://x/weights/a", "optimizer": True})
    ids = self._submit(
        (engine_lib.LOAD, "s:m", 0, body.encode()),
        (engine_lib.SAVE, "s:m", 1, b"{}"),
    )
    for said in self._wait(*ids):
      self.assertIn("there is no such checkpoint", said)


if __name__ == "__main__":
  absltest.main()
