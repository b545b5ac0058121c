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

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from typing import Any, BinaryIO

import jax
import ml_collections
import numpy as np
import rich.console
import rich.progress

from tba_jax import types
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models import transformer
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tba_jax.sampling import rows as sampling_rows
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.training import model_source

# A program that turns lines of JSON into lines of JSON, and can be killed.
#
# A line of the output names the line of the input that it answers, `"line": 7`,
# and stands in the order of the input. Lines that were written before are kept
# and passed over, so the same command goes on where it was ended. A line that
# cannot be answered is reported with its file and number and left out; the
# others
# are done. No JAX here.


# Exit status where some lines could not be answered.
EXIT_BAD_LINES = 1

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input that is not blank.

  number: from 1.
  record: the object; None where the line holds none.
  problem: why it holds none, else "".
  """

  number: int
  record: Record | None
  problem: str


@dataclasses.dataclass(frozen=True)
class Counts:
  """What became of the lines: written before, written now, not answered."""

  before: int
  done: int
  bad: int


def read_lines(path: pathlib.Path) -> Iterator[Line]:
  """Yields the lines of a file of JSON objects, the wrong ones too."""
  with path.open("rb") as file:
    for number, data in enumerate(file, start=1):
      if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
      if data.strip():
        yield _parse(number, data)


def _parse(number: int, data: bytes) -> Line:
  try:
    value = json.loads(data.rstrip(b"\r\n").decode("utf-8"))
  except UnicodeDecodeError as error:
    return Line(number, None, f"not UTF-8 from byte {error.start + 1} on")
  except json.JSONDecodeError as error:
    return Line(number, None, f"not JSON: {error.msg}, column {error.colno}")
  except (ValueError, RecursionError) as error:
    return Line(number, None, f"not JSON: {error}")
  if not isinstance(value, dict):
    return Line(number, None, "not a JSON object")
  return Line(number, value, "")


class Output:
  """The file that is written, with what it holds from an earlier start.

  Beside it, in `.NAME.settings.json`, stands what it was made with, so that it
  is not continued with something else.

  done: numbers of the input's lines that it answers.
  """

  def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
    """Opens the file; cuts off the torn line of a writer that was killed.

    Args:
      path: of the file; its folder is made.
      settings: what the answers depend on, of JSON types.

    Raises:
      ValueError: the file was made with other settings or by something else, or
        another process is writing it.
      OSError: it cannot be written.
    """
    self.done: set[int] = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open("ab+")
    try:
      self._take(path)
      self._check_settings(path, dict(settings))
      self._read(path)
    except BaseException:
      self._file.close()
      raise

  def write(self, records: Sequence[Record]) -> None:
    """Appends answers; they survive the process once this returns."""
    self._file.write("".join(map(jsonl.json_line, records)).encode())
    self._file.flush()

  def close(self) -> None:
    self._file.close()

  def _take(self, path: pathlib.Path) -> None:
    if not processes.try_lock(self._file.fileno()):
      raise ValueError(f"{path}: another process is writing it")

  def _check_settings(
      self, path: pathlib.Path, settings: dict[str, Any]
  ) -> None:
    beside = path.with_name(f".{path.name}.settings.json")
    if os.fstat(self._file.fileno()).st_size == 0:
      jsonl.atomic_write_json(beside, settings)
      return
    saved = jsonl.read_json(beside)
    remedy = "; remove the file or name another one"
    if not isinstance(saved, dict):
      raise ValueError(f"{path}: it is there already{remedy}")
    settings = json.loads(json.dumps(settings))
    for key in [*settings, *saved]:
      if saved.get(key) != settings.get(key):
        raise ValueError(
            f"{path}: it was begun with {key} = {saved.get(key)!r}, now it is"
            f" {settings.get(key)!r}{remedy}"
        )

  def _read(self, path: pathlib.Path) -> None:
    self._file.seek(0)
    whole = 0
    for number, data in enumerate(self._file, start=1):
      if not data.endswith(b"\n"):
        break
      record = jsonl.parse_line(data)
      if record is None or not isinstance(record.get("line"), int):
        raise ValueError(f"{path}:{number}: not a line that was written here")
      self.done.add(record["line"])
      whole += len(data)
    self._file.truncate(whole)


def digest_lines(path: pathlib.Path) -> tuple[str, int]:
  """Returns the SHA-256 of a file, and how many lines of it are not blank."""
  sha = hashlib.sha256()
  with path.open("rb") as file:
    return _digest(file, sha)


def _digest(file: BinaryIO, sha: Any) -> tuple[str, int]:
  count = 0
  for data in file:
    sha.update(data)
    count += bool(data.strip())
  return sha.hexdigest(), count


def run_lines(
    source: str,
    target: str,
    settings: Mapping[str, Any],
    *,
    prepare: Callable[[Line], Any],
    answer: Callable[[list[Any]], list[Record]],
    batch_lines: int,
) -> Counts:
  """Answers all lines of a file that its output does not answer yet.

  Args:
    source: path of the input.
    target: path of the output.
    settings: what the answers depend on, beside the input.
    prepare: (line) -> what `answer` needs of it; a ValueError reports the line.
    answer: (what was prepared) -> the records to write, in the same order.
    batch_lines: lines that are answered, and written, together.

  Raises:
    ValueError: as `Output` does.
    OSError: a file cannot be read or written.
  """
  path = pathlib.Path(source).expanduser()
  sha, total = digest_lines(path)
  output = Output(
      pathlib.Path(target).expanduser(), {**settings, "input_sha256": sha}
  )
  before, done, bad = len(output.done), 0, 0
  console = rich.console.Console(stderr=True)
  waiting: list[tuple[int, Any]] = []

  def flush() -> None:
    nonlocal done
    records = answer([prepared for _, prepared in waiting])
    output.write(
        [
            {"line": number, **record}
            for (number, _), record in zip(waiting, records, strict=True)
        ]
    )
    done += len(waiting)
    progress.update(task, completed=before + done + bad)
    if not console.is_terminal:
      print(f"{before + done + bad}/{total} lines", file=sys.stderr, flush=True)
    waiting.clear()

  try:
    with _progress(console) as progress:
      task = progress.add_task("lines", total=total, completed=before)
      for line in read_lines(path):
        if line.number in output.done:
          continue
        try:
          if line.problem:
            raise ValueError(line.problem)
          waiting.append((line.number, prepare(line)))
        except ValueError as error:
          bad += 1
          progress.console.print(
              f"{source}:{line.number}: {error}",
              markup=False,
              highlight=False,
              soft_wrap=True,
          )
        if len(waiting) == batch_lines:
          flush()
      if waiting:
        flush()
  finally:
    output.close()
  return Counts(before, done, bad)


def _progress(console: rich.console.Console) -> rich.progress.Progress:
  return rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.MofNCompleteColumn(),
      console=console,
      disable=not console.is_terminal,
  )


def float_list(values: Iterable[float]) -> list[float]:
  """Returns float32 numbers as the shortest that read back as the same."""
  return [float(f"{value:.9g}") for value in values]


def finish_lines(work: Callable[[], Counts]) -> int:
  """Runs a program's work, says what became of it; returns the exit status."""
  try:
    counts = work()
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from here", file=sys.stderr)
    return processes.EXIT_INTERRUPTED
  before = f", {counts.before} were done before" if counts.before else ""
  print(
      f"{counts.done} lines done{before}, {counts.bad} could not be done",
      file=sys.stderr,
  )
  return EXIT_BAD_LINES if counts.bad else processes.EXIT_OK


# The prompt that a record of an input file describes, as tokens.
#
# A record has one of `prompt` (a text), `messages` (a chat, laid out by the
# tokenizer's template) and `prompt_token_ids`.


_FIELDS = ("prompt", "messages", "prompt_token_ids")


def prompt_tokens(
    record: Mapping[str, Any],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    chat: bool,
    vocab_size: int,
    max_tokens: int,
) -> list[int]:
  """Returns the ids of a record's prompt, its BOS included.

  Args:
    record: of the input.
    tokenizer: its BOS rule holds for `prompt`; `messages` have the special
      tokens of the template alone, `prompt_token_ids` none beside their own.
    chat: whether a `prompt` is the message of a user.
    vocab_size: of the model.
    max_tokens: `config.sampling.max_prompt_tokens`.

  Raises:
    ValueError: the prompt is missing, empty, too long, or not a text.
  """
  given = [name for name in _FIELDS if name in record]
  if len(given) != 1:
    raise ValueError(
        f"allowed exactly one of {', '.join(_FIELDS)}, not {given}"
    )
  value = record[given[0]]
  if given[0] == "prompt_token_ids":
    ids = prompt_token_ids("prompt_token_ids", value, vocab_size)
  elif given[0] == "messages":
    ids = tokenizer.encode_chat(_messages(value))
  else:
    prompt = prompt_text("prompt", value)
    if not prompt:
      raise ValueError("the prompt is empty")
    ids = (
        tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if chat
        else tokenizer.encode_prompt(prompt)
    )
  if not 1 <= len(ids) <= max_tokens:
    raise ValueError(
        f"the prompt has {len(ids)} tokens: allowed 1 to"
        f" config.sampling.max_prompt_tokens = {max_tokens}"
    )
  return ids


def prompt_text(name: str, value: Any) -> str:
  """Returns a field that must be a text; ValueError where it is not."""
  if not isinstance(value, str):
    raise ValueError(f"{name} is {type(value).__name__}: allowed a text")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:  # JSON may escape half a character.
    raise ValueError(f"{name} is not text: {error.reason}") from error
  return value


def prompt_token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
  """Returns a field that must be a list of token ids; else ValueError."""
  are_ids = isinstance(value, list) and all(
      isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size
      for i in value
  )
  if not are_ids:
    raise ValueError(
        f"{name}: allowed a list of whole numbers from 0 to {vocab_size - 1}"
    )
  return value


def whole_number(name: str, value: Any, low: int, high: int) -> int:
  """Returns a field from `low` to `high`; ValueError where it is none."""
  is_int = isinstance(value, int) and not isinstance(value, bool)
  if not is_int or not low <= value <= high:
    raise ValueError(
        f"{name}={value!r}: allowed a whole number from {low} to {high}"
    )
  return value


def _messages(value: Any) -> list[dict[str, str]]:
  if not isinstance(value, list) or not value:
    raise ValueError("messages: allowed a list of objects, not an empty one")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError("messages: allowed objects with role and content")
    for name in ("role", "content"):
      prompt_text(f"messages' {name}", message.get(name))
  return value


# What changes how fast the answers come, not what they are.
_SPEED = ("num_rows", "chunk_steps")


@dataclasses.dataclass(frozen=True)
class _Asked:
  """A prompt of the input: what the output repeats, and what is sampled."""

  prompt: str
  request: requests.Request


def run_generate(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  processes.enable_compilation_cache()
  return finish_lines(lambda: generate(config, operands))


def generate(
    config: ml_collections.ConfigDict, operands: Sequence[str] = ()
) -> Counts:
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
  return run_lines(
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
) -> list[Record]:
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
  ids = prompt_tokens(
      record,
      source.tokenizer,
      chat=config.generate.chat,
      vocab_size=source.model.config.vocab_size,
      max_tokens=config.sampling.max_prompt_tokens,
  )
  seed, max_tokens = record.get("seed"), record.get("max_tokens")
  if seed is not None:
    whole_number("seed", seed, 0, requests.UINT32 - 1)
  if max_tokens is not None:
    limit = config.sampling.max_completion_tokens
    whole_number("max_tokens", max_tokens, 1, limit)
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
) -> list[Record]:
  """Returns the records of what was asked, in its order."""
  found = sampler.sample(source.params, [a.request for a in asked], version=0)
  plain = config.generate.plain_logprobs
  greedy = config.sampling.temperature == 0
  return [
      {
          "prompt": a.prompt,
          "completions": [
              _generate_record(
                  source, completions, sample, plain=plain, greedy=greedy
              )
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
  settings = decode.Settings(
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
      pad_id=source.tokenizer.pad_id,
      seed=config.seed,
  )
  return decode.Sampler(source.model, settings)


def _generate_record(
    source: model_source.Source,
    completions: types.Completions,
    sample: int,
    *,
    plain: bool,
    greedy: bool,
) -> Record:
  """Returns one completion of a prompt as the output has it."""
  length = int(completions.lengths[sample])
  tokens_T = completions.tokens[sample, :length]
  logprobs = lambda array: float_list(array[sample, :length])
  # Of greedy decoding all would be 0.
  drawn = completions.plain_logprobs if greedy else completions.logprobs
  record = {
      "text": source.tokenizer.decode_completion(
          tokens_T, length, bool(completions.stopped[sample])
      ),
      "token_ids": tokens_T.tolist(),
      "logprobs": logprobs(drawn),
      "finish_reason": "stop" if completions.stopped[sample] else "length",
  }
  if plain:
    record["plain_logprobs"] = logprobs(completions.plain_logprobs)
  return record


# The `score` program: log-probs of completions that a file gives.
#
# python -m tba_jax.main --program=score --config=configs/generate.py \
# --config.generate.model=FOLDER --config.generate.input=pairs.jsonl \
# --config.generate.output=scores.jsonl
#
# The input has a `{"prompt": "…", "completion": "…"}` a line; the output a
# `{"line", "token_ids", "logprobs", "logprob"}`, in nats, of the logits divided
# by `sampling.temperature`. The same command goes on where it was ended.


# What the log-probs depend on, beside model and input.
_SETTINGS = ("generate.chat", "generate.append_stop_token",
             "sampling.temperature", "sampling.max_prompt_tokens",
             "sampling.max_completion_tokens", "tokenizer.bos")  # fmt: skip

_Pair = tuple[list[int], list[int]]


def run_score(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs the program; returns its exit status."""
  del workdir  # Everything is in `config.generate`.
  processes.enable_compilation_cache()
  return finish_lines(lambda: score(config, operands))


def score(
    config: ml_collections.ConfigDict, operands: Sequence[str] = ()
) -> Counts:
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

  rows = sampling_rows.rows_sharding(
      sampling_rows.params_sharding(source.params), config.generate.batch_lines
  )

  def prepare(line: Line) -> _Pair:
    prompt = prompt_tokens(
        line.record,
        source.tokenizer,
        chat=config.generate.chat,
        vocab_size=shape.vocab_size,
        max_tokens=sampling.max_prompt_tokens,
    )
    return prompt, _completion(config, source, line.record)

  def answer(pairs: list[_Pair]) -> list[Record]:
    arrays = jax.device_put(_pad(config, source, pairs), rows)
    logprobs_BxT = np.asarray(scores(source.params, *arrays))
    return [
        _score_record(ids, logprobs_T[: len(ids)])
        for (_, ids), logprobs_T in zip(pairs, logprobs_BxT)
    ]

  values = config.to_dict()
  settings = model_source.settings(config, source)
  for key in _SETTINGS:
    section, name = key.split(".")
    settings[f"config.{key}"] = values[section][name]
  return run_lines(
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
    record: Record,
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
        prompt_text("completion", record["completion"])
    )
  else:
    ids = list(
        prompt_token_ids(
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
    model: transformer.Model,
    params: types.PyTree,
    prompt_BxP: jax.Array,
    mask_BxP: jax.Array,
    completion_BxT: jax.Array,
    *,
    temperature: float,
) -> jax.Array:
  """Returns the log-prob of each completion token, [B, T]."""
  return logprobs_lib.completion_logprobs(
      model,
      params,
      prompt_BxP,
      mask_BxP,
      completion_BxT[:, None],
      temperature=temperature,
  )[:, 0]


def _score_record(ids: list[int], logprobs_T: np.ndarray) -> Record:
  return {
      "token_ids": ids,
      "logprobs": float_list(logprobs_T),
      "logprob": float(np.sum(logprobs_T, dtype=np.float64)),
  }
