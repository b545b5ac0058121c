# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of tasks over rows of data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import re
from typing import Any, ClassVar

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import rows

OVERLAPS = ("error", "leave_out", "keep")
# Default share and maximum number of held-out prompts without a test split:
# more would add little precision and make evaluations slower.
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 1000


@dataclasses.dataclass(frozen=True)
class Example:
  """A usable row.

  index: position in its split before long prompts are dropped.
  place: file and line of the row.
  prompt: text that the policy sees, or messages, see `tasks/base.py`.
  answer: reference answer; "" if the task has none.
  fields: values of the row, as read.
  """

  index: int
  place: str
  prompt: base.Prompt
  answer: str
  fields: Mapping[str, Any]


class RowsTask(base.Task):
  """Prompts and reference answers from rows of data.

  Splits are "train", optionally "held_out" (the test split, or a part taken
  from "train") and optionally "validation". Subclasses make prompts from rows
  (`_make`) and give rewards.

  overlap: rule for training prompts that are also in another split, and for
    pairs of a reward model that are in both splits: "error"; "leave_out", which
    drops and counts them; or "keep", for rows with the same prompt that are
    different problems because their rewards differ (pairs are still dropped).
  """

  # Words with the preceding space, and single digits, so that a small model can
  # learn arithmetic.
  WORDS: ClassVar[str] = r" ?[A-Za-z]+|[0-9]|#+|[^0-9A-Za-z#]"
  CHARACTERS: ClassVar[str] = r"[\s\S]"
  MAX_WORDS: ClassVar[int] = 20_000

  reads_data: ClassVar[bool] = True

  def __init__(
      self,
      sources: Mapping[str, Iterable[rows.Row]],
      *,
      held_out: float | None = 0,
      validation_prompts: int = 0,
      split_seed: int = 0,
      overlap: str = "error",
  ):
    """Reads the rows.

    Args:
      held_out: training prompts to move to "held_out" if `sources` lacks that
        split: a share below 1, else a number; None means `HELD_OUT_SHARE`, but
        at most `MOST_HELD_OUT`.
      validation_prompts: training prompts to move to "validation".
      split_seed: seed for choosing these prompts.
      overlap: rule for training prompts that are also in another split, one of
        `OVERLAPS`.

    Raises:
      ValueError: a setting is invalid, a source cannot be read or has no usable
        row, or splits share prompts against `overlap`.
    """
    _check_held_out(held_out)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_choice("overlap", overlap, OVERLAPS)
    self.report = rows.DataReport()
    self._splits: dict[str, list[Example]] = {}
    # For each split, what is wrong with the first row that has a detailed
    # reason.
    self._wrong: dict[str, str] = {}
    field_names: set[str] = set()
    for split, source in sources.items():
      self._splits[split] = self._read(split, source, field_names)
      if not self._splits[split]:
        raise ValueError(self._why_empty(split, source, field_names))
    if overlap != "keep":
      self._check_overlap(sources, overlap)
    if base.HELD_OUT not in sources and held_out != 0:
      self._cut_held_out(held_out, split_seed, overlap)
    if validation_prompts:
      self._cut_validation(validation_prompts, split_seed, overlap)

  def _make(self, fields: Mapping[str, Any]) -> tuple[base.Prompt, str] | str:
    """Returns a row's (prompt, answer), or a key of `rows.REASONS`.

    Raises `rows.UnusableError` for an unusable row with a detailed reason.
    """
    raise NotImplementedError

  def _what_differs(self, fields: Mapping[str, Any]) -> Any:
    """Returns what distinguishes rows with the same prompt and answer."""
    return fields

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    """Returns the row fields that each setting mentions; "" is the task."""
    return {}

  def completion_of(self, example: Example) -> str:
    """Returns an example's target for supervised fine-tuning."""
    return example.answer

  def _shortened(
      self, example: Example, fits: Callable[[base.Prompt], bool]
  ) -> base.Prompt | None:
    """Returns a shorter prompt that fits; None if the task has none."""
    del example, fits
    return None

  def _read(
      self, split: str, source: Iterable[rows.Row], field_names: set[str]
  ) -> list[Example]:
    """Returns the usable rows of a split; reports the others.

    Rows with equal prompts count separately, because solutions or tests may
    differ; rows that are equal in all fields count once.
    """
    seen: set[bytes] = set()
    examples: list[Example] = []
    num_rows = 0
    for row in source:
      num_rows += 1
      field_names.update(row.fields or ())
      try:
        made = "malformed" if row.fields is None else self._make(row.fields)
      except rows.UnusableError as error:
        made = error.reason
        self._wrong.setdefault(split, f"{row.place}: {error}")
      if not isinstance(made, str):
        digest = _digest([*made, self._what_differs(row.fields)])
        if digest in seen:
          made = "duplicate"
        seen.add(digest)
      if isinstance(made, str):
        self.report.leave_out(split, made, row.place)
        continue
      examples.append(Example(len(examples), row.place, *made, row.fields))
    self.report.read[split], self.report.used[split] = num_rows, len(examples)
    if split in self._wrong:
      self.report.warnings.append(f"warning: {self._wrong[split]}")
    return examples

  def _why_empty(
      self, split: str, source: Iterable[rows.Row], field_names: set[str]
  ) -> str:
    """Returns the error message for a split without a usable row."""
    if split in self._wrong:
      return f"{source}: no row can be used; {self._wrong[split]}"
    for setting, names in self._used_fields().items():
      missing = [
          name
          for name in names
          if not {name, name.partition(".")[0]} & field_names
      ]
      if missing and field_names:
        mentions = f"config.task.{setting}: " if setting else ""
        hint = "; set it to one of them in braces, or to a text with several"
        return (
            f"{mentions}no row of {source} has the field {missing[0]!r}; its"
            f" fields are {sorted(field_names)}" + hint * (setting == "prompt")
        )
    if not self.report.read[split]:
      return f"{source}: has no rows"
    why = "; ".join(self.report.lines())
    fields = f"fields {sorted(field_names)}"
    if not field_names:
      fields = "must be JSON objects, one a line (.jsonl), or a Parquet file"
    return f"{source}: no row can be used, {why}; {fields}"

  def _check_overlap(
      self, sources: Mapping[str, Iterable[rows.Row]], overlap: str
  ) -> None:
    """Finds prompts that are in two splits, ignoring case and white space."""
    for split, other, name in (
        (base.VALIDATION, base.HELD_OUT, "test"),
        (base.TRAIN, base.HELD_OUT, "test"),
        # The validation split chooses the best checkpoint.
        (base.TRAIN, base.VALIDATION, "validation"),
    ):
      places = {_folded(e): e.place for e in self._splits.get(other, ())}
      examples = self._splits.get(split, ())
      shared = [e for e in examples if _folded(e) in places]
      if not shared:
        continue
      if overlap == "error" or split != base.TRAIN:
        pairs = [
            f"{e.place} = {places[_folded(e)]}"
            for e in shared[: rows.MAX_PLACES]
        ]
        raise ValueError(
            f"config.task: {len(shared)} prompts of the split {split!r} are in"
            f" the {name} split too: {', '.join(pairs)}; must share none, or"
            " config.task.overlap='leave_out' to drop them from 'train', or"
            " 'keep' if rows of one prompt are different problems"
        )
      for example in shared:
        self.report.leave_out(split, f"in_{name}", example.place)
      self._keep(split, [e for e in examples if _folded(e) not in places])
      if not self._splits[split]:
        raise ValueError(
            f"{sources[split]}: every prompt is in the {name} split too"
        )

  def _cut_held_out(
      self, held_out: float | None, seed: int, overlap: str
  ) -> None:
    """Moves a share or a number of training prompts to "held_out"."""
    total = len(self._by_prompt(overlap))
    share = HELD_OUT_SHARE if held_out is None else held_out
    count = max(1, round(share * total)) if share < 1 else int(share)
    if held_out is None:
      count = min(count, MOST_HELD_OUT)
    setting = "None" if held_out is None else f"{held_out:g}"
    if count >= total:
      if total == 1 and self._used_fields().get("prompt") == []:
        raise ValueError(
            "config.task.prompt: must name a field in braces, as in"
            " {question}; without one all rows have the same prompt, and"
            " config.task.held_out leaves none to train on"
        )
      raise ValueError(
          f"config.task.held_out={setting}: must leave a prompt to train on,"
          f" and takes {count} of the {total} in config.task.train"
          f" ({'; '.join(self.report.lines())}); give more rows, or"
          " config.task.held_out=0, which trains without evaluation"
      )
    self._cut(base.HELD_OUT, count, [seed, 0x7E5], "in_test", overlap)
    self.report.taken[base.HELD_OUT] = (
        f"taken at random from the {total} of config.task.train"
        f" (config.task.held_out={setting}, split_seed={seed})"
    )

  def _cut_validation(self, num_prompts: int, seed: int, overlap: str) -> None:
    """Moves training prompts to "validation"."""
    total = len(self._by_prompt(overlap))
    if num_prompts >= total:
      raise ValueError(
          f"config.task.validation_prompts={num_prompts}: must be at most"
          f" {total - 1}, less than the training prompts"
      )
    self._cut(
        base.VALIDATION, num_prompts, [seed, 0x7A1], "in_validation", overlap
    )

  def _by_prompt(self, overlap: str) -> list[list[Example]]:
    """Returns training examples grouped by prompt, or by row with "keep"."""
    key = id if overlap == "keep" else _folded
    prompts: dict[Any, list[Example]] = {}
    for example in self._splits[base.TRAIN]:
      prompts.setdefault(key(example), []).append(example)
    return [*prompts.values()]

  def _cut(
      self,
      split: str,
      num_prompts: int,
      seed: Sequence[int],
      reason: str,
      overlap: str,
  ) -> None:
    """Moves prompts to a split, keeping only one row of each."""
    prompts = self._by_prompt(overlap)
    order = np.random.default_rng(seed).permutation(len(prompts))
    chosen = set(order[:num_prompts].tolist())
    of_chosen = [examples for i, examples in enumerate(prompts) if i in chosen]
    for _, *duplicates in of_chosen:
      for example in duplicates:
        self.report.leave_out(base.TRAIN, reason, example.place)
    used = {id(example) for examples in of_chosen for example in examples}
    training = self._splits[base.TRAIN]
    self._keep(split, [examples[0] for examples in of_chosen])
    self._keep(base.TRAIN, [e for e in training if id(e) not in used])

  def _keep(self, split: str, examples: list[Example]) -> None:
    """Sets and renumbers the examples of a split."""
    self._splits[split] = [
        dataclasses.replace(e, index=i) for i, e in enumerate(examples)
    ]
    self.report.used[split] = len(examples)

  def drop_long(
      self, tokenizer: Any, max_prompt_tokens: int, max_answer_tokens: int = 0
  ) -> None:
    fits = lambda it: len(tokenizer.encode_prompt(it)) <= max_prompt_tokens
    num_untrained = 0
    for split, examples in self._splits.items():
      fitting = []
      for example in examples:
        reason = ""
        if not fits(example.prompt):
          shorter = self._shortened(example, fits)
          if shorter is None:
            reason = "too_long"
          else:
            example = dataclasses.replace(example, prompt=shorter)
        if not reason and max_answer_tokens and split == base.TRAIN:
          answered = tokenizer.encode_answered(
              example.prompt, self.completion_of(example)
          )
          if answered is None:
            reason = "rerendered"
          elif len(answered.completion) > max_answer_tokens + 1:
            reason = "answer_too_long"
          else:
            num_untrained += answered.num_untrained
        if reason:
          self.report.leave_out(split, reason, example.place)
        else:
          fitting.append(example)
      self._splits[split] = fitting
      self.report.used[split] = len(fitting)
      if not fitting:
        raise ValueError(
            f"config.sampling.max_prompt_tokens={max_prompt_tokens}: every"
            f" prompt of the split {split!r} is longer, or its answer is"
        )
    if num_untrained:
      self.report.warnings.append(
          f"warning: {num_untrained} of the assistant's earlier turns are not"
          " fine-tuned on: the chat template writes them otherwise once more"
          " turns follow"
      )

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._splits)

  def example(self, split: str, index: int) -> Example:
    """Returns the example that a prompt was made from."""
    base.check_split(split)
    return self._splits[split][index]

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._splits.get(split, ()))

  def source_index(self, split: str, index: int) -> int:
    return self.example(split, index).index

  def prompt(self, split: str, index: int) -> base.Prompt:
    return self.example(split, index).prompt

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    return self.judge(split, index, completion).key

  def reward(self, split: str, index: int, completion: str) -> float:
    return self.judge(split, index, completion).reward

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns the row's answer; `rng` is not used."""
    return self.completion_of(self.example(split, index))

  @functools.cached_property
  def _vocabulary(self) -> tuple[list[str], int, int]:
    """Sorted words of all rows; longest prompt and completion, in words."""
    pattern = re.compile(self.tokenizer_pattern)
    words = {split: set() for split in self._splits}
    longest = [0, 0]
    for split, examples in self._splits.items():
      for example in examples:
        texts = _own_words(example.prompt), self.completion_of(example)
        for i, text in enumerate(texts):
          these = pattern.findall(text)
          words[split].update(these)
          longest[i] = max(longest[i], len(these))
    every = set.union(*words.values())
    return sorted(every | set("0123456789")), *longest

  def tokenizer_words(self) -> Sequence[str]:
    words = self._vocabulary[0]
    if len(words) > self.MAX_WORDS:
      raise ValueError(
          f"config.tokenizer.source='task': the texts have {len(words)} words,"
          f" must be at most {self.MAX_WORDS}; name a folder with a tokenizer"
      )
    return words

  def warn_of_unseen_words(self) -> None:
    """Adds a warning about held-out texts with tokens unseen in training.

    The embedding of such a token is never trained.
    """
    pattern = re.compile(self.tokenizer_pattern)
    texts = lambda e: f"{_own_words(e.prompt)}\n{self.completion_of(e)}"
    tokens = lambda e: set(pattern.findall(texts(e)))
    trained = set().union(*map(tokens, self._splits[base.TRAIN]))
    held_out = self._splits.get(base.HELD_OUT, ())
    unseen = [tokens(e) - trained - {"\n"} for e in held_out]
    count = sum(map(bool, unseen))
    if count:
      some = sorted(set().union(*unseen))[: rows.MAX_PLACES]
      self.report.warnings.append(
          f"warning: {count} of {len(held_out)} held-out rows have tokens that"
          f" no training row has, such as {some}: the model cannot learn them."
          " Use characters (config.task.tokenizer='characters') or a"
          " pretrained tokenizer"
      )

  @property
  def tokenizer_pattern(self) -> str:
    return self.WORDS

  @property
  def max_prompt_tokens(self) -> int:
    return self._vocabulary[1]

  @property
  def max_completion_tokens(self) -> int:
    return self._vocabulary[2] + 1  # and the stop token


def _check_held_out(value: float | None) -> None:
  """Raises ValueError unless the value is None, a share or a whole number."""
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if (
      value is None
      or is_number
      and (0 <= value < 1 or 1 <= value < 2**31 and value == int(value))
  ):
    return
  raise ValueError(
      f"config.task.held_out={value!r}: must be a share from 0 to below 1, or a"
      " whole number of prompts; None takes a tenth"
  )


def _folded(example: Example) -> str:
  """Returns a prompt's text without case and white space."""
  return " ".join(base.plain_text(example.prompt).casefold().split())


def _digest(values: Any) -> bytes:
  text = json.dumps(values, sort_keys=True, default=repr)
  return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _own_words(prompt: base.Prompt) -> str:
  """Returns a prompt in words that the task's tokenizer has."""
  if not isinstance(prompt, str):
    raise ValueError(
        "config.tokenizer.source='task': prompts of messages need a chat"
        " template, which a task's own words have not; must be a folder whose"
        " tokenizer has one, there or as init"
    )
  return prompt
