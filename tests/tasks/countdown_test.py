# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of Countdown: enumeration by brute force, adversarial completions."""

import collections
import itertools
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import arithmetic
from tba_jax.tasks import base
from tba_jax.tasks import countdown

_DEFAULT = countdown.Countdown(**countdown.Countdown.FIELDS)


def make_task(**fields):
  return countdown.Countdown(**{**countdown.Countdown.FIELDS, **fields})


def brute_force(values, steps=()):
  """Yields (target, identity) of every chain of steps, one at a time."""
  if len(values) == 1:
    yield values[0], ",".join(sorted(steps))
    return
  for i, j in itertools.permutations(range(len(values)), 2):
    a, b = values[i], values[j]
    rest = [v for k, v in enumerate(values) if k not in (i, j)]
    for operation, result in (("+", a + b), ("-", a - b), ("*", a * b)):
      if a >= b and 1 <= result <= 99:
        step = f"{a}{operation}{b}={result}"
        yield from brute_force(rest + [result], steps + (step,))


def solutions_by_target(numbers):
  out = collections.defaultdict(set)
  for target, identity in brute_force(list(numbers)):
    out[target].add(identity)
  return out


def parse_prompt(text):
  numbers, _, target = text.partition(">")
  return tuple(int(n) for n in numbers.split(",")), int(target)


class EnumerationTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(numbers=3, max_number=9, max_target=99, min_solutions=3),
      dict(numbers=3, max_number=6, max_target=20, min_solutions=1),
      dict(numbers=4, max_number=4, max_target=99, min_solutions=8),
      dict(numbers=2, max_number=10, max_target=99, min_solutions=1),
  )
  def test_prompts_match_brute_force(self, **fields):
    task = make_task(**fields)
    expected = {}
    for numbers in itertools.combinations_with_replacement(
        range(1, fields["max_number"] + 1), fields["numbers"]
    ):
      for target, result in solutions_by_target(numbers).items():
        if (
            len(result) >= fields["min_solutions"]
            and target <= fields["max_target"]
        ):
          for order in itertools.permutations(numbers):
            expected[order, target] = len(result)
    actual = {}
    for split in ("train", "held_out"):
      for i in range(task.num_prompts(split)):
        key = parse_prompt(task.prompt(split, i))
        self.assertNotIn(key, actual)
        actual[key] = task.num_solutions(split, i)
        texts = task.correct_completions(split, i)
        self.assertLen({*texts}, len(texts))
        keys = {task.solution_key(split, i, text) for text in texts}
        self.assertNotIn(None, keys)
        self.assertLen(keys, actual[key])
    self.assertEqual(actual, expected)

  def test_no_multiset_is_in_both_splits(self):
    seen = {}
    for split in ("train", "held_out"):
      seen[split] = {
          tuple(sorted(parse_prompt(_DEFAULT.prompt(split, i))[0]))
          for i in range(0, _DEFAULT.num_prompts(split))
      }
    self.assertEmpty(seen["train"] & seen["held_out"])
    share = len(seen["held_out"]) / sum(map(len, seen.values()))
    self.assertBetween(share, 0.1, 0.2)

  def test_first_prompts_of_split_are_different_pairs(self):
    pairs = []
    for i in range(500):
      numbers, target = parse_prompt(_DEFAULT.prompt("held_out", i))
      pairs.append((tuple(sorted(numbers)), target))
    self.assertLen(set(pairs), 500)

  def test_numbers_come_in_random_order(self):
    numbers = [parse_prompt(_DEFAULT.prompt("train", i))[0] for i in range(500)]
    in_order = sum(tuple(sorted(n)) == n for n in numbers)
    self.assertLess(in_order, 100)

  def test_same_seed_gives_same_task(self):
    again, other = make_task(), make_task(split_seed=1)
    rng, rng_again = np.random.default_rng(3), np.random.default_rng(3)
    for i in range(50):
      self.assertEqual(again.prompt("train", i), _DEFAULT.prompt("train", i))
      self.assertEqual(
          again.reference_completion("train", i, rng_again),
          _DEFAULT.reference_completion("train", i, rng),
      )
    self.assertNotEqual(
        [other.prompt("train", i) for i in range(50)],
        [_DEFAULT.prompt("train", i) for i in range(50)],
    )


class ReferenceCompletionTest(absltest.TestCase):

  def test_references_are_right(self):
    rng = np.random.default_rng(0)
    for split in ("train", "held_out"):
      for i in range(300):
        text = _DEFAULT.reference_completion(split, i, rng)
        self.assertEqual(_DEFAULT.reward(split, i, text), 1.0, text)

  def test_every_solution_and_order_comes_and_solutions_come_evenly(self):
    task = make_task()
    numbers, target = parse_prompt(task.prompt("train", 0))
    expected = solutions_by_target(numbers)[target]
    rng = np.random.default_rng(1)
    texts = [task.reference_completion("train", 0, rng) for _ in range(6000)]
    counts = collections.Counter(
        task.solution_key("train", 0, text) for text in texts
    )
    self.assertEqual(set(counts), expected)
    # Six standard deviations of a uniform draw.
    mean = len(texts) / len(expected)
    for count in counts.values():
      self.assertAlmostEqual(count, mean, delta=6 * mean**0.5)
    orders = {
        ",".join(steps)
        for key in expected
        for steps in itertools.permutations(key.split(","))
        if task.reward("train", 0, ",".join(steps))
    }
    self.assertEqual(set(texts), orders)

  def test_words_and_lengths_hold_every_reference(self):
    words = {word: i for i, word in enumerate(_DEFAULT.tokenizer_words())}
    self.assertLen(words, 107)
    rng = np.random.default_rng(2)
    pattern = re.compile(_DEFAULT.tokenizer_pattern)
    for i in range(300):
      prompt = pattern.findall(_DEFAULT.prompt("train", i))
      text = _DEFAULT.reference_completion("train", i, rng)
      completion = pattern.findall(text)
      self.assertEqual("".join(completion), text)
      self.assertLen(prompt, _DEFAULT.max_prompt_tokens)
      # One place is for the stop token.
      self.assertLen(completion, _DEFAULT.max_completion_tokens - 1)
      self.assertContainsSubset(prompt + completion, words)


class RewardTest(parameterized.TestCase):
  """`solution_key` of one prompt: 3, 4, 7 and 2 to 17."""

  def key(self, text):
    return countdown.solution_key([3, 4, 7, 2], 17, text)

  def test_accepts_right_completion(self):
    self.assertEqual(
        self.key("4*3=12,12+7=19,19-2=17"), "12+7=19,19-2=17,4*3=12"
    )

  def test_judge_finds_key_once(self):
    find = mock.Mock(wraps=_DEFAULT.solution_key)
    right = _DEFAULT.reference_completion(
        base.TRAIN, 0, np.random.default_rng(0)
    )
    with mock.patch.object(_DEFAULT, "solution_key", find):
      judgements = [
          _DEFAULT.judge(base.TRAIN, 0, text) for text in (right, "1+1=3")
      ]
    self.assertEqual([j.reward for j in judgements], [1.0, 0.0])
    self.assertEqual([j.key is None for j in judgements], [False, True])
    self.assertEqual(find.call_count, 2)

  def test_judge_takes_reward_of_subclass(self):
    class Doubled(countdown.Countdown):

      def reward(self, split, index, completion):
        return 2 * super().reward(split, index, completion)

    task = Doubled(**Doubled.FIELDS)
    right = task.reference_completion(base.TRAIN, 0, np.random.default_rng(0))
    self.assertEqual(task.judge(base.TRAIN, 0, right).reward, 2.0)

  def test_order_of_independent_steps_is_one_solution(self):
    # Both give (4 * 3) + (7 - 2) = 17.
    self.assertEqual(
        self.key("4*3=12,7-2=5,12+5=17"), self.key("7-2=5,4*3=12,12+5=17")
    )

  @parameterized.named_parameters(
      ("empty", ""),
      ("target_only", "17"),
      ("from_nothing", "17+0=17"),
      ("from_nothing_in_three_steps", "17*1=17,17*1=17,17*1=17"),
      ("target_as_operand", "4*3=12,12+7=19,17*1=17"),
      ("false_step", "4*3=12,12+7=17"),
      ("false_last_step", "4*3=12,12+7=19,19+2=17"),
      ("other_target", "4*3=12,12+7=19,19+2=21"),
      ("number_used_twice", "4*3=12,12+3=15,15+2=17"),
      ("number_not_given", "5*3=15,15-5=10,10+7=17"),
      ("intermediate_used_twice", "3+2=5,7+5=12,12+5=17"),
      ("number_used_again_later", "4+3=7,7*2=14,14+3=17"),
      ("used_number_equals_intermediate", "4+3=7,7+7=14,14+3=17"),
      ("doubles_one_value", "4+4=8,8+7=15,15+2=17"),
      ("numbers_left", "7*2=14,14+3=17"),
      ("numbers_left_repeated_step", "7*2=14,14+3=17,14+3=17"),
      ("too_many_steps", "4*3=12,12+7=19,19-2=17,17*1=17"),
      ("right_then_more", "4*3=12,12+7=19,19-2=17,"),
      ("leading_comma", ",4*3=12,12+7=19,19-2=17"),
      ("empty_step", "4*3=12,,12+7=19,19-2=17"),
      ("smaller_first", "3*4=12,12+7=19,19-2=17"),
      ("smaller_first_sum", "4*3=12,7+12=19,19-2=17"),
      ("leading_zero", "04*3=12,12+7=19,19-2=17"),
      ("leading_zero_result", "4*3=12,12+7=19,19-2=017"),
      ("plus_sign", "+4*3=12,12+7=19,19-2=17"),
      ("space", "4*3=12, 12+7=19,19-2=17"),
      ("newline_at_end", "4*3=12,12+7=19,19-2=17\n"),
      ("newline_as_comma", "4*3=12\n12+7=19\n19-2=17"),
      ("semicolon_as_comma", "4*3=12;12+7=19;19-2=17"),
      ("fullwidth_digit", "４*3=12,12+7=19,19-2=17"),
      ("arabic_digit", "4*٣=12,12+7=19,19-2=17"),
      ("division", "4/2=2,7*2=14,14+3=17"),
      ("zero_result", "7-7=0,4*3=12,12+2=14"),
      ("eos_inside", "4*3=12,12+7=19<eos>,19-2=17"),
      ("eos_at_end", "4*3=12,12+7=19,19-2=17<eos>"),
      ("pad_at_start", "<pad>4*3=12,12+7=19,19-2=17"),
      ("unk_as_number", "4*3=<unk>,12+7=19,19-2=17"),
      ("prompt_repeated", "3,4,7,2>17"),
      ("chained_equals", "4*3=12=12,12+7=19,19-2=17"),
      ("null", "4*3=12,12+7=19,19-2=17\0"),
  )
  def test_cheat_earns_nothing(self, text):
    self.assertIsNone(self.key(text))

  def test_results_stay_from_1_to_99(self):
    def key(numbers, target, text):
      return countdown.solution_key(numbers, target, text)

    self.assertIsNotNone(key([11, 9, 1], 99, "11*9=99,99*1=99"))
    self.assertIsNone(key([12, 9, 10], 98, "12*9=108,108-10=98"))
    # Steps by way of zero and of a negative number.
    self.assertIsNone(key([5, 5, 3], 3, "5-5=0,3+0=3"))
    self.assertIsNone(key([3, 5, 9], 7, "3-5=-2,9+-2=7"))
    self.assertIsNone(key([3, 5, 9], 7, "3-5=2,9-2=7"))

  def test_equal_numbers_may_each_be_used(self):
    self.assertIsNotNone(countdown.solution_key([4, 4], 8, "4+4=8"))
    self.assertIsNone(countdown.solution_key([4, 3], 8, "4+4=8"))
    self.assertIsNone(countdown.solution_key([4], 4, "4"))

  def test_long_or_odd_text_is_refused_at_once(self):
    for text in (
        "9" * 10_000,
        "4*3=12," * 1500,
        "," * 10_000,
        "1" * 100_000 + "-" + "1" * 100_000 + "=0",
        "4*3=12,12+7=19,19-2=17" + " " * 10_000,
        "\ud800",
        None,
        b"4*3=12,12+7=19,19-2=17",
    ):
      self.assertIsNone(self.key(text))

  def test_agrees_with_brute_force_on_altered_solutions(self):
    rng = np.random.default_rng(0)
    words = _DEFAULT.tokenizer_words()
    num_right = 0
    for i in range(400):
      numbers, target = parse_prompt(_DEFAULT.prompt("train", i))
      text = _DEFAULT.reference_completion("train", i, rng)
      place = rng.integers(len(text))
      altered = text[:place] + rng.choice(words) + text[place + 1 :]
      key = _DEFAULT.solution_key("train", i, altered)
      identity = ",".join(sorted(altered.split(",")))
      right = identity in solutions_by_target(numbers)[target]
      # Steps in an impossible order have the identity but are not right.
      self.assertTrue(right or key is None, altered)
      if key is not None:
        num_right += 1
        self.assertEqual(key, identity)
    self.assertGreater(num_right, 0)


class FieldsTest(parameterized.TestCase):

  @parameterized.parameters(
      ("numbers", 1),
      ("numbers", 5),
      ("numbers", "4"),
      ("max_number", 0),
      ("max_number", 100),
      ("max_number", 40),
      ("max_target", 0),
      ("max_target", 100),
      ("min_solutions", 0),
      ("held_out_fraction", 0.0),
      ("held_out_fraction", 1.5),
  )
  def test_refuses_bad_field(self, field, value):
    with self.assertRaisesRegex(ValueError, rf"config\.task\.{field}="):
      make_task(**{field: value})

  @parameterized.parameters(
      dict(min_solutions=9999), dict(held_out_fraction=0.0001)
  )
  def test_refuses_empty_split(self, **fields):
    with self.assertRaisesRegex(ValueError, "without prompts"):
      make_task(**fields)

  def test_refuses_unknown_split(self):
    for call in (_DEFAULT.num_prompts, lambda s: _DEFAULT.prompt(s, 0)):
      with self.assertRaisesRegex(ValueError, "split 'test'"):
        call("test")


class CountdownReasonTest(parameterized.TestCase):

  @parameterized.parameters(
      ("4*3=12,12+7=19,19-2=17", ""),
      ("", "is empty"),
      ("4*3=12," * 9, "has 63 characters, a solution up to 27"),
      ("17", 'step 1: "17" is not of the form 4*3=12'),
      ("4*3=12,12+7=17", "step 2: 12+7 is 19, not 17"),
      ("4*3=12,12+7=19,19+2=21", "gives 21, not 17"),
      ("4*3=12,12+3=15,15+2=17", "step 2: uses 3 once too often"),
      (
          "4*3=12,12-5=7,7+7=14",
          "step 2: uses 5, which is not among 7, 2",
      ),
      ("7*2=14,14+3=17", "ends with 4, 17 left over"),
      (
          "4*3=12,12+7=19,19-2=17,1+1=2",
          "has 28 characters, a solution up to 27",
      ),
      ("4-3=1,7+2=9,9+1=10,10-7=3", "has more than 3 steps"),
      (
          "3*4=12,12+7=19,19-2=17",
          "step 1: the larger of 3 and 4 has to stand first",
      ),
      ("7-7=0,4*3=12,12+2=14", "step 1: 0 is not from 1 to 99"),
      ("4*3=12, 12+7=19", 'step 2: " 12+7=19" is not of the form 4*3=12'),
  )
  def test_explains_error(self, text, reason):
    self.assertEqual(countdown.explain([3, 4, 7, 2], 17, text), reason)

  @parameterized.parameters("train", "held_out")
  def test_explains_exactly_unrewarded_completions(self, split):
    task = _DEFAULT
    rng = np.random.default_rng(0)
    words = task.tokenizer_words()
    counts = [0, 0]
    for i in range(300):
      text = task.reference_completion(split, i, rng)
      place = rng.integers(len(text) + 1)
      for one in (text, text[:place], text[:place] + rng.choice(words)):
        right = task.solution_key(split, i, one) is not None
        self.assertEqual(task.explain(split, i, one) == "", right, one)
        counts[right] += 1
    self.assertGreater(min(counts), 100)


def _sparse(**fields) -> countdown.CountdownSparse:
  cls = countdown.CountdownSparse
  return cls(**{**cls.FIELDS, **fields})


def _random_chain(prompt: str, rng: np.random.Generator) -> str:
  """Steps with operands and operations drawn evenly, as far as they go."""
  left = [int(n) for n in prompt.partition(">")[0].split(",")]
  steps = []
  while len(left) > 1:
    i, j = rng.choice(len(left), size=2, replace=False)
    a, b = max(left[i], left[j]), min(left[i], left[j])
    operation = str(rng.choice(list(arithmetic.OPERATIONS)))
    result = arithmetic.OPERATIONS[operation](a, b)
    left = [n for k, n in enumerate(left) if k not in (i, j)] + [result]
    steps.append(f"{a}{operation}{b}={result}")
  return ",".join(steps)


class CountdownSparseTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_no_pair_has_more_solutions(self, limit):
    task = _sparse(max_solutions=limit)
    result = {
        task.num_solutions(split, i)
        for split in base.SPLITS
        for i in range(0, task.num_prompts(split), 101)
    }
    self.assertEqual(result, set(range(1, limit + 1)))

  def test_reward_is_rare(self):
    task = _sparse()
    rng = np.random.default_rng(1)
    size = task.num_prompts("train")
    rewards = [
        task.reward("train", i, _random_chain(task.prompt("train", i), rng))
        for i in rng.integers(size, size=3000).tolist()
    ]
    self.assertBetween(np.mean(rewards), 0.001, 0.02)

  def test_refuses_wrong_field(self):
    with self.assertRaisesRegex(ValueError, "config.task.max_solutions=0"):
      _sparse(max_solutions=0)
