# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments from other packages, by the packages' names for them.

    textarena:GuessTheNumber-v0
    gem:game:GuessTheNumber-v0-easy
    gem:rg:chain_sum,python_tool

The packages are TextArena (Guertler et al. 2025, arXiv:2504.11442) and GEM (Liu
et al. 2025, arXiv:2510.01051). They are imported in the separate processes that
make environments, since TextArena seeds Python's global `random`.
"""

from collections.abc import Callable, Mapping
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import types
from typing import Any

from tba_jax.system import user_code

# Module -> the distribution that contains it.
PACKAGES = {"textarena": "textarena", "gem": "gem-llm"}
# The policy's player id in a game.
_POLICY = 0


def load(source: str, opponent: str) -> Callable[[], Any]:
  """Returns the class or function that makes an environment.

  Args:
    source: `config.task.source`.
    opponent: `config.task.opponent`.

  Raises:
    ValueError: a file, module or package cannot be imported, or the environment
      has no opponents.
  """
  module, _, name = source.partition(":")
  if opponent and module != "textarena":
    raise ValueError(
        f"config.task.opponent={opponent!r}: must be '' with"
        f" config.task.source={source!r}; environments of textarena have"
        " opponents"
    )
  if module not in PACKAGES:
    return user_code.load_function("config.task.source", source)
  if importlib.util.find_spec(module) is None:
    raise ValueError(
        f"config.task.source={source!r}: needs a package that is not"
        f" installed: pip install {PACKAGES[module]}"
    )
  if module == "gem":
    return functools.partial(Gem, name)
  make_opponent = None
  if opponent:
    make_opponent = user_code.load_function("config.task.opponent", opponent)
  return functools.partial(TextArena, name, make_opponent)


def preload(source: str) -> None:
  """Imports the source's package, if it has one, for all later episodes."""
  module = source.partition(":")[0]
  if module in PACKAGES:
    importlib.import_module(module)


def version(source: str) -> str:
  """Returns the source with its package's version; "" without a package."""
  module = source.partition(":")[0]
  if module not in PACKAGES:
    return ""
  return f"{source} {importlib.metadata.version(PACKAGES[module])}"


class TextArena:
  """A TextArena game; the policy is player 0.

  An observation contains the messages since the policy's last turn, except the
  policy's. Observation wrappers that repeat the game so far, such as the
  default ones, are removed; action wrappers are kept.
  """

  def __init__(self, name: str, make_opponent: Callable[..., Any] | None):
    """Makes the game.

    Args:
      name: TextArena id, such as "GuessTheNumber-v0".
      make_opponent: TextArena agent of the other side, a function of the
        observation or a class of such functions; None in a single-player game.
    """
    package = _registry("textarena", name)
    self._game = self._inner = package.make(name)
    while isinstance(self._inner, package.Wrapper):
      self._inner = self._inner.env
    self._make_opponent = make_opponent

  def reset(self, seed: int) -> str:
    is_class = inspect.isclass(self._make_opponent)
    self._opponent = self._make_opponent() if is_class else self._make_opponent
    num_players = 1 if self._opponent is None else 2
    try:
      self._game.reset(num_players=num_players, seed=seed)
    except AssertionError as error:
      raise ValueError(
          f"{error}: must be a game for one, or with config.task.opponent for"
          " two"
      ) from error
    self._play_opponent(done=False)
    return self._observation()

  def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
    done, _ = self._game.step(action=text)
    if not self._play_opponent(done):
      return self._observation(), 0.0, False, {}
    rewards, _ = self._game.close()
    return "", rewards[_POLICY], True, {}

  def _play_opponent(self, done: bool) -> bool:
    """Plays until it is the policy's turn; returns whether the game is over."""
    while not done and self._inner.state.current_player_id != _POLICY:
      _, observation = self._game.get_observation()
      done, _ = self._game.step(action=self._opponent(observation))
    return done

  def _observation(self) -> str:
    state = self._inner.state
    _, messages = self._inner.get_observation()
    return "".join(
        f"[{state.role_mapping.get(sender, sender)}] {text}\n"
        for sender, text, _ in messages
        if sender != _POLICY
    )


class Gem:
  """An environment of GEM.

  An observation includes the prefix and suffix in its info, such as a board.
  """

  def __init__(self, name: str):
    """Makes the environment.

    Args:
      name: GEM id, then wrappers from GEM's `WRAPPER_FACTORY`, separated by
        commas, such as "python_tool".
    """
    name, *wrappers = (part.strip() for part in name.split(","))
    self._env = _registry("gem", name).make(name)
    for wrapper in wrappers:
      where = importlib.import_module("gem.wrappers.wrapper_factory")
      _check_name("gem", wrapper, where.WRAPPER_FACTORY)
      self._env = where.WRAPPER_FACTORY[wrapper](self._env)

  def reset(self, seed: int) -> str:
    return _with_info(*self._env.reset(seed=seed))

  def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    observation, *ends, info = self._env.step(text)
    return _with_info(observation, info), *ends, {}


def _with_info(observation: str, info: Mapping[str, Any]) -> str:
  """Returns an observation as GEM's `ObservationWrapper` writes it."""
  if observation and not observation.endswith("\n"):
    observation += "\n"
  return f"{info.get('prefix', '')}{observation}{info.get('suffix', '')}"


def _registry(package: str, name: str) -> types.ModuleType:
  """Returns a package; raises ValueError if it does not know the name."""
  module = importlib.import_module(package)
  _check_name(package, name, module.envs.registration.ENV_REGISTRY)
  return module


def _check_name(package: str, name: str, known: Mapping[str, Any]) -> None:
  if name not in known:
    near = difflib.get_close_matches(name, known, n=8, cutoff=0.5)
    raise ValueError(
        f"{name!r} is unknown to {package}: must be one of"
        f" {', '.join(near or sorted(known))}"
    )
