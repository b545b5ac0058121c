# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tries custom code and offline data: `python -m tba_jax.learning.dry_run`.

Reads the config and the names of the checks (`config/custom_code.py`) as JSON
from standard input; writes [problems, notes] as JSON to standard output. The
checks trace the loss, compute the reward of an example as a run does, read the
first observations of environments, ask a judge over HTTP, and match offline
data with prompts.
"""

import contextlib
import dataclasses
import json
import os
import sys

import ml_collections

from tba_jax.config import custom_code
from tba_jax.environments import episode_pool
from tba_jax.policy import prompt_preview
from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.rewards import url_judge
from tba_jax.system import processes
from tba_jax.system import ramps
from tba_jax.system import user_code
from tba_jax.tasks import base
from tba_jax.tasks import task_table

# Number of first training prompts, of which at least one must be readable.
_NUM_PROMPTS = 4


def main() -> int:
  """Prints [problems, notes] as JSON and exits with status 0."""
  processes.die_with_parent()
  given, tried = json.load(sys.stdin)
  # Redirect user code's prints, so that they do not mix with the answer.
  answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  config, problems, notes = ml_collections.ConfigDict(given), [], []
  checks = {
      custom_code.LOSS: trace_loss,
      custom_code.REWARD: try_reward,
      custom_code.JUDGE: try_judge,
      custom_code.PROMPT: try_prompts,
      custom_code.LOG: try_log,
  }
  for name in tried:
    try:
      notes += checks[name](config) or ()
    except ValueError as error:
      problems.append(str(error))
  with answer:
    json.dump([problems, notes], answer)
  processes.leave(0)


def trace_loss(config: ml_collections.ConfigDict) -> None:
  """Traces `config.loss` on a micro-batch's shapes, then on random data.

  Raises:
    ValueError: the loss raises, does not return a loss, or has no gradient.
  """
  with processes.importing():  # Takes seconds.
    import jax  # pylint: disable=g-import-not-at-top
    import numpy as np  # pylint: disable=g-import-not-at-top

    from tba_jax import types  # pylint: disable=g-import-not-at-top
    from tba_jax.losses import objective  # pylint: disable=g-import-not-at-top
    from tba_jax.losses import objective_table  # pylint: disable=g-import-not-at-top

  c, sampling = config.train, config.sampling
  B = min(c.micro_batch_prompts, c.prompts_per_batch)
  K, T = c.completions_per_prompt, sampling.max_completion_tokens
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, np.float32)
  batch = types.abstract_batch(
      {"B": B, "K": K, "P": sampling.max_prompt_tokens, "T": T}
  )
  if objective_table.baseline(config.loss) == "file":
    batch.prepared["baselines_Bx1"] = shape(B, 1)
  pure_loss = objective.make_pure_loss(config)
  gradient = jax.jit(
      jax.grad(lambda x, *others: pure_loss(x, {}, *others), has_aux=True)
  )
  jax.eval_shape(gradient, shape(B, K, T), batch, shape())
  # Random data: binary rewards, then real-valued ones.
  rng = np.random.default_rng(0)
  for rewards in (rng.integers(0, 2, (B, K)), rng.normal(size=(B, K))):
    filled = jax.tree.map(
        lambda x: -np.abs(rng.normal(size=x.shape)).astype(x.dtype)
        if x.dtype.kind == "f"
        else np.ones(x.shape, x.dtype),
        batch,
    )
    filled = dataclasses.replace(
        filled,
        rewards=np.float32(rewards),
        prompt_mask=np.ones_like(filled.prompt_mask),
        completion_mask=np.ones_like(filled.completion_mask),
    )
    logprobs_BxKxT = -np.abs(rng.normal(size=(B, K, T))).astype(np.float32)
    beta = np.float32(ramps.parse(config.loss.beta).start)
    if np.any(gradient(logprobs_BxKxT, filled, beta)[0]):
      return
  raise ValueError(
      f"config.loss.name={config.loss.name!r}: its gradient with respect to"
      " groups.logprobs_BxKxT is 0, so nothing would be learned; must depend on"
      " log-probs outside of stop_gradient, int and argmax"
      " (docs/reference/objectives.md)"
  )


def try_reward(config: ml_collections.ConfigDict) -> None:
  """Judges completions of the first training prompt as a run does.

  Raises:
    ValueError: the task raises, or no completion could be judged.
  """
  if task_table.facts(config.task.name).has_turns:
    try_environment(config)
    return
  name, field = config.task.name, _field(config.task)
  try:
    task = task_table.make_task(config.task)
    for split in task.splits:
      task.num_prompts(split)
    prompt = task.prompt(base.TRAIN, 0)
    right = base.reference_text(task, base.TRAIN, 0)
    if not isinstance(prompt, str) and not base.are_messages(prompt):
      raise TypeError("prompt must return a string or messages")
    if not isinstance(right, str):
      raise TypeError("reference_completion must return a string")
  except ValueError as error:
    if user_code.place_of(error):
      raise ValueError(
          f"config.task.name={name!r}: {user_code.describe(error)}"
      ) from error
    raise
  # User code may raise anything.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f"config.task.name={name!r}: {user_code.describe(error)}"
    ) from error
  events: list[str] = []
  # No workdir to hide from the judge: no model has written these texts.
  judge = pool.make_judge(
      config, "", task, lambda kind, text: events.append(text)
  )
  try:
    # A reward may fail on a text that is not an answer.
    for text in dict.fromkeys((right, base.plain_text(prompt), "1")):
      request = judges.JudgeRequest(base.TRAIN, 0, text, tokens=(0,))
      judged = judge.judge([request])[0]
      if judged.failure in ("", "deadline"):
        break
    if judged.failure:
      why = _cause(judged, events, field)
      raise ValueError(f"config.task.{field}={config.task[field]!r}: {why}")
    (reason,) = judge.explain([request])
    if reason.startswith(judges.no_reason("")[:-1]):
      field = "reason" if config.task.get("reason") else field
      raise ValueError(f"config.task.{field}={config.task[field]!r}: {reason}")
  finally:
    judge.close()


def try_judge(config: ml_collections.ConfigDict) -> list[str]:
  """Asks the model at `config.reward.url` once; returns a line with its answer.

  Raises ValueError if it gives no score.
  """
  return [url_judge.probe(config.reward, task_table.make_task(config.task))]


def try_environment(config: ml_collections.ConfigDict) -> None:
  """Starts an episode of the first training prompt and takes one turn.

  Raises:
    ValueError: the environment cannot be imported, or fails.
  """
  task = task_table.make_task(config.task)
  seed = task.seed(base.TRAIN, 0)
  workers = episode_pool.make(config, "", None)
  try:
    with workers.hold() as worker:
      for message in (["reset", seed], ["reset", seed], ["step", "1"]):
        answer = worker.call(message)
        if answer.get("failure") == "deadline":
          return  # Slow machine. A new worker would have no episode to step.
        if "failure" in answer:
          raise ValueError(
              f"config.task.source={config.task.source!r}: {message[0]} fails"
              f" ({answer['failure']}): {answer['message']}; must be an"
              " environment as described in docs/guides/agents.md"
          )
  finally:
    workers.close()


def try_prompts(config: ml_collections.ConfigDict) -> list[str]:
  """Encodes first observations as the policy reads them.

  Returns:
    Lines that show the first prompt and, as the chat template renders them, its
    tools.

  Raises:
    ValueError: none of the first training prompts can be read, or the chat
      template leaves out a tool.
  """
  with processes.importing():  # Takes seconds.
    from tba_jax.environments import turns  # pylint: disable=g-import-not-at-top

  task = task_table.make_task(config.task)
  tokenizer = prompt_preview.prompt_tokenizer(config, task)
  made = turns.Environments(
      task,
      tokenizer,
      episode_pool.make(config, "", None),
      config.sampling.max_prompt_tokens,
  )
  first = range(min(_NUM_PROMPTS, task.num_prompts(base.TRAIN)))
  with contextlib.closing(made):
    prompts = made.prompts(base.TRAIN, first)
  # `try_environment` reports an environment without any observation.
  if all(one.failure and one.observation is not None for one in prompts):
    raise ValueError(
        f"config.task.source={config.task.source!r}: {prompts[0].failure[1]}"
    )
  first = next((one for one in prompts if not one.failure), None)
  if first is None or prompt_preview.tokenizer_folder(config) == "task":
    return []
  # SFT demonstrates tool calls, so the prompt need not describe them.
  tools = () if config.init in ("scratch", "sft") else first.tools
  try:
    lines = prompt_preview.prompt_lines(
        first.observation, base.TRAIN, tokenizer, tools
    )
    return [*lines][:2]
  except ValueError as error:
    raise ValueError(
        f"config.task.source={config.task.source!r}: {error}"
    ) from error


def try_log(config: ml_collections.ConfigDict) -> list[str]:
  """Looks up the training prompts in offline completions and baselines.

  Uses the run's tokenizer, or the one that SFT starts with.

  Returns:
    Lines on how many completions are used and left out.

  Raises:
    ValueError: no offline completion can be used, or the baseline file lacks a
      training prompt.
  """
  with processes.importing():  # Takes seconds.
    from tba_jax.losses import objective_table  # pylint: disable=g-import-not-at-top
    from tba_jax.policy import policy as policy_lib  # pylint: disable=g-import-not-at-top
    from tba_jax.sampling import offline_sampler  # pylint: disable=g-import-not-at-top
    from tba_jax.tasks import offline_completions as tasks_logged  # pylint: disable=g-import-not-at-top

  policy = policy_lib.make_policy(config, "", scratch=config.init == "sft")
  task, tokenizer, notes = policy.task, policy.tokenizer, []
  if config.offline.path:
    found = offline_sampler.Log(
        config,
        task,
        tokenizer,
        needs_logprobs=objective_table.needs_logprobs(
            config.loss, config.optimizer
        ),
    )
    first, *others = found.report()
    notes.append(f"log: {config.offline.path}: {first}")
    notes += [f"  {line}" for line in others]
  if objective_table.baseline(config.loss) == "file":
    tasks_logged.values(
        config.loss.baseline_file,
        task,
        tokenizer,
        reward_field=config.offline.reward_field,
        temperature=config.loss.baseline_temperature,
    )
  return notes


def _field(task: ml_collections.ConfigDict) -> str:
  """Returns the task field that names the user's code."""
  if task.name != "custom":
    return "name"
  return "rewards" if ":" in task.rewards else "verifier"


def _cause(judged: base.Judgement, events: list[str], field: str) -> str:
  """Returns why a completion could not be judged, and what is expected."""
  # An event begins with the cause, its count and the prompt.
  why = events[-1].partition(": prompt 0 of 'train': ")[2] if events else ""
  allowed = "a function of (prompt, completion, row) that returns a number"
  if field == "verifier":
    allowed = "a command that prints a number"
  elif field == "name":
    allowed = "a task whose judge() returns a finite reward"
  return (
      f"a completion of the first prompt cannot be judged ({judged.failure}):"
      f" {why.strip().removesuffix(':')}; must be {allowed}"
      " (docs/guides/your_reward.md)"
  )


if __name__ == "__main__":
  sys.exit(main())
