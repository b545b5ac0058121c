# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environment process: `python -m tba_jax.environments.episode_worker`.

Imports the environment named in its first message, then runs one episode after
another, each in a separate process (`system/keeper.py`). Requests and answers:

    ["reset", seed]            {"observation", "tools", "judges_cut"}
    ["step", text, n, m]       {"observation", "reward", "done", "success",
                                "metrics"}
    ["end", text, n, m]        the same, of an episode that is cut off
    ["demonstrate", seed, n]   {"turns": [prompt, turn, answer, …], "tools"}

A turn has m tokens, with n tokens before it. A failed request is answered with
`failure` and `message`. An observation is a text or a list of messages; `tools`
are JSON schemas. Episodes may hang, crash and print.
"""

import json
import sys
from typing import Any

from tba_jax.environments import agent_environment
from tba_jax.environments import packages
from tba_jax.environments import tool_environment
from tba_jax.system import keeper
from tba_jax.system import user_code
from tba_jax.tasks import base

# Fields of a message.
_FIELDS = {"role": str, "name": str, "content": str, "tool_calls": list}
# Most characters of an observation.
_MAX_CHARACTERS = 2**16


def main() -> int:
  """Runs episodes until the pool closes the pipe."""
  episode = _Episode()

  def answer(request: list[Any]) -> tuple[dict[str, Any], bool]:
    answered = _answer(episode, *request)
    is_over = request[0] == "demonstrate" or answered.get("done", False)
    return answered, is_over or "failure" in answered

  def begin(hello: dict[str, Any]) -> keeper.AnswerFn:
    episode.load(**{k: hello[k] for k in ("source", "opponent", "preload")})
    return answer

  return keeper.serve(
      begin,
      shows_prints=False,
      goes_on=lambda request: request[0] in ("step", "end"),
      close=episode.close,
  )


def _answer(episode: "_Episode", what: str, *arguments: Any) -> dict[str, Any]:
  try:
    return getattr(episode, what)(*arguments)
  except base.RewardError as failure:
    return {"failure": failure.cause, "message": str(failure)}
  except (Exception, SystemExit) as error:  # User code.
    message = user_code.describe(error, episode.make)
    return {"failure": "error", "message": message}


class _Episode:
  """An environment from `reset` to its end; accepts Gymnasium's tuples."""

  def __init__(self):
    self.make: Any = None
    self._environment: Any = None

  def load(self, source: str, opponent: str, preload: str) -> None:
    self.make = packages.load(source, opponent)
    packages.preload(source)
    if tool_environment.plays(self.make):
      agent_environment.preload(self.make, preload)

  def close(self) -> None:
    try:
      if hasattr(self._environment, "close"):
        self._environment.close()
    # The episode is already judged.
    except Exception as error:
      why = user_code.describe(error, self.make)
      print(f"an environment's close() failed: {why}", file=sys.stderr)

  def reset(self, seed: int) -> dict[str, Any]:
    """Starts the episode."""
    self._environment = tool_environment.wrap(self.make())
    observation = self._environment.reset(seed=seed)
    if isinstance(observation, tuple) and len(observation) == 2:  # With info.
      observation = observation[0]
    return {
        "observation": _checked("reset", observation),
        "tools": getattr(self._environment, "schemas", []),
        "judges_cut": self._is_agent(),
    }

  def step(
      self, text: str, num_before: int = 0, num_tokens: int = 0
  ) -> dict[str, Any]:
    """Passes a turn to the environment."""
    usage = ((num_before, num_tokens),) * self._is_agent()
    return self._checked_step(self._environment.step(text, *usage))

  def end(
      self, text: str | None, num_before: int, num_tokens: int
  ) -> dict[str, Any]:
    """Ends an agent's episode at an unfinished turn, or before one."""
    usage = num_before, num_tokens
    return self._checked_step(self._environment.end(text, usage))

  def _is_agent(self) -> bool:
    return isinstance(self._environment, agent_environment.AgentEnvironment)

  def _checked_step(self, out: Any) -> dict[str, Any]:
    if not isinstance(out, tuple) or len(out) not in (4, 5):
      raise base.RewardError(
          "error",
          f"step returned {repr(out)[:80]}: must be (observation, reward,"
          " done, info), or with terminated and truncated",
      )
    observation, reward, *ends, info = out
    info = info if isinstance(info, dict) else {}
    success = info.get("success")
    done = any(_flag("done", end) for end in ends)
    return {
        # The last observation is unused and often [], {} or None.
        "observation": "" if done else _checked("step", observation),
        "reward": base.number(reward, "step, as its reward,"),
        "done": done,
        "success": None if success is None else _flag("success", success),
        "metrics": base.metrics_of(info.get("metrics") or {}, "step"),
    }

  def demonstrate(self, seed: int, max_turns: int) -> dict[str, Any]:
    """Runs an episode with the environment's demonstrated turns."""
    first, done = self.reset(seed), False
    turns = [first["observation"]]
    while not done and len(turns) < 2 * max_turns:
      turn = self._environment.demonstrate()
      if not isinstance(turn, str):
        raise base.RewardError(
            "error", f"demonstrate returned {repr(turn)[:80]}: must be a text"
        )
      answer = self.step(turn)
      turns += [turn, answer["observation"]]
      done = answer["done"]
    return {"turns": turns, "tools": first["tools"]}


def _flag(name: str, value: Any) -> bool:
  """Returns a flag; raises unless it is a bool, as for the text "False"."""
  if getattr(value, "shape", ()) == () and value in (True, False):
    return bool(value)
  raise base.RewardError(
      "error", f"step returned {repr(value)[:80]} as {name}: must be a bool"
  )


def _checked(method: str, observation: Any) -> str | list[dict[str, str]]:
  """Returns an observation; raises unless it is a text or messages."""
  is_list = isinstance(observation, list) and bool(observation)
  if is_list and all(
      isinstance(message, dict)
      and isinstance(message.get("role"), str)
      and isinstance(message.get("content"), str)
      for message in observation
  ):
    observation = [
        {k: m[k] for k, kind in _FIELDS.items() if isinstance(m.get(k), kind)}
        for m in observation
    ]
  elif not isinstance(observation, str):
    raise base.RewardError(
        "error",
        f"{method} returned {repr(observation)[:80]}: must be a text, or a list"
        " of messages with role and content",
    )
  size = (
      len(observation)
      if isinstance(observation, str)
      else len(json.dumps(observation))
  )
  if size > _MAX_CHARACTERS:
    raise base.RewardError(
        "size",
        f"{method} returned {size} characters: must be at most"
        f" {_MAX_CHARACTERS}",
    )
  return observation


if __name__ == "__main__":
  sys.exit(main())
