# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates checkpoints on tasks of Inspect, for `--program=evaluate`.

    python -m tba_jax.main --program=evaluate --workdir=runs/mine \\
        --inspect='exam.py@exam --limit 100' 240 480

serves each checkpoint on the loopback address and runs `inspect eval` with
these arguments as a child process. The run may be in progress, because scores
are only appended to `metrics.jsonl`, at the checkpoint's step, as
`inspect/TASK/SCORER/METRIC`. WORKDIR/inspect has Inspect's logs.

Source: Inspect 0.3 (https://inspect.aisi.org.uk), its logs in JSON.
"""

from collections.abc import Sequence
import contextlib
import gc
import importlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import ml_collections

from tba_jax import types
from tba_jax.learning import model_source
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import evaluate
from tba_jax.run import files
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.run import text
from tba_jax.serving import settings
from tba_jax.system import bucket
from tba_jax.system import jsonl

# Environment variable that names Inspect's command.
COMMAND_VARIABLE = "TBA_JAX_INSPECT"
# Inspect reads SERVICE_BASE_URL and SERVICE_API_KEY, in capitals.
_SERVICE = "tba_jax"
# Options of `inspect eval` that this program gives.
_TAKEN = (
    "--detach", "--json", "--log-dir", "--log-format", "--model",
    "--model-base-url", "--model-config", "--model-spec",
)  # fmt: skip
# Retries of a failed request; Inspect has no limit.
_RETRIES = 5
_POLL_S = 0.2
# Most characters of a cause in an error, and of Inspect's output in one.
_CAUSE_CHARS, _TAIL_CHARS = 500, 1500
_LOG = {
    "status": str,
    "eval": {"task": str, "config?": {}},
    "results?": {
        "total_samples": int,
        "completed_samples": int,
        "scores": [{"name": str, "metrics": {"*": {"value": float}}}],
    },
    "error?": {"message": str},
}


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    operands: Sequence[str],
    arguments: str,
) -> dict[str, dict[str, float]]:
  """Evaluates each source, prints its scores and adds them to the run.

  Args:
    config: reads `sampling`, `mesh` and `evaluate.deadline_s`, the longest time
      in which Inspect makes no call.
    operands: steps of checkpoints, or folders; see `evaluate.run`.
    arguments: command line of `inspect eval`, in a shell's syntax.

  Returns:
    Numbers of each source by "TASK/SCORER/METRIC", with a METRIC_stderr if
    Inspect has one, and TASK/samples and TASK/errors.

  Raises:
    FileNotFoundError: the checkpoint does not exist.
    ValueError: an argument or a source is wrong, or Inspect is missing.
    SubprocessError: Inspect failed, or did not score all samples although its
      arguments tolerate no errors.
  """
  command = [*_find_inspect(arguments), *_parse(arguments)]
  for operand in operands:
    evaluate.check_source(workdir, operand)
  mesh = model_source.mesh_here(config.mesh)
  results = {}
  with _uploading(workdir):
    for operand in operands or ("",):
      source = evaluate.load_source(config, workdir, operand, mesh)
      name, step = source[0], source[-1]
      numbers = _evaluate(config, workdir, source, command, arguments)
      for key, value in numbers.items():
        print(f"{name}: {key} {text.number(value)}", flush=True)
      if step is not None:
        _record(workdir, step, numbers)
      results[name] = numbers
      # The params leave before the next ones come; the server has cycles.
      del source
      gc.collect()
  return results


def _evaluate(
    config: ml_collections.ConfigDict,
    workdir: str,
    source: tuple[str, policy_lib.Policy, types.PyTree, int | None],
    command: Sequence[str],
    arguments: str,
) -> dict[str, float]:
  """Returns the numbers of a source; raises as `run`."""
  name, policy, params, _ = source
  if not policy.tokenizer.chat_template:
    raise ValueError(
        f"--inspect={arguments}: {name} must have a chat template, because"
        " Inspect sends messages"
    )
  # Its packages are optional.
  endpoint_lib = importlib.import_module("tba_jax.serving.endpoint")
  model = pathlib.Path(name.replace(" ", "-")).name
  logs = pathlib.Path(workdir).absolute() / "inspect" / model
  with endpoint_lib.serve(config, policy, params, model) as endpoint:
    try:
      paths = _run_inspect(command, endpoint, model, logs, config)
      return {k: v for path in paths for k, v in read_scores(path).items()}
    except ValueError as error:
      raise subprocess.SubprocessError(
          f"--inspect={arguments}: {name} has no scores: {error}"
      ) from error


def _find_inspect(arguments: str) -> list[str]:
  """Returns the beginning of the command line; ValueError if it is missing."""
  settings.check_packages("--inspect")
  named = os.environ.get(COMMAND_VARIABLE, "")
  folders = os.pathsep.join(
      [os.environ.get("PATH", ""), str(pathlib.Path(sys.executable).parent)]
  )
  found = shutil.which(named or "inspect", path=folders)
  if found is None:
    place = f"at {COMMAND_VARIABLE}={named}" if named else "on the PATH"
    raise ValueError(
        f"--inspect={arguments}: needs the command inspect, which is not"
        f" {place}; pip install inspect-ai openai, in any environment, and set"
        f" {COMMAND_VARIABLE} to its bin/inspect"
    )
  return [found, "eval"]


def _parse(arguments: str) -> list[str]:
  """Returns arguments of `inspect eval`; ValueError if they are wrong."""
  try:
    words = shlex.split(arguments)
  except ValueError as error:
    raise ValueError(f"--inspect={arguments}: {error}") from error
  if not words or words[0].startswith("-"):
    raise ValueError(
        f"--inspect={arguments}: must begin with a task, as FILE.py@TASK"
    )
  file = words[0].rpartition("@")[0] or words[0]
  if file.endswith(".py") and not pathlib.Path(file).is_file():
    raise ValueError(f"--inspect={arguments}: there is no file {file}")
  for word in words:
    if word.partition("=")[0] in _TAKEN:
      raise ValueError(
          f"--inspect={arguments}: must leave out {word}, which this program"
          " gives"
      )
  return words


@contextlib.contextmanager
def _uploading(workdir: str) -> Any:
  """Holds a run of a bucket, to upload its files; a local one needs no lock."""
  if bucket.is_remote(bucket.place(pathlib.Path(workdir) / "metrics.jsonl")):
    lock = bucket.hold(run_directory.lock(workdir), workdir)
    with contextlib.closing(lock):
      yield
  else:
    yield


def _run_inspect(
    command: Sequence[str],
    endpoint: Any,
    model: str,
    logs: pathlib.Path,
    config: ml_collections.ConfigDict,
) -> list[pathlib.Path]:
  """Runs Inspect and shows its output on stderr; returns its logs.

  Raises ValueError if it fails, writes no log or makes no call for too long.
  """
  logs.mkdir(parents=True, exist_ok=True)
  before = set(logs.glob("*.json"))
  options = {
      "model": f"openai-api/{_SERVICE}/{model}",
      "log-dir": logs,
      "log-format": "json",
      "display": "plain",
      "max-retries": _RETRIES,
      "max-connections": config.sampling.num_slots,
  }
  # The last of equal options holds, so the user's follow.
  program, verb, task, *rest = command
  given = [f"--{key}={value}" for key, value in options.items()]
  service = _SERVICE.upper()
  direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
  with tempfile.TemporaryFile() as output:
    child = subprocess.Popen(
        [program, verb, task, *given, *rest],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={
            **os.environ,
            f"{service}_BASE_URL": endpoint.url,
            f"{service}_API_KEY": endpoint.key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        },
    )
    shown, ended = 0, False
    try:
      while not ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
          child.wait(_POLL_S)
        ended = child.returncode is not None
        new = os.pread(output.fileno(), 1 << 20, shown)
        shown += len(new)
        sys.stderr.write(new.decode(errors="replace"))
        sys.stderr.flush()
        if endpoint.idle_s > config.evaluate.deadline_s:
          raise ValueError(
              "Inspect made no call for"
              f" {config.evaluate.deadline_s:g} s, config.evaluate.deadline_s,"
              f" after {endpoint.answered}"
          )
    finally:
      if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    size = os.fstat(output.fileno()).st_size
    tail = os.pread(output.fileno(), size, max(0, size - _TAIL_CHARS))
  paths = sorted(set(logs.glob("*.json")) - before)
  if not paths or child.returncode:
    last = text.printable(tail.decode(errors="replace").strip(), _TAIL_CHARS)
    causes = [cause for path in paths if (cause := _failure(_read(path)))]
    raise ValueError(
        f"Inspect ended with status {child.returncode}:"
        f" {'; '.join(causes) or last}"
    )
  return paths


def read_scores(path: pathlib.Path) -> dict[str, float]:
  """Returns the scores of a log of Inspect, as `run` does.

  Raises ValueError if Inspect did not score all samples, or none.
  """
  log = _read(path)
  if cause := _failure(log):
    raise ValueError(f"{path}: {cause}")
  task, results = log["eval"]["task"], log["results"]
  done, total = results["completed_samples"], results["total_samples"]
  out = {f"{task}/samples": done, f"{task}/errors": total - done}
  for score in results["scores"]:
    reducer = score.get("reducer") or "mean"
    suffix = "" if reducer == "mean" else f"_{reducer}"
    names = [name for name in score["metrics"] if name != "stderr"]
    for name, metric in score["metrics"].items():
      # The standard error belongs to the first metric, as the mean.
      shown = f"{names[0]}_stderr" if name == "stderr" and names else name
      if text.is_number(metric["value"]):
        out[f"{task}/{score['name']}{suffix}/{shown}"] = metric["value"]
  if len(out) == 2:
    raise ValueError(f"{path}: has no metric that is a number")
  return out


def _read(path: pathlib.Path) -> dict[str, Any]:
  log = jsonl.read_object(path, _LOG)
  if log is None:
    raise ValueError(f"{path}: is missing")
  return log


def _failure(log: dict[str, Any]) -> str:
  """Returns why a log has no scores, "" if it has some."""
  results = log.get("results") or {"total_samples": 0, "completed_samples": 0}
  done, total = results["completed_samples"], results["total_samples"]
  tolerance = (log["eval"].get("config") or {}).get("fail_on_error")
  is_strict = tolerance is None or tolerance is True
  is_whole = done == total or (done and not is_strict)
  if log["status"] == "success" and is_whole and results.get("scores"):
    return ""
  errors = [log.get("error"), *(s.get("error") for s in log.get("samples", ()))]
  cause = next((error["message"] for error in errors if error), "no scores")
  return text.printable(
      f"status {log['status']}, {done} of {total} samples done: {cause}",
      _CAUSE_CHARS,
      one_line=True,
  )


def _record(workdir: str, step: int, numbers: dict[str, float]) -> None:
  """Appends numbers to the run's metrics, which may be in use."""
  path = pathlib.Path(workdir) / "metrics.jsonl"
  # A newer start of the trainer would count as one that redoes these steps.
  epochs = [record.get("epoch", 0) for record in jsonl.iter_jsonl(path)]
  if epochs:
    lines = files.Directory(path.parent).lines(path.name)
    writer = metrics.MetricsWriter(lines, epoch=max(epochs))
    # As the trainer records an evaluation.
    writer.write(
        max(step - 1, 0), {f"inspect/{k}": v for k, v in numbers.items()}
    )
    writer.close()
