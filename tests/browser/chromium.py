# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for a test.

Needs Debian's `chromium` and `chromium-driver`, and the package selenium.
Without them a test skips, unless the environment has CI set.
"""

import os
import pathlib
import shutil
from typing import Any

from absl.testing import absltest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1320,1000",
)


def missing() -> str:
  """Returns what a test lacks on this machine, "" where nothing."""
  try:
    import selenium.webdriver  # noqa: F401
  except ImportError:
    return "selenium is not installed (the extra `test` has it)"
  for program in ("chromium", "chromedriver"):
    if shutil.which(program) is None:
      return f"no {program}: apt-get install chromium chromium-driver"
  return ""


def start(test: type[absltest.TestCase], folder: pathlib.Path) -> Any:
  """Returns a driver that ends with the test class; its profile is in there."""
  lacking = missing()
  if lacking and os.environ.get("CI"):
    raise RuntimeError(lacking)
  if lacking:
    raise absltest.SkipTest(lacking)
  from selenium import webdriver
  from selenium.webdriver.chrome import service

  options = webdriver.ChromeOptions()
  options.binary_location = shutil.which("chromium")
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
    options.add_argument(flag)
  driver = webdriver.Chrome(
      options=options, service=service.Service(shutil.which("chromedriver"))
  )
  test.addClassCleanup(driver.quit)
  return driver
