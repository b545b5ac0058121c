# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A custom task: data rows and reward functions, named in settings.

docs/guides/your_data.md builds one. A reward is a function of (prompt,
completion, row) that returns a number, or a dict with the number as "reward"
and metrics by name; or a function with TRL's signature (`reward_calls.py`). The
prompt is a text or messages, as in `tasks/base.py`; `row` has the fields of the
data row, and the reference as "answer". The task's reward is a weighted sum:

    "answer"                                one of `REWARDS`
    "my_rewards.py:polite"                  a function in a file
    "my_package.rewards:polite"             a function in a module
    "exact, my_rewards.py:short * 0.1"      several, weighted
    "judge"                                 the score of the model at
                                            `reward.url` (`url_judge.py`)

Functions in `REWARDS` read only the text after a completion's thoughts (see
`answers.after_thinking`); custom functions get the whole completion.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import subprocess
import tempfile
from typing import Any, ClassVar

from tba_jax.system import callables
from tba_jax.system import processes
from tba_jax.system import sandbox
from tba_jax.system import user_code
from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import reward_calls
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

RewardFn = Callable[[base.Prompt, str, Mapping[str, Any]], float]
# Function that returns why a completion is wrong; "" or None if unknown.
ReasonFn = Callable[[base.Prompt, str, Mapping[str, Any]], str | None]

ANSWER_KINDS = ("none", "text", "number")
_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class CustomTask(rows_task.RowsTask):
  """Prompts made from the fields of rows, rewarded by custom functions.

  train, test, validation: sources of the splits, as in
    docs/guides/your_data.md; `test` and `validation` may be "".
  held_out: training prompts to hold out at random if `test` is "": a share
    below 1, else a number; None = a tenth, at most 1,000; 0 = no evaluation.
  validation_prompts: training prompts to hold out if `validation` is "".
  prompt: template with field names in braces; or a JSON list of messages with
    such texts, `[{"role": "user", "content": "{question}"}]`; or a single field
    with a text or a list of messages. A final assistant message is not part of
    the prompt; it is the answer if the row has no other.
  completion: template with field names in braces, the target of supervised
    fine-tuning; "" = no fine-tuning on this data.
  answer: field with the reference answer.
  answer_kind: "text" or "number" to leave out rows without such an answer;
    "none" keeps them.
  rewards: weighted functions: `exact`, `answer` (the number that a person would
    read as the answer), `number` (the last number), `contains`,
    FILE.py:FUNCTION or MODULE:FUNCTION; `judge`, by the model at `reward.url`.
  verifier: command that prints a number, which becomes the part "verifier" of
    the reward; "" = none. Needs `reward.backend="pool"`.
  verifier_weight: weight of that part.
  correct_threshold: minimum reward of a correct completion.
  reason: "FILE.py:FUNCTION" or "MODULE:FUNCTION" of (prompt, completion, row)
    that returns why a completion is wrong, for displayed samples; "" = derived
    from the built-in rewards.
  tokenizer: vocabulary with `tokenizer.source="task"`: "characters", or
    "words" if all held-out words occur in training.
  split_seed: seed for choosing held-out and validation prompts.
  """

  name: ClassVar[str] = "custom"
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "validation": "",
      "held_out": None,
      "validation_prompts": 0,
      "overlap": "error",
      "prompt": "{prompt}",
      "completion": "{answer}",
      "answer": "answer",
      "answer_kind": "text",
      "rewards": "exact",
      "verifier": "",
      "verifier_weight": 1.0,
      "correct_threshold": 1.0,
      "reason": "",
      "tokenizer": "characters",
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data and imports the rewards; requires all of `FIELDS`."""
    base.check_choice("answer_kind", fields["answer_kind"], ANSWER_KINDS)
    base.check_choice("tokenizer", fields["tokenizer"], ("characters", "words"))
    for name in ("correct_threshold", "verifier_weight"):
      if not math.isfinite(fields[name]):
        raise ValueError(
            f"config.task.{name}={fields[name]!r}: must be a finite number"
        )
    self._fields = fields
    self._template = _parse_template(fields["prompt"])
    self._reason: ReasonFn | None = None
    if fields["reason"]:
      self._reason = user_code.load_function(
          "config.task.reason", fields["reason"]
      )
    parts = parse_rewards("config.task.rewards", fields["rewards"])
    if fields["verifier"]:
      if any(part.name == "verifier" for part in parts):
        raise ValueError(
            f"config.task.rewards={fields['rewards']!r}: must be other names"
            " than 'verifier' with a config.task.verifier"
        )
      command = make_command("config.task.verifier", fields["verifier"])
      weight = fields["verifier_weight"]
      parts.append(RewardPart("verifier", lambda: command, weight))
    if not parts:
      raise ValueError(
          f"config.task.rewards={fields['rewards']!r}: must be one or more"
          " rewards, or a config.task.verifier"
      )
    self._weights = {part.name: part.weight for part in parts}
    self._parts = [part for part in parts if part.load is not _of_judge]
    self._has_judge = len(self._parts) < len(parts)
    named = {base.TRAIN: "train"}
    if fields["test"]:
      named[base.HELD_OUT] = "test"
      if fields["held_out"] is not None:
        raise ValueError(
            f"config.task.held_out={fields['held_out']!r}: must be None with"
            f" config.task.test={fields['test']!r}, which has the held-out"
            " prompts"
        )
    if fields["validation"]:
      named[base.VALIDATION] = "validation"
    super().__init__(
        {
            split: rows.RowSource(f"config.task.{key}", fields[key])
            for split, key in named.items()
        },
        held_out=fields["held_out"],
        validation_prompts=0
        if fields["validation"]
        else fields["validation_prompts"],
        split_seed=fields["split_seed"],
        overlap=fields["overlap"],
    )

  def _make(self, fields: Mapping[str, Any]) -> tuple[base.Prompt, str] | str:
    prompt = _filled_prompt(self._template, fields)
    reply = None
    if not isinstance(prompt, str):
      if prompt and prompt[-1]["role"] == "assistant":
        *prompt, last = prompt
        reply = last["content"]
      if not prompt or prompt[-1]["role"] != "user":
        return "no_user"
    elif not prompt.strip():
      return "no_prompt"
    name, kind = self._fields["answer"], self._fields["answer_kind"]
    answer = reply or ""
    try:
      text = rows.as_text(name, rows.value_at(fields, name))
      answer = answer if text is None else text
    except rows.UnusableError as error:
      if kind != "none":
        raise rows.UnusableError(
            error.reason,
            f"{error}; config.task.answer={name!r} may name another, and with"
            " config.task.answer_kind='none' a reward reads the row alone",
        ) from error
    if kind == "none":
      return prompt, answer
    if not answer.strip() or self._target(fields, answer) is None:
      return "no_answer"
    if kind == "number" and answers.last_number(answer) is None:
      return "no_number"
    return prompt, answer

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    template = base.plain_text(self._template)
    named = {"prompt": _FIELD.findall(template)}
    if self._fields["answer_kind"] != "none":
      named["answer"] = [self._fields["answer"]]
      named["completion"] = _FIELD.findall(self._fields["completion"])
    return named

  @property
  def tokenizer_pattern(self) -> str:
    is_words = self._fields["tokenizer"] == "words"
    return self.WORDS if is_words else self.CHARACTERS

  def completion_of(self, example: rows_task.Example) -> str:
    return self._target(example.fields, example.answer) or ""

  def _target(self, fields: Mapping[str, Any], answer: str) -> str | None:
    """Returns the text to fine-tune on; None if a field is missing."""
    if answer:
      fields = {**fields, self._fields["answer"]: answer}
    return _filled(self._fields["completion"], fields)

  @property
  def part_weights(self) -> Mapping[str, float]:
    return self._weights

  @property
  def has_judge(self) -> bool:
    return self._has_judge

  @property
  def judges_groups(self) -> bool:
    return any(reward_calls.takes_group(part.function) for part in self._parts)

  def prepare_judging(self) -> None:
    for part in self._parts:
      part.function  # pylint: disable=pointless-statement

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    (judged,) = self.judge_group(split, index, [completion])
    if isinstance(judged, base.RewardError):
      raise judged
    return judged

  def judge_group(
      self,
      split: str,
      index: int,
      completions: Sequence[str],
      completion_ids: Sequence[Sequence[int]] = (),
  ) -> list[base.Judgement | base.RewardError]:
    example = self.example(split, index)
    values = [
        part.values(example, completions, completion_ids)
        for part in self._parts
    ]
    values_of = zip(*values) if values else [()] * len(completions)
    return list(map(self._judgement, values_of, completions))

  def _judgement(
      self,
      values: Sequence[Mapping[str, float] | base.RewardError],
      completion: str,
  ) -> base.Judgement | base.RewardError:
    parts: dict[str, float] = {}
    for of_part in values:
      if isinstance(of_part, base.RewardError):
        return of_part
      if twice := parts.keys() & of_part.keys():
        return base.RewardError(
            "error", f"two rewards name a metric {min(twice)!r}"
        )
      parts |= of_part
    if not self._has_judge and not parts.keys() & self._weights.keys():
      return base.RewardError("nan", "every reward returned None")
    return self.judgement_of_parts(parts, completion)

  def judgement_of_parts(
      self, parts: Mapping[str, float], completion: str
  ) -> base.Judgement:
    """Returns the judgement whose reward is the weighted sum of `parts`."""
    weights = {n: w for n, w in self._weights.items() if n in parts}
    reward = sum(weight * parts[name] for name, weight in weights.items())
    judged = base.judgement_of(
        reward, reward >= self._fields["correct_threshold"], completion
    )
    return dataclasses.replace(judged, parts=parts)

  def fill_in(
      self, template: str, split: str, index: int, completion: str
  ) -> str:
    """Returns a judge's question: fields in braces replaced by their values.

    Fields are `prompt`, `completion` without its thoughts, `answer` and those
    of the row. Raises RewardError for a missing field.
    """
    example = self.example(split, index)
    fields = {
        **example.fields,
        "answer": example.answer or None,
        "prompt": base.plain_text(example.prompt),
        "completion": answers.after_thinking(completion),
    }
    try:
      text = _filled(template, fields)
    except rows.UnusableError as error:
      raise base.RewardError("error", f"row {example.place}: {error}") from None
    if text is None:
      names = [name for name in _FIELD.findall(template)
               if rows.value_at(fields, name) is None]  # fmt: skip
      raise base.RewardError(
          "error", f"row {example.place}: has no field {names[0]!r}"
      )
    return text

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns the result of `reason`, or else of the built-in rewards."""
    example = self.example(split, index)
    row = _row_of(example)
    if self._reason is not None:
      return str(self._reason(example.prompt, completion, row) or "")
    reasons = (
        _REASONS[part.name](completion, row["answer"])
        for part in self._parts
        if part.function is REWARDS.get(part.name)
        and not part.function(example.prompt, completion, row)
    )
    return "; ".join(filter(None, reasons))


def _parse_template(text: str) -> base.Prompt:
  """Returns `config.task.prompt` as a text or as a list of messages."""
  if not rows.MESSAGES.match(text):
    return text
  try:
    messages = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(
        f"config.task.prompt={text!r}: must be a text, or a JSON list of"
        f" messages; {error}"
    ) from error
  if not base.are_messages(messages):
    raise ValueError(
        f"config.task.prompt={text!r}: must be messages with role, one of"
        f" {list(base.ROLES)}, and content, a text"
    )
  return messages


def prompt_of(template: str, fields: Mapping[str, Any]) -> base.Prompt:
  """Returns the prompt for a row's fields; "" if a field is missing.

  Args:
    template: `config.task.prompt`.
    fields: values of the row by name.

  Raises:
    rows.UnusableError: a field has neither a text nor messages.
  """
  return _filled_prompt(_parse_template(template), fields)


def _filled_prompt(
    template: base.Prompt, fields: Mapping[str, Any]
) -> base.Prompt:
  """Fills in a prompt's fields; returns "" if a field is missing."""
  if isinstance(template, str):
    field = _FIELD.fullmatch(template)
    if field:
      value = rows.value_at(fields, field[1])
      messages = rows.messages_of(field[1], value)
      if messages is not None:
        return messages
    return _filled(template, fields) or ""
  contents = [_filled(m["content"], fields) for m in template]
  if None in contents:
    return ""
  return [
      {**message, "content": content}
      for message, content in zip(template, contents)
  ]


def _filled(template: str, fields: Mapping[str, Any]) -> str | None:
  """Fills in a template's fields; returns None if a field is missing."""
  texts = {
      name: rows.as_text(name, rows.value_at(fields, name))
      for name in _FIELD.findall(template)
  }
  if None in texts.values():
    return None
  return _FIELD.sub(lambda match: texts[match[1]], template)


def _row_of(example: rows_task.Example) -> dict[str, Any]:
  return {**example.fields, "answer": example.answer}


@dataclasses.dataclass(frozen=True)
class RewardPart:
  """A weighted reward; `name` names its metric, `load` returns its function."""

  name: str
  load: Callable[[], Callable[..., Any]]
  weight: float

  @functools.cached_property
  def function(self) -> Callable[..., Any]:
    return self.load()

  def values(
      self,
      example: rows_task.Example,
      completions: Sequence[str],
      completion_ids: Sequence[Sequence[int]] = (),
  ) -> list[dict[str, float] | base.RewardError]:
    """Returns each completion's reward, as `name`, and metrics, or an error.

    There is no reward for a completion that the function does not judge. The
    error of a function that raised, or returned no finite number, names the
    row.
    """
    returned = reward_calls.call(
        self.function,
        example.prompt,
        completions,
        _row_of(example),
        example.fields,
        completion_ids,
    )
    return [self._checked(value, example.place) for value in returned]

  def _checked(
      self, value: Any, row: str
  ) -> dict[str, float] | base.RewardError:
    error = value
    if not isinstance(value, base.RewardError):
      place = user_code.place_of_function(self.function) or self.name
      what = f"{place}: {self.name}"
      if not isinstance(value, Mapping):
        value = {"reward": value}
      metrics = {name: x for name, x in value.items() if name != "reward"}
      reward = value.get("reward")
      try:
        out = base.metrics_of(metrics, what)
        if reward is None and reward_calls.has_trl_signature(self.function):
          return out
        return {self.name: base.number(reward, what), **out}
      except base.RewardError as raised:
        error = raised
    return base.RewardError(error.cause, f"row {row}: {error}")


def exact(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if completion and answer agree up to outer white space."""
  del prompt
  answer = answers.after_thinking(completion).strip()
  return float(answer == str(row["answer"]).strip())


def answer(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if `answers.final_answer` reads the same number in both."""
  del prompt
  right = answers.final_answer(str(row["answer"]))
  return float(right is not None and answers.final_answer(completion) == right)


def number(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if the last numbers of completion and answer are equal."""
  del prompt
  right = answers.last_number(str(row["answer"]))
  last_number = answers.last_number(answers.after_thinking(completion))
  return float(right is not None and last_number == right)


def contains(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if the completion contains the answer."""
  del prompt
  right = str(row["answer"]).strip()
  return float(bool(right) and right in answers.after_thinking(completion))


REWARDS: Mapping[str, RewardFn] = {
    "exact": exact,
    "answer": answer,
    "number": number,
    "contains": contains,
}
# Name of a reward -> function from (completion, answer) to why it is wrong.
_REASONS: Mapping[str, Callable[[str, str], str]] = {
    "exact": lambda answer_text, right: f'wanted "{right.strip()}"',
    "answer": lambda answer_text, right: answers.number_difference(
        answers.final_answer(answer_text), answers.final_answer(right)
    ),
    "number": lambda answer_text, right: answers.number_difference(
        answers.last_number(answers.after_thinking(answer_text)),
        answers.last_number(right),
    ),
    "contains": lambda answer_text, right: f'is without "{right.strip()}"',
}


def parse_rewards(key: str, text: str) -> list[RewardPart]:
  """Returns the weighted rewards that a setting lists (see the module).

  Raises ValueError if a reward is unknown, cannot be imported or has no finite
  weight, or if a name occurs twice.
  """
  parts = []
  for item in filter(None, (i.strip() for i in text.split(","))):
    what, star, weight = (i.strip() for i in item.partition("*"))
    try:
      value = float(weight) if star else 1.0
    except ValueError:
      value = math.nan
    if not math.isfinite(value):
      raise ValueError(f"{key}={item!r}: must be a finite number as weight")
    load = (
        _of_judge if what == base.JUDGE else functools.partial(_load, key, what)
    )
    part = RewardPart(what.rpartition(":")[2], load, value)
    # A program that does not judge, such as `export`, may lack functions that
    # another process lends.
    if load is not _of_judge and not callables.is_lent(what):
      part.function  # pylint: disable=pointless-statement
    parts.append(part)
  names = [part.name for part in parts]
  if len(set(names)) < len(names):
    raise ValueError(f"{key}={text!r}: must be rewards with different names")
  return parts


def _load(key: str, text: str) -> Callable[..., Any]:
  return REWARDS.get(text) or user_code.load_function(
      key, text, ", ".join((*REWARDS, base.JUDGE))
  )


def _of_judge() -> RewardFn:
  raise NotImplementedError("config.reward.url gives this reward")


def make_command(key: str, command: str) -> RewardFn:
  """Returns a reward that runs a command for each completion.

  The command reads a JSON object with `prompt`, `completion` and `row` from
  standard input, and prints a number on its last line. It runs in a temporary
  directory and in the environment of the pool's worker, which limits everything
  else.

  Raises ValueError if the command is empty or cannot be split into words.
  """
  try:
    words = shlex.split(command)
  except ValueError as error:
    raise ValueError(f"{key}={command!r}: {error}") from error
  if not words:
    raise ValueError(f"{key}={command!r}: must be a command")
  # Relative paths are relative to the folder in which the run starts.
  words = [os.path.abspath(w) if os.path.isfile(w) else w for w in words]

  def verify(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    question = {"prompt": prompt, "completion": completion, "row": row}
    # Values that JSON cannot represent, such as bytes and images, become null.
    return _run(words, json.dumps(question, default=lambda value: None))

  return verify


def _run(words: Sequence[str], text: str) -> float:
  # The command may leave files that cannot be removed.
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    try:
      with subprocess.Popen(
          words,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
          cwd=folder,
          env=sandbox.environment(folder, [*os.environ]),
          preexec_fn=processes.die_with_parent,
      ) as process:
        # Its child processes cannot open its output through /proc.
        os.fchmod(process.stdout.fileno(), 0)
        output, errors = process.communicate(text)
    except OSError as error:
      raise base.RewardError("exit", f"{words[0]}: {error}") from error
  if process.returncode:
    raise base.RewardError(
        "exit", f"{words[0]} ended with {process.returncode}: {errors[-200:]}"
    )
  lines = [line for line in output.split("\n") if line.strip()]
  last = lines[-1] if lines else ""
  try:
    return float(last)
  except ValueError as error:
    raise base.RewardError("nan", f"{words[0]} wrote {last[:80]!r}") from error
