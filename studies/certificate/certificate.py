# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a certificate's bounds hold and tighten, where the target is known.

A run has four prompts, each a space of 50 completions in 25 solutions
(`learning/enumerable.py`), and a policy π ∝ π_ref exp(p r/β): p = 0 is the
reference and p = 1 the target. Its draws, and as many of the reference's, give
a certificate, which is compared with the exact values.

Operands: numbers of draws; 16, 64 and 256 by default.

    python -m studies --config=configs/countdown.py:quick certificate countdown

compares instead log Z and the mass not found with the truth on held-out
countdown prompts, before and after training. As rewards are 0 or 1, both follow
from log π_ref of all correct completions, which are enumerated: every order of
every solution, and every spelling of its numbers in tokens that fits.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math
import pathlib
import re
from typing import Any

import ml_collections
import numpy as np

from benchmarks import results
from studies import curves
from tba_jax.evaluation import certificate
from tba_jax.learning import batches
from tba_jax.learning import enumerable
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference_policy
from tba_jax.programs import inline
from tba_jax.system import ramps
from tba_jax.tasks import base
from tba_jax.tools import sweep

BETA = 0.25
_SIZE, _NUM_PROMPTS = 50, 4
_NUM_RUNS = 200
_PROGRESS = (0.0, 0.5, 0.9)
_DRAWS = ("16", "64", "256")
_COUNTDOWN = "countdown"
_COUNTDOWN_PROMPTS = 16
# Completions per forward pass of the reference.
_CHUNK = 64


def simulate(
    seed: int,
    *,
    num_draws: int,
    progress: float,
    failures: float = 0.0,
    size: int = _SIZE,
) -> tuple[certificate.Draws, dict[str, float]]:
  """Returns a prompt's draws, and the exact `log_z`, `tv`, `kl` and `unfound`.

  Args:
    seed: random seed of space and draws.
    num_draws: sample size for the policy, and for the reference.
    progress: p, see the module docstring.
    failures: probability that a draw could not be judged.
    size: number of completions, even.
  """
  rng = np.random.default_rng(seed)
  space = enumerable.make_space(size, seed=seed)
  rewards_N = space.rewards_N.astype(float)
  ref_N = _normalized(np.exp(space.ref_logprobs_N.astype(float)))
  z = (ref_N * np.exp(rewards_N / BETA)).sum()
  target_N = _normalized(ref_N * np.exp(rewards_N / BETA))
  policy_N = _normalized(ref_N * np.exp(progress * rewards_N / BETA))
  y_S, y_R = (rng.choice(size, num_draws, p=p) for p in (policy_N, ref_N))
  judge = lambda y: np.where(
      rng.random(len(y)) < failures, np.nan, rewards_N[y]
  )
  draws = certificate.Draws(
      rewards_S=judge(y_S),
      log_ratios_S=np.log(policy_N / ref_N)[y_S],
      ref_logprobs_S=np.log(ref_N)[y_S],
      texts_S=tuple(y_S),
      modes_S=tuple(y_S // 2),
      ref_rewards_R=judge(y_R),
      ref_texts_R=tuple(y_R),
      ref_modes_R=tuple(y_R // 2),
  )
  found_N = np.isin(np.arange(size) // 2, y_S // 2)
  return draws, {
      "log_z": math.log(z),
      "tv": np.abs(policy_N - target_N).sum() / 2,
      "kl": (policy_N * np.log(policy_N / target_N)).sum(),
      "unfound": target_N[~found_N].sum(),
  }


def certify(
    seeds: Sequence[int], **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
  """Returns the certificate of several prompts and the exact means."""
  draws, exact = zip(*(simulate(seed, **options) for seed in seeds))
  means = {name: float(np.mean([e[name] for e in exact])) for name in exact[0]}
  return certificate.certify(draws, BETA, max_reward=1.0), means


def misses(out: dict[str, Any], exact: dict[str, float]) -> list[str]:
  """Returns the names of the bounds that do not hold."""
  lower = [
      n for n in ("log_z", "tv", "kl") if out[f"{n}_lower"] > exact[n] + 1e-9
  ]
  upper = [n for n in exact if out[f"{n}_upper"] < exact[n] - 1e-9]
  return [f"{n}_lower" for n in lower] + [f"{n}_upper" for n in upper]


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns misses and mean bounds by p and draws; prints the table."""
  if operands and operands[0] == _COUNTDOWN:
    return _run_countdown(config, list(map(int, operands[1:] or _DRAWS)))
  table, out = [], {}
  for progress in _PROGRESS:
    for num_draws in map(int, operands or _DRAWS):
      runs = [
          certify(
              range(first, first + _NUM_PROMPTS),
              num_draws=num_draws,
              progress=progress,
          )
          for first in range(0, _NUM_RUNS * _NUM_PROMPTS, _NUM_PROMPTS)
      ]
      missed = sum(bool(misses(*one)) for one in runs)
      bounds, exact = (
          {name: float(np.mean([one[i][name] for one in runs]))
           for name in runs[0][i]} for i in (0, 1)
      )  # fmt: skip
      cells = {
          name: [bounds[f"{name}_lower"], exact[name], bounds[f"{name}_upper"]]
          for name in ("log_z", "tv", "kl")
      }
      cells["unfound"] = [exact["unfound"], bounds["unfound_upper"]]
      out[f"p={progress:g}, draws={num_draws}"] = {"missed": missed, **cells}
      table.append([
          f"{progress:g}", str(num_draws), f"{missed} of {len(runs)}",
          *(" ≤ ".join(f"{x:.2f}" for x in cell) for cell in cells.values()),
      ])  # fmt: skip
  results.print_table(
      [
          [
              "p",
              "draws",
              "missed",
              "log Z",
              "total variation",
              "KL",
              "not found",
          ],
          *table,
      ]
  )
  return out


@dataclasses.dataclass(frozen=True)
class Solutions:
  """The correct completions of a prompt, as the reference samples them.

  mass: solution -> its probability under the reference.
  texts: token ids of all correct completions, as bytes.
  """

  mass: dict[str, float]
  texts: set[bytes]

  def exact(self, draws: certificate.Draws, beta: float) -> dict[str, float]:
    """Returns the exact `log_z` and `unfound` of rewards 0 and 1."""
    right = sum(self.mass.values())
    wrong_texts = {
        text: logprob
        for text, logprob in zip(draws.texts_S, draws.ref_logprobs_S)
        if text not in self.texts
    }
    wrong = 1 - right - np.exp(list(wrong_texts.values())).sum()
    missing = sum(p for s, p in self.mass.items() if s not in draws.modes_S)
    # In units of exp(1/β).
    z = right + (1 - right) * math.exp(-1 / beta)
    return {
        "log_z": math.log(z) + 1 / beta,
        "unfound": (missing + wrong * math.exp(-1 / beta)) / z,
    }


def enumerate_solutions(
    policy: policy_lib.Policy,
    reference: reference_policy.Reference,
    index: int,
    max_tokens: int,
) -> Solutions:
  """Returns the solutions of a held-out countdown prompt.

  Args:
    index: number of the prompt.
    max_tokens: longest completion, with its stop token.
  """
  task, tokenizer = policy.task, policy.tokenizer
  texts, keys = [], []
  for text in task.correct_completions(base.HELD_OUT, index):
    pieces = re.findall(task.tokenizer_pattern, text)
    # "12" is one token, or "1" and "2".
    spellings = [{(piece,), tuple(piece)} for piece in pieces]
    spelled = [
        [sum(map(tokenizer.encode, parts), []) for parts in some]
        for some in spellings
    ]
    for parts in itertools.product(*spelled):
      ids = [*itertools.chain(*parts), tokenizer.eos_id]
      # A completion that was cut off is judged as if it had stopped.
      if len(ids) <= max_tokens + 1:
        texts.append(ids[:max_tokens])
        keys.append(task.solution_key(base.HELD_OUT, index, text))
  prompt = tokenizer.encode_prompt(task.prompt(base.HELD_OUT, index))
  mass = dict.fromkeys(keys, 0.0)
  for start in range(0, len(texts), _CHUNK):
    some = texts[start : start + _CHUNK]
    batch = batches.pad_sequences(
        [(prompt, some)],
        (1,),
        num_completions=_CHUNK,
        max_prompt_tokens=task.max_prompt_tokens,
        max_completion_tokens=max_tokens,
    )
    logprobs_1xKxT = reference.logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
    )
    for key, logprob in zip(
        keys[start:], np.asarray(logprobs_1xKxT[0].sum(-1))[: len(some)]
    ):
      mass[key] += math.exp(logprob)
  return Solutions(mass, {np.int32(ids).tobytes() for ids in texts})


def _first(draws: certificate.Draws, num_draws: int) -> certificate.Draws:
  return certificate.Draws(**{k: v[:num_draws] for k, v in vars(draws).items()})


def _run_countdown(
    config: ml_collections.ConfigDict, nums_draws: Sequence[int]
) -> dict[str, Any]:
  """Returns bounds and truth by policy and draws; prints the table.

  Raises:
    RuntimeError: a draw was judged correct, but is not among the solutions.
  """
  config = curves.fine_tune(config, pathlib.Path("runs") / "certificate")
  config = sweep.set_exact_lag(config, 1)
  with config.unlocked():
    config.evaluate.certificate = True
    config.evaluate.num_completions = max(nums_draws)
  beta = ramps.parse(config.loss.beta).end
  maker = inline.LoopMaker(config)
  loop, prompts = maker.make(config), range(_COUNTDOWN_PROMPTS)
  solutions: list[Solutions] = []
  table, out = [], {}

  def measure(name: str, step: int) -> None:
    params = maker.sampler.put(loop.learner.params)
    records = maker.evaluator.evaluate_batch(params, prompts, step)
    draws = [record["draws"] for record in records]
    for num_draws in nums_draws:
      some = [_first(one, num_draws) for one in draws]
      for one, known in zip(some, solutions):
        right = {t for t, r in zip(one.texts_S, one.rewards_S) if r}
        if not right <= known.texts:
          raise RuntimeError(f"unknown solutions {right - known.texts}")
      pairs = [s.exact(one, beta) for s, one in zip(solutions, some)]
      exact = {k: float(np.mean([p[k] for p in pairs])) for k in pairs[0]}
      alone = [certificate.certify([one], beta, 1.0) for one in some]
      bounds = certificate.certify(some, beta, 1.0)
      missed = sum(
          not (b["log_z_lower"] - 1e-4 <= p["log_z"] <= b["log_z_upper"] + 1e-4
               and p["unfound"] <= b["unfound_upper"] + 1e-4)
          for b, p in zip(alone, pairs)
      )  # fmt: skip
      row = {
          "log_z": [bounds["log_z_lower"], exact["log_z"],
                    bounds["log_z_upper"]],
          "unfound": [exact["unfound"], bounds["unfound_upper"]],
          "tv": [bounds["tv_lower"], bounds["tv_upper"]],
          "vacuous": [bounds["vacuous"]],
      }  # fmt: skip
      out[f"{name}, draws={num_draws}"] = {"missed": missed, **row}
      table.append([
          name, str(num_draws), f"{missed} of {len(some)}",
          *(" ≤ ".join(f"{x:.2f}" for x in cell) for cell in row.values()),
      ])  # fmt: skip

  try:
    max_tokens = config.sampling.max_completion_tokens
    solutions += [
        enumerate_solutions(maker.policy, maker.reference, i, max_tokens)
        for i in prompts
    ]
    measure("initial", 0)
    loop.train()
    measure("trained", config.train.num_steps)
  finally:
    maker.close()
  heads = ["policy", "draws", "prompts missed", "log Z", "not found",
           "total variation", "vacuous"]  # fmt: skip
  results.print_table([heads, *table])
  return out


def _normalized(mass_N: np.ndarray) -> np.ndarray:
  return mass_N / mass_N.sum()
