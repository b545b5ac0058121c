# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The game of examples/guess.py, played by an agent over HTTP."""

import json
import pathlib
import runpy
import urllib.error
import urllib.request

FILE = pathlib.Path(__file__).parents[2] / "examples" / "guess.py"
_Game = runpy.run_path(str(FILE))["Guess"]


class Guess:
  words = _Game.words

  def play(self, seed, url):
    game, total, done, info = _Game(), 0.0, False, {}
    text = game.reset(seed)
    while not done:
      body = json.dumps({"model": "any", "prompt": text}).encode()
      try:
        with urllib.request.urlopen(f"{url}/v1/completions", body) as reply:
          (choice,) = json.load(reply)["choices"]
      except urllib.error.HTTPError:  # There is no room for a turn.
        break
      if choice["finish_reason"] == "length":
        break
      said = choice["text"]
      observation, reward, done, info = game.step(said)
      text, total = text + said + observation, total + reward
    return total, info
