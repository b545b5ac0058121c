# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Config files, their arguments, overrides, and the errors of all."""

import functools
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load as load_lib
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.tasks import task_table

_ROOT = pathlib.Path(__file__).parents[2]
_FILE = """
from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg=""):
  arg = variants.parse_arg(arg, quick=False, steps=320)
  config = settings.get_config()
  config.task.name = "countdown"
  config.task.min_solutions = 3
  config.train.num_steps = 10 if arg.quick else arg.steps
  return config
"""


class LoadConfigTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / "mine.py"
    self.path.write_text(_FILE)

  def _error(self, spec, *overrides):
    with self.assertRaises(load_lib.ConfigError) as caught:
      load_lib.load_config(spec, overrides)
    return str(caught.exception)

  def test_loads_file_with_its_arguments(self):
    load = load_lib.load_config
    self.assertEqual(load(str(self.path)).train.num_steps, 320)
    self.assertEqual(load(f"{self.path}:quick").train.num_steps, 10)
    self.assertEqual(load(f"{self.path}:steps=7").train.num_steps, 7)

  def test_finds_experiment_configs_by_name_from_any_folder(self):
    before = os.getcwd()
    self.addCleanup(os.chdir, before)
    os.chdir(self.folder)
    for name in ("gsm8k/tba", "gsm8k/tba.py", "configs/gsm8k/tba.py"):
      config = load_lib.load_config(f"{name}:quick")
      self.assertEqual(config.task.name, "gsm8k")
    # The working directory comes first.
    (self.folder / "configs" / "gsm8k").mkdir(parents=True)
    (self.folder / "configs" / "gsm8k" / "tba.py").write_text(_FILE)
    config = load_lib.load_config("configs/gsm8k/tba.py")
    self.assertEqual(config.task.name, "countdown")

  def test_config_is_locked(self):
    config = load_lib.load_config(str(self.path))
    with self.assertRaises(AttributeError):
      config.train.new_key = 1

  def test_fields_of_task_are_filled_in(self):
    task = load_lib.load_config(str(self.path)).task
    self.assertEqual(
        task.to_dict(),
        {**task_table.find("countdown").FIELDS, "min_solutions": 3,
         "name": "countdown"},
    )  # fmt: skip

  def test_number_may_be_not_set(self):
    config = settings.get_config()
    self.assertIsNone(config.reward.fallback)
    for text, value in (("none", None), ("-1", -1.0), ("0", 0.0)):
      config = settings.get_config()
      load_lib.apply_overrides(config, [f"reward.fallback={text}"])
      self.assertEqual(config.reward.fallback, value)
      self.assertEqual(
          load_lib.complete(config).reward.fallback, config.reward.fallback
      )
    with self.assertRaisesRegex(ValueError, "'x': must be a number, or None"):
      load_lib.apply_overrides(settings.get_config(), ["reward.fallback=x"])

  def test_another_task_brings_its_own_fields(self):
    config = load_lib.load_config(
        str(self.path), ["task.max_number=9", "task.name=arithmetic"]
    )
    self.assertEqual(
        config.task.to_dict(),
        {**task_table.find("arithmetic").FIELDS, "max_number": 9,
         "name": "arithmetic"},
    )  # fmt: skip

  def test_names_missing_file_and_present_one(self):
    message = self._error("configs/nothing.py")
    self.assertIn("configs/nothing.py", message)
    self.assertIn("there is no such file", message)
    self.assertIn("there are arithmetic, calculator, countdown", message)

  def test_refuses_binary_file(self):
    for data in (b"\0\1", b"\xff\xfe"):
      self.path.write_bytes(data)
      self.assertRegex(
          self._error(str(self.path)), rf"SyntaxError.*{self.path}(:\d+)?\)"
      )

  def test_names_wrong_argument_and_allowed_ones(self):
    message = self._error(f"{self.path}:quik")
    self.assertIn("'quik'", message)
    self.assertIn("['quick', 'steps']", message)

  def test_refuses_arguments_for_file_without_arguments(self):
    self.assertIn(
        "takes no arguments", self._error("tba_jax/config/settings.py:quick")
    )

  def test_part_of_config_is_none(self):
    self.path.write_text("get_config = lambda: {}\n")
    self.assertIn("must return a complete config", self._error(str(self.path)))

  @parameterized.parameters(
      ("x = (\n", 1),
      ("import nosuchmodule\n", 1),
      ("\n\nimport sys\nsys.exit(9)\n", 4),
      ("def get_config():\n  import json\n  json.loads('{')\n", 3),
      (_FILE.replace("config.train.num_steps", "config.train.nosuch.x"), 11),
  )
  def test_error_in_file_has_its_line(self, text, line):
    self.path.write_text(text)
    self.assertIn(f"{self.path}:{line}", self._error(str(self.path)))

  def test_refuses_missing_argument(self):
    self.path.write_text(_FILE.replace('arg=""', "arg"))
    self.assertIn(f"{self.path}:ARG", self._error(str(self.path)))

  def test_config_imports_sibling_file(self):
    other = self.folder / "other.py"
    other.write_text(
        "from tba_jax.config import variants\n"
        "mine = variants.import_config('mine.py', relative_to=__file__)\n"
        "get_config = mine.get_config\n"
    )
    config = load_lib.load_config(f"{other}:quick")
    self.assertEqual(config.train.num_steps, 10)
    self.path.unlink()
    self.assertIn(f"{other}:2", self._error(str(other)))

  def test_folder_configs_of_user_does_no_harm(self):
    (self.folder / "configs").mkdir()
    (self.folder / "configs" / "__init__.py").write_text("raise OSError\n")
    process = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", "--workdir=run",
         "--config=configs/countdown_sparse.py:smoke", "--config.seed=-1"],
        cwd=self.folder,
        env={**os.environ, "PYTHONPATH": f"{self.folder}:{_ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    self.assertEqual(process.returncode, 2, process.stderr)
    self.assertStartsWith(process.stderr, "error: config.seed = -1")

  def test_file_without_get_config(self):
    self.path.write_text("x = 1\n")
    self.assertIn("get_config", self._error(str(self.path)))

  def test_later_override_wins_and_types_match_default(self):
    config = load_lib.load_config(
        str(self.path),
        [
            "--config.loss.beta=1",
            "--config.loss.beta=2",
            "replay.capacity=1_000",
            "search.lockstep=true",
            "replay.dedupe=0",
            "devices.trainer=0",
            "search.prompts_per_step=0",
        ],
    )
    self.assertIsInstance(config.loss.beta, float)
    self.assertEqual(config.loss.beta, 2.0)
    self.assertEqual(config.replay.capacity, 1000)
    self.assertIs(config.search.lockstep, True)
    self.assertIs(config.replay.dedupe, False)
    self.assertEqual(config.devices.trainer, "0")
    self.assertEqual(config.search.prompts_per_step, 0)

  @parameterized.parameters(
      ("train.num_steps=1.5", "config.train.num_steps = '1.5'", "whole number"),
      ("train.num_steps=", "config.train.num_steps = ''", "whole number"),
      ("loss.beta=small", "config.loss.beta = 'small'", "must be a number"),
      ("replay.dedupe=yes", "config.replay.dedupe = 'yes'", "true or false"),
      ("loss.beta", "config.loss.beta", "needs a value"),
      ("train.num_step=3", "config.train.num_step = '3'",
       "did you mean config.train.num_steps?"),
      ("loss.lead_steps=3", "config.loss.lead_steps = '3'",
       "config.search.lead_steps"),
      ("loss=3", "config.loss = '3'", "it is a section; its keys: loss."),
      ("loss.qqqqqqqqqqqqqqqq=3", "config.loss.qqqqqqqqqqqqqqqq", "loss.scale"),
      ("zzzzzzzzzzzzzzzz=3", "config.zzzzzzzzzzzzzzzz", "publish, "),
      ("task.operations=+", "config.task.operations = '+'", "no such key"),
  )  # fmt: skip
  def test_refuses_wrong_override_by_key(self, override, key, allowed):
    message = self._error(str(self.path), override)
    self.assertStartsWith(message, key)
    self.assertIn(allowed, message)

  def test_files_are_found_from_another_folder(self):
    folder = pathlib.Path(self.create_tempdir().full_path).resolve()
    (folder / "data").mkdir()
    (folder / "scratch").touch()
    for name in ("data/train.jsonl", "data/test.jsonl", "rewards.py"):
      (folder / name).touch()
    before = os.getcwd()
    os.chdir(folder)
    self.addCleanup(os.chdir, before)
    config = load_lib.load_config(
        str(self.path),
        [
            "task.name=custom",
            "task.train=data/train.jsonl",
            "task.test=data[test]",
            "task.rewards=exact, rewards.py:short*2",
            "task.verifier=python rewards.py 'x y'",
            "task.prompt={rewards.py}",
            "reward_model.train=data",
            "offline.path=data/train.jsonl",
            "loss.baseline_file=data/train.jsonl",
            "store.secret_file=none",
            "init=scratch",
        ],
    )
    self.assertEqual(config.task.train, str(folder / "data/train.jsonl"))
    self.assertEqual(config.task.test, f"{folder}/data[test]")
    self.assertEqual(config.task.rewards, f"exact, {folder}/rewards.py:short*2")
    self.assertEqual(config.task.verifier, f"python {folder}/rewards.py 'x y'")
    self.assertEqual(config.task.prompt, "{rewards.py}")
    self.assertEqual(config.reward_model.train, str(folder / "data"))
    self.assertEqual(config.offline.path, config.task.train)
    self.assertEqual(config.loss.baseline_file, config.task.train)
    self.assertEqual(config.store.secret_file, "none")
    self.assertEqual(config.init, "scratch")
    # All may move together; nothing else may be there instead.
    old, moved = config.task.rewards, "exact, /new/rewards.py:short*2"
    same = functools.partial(load_lib.are_moved_files, "task.rewards", old)
    self.assertFalse(same(moved))
    (folder / "rewards.py").unlink()
    self.assertTrue(same(moved))
    self.assertFalse(same(moved.replace("short", "long")))
    same = functools.partial(load_lib.are_moved_files, "task.train")
    self.assertTrue(same("/a/set/hard[train]", "/b/hard[train]"))
    self.assertFalse(same("org/set/main[train]", "other/set/main[train]"))

  def test_subsets_of_folders_are_found_from_another_folder(self):
    folder = pathlib.Path(self.create_tempdir().full_path).resolve()
    for name in ("data", "org"):
      (folder / name).mkdir()
    (folder / "data" / "README.md").touch()
    before = os.getcwd()
    os.chdir(folder)
    self.addCleanup(os.chdir, before)
    for text, value in (
        ("data/hard[train]", f"{folder}/data/hard[train]"),
        ("data/*[test]", f"{folder}/data/*[test]"),
        ("org/hard[train]", "org/hard[train]"),
    ):
      config = load_lib.load_config(
          str(self.path), ["task.name=custom", f"task.train={text}"]
      )
      self.assertEqual(config.task.train, value)

  def test_bool_flag_without_value_is_true(self):
    config = load_lib.load_config(str(self.path), ["search.lockstep"])
    self.assertIs(config.search.lockstep, True)


class CompleteTest(absltest.TestCase):

  def test_saved_config_gets_newer_settings(self):
    saved = settings.get_config()
    saved.seed = 3
    saved.sampling.top_k = 7
    saved.task = {"name": "countdown", "min_solutions": 2}
    del saved.sampling["top_p"], saved["export"]
    complete = load_lib.complete(saved)
    expected = settings.get_config()
    expected.seed, expected.sampling.top_k = 3, 7
    with expected.unlocked():
      expected.task = saved.task
    self.assertEqual(complete.to_dict(), expected.to_dict())
    self.assertNotIn("top_p", saved.sampling)

  def test_complete_keeps_unknown_key(self):
    saved = settings.get_config()
    saved.sampling.no_such_key = 1
    self.assertEqual(load_lib.complete(saved).sampling.no_such_key, 1)


class SplitArgvTest(parameterized.TestCase):

  @parameterized.parameters(
      (["--config.a.b=1"], [], ["a.b=1"]),
      (["--config.a", "1", "x"], ["x"], ["a=1"]),
      (["--config.a=x=y"], [], ["a=x=y"]),
      (["--config.a=", "x"], ["x"], ["a="]),
      (["--config.a", "--workdir=w"], ["--workdir=w"], ["a"]),
      (["--config.a"], [], ["a"]),
      (["--config.a", "-1"], [], ["a=-1"]),
      (["--config=f.py:quick", "run"], ["--config=f.py:quick", "run"], []),
      (["run", "--", "--config.a=1"], ["run", "--", "--config.a=1"], []),
  )
  def test_split(self, argv, rest, overrides):
    self.assertEqual(load_lib.split_argv(argv), (rest, overrides))


class ParseArgTest(parameterized.TestCase):

  def test_types_match_defaults(self):
    arg = variants.parse_arg(
        "quick,seed=3,beta=0.5,name=x=y",
        quick=False, smoke=True, seed=0, beta=1.0, name="", other=7,
    )  # fmt: skip
    self.assertEqual(
        arg.to_dict(),
        dict(quick=True, smoke=True, seed=3, beta=0.5, name="x=y", other=7),
    )

  @parameterized.parameters("", None, ",")
  def test_returns_defaults_without_argument(self, text):
    self.assertEqual(variants.parse_arg(text, seed=4).to_dict(), {"seed": 4})

  @parameterized.parameters(("quick=false", False), ("quick=TRUE", True))
  def test_bool_by_name(self, text, value):
    self.assertIs(variants.parse_arg(text, quick=not value).quick, value)

  @parameterized.parameters(
      ("quik", "'quik'.*\\['quick', 'seed'\\]"),
      ("quick=maybe", "quick = 'maybe'.*true or false"),
      ("seed=x", "seed = 'x'.*a whole number"),
      ("seed", "'seed' needs a value"),
  )
  def test_refuses_wrong_argument(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      variants.parse_arg(text, quick=False, seed=0)
