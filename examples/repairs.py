# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Broken functions that coding agents repair: agents as environments.

    pip install 'tba_jax[serve]' mini-swe-agent     # MiniSwe
    npm install -g @openai/codex                    # Codex
    npm install -g opencode-ai                      # OpenCode

Seeds select one of twenty files with an issue; the reward is 1 if the file then
passes its test, which the agent does not see. `config.reward.readable` needs
the folder of npm's packages. docs/guides/agents.md has the interface.
"""

import json
import os
import pathlib
import secrets
import subprocess
import sys

# Issue, file with a gap, right and wrong text of the gap, and test.
TASKS = (
    (
        "mean() of an empty list raises ZeroDivisionError; it must return 0.",
        "def mean(xs):\n  return {}\n",
        "sum(xs) / len(xs) if xs else 0",
        "sum(xs) / len(xs)",
        "mean([]) == 0 and mean([1, 2]) == 1.5",
    ),
    (
        "is_leap(1900) is True, but centuries are no leap years.",
        "def is_leap(y):\n  return {}\n",
        "y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
        "y % 4 == 0",
        "[is_leap(y) for y in (1900, 2000, 2023, 2024)] == [0, 1, 0, 1]",
    ),
    (
        "last(xs, n) returns all of xs for n = 0.",
        "def last(xs, n):\n  return {}\n",
        "xs[len(xs) - n :]",
        "xs[-n:]",
        "last([1, 2, 3], 0) == [] and last([1, 2, 3], 2) == [2, 3]",
    ),
    (
        "join(['a']) ends with a comma.",
        "def join(xs):\n  return {}\n",
        "','.join(xs)",
        "''.join(x + ',' for x in xs)",
        "join(['a']) == 'a' and join(['a', 'b']) == 'a,b'",
    ),
    (
        "clip(5, 0, 3) returns 0.",
        "def clip(x, low, high):\n  return {}\n",
        "max(low, min(x, high))",
        "min(low, max(x, high))",
        "[clip(x, 0, 3) for x in (-1, 2, 5)] == [0, 2, 3]",
    ),
    (
        "median() of four numbers is one of them, not the middle.",
        "def median(xs):\n  s, n = sorted(xs), len(xs)\n  return {}\n",
        "(s[(n - 1) // 2] + s[n // 2]) / 2",
        "s[n // 2]",
        "median([4, 1, 3, 2]) == 2.5 and median([3, 1, 2]) == 2",
    ),
    (
        "is_palindrome('Anna') is False; case must not count.",
        "def is_palindrome(t):\n  return {}\n",
        "t.lower() == t.lower()[::-1]",
        "t == t[::-1]",
        "is_palindrome('Anna') and not is_palindrome('ab')",
    ),
    (
        "count('aaa', 'aa') is 1, but overlapping matches must count.",
        "def count(t, part):\n  return {}\n",
        "sum(t.startswith(part, i) for i in range(len(t)))",
        "t.count(part)",
        "count('aaa', 'aa') == 2 and count('abc', 'b') == 1",
    ),
    (
        "invert() loses keys with equal values; it must map to lists of keys.",
        "def invert(d):\n  out = {{}}\n  for k, v in d.items():\n    {}\n"
        "  return out\n",
        "out.setdefault(v, []).append(k)",
        "out[v] = [k]",
        "invert({'a': 1, 'b': 1}) == {1: ['a', 'b']}",
    ),
    (
        "chunks([1, 2, 3], 2) drops the last item.",
        "def chunks(xs, n):\n  return [xs[i : i + n] for i in {}]\n",
        "range(0, len(xs), n)",
        "range(0, len(xs) - n + 1, n)",
        "chunks([1, 2, 3], 2) == [[1, 2], [3]]",
    ),
    (
        "gcd(12, 18) is 0.",
        "def gcd(a, b):\n  while {}:\n    a, b = b, a % b if b else b\n"
        "  return a\n",
        "b",
        "a",
        "gcd(4, 0) == 4 and gcd(12, 18) == 6",
    ),
    (
        "words('a  b') contains an empty word.",
        "def words(t):\n  return {}\n",
        "t.split()",
        "t.split(' ')",
        "words('a  b ') == ['a', 'b']",
    ),
    (
        "unique() changes the order of the items.",
        "def unique(xs):\n  return {}\n",
        "list(dict.fromkeys(xs))",
        "sorted(set(xs))",
        "unique([2, 1, 2]) == [2, 1]",
    ),
    (
        "flatten([[1], 2]) raises TypeError; items may be single.",
        "def flatten(xs):\n  out = []\n  for x in xs:\n    out += {}\n"
        "  return out\n",
        "x if isinstance(x, list) else [x]",
        "x",
        "flatten([[1], 2]) == [1, 2]",
    ),
    (
        "factorial(0) is 0.",
        "def factorial(n):\n  out = {}\n  for i in range(2, n + 1):\n"
        "    out *= i\n  return out\n",
        "1",
        "n and 1",
        "factorial(0) == 1 and factorial(4) == 24",
    ),
    (
        "digits(-12) raises ValueError; the sign must not count.",
        "def digits(n):\n  return [int(c) for c in str({})]\n",
        "abs(n)",
        "n",
        "digits(-12) == [1, 2] and digits(3) == [3]",
    ),
    (
        "rotate([1, 2], 3) returns an unchanged list.",
        "def rotate(xs, n):\n  n = {}\n  return xs[n:] + xs[:n]\n",
        "n % len(xs) if xs else 0",
        "n",
        "rotate([1, 2], 3) == [2, 1] and rotate([], 1) == []",
    ),
    (
        "parse('a=b=c') raises ValueError; values may contain '='.",
        "def parse(t):\n  k, v = {}\n  return {{k: v}}\n",
        "t.split('=', 1)",
        "t.split('=')",
        "parse('a=b=c') == {'a': 'b=c'}",
    ),
    (
        "second([3, 3, 1]) is 3; equal items must count once.",
        "def second(xs):\n  return sorted({})[-2]\n",
        "set(xs)",
        "xs",
        "second([3, 3, 1]) == 1",
    ),
    (
        "title('o neil') returns 'O neil'; each word needs a capital.",
        "def title(t):\n  return {}\n",
        "' '.join(w.capitalize() for w in t.split())",
        "t.capitalize()",
        "title('o neil') == 'O Neil'",
    ),
)


class Repairs:
  """Runs an agent in a folder with one file, `task.py`.

  Subclasses have `work(issue, folder, url)`, which returns when the agent has
  ended, also at the limits of a completion.
  """

  def play(self, seed, url):
    issue, source, _, wrong, test = TASKS[seed // 2 % len(TASKS)]
    folder = pathlib.Path.home() / "repository"
    folder.mkdir()
    (folder / "task.py").write_text(source.format(wrong))
    self.work(f"task.py: {issue}", folder, url)
    # The file could exit by itself.
    code = f"from task import *; assert {test}; print(input())"
    passed = secrets.token_hex()
    ran = _run(
        ["timeout", "10", sys.executable, "-c", code],
        folder,
        text=passed,
        PYTHONPATH="",
        PYTHONDONTWRITEBYTECODE="1",
    )
    success = ran.stdout.strip() == passed
    return float(success), {"success": success}


class MiniSwe(Repairs):
  """mini-swe-agent, which calls `chat/completions`."""

  def work(self, issue, folder, url):
    # Packages that only the process of an episode needs.
    import minisweagent
    from minisweagent.agents import default
    from minisweagent.environments import local
    from minisweagent.models import litellm_model
    import yaml

    package = pathlib.Path(minisweagent.__file__).parent
    config = yaml.safe_load((package / "config/mini.yaml").read_text())["agent"]
    agent = default.DefaultAgent(
        litellm_model.LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": f"{url}/v1", "api_key": "none"},
            cost_tracking="ignore_errors",
        ),
        local.LocalEnvironment(cwd=str(folder)),
        system_template=config["system_template"],
        instance_template=config["instance_template"],
    )
    try:
      agent.run(issue)
    except Exception as error:  # pylint: disable=broad-exception-caught
      if "context_length_exceeded" not in str(error):
        raise


class Codex(Repairs):
  """Codex, which calls `responses`."""

  def work(self, issue, folder, url):
    provider = "model_providers.policy"
    settings = (
        "model_provider=policy",
        f"{provider}.name=policy",
        f"{provider}.base_url={url}/v1",
        f"{provider}.wire_api=responses",
        "web_search=disabled",
        "features.multi_agent=false",
        "features.goals=false",
        "include_environment_context=false",  # It has the folder's path.
    )
    flags = [flag for setting in settings for flag in ("-c", setting)]
    home = folder.parent / "codex"
    home.mkdir()
    _check(
        _run(
            ["codex", "exec", "--skip-git-repo-check", "--model=policy"]
            + ["--dangerously-bypass-approvals-and-sandbox", *flags, issue],
            folder,
            CODEX_HOME=str(home),
        )
    )


class OpenCode(Repairs):
  """opencode, which calls Anthropic's `messages`."""

  def work(self, issue, folder, url):
    model = {"name": "policy", "limit": {"context": 32768, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/anthropic",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"policy": model},
    }
    config = {
        "model": "policy/policy",
        "small_model": "policy/policy",
        "provider": {"policy": provider},
        "permission": "allow",
        "share": "disabled",
    }
    _check(
        _run(
            ["opencode", "run", "--title=repair", issue],
            folder,
            OPENCODE_CONFIG_CONTENT=json.dumps(config),
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )
    )


def _run(command, folder, text="", **variables):
  return subprocess.run(
      command,
      cwd=folder,
      env={**os.environ, "PWD": str(folder), **variables},
      input=text,
      capture_output=True,
      text=True,
      check=False,
  )


def _check(ran):
  """Raises RuntimeError if an agent failed, except at the limits."""
  text = ran.stdout + ran.stderr
  if ran.returncode and "context_length_exceeded" not in text:
    raise RuntimeError(f"status {ran.returncode}: {text[-2000:]}")
