# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `generate` and `score` programs, from JSON Lines to JSON Lines.

    python -m tba_jax.main --program=generate --config=configs/generate.py \\
        --config.generate.model=FOLDER --config.generate.input=prompts.jsonl \\
        --config.generate.output=completions.jsonl

`generate` samples completions of prompts, or plays a task's environments;
`score` computes the log-probs of given completions, or reports how likely the
model is to sample a log (`offline.path`). docs/guides/generate.md
describes the formats. Output lines have the number of their input line and keep
the order of the input. The same command resumes an interrupted run and ends
with the same bytes. A line that cannot be processed is reported with file and
number, and the others are processed.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

import jax
import ml_collections
import numpy as np
import rich.console
import rich.progress

from tba_jax import types
from tba_jax.chat_api import tool_calls
from tba_jax.environments import build as environments_build
from tba_jax.environments import turns
from tba_jax.learning import batches
from tba_jax.learning import model_source
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.policy import policy_samplers
from tba_jax.sampling import decode
from tba_jax.sampling import offline_sampler
from tba_jax.sampling import requests
from tba_jax.sampling import sharing
from tba_jax.sampling import slots as slots_lib
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tasks import task_table as tasks_build

# Exit status if some lines could not be processed.
EXIT_BAD_LINES = 1
_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_COMPLETION_FIELDS = ("completion", "completion_token_ids")
# The other fields of an input line are copied to its output line.
_GENERATE_FIELDS = (*_PROMPT_FIELDS, "seed", "max_tokens")
# Fields of a completion with a number for each policy token.
_LOGPROBS = frozenset(("logprobs", "plain_logprobs"))
_SCORE_FIELDS = (*_PROMPT_FIELDS, *_COMPLETION_FIELDS)
# Settings for the speed of sampling. They change completions only through the
# rounding of another number of rows, in bfloat16 more than in float32.
_SPEED = ("num_slots", "chunk_steps")
# Settings that affect the log-probs of `score`, apart from model and input.
_SCORE_SETTINGS = (
    "generate.chat", "generate.append_stop_token", "sampling.temperature",
    "sampling.max_prompt_tokens", "sampling.max_completion_tokens",
    "tokenizer.bos", "tokenizer.chat", "tokenizer.template_arguments",
)  # fmt: skip

# Number of characters that can be tokenized within a second.
_SHORT_TEXT = 2**18

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Counts:
  """Lines processed before this start, processed now, and failed."""

  before: int
  done: int
  bad: int


@dataclasses.dataclass(frozen=True)
class _Prompt:
  """A prompt in the input.

  text: prompt as given, copied to the output.
  other: the line's other fields, copied to the output.
  """

  text: str
  request: requests.Request
  other: Record


@dataclasses.dataclass(frozen=True)
class _Episode:
  """An episode in the input.

  seed: argument of the environment's `reset`.
  max_tokens: maximum tokens per completion; None takes the sampler's limit.
  other: the line's other fields, copied to the output.
  """

  seed: int
  max_tokens: int | None
  other: Record


@dataclasses.dataclass(frozen=True)
class _Pair:
  """Token ids of a prompt and its completion, and the line's other fields."""

  prompt: list[int]
  completion: list[int]
  other: Record


def run_generate(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  return _run_program(generate, config, operands)


def run_score(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  is_report = bool(config.offline.path)
  return _run_program(score, config, operands, has_lines=not is_report)


def _run_program(
    work: Callable[[ml_collections.ConfigDict], Counts],
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    has_lines: bool = True,
) -> int:
  processes.prepare_compiling()
  try:
    if operands:
      raise ValueError(f"operands {' '.join(operands)}: must be left out")
    counts = work(config)
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  except KeyboardInterrupt:
    remedy = "; the same command resumes" * has_lines
    print(f"interrupted{remedy}", file=sys.stderr)
    return processes.EXIT_INTERRUPTED
  if not has_lines:
    return processes.EXIT_OK
  before = f", {counts.before} were done before" if counts.before else ""
  print(
      f"{counts.done} lines done{before}, {counts.bad} failed",
      file=sys.stderr,
  )
  return EXIT_BAD_LINES if counts.bad else processes.EXIT_OK


def generate(config: ml_collections.ConfigDict) -> Counts:
  """Samples completions of all prompts that the output lacks.

  Raises:
    ValueError: a setting, the model or the output file is invalid.
    OSError: a file cannot be read or written.
  """
  source = model_source.of_config(config)
  sampler = _make_sampler(config, source, config.generate.batch_lines)
  source = dataclasses.replace(source, params=sampler.put(source.params))
  if tasks_build.facts(config.task.name).has_turns:
    task = tasks_build.make_task(config.task)
    environments = environments_build.make(config, "", task, source.tokenizer)
    with contextlib.closing(environments):
      return run_lines(
          config,
          {**_generate_settings(config, source), **_task_settings(config)},
          prepare=functools.partial(_parse_seed, config),
          answer=functools.partial(
              _play, config, source, sampler, environments
          ),
      )
  return run_lines(
      config,
      _generate_settings(config, source),
      prepare=functools.partial(_parse_prompt, config, source),
      answer=functools.partial(_complete, config, source, sampler),
  )


def complete(
    config: ml_collections.ConfigDict,
    inputs: Sequence[str | Mapping[str, Any]],
) -> list[Record]:
  """Returns completions of prompts as records like in the program's files.

  Args:
    config: settings of `generate`; `generate.input` and `generate.output` are
      ignored.
    inputs: prompts, or records as in the program's input.

  Returns:
    A record with `prompt` and `completions` for each input.

  Raises:
    ValueError: a setting, the model or an input is invalid.
  """
  if not inputs:
    return []
  source = model_source.of_config(config)
  prompts = []
  for number, one in enumerate(inputs, start=1):
    record = {"prompt": one} if isinstance(one, str) else one
    try:
      prompts.append(_parse_prompt(config, source, number, record))
    except ValueError as error:
      raise ValueError(f"input {number}: {error}") from error
  sampler = _make_sampler(config, source, len(prompts))
  return _complete(config, source, sampler, prompts)


def _generate_settings(
    config: ml_collections.ConfigDict, source: model_source.ModelSource
) -> dict[str, object]:
  """Returns all values that affect the completions, apart from the input."""
  return {
      **model_source.settings(config, source),
      "config.seed": config.seed,
      **{
          f"config.tokenizer.{name}": config.tokenizer[name]
          for name in ("bos", "chat", "template_arguments")
      },
      **{
          f"config.generate.{name}": config.generate[name]
          for name in ("num_completions", "chat", "plain_logprobs")
      },
      **{
          f"config.sampling.{name}": value
          for name, value in config.sampling.to_dict().items()
          if name not in _SPEED
      },
  }


def _task_settings(config: ml_collections.ConfigDict) -> dict[str, object]:
  """Returns the settings of environments that affect completions."""
  task = tasks_build.with_defaults(config.task.to_dict())
  return {f"config.task.{name}": value for name, value in task.items()}


def _parse_prompt(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    number: int,
    record: Record,
) -> _Prompt:
  """Returns the prompt of line `number`; ValueError for an invalid record."""
  ids = _prompt_tokens(config, source, record)
  seed = record.get("seed")
  if seed is not None:
    _check_whole("seed", seed, 0, requests.UINT32 - 1)
  max_tokens = _max_tokens(config, record)
  request = requests.Request(
      np.asarray(ids, np.int32),
      # A prompt with its own seed does not depend on its line.
      prompt_id=number if seed is None else 0,
      visit=0,
      num_completions=config.generate.num_completions,
      seed=seed,
      max_tokens=max_tokens,
  )
  text = record.get("prompt")
  if text is None:
    text = source.tokenizer.decode(ids)
  return _Prompt(text, request, _other_fields(record, _GENERATE_FIELDS))


def _parse_seed(
    config: ml_collections.ConfigDict, number: int, record: Record
) -> _Episode:
  """Returns the episode of a line; ValueError if the record is invalid."""
  del number
  if "seed" not in record or any(name in record for name in _PROMPT_FIELDS):
    raise ValueError(
        "must be seed, for the environment, which produces the prompt"
    )
  _check_whole("seed", record["seed"], 0, requests.UINT32 - 1)
  other = _other_fields(record, ("seed", "max_tokens"))
  return _Episode(record["seed"], _max_tokens(config, record), other)


def _max_tokens(
    config: ml_collections.ConfigDict, record: Record
) -> int | None:
  max_tokens = record.get("max_tokens")
  if max_tokens is not None:
    limit = config.sampling.max_completion_tokens
    _check_whole("max_tokens", max_tokens, 1, limit)
  return max_tokens


def _make_sampler(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    num_lines: int,
) -> decode.JaxSampler:
  """Returns the sampler, with rows for at most `num_lines` prompts."""
  num_completions = config.generate.num_completions
  num_rows = min(config.sampling.num_slots, num_lines * num_completions)
  return policy_samplers.build_sampler(
      config,
      source.model,
      source.tokenizer,
      num_rows=num_rows,
      most_rows_per_prompt=sharing.most_rows(
          num_rows, num_lines, num_completions
      ),
      seed=config.seed,
      explore=requests.Explore(),
  )


def _complete(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    sampler: decode.JaxSampler,
    prompts: list[_Prompt],
) -> list[Record]:
  """Returns the output records of prompts, in their order."""
  sampled = sampler.sample(
      source.params, [p.request for p in prompts], version=0
  )
  return [
      {
          **prompt.other,
          "prompt": prompt.text,
          "completions": _completion_records(config, source, completions),
      }
      for prompt, completions in zip(prompts, sampled, strict=True)
  ]


def _play(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    sampler: decode.JaxSampler,
    environments: turns.Environments,
    lines: list[_Episode],
) -> list[Record]:
  """Returns the output records of episodes, in their order."""
  prompts = environments.begin([line.seed for line in lines])
  live = [i for i, prompt in enumerate(prompts) if prompt.failure is None]
  num_completions = config.generate.num_completions
  episodes = environments.episodes([prompts[i] for i in live], num_completions)
  try:
    sampled = sampler.sample(
        source.params,
        [
            requests.Request(
                prompts[i].tokens,
                prompt_id=lines[i].seed,
                visit=0,
                num_completions=num_completions,
                max_tokens=lines[i].max_tokens,
            )
            for i in live
        ],
        version=0,
        turns=episodes,
    )
  finally:
    episodes.close()
  outcomes = [episodes.outcomes(n)() for n in range(len(live))]
  results = dict(zip(live, zip(sampled, outcomes, strict=True)))
  out = []
  for i, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
    record = {
        **line.other,
        "seed": line.seed,
        "prompt": source.tokenizer.decode(prompt.tokens),
        "completions": [],
    }
    if prompt.failure is None:
      completions, outcomes = results[i]
      records = _completion_records(config, source, completions)
      for s, (completion, outcome) in enumerate(
          zip(records, outcomes, strict=True)
      ):
        sampled_T = completions.sampled_mask[s]
        for name in _LOGPROBS.intersection(completion):
          completion[name] = [
              x if m else None for x, m in zip(completion[name], sampled_T)
          ]
        completion["turns"] = turns_of(
            source.tokenizer,
            completions.tokens[s, : completions.lengths[s]],
            sampled_T,
            outcome.turn_ends,
            prompt.tools,
        )
        failed = bool(outcome.failure)
        completion["reward"] = None if failed else float(outcome.reward)
        completion["success"] = None if failed else outcome.is_right
        if failed:
          completion["failure"] = f"{outcome.failure}: {outcome.message}"
      record["completions"] = records
    else:
      record["failure"] = ": ".join(prompt.failure)
    out.append(record)
  return out


def turns_of(
    tokenizer: tokenizer_lib.Tokenizer,
    tokens: np.ndarray,
    sampled: np.ndarray,
    turn_ends: Sequence[int],
    schemas: Sequence[Mapping[str, Any]],
) -> list[Record]:
  """Returns the turns of a completion with their roles.

  Args:
    tokens: [n] int, tokens of the completion.
    sampled: [n] bool or longer, True on policy tokens.
    turn_ends: number of tokens up to the end of each policy turn.
    schemas: JSON schemas of the environment's tools.

  Returns:
    Turns with `role` ("policy", "environment" or "tool") and `text`, and with
    `calls` if the policy calls tools in the turn.
  """
  spans: list[tuple[bool, list[int]]] = []
  for place, (token, of_policy) in enumerate(
      zip(tokens.tolist(), sampled.tolist())
  ):
    if not spans or place in turn_ends or spans[-1][0] != of_policy:
      spans.append((of_policy, []))
    spans[-1][1].append(token)
  parameters = tool_calls.parameters_of(schemas)
  out: list[Record] = []
  for of_policy, ids in spans:
    if not of_policy:
      called = out and "calls" in out[-1]
      role = "tool" if called else "environment"
      out.append({"role": role, "text": tokenizer.decode(ids, within=True)})
      continue
    text = tokenizer.decode_completion(ids, len(ids), stopped=True)
    calls = tool_calls.find(text, parameters)[0] if parameters else []
    out.append({"role": "policy", "text": text})
    if calls:
      out[-1]["calls"] = [_call_record(call) for call in calls]
  return out


def _call_record(call: tool_calls.ParsedCall) -> Record:
  if call.error:
    return {"error": call.error}
  return {"name": call.name, "arguments": call.arguments}


def _completion_records(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    completions: types.Completions,
) -> list[Record]:
  # Under greedy decoding the sampling distribution's log-probs are 0.
  greedy = config.sampling.temperature == 0
  logprobs = completions.plain_logprobs if greedy else completions.logprobs
  out = []
  for s, text in enumerate(source.tokenizer.decode_completions(completions)):
    length = int(completions.lengths[s])
    record = {
        "text": text,
        "token_ids": completions.tokens[s, :length].tolist(),
        "logprobs": _float_list(logprobs[s, :length]),
        "finish_reason": "stop" if completions.stopped[s] else "length",
    }
    if config.generate.plain_logprobs:
      plain = completions.plain_logprobs[s, :length]
      record["plain_logprobs"] = _float_list(plain)
    out.append(record)
  return out


def score(config: ml_collections.ConfigDict) -> Counts:
  """Scores all completions that the output lacks, or reports on a log.

  Raises:
    ValueError: a setting, the model or the output file is invalid.
    OSError: a file cannot be read or written.
  """
  source = model_source.of_config(config)
  sampling, batch_lines = config.sampling, config.generate.batch_lines
  limit = source.model.config.max_positions
  most = sampling.max_prompt_tokens + sampling.max_completion_tokens
  if most > limit:
    raise ValueError(
        "config.sampling.max_prompt_tokens + max_completion_tokens ="
        f" {most}: must be at most {limit}, the model's positions"
    )
  sharding = slots_lib.rows_sharding(
      slots_lib.params_sharding(source.params), batch_lines
  )

  @jax.jit
  def logprobs_of(params: types.PyTree, batch: types.Batch) -> jax.Array:
    logprobs_Bx1xT = logprobs_lib.completion_logprobs(
        source.model,
        params,
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        temperature=sampling.temperature,
    )
    return logprobs_Bx1xT[:, 0]

  def logprobs_of_pairs(
      pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
  ) -> list[np.ndarray]:
    # All batches have the same shape: the last one repeats its first pair.
    full = [*pairs, *pairs[:1] * (batch_lines - len(pairs))]
    batch = batches.pad_sequences(
        [(prompt, [completion]) for prompt, completion in full],
        (batch_lines,),
        num_completions=1,
        max_prompt_tokens=sampling.max_prompt_tokens,
        max_completion_tokens=sampling.max_completion_tokens,
    )
    logprobs_BxT = np.asarray(
        logprobs_of(source.params, jax.device_put(batch, sharding))
    )
    return [
        logprobs_T[: len(completion)]
        for (_, completion), logprobs_T in zip(pairs, logprobs_BxT)
    ]

  if config.offline.path:
    return _report(config, source, logprobs_of_pairs)

  def answer(pairs: list[_Pair]) -> list[Record]:
    logprobs = logprobs_of_pairs([(p.prompt, p.completion) for p in pairs])
    out = []
    for pair, logprobs_T in zip(pairs, logprobs, strict=True):
      out.append(
          {
              **pair.other,
              "token_ids": pair.completion,
              "logprobs": _float_list(logprobs_T),
              "logprob": float(np.sum(logprobs_T, dtype=np.float64)),
          }
      )
    return out

  settings = model_source.settings(config, source)
  for key in _SCORE_SETTINGS:
    section, name = key.split(".")
    settings[f"config.{key}"] = config[section][name]
  return run_lines(
      config,
      settings,
      prepare=lambda number, record: _parse_pair(config, source, record),
      answer=answer,
  )


def _report(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    logprobs_of_pairs: Callable[[Sequence[Any]], list[np.ndarray]],
) -> Counts:
  """Prints what a run can learn from the log `offline.path`."""
  task = tasks_build.make_task(config.task)
  log = offline_sampler.Log(
      config, task, source.tokenizer, needs_logprobs=False
  )
  pairs, count = log.pairs(), config.generate.batch_lines
  logprobs = [
      logprobs_T
      for first in range(0, len(pairs), count)
      for logprobs_T in logprobs_of_pairs(pairs[first : first + count])
  ]
  print("\n".join([*log.report(), *log.coverage(logprobs)]))
  return Counts(0, len(pairs), 0)


def _parse_pair(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    record: Record,
) -> _Pair:
  """Returns the pair of a line; the output copies its texts."""
  ids = _prompt_tokens(config, source, record)
  completion = _completion_tokens(config, source, record, ids)
  texts = {"prompt": record.get("prompt", source.tokenizer.decode(ids))}
  if "completion" in record:
    texts["completion"] = record["completion"]
  return _Pair(ids, completion, texts | _other_fields(record, _SCORE_FIELDS))


# Fields of an input line.


def _other_fields(record: Record, fields: Sequence[str]) -> Record:
  return {name: v for name, v in record.items() if name not in fields}


def _prompt_tokens(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    record: Record,
) -> list[int]:
  """Returns the ids of a record's prompt, including BOS.

  The tokenizer's BOS rule only applies to `prompt`: `messages` have the special
  tokens of the chat template, and `prompt_token_ids` their own.

  Raises:
    ValueError: the prompt is missing, empty, overlong, or not a text.
  """
  tokenizer = source.tokenizer
  name = _only_field(record, _PROMPT_FIELDS)
  value = record[name]
  if isinstance(value, str):
    _check_size(config, source, "prompt", value)
  if name == "prompt_token_ids":
    ids = _check_ids(name, value, source)
  elif name == "messages":
    messages = _check_messages(value)
    for message in messages:
      _check_size(config, source, "prompt", message["content"])
    ids = tokenizer.encode_chat(messages)
  elif not _check_text(name, value):
    raise ValueError("the prompt is empty")
  elif config.generate.chat:
    ids = tokenizer.encode_chat([{"role": "user", "content": value}])
  else:
    ids = tokenizer.encode_prompt(value)
  _check_length(config, "prompt", ids)
  return ids


def _completion_tokens(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    record: Record,
    prompt: Sequence[int],
) -> list[int]:
  """Returns the ids of a record's completion; ValueError if it is invalid."""
  name = _only_field(record, _COMPLETION_FIELDS)
  if name == "completion":
    text = _check_text(name, record[name])
    _check_size(config, source, name, text)
    ids = _sampled_tokens(source, record, text)
    if ids is None:
      ids = source.tokenizer.encode(text, prompt)
  else:
    ids = list(_check_ids(name, record[name], source))
  has_stop = source.tokenizer.split_stop(ids)[1] is not None
  if config.generate.append_stop_token and not has_stop:
    ids.append(_stop_id(config, source, record))
  _check_length(config, "completion", ids)
  return ids


def _sampled_tokens(
    source: model_source.ModelSource, record: Record, text: str
) -> list[int] | None:
  """Returns the ids of a completion in a run's `samples.jsonl`, else None.

  Raises ValueError for token strings that the model does not have.
  """
  tokens, tokenizer = record.get("tokens"), source.tokenizer
  if not isinstance(tokens, list):
    return None
  ids = None
  if all(isinstance(token, str) for token in tokens):
    ids = tokenizer.ids_of(tokens)
  if ids is None or not tokenizer.decode(ids, within=True).startswith(text):
    raise ValueError(
        "tokens: must be the strings of the model's tokens of completion, as a"
        " run's samples.jsonl has them; without tokens the text is encoded"
    )
  return ids


def _stop_id(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    record: Record,
) -> int:
  """Returns the id that ends completions of a record's prompt."""
  if config.generate.chat or "messages" in record:
    return source.tokenizer.stop_id([])
  return source.tokenizer.stop_id(record.get("prompt", ""))


def _only_field(record: Record, fields: Sequence[str]) -> str:
  present = [name for name in fields if name in record]
  if len(present) != 1:
    raise ValueError(
        f"must be exactly one of {', '.join(fields)}, not {present}"
    )
  return present[0]


def _check_size(
    config: ml_collections.ConfigDict,
    source: model_source.ModelSource,
    what: str,
    text: str,
) -> None:
  """Refuses a text that is too long in any tokens; encoding takes minutes."""
  key = f"max_{what}_tokens"
  limit = config.sampling[key]
  if len(text) > max(_SHORT_TEXT, limit * source.tokenizer.longest_token):
    raise ValueError(
        f"the {what} has {len(text)} characters: must have 1 to"
        f" config.sampling.{key} = {limit} tokens"
    )


def _check_length(
    config: ml_collections.ConfigDict, what: str, ids: list[int]
) -> None:
  key = f"max_{what}_tokens"
  if not 1 <= len(ids) <= config.sampling[key]:
    raise ValueError(
        f"the {what} has {len(ids)} tokens: must have 1 to"
        f" config.sampling.{key} = {config.sampling[key]}"
    )


def _check_text(name: str, value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{name} is {type(value).__name__}: must be a text")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:  # JSON may escape half a surrogate pair.
    raise ValueError(f"{name} is not text: {error.reason}") from error
  return value


def _check_messages(value: Any) -> list[dict[str, str]]:
  if not isinstance(value, list) or not value:
    raise ValueError("messages: must be a list of objects, not an empty one")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError("messages: must be objects with role and content")
    for name in ("role", "content"):
      _check_text(f"messages' {name}", message.get(name))
  return value


def _check_ids(
    name: str, value: Any, source: model_source.ModelSource
) -> list[int]:
  last = source.model.config.vocab_size - 1
  if not isinstance(value, list) or not all(
      type(i) is int and 0 <= i <= last for i in value
  ):
    raise ValueError(
        f"{name}: must be a list of whole numbers from 0 to {last}"
    )
  return value


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
  if type(value) is not int or not low <= value <= high:
    raise ValueError(
        f"{name}={value!r}: must be a whole number from {low} to {high}"
    )


def _float_list(values: Iterable[float]) -> list[float]:
  """Returns float32 numbers as floats with as few digits as restore them."""
  return [float(f"{value:.9g}") for value in values]


# Lines of the input and of the output.


def run_lines(
    config: ml_collections.ConfigDict,
    settings: Mapping[str, Any],
    *,
    prepare: Callable[[int, Record], Any],
    answer: Callable[[list[Any]], list[Record]],
) -> Counts:
  """Processes all lines of the input that the output lacks.

  Args:
    config: settings with `generate.input`, `generate.output` and
      `generate.batch_lines`.
    settings: values that affect the output, apart from the input.
    prepare: (line number from 1, JSON object) -> parsed line; lines that raise
      ValueError are reported.
    answer: (parsed lines) -> their output records.

  Raises:
    ValueError: `Output` rejects the file.
    OSError: a file cannot be read or written.
  """
  source = config.generate.input
  path = pathlib.Path(source).expanduser()
  sha, total = _digest(path)
  output = Output(
      pathlib.Path(config.generate.output).expanduser(),
      {**settings, "input_sha256": sha},
  )
  before, done, bad = len(output.done), 0, 0
  console = rich.console.Console(stderr=True)
  waiting: list[tuple[int, Any]] = []

  def flush() -> None:
    nonlocal done
    records = answer([prepared for _, prepared in waiting])
    output.write(
        [
            {"line": number, **_other_fields(record, ("line",))}
            for (number, _), record in zip(waiting, records, strict=True)
        ]
    )
    done += len(waiting)
    progress.update(task, completed=before + done + bad)
    if not console.is_terminal:
      print(f"{before + done + bad}/{total} lines", file=sys.stderr, flush=True)
    waiting.clear()

  with contextlib.closing(output), _progress(console) as progress:
    task = progress.add_task("lines", total=total, completed=before)
    with path.open("rb") as file:
      for number, data in enumerate(file, start=1):
        if number in output.done or not data.strip():
          continue
        try:
          bom = codecs.BOM_UTF8 if number == 1 else b""
          record = _parse_line(data.removeprefix(bom))
          waiting.append((number, prepare(number, record)))
        except ValueError as error:
          bad += 1
          progress.console.print(
              f"{source}:{number}: {error}",
              markup=False,
              highlight=False,
              soft_wrap=True,
          )
        if len(waiting) == config.generate.batch_lines:
          flush()
      if waiting:
        flush()
  return Counts(before, done, bad)


def _digest(path: pathlib.Path) -> tuple[str, int]:
  """Returns the SHA-256 of a file, and its number of non-blank lines."""
  sha, count = hashlib.sha256(), 0
  with path.open("rb") as file:
    for data in file:
      sha.update(data)
      count += bool(data.strip())
  return sha.hexdigest(), count


def _parse_line(data: bytes) -> Record:
  """Returns the JSON object in a line; ValueError if there is none."""
  try:
    value = json.loads(data.rstrip(b"\r\n").decode("utf-8"))
  except UnicodeDecodeError as error:
    raise ValueError(f"not UTF-8 from byte {error.start + 1} on") from error
  except json.JSONDecodeError as error:
    raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f"not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError("not a JSON object")
  return value


def _progress(console: rich.console.Console) -> rich.progress.Progress:
  return rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.MofNCompleteColumn(),
      console=console,
      disable=not console.is_terminal,
  )


class Output:
  """The output file, opened to continue what an earlier start wrote.

  `.NAME.settings.json` in the same folder has the settings; the file is not
  continued with different ones.

  done: numbers of the input lines that are in the output.
  """

  def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
    """Opens the file; removes the incomplete line of a killed writer.

    Args:
      path: output file; its folder is created.
      settings: values of JSON types that the output depends on.

    Raises:
      ValueError: the file was written with other settings or by another
        program, or another process is writing it.
      OSError: the file cannot be written.
    """
    self.done: set[int] = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open("ab+")
    try:
      if not processes.try_lock(self._file.fileno()):
        raise ValueError(f"{path}: another process is writing it")
      self._check_settings(path, json.loads(json.dumps(settings)))
      self._read(path)
    except BaseException:
      self._file.close()
      raise

  def write(self, records: Sequence[Record]) -> None:
    """Appends records, which survive a kill once this returns."""
    self._file.write("".join(map(jsonl.json_line, records)).encode())
    self._file.flush()

  def close(self) -> None:
    self._file.close()

  def _check_settings(
      self, path: pathlib.Path, settings: dict[str, Any]
  ) -> None:
    settings_path = path.with_name(f".{path.name}.settings.json")
    if os.fstat(self._file.fileno()).st_size == 0:
      jsonl.atomic_write_json(settings_path, settings)
      return
    saved = jsonl.read_json(settings_path)
    remedy = "; remove the file or name another one"
    if not isinstance(saved, dict):
      raise ValueError(f"{path}: exists already{remedy}")
    for key in [*settings, *saved]:
      if saved.get(key) != settings.get(key):
        raise ValueError(
            f"{path}: it was begun with {key} = {saved.get(key)!r}, now it is"
            f" {settings.get(key)!r}{remedy}"
        )

  def _read(self, path: pathlib.Path) -> None:
    self._file.seek(0)
    size = 0
    for number, data in enumerate(self._file, start=1):
      if not data.endswith(b"\n"):
        break
      record = jsonl.parse_line(data)
      if record is None or not isinstance(record.get("line"), int):
        raise ValueError(f"{path}:{number}: not a line that was written here")
      self.done.add(record["line"])
      size += len(data)
    self._file.truncate(size)
