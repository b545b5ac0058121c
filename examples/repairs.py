# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Broken functions that coding agents repair: agents as environments.

    pip install 'tba_jax[serve]' mini-swe-agent     # MiniSwe
    npm install -g @openai/codex                    # Codex
    npm install -g opencode-ai                      # OpenCode

Seeds select one of twenty files with an issue; the reward is 1 if the file then
passes its test. Agent and test run in containers, by default of bubblewrap; the
variables REPAIRS_KIND and REPAIRS_IMAGE, named in `config.reward.env_vars`,
select others, except for Codex and OpenCode, which need bubblewrap's options.
The test's values stay outside. `config.reward.readable` needs the folder of
npm's packages. docs/guides/agents.md has the interface.
"""

import ast
import json
import os
import pathlib
import urllib.request

from tba_jax.environments import containers

# Issue, file with a gap, right and wrong text of the gap, and the values that
# the file must have.
TASKS = (
    (
        "mean() of an empty list raises ZeroDivisionError; it must return 0.",
        "def mean(xs):\n  return {}\n",
        "sum(xs) / len(xs) if xs else 0",
        "sum(xs) / len(xs)",
        {"mean([])": 0, "mean([1, 2])": 1.5},
    ),
    (
        "is_leap(1900) is True, but centuries are no leap years.",
        "def is_leap(y):\n  return {}\n",
        "y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
        "y % 4 == 0",
        {"[is_leap(y) for y in (1900, 2000, 2023, 2024)]": [0, 1, 0, 1]},
    ),
    (
        "last(xs, n) returns all of xs for n = 0.",
        "def last(xs, n):\n  return {}\n",
        "xs[len(xs) - n :]",
        "xs[-n:]",
        {"last([1, 2, 3], 0)": [], "last([1, 2, 3], 2)": [2, 3]},
    ),
    (
        "join(['a']) ends with a comma.",
        "def join(xs):\n  return {}\n",
        "','.join(xs)",
        "''.join(x + ',' for x in xs)",
        {"join(['a'])": "a", "join(['a', 'b'])": "a,b"},
    ),
    (
        "clip(5, 0, 3) returns 0.",
        "def clip(x, low, high):\n  return {}\n",
        "max(low, min(x, high))",
        "min(low, max(x, high))",
        {"[clip(x, 0, 3) for x in (-1, 2, 5)]": [0, 2, 3]},
    ),
    (
        "median() of four numbers is one of them, not the middle.",
        "def median(xs):\n  s, n = sorted(xs), len(xs)\n  return {}\n",
        "(s[(n - 1) // 2] + s[n // 2]) / 2",
        "s[n // 2]",
        {"median([4, 1, 3, 2])": 2.5, "median([3, 1, 2])": 2},
    ),
    (
        "is_palindrome('Anna') is False; case must not count.",
        "def is_palindrome(t):\n  return {}\n",
        "t.lower() == t.lower()[::-1]",
        "t == t[::-1]",
        {"is_palindrome('Anna')": True, "is_palindrome('ab')": False},
    ),
    (
        "count('aaa', 'aa') is 1, but overlapping matches must count.",
        "def count(t, part):\n  return {}\n",
        "sum(t.startswith(part, i) for i in range(len(t)))",
        "t.count(part)",
        {"count('aaa', 'aa')": 2, "count('abc', 'b')": 1},
    ),
    (
        "invert() loses keys with equal values; it must map to lists of keys.",
        "def invert(d):\n  out = {{}}\n  for k, v in d.items():\n    {}\n"
        "  return out\n",
        "out.setdefault(v, []).append(k)",
        "out[v] = [k]",
        {"invert({'a': 1, 'b': 1})": {1: ["a", "b"]}},
    ),
    (
        "chunks([1, 2, 3], 2) drops the last item.",
        "def chunks(xs, n):\n  return [xs[i : i + n] for i in {}]\n",
        "range(0, len(xs), n)",
        "range(0, len(xs) - n + 1, n)",
        {"chunks([1, 2, 3], 2)": [[1, 2], [3]]},
    ),
    (
        "gcd(12, 18) is 0.",
        "def gcd(a, b):\n  while {}:\n    a, b = b, a % b if b else b\n"
        "  return a\n",
        "b",
        "a",
        {"gcd(4, 0)": 4, "gcd(12, 18)": 6},
    ),
    (
        "words('a  b') contains an empty word.",
        "def words(t):\n  return {}\n",
        "t.split()",
        "t.split(' ')",
        {"words('a  b ')": ["a", "b"]},
    ),
    (
        "unique() changes the order of the items.",
        "def unique(xs):\n  return {}\n",
        "list(dict.fromkeys(xs))",
        "sorted(set(xs))",
        {"unique([2, 1, 2])": [2, 1]},
    ),
    (
        "flatten([[1], 2]) raises TypeError; items may be single.",
        "def flatten(xs):\n  out = []\n  for x in xs:\n    out += {}\n"
        "  return out\n",
        "x if isinstance(x, list) else [x]",
        "x",
        {"flatten([[1], 2])": [1, 2]},
    ),
    (
        "factorial(0) is 0.",
        "def factorial(n):\n  out = {}\n  for i in range(2, n + 1):\n"
        "    out *= i\n  return out\n",
        "1",
        "n and 1",
        {"factorial(0)": 1, "factorial(4)": 24},
    ),
    (
        "digits(-12) raises ValueError; the sign must not count.",
        "def digits(n):\n  return [int(c) for c in str({})]\n",
        "abs(n)",
        "n",
        {"digits(-12)": [1, 2], "digits(3)": [3]},
    ),
    (
        "rotate([1, 2], 3) returns an unchanged list.",
        "def rotate(xs, n):\n  n = {}\n  return xs[n:] + xs[:n]\n",
        "n % len(xs) if xs else 0",
        "n",
        {"rotate([1, 2], 3)": [2, 1], "rotate([], 1)": []},
    ),
    (
        "parse('a=b=c') raises ValueError; values may contain '='.",
        "def parse(t):\n  k, v = {}\n  return {{k: v}}\n",
        "t.split('=', 1)",
        "t.split('=')",
        {"parse('a=b=c')": {"a": "b=c"}},
    ),
    (
        "second([3, 3, 1]) is 3; equal items must count once.",
        "def second(xs):\n  return sorted({})[-2]\n",
        "set(xs)",
        "xs",
        {"second([3, 3, 1])": 1},
    ),
    (
        "title('o neil') returns 'O neil'; each word needs a capital.",
        "def title(t):\n  return {}\n",
        "' '.join(w.capitalize() for w in t.split())",
        "t.capitalize()",
        {"title('o neil')": "O Neil"},
    ),
)


_PATH = os.environ["PATH"]
# Errors of `ast.literal_eval`.
_UNREADABLE = ValueError, TypeError, SyntaxError, MemoryError, RecursionError
# Prints the values of expressions.
_TEST = "import sys; from task import *; print([eval(x) for x in sys.stdin])"
# Runs an agent, whose log may be longer than a container's outputs; fails if
# the agent does, except at the limits.
_LOGGED = """env "$@" >/tmp/log 2>&1 && exit
status=$?
grep -q context_length_exceeded /tmp/log && exit
tail -c 2000 /tmp/log
exit $status"""


class Repairs:
  """Runs an agent in a container whose folder has one file, `task.py`.

  Subclasses have `work(issue, container, url)`, which returns when the agent
  has ended, also at the limits of a completion.

  network: whether the agent itself is in the container and calls the model.
  readable: folders that the agent needs there.
  """

  network = False
  readable = ()

  def play(self, seed, url):
    self.task = TASKS[seed // 2 % len(TASKS)]
    issue, source, _, wrong, values = self.task
    with self._open(network=self.network) as container:
      container.put("task.py", source.format(wrong).encode())
      self.work(f"task.py: {issue}", container, url)
      metrics = container.metrics
      try:
        repaired = container.get("task.py")
      except containers.CommandError:
        repaired = b""
    # Without what the agent changed elsewhere. The file computes the values,
    # which it does not know: it can neither print them nor find them.
    with self._open() as container:
      container.put("task.py", repaired)
      command = ["python3", "-c", _TEST]
      try:
        _, output = container.run(command, "\n".join(values), deadline_s=10)
        success = ast.literal_eval(output) == [*values.values()]
      except (containers.CommandError, *_UNREADABLE):
        success = False
    return float(success), {"success": success, "metrics": metrics}

  def _open(self, **arguments):
    options = []
    for path in self.readable:
      options += ["--ro-bind-try", path, path]
    return containers.open(
        os.environ.get("REPAIRS_KIND", "bubblewrap"),
        os.environ.get("REPAIRS_IMAGE", ""),
        options=options,
        **arguments,
    )


class Scripted(Repairs):
  """An agent that asks the model for its opinion, and repairs the file."""

  def work(self, issue, container, url):
    body = json.dumps({"model": "policy", "prompt": f"{issue}\n"}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body) as reply:
      json.load(reply)
    _, source, right, wrong, _ = self.task
    _, text = container.run("cat task.py")
    if text != source.format(wrong):
      raise RuntimeError(text)
    container.put("task.py", source.format(right).encode())


class MiniSwe(Repairs):
  """mini-swe-agent, which calls `chat/completions`."""

  def work(self, issue, container, url):
    # Packages that only the process of an episode needs.
    import minisweagent
    from minisweagent.agents import default
    from minisweagent.environments import local
    from minisweagent.models import litellm_model
    import yaml

    class Environment(local.LocalEnvironment):

      def execute(self, action, cwd="", *, timeout=None):
        out = {"exception_info": ""}
        try:
          out["returncode"], out["output"] = container.run(
              action.get("command", ""), deadline_s=timeout or 30
          )
        except containers.CommandError as error:
          out = {"output": error.output, "returncode": -1}
          out["exception_info"] = str(error)
        self._check_finished(out)
        return out

    package = pathlib.Path(minisweagent.__file__).parent
    config = yaml.safe_load((package / "config/mini.yaml").read_text())["agent"]
    agent = default.DefaultAgent(
        litellm_model.LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": f"{url}/v1", "api_key": "none"},
            cost_tracking="ignore_errors",
        ),
        Environment(cwd=container.folder),
        system_template=config["system_template"],
        instance_template=config["instance_template"],
    )
    try:
      agent.run(issue)
    except Exception as error:  # pylint: disable=broad-exception-caught
      if "context_length_exceeded" not in str(error):
        raise


class Npm(Repairs):
  """Agents of npm, which run in the container."""

  network = True

  @property
  def readable(self):
    paths = [path.partition("node_modules") for path in _PATH.split(":")]
    return [f"{above}{name}" for above, name, _ in paths if name]

  def start(self, container, *words, **variables):
    """Runs an agent; raises if it failed, except at the limits."""
    values = {"PATH": _PATH, **variables}
    set_values = [f"{name}={value}" for name, value in values.items()]
    command = ["sh", "-c", _LOGGED, "sh", *set_values, *words]
    try:
      status, text = container.run(command, deadline_s=3600)
    except containers.CommandError:  # Its file is tested as it is.
      return
    if status:
      raise RuntimeError(f"status {status}: {text}")


class Codex(Npm):
  """Codex, which calls `responses`."""

  def work(self, issue, container, url):
    provider = "model_providers.policy"
    settings = (
        "model_provider=policy",
        f"{provider}.name=policy",
        f"{provider}.base_url={url}/v1",
        f"{provider}.wire_api=responses",
        "web_search=disabled",
        "features.multi_agent=false",
        "features.goals=false",
        "include_environment_context=false",  # It has the date.
    )
    flags = [flag for setting in settings for flag in ("-c", setting)]
    container.run("mkdir /tmp/codex")
    self.start(
        container,
        *("codex", "exec", "--skip-git-repo-check", "--model=policy"),
        *("--dangerously-bypass-approvals-and-sandbox", *flags, issue),
        CODEX_HOME="/tmp/codex",
    )


class OpenCode(Npm):
  """opencode, which calls Anthropic's `messages`."""

  def work(self, issue, container, url):
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
    self.start(
        container,
        *("opencode", "run", "--title=repair", issue),
        OPENCODE_CONFIG_CONTENT=json.dumps(config),
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
    )
