# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Held-out completions before and after, prompt by prompt."""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.report import load
from tba_jax.report import text

MAX_PROMPTS = 24
MAX_COMPLETIONS = 32


def _completions(
    record: Mapping[str, Any],
) -> Iterator[tuple[str, float | None]]:
  """Yields (text, reward) of an evaluation's example record."""
  many = record.get("completions")
  if not isinstance(many, list):
    many = [record] if "completion" in record else []
  rewards = record.get("rewards")
  for i, one in enumerate(many):
    reward = None
    if isinstance(one, dict):
      reward = one.get("reward")
      one = one.get("completion", one.get("text", ""))
    elif isinstance(rewards, list) and i < len(rewards):
      reward = rewards[i]
    yield str(one), reward if load.is_number(reward) else None


def _by_prompt(evaluation: Mapping[str, Any]) -> dict[str, list[dict]]:
  """Returns prompt -> distinct completions with reward and count."""
  out: dict[str, dict[str, dict[str, Any]]] = {}
  records = evaluation.get("samples")
  for record in records if isinstance(records, list) else []:
    if not isinstance(record, dict):
      continue
    prompt = str(record.get("prompt", ""))
    seen = out.setdefault(prompt, {})
    for completion, reward in _completions(record):
      entry = seen.setdefault(
          completion,
          {
              "text": text.printable(completion, 300, one_line=True),
              "reward": reward,
              "count": 0,
          },
      )
      entry["count"] += 1
  order = lambda e: (-(e["reward"] or 0.0), -e["count"])
  return {
      prompt: sorted(seen.values(), key=order)[:MAX_COMPLETIONS]
      for prompt, seen in out.items()
  }


def diversity(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows prompt, before, after for the prompts of both evaluations.

  Args:
    before, after: evaluations with `samples`: records with `prompt` and either
      `completion` and `reward`, or `completions` and `rewards`.
  """
  old, new = _by_prompt(before), _by_prompt(after)
  # Prompts seen on both sides first: there the two can be compared.
  prompts = [p for p in old if p in new]
  prompts += [p for p in (*old, *new) if not (p in old and p in new)]
  return [
      {
          "prompt": text.printable(prompt, 300, one_line=True),
          "before": old.get(prompt, []),
          "after": new.get(prompt, []),
      }
      for prompt in prompts[:MAX_PROMPTS]
  ]
