# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TL;DR: summaries of Reddit posts, rewarded by a reward model.

Völske et al. 2017 made the data, Stiennon et al. 2020 (arXiv:2009.01325) the
query and the comparisons. Queries, lengths and splits are those of Noukhovitch
et al. 2024 (arXiv:2410.18252) and Bartoldson et al. 2025 (arXiv:2503.18929):

    SUBREDDIT: r/{subreddit}\\n\\nTITLE: {title}\\n\\nPOST: {post}\\n\\nTL;DR:

A summary begins with a space. A query that is too long loses the end of its
post: paragraph by paragraph, and single characters where it has only one.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task
from tba_jax.tasks import tldr_made_up

MADE_UP = "made_up"
QUERY = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
_QUERY_FIELDS = ("subreddit", "title", "post")
# Of rows that have the query ready: those of the papers' sets, and trl's.
_READY_FIELDS = ("query", "prompt")
_SUMMARY_FIELDS = ("summary", "reference_response", "completion")


class Tldr(rows_task.RowsTask):
  """Posts with a person's summary.

  data: a folder with train.jsonl and validation.jsonl, each row with
    `subreddit`, `title`, `post` and `summary`, or with a ready `query` and
    `reference_response`, or `prompt` and `completion`; a folder of Hugging Face
    `datasets` with these splits; or "made_up": small posts that code writes,
    with a scripted gold reward.
  held_out: name of the split that is evaluated on: the papers' "validation".
  made_up_prompts: how many of those posts, over both splits.
  made_up_pairs: pairs of summaries made of them, for a reward model to learn
    from; a fifth as many to measure it.
  validation_prompts: training posts set apart to choose a checkpoint by.
  split_seed: of that choice, and of what is made up.
  """

  name: ClassVar[str] = "tldr"
  FIELDS: ClassVar = {
      "data": "",
      "held_out": "validation",
      "made_up_prompts": 3000,
      "made_up_pairs": 8000,
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      data: str,
      held_out: str,
      made_up_prompts: int,
      made_up_pairs: int,
      validation_prompts: int,
      split_seed: int,
  ):
    """Reads the data.

    Raises:
      ValueError: a field is not allowed, the data is not there, a split is
        empty, or training and held-out posts overlap.
    """
    base.check_integer("made_up_prompts", made_up_prompts, 20, 8000)
    base.check_integer("made_up_pairs", made_up_pairs, 5, 1_000_000)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._made_up = data == MADE_UP
    self._pairs, self._seed = made_up_pairs, split_seed
    if self._made_up:
      sources = tldr_made_up.splits(made_up_prompts, split_seed)
    else:
      sources = _sources(data, held_out)
    report = rows.Report()
    splits = rows_task.read_splits(sources, _make, report)
    rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def completion_of(self, example: rows.Example) -> str:
    return " " + example.answer.strip()

  def shortened(
      self, split: str, index: int, fits: Callable[[str], bool]
  ) -> str | None:
    """Returns the query with less of its post; None for a ready query."""
    fields = self.example(split, index).fields
    if _ready(fields) is not None:
      return None
    make = lambda post: QUERY.format_map({**fields, "post": post})
    post = fields["post"]
    while "\n" in post and not fits(make(post)):
      post = post[: post.rindex("\n")]
    if fits(make(post)):
      return make(post)
    # As many characters as fit: more of them are hardly ever fewer tokens.
    low, high = 0, len(post)
    while low < high:
      middle = (low + high + 1) // 2
      low, high = (middle, high) if fits(make(post[:middle])) else (
          low, middle - 1)  # fmt: skip
    return make(post[:low]) if low else None

  @property
  def has_reward(self) -> bool:
    return self._made_up

  def pairs(self, split: str) -> Sequence[tuple[str, str, str]]:
    if not self._made_up:
      return super().pairs(split)
    queries = [e.prompt for e in self._splits[split]]
    held_out = split == base.HELD_OUT
    return tldr_made_up.pairs(
        queries,
        self._pairs // 5 if held_out else self._pairs,
        self._seed * 2 + held_out,
    )

  def reward_of(self, prompt: str, completion: str) -> float:
    if not self._made_up:
      return super().reward_of(prompt, completion)
    return tldr_made_up.gold(prompt, completion)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    """Returns the scripted reward; right is what beats the reference."""
    if not self._made_up:
      raise base.RewardError(
          "no_reward",
          "the task has no reward of its own: config.reward.where='model'",
      )
    example = self.example(split, index)
    reward = tldr_made_up.gold(example.prompt, completion)
    reference = tldr_made_up.gold(example.prompt, self.completion_of(example))
    is_right = reward > reference
    key = " ".join(completion.split()) if is_right else None
    return base.Judgement(reward, key)


def _make(fields: Mapping[str, Any]) -> tuple[str, str] | str:
  """Returns query and summary of a row, or what is wrong with it."""
  answer = next((fields[f] for f in _SUMMARY_FIELDS if f in fields), None)
  query = _ready(fields)
  texts = [fields.get(f) for f in _QUERY_FIELDS]
  if query is None and all(isinstance(text, str) for text in texts):
    query = QUERY.format_map(fields) if fields["post"].strip() else None
  if not isinstance(query, str) or not query.strip():
    return "no_prompt"
  if not isinstance(answer, str) or not answer.strip():
    return "no_answer"
  return query, answer


def _ready(fields: Mapping[str, Any]) -> Any:
  """Returns the query that a row has ready, None where it has none."""
  return next((fields[f] for f in _READY_FIELDS if f in fields), None)


def _sources(data: str, held_out: str) -> dict[str, Any]:
  """Returns the rows of both splits of a folder."""
  folder = pathlib.Path(data).expanduser()
  if not data or not folder.is_dir():
    raise ValueError(
        f"config.task.data={data!r}: allowed a folder with train.jsonl and"
        f" {held_out}.jsonl, one of Hugging Face `datasets`, or {MADE_UP!r}"
    )
  lines = (folder / "train.jsonl").is_file()
  return {
      split: rows.read_rows(
          "config.task.data",
          str(folder / f"{name}.jsonl") if lines else f"{folder}[{name}]",
      )
      for split, name in ((base.TRAIN, "train"), (base.HELD_OUT, held_out))
  }
