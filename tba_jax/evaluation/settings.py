# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of evaluations."""

import shlex
import shutil

from tba_jax.system import ramps
from tba_jax.system import rules
from tba_jax.tasks import task_table

_s = rules.Setting

# fmt: off
SECTIONS = {
    "evaluate": rules.Section("Evaluation on held-out prompts, while training"
        " and by `--program=evaluate`.", hosts="searcher"),
}

SETTINGS = {
    "evaluate.every_steps": _s(80, rules.FROM_0, "steps between evaluations; 0"
        " = only before and after training", auto=True),
    "evaluate.background": _s(True, rules.FLAG, "whether a thread evaluates"
    " while"
        " training continues; not in lockstep"),
    "evaluate.deadline_s": _s(600.0, rules.WAIT, "limit of an evaluation during"
        " training; of --inspect: of the time without a call"),
    "evaluate.num_prompts": _s(256, rules.FROM_0, "prompts while training, at"
        " most: as many as there are; 0 = none", auto=True),
    "evaluate.num_completions": _s(8, rules.COUNT, "k of pass@k", auto=True),
    "evaluate.final_prompts": _s(1000, rules.FROM_0, "prompts before and after"
        " training, at most: as many as there are; 0 = no such evaluation",
        auto=True),
    "evaluate.batch_prompts": _s(64, rules.COUNT, "prompts decoded at a time",
        auto=True),
    "evaluate.greedy": _s(False, rules.FLAG, "whether to evaluate each prompt's"
        " greedy completion too"),
    "evaluate.certificate": _s(False, rules.FLAG, "whether to bound the"
        " distance to the target of trajectory balance; draws as many"
        " completions from the reference as from the policy"
        " (docs/reference/objectives.md)"),
    "evaluate.max_reward": _s(None, rules.NUMBER_OR_NONE, "largest reward that"
        " a completion can have, for upper bounds of the certificate; None ="
        " the task's, if it is known"),
    "evaluate.judge": _s("", rules.TEXT, "judge that compares completions with"
        " the task's reference, for the win-rate: '' none, 'task' the task's"
        " reward, 'command' judge_command, or the Hugging Face folder of a gold"
        " model", files=True),
    "evaluate.judge_command": _s("", rules.TEXT, "reads pairs, writes verdicts"
        " (docs/guides/offline_data.md)", files=True,
        read_with=("evaluate.judge", ("command",))),
    "evaluate.judge_deadline_s": _s(60.0, rules.WAIT, "limit for one pair"),
    "evaluate.variants": _s("", rules.TEXT, "task settings that"
        " `--program=evaluate` tries in turn, as"
        " 'prompt_format=tba;prompt_format=sft'; '' = the run's"),
}
# fmt: on


# Programs that compare completions.
_WITH_JUDGE = ("train", "trainer", "one_process", "evaluate")


def _judge_command(c: rules.Values) -> rules.Problems:
  """Checks that the judge's command exists where completions are compared."""
  if c["evaluate.judge"] != "command":
    return
  if not c["evaluate.judge_command"]:
    yield "evaluate.judge_command", (
        "must be a command with config.evaluate.judge = 'command'"
    )
  if c.program not in _WITH_JUDGE:
    return
  try:
    words = shlex.split(c["evaluate.judge_command"])
  except ValueError as error:
    yield "evaluate.judge_command", f"must be a command; {error}"
    return
  if words and shutil.which(words[0]) is None:
    yield "evaluate.judge_command", (
        f"must be a command of this machine; there is no program {words[0]!r}"
    )


def _certificate(c: rules.Values) -> rules.Problems:
  """Checks that the evaluation samples from policy and reference themselves."""
  if not c["evaluate.certificate"]:
    return
  if c["sampling.temperature"] <= 0:
    yield "sampling.temperature", (
        "must be above 0 with config.evaluate.certificate, whose weights are"
        " ratios of probabilities"
    )
  if ramps.parse(c["loss.beta"]).end <= 0:
    yield "loss.beta", (
        "must end above 0 with config.evaluate.certificate, because exp(r/beta)"
        " defines the target"
    )
  if c.get("task.min_k"):
    yield "task.min_k", (
        "must be 0 with config.evaluate.certificate, which certifies the task's"
        " own rewards"
    )
  if c.program != "evaluate" and c["reference.role"] != "trainer":
    yield "reference.role", (
        "must be 'trainer' with config.evaluate.certificate, because the"
        " evaluation draws from the reference"
    )
  if task_table.facts(c["task.name"]).has_turns:
    yield "evaluate.certificate", (
        "must be False for a task with environments, whose answers have unknown"
        " probabilities"
    )


CHECKS = (
    _certificate,
    rules.require(
        "evaluate.certificate",
        bool,
        {
            "sampling.top_k": (0,),
            "sampling.top_p": (1.0,),
            "sampling.min_p": (0.0,),
            "explore.min_tokens": (0,),
            "explore.max_tokens": (0,),
            "reference.mode": ("fixed",),
            # The target is defined by the task's own rewards.
            "loss.reward_weight": (1.0,),
            "loss.missing_stop": ("keep",),
            "reward.normalize_parts": (False,),
            "tempering.tau": (1.0,),
            "tempering.gamma": (1.0,),
            # Its reference is in one process.
            "trainer.num_processes": (1,),
        },
    ),
    rules.require(
        "checkpoint.keep_best",
        bool,
        {"evaluate.every_steps": "above 0", "evaluate.num_prompts": "above 0"},
    ),
    _judge_command,
)
