# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The live panel, of runs in any condition."""

import io
import json
import os
import pathlib
import re
import tempfile
import time

from absl.testing import absltest
from absl.testing import parameterized
import rich.console

from tba_jax.report import panel
from tba_jax.report import run_state
from tba_jax.run import files
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tests.report import fake_run


def _shown(renderable, width=110):
  console = rich.console.Console(file=io.StringIO(), width=width)
  console.print(renderable)
  return console.file.getvalue()


def _view(state, width=110):
  return _shown(panel.render_view(state), width)


class TailTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name) / "m.jsonl"
    self.tail = files.Tail(self.path)

  def _append(self, data):
    with self.path.open("ab") as f:
      f.write(data)

  def test_new_complete_lines_are_read(self):
    self.assertEqual(self.tail.read(), [])
    self._append(b'{"step": 0}\n{"st')
    self.assertEqual(self.tail.read(), [{"step": 0}])
    self.assertEqual(self.tail.read(), [])
    self._append(b'ep": 1}\nbroken\n')
    self.assertEqual(self.tail.read(), [{"step": 1}])

  def test_replaced_file_is_read_from_its_start(self):
    self._append(b'{"step": 0}\n{"step": 1}\n')
    self.tail.read()
    self.path.write_bytes(b'{"step": 7}\n')
    self.assertEqual(self.tail.read(), [{"step": 7}])


class FollowerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def test_shows_empty_directory(self):
    state = run_state.Follower(self.workdir).read()
    self.assertEqual(state.phase, "setup")
    self.assertIn("setup", _view(state))

  def test_repeated_steps_replace_earlier_records(self):
    follower = run_state.Follower(self.workdir)
    for step, reward in ((0, 0.1), (1, 0.2), (2, 0.3), (1, 0.5)):
      fake_run.write_metrics_line(
          self.workdir, step, **{"train/reward_mean": reward}
      )
      state = follower.read()
    self.assertEqual(list(state.reward), [(0, 0.1), (1, 0.5)])

  def test_shows_collapse(self):
    lines = run_state.Follower(self.workdir)
    for step in range(60):
      reward, entropy = (0.5, 1.0) if step < 30 else (0.1, 0.02)
      values = {"train/reward_mean": reward, "train/entropy": entropy}
      fake_run.write_metrics_line(self.workdir, step, **values)
      if step == 20:
        self.assertNotIn("collapse", _view(lines.read()))
    state = run_state.Follower(self.workdir).read()
    state.phase, state.status = "train", fake_run.status()
    self.assertRegex(
        _view(state), r"collapse +entropy since step 30: it went from 1\.00 to"
    )
    self.assertIn("collapse by entropy since step 30", panel.plain_line(state))

  def test_long_history_is_thinned(self):
    path = os.path.join(self.workdir, "metrics.jsonl")
    with open(path, "w") as f:
      for step in range(9000):
        reward, entropy = (0.5, 1.0) if step < 6000 else (0.1, 0.02)
        record = {"train/reward_mean": reward, "train/entropy": entropy}
        f.write(json.dumps({"step": step} | record) + "\n")
    result = run_state.Follower(self.workdir).read().collapse
    self.assertEqual(result.cause, "entropy")
    self.assertAlmostEqual(result.step, 6000, delta=100)

  def test_shows_newest_error_and_event(self):
    events = metrics.EventLog(
        jsonl.LineWriter(os.path.join(self.workdir, "events.jsonl"))
    )
    events.write("died", "searcher-0: SIGKILL")
    events.write("restart", "searcher-0 (after SIGKILL)")
    events.write("searcher_gone", "s000 (finished)")
    events.close()
    state = run_state.Follower(self.workdir).read()
    self.assertEqual(state.error["message"], "searcher-0: SIGKILL")
    shown = _view(state)
    self.assertRegex(shown, r"event +[\d:]+ searcher_gone: s000")
    self.assertRegex(shown, r"error +[\d:]+ died: searcher-0: SIGKILL")

  def test_shows_run(self):
    fake_run.make_run(self.workdir, num_steps=40, finished=False)
    config = {"config": {"sft": {"num_steps": 2400}}}
    os.makedirs(os.path.join(self.workdir, "reward_model"))
    lines = os.path.join(self.workdir, "reward_model", "metrics.jsonl")
    with open(lines, "w") as f:
      f.write('{"step": 25, "time": 1.0, "train/accuracy": 0.5}\n')
    with open(os.path.join(self.workdir, "config.json"), "w") as f:
      json.dump(config, f)
    state = run_state.Follower(self.workdir).read()
    self.assertLen(state.reward, 40)
    self.assertNotEmpty(state.held_out)
    self.assertEqual(state.made_steps, {"sft": 2400})
    self.assertEqual(state.seen, fake_run.START + 180)  # The newest event.
    self.assertEqual(state.event["role"], "store")
    self.assertEqual(state.made["reward_model"]["step"], 25)
    self.assertEqual(state.status["num_steps"], 40)


class ViewTest(parameterized.TestCase):

  def _state(self, **status):
    state = run_state.RunState("run", phase="train")
    state.status = {**fake_run.status(), **status}
    return state

  def test_formats_figures(self):
    state = self._state()
    state.restarts = {"searcher": 2, "store": 0}
    state.reward.extend([(0, 0.1), (1, 0.9)])
    shown = _view(state)
    for words in (
        "step 120/320",
        "2:40 min left",
        "0.61",
        "58.0 %",
        "▁█",
        "2.20 steps",
        "16,384 of 200,000",
        "0.91 of ideal",
        "93.0 %",
        "9,340",
        "2/4",
        "2 (2 searcher)",
        "generation 2",
    ):
      self.assertIn(words, shown)

  def _busy_state(self):
    state = self._state(
        eta_s=12_345.0,
        step=12_345,
        num_steps=123_456,
        kl=-123.45,
        buffer={"size": 123_456, "capacity": 200_000},
        reward_failures={"deadline": 1_234, "nan": 5},
        trainer={"busy_share": 0.931, "step_s": 754.0, "wait_s": 0.512},
    )
    state.status["searchers"] = {
        f"{i}-a3": {
            "index": i,
            "samples_per_s": 12_345.6,
            "tokens_per_s": 1_234_567.8,
            "version": 12_344,
            "busy_share": 0.712,
            "unacked": 12,
            "credits": 16,
            "age_s": 83.0,
            "environment_wait_share": 0.234,
        }
        for i in range(12)
    }
    state.reward.extend((i, i / 64) for i in range(64))
    state.held_out.extend((i, i / 64) for i in range(64))
    state.event = {"kind": "reward_failed", "message": "deadline, 1,234 so far"}
    state.note = "from status.json; no sign of life for 20:34 min"
    return state

  @parameterized.parameters(40, 60, 62, 80, 84, 100, 160)
  def test_no_number_is_cut_at_any_width(self, width):
    numbers = lambda shown: set(re.findall(r"[\d.,:/-]*\d", shown))
    state = self._busy_state()
    shown = _view(state, width)
    self.assertNotIn("…", shown)
    self.assertLessEqual(max(map(len, shown.splitlines())), width)
    self.assertEqual(numbers(shown), numbers(_view(state, 400)))

  def test_completions_without_reward_are_shown(self):
    state = self._state(reward_failures={"deadline": 3, "nan": 1})
    shown = _view(state)
    self.assertIn("4 (3 deadline, 1 nan)", shown)
    shares = {"first": 0.125, "newest": 0.455}
    shown = _view(self._state(failure_share=shares))
    self.assertIn("now 45.5 %, 12.5 % at first", shown)
    shown = _view(self._state(staleness_steps=None))
    self.assertNotIn("not judged", shown)
    self.assertRegex(shown, r"staleness +– +│")  # No unit without a number.

  def test_waits_for_environments_are_shown(self):
    self.assertIn("23.4 % waits for environments", _view(self._busy_state()))
    self.assertNotIn("waits for environments", _view(self._state()))

  def test_any_key_may_be_missing_or_invalid(self):
    keys = list(fake_run.status())
    for key in keys:
      state = self._state()
      del state.status[key]
      _view(state)
      for odd in (None, "x", [], {"a": None}, float("nan")):
        _view(self._state(**{key: odd}))
        panel.plain_line(self._state(**{key: odd}))

  def test_text_of_run_is_escaped(self):
    state = self._state(last_error="\x1b[31m[bold]red[/bold]\n\u202e")
    state.event = {"kind": "[link]", "message": "\x1b]0;title\x07"}
    state.name = "\x1b[2J"
    shown = _view(state)
    self.assertNotIn("\x1b", shown)
    self.assertIn("␛[31m[bold]red[/bold]␊⟦U+202E⟧", shown)
    self.assertIn("[link]: ␛]0;title␇", shown)

  def test_long_text_is_cut(self):
    long = "\u202e" + "x" * 100_000
    state = self._state(last_error=long, phase=long)
    state.event = {"kind": long, "message": long}
    state.name = state.note = state.phase = long
    state.restarts = {long: 1}
    state.made["sft"] = {f"a/{long}": 1.0}
    for shown in (
        _view(state),
        panel.plain_line(state),
    ):
      self.assertLess(len(shown), 10_000)
      self.assertNotIn("\u202e", shown)

  def test_shows_progress_of_evaluation(self):
    state = self._state(evaluate={"done": 64, "total": 1256})
    for shown in (_view(state), panel.plain_line(state)):
      self.assertIn("evaluated 64/1,256", shown)

  def test_shows_progress_of_fine_tuning(self):
    state = run_state.RunState("run", phase="sft", made_steps={"sft": 2400})
    state.made["sft"] = {"step": 600, "sft/loss": 0.731}
    shown = _view(state)
    self.assertIn("step 600/2,400  25 %", shown)
    self.assertIn("sft/loss 0.731", shown)
    self.assertIn("step 600/2400", panel.plain_line(state))

  def test_draws_sparkline(self):
    self.assertEqual(panel.sparkline([]), "")
    self.assertEqual(panel.sparkline([2.0, 2.0]), "▄▄")
    self.assertEqual(panel.sparkline([0, 1, 2, 3], width=2), "▁█")
    self.assertLen(panel.sparkline(list(range(999)), width=24), 24)


class PanelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name
    self.out = io.StringIO()

  def _console(self, **kwargs):
    return rich.console.Console(file=self.out, width=110, **kwargs)

  def _write_status(self, **values):
    path = os.path.join(self.workdir, "status.json")
    jsonl.atomic_write_json(path, {"time": time.time(), **values})

  def test_prints_plain_line_at_each_phase(self):
    with panel.Panel(self.workdir, self._console()) as view:
      view.phase("sft")
      view.phase("start")
      view.update(force=True)
      view.update(force=True)
    phases = [line.split(" ")[0] for line in self.out.getvalue().splitlines()]
    self.assertEqual(phases, ["sft", "warm-up"])
    self.assertIn("load the model", self.out.getvalue())
    self.assertNotIn("\x1b", self.out.getvalue())

  def test_plain_lines_are_not_repeated(self):
    with panel.Panel(self.workdir, self._console(), line_every_s=0.0) as view:
      view.phase("start")
      for doing in ("", "evaluate", "evaluate", "step"):
        self._write_status(phase="warm-up", doing=doing)
        view.update(force=True)
    lines = self.out.getvalue().splitlines()
    self.assertLen(set(lines), 4)
    self.assertLen(lines, 4)
    self.assertIn("compiles the train step", lines[-1])

  def test_prints_plain_line_at_interval(self):
    with panel.Panel(self.workdir, self._console(), line_every_s=0.0) as view:
      view.phase("start")
      view.update(restarts={"searcher": 3}, force=True)
    self.assertIn("restarts 3", self.out.getvalue().splitlines()[-1])

  def test_plain_lines_report_new_error_once(self):
    path = os.path.join(self.workdir, "events.jsonl")
    log = metrics.EventLog(jsonl.LineWriter(path))
    log.write("checkpoint_failed", "of an earlier start")
    with panel.Panel(self.workdir, self._console()) as view:
      view.phase("start")
      log.write("checkpoint_failed", "checkpoint 25 could not be written")
      log.write("store_started", "at a socket")
      view.update(force=True)
      view.update(force=True)
    log.close()
    lines = self.out.getvalue().splitlines()
    told = [line for line in lines if "checkpoint" in line]
    self.assertLen(told, 1)
    self.assertRegex(
        told[0], r"^error .*checkpoint_failed: checkpoint 25 could"
    )

  def test_shows_one_sample_of_start_model(self):
    sample = {"prompt": "2+2", "completion": "five", "reward": 0.0}
    with panel.Panel(self.workdir, self._console()) as view:
      view.update(force=True)
      self.assertNotIn("sample of", self.out.getvalue())
      jsonl.atomic_write_json(
          os.path.join(self.workdir, "eval.json"),
          {"before": {"samples": [{**sample, "reason": "wanted 4"}, sample]}},
      )
      for _ in range(3):
        view.update(force=True)
    shown = "model: reward 0.00 (wanted 4)\n  prompt: 2+2\n  completion: five"
    self.assertEqual(self.out.getvalue().count(shown), 1)
    # A run that is resumed has shown it.
    with panel.Panel(self.workdir, self._console()) as view:
      view.update(force=True)
    self.assertEqual(self.out.getvalue().count("sample of"), 1)

  def test_shows_sample_of_first_step_without_evaluation(self):
    with panel.Panel(self.workdir, self._console()) as view:
      view.update(force=True)
      with open(os.path.join(self.workdir, "samples.jsonl"), "w") as f:
        f.write('{"prompt": "a", "completion": "b", "reward": 1.5}\n')
      view.update(force=True)
    self.assertIn("reward 1.50\n  prompt: a\n", self.out.getvalue())

  def test_status_of_trainer_replaces_phase(self):
    with panel.Panel(self.workdir, self._console()) as view:
      view.phase("start")
      self._write_status(phase="train", step=7, num_steps=9, reward=0.5)
      view.update(force=True)
    self.assertRegex(self.out.getvalue(), r"train · step 7/9 · reward 0.50")

  def test_status_of_earlier_start_is_ignored(self):
    with open(os.path.join(self.workdir, "status.json"), "w") as f:
      json.dump({"phase": "train", "step": 7, "time": time.time() - 60}, f)
    with panel.Panel(self.workdir, self._console()) as view:
      view.phase("start")
    self.assertNotIn("step 7", self.out.getvalue())

  def test_draws_on_terminal(self):
    console = self._console(force_terminal=True)
    with panel.Panel(self.workdir, console) as view:
      self._write_status(phase="train", step=7, num_steps=9)
      view.update(force=True)
    self.assertIn("step 7/9", self.out.getvalue())
    self.assertIn("\x1b[", self.out.getvalue())

  def test_frequent_updates_do_not_read(self):
    with panel.Panel(self.workdir, self._console()) as view:
      view.phase("start")
      self._write_status(phase="train", step=7, num_steps=9)
      view.update()
      self.assertNotIn("train", self.out.getvalue())


class FinalTest(absltest.TestCase):

  def test_draws_final_table(self):
    before = {"pass_at_1": 0.29, "pass_at_k": 0.9, "distinct_correct": 2.0}
    after = {"pass_at_1": 0.68, "pass_at_k": 0.9, "distinct_correct": 1.8}
    summary = fake_run.summary(before, after)
    shown = _shown(panel.final_table(summary))
    for words in ("29.0 %", "68.0 %", "+39.0 points", "164,576", "closed"):
      self.assertIn(words, shown)
    shown = _shown(panel.final_table({"ledger_closed": False}))
    self.assertIn("OPEN", shown)
    table = panel.final_table({"steps": 2, "stopped_by": "guard kl"})
    self.assertIn("2 (stopped by guard kl)", _shown(table))
    table = panel.final_table({"reward_failures": {"exit": 2, "nan": 1}})
    self.assertIn("3 (2 exit, 1 nan)", _shown(table))

  def test_lists_advice(self):
    shown = _shown(panel.advice_list(["a [b]", "c"]))
    self.assertEqual(
        [x.rstrip() for x in shown.splitlines()], ["• a [b]", "• c"]
    )
