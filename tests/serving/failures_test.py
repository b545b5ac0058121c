# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests that fail: alone, once, and on every start after a kill."""

import contextlib
import itertools
import json
import pathlib
import threading
from unittest import mock

from absl.testing import absltest

from tba_jax.chat_api import completions
from tba_jax.learning import checkpoint
from tba_jax.serving import agent_episodes
from tba_jax.serving import crash_guard
from tba_jax.serving import database
from tba_jax.serving import engine as engine_lib
from tba_jax.serving import kinds
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import request_queue
from tba_jax.serving import sample_batches
from tba_jax.serving import schemas
from tba_jax.serving import served_models
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
          "sampling_session_id": "s",
          "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
          "sampling_params": {"max_tokens": 2},
          **fields,
      }
  ).encode()


def _fails_second(error):
  """Returns `completions.completion` whose second call raises."""
  answer, count = completions.completion, itertools.count(1)

  def fail_second(*args, **fields):
    if next(count) == 2:
      raise error
    return answer(*args, **fields)

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
    self.engine.base.policy.tokenizer.chat_template = serving_case.TEMPLATE
    self.journal = self.engine.journal
    self.registry = self.engine.registry
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

  def _open_journal(self):
    """Returns the file of an ended engine, and what is in it."""
    path = pathlib.Path(self.workdir) / "serve" / "journal.sqlite"
    db = database.Database(path)
    return db, request_journal.RequestJournal(db), registry_lib.Registry(db)

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
    with self.engine.queue.lock:
      return [self.engine.queue.submit(*request).id for request in requests]

  def _episode(self, id, **spec):
    spec = {"sampler": "", "path": "", "together": "", "replay": "",
            "num_episodes": 0, **spec}  # fmt: skip
    self.registry.add_episode(
        id, "", spec, together=spec["together"], size=spec["num_episodes"]
    )

  def _spec(self):
    return self.engine.base.spec_of("s:m", schemas.LoraConfig(rank=2))

  def _works(self, owner="works"):
    self.registry.add_sampler(owner, "", "")
    ids = self._submit((kinds.SAMPLE, owner, None, _sample()))
    self.assertEqual(self._wait(*ids), [None])

  def test_concurrent_calls_are_replayed_in_answer_order(self):
    """They are decoded by temperature: first and third, then the second."""
    self._episode("e")
    calls = [(kinds.CALL, "e", None, _call(t)) for t in (1.0, 0.5, 1.0)]
    ids = self._submit(*calls)
    self.assertEqual(self._wait(*ids), [None] * 3)
    again = self.engine.episodes.read("e")  # From the journal.
    self.assertLen(again["rows"], 3)
    ends = self._submit((kinds.FINISH, "e", None, b'{"reward": 1.0}'))
    self.assertEqual(self._wait(*ends), [None])
    played = self.engine.episodes.read("e")  # As it was in memory.
    self.assertEqual(played, again | {"reward": 1.0, "finished": True})

  def test_failed_call_is_not_recorded_in_episode(self):
    for error in (ValueError("of the request"), RuntimeError("no memory")):
      with self.subTest(type(error).__name__):
        id = f"e-{type(error).__name__}"
        self._episode(id)
        with mock.patch.object(completions, "completion", _fails_second(error)):
          calls = [(kinds.CALL, id, None, _call(seed=n)) for n in range(2)]
          ids = self._submit(*calls)
          for response in self._wait(*ids):
            self.assertIn(str(error), response)
        self.assertEqual(self.engine.episodes.read(id)["calls"], 0)
        (again,) = self._submit((kinds.CALL, id, None, _call(seed=2)))
        self.assertEqual(self._wait(again), [None])
        self.assertLen(self.engine.episodes.read(id)["rows"], 1)

  def test_whatever_request_raises_is_its_failure(self):
    class OddError(Exception):
      pass

    self._episode("e")
    for name, request in (
        (
            (agent_episodes.AgentEpisodes, "end"),
            (kinds.FINISH, "e", None, b'{"reward": 1.0}'),
        ),
        (
            (sample_batches.SampleBatches, "job"),
            (kinds.SAMPLE, "s", None, _sample()),
        ),
        (
            (sample_batches.SampleBatches, "complete"),
            (kinds.ANSWER, kinds.ANSWERS, None, _call()),
        ),
        (
            (served_models.ServedModels, "execute"),
            (kinds.CREATE, "m", 0, b"{}"),
        ),
    ):
      self.registry.add_sampler("s", "", "")
      with self.subTest(name[1]), mock.patch.object(
          *name, side_effect=OddError("odd")
      ):
        (id,) = self._submit(request)
        self.assertEqual(self._wait(id), ["OddError: odd"])
    self._works()

  def test_starts_with_unservable_requests_in_journal(self):
    """As an older version, or a damaged one, may have left them."""
    self._close()
    db, journal, registry = self._open_journal()
    spec = {"sampler": "", "path": "", "together": "r/g", "replay": "r"}
    # A group that had all its episodes when one with another size came.
    for id, size in (("a", 2), ("b", 2)):
      registry.add_episode(
          id, "", {**spec, "num_episodes": size}, together="r/g", size=size
      )
      registry.finish_episode(id, {"reward": 1.0, "rows": []})
    db.fetch_all(
        "INSERT INTO episodes VALUES ('c', '', 'r/g', ?, NULL)",
        json.dumps({**spec, "num_episodes": 3}),
    )
    registry.add_model("m", "", {"rank": "x"})
    registry.add_sampler("s", "", "tinker://gone/weights/a")
    poison = [
        (kinds.FINISH, "none", b'{"reward": 1}'),
        (kinds.FINISH, "none", b"["),
        (kinds.CALL, "none", _call()),
        (kinds.CALL, "c", b"\xff"),
        (kinds.ANSWER, kinds.ANSWERS, b"{}"),
        (kinds.SAMPLE, "s", _sample()),
        (kinds.SAMPLE, "none", _sample()),
        (kinds.CREATE, "m", b"{}"),
        (kinds.TRAIN, "m", b"{}"),
        (kinds.FORWARD_BACKWARD, "m3", b"\xff"),
        ("of_another_version", "m2", b"{}"),
    ]
    ids, seqs = [], {}
    for kind, owner, body in poison:
      seq = seqs[owner] = seqs.get(owner, -1) + 1
      ids.append(f"{owner}:{seq}")
      journal.accept(ids[-1], owner, seq, kind, body)
    journal.accept("c:end", "c", 9, kinds.FINISH, b'{"reward": 1.0}')
    registry.set_running("m", True, "")
    db.close()
    with self.assertLogs(level="ERROR") as logs:
      self._start()
      for id, response in zip(ids, self._wait(*ids)):
        self.assertIsNotNone(response, id)
      self.assertEqual(self._wait("c:end"), [None])
    self.assertIn("none:0 failed", "\n".join(logs.output))
    self.assertIn("no request 'of_another_version'", self._wait(ids[-1])[0])
    self.assertIn("KeyError", self.registry.running("m")[1])
    self._works()
    with self.subTest("and once more"):
      before = [self.journal.outcome(id) for id in ids]
      self._restart()
      self._works("again")
      self.assertEqual([self.journal.outcome(id) for id in ids], before)

  def test_skips_request_after_repeated_crashes(self):
    """Those that came with it are done, one by one."""
    self._close()
    db, journal, registry = self._open_journal()
    ids = [f"s:{n}" for n in range(3)]
    registry.add_sampler("s", "", "")
    for n, id in enumerate(ids):
      journal.accept(id, "s", n, kinds.SAMPLE, _sample())
    db.close()

    class KilledError(BaseException):
      pass

    def die(samples, jobs):
      if any(job.id == "s:1" for job in jobs):
        raise KilledError
      return complete(samples, jobs)

    complete = sample_batches.SampleBatches.complete
    with mock.patch.object(sample_batches.SampleBatches, "complete", die):
      for _ in range(crash_guard.MOST_DEATHS):
        self._start(runs=False)
        with contextlib.suppress(KilledError):
          self.engine.run()
          self.fail("was not killed")
      with self.assertLogs(level="ERROR") as logs:
        self._start()
        response = self._wait(*ids)
    self.assertEqual((response[0], response[2]), (None, None))
    self.assertIn("s:1: the server was killed 3 times", response[1])
    self.assertIn("s:1 (sample) is left out", logs.output[0])

  def test_clean_shutdown_is_not_crash_of_pending_requests(self):
    self._works()
    note = pathlib.Path(self.workdir) / "serve" / "under_way.json"
    self.assertTrue(note.exists())
    self._close()
    self.assertFalse(note.exists())

  def test_outcomes_wait_for_room_on_disk(self):
    self.registry.add_sampler("s", "", "")
    finish, tries = self.journal.finish, []

    def full_at_first(outcomes):
      tries.append(list(outcomes))
      if len(tries) < 3:
        raise OSError("disk full")
      finish(outcomes)

    with mock.patch.object(request_queue, "DISK_S", 0.01), mock.patch.object(
        self.journal, "finish", full_at_first
    ):
      (id,) = self._submit((kinds.SAMPLE, "s", 0, _sample()))
      self.assertEqual(self._wait(id), [None])
    self.assertEqual(tries, [[id]] * 3)

  def test_refuses_requests_beyond_queue_memory(self):
    """A request waits for its predecessor, and is in memory meanwhile."""
    self.registry.add_model("m", "", {})
    late = (kinds.OPTIM_STEP, "m", 2, b"x" * 60)
    with mock.patch.object(request_queue, "MOST_QUEUED", 100):
      (id,) = self._submit(late)
      with self.assertRaisesRegex(
          request_queue.BusyError, "60 bytes of requests"
      ):
        self._submit((kinds.OPTIM_STEP, "m", 3, b"x" * 60))
      self.assertEqual(self._submit(late), [id])
    self._works()

  def test_failed_save_keeps_previous_checkpoint(self):
    self.registry.add_session("s")
    self.registry.add_model("s:m", "s", self._spec())
    save = b'{"path": "a", "overwrite": true}'
    ids = self._submit(
        (kinds.CREATE, "s:m", 0, b"{}"),
        (kinds.SAVE, "s:m", 1, save),
    )
    self.assertEqual(self._wait(*ids), [None, None])
    path = "tinker://s:m/weights/a"
    before = self.registry.checkpoint(path)
    with mock.patch.object(
        checkpoint.Checkpointer, "save", side_effect=OSError("full")
    ):
      (id,) = self._submit((kinds.SAVE, "s:m", 2, save))
      self.assertEqual(self._wait(id), ["OSError: full"])
    self.assertEqual(self.registry.checkpoint(path), before)
    self.assertIn("opt_state", self.engine.weights.read(path)[1])
    folder = self.engine.weights.place(path)[1]
    self.assertEqual([f.name for f in folder.parent.iterdir()], ["a"])

  def test_model_with_unread_checkpoint_is_not_served(self):
    self.registry.add_model("s:m", "s", self._spec())
    body = json.dumps({"path": "tinker://x/weights/a", "optimizer": True})
    ids = self._submit(
        (kinds.LOAD, "s:m", 0, body.encode()),
        (kinds.SAVE, "s:m", 1, b"{}"),
    )
    for response in self._wait(*ids):
      self.assertIn("there is no such checkpoint", response)
