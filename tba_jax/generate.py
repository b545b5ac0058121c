# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `generate` program: completions for the prompts of a file.

    python -m tba_jax.main --program=generate --config=configs/generate.py \\
        --config.generate.model=FOLDER --config.generate.input=prompts.jsonl \\
        --config.generate.output=completions.jsonl

The input has a `{"prompt": "…"}` a line; the output a `{"line", "prompt",
"completions": [{"text", "token_ids", "logprobs", "finish_reason"}]}`. The same
command goes on where an earlier one was ended, and ends with the same bytes.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import ml_collections
import numpy as np

from tba_jax import line_program
from tba_jax import model_source
from tba_jax import processes
from tba_jax import prompts
from tba_jax import types
from tba_jax.sampling import decode
from tba_jax.sampling import requests

# What changes how fast the answers come, not what they are.
_SPEED = ("num_rows", "chunk_steps")


@dataclasses.dataclass(frozen=True)
class _Asked:
  """A prompt of the input: what the output repeats, and what is sampled."""

  prompt: str
  request: requests.Request


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  processes.enable_compilation_cache()
  return line_program.finish(lambda: generate(config, operands))


def generate(
    config: ml_collections.ConfigDict, operands: Sequence[str] = ()
) -> line_program.Counts:
  """Samples completions of all prompts that the output does not have yet.

  Args:
    config: reads `generate`, `sampling`, `tokenizer.bos` and `seed`.
    operands: none is known.

  Raises:
    ValueError: a wrong setting, model or output file.
    OSError: a file cannot be read or written.
  """
  if operands:
    raise ValueError(f"operands {' '.join(operands)}: generate takes none")
  source = model_source.of_config(config)
  sampler = _make_sampler(config, source, config.generate.batch_lines)
  return line_program.run(
      config.generate.input,
      config.generate.output,
      settings(config, source),
      prepare=lambda line: _ask(config, source, line.number, line.record),
      answer=lambda asked: _answer(config, source, sampler, asked),
      batch_lines=config.generate.batch_lines,
  )


def complete(
    config: ml_collections.ConfigDict,
    inputs: Sequence[str | Mapping[str, Any]],
) -> list[line_program.Record]:
  """Returns completions of prompts, as the program writes them, without files.

  Blocks until all are sampled.

  Args:
    config: as `generate` takes it; `generate.input` and `generate.output` play
      no part.
    inputs: a prompt each, or a record as the program's input has it.

  Returns:
    A record `prompt`, `completions` for each input, as the program's for a
    file with these lines.

  Raises:
    ValueError: a wrong setting, model or input.
  """
  if not inputs:
    return []
  source = model_source.of_config(config)
  asked = []
  for number, one in enumerate(inputs, start=1):
    record = {"prompt": one} if isinstance(one, str) else one
    try:
      asked.append(_ask(config, source, number, record))
    except ValueError as error:
      raise ValueError(f"input {number}: {error}") from error
  sampler = _make_sampler(config, source, len(asked))
  return _answer(config, source, sampler, asked)


def _ask(
    config: ml_collections.ConfigDict,
    source: model_source.Source,
    number: int,
    record: Mapping[str, Any],
) -> _Asked:
  """Returns what a record of the input asks for; ValueError for a bad one."""
  ids = prompts.tokens(
      record,
      source.tokenizer,
      chat=config.generate.chat,
      vocab_size=source.model.config.vocab_size,
      max_tokens=config.sampling.max_prompt_tokens,
  )
  seed, max_tokens = record.get("seed"), record.get("max_tokens")
  if seed is not None:
    prompts.whole_number("seed", seed, 0, requests.UINT32 - 1)
  if max_tokens is not None:
    limit = config.sampling.max_completion_tokens
    prompts.whole_number("max_tokens", max_tokens, 1, limit)
  request = requests.Request(
      np.asarray(ids, np.int32),
      # With a seed of its own a prompt may stand in any line.
      prompt_id=number if seed is None else 0,
      visit=0,
      num_completions=config.generate.num_completions,
      seed=seed,
      max_tokens=max_tokens,
  )
  prompt = record.get("prompt")
  if prompt is None:
    prompt = source.tokenizer.decode(ids)
  return _Asked(prompt, request)


def _answer(
    config: ml_collections.ConfigDict,
    source: model_source.Source,
    sampler: decode.Sampler,
    asked: list[_Asked],
) -> list[line_program.Record]:
  """Returns the records of what was asked, in its order."""
  found = sampler.sample(source.params, [a.request for a in asked], version=0)
  plain = config.generate.plain_logprobs
  return [
      {
          "prompt": a.prompt,
          "completions": [
              _record(source, completions, sample, plain=plain)
              for sample in range(len(completions.lengths))
          ],
      }
      for a, completions in zip(asked, found, strict=True)
  ]


def settings(
    config: ml_collections.ConfigDict, source: model_source.Source
) -> dict[str, object]:
  """Returns what the output depends on, beside its input."""
  sampling = config.sampling.to_dict()
  return {
      **model_source.settings(config, source),
      "config.seed": config.seed,
      "config.tokenizer.bos": config.tokenizer.bos,
      **{
          f"config.generate.{name}": config.generate[name]
          for name in ("num_completions", "chat", "plain_logprobs")
      },
      **{
          f"config.sampling.{name}": value
          for name, value in sampling.items()
          if name not in _SPEED
      },
  }


def _make_sampler(
    config: ml_collections.ConfigDict,
    source: model_source.Source,
    num_lines: int,
) -> decode.Sampler:
  """Returns the sampler, with rows for so many lines at most."""
  sampling = config.sampling
  in_batch = num_lines * config.generate.num_completions
  return decode.Sampler(
      source.model,
      temperature=sampling.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
      stop_ids=source.tokenizer.stop_ids,
      stop_strings=source.tokenizer.stop_strings,
      text_fn=source.tokenizer.decode,
      max_prompt_tokens=sampling.max_prompt_tokens,
      max_completion_tokens=sampling.max_completion_tokens,
      num_rows=min(sampling.num_rows, in_batch),
      chunk_steps=sampling.chunk_steps,
      prompt_buckets=sampling.prompt_buckets,
      eos_id=source.tokenizer.eos_id,
      pad_id=source.tokenizer.pad_id,
      seed=config.seed,
  )


def _record(
    source: model_source.Source,
    completions: types.Completions,
    sample: int,
    *,
    plain: bool,
) -> line_program.Record:
  """Returns one completion of a prompt as the output has it."""
  length = int(completions.lengths[sample])
  tokens_T = completions.tokens[sample, :length]
  logprobs = lambda array: line_program.float_list(array[sample, :length])
  record = {
      "text": source.tokenizer.decode_completion(
          tokens_T, length, bool(completions.stopped[sample])
      ),
      "token_ids": tokens_T.tolist(),
      "logprobs": logprobs(completions.logprobs),
      "finish_reason": str(completions.finish_reasons[sample]),
  }
  if plain:
    record["plain_logprobs"] = logprobs(completions.plain_logprobs)
  return record
