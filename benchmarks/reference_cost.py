# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Time saved without a reference, in a searcher's round and a train step.

Alternates, at the config's sizes and with a random model, between a searcher's
round with and without reference log-probs (`reference.role` `searcher` and
`none`), and between train steps of TB (role `trainer`) and of OAPL, which needs
no reference. The operand is the number of turns (default 20). Ratios are
medians over the turns.
"""

from collections.abc import Callable, Sequence
import dataclasses
import statistics
import time
from typing import Any

import ml_collections

from tba_jax import collect
from tba_jax import types
from tba_jax.learning import group_reference
from tba_jax.programs import inline
from tba_jax.tools import sweep

_TURNS = 20


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns median seconds, and their ratios without and with the reference.

  Args:
    config: settings of sizes and model.
    operands: number of turns, if any.
  """
  turns = int(operands[0]) if operands else _TURNS
  config = sweep.set_exact_lag(config, 0)
  with config.unlocked():
    config.init = "scratch"
    config.replay.recent_window_steps = 1
    config.replay.skip_equal_rewards = False
  maker = inline.LoopMaker(config)
  try:
    return {
        "round": _in_turn(*_rounds(config, maker), turns),
        "step": _in_turn(*_steps(config, maker), turns),
    }
  finally:
    maker.close()


def _rounds(
    config: ml_collections.ConfigDict, maker: inline.LoopMaker
) -> tuple[Callable[[], None], Callable[[], None]]:
  """Returns a searcher's round without the reference, and with it."""
  loop = maker.make(config, "tb")
  params = loop.learner.params
  reference = group_reference.GroupReference(config, maker.policy, params)
  position = 0

  def run_round(reference: group_reference.GroupReference | None) -> None:
    nonlocal position
    collector = collect.Collector(
        maker.policy.task,
        maker.policy.tokenizer,
        maker.sampler,
        maker.judge,
        num_completions=config.search.samples_per_prompt,
        reference=reference,
        seed=config.seed,
    )
    count = config.search.prompts_per_round
    places = range(position, position + count)
    prompts = [(i, *loop.order.prompt(i)) for i in places]
    position += count
    collector(prompts, params, 0)

  return lambda: run_round(None), lambda: run_round(reference)


def _steps(
    config: ml_collections.ConfigDict, maker: inline.LoopMaker
) -> tuple[Callable[[], None], Callable[[], None]]:
  """Returns a step of OAPL, and one of TB with the pass of its reference."""
  steps_config = config.copy_and_resolve_references()
  steps_config.loss.name = "oapl"
  steps_config.reference.role = "none"
  out = []
  for name, c in (("oapl", steps_config), ("tb", config)):
    loop = maker.make(c, name)
    draws: list[types.Draw] = []
    loop.train(
        lambda step, draw, metrics, draws=draws: draws.append(draw),
        should_stop=lambda draws=draws: bool(draws),
    )
    # Reset to before the step cached the reference's log-probs.
    (draw,) = draws
    draw = dataclasses.replace(draw, ref_versions=draw.ref_versions * 0 - 1)

    def step(learner=loop.learner, draw=draw):
      learner.read(learner.step(draw))
      learner.finish()

    out.append(step)
  return out[0], out[1]


def _in_turn(
    without: Callable[[], Any], with_reference: Callable[[], Any], turns: int
) -> dict[str, float]:
  seconds: list[tuple[float, float]] = []
  for turn in range(turns + 1):
    pair = []
    for function in (without, with_reference):
      started = time.perf_counter()
      function()
      pair.append(time.perf_counter() - started)
    if turn:  # The first turn compiles.
      seconds.append((pair[0], pair[1]))
  columns = zip(*seconds, strict=True)
  without_s, with_s = (statistics.median(column) for column in columns)
  return {
      "without_s": without_s,
      "with_s": with_s,
      "ratio": statistics.median(a / b for a, b in seconds),
  }
