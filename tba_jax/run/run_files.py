# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a run directory: their schemas, and their audit."""

import itertools
from typing import Any

from tba_jax.system import auditing
from tba_jax.system import jsonl

# pass@1 is null if no completion could be judged.
_EVALUATION = {"step": int, "pass_at_1?": float}
# Schemas of the files, see `jsonl.schema_error`.
SCHEMAS: dict[str, dict[str, Any]] = {
    "config.json": {
        "format": int,
        "run_id": str,
        "created": float,
        "config": {},
    },
    "epoch.json": {"epoch": int, "owner?": str},
    "eval.json": {
        "before?": _EVALUATION,
        "after?": _EVALUATION,
        "history?": [_EVALUATION],
    },
    "ledger.json": {
        "generated": {},
        "rejected": {},
        "lost": {},
        "closed": bool,
    },
    "result.json": {
        "steps": int,
        "num_steps": int,
        "completions": int,
        "ledger_closed": bool,
    },
    "summary.json": {"steps": int, "num_steps": int},
    "totals.json": {"wall_s": float, "restarts": {"*": int}},
    "status.json": {"time": float, "phase": str},
}
_DELETE = "the run cannot continue; delete it: the same command writes it again"
# What to do about a file that violates its schema.
_REMEDIES = {
    "config.json": f"no program can open the run; {auditing.COPY}",
    "epoch.json": (
        'the trainer will not start; restore it as {"epoch": N}, N above every'
        ' "epoch" in metrics.jsonl'
    ),
    "eval.json": (
        f"the run cannot continue; {auditing.COPY}, or delete it: `before` is"
        " then evaluated at the step reached"
    ),
    "ledger.json": (
        "a run that continues writes it again; the account of a finished run is"
        " in its last checkpoint"
    ),
    "result.json": _DELETE,
    "summary.json": _DELETE,
    "totals.json": _DELETE,
    "status.json": "delete it",
}
# Folders with JSON files that contain checksums.
_SEALED = ("", "best", "reward_model", "replay", "sft")


def audit(run: auditing.AuditedRun) -> auditing.Findings:
  """Reads the JSON files of a run."""
  for name, schema in SCHEMAS.items():
    try:
      value = jsonl.loads((run.folder / name).read_bytes())
      wrong = jsonl.schema_error(value, schema)
    except FileNotFoundError:
      continue
    except (ValueError, RecursionError) as error:
      wrong = f"not JSON: {error}"
    if name == "eval.json" and not wrong:
      steps = [result["step"] for result in value.get("history") or ()]
      if any(a >= b for a, b in itertools.pairwise(steps)):
        wrong = f"the steps of history do not increase: {steps}"
    if wrong:
      yield name, wrong, _REMEDIES[name]
    else:
      run.json[name] = value
  exists = lambda name: (run.folder / name).exists()
  required = ["config.json"]
  required += ["epoch.json"] if exists("metrics.jsonl") else []
  if exists("result.json"):
    required += ["eval.json", "ledger.json"]
    required += ["summary.json"] if "totals.json" in run.json else []
  for name in required:
    if not (exists(name) or run.live):
      yield name, "is missing", _REMEDIES[name]
  yield ", ".join(name.removesuffix(".json") for name in run.json)


def audit_checksums(run: auditing.AuditedRun) -> auditing.Findings:
  """Verifies the checksums of JSON files, and of lines of JSON Lines files."""
  count = 0
  for folder in _SEALED:
    for path in sorted((run.folder / folder).glob("*.json*")):
      name = str(path.relative_to(run.folder))
      is_lines = path.suffix == ".jsonl"
      with path.open("rb") as file:
        for number, data in enumerate(file if is_lines else [file.read()], 1):
          verdict = jsonl.is_sound(data)
          count += verdict is not None
          if verdict is False:
            place = f"{name}, line {number}" if is_lines else name
            advice = _REMEDIES.get(name, auditing.COPY)
            yield place, "differs from its checksum", advice
  yield f"{count} of files and lines"


def audit_results(run: auditing.AuditedRun) -> auditing.Findings:
  """Compares the results of a finished run with its other files."""
  if not run.finished:
    return
  yield "of a finished run"
  advice = "one of the two is of another time; trust the older results less"
  evaluations, ledger = run.json.get("eval.json"), run.json.get("ledger.json")
  for name in ("result.json", "summary.json"):
    saved = run.json.get(name)
    if saved is None:
      continue
    if run.saved and saved["steps"] != run.newest:
      yield (
          name,
          f"has {saved['steps']} steps, the newest checkpoint {run.newest}",
          "a checkpoint is missing, or the file is of another time",
      )
    for key in ("before", "after") if evaluations else ():
      of_eval = evaluations.get(key) or {}
      shown = {k: v for k, v in of_eval.items() if k != "samples"}
      if saved[key] != shown:
        yield (name, f"{key!r} differs from eval.json", advice)
    if ledger and (saved["ledger_closed"], saved["completions"]) != (
        ledger["closed"],
        ledger["generated"]["completions"],
    ):
      yield name, "disagrees with ledger.json", advice
