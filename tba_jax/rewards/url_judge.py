# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges over HTTP: scores by a model of an OpenAI-compatible API.

`reward.rubric`, filled in for a completion, is the user's message of a request
to `reward.url`/chat/completions. The number in the answer, scaled from
`reward.score_range` to [0, 1], is the part "judge" of the task's reward.

A request without a score is repeated, later each time, and not before the
server's Retry-After. While the server cannot be reached or is overloaded, it is
repeated up to `reward.outage_s`; after any other failure `reward.retries`
times, but never if the server refuses it. Then the completion has failed
(`judges.py`):

    deadline     no answer in time
    unreachable  no connection, or the server is overloaded
    server       the server failed
    refused      the server refuses the request
    answer       the answer has no score

WORKDIR/judge.jsonl has every answer with its tokens, and its score unless it
has none. It answers equal requests, also after a restart.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import dataclasses
import datetime
from email import utils as email_utils
import hashlib
import http.client
import json
import math
import os
import pathlib
import queue
import random
import re
import threading
import time
from typing import Any, NoReturn
from urllib import error as urllib_error
from urllib import request as urllib_request

import ml_collections

from tba_jax.rewards import judges
from tba_jax.rewards import settings
from tba_jax.system import jsonl
from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import custom_task

FILE_NAME = "judge.jsonl"
# Seconds before the first repetition; doubled for each further one.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
# Attempts at the start, and the longest Retry-After that is followed there.
_PROBES, _PROBE_WAIT_S = 3, 10.0
_MAX_ANSWER = 1 << 24  # Bytes.
# Characters at an answer's end that are searched for the score.
_MAX_SEARCHED = 10_000
_MAX_SHOWN = 200
_OVERLOADED = (429, 502, 503, 504)
_REPEATED = (408, 409, 425)
_NUMBER = re.compile(r"(?<![\w.])-?\d++(?:\.\d++)?+(?!\w)")
# Status -> settings that may be wrong.
_AT_FAULT = {
    401: ("key_variable",),
    403: ("key_variable",),
    404: ("url", "judge_model"),
    400: ("judge_model", "request"),
    422: ("judge_model", "request"),
}


class JudgeDownError(RuntimeError):
  """No score came for longer than `reward.outage_s`."""


class AttemptError(Exception):
  """A request brought no score.

  cause: name of the failure, as in the module's docstring.
  names: settings that may be wrong, without their section.
  wait_s: the server's Retry-After in seconds, else 0.
  tokens: cost of the request, as in `Score`.
  """

  def __init__(
      self,
      cause: str,
      message: str,
      names: Sequence[str] = ("url",),
      *,
      wait_s: float = 0.0,
      tokens: tuple[int, ...] = (),
  ):
    super().__init__(message)
    self.cause = cause
    self.names = names
    self.wait_s = wait_s
    self.tokens = tokens


@dataclasses.dataclass(frozen=True)
class Score:
  """A judge's score.

  value: number from 0 to 1.
  tokens: numbers of prompt and completion tokens; () if the server does not
    count.
  """

  value: float
  answer: str
  tokens: tuple[int, ...] = ()


class _NoRedirects(urllib_request.HTTPRedirectHandler):
  """Follows no redirect, which would take the key to another server."""

  def redirect_request(self, *arguments: Any) -> None:
    return None


class Endpoint:
  """Requests to `reward.url`; thread-safe."""

  def __init__(self, config_reward: ml_collections.ConfigDict):
    self._config = config_reward
    self._url = config_reward.url.rstrip("/") + "/chat/completions"
    self._fields = settings.request_fields(config_reward.request)
    self._low, self._high = settings.score_range(config_reward.score_range)
    # Proxies of the environment apply.
    self._opener = urllib_request.build_opener(_NoRedirects)
    self._headers = {"Content-Type": "application/json"}
    self._key = os.environ.get(config_reward.key_variable, "").strip()
    if self._key:
      self._headers["Authorization"] = f"Bearer {self._key}"

  def request(self, text: str) -> bytes:
    """Returns the body of a request with a filled-in rubric."""
    body = {
        **self._fields,
        "model": self._config.judge_model,
        "messages": [{"role": "user", "content": text}],
    }
    return json.dumps(body, sort_keys=True).encode()

  def ask(self, body: bytes) -> Score:
    """Sends a request once; waits for `reward.deadline_s` at most.

    Raises AttemptError without a score.
    """
    results: queue.SimpleQueue[Score | Exception] = queue.SimpleQueue()

    def send() -> None:
      try:
        results.put(self._score(self._send(body)))
      except Exception as error:  # Raised again below.
        results.put(error)

    # A thread, since a socket's timeout is for each read; a daemon, since a
    # server that hangs would block a join.
    threading.Thread(target=send, daemon=True).start()
    deadline_s = self._config.deadline_s
    try:
      result = results.get(timeout=deadline_s)
    except queue.Empty:
      raise AttemptError(
          "deadline", f"gave no answer within {deadline_s:g} s", ("deadline_s",)
      ) from None
    if isinstance(result, AttemptError):
      raise result
    if isinstance(result, Exception):
      raise AttemptError(
          "answer", self._shown(f"cannot be read: {result!r}")
      ) from result
    return result

  def _send(self, body: bytes) -> bytes:
    request = urllib_request.Request(self._url, body, self._headers)
    try:
      with self._opener.open(
          request, timeout=self._config.deadline_s
      ) as answer:
        return answer.read(_MAX_ANSWER)
    except urllib_error.HTTPError as error:
      with error:
        self._refuse(error)
    except TimeoutError:
      raise AttemptError(
          "deadline",
          f"gave no answer within {self._config.deadline_s:g} s",
          ("deadline_s",),
      ) from None
    except (OSError, http.client.HTTPException) as error:
      why = getattr(error, "reason", None) or error
      raise AttemptError(
          "unreachable", self._shown(f"does not answer: {why}")
      ) from None
    except ValueError:  # Its message may show the key.
      raise AttemptError(
          "refused",
          "cannot be asked: invalid URL or key",
          ("url", "key_variable"),
      ) from None

  def _refuse(self, error: urllib_error.HTTPError) -> NoReturn:
    status = error.code
    try:
      detail = error.read(_MAX_ANSWER).decode(errors="replace")
    except (OSError, http.client.HTTPException):
      detail = ""
    if status in _OVERLOADED:
      cause = "unreachable"
    elif status >= 500 or status in _REPEATED:
      cause = "server"
    else:
      cause = "refused"
    where = error.headers.get("Location") if status < 400 else None
    raise AttemptError(
        cause,
        self._shown(f"answered {status}: {where or detail}"),
        _AT_FAULT.get(status, ("url",)),
        wait_s=_retry_after_s(error.headers.get("Retry-After", "")),
    )

  def _shown(self, text: str) -> str:
    """Returns a text on one line, shortened and without the key."""
    if self._key:
      text = text.replace(self._key, "***")
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"

  def _score(self, data: bytes) -> Score:
    try:
      answer = json.loads(data)
      choice = answer["choices"][0]
      text = choice["message"]["content"]
      is_cut = choice.get("finish_reason") == "length"
    except (
        ValueError, LookupError, TypeError, AttributeError, RecursionError
    ):  # fmt: skip
      shown = self._shown(data[: 4 * _MAX_SHOWN].decode(errors="replace"))
      raise AttemptError(
          "answer", f"answered no chat completion: {shown}"
      ) from None
    tokens = _tokens(answer.get("usage"))
    text = text if isinstance(text, str) else ""
    value = self.parse(text)
    if is_cut and re.search(r"[\d.]\s*$", text):
      value = None  # Perhaps the first digits of a number.
    if value is None:
      raise AttemptError(
          "answer",
          f"answered {self._shown(text)!r}, which has not exactly one number"
          f" in {self._config.score_range}"
          + (", as config.reward.score_pattern finds it"
             if self._config.score_pattern else ""),
          ("rubric", "score_range", "score_pattern"),
          tokens=tokens,
      )  # fmt: skip
    if self._key:
      text = text.replace(self._key, "***")
    return Score(value, text, tokens)

  def parse(self, answer: str) -> float | None:
    """Returns the score of an answer, from 0 to 1; None if it has none.

    Without a pattern the answer has one number, which "/10" or "out of 10" may
    follow if the highest score is 10.
    """
    text = answers.after_thinking(answer)[-_MAX_SEARCHED:]
    if self._config.score_pattern:
      *_, found = [None, *re.finditer(self._config.score_pattern, text)]
      texts = [found[1] or ""] if found else []
    else:
      highest = re.escape(self._config.score_range.partition(":")[2])
      highest = rf"(?:/|out of)\s*{highest}(?![\w.]*\d)"
      texts = [m[0] for m in _NUMBER.finditer(re.sub(highest, " ", text))]
    try:
      (score,) = map(float, texts)
    except ValueError:
      return None
    if not self._low <= score <= self._high:
      return None
    return (score - self._low) / (self._high - self._low)


def _retry_after_s(text: str) -> float:
  """Returns the seconds of a Retry-After, a number or a date; 0 if invalid."""
  try:
    seconds = float(text)
  except ValueError:
    try:
      until = email_utils.parsedate_to_datetime(text)
      seconds = (until - datetime.datetime.now(until.tzinfo)).total_seconds()
    except (ValueError, OverflowError):
      return 0.0
  return min(max(seconds, 0.0), 1e6) if seconds == seconds else 0.0


def _tokens(usage: Any) -> tuple[int, ...]:
  if not isinstance(usage, Mapping):
    return ()
  counts = [usage.get(f"{name}_tokens") for name in ("prompt", "completion")]
  are_counts = all(type(n) is int and 0 <= n < 2**31 for n in counts)
  return tuple(counts) if are_counts else ()


class UrlJudge(judges.Judge):
  """Adds the score of `reward.url` to the judgements of another judge."""

  def __init__(
      self,
      config_reward: ml_collections.ConfigDict,
      workdir: str | pathlib.Path,
      task: custom_task.CustomTask,
      inner: judges.Judge,
      *,
      on_event: judges.OnEvent | None = None,
  ):
    """Reads the scores of earlier starts.

    Args:
      config_reward: `config.reward`.
      workdir: directory of `judge.jsonl`; "" keeps scores in memory only.
      task: source of prompts and rows; has a judge.
      inner: judge of the other parts of the reward; closed with this one.
      on_event: sink of events, as in `Judge`, and of "judge_retry".
    """
    super().__init__(on_event=on_event)
    self._config = config_reward
    self._task = task
    self._inner = inner
    self._endpoint = Endpoint(config_reward)
    self._retries = judges.FailureLog("judge_retry", on_event)
    self._scores: dict[str, float] = {}
    self._file: jsonl.LineWriter | None = None
    if str(workdir):
      path = pathlib.Path(workdir) / FILE_NAME
      for record in jsonl.iter_jsonl(path):
        if isinstance(record.get("score"), float):
          self._scores[str(record.get("request"))] = record["score"]
      self._file = jsonl.LineWriter(path)
    # When the last score came, or when requests without one began; None while
    # there are none.
    self._without_score_s: float | None = None
    self._last_score_s = -math.inf
    self._idle_since_s = 0.0
    self._down = ""
    self._ends = threading.Event()
    self._threads = futures.ThreadPoolExecutor(
        config_reward.concurrency, thread_name_prefix="url_judge"
    )

  def _judge(
      self, requests: Sequence[judges.JudgeRequest]
  ) -> list[base.Judgement]:
    """Returns one judgement per request; raises JudgeDownError."""
    judged = self._inner.judge(requests)
    if self._without_score_s is not None:
      self._without_score_s += time.monotonic() - self._idle_since_s
    # Equal requests are sent once.
    asked: dict[str, futures.Future[Score | AttemptError]] = {}
    keys: list[str | base.RewardError | None] = []
    for request, one in zip(requests, judged, strict=True):
      keys.append(None if one.failure else self._begin(request, asked))
    try:
      futures.wait(asked.values())
    finally:
      self._idle_since_s = time.monotonic()
    if self._down:
      raise JudgeDownError(self._down)
    results = {key: future.result() for key, future in asked.items()}
    return [
        self._judgement(request, one, key, results)
        for request, one, key in zip(requests, judged, keys)
    ]

  def _begin(
      self,
      request: judges.JudgeRequest,
      asked: dict[str, futures.Future["Score | AttemptError"]],
  ) -> "str | base.RewardError":
    """Sends a completion's request unless its score is known or under way.

    Returns the request's hash, or an error if the rubric does not fit the row.
    """
    try:
      body = self._endpoint.request(
          self._task.fill_in(
              self._config.rubric,
              request.split,
              request.index,
              request.completion,
          )
      )
    except base.RewardError as error:
      return error
    key = hashlib.sha256(body).hexdigest()
    if key not in self._scores and key not in asked:
      asked[key] = self._threads.submit(self._ask, key, body)
    return key

  def _judgement(
      self,
      request: judges.JudgeRequest,
      judged: base.Judgement,
      key: "str | base.RewardError | None",
      results: "dict[str, Score | AttemptError]",
  ) -> base.Judgement:
    if key is None:
      return judged
    if isinstance(key, base.RewardError):
      return self._failed(request, key.cause, str(key))
    result = results.get(key)
    if isinstance(result, AttemptError):
      return self._failed(request, result.cause, str(result))
    parts = {**judged.parts, base.JUDGE: self._scores[key]}
    # An equal completion, or an earlier one, has paid for this score.
    tokens = (0, 0)
    if result is not None:
      tokens = result.tokens
      results[key] = dataclasses.replace(result, tokens=(0, 0))
    names = (f"{base.JUDGE}_prompt_tokens", f"{base.JUDGE}_completion_tokens")
    parts |= zip(names, map(float, tokens))
    summed = self._task.judgement_of_parts(parts, request.completion)
    return self._checked(request, dataclasses.replace(summed, parts=parts))

  def _ask(self, key: str, body: bytes) -> "Score | AttemptError":
    """Asks until there is a score, the request fails or the judge is down."""
    tokens: tuple[int, ...] = ()
    failures = attempts = 0
    first_s = time.monotonic()
    while True:
      if self._ends.is_set():
        return AttemptError("unreachable", "the judge is closed")
      begun_s = time.monotonic()
      try:
        score = self._endpoint.ask(body)
      except AttemptError as error:
        tokens = _sum(tokens, error.tokens)
        self._note_failure(begun_s, error)
        self._retries.add(error.cause, str(error))
        attempts += 1
        # A server that answers other requests is up.
        is_up = self._last_score_s > first_s
        failures += is_up or error.cause != "unreachable"
        if (
            error.cause == "refused"
            or failures > self._config.retries
            or self._ends.wait(self._wait_s(attempts, error.wait_s))
        ):
          self._write(key, None, str(error), tokens)
          return error
        continue
      score = dataclasses.replace(score, tokens=_sum(tokens, score.tokens))
      with self._lock:
        self._without_score_s, self._last_score_s = None, time.monotonic()
        self._scores[key] = score.value
      self._write(key, score.value, score.answer, score.tokens)
      return score

  def _wait_s(self, attempts: int, retry_after_s: float) -> float:
    longest_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempts, 9))
    # Spread, so that requests that failed together do not return together.
    wait_s = longest_s * random.uniform(0.25, 0.5)
    return min(max(wait_s, retry_after_s), self._config.outage_s)

  def _note_failure(self, begun_s: float, error: AttemptError) -> None:
    """Ends all requests if there has been no score for too long."""
    with self._lock:
      if self._without_score_s is None:
        self._without_score_s = max(begun_s, self._last_score_s)
      waited_s = time.monotonic() - self._without_score_s
      if waited_s < self._config.outage_s or self._down:
        return
      self._down = (
          f"config.reward.url = {self._config.url!r}: the judge has given no"
          f" score for {waited_s:.0f} s (config.reward.outage_s ="
          f" {self._config.outage_s:g}); last cause: {error}. Resume the run"
          " once it answers"
      )
      self._ends.set()

  def _write(
      self, key: str, score: float | None, answer: str, tokens: tuple[int, ...]
  ) -> None:
    if self._file is None:
      return
    record = {"request": key, "score": score, "answer": answer,
              "tokens": list(tokens)}  # fmt: skip
    self._file.write(record)

  def _explain(self, requests: Sequence[judges.JudgeRequest]) -> list[str]:
    return self._inner.explain(requests)

  def totals(self) -> dict[str, Any]:
    out = super().totals()
    for cause, count in self._inner.totals()["failures"].items():
      out["failures"][cause] = out["failures"].get(cause, 0) + count
    return out

  def close(self) -> None:
    """Ends requests under way and closes the other judge."""
    self._ends.set()
    self._threads.shutdown()
    self._inner.close()
    if self._file is not None:
      self._file.close()


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(map(sum, zip(a, b))) if a and b else a or b


def probe(
    config_reward: ml_collections.ConfigDict, task: custom_task.CustomTask
) -> str:
  """Judges the reference answer of the first training prompt, uncached.

  Without a reference, the prompt's text stands in for it.

  Returns:
    A line with the judge's answer.

  Raises:
    ValueError: there is no score; the message names the setting.
  """
  prompt = base.plain_text(task.prompt(base.TRAIN, 0))
  text = base.reference_text(task, base.TRAIN, 0) or prompt
  try:
    filled = task.fill_in(config_reward.rubric, base.TRAIN, 0, text)
  except base.RewardError as error:
    raise ValueError(f"config.reward.rubric: {error}") from error
  endpoint, started_s = Endpoint(config_reward), time.monotonic()
  body = endpoint.request(filled)
  for number in range(1, _PROBES + 1):
    try:
      score = endpoint.ask(body)
      break
    except AttemptError as error:
      is_lasting = error.cause not in ("unreachable", "server")
      if is_lasting or number == _PROBES:
        named = " or ".join(
            f"config.reward.{name} = {config_reward[name]!r:.80}"
            for name in error.names
        )
        raise ValueError(
            f"{named}: the judge at {config_reward.url} {error}"
        ) from error
      time.sleep(max(number, min(error.wait_s, _PROBE_WAIT_S)))
  seconds = time.monotonic() - started_s
  answer = " ".join(score.answer.split())
  tokens = f", {sum(score.tokens)} tokens" if score.tokens else ""
  return (
      f"judge: {config_reward.judge_model} at {config_reward.url} answers"
      f" {answer:.{_MAX_SHOWN}}, a reward of {score.value:.3g} for the answer"
      f" to the first prompt of train ({seconds:.1f} s{tokens})"
  )
