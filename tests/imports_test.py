# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: rings, no cycles, a bounded depth, parts without JAX."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGE = _ROOT / "tba_jax"

# A file may import from lower rings, or from its own ring and folder. A name
# that ends with `*` stands for the files of a folder.
_RINGS = {
    0: """
        background bootstrap bucket bucket_lease bucket_mirror config_diverse
        config_flat config_hosts config_lora
        config_ranges config_relations config_rewards config_variants devices
        guards host_state jsonl lease_totals logprobs metrics pace pipeline
        processes reward_log rounds save_barrier schedules sharding sweep_types
        tasks/base tokenizer types
    """,
    1: """
        calibration eval_summary line_program local_mesh losses/* models/*
        state_fields
        offline_batches prompts replay/* rewards/judges roofline sampling/*
        tasks/* transport/*
    """,
    2: """
        agreement batch_metrics best_model carriers/* checkpoint cluster
        cluster_join config_args data_report forward host_item ledger lora
        micro_batches objective
        optimizer preparation red_team/* reference replay/claim replay/inbox
        replay/intake replay/journal replay/lease_reader replay/packing
        replay/replies report/* rewards/*
        run_directory run_state sampling/decode sampling/rows shard_report
        step_record value_model versions wandb_writer writers
    """,
    3: """
        batches carriers/build enumerable eval_measures evaluator periods policy
        publication puller replay/drain replay/outbox replay/service
        reward_scorer train_step validate
    """,
    4: """
        device_work evaluations group_scorer model_source offline_training
        pair_objective preference_pairs recorder reward_judge sample_log
        searcher sft_examples sft_settings trainer
    """,
    5: """
        children config_reference evaluate export generate panel panel_final
        panel_view parts parts_params parts_replay plan plan_measured
        plan_memory plan_speed report/program roles score stale_loop
        stale_samples status store supervise sweep sweep_runs sweep_table
        sweep_view train_reward_model train_sft
    """,
    # Benchmarks measure programs; `main` alone asks for either, by name.
    6: "benchmarks/* main",
}
_MAX_DEPTH = 7

# Neither these nor what they import may bring JAX into the process: the store
# and the supervisor must stay small, and a wrong config must be told before a
# device is touched.
_WITHOUT_JAX = """
    bucket bucket_lease bucket_mirror config_diverse config_lora
    carriers/directory
    children config_args config_ranges config_relations jsonl line_program main
    metrics models/config models/hf_config models/hf_files models/hf_names
    models/hf_slices panel panel_final panel_view
    processes prompts report/* rewards/* run_directory run_state shard_report
    store supervise tasks/* transport/announcer transport/base
    transport/in_process
    transport/kv_host
    transport/locator transport/spool transport/wire validate
"""
_JAX_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


def _name(path: pathlib.Path) -> str:
  return str(path.relative_to(_PACKAGE).with_suffix(""))


# The package's own `__init__` is loaded before any of its files, so it has no
# ring; the last test below sees what it loads.
_FILES = {
    _name(path): ast.parse(path.read_text())
    for path in sorted(_PACKAGE.rglob("*.py"))
    if path != _PACKAGE / "__init__.py"
}


def _matches(names: str) -> set[str]:
  """The files that a list of names and `folder/*` stands for."""
  out = set()
  for name in names.split():
    if name.endswith("/*"):
      out |= {f for f in _FILES if f.startswith(name[:-1])}
    else:
      out |= {name} & set(_FILES)
  return out


def _ring_of() -> dict[str, int]:
  """Ring of each file; a file's own name wins over its folder's `*`."""
  rings = {}
  for folders in (True, False):
    for ring, names in _RINGS.items():
      some = [n for n in names.split() if n.endswith("/*") == folders]
      rings |= dict.fromkeys(_matches(" ".join(some)), ring)
  return rings


def _is_type_checking(node: ast.AST) -> bool:
  return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(tree: ast.AST, *, top_level: bool = False) -> set[str]:
  """Dotted names that a file imports; with `top_level` only when it loads."""
  found, nodes = set(), [tree]
  while nodes:
    node = nodes.pop()
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if not _is_type_checking(node) and not (inside and top_level):
      nodes += ast.iter_child_nodes(node)
  return found


def _ours(tree: ast.AST, *, top_level: bool = False) -> set[str]:
  """The files of the package that a file imports."""
  names = {
      name.removeprefix("tba_jax.").replace(".", "/")
      for name in _imports(tree, top_level=top_level)
      if name.startswith("tba_jax.")
  }
  return (names | {f"{name}/__init__" for name in names}) & set(_FILES)


def _programs() -> set[str]:
  """What `main` imports by name when a program is asked for."""
  return {
      node.value.removeprefix("tba_jax.").replace(".", "/")
      for node in ast.walk(_FILES["main"])
      if isinstance(node, ast.Constant)
      and isinstance(node.value, str)
      and node.value.startswith("tba_jax.")
  } & set(_FILES)


class ImportsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.edges = {name: _ours(tree) for name, tree in _FILES.items()}

  def test_every_file_has_a_ring(self):
    self.assertEqual(set(_FILES) - set(_ring_of()), set())

  def test_imports_go_inwards(self):
    rings = _ring_of()
    for name, targets in self.edges.items():
      for target in targets:
        same_folder = name.rpartition("/")[0] == target.rpartition("/")[0]
        allowed = rings[target] < rings[name] or (
            same_folder and rings[target] == rings[name]
        )
        self.assertTrue(
            allowed,
            f"{name} (ring {rings[name]}) imports {target} (ring"
            f" {rings[target]})",
        )

  def test_no_cycles_and_a_bounded_depth(self):
    edges = {**self.edges, "main": self.edges["main"] | _programs()}
    longest: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...]) -> list[str]:
      self.assertNotIn(name, above, f"a cycle: {above} {name}")
      if name not in longest:
        below = [chain(t, (*above, name)) for t in sorted(edges[name])]
        longest[name] = [name, *max(below, key=len, default=[])]
      return longest[name]

    for name in _FILES:
      chain(name, ())
    below_main = longest["main"][1:]
    self.assertLessEqual(len(below_main), _MAX_DEPTH, " > ".join(below_main))

  def test_only_one_file_uses_private_jax(self):
    users = [
        name
        for name, tree in _FILES.items()
        if any(i.startswith(("jax._src", "jaxlib")) for i in _imports(tree))
    ]
    self.assertEqual(users, ["transport/jax_kv"])

  def test_no_torch_and_no_pickle(self):
    for name, tree in _FILES.items():
      packages = {imported.partition(".")[0] for imported in _imports(tree)}
      self.assertEqual(
          packages & {"torch", "pickle", "tensorflow"}, set(), name
      )

  def test_first_party_imports_are_of_modules(self):
    for name, tree in _FILES.items():
      for imported in _imports(tree):
        if imported.startswith(("tba_jax.", "configs.")):
          path = _ROOT / imported.replace(".", "/")
          self.assertTrue(
              path.with_suffix(".py").exists() or path.is_dir(),
              f"{name} imports {imported}, which is no module",
          )

  def test_parts_without_jax_do_not_name_it(self):
    """Tells which file it is; the next test also sees third parties."""
    edges = {n: _ours(t, top_level=True) for n, t in _FILES.items()}
    todo = [(name, name) for name in sorted(_matches(_WITHOUT_JAX))]
    seen = set()
    while todo:
      name, why = todo.pop()
      if name in seen:
        continue
      seen.add(name)
      packages = {
          imported.partition(".")[0]
          for imported in _imports(_FILES[name], top_level=True)
      }
      self.assertEqual(packages & _JAX_PACKAGES, set(), why)
      todo += [(target, f"{why} > {target}") for target in edges[name]]

  def test_parts_without_jax_do_not_load_it(self):
    modules = [
        "tba_jax." + name.replace("/", ".")
        for name in sorted(_matches(_WITHOUT_JAX))
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "  importlib.import_module(name)\n"
        "  if 'jax' in sys.modules: sys.exit(f'{name} loads jax')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
  absltest.main()
