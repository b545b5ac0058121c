# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs read downwards, and commands name configs that there are."""

import pathlib
import re
import traceback
from unittest import mock

from absl.testing import absltest
import ml_collections

from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import variants

_ROOT = pathlib.Path(__file__).parents[2]
_PLACES = (
    "*.md", ".github/**/*.yml", "benchmarks/**/*", "colabs/*", "configs/**/*",
    "docs/**/*.md", "examples/*", "launch/*", "studies/**/*", "tba_jax/**/*.py",
    "tests/**/*.py", "tests/**/*.md",
)  # fmt: skip
# Old names, and names of no file.
_LEFT_OUT = ("CHANGELOG.md", "load_test.py")
_TEXTS = (".ipynb", ".md", ".py", ".sh", ".yml")
_CONFIG = re.compile(r"\bconfigs/((?:\w+/)*\w+\.py)(?::([\w.=,-]*\w))?")
# Functions that may set a key again, at the end of a config.
_SHRINK = ("make_smoke", "_make_smoke")
_MORE = (
    *(f"arithmetic.py:{size}{arg}" for size in ("", "quick,", "smoke,")
      for arg in ("lockstep", "rounds=3", "rounds=4,passes=2,lag_rounds=0")),
    *(f"{name}.py:{size}lockstep" for size in ("", "quick,", "smoke,")
      for name in ("calculator", "countdown", "countdown_sparse", "guess")),
    *(f"{name}/async_rlhf.py:{size}method={method}"
      for name in ("gsm8k", "tldr") for size in ("", "quick,", "smoke,")
      for method in ("online_dpo", "rloo", "ppo")),
    "gsm8k/async_rlhf.py:method=ppo,lag=0,hardware=4xa100",
    "gsm8k/tba.py:model=qwen2.5-0.5b,samples=40",
    "gsm8k/tba.py:quick,model=llama-3.2-1b",
    "gsm8k/tba.py:steps=1000",
    *(f"instructions.py:{arg}lora" for arg in ("", "quick,", "ifbench,")),
    "no_robots.py:stage=sft",
    *(f"pretrained_turns.py:{size}task=guess_the_number"
      for size in ("", "quick,", "smoke,")),
    *(f"red_team.py:{size}model=llama" for size in ("", "quick,", "smoke,")),
    "staleness.py:tune",
    "tldr/async_rlhf.py:mini_batches=3,passes=2,samples=4",
    "tldr/async_rlhf.py:quick,method=best_of_2,overoptimize",
    "tldr/async_rlhf.py:quick,mini_batches=3,passes=2",
    *(f"tldr/{name}.py:model=pythia-1b,hardware=v5e-16"
      for name in ("sft", "reward_model", "tba")),
    "tldr/tba.py:steps=825",
)  # fmt: skip


def _named() -> dict[str, str]:
  """Returns the configs, as FILE or FILE:ARG, that commands and pages name."""
  out = {}
  for place in _PLACES:
    for path in sorted(_ROOT.glob(place)):
      if path.name in _LEFT_OUT or not path.is_file():
        continue
      if path.suffix not in _TEXTS and path.name != "Dockerfile":
        continue
      # A command may go on in the next line.
      for file, arg in _CONFIG.findall(path.read_text("utf-8")):
        # Capitals stand for a value of the user's.
        args = [a for a in arg.split(",") if not re.search("[A-Z]", a)]
        if not re.search("[A-Z]", file):
          out[":".join(filter(None, (file, ",".join(args))))] = str(path)
  return out


def _set_twice(path_and_arg: str) -> dict[str, list]:
  """Returns the keys that a config sets to one value and then to another.

  Defaults do not count, nor do functions that shrink a run at its end.
  """
  sets, sections = {}, {}
  set_item = ml_collections.ConfigDict.__setitem__

  def record(section, name, value):
    set_item(section, name, value)
    stack = traceback.extract_stack()
    files = {frame.filename for frame in stack[:-1]}
    functions = {frame.name for frame in stack[:-1]}
    may = functions.intersection(_SHRINK) or hardware.__file__ in files
    if not may and settings.__file__ not in files:
      sections[id(section)] = section  # Kept, so that no other has its id.
      sets.setdefault((id(section), name), []).append(value)

  path, _, arg = path_and_arg.partition(":")
  module = variants.import_config(path)
  with mock.patch.object(ml_collections.ConfigDict, "__setitem__", record):
    config = module.get_config(arg)
  names = {id(config): "", **{id(v): f"{k}." for k, v in _sections(config)}}
  return {
      f"{names[section]}{name}": values
      for (section, name), values in sets.items()
      if section in names and any(value != values[0] for value in values)
  }


def _sections(config, prefix=""):
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield f"{prefix}{name}", value
      yield from _sections(value, f"{prefix}{name}.")


class LinearTest(absltest.TestCase):

  def test_configs_and_arguments_named_on_pages_exist(self):
    named = _named()
    self.assertGreater(len(named), 60)
    for spec, page in named.items():
      with self.subTest(spec, page=page):
        load.load_config(f"configs/{spec}")

  def test_every_variant_sets_key_once(self):
    files = sorted((_ROOT / "configs").rglob("*.py"))
    names = [str(path.relative_to(_ROOT / "configs")) for path in files]
    specs = [f"{name}{size}" for name in names
             for size in ("", ":quick", ":smoke")]  # fmt: skip
    for spec in dict.fromkeys((*specs, *_MORE, *_named())):
      with self.subTest(spec):
        self.assertEqual(_set_twice(f"configs/{spec}"), {})

  def test_undone_setting_is_found(self):
    path = self.create_tempfile(
        "undone.py",
        "import ml_collections\n"
        "from tba_jax.config import settings\n\n\n"
        "def get_config(arg=''):\n"
        "  c = settings.get_config()\n"
        "  c.task = ml_collections.ConfigDict({'name': 'countdown'})\n"
        "  c.seed = 1\n"
        "  c.loss.beta = c.loss.ratio_clip = 0.2\n"
        "  c.loss.ratio_clip = 0.2\n"
        "  c.loss.beta = 0.1\n"
        "  _make_smoke(c)\n"
        "  c.task.name = 'arithmetic'\n"
        "  return c\n\n\n"
        "def _make_smoke(c):\n"
        "  c.seed = 2\n",
    )
    self.assertEqual(
        _set_twice(path.full_path),
        {"loss.beta": [0.2, 0.1], "task.name": ["countdown", "arithmetic"]},
    )
