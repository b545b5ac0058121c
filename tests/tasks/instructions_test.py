# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of instructions: each check, prompts that can be followed, splits."""

import importlib
import importlib.util

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections

from tba_jax.rewards import judges
from tba_jax.tasks import base
from tba_jax.tasks import instructions
from tba_jax.tasks import task_table
from tests.support import fakes

# Kind -> value, texts that follow the instruction, and texts that do not.
_CASES = {
    "lowercase": ("", ("it's 2 cats, ok?", "élan"), ("It is.", "aB")),
    "uppercase": ("", ("IT'S 2 CATS!", "ÉLAN"), ("It is.", "ABc")),
    "words": (
        3,
        ("Bees make honey.", "It's well-known: yes", " a, b\nc "),
        ("Honey.", "Bees do make honey.", "- - -"),
    ),
    "at_most_words": (6, ("one two three four five six.",), ("a " * 7,)),
    "sentences": (
        2,
        ("Bees fly. They hum!", "One... Two", "Is pi 3.14? Yes."),
        ("Bees fly.", "One. Two. Three.", "a.b.c"),
    ),
    "contains": (
        "light",
        ("The Light is on.", "light-", "so “LIGHT”"),
        ("lights", "delight", "lig ht"),
    ),
    "avoids": ("the", ("Then they ran.", "bathe"), ("The end", "so the, end")),
    "starts_with": (
        "Well",
        ("Well, yes.", '"well" it is', "- Well"),
        ("Wells are", "Oh well", "We'll"),
    ),
    "ends_with": (
        "the end",
        ("It was the end.", "This is The End!", "the end\n"),
        ("The end is near.", "the end?", "the end of it"),
    ),
    "question": ("", ("Why?", "So, why? "), ("Why? Because.", "why?!")),
    "exclamation": ("", ("Yes!", "Oh! No!\n"), ("Yes! I do.", "Yes!?")),
    "no_comma": ("", ("a; b", "no"), ("a, b", "1,000 bees")),
    "quoted": (
        "",
        ('"It is so."', ' "a"\n'),
        ('It is "so"', '"a" and "b"', '"so', "'so'"),
    ),
    "bullets": (
        2,
        ("- a\n- b", "* a b\n\n*  c"),
        ("- a", "- a\n- b\n- c", "Two:\n- a\n- b", "-a\n-b", "- \n- b"),
    ),
    "json": (
        "key",
        ('{"key": "a text"}', '{\n"key": "a"}\n'),
        (
            '{"Key": "a"}',
            '{"key": 1}',
            '{"key": ""}',
            '{"key": "a", "b": "c"}',
            '["key"]',
            'So: {"key": "a"}',
            "{'key': 'a'}",
            "[" * 100_000 + "a",
        ),
    ),
    "numbered": (
        2,
        ("1. a\n2. b", "1) a b\n\n2) c"),
        ("1. a", "2. a\n1. b", "1. a\n2. b\n3. c", "1a\n2b", "1.\n2. b"),
    ),
    "twice": ("light", ("Light, light.", "light light light"), ("light",)),
    "brackets": (
        "",
        ("<<It is so.>>", " <<a>>\n"),
        ("<a>", "<<a>> b", "<<a>> and <<b>>", "<<a"),
    ),
    "no_period": ("", ("a, b!", "no"), ("a.", "3.14 bees")),
    "digits": ("", ("2 bees", "bees: a12"), ("two bees",)),
}
# Kinds that IFEval has too -> its name, and its arguments for a value. That
# of the last words refuses a period after them; those of letters' case detect
# languages.
_IFEVAL = {
    "at_most_words": (
        "length_constraints:number_words",
        lambda n: {"num_words": n + 1, "relation": "less than"},
    ),
    "contains": ("keywords:existence", lambda word: {"keywords": [word]}),
    "twice": (
        "keywords:frequency",
        lambda word: {"keyword": word, "frequency": 2, "relation": "at least"},
    ),
    "no_comma": ("punctuation:no_comma", lambda value: {}),
    "quoted": ("startend:quotation", lambda value: {}),
    "bullets": (
        "detectable_format:number_bullet_lists",
        lambda n: {"num_bullets": n},
    ),
    "json": ("detectable_format:json_format", lambda value: {}),
    "brackets": ("detectable_format:title", lambda value: {}),
}


def _task(**fields):
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "instructions", **fields})
  )


def _follows(kind, value, text):
  return instructions.follows(instructions.Instruction(kind, value, ""), text)


class ChecksTest(parameterized.TestCase):

  def test_every_kind_has_cases(self):
    self.assertEqual(set(_CASES), set(instructions.KINDS))

  @parameterized.named_parameters((kind, kind) for kind in _CASES)
  def test_texts_follow_or_not(self, kind):
    value, right, wrong = _CASES[kind]
    for text in right:
      self.assertTrue(_follows(kind, value, text), text)
    for text in (*wrong, "", " \n", "12", "...", "🐝"):
      self.assertFalse(_follows(kind, value, text), text[:50])

  @absltest.skipUnless(
      importlib.util.find_spec("if_verifiable"),
      "if_verifiable is not installed",
  )
  @parameterized.named_parameters((kind, kind) for kind in _IFEVAL)
  def test_following_answer_passes_ifeval_checker(self, kind):
    value, right, _ = _CASES[kind]
    name, arguments = _IFEVAL[kind]
    module = importlib.import_module("if_verifiable.ifeval")
    checker = module.INSTRUCTION_DICT[name](name)
    checker.build_description(**arguments(value))
    for text in right:
      self.assertTrue(checker.check_following(text), text)

  def test_wordings_have_placeholder_exactly_for_kinds_with_values(self):
    for name, kind in instructions.KINDS.items():
      needs = [*kind.values] != [""]
      for wording in kind.wordings:
        self.assertEqual("{}" in wording, needs, (name, wording))


class InstructionsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.task = _task()
    cls.splits = (*cls.task.splits, *cls.task.more_splits)

  def prompts(self, split, task=None):
    task = task or self.task
    return [task.prompt(split, i) for i in range(task.num_prompts(split))]

  def kinds(self, split):
    return [
        [i.kind for i in self.task.instructions(split, index)]
        for index in range(self.task.num_prompts(split))
    ]

  def test_every_prompt_can_be_followed(self):
    for split in self.splits:
      for index in range(self.task.num_prompts(split)):
        text = base.reference_text(self.task, split, index)
        result = self.task.judge(split, index, text)
        self.assertEqual(result.reward, 1.0, self.task.prompt(split, index))
        self.assertIsNotNone(result.key)

  def test_splits_share_neither_topics_nor_prompts(self):
    topics = {
        split: {
            topic
            for topic in instructions.TOPICS
            for prompt in self.prompts(split)
            for request in instructions.REQUESTS
            if prompt.startswith(request.format(topic))
        }
        for split in self.splits
    }
    self.assertLen(topics["held_out"], 24)
    self.assertEqual(topics["held_out"], topics["new_kinds"])
    self.assertLen(topics["train"] | topics["held_out"], 120)
    self.assertEqual(topics["train"] & topics["held_out"], set())
    every = [p for split in self.splits for p in self.prompts(split)]
    self.assertLen(set(every), 4000 + 2 * 512)
    self.assertLen(every, 4000 + 2 * 512)

  def test_held_out_kinds_are_in_no_other_split(self):
    flat = lambda split: {kind for some in self.kinds(split) for kind in some}
    new = set(instructions.HELD_OUT_KINDS)
    self.assertEqual(flat("new_kinds"), new)
    self.assertEqual(flat("train"), set(instructions.KINDS) - new)
    self.assertEqual(flat("held_out"), flat("train"))

  def test_prompts_have_one_to_three_instructions_of_different_aspects(self):
    counts = [0, 0, 0, 0]
    for some in self.kinds("train"):
      counts[len(some)] += 1
      aspects = {instructions.KINDS[kind].aspect for kind in some}
      self.assertLen(aspects, len(some))
    self.assertEqual(counts[0], 0)
    self.assertGreater(min(counts[1:]), 800)
    single = _task(max_instructions=1)
    self.assertLen(single.instructions("held_out", 0), 1)

  def test_prompts_are_function_of_seed(self):
    again, other = _task(), _task(split_seed=1)
    for split in self.splits:
      self.assertEqual(self.prompts(split, again), self.prompts(split))
    self.assertNotEqual(self.prompts("train", other), self.prompts("train"))

  def test_reward_is_fraction_of_followed_instructions(self):
    task = self.task
    index = next(
        i
        for i, some in enumerate(self.kinds("train"))
        if sorted(some) == ["lowercase", "question"]
    )
    judged = task.judge("train", index, "why is it?")
    self.assertEqual((judged.reward, judged.key), (1.0, "why is it?"))
    judged = task.judge("train", index, "Why is it?")
    self.assertEqual((judged.reward, judged.key), (0.5, None))
    self.assertEqual(judged.parts, {"lowercase": 0.0, "question": 1.0})
    self.assertEqual(task.judge("train", index, "").reward, 0.0)
    self.assertEqual(task.explain("train", index, "why is it?"), "")
    self.assertStartsWith(
        task.explain("train", index, "Why is it?"), "does not follow: "
    )

  def test_truncated_completion_has_no_reward(self):
    text = base.reference_text(self.task, "train", 0)
    judge = judges.InProcess(self.task)
    done, cut = judge.judge(
        [
            judges.JudgeRequest("train", 0, text, stopped)
            for stopped in (True, False)
        ]
    )
    self.assertEqual((done.reward, cut.reward, cut.key), (1.0, 0.0, None))
    self.assertEqual(cut.parts, dict.fromkeys(done.parts, 0.0))

  def test_completion_always_gets_same_reward(self):
    texts = ["ok", "It is 12, OK?", '- a\n- "b"!', '{"answer": "so"}']
    task, again = self.task, _task()
    for split in self.splits:
      for index in range(0, task.num_prompts(split), 7):
        for text in texts:
          self.assertEqual(
              task.judge(split, index, text), again.judge(split, index, text)
          )

  def test_long_prompts_are_dropped_with_stable_indices_in_workers(self):
    task = _task()
    task.drop_long(fakes.Characters(), 90)
    for split in self.splits:
      count = task.num_prompts(split)
      self.assertBetween(count, 1, self.task.num_prompts(split) - 1)
      # The workers of a pool make the task anew, with all prompts.
      places = [task.source_index(split, i) for i in range(count)]
      self.assertEqual(
          self.prompts(split, task),
          [self.task.prompt(split, place) for place in places],
      )
    task.drop_long(fakes.Characters(), 80)
    place = task.source_index("train", 1)
    self.assertEqual(task.prompt("train", 1), self.task.prompt("train", place))
    with self.assertRaisesRegex(ValueError, "max_prompt_tokens=1: .*'train'"):
      task.drop_long(fakes.Characters(), 1)

  @parameterized.parameters(
      ("max_instructions", 4),
      ("train_prompts", 0),
      ("held_out_prompts", 1.5),
      ("held_out_fraction", 1.0),
      ("held_out_fraction", 0.001),
      ("held_out_kinds", "lowercase,rhyme"),
      ("held_out_kinds", ""),
      ("held_out_kinds", ",".join(instructions.KINDS)),
  )
  def test_refuses_wrong_settings(self, name, value):
    with self.assertRaisesRegex(ValueError, f"config.task.{name}={value!r}"):
      _task(**{name: value})

  def test_refuses_more_prompts_than_available(self):
    with self.assertRaisesRegex(ValueError, "config.task: no 2000 distinct"):
      _task(
          held_out_kinds="no_period",
          held_out_fraction=0.01,
          held_out_prompts=2000,
      )
