# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small posts in the format of TL;DR, written by code, with a scripted gold.

They are no part of the Reddit data and say nothing of a model's summaries: four
facts in a few words, for trials and tests of the pipeline where neither data
nor a pretrained model is at hand.

    {"subreddit": "pets", "title": "my key", "summary": " Ann lost key",
     "post": "so Ann lost the key at school. it was a long day."}

The gold reward of a summary: of each of the four facts (who, what happened, to
which thing, where) 1 the first time it is told; -1 for telling it again and for
a wrong word of its kind; -1/2 for any other word; in all divided by four, so
that the best summary has 1. People write most facts, some filler, now and then
a wrong word, and hardly ever the same fact twice: of that a reward model learns
little, and a policy that follows one too far tells facts again and again.
"""

from collections.abc import Iterator, Mapping
import re

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import rows as rows_lib

KINDS: Mapping[str, tuple[str, ...]] = {
    "who": ("Ann", "Ben", "Eva", "Tom", "Kim", "Max"),
    "did": ("lost", "found", "sold", "broke", "hid", "drew"),
    "what": ("key", "pen", "cup", "hat", "map", "toy"),
    "where": ("school", "home", "work", "camp", "church", "town"),
}
_FILLERS = ("so", "well", "basically", "honestly")
_SUBREDDITS = ("pets", "family", "jobs")
_ENDINGS = ("it was a long day.", "what should we do?", "thanks for reading.")
_KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
_POST = re.compile(r"POST: (.*)", re.S)
_WORDS = re.compile(r"[A-Za-z]+|[^\sA-Za-z]")
# Of a person who writes a summary.
_TOLD_SHARE = 0.75
_WRONG_SHARE = 0.1
_FILLER_SHARE = 0.25
_AGAIN_SHARE = 0.04
# Of a person who compares two: prefers the longer one.
_LONGER_SHARE = 0.7
_HELD_OUT_SHARE = 0.2
_STREAM = 0x71D


def splits(num_prompts: int, seed: int) -> dict[str, list[rows_lib.Row]]:
  """Returns rows of the train and held-out split, no post twice.

  Args:
    num_prompts: over both splits.
    seed: of posts and summaries.
  """
  cut = round(num_prompts * _HELD_OUT_SHARE)
  rng = np.random.default_rng([seed, _STREAM])
  rows = []
  for number, fields in enumerate(_posts(num_prompts, rng), 1):
    fields["summary"] = _summary(fields["post"], rng)
    rows.append(rows_lib.Row(f"made up:{number}", fields))
  return {base.TRAIN: rows[cut:], base.HELD_OUT: rows[:cut]}


def pairs(
    posts: list[str], num_pairs: int, seed: int
) -> list[tuple[str, str, str]]:
  """Returns (query, chosen, rejected): two summaries, labelled by a person.

  Args:
    posts: queries, as the policy sees them.
    num_pairs: of them all, drawn with replacement.
    seed: of summaries and labels.
  """
  rng = np.random.default_rng([seed, _STREAM, 1])
  out = []
  while len(out) < num_pairs:
    query = str(rng.choice(posts))
    first, second = (_summary(_post_of(query), rng) for _ in range(2))
    if first != second:
      longer_is_first = len(first) >= len(second)
      keeps = longer_is_first == (rng.random() < _LONGER_SHARE)
      out.append((query, *((first, second) if keeps else (second, first))))
  return out


def gold(query: str, summary: str) -> float:
  """Returns the scripted reward of a summary; see the module.

  Args:
    query: with the post, as the policy sees it.
    summary: any text.
  """
  facts = _facts(_post_of(query))
  told, total = set(), 0.0
  for word in _WORDS.findall(summary):
    kind = _KIND_OF.get(word)
    if kind is None:
      total -= 0.5
    elif word == facts.get(kind) and kind not in told:
      told.add(kind)
      total += 1.0
    else:
      total -= 1.0
  return total / len(KINDS)


def _post_of(query: str) -> str:
  found = _POST.search(query)
  return found[1] if found else query


def _facts(post: str) -> dict[str, str]:
  """Returns the word of each kind that a post has."""
  return {
      _KIND_OF[word]: word for word in _WORDS.findall(post) if word in _KIND_OF
  }


def _posts(
    num_posts: int, rng: np.random.Generator
) -> Iterator[dict[str, str]]:
  seen: set[str] = set()
  while len(seen) < num_posts:
    who, did, what, where = (str(rng.choice(words)) for words in KINDS.values())
    opening, subreddit, ending = (
        str(rng.choice(texts)) for texts in (_FILLERS, _SUBREDDITS, _ENDINGS)
    )
    post = f"{opening} {who} {did} the {what} at {where}. {ending}"
    if post not in seen:
      seen.add(post)
      yield {"subreddit": subreddit, "title": f"my {what}", "post": post}


def _summary(post: str, rng: np.random.Generator) -> str:
  """Returns what a person writes: words with a space before each."""
  words = []
  for kind, word in sorted(
      _facts(post).items(), key=lambda item: list(KINDS).index(item[0])
  ):
    if rng.random() < _FILLER_SHARE:
      words.append(str(rng.choice(_FILLERS)))
    if rng.random() < _TOLD_SHARE:
      wrong = rng.random() < _WRONG_SHARE
      words.append(str(rng.choice(KINDS[kind])) if wrong else word)
      if rng.random() < _AGAIN_SHARE:
        words.append(word)
  return "".join(f" {word}" for word in words or [str(rng.choice(_FILLERS))])
