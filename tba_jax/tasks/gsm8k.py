# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K: grade-school word problems, rewarded for the correct final number.

Cobbe et al. 2021 (arXiv:2110.14168). As in Bartoldson et al. 2025
(arXiv:2503.18929), the reward is 1 if the completion's number equals the
reference solution's, else 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task
from tba_jax.tasks import synthetic

# Name -> (prompt, prefix of a solution). TBA's SFT model was trained with
# "sft", which has an underscore, and puts the last line break into the
# solution. TBA's code prompts it with "tba".
FORMATS = {
    "tba": ("[MATH TASK] Problem:\n{question}\n\nSolution:\n", ""),
    "sft": ("[MATH_TASK] Problem:\n{question}\n\nSolution:", "\n"),
    "plain": ("{question}\n", ""),
}
ANSWER_RULES = {
    "last_number": answers.last_number,
    "tba": answers.tba_last_number,
    "hash": answers.number_after_hashes,
    "answer": answers.final_answer,
}


class Gsm8k(rows_task.RowsTask):
  """Problems with worked solutions that end in `#### number`.

  data: "openai/gsm8k" on the Hugging Face hub, of which the subset "main" is
    read; a folder with train.jsonl and test.jsonl as published; or
    "synthetic": small generated problems in the same format.
  synthetic_prompts: number of generated problems, over all splits.
  prompt_format: "tba", "sft" or "plain".
  answer_rule: "answer", as a person would read it: after the last `####`, else
    in a box, else after "answer is", else the last number; "last_number", the
    last number in the completion; "tba", the last number as TBA's runs read it,
    dropping all commas and keeping every sign; "hash", the number after the
    last `####`.
  validation_prompts: training problems held out to select checkpoints.
  split_seed: seed of that selection and of generated problems.
  """

  name: ClassVar[str] = "gsm8k"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {
      "data": "",
      "synthetic_prompts": 4000,
      "prompt_format": "tba",
      "answer_rule": "answer",
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data; requires all of `FIELDS`."""
    base.check_choice("prompt_format", fields["prompt_format"], FORMATS)
    base.check_choice("answer_rule", fields["answer_rule"], ANSWER_RULES)
    self._format, self._opening = FORMATS[fields["prompt_format"]]
    self._read_answer = ANSWER_RULES[fields["answer_rule"]]
    data, seed = fields["data"], fields["split_seed"]
    num_prompts = fields["synthetic_prompts"]
    base.check_integer("synthetic_prompts", num_prompts, 100, 20_000)
    if data == synthetic.SYNTHETIC:
      sources = synthetic.gsm8k_splits(num_prompts, seed)
    else:
      # The hub's data set has two subsets, "main" and "socratic".
      sources = rows.folder_sources(data, preferred="main")
    super().__init__(
        sources,
        validation_prompts=fields["validation_prompts"],
        split_seed=seed,
        overlap=fields["overlap"],
    )

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    return {"": ("question", "answer")}

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    question = rows.text_of(fields, "question")
    answer = rows.text_of(fields, "answer")
    if question is None:
      return "no_prompt"
    if answer is None:
      return "no_answer"
    if answers.last_number(answer) is None:
      return "no_number"
    return (
        self._format.replace("{question}", question),
        answers.without_calculator(answer),
    )

  def completion_of(self, example: rows_task.Example) -> str:
    return self._opening + example.answer

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    right = answers.last_number(self.example(split, index).answer)
    answer = self._read_answer(answers.after_thinking(completion))
    is_right = answer == right
    return base.judgement_of(float(is_right), is_right, completion)

  def explain(self, split: str, index: int, completion: str) -> str:
    right = answers.last_number(self.example(split, index).answer)
    answer = self._read_answer(answers.after_thinking(completion))
    return answers.number_difference(answer, right)
