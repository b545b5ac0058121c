# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""No completion sets its reward, or changes another's (`attacks.py`).

Runs a seeded choice of the attacks, and all with TBA_JAX_ALL_ATTACKS=1.
"""

import os
import random

from absl.testing import absltest
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


class AttacksTest(confinement_test.Confined):

  @parameterized.product(user=("ordinary", "root"), bubblewrap=("system", ""))
  def test_attack(self, user, bubblewrap):
    self.install(bubblewrap)
    outside = self.root / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o666)
    found = attacks.texts(
        {
            "outside": str(outside),
            "project": str(ordinary_user.CHECKOUT),
            "boxed": str(bool(bubblewrap)),
        }
    )
    if _ALL not in os.environ:
      chosen = random.Random(f"{_SEED} {user} {bubblewrap}").sample(
          sorted(found), _CHOSEN
      )
      found = {n: t for n, t in found.items() if n in (*_ALWAYS, *chosen)}
    self.deadline_s = 15.0
    # A completion after each attack has its own reward, in time.
    texts = [t for a in found.values() for t in (a, *_HONEST.values())]
    answers, message = self.judge(user, *texts)
    per = 1 + len(_HONEST)
    for i, name in enumerate(found):
      (reward, key, failure), *honest = answers[per * i :][:per]
      with self.subTest(name):
        self.assertNotEqual(reward, 1.0)
        self.assertNotEqual(key, "forged")
        is_open = name in _OPEN and "change files" in message
        if not failure and not is_open:
          self.assertNotIn("REACHED", key)
        self.assertNotIn("Error", key or "")
        outcomes = [(r, f) for r, _, f in honest]
        self.assertEqual(
            outcomes, [(1.0, ""), (0.0, ""), (4.0, ""), (0.0, "error")]
        )
    self.assertEqual((outside / "kept").read_text(), "kept")
    self.assertEqual([p.name for p in outside.iterdir()], ["kept"])


if __name__ == "__main__":
  absltest.main()
