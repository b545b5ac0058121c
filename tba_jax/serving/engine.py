# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Engine of a server: one thread that owns the devices and does what is asked.

Handlers of HTTP journal a request and return; the engine does the requests of
each model in the order of their numbers, and decodes those of sampling sessions
together. A model is its newest checkpoint and the journaled requests after it,
done again: after a kill, and when a model is needed that had to make room.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import shutil
import threading
import time
from typing import Any, TypeVar
import zlib

from absl import logging
import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.learning import checkpoint
from tba_jax.learning import model_source
from tba_jax.losses import build
from tba_jax.models import adapter_folder
from tba_jax.models import hf
from tba_jax.models import hf_config
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import sharding
from tba_jax.sampling import decode
from tba_jax.serving import chat
from tba_jax.serving import episodes
from tba_jax.serving import journal as journal_lib
from tba_jax.serving import messages
from tba_jax.serving import replay as replay_lib
from tba_jax.serving import training

_T = TypeVar("_T")

# Kinds of requests. A forward pass and a sample change nothing.
FORWARD = "forward"
FORWARD_BACKWARD = "forward_backward"
OPTIM_STEP = "optim_step"
CREATE, LOAD = "create_model", "load_weights"
SAVE, SAVE_SAMPLER = "save_weights", "save_weights_for_sampler"
EXPORT = "save_weights_external"
SAMPLE = "sample"
# Episodes: a call of an agent, and the end.
CALL, FINISH = "call", "finish_episode"
# A call of an agent without an episode, and the owner of all of them.
ANSWER, ANSWERS = "answer", "answers"
# Replays: completions to reward, a group that enters, a step, what begins and
# ends them.
SAMPLE_INTO = "sample_into_replay"
INSERT, TRAIN = "replay_insert", "replay_step"
_PUBLISH = b"{}"  # Body of a version that the server saves by itself.
START, STOP = "replay_start", "replay_stop"
# Done together, by arrival.
_DECODED = (SAMPLE, SAMPLE_INTO, ANSWER, CALL, FINISH)
# Name of the sampling session of a replay, after its id.
_NEWEST = "newest"
# Folder of a kind of checkpoint, as in the paths of the Tinker API.
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
EXTERNAL_WEIGHTS = "external_weights"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCHEME = "tinker://"
_UNNAMED_PREFIX = "unnamed-"
# Recovery checkpoints of a model: the second serves if the first is damaged.
_KEEP = 2
# Episodes in memory; others are read again.
_EPISODES = 256
# Compiled samplers, by sampling settings, compiled programs, by adapters, and
# params of versions on the devices, that are kept.
_SAMPLERS, _PROGRAMS, _VERSIONS = 8, 8, 2
# Versions without a name of each model that are kept on disk.
_UNNAMED = 8
# Bytes of the requests that wait: four passes of the largest kind.
_MOST_QUEUED = 2**30
# Deaths of the process with a request under way, after which it is not done.
_MOST_DEATHS = 3
_DEADLY = (
    f"the server was killed {_MOST_DEATHS} times with it under way, and does"
    " not try again"
)
# Seconds between attempts to write an outcome to a disk that is full.
_DISK_S = 1.0
# Seconds after the last arrival at which a burst of samples is decoded.
_BURST_S = 0.01
_LONGEST_BURST_S = 0.1
_MOST_SAMPLES = 4096
# Texts that end a completion; all are looked for in each that is decoded.
_MOST_STOPS = 64
# As OpenAI has it.
MOST_CHOICES = 128
# Category of the failure of a request that was never begun.
_UNDONE = "unknown"
# Sections of the config on which the requests that are done again depend.
_SECTIONS = ("model", "tokenizer", "sampling", "loss", "lora")


class BusyError(OSError):
  """A request that cannot be taken now."""


class Engine:
  """Does the requests of a server; `run` is its thread.

  model_name: name of the base model.
  tokenizer_id: name or folder that clients load the tokenizer from.
  journal: journal of the server.

  Args:
    config: config of the server.
    workdir: its directory; a `serve` folder is made there.
    on_done: called with the ids of requests that are done, by the thread.

  Raises:
    ValueError: the model cannot be loaded, or the directory belongs to a server
      with other settings.
    OSError: the directory cannot be used.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      workdir: str,
      on_done: Callable[[list[str]], None],
  ):
    training.check_config(config)
    self._config = config
    self._on_done = on_done
    self._folder = pathlib.Path(workdir) / "serve"
    self._folder.mkdir(parents=True, exist_ok=True)
    policy = policy_lib.make_policy(config, workdir, needs_task=False)
    self._policy = policy
    self.journal = journal_lib.Journal(self._folder / "journal.sqlite")
    self.model_name = config.serve.model_name or (
        str(policy.folder) if policy.folder else "scratch"
    )
    self._check_facts()
    self.tokenizer_id = self._place_tokenizer()
    mesh = sharding.make_mesh(config.mesh)
    shardings = sharding.param_shardings(mesh, policy.model)
    self._base = jax.device_put(
        model_source.initial_params(config, policy, mesh), shardings
    )
    self._programs: collections.OrderedDict[
        tuple[int, str], training.Programs
    ] = collections.OrderedDict()
    self._runs: collections.OrderedDict[str, training.TrainingRun] = (
        collections.OrderedDict()
    )
    self._replays: dict[str, replay_lib.Replay] = {}
    self._savers: dict[str, checkpoint.Checkpointer] = {}
    self._steps_since_save: dict[str, int] = {}
    self._samplers: collections.OrderedDict[Any, decode.Sampler] = (
        collections.OrderedDict()
    )
    self._versions: collections.OrderedDict[str, dict[str, Any]] = (
        collections.OrderedDict()
    )
    self._episodes: collections.OrderedDict[str, episodes.Episode] = (
        collections.OrderedDict()
    )
    # Times that the process ended with a request under way, by id.
    self._under_way = self._folder / "under_way.json"
    self._deaths: dict[str, int] = {}
    # There is none at first, and an empty one after a power cut.
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
      self._deaths = json.loads(self._under_way.read_text())
    self._changed = threading.Condition()
    self._stopping = False
    # Requests of each model by number; those of sampling sessions and episodes
    # by arrival.
    self._waiting: dict[str, dict[int, journal_lib.Request]] = {}
    self._expected: dict[str, int] = {}
    self._samples: list[journal_lib.Request] = []
    for request in self.journal.pending():
      self._queue(request)

  @property
  def family(self) -> str:
    """Family of the model, as `llama`."""
    return self._policy.model.config.family

  @property
  def max_tokens(self) -> int:
    """Most tokens of a sequence."""
    sampling = self._config.sampling
    return sampling.max_prompt_tokens + sampling.max_completion_tokens

  def submit(
      self,
      kind: str,
      owner: str,
      seq: int | None,
      body: bytes,
      *,
      name: str = "",
  ) -> journal_lib.Request:
    """Journals a request and queues it, unless it has come before.

    Args:
      kind: kind of the request.
      owner: model, sampling session or episode.
      seq: its number; None takes the next one.
      body: body of the request.
      name: name among the owner's requests, by which it is known if it comes
        again; "" = its number.

    Raises:
      ConflictError: another request has this number.
      ValueError: the number is out of range.
      BusyError: the requests that wait are too large for one more.
    """
    if seq is not None and not 0 <= seq < 2**62:
      raise ValueError(f"seq_id={seq}: allowed 0 to 2**62 - 1")
    with self._changed:
      if seq is None:
        seq = self.journal.last_seq(owner) + 1
      id = f"{owner}:{name or seq}"
      if self._queued_bytes + len(body) > _MOST_QUEUED:
        if self.journal.outcome(id) is None:
          raise BusyError(f"{self._queued_bytes} bytes of requests wait")
      request, is_new = self.journal.accept(id, owner, seq, kind, body)
      if is_new:
        self._queue(request)
        self._changed.notify_all()
    return request

  def stop(self) -> None:
    """Asks the thread to end after the request that it is doing."""
    with self._changed:
      self._stopping = True
      # What is under way may take longer than the process waits for it.
      self._under_way.unlink(missing_ok=True)
      self._changed.notify_all()

  def run(self) -> None:
    """Does requests until `stop`; for one thread.

    Raises:
      OSError: the journal cannot be read, or not be written before `stop`.
    """
    for model in self.journal.running_replays():
      if self._may_begin([model]):
        self._insist(self._go_on, model)
      else:
        self.journal.set_running(model, False, _DEADLY)
    while True:
      with self._changed:
        batch = self._next()
        while not batch and not self._stopping:
          self._changed.wait(timeout=1.0)
          batch = self._next()
        if self._stopping:
          break
      for some in self._apart(batch):
        if self._stopping:
          break
        ids = [request.id for request in some]
        if not self._may_begin(ids):
          self._give_up(some)
        elif some[0].kind in _DECODED:
          self._sample(some)
        else:
          self._do(some[0])
    for model in list(self._savers):
      self._forget(model)
    self.journal.close()

  # The queue.

  @property
  def _queued_bytes(self) -> int:
    """Bytes of the bodies that wait, which are in memory."""
    queues = [
        self._samples,
        *(some.values() for some in self._waiting.values()),
    ]
    return sum(len(request.body) for some in queues for request in some)

  def _queue(self, request: journal_lib.Request) -> None:
    if request.kind in _DECODED:
      self._samples.append(request)
      return
    owner = request.owner
    if owner not in self._expected:
      self._expected[owner] = self.journal.next_seq(owner)
    self._waiting.setdefault(owner, {})[request.seq] = request

  def _next(self) -> list[journal_lib.Request]:
    """Returns the requests to do next: one of a model, or samples."""
    self._give_up_gaps()
    ready = [
        some[self._expected[owner]]
        for owner, some in self._waiting.items()
        if self._expected[owner] in some
    ]
    first = min(ready, key=lambda r: r.accepted_s, default=None)
    if self._samples and (
        first is None or self._samples[0].accepted_s <= first.accepted_s
    ):
      end = time.monotonic() + _LONGEST_BURST_S
      while self._changed.wait(timeout=_BURST_S) and time.monotonic() < end:
        pass
      batch, self._samples = self._samples, []
      return batch
    if first is None:
      return []
    del self._waiting[first.owner][first.seq]
    return [first]

  def _give_up_gaps(self) -> None:
    """Fails requests whose predecessor does not come."""
    now_s, wait_s = time.time(), self._config.serve.gap_deadline_s
    for owner, some in list(self._waiting.items()):
      expected = self._expected[owner]
      if expected in some:
        continue
      for seq, request in list(some.items()):
        if now_s - request.accepted_s < wait_s:
          continue
        late = _failure(
            f"seq_id {seq} of {owner} waited {wait_s:.0f} s"
            f" (config.serve.gap_deadline_s) for seq_id {expected}, which did"
            " not come",
            category=_UNDONE,
        )
        self._finish({request.id: late})
        del some[seq]

  def _is_done(self, id: str) -> bool:
    outcome = self.journal.outcome(id)
    return outcome is not None and outcome.is_done

  # Requests that end the process, as by all its memory.

  def _apart(
      self, batch: list[journal_lib.Request]
  ) -> list[list[journal_lib.Request]]:
    """Returns a batch in parts: one request each if one may be deadly."""
    if not any(request.id in self._deaths for request in batch):
      return [batch]
    ordered = sorted(batch, key=lambda request: request.kind == FINISH)
    return [[request] for request in ordered]

  def _may_begin(self, ids: Sequence[str]) -> bool:
    """Returns whether to do what the process may have died of, and notes it.

    The note outlives the process, if not the machine.
    """
    deaths = {id: self._deaths.get(id, 0) for id in ids}
    if max(deaths.values()) >= _MOST_DEATHS:
      return False
    text = json.dumps({id: count + 1 for id, count in deaths.items()})
    new = self._under_way.with_suffix(".new")
    try:
      new.write_text(text)
      new.replace(self._under_way)
    except OSError as error:
      logging.error("%s", error)  # The disk is full: it is done all the same.
    return True

  def _give_up(self, requests: Sequence[journal_lib.Request]) -> None:
    """Fails requests that the process has died of."""
    for request in requests:
      logging.error(
          "%s (%s) is left out: %s", request.id, request.kind, _DEADLY
      )
      self._end(request, _failure(f"{request.id}: {_DEADLY}", "server"))

  # Outcomes.

  def _insist(self, write: Callable[..., None], *args: Any) -> None:
    """Repeats a write until the disk takes it; OSError if that is at `stop`."""
    while True:
      try:
        return write(*args)
      except OSError as error:
        logging.error("%s; trying again", error)
        with self._changed:
          if self._stopping:
            raise
          self._changed.wait(timeout=_DISK_S)

  def _finish(self, outcomes: Mapping[str, bytes | Mapping[str, str]]) -> None:
    """Writes outcomes by request, whose effects are there."""
    if outcomes:
      self._insist(self.journal.finish, outcomes)
      self._on_done(list(outcomes))

  def _attempt(
      self, id: str, fn: Callable[..., _T], *args: Any
  ) -> _T | dict[str, str]:
    """Returns a result, or the failure of a request whatever it raises.

    A ValueError is of the request, and changed nothing; what other errors left
    in memory is not known.
    """
    try:
      return fn(*args)
    except ValueError as error:
      return _failure(str(error))
    # Whatever JAX, Orbax or the disk raise: the server goes on.
    except Exception as error:
      logging.exception("%s failed", id)
      return _failure(f"{type(error).__name__}: {error}", category="server")

  # Requests of a model.

  def _do(self, request: journal_lib.Request) -> None:
    """Does a model's request, and writes its outcome."""
    owner = request.owner
    outcome = self._attempt(request.id, self._execute, request)
    if _is_of_server(outcome):
      self._forget(owner)  # Next time it is made again.
    self._end(request, outcome)

  def _end(
      self, request: journal_lib.Request, outcome: bytes | Mapping[str, str]
  ) -> None:
    """Writes the outcome of a request, and begins what follows it."""
    owner = request.owner
    self._finish({request.id: outcome})
    if request.kind in _DECODED:
      return
    with self._changed:
      seq = request.seq + 1
      # Those that waited too long for this one.
      while self._is_done(f"{owner}:{seq}"):
        seq += 1
      self._expected[owner] = seq
    if isinstance(outcome, bytes):
      self._save_in_time(request)
    elif request.kind == TRAIN or (
        request.kind == SAVE_SAMPLER and request.body == _PUBLISH
    ):
      self._insist(self.journal.set_running, owner, False, outcome["error"])
    self._insist(self._go_on, owner)

  def _execute(self, request: journal_lib.Request) -> bytes:
    """Does a model's request; returns its result.

    Raises:
      ValueError: the request is wrong; the model is what it was.
    """
    owner, kind = request.owner, request.kind
    if kind in (FORWARD, FORWARD_BACKWARD):
      asked = messages.unpack_pass(request.body)
      run = self._run_of(owner)
      return messages.pack_pass_result(run.run_pass(asked))
    body = messages.parse_json(request.body)
    if kind == CREATE:
      self._run_of(owner)
      return _json({"type": kind, "model_id": owner})
    if kind == OPTIM_STEP:
      metrics = self._run_of(owner).step(_adam_settings(body))
      return _json({"metrics": metrics})
    if kind in (INSERT, TRAIN, START, STOP):
      return self._execute_replay(owner, kind, body)
    if kind == LOAD:
      path = body["path"]
      self._load(owner, path, with_optimizer=body["optimizer"])
      return _json({"type": kind, "path": path, "model_id": owner})
    if kind == SAVE:
      return self._save_named(request, body)
    if kind == SAVE_SAMPLER:
      return self._save_for_sampler(request, body)
    if kind == EXPORT:
      return self._export(request, body)
    raise ValueError(f"{request.id}: this version has no request {kind!r}")

  def _programs_of(self, spec: Mapping[str, Any]) -> training.Programs:
    key = (spec["rank"], spec["targets"])
    if key in self._programs:
      self._programs.move_to_end(key)
    else:
      while len(self._programs) >= _PROGRAMS:
        self._programs.popitem(last=False)
      self._programs[key] = training.Programs(
          self._config,
          self._policy.model,
          self._base,
          rank=spec["rank"],
          targets=spec["targets"],
      )
    return self._programs[key]

  def _run_of(self, model: str) -> training.TrainingRun:
    """Returns a model, from memory or made again."""
    if model in self._runs:
      self._runs.move_to_end(model)
      return self._runs[model]
    spec = self.journal.model(model)
    if spec is None:
      raise ValueError(f"model {model}: there is none; create_model makes one")
    made = self.journal.outcome(f"{model}:0")
    if made is not None and made.kind == LOAD and made.failure is not None:
      raise ValueError(f"model {model} was not made: {made.failure['error']}")
    while len(self._runs) >= self._config.serve.max_models:
      self._forget(next(iter(self._runs)))
    programs = self._programs_of(spec)
    saver = checkpoint.Checkpointer(
        str(self._model_folder(model) / "state"), keep=_KEEP
    )
    self._savers[model] = saver
    try:
      run, seq = self._read_run(programs, saver, model, spec)
      self._runs[model] = run
      self._steps_since_save[model] = 0
      self._repeat(model, seq)
    except BaseException:
      self._forget(model)
      raise
    return run

  def _read_run(
      self,
      programs: training.Programs,
      saver: checkpoint.Checkpointer,
      model: str,
      spec: Mapping[str, Any],
  ) -> tuple[training.TrainingRun, int]:
    """Returns a model at its newest checkpoint, and the number it is of."""
    if "replay" in spec:
      replay = replay_lib.Replay(
          self._config, spec["replay"], self._policy.tokenizer
      )
      self._replays[model] = replay
    if saver.latest_step() is None:
      params = programs.init(spec["seed"])
      state = {"params": params, "opt_state": programs.init_optimizer(params)}
      return training.TrainingRun(programs, **state), -1
    try:
      state, host = saver.restore(programs.abstract_state())
    except ValueError as error:
      # Damage on disk is not an error of the request that needs the model.
      raise RuntimeError(str(error)) from error
    if "replay" in spec:
      replay.set_state(host["replay"])
    return training.TrainingRun(programs, **state), int(host["seq"])

  def _repeat(self, model: str, seq: int) -> None:
    """Does the finished requests of a model after a number again.

    Raises:
      RuntimeError: a request cannot be done again, or ends otherwise.
    """
    repeated = 0
    for request, is_done in self.journal.since(model, seq):
      if not is_done:
        break
      if request.kind not in (
          FORWARD_BACKWARD, OPTIM_STEP, LOAD, INSERT, TRAIN
      ):  # fmt: skip
        continue
      outcome = self.journal.outcome(request.id)
      # A step alone may have had an effect though it failed: it drops a
      # gradient that is not finite.
      if outcome.failure and (
          request.kind not in (OPTIM_STEP, TRAIN)
          or outcome.failure["category"] != "user"
      ):
        continue
      if request.body is None:
        raise RuntimeError(
            f"{request.id} cannot be done again: its body is gone, and no"
            f" checkpoint in {self._model_folder(model)} has its effect"
        )
      try:
        self._execute(request)
      except ValueError as error:
        if outcome.failure is None:
          raise RuntimeError(
              f"{request.id} cannot be done again: {error}"
          ) from error
      else:
        if outcome.failure is not None:
          raise RuntimeError(
              f"{request.id} failed the first time, but not when it was done"
              f" again: {outcome.failure['error']}"
          )
      repeated += 1
    if repeated:
      print(f"{model}: {repeated} requests after its checkpoint done again")

  def _forget(self, model: str) -> None:
    """Drops a model from memory; `_run_of` makes it again."""
    self._runs.pop(model, None)
    self._replays.pop(model, None)
    saver = self._savers.pop(model, None)
    if saver is None:
      return
    try:
      saver.close()
    # Whatever Orbax raises: the journal has what the checkpoint would have had.
    except Exception as error:
      logging.error("%s", error)

  def _save_in_time(self, request: journal_lib.Request) -> None:
    """Saves a recovery checkpoint of a model if it is time for one."""
    model = request.owner
    if request.kind in (OPTIM_STEP, TRAIN):
      self._steps_since_save[model] += 1
    elif request.kind != LOAD:
      return
    is_due = (
        self._steps_since_save[model]
        >= self._config.serve.checkpoint_every_steps
    )
    # What a load read may be replaced, so it is not done again.
    if is_due or request.kind == LOAD:
      run, saver = self._runs[model], self._savers[model]
      state = {"params": run.params, "opt_state": run.opt_state}
      host: dict[str, Any] = {"seq": request.seq}
      if model in self._replays:
        host["replay"] = self._replays[model].get_state()
      try:
        saver.save(request.seq, state, host, wait=request.kind == LOAD)
        steps = saver.newest_steps()
        if len(steps) == _KEEP:
          # Those after the older one stay: it serves if the newer is damaged.
          self.journal.drop_bodies(model, steps[0])
      # Whatever Orbax raises: the journal has everything; the next one may fit.
      except Exception as error:
        logging.error("%s", error)
        return
      self._steps_since_save[model] = 0

  # Checkpoints.

  def _model_folder(self, model: str) -> pathlib.Path:
    return self._folder / "models" / model.replace(":", "_")

  def _place(self, path: str) -> tuple[str, str, pathlib.Path]:
    """Returns model, kind and folder of a path; ValueError if it is none."""
    parts = path.removeprefix(_SCHEME).split("/")
    kinds = (WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS)
    if (
        not path.startswith(_SCHEME)
        or len(parts) != 3
        or parts[1] not in kinds
        or self.journal.checkpoint(path) is None
    ):
      raise ValueError(
          f"{path}: there is no such checkpoint; allowed the paths that"
          " save_weights and save_weights_for_sampler have returned, of which"
          f" the newest {_UNNAMED} without a name are kept"
      )
    model, kind, name = parts
    return model, kind, self._model_folder(model) / kind / name

  def _new_path(
      self,
      request: journal_lib.Request,
      kind: str,
      name: str,
      *,
      overwrite: bool = False,
  ) -> tuple[str, pathlib.Path]:
    """Returns path and place of a new checkpoint."""
    model = request.owner
    path = f"{_SCHEME}{model}/{kind}/{name}"
    before = self.journal.checkpoint(path)
    # The same request wrote it, if a kill came before its outcome.
    if before and before.get("request") != request.id and not overwrite:
      or_overwrite = ", or give overwrite" * (kind == WEIGHTS)
      raise ValueError(
          f"{path}: there is a checkpoint already; name another one"
          + or_overwrite
      )
    return path, self._model_folder(model) / kind / name

  def _drop(self, path: str) -> None:
    """Forgets a checkpoint; for any thread."""
    self.journal.drop_checkpoint(path)
    self._versions.pop(path, None)

  def _write(
      self,
      path: str,
      folder: pathlib.Path,
      request: journal_lib.Request,
      state: types.PyTree,
  ) -> None:
    """Writes a checkpoint; what was there stays until it is complete."""
    new = folder.with_name(f".{folder.name}")  # No name that a client may give.
    _remove(new)
    try:
      saver = checkpoint.Checkpointer(str(new), keep=1)
      try:
        saver.save(0, state, {}, wait=True)
      finally:
        saver.close()
      self._versions.pop(path, None)
      _remove(folder)
      new.rename(folder)
    finally:
      _remove(new)
    self._insist(self._note, path, request)

  def _note(self, path: str, request: journal_lib.Request) -> None:
    spec = self.journal.model(request.owner)
    base = lora.base_name(self._policy.folder, self._config.seed)
    self.journal.add_checkpoint(
        path,
        request.owner,
        {
            **spec,
            "base": base,
            "request": request.id,
            "step": self._runs[request.owner].num_steps,
        },
    )

  def _read(self, path: str) -> tuple[dict[str, Any], types.PyTree]:
    """Returns spec and state of a checkpoint; ValueError if there is none."""
    _, kind, folder = self._place(path)
    if kind == EXTERNAL_WEIGHTS:
      raise ValueError(f"{path}: an export is for other programs")
    spec = self.journal.checkpoint(path)
    state = self._programs_of(spec).abstract_state()
    if kind == SAMPLER_WEIGHTS:
      del state["opt_state"]
    saver = checkpoint.Checkpointer(str(folder), keep=1)
    try:
      return spec, saver.restore(state)[0]
    finally:
      saver.close()

  def _save_named(
      self, request: journal_lib.Request, body: Mapping[str, Any]
  ) -> bytes:
    name = _checkpoint_name(body) or f"seq-{request.seq}"
    overwrite = messages.field(body, "overwrite", bool, False)
    run = self._run_of(request.owner)
    path, folder = self._new_path(request, WEIGHTS, name, overwrite=overwrite)
    state = {"params": run.params, "opt_state": run.opt_state}
    self._write(path, folder, request, state)
    return _json({"type": SAVE, "path": path})

  def _save_for_sampler(
      self, request: journal_lib.Request, body: Mapping[str, Any]
  ) -> bytes:
    """Saves a version; returns its path, or without a name its session."""
    model, name = request.owner, _checkpoint_name(body)
    run = self._run_of(model)
    path, folder = self._new_path(
        request, SAMPLER_WEIGHTS, name or f"{_UNNAMED_PREFIX}{request.seq}"
    )
    self._write(path, folder, request, {"params": run.params})
    if name:
      return _json({"type": SAVE_SAMPLER, "path": path})
    self._drop_unnamed(model)
    # Its own numbers, apart from those that clients give.
    sampler = f"{model}:sample:{request.seq}"
    self.journal.add_sampler(sampler, model.partition(":")[0], path)
    if model in self._replays:
      self.journal.set_sampler(newest_sampler(model), path)
    return _json({"type": SAVE_SAMPLER, "sampling_session_id": sampler})

  def _drop_unnamed(self, model: str) -> None:
    """Deletes the oldest versions without a name."""
    unnamed = [
        path
        for path, _ in self.journal.checkpoints_of(model)
        if f"/{SAMPLER_WEIGHTS}/{_UNNAMED_PREFIX}" in path
    ]
    for path in unnamed[:-_UNNAMED]:
      # A client may delete it at the same time.
      with contextlib.suppress(ValueError):
        self.delete(path)

  def delete(self, path: str) -> None:
    """Deletes a checkpoint; ValueError if there is none."""
    _, _, folder = self._place(path)
    self._drop(path)
    shutil.rmtree(folder, ignore_errors=True)

  def _load(self, model: str, path: str, *, with_optimizer: bool) -> None:
    """Replaces a model's params by a checkpoint's."""
    own = self.journal.model(model)
    spec, state = self._read(path)
    for key in ("rank", "targets"):
      if spec[key] != own[key]:
        raise ValueError(
            f"{path} has {key}={spec[key]!r}, the model {own[key]!r}: allowed"
            " a checkpoint of the same adapters"
        )
    if with_optimizer and "opt_state" not in state:
      raise ValueError(
          f"{path} has no optimizer state: allowed a path of save_weights"
      )
    self._run_of(model).load(
        state["params"], state["opt_state"] if with_optimizer else None
    )

  def _export(
      self, request: journal_lib.Request, body: Mapping[str, Any]
  ) -> bytes:
    """Writes a folder for transformers, or of adapters for peft."""
    name = _checkpoint_name(body) or f"seq-{request.seq}"
    model = request.owner
    run, spec = self._run_of(model), self.journal.model(model)
    path, folder = self._new_path(request, EXTERNAL_WEIGHTS, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove(folder)  # A kill before its outcome has the request come again.
    policy = self._policy
    tensors = self._peft_tensors(run.params) if spec["rank"] else None
    if tensors is not None:

      def fill(new: pathlib.Path) -> None:
        adapter_folder.write(
            new,
            tensors,
            base=policy.folder,
            rank=spec["rank"],
            alpha=self._config.lora.alpha,
        )
        policy.tokenizer.save(new)

      hf.replace_folder(folder, fill)
    else:
      hf.save(
          folder,
          policy.model.config,
          run.programs.merged(run.params),
          policy.tokenizer,
      )
    self._note(path, request)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return _json({"type": EXPORT, "path": path, "size_bytes": size})

  def _peft_tensors(self, params: types.PyTree) -> Mapping[str, Any] | None:
    """Returns adapters as `peft` has them, None where only merged ones will do.

    That is beside adapters that the base has already, and where its files have
    the matrices in another form, as those of experts are.
    """
    folder = self._policy.folder
    if folder is None or adapter_folder.is_adapter(folder):
      return None
    if hf_config.is_multimodal(folder):
      return None
    try:
      return lora.peft_tensors(self._policy.model.config, params)
    except ValueError:
      return None

  def export_folder(self, path: str) -> pathlib.Path:
    """Returns the folder of an export; ValueError if there is none."""
    _, kind, folder = self._place(path)
    if kind != EXTERNAL_WEIGHTS:
      raise ValueError(f"{path}: allowed a path of save_weights_external")
    return folder

  # Sampling.

  def _sample(self, batch: list[journal_lib.Request]) -> None:
    """Decodes samples, those together that may be, and ends episodes."""
    together: dict[Any, list[_Sample]] = {}
    failed: dict[str, Mapping[str, str]] = {}
    ends = [request for request in batch if request.kind == FINISH]
    for request in batch:
      if request.kind == FINISH:
        continue
      sample = self._attempt(request.id, self._parse_sample, request)
      if isinstance(sample, dict):
        failed[request.id] = sample
        continue
      key = (sample.path, sample.settings)
      together.setdefault(key, []).append(sample)
    self._finish(failed)
    for (path, settings), some in together.items():
      ids = [sample.id for sample in some]
      outcomes = self._attempt(
          ", ".join(ids), self._decode, path, settings, some
      )
      if isinstance(outcomes, dict):
        outcomes = [outcomes] * len(some)
        for sample in some:  # Some may have been added.
          self._episodes.pop(sample.owner, None)
      self._finish(dict(zip(ids, outcomes, strict=True)))
    for request in ends:
      outcome = self._attempt(request.id, self._end_episode, request)
      self._finish({request.id: outcome})

  def _parse_sample(self, request: journal_lib.Request) -> "_Sample":
    """Returns what is asked for; ValueError if it is wrong."""
    sampling, model = self._config.sampling, self._policy.model
    stop_ids = self._policy.tokenizer.stop_ids
    P, T = sampling.max_prompt_tokens, sampling.max_completion_tokens
    if request.kind in (CALL, ANSWER):
      sample = self._parse_call(request, stop_ids)
    else:
      path = self._path_of(request.owner)
      sample = _parse_sample(request, path, stop_ids)
    if sample.path:
      self._place(sample.path)
    tokens = sample.request.prompt_tokens
    most = sample.request.max_tokens or T
    if len(tokens) > P and most == 1 and request.kind == SAMPLE:
      # One token after a longer text: how clients ask for its log-probs.
      settings = dataclasses.replace(sample.settings, is_long=True)
      sample = dataclasses.replace(sample, settings=settings)
      if len(tokens) >= P + T:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens and one after it: allowed up to"
            f" config.sampling.max_prompt_tokens = {P} and"
            f" config.sampling.max_completion_tokens = {T} together"
        )
      P, T = P + T - 1, 1
    elif sample.request.max_tokens is None:
      wanted = dataclasses.replace(sample.request, max_tokens=T)
      sample = dataclasses.replace(sample, request=wanted)
    try:
      sample.request.check(
          decode.Settings(
              temperature=1.0,
              top_k=0,
              top_p=1.0,
              max_prompt_tokens=P,
              max_completion_tokens=T,
              num_rows=1,
              chunk_steps=1,
              pad_id=0,
              seed=0,
          ),
          model.config.vocab_size,
      )
    except ValueError as error:
      # The prompt's number is of the server's own.
      number = f"prompt {sample.request.prompt_id}: "
      raise ValueError(str(error).removeprefix(number)) from error
    return sample

  def _decode(
      self, path: str, settings: "_Settings", samples: list["_Sample"]
  ) -> list[bytes]:
    """Returns the packed results of samples of one version."""
    sampler = self._sampler(settings)
    version = self._version(path)
    if "decode" not in version:
      version["decode"] = sampler.put(version["params"])
    completions = sampler.sample(
        version["decode"], [s.request for s in samples], version=0
    )
    scored = [s for s in samples if s.last_n]
    values = self._scorer().logprobs(
        version["params"], [s.request.prompt_tokens for s in scored]
    )
    prompts = {s.id: v for s, v in zip(scored, values, strict=True)}
    out = []
    for sample, c in zip(samples, completions, strict=True):
      prompt_logprobs = prompts.get(sample.id)
      if prompt_logprobs is not None:
        prompt_logprobs[: max(0, len(prompt_logprobs) - sample.last_n)] = np.nan
      result = messages.SampleResult(
          [t[:n] for t, n in zip(c.tokens, c.lengths)],
          [p[:n] for p, n in zip(c.plain_logprobs, c.lengths)],
          c.stopped.tolist(),
          prompt_logprobs,
      )
      if sample.call is not None:
        out.append(self._answer(sample, result, version["step"]))
        continue
      packed = messages.pack_sample_result(result)
      if sample.into_replay:
        packed = _json(
            {
                **messages.sample_result_to_json(packed),
                "prompt_ids": sample.request.prompt_tokens.tolist(),
                "version": version["step"],
            }
        )
      out.append(packed)
    return out

  def _scorer(self) -> training.Programs:
    """Returns programs whose log-probs are of the model's own params."""
    return self._programs_of({"rank": 0, "targets": "all"})

  def _version(self, path: str) -> dict[str, Any]:
    """Returns the params of a version on the devices, by form, and its step."""
    # Taken out and put at the end: another thread may drop a path.
    version = self._versions.pop(path, None)
    if version is None:
      while len(self._versions) >= _VERSIONS:
        self._versions.popitem(last=False)
      params, step = self._base, 0
      if path:
        spec, state = self._read(path)
        params = self._programs_of(spec).merged(state["params"])
        step = spec.get("step", 0)
      version = {"params": params, "step": step}
    self._versions[path] = version
    return version

  def _path_of(self, sampler: str) -> str:
    """Returns the path of a sampling session; ValueError if there is none."""
    path = self.journal.sampler(sampler)
    if path is None:
      raise ValueError(f"sampling session {sampler}: there is none")
    return path

  def _step(self, path: str) -> int:
    """Returns the optimizer steps of a version; 0 for the base model."""
    spec = self.journal.checkpoint(path) if path else None
    return (spec or {}).get("step", 0)

  def _sampler(self, settings: "_Settings") -> decode.Sampler:
    """Returns the sampler of these settings, compiled when it is first used."""
    if settings in self._samplers:
      self._samplers.move_to_end(settings)
      return self._samplers[settings]
    while len(self._samplers) >= _SAMPLERS:
      self._samplers.popitem(last=False)
    config = self._config.copy_and_resolve_references()
    c, tokenizer = config.sampling, self._policy.tokenizer
    P, T = c.max_prompt_tokens, c.max_completion_tokens
    if settings.is_long:
      P, T = P + T - 1, 1
    self._samplers[settings] = decode.Sampler(
        self._policy.model,
        decode.Settings(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            max_prompt_tokens=P,
            max_completion_tokens=T,
            num_rows=c.num_slots,
            chunk_steps=c.chunk_steps,
            prompt_buckets=c.prompt_buckets,
            stop_ids=settings.stop_ids,
            stop_strings=settings.stop_strings,
            text_fn=functools.partial(tokenizer.decode, within=True),
            pad_id=tokenizer.pad_id,
            seed=config.seed,
            # Passes have the same: on the policy all ratios are 1.
            plain_temperature=c.temperature,
        ),
    )
    return self._samplers[settings]

  # Episodes.

  def read_episode(self, id: str) -> dict[str, Any]:
    """Returns rows, counts and outcome of an episode, JSON; for any thread.

    Raises:
      LookupError: there is no such episode.
    """
    state = self.journal.episode(id)
    if state is None:
      raise LookupError(
          f"episode {id}: there is none; create_episode makes one"
      )
    if state[1] is not None:
      return state[1]
    return {
        "reward": None,
        "finished": False,
        **self._read_episode(id).to_json(),
    }

  def _read_episode(self, id: str) -> episodes.Episode:
    """Returns an episode, made again from the calls in the journal.

    They are added in the order in which they were answered: calls at the same
    time are decoded by their settings, not by their numbers.
    """
    episode = self._new_episode()
    for request, result in self.journal.answered(id, CALL):
      body, done = messages.parse_json(request.body), json.loads(result)
      call = chat.parse(body, body["model"])
      episode.add(done["record"], call.messages, done["message"])
    return episode

  def _new_episode(self) -> episodes.Episode:
    most = self._config.sampling.max_prompt_tokens
    return episodes.Episode(self._policy.tokenizer, most)

  def _episode(self, id: str) -> episodes.Episode:
    if id not in self._episodes:
      while len(self._episodes) >= _EPISODES:
        self._episodes.popitem(last=False)
      self._episodes[id] = self._read_episode(id)
    self._episodes.move_to_end(id)
    return self._episodes[id]

  def _parse_call(
      self, request: journal_lib.Request, stop_ids: frozenset[int]
  ) -> "_Sample":
    """Returns the completion that an agent's call asks for."""
    body, is_kept = messages.parse_json(request.body), request.kind == CALL
    if is_kept:
      spec, outcome = self.journal.episode(request.owner)
      if outcome is not None:
        raise ValueError(f"episode {request.owner} has finished")
      path = spec["path"]
      if spec["sampler"]:
        path = self._path_of(spec["sampler"])
      call = chat.parse(body, self.model_name)
      turn = self._episode(request.owner).begin(call)
    else:
      name = body["model"]
      path = "" if name == self.model_name else name
      call = chat.parse(body, name, most_choices=MOST_CHOICES)
      turn = self._new_episode().begin(call)
    P = self._config.sampling.max_prompt_tokens
    T = self._config.sampling.max_completion_tokens
    room = T - (len(turn.tokens) - turn.start)
    if len(turn.tokens) > P or room < 1:
      raise ValueError(
          f"context_length_exceeded: the call has {len(turn.tokens)} tokens,"
          f" {len(turn.tokens) - turn.start} of them after the episode's first"
          f" prompt; allowed up to config.sampling.max_prompt_tokens = {P}, and"
          f" fewer than config.sampling.max_completion_tokens = {T}"
      )
    tokens = np.asarray(turn.tokens, np.int32)
    return _Sample(
        request.id,
        path,
        _sampling_settings(
            call.temperature, call.top_k, call.top_p, stop_ids, call.stop
        ),
        _decode_request(
            request.id,
            tokens,
            call.num_choices,
            call.seed,
            min(call.max_tokens or T, room),
        ),
        0,
        request.owner,
        _Call(call, turn, request.accepted_s, is_kept),
    )

  def _answer(
      self, sample: "_Sample", result: messages.SampleResult, step: int
  ) -> bytes:
    """Adds an answered call to its episode; returns what is journaled."""
    tokenizer, asked = self._policy.tokenizer, sample.call
    name = self.model_name if asked.is_kept else sample.path or self.model_name
    answers = []
    for n, tokens in enumerate(result.tokens):
      ids = tokens.tolist()
      if asked.is_kept:
        episode = self._episode(sample.owner)
      else:
        episode = self._new_episode()
      record = episode.end(
          asked.turn,
          ids,
          result.logprobs[n].tolist(),
          stopped=result.stopped[n],
          version=step,
      )
      text = tokenizer.decode(tokenizer.split_stop(ids)[0], within=True)
      for stop in asked.call.stop:
        text = text.partition(stop)[0]
      id = f"{sample.id}-{n}" if n else sample.id
      message = chat.answer(asked.call, text, id)
      answer = chat.completion(
          asked.call,
          id=sample.id,
          created_s=asked.accepted_s,
          model=name,
          message=message,
          tokens=[tokenizer.decode([i]) for i in ids],
          record=record,
          prompt_ids=[int(i) for i in asked.turn.tokens],
      )
      answers.append(answer)
    if not asked.is_kept:
      return _json({"answer": chat.join(answers)})
    episode.add(record, asked.call.messages, message)
    return _json({"record": record, "message": message, "answer": answer})

  def _end_episode(self, request: journal_lib.Request) -> bytes:
    """Keeps what an episode was, and drops its calls from the journal."""
    id, reward = request.owner, json.loads(request.body)["reward"]
    if self.journal.episode(id)[1] is None:
      episode = self._episode(id)
      outcome = {"reward": reward, "finished": True, **episode.to_json()}
      self.journal.finish_episode(id, outcome)
    self.journal.drop_bodies(id, request.seq)
    self._episodes.pop(id, None)
    done = {"type": FINISH, "episode_id": id}
    return _json({**done, **self._enter_episodes(self.journal.episode(id)[0])})

  def _enter_episodes(self, spec: Mapping[str, Any]) -> dict[str, int]:
    """Lets a group of episodes into its replay once all have finished."""
    together = spec["together"]
    if not together:
      return {}
    outcomes, size = self.journal.outcomes_of(together)
    if len(outcomes) != size:
      return {}
    model = spec["replay"]
    least = self.least_completions(model)
    groups, left_out = replay_lib.groups_of_episodes(outcomes, least)
    for n, group in enumerate(groups):
      self.submit(INSERT, model, None, _json(group), name=f"{together}:{n}")
    return {"groups": len(groups), "rows_left_out": left_out}

  # Replays.

  def add_replay(
      self, session: str, number: int, body: Mapping[str, Any]
  ) -> str:
    """Adds the model of a replay; returns its id.

    Args:
      session: session that it is of.
      number: its number there.
      body: body of `create_replay`.

    Raises:
      ValueError: a setting is wrong, or the number is another replay's.
      LookupError: the checkpoint to begin with is not there.
    """
    model = f"{session}:replay:{number}"
    replay = replay_lib.parse(body)
    replay_lib.with_replay(self._config, replay.replay)
    path = messages.field(body, "model_path", str, "")
    if path:
      spec = self._spec_from(path, body)
    else:
      spec = self.spec_of(model, body.get("lora_config"))
    least = self._least_completions(replay)
    if replay.completions_per_prompt < least:
      raise ValueError(
          f"completions_per_prompt={replay.completions_per_prompt}:"
          f" loss_fn={replay.loss!r} needs {least} or more"
      )
    _adam_settings(body)
    spec["replay"] = dict(body)
    self.journal.add_model(model, session, spec)
    if self.journal.model(model) != json.loads(json.dumps(spec)):
      raise ValueError(
          f"replay_seq_id={number} is another replay: take another number"
      )
    self.journal.add_sampler(newest_sampler(model), session, "")
    return model

  def _spec_from(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the spec of a replay that begins with a checkpoint."""
    saved = self.journal.checkpoint(path)
    if saved is None:
      raise LookupError(f"{path}: there is no such checkpoint")
    if body.get("lora_config") is not None:
      raise ValueError(
          "lora_config: allowed without model_path, whose adapters are those of"
          " the checkpoint"
      )
    wanted = self.spec_of(path, None)  # All that a spec has.
    return {key: saved[key] for key in wanted}

  def least_completions(self, model: str) -> int:
    """Returns the smallest group that a replay learns from; for any thread."""
    replay = replay_lib.parse(self.journal.model(model)["replay"])
    return self._least_completions(replay)

  def _least_completions(self, replay: replay_lib.Settings) -> int:
    """As `least_completions`; ValueError if the objective is not allowed."""
    config = training.objective_config(
        self._config, replay.loss, replay.loss_config
    )
    return build.min_completions(config.loss)

  def _execute_replay(
      self, model: str, kind: str, body: Mapping[str, Any]
  ) -> bytes:
    """Does a request of a replay; returns its result."""
    run = self._run_of(model)
    replay = self._replays[model]
    if kind == INSERT:
      return _json(replay.insert(body, run.num_steps))
    if kind in (START, STOP):
      is_start = kind == START
      self.journal.set_running(model, is_start, "" if is_start else "stopped")
      return _json({"type": kind})
    adam = _adam_settings(self.journal.model(model)["replay"])
    return _json(replay.train(run, adam))

  def _go_on(self, model: str) -> None:
    """Queues the next request of a replay that trains, if it can."""
    if not self.journal.running(model)[0] or self._waiting.get(model):
      return
    try:
      run = self._run_of(model)
    # As in `_try`: it is not to be tried for ever.
    except Exception as error:
      logging.exception("%s failed", model)
      self.journal.set_running(model, False, f"{type(error).__name__}: {error}")
      return
    replay, step = self._replays[model], run.num_steps
    settings = replay.settings
    is_last = step >= settings.num_steps
    published = self._step(self.journal.sampler(newest_sampler(model)))
    if step > published and (
        is_last or step % settings.publish_every_steps == 0
    ):
      self.submit(SAVE_SAMPLER, model, None, _PUBLISH)
    elif is_last:
      self.journal.set_running(model, False, "done")
    elif not replay.missing(step):
      self.submit(TRAIN, model, None, b"{}")

  def reward(
      self, model: str, id: str, rewards: Sequence[Any]
  ) -> journal_lib.Request:
    """Lets the completions of a sample into its replay; for any thread.

    Args:
      model: id of the replay.
      id: id of the sample.
      rewards: reward of each completion.

    Raises:
      LookupError: there is no such sample of this replay.
      ValueError: the sample is not done, or the rewards are wrong.
    """
    outcome = self.journal.outcome(id)
    is_own = id.startswith(f"{newest_sampler(model)}:")
    if outcome is None or not is_own or outcome.kind != SAMPLE_INTO:
      raise LookupError(f'{id}: no sample with "into": "replay" of {model}')
    if outcome.result is None:
      text = (outcome.failure or {}).get("error", "not done yet")
      raise ValueError(f"{id}: {text}")
    group = replay_lib.group_of_sample(
        json.loads(outcome.result), rewards, self.least_completions(model)
    )
    name = f"reward-{id.rpartition(':')[2]}"
    return self.submit(INSERT, model, None, _json(group), name=name)

  def replay_state(self, model: str, after: int) -> dict[str, Any]:
    """Returns the state of a replay, JSON; for any thread.

    Args:
      model: id of the replay.
      after: step after which metrics are returned, the newest 1000 at most.
    """
    settings = replay_lib.parse(self.journal.model(model)["replay"])
    is_running, reason = self.journal.running(model)
    results = self.journal.results
    steps = [json.loads(r) for _, r in results(model, TRAIN, -1, 1000)]
    newest = [
        (seq, json.loads(result))
        for kind in (INSERT, TRAIN)
        for seq, result in results(model, kind, -1, 1)
    ]
    counts = dict(max(newest, key=lambda x: x[0], default=(0, {}))[1])
    counts.pop("metrics", None)
    counts.pop("step", None)
    step = steps[-1]["step"] if steps else 0
    path = self.journal.sampler(newest_sampler(model))
    return {
        "replay_id": model,
        "running": is_running,
        "reason": reason,
        "step": step,
        "num_steps": settings.num_steps,
        "missing_groups": replay_lib.missing_groups(
            settings, counts.get("groups", 0), step
        ),
        "counts": counts,
        "version": self._step(path),
        "model_path": path or None,
        "sampling_session_id": newest_sampler(model),
        "steps": [s for s in steps if s["step"] > after],
    }

  # What is asked of the server as a whole.

  def spec_of(
      self, model: str, lora_config: Mapping[str, Any] | None
  ) -> dict[str, Any]:
    """Returns the spec of a new model.

    Args:
      model: id of the model.
      lora_config: LoraConfig of the request; None trains all params, as rank 0.

    Raises:
      ValueError: the config is wrong.
    """
    asked = dict(lora_config or {"rank": 0})
    messages.check_fields(asked, _LORA_FIELDS)
    rank = messages.field(asked, "rank", int)
    if not 0 <= rank <= 1024:
      raise ValueError(f"lora_config.rank={rank}: allowed 0 to 1024")
    names = lora.kernel_names(self._policy.model)
    wanted = [
        name
        for name, is_mlp in sorted(names.items())
        if messages.field(
            asked, "train_mlp" if is_mlp else "train_attn", bool, True
        )
    ]
    if rank and not wanted:
      raise ValueError(
          "lora_config: train_mlp and train_attn are False, and this server has"
          " no adapters of the unembedding"
      )
    seed = messages.field(asked, "seed", int, None)
    if seed is None:
      seed = _seed_of(model)
    return {
        "base_model": self.model_name,
        "rank": rank,
        "targets": ",".join(wanted) if rank else "all",
        "train_mlp": any(names[n] for n in wanted),
        "train_attn": not all(names[n] for n in wanted),
        "seed": seed % 2**32,
    }

  def _check_facts(self) -> None:
    """Raises ValueError if the directory is of a server with other settings."""
    values = load.flatten(self._config)
    facts = {
        f"config.{key}": value
        for key, value in values.items()
        if key.partition(".")[0] in _SECTIONS or key in ("seed", "train.remat")
    }
    facts["base"] = lora.base_name(self._policy.folder, self._config.seed)
    saved = self.journal.fact("settings", facts)
    for name, value in json.loads(json.dumps(facts)).items():
      before = saved.get(name)
      if name not in saved:
        # A setting that the version of the first start did not have.
        key = name.removeprefix("config.")
        before = settings_lib.SETTINGS[key].default
      if before != value:
        raise ValueError(
            f"{name} was {before!r} when this server began, now it is"
            f" {value!r}: restore it, or give another --workdir than"
            f" {self._folder.parent}"
        )

  def _place_tokenizer(self) -> str:
    """Returns a name that clients load the tokenizer from."""
    folder = self._policy.folder
    if folder is not None and not folder.exists():
      if len(folder.parts) == 2:
        return str(folder)  # ORG/NAME of the hub.
    own = self._folder / "tokenizer"
    if not own.is_dir():
      hf.replace_folder(own, self._policy.tokenizer.save)
    return str(own.absolute())


@dataclasses.dataclass(frozen=True)
class _Settings:
  """Settings of sampling that a sampler is compiled for."""

  temperature: float
  top_k: int
  top_p: float
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...]
  is_long: bool = False


@dataclasses.dataclass(frozen=True)
class _Call:
  """A call of an agent.

  turn: place of the call in its episode.
  accepted_s: Unix time of its arrival.
  is_kept: whether the episode goes on with the answer.
  """

  call: chat.Call
  turn: episodes.Turn
  accepted_s: float
  is_kept: bool


@dataclasses.dataclass(frozen=True)
class _Sample:
  """Completions that are asked for.

  last_n: prompt tokens, from the end, whose log-probs are asked for; 0 = none.
  owner: sampling session or episode.
  call: call of an agent that it answers, if it is one.
  into_replay: whether the completions are to be rewarded, and trained on.
  """

  id: str
  path: str
  settings: _Settings
  request: decode.Request
  last_n: int
  owner: str
  call: _Call | None = None
  into_replay: bool = False


def newest_sampler(replay: str) -> str:
  """Returns the sampling session of a replay's newest version."""
  return f"{replay}:{_NEWEST}"


def num_samples(body: Mapping[str, Any]) -> int:
  """Returns the completions that are asked for; ValueError if too many."""
  count = messages.field(body, "num_samples", int, 1)
  if not 1 <= count <= _MOST_SAMPLES:
    raise ValueError(f"num_samples={count}: allowed 1 to {_MOST_SAMPLES}")
  return count


def _checkpoint_name(body: Mapping[str, Any]) -> str | None:
  """Returns the name that a client gives a checkpoint; ValueError if wrong."""
  name = messages.field(body, "path", str, None)
  if name is None:
    return None
  if not _NAME.fullmatch(name) or name.startswith(_UNNAMED_PREFIX):
    raise ValueError(
        f"path={name!r}: allowed letters, digits, '.', '_' and '-', 128 at"
        " most, the first a letter or digit, and not the prefix"
        f" {_UNNAMED_PREFIX!r}"
    )
  return name


_LORA_FIELDS = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
_SAMPLING_PARAMS = (
    "max_tokens", "seed", "stop", "temperature", "top_k", "top_p",
)  # fmt: skip
_SAMPLE_FIELDS = (
    "num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id",
    "prompt_logprobs", "prompt_logprobs_last_n", "into",
)  # fmt: skip


def _parse_sample(
    request: journal_lib.Request, path: str, stop_ids: frozenset[int]
) -> _Sample:
  body, field = messages.parse_json(request.body), messages.field
  if body.get("record_stability_info"):
    raise ValueError(
        "record_stability_info: it is for the loss stable_reinforce, which is"
        " Tinker's own; allowed are other losses, as"
        " loss_fn=importance_sampling"
    )
  messages.check_fields(body, _SAMPLE_FIELDS)
  try:
    tokens = messages.tokens_of(body.get("prompt"))
  except ValueError as error:
    raise ValueError(f"prompt: {error}") from error
  params = field(body, "sampling_params", dict)
  messages.check_fields(params, _SAMPLING_PARAMS)
  count = num_samples(body)
  stop, strings = params.get("stop"), ()
  if isinstance(stop, str):
    strings = (stop,)
  elif isinstance(stop, list) and stop and isinstance(stop[0], str):
    strings = tuple(stop)
  elif isinstance(stop, list) and all(
      type(i) is int and 0 <= i < 2**31 for i in stop
  ):
    stop_ids = frozenset(stop)
  elif stop is not None:
    raise ValueError("stop: allowed a text, a list of texts, or of token ids")
  settings = _sampling_settings(
      field(params, "temperature", float, 1.0),
      field(params, "top_k", int, -1),
      field(params, "top_p", float, 1.0),
      stop_ids,
      strings,
  )
  last_n = 0
  if field(body, "prompt_logprobs", bool, False):
    last_n = field(body, "prompt_logprobs_last_n", int, len(tokens))
    if last_n < 0:
      raise ValueError(f"prompt_logprobs_last_n={last_n}: allowed 0 or more")
  seed = field(params, "seed", int, None)
  most = field(params, "max_tokens", int, None)
  if most is not None and most < 1:
    raise ValueError(f"max_tokens={most}: allowed 1 or more")
  return _Sample(
      request.id,
      path,
      settings,
      _decode_request(request.id, tokens, count, seed, most),
      last_n,
      request.owner,
      into_replay=request.kind == SAMPLE_INTO,
  )


def _sampling_settings(
    temperature: float,
    top_k: int,
    top_p: float,
    stop_ids: frozenset[int],
    strings: Sequence[str],
) -> _Settings:
  # Logits divided by less overflow a float32.
  is_temperature = temperature == 0 or 1e-3 <= temperature <= 100
  is_top_k = -1 <= top_k < 2**31
  if not is_temperature or not 1e-6 <= top_p <= 1 or not is_top_k:
    raise ValueError(
        f"temperature={temperature:g}, top_p={top_p:g}, top_k={top_k}: allowed"
        " a temperature of 0, or .001 to 100, top_p of 1e-6 to 1, top_k of -1"
        " to 2**31 - 1"
    )
  is_text = lambda text: isinstance(text, str) and text
  if len(strings) > _MOST_STOPS or not all(map(is_text, strings)):
    raise ValueError(
        f"stop: allowed up to {_MOST_STOPS} texts that are not empty"
    )
  return _Settings(
      temperature,
      max(top_k, 0),
      top_p,
      tuple(sorted(stop_ids)),
      tuple(strings),
  )


def _decode_request(
    id: str,
    tokens: np.ndarray,
    count: int,
    seed: int | None,
    max_tokens: int | None,
) -> decode.Request:
  return decode.Request(
      prompt_tokens=tokens,
      # The same seed and prompt have the same completions.
      prompt_id=zlib.crc32(tokens.tobytes()),
      visit=0,
      num_completions=count,
      seed=_seed_of(id) if seed is None else seed % 2**32,
      max_tokens=max_tokens,
  )


def _adam_settings(body: Mapping[str, Any]) -> training.AdamSettings:
  """Returns the settings of an optim_step; ValueError if they are wrong."""
  if body.get("adam_params") is None:
    raise ValueError("adam_params is missing: the optimizer here is AdamW")
  asked = messages.field(body, "adam_params", dict)
  names = [field.name for field in dataclasses.fields(training.AdamSettings)]
  messages.check_fields(asked, names)
  given = {n: messages.field(asked, n, float) for n in names if n in asked}
  settings = training.AdamSettings(**given)
  s = settings
  if not (
      np.isfinite(dataclasses.astuple(s)).all()
      and 0 <= s.beta1 < 1
      and 0 <= s.beta2 < 1
      and min(s.learning_rate, s.eps, s.weight_decay, s.grad_clip_norm) >= 0
  ):
    raise ValueError(
        f"adam_params={given}: allowed numbers from 0, beta1 and beta2 below 1"
    )
  return settings


def _remove(folder: pathlib.Path) -> None:
  if folder.exists():
    shutil.rmtree(folder)


def _seed_of(text: str) -> int:
  digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
  return int.from_bytes(digest, "big")


def _failure(text: str, category: str = "user") -> dict[str, str]:
  return {"error": text, "category": category}


def _is_of_server(outcome: bytes | Mapping[str, str]) -> bool:
  return isinstance(outcome, dict) and outcome["category"] == "server"


def _json(value: Mapping[str, Any]) -> bytes:
  return json.dumps(value).encode()
