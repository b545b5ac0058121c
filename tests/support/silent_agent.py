# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An agent whose code does not name the API that it calls."""

import sys

from tests.support import agents


class Silent:
  """Reports how many APIs its process had imported before the first call."""

  def play(self, seed, url):
    del seed
    count = sum(
        f"tba_jax.chat_api.{name}" in sys.modules
        for name in agents.SLOW_DIALECTS
    )
    status, _ = agents.post(url, agents.QUESTION, agents.PATH)
    return float(status == 200), {"metrics": {"imported": count}}
