# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of programs; wrong use exits with status 2."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl import app
from absl.testing import flagsaver
from absl.testing import parameterized

import tba_jax
from tba_jax import main as main_lib
from tba_jax.config import load as load_lib
from tba_jax.programs import train
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.system import processes
from tba_jax.transport import byte_store

_ROOT = pathlib.Path(__file__).parents[1]
_CONFIG = str(_ROOT / "configs" / "countdown.py")


class MainTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    self.addCleanup(os.umask, os.umask(0o022))
    self.workdir = self.create_tempdir().full_path
    self.stderr = io.StringIO()

  def main(self, *argv, overrides=(), **flags):
    """Runs `main` with flags as parsed; returns the exit status."""
    with (
        flagsaver.flagsaver(**flags),
        contextlib.redirect_stderr(self.stderr),
    ):
      return main_lib.main(["main", *argv], overrides)

  def refused(self, pattern, **arguments):
    with mock.patch.object(main_lib, "find_program") as load:
      self.assertEqual(self.main(**arguments), 2)
    load.assert_not_called()
    self.assertRegex(self.stderr.getvalue(), f"^error: .*{pattern}")

  def make_run(self):
    config = load_lib.load_config(_CONFIG + ":smoke")
    run_directory.create(self.workdir, config)
    return config

  def test_program_gets_config_workdir_and_operands(self):
    with mock.patch.object(train, "run", autospec=True, return_value=7) as run:
      status = self.main(
          "one",
          "two",
          program="train",
          config=_CONFIG,
          workdir=self.workdir,
          overrides=["train.num_steps=12"],
      )
    self.assertEqual(status, 7)
    config, workdir, operands = run.call_args.args
    self.assertEqual(config.train.num_steps, 12)
    self.assertEqual((workdir, operands), (self.workdir, ["one", "two"]))

  def test_role_runs_with_saved_config(self):
    saved = self.make_run()
    module = mock.Mock(spec=["run_trainer", "run"])
    with mock.patch.object(
        main_lib, "find_program", return_value=module
    ) as load:
      self.main(program="trainer", config=None, workdir=self.workdir)
    load.assert_called_once_with("trainer")
    # A module with two programs has a function for each.
    module.run.assert_not_called()
    config = module.run_trainer.call_args.args[0]
    self.assertEqual(config.to_dict(), saved.to_dict())

  @parameterized.parameters("trainer", "searcher", "train")
  def test_programs_but_supervisor_prepare_for_gpu(self, program):
    self.make_run()
    module = mock.Mock(spec=["run", "run_trainer", "run_searcher"])
    with (
        mock.patch.object(accelerators, "prepare") as prepare,
        mock.patch.object(main_lib, "find_program", return_value=module),
    ):
      self.main("0", program=program, config=None, workdir=self.workdir)
    self.assertEqual(prepare.call_count, program != "train")

  @parameterized.parameters(
      OSError("a full disk"), byte_store.DeadlineExceededError("a store away")
  )
  def test_transient_error_exits_with_1(self, error):
    module = mock.Mock(spec=["run"])
    module.run.side_effect = error
    with mock.patch.object(main_lib, "find_program", return_value=module):
      status = self.main(program="plan", config=_CONFIG, workdir=self.workdir)
    self.assertEqual(status, 1)
    self.assertRegex(self.stderr.getvalue(), f"(?m)^error: {error}$")

  def test_calibrate_is_of_plan(self):
    module = mock.Mock(spec=["run"])
    with mock.patch.object(main_lib, "find_program", return_value=module):
      self.main("l4", program="plan", config=_CONFIG, calibrate="a/run")
    self.assertEqual(module.run.call_args.args[2], ["l4", "--calibrate=a/run"])
    self.refused(
        "--calibrate: --program=train",
        program="train",
        config=_CONFIG,
        calibrate="a/run",
    )

  def test_report_needs_no_config(self):
    """A report can describe a damaged run."""
    self.make_run()
    pathlib.Path(self.workdir, "epoch.json").write_text("[]")
    module = mock.Mock(spec=["run"])
    with mock.patch.object(main_lib, "find_program", return_value=module):
      for workdir, *operands in ((None, "a", "b"), (self.workdir,)):
        self.main(*operands, program="report", config=None, workdir=workdir)
        module.run.assert_called_with(None, workdir, operands)

  def test_status_of_run_with_missing_task(self):
    config = load_lib.load_config(_CONFIG + ":smoke")
    with config.unlocked():
      config.task = {"name": "gone.py:Task", "path": "gone.jsonl"}
    run_directory.create(self.workdir, config)
    module = mock.Mock(spec=["run"])
    module.run.return_value = 0
    with mock.patch.object(main_lib, "find_program", return_value=module):
      status = self.main(program="status", config=None, workdir=self.workdir)
    self.assertEqual(status, 0, self.stderr.getvalue())

  @parameterized.parameters(
      ("--workdir: --program=train needs", dict(workdir=None)),
      ("--workdir", dict(workdir="")),
      ("--workdir", dict(program="status", config=None, workdir=None)),
      ("--config", dict(config="")),
      ("--config: --program=train needs", dict(config=None)),
      ("--config=no.py.*calculator, countdown", dict(config="no.py")),
      ("no run is there", dict(program="trainer", config=None)),
      *(
          (
              f"config.seed=3: --program={name} takes no settings",
              dict(program=name, config=None, overrides=["seed=3"]),
          )
          for name in ("report", "verify", "rerun")
      ),
      ("config.loss.betta = '1'.*did you mean config.loss.beta",
       dict(overrides=["loss.betta=1"])),
      ("config.train.num_steps = 0", dict(overrides=["train.num_steps=0"])),
  )  # fmt: skip
  def test_wrong_use_is_refused_and_writes_nothing(self, pattern, changes):
    usual = dict(program="train", config=_CONFIG, workdir=self.workdir)
    self.refused(pattern, **usual | changes)
    self.assertEmpty(list(pathlib.Path(self.workdir).iterdir()))

  @parameterized.parameters(
      ("JAX_PLATFORMS", "nosuch", "must be one of cpu"),
      ("JAX_PLATFORMS", "cpu,x.y", "'x.y': not installed here"),
      ("TBA_JAX_CACHE_DIR", "/proc/none", "'/proc/none', cannot be made: No"),
      ("TBA_JAX_CACHE_DIR", f"{__file__}/x", "cannot be made: Not a directory"),
  )
  def test_wrong_environment_is_refused(self, variable, value, pattern):
    with mock.patch.dict(os.environ, {variable: value}):
      self.refused(
          f"{variable}.*{pattern}",
          program="train",
          config=_CONFIG,
          workdir=self.workdir,
      )

  @parameterized.parameters(
      ("--workdir=.*UTF-8", dict(workdir="/tmp/\udcff")),
      ("config.init = .*UTF-8", dict(overrides=["init=/tmp/\udcff"])),
      ("config.init = .*without NUL", dict(overrides=["init=/tmp/\0"])),
  )
  def test_refuses_unencodable_text(self, pattern, changes):
    usual = dict(program="train", config=_CONFIG, workdir=self.workdir)
    self.refused(pattern, **usual | changes)

  def test_file_is_not_workdir(self):
    for program in ("train", "sft", "status"):
      self.refused(
          "--workdir=.*: is a file; must be a folder",
          program=program,
          config=_CONFIG,
          workdir=__file__,
      )

  @parameterized.parameters("sft", "reward_model", "store", "searcher")
  def test_refuses_non_numeric_operands(self, program):
    with mock.patch.object(main_lib, "find_program"):
      status = self.main(
          "a", program=program, config=_CONFIG, workdir=self.workdir
      )
    self.assertEqual(status, 2)
    self.assertIn("operands a: must be one whole", self.stderr.getvalue())

  @parameterized.parameters("sft", "reward_model")
  def test_manual_stage_locks_directory(self, program):
    module = mock.Mock(spec=["run"])
    module.run.return_value = 0
    held = run_directory.lock(self.workdir)
    arguments = dict(program=program, config=_CONFIG, workdir=self.workdir)
    with mock.patch.object(main_lib, "find_program", return_value=module):
      self.assertEqual(self.main(**arguments), 2)
      pattern = f"process {os.getpid()} already runs there"
      self.assertRegex(self.stderr.getvalue(), pattern)
      module.run.assert_not_called()
      with self.subTest("which its supervisor has for it"):
        os.environ[processes.SUPERVISED] = "1"
        self.assertEqual(self.main(**arguments), 0)
        del os.environ[processes.SUPERVISED]
      os.close(held)
      self.assertEqual(self.main(**arguments), 0)

  @parameterized.parameters(
      ("Unable to initialize backend 'tpu': no device\nmore", 2),
      ("Unable to initialize backend 'tpu': the TPU is already in use", 1),
  )
  def test_reports_unusable_device(self, message, expected):
    module = mock.Mock(spec=["run"])
    module.run.side_effect = RuntimeError(message)
    with mock.patch.object(main_lib, "find_program", return_value=module):
      status = self.main(program="plan", config=_CONFIG, workdir=self.workdir)
    self.assertEqual(status, expected)
    line = message.partition("\n")[0]
    self.assertRegex(
        self.stderr.getvalue(), f"^error: JAX_PLATFORMS='.*': {line}\n$"
    )

  def _usage(self, *argv):
    """Returns status, stdout and stderr of a command line."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["main", *argv]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(self.stderr),
        self.assertRaises(SystemExit) as exit_,
    ):
      main_lib.run()
    return exit_.exception.code, out.getvalue(), self.stderr.getvalue()

  @parameterized.parameters(["--help"], ["-h"])
  def test_help_lists_every_program(self, *argv):
    status, out, _ = self._usage(*argv)
    self.assertEqual(status, 0)
    for name, (meaning, _) in main_lib.PROGRAMS.items():
      self.assertRegex(out, f"(?m)^  {name} +{meaning}$")

  @parameterized.parameters(
      (["--help", "loss.beta"], ["loss.beta = 0.05", "from 0 on", "KL"]),
      (["--help=config.replay"], ["replay.capacity =", "replay.dedupe ="]),
      (["--help", "task.max_number"], ["task.max_number ="]),
      (["--help", "task.test"], ["(task.name: math)", "(task.name: custom)"]),
      (["--help", "loss.name"], ["when a run is resumed: the loss"]),
      (["--help", "optimizer.b1"], ["may change when a run is resumed"]),
  )
  def test_help_explains_settings(self, argv, said):
    status, out, _ = self._usage(*argv)
    self.assertEqual(status, 0)
    for text in said:
      self.assertIn(text, out)

  @parameterized.parameters(
      (["export", "--help"], "Operands are the step of a checkpoint"),
      (["--program=compile", "--help"], "TRAINER_TOPOLOGY"),
      (["--help", "rerun"], "Operands are the step"),
  )
  def test_help_on_program_names_its_operands(self, argv, text):
    status, out, _ = self._usage(*argv)
    self.assertEqual(status, 0)
    self.assertIn(text, out)

  def test_prints_its_version(self):
    status, out, _ = self._usage("--version")
    self.assertEqual((status, out), (0, f"tba_jax {tba_jax.__version__}\n"))

  def test_help_to_closed_pipe_is_silent(self):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", "--help"],
        cwd=_ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    self.assertEqual((process.returncode, process.stderr), (0, b""))

  def test_help_on_no_setting_names_nearest(self):
    status, _, error = self._usage("--help", "los.beta")
    self.assertEqual(status, 2)
    self.assertIn("config.loss.beta", error)

  def test_asks_nothing(self):
    status, _, error = self._usage()
    self.assertEqual(status, 2)
    self.assertIn("--config=FILE", error)

  def test_role_takes_no_overrides(self):
    self.make_run()
    self.refused(
        "config.seed=3: --program=trainer takes its settings from",
        program="trainer",
        config=None,
        workdir=self.workdir,
        overrides=["seed=3"],
    )

  @parameterized.parameters("evaluate", "train", "searcher")
  def test_program_may_change_saved_settings(self, program):
    self.make_run()
    module = mock.Mock(spec=["run"])
    with mock.patch.object(main_lib, "find_program", return_value=module):
      self.main(
          program=program,
          config=None,
          workdir=self.workdir,
          overrides=["evaluate.num_prompts=3"],
      )
    self.assertEqual(module.run.call_args.args[0].evaluate.num_prompts, 3)

  def test_overrides_are_taken_out_before_flags(self):
    argv = ["main", "--config.seed=3", "--program=plan", "--config.a", "b", "x"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(app, "run", autospec=True) as run,
        mock.patch.object(main_lib, "main", autospec=True, return_value=4),
        mock.patch.object(main_lib.logging, "set_verbosity", autospec=True),
    ):
      main_lib.run()
      entry = run.call_args.args[0]
      self.assertEqual(
          run.call_args.kwargs["argv"], ["main", "--program=plan", "x"]
      )
      with self.assertRaises(SystemExit) as exit_:
        entry(["main", "x"])
      main_lib.main.assert_called_once_with(["main", "x"], ["seed=3", "a=b"])
    self.assertEqual(exit_.exception.code, 4)

  @parameterized.parameters("--program=foo", "--no_such_flag", "--workdirr=x")
  def test_wrong_flag_ends_with_2(self, flag):
    with contextlib.redirect_stderr(self.stderr), flagsaver.flagsaver():
      with self.assertRaises(SystemExit) as exit_:
        main_lib.parse_flags(["main", flag])
    self.assertEqual(exit_.exception.code, 2)
    self.assertRegex(self.stderr.getvalue(), "^error: ")

  @parameterized.parameters(
      ("num_steps", "it is --config.train.num_steps here"),
      (
          "learning_rate",
          "it is --config.optimizer.learning_rate and"
          " --config.optimizer.learning_rate_final here",
      ),
      ("prompt", "it is --config.task.prompt here"),
      ("sampling.top_p", "it is --config.sampling.top_p here"),
      ("num_generations", r"it is config.search.samples_per_prompt here \("),
  )
  def test_setting_as_flag_is_named(self, flag, answer):
    with contextlib.redirect_stderr(self.stderr), flagsaver.flagsaver():
      with self.assertRaises(SystemExit):
        main_lib.parse_flags(["main", f"--{flag}=1"])
    self.assertRegex(
        self.stderr.getvalue(),
        f"^error: --{flag}: there is no such flag; {answer}",
    )

  @parameterized.parameters(
      ("tran", "; did you mean train[?]"), ("runs/a", "; see --help")
  )
  def test_wrong_program_is_refused(self, name, hint):
    argv = ["main", name, "--config=countdown", "--workdir=runs/a"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(app, "run", autospec=True) as run,
        contextlib.redirect_stderr(self.stderr),
        self.assertRaises(SystemExit) as exit_,
    ):
      main_lib.run()
    self.assertEqual(exit_.exception.code, 2)
    self.assertRegex(
        self.stderr.getvalue(),
        f"^error: {name}: there is no such program{hint}",
    )
    run.assert_not_called()

  def test_operand_may_precede_flag_of_its_program(self):
    argv = ["main", "0", "--program=searcher", "--workdir=runs/a"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(app, "run", autospec=True) as run,
        mock.patch.object(main_lib.logging, "set_verbosity", autospec=True),
    ):
      main_lib.run()
    self.assertEqual(run.call_args.kwargs["argv"], argv)

  def test_wrong_use_never_loads_jax(self):
    # Uses another process, because this one has loaded JAX.
    script = """
import json, sys
from tba_jax import main
out = []
for argv in json.loads(sys.argv[1]):
  sys.argv = ["main", *argv]
  try:
    main.run()
  except SystemExit as error:
    out.append(error.code)
print(json.dumps([out, "jax" in sys.modules]))
"""
    commands = [
        ["--program=foo"],
        ["--program=train"],
        ["--config=configs/countdown.py", "--config.loss.beta=-1",
         f"--workdir={self.workdir}", "--program=train"],
        ["--program=train", "--config=configs/countdown.py",
         f"--workdir={self.workdir}", "operand"],
    ]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertEqual(json.loads(process.stdout), [[2, 2, 2, 2], False])
    for named in ("--program=foo", "config.loss.beta", "operand"):
      self.assertIn(named, process.stderr)

  def test_every_program_exists(self):
    for name, (_, module) in main_lib.PROGRAMS.items():
      text = (_ROOT / "tba_jax" / f"{module.replace('.', '/')}.py").read_text()
      self.assertTrue(
          f"def run_{name}(" in text or "def run(" in text,
          f"{name} of {module}",
      )
