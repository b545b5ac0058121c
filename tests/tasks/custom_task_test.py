# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of a user's own task: rows, weighted rewards, commands."""

import json
import os
import pathlib
import sys
from unittest import mock

from absl.testing import parameterized
import ml_collections
import numpy as np

from tba_jax.config import validate
from tba_jax.rewards import judges
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tests.support import base_config

_HERE = pathlib.Path(__file__).parent
_ROWS = [
    {"prompt": "sky?", "answer": "blue", "color": "blue"},
    {"prompt": "sea?", "answer": "12 shades", "color": "green"},
]


class CustomTaskTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.save("train", *_ROWS)
    self.save("test", {"prompt": "sun?", "answer": "1,000", "color": "red"})

  def save(self, name, *rows):
    path = self.folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

  def fields(self, **changes):
    files = {n: str(self.folder / f"{n}.jsonl") for n in ("train", "test")}
    return {"name": "custom", **files, **changes}

  def make(self, **changes) -> base.Task:
    return task_table.make_task(
        ml_collections.ConfigDict(self.fields(**changes))
    )

  @parameterized.parameters(
      ("exact", 0, " blue\n", 1.0),
      ("exact", 0, "light blue", 0.0),
      ("contains", 0, "light blue", 1.0),
      ("contains", 0, "red", 0.0),
      ("number", 1, "I say 12.", 1.0),
      ("number", 1, "I say 12 or 13.", 0.0),
  )
  def test_built_in_rewards(self, name, index, completion, reward):
    task = self.make(rewards=name)
    judged = task.judge("train", index, completion)
    self.assertEqual(judged.reward, reward)
    self.assertEqual(judged.key is not None, reward == 1.0)
    self.assertEqual(judged.parts, {name: reward})

  def test_reward_of_none_leaves_others(self):
    (self.folder / "some.py").write_text(
        "def long(completions, log_metric, **kwargs):\n"
        "  log_metric('n', 3)\n"
        "  return [1 if len(c) > 3 else None for c in completions]\n"
        "def one(prompt, completion, row): return None\n"
    )
    file = self.folder / "some.py"
    task = self.make(rewards=f"contains, {file}:long * 0.5")
    first, second = task.judge_group("train", 0, ["light blue", "red"])
    self.assertEqual(first.reward, 1.5)
    self.assertEqual(first.parts, {"contains": 1.0, "long": 1.0, "n": 3.0})
    self.assertEqual(second.reward, 0.0)
    self.assertEqual(second.parts, {"contains": 0.0, "n": 3.0})
    (alone,) = self.make(rewards=f"{file}:long").judge_group("train", 0, ["re"])
    self.assertIn("every reward returned None", str(alone))
    with self.assertRaisesRegex(base.RewardError, "one returned None: must be"):
      self.make(rewards=f"{file}:one").judge("train", 0, "red")

  def test_row_without_answer_is_in_no_completion(self):
    self.save("train", {"prompt": "sky?"}, {"prompt": "sea?", "answer": " "})
    task = self.make(rewards="contains", answer_kind="none")
    for index in range(2):
      self.assertEqual(task.reward("train", index, "anything"), 0.0)

  def test_numbers_of_columns_with_gaps_are_whole_and_gaps_no_answers(self):
    nan = float("nan")
    answers = [12.0, nan, None, 1.5, 7, -0.0, float("inf"), 1e16]
    self.save(
        "train",
        *(
            {"prompt": i, "answer": a, "unit": nan if i == 4 else 2.0}
            for i, a in enumerate(answers)
        ),
    )
    self.save("test", {"prompt": 9, "answer": 9, "unit": 9})
    task = self.make(prompt="{prompt} {unit}")
    count = task.num_prompts("train")
    examples = [task.example("train", i) for i in range(count)]
    self.assertEqual(
        [(e.prompt, e.answer) for e in examples],
        [
            ("0 2", "12"),
            ("3 2", "1.5"),
            ("5 2", "0"),
            ("6 2", "inf"),
            ("7 2", "10000000000000000"),
        ],
    )
    self.assertEqual(task.report.count("train", "no_answer"), 2)
    self.assertEqual(task.report.count("train", "no_prompt"), 1)
    self.assertEqual(task.completion_of(examples[0]), "12")
    self.assertEqual(task.reward("train", 0, "12"), 1.0)

  @parameterized.parameters(
      ("exact", 0, "blue ", ""),
      ("exact", 0, "red", 'wanted "blue"'),
      ("contains", 0, "red", 'is without "blue"'),
      ("number", 1, "I say 13.", "read 13, wanted 12"),
      (
          "number, contains * 2, tests.tasks.own_rewards:short",
          1,
          "many",
          'no number found; is without "12 shades"',
      ),
  )
  def test_reasons_of_built_in_rewards(self, rewards, index, text, reason):
    task = self.make(rewards=rewards)
    self.assertEqual(task.explain("train", index, text), reason)

  def test_asks_reason_of_user_s(self):
    task = self.make(reason="tests.tasks.own_rewards:why")
    self.assertEqual(task.explain("train", 0, "red"), "not blue: red")
    self.assertEqual(task.explain("train", 0, "blue"), "")

  def test_reward_names_metrics(self):
    name = "tests.tasks.own_rewards:short_and_why"
    task = self.make(rewards=f"exact, {name}*0.5")
    judged = task.judge("train", 0, "blue")
    self.assertEqual(
        judged.parts, {"exact": 1.0, "short_and_why": 0.2, "length": 4.0}
    )
    self.assertAlmostEqual(judged.reward, 1.1)
    self.assertNotIn("length", task.part_weights)
    # Two of one name would be one metric.
    path = self.create_tempfile(
        "more.py", "def f(p, c, row): return {'reward': 0, 'length': 1}\n"
    ).full_path
    task = self.make(rewards=f"{path}:f, {name}")
    with self.assertRaisesRegex(base.RewardError, "two rewards .* 'length'"):
      task.judge("train", 0, "blue")

  def test_weighs_several_rewards(self):
    task = self.make(
        rewards=(
            f"exact * 2, {_HERE}/own_rewards.py:short*0.5,"
            "tests.tasks.own_rewards:says_color * -1"
        ),
        correct_threshold=1.5,
    )
    judged = task.judge("train", 0, "blue")
    self.assertEqual(
        judged.parts, {"exact": 1.0, "short": 0.2, "says_color": 0.0}
    )
    self.assertAlmostEqual(judged.reward, 2.1)
    self.assertEqual(judged.key, "blue")
    judged = task.judge("train", 0, "sky? blue")
    self.assertAlmostEqual(judged.reward, 0.05 - 1.0)
    self.assertIsNone(judged.key)

  def test_templates_and_kinds_of_answers(self):
    self.save(
        "train",
        {"q": "a", "n": 1},
        {"q": "b", "n": None},
        {"q": "c", "n": "none"},
        {"n": 4},
    )
    self.save("test", {"q": "z", "n": 2})
    task = self.make(
        prompt="Q: {q}\nA:",
        completion=" {n}!",
        answer="n",
        answer_kind="number",
        rewards="number",
    )
    self.assertEqual(task.prompt("train", 0), "Q: a\nA:")
    self.assertEqual(task.reference_completion("train", 0, None), " 1!")
    self.assertEqual(
        task.report.places("train", "no_answer"), ["train.jsonl:2"]
    )
    self.assertEqual(
        task.report.places("train", "no_number"), ["train.jsonl:3"]
    )
    self.assertEqual(
        task.report.places("train", "no_prompt"), ["train.jsonl:4"]
    )
    task = self.make(
        prompt="{q}", completion="", answer_kind="none", answer="n"
    )
    self.assertEqual(task.num_prompts("train"), 3)

  def test_fields_of_objects(self):
    row = lambda n: {"q": {"text": f"{n}?"}, "model": {"truth": n}}
    self.save("train", row(1), row(2))
    self.save("test", row(3))
    fields = dict(prompt="{q.text}", completion="{model.truth}")
    task = self.make(answer="model.truth", **fields)
    self.assertEqual(task.prompt("train", 1), "2?")
    self.assertEqual(base.reference_text(task, "train", 1), "2")
    self.assertEqual(task.reward("train", 1, "2"), 1)
    with self.assertRaisesRegex(
        ValueError,
        "train.jsonl:1: field 'model' is an object.*such as model.truth",
    ):
      self.make(answer="model", **fields)
    task = self.make(answer="model", answer_kind="none", **fields)
    self.assertEqual(task.example("train", 0).answer, "")

  @parameterized.parameters("number", "answer")
  def test_large_numbers_are_exact(self, rule):
    self.save("train", {"prompt": "a", "answer": 2**53 + 1})
    self.save("test", {"prompt": "b", "answer": 1})
    task = self.make(rewards=rule)
    self.assertEqual(task.reward("train", 0, f"It is {2**53 + 1}."), 1)
    self.assertEqual(task.reward("train", 0, f"It is {2**53}."), 0)
    self.assertEqual(
        task.explain("train", 0, str(2**53)),
        "read 9007199254740992, wanted 9007199254740993",
    )

  def test_prompts_of_messages(self):
    turn = lambda role, text: {"role": role, "content": text}
    ask = json.dumps([turn("system", "Be {how}."), turn("user", "{q}")])
    self.save("train", {"q": "Why?", "how": "kind", "answer": "So."}, {"q": 1})
    self.save("test", {"q": "Who?", "how": "brief", "answer": "I."})
    task = self.make(prompt=ask)
    expected = [turn("system", "Be kind."), turn("user", "Why?")]
    self.assertEqual(task.prompt("train", 0), expected)
    self.assertEqual(base.reference_text(task, "train", 0), "So.")
    self.assertEqual(task.judge("train", 0, "So.").reward, 1)
    self.assertEqual(task.report.places("train", "no_prompt"),
                     ["train.jsonl:2"])  # fmt: skip
    with self.assertRaisesRegex(ValueError, "config.tokenizer.source='task'"):
      task.tokenizer_words()
    for wrong in ('[{"role": "me", "content": "a"}]', '[{"role": "user"'):
      with self.assertRaisesRegex(ValueError, "config.task.prompt=.*must be"):
        self.make(prompt=wrong)

  def test_rows_with_messages(self):
    turn = lambda role, text: {"role": role, "content": text}
    ask, said, more = (
        turn("user", "a"),
        turn("assistant", "b"),
        turn("user", "c"),
    )
    rows = lambda *chats: [{"prompt": chat} for chat in chats]
    self.save(
        "train", *rows([ask, said], [ask, said, more, said], [said], [ask],
                       [ask, turn("system", "d")], ["a"], [ask, said]),
    )  # fmt: skip
    self.save("test", {"prompt": [more], "answer": "e"})
    task = self.make()
    prompts = [task.prompt("train", i) for i in range(2)]
    self.assertEqual(prompts, [[ask], [ask, said, more]])
    self.assertEqual(base.reference_text(task, "train", 0), "b")
    self.assertEqual(base.reference_text(task, "held_out", 0), "e")
    places = lambda reason: task.report.places("train", reason)
    at = lambda *lines: [f"train.jsonl:{line}" for line in lines]
    self.assertEqual(places("no_user"), at(3, 5))
    self.assertEqual(places("no_text"), at(6))
    self.assertEqual(places("no_answer"), at(4))
    self.assertEqual(places("duplicate"), at(7))

  def test_file_of_rewards_may_hold_dataclasses(self):
    path = self.folder / "json.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses, json\n"
        "@dataclasses.dataclass\n"
        "class Found:\n"
        "  size: int\n"
        "def size(prompt, completion, row):\n"
        "  return Found(len(json.loads(completion))).size\n"
    )
    task = self.make(rewards=f"{path}:size")
    self.assertEqual(task.judge("train", 0, "[1, 2]").reward, 2.0)

  def test_validation_of_source_or_cut(self):
    rows = [{"prompt": f"v{i}", "answer": "1"} for i in range(3)]
    task = self.make(validation=self.save("dev", *rows))
    self.assertEqual(task.num_prompts("validation"), 3)
    task = self.make(validation_prompts=1)
    self.assertEqual([task.num_prompts(s) for s in task.splits], [1, 1, 1])

  @parameterized.parameters(
      (None, 10), (0.25, 25), (0.001, 1), (99, 99), (0, 0)
  )
  def test_rows_without_test_split_hold_part_out(self, held_out, size):
    # Rows of one prompt are held out together, and count once.
    self.save(
        "train",
        *(
            {"prompt": f"number {i // 2}?", "answer": str(i)}
            for i in range(200)
        ),
    )
    make = lambda **more: self.make(test="", held_out=held_out, **more)
    task = make()
    prompts = lambda task, split: {
        task.prompt(split, i) for i in range(task.num_prompts(split))
    }
    train, held = (prompts(task, split) for split in ("train", "held_out"))
    self.assertLen(held, size)
    self.assertLen(train, 100 - size)
    self.assertFalse(train & held)
    self.assertEqual(task.num_prompts("train"), 2 * (100 - size))
    self.assertEqual(task.num_prompts("held_out"), size)
    self.assertEqual(prompts(make(), "held_out"), held)
    if size in (10, 25):
      self.assertNotEqual(prompts(make(split_seed=1), "held_out"), held)
    lines = "\n".join(task.report.lines())
    self.assertEqual("held_out: " in lines, size > 0)
    self.assertEqual("from the 100 of config.task.train" in lines, size > 0)

  def test_held_out_part_has_no_validation_prompts(self):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)]
    self.save("train", *rows)
    task = self.make(test="", held_out=5, validation_prompts=4)
    sizes = [task.num_prompts(s) for s in ("train", "held_out", "validation")]
    self.assertEqual(sizes, [11, 5, 4])
    prompts = [
        task.prompt(split, i)
        for split in task.splits
        for i in range(task.num_prompts(split))
    ]
    self.assertLen(set(prompts), 20)

  def test_most_prompts_held_out_of_many(self):
    rows = ({"prompt": f"{i}?", "answer": str(i)} for i in range(12_000))
    self.save("train", *rows)
    self.assertEqual(self.make(test="").num_prompts("held_out"), 1000)

  def test_command_judges(self):
    script = self.folder / "verify.py"
    script.write_text(
        "import json, sys\n"
        "q = json.load(sys.stdin)\n"
        "if q['completion'] == 'exit': sys.exit('broken')\n"
        "if q['completion'] == 'word': print('well')\n"
        "print('thinking')\n" * 1 + "if q['completion'] != 'word':\n"
        "  print(0.5 * (q['row']['color'] == q['completion']))\n"
    )
    task = self.make(
        rewards="exact", verifier=f"{sys.executable} {script}",
        verifier_weight=4.0,
    )  # fmt: skip
    judge = judges.InProcess(task)
    result = judge.judge(
        [
            judges.JudgeRequest("train", 0, t)
            for t in ("blue", "red", "exit", "word")
        ]
    )
    rewards = [j.reward for j in result]
    np.testing.assert_array_equal(rewards, [3.0, 0.0, np.nan, np.nan])
    self.assertEqual([j.failure for j in result], ["", "", "exit", "nan"])
    self.assertEqual(result[0].parts, {"exact": 1.0, "verifier": 0.5})

  def test_command_has_environment_of_its_worker(self):
    script = self.folder / "verify.py"
    script.write_text(
        "import os\n"
        "print(float(os.environ['MINE']) - ('TBA_JAX_SECRET' in os.environ))\n"
    )
    task = self.make(verifier=f"{sys.executable} {script}")
    mine = {"MINE": "0.5", "TBA_JAX_SECRET": "5e"}
    with mock.patch.dict(os.environ, mine):
      self.assertEqual(task.judge("train", 0, "x").parts["verifier"], 0.5)

  def test_command_requires_pool(self):
    config = base_config.make()
    config.task = ml_collections.ConfigDict(
        self.fields(verifier="echo 1", answer_kind="text")
    )
    config.evaluate.num_prompts = config.evaluate.final_prompts = 1
    with self.assertRaisesRegex(
        ValueError, "config.reward.backend = 'process'"
    ):
      validate.validate(config)
    config.reward.backend = "pool"
    validate.validate(config)

  @parameterized.parameters(
      ({"rewards": ""}, "config.task.rewards=''"),
      ({"rewards": "nice"}, "config.task.rewards='nice'.*FILE.py:FUNCTION"),
      ({"rewards": "exact*much"}, "finite number"),
      ({"rewards": "exact*nan"}, "finite number"),
      ({"rewards": "exact,exact*2"}, "different names"),
      ({"rewards": "nowhere.py:f"}, "nowhere.py"),
      ({"rewards": "tests.tasks.own_rewards:nope"}, "nope"),
      ({"rewards": "tests.tasks.own_rewards:NOT_A_FUNCTION"}, "not a function"),
      ({"verifier": "'"}, "config.task.verifier"),
      (
          {"rewards": "tests.tasks.own_rewards:verifier", "verifier": "true"},
          "config.task.rewards=.*'verifier'",
      ),
      ({"reason": "exact"}, "config.task.reason='exact'.*FILE.py:FUNCTION"),
      ({"reason": "tests.tasks.own_rewards:nope"}, "config.task.reason=.*nope"),
      ({"train": "nowhere.jsonl"}, "config.task.train='nowhere.jsonl'"),
      (
          {"test": "", "held_out": 2},
          "held_out=2: must leave a prompt.*2 of the",
      ),
      ({"test": "", "held_out": 0.9}, "held_out=0.9: must leave a prompt"),
      ({"test": "", "held_out": 1.5}, "held_out=1.5: must be a share"),
      ({"test": "", "held_out": -1}, "held_out=-1: must be a share"),
      ({"test": "", "held_out": "2"}, "held_out='2': must be a share"),
      ({"held_out": 1}, "held_out=1: must be None with config.task.test"),
      (
          {"prompt": "{promt}"},
          "task.prompt: no row.*'promt'.*'prompt'.*one of them in braces",
      ),
      (
          {"test": "", "prompt": "prompt"},
          "task.prompt: must name a field in braces.*the same prompt",
      ),
      ({"answer": "reply"}, "config.task.answer: no row of .*'reply'"),
      ({"completion": " {reply}"}, "config.task.completion: .*'reply'"),
      ({"answer_kind": "x"}, "config.task.answer_kind='x'"),
  )
  def test_refuses_wrong_settings(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      self.make(**changes)

  @parameterized.parameters("broken", "leaves")
  def test_bug_costs_one_completion(self, name):
    task = self.make(rewards=f"tests.tasks.own_rewards:{name}")
    judge = judges.InProcess(task)
    (result,) = judge.judge([judges.JudgeRequest("train", 0, "x")])
    np.testing.assert_equal((result.reward, result.failure), (np.nan, "error"))
