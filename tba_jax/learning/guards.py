# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guards: limits on entropy, KL, accuracy, the log-prob gap, and failures.

The loss is not guarded, because it falls while a policy collapses. The gap
between the log-probs of trainer and sampler at staleness 0 is the first sign of
a wrong model, mask or temperature. A rising share of unjudged completions stops
the run with any `guards.action` but "off": neither a warning nor a lower
learning rate fixes a policy that learns to break its judge.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import ml_collections

from tba_jax.models import config as config_lib
from tba_jax.run import failures as failures_lib
from tba_jax.sampling import samplers

# Default limits, nats per token, coarsest dtype first. Measured mean gaps
# between decoding and a forward pass: up to 6e-6 (float32) and 0.024 (bfloat16)
# for random models of 2 to 4 layers with logits of standard deviation 1 to 9;
# 0.22 (int8) for SmolLM2-135M on the probe's tokens.
_MAX_LOGPROB_GAP = {"int8": 0.3, "bfloat16": 0.1, "float32": 1e-3}


def max_logprob_gap(config: ml_collections.ConfigDict, backend: str) -> float:
  """Returns the limit of the log-prob gap, nats per token.

  The default follows the coarsest dtype of trainer, published params and
  sampler. There is no limit if completions do not come from the policy alone
  (exploration, offline data).

  Args:
    config: reads `guards`, `search`, `explore`, `offline`, `model`, `publish`,
      `lora`.
  """
  explore = config.explore
  if config.guards.max_logprob_gap:
    return config.guards.max_logprob_gap
  if any((explore.fraction, explore.min_tokens, explore.max_tokens)):
    return math.inf
  log = config.offline.path
  if [*samplers.without("is_exact", config.search.sampler, log)]:
    return math.inf
  dtypes = [config_lib.compute_dtype(config.model, backend)]
  dtypes += [config.publish.dtype, config.search.quantization]
  if config.lora.rank:  # Searchers round merged kernels to this dtype.
    dtypes.append(config.model.param_dtype)
  return next(
      limit for dtype, limit in _MAX_LOGPROB_GAP.items() if dtype in dtypes
  )


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A guard that fired.

  name: guard that raised the alarm.
  message: sentence with value and limit.
  action: value of `config.guards.action` to apply.
  """

  name: str
  message: str
  action: str


class Guards:
  """Compares metrics with the limits of `config.guards`.

  A guard fires when its limit is crossed, and again only after the value has
  been back within the limit.

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
      num_sampled_by_chance: position in the prompt order from which prompts are
        selected by earlier results.
      unchecked_step: first step with changed settings, where the log-prob gap
        is not checked: its freshest completions may have been sampled with the
        old ones.
    """
    self._unchecked_step = unchecked_step
    self._config = config.guards
    self._num_sampled_by_chance = num_sampled_by_chance
    self.failures = failures_lib.FailureShare()
    self._max_logprob_gap = max_logprob_gap(config, backend)
    self._firing: set[str] = set()
    # By split, since splits differ in difficulty: the first accuracy, and the
    # step of the newest evaluation.
    self._first_accuracy: dict[str, float] = {}
    self._evaluated: dict[str, int] = {}
    if state is not None:
      self.set_state(state)

  def check_step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    """Returns the alarms raised by a step's metrics."""
    c = self._config
    crossed = {
        "entropy": (
            metrics["entropy"] < c.min_entropy,
            f"entropy {metrics['entropy']:.4f} nats per token is below"
            f" config.guards.min_entropy={c.min_entropy}",
        ),
        "logprob_gap": (
            step != self._unchecked_step
            and metrics["on_policy_share"] > 0
            and metrics["logprob_gap"] > self._max_logprob_gap,
            "trainer and sampler differ by"
            f" {metrics['logprob_gap']:.2e} nats per token at staleness 0,"
            f" above {self._max_logprob_gap} (config.guards.max_logprob_gap)",
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
    """Returns an alarm if the share of failures has risen above the limit.

    Args:
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
    """Returns an alarm if pass@1 of a split has dropped too far, else [].

    Ignores evaluations checked earlier, and those without judged completions.
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
    """Returns alarms of newly crossed limits; `action` overrides the config."""
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
