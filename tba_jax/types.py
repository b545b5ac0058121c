# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records that pass between the parts of a run.

Axes: B prompts, K completions of a prompt in a batch, S completions of a
prompt as sampled, P prompt tokens, T completion tokens.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Group:
  """One prompt and its S completions, sampled by one searcher: host arrays.

  prompt_id: index of the prompt in the task's training split.
  visit: times that the prompt order granted this prompt before, from 0.
  position: index in the prompt order; identifies (prompt_id, visit).
  prompt_tokens: [P] int32, unpadded prompt.
  completion_tokens: [S, T] int32, pad after the stop token.
  completion_lengths: [S] int32, tokens of each completion with its stop token
    and those of an environment.
  sampled_mask: [S, T] bool, True on the tokens that the policy sampled.
  stopped: [S] bool, True if a stop token or stop string ended the completion,
    False if it was cut off at its maximum length.
  behavior_logprobs: [S, T] float32, exact log-prob of each sampled token in
    nats, 0 elsewhere.
  rewards: [S] float32, task units; NaN of completions without a reward: they
    could not be judged, or the trainer has yet to judge them.
  versions: [S] int32, oldest params version that sampled a token of the row.
  epoch: start count of the trainer that published those params.
  ref_logprobs: [S, T] float32, log-prob of each token that the loss counts
    under the fixed reference, nats, 0 elsewhere; None if the trainer computes
    them.
  routes: [S, T, N, A] uint8, experts that each completion token used in each of
    N layers, 0 at the last, which was not fed to the model, and after it; None
    if they are not recorded.
  prompt_routes: [P, N, A] uint8, experts of the prompt's tokens, likewise.
  turn_rewards: [S, T] float32, reward of each turn at its last token, 0
    elsewhere; each row sums to its reward. None if the loss does not read them.
  """

  prompt_id: int
  visit: int
  position: int
  prompt_tokens: np.ndarray
  completion_tokens: np.ndarray
  completion_lengths: np.ndarray
  sampled_mask: np.ndarray
  stopped: np.ndarray
  behavior_logprobs: np.ndarray
  rewards: np.ndarray
  versions: np.ndarray
  epoch: int
  ref_logprobs: np.ndarray | None = None
  routes: np.ndarray | None = None
  prompt_routes: np.ndarray | None = None
  turn_rewards: np.ndarray | None = None

  @property
  def num_completions(self) -> int:
    return len(self.rewards)

  @property
  def failure_share(self) -> float:
    """Share of completions without a reward."""
    return float(np.isnan(self.rewards).mean())

  def rewarded(self, fallback: float | None = None) -> "Group":
    """Returns the group of the completions with a reward, 0 or more.

    With a fallback the others get it instead of being left out.
    """
    has_reward_S = ~np.isnan(self.rewards)
    if has_reward_S.all():
      return self
    if fallback is not None:
      filled = lambda x: (
          None if x is None else np.where(np.isnan(x), np.float32(fallback), x)
      )
      return dataclasses.replace(
          self,
          rewards=filled(self.rewards),
          turn_rewards=filled(self.turn_rewards),
      )
    rows = {
        field.name: value[has_reward_S]
        for field in dataclasses.fields(self)
        if field.name not in ("prompt_tokens", "prompt_routes")
        and isinstance(value := getattr(self, field.name), np.ndarray)
    }
    return dataclasses.replace(self, **rows)

  @property
  def num_tokens(self) -> int:
    """Sampled tokens, stop tokens included."""
    return int(self.sampled_mask.sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows in which a forward pass computes a batch's distinct completions.

  A row is a prompt with some of its completions, as indices b K + k. Places
  that are left over repeat a completion.

  indices: [R, N, M] int32, R rows of N parts; the parts are computed one after
    the other.
  slots: [B, K] int32, place of each completion in `indices`, part by part.
  tokens: [R, N, C] int32, the tokens of a row's completions that are computed:
    m T + t for token t of its completion m, one completion after the other, and
    M T in places left over. All others' results are 0. None computes all.
  """

  indices: Any
  slots: Any
  tokens: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
  """Experts that each token used when completions were sampled.

  Axes beside those above: N layers, A experts of a token.

  prompts: [B, P, N, A] uint8, experts of left-padded prompts, 0 at padding.
  completions: [B, K, T, N, A] uint8, 0 at a completion's last token, which was
    not fed to the model, and at padding.
  """

  prompts: Any
  completions: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Data of one optimizer step.

  prompt_tokens: [B, P] int32, left-padded.
  prompt_mask: [B, P] float32, 1 on prompt tokens.
  completion_tokens: [B, K, T] int32, pad after the last token.
  completion_mask: [B, K, T] float32, 1 on the tokens that the loss counts:
    those sampled, stop tokens included unless the config excludes them.
  behavior_logprobs: [B, K, T] float32, nats, 0 where not sampled.
  ref_logprobs: [B, K, T] float32, nats, 0 where the mask is 0.
  rewards: [B, K] float32.
  staleness_steps: [B, K] float32, step minus the sampling version.
  prepared: [B, ...] float32 by name, batch targets computed before the batch is
    split into micro-batches; {} until then.
  rows: packed rows of the forward pass; None if a row is a prompt with its K
    completions.
  routes: experts that the policy uses again; None has its routers choose.
  turn_rewards: [B, K, T] float32, reward of each turn at its last token; None
    if the loss does not read them.
  """

  prompt_tokens: Any
  prompt_mask: Any
  completion_tokens: Any
  completion_mask: Any
  behavior_logprobs: Any
  ref_logprobs: Any
  rewards: Any
  staleness_steps: Any
  prepared: Any = dataclasses.field(default_factory=dict)
  rows: Rows | None = None
  routes: Routes | None = None
  turn_rewards: Any = None


@dataclasses.dataclass(frozen=True)
class Completions:
  """S sampled completions of one prompt, from the sampler.

  tokens: [S, T] int32, pad after the stop token.
  lengths: [S] int32, completion lengths with the stop token and an
    environment's tokens.
  sampled_mask: [S, T] bool, True on the tokens that the policy sampled.
  logprobs: [S, T] float32, nats, under the distribution sampled from, 0 where
    not sampled.
  plain_logprobs: [S, T] float32, nats, before top-k, top-p and min-p, at the
    sampler's `plain_temperature`.
  stopped: [S] bool, True if a stop token or stop string ended the completion,
    False if it was cut off at its maximum length.
  versions: [S] int32, oldest params version that sampled a token of the row.
  token_versions: [S, T] int32, params version that sampled the token, -1 where
    not sampled.
  routes, prompt_routes: experts that tokens used, see `Group`.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  sampled_mask: np.ndarray
  logprobs: np.ndarray
  plain_logprobs: np.ndarray
  stopped: np.ndarray
  versions: np.ndarray
  token_versions: np.ndarray
  routes: np.ndarray | None = None
  prompt_routes: np.ndarray | None = None
