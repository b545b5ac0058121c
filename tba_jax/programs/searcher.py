# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `searcher` program: builds a searcher from a config and runs it."""

from collections.abc import Callable, Sequence
import functools
import os
import secrets
import time
from typing import Any

from absl import logging
import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import validate
from tba_jax.monitor import metrics
from tba_jax.monitor import run_directory
from tba_jax.programs import roles
from tba_jax.replay import queue_client
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.system import processes
from tba_jax.tasks import base as tasks_base
from tba_jax.training import agreement
from tba_jax.training import lora
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reward_judge
from tba_jax.training import sharding
from tba_jax.transport import base as transport_base

# The searcher: takes prompts, samples with the newest params, sends back.


SPLIT = "train"


class Searcher:
  """One sampling loop. Talks to the store only through puller and outbox."""

  def __init__(
      self,
      *,
      task: tasks_base.Task,
      judge: judges.Judge,
      tokenizer: Any,
      sampler: decode.Sampler,
      puller: publication.Puller,
      outbox: queue_client.Outbox,
      params_fn: Callable[[dict[str, np.ndarray]], types.PyTree],
      samples_per_prompt: int,
      in_flight: bool,
      spans: metrics.SpanWriter,
      clock: metrics.BusyClock,
  ):
    """Takes the parts; `run` starts.

    Args:
      task: prompts.
      judge: of the completions.
      tokenizer: of the policy.
      sampler: compiled at the first params.
      puller: of versions.
      outbox: of the queue.
      params_fn: (published leaves by path) -> params of the sampler, on its
        devices; once a version.
      samples_per_prompt: S.
      in_flight: whether newer params are taken between chunks too, where a
        block does not name its version.
      spans: receives decode, reward and wait spans.
      clock: busy seconds by kind, which the spans feed.
    """
    self._task = task
    self._judge = judge
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._puller = puller
    self._outbox = outbox
    self._params_fn = params_fn
    self._samples_per_prompt = samples_per_prompt
    self._in_flight = in_flight
    self._spans = spans
    self._clock = clock
    self._tag: tuple[int, int] | None = None
    self._params: types.PyTree = None
    self._prompt_tokens: dict[int, np.ndarray] = {}
    self._mixed_completions = 0
    self._started = 0.0

  def run(self, should_stop: Callable[[], bool]) -> None:
    """Samples until the trainer is done or `should_stop` says so."""
    stop = lambda: should_stop() or self._outbox.stop_requested
    with self._spans.span("wait_params"):
      while not stop() and not self._swap(-1, 0.2):
        pass
    if stop():
      return
    with self._spans.span("compile"):
      self._sampler.warm_up(self._params)
    self._clock.take()
    self._started = time.monotonic()
    while not stop():
      block = None
      with self._spans.span("wait_work"):
        while block is None and not stop():
          block = self._outbox.next_block(0.1)
      if block is not None and self._use_version(block, stop):
        groups = self._sample(block)
        with self._spans.span("wait_credit"):
          self._outbox.submit(groups, stop)
        self._report()

  def _use_version(
      self, block: queue_client.Block, stop: Callable[[], bool]
  ) -> bool:
    """Swaps params as the block wants; False where it is out of date."""
    if block.require_version < 0:
      self._swap(-1, 0.0)
      return True
    with self._spans.span("wait_version"):
      while not self._swap(block.require_version, 0.2):
        if stop() or self._outbox.epoch > block.epoch:
          return False
    return True

  def _swap(self, version: int, timeout_s: float) -> bool:
    """Takes the newest params whole; False where `version` did not come."""
    found = self._puller.wait_for(version, timeout_s)
    if found is None:
      return False
    self._take(*found)
    return True

  def _take(self, tag: tuple[int, int], leaves: dict[str, np.ndarray]) -> None:
    if tag != self._tag:
      self._params = self._params_fn(leaves)
      self._tag = tag

  def _newer(self) -> tuple[int, types.PyTree] | None:
    """Returns newer params of the same epoch, for the rest of a block."""
    found, tag = self._puller.latest(), self._tag
    # A group has one epoch: another trainer's params wait for the next block.
    if found is None or found[0] <= tag or found[0][0] != tag[0]:
      return None
    self._take(*found)
    return self._tag[1], self._params

  def _sample(self, block: queue_client.Block) -> list[types.Group]:
    epoch, version = self._tag
    requests = [
        decode.Request(
            prompt_tokens=self._tokens_of(prompt_id),
            prompt_id=prompt_id,
            visit=visit,
            num_completions=self._samples_per_prompt,
        )
        for _, prompt_id, visit in block.prompts
    ]
    swaps = self._in_flight and block.require_version < 0
    with self._spans.span("decode", version=version):
      completions = self._sampler.sample(
          self._params,
          requests,
          version=version,
          newer=self._newer if swaps else None,
      )
    self._mixed_completions += sum(
        int((found.token_versions > found.versions[:, None]).any(1).sum())
        for found in completions
    )
    with self._spans.span("reward"):
      rewards_PxS = self._rewards(block, completions)
      return [
          types.Group(
              prompt_id=prompt_id,
              visit=visit,
              position=position,
              prompt_tokens=request.prompt_tokens,
              completion_tokens=found.tokens,
              completion_lengths=found.lengths,
              stopped=found.stopped,
              behavior_logprobs=found.logprobs,
              rewards=rewards_S,
              versions=found.versions,
              epoch=epoch,
          )
          for (position, prompt_id, visit), request, found, rewards_S in zip(
              block.prompts, requests, completions, rewards_PxS, strict=True
          )
      ]

  def _rewards(
      self, block: queue_client.Block, completions: Sequence[types.Completions]
  ) -> np.ndarray:
    """Returns [P, S] rewards of a block, judged together."""
    requests = [
        judges.Request(SPLIT, prompt_id, text, bool(stopped))
        for (_, prompt_id, _), found in zip(
            block.prompts, completions, strict=True
        )
        for text, stopped in zip(
            decode_texts(self._tokenizer, found), found.stopped
        )
    ]
    rewards = [judgement.reward for judgement in self._judge.judge(requests)]
    return np.asarray(rewards, np.float32).reshape(len(block.prompts), -1)

  def _tokens_of(self, prompt_id: int) -> np.ndarray:
    if prompt_id not in self._prompt_tokens:
      text = self._task.prompt(SPLIT, prompt_id)
      self._prompt_tokens[prompt_id] = np.asarray(
          self._tokenizer.encode_prompt(text), np.int32
      )
    return self._prompt_tokens[prompt_id]

  def _report(self) -> None:
    """Puts rates since the start into the lease."""
    seconds = self._clock.seconds()
    wall_s = max(time.monotonic() - self._started, 1e-9)
    totals = self._outbox.totals
    self._outbox.set_stats(
        {
            "samples_per_s": totals["completions"] / wall_s,
            "tokens_per_s": totals["tokens"] / wall_s,
            "version": self._tag[1],
            "busy_s": sum(
                s for kind, s in seconds.items() if not metrics.is_wait(kind)
            ),
            "wall_s": wall_s,
            "busy_share": metrics.busy_share(seconds, wall_s),
            "refused_versions": self._puller.stats.refused,
            "mixed_completions": self._mixed_completions,
            "rewards": self._judge.totals(),
        }
    )


def decode_texts(
    tokenizer: Any, completions: types.Completions
) -> Sequence[str]:
  """Returns the S texts, each without its final stop token."""
  return [
      tokenizer.decode_completion(tokens, int(length), bool(stopped))
      for tokens, length, stopped in zip(
          completions.tokens, completions.lengths, completions.stopped
      )
  ]


_FLUSH_S = 5.0


def run_searcher(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one searcher until the trainer is done, a signal or an error.

  Args:
    config, workdir: of the run.
    operands: the searcher's index in its launcher, 0 where not given.

  Returns:
    0 where the run is at its end; 75 where the trainer was interrupted, or
    this searcher: it may be started again, also before the trainer is.
  """
  stop = processes.start_role()
  run = run_directory.open_run(workdir, config)
  events = metrics.EventLog(run.workdir / "events.jsonl")
  try:
    index = processes.index_of(operands)
    on_event = functools.partial(events.write, role="searcher", index=index)
    mesh = sharding.searcher_mesh(config.search, on_event)
    policy = policy_lib.make_policy(config, run.workdir)
    place = sharding.make_place(mesh, config.sharding, policy)
    whole = make_whole(config, policy, place)
    make_transport = roles.transport_maker(config, run)
    judge = reward_judge.of_searcher(config, run.workdir, policy, on_event)
    agreed = make_agreement(config, run, policy, validate.check_hosts, on_event)
    agreed.wait(make_transport, stop.is_set)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error
  clock, path = metrics.BusyClock(), f"spans/searcher-{index}.jsonl"
  spans = metrics.SpanWriter(run.workdir / path, "searcher", index, clock=clock)
  puller = make_puller(
      config, run, policy, place, whole.base, make_transport, on_event
  )
  outbox = queue_client.Outbox(
      make_transport,
      sid=make_sid(index),
      index=index,
      run_id=run.run_id,
      secret=run.secret,
      partition=roles.PARTITION,
      credits=config.search.credits,
      lease_s=config.search.lease_s,
      on_event=on_event,
      agree=agreed.holds,
  )
  Searcher(
      task=policy.task,
      judge=judge,
      tokenizer=policy.tokenizer,
      sampler=policy_lib.make_sampler(config, policy),
      puller=puller,
      outbox=outbox,
      params_fn=make_params_fn(policy, whole, place),
      samples_per_prompt=config.search.samples_per_prompt,
      in_flight=config.sampling.in_flight != "off",
      spans=spans,
      clock=clock,
  ).run(stop.is_set)
  # Read before `close`: a signal alone is no word of the trainer's.
  done = outbox.run_done
  judge.close()
  flushed = outbox.close(_FLUSH_S)
  puller.close()
  spans.close()
  logging.info("searcher leaves; all delivered: %s", flushed)
  return processes.EXIT_OK if done else processes.EXIT_INTERRUPTED


def make_sid(index: int) -> str:
  """Returns a searcher's name: none had it before; readable in a log."""
  unique = f"{int(time.time()):x}-{os.getpid():x}-{secrets.token_hex(4)}"
  return f"s{index:03d}-{unique}"


def make_agreement(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
    check: Callable[..., None],
    on_event: Callable[[str, str], None],
) -> agreement.Agreement:
  """Returns what holds a searcher to its trainer; `check` as there."""
  return agreement.Agreement(
      agreement.Terms.make(config, run, policy),
      run_id=run.run_id,
      secret=run.secret,
      check=check,
      on_event=on_event,
  )


def make_whole(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    place: sharding.Place = sharding.ONE_DEVICE,
) -> lora.Whole:
  """Returns what makes a searcher's params of what is trained.

  Adapters have it load their base, to where the searcher's params lie.

  Raises:
    ValueError: the base cannot be read.
  """

  return lora.make_whole(
      policy.adapters,
      policy.folder,
      config.seed,
      lambda: place.put(
          policy_lib.initial_params(policy, config.seed, place.model)
      ),
  )


def make_params_fn(
    policy: policy_lib.Policy,
    whole: lora.Whole,
    place: sharding.Place = sharding.ONE_DEVICE,
) -> Callable[[dict[str, np.ndarray]], types.PyTree]:
  """Returns (published leaves by path) -> params where the searcher's lie.

  Of leaves on the host each device gets its own part alone.
  """
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))

  def params_fn(leaves: dict[str, np.ndarray]) -> types.PyTree:
    trained = jax.device_put(publication.unflatten(leaves, like), place.trained)
    return place.put(whole.params(trained))

  return params_fn


def make_puller(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
    place: sharding.Place,
    base_name: str,
    make_transport: Callable[[], transport_base.Transport],
    on_event: Callable[[str, str], None],
) -> publication.Puller:
  """Returns the puller of what a run trains; see `lora.Whole.base`."""
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))
  places = None if place.trained is None else publication.by_path(place.trained)
  return publication.Puller(
      make_transport,
      run_id=run.run_id,
      secret=run.secret,
      base_name=base_name,
      expected=publication.expected_leaves(like),
      carriers=publication.make_read_carriers(
          config, run, placement=places and places.get
      ),
      dtype=config.publish.dtype,
      every_s=config.search.pull_every_s,
      on_event=on_event,
  )
