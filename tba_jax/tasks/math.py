# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""MATH: competition problems, rewarded for the answer in the last \boxed.

Hendrycks et al. 2021 (arXiv:2103.03874); tested on MATH-500, 500 of its test
problems chosen by Lightman et al. 2023 (arXiv:2305.20050). As for TBA' in
Bartoldson et al. 2025 (arXiv:2503.18929), the reward is 1 for a correct answer,
else 0.

An answer is correct if `math_answers.equal` returns true. It may call sympy,
which may never return, so the task needs `reward.backend="pool"`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import math_answers
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task
from tba_jax.tasks import synthetic

_ASK = "Please reason step by step, and put your final answer within \\boxed{}."
FORMATS = {
    # The chat template of Qwen2.5's base models, written out.
    "qwen": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{{problem}}\n{_ASK}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "plain": f"Problem:\n{{problem}}\n{_ASK}\n\nSolution:\n",
    "bare": "{problem}\n",
}


class Math(rows_task.RowsTask):
  r"""Problems with worked solutions that box their answer.

  train, test: sources of the splits, as in docs/guides/your_data.md; rows have
    `problem` and `solution`; the answer is the field `answer`, or the contents
    of the solution's last \boxed. "synthetic" for both: small generated
    problems.
  synthetic_prompts: number of generated problems, over both splits.
  prompt_format: "qwen" (a chat), "plain", or "bare" (only the problem).
  validation_prompts: training problems held out to select checkpoints.
  split_seed: seed of that selection and of generated problems.
  """

  name: ClassVar[str] = "math"
  max_reward: ClassVar[float | None] = 1.0
  # Only the pool bounds the time of sympy.
  rewards_where: ClassVar[tuple[str, ...]] = ("pool",)
  packages: ClassVar[Mapping[str, str]] = {"math_verify": "math"}
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "synthetic_prompts": 4000,
      "prompt_format": "qwen",
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data; requires all of `FIELDS`."""
    base.check_choice("prompt_format", fields["prompt_format"], FORMATS)
    self._format = FORMATS[fields["prompt_format"]]
    train, test, seed = fields["train"], fields["test"], fields["split_seed"]
    base.check_integer(
        "synthetic_prompts", fields["synthetic_prompts"], 100, 5000
    )
    if train == test == synthetic.SYNTHETIC:
      sources = synthetic.math_splits(fields["synthetic_prompts"], seed)
    elif synthetic.SYNTHETIC in (train, test):
      raise ValueError(
          f"config.task.train={train!r}, config.task.test={test!r}: must be"
          f" {synthetic.SYNTHETIC!r} for both, or for neither"
      )
    else:
      sources = {
          base.TRAIN: rows.RowSource("config.task.train", train),
          base.HELD_OUT: rows.RowSource("config.task.test", test),
      }
    super().__init__(
        sources,
        validation_prompts=fields["validation_prompts"],
        split_seed=seed,
        overlap=fields["overlap"],
    )

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    return {"": ("problem", "solution")}

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    problem = rows.text_of(fields, "problem")
    solution = rows.text_of(fields, "solution")
    if problem is None:
      return "no_prompt"
    if solution is None:
      return "no_answer"
    answer = fields.get("answer")
    if answer is None:
      answer = answers.last_boxed(solution)
      if answer is None:
        return "no_box"
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
      answer = str(answer)
    if not isinstance(answer, str) or not math_answers.normalized(answer):
      return "no_answer"
    return self._format.replace("{problem}", problem), answer

  def completion_of(self, example: rows_task.Example) -> str:
    return example.fields["solution"]

  def prepare_judging(self) -> None:
    math_answers.prepare()

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    answer = answers.last_boxed(answers.after_thinking(completion))
    reference = self.example(split, index).answer
    is_right = answer is not None and math_answers.equal(reference, answer)
    return base.judgement_of(float(is_right), is_right, completion)

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns why an answer is wrong, from the texts; never calls sympy."""
    answer = answers.last_boxed(answers.after_thinking(completion))
    if answer is None:
      return "has no closed \\boxed{} with an answer in it"
    reference = self.example(split, index).answer
    if math_answers.equal_as_texts(reference, answer) is False:
      return f"boxes {answer[: math_answers.MAX_CHARS]}, not {reference}"
    return ""
