# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that failed and went on is trained again to the same bits."""

import contextlib
import json
import shutil
from unittest import mock

import numpy as np
import pytest

from tba_jax.learning import host_state
from tba_jax.learning import learner
from tba_jax.replay import decisions
from tba_jax.run import metrics
from tba_jax.run import recorder
from tba_jax.system import jsonl
from tba_jax.tools import rerun
from tests.tools import reruns

_OVERRIDES = (
    "checkpoint.every_steps=4",
    "checkpoint.keep=1",
    "checkpoint.keep_every_steps=8",
    "search.lead_steps=4",
    "replay.recent_fraction=0.5",
    # Routes are part of what is drawn and trained on.
    "model.family=qwen3_moe",
    "model.num_experts=4",
    "model.experts_per_token=2",
    "train.router_replay=True",
)
# Settings of the steps after the failure.
_CHANGES = (
    "loss.beta=0.1",
    "optimizer.learning_rate=2e-3",
    "optimizer.grad_clip_norm=0",
    "replay.capacity=100",
    "replay.recent_fraction=0.3",
    "sampling.temperature=0.8",
    "train.micro_batch_prompts=2",
)


def _train(workdir):
  """Trains; fails in step 9, and resumes with changed settings."""
  record = recorder.Recorder.step

  def fail(self, step, *args):
    if step == 9:
      raise RuntimeError("the trainer fails")
    record(self, step, *args)

  with mock.patch.object(recorder.Recorder, "step", fail):
    with contextlib.suppress(RuntimeError):
      reruns.train(workdir, _OVERRIDES)
  return reruns.train(workdir, _OVERRIDES + _CHANGES)


@pytest.mark.slow
@pytest.mark.timeout(300)
class ReplayTest(reruns.TestCase):

  record = staticmethod(_train)

  def change(self, edit):
    """Returns a copy of the run, of which `edit` changes the record's lines."""
    copy = self.folder / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(self.workdir, copy)
    path = copy / decisions.FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
      edit(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy

  def test_all_steps_from_start_and_from_checkpoints_have_same_bits(
      self,
  ):
    recording = decisions.read(self.workdir)
    self.assertEqual([s.step for s in recording.starts], [0, 8])
    self.assertIn(True, [s.decision.ahead for s in recording.steps.values()])
    for operands, checkpoints in (("0", [8, 12]), ("8", [12])):
      status, out, _ = self.rerun(operands)
      self.assertEqual(status, 0, out)
      self.assertIn(f"steps {operands} to 11 have the same bits", out)
      for step in checkpoints:
        self.assertIn(f"checkpoints/{step}", out)

  def test_changed_settings_are_event_of_their_first_step(self):
    events = jsonl.read_jsonl(self.workdir / "events.jsonl")
    changes = metrics.settings_changes(events)
    self.assertEqual([*changes], [8])
    self.assertLen(changes[8], len(_CHANGES))
    self.assertEqual(changes[8]["sampling.temperature"], [1.0, 0.8])

  def test_steps_with_other_devices_are_refused(self):

    def edit(line):
      if line.get("step") == 8 and "config" in line:
        line["config"]["mesh"]["fsdp"] = 2

    status, _, errors = reruns.call(self.change(edit), "0")
    self.assertEqual(status, 2)
    self.assertIn("config.mesh.fsdp changed at step 8; must be", errors)

  def test_steps_with_other_limit_of_trainer_have_same_bits(self):

    def edit(line):
      if line.get("step") == 8 and "config" in line:
        line["config"]["trainer"]["heartbeat_s"] = 50.0

    status, out, _ = reruns.call(self.change(edit), "0", "9")
    self.assertEqual(status, 0, out)
    self.assertIn("steps 0 to 8 have the same bits", out)

  def test_changed_draw_is_reported_with_its_step_and_fields(self):
    names = list(decisions.read(self.workdir).steps[6].draw)

    def edit(line):
      if line.get("step") == 6 and "draw" in line:
        line["draw"][names.index("rewards")] ^= 1

    status, out, _ = reruns.call(self.change(edit), "0")
    self.assertEqual(status, 1)
    self.assertIn("step 6: the draw differs in rewards", out)

  def test_step_is_drawn_before_or_after_end_of_another_as_recorded(self):

    def edit(line):
      if "draw" in line:
        line["ahead"] = line["step"] == 10

    log = []
    make, finish = learner.Learner.make, learner.Learner.finish

    def logged_make(self, draw):
      log.append(draw.step)
      return make(self, draw)

    def logged_finish(self):
      log.append("finish")
      finish(self)

    workdir = self.change(edit)
    with (
        mock.patch.object(learner.Learner, "make", logged_make),
        mock.patch.object(learner.Learner, "finish", logged_finish),
        # Its draws lack reference log-probs at other steps than the run's.
        mock.patch.object(rerun._Replay, "difference", return_value=""),
    ):
      self.assertEqual(reruns.call(workdir, "8")[0], 0)
    end = "finish"
    self.assertEqual(log, [8, end, 9, 10, end, end, 11, end])

  def test_changed_metric_is_reported_with_both_values(self):

    def edit(line):
      if line.get("step") == 9 and "draw" in line:
        line["scale"] = 0.5

    status, out, _ = reruns.call(self.change(edit), "8")
    self.assertEqual(status, 1)
    self.assertRegex(out, r"step 9: train/learning_rate is \S+, was \S+")

  def test_changed_params_are_reported_with_their_leaf(self):
    copy = self.change(lambda line: None)
    path = copy / "checkpoints/12/host" / host_state.NAME
    with path.open("rb") as file:
      saved = host_state.read(file)
    name = next(n for n in saved["checksums"] if n.startswith(".params"))
    saved["checksums"][name] ^= 1
    with path.open("wb") as file:
      host_state.write(file, host_state.pack(saved))
    status, out, _ = reruns.call(copy, "8")
    self.assertEqual(status, 1)
    self.assertIn("step 11: 1 of ", out)
    self.assertIn(f"checkpoints/12: {name};", out)

  def test_refuses_unrepeatable_steps(self):
    for operands, error in (
        (["4"], "step 4: must be a checkpoint .*: 0, 8;"),
        (["8", "99"], "must be an end of 9 to 12"),
        (["x"], "must be the step to begin with"),
        (["8", "--export_step=3"], "export_step=3: must be .* 8 to 11"),
    ):
      status, _, errors = self.rerun(*operands)
      self.assertEqual(status, 2)
      self.assertRegex(errors, error)
    (empty := self.folder / "empty").mkdir()
    for error in ("empty: no run is there", "there is no record"):
      status, _, errors = reruns.call(empty)
      self.assertEqual(status, 2)
      self.assertIn(error, errors)
      shutil.copy(self.workdir / "config.json", empty)

  def test_step_s_file_is_computed_again(self):
    status, out, _ = self.rerun("8", "11", "--export_step=10")
    self.assertEqual(status, 0)
    path = self.workdir / "step-10.npz"
    self.assertEqual(out.splitlines()[-1], str(path))
    status, out, _ = reruns.call(None, str(path))
    self.assertEqual(status, 0)
    self.assertRegex(out, r"step 10 on .*: is the same")
    with path.open("rb") as file:
      saved = host_state.read(file)
    shape = saved["draw"]["rewards"].shape
    self.assertLen(saved["prompts"], shape[0])
    self.assertEqual({len(group) for group in saved["completions"]}, {shape[1]})
    # A step with other rewards, or other experts, is another one.
    batch = saved["batch"]
    steps = np.arange(shape[1], dtype=np.float32)
    for name, changed in (
        ("routes", 3 - batch["routes"]),
        ("rewards", batch["rewards"] + steps),
    ):
      saved["batch"] = {**batch, name: changed}
      with path.open("wb") as file:
        host_state.write(file, host_state.pack(saved))
      status, out, _ = reruns.call(None, str(path))
      self.assertEqual(status, 1)
      self.assertRegex(out, r"step 10 on .*: differs in .*loss")
    # Nor is it one whose params were changed.
    name = next(n for n in saved["state"] if n.startswith("params."))
    saved["state"][name] = saved["state"][name] + 1
    with path.open("wb") as file:
      host_state.write(file, host_state.pack(saved))
    status, _, errors = reruns.call(None, str(path))
    self.assertEqual(status, 2)
    self.assertIn("other checksums", errors)
