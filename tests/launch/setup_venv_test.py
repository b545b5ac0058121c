# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The install of launch/setup_venv.sh: by uv, by pip, and after a kill."""

import os
import pathlib
import shutil
import subprocess
import sys

from absl.testing import parameterized
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = _ROOT / "launch" / "setup_venv.sh"
# Stands in for the interpreter of .venv: notes what pip is asked to install.
_PYTHON = """#!/bin/bash
if [[ "$*" == *"pip install"*" --target "* ]]; then exit 1; fi
if [[ "$*" == *"pip install"* ]]; then
  echo "pip $*" >>"$CALLS"
  exit "$STATUS_PIP"
fi
exec "{python}" "$@"
"""
_UV = """#!/bin/bash
if [[ "$1" == --version ]]; then exit 0; fi
echo "uv $*" >>"$CALLS"
exit "$STATUS_UV"
"""


class SetupVenvTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.root = self.folder / "root"
    self.venv = self.root / ".venv"
    (self.venv / "bin").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
      (self.root / name).touch()
    self.write(
        self.venv / "bin" / "python", _PYTHON.format(python=sys.executable)
    )
    self.calls = self.folder / "calls"
    self.stamp = self.venv / ".tba_jax_stamp"
    self.bin = self.folder / "bin"
    self.bin.mkdir()
    for name in ("bash", "cat", "flock", "grep", "mv", "rm", "touch"):
      (self.bin / name).symlink_to(shutil.which(name))

  def write(self, path, text):
    path.write_text(text)
    path.chmod(0o755)

  def run_it(self, *extras, uv=0, pip=0, **environment):
    """Installs; `uv` and `pip` are their exit status, None for no uv."""
    if uv is not None:
      self.write(self.bin / "uv", _UV)
    self.calls.write_text("")
    clean = {k: v for k, v in os.environ.items() if "PIP" not in k}
    process = subprocess.run(
        ["bash", "-c", 'set -euo pipefail; source "$0"; setup_venv "$@"',
         _SCRIPT, self.root, *extras],
        capture_output=True, text=True, timeout=60,
        env=clean | {
            "PATH": str(self.bin), "CALLS": str(self.calls),
            "STATUS_UV": str(uv), "STATUS_PIP": str(pip),
            "PIP_CONFIG_FILE": os.devnull, **environment,
        },
    )  # fmt: skip
    calls = self.calls.read_text().splitlines()
    return process, [call.partition(" ")[0] for call in calls], calls

  @pytest.mark.slow
  def test_uv_installs_if_available(self):
    done, tools, (call,) = self.run_it("test")
    self.assertEqual((done.returncode, tools), (0, ["uv"]), done.stderr)
    self.assertIn(f"--constraint {self.root}/constraints.txt", call)
    self.assertEndsWith(call, f"--editable {self.root}[test]")
    # Once: a finished install is not looked at again.
    self.assertEqual(self.run_it("test")[1], [])
    self.assertEqual(self.run_it("test", "wandb")[1], ["uv"])

  @parameterized.parameters(
      (None, {}, ["pip"]),  # Nor can it be had.
      (1, {}, ["uv", "pip"]),
      (0, {"PIP_PROXY": "http://there"}, ["pip"]),
      (0, {"PIP_CERT": "here.pem", "SSL_CERT_FILE": ""}, ["pip"]),
  )
  def test_pip_installs_without_uv(self, uv, environment, tools):
    done, called, calls = self.run_it("test", uv=uv, **environment)
    self.assertEqual((done.returncode, called), (0, tools), done.stderr)
    self.assertEndsWith(calls[-1], f"--editable {self.root}[test]")
    self.assertTrue(self.stamp.exists())

  @pytest.mark.slow
  def test_failed_install_leaves_no_stamp(self):
    done, tools, _ = self.run_it("test", uv=1, pip=1)
    self.assertEqual((done.returncode, tools), (1, ["uv", "pip"]))
    self.assertFalse(self.stamp.exists())
    _, tools, calls = self.run_it("test", uv=1)
    self.assertEqual(tools, ["uv", "pip"])
    self.assertIn(" --reinstall ", calls[0])
    self.assertIn(" --force-reinstall ", calls[1])
    # Whole again: what is added comes as usual.
    _, _, (call,) = self.run_it("test", "wandb")
    self.assertNotIn("--reinstall", call)

  def test_settings_of_pip_match_uv(self):
    path = self.folder / "pip.conf"
    path.write_text(
        "[global]\nextra-index-url = https://a/simple\n  https://b/simple\n"
        "index-url = https://c/simple\ntimeout = 9\n"
        "[install]\nfind-links = /wheels\n"
    )
    _, _, (call,) = self.run_it(
        PIP_CONFIG_FILE=str(path),
        PIP_INDEX_URL="https://d/simple",
        PIP_FIND_LINKS="",
        PIP_TRUSTED_HOST="d",
        PIP_NO_INDEX="0",
        PIP_PRE="yes",
    )
    # Beside those of this machine's own files.
    for option in (
        # As pip, the best version of all indices.
        "--index-strategy=unsafe-best-match",
        "--index=https://a/simple",
        "--index=https://b/simple",
        "--default-index=https://d/simple",
        "--find-links=/wheels",
        "--allow-insecure-host=d",
        "--prerelease=allow",
    ):
      self.assertIn(f" {option} ", call)
    self.assertNotIn("https://c", call)
    self.assertNotIn("--no-index", call)
