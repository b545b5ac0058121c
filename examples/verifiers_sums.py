# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment of `verifiers` 0.4, trained by a server of this package.

    python examples/verifiers_sums.py --url=http://127.0.0.1:8700 --key=tml-…

in a venv with `verifiers`, which need not have this package. The server keeps
the replay buffer and takes the steps (docs/guides/serving.md); here episodes
are played. An episode has a URL of its own, which is the agent's endpoint, and
ends with the sum of the task's rewards. `Sums` is the part to put another
taskset in place of.
"""

import argparse
import asyncio
from collections.abc import Iterable
import os
import random
from typing import Any
import uuid

import httpx
import verifiers.v1 as vf

__all__ = ["InProcess", "Sums"]
_KEY = "TBA_JAX_KEY"
_HTTP = httpx.AsyncClient(timeout=None)


class SumData(vf.TaskData):
  answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
  """Asks for the sum of two numbers, and rewards it."""

  @vf.reward(weight=1.0)
  async def is_right(self, task: SumData, trace: vf.Trace) -> float:
    return float(trace.last_reply.strip() == task.answer)

  @vf.reward(weight=1.0)
  async def digits(self, trace: vf.Trace) -> float:
    """Returns the share of digits in the answer: all that is asked for."""
    said = trace.last_reply.strip()
    return sum(c.isdigit() for c in said) / max(1, len(said))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):

  def load(self) -> Iterable[Sum]:
    for a in range(10):
      for b in range(10):
        prompt = f"What is {a} + {b}?"
        yield Sum(SumData(prompt=prompt, answer=str(a + b)), self.config.task)


class InProcess(vf.Harness[vf.HarnessConfig]):
  """Says the prompt in this process; `null` starts one for each episode."""

  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(
      self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
  ) -> vf.ProgramResult:
    said = {"role": "user", "content": data.prompt}
    body = {"model": ctx.model, "messages": [said]}
    await _call(f"{endpoint}/chat/completions", secret, body)
    return vf.ProgramResult(0, "", "")


async def _call(url: str, key: str, body: Any = None) -> Any:
  """Returns the answer to a body, JSON; without one it is a GET."""
  answer = await _HTTP.request(
      "GET" if body is None else "POST",
      url,
      json=body,
      headers={"Authorization": f"Bearer {key}"},
  )
  if answer.is_error:
    raise RuntimeError(f"{url}: {answer.status_code}: {answer.text}")
  return answer.json()


async def train(
    url: str,
    key: str,
    *,
    num_steps: int,
    learning_rate: float,
    max_tokens: int,
    groups: int = 4,
    episodes: int = 8,
) -> tuple[list[float], dict[str, Any]]:
  """Plays until the server has taken its steps.

  Args:
    url: address of the server.
    key: its key.
    num_steps: optimizer steps.
    learning_rate: learning rate of AdamW.
    max_tokens: most tokens of an answer.
    groups: tasks of a round, and groups of a step.
    episodes: episodes of a task.

  Returns:
    Mean rewards by round, and the replay's state at the end.
  """
  os.environ[_KEY] = key  # Where verifiers takes it from.
  ask = lambda path, *body: _call(f"{url}/api/v1/{path}", key, *body)
  models = (await ask("get_server_capabilities"))["supported_models"]
  model = models[0]["model_name"]
  made = await ask(
      "create_replay",
      {
          "session_id": (await ask("create_session", {}))["session_id"],
          "replay_seq_id": 0,
          "base_model": model,
          "lora_config": {"rank": 16},
          "loss_fn": "tb",
          "loss_fn_config": {"beta": 0.05},
          "adam_params": {"learning_rate": learning_rate},
          "prompts_per_batch": groups,
          "completions_per_prompt": episodes,
          "num_steps": num_steps,
          "groups_per_step": groups,
          "publish_every_steps": 1,
      },
  )
  replay = made["replay_id"]
  await ask(f"replays/{replay}/start", {})

  env = vf.SingleAgentEnv(
      vf.SingleAgentEnvConfig(
          taskset={"id": "verifiers_sums"},
          agent=vf.AgentConfig(runtime=vf.SubprocessConfig()),
      )
  )
  tasks = list(env.taskset)

  async def play(task: vf.Task, path: str) -> float:
    client = vf.EvalClientConfig(base_url=url + path, api_key_var=_KEY)
    sampling = vf.SamplingConfig(max_tokens=max_tokens)
    played = await env.run_episode(
        task, vf.ModelContext(model, client, sampling)
    )
    if not played.ok:
      raise RuntimeError(played.errors or played.traces[0].errors)
    return sum(trace.reward for trace in played.traces)

  means = []
  async with env.serving():
    while (state := await ask(f"replays/{replay}"))["running"]:
      begun = []
      for task in random.sample(tasks, groups):
        body = {
            "sampling_session_id": made["sampling_session_id"],
            "into": "replay",
            "group": uuid.uuid4().hex,
            "num_episodes": episodes,
        }
        for _ in range(episodes):
          begun.append((task, await ask("create_episode", body)))
      rewards = await asyncio.gather(
          *(play(task, episode["path"]) for task, episode in begun)
      )
      for (_, episode), reward in zip(begun, rewards):
        finish = f"episodes/{episode['episode_id']}/finish"
        await ask(finish, {"reward": reward})
      means.append(sum(rewards) / len(rewards))
      print(f"step {state['step']}: mean reward {means[-1]:.3f}", flush=True)
  if state["reason"] != "done":
    raise RuntimeError(state["reason"])
  return means, state


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--url", required=True)
  parser.add_argument("--key", required=True)
  parser.add_argument("--steps", type=int, default=50)
  parser.add_argument("--learning_rate", type=float, default=1e-4)
  parser.add_argument("--max_tokens", type=int, default=5)
  args = parser.parse_args()
  asyncio.run(
      train(
          args.url,
          args.key,
          num_steps=args.steps,
          learning_rate=args.learning_rate,
          max_tokens=args.max_tokens,
      )
  )


if __name__ == "__main__":
  main()
