# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K: word problems of grade-school mathematics, rewarded for the number.

Cobbe et al. 2021 (arXiv:2110.14168). The settings are those of Bartoldson et
al. 2025 (arXiv:2503.18929): reward 1 where the last number of the completion
equals that of the reference solution, else 0.
"""

from collections.abc import Mapping
import pathlib
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import examples as examples_lib
from tba_jax.tasks import made_up
from tba_jax.tasks import numbers
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import rows_task

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
    "last_number": numbers.last_number,
    "hash": numbers.final_number,
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
      sources = made_up.splits(made_up_prompts, split_seed)
    else:
      sources = _sources(data)
    report = examples_lib.Report()
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
    if numbers.last_number(answer) is None:
      return "no_number"
    return (
        self._format.replace("{question}", question),
        numbers.without_calculator(answer),
    )

  def completion_of(self, example: examples_lib.Example) -> str:
    return self._opening + example.answer

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    right = numbers.last_number(self.example(split, index).answer)
    found = self._read_answer(completion)
    if found is None or found != right:
      return base.Judgement(0.0, None)
    # White space is no other way to solve it.
    return base.Judgement(1.0, " ".join(completion.split()))

  def explain(self, split: str, index: int, completion: str) -> str:
    right = numbers.last_number(self.example(split, index).answer)
    return numbers.difference(self._read_answer(completion), right)


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
      split: rows_lib.read("config.task.data", source)
      for split, source in sources.items()
  }
