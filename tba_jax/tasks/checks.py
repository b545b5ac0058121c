# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that settings and the task fit each other."""

from tba_jax.environments import checks as environments
from tba_jax.losses import objective_table
from tba_jax.models import checks as models
from tba_jax.system import rules
from tba_jax.tasks import base
from tba_jax.tasks import rows_task
from tba_jax.tasks import task_table


def fits(c: rules.Values) -> rules.Problems:
  """Checks text lengths, numbers of prompts, and features of the task."""
  try:
    task = task_table.configured_task(c)
  except ValueError as error:
    yield "", str(error)
    return
  start = c.get("sft.init") if c.get("init") == "sft" else c.get("init")
  # A model's folder has its own tokenizer, with different tokens.
  if c.get("tokenizer.source") == "task" and start == "scratch":
    # Data rows that are too long are dropped instead.
    has_rows = isinstance(task, rows_task.RowsTask)
    read = task.report is not None
    for key, needed, what in (
        (
            "sampling.max_prompt_tokens",
            0 if has_rows else task.max_prompt_tokens,
            "prompt",
        ),
        (
            "sampling.max_completion_tokens",
            0 if read else task.max_completion_tokens,
            "correct completion, with its stop token,",
        ),
    ):
      if c.get(key, needed) < needed:
        yield key, (
            f"must be {needed} or more: the longest {what} has {needed} tokens"
        )
  yield from _lacks(c, task)
  # Reward models are trained on pairs instead.
  needs_prompts = c.program not in ("evaluate", "reward_model")
  if needs_prompts and not task.num_prompts(base.TRAIN):
    yield "task.name", (
        "needs --program=evaluate: the task has no training prompts"
    )
  learns_log_z = objective_table.find(c.get("loss.name")).learns_log_z
  if learns_log_z and task.num_prompts("train") > 1:
    yield "loss.name", (
        "needs one training prompt, since it learns one log Z; this task"
        f" has {task.num_prompts('train')}. 'tb' estimates it for each prompt,"
        " 'subtb' learns it for each"
    )
  if not task.num_prompts(base.split_while_training(task)):
    if c.get("checkpoint.keep_best"):
      yield "checkpoint.keep_best", (
          "must be False: the task has no held-out prompts to choose by"
      )
  if c.program == "evaluate" and not task.num_prompts(base.HELD_OUT):
    yield "task.name", (
        "must have held-out prompts for --program=evaluate, such as"
        " config.task.test or config.task.held_out of the task 'custom'"
    )


def _lacks(c: rules.Values, task: base.PromptSet) -> rules.Problems:
  """Yields a problem for each feature that settings need and the task lacks."""
  if c.get("tokenizer.source") == "task" and _starts_from_scratch(c):
    last = 2 + len(task.tokenizer_words())  # After <pad>, <eos> and <unk>.
    if any(i > last for i in models.stop_ids(c)):
      yield "sampling.stop_token_ids", f"must be 0 to {last}"
    if c.get("tokenizer.chat"):
      yield "tokenizer.chat", (
          "needs a tokenizer with a chat template: its folder as"
          " source or init"
      )
  if task.has_turns:
    yield from environments.fits(c, task)
  if c.get("reward.normalize_parts") and len(task.part_weights) < 2:
    yield "reward.normalize_parts", (
        "needs two rewards or more (config.task.rewards of the task"
        " 'custom')"
    )
  url = c.get("reward.url")
  if url is not None and task.has_judge != bool(url):
    yield "reward.url", (
        "must be the URL of the judge in config.task.rewards"
        if task.has_judge
        else "must be '' without 'judge' in config.task.rewards of the task"
        " 'custom'"
    )
  if c.program not in ("sft", "reward_model") and not task.has_reward:
    needs = f"the task {c['task.name']!r} has no reward of its own"
    if c.get("reward.backend", "model") != "model":
      yield "reward.backend", f"must be 'model': {needs}"
    if c.get("evaluate.judge") == "task":
      yield "evaluate.judge", (
          f"must be '', 'command' or a gold model's folder: {needs}"
      )


def _starts_from_scratch(c: rules.Values) -> bool:
  try:
    return models.start(c)[0] == "scratch"
  except KeyError:
    return False


def _rewards_where(c: rules.Values) -> rules.Problems:
  where = task_table.facts(c["task.name"]).rewards_where
  if where and c["reward.backend"] not in where:
    yield "reward.backend", (
        f"must be {' or '.join(map(repr, where))} with config.task.name ="
        f" {c['task.name']!r}"
    )


def _filter(c: rules.Values) -> rules.Problems:
  if c.get("task.min_k") and c["reference.role"] != "searcher":
    yield "reference.role", (
        f"must be 'searcher' with config.task.min_k = {c['task.min_k']!r},"
        " which filters groups by the reference's log-probs"
    )


def _packages(c: rules.Values) -> rules.Problems:
  for package, extra in task_table.facts(c["task.name"]).packages.items():
    if lack := not c.elsewhere and rules.lacks(package, extra):
      yield "task.name", lack


# fmt: off
CHECKS = (
    rules.require("task.name", lambda v: not task_table.facts(v).has_embeddings,
                  {"replay_filter.similarity": ("none", "edit")}),
    # Only the pool bounds the time of a command.
    rules.require("task.verifier", bool, {"reward.backend": ("pool",)}),
    _rewards_where, _filter, _packages,
)
# fmt: on
