# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Generates small rows in the formats of GSM8K, MATH and TL;DR.

For tests and trials without data or a pretrained model. The rows are not part
of those data sets and do not measure a model's quality on them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import fractions
import operator
import re
import string
from typing import Any

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

SYNTHETIC = "synthetic"  # value of `config.task.data`
_HELD_OUT_SHARE = 0.2
_MAX_VALUE = 9  # one digit: learned by a tiny model within a minute
# Half of the solutions are just the answer. A small model fine-tuned on both
# kinds guesses half the time; the reward teaches it to show its work.
_TERSE_SHARE = 0.5
_DRAWN_OPERATIONS = "++--*"
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _splits(records: Sequence[dict]) -> dict[str, list[rows.Row]]:
  """Returns the first fifth of the rows as held-out, the rest as training."""
  all_rows = [
      rows.Row(f"synthetic:{n}", fields) for n, fields in enumerate(records, 1)
  ]
  cut = round(len(all_rows) * _HELD_OUT_SHARE)
  return {base.TRAIN: all_rows[cut:], base.HELD_OUT: all_rows[:cut]}


def _distinct(
    make: Callable[[], dict | None], key: str, num_rows: int
) -> Iterator[dict]:
  """Yields results of `make` that differ in the field `key`; skips None."""
  seen: set[str] = set()
  while len(seen) < num_rows:
    record = make()
    if record is not None and record[key] not in seen:
      seen.add(record[key])
      yield record


def _pick(rng: np.random.Generator, items: Sequence[str]) -> str:
  # `rng.choice` takes ten times as long.
  return items[rng.integers(len(items))]


def _two_steps(
    rng: np.random.Generator,
) -> list[tuple[int, str, int, int]] | None:
  """Returns two chained steps (value, operation, number, result).

  Returns None if a result is not in 1 … `_MAX_VALUE`.
  """
  value = int(rng.integers(2, _MAX_VALUE + 1))
  steps = []
  for _ in range(2):
    operation = _pick(rng, _DRAWN_OPERATIONS)
    number = int(rng.integers(2, 4) if operation == "*" else rng.integers(1, 9))
    result = _OPERATIONS[operation](value, number)
    if not 1 <= result <= _MAX_VALUE:
      return None
    steps.append((value, operation, number, result))
    value = result
  return steps


# GSM8K.
_NAMES = ("Ann", "Ben", "Eva", "Tom")
_THINGS = ("pens", "nuts", "eggs", "keys")
_PHRASES = {
    "+": ("buys {}", "finds {}"),
    "-": ("loses {}", "sells {}"),
    "*": ("gets {} times as many",),
}


def gsm8k_splits(num_prompts: int, seed: int) -> dict[str, list[rows.Row]]:
  r"""Returns distinct two-step word problems in the format of GSM8K.

  {"question": "Ann has 4 pens. Ann buys 5, then loses 3. How many pens?",
   "answer": "4+5=<<4+5=9>>9\n9-3=<<9-3=6>>6\n#### 6"}
  """
  rng = np.random.default_rng([seed, 0x6A8])
  return _splits(
      list(_distinct(lambda: _word_problem(rng), "question", num_prompts))
  )


def _word_problem(rng: np.random.Generator) -> dict[str, str] | None:
  steps = _two_steps(rng)
  if steps is None:
    return None
  name, thing = _pick(rng, _NAMES), _pick(rng, _THINGS)
  lines, story = [], []
  for value, operation, number, result in steps:
    step = f"{value}{operation}{number}"
    lines.append(f"{step}=<<{step}={result}>>{result}")
    story.append(_pick(rng, _PHRASES[operation]).format(number))
  first, value = steps[0][0], steps[-1][-1]
  if rng.random() < _TERSE_SHARE:
    lines = []
  return {
      "question": (
          f"{name} has {first} {thing}. {name} {story[0]}, then {story[1]}. How"
          f" many {thing}?"
      ),
      "answer": "\n".join([*lines, f"#### {value}"]),
  }


# MATH.
_FRACTION_SHARE = 0.1
_MAX_DENOMINATOR = 20


def math_splits(num_prompts: int, seed: int) -> dict[str, list[rows.Row]]:
  r"""Returns distinct problems with boxed answers in the format of MATH.

  Two steps of arithmetic, or a sum of fractions whose answer is in lowest terms
  but whose solution is not, so that comparing answers takes some algebra.

  {"problem": "Let $x=4$. What is $(x+5)-3$?", "answer": "6",
   "solution": "$4+5=9$, $9-3=6$, so \\boxed{6}."}
  {"problem": "What is $\\frac{1}{8}+\\frac{3}{8}$?", "answer": "\\frac{1}{2}",
   "solution": "$1+3=4$, so \\boxed{\\frac{4}{8}}."}
  """
  rng = np.random.default_rng([seed, 0x3A7])

  def make() -> dict[str, str] | None:
    is_sum = rng.random() < _FRACTION_SHARE
    return _sum_of_fractions(rng) if is_sum else _expression(rng)

  return _splits(list(_distinct(make, "problem", num_prompts)))


def _expression(rng: np.random.Generator) -> dict[str, str] | None:
  steps = _two_steps(rng)
  if steps is None:
    return None
  (first, one, second, _), (_, other, third, value) = steps
  name = rng.choice(list(string.ascii_lowercase))
  work = ", ".join(f"${v}{o}{n}={result}$" for v, o, n, result in steps)
  work = "" if rng.random() < _TERSE_SHARE else f"{work}, so "
  return {
      "problem": (
          f"Let ${name}={first}$. What is"
          f" $({name}{one}{second}){other}{third}$?"
      ),
      "solution": f"{work}\\boxed{{{value}}}.",
      "answer": str(value),
  }


def _sum_of_fractions(rng: np.random.Generator) -> dict[str, str] | None:
  below = int(rng.integers(3, _MAX_DENOMINATOR))
  one, other = (int(n) for n in rng.integers(1, 9, size=2))
  if one + other >= min(below, 10):
    return None
  least = fractions.Fraction(one + other, below)
  frac = lambda a, b: f"\\frac{{{a}}}{{{b}}}"
  return {
      "problem": f"What is ${frac(one, below)}+{frac(other, below)}$?",
      "solution": (
          f"${one}+{other}={one + other}$, so"
          f" \\boxed{{{frac(one + other, below)}}}."
      ),
      "answer": frac(least.numerator, least.denominator),
  }


# TL;DR. A post contains four facts among filler. A person's summary contains
# most of them, some filler, sometimes a wrong word, and hardly ever a fact
# twice. A reward model thus learns little about repetition, so that an
# over-optimized policy repeats facts.
FACTS: Mapping[str, tuple[str, ...]] = {
    "who": ("Ann", "Ben", "Eva", "Tom", "Kim", "Max"),
    "did": ("lost", "found", "sold", "broke", "hid", "drew"),
    "what": ("key", "pen", "cup", "hat", "map", "toy"),
    "where": ("school", "home", "work", "camp", "church", "town"),
}
_FACT_OF = {word: fact for fact, words in FACTS.items() for word in words}
_FILLERS = ("so", "well", "basically", "honestly")
_SUBREDDITS = ("pets", "family", "jobs")
_ENDINGS = ("it was a long day.", "what should we do?", "thanks for reading.")
_POST = re.compile(r"POST: (.*)", re.S)
_WORDS = re.compile(r"[A-Za-z]+|[^\sA-Za-z]")
# Habits of the person who writes a summary.
_TOLD_SHARE = 0.75
_WRONG_SHARE = 0.1
_FILLER_SHARE = 0.25
_AGAIN_SHARE = 0.04
# Habit of the person who compares two: a preference for the longer one.
_LONGER_SHARE = 0.7
_TLDR_SEED = 0x71D


def tldr_splits(num_prompts: int, seed: int) -> dict[str, list[rows.Row]]:
  """Returns distinct posts of four facts with summaries, in TL;DR's format.

  {"subreddit": "pets", "title": "my key", "summary": " Ann lost key",
   "post": "so Ann lost the key at school. it was a long day."}
  """
  rng = np.random.default_rng([seed, _TLDR_SEED])
  records = []
  for fields in _distinct(lambda: _post(rng), "post", num_prompts):
    records.append({**fields, "summary": _summary(fields["post"], rng)})
  return _splits(records)


def tldr_pairs(
    queries: Sequence[base.Prompt], num_pairs: int, seed: int
) -> list[tuple[base.Prompt, str, str]]:
  """Returns (query, chosen, rejected), two summaries labelled by a person.

  `queries`, posts as the policy sees them, are drawn with replacement.
  """
  rng = np.random.default_rng([seed, _TLDR_SEED, 1])
  out = []
  while len(out) < num_pairs:
    query = queries[rng.integers(len(queries))]
    first, second = (_summary(_post_in(query), rng) for _ in range(2))
    if first != second:
      longer_is_first = len(first) >= len(second)
      keeps = longer_is_first == (rng.random() < _LONGER_SHARE)
      out.append((query, *((first, second) if keeps else (second, first))))
  return out


def tldr_reward(query: base.Prompt, summary: str) -> float:
  """Returns the scripted gold reward of a summary, at most 1.

  A quarter of the sum of these: 1 for each of the four facts, once; -1 for a
  repetition or a wrong word of a fact's kind; -1/2 for any other word.
  """
  post = _WORDS.findall(_post_in(query))
  facts = {_FACT_OF[word]: word for word in post if word in _FACT_OF}
  mentioned, total = set(), 0.0
  for word in _WORDS.findall(summary):
    fact = _FACT_OF.get(word)
    if fact is None:
      total -= 0.5
    elif word == facts.get(fact) and fact not in mentioned:
      mentioned.add(fact)
      total += 1.0
    else:
      total -= 1.0
  return total / len(FACTS)


class GoldReward(rows_task.RowsTask):
  """A task rewarded by a model, or by `tldr_reward` on synthetic posts.

  Subclasses have the fields `data`, `synthetic_prompts`, `synthetic_pairs`,
  `overlap`, `validation_prompts` and `split_seed`.
  """

  def __init__(self, fields: Mapping[str, Any], held_out: str = "test"):
    """Reads the data; `held_out` is the folder's split to evaluate on."""
    base.check_integer(
        "synthetic_prompts", fields["synthetic_prompts"], 20, 8000
    )
    base.check_integer(
        "synthetic_pairs", fields["synthetic_pairs"], 5, 1_000_000
    )
    self._fields = fields
    self._is_synthetic = fields["data"] == SYNTHETIC
    super().__init__(
        self._synthetic_rows(fields["synthetic_prompts"], fields["split_seed"])
        if self._is_synthetic
        else rows.folder_sources(fields["data"], held_out),
        validation_prompts=fields["validation_prompts"],
        split_seed=fields["split_seed"],
        overlap=fields["overlap"],
    )

  def _synthetic_rows(
      self, num_prompts: int, seed: int
  ) -> dict[str, list[rows.Row]]:
    return tldr_splits(num_prompts, seed)

  @property
  def has_reward(self) -> bool:
    return self._is_synthetic

  def pairs(self, split: str) -> Sequence[tuple[base.Prompt, str, str]]:
    if not self._is_synthetic:
      return super().pairs(split)
    held_out = split == base.HELD_OUT
    num_pairs = self._fields["synthetic_pairs"]
    return tldr_pairs(
        [e.prompt for e in self._splits[split]],
        num_pairs // 5 if held_out else num_pairs,
        self._fields["split_seed"] * 2 + held_out,
    )

  def reward_of(self, prompt: base.Prompt, completion: str) -> float:
    if not self._is_synthetic:
      return super().reward_of(prompt, completion)
    return tldr_reward(prompt, completion)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    """Returns the gold reward; correct means better than the reference."""
    if not self._is_synthetic:
      raise base.RewardError(
          "no_reward",
          f"config.reward.backend: must be 'model', the task {self.name!r} has"
          " no"
          " reward of its own",
      )
    example = self.example(split, index)
    reward = tldr_reward(example.prompt, completion)
    reference = tldr_reward(example.prompt, self.completion_of(example))
    return base.judgement_of(reward, reward > reference, completion)


def _post_in(query: base.Prompt) -> str:
  text = base.plain_text(query)
  match = _POST.search(text)
  return match[1] if match else text


def _post(rng: np.random.Generator) -> dict[str, str]:
  who, did, what, where = (str(rng.choice(words)) for words in FACTS.values())
  opening, subreddit, ending = (
      str(rng.choice(texts)) for texts in (_FILLERS, _SUBREDDITS, _ENDINGS)
  )
  post = f"{opening} {who} {did} the {what} at {where}. {ending}"
  return {"subreddit": subreddit, "title": f"my {what}", "post": post}


def _summary(post: str, rng: np.random.Generator) -> str:
  """Returns a person's summary: words, each with a space before it."""
  words = []
  for word in [w for w in _WORDS.findall(post) if w in _FACT_OF]:
    if rng.random() < _FILLER_SHARE:
      words.append(str(rng.choice(_FILLERS)))
    if rng.random() < _TOLD_SHARE:
      wrong = rng.random() < _WRONG_SHARE
      words.append(str(rng.choice(FACTS[_FACT_OF[word]])) if wrong else word)
      if rng.random() < _AGAIN_SHARE:
        words.append(word)
  return "".join(f" {word}" for word in words or [str(rng.choice(_FILLERS))])
