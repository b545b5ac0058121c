# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A taskset of `verifiers` plays episodes on a server, which trains on them."""

import asyncio
import pathlib
import sys
import tempfile

from absl.testing import absltest

from tests.peers import chat_server
from tests.support import harness

_NUM_STEPS = 3
_ROUND = 32  # Episodes.


class VerifiersTest(absltest.TestCase):

  def test_episodes_are_trained_on(self):
    workdir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    server = chat_server.start(self, workdir)
    # verifiers finds a taskset by the name of its module.
    sys.path.insert(0, str(harness.ROOT / "examples"))
    import verifiers_sums

    means, state = asyncio.run(
        verifiers_sums.train(
            server.url,
            server.key,
            num_steps=_NUM_STEPS,
            learning_rate=1e-3,
            max_tokens=3,
        )
    )
    print(f"rewards {means}")
    self.assertEqual(state["step"], _NUM_STEPS)
    counts = state["counts"]
    self.assertBetween(
        counts["entered"], _NUM_STEPS * _ROUND, len(means) * _ROUND
    )
    self.assertEqual(
        counts["entered"],
        counts["trained"] + counts["untrained"] + counts["evicted"],
    )
    trained = [s["metrics"]["reward_mean"] for s in state["steps"]]
    self.assertAlmostEqual(trained[0], means[0], delta=0.15)
    self.assertGreater(max(trained), 0.0)
