# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The recorder: its files, and totals over restarts."""

import dataclasses
import errno
import json
import pathlib
import threading
import time
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax.config import settings as settings_lib
from tba_jax.replay import ledger
from tba_jax.rewards import judges
from tba_jax.run import failures as failures_lib
from tba_jax.run import metrics as metrics_lib
from tba_jax.run import recorder as recorder_lib
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.transport.groups import queue_server
from tba_jax.transport.groups import service
from tests.support import fakes
from tests.transport.groups import fake_groups

METRICS = {"loss": 1.5, "reward_mean": 0.25, "kl": 2.0, "entropy": 0.5}
RESULT = {"pass_at_1": 0.4, "num_prompts": 8, "samples": [{"text": "2"}]}
LEDGER = {
    "generated": {"completions": 48},
    "lost": {"journal": {"prompts": 1, "completions": 4, "tokens": 9}},
    "unknown": [],
    "closed": True,
}


class _Task(fakes.FakeTask):

  def explain(self, split, index, completion):
    return f"{split} {index}: {completion}"


class RecorderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.leases = {}
    self.made = []
    self.statuses = []
    buffer = fake_groups.make_buffer(max_completion_tokens=4)
    for i in range(3):
      buffer.insert(
          fake_groups.make_group(i, [[2 + i, 3, 0], [5, 6, 2]], version=i), i
      )
    self.service = mock.create_autospec(service.ReplayService)
    self.service.buffer = buffer
    self.service.account.return_value = {"closed": False}
    self.service.generated.return_value = ledger.Amount(5, 40, 600)
    self.enter_context(mock.patch.object(recorder_lib, "NUM_SAMPLES", 3))
    self.now = 100.0
    self.failures = failures_lib.FailureShare()
    for name in ("monotonic", "perf_counter"):
      patch = mock.patch.object(time, name, side_effect=lambda: self.now)
      patch.start()
      self.addCleanup(patch.stop)

  def make(self, **changes):
    config = settings_lib.get_config()
    config.train.num_steps = 10
    config.search.num_searchers = 2
    log = dict(every_steps=1, samples_every_steps=2)
    config.log.update({**log, **changes})
    queue = mock.create_autospec(queue_server.QueueServer, instance=True)
    queue.heard.side_effect = lambda: self.leases
    queue.set_status.side_effect = self.statuses.append
    queue.generation = 5
    recorder = recorder_lib.Recorder(
        config,
        run_directory.RunInfo(self.workdir, "0a1b", self.workdir, b""),
        epoch=3,
        queue=queue,
        tokenizer=fakes.FakeTokenizer(),
        judge=judges.InProcess(_Task({})),
    )
    self.addCleanup(self.close, recorder)
    self.made.append(recorder)
    return recorder

  def lease(self, sid, *, busy_s, completions, **stats):
    self.leases[sid] = {
        "index": 0,
        "unacked": 1,
        "credits": 4,
        "age_s": 0.5,
        "alive": True,
        "stats": {"busy_s": busy_s, **stats},
        "totals": {"completions": completions},
    }

  def step(self, recorder, step, *, busy_s=0.0, wait_s=0.0, **metrics):
    """Records a step of the given seconds."""
    for kind, seconds in (("wait_fresh", wait_s), ("step", busy_s)):
      with recorder.span(kind):
        self.now += seconds
    draw = self.service.buffer.sample(2, 2, step)
    recorder.step(
        step, {**METRICS, **metrics}, draw, self.service, self.failures
    )
    return draw

  def close(self, recorder):
    try:
      recorder.close()
    except KeyError:
      pass  # Seen by its test.

  def flush(self):
    for recorder in self.made:
      recorder.flush()

  def lines(self, name):
    self.flush()
    text = (self.workdir / name).read_text()
    return [json.loads(line) for line in text.splitlines()]

  def read(self, name):
    self.flush()
    return jsonl.read_json(self.workdir / name)

  def test_slow_explanation_holds_up_no_metrics(self):
    recorder, go_on = self.make(), threading.Event()
    self.addCleanup(go_on.set)
    explain = lambda *_: go_on.wait(60) and "late"
    with mock.patch.object(_Task, "explain", explain):
      self.step(recorder, 0)
      recorder.sync()
      metrics = (self.workdir / "metrics.jsonl").read_text()
      self.assertEqual(json.loads(metrics)["step"], 0)
      self.assertEqual((self.workdir / "samples.jsonl").read_text(), "")
      go_on.set()
      recorder.flush()
    self.assertIn("late", (self.workdir / "samples.jsonl").read_text())

  def test_intervals_of_metrics_and_samples(self):
    recorder = self.make(every_steps=4)
    for step in range(10):
      self.step(recorder, step)
    steps = [record["step"] for record in self.lines("metrics.jsonl")]
    self.assertEqual(steps, [0, 4, 8, 9])  # Always the last.
    steps = [record["step"] for record in self.lines("samples.jsonl")]
    # The last step has samples, too.
    self.assertEqual(steps, [s for s in (0, 2, 4, 6, 8, 9) for _ in range(3)])

  def test_samples(self):
    draw = self.step(self.make(), 2)
    samples = self.lines("samples.jsonl")
    self.assertLen(samples, 3)
    for i, sample in enumerate(samples):
      b, k = divmod(i, 2)
      tokens = draw.completion_tokens[b, k, :3].tolist()
      self.assertEqual(sample["prompt_id"], draw.prompt_ids[b])
      self.assertEqual(sample["tokens"], [str(t) for t in tokens])
      text = "".join(map(str, tokens))  # 0 is no stop token here.
      self.assertEqual(sample["completion"], text)
      self.assertEqual(sample["reason"], f"train {sample['prompt_id']}: {text}")
      self.assertEqual(sample["logprobs"], [-float(t) for t in tokens])
      self.assertEqual(sample["version"], draw.versions[b, k])
      self.assertEqual(
          sample["prompt"],
          "".join(str(1 + j) for j in range(1 + draw.prompt_ids[b] % 5)),
      )

  def test_samples_show_logprobs_of_sampled_tokens(self):
    group = fake_groups.make_group(
        9, [[2, 3, 4]] * 2, inserted=[(0, 1), (1, 1)]
    )
    self.service.buffer = fake_groups.make_buffer(dedupe=False)
    self.service.buffer.insert(group, 3)
    self.step(self.make(), 4)
    for sample in self.lines("samples.jsonl"):
      self.assertEqual(sample["tokens"], ["2", "3", "4"])
      self.assertEqual(sample["logprobs"], [-2.0, None, -4.0])

  def test_writes_status_and_ledger_at_intervals(self):
    recorder = self.make()
    self.lease("s1", busy_s=1.0, completions=3)
    self.step(recorder, 0)
    status = self.read("status.json")
    self.assertEqual((status["phase"], status["step"]), ("train", 1))
    self.assertEqual(status["buffer"], {"size": 6, "capacity": 40})
    self.assertEqual(status["store"], {"generation": 5})
    lease = status["searchers"]["s1"]
    self.assertEqual((lease["unacked"], lease["age_s"]), (1, 0.5))
    self.assertEqual(self.read("ledger.json"), {"closed": False})
    self.step(recorder, 1, busy_s=0.4)  # Too soon.
    self.assertEqual(self.read("status.json")["step"], 1)
    self.step(recorder, 2, busy_s=0.7)
    self.assertEqual(self.read("status.json")["step"], 3)
    left = [status["eta_s"] for status in self.statuses]
    self.assertEqual((left[0], round(left[1], 3)), (None, 3.85))

  def test_counts_completions_without_reward(self):
    recorder = self.make()
    totals = {"completions": 9, "failures": {"deadline": 2}}
    totals |= {"sums": {}, "counts": {}}
    self.lease("a", busy_s=1.0, completions=9, rewards=totals)
    self.step(recorder, 0)
    status = self.read("status.json")
    self.assertEqual(status["reward_failures"], {"deadline": 2})
    (record,) = self.lines("metrics.jsonl")
    self.assertEqual(record["reward/failed_deadline"], 2)
    self.assertNotIn("reward/failure_share", record)  # No group came.
    self.failures.add([0.5, 0.25])
    self.step(recorder, 1, busy_s=2.0)
    self.assertEqual(
        self.lines("metrics.jsonl")[1]["reward/failure_share"], 0.375
    )
    status = self.read("status.json")
    self.assertEqual(status["failure_share"], {"first": 0.375, "newest": 0.375})
    # The last lease of a searcher that ended counts too.
    totals = {"completions": 18, "failures": {"deadline": 5}}
    totals |= {"sums": {}, "counts": {}}
    self.lease("a", busy_s=1.0, completions=18, rewards=totals)
    self.leases["a"]["alive"] = False
    recorder.phase("finish")
    self.assertEqual(self.read("status.json")["searchers"], {})
    self.assertEqual(self.finish(recorder)["reward_failures"], {"deadline": 5})

  def test_counts_completions_of_mixed_versions(self):
    recorder = self.make()
    self.lease("a", busy_s=1.0, completions=8, mixed_completions=8)
    self.step(recorder, 0)  # Before the loop.
    self.lease("a", busy_s=1.0, completions=18, mixed_completions=10)
    self.lease("b", busy_s=1.0, completions=6, mixed_completions=2)
    self.step(recorder, 1)
    first, second = self.lines("metrics.jsonl")
    self.assertNotIn("sampler/mixed_version_share", first)
    self.assertEqual(second["sampler/mixed_version_share"], 0.25)
    again = self.make()
    again.set_state(json.loads(json.dumps(recorder.get_state())))
    self.assertEqual(self.finish(again)["mixed_version_share"], 0.25)

  def test_damage_is_reported_at_start_and_in_result(self):
    for name in ("metrics.jsonl", "samples.jsonl"):
      path = self.workdir / name
      # The file has a line more than earlier starts explain.
      path.write_text('{"step": 0}\n' + 3 * "\0garbage\n" + '{"step": 1}\n')
    recorder = self.make()
    events = [e for e in self.lines("events.jsonl") if e["kind"] == "damaged"]
    self.assertLen(events, 2)
    self.assertRegex(events[0]["message"], "metrics.jsonl: 3 lines are damaged")
    result = self.finish(recorder)
    self.assertEqual(result["damage"], {"other file": 2})
    self.assertEqual(result["lost"], {"journal": 4})

  def test_thread_error_is_raised(self):
    recorder = self.make()
    with mock.patch.object(
        metrics_lib.MetricsWriter, "write", side_effect=KeyError("x")
    ):
      self.step(recorder, 0)
      self.assertRaises(KeyError, recorder.flush)
    self.assertRaises(KeyError, self.step, recorder, 1)
    self.assertRaises(KeyError, recorder.close)

  def test_full_disk_is_reported_once(self):
    recorder = self.make()
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        # First, since a thread writes the status.
        mock.patch.object(recorder, "event", wraps=recorder.event) as event,
        mock.patch.object(jsonl.LineWriter, "write", side_effect=full),
        mock.patch.object(jsonl, "atomic_write_json", side_effect=full),
        self.assertLogs(level="ERROR"),  # The event is logged.
    ):
      for step in range(4):
        self.step(recorder, step, busy_s=2.0)
      recorder.evaluation("before", 0, dict(RESULT))
      recorder.flush()
    told = [call.args[1].split()[0] for call in event.call_args_list]
    self.assertCountEqual(told, ["metrics", "samples", "state", "eval.json"])
    self.step(recorder, 4, busy_s=2.0)
    self.assertEqual([r["step"] for r in self.lines("metrics.jsonl")], [4])
    self.assertIn("No space left", self.statuses[-1]["last_error"])
    # Results are still written.
    self.finish(recorder)
    self.assertEqual(self.read("eval.json")["before"]["pass_at_1"], 0.4)

  def test_status_has_activity_of_trainer(self):
    recorder = self.make()
    self.step(recorder, 0)
    self.lease("a", busy_s=1.0, completions=3, block_age_s=7.0)
    with recorder.span("step"):
      with recorder.span("publish", lane="publish"):
        self.now += 20.0
        # A thread writes it: the main one may hang.
        deadline = time.time() + 20.0
        while self.statuses[-1]["doing"] != "step":
          self.assertLess(time.time(), deadline)
          time.sleep(0.01)
    self.assertEqual(self.statuses[-1]["step_age_s"], 20.0)
    self.assertEqual(self.statuses[-1]["searchers"]["a"]["block_age_s"], 7.0)

  def test_records_events(self):
    recorder = self.make()
    recorder.event("guard", "entropy is low")
    (event,) = self.lines("events.jsonl")
    self.assertEqual(
        (event["kind"], event["role"], event["message"]),
        ("guard", "trainer", "entropy is low"),
    )
    recorder.phase("train")
    self.assertEqual(self.read("status.json")["last_error"], "entropy is low")
    recorder.event("profile", "steps 3 to 5 are in a folder")
    recorder.phase("train")
    self.assertEqual(self.read("status.json")["last_error"], "entropy is low")

  def test_records_evaluations(self):
    recorder = self.make()
    self.assertFalse(recorder.has_result("before"))
    recorder.evaluation("before", 0, dict(RESULT))
    recorder.evaluation("", 6, dict(RESULT, pass_at_1=0.5))
    recorder.evaluation("", 3, dict(RESULT))
    recorder.evaluation("", 6, dict(RESULT, pass_at_1=0.6))
    results = self.read("eval.json")
    self.assertEqual(results["before"]["samples"], [{"text": "2"}])
    self.assertEqual(
        [(r["step"], r["pass_at_1"]) for r in results["history"]],
        [(0, 0.4), (3, 0.4), (6, 0.6)],
    )
    self.assertNotIn("samples", results["history"][0])
    # The evaluation is at the step that made the params.
    last = self.lines("metrics.jsonl")[-1]
    self.assertEqual((last["step"], last["eval/pass_at_1"]), (5, 0.6))
    self.assertNotIn("eval/step", last)
    status = self.read("status.json")
    self.assertEqual(status["pass_at_1"], 0.6)
    self.assertEqual(status["held_out"], {"metric": "pass_at_1", "value": 0.6})
    recorder.evaluation("", 9, dict(RESULT, pass_at_1=0.0, mean_reward=0.7))
    held_out = {"metric": "mean_reward", "value": 0.7}
    self.assertEqual(self.read("status.json")["held_out"], held_out)
    again = self.make()
    self.assertEqual([r["step"] for r in again.evaluations(6)], [0, 3, 6])
    self.assertEqual([r["step"] for r in again.evaluations(5)], [0, 3])
    self.assertTrue(again.has_result("before"))
    self.assertTrue(again.has_result("before", 0))
    self.assertFalse(again.has_result("before", 1))
    self.assertFalse(again.has_result("after"))

  def finish(self, recorder, step=10):
    for name in ("before", "after"):
      recorder.evaluation(name, step, dict(RESULT))
    recorder.finish(step, LEDGER, "guard kl")
    return self.read("result.json")

  def test_measures_overlap(self):
    recorder = self.make()
    self.lease("a", busy_s=50.0, completions=100)
    self.step(recorder, 0, busy_s=30.0)  # Compiles: not timed.
    self.lease("a", busy_s=56.0, completions=110)
    self.lease("b", busy_s=4.0, completions=6)
    self.step(recorder, 1, busy_s=3.0, wait_s=1.0)
    self.step(recorder, 2, busy_s=3.0, wait_s=3.0)
    recorder.train_ended()
    self.lease("b", busy_s=9.0, completions=60)
    self.now += 100.0
    result = self.finish(recorder)
    self.assertAlmostEqual(result["train_wall_s"], 10.0)
    self.assertAlmostEqual(result["train_busy_s"], 6.0)
    self.assertAlmostEqual(result["generate_busy_s"], 5.0)  # Sum of two.
    self.assertAlmostEqual(result["trainer_busy_share"], 0.6)
    self.assertAlmostEqual(result["searchers_busy_share"], 0.5)
    self.assertAlmostEqual(result["overlap_of_ideal"], 0.6)
    self.assertAlmostEqual(result["completions_per_s"], 1.6)
    self.assertEqual(result["trained_completions"], 12)
    self.assertEqual(result["completions"], 48)
    self.assertEqual(result["stopped_by"], "guard kl")
    self.assertTrue(result["ledger_closed"])
    self.assertEqual(result["after"]["pass_at_1"], 0.4)
    self.assertNotIn("samples", result["before"])
    self.assertEqual(self.read("ledger.json"), LEDGER)
    self.assertEqual(self.read("status.json")["phase"], "done")

  def test_background_work_keeps_one_core_busy(self):
    cores = mock.patch.object(
        recorder_lib.metrics_lib.processes, "available_cores", lambda: [0]
    )
    with cores:
      recorder = self.make()
    self.step(recorder, 0)
    with recorder.span("publish", lane="publish"):
      self.step(recorder, 1, busy_s=1.0, wait_s=3.0)
    self.step(recorder, 2, wait_s=4.0)
    self.assertAlmostEqual(recorder.get_state()["train_s"], 4.0)

  def test_first_evaluation_is_not_timed(self):
    recorder = self.make()
    recorder.evaluation("before", 0, dict(RESULT))
    self.step(recorder, 0, busy_s=30.0)
    self.step(recorder, 1, busy_s=2.0)
    self.assertAlmostEqual(recorder.get_state()["wall_s"], 2.0)

  def test_evaluation_during_training_is_timed(self):
    recorder = self.make()
    self.step(recorder, 0)
    with recorder.span("evaluate"):
      self.now += 4.0
    recorder.evaluation("", 1, dict(RESULT))
    self.assertAlmostEqual(recorder.get_state()["train_s"], 4.0)

  def test_resumes_totals(self):
    first = self.make()
    for step in range(3):
      self.step(first, step, busy_s=1.0)
    state = json.loads(json.dumps(first.get_state()))
    second = self.make()
    second.set_state(state)
    self.assertEqual(second.get_state(), state)
    self.lease("a", busy_s=70.0, completions=500)
    self.step(second, 3, busy_s=20.0)
    # Earlier work of a searcher is not counted again.
    self.assertEqual(second.get_state()["generate_s"], state["generate_s"])
    self.step(second, 4, busy_s=1.0)
    result = self.finish(second)
    self.assertAlmostEqual(result["train_wall_s"], 3.0)
    self.assertEqual(result["trained_completions"], 20)
    self.assertEqual(
        result["staleness_mean"], second.get_state()["staleness_sum"] / 20
    )
    self.assertGreater(result["staleness_mean"], 0)


def _record(versions, rewards, step=4):
  buffer = fake_groups.make_buffer(capacity=40)
  for i in range(2):
    buffer.insert(fake_groups.make_group(i, [[2, 0], [3, 0]]), 0)
  draw = dataclasses.replace(
      buffer.sample(2, 2, 0),
      step=step,
      staleness_steps=step - np.array(versions, np.int32),
      rewards=np.array(rewards, np.float32),
  )
  return recorder_lib.step_record(
      {"loss": 0.5},
      draw,
      seconds={"step": 0.25, "wait_fresh": 0.125},
      buffer={"size": 4},
      generated=ledger.Amount(3, 12, 90),
  )


class StepRecordTest(absltest.TestCase):

  def test_step_record_has_all_metrics(self):
    record = _record([[4, 4], [3, 1]], [[1.0, 0.5], [0.0, 0.25]])
    self.assertEqual(
        record["replay/staleness_histogram"], {"0": 2, "1": 1, "3": 1}
    )
    self.assertEqual(record["replay/staleness_steps"], 1.0)
    # A completion of the mean age, 1, still counts as young.
    self.assertEqual(record["replay/reward_young"], 0.5)
    self.assertEqual(record["replay/reward_old"], 0.25)
    self.assertEqual(record["replay/size"], 4)
    self.assertEqual(record["train/loss"], 0.5)
    self.assertEqual(record["time/step_s"], 0.25)
    self.assertEqual(record["time/wait_s"], 0.125)
    self.assertEqual(record["time/draw_s"], 0.0)
    self.assertEqual(record["total/completions"], 12)
    self.assertEqual(record["total/tokens"], 90)

  def test_equally_stale_data_has_no_young_and_old(self):
    record = _record([[2, 2], [2, 2]], [[1.0, 0.5], [0.0, 0.25]])
    self.assertNotIn("replay/reward_young", record)
    self.assertNotIn("replay/reward_old", record)


def _lease(completions, sums, counts=None, **failures):
  judged = completions - sum(failures.values())
  totals = {
      "completions": completions,
      "sums": sums,
      "counts": counts or dict.fromkeys(sums, judged),
      "failures": failures,
  }
  return {"stats": {"rewards": totals}, "totals": {"completions": 0}}


def _sampled(kind, tokens, cost=0.0):
  """Returns a lease with a second for a token, and two for a completion."""
  return {
      "stats": {"kind": kind, "wall_s": tokens, "cost": cost},
      "totals": {"completions": tokens / 2, "tokens": tokens},
  }


class SearcherTotalsTest(absltest.TestCase):

  def update(self, **leases):
    self.totals.update(leases)
    return self.totals.take_rewards()

  def setUp(self):
    super().setUp()
    self.totals = recorder_lib.SearcherTotals()

  def test_means_since_last_call(self):
    result = self.update(a=_lease(4, {"x": 2.0}), b=_lease(6, {"x": 4.0}))
    self.assertEqual(result, {"x": 0.6})
    result = self.update(a=_lease(8, {"x": 2.0}), b=_lease(6, {"x": 4.0}))
    self.assertEqual(result, {"x": 0.0})
    self.assertEqual(self.totals.take_rewards(), {})

  def test_failures_are_not_in_mean(self):
    self.assertEqual(
        self.update(a=_lease(4, {"x": 2.0}, deadline=2, nan=1)),
        {"x": 2.0, "failed_deadline": 2, "failed_nan": 1},
    )

  def test_part_averages_over_completions_with_part(self):
    counts = {"x": 2, "y": 4}
    result = self.update(a=_lease(6, {"x": 1.0, "y": 3.0}, counts))
    self.assertEqual(result, {"x": 0.5, "y": 0.75})
    counts = {"x": 2, "y": 5}
    result = self.update(a=_lease(7, {"x": 1.0, "y": 3.0}, counts))
    self.assertEqual(result, {"y": 0.0})

  def test_counts_failures_of_whole_run(self):
    self.update(a=_lease(4, {}, crash=1))
    # Its successor starts at 0, while the old lease is still there.
    self.update(a=_lease(4, {}, crash=1), b=_lease(2, {}, crash=2))
    self.assertEqual(self.totals.failures, {"crash": 3})
    state = self.totals.get_state()
    self.totals = recorder_lib.SearcherTotals()
    self.totals.set_state(state)
    self.update(c=_lease(2, {}, crash=1))
    self.assertEqual(self.totals.failures, {"crash": 4})
    # Totals of a searcher that outlived the trainer are not new.
    self.update(b=_lease(4, {}, crash=3))
    self.assertEqual(self.totals.failures, {"crash": 5})

  def test_sums_by_kind_of_searcher_over_starts_of_trainer(self):
    first = dict(a=_sampled("int8", 8), b=_sampled("vllm", 2, cost=1.0))
    self.update(**first)
    state = self.totals.get_state()
    self.totals = recorder_lib.SearcherTotals()
    self.totals.set_state(json.loads(json.dumps(state)))
    self.update(**first, c=_sampled("int8", 4))
    amounts = {"completions": 6, "tokens": 12, "wall_s": 12, "cost": 0}
    self.assertEqual(self.totals.by_kind["int8"], amounts)
    amounts = {"completions": 1, "tokens": 2, "wall_s": 2, "cost": 1}
    self.assertEqual(self.totals.by_kind["vllm"], amounts)
