# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads logged completions, with or without rewards, from JSON Lines or JSON.

docs/guides/offline_data.md describes the formats: the output of `generate` and
`score`, a run's `samples.jsonl`, completions as logged by TRL, and episodes of
several turns (`episode_formats.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import glob
import json
import math
import os
from typing import Any

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import episode_formats

# Rewards and log-probs are stored as float32.
_MAX_NUMBER = float(np.finfo(np.float32).max)

# Finish reasons that servers give for completions that were not truncated.
_STOPS = ("stop", "tool_calls")


@dataclasses.dataclass(frozen=True)
class Completion:
  """A completion in a log.

  text: content without the stop token; None with token ids alone.
  token_ids: ids, including the final stop token; None if unknown.
  reward: task units; None if it is not read.
  logprobs: natural logs, one per token, of the policy that sampled it; None if
    unknown.
  version: step of the params that sampled it; -1 if unknown.
  stopped: whether a stop token or stop string ended it; None if unknown.
  tokens: token strings, as in a run's `samples.jsonl`; None if unknown.
  sampled: whether the policy sampled each token, not an environment; None if it
    sampled all.
  lacks_logprobs: whether logged log-probs are incomplete or not finite.
  episode: messages of several turns; None for a text alone.
  unusable: reason why it cannot be trained on; "" = none.
  group: identity of the prompt where its text does not suffice: seed of an
    environment, or id of a run's prompt.
  seed: argument of the environment's `reset`; None if unknown.
  """

  text: str | None
  token_ids: tuple[int, ...] | None
  reward: float | None
  logprobs: tuple[float, ...] | None
  version: int
  stopped: bool | None
  tokens: tuple[str | None, ...] | None = None
  sampled: tuple[bool, ...] | None = None
  lacks_logprobs: bool = False
  episode: episode_formats.Episode | None = None
  unusable: str = ""
  group: str = ""
  seed: int | None = None

  @property
  def format(self) -> str:
    return self.episode.format if self.episode else "completion"


def read(
    path: str | os.PathLike[str],
    reward_field: str = "reward",
    *,
    needs_logprobs: bool = False,
) -> dict[str, list[Completion]]:
  """Returns the completions of each prompt, in their order.

  A prompt is identified by its text, by `base.plain_text` of its messages, or
  by `key_of_ids`.

  Args:
    path: file of JSON objects, one per line, or of a JSON object or list; or a
      pattern of such files.
    reward_field: field with the reward, in a line or in a completion; "" reads
      no rewards.
    needs_logprobs: whether a completion without log-probs is an error.

  Raises:
    ValueError: a line is invalid; the message names the file and line.
    OSError: the file cannot be read.
  """
  out: dict[str, list[Completion]] = {}
  for file in files_of(path):
    for place, text, record in _records(file):
      try:
        if isinstance(record, ValueError):
          raise record
        _check_text(record, text)
        completions = _parse(record, reward_field)
        if needs_logprobs:
          _check_logprobs([c for _, c in completions])
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} {place}: {error}") from error
      for prompt, completion in completions:
        out.setdefault(prompt, []).append(completion)
  if not out:
    raise ValueError(f"{path}: must be a file with one completion or more")
  return out


def files_of(path: str | os.PathLike[str]) -> list[str]:
  """Returns the files of a path or pattern, sorted.

  Raises:
    FileNotFoundError: there is none.
  """
  path = os.fspath(path)
  if os.path.exists(path):
    return [path]
  files = sorted(glob.glob(path, recursive=True))
  if not files:
    raise FileNotFoundError(2, "No such file or directory", path)
  return files


def _records(file: str) -> Iterator[tuple[str, str, Any]]:
  """Yields (place, text, value) of each record; a ValueError if not JSON."""
  with open(file, encoding="utf-8-sig", errors="replace") as opened:
    if file.endswith(".json"):
      text = opened.read()
      try:
        whole = json.loads(text)
      except (ValueError, RecursionError):
        opened.seek(0)  # Lines under another name.
      else:
        rows = whole if isinstance(whole, list) else [whole]
        escapes = "\\u" * ("\\u" in text)  # All that is read of the text.
        for number, row in enumerate(rows, start=1):
          yield f"record {number}", escapes, row
        return
    for number, line in enumerate(opened, start=1):
      if not line.strip():
        continue
      try:
        record = json.loads(line)
      except (ValueError, RecursionError) as error:
        record = ValueError(str(error))
      yield f"line {number}", line, record


def _check_logprobs(completions: Sequence[Completion]) -> None:
  """Raises ValueError for completions that cannot have log-probs."""
  for c in completions:
    if c.unusable:
      continue
    if c.logprobs is None:
      raise ValueError("logprobs are missing")
    if c.token_ids is None and c.tokens is None:
      raise ValueError(
          "token_ids are missing, the tokens that logprobs belong to"
      )


def key_of_ids(ids: Sequence[int]) -> str:
  """Returns the name of a prompt of which only the token ids are known."""
  return f"token ids {json.dumps([*ids])}"


def _check_text(record: Any, line: str) -> None:
  """Raises ValueError for an escaped half of a surrogate pair."""
  if "\\u" not in line:
    return
  try:
    json.dumps(record, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    half = error.object[error.start : error.end]
    raise ValueError(f"must be text, not {half!r:.40} alone") from error


def by_prompt_id(
    completions: Mapping[str, list[Completion]], task: base.Task, tokenizer: Any
) -> dict[int, list[Completion]]:
  """Returns the completions of a task's training prompts, by prompt id.

  A prompt in the log must equal the task's text or messages, or its decoded
  tokens, as in `samples.jsonl`. Other prompts are skipped.

  Raises:
    ValueError: two prompts of the task have the same text, and the log has
      rewards for it, which may belong to either prompt.
  """
  out = {}
  first: dict[str, int] = {}
  for prompt_id in range(task.num_prompts(base.TRAIN)):
    prompt = task.prompt(base.TRAIN, prompt_id)
    text = base.plain_text(prompt)
    if text not in completions:
      text = base.plain_text([{"role": "user", "content": prompt}])
    if text not in completions:
      ids = tokenizer.encode_prompt(prompt)
      text = tokenizer.decode(ids)
      if text not in completions:
        text = key_of_ids(ids)
    if text in completions:
      other = first.setdefault(text, prompt_id)
      if other != prompt_id and any(
          c.reward is not None for c in completions[text]
      ):
        raise ValueError(
            f"config.offline: training prompts {other} and {prompt_id} have one"
            f" text, {text[:80]!r}, and the log has rewards of it, which may be"
            " of either; must be prompts that differ, or, to sample from a log,"
            " config.offline.reward_field='', where the task judges"
        )
      out[prompt_id] = completions[text]
  return out


def values(
    path: str,
    task: base.Task,
    tokenizer: Any,
    *,
    reward_field: str,
    temperature: float,
) -> np.ndarray:
  """Returns [prompts] float32, values of the training prompts from a log.

      V*(x) = β₁ log 1/N Σ_n exp(r(x, y_n)/β₁)

  over its N completions, with temperature β₁, as A*-PO estimates it from
  samples of the reference (arXiv:2505.20686).

  Raises:
    ValueError: the log is invalid, or lacks a training prompt of the task.
  """
  completions = by_prompt_id(read(path, reward_field), task, tokenizer)
  num_prompts = task.num_prompts(base.TRAIN)
  if lacking := [i for i in range(num_prompts) if i not in completions]:
    first = base.plain_text(task.prompt(base.TRAIN, lacking[0]))
    raise ValueError(
        f"config.loss.baseline_file = {path!r}: must be a file with all"
        f" {num_prompts} training prompts; {len(lacking)} are missing, the"
        f" first is {first[:80]!r}"
    )
  out = []
  for prompt_id in range(num_prompts):
    scaled = np.array([c.reward for c in completions[prompt_id]]) / temperature
    total = np.logaddexp.reduce(scaled) - math.log(len(scaled))
    out.append(temperature * total)
  return np.array(out, np.float32)


def _parse(record: Any, reward_field: str) -> list[tuple[str, Completion]]:
  """Returns the completions of a record, each with its prompt."""
  if not isinstance(record, dict):
    raise ValueError("must be a JSON object")
  try:
    episodes = episode_formats.parse(record, reward_field)
  except episode_formats.UnusableError as error:
    none = Completion(None, None, None, None, -1, None, unusable=str(error))
    return [("", none)]
  if episodes is not None:
    return [_of_episode(episode, reward_field) for episode in episodes]
  prompt = record.get("prompt", record.get("messages"))
  if not isinstance(prompt, str) and not base.are_messages(prompt):
    raise ValueError(
        f"prompt: must be a text or messages, not {_short(prompt)}"
    )
  prompt = base.plain_text(prompt)
  seed = record.get("seed")
  common = {
      "group": str(record.get("seed", record.get("prompt_id", ""))),
      "seed": seed if type(seed) is int else None,
  }
  if "completions" not in record:
    one = _completion(record, record.get(reward_field), reward_field)
    return [(prompt, dataclasses.replace(one, **common))]
  completions = record["completions"]
  if completions == [] and "failure" in record:
    completions = [{"failure": record["failure"], "text": ""}]
  if not isinstance(completions, list) or not completions:
    raise ValueError("completions: must be a list of one or more")
  completions = [{"text": c} if isinstance(c, str) else c for c in completions]
  if not all(isinstance(c, dict) for c in completions):
    raise ValueError("completions: must be texts or JSON objects")
  rewards = [None] * len(completions)
  if reward_field:
    rewards = record.get(f"{reward_field}s", rewards)
  if not isinstance(rewards, list) or len(rewards) != len(completions):
    raise ValueError(
        f"{reward_field}s: must be a list of {len(completions)} numbers"
    )
  made = [
      _completion(c, c.get(reward_field, reward), reward_field)
      for c, reward in zip(completions, rewards)
  ]
  return [(prompt, dataclasses.replace(c, **common)) for c in made]


def _of_episode(
    episode: episode_formats.Episode, reward_field: str
) -> tuple[str, Completion]:
  """Returns the prompt and the completion of an episode."""
  tokens = episode.tokens
  completion = Completion(
      text=None,
      token_ids=tokens and tokens.ids,
      reward=_reward(episode.reward, reward_field),
      logprobs=tokens and tokens.logprobs,
      version=episode.version,
      stopped=episode.stopped,
      episode=episode,
  )
  if completion.logprobs and not _are_finite(completion.logprobs):
    raise ValueError("log-probs: must be finite")
  if episode.prompt is None:
    return key_of_ids(tokens.prompt), completion
  return base.plain_text(episode.prompt), completion


def _completion(
    record: Mapping[str, Any], reward: Any, reward_field: str
) -> Completion:
  text = record.get("text", record.get("completion"))
  ids, logprobs = record.get("token_ids"), record.get("logprobs")
  tokens = record.get("tokens")
  version, reason = record.get("version"), record.get("finish_reason")
  if text is not None and not isinstance(text, str):
    raise ValueError(f"completion: must be a text, not {_short(text)}")
  if ids is None and text is None:
    raise ValueError("must be a completion (text) or token_ids")
  if ids is not None and not (ids and _are_ids(ids)):
    raise ValueError("token_ids: must be a list of one or more ids")
  if tokens is not None and not (tokens and _are_strings(tokens)):
    raise ValueError(
        "tokens: must be a list of one or more strings of tokens, not"
        f" {_short(tokens)}; token_ids has ids"
    )
  if ids is not None and tokens is not None and len(ids) != len(tokens):
    raise ValueError("tokens: must be one for each of token_ids")
  failed = record.get("failure") is not None
  sampled, known = None, False
  if isinstance(logprobs, list):
    # A run's log has null for environment tokens.
    if None in logprobs and any(x is not None for x in logprobs):
      sampled = tuple(x is not None for x in logprobs)
      logprobs = [0.0 if x is None else x for x in logprobs]
    known = _are_numbers(logprobs) and _are_finite(logprobs)
    for name, some in (("token_ids", ids), ("tokens", tokens)):
      if some is not None and len(some) != len(logprobs):
        raise ValueError(f"logprobs: must be one for each of {name}")
  if version == -1:  # A run's samples from a log.
    version = None
    if known and not any(logprobs):
      logprobs, known = None, False
  if version is not None and not _are_ids([version]):
    raise ValueError("version: must be a whole number from 0 on")
  if reason not in (None, "length", *_STOPS):
    allowed = ", ".join(map(json.dumps, ("length", *_STOPS)))
    raise ValueError(f"finish_reason: must be {allowed}, not {_short(reason)}")
  return Completion(
      text=text,
      token_ids=None if ids is None else tuple(ids),
      reward=None if failed else _reward(reward, reward_field),
      logprobs=tuple(logprobs) if known else None,
      version=-1 if version is None else version,
      stopped=None if reason is None else reason != "length",
      tokens=None if tokens is None else tuple(tokens),
      sampled=sampled,
      lacks_logprobs=logprobs is not None and not known,
      unusable="failed in their environment" if failed else "",
  )


def _reward(value: Any, reward_field: str) -> float | None:
  if not reward_field:
    return None
  if not (_are_numbers([value]) and _are_finite([value])):
    raise ValueError(f"{reward_field}: must be a number, not {_short(value)}")
  return float(value)


def _are_ids(values: Any) -> bool:
  return isinstance(values, list) and all(
      type(v) is int and v >= 0 for v in values
  )


def _are_strings(values: Any) -> bool:
  """Returns whether values are a list of token strings or nulls."""
  return isinstance(values, list) and all(
      isinstance(v, str | None) for v in values
  )


def _are_numbers(values: Any) -> bool:
  return isinstance(values, list) and all(
      type(v) in (int, float) for v in values
  )


def _are_finite(values: Sequence[float]) -> bool:
  """Returns whether all numbers fit into float32."""
  return all(abs(value) <= _MAX_NUMBER for value in values)


def _short(value: Any) -> str:
  return f"{json.dumps(value)[:60]}"
