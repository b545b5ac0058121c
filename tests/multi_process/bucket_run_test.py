# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose directory is in a bucket, as a user runs, kills and moves it.

The bucket is `fake_gcs`; gcsfs and TensorStore are the real ones. A host is a
temporary directory of its own.
"""

import json
import pathlib
import re
import signal
import sys
import tempfile

from absl.testing import absltest
import pytest

from tests.support import fake_gcs
from tests.support import harness
from tests.support import waiting

_RUN = "gs://bucket/runs/one"
_OVERRIDES = {
    "init": "scratch",
    # It ends when it is told to.
    "train.num_steps": 100_000,
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
    """Starts a program on a host; it writes to FOLDER/HOST/out."""
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
    """Runs a program to its end; returns all that was printed there."""
    process = self.start(host, *args, settings=settings)
    self.assertEqual(process.wait(200), 0, self.text(host))
    return self.text(host)

  def steps(self):
    """Returns the steps whose checkpoints the bucket has, whole."""
    whole = re.compile(r"runs/one/checkpoints/(\d+)/commit_success.txt")
    result = map(whole.fullmatch, list(self.fake.store.by_name))
    return sorted(int(match[1]) for match in result if match)

  def wait_for_step(self, process, host, step):
    self.wait_until(lambda: max(self.steps(), default=0) >= step, process, host)

  def wait_until(self, condition, process, host):
    waiting.wait_until(
        condition,
        lambda: self.text(host),
        300.0,
        is_lost=lambda: not process.is_running,
    )

  def read(self, name):
    data = self.fake.store.by_name[f"runs/one/{name}"].data.decode()
    if name.endswith(".json"):
      return json.loads(data)
    return [json.loads(line) for line in data.splitlines()]

  def test_refuses_another_bucket(self):
    process = self.start("a", "--program=status", "--workdir=gs://other/run")
    self.assertEqual(process.wait(60), 2, self.text("a"))
    self.assertIn("gs://other/run cannot be", self.text("a"))

  @pytest.mark.timeout(1200)
  def test_continues_after_kill_and_on_another_host(self):
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
    # All of it at once: nothing saves or says goodbye.
    process.process.kill()
    process.wait()
    killed = max(self.steps())
    process = self.train("a")
    self.wait_for_step(process, "a", killed + 8)
    process.process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(120), 128 + signal.SIGTERM, self.text("a"))
    saved = max(self.steps())
    # Another host has what is in the bucket, and nothing else.
    last = saved + 8
    process = self.train("c", **{"train.num_steps": last})
    self.assertEqual(process.wait(400), 0, self.text("c"))
    restored = [e for e in self.read("events.jsonl") if e["kind"] == "restored"]
    self.assertLen(restored, 2)
    self.assertIn(f"step {saved}", restored[1]["message"])
    self.assertTrue(self.read("summary.json")["ledger_closed"])
    done = [r["step"] for r in self.read("metrics.jsonl") if "train/loss" in r]
    self.assertEqual(sorted(set(done)), list(range(last)))
    epochs = [r["epoch"] for r in self.read("metrics.jsonl")]
    self.assertEqual(sorted(epochs), epochs)
    self.check_bucket()
    self.check_programs(last)

  def check_bucket(self):
    names = list(self.fake.store.by_name)
    self.assertEmpty([n for n in names if n.startswith("params/")])
    self.assertEmpty([n for n in names if "spool" in n or "secret" in n])
    self.assertEqual(self.read(".lease.json")["holder"], "")

  def check_programs(self, last):
    """What reads a run reads one in a bucket, from any host."""
    run = f"--workdir={_RUN}"
    self.assertIn(f"{last}", self.use("d", "--program=status", run))
    self.assertRegex(
        self.use("e", "--program=verify", run), rf"steps \d+, {last} "
    )
    models = self.folder.glob("d/**/*.safetensors")
    self.assertEmpty(list(models))  # A look does not fetch models.
    del self.fake.store.by_name["runs/one/report.html"]
    self.use("d", "--program=report", run)
    self.assertIn("runs/one/report.html", self.fake.store.by_name)
    self.use("d", "--program=evaluate", run)
    self.assertIn(f"checkpoint {last}", str(self.read("eval.json")))
    lines = self.folder / "lines.jsonl"
    lines.write_text('{"prompt": "1+2="}\n')
    self.use(
        "d",
        "--program=generate",
        "--config=configs/generate.py",
        settings={
            "generate.model": f"{_RUN}/checkpoints/{last}",
            "generate.input": lines,
            "generate.output": self.folder / "made.jsonl",
            "sampling.max_prompt_tokens": 8,
            "sampling.max_completion_tokens": 4,
        },
    )
    made = json.loads((self.folder / "made.jsonl").read_text())
    self.assertLen(made["completions"], 1)
