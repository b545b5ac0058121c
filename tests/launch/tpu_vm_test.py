# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""launch/tpu_vm.sh looks after its machines, with a stand-in for gcloud."""

import configparser
import os
import pathlib
import shutil
import subprocess

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = _ROOT / "launch" / "tpu_vm.sh"
# Keeps the state of each queued resource in a file, and runs what is about
# units as two workers would. At the first look at the trainer's units a
# searcher is preempted, at the second the trainer's second host has restarted,
# at the fourth the trainer has ended.
_GCLOUD = r"""#!/usr/bin/env bash
cd "$(dirname "$0")"
echo "$*" >>called
case "$*" in
  *"queued-resources describe"*)
    if [ -e outage ]; then rm outage; echo "503" >&2; exit 1; fi
    echo "WARNING: a new version" >&2
    cat "state-$5" 2>/dev/null ||
      { echo "ERROR: NOT_FOUND: $5" >&2; exit 1; } ;;
  *"queued-resources create"*)
    if [ -e "quota-$5" ]; then rm "quota-$5"; exit 1; fi
    echo ACTIVE >"state-$5" ;;
  *"queued-resources delete"*) rm -f "state-$5" "up-$5.service" ;;
  *networkEndpoints*) echo 10.0.0.7 ;;
  *"systemctl "*)
    case "$*" in
      *tba-trainer*"systemctl show"*)
        echo >>looks
        [ "$(wc -l <looks)" != 1 ] || echo SUSPENDED >state-tba-searcher-1 ;;
    esac
    export LOOK="$(cat looks 2>/dev/null | wc -l)" WORKER
    for WORKER in 0 1; do
      [[ "$*" == *--worker=all* ]] || [ "$WORKER" = 0 ] || continue
      command="${*: -1}"
      command="${command#--command=}"
      bash -c "${command//\/run\/systemd\/system/.}"
    done
    ;;
esac
"""
_SYSTEMCTL = r"""#!/usr/bin/env bash
echo "$*" >>units
unit="${*: -1}"
case "$*" in
  is-active*) [ -e "up-$unit" ] ;;
  restart*) touch "up-$unit" ;;
  stop*) rm -f "up-$unit" ;;
  show*)
    state="LoadState=loaded SubState=running"
    case "$unit:$LOOK" in
      tba-trainer-1.service:2)
        rm "up-$unit" "$unit"
        state="LoadState=not-found SubState=dead" ;;
      tba-trainer-0.service:[4-9]) state="LoadState=loaded SubState=dead" ;;
    esac
    printf '%s\n' $state ;;
esac
"""


class TpuVmTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    for name, text in (
        ("gcloud", _GCLOUD),
        ("systemctl", _SYSTEMCTL),
        ("sudo", '#!/bin/sh\nexec "$@"\n'),
        ("curl", "#!/bin/sh\necho $WORKER\n"),
        ("python", "#!/bin/sh\n"),
    ):
      (self.folder / name).write_text(text)
      (self.folder / name).chmod(0o755)

  def run_script(self, *arguments, **variables):
    process = subprocess.run(
        ["bash", str(_SCRIPT), *arguments],
        env={
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHON": str(self.folder / "python"),
            "PROJECT": "p",
            "ZONE": "z",
            "NFS": "10.0.0.1:/share",
            "REPO": "https://example.com/tba_jax",
            "SEARCHERS": "2",
            "LOOK_EVERY_S": "0",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    called = (self.folder / "called").read_text()
    (self.folder / "called").unlink()
    return process.stdout, called.splitlines()

  def count(self, call):
    """Returns how often systemctl was called so."""
    return (self.folder / "units").read_text().splitlines().count(call)

  def unit(self, role):
    """Returns the parts of a role's unit."""
    parts = configparser.ConfigParser(interpolation=None)
    parts.optionxform = str
    parts.read_string((self.folder / f"tba-{role}.service").read_text())
    return parts

  def test_preempted_searcher_is_made_again(self):
    out, called = self.run_script("up")
    made = [c.split()[4] for c in called if "queued-resources create" in c]
    self.assertEqual(
        made,
        ["tba-trainer", "tba-searcher-0", "tba-searcher-1", "tba-searcher-1"],
    )
    (deleted,) = (c for c in called if "queued-resources delete" in c)
    self.assertIn(" tba-searcher-1 ", deleted)
    # Only the role of the host that has restarted is started again, and that
    # of the searcher that is a new machine: the others are up.
    self.assertEqual(self.count("restart tba-trainer-0.service"), 1)
    self.assertEqual(self.count("restart tba-trainer-1.service"), 2)
    self.assertEqual(self.count("restart tba-searcher-0.service"), 1)
    self.assertEqual(self.count("restart tba-searcher-1.service"), 2)
    self.assertIn("# the trainer has ended", out)

  def test_looks_continue_after_errors_of_cloud(self):
    for name in ("outage", "quota-tba-searcher-0"):
      (self.folder / name).touch()
    out, called = self.run_script("up")
    made = [c.split()[4] for c in called if "queued-resources create" in c]
    self.assertEqual(made.count("tba-trainer"), 1)
    self.assertEqual(made.count("tba-searcher-0"), 2)
    self.assertIn("# waiting for tba-trainer: ", out)
    self.assertIn("# tba-searcher-0: tried again", out)

  def test_units_start_roles_again_after_errors_only(self):
    self.run_script("up", SETTINGS="--config.task.note=5%d")
    code = f"{self.folder}/tba_jax_code"
    for role in ("store", "trainer-0", "trainer-1", "searcher-1"):
      service = self.unit(role)["Service"]
      self.assertEqual(service["Restart"], "on-failure")
      self.assertEqual(service["RestartPreventExitStatus"], "2 3")
      self.assertEqual(service["WorkingDirectory"], code)
      self.assertStartsWith(
          service["ExecStart"],
          f"{code}/launch/role.sh --once --log=/mnt/runs/tba/logs/{role}.log ",
      )
    store, second = (
        self.unit(role)["Service"]["ExecStart"]
        for role in ("store", "trainer-1")
    )
    self.assertIn(" --config.store.address=10.0.0.7:8470-8489 ", store)
    # systemd makes one of two percent signs.
    self.assertIn(" --config.task.note=5%%d ", store)
    self.assertEndsWith(
        second, "--program=trainer --workdir=/mnt/runs/tba 1 10.0.0.7:8490"
    )

  def test_units_are_right_for_systemd(self):
    verify = shutil.which("systemd-analyze")
    if verify is None:
      self.skipTest("systemd-analyze is not installed")
    (self.folder / "tba_jax_code").symlink_to(_ROOT)
    self.run_script("up")
    units = sorted(map(str, self.folder.glob("tba-*.service")))
    self.assertLen(units, 5)
    process = subprocess.run(
        [verify, "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
    )
    self.assertEqual((process.returncode, process.stderr), (0, ""))

  def test_resumes_interrupted_run(self):
    self.run_script("up")
    _, called = self.run_script("up")
    self.assertFalse([c for c in called if "queued-resources create" in c])
    # Each host itself knows whether its roles are up.
    self.assertTrue([c for c in called if "--program=trainer" in c])
    for role in ("store", "trainer-0", "searcher-0"):
      self.assertEqual(self.count(f"restart tba-{role}.service"), 1)

  def test_down_saves_and_deletes_everything(self):
    self.run_script("up")
    _, called = self.run_script("down")
    self.assertEqual(self.count("stop tba-trainer-0.service"), 1)
    self.assertEqual(self.count("stop tba-trainer-1.service"), 1)
    deleted = [c.split()[4] for c in called[1:]]
    self.assertEqual(
        deleted, ["tba-trainer", "tba-searcher-0", "tba-searcher-1"]
    )
