# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `searcher` program: samples groups with the newest params.

The devices decode one block of prompts while a thread rewards the block before
it and submits it to the queue, in the order of the blocks. On a mesh, decoding
waits for a judge that uses the mesh too.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import functools
import math
import os
import secrets
import threading
import time

from absl import logging
import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.monitor import metrics
from tba_jax.monitor import run_directory
from tba_jax.replay import queue_client
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.system import processes
from tba_jax.tasks import base as tasks_base
from tba_jax.training import agreement
from tba_jax.training import group_reference
from tba_jax.training import lora
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reward_judge
from tba_jax.training import sharding

# Seconds that a leaving searcher has to send its finished groups.
_FLUSH_S = 5.0
# The timeline has two lanes: the devices and the judge's thread.
_JUDGE_LANE = "judge"


def run_searcher(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one searcher until the trainer is done, a signal or an error.

  Args:
    config: config of the run.
    workdir: run directory.
    operands: the searcher's index in its launcher, 0 by default.

  Returns:
    0 at the end of the run; 75 if interrupted, or if the trainer was: start it
    again.
  """
  should_stop = processes.start_role().is_set
  try:
    index = processes.index_of(operands)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error
  done = search(config, workdir, index, should_stop)
  return processes.EXIT_OK if done else processes.EXIT_INTERRUPTED


def search(
    config: ml_collections.ConfigDict,
    workdir: str,
    index: int,
    should_stop: Callable[[], bool],
) -> bool:
  """Samples in a process that is set up; returns whether the run is complete.

  Raises:
    NoRunError: a setting or file does not fit, or differs from the trainer's.
  """
  run = run_directory.open_run(workdir, config)
  with contextlib.ExitStack() as closing:
    try:
      searcher = Searcher(config, run, index, should_stop, closing)
    except ValueError as error:
      raise run_directory.NoRunError(str(error)) from error
    return searcher.run()


class Searcher:
  """Samples the prompts granted to it and submits them with their rewards."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.Run,
      index: int,
      should_stop: Callable[[], bool],
      closing: contextlib.ExitStack,
  ):
    """Builds the parts and waits for the trainer's settings.

    Args:
      config: config of the run.
      run: directory and identity of the run.
      index: index of this searcher in its launcher.
      should_stop: checked in every wait.
      closing: stack on which the parts register their `close`; it sends what
        is left.

    Raises:
      ValueError: a setting or file does not fit, or differs from the trainer's.
    """
    self._config = config
    self._should_stop = should_stop
    self._tag: publication.Tag | None = None
    self._params: types.PyTree = None
    self._prompt_tokens: dict[int, np.ndarray] = {}
    self._mixed_completions = 0
    # When sampling began, and the busy seconds until then.
    self._started = self._busy_before_s = 0.0
    self._clock = metrics.BusyClock()
    self._build(run, index, closing)
    self._judging = futures.ThreadPoolExecutor(1, thread_name_prefix="judge")
    closing.callback(self._judging.shutdown)
    # The block that the judge's thread works on, if any.
    self._handing_over: futures.Future[None] | None = None
    self._judged = threading.Event()

  def _build(
      self, run: run_directory.Run, index: int, closing: contextlib.ExitStack
  ) -> None:
    """Builds the parts, each before those that need it."""
    config = self._config
    events = metrics.EventLog(
        run.workdir / "events.jsonl", role="searcher", index=index
    )
    closing.callback(events.close)
    mesh = sharding.searcher_mesh(config.search, events.write)
    policy = policy_lib.make_policy(config, run.workdir)
    place = sharding.make_place(mesh, config.sharding, policy)
    load_start = make_load_start(config, policy, place)
    merger = lora.make_merger(
        policy.adapters, policy.folder, config.seed, load_start
    )
    self._task, self._tokenizer = policy.task, policy.tokenizer
    params_fn = make_params_fn(policy, merger, place)
    self._sampler = policy_lib.make_searcher_sampler(config, policy)
    self._params_fn = lambda leaves: self._sampler.put(
        params_fn(leaves), place.model
    )
    self._reference = group_reference.make_group_reference(
        config, policy, load_start, mesh
    )
    self._judge = reward_judge.for_searcher(
        config, run.workdir, policy, events.write, mesh=mesh
    )
    closing.callback(self._judge.close)
    connect = functools.partial(publication.connect, config, run)
    agreed = agreement.Agreement(
        agreement.describe(config, run, policy), run, events
    )
    self._spans = metrics.SpanWriter(
        run.workdir / f"spans/searcher-{index}.jsonl",
        "searcher",
        index,
        clock=self._clock,
    )
    closing.callback(self._spans.close)
    with self._spans.span("wait_params"):
      agreed.wait(connect, self._should_stop)
    self._puller = publication.Puller(
        config,
        run,
        jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0)),
        events=events,
        base_name=merger.base,
    )
    closing.callback(self._puller.close)
    self._queue = queue_client.QueueClient(
        config,
        run,
        make_transport=connect,
        sid=make_sid(index),
        index=index,
        on_event=events.write,
        check_trainer=agreed.holds,
    )
    closing.callback(self._leave)

  def run(self) -> bool:
    """Samples until a stop; returns whether the trainer ended the run."""
    with self._spans.span("wait_params"):
      while not self._stop() and not self._take_params(-1, 0.2):
        pass
    if self._stop():
      return self._queue.run_done
    with self._spans.span("compile"):
      self._sampler.warm_up(self._params)
      if self._reference is not None:
        self._reference.warm_up()
    self._started, self._busy_before_s = time.monotonic(), self._clock.busy_s
    while not self._stop():
      block = self._wait_for_block()
      if block is not None and self._use_version(block):
        requests, completions = self._sample(block)
        self._hand_over(block, requests, completions)
    self._wait_handed_over()
    return self._queue.run_done

  def _leave(self) -> None:
    flushed = self._queue.close(_FLUSH_S)
    logging.info("searcher leaves; all delivered: %s", flushed)

  def _stop(self) -> bool:
    return self._should_stop() or self._queue.stop_requested

  def _wait_for_block(self) -> queue_client.Block | None:
    """Returns the next granted block; None if the searcher should stop."""
    with self._spans.span("wait_work"):
      while not self._stop():
        self._check_handed_over()
        block = self._queue.next_block(0.1)
        if block is not None:
          return block
    return None

  def _use_version(self, block: queue_client.Block) -> bool:
    """Takes the block's params; returns False if the block is obsolete."""
    if block.require_version < 0:
      self._take_params(-1, 0.0)
      return True
    with self._spans.span("wait_version"):
      while not self._take_params(block.require_version, 0.2):
        self._check_handed_over()
        if self._stop() or self._queue.epoch > block.epoch:
          return False
        newest = self._puller.latest()
        if newest and newest[0] > (block.epoch, block.require_version):
          # Others delivered its prompts while the store was out of reach.
          return False
    return True

  def _take_params(self, version: int, timeout_s: float) -> bool:
    """Takes the newest params; returns False if `version` did not arrive."""
    found = self._puller.wait_for(version, timeout_s)
    if found is not None:
      self._put_params(*found)
    return found is not None

  def _put_params(
      self, tag: publication.Tag, leaves: dict[str, np.ndarray]
  ) -> None:
    if tag != self._tag:
      self._params = self._params_fn(leaves)
      self._tag = tag

  def _newer_params(self) -> tuple[int, types.PyTree] | None:
    """Returns newer params of this epoch, to go on with within a block."""
    found, tag = self._puller.latest(), self._tag
    # A group has one epoch: params of a restarted trainer wait for a new block.
    if found is None or found[0] <= tag or found[0][0] != tag[0]:
      return None
    self._put_params(*found)
    return self._tag[1], self._params

  def _sample(
      self, block: queue_client.Block
  ) -> tuple[list[decode.Request], list[types.Completions]]:
    """Decodes the completions of a block's prompts."""
    requests = [
        decode.Request(
            prompt_tokens=self._tokens_of(prompt_id),
            prompt_id=prompt_id,
            visit=visit,
            num_completions=self._config.search.samples_per_prompt,
        )
        for _, prompt_id, visit in block.prompts
    ]
    swaps = (
        self._config.sampling.in_flight != "off" and block.require_version < 0
    )
    self._queue.begun_s.append(time.monotonic())
    with self._spans.span("decode", version=self._tag[1]):
      completions = self._sampler.sample(
          self._params,
          requests,
          version=self._tag[1],
          newer=self._newer_params if swaps else None,
      )
    self._mixed_completions += sum(
        int((found.token_versions > found.versions[:, None]).any(1).sum())
        for found in completions
    )
    return requests, completions

  def _hand_over(
      self,
      block: queue_client.Block,
      requests: list[decode.Request],
      completions: list[types.Completions],
  ) -> None:
    """Passes a block to the judge's thread, once it is done with the last."""
    ref_logprobs = self._start_reference(requests, completions)
    self._wait_handed_over()
    epoch = self._tag[0]  # A block is sampled within one epoch.
    self._judged.clear()
    self._handing_over = self._judging.submit(
        self._judge_and_submit,
        block,
        requests,
        completions,
        ref_logprobs,
        epoch,
    )
    devices = math.prod(self._config.search.mesh.values())
    if devices > 1 and self._judge.on_devices:
      # Two threads that launch collectives could order them differently on each
      # device.
      with self._spans.span("reward"):
        self._judged.wait()

  def _start_reference(
      self,
      requests: list[decode.Request],
      completions: list[types.Completions],
  ) -> Callable[[], Sequence[np.ndarray | None]]:
    """Returns a function that waits for the groups' reference log-probs."""
    if self._reference is None:
      return lambda: [None] * len(requests)
    with self._spans.span("reference"):
      return self._reference.start(
          [request.prompt_tokens for request in requests],
          [found.tokens for found in completions],
          [found.lengths for found in completions],
          [found.sampled_mask for found in completions],
      )

  def _check_handed_over(self) -> None:
    """Raises the thread's error, if any, without waiting for the thread."""
    if self._handing_over is not None and self._handing_over.done():
      self._wait_handed_over()

  def _wait_handed_over(self) -> None:
    """Waits for the thread; raises its error."""
    if self._handing_over is None:
      return
    # Waiting for a slow judge counts as work, waiting for credit as idle time.
    with self._spans.span("reward"):
      self._judged.wait()
    with self._spans.span("wait_credit"):
      self._handing_over.result()
    self._handing_over = None

  def _judge_and_submit(
      self,
      block: queue_client.Block,
      requests: list[decode.Request],
      completions: list[types.Completions],
      ref_logprobs: Callable[[], Sequence[np.ndarray | None]],
      epoch: int,
  ) -> None:
    try:
      with self._spans.span("reward", lane=_JUDGE_LANE):
        rewards_PxS = self._rewards(block, completions)
      with self._spans.span("reference", lane=_JUDGE_LANE):
        ref_logprobs_P = ref_logprobs()
    finally:
      self._judged.set()
    groups = [
        types.Group(
            prompt_id=prompt_id,
            visit=visit,
            position=position,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=found.tokens,
            completion_lengths=found.lengths,
            sampled_mask=found.sampled_mask,
            stopped=found.stopped,
            behavior_logprobs=found.logprobs,
            rewards=rewards_S,
            versions=found.versions,
            epoch=epoch,
            ref_logprobs=ref_logprobs_SxT,
        )
        for (
            (position, prompt_id, visit),
            request,
            found,
            rewards_S,
            ref_logprobs_SxT,
        ) in zip(
            block.prompts,
            requests,
            completions,
            rewards_PxS,
            ref_logprobs_P,
            strict=True,
        )
    ]
    # The block's age ends here: time spent waiting for credit does not count.
    self._queue.begun_s.popleft()
    with self._spans.span("wait_credit", lane=_JUDGE_LANE):
      self._queue.submit(groups, self._stop)
    self._report()

  def _rewards(
      self, block: queue_client.Block, completions: Sequence[types.Completions]
  ) -> np.ndarray:
    """Returns [P, S] rewards of a block, judged in one call."""
    requests = [
        judges.Request(tasks_base.TRAIN, prompt_id, text, bool(stopped))
        for (_, prompt_id, _), found in zip(
            block.prompts, completions, strict=True
        )
        for text, stopped in zip(
            policy_lib.decode_texts(self._tokenizer, found), found.stopped
        )
    ]
    judged = self._judge.judge(requests)
    if self._config.reward.role == "trainer":
      rewards = np.array([j.reward for j in judged], np.float32)
    else:
      rewards = judges.final_rewards(
          self._config.loss, judged, [r.stopped for r in requests]
      )
    return rewards.reshape(len(block.prompts), -1)

  def _tokens_of(self, prompt_id: int) -> np.ndarray:
    if prompt_id not in self._prompt_tokens:
      text = self._task.prompt(tasks_base.TRAIN, prompt_id)
      self._prompt_tokens[prompt_id] = np.asarray(
          self._tokenizer.encode_prompt(text), np.int32
      )
    return self._prompt_tokens[prompt_id]

  def _report(self) -> None:
    """Writes rates since the start into the lease."""
    busy_s = self._clock.busy_s - self._busy_before_s
    wall_s = max(time.monotonic() - self._started, 1e-9)
    totals = self._queue.totals
    self._queue.set_stats(
        {
            "samples_per_s": totals["completions"] / wall_s,
            "tokens_per_s": totals["tokens"] / wall_s,
            "version": self._tag[1],
            "busy_s": busy_s,
            "wall_s": wall_s,
            "busy_share": min(1.0, busy_s / wall_s),
            "refused_versions": self._puller.stats.refused,
            "mixed_completions": self._mixed_completions,
            "rewards": self._judge.totals(),
        }
    )


def make_sid(index: int) -> str:
  """Returns a unique searcher id that is readable in a log."""
  unique = f"{int(time.time()):x}-{os.getpid():x}-{secrets.token_hex(4)}"
  return f"s{index:03d}-{unique}"


def make_load_start(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    place: sharding.Place = sharding.ONE_DEVICE,
) -> Callable[[], types.PyTree]:
  """Returns a function that loads the run's first params, once.

  They are the base of adapters and the reference, on the sampler's devices. It
  raises ValueError if they cannot be read.
  """
  return functools.cache(
      lambda: place.put(
          policy_lib.initial_params(policy, config.seed, place.model)
      )
  )


def make_params_fn(
    policy: policy_lib.Policy,
    merger: lora.ParamsMerger,
    place: sharding.Place = sharding.ONE_DEVICE,
) -> Callable[[dict[str, np.ndarray]], types.PyTree]:
  """Returns a function from published leaves by path to the model's params.

  Without adapters leaves stay on the host; adapters are merged on the devices.
  """
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))

  def params_fn(leaves: dict[str, np.ndarray]) -> types.PyTree:
    trained = publication.unflatten(leaves, like)
    if policy.adapters is None:
      return trained
    return place.put(merger.params(jax.device_put(trained, place.trained)))

  return params_fn
