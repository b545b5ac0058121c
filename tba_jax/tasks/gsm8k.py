# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K: word problems of grade-school mathematics, rewarded for the number.

Cobbe et al. 2021 (arXiv:2110.14168). The settings are those of Bartoldson et
al. 2025 (arXiv:2503.18929): reward 1 where the last number of the completion
equals that of the reference solution, else 0.
"""

from collections.abc import Iterator, Mapping
import pathlib
from typing import Any, ClassVar

import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import digits
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import rows_task

# Small word problems in the format of GSM8K, written by code.
#
# They are no part of GSM8K and say nothing of a model's mathematics: two steps
# of
# mental arithmetic in a handful of phrases, for trials and tests of the
# pipeline
# where neither data nor a pretrained model is at hand.
#
# {"question": "Ann has 4 pens. Ann buys 5, then loses 3. How many pens?",
# "answer": "4+5=<<4+5=9>>9\n9-3=<<9-3=6>>6\n#### 6"}
#
# Half of the solutions are the answer alone. A small model that learned from
# both
# kinds guesses as often as it works a problem out; a reward for right answers
# teaches it to write the steps.


_NAMES = ("Ann", "Ben", "Eva", "Tom")
_THINGS = ("pens", "nuts", "eggs", "keys")
_PHRASES = {
    "+": ("buys {}", "finds {}"),
    "-": ("loses {}", "sells {}"),
    "*": ("gets {} times as many",),
}
_HELD_OUT_SHARE = 0.2


def made_up_splits(
    num_prompts: int, seed: int
) -> dict[str, list[rows_lib.Row]]:
  """Returns rows of the train and held-out split, no question twice.

  Args:
    num_prompts: over both splits.
    seed: of the problems.
  """
  cut = round(num_prompts * _HELD_OUT_SHARE)
  rows = list(_problems(num_prompts, seed))
  return {base.TRAIN: rows[cut:], base.HELD_OUT: rows[:cut]}


def _problems(num_prompts: int, seed: int) -> Iterator[rows_lib.Row]:
  rng = np.random.default_rng([seed, 0x6A8])
  seen: set[str] = set()
  while len(seen) < num_prompts:
    made = _problem(rng)
    if made is not None and made["question"] not in seen:
      seen.add(made["question"])
      yield rows_lib.Row(f"made up:{len(seen)}", made)


def _problem(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where a value is not of one digit."""
  steps = digits.chain(rng)
  if steps is None:
    return None
  name, thing = digits.pick(rng, _NAMES), digits.pick(rng, _THINGS)
  lines, told = [], []
  for value, operation, number, result in steps:
    step = f"{value}{operation}{number}"
    lines.append(f"{step}=<<{step}={result}>>{result}")
    told.append(digits.pick(rng, _PHRASES[operation]).format(number))
  first, value = steps[0][0], steps[-1][-1]
  if rng.random() < digits.TERSE_SHARE:
    lines = []
  return {
      "question": (
          f"{name} has {first} {thing}. {name} {told[0]}, then {told[1]}. How"
          f" many {thing}?"
      ),
      "answer": "\n".join([*lines, f"#### {value}"]),
  }


MADE_UP = "made_up"
# The SFT model that TBA starts from was trained with the underscore and without
# the last line end, which was part of the answer; TBA's own code has neither.
FORMATS = {
    "tba": "[MATH TASK] Problem:\n{question}\n\nSolution:\n",
    "sft": "[MATH_TASK] Problem:\n{question}\n\nSolution:",
    "plain": "{question}\n",
}
# What stands before a solution, as its format wants it.
_OPENINGS = {"tba": "", "sft": "\n", "plain": ""}
ANSWER_RULES = {
    "last_number": answers.last_number,
    "hash": answers.final_number,
}


class Gsm8k(rows_task.RowsTask):
  """Problems with worked solutions that end in `#### number`.

  data: a folder with train.jsonl and test.jsonl as published, one that
    `tba_jax/tasks/gsm8k_data.py` prepared, or "made_up": small problems in the
    same format that code writes, for trials and tests without the data.
  made_up_prompts: how many of those, over all splits.
  prompt_format: "tba", "sft" or "plain".
  answer_rule: "last_number" takes the last number of the completion; "hash"
    wants it after `####`.
  validation_prompts: training problems set apart to choose a checkpoint by.
  split_seed: of that choice, and of made-up problems.
  """

  name: ClassVar[str] = "gsm8k"
  FIELDS: ClassVar = {
      "data": "",
      "made_up_prompts": 4000,
      "prompt_format": "tba",
      "answer_rule": "last_number",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      data: str,
      made_up_prompts: int,
      prompt_format: str,
      answer_rule: str,
      validation_prompts: int,
      split_seed: int,
  ):
    """Reads the data.

    Raises:
      ValueError: a field is not allowed, the data is not there, a split is
        empty, or training and test problems overlap.
    """
    for field, value, allowed in (
        ("prompt_format", prompt_format, FORMATS),
        ("answer_rule", answer_rule, ANSWER_RULES),
    ):
      if value not in allowed:
        raise ValueError(
            f"config.task.{field}={value!r}: allowed {sorted(allowed)}"
        )
    base.check_integer("made_up_prompts", made_up_prompts, 100, 1_000_000)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._format = FORMATS[prompt_format]
    self._opening = _OPENINGS[prompt_format]
    self._read_answer = ANSWER_RULES[answer_rule]
    if data == MADE_UP:
      sources = made_up_splits(made_up_prompts, split_seed)
    else:
      sources = _sources(data)
    report = rows_lib.Report()
    splits = rows_task.read_splits(sources, self._make, report)
    rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns prompt and solution of a row, or what is wrong with it."""
    question, answer = fields.get("question"), fields.get("answer")
    if not isinstance(question, str) or not question.strip():
      return "no_prompt"
    if not isinstance(answer, str) or not answer.strip():
      return "no_answer"
    if answers.last_number(answer) is None:
      return "no_number"
    return (
        self._format.replace("{question}", question),
        answers.without_calculator(answer),
    )

  def completion_of(self, example: rows_lib.Example) -> str:
    return self._opening + example.answer

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    right = answers.last_number(self.example(split, index).answer)
    found = self._read_answer(completion)
    if found is None or found != right:
      return base.Judgement(0.0, None)
    # White space is no other way to solve it.
    return base.Judgement(1.0, " ".join(completion.split()))

  def explain(self, split: str, index: int, completion: str) -> str:
    right = answers.last_number(self.example(split, index).answer)
    return answers.number_difference(self._read_answer(completion), right)


def _sources(data: str) -> dict[str, Any]:
  """Returns the rows of both splits of a folder."""
  folder = pathlib.Path(data).expanduser()
  prepared = (folder / "features.json").is_file()
  sources = {
      split: f"{folder}[{name}]" if prepared else str(folder / f"{name}.jsonl")
      for split, name in ((base.TRAIN, "train"), (base.HELD_OUT, "test"))
  }
  if not data or not folder.is_dir():
    raise ValueError(
        f"config.task.data={data!r}: allowed a folder with train.jsonl and"
        " test.jsonl of GSM8K, one that `python -m tba_jax.tasks.gsm8k_data`"
        f" prepared, or {MADE_UP!r}"
    )
  return {
      split: rows_lib.read_rows("config.task.data", source)
      for split, source in sources.items()
  }
