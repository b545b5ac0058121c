# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own task: rows of data and rewards, by settings alone.

`docs/your_task.md` builds one in a short file.
"""

from collections.abc import Mapping
import re
from typing import Any, ClassVar

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import reward_functions
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

ANSWER_KINDS = ("none", "text", "number")
_FIELD = re.compile(r"\{(\w+)\}")


class Own(rows_task.RowsTask):
  """Prompts made of the fields of rows, rewarded by the user's functions.

  train, test, validation: sources of the splits, as `tba_jax/tasks/rows.py`
    reads them; `validation` may be "".
  validation_prompts: training prompts to set apart where `validation` is "".
  prompt: the prompt's text, with the names of fields in braces.
  completion: the same, what supervised fine-tuning learns to write; "" = no
    fine-tuning on this data.
  answer: field with the reference answer.
  answer_kind: "text" and "number" leave out rows without one, "none" does not.
  rewards: weighted functions, as `tba_jax/tasks/reward_functions.py` reads
    them.
  verifier: command whose number is a further part of the reward, "verifier";
    "" = none. It needs `reward.where="pool"`.
  verifier_weight: of that part.
  right_from: the reward from which on a completion counts as right.
  reason: "FILE.py:FUNCTION" or "MODULE:FUNCTION" of (prompt, completion, row),
    which says why a completion is wrong, for the samples that are shown; "" =
    what the built-in rewards know.
  split_seed: of the choice of validation prompts.
  """

  name: ClassVar[str] = "own"
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "validation": "",
      "validation_prompts": 0,
      "prompt": "{prompt}",
      "completion": "{answer}",
      "answer": "answer",
      "answer_kind": "text",
      "rewards": "exact",
      "verifier": "",
      "verifier_weight": 1.0,
      "right_from": 1.0,
      "reason": "",
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      train: str,
      test: str,
      validation: str,
      validation_prompts: int,
      prompt: str,
      completion: str,
      answer: str,
      answer_kind: str,
      rewards: str,
      verifier: str,
      verifier_weight: float,
      right_from: float,
      reason: str,
      split_seed: int,
  ):
    """Reads the data and imports the rewards.

    Raises:
      ValueError: a field is not allowed, a source or reward is not there, or a
        split is empty or overlaps the test split.
    """
    if answer_kind not in ANSWER_KINDS:
      raise ValueError(
          f"config.task.answer_kind={answer_kind!r}: allowed {ANSWER_KINDS}"
      )
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._prompt, self._completion = prompt, completion
    self._answer, self._answer_kind = answer, answer_kind
    self._right_from = right_from
    self._reason = reward_functions.parse_reason("config.task.reason", reason)
    self._parts = reward_functions.parse("config.task.rewards", rewards)
    if verifier:
      command = reward_functions.make_command("config.task.verifier", verifier)
      self._parts.append(
          reward_functions.Part("verifier", command, verifier_weight)
      )
    if not self._parts:
      raise ValueError(
          f"config.task.rewards={rewards!r}: allowed one or more rewards, or a"
          " config.task.verifier"
      )
    sources = {base.TRAIN: train, base.HELD_OUT: test}
    if validation:
      sources[base.VALIDATION] = validation
    report = rows.Report()
    self._seen: set[str] = set()
    splits = rows_task.read_splits(
        {
            split: rows.read_rows(_KEYS[split], source)
            for split, source in sources.items()
        },
        self._make,
        report,
    )
    self._check_fields()
    if not validation:
      rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns prompt and answer of a row, or what is wrong with it."""
    self._seen.update(fields)
    prompt = _filled(self._prompt, fields)
    if prompt is None or not prompt.strip():
      return "no_prompt"
    value = fields.get(self._answer)
    answer = "" if value is None else str(value)
    if self._answer_kind != "none" and not answer.strip():
      return "no_answer"
    if self._answer_kind == "number" and answers.last_number(answer) is None:
      return "no_number"
    if (
        self._answer_kind != "none"
        and _filled(self._completion, fields) is None
    ):
      return "no_answer"
    return prompt, answer

  def _check_fields(self) -> None:
    """Raises ValueError for a name in the settings that no row has."""
    named = [("prompt", self._prompt, _FIELD.findall(self._prompt))]
    if self._answer_kind != "none":
      named += [
          ("answer", self._answer, [self._answer]),
          ("completion", self._completion, _FIELD.findall(self._completion)),
      ]
    for setting, value, names in named:
      missing = [name for name in names if name not in self._seen]
      if missing and self._seen:
        raise ValueError(
            f"config.task.{setting}={value!r}: no row has the field"
            f" {missing[0]!r}; allowed are those of the rows,"
            f" {sorted(self._seen)}"
        )

  def completion_of(self, example: rows.Example) -> str:
    return _filled(self._completion, example.fields) or ""

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    example = self.example(split, index)
    row = _row(example)
    parts = {
        part.name: float(part.function(example.prompt, completion, row))
        for part in self._parts
    }
    reward = sum(part.weight * parts[part.name] for part in self._parts)
    is_right = reward >= self._right_from
    return base.Judgement(
        reward, " ".join(completion.split()) if is_right else None, parts
    )

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns what `reason` says, else what the built-in rewards miss."""
    example = self.example(split, index)
    row = _row(example)
    if self._reason is not None:
      return str(self._reason(example.prompt, completion, row) or "")
    known = reward_functions.REASONS
    found = (
        known[part.function](example.prompt, completion, row)
        for part in self._parts
        if part.function in known
    )
    return "; ".join(filter(None, found))


_KEYS = {
    base.TRAIN: "config.task.train",
    base.HELD_OUT: "config.task.test",
    base.VALIDATION: "config.task.validation",
}


def _row(example: rows.Example) -> dict[str, Any]:
  """Returns what a reward sees of a row: its fields, and the answer."""
  return {**example.fields, reward_functions.ANSWER: example.answer}


def _filled(template: str, fields: Mapping[str, Any]) -> str | None:
  """Returns a text with the fields put in, None where one is missing."""
  names = _FIELD.findall(template)
  if any(fields.get(name) is None for name in names):
    return None
  return _FIELD.sub(lambda match: str(fields[match[1]]), template)
