# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs from Python: `tba_jax.train(…)`, and what it returns.

Arguments become the same config as from a file (`config/arguments.py`), so a
run does not depend on how it was started. Objects that a file cannot contain
are lent to the run's processes: functions (`system/callables.py`) and rows
(`tasks/python_rows.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import html
import logging
import numbers
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any
import weakref

import ml_collections

from tba_jax.config import arguments
from tba_jax.config import validate
from tba_jax.policy import prompt_preview
from tba_jax.programs import settle
from tba_jax.programs import train as train_lib
from tba_jax.report import page as report_build
from tba_jax.run import files
from tba_jax.run import metrics as metrics_lib
from tba_jax.run import run_directory
from tba_jax.system import bucket
from tba_jax.system import callables
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tasks import python_rows

# A signal ends a run with status 128 plus its number.
_SIGNALS = 128


def begin(
    config: ml_collections.ConfigDict | None,
    workdir: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    *,
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
) -> "TrainingRun":
  """Returns a run that has not started; for arguments, errors see `train`."""
  if workdir is not None and not os.fspath(workdir):
    raise ValueError("workdir: must be a path; it is empty")
  if not (config is None or isinstance(config, ml_collections.ConfigDict)):
    raise ValueError(
        f"config={config!r:.60}: must be a config of load_config(FILE); a model"
        " is model=…"
    )
  if not (model is None or isinstance(model, (str, os.PathLike))):
    raise ValueError(
        f"model={model!r:.60}: must be a name or a folder, because this package"
        " implements models itself; model.save_pretrained(FOLDER) writes one"
    )
  with contextlib.ExitStack() as made:
    given = _Given(reward, environment, workdir, made)
    config = given.config(config, model, data, settings)
    try:
      config = settle.settle(config, given.folder or None, "train")
      program = "train" if workdir is not None else "one_process"
      validate.validate(config, program=program)
    except ValueError as error:
      raise ValueError(given.explain(str(error))) from error
    return TrainingRun(config, given, made.pop_all())


class _Given:
  """The caller's Python objects that the config refers to.

  folder: local folder of the run; "" for a run without files.
  """

  def __init__(
      self,
      reward: Any,
      environment: Any,
      workdir: str | os.PathLike[str] | None,
      made: contextlib.ExitStack,
  ):
    """Checks the callables, which are lent until `made` ends."""
    self._rewards = _listed_rewards(reward)
    self._environment = environment
    if not (environment is None or isinstance(environment, str)):
      _check_callable("environment", environment)
    self.folder = ""
    # Value of a setting for a callable -> the name of the caller's argument.
    self._names: dict[str, str] = {}
    if workdir is not None:
      self.folder = bucket.stage(os.fspath(workdir), "train")
      run_directory.check_folder(self.folder, "workdir")
    self._made = made
    self._arguments: list[str] = []
    self._lent: pathlib.Path | None = None

  def _temporary(self) -> pathlib.Path:
    # Kept as long as the run object, which may be evaluated after the run's
    # end.
    folder = tempfile.mkdtemp(prefix="tba_jax_")
    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)

  def _lending(self) -> pathlib.Path:
    """Returns the private folder of callables, the same in later calls."""
    if self._lent is None:
      if self.folder:
        path = pathlib.Path(self.folder).absolute() / "callables"
        self._lent = processes.temporary_directory(path)
      else:
        self._lent = self._temporary()
    return self._lent

  @contextlib.contextmanager
  def lend(self) -> Iterator[tuple[str, str]]:
    """Lends the callables; yields values of `task.rewards`, `task.source`."""
    loan = None
    with contextlib.ExitStack() as closing:

      def named(argument: str, value: Any) -> str:
        nonlocal loan
        if isinstance(value, str):
          return value
        if loan is None:
          loan = callables.Loan(self._lending())
          closing.callback(loan.close)
        text = loan.add(argument, value)
        self._names[text] = callables.name_of(value)
        return text

      rewards = [
          named("reward", value) + (f" * {weight}" if weight != 1 else "")
          for value, weight in self._rewards
      ]
      environment = self._environment
      if environment is not None:
        environment = named("environment", environment)
      yield ", ".join(rewards), environment or ""

  def config(
      self,
      config: ml_collections.ConfigDict | None,
      model: str | os.PathLike[str] | None,
      data: Any,
      settings: Mapping[str, Any],
  ) -> ml_collections.ConfigDict:
    """Returns the run's config; lends the callables until `made` ends."""
    sources, settings = None, dict(settings)
    if data is not None:
      is_path = isinstance(data, (str, os.PathLike))
      folder = pathlib.Path()
      if not is_path:
        folder = self.folder and pathlib.Path(self.folder).absolute() / "data"
        folder = folder or self._temporary()
      template = settings.get("prompt") or ""
      task = {} if config is None else config.task
      template = template or task.get("prompt", "")
      if not isinstance(template, str):
        template = arguments.as_text(template)
      sources, template = python_rows.sources(data, folder, template)
      if template:
        settings["prompt"] = template
    given = {"model": model, "data": data, "reward": self._rewards or None}
    given["environment"] = self._environment
    self._arguments = [n for n, value in given.items() if value is not None]
    reward, environment = self._made.enter_context(self.lend())
    return arguments.make_config(
        config,
        model="" if model is None else os.fspath(model),
        data=sources,
        reward=reward,
        environment=environment,
        settings=settings,
    )

  def explain(self, message: str) -> str:
    """Returns an error message that names the caller's arguments."""
    for text, name in self._names.items():
      message = message.replace(repr(text), name).replace(text, name)
    for argument in self._arguments:
      key = arguments.ARGUMENTS[argument]
      message = re.sub(
          rf"config\.{re.escape(key)} ?= ?", f"{argument}=", message
      )
    return message


def _listed_rewards(reward: Any) -> list[tuple[Any, float]]:
  """Returns (function or name, weight) of each reward."""
  if reward is None:
    return []
  out = []
  for item in reward if isinstance(reward, list) else [reward]:
    pair = item if isinstance(item, tuple) else (item, 1.0)
    if (
        len(pair) != 2
        or isinstance(pair[1], bool)
        or not isinstance(pair[1], numbers.Real)
    ):
      raise ValueError(
          f"reward={item!r:.80}: must be (function, weight); several functions"
          " are a list, [f, (g, 0.5)]"
      )
    value, weight = pair
    if not isinstance(value, str):
      _check_callable("reward", value)
    out.append((value, weight))
  if not out:
    raise ValueError("reward=[]: must have one function or more")
  names = [callables.name_of(v) for v, _ in out if not isinstance(v, str)]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
          f"reward: has several functions named {name!r}; must have different"
          " names, because they also name the metrics"
      )
  return out


def _check_callable(argument: str, value: Any) -> None:
  if not callable(value):
    noun = "class" if argument == "environment" else "function"
    raise ValueError(
        f"{argument}={value!r:.60}: must be a {noun}, or the name of one,"
        f" FILE.py:NAME{', or a list of these' * (argument == 'reward')}"
    )


class TrainingRun:
  """A run of `tba_jax.train`; notebooks show its report.

  workdir: local folder of the run; None for a run without files.
  status: None while the run is live, then 0, or 128 plus the number of the
    signal that ended it after a save; `stop` counts as SIGINT.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      given: _Given,
      made: contextlib.ExitStack,
  ):
    """Creates a run without starting it; `made` is closed after its end."""
    self.config = config
    self.workdir = pathlib.Path(given.folder) if given.folder else None
    self.status: int | None = None
    self._given = given
    self._made = made
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._page = ""  # Final report of a run without files.
    self._files: files.Directory | files.Memory = files.Memory()
    if self.workdir is not None:
      self._files = files.Directory(self.workdir)

  def start(self) -> None:
    """Starts the run in a thread, which ends with the main thread."""

    def work() -> None:
      try:
        self.work()
      except BaseException as error:  # `wait` will raise it.
        self._error = error

    # Not a daemon, so that the interpreter waits until the run has saved.
    self._thread = threading.Thread(target=work, name="run")
    self._thread.start()

    def end_with_main() -> None:
      threading.main_thread().join()
      if self.workdir is None:
        # Nothing needs saving, and threads would log errors because executors
        # reject work while the interpreter exits.
        logging.disable()
      self._stop.set()

    threading.Thread(target=end_with_main, daemon=True).start()

  def work(self) -> None:
    """Runs to the end in this thread; raises like `train`."""
    is_main = threading.current_thread() is threading.main_thread()
    with self._made:
      if self.workdir is None:
        from tba_jax.programs import one_process  # pylint: disable=g-import-not-at-top

        self._page = one_process.train_in_memory(
            self.config,
            stop=self._stop,
            on_start=lambda memory: setattr(self, "_files", memory),
            shows=self._thread is None,
        )
        self.status = _SIGNALS + 2 if self._stop.is_set() else 0
        return
      if self._thread is None:
        prompt_preview.print_data(self.config, shows_prompt=True)
      try:
        self.status, failure = train_lib.supervise(
            self.config, str(self.workdir), None if is_main else self._stop
        )
      except run_directory.NoRunError as error:
        raise ValueError(self._given.explain(str(error))) from error
      if 0 < self.status < _SIGNALS:
        kind = ValueError if self.status == processes.EXIT_CONFIG else None
        raise (kind or RuntimeError)(self._given.explain(failure))

  @property
  def is_live(self) -> bool:
    """Whether the run is still going."""
    return self._thread is not None and self._thread.is_alive()

  def wait(self, timeout_s: float | None = None) -> "TrainingRun":
    """Waits until the run has ended; returns the run; raises like `train`.

    Raises TimeoutError after `timeout_s` seconds; the run continues.
    """
    if self._thread is not None:
      self._thread.join(timeout_s)
      if self._thread.is_alive():
        raise TimeoutError(f"the run is still live after {timeout_s:g} s")
    if self._error is not None:
      raise self._error
    return self

  def stop(self) -> "TrainingRun":
    """Saves and ends the run, like SIGINT, and waits for its end."""
    self._stop.set()
    return self.wait()

  @property
  def metrics(self) -> Any:
    """Metrics of each step so far, as a DataFrame."""
    return _frame(self.steps)

  @property
  def samples(self) -> Any:
    """Logged training completions (`log.samples_every_steps`), a DataFrame."""
    return _frame(self._files.records("samples.jsonl"))

  @property
  def steps(self) -> Sequence[Mapping[str, Any]]:
    """Records of `metrics.jsonl`, one for each step."""
    return metrics_lib.last_per_step(self._files.records("metrics.jsonl"))

  @property
  def evaluations(self) -> Sequence[Mapping[str, Any]]:
    """Results of evaluations, in the order of their steps."""
    return (self._files.read("eval.json") or {}).get("history", [])

  @property
  def summary(self) -> Mapping[str, Any]:
    """Content of `summary.json`: `before`, `after`, counts; {} while live."""
    return self._files.read("summary.json") or {}

  @property
  def report(self) -> str:
    """Self-contained HTML report of the run so far."""
    if self._page:
      return self._page
    if self.workdir is not None:
      return report_build.conclude(self.workdir)[0].read_text()
    with _temporary() as folder:
      self._files.save(folder)
      return report_build.conclude(folder)[0].read_text()

  def evaluate(
      self, data: Any = None, *, step: int | None = None, **settings: Any
  ) -> dict[str, Any]:
    """Returns held-out metrics of a checkpoint, as `tba_jax evaluate` does.

    Args:
      data: held-out rows in any form that `train` accepts; None takes the run's
        own.
      step: number of the checkpoint; None is the newest.
      **settings: settings of `train`, such as
        evaluate={"final_prompts": 100}.

    Raises:
      ValueError: there is no such checkpoint, a setting is invalid, or the run
        is live.
    """
    self._check_ended("evaluate", step)
    with contextlib.ExitStack() as made:
      values = arguments.by_key(settings)
      workdir = made.enter_context(self._directory())
      if data is not None:
        folder = made.enter_context(_temporary())
        template = self.config.task.get("prompt", "")
        sources, _ = python_rows.sources(data, folder, template)
        values["task.test"] = sources["train"]
      # The callables that the config names.
      made.enter_context(self._given.lend())
      operands = [] if step is None else [str(step)]
      if self.workdir is None:
        operands = [str(workdir / "model")]
      self._program("evaluate", workdir, operands, values)
      results = jsonl.read_json(workdir / "eval.json")["evaluate"].values()
    return max(results, key=lambda result: result["time"])

  def push_to_hub(
      self,
      repo: str,
      *,
      private: bool | None = None,
      step: int | None = None,
      token: str | None = None,
  ) -> str:
    """Exports a checkpoint to the Hugging Face hub; returns its URL.

    Args:
      repo: ORG/NAME of the model, created if it is missing.
      private: whether a new repository is private; None is the hub's default.
      step: number of the checkpoint; None is the newest.
      token: credential for the hub; None uses the one from `hf auth login`.

    Raises:
      ValueError: there is no such checkpoint, or the run is live.
      huggingface_hub.errors.HfHubHTTPError: the hub rejects the upload.
    """
    import huggingface_hub  # pylint: disable=g-import-not-at-top

    self._check_ended("push_to_hub", step)
    with self._directory() as workdir, _temporary() as folder:
      model = workdir / "model"
      if self.workdir is not None:
        model = folder / "model"
        operands = [] if step is None else [str(step)]
        self._program("export", workdir, [*operands, str(model)], {})
      hub = huggingface_hub.HfApi(token=token)
      url = hub.create_repo(repo, private=private, exist_ok=True)
      hub.upload_folder(
          repo_id=repo, folder_path=model, commit_message="Model of tba_jax"
      )
    return str(url)

  def _check_ended(self, method: str, step: int | None) -> None:
    """Raises ValueError for a live run, or a step of a run without files."""
    if self.is_live:
      raise ValueError(
          f"{method}(): must be called after the run has ended; call wait() or"
          " stop() first"
      )
    if self.workdir is None and step is not None:
      raise ValueError(
          f"step = {step}: must be None for a run without workdir, because it"
          " only keeps the newest params"
      )

  @contextlib.contextmanager
  def _directory(self) -> Iterator[pathlib.Path]:
    """Yields the run's directory, or a temporary one that contains `model`."""
    if self.workdir is not None:
      yield self.workdir
      return
    with _temporary() as folder:
      run_directory.create(str(folder), self.config)
      self._files.save_model(folder / "model")
      yield folder

  def _program(
      self,
      name: str,
      workdir: pathlib.Path,
      operands: Sequence[str],
      values: Mapping[str, Any],
  ) -> None:
    """Runs a program on a run directory and prints its output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tba_jax.main", f"--program={name}"),
            f"--workdir={workdir}",
            *(f"--config.{key}={value}" for key, value in values.items()),
            *operands,
        ],
        env=processes.package_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode:
      lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
      start = [i for i, line in enumerate(lines) if line.startswith("error: ")]
      why = "\n".join(lines[start[-1] :] if start else lines[-1:])
      raise ValueError(self._given.explain(why.removeprefix("error: ")))

  def __repr__(self) -> str:
    status = self._files.read("status.json") or {}
    where = self.workdir or "no directory"
    state = "live" if self.is_live else f"status {self.status}"
    parts = [f"{where}", state]
    if "step" in status:
      parts.append(f"step {status['step']} of {self.config.train.num_steps}")
    if before_after := self.summary.get("before"):
      after = self.summary.get("after") or {}
      accuracy = [
          "–" if (value := r.get("pass_at_1")) is None else f"{value:.3f}"
          for r in (before_after, after)
      ]
      parts.append(f"pass@1 {' → '.join(accuracy)}")
    return f"TrainingRun({', '.join(parts)})"

  def _repr_html_(self) -> str:
    return (
        f'<iframe srcdoc="{html.escape(self.report)}" width="100%"'
        ' height="800" style="border:0"></iframe>'
    )


@contextlib.contextmanager
def _temporary() -> Iterator[pathlib.Path]:
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as folder:
    yield pathlib.Path(folder)


def _frame(records: Any) -> Any:
  try:
    import pandas  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
        "a DataFrame needs pandas: pip install 'tba_jax[data]'"
    ) from error
  return pandas.DataFrame(list(records))
