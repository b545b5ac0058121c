# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ledger of a run: accounts for everything that searchers generated.

In each of prompts (groups), completions and tokens:

    generated = trained_first_time + in_buffer_untrained + evicted_untrained
                + queued + rejected{reason} + lost{cause}

Searchers announce cumulative totals; every block contains the totals at its
end. A group is *applied* once, from the journal, and is then rejected or enters
the buffer. With sums over searchers,

    generated = Σ announced                queued = Σ announced - applied
    applied = rejected + lost by other causes + entered the buffer

and data that a departed searcher announced but never delivered is
lost{searcher}. Data in the buffer is *untrained* until its first use. A prompt
(one group) is trained with the first of its completions, and evicted untrained
with its last if none was used.

Tokens are policy tokens. Environment tokens are counted separately, once per
applied group.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.system import auditing


class Amount(NamedTuple):
  """A count of data; adds and subtracts elementwise.

  prompts: number of groups, one per time that a prompt was sampled.
  completions: number of completions in these groups.
  tokens: number of sampled tokens, stop tokens included.
  """

  prompts: int = 0
  completions: int = 0
  tokens: int = 0

  def __add__(self, other: tuple[int, int, int]) -> "Amount":
    return Amount(self[0] + other[0], self[1] + other[1], self[2] + other[2])

  def __sub__(self, other: tuple[int, int, int]) -> "Amount":
    return Amount(self[0] - other[0], self[1] - other[1], self[2] - other[2])


def amount_of(num_groups: int, num_tokens: Sequence[int]) -> Amount:
  """Returns the amount of completions, given the sampled tokens of each."""
  return Amount(num_groups, len(num_tokens), sum(num_tokens))


class Ledger:
  """Accounts for all generated data. Not thread-safe."""

  def __init__(self):
    self._announced = collections.defaultdict(Amount)
    self._applied = collections.defaultdict(Amount)
    self._rejected = collections.defaultdict(Amount)
    self._lost = collections.defaultdict(Amount)
    self._gone: set[str] = set()
    self._trained = Amount()
    self._evicted = Amount()
    self._unknown: list[str] = []
    self._environment_tokens = 0

  def searchers(self) -> list[str]:
    """Returns the present searchers, sorted."""
    return sorted(set(self._announced) - self._gone)

  def announce(self, searcher: str, totals: Amount) -> None:
    """Records a searcher's totals since its start; they never decrease."""
    known = self._announced[searcher]
    self._announced[searcher] = Amount(*map(max, known, totals))

  def apply(self, searcher: str, totals_after: Amount, amount: Amount) -> None:
    """Applies a block of a searcher; call it once per block, not per resend.

    Args:
      searcher: id of the searcher that generated the block.
      totals_after: the searcher's totals after this block.
    """
    self.announce(searcher, totals_after)
    self._applied[searcher] += amount

  def generated(self) -> Amount:
    """Returns the sum of all announced totals: the equation's left side."""
    return sum(self._announced.values(), Amount())

  def applied(self, searcher: str) -> Amount:
    return self._applied.get(searcher, Amount())

  def note_environment(self, num_tokens: int) -> None:
    """Counts tokens that environments wrote into an applied group."""
    self._environment_tokens += num_tokens

  def reject(self, reason: str, rejected: Amount) -> None:
    """Counts applied groups that are not inserted."""
    self._rejected[reason] += rejected

  def lost(self, cause: str, lost: Amount) -> None:
    """Counts applied groups that were lost before insertion."""
    self._lost[cause] += lost

  def evict(self, amount: Amount) -> None:
    """Counts data that left the buffer unused, from `ReplayBuffer.insert`."""
    self._evicted += amount

  def train_first(self, trained: Amount) -> None:
    """Counts first uses, from `ReplayBuffer.mark_drawn`."""
    self._trained += trained

  def searcher_gone(self, searcher: str) -> None:
    """Counts a searcher's announced but undelivered data as lost.

    A block that is applied later is subtracted from the loss.
    """
    self._gone.add(searcher)

  def note_unknown(self, reason: str) -> None:
    """Records that an unknown amount of data may be lost."""
    if reason not in self._unknown:
      self._unknown.append(reason)

  def close(self, in_buffer_untrained: Amount) -> dict[str, Any]:
    """Returns all terms of the equation and whether it holds.

    Args:
      in_buffer_untrained: amount from `ReplayBuffer.untrained`.

    Returns:
      Each term as {"prompts", "completions", "tokens"}, `rejected` and `lost`
      by reason and cause; `accounted`: sum of the right side; `difference`:
      left minus right side; `unknown`: reasons why more may be lost; `closed`:
      whether there is no difference, no negative term and nothing unknown;
      `environment_tokens`: unsampled tokens, which are in no term.
    """
    undelivered = {
        searcher: announced - self.applied(searcher)
        for searcher, announced in self._announced.items()
    }
    lost = dict(self._lost)
    queued = Amount()
    for searcher, amount in undelivered.items():
      if searcher not in self._gone:
        queued += amount
      elif any(amount):
        lost["searcher"] = lost.get("searcher", Amount()) + amount
    single = {
        "trained_first_time": self._trained,
        "in_buffer_untrained": Amount(*in_buffer_untrained),
        "evicted_untrained": self._evicted,
        "queued": queued,
    }
    parts = [*single.values(), *self._rejected.values(), *lost.values()]
    accounted = sum(parts, Amount())
    difference = self.generated() - accounted
    is_negative = min(map(min, [*parts, *undelivered.values()])) < 0
    return {
        "generated": self.generated()._asdict(),
        **{term: part._asdict() for term, part in single.items()},
        "rejected": _table(self._rejected),
        "lost": _table(lost),
        "accounted": accounted._asdict(),
        "difference": difference._asdict(),
        "unknown": list(self._unknown),
        "environment_tokens": self._environment_tokens,
        "closed": not (is_negative or any(difference) or self._unknown),
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the accounts as JSON values."""
    return {
        "announced": _lists(self._announced),
        "accepted": _lists(self._applied),
        "rejected": _lists(self._rejected),
        "lost": _lists(self._lost),
        "gone": sorted(self._gone),
        "trained": list(self._trained),
        "evicted": list(self._evicted),
        "unknown": list(self._unknown),
        "environment_tokens": self._environment_tokens,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    self._announced = _amounts(state["announced"])
    self._applied = _amounts(state["accepted"])
    self._rejected = _amounts(state["rejected"])
    self._lost = _amounts(state["lost"])
    self._gone = set(state["gone"])
    self._trained = Amount(*state["trained"])
    self._evicted = Amount(*state["evicted"])
    self._unknown = list(state["unknown"])
    self._environment_tokens = state.get("environment_tokens", 0)


def _table(amounts: dict[str, Amount]) -> dict[str, dict[str, int]]:
  return {name: part._asdict() for name, part in sorted(amounts.items())}


def _lists(amounts: dict[str, Amount]) -> dict[str, list[int]]:
  return {name: list(part) for name, part in amounts.items()}


def _amounts(lists: dict[str, list[int]]) -> dict[str, Amount]:
  amounts = {name: Amount(*part) for name, part in lists.items()}
  return collections.defaultdict(Amount, amounts)


def audit_state(
    state: Mapping[str, Any], untrained: tuple[int, int, int]
) -> str:
  """Returns how a saved state fails to account for applied data, or "".

  accepted = trained + evicted + rejected + lost + untrained in the buffer

  Args:
    state: result of `Ledger.get_state`.
    untrained: amount in the buffer saved with it.
  """
  parts = [state["trained"], state["evicted"]]
  parts += [*state["rejected"].values(), *state["lost"].values()]
  accepted = sum(state["accepted"].values(), Amount())
  accounted = sum(parts, Amount(*untrained))
  if accepted == accounted:
    return ""
  return (
      f"{[*accepted]} {', '.join(Amount._fields)} were accepted,"
      f" {[*accounted]} are accounted for"
  )


def audit(run: auditing.AuditedRun) -> auditing.Findings:
  """Checks that the ledger of a run closes."""
  name = "ledger.json"
  ledger = run.json.get(name)
  if ledger is None:
    return
  single = ("trained_first_time", "in_buffer_untrained", "evicted_untrained",
            "queued")  # fmt: skip
  amounts = [ledger[term] for term in ("generated", *single)]
  amounts += [*ledger["rejected"].values(), *ledger["lost"].values()]
  generated, *terms = (Amount(**amount) for amount in amounts)
  rest = generated - sum(terms, Amount())
  advice = (
      "the run lost data or counted it twice without noticing: treat its"
      " results with caution, and report this"
  )
  if any(rest) or min(map(min, terms)) < 0:
    what = ", ".join(f"{n} {unit}" for n, unit in zip(rest, Amount._fields))
    yield name, f"does not close: {what} are unaccounted for", advice
  elif ledger.get("unknown"):
    for reason in ledger["unknown"]:
      yield name, f"may lack losses: {reason}", auditing.COPY
  elif not ledger["closed"]:
    yield name, "adds up, but is marked as not closed", advice
  if run.finished and ledger["queued"]["completions"]:
    yield name, "has queued completions after the end", advice
  newest = run.saved.get(run.newest, {}).get("data")
  if run.finished and newest:
    trained = [*Amount(**ledger["trained_first_time"])]
    if (known := newest["ledger"]["trained"]) != trained:
      what = f"{trained} are trained, checkpoints/{run.newest} has {known}"
      yield name, what, "it was not written with the last checkpoint"
  for cause, amount in ledger["lost"].items():
    yield name, f"{amount['completions']} completions lost{{{cause}}}"
  yield (
      f"{ledger['generated']['completions']} completions,"
      f" {ledger['trained_first_time']['completions']} trained"
  )
