# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools: schemas from type hints, calls in turns, results and rewards."""

import re
from typing import Literal

from absl.testing import absltest
from absl.testing import parameterized

from examples import calculator
from examples import products
from tba_jax.chat_api import tool_calls
from tba_jax.environments import tool_environment


def look_up(word: str, most: int = 3, kind: Literal["a", "b"] | None = None):
  """Looks a word up
  in a dictionary.

  Args:
    word: the word, which may
      be long.
    most (int): number of meanings.
  """
  return [word] * most


class Echo:
  """TRL's shape, with the reward as an attribute."""

  def __init__(self):
    self.reward = 0.0

  def reset(self, **kwargs):
    return f"seed {kwargs['seed']}"

  def echo(self, message: str) -> str:
    self.reward = float(len(message))
    return message

  def fail(self) -> str:
    raise ValueError("game over")

  def look(self) -> dict:
    return {(1, 2): "a key that JSON lacks"}

  def _hidden(self):
    pass


def call(name, arguments="{}"):
  body = f'{{"name": "{name}", "arguments": {arguments}}}'
  return f"<tool_call>\n{body}\n</tool_call>"


class Typed:
  """Tools of one argument each, which answer with what they got."""

  reward = 0.0

  def whole(self, x: int) -> str:
    return repr(x)

  def real(self, x: float) -> str:
    return repr(x)

  def flag(self, x: bool) -> str:
    return repr(x)

  def text(self, x: str) -> str:
    return repr(x)

  def perhaps(self, x: str | None) -> str:
    return repr(x)

  def either(self, x: int | str) -> str:
    return repr(x)

  def some(self, x: list[int]) -> str:
    return repr(x)

  def table(self, x: dict) -> str:
    return repr(x)

  def word(self, x: Literal["a", "b"]) -> str:
    return repr(x)

  def level(self, x: Literal[1, 2] | None = None) -> str:
    return repr(x)


class ToolsTest(parameterized.TestCase):

  def test_schema_is_read_from_hints_and_docstring(self):
    self.assertEqual(
        tool_environment.schema(look_up)["function"],
        {
            "name": "look_up",
            "description": "Looks a word up in a dictionary.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {
                        "type": "string",
                        "description": "the word, which may be long.",
                    },
                    "most": {
                        "type": "integer",
                        "description": "number of meanings.",
                    },
                    "kind": {
                        "type": "string",
                        "enum": ["a", "b"],
                        "nullable": True,
                    },
                },
                "required": ["word"],
            },
        },
    )

  def test_parameters_without_usable_hint_are_named(self):
    with self.assertRaisesRegex(ValueError, "tool <lambda>: parameter 'x' has"):
      tool_environment.schema(lambda x: x)

    def tool(x: set):
      del x

    with self.assertRaisesRegex(ValueError, "tool tool: x: type <class 'set'>"):
      tool_environment.schema(tool)

    def positional(x: int, /):
      del x

    def any_names(**x: int):
      del x

    for tool in (positional, any_names):
      with self.assertRaisesRegex(
          ValueError, f"tool {tool.__name__}: .*no nam"
      ):
        tool_environment.schema(tool)

  def test_results_and_errors_answer_chat_in_role_of_tools(self):
    echo = tool_environment.wrap(Echo())
    names = [s["function"]["name"] for s in echo.schemas]
    self.assertEqual(names, ["echo", "fail", "look"])
    self.assertEqual(echo.reset(seed=3), "seed 3")
    said, reward, done, _ = echo.step(
        call("echo", '{"message": "hey"}') + call("fail") + call("no")
    )
    self.assertEqual({m["role"] for m in said}, {"tool"})
    self.assertEqual(
        [m["content"] for m in said],
        [
            "hey",
            "error: game over",
            "error: no tool 'no'; there are echo, fail, look",
        ],
    )
    self.assertEqual((reward, done), (3.0, False))
    _, reward, done, _ = echo.step(call("echo", '{"massage": "hey"}'))
    self.assertEqual((reward, done), (0.0, False))
    # Each turn gets what it adds.
    self.assertEqual(echo.step("echo: a")[:3], ("a\n", -2.0, False))
    self.assertEqual(echo.step("done")[:3], ("", 0.0, True))

  def test_tool_without_arguments_is_called_by_line(self):
    echo = tool_environment.wrap(Echo())
    self.assertEqual(echo.step("fail:")[0], "error: game over\n")
    said = echo.step("fail: not yet")[0]
    self.assertEqual(said, "error: fail has no arguments: give none\n")

  @parameterized.parameters(
      ("whole: 7", "7"),
      ("whole: -7", "-7"),
      ("whole: 7.0", "error: x: must be an integer"),
      ("whole: seven", "error: x: must be an integer"),
      ("whole: true", "error: x: must be an integer"),
      (f"whole: {'[' * 5000}", "error: x: must be an integer"),
      ("whole:", "error: missing a required argument: 'x'"),
      ('whole: {"x": 7}', "7"),
      ('whole: {"x": "7"}', "error: x: must be an integer"),
      ('whole: {"x": null}', "error: x: must be an integer"),
      ("real: 7", "7"),
      ("real: 7.5", "7.5"),
      ("real: NaN", "error: x: must be a number"),
      ("real: 1e999", "error: x: must be a number"),
      ("flag: true", "True"),
      ("flag: 1", "error: x: must be true or false"),
      ("text: 7", "'7'"),
      ('text: {"x": 7}', "error: x: must be a text"),
      ("perhaps: null", "'null'"),
      ('perhaps: {"x": null}', "None"),
      ("either: 7", "7"),
      ("either: 7.5", "'7.5'"),
      ('either: {"x": 7.5}', "error: x: must be an integer or a text"),
      ("some: [1, 2]", "[1, 2]"),
      ('some: [1, "2"]', "error: x: must be a list, each an integer"),
      ('table: {"x": {"y": 1}}', "{'y': 1}"),
      ("table: 1", "error: x: must be a JSON object"),
      ("word: a", "'a'"),
      ("word: c", 'error: x: must be one of "a", "b"'),
      ("level: 2", "2"),
      ("level: null", "None"),
      ('level: {"x": true}', "error: x: must be one of 1, 2 or null"),
      ("level:", "None"),
  )
  def test_arguments_have_types_of_their_hints(self, turn, result):
    self.assertEqual(
        tool_environment.wrap(Typed()).step(turn)[0], f"{result}\n"
    )

  def test_types_of_arguments_are_checked_in_chat(self):
    env = tool_environment.wrap(Typed())
    (said,) = env.step(call("whole", '{"x": "7"}'))[0]
    self.assertEqual(said["content"], "error: x: must be an integer")
    (said,) = env.step(call("whole", '{"x": 7}'))[0]
    self.assertEqual(said["content"], "7")

  @parameterized.parameters(
      '["tmp"]',
      "3",
      '"tmp"',
      '"[1]"',
      "null",
      '{}, "folder": "tmp"',
      '{"folder": "a", "folder": "b"}',
      '{"place": "tmp"}',
      '{"folder": 3}',
  )
  def test_calls_with_wrong_arguments_do_not_run(self, arguments):
    ran = []

    class Wipe(Echo):

      def wipe(self, folder: str = "all") -> str:
        ran.append(folder)
        return folder

    env = tool_environment.wrap(Wipe())
    (said,), _, done, _ = env.step(call("wipe", arguments))
    self.assertStartsWith(said["content"], "error: ")
    self.assertEqual((ran, done), ([], False))
    (said,) = env.step(call("wipe"))[0]
    self.assertEqual((said["content"], ran), ("all", ["all"]))

  def test_non_json_result_is_call_error(self):
    self.assertStartsWith(
        tool_environment.wrap(Echo()).step("look:")[0], "error: keys"
    )

  def test_line_does_not_call_tool_of_several_arguments(self):
    inner = Echo()
    inner.tools = [look_up]
    said = tool_environment.wrap(inner).step("look_up: a")[0]
    self.assertEqual(said, "error: give a JSON object with word, most, kind\n")

  def test_tool_class_without_reward_fails_at_episode_end(self):
    class Forgot:

      def reset(self, seed):
        return "Look."

      def look(self) -> str:
        return "nothing"

    env = tool_environment.wrap(Forgot())
    env.reset(0)
    self.assertEqual(env.step(call("look"))[1], 0.0)
    with self.assertRaisesRegex(TypeError, "Forgot has neither get_reward"):
      env.step("No more.")

  def test_functions_may_be_listed_as_tools(self):
    inner = Echo()
    inner.tools = [look_up]
    self.assertEqual(
        tool_environment.wrap(inner).step('look_up: {"word": "a", "most": 2}')[
            0
        ],
        '["a", "a"]\n',
    )

  def test_environment_with_step_is_unwrapped(self):
    class Steps(Echo):

      def step(self, text):
        return text, 0.0, True, {}

    made = Steps()
    self.assertIs(tool_environment.wrap(made), made)


class CalculatorTest(absltest.TestCase):

  def test_demonstrations_answer_with_tool_results(self):
    rewards = []
    for seed in range(40):
      game = tool_environment.wrap(calculator.Countdown())
      target = int(game.reset(seed).strip().partition(">")[2])
      said, done, reward = "", False, 0.0
      for _ in range(calculator.TRIES + 2):
        before, turn = said, game.demonstrate()
        said, reward, done, _ = game.step(turn)
        if done:
          break
      self.assertTrue(done)
      if before.strip() == str(target):
        self.assertEqual(reward, 1.0)
      rewards.append(reward)
    self.assertBetween(sum(rewards), 3, 37)

  def test_answer_uses_each_number_once(self):
    game = calculator.Countdown()
    game._numbers, game._target = [2, 3, 3], 12
    right = {"2*3+3+3": 0, "2*(3+3)": 1, "(3+3)*2": 1, "4*3": 0, "12": 0}
    right |= {"2*3*3": 0, "2**3": 0, "": 0, "(" * 999: 0, "3+3 2": 0}
    right |= {"12#3*3*2": 0, "2*6#33": 0}
    for text, reward in right.items():
      self.assertEqual(game.get_reward(text), reward, text)
    game._numbers, game._target = [1, 2, 3], 15
    # One number of two digits is not two numbers.
    self.assertEqual(game.get_reward("1_2+3"), 0)

  def test_products_are_right_after_call(self):
    made = products.Products()
    for seed in range(20):
      game = tool_environment.wrap(made)
      *shown, question = game.reset(seed)
      left, right = re.findall(r"\d+", question["content"])
      said, reward, done, _ = game.step(f"calculate: {left} * {right}")
      self.assertEqual(said, f"{int(left) * int(right)}\n")
      self.assertEqual((reward, done), (0.0, False))
      _, reward, done, _ = game.step(f"{left} * {right} = {said}")
      self.assertEqual((reward, done), (1.0, True))
    # The turns that are shown are right themselves.
    for question, call, said, answer in zip(*(iter(shown),) * 4, strict=True):
      (call,), _ = tool_calls.find(call["content"], {})
      self.assertEqual(call.name, "calculate")
      self.assertIn(
          call.arguments["expression"].replace("*", " * "), question["content"]
      )
      self.assertEqual(made.calculate(**call.arguments), said["content"])
      self.assertEqual(answer["content"], f"The answer is {said['content']}.")
    said, _, done, _ = game.step("calculate: 2**3")
    self.assertEqual(said, "error: must be two numbers, such as 3*4\n")
    right = f"{int(left) * int(right):,}"
    self.assertEqual(made.get_reward(f"It is {right}."), 1.0)
    self.assertEqual(made.get_reward(f"It is {right}, or 3."), 0.0)
