# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A program that plays the game of examples/guess.py through a model's API.

    python agent.py URL SEED

asks for each guess by Anthropic's Messages, and prints its reward and whether
it found the number, as JSON. `Guess` runs it as an episode.
"""

import json
import pathlib
import runpy
import subprocess
import sys
import urllib.error
import urllib.request

GAME = pathlib.Path(__file__).parents[2] / "examples" / "guess.py"
_DEADLINE_S = 60.0


class Guess:
  """An agent's episodes; see docs/guides/agents.md."""

  def play(self, seed: int, url: str) -> tuple[float, dict[str, bool]]:
    process = subprocess.run(
        [sys.executable, "-S", __file__, url, str(seed)],
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    reward, found = json.loads(process.stdout)
    return reward, {"success": found}


def play(url: str, seed: int) -> tuple[float, bool]:
  """Returns the sum of rewards, and whether the number was found."""
  game = runpy.run_path(str(GAME))["Guess"]()
  messages = [{"role": "user", "content": game.reset(seed)}]
  total = 0.0
  while True:
    body = {"model": "policy", "max_tokens": 1, "messages": messages}
    try:
      with urllib.request.urlopen(
          urllib.request.Request(
              f"{url}/v1/messages",
              json.dumps(body).encode(),
              {"Content-Type": "application/json"},
          ),
          timeout=_DEADLINE_S,
      ) as reply:
        answer = json.load(reply)
    except urllib.error.HTTPError as error:
      if error.code == 400:  # There is no room for another turn.
        return total, False
      raise
    if answer["stop_reason"] == "max_tokens":
      return total, False
    said = "".join(block["text"] for block in answer["content"])
    observation, reward, done, info = game.step(said)
    total += reward
    if done:
      return total, info.get("success", False)
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": observation},
    ]


if __name__ == "__main__":
  print(json.dumps(play(sys.argv[1], int(sys.argv[2]))))
