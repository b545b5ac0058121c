# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""No completion sets its reward, or changes another's (`attacks.py`).

Runs a seeded choice of the attacks, and all with TBA_JAX_ALL_ATTACKS=1.
"""

import json
import os
import random
import sys

from absl.testing import parameterized

from tests.multi_process import attacks
from tests.multi_process import confinement_test
from tests.support import ordinary_user

_ALL = "TBA_JAX_ALL_ATTACKS"
_SEED = 5
_ALWAYS = ("frame", "two_frames", "stop_later")
_CHOSEN = 5
# What an ordinary user's programs do to that user's processes and files where
# no box keeps them from it.
_OPEN = ("modules_of_ours",)
_HONEST = {
    "right": "program print(7 * 1_000_003**2)",
    "wrong": "program import json; print(json.dumps(7))",
    "prints": "print 4",
    "errs": "raise",
}


# Runs the completion as a program, which must print the answer.
_VERIFIER = """
import json, subprocess, sys
from tba_jax.system import processes
if {hides}:
  processes.hide_memory()
question = json.load(sys.stdin)
done = subprocess.run(
    [sys.executable, "-c", question["completion"]], capture_output=True,
    text=True,
)
print(float(done.stdout.strip() == question["row"]["answer"]))
"""
# Writes to the verifier's output, after the verifier.
_LATE_OUTPUT = """
import os, time
verifier = os.getppid()
if os.fork() == 0:
  os.setsid()
  out = os.open(f"/proc/{verifier}/fd/1", os.O_WRONLY)
  for fd in range(3):
    os.close(fd)
  time.sleep(2)
  os.write(out, b"1.0\\n")
"""
_MEMORY = """
import os
open(f"/proc/{os.getppid()}/mem", "rb")
print(42)
"""


class AttacksTest(confinement_test.Confined):

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_attack(self, user, bubblewrap):
    self.install(bubblewrap)
    outside = self.root / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o666)
    result = attacks.texts(
        {
            "outside": str(outside),
            "project": str(ordinary_user.CHECKOUT),
            "boxed": str(bool(bubblewrap)),
        }
    )
    if _ALL not in os.environ:
      chosen = random.Random(f"{_SEED} {user} {bubblewrap}").sample(
          sorted(result), _CHOSEN
      )
      result = {n: t for n, t in result.items() if n in (*_ALWAYS, *chosen)}
    self.deadline_s = 15.0
    # A completion after each attack has its own reward, in time.
    texts = [t for a in result.values() for t in (a, *_HONEST.values())]
    answers, message = self.judge(user, *texts)
    per = 1 + len(_HONEST)
    for i, name in enumerate(result):
      (reward, key, failure), *honest = answers[per * i :][:per]
      with self.subTest(name):
        self.assertNotEqual(reward, 1.0)
        self.assertNotEqual(key, "forged")
        is_open = name in _OPEN and "change files" in message
        if not failure and not is_open:
          self.assertNotIn("REACHED", key)
        self.assertNotIn("Error", key or "")
        outcomes = [(str(r), f) for r, _, f in honest]
        self.assertEqual(
            outcomes, [("1.0", ""), ("0.0", ""), ("4.0", ""), ("nan", "error")]
        )
    self.assertEqual((outside / "kept").read_text(), "kept")
    self.assertEqual([p.name for p in outside.iterdir()], ["kept"])

  @parameterized.product(
      user=("ordinary", "root"), bubblewrap=("system", ""), hides=(True, False)
  )
  def test_verifiers_output_and_memory(self, user, bubblewrap, hides):
    self.install(bubblewrap)
    verifier = _VERIFIER.format(hides=hides)
    (self.project / "check.py").write_text(verifier)
    for split in ("train", "test"):
      row = json.dumps({"prompt": split, "answer": "42"})
      (self.home / f"{split}.jsonl").write_text(row)
    self.task = {
        "name": "custom",
        "train": str(self.home / "train.jsonl"),
        "test": str(self.home / "test.jsonl"),
        "rewards": "",
        "verifier": f"{sys.executable} check.py",
    }
    texts = _LATE_OUTPUT, "print(42)", "print(41)", _MEMORY
    answers, _ = self.judge(user, *texts)
    outcomes = [(reward, failure) for reward, _, failure in answers]
    # One that does not hide can be read.
    expected = [0.0, 1.0, 0.0, float(not hides)]
    self.assertEqual(outcomes, [(reward, "") for reward in expected])
