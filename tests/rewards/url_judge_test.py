# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges over HTTP: their failures, repetitions, costs and stored scores."""

import json
import math
import os
import pathlib
import re
import threading
import time
from unittest import mock

from absl.testing import parameterized
import pytest

from tba_jax.config import validate
from tba_jax.evaluation import reward_judge
from tba_jax.rewards import judges
from tba_jax.rewards import url_judge
from tba_jax.system import jsonl
from tba_jax.tasks import task_table
from tests.support import base_config
from tests.support import fake_judge

_VARIABLE = "TEST_JUDGE_KEY"


class UrlJudgeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    rows = self.folder / "rows.jsonl"
    rows.write_text(
        '{"prompt": "p0", "answer": "4", "hint": "h0"}\n'
        '{"prompt": "p1", "answer": "5", "hint": "h1"}\n'
        '{"prompt": "p2", "answer": "6", "hint": "h2"}\n'
    )
    self.server = fake_judge.Server(lambda text: fake_judge.chat("7"))
    self.addCleanup(self.server.close)
    self.config = base_config.make(
        reward__url=self.server.url,
        reward__judge_model="m",
        reward__rubric="{prompt}|{completion}|{answer}",
        reward__deadline_s=5.0,
    )
    self.config.task = {
        "name": "custom", "train": str(rows), "held_out": 1, "rewards": "judge",
        "correct_threshold": 0.5,
    }  # fmt: skip
    self.events = []
    self.enter_context(mock.patch.object(url_judge, "FIRST_WAIT_S", 0.01))

  def make(self, workdir="", **reward):
    self.config.reward.update(reward)
    made = reward_judge.make_task_judge(
        self.config,
        workdir,
        task_table.make_task(self.config.task),
        lambda kind, text: self.events.append((kind, text)),
    )
    self.addCleanup(made.close)
    return made

  def ask(self, judge, *texts, index=0):
    return judge.judge(
        [judges.JudgeRequest("train", index, text) for text in texts]
    )

  def test_score_is_scaled_with_tokens_as_parts(self):
    judge = self.make()
    (judged,) = self.ask(judge, "<think>why</think>yes")
    self.assertEqual(
        (judged.reward, judged.key), (0.7, "<think>why</think>yes")
    )
    self.assertEqual(
        judged.parts,
        {"judge": 0.7, "judge_prompt_tokens": 30,
         "judge_completion_tokens": 2},
    )  # fmt: skip
    (body,) = self.server.bodies
    self.assertRegex(body["messages"][0]["content"], r"^p\d\|yes\|\d$")
    self.assertEqual(body["model"], "m")
    self.assertEqual(judge.totals()["sums"], judged.parts)

  def test_chat_prompt_is_shown_by_role(self):
    self.config.task.prompt = '[{"role": "user", "content": "Say {hint}"}]'
    self.ask(self.make(rubric="{prompt}|{completion}"), "yes")
    text = self.server.bodies[0]["messages"][0]["content"]
    self.assertRegex(text, r"^user: Say h\d\|yes$")

  def test_requests_have_further_fields(self):
    self.ask(self.make(request='{"temperature": 0}'), "yes")
    self.assertEqual(self.server.bodies[0]["temperature"], 0)

  def test_fields_in_completions_are_not_filled_in(self):
    self.ask(self.make(), "{answer} {prompt}")
    text = self.server.bodies[0]["messages"][0]["content"]
    self.assertIn("|{answer} {prompt}|", text)

  @parameterized.parameters(
      ("7", 0.7), ("**8**", 0.8), ("Score: 7/10.", 0.7), ("7 out of 10", 0.7),
      ("<think>3</think>9", 0.9), ("7.5", 0.75), ("0", 0.0),
      *((text, None) for text in
        ("", "no", "11", "-1", "7 or 8", "1e1", "7.5x", "8/100", "nan")),
  )  # fmt: skip
  def test_only_unambiguous_number_in_range_is_score(self, text, score):
    self.assertEqual(url_judge.Endpoint(self.config.reward).parse(text), score)

  def test_number_cut_off_by_length_is_no_score(self):
    for text in ("I give a 1", "Good"):
      answer = json.loads(fake_judge.chat(text)[2])
      answer["choices"][0]["finish_reason"] = "length"
      self.server.answer = lambda _, a=answer: (200, {}, json.dumps(a).encode())
      (judged,) = self.ask(self.make(retries=0), text)
      self.assertEqual(judged.failure, "answer")

  def test_one_failing_request_is_no_outage(self):
    def answer(text):
      if "|bad|" in text:
        return fake_judge.failure(504)
      time.sleep(0.3)
      return fake_judge.chat("7")

    self.server.answer = answer
    judge = self.make(retries=0, concurrency=2)
    judged = self.ask(judge, "bad", *map(str, range(4)))
    self.assertEqual([j.failure for j in judged], ["unreachable", *[""] * 4])

  def test_pattern_finds_last_score(self):
    self.config.reward.score_pattern = r"Score: (\S+)"
    self.config.reward.score_range = "-1:3"
    parse = url_judge.Endpoint(self.config.reward).parse
    self.assertEqual(parse("1. Score: 0\n2. Score: 1"), 0.5)
    for text in ("2", "Score: good", "Score: 4", "Score: nan"):
      self.assertIsNone(parse(text))

  @parameterized.parameters("process", "pool")
  def test_adds_to_weighted_rewards(self, backend):
    self.config.reward.backend = backend
    self.config.task.rewards = "exact * 2, judge * 0.5"
    task = task_table.make_task(self.config.task)
    right = task.reference_completion("train", 0, None)
    judged = self.ask(self.make(), right, "wrong")
    self.assertEqual([j.reward for j in judged], [2.35, 0.35])
    self.assertEqual([j.key is None for j in judged], [False, True])
    self.assertEqual([j.parts["exact"] for j in judged], [1, 0])

  def test_failed_other_reward_asks_no_judge(self):
    script = self.folder / "bad.py"
    script.write_text("def bad(prompt, completion, row):\n  return None\n")
    self.config.task.rewards = f"{script}:bad, judge"
    judge = self.make()
    (judged,) = self.ask(judge, "a")
    self.assertEqual(judged.failure, "nan")
    self.assertEqual(judge.totals()["failures"], {"nan": 1})
    self.assertEmpty(self.server.bodies)

  @parameterized.parameters(
      (fake_judge.chat("good"), "answer", 3),
      (fake_judge.chat(None), "answer", 3),
      ((200, {}, b"<html>"), "answer", 3),
      ((200, {}, b'{"choices": []}'), "answer", 3),
      (fake_judge.failure(500, "oh"), "server", 3),
      (fake_judge.failure(400, "too long"), "refused", 1),
      (fake_judge.failure(302, Location="/elsewhere"), "refused", 1),
  )
  def test_failure_costs_one_completion(self, response, cause, attempts):
    self.server.answer = lambda text: (
        response if "bad" in text else fake_judge.chat("7")
    )
    judge = self.make(retries=2)
    judged = self.ask(judge, "good", "bad")
    self.assertEqual([j.failure for j in judged], ["", cause])
    self.assertTrue(math.isnan(judged[1].reward))
    self.assertLen(self.server.bodies, 1 + attempts)
    self.assertEqual(judge.totals()["failures"], {cause: 1})
    self.assertIn("reward_failed", dict(self.events))

  def test_hanging_judge_costs_deadline_and_one_completion(self):
    end = threading.Event()
    self.addCleanup(end.set)

    def hang(text):
      if "bad" in text:
        end.wait(60)
      return fake_judge.chat("7")

    self.server.answer = hang
    judge = self.make(retries=0, deadline_s=0.5)
    judged = self.ask(judge, "good", "bad")
    self.assertEqual([j.failure for j in judged], ["", "deadline"])

  def test_overload_is_waited_out_beyond_retries(self):
    left = [fake_judge.failure(429), fake_judge.failure(503), None] * 2
    self.server.answer = lambda text: (
        left.pop() if left else fake_judge.chat("7")
    )
    (judged,) = self.ask(self.make(retries=0), "a")
    self.assertEqual(judged.reward, 0.7)
    self.assertLen(self.server.bodies, 7)

  def test_waits_as_long_as_server_asks(self):
    left = [fake_judge.failure(429, Retry_After="1")]
    self.server.answer = lambda text: (
        left.pop() if left else fake_judge.chat("7")
    )
    self.ask(self.make(), "a")
    first, second = self.server.times
    self.assertGreaterEqual(second - first, 1.0)

  @parameterized.parameters(
      (fake_judge.failure(503, "asleep"), "503: asleep"),
      (fake_judge.failure(500, "broken"), "500: broken"),
      (fake_judge.failure(401, "revoked"), "401: revoked"),
      (None, "does not answer"),
      (fake_judge.chat("no idea"), "no idea"),
  )
  def test_long_outage_ends_run(self, response, why):
    judge = self.make(outage_s=0.2)
    self.server.answer = lambda text: response
    with self.assertRaisesRegex(
        url_judge.JudgeDownError,
        f"config.reward.url = '{self.server.url}'.*{why}",
    ):
      for n in range(100):
        self.ask(judge, f"a{n}", f"b{n}")

  def test_idle_time_is_no_outage(self):
    judge = self.make(retries=0, outage_s=2.0)
    self.server.answer = lambda text: fake_judge.failure(500)
    clock = [0.0]
    with mock.patch.object(url_judge.time, "monotonic", lambda: clock[0]):
      self.ask(judge, "a")
      clock[0] += 100
      (judged,) = self.ask(judge, "b")
    self.assertEqual(judged.failure, "server")

  def test_one_score_ends_outage(self):
    judge = self.make(retries=0, outage_s=2.0)
    clock = [0.0]

    def answer(text):
      clock[0] += 1.5
      return fake_judge.chat("7" if "good" in text else "?")

    self.server.answer = answer
    with mock.patch.object(url_judge.time, "monotonic", lambda: clock[0]):
      for n in range(3):
        self.ask(judge, f"bad {n}")
        self.ask(judge, f"good {n}")

  def test_requests_under_way_are_limited(self):
    end = threading.Barrier(3, timeout=20)

    def wait(text):
      end.wait()
      return fake_judge.chat("7")

    self.server.answer = wait
    self.ask(self.make(concurrency=3), *map(str, range(9)))
    self.assertEqual(self.server.most, 3)

  def test_equal_completions_cost_once_even_after_restart(self):
    judged = self.ask(self.make(self.folder), "a", "a", "b")
    tokens = [j.parts["judge_prompt_tokens"] for j in judged]
    self.assertEqual(tokens, [30, 0, 30])
    # A killed writer leaves a torn line.
    with (self.folder / url_judge.FILE_NAME).open("a") as file:
      file.write('{"request": "')
    judge = self.make(self.folder)
    judged = self.ask(judge, "b", "a", "c")
    self.assertEqual([j.reward for j in judged], [0.7] * 3)
    self.assertLen(self.server.bodies, 3)
    records = jsonl.read_jsonl(self.folder / url_judge.FILE_NAME)
    self.assertEqual([r["answer"] for r in records], ["7"] * 3)
    # Another rubric asks again.
    self.ask(self.make(self.folder, rubric="{completion}"), "a")
    self.assertLen(self.server.bodies, 4)

  def test_failures_are_stored_but_not_reused(self):
    self.server.answer = lambda text: fake_judge.chat("?")
    self.ask(self.make(self.folder, retries=0), "a")
    (record,) = jsonl.read_jsonl(self.folder / url_judge.FILE_NAME)
    self.assertEqual((record["score"], record["tokens"]), (None, [30, 2]))
    self.server.answer = lambda text: fake_judge.chat("7")
    (judged,) = self.ask(self.make(self.folder), "a")
    self.assertEqual(judged.reward, 0.7)

  def test_key_is_sent_and_shown_nowhere(self):
    self.server.key = fake_judge.KEY
    self.config.reward.key_variable = _VARIABLE
    with mock.patch.dict(os.environ, {_VARIABLE: fake_judge.KEY + "\n"}):
      judge = self.make(self.folder)
      # The server may repeat the key.
      for text, failure in (("7", ""), ("?", "answer")):
        answer = fake_judge.chat(f"{fake_judge.KEY} {text}")
        self.server.answer = lambda asked, answer=answer: answer
        self.assertEqual(self.ask(judge, text)[0].failure, failure)
      self.server.key = "another"
      self.assertEqual(self.ask(judge, "b")[0].failure, "refused")
    self.assertIn("***", str(self.events))
    self.assertNotIn(fake_judge.KEY, str(self.events))
    for path in self.folder.iterdir():
      self.assertNotIn(fake_judge.KEY, path.read_text())

  def test_row_without_field_of_rubric_fails(self):
    judge = self.make(rubric="{hint} {completion} {nothing}")
    (judged,) = self.ask(judge, "a")
    self.assertEqual(judged.failure, "error")
    self.assertRegex(str(self.events), r"rows.jsonl:\d: has no field")

  def probe(self, **reward):
    self.config.reward.update(reward)
    task = task_table.make_task(self.config.task)
    return url_judge.probe(self.config.reward, task)

  def test_probe_shows_answer(self):
    self.assertRegex(
        self.probe(), rf"m at {self.server.url} answers 7, .* 0.7 .*32 tokens"
    )

  @parameterized.parameters(
      ({"url": "http://127.0.0.1:9/v1"}, "config.reward.url = .*refused"),
      ({"rubric": "{no} {completion}"}, "config.reward.rubric: .*'no'"),
      (
          {"deadline_s": 0.3, "rubric": "slow {completion}"},
          "deadline_s = 0.3: ",
      ),
      (
          {"rubric": "404 {completion}"},
          "reward.url = .* or .*judge_model = 'm': .*404",
      ),
      ({"rubric": "400 {completion}"}, "judge_model = .* or .*request = .*400"),
      ({"rubric": "401 {completion}"}, "config.reward.key_variable = .*401"),
      ({"rubric": "? {completion}"}, "reward.rubric = .*score_range.*'mm'"),
  )
  def test_probe_names_wrong_setting(self, reward, message):
    end = threading.Event()
    self.addCleanup(end.set)

    def answer(text):
      if text.startswith("slow"):
        end.wait(60)
      if re.match(r"\d", text):
        return fake_judge.failure(int(text[:3]))
      return fake_judge.chat("mm")

    self.server.answer = answer
    with mock.patch.object(url_judge.time, "sleep"):
      with self.assertRaisesRegex(ValueError, message):
        self.probe(**reward)

  @parameterized.parameters(
      ({"url": "http://me:key@host/v1"}, "config.reward.url"),
      ({"url": "http://h/v1/chat/completions"}, "/chat/completions"),
      ({"url": ""}, "config.reward.url = '': must be the URL"),
      ({"judge_model": ""}, "config.reward.judge_model"),
      ({"rubric": "{prompt}"}, r"config.reward.rubric.*\{completion\}"),
      ({"score_range": "3:1"}, "config.reward.score_range"),
      ({"score_pattern": "(a)(b)"}, "config.reward.score_pattern"),
      ({"request": '{"model": "x"}'}, "config.reward.request"),
      ({"key_variable": "NOT_SET_HERE"}, "config.reward.key_variable"),
      ({"backend": "model"}, "config.reward.backend"),
  )
  def test_wrong_settings_are_refused(self, reward, message):
    self.config.reward.update(reward)
    with self.assertRaisesRegex(ValueError, message):
      validate.validate(self.config)
    self.assertEmpty(self.server.bodies)

  def test_key_of_two_lines_is_refused_unseen(self):
    self.config.reward.key_variable = _VARIABLE
    with mock.patch.dict(os.environ, {_VARIABLE: "sk-a\nsk-b"}):
      with self.assertRaisesRegex(ValueError, "key_variable") as caught:
        validate.validate(self.config)
      self.assertNotIn("sk-", str(caught.exception))
      (judged,) = self.ask(self.make(retries=0), "a")
    self.assertEqual(judged.failure, "refused")
    self.assertNotIn("sk-", str(self.events))

  def test_url_requires_judge_in_rewards(self):
    self.config.task.rewards = "exact"
    with self.assertRaisesRegex(ValueError, "config.reward.url.*'judge'"):
      validate.validate(self.config)

  @pytest.mark.slow
  def test_validation_asks_judge_once(self):
    validate.validate(self.config)
    self.assertLen(self.server.bodies, 1)
    self.server.answer = lambda text: fake_judge.chat("fine")
    self.config.reward.judge_model = "other"
    with self.assertRaisesRegex(ValueError, "answered 'fine'"):
      validate.validate(self.config)
