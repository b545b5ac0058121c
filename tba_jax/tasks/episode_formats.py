# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logged episodes of several turns, in the formats of other programs.

A record is recognized by its keys:

    openai      messages with an assistant's; tools, reward
    anthropic   the same with blocks tool_use, tool_result or thinking, or with
                a field `system`
    verifiers   prompt and completion, the latter a list of messages
    verifiers   nodes, a graph of messages with their tokens (since 0.4)
    atif        schema_version "ATIF-…", agent, steps (Harbor)
    openenv     turns with prompt_token_ids and loss_mask (TrainingTrace)
    serve       rows with completion_ids: an episode of `serve`
    tinker      rows with sampled_tokens: a trajectory in the capture store of
                tinker-cookbook, with a reward added

All become a prompt, the assistant's turns and what answered them, with messages
in the form of OpenAI's chat completions, and token ids if the record has them.

Source: packages openai 3.57, anthropic 2.14, verifiers 0.4, atif 1.8, openenv
0.10 and tinker-cookbook 0.6.1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
from typing import Any

from tba_jax.models import dialogue
from tba_jax.tasks import base

Record = Mapping[str, Any]
_Call = tuple[str, Any, Any, Any, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking")
# Rewards and log-probs are stored as float32.
_LARGEST = base.MAX_REWARD
_NONE_SAMPLED = "have no sampled token"
# Order of an assistant's blocks in a turn.
_TURN = ("thinking", "text", "tool_use")


class UnusableError(ValueError):
  """Reason why a well-formed record cannot be trained on."""


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Token ids of an episode.

  prompt: ids before the first sampled one.
  ids: all later ids.
  sampled: whether a policy sampled each of `ids`.
  logprobs: natural logs, 0 where not sampled; None if unknown.
  num_lost: sampled tokens that are not in `ids`, since their prompt does not
    begin with the tokens before.
  """

  prompt: tuple[int, ...]
  ids: tuple[int, ...]
  sampled: tuple[bool, ...]
  logprobs: tuple[float, ...] | None
  num_lost: int = 0


@dataclasses.dataclass(frozen=True)
class Episode:
  """An episode, as messages, token ids or both.

  format: see the module docstring.
  prompt: messages before the first turn; None if only token ids are known.
  turns: the assistant's turns and their answers.
  tokens: ids that the policy read and sampled; None if unknown.
  reward: unchecked value of the reward's field; None if it is missing.
  stopped: whether a stop token ended the last turn; None if unknown.
  version: step of the sampling params; -1 if unknown.
  """

  format: str
  prompt: Sequence[dialogue.Message] | None
  turns: Sequence[dialogue.Turn]
  tools: Sequence[Record]
  tokens: Tokens | None = None
  reward: Any = None
  stopped: bool | None = None
  version: int = -1


def parse(record: Record, reward_field: str) -> list[Episode] | None:
  """Returns the episodes of a record; None for a record of another kind.

  Args:
    reward_field: name of the reward, at the top of the record or, in ATIF, in
      `extra`; verifiers' sum of `rewards` is used if it has none.

  Raises:
    UnusableError: a message has content other than text, no token is sampled,
      or the episode failed.
    ValueError: a part is wrong; the text names its place.
  """
  read = _reader(record)
  if read is None:
    return None
  if read in (_verifiers, _verifiers_graph):
    if record.get("errors") or record.get("error"):
      raise UnusableError("failed in their environment")
  reward, extra = record.get(reward_field), record.get("extra")
  if reward is None and isinstance(extra, dict):
    reward = extra.get(reward_field)
  if reward is None and read is _verifiers_graph:
    reward = _sum_of_rewards(record)
  return [dataclasses.replace(one, reward=reward) for one in read(record)]


def _reader(record: Record) -> Callable[[Record], list[Episode]] | None:
  """Returns the function that reads a record's format, or None."""
  if str(record.get("schema_version", "")).startswith("ATIF"):
    return _atif
  turns, rows = record.get("turns"), record.get("rows")
  if isinstance(turns, list) and turns and isinstance(turns[0], dict):
    if "completion_token_ids" in turns[0] or "loss_mask" in turns[0]:
      return _openenv
  if isinstance(rows, list) and rows and isinstance(rows[0], dict):
    if "completion_ids" in rows[0]:
      return _serve
    if "sampled_tokens" in rows[0]:
      return _tinker
  if isinstance(record.get("nodes"), list):
    return _verifiers_graph
  if isinstance(record.get("completion"), list):
    return _verifiers
  messages = record.get("messages")
  has_completion = {"completion", "completions", "text", "token_ids"} & {
      *record
  }
  if not isinstance(messages, list) or has_completion:
    return None
  return _anthropic if _is_anthropic(record, messages) else _openai


def _is_anthropic(record: Record, messages: Sequence[Any]) -> bool:
  contents = [m.get("content") for m in messages if isinstance(m, dict)]
  blocks = [b for c in contents if isinstance(c, list) for b in c]
  return "system" in record or any(
      isinstance(b, dict) and b.get("type") in _ANTHROPIC_BLOCKS for b in blocks
  )


def _openai(record: Record) -> list[Episode]:
  messages = _messages(record["messages"], "messages")
  return [_episode("openai", messages, _tools(record, "tools"))]


def _verifiers(record: Record) -> list[Episode]:
  """Reads a prompt and a completion of messages."""
  prompt = record.get("prompt", ())
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  before = _messages(prompt, "prompt")
  after = _messages(record["completion"], "completion", before)
  tools = _tools(record, "tools") or _tools(record, "tool_defs")
  info = record.get("info")
  if not tools and isinstance(info, dict):
    tools = _tools(info, "oai_tools", "info.")
  stopped = False if record.get("is_truncated") else None
  return [
      _episode(
          "verifiers", [*before, *after], tools, len(before), stopped=stopped
      )
  ]


def _verifiers_graph(record: Record) -> list[Episode]:
  """Reads every path from a root of the graph to a leaf."""
  nodes = [
      _object(node, f"nodes[{n}]") for n, node in enumerate(record["nodes"])
  ]
  parents = [node.get("parent") for node in nodes]
  for n, parent in enumerate(parents):
    if parent is not None and not (type(parent) is int and 0 <= parent < n):
      raise ValueError(
          f"nodes[{n}].parent = {_short(parent)}: must be the index of a node"
          " before it"
      )
  calls = [c for c in record.get("calls") or () if isinstance(c, dict)]
  is_cut = bool(calls) and calls[-1].get("finish_reason") == "length"
  out, seen = [], set()
  for leaf in sorted({*range(len(nodes))} - {*parents}):
    path, at = [leaf], parents[leaf]
    while at is not None:
      path.insert(0, at)
      at = parents[at]
    # A turn that several paths share is learned once.
    fresh = {n for n in path if nodes[n].get("sampled")} - seen
    if not fresh:
      continue
    seen |= fresh
    messages: list[dict[str, Any]] = []
    for n in path:
      message = nodes[n].get("message")
      messages += _messages([message], f"nodes[{n}].message", messages)
    for n, message in zip(path, messages):
      if message["role"] == "assistant" and n not in fresh:
        message["is_copied"] = True
    tools = _tools(nodes[path[0]], "tools", f"nodes[{path[0]}].")
    episode = _episode(
        "verifiers",
        messages,
        tools or _tools(record, "tools"),
        stopped=False if is_cut else None,
    )
    tokens = _path_tokens(nodes, path, fresh)
    out.append(dataclasses.replace(episode, tokens=tokens))
  if not out:
    raise ValueError("nodes: must have a message with sampled = true")
  return out


def _sum_of_rewards(record: Record) -> float | None:
  rewards = record.get("rewards")
  if not isinstance(rewards, dict) or not rewards:
    return None
  parts = [
      _object(part, f"rewards.{name}")
      for name, part in rewards.items()
      if part is not None
  ]
  return sum(
      _number(part.get("score"), "rewards.score")
      * _number(part.get("weight", 1.0), "rewards.weight")
      for part in parts
  )


def _path_tokens(
    nodes: Sequence[Record], path: Sequence[int], fresh: set[int]
) -> Tokens | None:
  """Returns the tokens of the nodes of a path; None if some are unknown.

  Sampled are the tokens that the masks of `fresh` nodes mark.
  """
  ids: list[int] = []
  sampled: list[bool] = []
  logprobs: list[float] = []
  for n in path:
    place = f"nodes[{n}]"
    own = _ids(nodes[n].get("token_ids", []), f"{place}.token_ids")
    mask = nodes[n].get("mask", [])
    if not own:
      return None
    if not isinstance(mask, list) or len(mask) != len(own):
      raise ValueError(f"{place}.mask: must be one for each of token_ids")
    known = _list(nodes[n].get("logprobs") or [], f"{place}.logprobs")
    if known and len(known) != sum(map(bool, mask)):
      raise ValueError(
          f"{place}.logprobs: must be one for each token that mask marks"
      )
    if n not in fresh:
      known, mask = (), [False] * len(own)
    given = iter(known)
    ids += own
    sampled += map(bool, mask)
    logprobs += [next(given, None) if m else 0.0 for m in mask]
  return _split(ids, sampled, logprobs, 0)


def _atif(record: Record) -> list[Episode]:
  agent = _object(record.get("agent"), "agent")
  steps = record.get("steps")
  if not isinstance(steps, list) or not steps:
    raise ValueError("steps: must be a list of one or more")
  messages: list[dict[str, Any]] = []
  calls: list[_Call] = []
  for n, step in enumerate(steps):
    place = f"steps[{n}]"
    step = _object(step, place)
    source = step.get("source")
    if source not in ("system", "user", "agent"):
      raise ValueError(
          f"{place}.source = {_short(source)}: must be system, user or agent"
      )
    role = "assistant" if source == "agent" else source
    message = {"role": role, "content": step.get("message")}
    if source == "agent":
      if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
      calls_of_step = _list(step.get("tool_calls") or [], f"{place}.tool_calls")
      message["tool_calls"] = [
          _atif_call(call, f"{place}.tool_calls[{i}]")
          for i, call in enumerate(calls_of_step)
      ]
    made = _message(message, place, messages, "message")
    is_copied = bool(step.get("is_copied_context"))
    if source == "agent" and (is_copied or step.get("llm_call_count") == 0):
      made["is_copied"] = True
    elif source == "agent":
      metrics = _object(step.get("metrics") or {}, f"{place}.metrics")
      ids = [metrics.get(f"{x}_token_ids") for x in ("prompt", "completion")]
      logprobs = metrics.get("logprobs")
      calls.append((f"{place}.metrics", *ids, logprobs, None))
    messages.append(made)
    observation = step.get("observation")
    if observation is None:
      continue
    results = _object(observation, f"{place}.observation").get("results")
    results = _list(results or [], f"{place}.observation.results")
    for i, result in enumerate(results):
      here = f"{place}.observation.results[{i}]"
      result = _object(result, here)
      answer = {"role": "user", "content": result.get("content")}
      if result.get("source_call_id") is not None:
        answer["role"] = "tool"
        answer["tool_call_id"] = result["source_call_id"]
      messages.append(_message(answer, here, messages))
  tools = _tools(agent, "tool_definitions", "agent.")
  episode = _episode("atif", messages, tools)
  tokens = None
  if all(prompt and completion for _, prompt, completion, *_ in calls):
    tokens = _chain(calls)
  return [dataclasses.replace(episode, tokens=tokens)]


def _atif_call(call: Any, place: str) -> dict[str, Any]:
  call = _object(call, place)
  return {
      "id": call.get("tool_call_id"),
      "name": call.get("function_name"),
      "arguments": call.get("arguments"),
  }


def _openenv(record: Record) -> list[Episode]:
  calls, last = [], record["turns"][-1]
  for n, turn in enumerate(record["turns"]):
    turn = _object(turn, f"turns[{n}]")
    calls.append(
        (
            f"turns[{n}]",
            turn.get("prompt_token_ids"),
            turn.get("completion_token_ids"),
            turn.get("per_token_logps"),
            turn.get("loss_mask"),
        )
    )
  tokens = _chain(calls)
  place = f"turns[{len(calls) - 1}]"
  request = _object(last.get("request") or {}, f"{place}.request")
  if not request.get("messages"):
    return [Episode("openenv", None, (), (), tokens)]
  before = _messages(request["messages"], f"{place}.request.messages")
  response = _object(last.get("response") or {}, f"{place}.response")
  choices = response.get("choices")
  if not isinstance(choices, list) or len(choices) != 1:
    raise ValueError(f"{place}.response.choices: must be a list of one")
  choice = _object(choices[0], f"{place}.response.choices[0]")
  after = _messages(
      [choice.get("message")], f"{place}.response.choices[0].message", before
  )
  first = _object(record["turns"][0].get("request") or {}, "turns[0].request")
  # A prompt may show turns of an assistant.
  shown = _list(first.get("messages") or [], "turns[0].request.messages")
  messages = [*before, *after]
  learned = _trained_messages(record["turns"])
  for n, message in enumerate(messages):
    if message["role"] == "assistant" and n not in learned:
      message["is_copied"] = True
  episode = _episode(
      "openenv",
      messages,
      _tools(request, "tools", f"{place}.request."),
      len(shown) or None,
      stopped=False if choice.get("finish_reason") == "length" else None,
  )
  return [dataclasses.replace(episode, tokens=tokens)]


def _trained_messages(turns: Sequence[Record]) -> set[int]:
  """Returns the places of messages whose turns have a token to learn."""
  out = set()
  for n, turn in enumerate(turns):
    request = _object(turn.get("request") or {}, f"turns[{n}].request")
    before = _list(
        request.get("messages") or [], f"turns[{n}].request.messages"
    )
    mask = turn.get("loss_mask")
    if mask is None or any(mask[len(turn["prompt_token_ids"]) :]):
      out.add(len(before))
  return out


def _serve(record: Record) -> list[Episode]:
  """Reads the rows that `GET /api/v1/episodes/ID` returns."""
  out = []
  for n, row in enumerate(record["rows"]):
    place = f"rows[{n}]"
    row = _object(row, place)
    if not row.get("is_task", True):
      continue
    prompt, ids = (
        _ids(row.get(name), f"{place}.{name}")
        for name in ("prompt_ids", "completion_ids")
    )
    mask, logprobs = row.get("sampled_mask"), row.get("logprobs")
    versions = _list(row.get("versions") or [-1], f"{place}.versions")
    for name, values in (("sampled_mask", mask), ("logprobs", logprobs)):
      if not isinstance(values, list) or len(values) != len(ids):
        raise ValueError(
            f"{place}.{name}: must be one for each of completion_ids"
        )
    tokens = _split(
        [*prompt, *ids],
        [False] * len(prompt) + [bool(m) for m in mask],
        [0.0] * len(prompt) + logprobs,
        0,
    )
    version = min(
        (v for v in versions if type(v) is int and v >= 0), default=-1
    )
    stopped = bool(row.get("stopped", True))
    out.append(
        Episode("serve", None, (), (), tokens, stopped=stopped, version=version)
    )
  if not out:
    raise ValueError("rows: must have one with is_task = true")
  return out


def _tinker(record: Record) -> list[Episode]:
  """Reads the calls of an agent, which may have several conversations.

  A call belongs to the last conversation that its prompt continues. Calls
  without sampled tokens are left out.
  """
  conversations: list[list[_Call]] = []
  reasons: dict[int, Any] = {}
  for n, row in enumerate(record["rows"]):
    place = f"rows[{n}]"
    row = _object(row, place)
    prompt, sampled = (
        _ids(row.get(name), f"{place}.{name}")
        for name in ("prompt_tokens", "sampled_tokens")
    )
    if not sampled:
      continue
    for calls in reversed(conversations):
      before = [*calls[-1][1], *calls[-1][2]]
      if prompt[: len(before)] == before:
        break
    else:
      conversations.append(calls := [])
    calls.append((place, prompt, sampled, row.get("logprobs"), None))
    metadata = _object(row.get("metadata") or {}, f"{place}.metadata")
    reasons[id(calls)] = metadata.get("stop_reason")
  if not conversations:
    raise UnusableError(_NONE_SAMPLED)
  return [
      Episode(
          "tinker",
          None,
          (),
          (),
          _chain(calls),
          stopped=False if reasons[id(calls)] == "length" else None,
      )
      for calls in conversations
  ]


def _anthropic(record: Record) -> list[Episode]:
  messages: list[dict[str, Any]] = []
  if record.get("system"):
    text = _text(record["system"], "system")
    messages.append({"role": "system", "content": text})
  for n, message in enumerate(_list(record["messages"], "messages")):
    place = f"messages[{n}]"
    message = _object(message, place)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
      raise ValueError(
          f"{place}.role = {_short(role)}: must be user, assistant or system"
      )
    if isinstance(content, str):
      content = [{"type": "text", "text": content}]
    blocks = [
        _object(block, f"{place}.content[{i}]")
        for i, block in enumerate(_list(content, f"{place}.content"))
    ]
    if role == "assistant":
      messages.append(_from_assistant(blocks, f"{place}.content"))
    else:
      messages += _from_user(role, blocks, f"{place}.content", messages)
  return [_episode("anthropic", messages, _tools(record, "tools"))]


def _from_user(
    role: str, blocks: Sequence[Record], place: str, before: Sequence[Record]
) -> Iterator[dict[str, Any]]:
  """Yields a message for each run of texts and for each result of a call."""
  texts: list[str] = []
  for n, block in enumerate(blocks):
    here = f"{place}[{n}]"
    if block.get("type") == "tool_result":
      if texts:
        yield {"role": role, "content": "".join(texts)}
        texts = []
      content = block.get("content")
      content = _text(content, f"{here}.content") if content else ""
      answer = {
          "role": "tool",
          # Chat templates have no field for errors.
          "content": "error: " * bool(block.get("is_error")) + content,
          "tool_call_id": block.get("tool_use_id"),
      }
      yield _message(answer, here, before, id_name="tool_use_id")
    else:
      texts.append(_text([block], place, n))
  if texts or not blocks:
    yield {"role": role, "content": "".join(texts)}


def _from_assistant(blocks: Sequence[Record], place: str) -> dict[str, Any]:
  """Returns the assistant's message of a turn's blocks."""
  parts: dict[Any, list[Any]] = {kind: [] for kind in _TURN}
  last = 0
  for n, block in enumerate(blocks):
    here, kind = f"{place}[{n}]", block.get("type")
    if kind not in _TURN:
      raise _wrong_block(kind, here, _TURN)
    if _TURN.index(kind) < last:
      raise UnusableError(f"have {kind} after {_TURN[last]} in a turn")
    last = _TURN.index(kind)
    if kind == "tool_use":
      call = {
          "id": block.get("id"),
          "name": block.get("name"),
          "arguments": block.get("input"),
      }
      parts[kind].append(_call(call, here, "input"))
    elif isinstance(block.get(kind), str):
      parts[kind].append(block[kind])
    else:
      raise ValueError(
          f"{here}.{kind} = {_short(block.get(kind))}: must be a text"
      )
  out = {"role": "assistant", "content": "".join(parts["text"])}
  if parts["thinking"]:
    out["reasoning_content"] = "".join(parts["thinking"])
  if parts["tool_use"]:
    out["tool_calls"] = parts["tool_use"]
  return out


def _episode(
    format: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Record],
    first: int | None = None,
    *,
    stopped: bool | None = None,
) -> Episode:
  """Returns the episode of messages in one form.

  Args:
    messages: prompt and episode; `is_copied` marks turns not sampled in it.
    first: number of messages in the prompt; None = those before the first
      sampled turn.
    stopped: see `Episode`.
  """
  is_turn = lambda m: m["role"] == "assistant" and not m.get("is_copied")
  if first is None:
    first = next((n for n, m in enumerate(messages) if is_turn(m)), 0)
  places = [n for n, m in enumerate(messages) if n >= first and is_turn(m)]
  if not places or not first:
    raise ValueError(
        "must have a turn of the assistant, and a message before it"
    )
  # What precedes the first turn of a completion belongs to the prompt.
  first = places[0]
  plain = [{k: v for k, v in m.items() if k != "is_copied"} for m in messages]
  starts = [
      n
      for n, m in enumerate(messages)
      if first <= n <= places[-1] and m["role"] == "assistant"
  ]
  ends = [*starts[1:], len(messages)]
  turns = [
      dialogue.Turn(
          plain[start], plain[start + 1 : end], is_turn(messages[start])
      )
      for start, end in zip(starts, ends)
  ]
  return Episode(format, plain[:first], turns, tools, stopped=stopped)


def _messages(
    value: Any, place: str, before: Sequence[Record] = ()
) -> list[dict[str, Any]]:
  """Returns messages in one form.

  Args:
    place: path of the list; of a message, if it is the only one.
    before: messages before them, whose calls they may answer.
  """
  out: list[dict[str, Any]] = []
  is_one = place.endswith("message")
  for n, message in enumerate(_list(value, place)):
    here = place if is_one else f"{place}[{n}]"
    out.append(_message(_object(message, here), here, [*before, *out]))
  return out


def _message(
    message: Record,
    place: str,
    before: Sequence[Record],
    content_name: str = "content",
    id_name: str = "tool_call_id",
) -> dict[str, Any]:
  """Returns a message in one form: role, text, thinking, calls and names.

  Args:
    message: JSON object of OpenAI's clients.
    place: its path.
    before: earlier messages.
    content_name, id_name: names of these fields in the record, for errors.
  """
  role = message.get("role")
  if role not in _ROLES:
    raise ValueError(
        f"{place}.role = {_short(role)}: must be {', '.join(_ROLES)}"
    )
  content = message.get("content")
  content = "" if content is None else _text(content, f"{place}.{content_name}")
  role = "system" if role == "developer" else role
  out: dict[str, Any] = {"role": role, "content": content}
  if role == "assistant":
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
      if not isinstance(reasoning, str):
        raise ValueError(
            f"{place}.reasoning_content = {_short(reasoning)}: must be a text"
        )
      out["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
      out["tool_calls"] = [
          _call(call, f"{place}.tool_calls[{n}]")
          for n, call in enumerate(_list(calls, f"{place}.tool_calls"))
      ]
    if message.get("weight") == 0:  # OpenAI's mark of turns not to train on.
      out["is_copied"] = True
  if isinstance(message.get("name"), str):
    out["name"] = message["name"]
  if role == "tool" and (id := message.get("tool_call_id")) is not None:
    names = {
        call["id"]: call["function"]["name"]
        for earlier in before
        for call in earlier.get("tool_calls", ())
    }
    if not isinstance(id, str) or id not in names:
      raise ValueError(
          f"{place}.{id_name} = {_short(id)}: must be the id of a call"
          " before it"
      )
    out = {"role": role, "name": names[id], "content": content} | out
    out["tool_call_id"] = id
  return out


def _call(
    call: Any, place: str, arguments_name: str = "arguments"
) -> dict[str, Any]:
  """Returns a tool call in one form, with arguments as JSON text."""
  if isinstance(call, str):  # verifiers' data sets have JSON texts.
    try:
      call = json.loads(call)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{place}: must be a call; {error}") from error
  call = _object(call, place)
  function = call.get("function", call)
  function = _object(function, f"{place}.function")
  name, arguments = function.get("name"), function.get("arguments")
  if not isinstance(name, str) or not name:
    raise ValueError(f"{place}.name = {_short(name)}: must be a text")
  if isinstance(arguments, dict):
    arguments = json.dumps(arguments)
  if not isinstance(arguments, str):
    raise ValueError(
        f"{place}.{arguments_name} = {_short(arguments)}: must be an object, or"
        " its JSON text"
    )
  id = call.get("id")
  if id is not None and not isinstance(id, str):
    raise ValueError(f"{place}.id = {_short(id)}: must be a text")
  return {
      "id": id or "",
      "type": "function",
      "function": {"name": name, "arguments": arguments},
  }


def _tools(record: Record, name: str, above: str = "") -> list[dict[str, Any]]:
  """Returns a field's tools as JSON schemas in OpenAI's form."""
  value = record.get(name)
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{above}{name}: must be tools; {error}") from error
  out = []
  for n, tool in enumerate(_list(value or [], f"{above}{name}")):
    place = f"{above}{name}[{n}]"
    tool = _object(tool, place)
    if "function" in tool:
      function = _object(tool["function"], f"{place}.function")
    else:
      names = ("name", "description", "parameters")
      function = {k: tool[k] for k in names if k in tool}
      if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    if not isinstance(function.get("name"), str):
      raise ValueError(
          f"{place}.name = {_short(function.get('name'))}: must be a text"
      )
    out.append({"type": "function", "function": function})
  return out


def _text(value: Any, place: str, first: int = 0) -> str:
  """Returns the text of a text or of parts, counted from `first`."""
  if isinstance(value, str):
    return value
  texts = []
  for n, part in enumerate(_list(value, place), start=first):
    here = f"{place}[{n}]"
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    part = _object(part, here)
    if part.get("type") != "text":
      raise _wrong_block(part.get("type"), here, ("text",))
    if not isinstance(part.get("text"), str):
      raise ValueError(
          f"{here}.text = {_short(part.get('text'))}: must be a text"
      )
    texts.append(part["text"])
  return "".join(texts)


def _wrong_block(kind: Any, place: str, kinds: Sequence[str]) -> ValueError:
  """Returns the error of a block that is not one of `kinds`."""
  if isinstance(kind, str) and kind:
    return UnusableError(f"have content of type {kind[:40]}")
  return ValueError(
      f"{place}.type = {_short(kind)}: must be {' or '.join(kinds)}"
  )


def _chain(calls: Sequence[_Call]) -> Tokens:
  """Returns the tokens of calls that each continue the one before.

  Sampled tokens from the first call on whose prompt changes earlier tokens are
  lost.

  Args:
    calls: place, prompt ids, completion ids, log-probs of the latter or None,
      and mask of both or None, of each call.
  """
  ids: list[int] = []
  sampled: list[bool] = []
  logprobs: list[float | None] = []
  num_lost, is_broken = 0, False
  for here, prompt, completion, known, mask in calls:
    prompt = _ids(prompt, f"{here}.prompt_token_ids")
    completion = _ids(completion, f"{here}.completion_token_ids")
    if mask is None:
      mask = [0] * len(prompt) + [1] * len(completion)
    if not isinstance(mask, list) or len(mask) != len(prompt) + len(completion):
      raise ValueError(
          f"{here}.loss_mask: must be one for each token of prompt and"
          " completion"
      )
    if known is not None and (
        not isinstance(known, list) or len(known) != len(completion)
    ):
      raise ValueError(
          f"{here}: log-probs must be one for each of completion_token_ids"
      )
    of_completion = [bool(m) for m in mask[len(prompt) :]]
    if is_broken or (ids and prompt[: len(ids)] != ids):
      is_broken = True
      num_lost += sum(of_completion)
      continue
    new = prompt[len(ids) :]
    ids += [*new, *completion]
    sampled += [False] * len(new) + of_completion
    logprobs += [0.0] * len(new)
    given = known if known is not None else [None] * len(completion)
    logprobs += [x if m else 0.0 for x, m in zip(given, of_completion)]
  return _split(ids, sampled, logprobs, num_lost)


def _split(
    ids: Sequence[int],
    sampled: Sequence[bool],
    logprobs: Sequence[float | None],
    num_lost: int,
) -> Tokens:
  """Returns tokens, split before the first sampled one."""
  if not any(sampled):
    raise UnusableError(_NONE_SAMPLED)
  first = sampled.index(True)
  last = len(sampled) - sampled[::-1].index(True)
  known = logprobs[first:last]
  if any(type(x) is int and abs(x) > _LARGEST for x in known):
    raise ValueError("log-probs: must be finite")
  is_known = all(type(x) in (int, float) for x in known)
  return Tokens(
      tuple(ids[:first]),
      tuple(ids[first:last]),
      tuple(sampled[first:last]),
      tuple(map(float, known)) if is_known else None,
      num_lost,
  )


def _ids(value: Any, place: str) -> list[int]:
  if not isinstance(value, list) or not all(
      type(i) is int and i >= 0 for i in value
  ):
    raise ValueError(f"{place} = {_short(value)}: must be a list of token ids")
  return value


def _number(value: Any, place: str) -> float:
  if type(value) not in (int, float) or not abs(value) <= _LARGEST:
    raise ValueError(f"{place} = {_short(value)}: must be a finite number")
  return value


def _object(value: Any, place: str) -> Record:
  if not isinstance(value, dict):
    raise ValueError(f"{place} = {_short(value)}: must be an object")
  return value


def _list(value: Any, place: str) -> Sequence[Any]:
  if not isinstance(value, list | tuple):
    raise ValueError(f"{place} = {_short(value)}: must be a list")
  return value


def _short(value: Any) -> str:
  return json.dumps(value)[:60]
