# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `reward_model` program: a scalar head learns from preferences.

    python -m tba_jax.main --program=reward_model --workdir=runs/tldr \\
        --config=configs/tldr_reward_model.py:quick

Pairs are read, put in the order of a gold model where `reward_model.relabel`
names one, and learned from by Bradley-Terry. `offline_training.py` has the
loop: an interrupted run goes on where it was, bit for bit.

Files, all below WORKDIR/reward_model: `settings.json` (what the model depends
on), `pairs/` (relabelled), `checkpoints/`, `metrics.jsonl`, and at the end
`evaluation.json` and `model/`, a folder that `transformers` loads as
`AutoModelForSequenceClassification`.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
import threading
import time
from typing import Any

import jax
import ml_collections
import numpy as np
import rich.console
import rich.table

from tba_jax import jsonl
from tba_jax import offline_training
from tba_jax import pair_objective
from tba_jax import policy as policy_lib
from tba_jax import preference_pairs
from tba_jax import reward_scorer
from tba_jax import sft_settings
from tba_jax import sharding
from tba_jax import tokenizer as tokenizer_lib
from tba_jax import train_step as train_step_lib
from tba_jax import types
from tba_jax.models import build
from tba_jax.models import config as model_config_lib
from tba_jax.models import heads
from tba_jax.models import hf
from tba_jax.tasks import base
from tba_jax.tasks import build as tasks_build
from tba_jax.tasks import examples as examples_lib

NAME = "reward_model"
_SPLITS = (base.TRAIN, base.HELD_OUT)


def run_reward_model(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline_training.run_program(
      NAME,
      config.trainer,
      functools.partial(run, config, workdir),
      lambda result: rich.console.Console().print(
          make_table(result["evaluation"])
      ),
  )


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    stop: threading.Event,
    on_progress: offline_training.Progress | None = None,
) -> dict[str, Any]:
  """Makes WORKDIR/reward_model/model, or finds it; continues what was begun.

  Args:
    config: reads `seed`, `task`, `tokenizer`, `model`, `reward_model`, `mesh`,
      `sharding`, `sampling`, `reward.batch_size`, `evaluate` and
      `checkpoint.keep`.
    workdir: of the run, local.
    stop: once set, the present chunk of steps is finished and saved.
    on_progress: called with (step, num_steps, metrics) at each log line.

  Returns:
    `model`: the folder; `interrupted`; `skipped`, True where the model was
    there; `step`; `num_steps`; `evaluation`: what `calibration.summarize` says
    of the held-out pairs, with `agreement` by split, the share of pairs whose
    label relabelling kept; `wall_s`.

  Raises:
    ValueError: a source is not there or has no pair, or what is in the folder
      was made with other settings.
    FloatingPointError: a loss is not finite; names the steps.
    OSError: a file cannot be written.
  """
  started = time.perf_counter()
  settings = config.reward_model
  folder = pathlib.Path(workdir) / NAME
  sft_settings.check(config, folder, section=NAME)
  result = {
      "model": str(folder / "model"),
      "interrupted": False,
      "skipped": False,
      "step": settings.num_steps,
      "num_steps": settings.num_steps,
      "evaluation": jsonl.read_json(folder / "evaluation.json") or {},
  }
  if (folder / "model" / "config.json").exists():
    return {**result, "skipped": True, "wall_s": time.perf_counter() - started}
  start = _Start(config, workdir)
  pairs = _read_pairs(config, folder, start.tokenizer, stop)
  if pairs is None:
    return {**result, "interrupted": True, "step": 0}
  make_examples = lambda split: preference_pairs.Examples(
      pairs[split],
      start.tokenizer,
      seed=config.seed,
      batch_size=settings.batch_size,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=settings.max_completion_tokens,
  )
  evaluate = pair_objective.make_evaluate(
      config,
      start.model,
      make_examples(base.HELD_OUT),
      pairs[base.HELD_OUT][: settings.evaluate_pairs],
  )
  job = _make_job(config, folder, start, make_examples(base.TRAIN), evaluate)
  params, done = offline_training.train(
      config, job, stop=stop, on_progress=on_progress
  )
  if not done["interrupted"]:
    agreement = {s: float(np.mean([p.agrees for p in pairs[s]])) for s in pairs}
    evaluation = {**evaluate(params), "agreement": agreement}
    done["evaluation"] = evaluation
    jsonl.atomic_write_json(folder / "evaluation.json", evaluation)
    hf.save(folder / "model", start.model.config, params, start.tokenizer)
  wall_s = time.perf_counter() - started
  return {**result, **done, "wall_s": wall_s}


def _make_job(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    start: "_Start",
    examples: preference_pairs.Examples,
    evaluate: Callable[[types.PyTree], dict[str, Any]],
) -> offline_training.Job:
  """Returns what `offline_training.train` makes the reward model of."""
  step_config = offline_training.step_config(config, NAME)
  mesh = sharding.make_mesh(config.mesh)
  return offline_training.Job(
      name=NAME,
      folder=folder,
      init_state=lambda: train_step_lib.init_state(
          step_config, start.model, start.params(), mesh
      ),
      abstract_state=train_step_lib.abstract_state(
          step_config, start.model, mesh
      ),
      train_step=train_step_lib.make_train_step(
          step_config,
          start.model,
          mesh,
          loss_fn=pair_objective.make_loss_fn(start.model),
      ),
      chunk=examples.chunk,
      evaluate=lambda params, step: {
          name: value
          for name, value in evaluate(params).items()
          if isinstance(value, float)
      },
      metric_names=("loss", "accuracy", "grad_norm", "learning_rate"),
  )


def make_table(evaluation: dict[str, Any]) -> rich.table.Table:
  """Returns the evaluation as a table, with what was right in each bin."""
  low, high = evaluation["accuracy_interval"]
  kept = ", ".join(f"{k} {v:.3f}" for k, v in evaluation["agreement"].items())
  table = rich.table.Table(
      title=f"{evaluation['num_pairs']} held-out pairs", show_header=False
  )
  for name, value in (
      ("accuracy", f"{evaluation['accuracy']:.3f} ({low:.3f} to {high:.3f})"),
      ("loss, nats a pair", f"{evaluation['loss']:.3f}"),
      ("calibration error", f"{evaluation['calibration_error']:.3f}"),
      ("labels that relabelling kept", kept),
      *(
          (
              f"said {b['predicted']:.2f}, right",
              f"{b['right']:.2f} of" f" {b['num_pairs']}",
          )
          for b in evaluation["bins"]
      ),
  ):
    table.add_row(name, value)
  return table


class _Start:
  """What training starts from: tokenizer, model, and its params when asked."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    source = config.reward_model.init
    self._folder = pathlib.Path(source).expanduser()
    if source == "sft":
      self._folder = policy_lib.sft_folder(workdir)
    if not (self._folder / "config.json").is_file():
      raise ValueError(
          f"config.reward_model.init={source!r}: no model is in"
          f" {self._folder}; make it with --program=sft, or name another folder"
      )
    self._seed = config.seed
    self.tokenizer = tokenizer_lib.load(self._folder, bos=config.tokenizer.bos)
    self._shape = hf.read_config(
        self._folder,
        dtype=config.model.param_dtype,
        compute_dtype=model_config_lib.compute_dtype(
            config.model, jax.default_backend()
        ),
    )
    if self._shape.num_labels not in (0, 1):
      raise ValueError(
          f"config.reward_model.init={source!r}: its head gives"
          f" {self._shape.num_labels} labels; allowed 1, or a policy"
      )
    self.model = build.make_scalar_model(
        self._shape if self._shape.num_labels else heads.config_of(self._shape)
    )

  def params(self) -> types.PyTree:
    """Returns the folder's params; a policy's get a random head."""
    _, params = hf.load(self._folder, dtype=self._shape.param_dtype)
    if self._shape.num_labels:
      return params
    return self.model.from_policy(params, jax.random.PRNGKey(self._seed))


def _read_pairs(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    tokenizer: tokenizer_lib.Tokenizer,
    stop: threading.Event,
) -> dict[str, list[preference_pairs.Pair]] | None:
  """Returns the pairs of both splits; None where it was stopped."""
  settings = config.reward_model
  limits = (
      (config.sampling.max_prompt_tokens, "too_long"),
      *[(settings.max_completion_tokens, "answer_too_long")] * 2,
  )

  def fits(pair: preference_pairs.Pair) -> str:
    found = zip(preference_pairs.encode(pair, tokenizer), limits)
    return next((why for ids, (most, why) in found if len(ids) > most), "")

  task = tasks_build.make_task(config.task)
  report = examples_lib.Report()
  pairs = {
      split: preference_pairs.load(
          settings[split],
          f"config.{NAME}.{split}",
          split,
          task,
          report,
          fits=fits,
          stop_text=tokenizer.decode([tokenizer.eos_id]),
      )
      for split in _SPLITS
  }
  for line in report.lines():
    print(f"data: {line.replace('prompts', 'pairs', 1)}", flush=True)
  jsonl.atomic_write_json(folder / "data.json", report.to_json())
  _check_disjoint(pairs)
  if not settings.relabel:
    return pairs
  score = _make_gold(config, task)
  for split in _SPLITS:
    found = preference_pairs.relabel(
        pairs[split],
        score,
        folder / "pairs" / f"{split}.jsonl",
        lambda done, total, split=split: print(
            f"{split} pairs labelled: {done}/{total}", flush=True
        ),
        stop.is_set,
    )
    if found is None:
      return None
    pairs[split] = found
  return pairs


def _check_disjoint(pairs: dict[str, list[preference_pairs.Pair]]) -> None:
  """Raises where a held-out pair is a training pair too."""
  key = lambda pair: (pair.prompt, frozenset((pair.chosen, pair.rejected)))
  trained = {key(pair): pair.place for pair in pairs[base.TRAIN]}
  shared = [p for p in pairs[base.HELD_OUT] if key(p) in trained]
  if shared:
    first = shared[0]
    raise ValueError(
        f"config.{NAME}.held_out: {len(shared)} pairs are training pairs too,"
        f" the first {first.place} = {trained[key(first)]}; allowed none"
    )


def _make_gold(
    config: ml_collections.ConfigDict, task: base.Task
) -> Callable[[Sequence[tuple[str, str]]], np.ndarray]:
  """Returns [(prompt, completion)] -> scores [N] of who labels the pairs."""
  source = config.reward_model.relabel
  if source == "task":
    return lambda texts: np.array([task.reward_of(*text) for text in texts])
  scorer = reward_scorer.load(config, f"{NAME}.relabel", source)
  return lambda texts: scorer.score(
      [reward_scorer.Text(*text) for text in texts]
  )
