# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Both ends of the queue in threads of one process, over a store in memory."""

import contextlib
import dataclasses
import pathlib
import threading
import time
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax import types
from tba_jax.replay import buffer
from tba_jax.replay import prompt_order
from tba_jax.transport import ports
from tba_jax.transport import wire
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import queue_client
from tba_jax.transport.groups import queue_server
from tba_jax.transport.groups import service
from tests.support import in_process
from tests.support import waiting
from tests.transport.groups import fake_groups

RUN = "run"
SECRET = b"s" * 32
SAMPLES = 3
PROMPTS_PER_STEP = 4
PROMPTS_PER_ROUND = 2
VOCAB = 10_000


def make_group(position, prompt_id, visit, version=0) -> types.Group:
  """Returns a group whose first tokens encode its position."""
  completions = [[1 + position, s + 1] for s in range(SAMPLES)]
  group = fake_groups.make_group(prompt_id, completions, version=version)
  return dataclasses.replace(group, position=position, visit=visit)


class Events:

  def __init__(self):
    self.all: list[tuple[str, str]] = []

  def __call__(self, kind: str, message: str) -> None:
    self.all.append((kind, message))

  def of(self, kind: str) -> list[str]:
    return [m for k, m in list(self.all) if k == kind]


def make_config(**changes):
  """Returns a config; `changes`: keys of its sections, or `capacity`."""
  config = fake_groups.buffer_config(
      capacity=changes.pop("capacity", 2000), capacity_per_prompt=200
  )
  more = dict(
      search=dict(
          prompts_per_step=PROMPTS_PER_STEP,
          prompts_per_round=PROMPTS_PER_ROUND,
          samples_per_prompt=SAMPLES,
          lead_steps=2,
          lockstep=False,
          wait_for_fresh=True,
          starvation_s=20.0,
          lease_s=30.0,
          credits=4,
      ),
      train=dict(num_steps=1000, prompts_per_batch=2),
      rounds=dict(mini_batches=0, passes=1, lag_rounds=0),
      publish=dict(every_steps=1),
  )
  for section in more.values():
    for key in set(section) & set(changes):
      section[key] = changes.pop(key)
  if changes:
    raise KeyError(f"no such settings: {sorted(changes)}")
  config.replay.update(
      max_segment_mb=0.005,
      warm_start_completions=0,
      recent_window_steps=more["publish"]["every_steps"],
  )
  config.update(more)
  return config


class TrainerSide:
  """Buffer, order, queue server and service, new or restored."""

  def __init__(
      self,
      store,
      workdir,
      *,
      state=None,
      epoch=0,
      open_store=None,
      **changes,
  ):
    config = make_config(**changes)
    self.events = Events()
    self.inserted: list[int] = []
    self.order = prompt_order.PromptOrder(10, seed=0)
    self.buffer = buffer.ReplayBuffer(
        config, reward_temperature=lambda step: 1.0
    )
    self.server = self.make_receiver(
        store,
        config,
        wire.RunIdentity(RUN, SECRET, workdir),
        order=self.order,
        epoch=epoch,
        on_event=self.events,
        saved=state,
        **({} if open_store is None else {"open_store": open_store}),
    )
    self._insert = self.buffer.insert
    self.buffer.insert = self._record_insert
    self.service = service.ReplayService(
        config,
        receiver=self.server,
        buffer=self.buffer,
        vocab_size=VOCAB,
        on_event=self.events,
        saved=state,
    )

  def make_receiver(
      self, store, *args, open_store=lambda transport: None, **kwargs
  ):
    server = queue_server.QueueServer(
        *args,
        make_transport=lambda: in_process.InProcessTransport(store),
        open_store=open_store,
        **kwargs,
    )
    self.journal = server.journal
    return server

  def start(self) -> None:
    self.server.start()

  def _record_insert(self, group, step):
    self.inserted.append(group.position)
    return self._insert(group, step)

  def step(self, step: int) -> None:
    """Does a step of the trainer's loop."""
    if not self.service.begin_step(step, lambda: False):
      raise AssertionError(f"step {step} did not begin")
    self.service.mark_drawn(self.buffer.sample(2, SAMPLES, step))

  @property
  def num_journaled(self) -> int:
    """Number of positions that came, applied or not."""
    self.service.take_records()
    return len(self.service.journaled)

  @property
  def waiting(self):
    """Records that are journaled and not applied."""
    self.service.take_records()
    return self.service.unapplied

  def living(self):
    """Returns the leases of the searchers that are not gone, by sid."""
    heard = self.server.heard()
    return {sid: lease for sid, lease in heard.items() if lease["alive"]}

  def close(self) -> None:
    self.server.close()


class SearcherSide:
  """A searcher's end, and a thread that answers each grant with a block."""

  def __init__(
      self,
      store,
      sid,
      index=0,
      *,
      credits=4,
      works=True,
      delay_s=0,
      lease_s=4.0,
      workdir=None,
      **changes,
  ):
    self.events = Events()
    self.blocks: list[ports.Assignment] = []
    self.error: BaseException | None = None
    self._delay_s = delay_s
    self._stop = threading.Event()
    self.client = self.make_client(
        store,
        make_config(credits=credits, lease_s=lease_s),
        wire.RunIdentity(RUN, SECRET, workdir),
        sid=sid,
        index=index,
        **changes,
    )
    self._thread = threading.Thread(target=self._work, daemon=True)
    if works:
      self._thread.start()

  def make_client(self, store, *args, **kwargs):
    return queue_client.QueueClient(
        *args,
        make_transport=lambda: in_process.InProcessTransport(store),
        on_event=self.events,
        **kwargs,
    )

  def submit(self, *positions: int, order=None) -> bool:
    """Sends one block of the prompts at these positions of an order."""
    order = order or prompt_order.PromptOrder(10, seed=0)
    groups = [make_group(p, *order.prompt(p)) for p in positions]
    return self.client.submit(groups, self._stop.is_set)

  def _work(self) -> None:
    try:
      while not self._stop.is_set() and not self.client.stop_requested:
        block = self.client.next_assignment(0.02)
        if block is not None:
          self.blocks.append(block)
          time.sleep(self._delay_s)
          # The oldest version that it may sample with.
          version = max(block.require_version, 0)
          self.client.submit(
              [make_group(*p, version) for p in block.prompts],
              self._stop.is_set,
          )
      self.client.close(0.0 if self._stop.is_set() else 10.0)
    except Exception as error:  # Looked at by `close`.
      self.error = error

  def kill(self) -> None:
    """Ends the client as SIGKILL would: it sends nothing more."""
    with mock.patch.object(
        self.client, "exchange", side_effect=KeyError("killed")
    ):
      waiting.wait_until(lambda: not self.client.worker.is_alive(), "its death")

  def close(self) -> None:
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join(20.0)
    else:
      self.client.close(0.0)
    if self.error is not None:
      raise self.error


class QueueTestCase(absltest.TestCase):

  trainer_side = TrainerSide
  searcher_side = SearcherSide

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.directory = self.workdir / "replay"
    self.order = prompt_order.PromptOrder(10, seed=0)

  def trainer(self, *, start=True, **changes) -> TrainerSide:
    side = self.trainer_side(self.store, self.workdir, **changes)
    self.addCleanup(side.close)
    if start:
      side.start()
    return side

  def searcher(self, sid, index=0, **changes) -> SearcherSide:
    changes = {"workdir": self.workdir, **changes}
    side = self.searcher_side(self.store, sid, index, **changes)
    self.addCleanup(side.close)
    return side

  def client(self) -> in_process.InProcessTransport:
    return in_process.InProcessTransport(self.store)

  def group(self, position: int) -> types.Group:
    return make_group(position, *self.order.prompt(position))

  def message(self, sid, sequence, groups, **changes) -> bytes:
    """Returns a block as an outbox would send it as its only one."""
    header, arrays = messages.pack_groups(groups)
    amount = {
        "prompts": len(groups),
        "completions": sum(g.num_completions for g in groups),
        "tokens": sum(g.num_tokens for g in groups),
    }
    header.update(
        run=RUN,
        key=messages.block_key(sid, sequence),
        sid=sid,
        sequence=sequence,
        totals=amount,
        amount=amount,
    )
    arrays = changes.pop("arrays", arrays)
    return wire.encode({**header, **changes}, arrays, SECRET)

  def put_block(self, sid, sequence, data: bytes) -> None:
    """Delivers a block, as a queue client does."""
    self.client().put(messages.block_key(sid, sequence), data)
    self.client().put(messages.delivery_key(sid, sequence), b"1")

  def lease(self, sid, beat=1, *, slot=None, joined=0, totals=0, **changes):
    """Writes a lease by hand, of a searcher that does nothing else."""
    key = messages.lease_key(sid)
    lease = {
        "run": RUN,
        "key": key,
        "sid": sid,
        "slot": slot or f"elsewhere/{sid}",
        "index": 0,
        "joined": [1, joined],
        "beat": beat,
        "totals": dict.fromkeys(messages.UNITS, totals),
        "unacked": 0,
        "first": 0,
        "acked": dict.fromkeys(messages.UNITS, 0),
        "seen": [-1, -1],
        "begun": [-1, -1],
        "credits": 4,
        "final": False,
        "stats": {},
        **changes,
    }
    self.client().put(key, wire.encode_message(lease, SECRET))

  @contextlib.contextmanager
  def reads(self, key: str, count: int):
    """Afterwards waits until a key was read so many times."""
    result, get = [], in_process.InProcessTransport.get

    def record(transport, name):
      value = get(transport, name)
      if name == key:
        result.append(value)
      return value

    with mock.patch.object(in_process.InProcessTransport, "get", record):
      yield
      before = len(result)
      # One read may have begun before the body ended.
      waiting.wait_until(
          lambda: len(result) > before + count, f"reads of {key}"
      )

  def queue(self) -> list[str]:
    """Returns the keys of the delivered blocks in the store."""
    return list(self.client().list("new/0"))

  def assert_closed(self, ledger) -> None:
    self.assertTrue(ledger["closed"], ledger)

  def assert_same(self, a, b) -> None:
    """Compares nested states, arrays included."""
    self.assertEqual(type(a), type(b))
    if isinstance(a, dict):
      self.assertEqual(a.keys(), b.keys())
      for key in a:
        self.assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
      self.assertEqual(len(a), len(b))
      for x, y in zip(a, b, strict=True):
        self.assert_same(x, y)
    elif isinstance(a, np.ndarray):
      np.testing.assert_array_equal(a, b)
    else:
      self.assertEqual(a, b)
