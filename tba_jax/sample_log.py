# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `samples.jsonl`: completions as text, and why one is wrong."""

import pathlib
from typing import Any

from tba_jax import jsonl
from tba_jax.replay import draw as draw_lib
from tba_jax.rewards import judges
from tba_jax.tasks import base


class SampleLog:
  """Writes some completions of a draw."""

  def __init__(
      self,
      path: pathlib.Path,
      *,
      num_samples: int,
      tokenizer: Any,
      judge: judges.Judge,
  ):
    """Opens the file for appending.

    Args:
      path: the file.
      num_samples: completions of a draw, at most two of a prompt.
      tokenizer: shows completions as text.
      judge: says why a completion is wrong.
    """
    self._lines = jsonl.LineWriter(path)
    self._num_samples = num_samples
    self._tokenizer = tokenizer
    self._judge = judge

  def write(self, step: int, draw: draw_lib.Draw) -> None:
    """Writes the first completions of what a step learned from."""
    samples = self._samples(step, draw)
    reasons = self._judge.explain(
        [
            judges.Request(base.TRAIN, s["prompt_id"], s["completion"])
            for s in samples
        ]
    )
    for sample, reason in zip(samples, reasons, strict=True):
      self._lines.write({**sample, "reason": reason})

  def close(self) -> None:
    self._lines.close()

  def _samples(self, step: int, draw: draw_lib.Draw) -> list[dict[str, Any]]:
    num_prompts, num_completions = draw.rewards.shape
    per_prompt = min(2, num_completions)
    out = []
    for i in range(min(self._num_samples, num_prompts * per_prompt)):
      b, k = divmod(i, per_prompt)
      length = int(draw.completion_lengths[b, k])
      tokens = draw.completion_tokens[b, k, :length].tolist()
      prompt = draw.prompt_tokens[b][draw.prompt_mask[b] > 0].tolist()
      out.append(
          {
              "step": step,
              "prompt_id": int(draw.prompt_ids[b]),
              "prompt": self._tokenizer.decode(prompt),
              "completion": self._tokenizer.decode_completion(
                  tokens, length, bool(draw.stopped[b, k])
              ),
              "reward": float(draw.rewards[b, k]),
              "version": int(draw.versions[b, k]),
              "tokens": self._tokenizer.tokens(tokens),
              "logprobs": draw.behavior_logprobs[b, k, :length],
          }
      )
    return out
