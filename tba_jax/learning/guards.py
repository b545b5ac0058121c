# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guards: limits on entropy, KL, accuracy, the log-prob gap, and failures.

The loss is no guard, because it falls while a policy collapses. The gap between
the trainer's and the sampler's log-probs at staleness 0 is the first sign of a
wrong model, mask or temperature. A rising share of unjudged completions stops a
run regardless of the action: neither a warning nor a lower rate fixes a policy
that learns to break its judge.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import ml_collections

from tba_jax.models import config as config_lib
from tba_jax.run import failures as failures_lib
from tba_jax.sampling import samplers

# Nats per token, for `guards.max_logprob_gap = 0`. Random models of 2 to 4
# layers, with logits of standard deviation 1 to 9, had a mean gap between
# decoding and one forward pass of up to 6e-6 in float32 and .024 in bfloat16.
# With matrices of int8 SmolLM2-135M is .22 off on the tokens of the probe.
# Coarsest first.
_MAX_LOGPROB_GAP = {"int8": 0.3, "bfloat16": 0.1, "float32": 1e-3}


def max_logprob_gap(config: ml_collections.ConfigDict, backend: str) -> float:
  """Returns the limit of the log-prob gap, nats per token.

  The default depends on the coarser of both dtypes. There is no limit if
  completions do not come from the plain policy (top-k, top-p, min-p,
  exploration, a log).

  Args:
    config: reads `guards`, `sampling`, `search`, `explore`, `offline`, `model`,
      `publish`, `lora`.
    backend: JAX's, of the trainer.
  """
  sampling, explore = config.sampling, config.explore
  if config.guards.max_logprob_gap:
    return config.guards.max_logprob_gap
  if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
    return math.inf
  if any((explore.fraction, explore.min_tokens, explore.max_tokens)):
    return math.inf
  log = config.offline.path
  if [*samplers.without("is_exact", config.search.sampler, log)]:
    return math.inf
  dtypes = [config_lib.compute_dtype(config.model, backend)]
  dtypes += [config.publish.dtype, config.search.quantization]
  if config.lora.rank:  # Searchers round the merged kernels to it.
    dtypes.append(config.model.param_dtype)
  return next(
      limit for dtype, limit in _MAX_LOGPROB_GAP.items() if dtype in dtypes
  )


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A guard that fired.

  name: guard that raised it.
  message: sentence with the numbers.
  action: value of `config.guards.action` that applies.
  """

  name: str
  message: str
  action: str


class Guards:
  """Compares metrics with the limits of `config.guards`.

  A guard fires when its limit is crossed, and again only after the value has
  returned within the limit.

  failures: share of unjudged training completions.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      state: Mapping[str, Any] | None = None,
      *,
      backend: str,
      num_sampled_by_chance: float = math.inf,
      unchecked_step: int = -1,
  ):
    """Initializes the guards.

    Args:
      config: reads `guards` and what `max_logprob_gap` reads.
      state: result of `get_state`, to continue from.
      backend: JAX backend of the trainer.
      num_sampled_by_chance: position in the prompt order from which prompts are
        selected by earlier answers.
      unchecked_step: step without a check of the log-prob gap: the first one
        with changed settings, whose freshest completions may have been sampled
        with the old settings.
    """
    self._unchecked_step = unchecked_step
    self._config = config.guards
    self._num_sampled_by_chance = num_sampled_by_chance
    self.failures = failures_lib.FailureShare()
    self._max_logprob_gap = max_logprob_gap(config, backend)
    self._firing: set[str] = set()
    # First accuracy by split, since splits differ in difficulty, and the step
    # of the newest one.
    self._first_accuracy: dict[str, float] = {}
    self._evaluated: dict[str, int] = {}
    if state is not None:
      self.set_state(state)

  def check_step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    """Returns the guards that fire on a step's metrics."""
    c = self._config
    crossed = {
        "entropy": (
            metrics["entropy"] < c.min_entropy,
            f"entropy {metrics['entropy']:.4f} nats a token is below"
            f" config.guards.min_entropy={c.min_entropy}",
        ),
        "logprob_gap": (
            step != self._unchecked_step
            and metrics["on_policy_share"] > 0
            and metrics["logprob_gap"] > self._max_logprob_gap,
            "trainer and sampler differ by"
            f" {metrics['logprob_gap']:.2e} nats a token at staleness 0, above"
            f" {self._max_logprob_gap} (config.guards.max_logprob_gap)",
        ),
    }
    if "kl" in metrics:  # Not without a reference.
      crossed["kl"] = (
          metrics["kl"] > c.max_kl,
          f"KL to the reference {metrics['kl']:.2f} nats is above"
          f" config.guards.max_kl={c.max_kl}",
      )
    return self._alarms(step, crossed)

  def check_failures(
      self, step: int, shares: Sequence[tuple[int, float]]
  ) -> list[Alarm]:
    """Returns the failure guard if the share of failures is rising.

    Args:
      step: last completed step.
      shares: (position, share of unjudged completions) of the groups that
        arrived since the last call.
    """
    failures, limit = self.failures, self._config.max_failure_rise
    for position, share in shares:
      failures.add([share], compare=position < self._num_sampled_by_chance)
    rises = failures.is_rising and failures.newest > failures.first + limit
    message = (
        f"{failures.newest:.1%} of the newest training completions could not be"
        f" judged, {failures.first:.1%} of the first: a rise above"
        f" config.guards.max_failure_rise={limit}. The judge fails, or the"
        " policy learns to break it: fix the causes in the reward_failed"
        " events, then resume with a changed setting, such as a larger"
        " config.train.num_steps"
        if rises
        else ""
    )
    return self._alarms(step, {"failures": (rises, message)}, "stop")

  def check_accuracy(
      self, step: int, accuracy: float | None, split: str
  ) -> list[Alarm]:
    """Returns the accuracy guard if pass@1 of a split fires it, or [].

    Ignores evaluations that were checked before or have no judged completion.
    """
    if accuracy is None or step <= self._evaluated.get(split, -1):
      return []
    self._evaluated[split] = step
    first = self._first_accuracy.setdefault(split, accuracy)
    limit = first - self._config.max_accuracy_drop
    return self._alarms(
        step,
        {
            "accuracy": (
                accuracy < limit,
                f"{split.replace('_', '-')} pass@1 {accuracy:.3f} is below"
                f" {limit:.3f}, its first value less"
                " config.guards.max_accuracy_drop"
                f"={self._config.max_accuracy_drop}",
            )
        },
    )

  def get_state(self) -> dict[str, Any]:
    return {
        "firing": sorted(self._firing),
        "first_accuracy_by_split": self._first_accuracy,
        "evaluated_by_split": self._evaluated,
        "failures": self.failures.get_state(),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._firing = set(state["firing"])
    self._first_accuracy = dict(state.get("first_accuracy_by_split", {}))
    self._evaluated = dict(state.get("evaluated_by_split", {}))
    self.failures = failures_lib.FailureShare(state.get("failures"))

  def _alarms(
      self,
      step: int,
      crossed: Mapping[str, tuple[bool, str]],
      action: str = "",
  ) -> list[Alarm]:
    """Returns the guards that fire, with another action than the config's."""
    if self._config.action == "off":
      return []
    alarms = []
    for name, (fires, message) in crossed.items():
      if fires and name not in self._firing:
        message = f"step {step}: {message}"
        alarms.append(Alarm(name, message, action or self._config.action))
      if fires:
        self._firing.add(name)
      else:
        self._firing.discard(name)
    return alarms
