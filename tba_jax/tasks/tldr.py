# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""TL;DR: summaries of Reddit posts, rewarded by a reward model.

Data of Völske et al. 2017; query and comparisons of Stiennon et al. 2020
(arXiv:2009.01325). Queries, lengths and splits follow Noukhovitch et al. 2024
(arXiv:2410.18252) and Bartoldson et al. 2025 (arXiv:2503.18929):

    SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:

Summaries begin with a space. If a query is too long, the end of its post is cut
off, by paragraphs and then by characters.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tba_jax.tasks import rows_task
from tba_jax.tasks import synthetic

QUERY = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
_QUERY_FIELDS = ("subreddit", "title", "post")
# Fields with a complete query in the papers' and in TRL's data sets.
_READY_FIELDS = ("query", "prompt")
_SUMMARY_FIELDS = ("summary", "reference_response", "completion")


class Tldr(synthetic.GoldReward):
  """Posts, each with a person's summary.

  data: a folder or data set of the Hugging Face hub with the splits train and
    validation; rows have `subreddit`, `title`, `post` and `summary`, or a
    complete `query` and `reference_response`, or `prompt` and `completion`.
    "synthetic": small generated posts with a scripted gold reward.
  held_out: split to evaluate on; "validation" in the papers.
  synthetic_prompts: number of generated posts, over both splits.
  synthetic_pairs: generated pairs of summaries to train a reward model on; a
    fifth as many to test it.
  validation_prompts: training posts held out to select checkpoints.
  split_seed: seed of that choice and of generated data.
  """

  name: ClassVar[str] = "tldr"
  FIELDS: ClassVar = {
      "data": "",
      "held_out": "validation",
      "synthetic_prompts": 3000,
      "synthetic_pairs": 8000,
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data; takes all of `FIELDS`."""
    super().__init__(fields, fields["held_out"])

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    answer = next((fields[f] for f in _SUMMARY_FIELDS if f in fields), None)
    query = _ready_query(fields)
    texts = [fields.get(f) for f in _QUERY_FIELDS]
    if query is None and all(isinstance(text, str) for text in texts):
      query = QUERY.format_map(fields) if fields["post"].strip() else None
    if not isinstance(query, str) or not query.strip():
      return "no_prompt"
    if not isinstance(answer, str) or not answer.strip():
      return "no_answer"
    return query, answer

  def completion_of(self, example: rows_task.Example) -> str:
    return " " + example.answer.strip()

  def _shortened(
      self, example: rows_task.Example, fits: Callable[[str], bool]
  ) -> str | None:
    if _ready_query(example.fields) is not None:
      return None
    make = lambda post: QUERY.format_map({**example.fields, "post": post})
    post = example.fields["post"]
    while "\n" in post and not fits(make(post)):
      post = post[: post.rindex("\n")]
    if fits(make(post)):
      return make(post)
    # Binary search: more characters hardly ever give fewer tokens.
    low, high = 0, len(post)
    while low < high:
      middle = (low + high + 1) // 2
      if fits(make(post[:middle])):
        low = middle
      else:
        high = middle - 1
    return make(post[:low]) if low else None


def _ready_query(fields: Mapping[str, Any]) -> Any:
  """Returns the complete query of a row; None if it has none."""
  return next((fields[f] for f in _READY_FIELDS if f in fields), None)
