# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of `tests/chaos/README.md` from kept results.

    python -m tests.chaos faults

`chaos` and `fuzz` keep a row for each run or format in `runs.jsonl.gz` beside
this file. The table of failures has what the run's events told first, what
happened next, and the pause of training, over all kept runs; others have the
runs and the formats.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import pathlib
import re
import statistics
from typing import Any

import ml_collections

from benchmarks import results
from tba_jax.run import metrics
from tests.chaos import chaos

_PAGE = pathlib.Path("tests") / "chaos" / "README.md"
_PLACE = re.compile(
    r"(<!-- tests.chaos faults: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL
)
_RESTART = "restarted"
_RESUME = (
    "the newest readable checkpoint and the journal; steps since the checkpoint"
    " are trained again"
)
_AGAIN = "searchers send again what was not acknowledged"
# Fault -> its name, and process -> what happens next; "" is any process.
NEXT: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "kill": (
        "{} killed",
        {
            "searcher": (
                "restarted; its prompts are granted again after"
                " `search.lease_s`. Lost: its unfinished round and completions"
                " not yet sent"
            ),
            "kvservice": f"a new generation of the store starts, and {_AGAIN}",
            "store": f"{_RESTART}, with a new generation, and {_AGAIN}",
            "trainer": f"{_RESTART} from {_RESUME}",
            "trainer of two processes": f"both restart from {_RESUME}",
            "run in one process": f"{_RESTART} from {_RESUME}",
            "supervisor": f"all end; the same command goes on from {_RESUME}",
            "two processes": "what happens to each of the two",
        },
    ),
    "stop": ("{} stopped for 1 to 4 s", {"": "the others wait, or go on"}),
    "stop for ever": (
        "{} stopped for ever",
        {"": "killed and restarted after the limit below, then as above"},
    ),
    "slow": (
        "{} at a fifth of its speed for 4 s",
        {"": "the others do its share, or wait"},
    ),
    "full disk": (
        "{}'s files cannot grow for 3 s",
        {
            "": (
                "data waits unacknowledged, a checkpoint is tried again at the"
                " next one; logs lack entries"
            )
        },
    ),
    "cut links": (
        "{}'s links to the store cut as they are made, for 4 s",
        {
            "": (
                "connects again; JAX aborts a process whose link breaks as it"
                " connects, which is restarted. Nothing is lost"
            )
        },
    ),
    "clock jump": (
        "clock of {} set by up to a day",
        {"": "nothing: seconds are counted, clocks are not compared"},
    ),
    "torn files": (
        "machine crashes: {}'s files end anywhere",
        {
            "": (
                "damaged ends are cut off, a damaged checkpoint is set aside"
                " for the one before it; what is missing is sent again, or"
                " counted as lost"
            )
        },
    ),
}
# Folders of a path in a message, which are those of the suite's machine.
_FOLDERS = re.compile(r"(?<![\w.])(/[\w.-]+)+/")
# An event is of a fault if it came after so many of its kind.
_SHARE, _MAX_TOLD, _MAX_MESSAGE = 0.3, 2, 90


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the number of lines that it writes into the page.

  Args:
    config: not read.
    operands: none.

  Raises:
    ValueError: there are operands, no results, or no place for a table.
  """
  del config
  if operands:
    raise ValueError(f"operands {list(operands)}: must be none")
  made = tables(chaos.FOLDER)
  page = _PAGE.read_text()
  places = [name for _, name, *_ in _PLACE.findall(page)]
  if sorted(places) != sorted(made):
    raise ValueError(f"{_PAGE} has places for {places}: must be {list(made)}")
  _PAGE.write_text(
      _PLACE.sub(lambda found: found[1] + made[found[2]] + found[4], page)
  )
  return {"page": str(_PAGE), "lines": "".join(made.values()).count("\n")}


def of_page(page: str) -> dict[str, str]:
  """Returns the tables of a page that `run` has written, by name."""
  return {name: text for _, name, text, _ in _PLACE.findall(page)}


def tables(folder: pathlib.Path) -> dict[str, str]:
  """Returns the tables of the results in a folder, in Markdown, by name.

  Raises:
    ValueError: there are no results of runs.
  """
  kept = results.read_rows(folder)
  runs = [row for row in kept if "layout" in row]
  formats = [row for row in kept if "format" in row]
  if not runs:
    raise ValueError(f"{folder}: no results; first python -m tests.chaos chaos")
  return {
      "failures": _failures(runs),
      "runs": _runs(runs),
      "formats": _formats(formats),
  }


def _markdown(rows: Sequence[Sequence[str]]) -> str:
  lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _runs(runs: Iterable[Mapping[str, Any]]) -> str:
  rows = [
      ("layout", "seed", "kills", "other faults", "steps", "trained again",
       "completions", "refused as duplicates", "pass@1", "without faults",
       "minutes")
  ]  # fmt: skip
  for run_ in runs:
    done = collections.Counter(run_["done"])
    audit, band = run_["audit"], run_["pass_at_1_undisturbed"]
    rows.append(
        (
            run_["layout"],
            str(run_["seed"]),
            str(done["kill"]),
            str(done.total() - done["kill"]),
            str(audit["steps"]),
            str(audit["steps_redone"]),
            f"{audit['completions_trained']:,}",
            str(audit["duplicate_prompts_refused"]),
            f"{run_['pass_at_1']:.3f}",
            f"{min(band):.3f} to {max(band):.3f}",
            f"{run_['seconds'] / 60:.0f}",
        )
    )
  return _markdown(rows)


def _process(layout: str, fault: str, process: str) -> str:
  """Returns how the table names the process, or processes, of a fault."""
  if " + " in process:
    return "two processes"
  if process == "all":
    return "all processes"
  if fault == "torn files":
    return "the run"
  if fault in ("stop", "slow") and layout != "one":
    return "a process" if fault == "stop" else process
  if layout == "one" and process == "trainer":
    return "run in one process"
  if layout == "trainers" and process == "trainer":
    return "trainer of two processes"
  return process


def _failures(runs: Iterable[Mapping[str, Any]]) -> str:
  seconds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
  told: dict[tuple[str, str], dict[str, dict[str, Any]]] = (
      collections.defaultdict(dict)
  )
  for run_ in runs:
    for row in run_["outcomes"]:
      fault = row["fault"]
      key = fault, _process(run_["layout"], fault, row["process"])
      seconds[key] += row["seconds"]
      for kind, event in row["told"].items():
        both = told[key].setdefault(kind, {**event, "times": 0})
        both["times"] += event["times"]
  rows = [("failure", "times", "told as", "what happens next", "pause, s")]
  for fault, (title, following) in NEXT.items():
    # Those that no kept run had are listed, too.
    processes = [process for process in following if process]
    processes += sorted(
        process
        for other, process in seconds
        if other == fault and process not in following
    )
    for process in processes:
      times = seconds[fault, process]
      pause = "not measured"
      if times:
        pause = f"{statistics.median(times):.1f} (to {max(times):.0f})"
      rows.append(
          (
              title.format(process),
              str(len(times)),
              _told(told[fault, process], len(times)) if times else "",
              following.get(process) or following[""],
              pause,
          )
      )
  return _markdown(rows)


def _told(events: Mapping[str, Mapping[str, Any]], times: int) -> str:
  """Returns the events that often came after a fault, errors if there are."""
  often = [(k, e) for k, e in events.items() if e["times"] >= _SHARE * times]
  often.sort(key=lambda item: -item[1]["times"])
  errors = [(k, e) for k, e in often if metrics.is_error(k, e["message"])]
  out = []
  for kind, event in (errors or often)[:_MAX_TOLD]:
    message = " ".join(event["message"].split()).replace("|", "/")
    message = _FOLDERS.sub("…/", message)
    if len(message) > _MAX_MESSAGE:
      message = message[: _MAX_MESSAGE - 1] + "…"
    out.append(f"`{kind}`: {message}")
  return "; ".join(out) or "nothing"


def _formats(formats: Iterable[Mapping[str, Any]]) -> str:
  rows = [
      ("mutated input", "inputs", "read", "refused", "by the error",
       "most memory")
  ]  # fmt: skip
  for made in formats:
    refused = {
        key[len("refused (") : -1]: count
        for key, count in made.items()
        if key.startswith("refused (")
    }
    often = sorted(refused, key=refused.get, reverse=True)
    rows.append(
        (
            f"`{made['format']}`",
            f"{made['count']:,}",
            f"{made.get('accepted', 0):,}",
            f"{sum(refused.values()):,}",
            ", ".join(f"{name} ({refused[name]:,})" for name in often[:4]),
            f"{made['most_bytes_allocated'] / 1e6:.1f} MB",
        )
    )
  return _markdown(rows)
