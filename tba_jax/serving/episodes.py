# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Episodes that agents play over HTTP, recorded as token ids.

    POST /api/v1/create_episode        {"sampling_session_id"} -> {"episode_id"}
    POST /episodes/ID/v1/chat/completions, /episodes/ID/v1/completions
    POST /episodes/ID/v1/messages, /episodes/ID/v1/responses
    GET  /episodes/ID/v1/models
    POST /api/v1/episodes/ID/finish    {"reward"}; null drops the episode
    GET  /api/v1/episodes/ID           rows: ids, mask, log-probs, versions

An agent that uses OpenAI's or Anthropic's API is pointed at its episode's URL
and runs unmodified. A row of an episode is a prompt and its continuation: the
token ids that the model saw and sampled, never encoded again. A call continues
a row if its messages start with the row's messages, and the chat template
renders these as exactly the row's text; the text rendered after it is encoded
and appended. A template that refuses turns as sampled (gpt-oss's) renders them
parsed instead, which must not depend on the messages after them. Otherwise the
call starts a new row: `rewritten` counts calls whose history the template
renders differently, `branched` calls with another history. Rows of an agent
with another system prompt or other tools than the task's are marked.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
from typing import Any

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import strict_json
from tba_jax.chat_api import tool_calls
from tba_jax.models import dialogue
from tba_jax.models import tokenizer as tokenizer_lib

# Characters up to which a text is always encoded: runs of spaces and unknown
# words may be longer than the tokenizer's longest token.
_SHORT_TEXT = 2**14
_NO_TOOLS = "0-"  # Start of the key of an agent without tools.
FIRST, REWRITTEN, BRANCHED = "first", "rewritten", "branched"


@dataclasses.dataclass
class EpisodeRow:
  """A prompt and its continuation, token by token.

  messages: chat history as sent by the agent; None for a text prompt.
  rendered: chat history for the chat template, with turns as sampled.
  tokens: [L] token ids.
  start: number of tokens before the first sampled one.
  sampled: [L], whether the policy sampled each token.
  logprobs: [L], log-prob of each sampled token, nats, 0 elsewhere.
  versions: [L], optimizer steps of the params that sampled each token, -1
    elsewhere.
  stopped: whether a stop token or stop string ended the last turn.
  agent: number of tools and digest of the system prompt and tools of the row's
    first call.
  """

  messages: list[dict[str, Any]] | None
  rendered: list[dict[str, Any]]
  text: str = ""
  tokens: list[int] = dataclasses.field(default_factory=list)
  start: int = 0
  sampled: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  stopped: bool = False
  agent: str = _NO_TOOLS

  def to_json(self, *, is_task: bool) -> dict[str, Any]:
    """Returns prompt, completion, and the completion's arrays, as JSON."""
    n = self.start
    return {
        "is_task": is_task,
        "prompt_ids": self.tokens[:n],
        "completion_ids": self.tokens[n:],
        "sampled_mask": [int(x) for x in self.sampled[n:]],
        "logprobs": self.logprobs[n:],
        "versions": self.versions[n:],
        "stopped": self.stopped,
    }


@dataclasses.dataclass(frozen=True)
class Turn:
  """Place of a call in an episode.

  row: index of the call's row, the next index if the call starts a row.
  length: number of the row's tokens before the call.
  tokens: [P] token ids that the model sees.
  text: prompt text, which `tokens` encode.
  rendered: messages for the chat template.
  start: number of the row's tokens before its first sampled one.
  cause: reason for a new row; "" if the call continues a row.
  agent: see `EpisodeRow`.
  """

  row: int
  length: int
  tokens: Sequence[int]
  text: str
  rendered: Sequence[Mapping[str, Any]]
  start: int
  cause: str
  agent: str = _NO_TOOLS


class Episode:
  """The rows of an episode, and how its calls continue them.

  rows: token rows, in the order of their first calls.
  counts: number of calls, and of rows after the first by cause.

  Args:
    tokenizer: encoder of texts, with a chat template for chat calls.
    most_tokens: context length of the model.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer, most_tokens: int):
    self._tokenizer = tokenizer
    self._most_tokens = most_tokens
    self._reads_reasoning = tokenizer.reads_reasoning
    self.rows: list[EpisodeRow] = []
    self.counts = {"calls": 0, REWRITTEN: 0, BRANCHED: 0}

  def begin(self, call: chat_requests.CompletionRequest) -> Turn:
    """Returns the place of a call; changes nothing.

    Raises:
      ValueError: the chat template is missing or rejects the messages, or the
        call is too long for the model's context.
    """
    if call.prompt is not None and not isinstance(call.prompt, str):
      self._check_room(len(call.prompt), self._most_tokens, "tokens")
    if call.chat is None:
      return self._text_turn(call)
    return dataclasses.replace(self._chat_turn(call), agent=_agent_of(call))

  def _chat_turn(self, call: chat_requests.CompletionRequest) -> Turn:
    messages, cause = call.chat, BRANCHED if self.rows else FIRST
    tools = call.offered_tools
    if tools and self._tokenizer.chat_template:
      tool_calls.check_template(self._tokenizer.chat_text)
    sent = [self._for_template(message) for message in messages]
    for index, row in reversed(list(enumerate(self.rows))):
      num_known = len(row.messages or ())
      if not num_known or num_known == len(messages):
        continue
      # Clients spell the arguments of calls in their own way.
      known = [self._for_template(message) for message in row.messages]
      if sent[:num_known] != known:
        continue
      text, rendered, continues = self._render_after(
          row, known, sent[num_known:], tools
      )
      if continues:
        return self._go_on(index, text, rendered)
      cause = REWRITTEN
      break
    else:
      rendered = sent
      text = self._tokenizer.chat_text(rendered, tools=tools)
    ids = self._encode(text)
    return Turn(len(self.rows), 0, ids, text, rendered, len(ids), cause)

  def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
    return dialogue.for_template(message, reads_reasoning=self._reads_reasoning)

  def _render_after(
      self,
      row: EpisodeRow,
      known: Sequence[Mapping[str, Any]],
      new: Sequence[Mapping[str, Any]],
      tools: Sequence[Mapping[str, Any]],
  ) -> tuple[str, list[Mapping[str, Any]], bool]:
    """Renders a row's messages and new ones.

    Args:
      row: existing row to continue.
      new: messages after them.
      tools: JSON schemas to present to the model.

    Returns:
      The text, its messages, and whether the text continues the row's.
    """
    chat = [*row.rendered, *new]
    try:
      text = self._tokenizer.chat_text(chat, tools=tools)
      return text, chat, text.startswith(row.text)
    except ValueError:
      # Harmony's template refuses turns as sampled: take what it writes after
      # the parsed turns.
      parsed = [*known, *new]
      text = self._tokenizer.chat_text(parsed, tools=tools)
      before = self._tokenizer.chat_text(known, asks=False, tools=tools)
      if row.stopped and text.startswith(before):
        return row.text + text[len(before) :], chat, True
      return text, parsed, False

  def _text_turn(self, call: chat_requests.CompletionRequest) -> Turn:
    for index, row in reversed(list(enumerate(self.rows))):
      if row.messages is not None:
        continue
      if isinstance(call.prompt, str):
        if call.prompt.startswith(row.text):
          return self._go_on(index, call.prompt, ())
      elif list(call.prompt[: len(row.tokens)]) == row.tokens:
        more = call.prompt[len(row.tokens) :]
        text = row.text + self._tokenizer.decode(more, within=True)
        return Turn(
            index, len(row.tokens), call.prompt, text, (), row.start, ""
        )
    if isinstance(call.prompt, str):
      text = call.prompt
      ids = self._encode(text, self._tokenizer.encode_prompt)
    else:
      ids = list(call.prompt)
      text = self._tokenizer.decode(ids)
    cause = BRANCHED if self.rows else FIRST
    return Turn(len(self.rows), 0, ids, text, (), len(ids), cause)

  def _go_on(
      self, index: int, text: str, rendered: Sequence[Mapping[str, Any]]
  ) -> Turn:
    row = self.rows[index]
    after = functools.partial(self._tokenizer.encode, after=row.tokens)
    ids = self._encode(text[len(row.text) :], after)
    tokens = [*row.tokens, *ids]
    return Turn(index, len(row.tokens), tokens, text, rendered, row.start, "")

  def _encode(
      self, text: str, encode: Callable[[str], list[int]] | None = None
  ) -> list[int]:
    """Returns the ids of a text, after a check of its length.

    Tokenizers take seconds for a megabyte.
    """
    most = self._most_tokens * self._tokenizer.longest_token
    most = max(_SHORT_TEXT, most)
    self._check_room(len(text), most, "characters")
    return (encode or self._tokenizer.encode)(text)

  def _check_room(self, size: int, most: int, unit: str) -> None:
    if size > most:
      raise ValueError(
          f"{strict_json.TOO_LONG}: the call has {size} {unit}; must be up to"
          f" {most} with config.sampling.max_prompt_tokens ="
          f" {self._most_tokens}"
      )

  def end(
      self,
      turn: Turn,
      tokens: Sequence[int],
      logprobs: Sequence[float],
      *,
      stopped: bool,
      version: int,
  ) -> dict[str, Any]:
    """Returns the record of an answered call, JSON, for `add`.

    Args:
      turn: place of the call, from `begin`.
      logprobs: their log-probs, nats.
      stopped: whether a stop token or stop string ended it.
      version: optimizer steps of the params that sampled it.
    """
    cause, row, length = turn.cause, turn.row, turn.length
    is_new = bool(cause) or len(self.rows[row].tokens) != length
    if is_new:
      # Without a cause: a concurrent call has already extended the row.
      row, length = len(self.rows), 0
      cause = BRANCHED if self.rows and cause != REWRITTEN else cause
    return {
        "row": row,
        "cause": cause,
        "agent": turn.agent,
        "context_ids": list(turn.tokens[length:]),
        "text": turn.text,
        "rendered": list(turn.rendered),
        "token_ids": [int(i) for i in tokens],
        "logprobs": [float(x) for x in logprobs],
        "stopped": stopped,
        "version": version,
    }

  def add(
      self,
      record: Mapping[str, Any],
      messages: Sequence[Mapping[str, Any]] | None,
      answer: Mapping[str, Any],
  ) -> None:
    """Adds an answered call.

    Args:
      record: result of `end`.
      messages: chat history of the call; None for a text prompt.
      answer: the assistant's message, as sent to the agent.
    """
    is_chat, context = messages is not None, record["context_ids"]
    if record["row"] == len(self.rows):
      self.rows.append(
          EpisodeRow(
              [] if is_chat else None,
              [],
              start=len(context),
              agent=record.get("agent", _NO_TOOLS),
          )
      )
    if record["cause"] in self.counts:
      self.counts[record["cause"]] += 1
    self.counts["calls"] += 1
    row, ids = self.rows[record["row"]], record["token_ids"]
    row.tokens += [*context, *ids]
    row.sampled += [False] * len(context) + [True] * len(ids)
    row.logprobs += [0.0] * len(context) + list(record["logprobs"])
    row.versions += [-1] * len(context) + [record["version"]] * len(ids)
    row.stopped = record["stopped"]
    row.text = record["text"] + self._tokenizer.decode(ids, within=True)
    if is_chat:
      content = self._tokenizer.split_stop(ids)[0]
      text = self._tokenizer.decode(content, within=True)
      row.messages = [*messages, dict(answer)]
      row.rendered = [
          *record["rendered"],
          {"role": "assistant", "content": text},
      ]

  def to_json(self) -> dict[str, Any]:
    """Returns the rows and counts.

    The task's rows belong to the first agent with tools, or to the first agent
    if none has tools. Agents differ in system prompt, or in having tools:
    requests for a title have none, and an agent called by another one comes
    after its caller.
    """
    agents = [row.agent for row in self.rows]
    with_tools = [a for a in agents if not a.startswith(_NO_TOOLS)]
    task = (with_tools or agents or [""])[0]
    rows = [row.to_json(is_task=row.agent == task) for row in self.rows]
    return {"rows": rows, **self.counts}


def _agent_of(call: chat_requests.ChatRequest) -> str:
  """Returns whether there are tools, 0 or 1, and a digest of the system prompt.

  An agent may offer other tools in later calls, or none in its last.
  """
  is_system = lambda message: message["role"] in ("system", "developer")
  system = [m["content"] for m in itertools.takewhile(is_system, call.chat)]
  text = json.dumps(system, sort_keys=True)
  digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
  return f"{int(bool(call.tools))}-{digest}"
