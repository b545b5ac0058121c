# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""MATH: competition problems, rewarded for the answer in the last \boxed.

Hendrycks et al. 2021 (arXiv:2103.03874); tested on MATH-500, the 500 of its
test problems that Lightman et al. 2023 (arXiv:2305.20050) chose. The settings
are those of TBA' in Bartoldson et al. 2025 (arXiv:2503.18929): reward 1 where
the answer is right, else 0. Comparing may take for ever, so it needs
`reward.where="pool"`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import boxed
from tba_jax.tasks import examples as examples_lib
from tba_jax.tasks import made_up_math
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import rows_task

MADE_UP = "made_up"
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
OVERLAPS = ("error", "leave_out")


class Math(rows_task.RowsTask):
  r"""Problems with worked solutions whose answer is boxed.

  train, test: sources of the splits, as `tba_jax/tasks/rows.py` reads them, of
    rows with `problem` and `solution`; the answer is the field `answer`, or
    what the solution's last \boxed holds. "made_up" for both: small problems
    that code writes, for trials and tests without the data.
  made_up_prompts: how many of those, over both splits.
  prompt_format: "qwen" (a chat), "plain" or "bare", the problem alone.
  overlap: what to do with training problems that the test split has: "error",
    or "leave_out", which counts them.
  validation_prompts: training problems set apart to choose a checkpoint by.
  split_seed: of that choice, and of made-up problems.
  """

  name: ClassVar[str] = "math"
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "made_up_prompts": 4000,
      "prompt_format": "qwen",
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      train: str,
      test: str,
      made_up_prompts: int,
      prompt_format: str,
      overlap: str,
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
        ("overlap", overlap, OVERLAPS),
    ):
      if value not in allowed:
        raise ValueError(
            f"config.task.{field}={value!r}: allowed {sorted(allowed)}"
        )
    base.check_integer("made_up_prompts", made_up_prompts, 100, 5000)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._format = FORMATS[prompt_format]
    report = examples_lib.Report()
    splits = rows_task.read_splits(
        _sources(train, test, made_up_prompts, split_seed), self._make, report
    )
    if overlap == "leave_out":
      examples_lib.leave_out_shared(
          splits, base.TRAIN, test=base.HELD_OUT, report=report
      )
    rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns prompt and answer of a row, or what is wrong with it."""
    problem, solution = fields.get("problem"), fields.get("solution")
    if not isinstance(problem, str) or not problem.strip():
      return "no_prompt"
    if not isinstance(solution, str) or not solution.strip():
      return "no_answer"
    answer = fields.get("answer")
    if answer is None:
      answer = boxed.last_boxed(solution)
      if answer is None:
        return "no_box"
    if not isinstance(answer, str) or not boxed.normalized(answer):
      return "no_answer"
    return self._format.replace("{problem}", problem), answer

  def completion_of(self, example: examples_lib.Example) -> str:
    return example.fields["solution"]

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    found = boxed.last_boxed(completion)
    reference = self.example(split, index).answer
    if found is None or not boxed.equal(reference, found):
      return base.Judgement(0.0, None)
    # White space is no other way to solve it.
    return base.Judgement(1.0, " ".join(completion.split()))

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns why it is wrong where the texts say so; nothing is worked out."""
    found = boxed.last_boxed(completion)
    if found is None:
      return "has no closed \\boxed{} with an answer in it"
    reference = self.example(split, index).answer
    if boxed.equal_as_texts(reference, found) is False:
      return f"boxes {found[: boxed.MAX_CHARS]}, not {reference}"
    return ""


def _sources(
    train: str, test: str, made_up_prompts: int, split_seed: int
) -> Mapping[str, Iterable[examples_lib.Row]]:
  """Returns the rows of both splits."""
  if MADE_UP in (train, test):
    if train != test:
      raise ValueError(
          f"config.task.train={train!r}, config.task.test={test!r}: allowed"
          f" {MADE_UP!r} for both, or for neither"
      )
    return made_up_math.splits(made_up_prompts, split_seed)
  sources = {}
  for split, field, source in (
      (base.TRAIN, "train", train),
      (base.HELD_OUT, "test", test),
  ):
    sources[split] = rows_lib.read(f"config.task.{field}", source)
  return sources
