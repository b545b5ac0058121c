# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""launch/tpu_vm.sh looks after its machines, with a stand-in for gcloud."""

import os
import pathlib
import subprocess

from absl.testing import absltest

_SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "tpu_vm.sh"
# Keeps the state of each queued resource in a file, and asks for roles as two
# workers would. At the first look at the trainer's role a searcher is
# preempted, at the second the trainer's second host has restarted, at the
# fourth the trainer has ended.
_GCLOUD = r"""#!/usr/bin/env bash
cd "$(dirname "$0")"
echo "$*" >>called
case "$*" in
  *"queued-resources describe"*) cat "state-$5" 2>/dev/null || exit 1 ;;
  *"queued-resources create"*) echo ACTIVE >"state-$5" ;;
  *"queued-resources delete"*) rm "state-$5" ;;
  *networkEndpoints*) echo 10.0.0.7 ;;
  *pgrep*)
    case "$5" in
      tba-trainer)
        echo >>looks
        [ "$(wc -l <looks)" != 1 ] || echo SUSPENDED >state-tba-searcher-1 ;;
    esac
    export LOOK="$(wc -l <looks)" WORKER
    for WORKER in 0 1; do
      command="${*: -1}"
      command="${command#--command=}"
      bash -c "${command//\/mnt\/runs\/tba/.}"
    done
    ;;
esac
"""
_PGREP = """#!/usr/bin/env bash
case "$*:$LOOK-$WORKER" in *trainer:2-1 | *trainer:[4-9]-*) exit 1 ;; esac
"""


class TpuVmTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    for name, text in (
        ("gcloud", _GCLOUD),
        ("pgrep", _PGREP),
        ("curl", "#!/bin/sh\necho $WORKER\n"),
        ("python", "#!/bin/sh\n"),
    ):
      (self.folder / name).write_text(text)
      (self.folder / name).chmod(0o755)
    # Of an earlier start; a role that is up has more to say.
    (self.folder / "logs").mkdir()
    (self.folder / "logs" / "trainer-0.log").write_text(
        "role.sh: ended for good with status 0\n"
    )

  def run_script(self, *arguments):
    done = subprocess.run(
        ["bash", str(_SCRIPT), *arguments],
        env={
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHON": str(self.folder / "python"),
            "PROJECT": "p",
            "ZONE": "z",
            "NFS": "10.0.0.1:/share",
            "REPO": "https://example.com/tba_jax",
            "SEARCHERS": "2",
            "LOOK_EVERY_S": "0",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    called = (self.folder / "called").read_text().splitlines()
    (self.folder / "called").unlink()
    return done.stdout, called

  def test_a_preempted_searcher_is_made_again(self):
    out, called = self.run_script("up")
    made = [c.split()[4] for c in called if "queued-resources create" in c]
    self.assertEqual(
        made,
        ["tba-trainer", "tba-searcher-0", "tba-searcher-1", "tba-searcher-1"],
    )
    (deleted,) = (c for c in called if "queued-resources delete" in c)
    self.assertIn(" tba-searcher-1 ", deleted)
    text = "\n".join(called)
    # The first searcher's role is started once; the trainer's again where one
    # of its hosts has restarted.
    self.assertEqual(text.count("--program=trainer --workdir"), 2)
    self.assertEqual(
        text.count("--detach=/mnt/runs/tba/logs/searcher-0.log"), 1
    )
    self.assertEqual(
        text.count("--detach=/mnt/runs/tba/logs/searcher-1.log"), 2
    )
    self.assertIn("--config.store.address=10.0.0.7:8470-8489", text)
    self.assertIn("--index_from=INDEX 10.0.0.7:8490", text)
    self.assertIn("# the trainer has ended", out)

  def test_a_run_that_was_left_goes_on(self):
    self.run_script("up")
    _, called = self.run_script("up")
    self.assertFalse([c for c in called if "queued-resources create" in c])
    # role.sh itself knows whether a role is up.
    self.assertTrue([c for c in called if "--program=trainer" in c])

  def test_down_saves_and_deletes_everything(self):
    self.run_script("up")
    _, called = self.run_script("down")
    self.assertIn(
        "launch/role.sh --stop=/mnt/runs/tba/logs/trainer-$INDEX.log", called[0]
    )
    deleted = [c.split()[4] for c in called[1:]]
    self.assertEqual(
        deleted, ["tba-trainer", "tba-searcher-0", "tba-searcher-1"]
    )


if __name__ == "__main__":
  absltest.main()
