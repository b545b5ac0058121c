# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The searcher: takes prompts, samples with the newest params, sends back."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import numpy as np

from tba_jax import metrics
from tba_jax import puller as puller_lib
from tba_jax import types
from tba_jax.replay import outbox as outbox_lib
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.tasks import base as tasks_base

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
      puller: puller_lib.Puller,
      outbox: outbox_lib.Outbox,
      params_fn: Callable[[dict[str, np.ndarray]], types.PyTree],
      samples_per_prompt: int,
      in_flight: bool,
      spans: metrics.SpanWriter,
      clock: metrics.BusyClock,
      missing_stop_reward: float | None = None,
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
      missing_stop_reward: takes the place of the reward of completions without
        stop token, so that replay draws by what is learned from; None where the
        config does not replace it.
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
    self._missing_stop_reward = missing_stop_reward
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
      self, block: outbox_lib.Block, stop: Callable[[], bool]
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

  def _sample(self, block: outbox_lib.Block) -> list[types.Group]:
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
      self, block: outbox_lib.Block, completions: Sequence[types.Completions]
  ) -> np.ndarray:
    """Returns [P, S] rewards of a block, judged together."""
    requests = [
        judges.Request(SPLIT, prompt_id, text, reason != "length")
        for (_, prompt_id, _), found in zip(
            block.prompts, completions, strict=True
        )
        for text, reason in zip(
            decode_texts(self._tokenizer, found), found.finish_reasons
        )
    ]
    rewards = [judgement.reward for judgement in self._judge.judge(requests)]
    rewards_PxS = np.asarray(rewards, np.float32).reshape(
        len(block.prompts), -1
    )
    if self._missing_stop_reward is None:
      return rewards_PxS
    stopped_PxS = np.stack([found.stopped for found in completions])
    instead = np.float32(self._missing_stop_reward)
    return np.where(stopped_PxS, rewards_PxS, instead)

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
