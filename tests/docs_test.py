# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages agree with the code, as far as a program can check."""

import ast
import json
import os
import pathlib
import re
import runpy
import textwrap

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import __main__ as benchmarks
from studies import __main__ as studies
from tba_jax import main
from tba_jax import types
from tba_jax.config import load
from tba_jax.config import reference
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.environments import tool_environment
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.tasks import task_table as tasks_build
from tests.chaos import __main__ as chaos
from tests.support import base_config
from tests.support import hub_cache

_ROOT = pathlib.Path(__file__).parent.parent
_COLABS = _ROOT / "colabs"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE_PATH = re.compile(
    r"`((?:tba_jax|tests|configs|launch|docs|colabs|benchmarks|studies)"
    r"/[\w/.]+)`"
)

# Docstring field "name: meaning"; shape and dtype may precede the meaning.
_FIELD = re.compile(
    r"^ +\*{0,2}\w+(?:, \*{0,2}\w+)*: +(?:\[[^\]]*\](?: \w+)?[,;:] )?"
    r"([a-zA-Z]+)"
)
# Words that do not begin a meaning, whose noun comes first.
_NO_NOUNS = frozenset("""
    after as at before between by for from how if in it of on one such that
    these this those to what when where which who whose why with within
""".split())

# Comments and test names that do not begin with their noun or subject.
_NO_SUBJECT = re.compile(
    r"# (?:Of|That|Which|Whose)\b|"
    r" def test_(?:its|of|that|which|whose|with|without)_"
)


def _has_no_noun(meaning: str) -> bool:
  word = re.match(r"[a-zA-Z]*", meaning)
  return word[0].lower() in _NO_NOUNS


def _fields_without_noun(path: pathlib.Path) -> list[str]:
  """Returns file, line and text of fields that do not begin with a noun."""
  text = path.read_text("utf-8")
  lines, out = text.split("\n"), []
  for node in ast.walk(ast.parse(text)):
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)):
      continue
    if ast.get_docstring(node) is None:
      continue
    first, last = node.body[0].lineno, node.body[0].end_lineno
    for number in range(first, last):
      field = _FIELD.match(lines[number])
      if field and _has_no_noun(field[1]):
        out.append(f"{path}:{number + 1}: {lines[number].strip()}")
  return out


def _sources() -> list[pathlib.Path]:
  folders = (
      "tba_jax", "benchmarks", "colabs", "configs", "examples", "studies",
      "tests",
  )  # fmt: skip
  return [p for name in folders for p in sorted((_ROOT / name).rglob("*.py"))]


def _pages() -> list[pathlib.Path]:
  names = (
      "*.md", "docs/**/*.md", "benchmarks/*.md", "studies/*.md",
      "tests/chaos/*.md", "colabs/*.ipynb",
  )  # fmt: skip
  return [path for name in names for path in sorted(_ROOT.glob(name))]


def _anchors(page: pathlib.Path) -> set[str]:
  """Returns GitHub's anchors of a page's headings."""
  heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
  words = [re.sub(r"[^\w\- ]", "", head.lower()) for head in heads]
  return {word.replace(" ", "-") for word in words}


def _prose(page: pathlib.Path) -> str:
  """Returns a page without code blocks, which contain no links."""
  if page.suffix == ".ipynb":
    cells = json.loads(page.read_text("utf-8"))["cells"]
    words = (c["source"] for c in cells if c["cell_type"] == "markdown")
    return "\n\n".join("".join(source) for source in words)
  return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def _templates() -> set[str]:
  """Returns every string of the code, with `…` for inserted values."""
  out = set()
  for path in (_ROOT / "tba_jax").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        out.add(node.value)
      elif isinstance(node, ast.JoinedStr):
        parts = [getattr(value, "value", None) for value in node.values]
        texts = [part if isinstance(part, str) else "…" for part in parts]
        out.add("".join(texts))
  return out


class DocsTest(absltest.TestCase):

  def test_reference_of_settings_is_up_to_date(self):
    self.assertEqual(
        (_ROOT / "docs/reference/settings.md").read_text("utf-8"),
        reference.render(),
        "run: python -m tba_jax.config.reference > docs/reference/settings.md",
    )

  def test_fields_of_docstrings_begin_with_their_noun(self):
    for path in _sources():
      self.assertEqual(_fields_without_noun(path), [])

  def test_comments_and_names_of_tests_begin_with_their_subject(self):
    for path in _sources():
      lines = path.read_text("utf-8").split("\n")
      self.assertEqual([x for x in lines if _NO_SUBJECT.search(x)], [], path)

  def test_meanings_of_settings_begin_with_their_noun(self):
    meanings = {key: s.meaning for key, s in settings.SETTINGS.items()}
    meanings |= {key: s.meaning for key, s in settings.SECTIONS.items()}
    no_noun = [key for key, text in meanings.items() if _has_no_noun(text)]
    self.assertEqual(no_noun, [])

  def test_links_have_target(self):
    for page in _pages():
      for link in _LINK.findall(_prose(page)):
        if re.match(r"(https?|mailto):", link):
          continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        where = f"{page.name}: {link}"
        self.assertTrue(target.exists(), where)
        if anchor and target.suffix == ".md":
          self.assertIn(anchor, _anchors(target), where)

  def test_every_notebook_is_on_first_pages(self):
    for page in (_ROOT / "README.md", _ROOT / "docs" / "README.md"):
      links = {link.rpartition("/")[2] for link in _LINK.findall(_prose(page))}
      notebooks = {path.name for path in _COLABS.glob("*.ipynb")}
      self.assertNotEmpty(notebooks)
      self.assertLessEqual(notebooks, links, page.name)

  def test_mentioned_files_exist(self):
    for page in [*_pages(), *sorted((_ROOT / "tba_jax").glob("*.md"))]:
      for name in _CODE_PATH.findall(page.read_text("utf-8")):
        self.assertTrue((_ROOT / name).exists(), f"{page.name}: {name}")

  def test_mentioned_settings_and_programs_exist(self):
    keys = set(settings.SETTINGS) | {"search.mesh"}
    for task in map(tasks_build.find, tasks_build.TASKS):
      keys |= {f"task.{name}" for name in task.FIELDS}
    sections = "|".join(settings.SECTIONS)
    # Excludes file names such as `train.jsonl`.
    name = rf"(?:{sections})\.(?!md|png|jsonl)[a-z]\w*(?:\.\w+)*"
    # In notebooks, module names look the same.
    for page in (page for page in _pages() if page.suffix == ".md"):
      text = page.read_text("utf-8")
      named = set(re.findall(rf"(?:--config\.|`)({name})[=`]", text))
      self.assertEqual(named - keys, set(), page.name)
      program = r"(?:--program=|^tba_jax (?=\w+ -))(\w+)"
      programs = set(re.findall(program, text, re.M)) - {"P"}
      self.assertEqual(programs - set(main.PROGRAMS), set(), page.name)
      configs = re.findall(
          r"^tba_jax \w+ .*--config=([\w/]+)[: \n]", text, re.M
      )
      for config in configs:
        path = _ROOT / "configs" / f"{config}.py"
        self.assertTrue(path.exists(), f"{page.name}: --config={config}")

  def test_mentioned_benchmarks_exist(self):
    modules = {
        "benchmarks": benchmarks.MODULES,
        "studies": studies.MODULES,
        "tests.chaos": chaos.MODULES,
    }
    packages = "|".join(modules)
    command = rf"python -m ({packages})((?: --config\S*)*) ([a-z_]+)"
    result = []
    for page in [*_pages(), *_sources()]:
      # A command may span several lines.
      text = re.sub(r"[\s\\]+", " ", page.read_text("utf-8"))
      for package, _, name in re.findall(command, text):
        self.assertIn(name, modules[package], page)
        result.append(name)
      for name in re.findall(rf"python -m ((?:{packages})\.\w+)", text):
        path = _ROOT / name.replace(".", "/")
        self.assertTrue(path.with_suffix(".py").exists(), f"{page}: {name}")
    self.assertGreater(len(result), 50)

  def test_index_lists_every_program(self):
    text = (_ROOT / "docs" / "README.md").read_text("utf-8")
    table = text.partition("## Programs")[2].partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`.+?) \|", table, re.M))
    self.assertEqual(set(re.findall(r"`(\w+)`", rows)), set(main.PROGRAMS))

  def test_readme_shows_loop_of_package(self):
    page = (_ROOT / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"```python\n(for step, .*?\n)```", page, re.DOTALL)
    code = (_ROOT / "tba_jax" / "loop.py").read_text("utf-8")
    self.assertIn(textwrap.indent(shown, "  "), code)
    self.assertLess(shown.count("\n"), 30)

  def test_architecture_page_lists_existing_files(self):
    page = (_ROOT / "docs/reference/architecture.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py):(\w+)`", page)
    self.assertGreater(len(named), 20)
    for path, name in named:
      code = (_ROOT / path).read_text("utf-8")
      self.assertRegex(code, rf"(?m)^ *(class|def) {name}\b", path)

  def test_messages_match_code(self):
    templates = _templates()
    page = (_ROOT / "docs/guides/troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", page, re.M)
    self.assertGreater(len(messages), 30)
    for message in messages:
      # The line of a wrong setting ends with what its own check says.
      text = message.removesuffix("must be …")
      self.assertTrue(any(text in t for t in templates), message)

  def test_every_objective_and_correction_is_on_its_page(self):
    page = (_ROOT / "docs/reference/objectives.md").read_text("utf-8")
    table = page.partition("## ")[0]
    self.assertCountEqual(
        re.findall(r"^\| `(\w+)` \|", table, re.M), objective_table.OBJECTIVES
    )
    for name in (*objective_table.CORRECTIONS, *objective_table.LENGTH_NORMS):
      self.assertIn(f"`{name}`", page)
    (row,) = re.findall(r"^\| K = 1 \| (.+?) \|", page, re.M)
    self.assertCountEqual(
        re.findall(r"`(\w+)`", row),
        [
            name
            for name, objective in objective_table.OBJECTIVES.items()
            if objective.min_completions == 1
        ],
    )

  def test_loss_of_page_works(self):
    page = (_ROOT / "docs/reference/objectives.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    path = pathlib.Path(self.create_tempdir().full_path) / "my_loss.py"
    path.write_text(block)
    (name,) = re.findall(r"my_loss\.py:(\w+)", page)
    config = base_config.make(loss__name=f"{path}:{name}", loss__beta=1.0)
    validate.validate(config)
    rewards = jnp.array([[0.0, jnp.log(3.0)]])
    ones = jnp.ones((1, 2, 1))
    batch = types.Batch(
        prompt_tokens=jnp.ones((1, 1), jnp.int32),
        prompt_mask=jnp.ones((1, 1)),
        completion_tokens=jnp.ones((1, 2, 1), jnp.int32),
        completion_mask=ones,
        behavior_logprobs=-ones,
        ref_logprobs=-ones,
        rewards=rewards,
        staleness_steps=jnp.zeros((1, 2)),
    )
    pure_loss = objective.make_pure_loss(config)
    grad = jax.grad(lambda x: pure_loss(x, {}, batch, jnp.float32(1.0))[0])
    np.testing.assert_allclose(grad(-ones)[0, :, 0], [-0.25, -0.75], rtol=1e-6)
    config.loss.name = f"{path}:no_such_function"
    with self.assertRaisesRegex(validate.ConfigError, "config.loss.name"):
      validate.validate(config)

  def test_config_of_page_works(self):
    page = (_ROOT / "docs/guides/your_data.md").read_text("utf-8")
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.M | re.S
    )
    folder = pathlib.Path(self.create_tempdir().full_path)
    for name, block in blocks:
      (folder / name).write_text(block)
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(folder)
    runpy.run_path("make_data.py")
    config = load.load_config("my_task.py")
    validate.validate(config)
    task = tasks_build.make_task(config.task)
    self.assertEqual(task.num_prompts("train"), 200)
    word = task.prompt("held_out", 0)[:-1]
    judged = task.judge("held_out", 0, word[::-1])
    self.assertEqual(judged.parts, {"exact": 1.0, "close": 1.0})
    self.assertIsNotNone(judged.key)
    self.assertIsNone(task.judge("held_out", 0, "no").key)
    hub_cache.make(self)
    config = load.load_config("hub_task.py")
    # Only model and data are missing here.
    for line in validate.validate(config, elsewhere=True):
      self.assertIn("not in the hub's cache", line)

  def test_wrappers_of_other_environments_run(self):
    page = (_ROOT / "docs/guides/agents.md").read_text("utf-8")
    (block,) = re.findall(
        r"^```python\n# from_others.py\n(.*?)^```", page, re.M | re.S
    )
    asks = [{"role": "user", "content": "2+3?"}]
    names = {
        "ROWS": [{"prompt": asks, "right": "5"}],
        "TASKS": [{"question": "2+3?"}],
        "SkyRLEnv": _SkyRLEnv,
        "TunixEnv": _TunixEnv,
        "TRLEnvironment": _TRLEnvironment,
        "reward_fn": lambda task, action: float(action == "5"),
    }
    exec(block, names)  # pylint: disable=exec-used
    for name, first, again, turns in (
        ("FromSkyRL", asks, [{"role": "user", "content": "no"}], ["4", "5"]),
        ("FromTunix", "2+3?", "{'left': 1}", ["4", "5"]),
        ("FromTRL", [{**asks[0], "content": "2+3? Add."}], "5\n",
         ['add: {"left": 2, "right": 3}', "5"]),
    ):  # fmt: skip
      with self.subTest(name):
        made = tool_environment.wrap(names[name]())
        self.assertEqual(made.reset(seed=7), first)
        said, reward, done, _ = made.step(turns[0])
        self.assertEqual((said, done), (again, False))
        _, last, done, _ = made.step(turns[1])
        self.assertEqual((reward + last, done), (1.0, True))


class _SkyRLEnv:
  """Follows the interface of SkyRL's `BaseTextEnv`."""

  def __init__(self, env_config, extras):
    del env_config
    self._right = extras["right"]

  def init(self, prompt):
    return prompt, {}

  def step(self, action):
    done = action == self._right
    again = [{"role": "user", "content": "no"}]
    said = [] if done else again
    return dict(observations=said, reward=+done, done=done, metadata={})


class _TunixEnv:
  """Follows the interface of tunix's `BaseTaskEnv`."""

  def __init__(self, task, *, reward_fn):
    self._task, self._reward_fn = task, reward_fn

  def reset(self):
    return self._task, {}

  def step(self, action):
    reward = self._reward_fn(self._task, action)
    return {"left": 1}, reward, reward > 0, {}


class _TRLEnvironment:
  """Follows the interface of TRL's `environment_factory`."""

  def reset(self, **row):
    del row
    self.solved = False
    return " Add."

  def add(self, left: int, right: int) -> int:
    """Adds two numbers."""
    self.solved = left + right == 5
    return left + right
