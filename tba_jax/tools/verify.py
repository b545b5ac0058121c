# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `verify` program: audits the files of a run.

    python -m tba_jax.main --program=verify --workdir=runs/countdown

Each format has its own audit; this program runs them and prints the report. It
writes nothing and needs neither devices nor the run's secret. Keyed hashes are
not checked, so it finds damage, but not forgery by someone who can compute the
other digests. A run may be audited while it is live. Logs, spans, tables and
pages have no digests.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import pathlib
import sys
import time

import ml_collections
import rich.console
import rich.table

from tba_jax.learning import checkpoint_audit
from tba_jax.replay import ledger
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.run import run_files
from tba_jax.system import auditing
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport.groups import journal_audit

# The order matters: an audit compares its files with those read before it.
# Acknowledgements come before the journal, which has what they acknowledge.
_AUDITS: dict[str, Callable[..., auditing.Findings]] = {
    "files": run_files.audit,
    "checksums": run_files.audit_checksums,
    "events, samples": metrics.audit_events,
    "acknowledged": journal_audit.audit_acks,
    "checkpoints": checkpoint_audit.audit,
    "metrics": metrics.audit_metrics,
    "journal": journal_audit.audit,
    "ledger": ledger.audit,
    "results": run_files.audit_results,
}
# Folders of models that are trained or kept in addition to the policy.
_MODELS = ("sft", "reward_model", "best")
# Seconds until progress is shown on stderr, and between later updates.
_QUIET_S, _SHOW_EVERY_S = 5.0, 2.0


@dataclasses.dataclass
class AuditPart:
  """A row of the table: summary, problems, and notes on handled faults."""

  name: str
  summary: str = "none"
  problems: list[auditing.Damage] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str,
    operands: Sequence[str] = (),
) -> int:
  """Prints the contents of the run directory and whether they are intact.

  Returns:
    0: everything is intact; 1: something is damaged or missing; 2: wrong usage.
  """
  folder = pathlib.Path(workdir)
  if operands or config is not None:
    error = "verify takes --workdir alone"
  elif not any(
      (folder / name).exists()
      for name in ("config.json", "metrics.jsonl", "checkpoints", "replay")
  ):
    error = f"--workdir={workdir}: no run is there"
  else:
    error = _wrong_format(folder / "config.json")
  if error:
    return processes.refuse(error)
  parts, live = audit(folder, _Progress())
  table = rich.table.Table(box=None, pad_edge=False, header_style="")
  for name in ("part", "found", "verdict"):
    table.add_column(name, overflow="fold")
  for part in parts:
    count = len(part.problems)
    table.add_row(
        part.name, part.summary, f"{count} wrong" if count else "sound"
    )
  rich.console.Console(highlight=False).print(table)
  for part in parts:
    for note in part.notes:
      print(f"note: {note}")
  problems = [problem for part in parts for problem in part.problems]
  for problem in problems:
    print(f"wrong: {problem.place}: {problem.what}\n  {problem.advice}")
  verdict = f"{len(problems)} wrong" if problems else "sound"
  print(f"{workdir}: {verdict}{' so far; the run is live' if live else ''}")
  return 1 if problems else processes.EXIT_OK


def _wrong_format(path: pathlib.Path) -> str:
  """Returns why this version cannot audit a run; "" if it can."""
  saved = jsonl.read_json(path)
  if jsonl.schema_error(saved, {"format": int}):
    return ""  # The audit will find the damage.
  try:
    run_directory.check_format(path, saved)
  except ValueError as error:
    return str(error)
  return ""


class _Progress:
  """Prints on stderr what is being read, if reading takes long."""

  def __init__(self):
    self._due = time.monotonic() + _QUIET_S

  def __call__(self, text: str) -> None:
    if time.monotonic() >= self._due:
      print(f"reading {text}", file=sys.stderr, flush=True)
      self._due = time.monotonic() + _SHOW_EVERY_S


def audit(
    folder: pathlib.Path, show: Callable[[str], None] = lambda text: None
) -> tuple[list[AuditPart], bool]:
  """Returns the parts of a run directory, and whether the run is live.

  The files of a live run change between reads, so it is read twice, and only
  problems found both times are kept.
  """
  live = _is_live(folder)
  parts = _audit_once(folder, live, show)
  if live and any(part.problems for part in parts):
    before = {problem for part in parts for problem in part.problems}
    parts = _audit_once(folder, live, show)
    for part in parts:
      part.problems = [
          problem for problem in part.problems if problem in before
      ]
  return parts, live


def _audit_once(
    folder: pathlib.Path, live: bool, show: Callable[[str], None]
) -> list[AuditPart]:
  audited, parts = auditing.AuditedRun(folder, live, show), []
  models = [name for name in _MODELS if (folder / name).exists()]
  for name in (*_AUDITS, *models):
    part = AuditPart(name)
    parts.append(part)
    try:
      for finding in (
          _AUDITS[name](audited)
          if name in _AUDITS
          else checkpoint_audit.audit_model(audited, name)
      ):
        if isinstance(finding, str):
          part.summary = finding
        elif len(finding) == 3:
          part.problems.append(auditing.Damage(*finding))
        else:
          part.notes.append(": ".join(finding))
    # Valid JSON of an unexpected shape ends here.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      what = f"not as it was written: {error!r}"
      part.problems.append(auditing.Damage(name, what, auditing.COPY))
  return parts


def _is_live(folder: pathlib.Path) -> bool:
  """Returns whether a supervisor or trainer on this host has locked the run."""
  for name in (".lock", ".trainer.lock"):
    with contextlib.suppress(FileNotFoundError), (folder / name).open() as file:
      if not processes.try_lock(file.fileno(), shared=True):
        return True
  return False
