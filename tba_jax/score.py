# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `score` program: log-probs of completions that a file gives.

    python -m tba_jax.main --program=score --config=configs/generate.py \\
        --config.generate.model=FOLDER --config.generate.input=pairs.jsonl \\
        --config.generate.output=scores.jsonl

The input has a `{"prompt": "…", "completion": "…"}` a line; the output a
`{"line", "token_ids", "logprobs", "logprob"}`, in nats, of the logits divided
by `sampling.temperature`. The same command goes on where it was ended.
"""

from collections.abc import Sequence
import functools

import jax
import ml_collections
import numpy as np

from tba_jax import forward
from tba_jax import line_program
from tba_jax import model_source
from tba_jax import processes
from tba_jax import prompts
from tba_jax import types
from tba_jax.models import build
from tba_jax.sampling import placement

# What the log-probs depend on, beside model and input.
_SETTINGS = ("generate.chat", "generate.append_stop_token",
             "sampling.temperature", "sampling.max_prompt_tokens",
             "sampling.max_completion_tokens", "tokenizer.bos")  # fmt: skip

_Pair = tuple[list[int], list[int]]


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  processes.enable_compilation_cache()
  return line_program.finish(lambda: score(config, operands))


def score(
    config: ml_collections.ConfigDict, operands: Sequence[str] = ()
) -> line_program.Counts:
  """Scores all completions that the output does not have yet.

  Args:
    config: reads `generate`, `tokenizer.bos` and, of `sampling`, the
      temperature and the most tokens.
    operands: none is known.

  Raises:
    ValueError: a wrong setting, model or output file.
    OSError: a file cannot be read or written.
  """
  if operands:
    raise ValueError(f"operands {' '.join(operands)}: score takes none")
  source = model_source.of_config(config)
  sampling = config.sampling
  shape = source.model.config
  most = sampling.max_prompt_tokens + sampling.max_completion_tokens
  if most > shape.max_positions:
    raise ValueError(
        "config.sampling.max_prompt_tokens + max_completion_tokens ="
        f" {most}: allowed up to {shape.max_positions}, the model's positions"
    )
  scores = jax.jit(
      functools.partial(
          _logprobs, source.model, temperature=sampling.temperature
      )
  )

  rows = placement.of_rows(
      placement.of_params(source.params), config.generate.batch_lines
  )

  def prepare(line: line_program.Line) -> _Pair:
    prompt = prompts.tokens(
        line.record,
        source.tokenizer,
        chat=config.generate.chat,
        vocab_size=shape.vocab_size,
        max_tokens=sampling.max_prompt_tokens,
    )
    return prompt, _completion(config, source, line.record)

  def answer(pairs: list[_Pair]) -> list[line_program.Record]:
    arrays = jax.device_put(_pad(config, source, pairs), rows)
    logprobs_BxT = np.asarray(scores(source.params, *arrays))
    return [
        _record(ids, logprobs_T[: len(ids)])
        for (_, ids), logprobs_T in zip(pairs, logprobs_BxT)
    ]

  values = config.to_dict()
  settings = model_source.settings(config, source)
  for key in _SETTINGS:
    section, name = key.split(".")
    settings[f"config.{key}"] = values[section][name]
  return line_program.run(
      config.generate.input,
      config.generate.output,
      settings,
      prepare=prepare,
      answer=answer,
      batch_lines=config.generate.batch_lines,
  )


def _completion(
    config: ml_collections.ConfigDict,
    source: model_source.Source,
    record: line_program.Record,
) -> list[int]:
  """Returns the ids of a record's completion; ValueError where it is wrong."""
  given = [n for n in ("completion", "completion_token_ids") if n in record]
  if len(given) != 1:
    raise ValueError(
        "allowed exactly one of completion, completion_token_ids, not"
        f" {given}"
    )
  if given[0] == "completion":
    ids = source.tokenizer.encode(
        prompts.text("completion", record["completion"])
    )
  else:
    ids = list(
        prompts.token_ids(
            given[0], record[given[0]], source.model.config.vocab_size
        )
    )
  if config.generate.append_stop_token:
    ids.append(source.tokenizer.eos_id)
  most = config.sampling.max_completion_tokens
  if not 1 <= len(ids) <= most:
    raise ValueError(
        f"the completion has {len(ids)} tokens: allowed 1 to"
        f" config.sampling.max_completion_tokens = {most}"
    )
  return ids


def _pad(
    config: ml_collections.ConfigDict,
    source: model_source.Source,
    pairs: list[_Pair],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns prompts and their mask, [B, P], and completions [B, T].

  All batches have one shape, so that one program scores them all.
  """
  num_lines = config.generate.batch_lines
  shape = num_lines, config.sampling.max_prompt_tokens
  prompt_BxP = np.full(shape, source.tokenizer.pad_id, np.int32)
  mask_BxP = np.zeros(shape, np.float32)
  # A row without any token would have nothing to attend to.
  mask_BxP[:, -1] = 1
  completion_BxT = np.full(
      (num_lines, config.sampling.max_completion_tokens),
      source.tokenizer.pad_id,
      np.int32,
  )
  for row, (prompt, completion) in enumerate(pairs):
    prompt_BxP[row, -len(prompt) :] = prompt
    mask_BxP[row, -len(prompt) :] = 1
    completion_BxT[row, : len(completion)] = completion
  return prompt_BxP, mask_BxP, completion_BxT


def _logprobs(
    model: build.Model,
    params: types.PyTree,
    prompt_BxP: jax.Array,
    mask_BxP: jax.Array,
    completion_BxT: jax.Array,
    *,
    temperature: float,
) -> jax.Array:
  """Returns the log-prob of each completion token, [B, T]."""
  return forward.completion_logprobs(
      model,
      params,
      prompt_BxP,
      mask_BxP,
      completion_BxT[:, None],
      temperature=temperature,
  )[:, 0]


def _record(ids: list[int], logprobs_T: np.ndarray) -> line_program.Record:
  return {
      "token_ids": ids,
      "logprobs": line_program.float_list(logprobs_T),
      "logprob": float(np.sum(logprobs_T, dtype=np.float64)),
  }
