# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong losses, rewards and logs of a user's own are found before a run."""

import contextlib
import io
import json
import os
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections
import pytest

from tba_jax.config import custom_code
from tba_jax.config import validate
from tba_jax.learning import dry_run
from tba_jax.models import tokenizer
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tests.support import base_config

_LOSSES = """
import jax
def right(groups, c, beta):
  shares_BxK = jax.nn.softmax(groups.rewards_BxK / beta, axis=1)
  return -(shares_BxK * groups.seq_BxK).sum(axis=1).mean(), {}
def bare(groups, c, beta): return right(groups, c, beta)[0]
def few(groups, c): return 0.0, {}
def vector(groups, c, beta): return groups.seq_BxK, {}
def whole(groups, c, beta): return 1, {}
def nothing(groups, c, beta): pass
def listed(groups, c, beta): return groups.seq_BxK.mean(), [1]
def half(groups, c, beta): return 0.0, {"residual_BxK": groups.seq_BxK}
def narrow(groups, c, beta):
  return 0.0, {"residual_BxK": groups.seq_BxK, "log_z_Bx1": groups.seq_BxK}
def branch(groups, c, beta):
  if groups.rewards_BxK.mean() > 0:
    return right(groups, c, beta)
  return 0.0, {}
def unknown(groups, c, beta): return groups.reward.mean(), {}
def leaves(groups, c, beta): raise SystemExit(0)
def dies(groups, c, beta):
  import os
  os._exit(0)
def of_values(groups, c, beta):
  return (groups.baselines_Bx1 * groups.seq_BxK).mean(), {}
def stopped(groups, c, beta):
  return jax.lax.stop_gradient(groups.seq_BxK).mean(), {}
def named(groups, c, beta): return groups.seq_BxK.mean(), {"a": "b"}
def long(groups, c, beta): return groups.seq_BxK.mean(), {"a": beta[None]}
def spaced(groups, c, beta): return groups.seq_BxK.mean(), {"a b": 1.0}
"""
_REWARDS = """
import os, time
import numpy as np
def right(prompt, completion, row): return np.float32(completion == "1")
def picky(prompt, completion, row): return float(int(completion))
def few(prompt, completion): return 1.0
def text(prompt, completion, row): return "1"
def nan(prompt, completion, row): return float("nan")
def nothing(prompt, completion, row): pass
def several(prompt, completion, row): return [1.0, 2.0]
def field(prompt, completion, row): return row["solution"]
def leaves(prompt, completion, row): raise SystemExit("bye")
def hangs(prompt, completion, row): time.sleep(60)
def dies(prompt, completion, row): os._exit(3)
def unnamed(prompt, completion, row): return {"length": 3}
def worded(prompt, completion, row): return {"reward": 1, "length": "3"}
"""


class LossTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = self.create_tempfile("losses.py", _LOSSES).full_path

  def make(self, name):
    return base_config.make(loss__name=f"{self.path}:{name}")

  def test_accepts_right_loss(self):
    dry_run.trace_loss(self.make("right"))
    config = self.make("of_values")
    config.loss.baseline, config.loss.baseline_file = "file", "values.jsonl"
    dry_run.trace_loss(config)

  @parameterized.parameters(
      ("bare", 6, r"it returned an array float32\[\]"),
      ("few", 7, "TypeError: few.. takes 2 positional"),
      ("vector", 8, r"its loss is an array float32\[32, 8\]"),
      ("whole", 9, "its loss is of type int"),
      ("nothing", 10, "it returned None"),
      ("listed", 11, "its second result is of type list"),
      ("half", 12, "residual_BxK without log_z_Bx1"),
      ("narrow", 13, r"log_z_Bx1 is an array .*, not \[32, 1\]"),
      ("branch", 16, "TracerBoolConversionError: Attempted boolean"),
      ("unknown", 19, "no attribute 'reward'"),
      ("leaves", 20, "SystemExit: 0"),
      ("named", 28, "its dict's a is of type str, not a number or array"),
      (
          "long",
          29,
          r"its dict's a is an array float32\[1\], not \[\], \[B, 1\]",
      ),
      ("spaced", 30, "its dict's key 'a b' may have only letters"),
  )
  def test_error_names_line_of_custom_code(self, name, line, pattern):
    with self.assertRaises(ValueError) as caught:
      dry_run.trace_loss(self.make(name))
    message = str(caught.exception)
    setting = f"config.loss.name='{self.path}:{name}': "
    self.assertStartsWith(message, f"{setting}{self.path}:{line}: ")
    self.assertRegex(message, f"{pattern}.*; must be a function of .groups, c,")
    self.assertNotIn("\n", message)

  def test_loss_without_gradient_is_refused(self):
    with self.assertRaisesRegex(
        ValueError, "stopped': its gradient with respect to .* is 0"
    ):
      dry_run.trace_loss(self.make("stopped"))

  def test_whole_config_is_refused(self):
    with self.assertRaisesRegex(ValueError, "returned an array float32"):
      validate.validate(self.make("bare"))
    # Its process ends; this one does not.
    with self.assertRaisesRegex(ValueError, "ended its process with status 0"):
      validate.validate(self.make("dies"))
    with mock.patch.dict(os.environ, {processes.SUPERVISED: "1"}):
      validate.validate(self.make("bare"))

  def test_refuses_missing_loss(self):
    for name, pattern in (
        (
            f"{self.path}:rihgt",
            "defines no 'rihgt'; it defines right, bare",
        ),
        ("/nowhere/l.py:right", "/nowhere/l.py: there is no such file"),
    ):
      with self.assertRaisesRegex(ValueError, pattern):
        validate.validate(base_config.make(loss__name=name))
    wrong = self.create_tempfile("wrong.py", "x = 1\ndef f(:\n").full_path
    with self.assertRaisesRegex(ValueError, f"{wrong}:2: invalid syntax"):
      validate.validate(base_config.make(loss__name=f"{wrong}:f"))


class RewardTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = str(folder / "rewards.py")
    pathlib.Path(self.path).write_text(_REWARDS)
    self.fields = {"name": "custom"}
    for split in ("train", "test"):
      path = folder / f"{split}.jsonl"
      rows = [{"prompt": f"{split} {i}", "answer": "4"} for i in range(4)]
      path.write_text("".join(json.dumps(row) + "\n" for row in rows))
      self.fields[split] = str(path)

  def make(self, where="process", deadline_s=30.0, **fields):
    config = base_config.make(
        reward__backend=where, reward__deadline_s=deadline_s
    )
    config.evaluate.num_prompts = config.evaluate.final_prompts = 1
    config.task = ml_collections.ConfigDict(
        task_table.with_defaults({**self.fields, **fields})
    )
    return config

  @parameterized.parameters("right", "picky")
  def test_accepts_right_reward(self, name):
    for where in ("process", "pool"):
      dry_run.try_reward(self.make(where, rewards=f"{self.path}:{name}"))

  def test_hanging_reward_is_named_while_and_after_it_is_tried(self):
    config = self.make("process", 0.0, rewards=f"{self.path}:hangs")
    output = io.StringIO()
    with (
        mock.patch.object(custom_code, "PATIENCE_S", 0.1),
        mock.patch.object(custom_code, "DEADLINE_S", 0.3),
        contextlib.redirect_stdout(output),
    ):
      (problem,) = custom_code.problems(config.to_dict(), (custom_code.REWARD,))
    self.assertRegex(output.getvalue(), "rewards.py:hangs': trying it")
    self.assertRegex(problem, "rewards.py:hangs': did not return within 0.3 s")

  @parameterized.parameters(
      ("few", "rewards.py:6: TypeError: takes .prompt, completion.: must take"),
      ("text", "rewards.py:7: text returned '1'"),
      ("nan", "rewards.py:8: nan returned nan"),
      ("nothing", "rewards.py:9: nothing returned None"),
      ("several", r"rewards.py:10: several returned \[1.0, 2.0\]"),
      ("field", "rewards.py:11: KeyError: 'solution'"),
      ("unnamed", "rewards.py:15: unnamed returned None"),
      ("worded", "rewards.py:16: worded: length returned '3'"),
      ("leaves", "bye"),
  )
  @pytest.mark.slow
  def test_error_names_line_of_custom_code(self, name, pattern):
    for where in ("process", "pool"):
      with self.assertRaises(ValueError) as caught:
        dry_run.try_reward(self.make(where, rewards=f"{self.path}:{name}"))
      message = str(caught.exception)
      self.assertStartsWith(
          message, f"config.task.rewards='{self.path}:{name}'"
      )
      self.assertRegex(message, f"{pattern}.*; must be a function of .prompt")
      self.assertNotIn("\n", message)

  @parameterized.parameters(
      ("hangs", 1.0, "no answer in 1 s"), ("dies", 30.0, "it ended, status 3")
  )
  @pytest.mark.slow
  def test_refuses_reward_without_result(self, name, deadline_s, pattern):
    config = self.make("pool", deadline_s, rewards=f"{self.path}:{name}")
    with self.assertRaisesRegex(ValueError, pattern):
      dry_run.try_reward(config)

  def test_refuses_exiting_reward(self):
    with self.assertRaisesRegex(ValueError, "task.rewards=.*with status 3"):
      validate.validate(self.make(rewards=f"{self.path}:dies"))

  @parameterized.parameters(
      (f"{sys.executable} -c 'print(1)'", ""),
      ("false", "false ended with 1"),
      ("no_such_command", "No such file"),
      ("echo many", "wrote 'many'.*must be a command that prints a number"),
  )
  @pytest.mark.slow
  def test_tries_command(self, command, pattern):
    config = self.make("pool", rewards="", verifier=command)
    if not pattern:
      dry_run.try_reward(config)
      return
    with self.assertRaisesRegex(
        ValueError, f"config.task.verifier=.*{pattern}"
    ):
      dry_run.try_reward(config)

  def test_tries_reason(self):
    config = self.make(rewards="exact", reason=f"{self.path}:field")
    with self.assertRaisesRegex(ValueError, "task.reason=.*py:11: KeyError"):
      dry_run.try_reward(config)

  def make_environment(self, said):
    source = self.path.replace("rewards.py", "said.py")
    pathlib.Path(source).write_text(
        f"class Says:\n  def reset(self, seed):\n    return {said!r}\n"
        "  def step(self, text):\n    return '', 1.0, True, {}\n"
    )
    config = self.make("pool")
    config.init = "scratch"
    config.task = ml_collections.ConfigDict(
        {"name": "environment", "source": f"{source}:Says"}
    )
    config.sampling.max_prompt_tokens = 4
    return config

  @parameterized.parameters(
      ("four", ""),
      (
          "letters",
          r"reset.*returned 7 tokens: must be 1 to .*max_prompt_tokens = 4",
      ),
      ("", "returned 0 tokens"),
      ([{"role": "user", "content": "one"}], "need a tokenizer with a chat te"),
  )
  @pytest.mark.slow
  def test_reads_first_observation_of_environment(self, said, pattern):
    config = self.make_environment(said)
    if not pattern:
      dry_run.try_prompts(config)
      return
    with self.assertRaisesRegex(
        ValueError, f"task.source=.*Says': .*{pattern}"
    ):
      dry_run.try_prompts(config)

  @parameterized.parameters(
      # What the template writes, what the prompt says, why it is refused.
      ("{{ tools }}", "2+2?", ""),
      ("", "2+2? Write add: 2, 2", ""),
      ("", "2+2?", "the policy does not see the tools add"),
      (
          "{{ tools }}{% for c in messages[-1].tool_calls or [] %}[TOOL_CALLS]"
          "{{ c.function.name }}{% endfor %}",
          "2+2?",
          r"tools: the chat template writes a call as .*\[TOOL_CALLS\]look_up",
      ),
  )
  @pytest.mark.slow
  def test_policy_must_see_tools(self, written, said, refusal):
    source = self.path.replace("rewards.py", "adds.py")
    said = [{"role": "user", "content": said}]
    pathlib.Path(source).write_text(
        f"class Adds:\n  def reset(self, seed):\n    return {said!r}\n"
        "  def add(self, left: int, right: int) -> int:\n"
        "    'Adds.'\n    return left + right\n"
        "  def get_reward(self, text):\n    return 1.0\n"
    )
    folder = pathlib.Path(self.create_tempdir().full_path)
    letters = sorted({*map(chr, range(32, 127)), "\n"})
    words = tokenizer.word_level(letters, r"[\s\S]")
    words.chat_template = (
        written + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    words.save(folder)
    config = self.make("pool")
    config.init = config.tokenizer.source = str(folder)
    config.task = ml_collections.ConfigDict(
        {"name": "environment", "source": f"{source}:Adds"}
    )
    config.sampling.max_prompt_tokens = 1000
    if not refusal:
      heading, text = dry_run.try_prompts(config)
      self.assertStartsWith(heading, "prompt: the first of train, in the chat")
      self.assertIn("2+2?", text)
      self.assertIn("add", text)
      return
    with self.assertRaisesRegex(ValueError, f"task.source=.*Adds': {refusal}"):
      dry_run.try_prompts(config)

  def test_tries_custom_code_used_by_program(self):
    values = {"loss.name": "tb", "loss.baseline": "", "offline.path": "",
              "reward.backend": "process", "evaluate.judge": ""}  # fmt: skip
    own = {"task.name": "custom", "task.rewards": "my.py:f"}
    plain = {"task.name": "countdown"}
    for task, program, tried in (
        ({"task.name": "countdown"}, "train", ()),
        ({"task.name": "custom", "task.rewards": "exact"}, "train", ()),
        (own, "train", ("reward",)),
        (own, "evaluate", ("reward",)),
        (own, "export", ()),
        ({**own, "task.rewards": "exact, judge * 2"}, "train", ("judge",)),
        ({**own, "task.rewards": "my.py:f, judge"}, "sft", ("reward", "judge")),
        ({**own, "task.rewards": "my.py:judge"}, "train", ("reward",)),
        ({**own, "task.rewards": "judge"}, "export", ()),
        ({**own, "loss.name": "l.py:f"}, "train", ("loss", "reward")),
        ({**own, "loss.name": "l.py:f"}, "sft", ("reward",)),
        ({**own, "reward.backend": "model"}, "train", ()),
        ({"task.name": "mine:Task"}, "train", ("reward",)),
        ({"task.name": "environment"}, "train", ("reward", "prompt")),
        ({"task.name": "environment"}, "searcher", ("reward",)),
        ({"task.name": "environment"}, "generate", ("reward",)),
        ({**plain, "offline.path": "l.jsonl"}, "train", ("log",)),
        ({**plain, "offline.path": "l.jsonl"}, "sft", ()),
        ({**plain, "loss.name": "a_star_po"}, "plan", ("log",)),
        ({**plain, "loss.baseline": "file"}, "train", ("log",)),
        ({**plain, "loss.baseline": "file"}, "sweep", ("log",)),
    ):
      self.assertEqual(custom_code.parts({**values, **task}, program), tried)


class LogTest(absltest.TestCase):

  def write(self, *prompts, completion="1"):
    one = {"completion": completion, "reward": 1.0}
    lines = [json.dumps({"prompt": prompt} | one) for prompt in prompts]
    return self.create_tempfile(content="\n".join(lines)).full_path

  def prompts(self, config):
    task = task_table.make_task(config.task)
    return [
        task.prompt(base.TRAIN, i) for i in range(task.num_prompts(base.TRAIN))
    ]

  def test_log_has_prompts_of_task(self):
    config = base_config.make()
    prompts = self.prompts(config)
    config.offline.path = self.write(prompts[1])
    dry_run.try_log(config)
    config.offline.path = self.write("no such prompt")
    with self.assertRaisesRegex(ValueError, "offline.path.*'no such prompt'"):
      dry_run.try_log(config)
    config.offline.path = self.write(prompts[1], completion="1 " * 5000)
    with self.assertRaisesRegex(ValueError, "usable: 1 have more than"):
      dry_run.try_log(config)

  def test_baselines_are_of_all_prompts(self):
    config = base_config.make(loss__name="a_star_po")
    prompts = self.prompts(config)
    config.loss.baseline_file = self.write(*prompts)
    dry_run.try_log(config)
    config.loss.baseline_file = self.write(*prompts[:-1])
    with self.assertRaisesRegex(ValueError, "baseline_file.*1 are missing"):
      dry_run.try_log(config)

  def test_runs_are_refused_before_they_begin(self):
    config = base_config.make()
    config.offline.path = self.write("no such prompt")
    with self.assertRaisesRegex(validate.ConfigError, "'no such prompt'"):
      validate.validate(config)
