# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A command `inspect`, whose behavior the name of its task chooses.

    fake_inspect.py eval exam.py@NAME --model=… --log-dir=… …

`good` calls the model twice and scores; the names of `_LOGS` change its log;
`quiet` makes no call, `unwritten` ends without a log.
"""

import json
import os
import pathlib
import sys
import time
import urllib.request

_QUESTIONS = ("1+1?", "2+2?")
# Name of a task -> changes of its log.
_LOGS = {
    "failed": {
        "status": "error",
        "error": {"message": "the sandbox is gone"},
        "results": None,
    },
    "cancelled": {"status": "cancelled", "results": None},
    "partial": {"completed_samples": 1},
    "empty": {"completed_samples": 0, "fail_on_error": False},
    "unscored": {"scores": []},
    "nan": {"value": float("nan")},
}


def log_of(name, texts=()):
  """Returns a log as Inspect 0.3 writes it."""
  change = {"value": 0.5, **_LOGS.get(name, {})}
  samples = [{"id": n + 1, "output": text} for n, text in enumerate(texts)]
  if name in ("partial", "empty"):
    samples.append({"id": 2, "error": {"message": "no room for the prompt"}})
  metrics = {
      "accuracy": {"name": "accuracy", "value": change.pop("value")},
      "stderr": {"name": "stderr", "value": 0.25},
  }
  if name == "nan":
    del metrics["stderr"]
  strict = change.pop("fail_on_error", True)
  results = {
      "total_samples": 2,
      "completed_samples": change.pop("completed_samples", 2),
      "scores": change.pop(
          "scores", [{"name": "match", "scorer": "match", "metrics": metrics}]
      ),
  }
  return {
      "version": 2,
      "status": "success",
      "eval": {"task": name, "config": {"fail_on_error": strict}},
      "results": results,
      "samples": samples,
      **change,
  }


def _ask(model, question):
  """Returns the model's greedy answer."""
  body = {
      "model": model,
      "messages": [{"role": "user", "content": question}],
      "temperature": 0,
      "max_tokens": 8,
  }
  request = urllib.request.Request(
      f"{os.environ['TBA_JAX_BASE_URL']}/chat/completions",
      json.dumps(body).encode(),
      {"Authorization": f"Bearer {os.environ['TBA_JAX_API_KEY']}"},
  )
  with urllib.request.urlopen(request, timeout=120) as answer:
    return json.load(answer)["choices"][0]["message"]["content"]


def main(argv):
  verb, task, *words = argv
  assert verb == "eval", argv
  options = dict(word.removeprefix("--").split("=", 1) for word in words)
  service, model = options["model"].removeprefix("openai-api/").split("/")
  assert service == "tba_jax" and options["log-format"] == "json", argv
  name = task.rpartition("@")[2]
  print(f"running {name}", flush=True)
  if name == "quiet":
    time.sleep(600)
  if name == "unwritten":
    sys.exit("there is no task unwritten")
  texts = [_ask(model, question) for question in _QUESTIONS]
  # Inspect ends with status 0 after failures, too.
  path = pathlib.Path(options["log-dir"], f"{time.time_ns()}_{name}.json")
  path.write_text(json.dumps(log_of(name, texts)))


if __name__ == "__main__":
  main(sys.argv[1:])
