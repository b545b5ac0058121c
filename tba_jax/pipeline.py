# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model of the pipeline from searchers to the trainer: rates and staleness.

Three stages in a row, each of which can be the slowest:

    n searchers ---> store and drain ---> trainer

The slowest one sets the rate of all. What lies between them is bounded by
credits, so by Little's law (Little 1961: number = rate times time) the time
from a completion's version to its use is the groups under way over the rate,
and its staleness is the groups under way over the groups of a step.
`docs/scaling.md` holds it to measurements. No JAX here.
"""

import dataclasses
import math

# Of a fixed point; it is reached within a few of them where searchers are the
# slowest stage.
_ROUNDS = 100


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Stages of the pipeline, in seconds a group.

  num_searchers: n.
  sample_s: of one searcher, for one group.
  serve_s: of store and drain, for one group; 0 where it never holds up.
  train_s: of the trainer, for one group that is sampled; 0: it never waits.
  groups_per_step: groups that are sampled for each optimizer step.
  ahead_groups: most groups that may be granted and not trained on yet:
    (lead_steps + 1) steps of them; infinite: the credits alone bound it.
  round_groups: groups of a searcher's round, sampled with one version and sent
    as one block.
  credits: blocks that a searcher may have sent and not seen acknowledged.
  granted_rounds: rounds that a searcher may have been granted and not handed
    over, the one that it samples included.
  publish_steps: a version comes so often.
  hand_over_s: from the end of sampling until the trainer has a group, of a
    searcher that is alone.
  idle_s: from one look of the drain at an empty queue to the next.
  look_s: of the drain, for a look that finds one group.
  more_s: of such a look for each further group.
  """

  num_searchers: int
  sample_s: float
  serve_s: float = 0.0
  train_s: float = 0.0
  groups_per_step: float = 1.0
  ahead_groups: float = math.inf
  round_groups: float = 1.0
  credits: float = math.inf
  granted_rounds: float = math.inf
  publish_steps: int = 1
  hand_over_s: float = 0.0
  idle_s: float = 0.0
  look_s: float = 0.0
  more_s: float = 0.0

  def rates(self) -> dict[str, float]:
    """Returns the groups a second that each stage could do alone."""
    over = lambda seconds: 1.0 / seconds if seconds else math.inf
    return {
        "searchers": self.num_searchers * over(self.sample_s),
        "store": over(self.serve_s),
        "trainer": over(self.train_s),
    }

  def slowest(self) -> str:
    """Returns the stage that sets the rate; the first of equal ones."""
    rates = self.rates()
    return min(rates, key=rates.get)

  def groups_per_s(self) -> float:
    """Returns the rate of the whole."""
    return min(self.rates().values())

  def step_s(self) -> float:
    """Returns the seconds of one optimizer step."""
    return self.groups_per_step / self.groups_per_s()

  def busy_shares(self) -> dict[str, float]:
    """Returns the share of time that each stage has work."""
    rate = self.groups_per_s()
    return {stage: rate / alone for stage, alone in self.rates().items()}

  def groups_under_way(self) -> float:
    """Returns the groups sampled with a version but not yet trained on.

    Where searchers are the slowest, nothing queues behind them: it is what they
    are sampling, and what is handed over just then. Elsewhere all fills up to
    the credits or to what is granted. Where it is the store that all wait for,
    a granted round waits for it twice, as long on its way to a searcher as back
    from it, and only what a searcher has begun to sample is under way.
    """
    sampling = self.num_searchers * self.round_groups
    slowest, rate = self.slowest(), self.groups_per_s()
    if slowest == "searchers":
      under_way = sampling + rate * self.hand_over()
    else:
      under_way = sampling * min(1 + self.credits, self.granted_rounds)
    if slowest == "store" and self.granted_rounds <= 1 + self.credits:
      # rate · (s + (n · granted / rate - s) / 2), by Little's law.
      under_way = (under_way + rate * self.sample_s * self.round_groups) / 2
    return min(under_way, self.ahead_groups)

  def hand_over(self) -> float:
    """Returns the seconds from the end of sampling until the trainer has it.

    A group waits for the drain's next look. Groups that find the drain idle
    wait for half of its pause, as that of a single searcher does; those that
    find it busy with the groups of others wait for half of what that takes. Of
    a look that takes S and in which m = S · rate come by chance, the next one
    finds m, or is an idle one with probability exp(-m), after which the next
    that finds any finds one: m + exp(-m) on average. S grows with what a look
    finds, so that both are found together.
    """
    if not self.look_s:
      return self.hand_over_s
    others = self.groups_per_s() * (1 - 1 / self.num_searchers)
    found, busy, look_s = 1.0, 0.0, self.look_s
    for _ in range(_ROUNDS):
      look_s = self.look_s + (found - 1) * self.more_s
      coming = others * look_s
      found = min(coming + math.exp(-coming), self.num_searchers)
      busy = min(coming / found, 1.0)
    return self.hand_over_s + busy * max(0.0, look_s - self.idle_s) / 2

  def staleness_steps(self) -> float:
    """Returns the mean staleness of data when it is first trained on.

    A version is (publish_steps - 1) / 2 steps old on average when it is taken.
    """
    return (
        self.groups_under_way() / self.groups_per_step
        + (self.publish_steps - 1) / 2
    )

  def gain(self) -> float:
    """Returns how much faster this is than sampling and training in turns.

    (G + T) / max(G, T), with G and T the seconds of sampling and training.
    """
    rates = self.rates()
    in_turns = 1.0 / rates["searchers"] + 1.0 / rates["trainer"]
    return in_turns * self.groups_per_s()

  def balancing_searchers(self) -> int:
    """Returns the least searchers that never let the trainer wait."""
    if not self.train_s:
      raise ValueError("train_s = 0: allowed above 0, to be balanced")
    # So that 3.0000000001 is 3.
    return max(1, math.ceil(self.sample_s / self.train_s - 1e-9))
