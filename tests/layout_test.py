# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Import order of folders, and modules that must not load JAX."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import absltest

from benchmarks import structure

_PACKAGE = pathlib.Path(__file__).parents[1] / "tba_jax"
# A file imports from earlier folders and its own. Tables and checks of a
# folder's settings precede the folder.
_TABLES = "settings of folders"
_ORDER = (
    ("types", "system"),
    ("transport", "models"),
    ("tasks", "losses"),
    ("sampling",),
    (_TABLES,),
    ("config",),
    ("rewards",),
    ("chat_api",),
    ("environments",),
    ("schedule", "collect"),
    ("replay",),
    ("loop",),
    ("transport.groups",),
    ("run",),
    ("mesh",),
    ("policy",),
    ("learning",),
    ("evaluation",),
    ("hooks", "searcher"),
    ("serving",),
    ("report",),
    ("programs",),
    ("tools",),
    ("main", "__init__"),
    ("__main__",),
)
_RANK = {name: rank for rank, names in enumerate(_ORDER) for name in names}
# The supervisor and the store stay small, and a wrong config is reported before
# a device is used.
_WITHOUT_JAX = """
    config.custom_code config.hardware config.load config.reference
    config.settings config.stages config.validate config.variants
    environments.checks environments.containers environments.environment_task
    environments.episode_pool environments.episode_worker learning.host_state
    losses.objective_table main models.config models.families.family
    models.hf.folders models.hf.hf_config models.hf.hf_files models.hf.hf_hub
    models.hf.hf_names policy.prompt_preview programs.model_sizes
    programs.store programs.train report.page report.panel rewards.comparers
    rewards.judges rewards.pool rewards.url_judge rewards.worker
    run.run_directory
    system.background system.bucket system.heartbeat system.jsonl
    system.polling system.processes system.role system.supervised_worker
    tasks.task_table tools.verify transport.byte_store transport.kv.kv_host
    transport.kv.locator transport.params.carriers transport.wire
""".split()

# Uses of private names in all tests. The limit may only fall: a test that needs
# another one is a reason for a public name.
_MOST_REACHES = 65
# Modules in the longest chain of imports, and modules reached by `loop.py`,
# including itself. The limits may only fall: remove imports.
_MOST_IN_A_CHAIN = 14
_MOST_OF_THE_LOOP = 40
# Interfaces of the standard library, of notebooks and of a package's sources.
_NO_REACH = ("_asdict", "_exit", "_make", "_replace", "_repr_html_", "_src")


def _reaches(path: pathlib.Path) -> list[str]:
  """Returns the private names that a test reads or patches, with locations."""
  result = []
  for node in ast.walk(ast.parse(path.read_text())):
    name = owner = ""
    if isinstance(node, ast.Attribute):
      name, owner = node.attr, ast.unparse(node.value)
    elif isinstance(node, ast.Call) and len(node.args) > 1:
      patches = ast.unparse(node.func).endswith(("patch.object", "attr"))
      if patches and isinstance(node.args[1], ast.Constant):
        name, owner = str(node.args[1].value), ast.unparse(node.args[0])
    is_private = name.startswith("_") and not name.startswith("__")
    if is_private and name not in _NO_REACH:
      if owner not in ("self", "cls", "super()"):
        result.append(f"{path.name}:{node.lineno} {owner}.{name}")
  return result


def _place(name: str) -> str:
  """Returns the entry of `_ORDER` for a dotted module name."""
  folder, _, file = name.rpartition(".")
  if not folder.startswith("config") and file in ("settings", "checks"):
    return _TABLES
  above = name.split(".")[0]
  return folder if folder in _RANK else above


def _imports(path: pathlib.Path) -> set[str]:
  """Returns the dotted names of the package's modules that a file imports."""
  result = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      result |= {f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Import):
      result |= {alias.name for alias in node.names}
  return result


def _uses(path: pathlib.Path) -> dict[str, set[str]]:
  """Returns the names that a file uses, by module outside `system`."""
  tree = ast.parse(path.read_text())
  modules = {
      alias.asname or alias.name: f"{node.module}.{alias.name}"
      for node in ast.walk(tree)
      if isinstance(node, ast.ImportFrom)
      for alias in node.names
  }
  uses = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      folder, _, name = modules.get(node.value.id, "").partition(".")
      if folder == "tba_jax" and not name.startswith("system."):
        uses.setdefault(name, set()).add(node.attr)
  return uses


class LayoutTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.files = {
        ".".join(path.relative_to(_PACKAGE).with_suffix("").parts): path
        for path in sorted(_PACKAGE.rglob("*.py"))
    }
    self.edges = {
        name: {
            target
            for imported in _imports(path)
            for target in (imported.removeprefix("tba_jax."),)
            if imported.startswith("tba_jax.") and target in self.files
        }
        for name, path in self.files.items()
    }

  def test_root_has_few_files(self):
    roots = {name for name in self.files if "." not in name}
    self.assertEqual(
        roots,
        {
            "__init__",
            "__main__",
            "collect",
            "hooks",
            "loop",
            "main",
            "schedule",
            "searcher",
            "types",
        },
    )

  def test_imports_follow_order_of_folders(self):
    for name, path in self.files.items():
      place = _place(name)
      for imported in _imports(path):
        if not imported.startswith("tba_jax."):
          continue
        target = _place(imported.removeprefix("tba_jax."))
        allowed = _RANK[target] < _RANK[place] or target == place
        self.assertTrue(allowed, f"{name} imports {imported}")

  def test_imports_have_no_circle(self):
    done = set()

    def visit(name, above):
      self.assertNotIn(name, above, f"a circle: {above}")
      if name not in done:
        for target in sorted(self.edges[name]):
          visit(target, (*above, name))
        done.add(name)

    for name in self.edges:
      visit(name, ())

  def test_chains_of_imports_are_short(self):
    chain = structure.longest_chain(self.edges)
    self.assertLessEqual(len(chain), _MOST_IN_A_CHAIN, " > ".join(chain))
    reached = structure.reach("loop", self.edges)
    self.assertLessEqual(len(reached), _MOST_OF_THE_LOOP, sorted(reached))

  def test_verify_audits_use_only_readers(self):
    """Audits use only the readers of the code that writes a format."""
    audits = {
        "transport.groups.journal_audit": {"audit", "audit_acks"},
        "learning.checkpoint_audit": {"audit", "audit_model"},
        "run.metrics": {"audit_events", "audit_metrics"},
        "run.run_directory": {"check_format"},
        "run.run_files": {"audit", "audit_checksums", "audit_results"},
        "replay.ledger": {"audit"},
    }
    self.assertEqual(_uses(self.files["tools.verify"]), audits)
    readers = {
        "transport.groups.journal": {
            *("find_segments", "header_error", "split_segment", "parse_ack"),
            *("RecordSpan", "HEADER_BYTES"),
        },
        "learning.host_state": {"read", "NAME", "FORMAT"},
        "models.hf.hf_files": {"damage"},
        "replay.ledger": {"Amount", "audit_state"},
        "transport.wire": {"decode_unverified"},
    }
    for name in ("transport.groups.journal_audit", "learning.checkpoint_audit"):
      for module, used in _uses(self.files[name]).items():
        self.assertLessEqual(used, readers[module], f"{name}: {module}")

  def test_tests_use_few_private_names(self):
    tests = pathlib.Path(__file__).parent.rglob("*.py")
    result = [reach for path in sorted(tests) for reach in _reaches(path)]
    self.assertLessEqual(len(result), _MOST_REACHES, "\n".join(result))

  def test_no_file_imports_for_type_checking_alone(self):
    for name, path in self.files.items():
      self.assertNotIn("TYPE_CHECKING", path.read_text(), name)

  def test_one_file_uses_private_jax_and_none_torch_or_pickle(self):
    private = set()
    for name, path in self.files.items():
      imported = _imports(path)
      packages = {i.partition(".")[0] for i in imported}
      self.assertEqual(packages & {"torch", "pickle", "tensorflow"}, set())
      for other in ("benchmarks", "configs", "studies", "tests"):
        self.assertNotIn(other, packages, name)
      if any(i.startswith(("jax._src", "jaxlib")) for i in imported):
        private.add(name)
    self.assertEqual(private, {"transport.kv.jax_kv"})

  def test_parts_without_jax_do_not_load_it(self):
    code = (
        "import importlib, sys\n"
        f"for name in {_WITHOUT_JAX!r}:\n"
        "  importlib.import_module('tba_jax.' + name)\n"
        "  if 'jax' in sys.modules: sys.exit(f'{name} loads jax')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(process.returncode, 0, process.stderr)

  def test_roles_of_task_with_builtin_vocabulary_load_no_transformers(self):
    code = (
        "import sys\n"
        "from tba_jax.config import load\n"
        "from tba_jax.policy import policy\n"
        "from tba_jax.programs import one_process, roles, store\n"
        "file = 'configs/arithmetic.py:smoke'\n"
        "config = load.load_config(file, ['init=scratch'])\n"
        "words = policy.make_policy(config, '').tokenizer\n"
        "assert words.decode(words.encode('1+2')) == '1+2'\n"
        "if 'transformers' in sys.modules: sys.exit('transformers is loaded')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
