# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run in a bucket, killed, resumed and moved to another host.

The bucket is `fake_gcs`; gcsfs and TensorStore are the real ones. A host is a
temporary directory of its own.
"""

import json
import pathlib
import re
import signal
import sys
import tempfile
import time

from absl.testing import absltest
import pytest

from tests.support import fake_gcs
from tests.support import harness

_RUN = "gs://bucket/runs/one"
_STEPS = 240
_OVERRIDES = {
    "init": "scratch",
    # Enough that the first run is still going on when a second is refused.
    "train.num_steps": _STEPS,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 8,
    "publish.carrier": "orbax",
    "publish.directory": "gs://bucket/params",
}


class BucketRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.fake = fake_gcs.FakeGcs()
    self.addCleanup(self.fake.close)
    # Short, so that a socket's path fits.
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def start(self, host, *args, settings=()):
    """Starts a program on a host; its output goes to FOLDER/HOST/out."""
    place = self.folder / host
    process = harness.Process(
        [
            *(sys.executable, "-m", "tba_jax.main", *args),
            *(f"--config.{k}={v}" for k, v in dict(settings).items()),
        ],
        place / "out",
        env={**self.fake.environment(), "TMPDIR": str(place)},
    )
    self.addCleanup(self.end, process)
    return process

  def end(self, process):
    process.process.kill()
    process.process.wait()

  def train(self, host, **settings):
    return self.start(
        host,
        "--config=configs/arithmetic.py:smoke",
        f"--workdir={_RUN}",
        settings=_OVERRIDES | settings,
    )

  def text(self, host):
    return (self.folder / host / "out").read_text()

  def use(self, host, *args, settings=()):
    """Runs a program to its end; returns its host's output."""
    process = self.start(host, *args, settings=settings)
    self.assertEqual(process.wait(200), 0, self.text(host))
    return self.text(host)

  def steps(self):
    """Returns the steps of the complete checkpoints in the bucket."""
    whole = re.compile(r"runs/one/checkpoints/(\d+)/commit_success.txt")
    found = map(whole.fullmatch, list(self.fake.store.by_name))
    return sorted(int(match[1]) for match in found if match)

  def wait_for_step(self, process, host, step):
    self.wait_until(lambda: max(self.steps(), default=0) >= step, process, host)

  def wait_until(self, condition, process, host):
    until = time.monotonic() + 300
    while not condition():
      self.assertTrue(process.is_running, self.text(host))
      self.assertLess(time.monotonic(), until, self.text(host))
      time.sleep(0.05)

  def read(self, name):
    data = self.fake.store.by_name[f"runs/one/{name}"].data.decode()
    if name.endswith(".json"):
      return json.loads(data)
    return [json.loads(line) for line in data.splitlines()]

  @pytest.mark.timeout(1200)
  def test_run_continues_after_a_kill_and_on_another_host(self):
    process = self.train("a")
    self.wait_until(
        lambda: "runs/one/.lease.json" in self.fake.store.by_name, process, "a"
    )
    # One run at a time.
    second = self.train("b")
    self.assertEqual(second.wait(120), 2, self.text("b"))
    self.assertRegex(self.text("b"), r"process \d+ of \S+ already runs there")
    self.assertTrue(process.is_running, self.text("a"))
    self.wait_for_step(process, "a", 4)
    # Nothing is saved or released.
    process.process.kill()
    process.wait()
    killed = max(self.steps())
    process = self.train("a")
    self.wait_for_step(process, "a", killed + 8)
    process.process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(120), 128 + signal.SIGTERM, self.text("a"))
    saved = max(self.steps())
    # Another host has only what is in the bucket.
    process = self.train("c")
    self.assertEqual(process.wait(400), 0, self.text("c"))
    restored = [e for e in self.read("events.jsonl") if e["kind"] == "restored"]
    self.assertLen(restored, 2)
    self.assertIn(f"step {saved}", restored[1]["message"])
    self.assertTrue(self.read("summary.json")["ledger_closed"])
    done = [r["step"] for r in self.read("metrics.jsonl") if "train/loss" in r]
    self.assertEqual(sorted(set(done)), list(range(_STEPS)))
    epochs = [r["epoch"] for r in self.read("metrics.jsonl")]
    self.assertEqual(sorted(epochs), epochs)
    self.check_bucket()
    self.check_programs()

  def check_bucket(self):
    names = list(self.fake.store.by_name)
    self.assertEmpty([n for n in names if n.startswith("params/")])
    self.assertEmpty([n for n in names if "spool" in n or "secret" in n])
    self.assertEqual(self.read(".lease.json")["holder"], "")

  def check_programs(self):
    """Programs that read a run read one in a bucket, on any host."""
    run = f"--workdir={_RUN}"
    shown = self.use("d", "--program=status", run)
    self.assertIn(f"step {_STEPS}/{_STEPS}", shown)
    self.assertIn(
        f"steps {_STEPS - 4}, {_STEPS}", self.use("e", "--program=verify", run)
    )
    models = self.folder.glob("d/**/*.safetensors")
    self.assertEmpty(list(models))  # `status` downloads no models.
    del self.fake.store.by_name["runs/one/report.html"]
    self.use("d", "--program=report", run)
    self.assertIn("runs/one/report.html", self.fake.store.by_name)
    self.use("d", "--program=evaluate", run)
    self.assertIn(f"checkpoint {_STEPS}", str(self.read("eval.json")))
    lines = self.folder / "lines.jsonl"
    lines.write_text('{"prompt": "1+2="}\n')
    self.use(
        "d",
        "--program=generate",
        "--config=configs/generate.py",
        settings={
            "generate.model": f"{_RUN}/checkpoints/{_STEPS}",
            "generate.input": lines,
            "generate.output": self.folder / "made.jsonl",
            "sampling.max_prompt_tokens": 8,
            "sampling.max_completion_tokens": 4,
        },
    )
    made = json.loads((self.folder / "made.jsonl").read_text())
    self.assertLen(made["completions"], 1)


if __name__ == "__main__":
  absltest.main()
