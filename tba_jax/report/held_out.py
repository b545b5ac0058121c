# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions of held-out prompts, of the first and the last checkpoint."""

from collections.abc import Mapping
from typing import Any

from tba_jax.report import load
from tba_jax.report import text

MAX_PROMPTS = 24
MAX_COMPLETIONS = 16


def _by_prompt(evaluation: Mapping[str, Any]) -> dict[str, list[dict]]:
  out: dict[str, list[dict]] = {}
  records = evaluation.get("samples")
  for record in records if isinstance(records, list) else []:
    if isinstance(record, dict) and "completion" in record:
      mine = out.setdefault(str(record.get("prompt", "")), [])
      if len(mine) < MAX_COMPLETIONS:
        mine.append(load.printable_sample(record))
  return out


def side_by_side(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows prompt, before, after for the prompts of either evaluation.

  Args:
    before, after: evaluations with `samples`, records as `samples.jsonl` has
      them; what else stands there is left out.
  """
  old, new = _by_prompt(before), _by_prompt(after)
  return [
      {
          "prompt": text.printable(prompt, load.MAX_PROMPT_CHARS),
          "before": old.get(prompt, []),
          "after": new.get(prompt, []),
      }
      for prompt in list(dict.fromkeys([*old, *new]))[:MAX_PROMPTS]
  ]
