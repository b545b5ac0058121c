# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A wheel without a checkout: its files, configs by name, its command."""

import configparser
import os
import pathlib
import subprocess
import sys
import zipfile

from absl.testing import absltest
import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
class WheelTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(absltest.get_default_test_tmpdir()) / "wheel"
    # From a copy: a build writes into the folder that it builds.
    source = cls.folder / "source"
    tracked = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=_ROOT, text=True
    )
    for name in tracked.splitlines():
      if name.startswith(("tba_jax/", "configs/")) or "/" not in name:
        if (_ROOT / name).is_file():
          (source / name).parent.mkdir(parents=True, exist_ok=True)
          (source / name).write_bytes((_ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps",
         "--no-build-isolation", "--disable-pip-version-check",
         "--wheel-dir", cls.folder, source],
        check=True,
    )  # fmt: skip
    (wheel,) = cls.folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
      cls.names = archive.namelist()
      archive.extractall(cls.folder / "installed")

  def run_command(self, *arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": str(self.folder / "installed"),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-m", "tba_jax", *arguments],
        cwd=self.create_tempdir().full_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )

  def test_has_configs_templates_and_mark_of_types(self):
    for name in (
        "tba_jax/py.typed",
        "tba_jax/configs/countdown.py",
        "tba_jax/configs/gsm8k/tba.py",
    ):
      self.assertIn(name, self.names)
    self.assertTrue(any(n.endswith("report.html.j2") for n in self.names))
    outside = [n for n in self.names if n.startswith(("tests/", "configs/"))]
    self.assertEqual(outside, [])

  def test_installs_command(self):
    (name,) = (n for n in self.names if n.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read(self.folder / "installed" / name)
    self.assertEqual(parser["console_scripts"]["tba_jax"], "tba_jax.main:run")

  def test_takes_configs_by_name_from_any_folder(self):
    for name in ("countdown:quick", "gsm8k/tba:quick"):
      done = self.run_command("plan", f"--config={name}")
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertIn("parameters", done.stdout)

  def test_names_configs_when_one_is_unknown(self):
    done = self.run_command("plan", "--config=countdwn")
    self.assertEqual(done.returncode, 2)
    self.assertIn("countdown, countdown_sparse", done.stderr)
