# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer that may not, or cannot, run where it was started: all end, soon.

Process 0 alone finds out, before anything is written or computed.
"""

import os

from absl.testing import absltest

from tba_jax.monitor import run_directory
from tba_jax.programs import trainer
from tba_jax.transport import kv_client
from tests.multi_process import by_hand_case
from tests.transport import running_host


class ByHandTest(by_hand_case.ByHandCase):

  def test_two_trainers_on_one_workdir(self):
    run = self.make_run("run")
    lock = run_directory.lock(str(run.workdir), "trainer")
    self.addCleanup(os.close, lock)
    words = f"process {os.getpid()} already runs there as the trainer"
    self.assert_refused(run, (2, 2), words)

  def test_a_store_that_is_not_there(self):
    run = self.make_run("run")
    self.assert_refused(run, (1, 1), "no store to attach to within 3")

  def test_a_store_of_another_run(self):
    other = self.make_run("other")
    run = self.make_run("run", spool_dir=str(other.spool))
    with running_host.RunningHost(other.spool, run_id=other.run_id):
      self.assert_refused(
          run, (1, 1), f"of run '{run.run_id}'.* of run '{other.run_id}'"
      )
      # And a second store is refused where the first one lives.
      store = self.start("store", run)
      self.assertEqual(store.wait(by_hand_case.DEADLINE_S), 2)

  def test_a_store_that_serves_the_trainer_of_another_directory(self):
    first = self.make_run("first")
    second = self.make_run("second", spool_dir=str(first.spool))
    # As one that joined the store's run from a host of its own.
    config = second.workdir / "config.json"
    text = config.read_text().replace(second.run_id, first.run_id)
    config.write_text(text)
    with running_host.RunningHost(first.spool, run_id=first.run_id) as host:
      transport = kv_client.KvTransport(
          host.spool / "locator.json", deadline_s=20.0
      )
      trainer.lock_store(transport, first)
      transport.close()
      run_directory.owner(second)
      self.assert_refused(
          second, (2, 2), f"serves the trainer of .*:{first.workdir};"
      )

  def test_a_process_with_other_settings(self):
    store = self.make_run("store")
    spool = {"spool_dir": str(store.spool)}
    run = self.make_run("run", **spool)
    changes = ["loss.beta=0.1", "train.num_steps=9"]
    other = self.make_run("other", changes=changes, **spool)
    words = r"config.loss.beta = 0.1 at process 1 \(.*/other\), 0.05 at process"
    with running_host.RunningHost(store.spool, run_id=run.run_id):
      self.assert_refused(run, (2, 2), words, other)
    # The other key is named below the first.
    self.assertRegex(
        self.text(), "(?m)^config.train.num_steps = 9 at process 1"
    )

  def test_a_workdir_that_cannot_be_written(self):
    run = self.make_run("run")
    os.chmod(run.workdir, 0o500)
    self.addCleanup(os.chmod, run.workdir, 0o700)
    self.assert_refused(
        run, (1, 1), f"Permission denied: '{run.workdir}", as_user=True
    )


if __name__ == "__main__":
  absltest.main()
