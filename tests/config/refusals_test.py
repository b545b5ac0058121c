# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every refusal in `refusals.json` names the same keys.

A row changes the base config; `keys` are those of all lines of the error.
"""

import json
import pathlib
import re

from absl.testing import absltest

from tba_jax.config import validate
from tests.support import base_config

_ROWS = json.loads(
    (pathlib.Path(__file__).parent / "refusals.json").read_text()
)


class RefusalsTest(absltest.TestCase):

  def test_same_keys(self):
    for row in _ROWS:
      with self.subTest(row=row):
        config = base_config.make()
        with config.ignore_type():
          config.update_from_flattened_dict(row["changes"])
        with self.assertRaises(validate.ConfigError) as caught:
          validate.validate(
              config,
              program=row["program"],
              elsewhere=row.get("elsewhere", False),
          )
        keys = re.findall(r"^config\.([\w.]+)", str(caught.exception), re.M)
        self.assertEqual(sorted(set(keys)), row["keys"])
