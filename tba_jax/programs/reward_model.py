# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `reward_model` program: trains a scalar head on preference pairs.

    python -m tba_jax.main --program=reward_model --workdir=runs/tldr \\
        --config=configs/tldr/reward_model.py:quick

Reads pairs of completions, relabels them with a gold model if
`reward_model.relabel` names one, and fits the Bradley-Terry model.

Files in WORKDIR/reward_model: `settings.json` (all that the model depends on),
`data.json` (rows used and left out), `pairs/` (relabelled), `checkpoints/`,
`metrics.jsonl`, and at the end `evaluation.json` and `model/`, which
`transformers` loads as `AutoModelForSequenceClassification`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import rich.console
import rich.table

from tba_jax import types
from tba_jax.evaluation import evaluator
from tba_jax.learning import batches
from tba_jax.learning import offline
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import pairwise
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tba_jax.policy import frozen_models
from tba_jax.policy import policy
from tba_jax.rewards import reward_scorer
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import task_table

NAME = "reward_model"
# Number of pairs that relabelling scores and writes at a time.
_LABEL_PAIRS = 256
_NUM_BINS = 10
_EVALUATION = {
    "accuracy": float,
    "accuracy_interval": [float],
    "loss": float,
    "calibration_error": float,
    "num_pairs": int,
    "agreement": {"*": float},
    "bins": [{"num_pairs": int, "predicted": float, "right": float}],
}


@dataclasses.dataclass(frozen=True)
class Pair:
  """A preference pair: two completions of a prompt, without stop tokens.

  place: file and line of the pair, or its number.
  agrees: whether relabelling kept the label; True before relabelling.
  """

  place: str
  prompt: str
  chosen: str
  rejected: str
  agrees: bool = True


def run_reward_model(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline.run_program(
      NAME, config, functools.partial(run, config, workdir)
  )


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    stop: threading.Event,
    on_progress: offline.Progress | None = None,
) -> dict[str, Any]:
  """Trains WORKDIR/reward_model/model unless it exists, see `offline.run`.

  The result's `evaluation` is the `calibration_summary` of the held-out pairs,
  with `agreement` by split, the share of labels that relabelling kept.
  """
  result = offline.run(
      NAME,
      config,
      workdir,
      functools.partial(_prepare, config, workdir),
      stop=stop,
      on_progress=on_progress,
  )
  if result["skipped"]:
    path = pathlib.Path(workdir) / NAME / "evaluation.json"
    result["evaluation"] = jsonl.read_object(path, _EVALUATION) or {}
  if result["evaluation"] and not result["interrupted"]:
    rich.console.Console().print(make_table(result["evaluation"]))
  return result


@contextlib.contextmanager
def _prepare(
    config: ml_collections.ConfigDict,
    workdir: str,
    folder: pathlib.Path,
    stop: threading.Event,
) -> Iterator[offline.Job | None]:
  model, tokenizer, init_params = initial_model(config, workdir)
  pairs = _read_pairs(config, folder, tokenizer, stop)
  if pairs is None:
    yield None
    return
  held_out = pairs[base.HELD_OUT][: config.reward_model.evaluate_pairs]
  evaluate = _make_evaluate(config, model, held_out, tokenizer)

  def save(params: types.PyTree, _: dict[str, float]) -> dict[str, Any]:
    agreement = {
        split: float(np.mean([pair.agrees for pair in pairs[split]]))
        for split in pairs
    }
    evaluation = {**evaluate(params), "agreement": agreement}
    jsonl.atomic_write_json(folder / "evaluation.json", evaluation)
    hf.save(folder / "model", model.config, params, tokenizer)
    return evaluation

  yield offline.Job(
      name=NAME,
      folder=folder,
      model=model,
      init_params=init_params,
      loss_fn=functools.partial(_pair_loss, model),
      examples=make_examples(config, pairs[base.TRAIN], tokenizer),
      evaluate=lambda params, step: {
          name: value
          for name, value in evaluate(params).items()
          if isinstance(value, float)
      },
      metric_names=("accuracy", "grad_norm", "learning_rate"),
      save=save,
  )


def initial_model(
    config: ml_collections.ConfigDict, workdir: str
) -> tuple[
    heads.ScalarModel, tokenizer_lib.Tokenizer, Callable[[], types.PyTree]
]:
  """Returns model, tokenizer, and a function that returns the initial params.

  A policy gets a random scalar head.

  Raises:
    ValueError: there is no model, or its head has several labels.
  """
  source = config.reward_model.init
  folder = (
      policy.sft_folder(workdir) if source == "sft" else hf_hub.find(source)
  )
  if not (folder / "config.json").is_file():
    raise ValueError(
        f"config.reward_model.init={source!r}: no model is in {folder}; make"
        " it with --program=sft, or name another folder"
    )
  shape = policy.shape_of_folder(config, folder)
  try:
    folders.check_labels(shape, (*folders.POLICY, *folders.SCORER))
  except ValueError as error:
    raise ValueError(f"config.reward_model.init={source!r}: {error}") from error
  mesh = sharding.make_mesh(config.mesh)
  has_head = bool(shape.num_labels)
  model = heads.ScalarModel(shape if has_head else heads.config_of(shape))

  def init_params() -> types.PyTree:
    start = model if has_head else transformer.make_model(shape)
    params = frozen_models.load_params(folder, start, mesh)
    if has_head:
      return params
    return model.from_policy(params, jax.random.PRNGKey(config.seed))

  return (
      model,
      tokenizer_lib.load_configured(folder, config.tokenizer),
      init_params,
  )


# Pairs.


def _read_pairs(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    tokenizer: tokenizer_lib.Tokenizer,
    stop: threading.Event,
) -> dict[str, list[Pair]] | None:
  """Returns the pairs of both splits; None if stopped."""
  task = task_table.make_task(config.task)
  report = rows_lib.DataReport()
  pairs = {
      split: load_pairs(config, split, task, tokenizer, report)
      for split in (base.TRAIN, base.HELD_OUT)
  }
  # Tasks over rows have this setting, and keep their splits apart likewise.
  overlap = config.task.get("overlap", "error")
  pairs[base.TRAIN] = leave_out_shared(pairs, overlap, report)
  for line in report.lines():
    print(f"data: {line.replace('prompts', 'pairs', 1)}", flush=True)
  jsonl.atomic_write_json(folder / "data.json", report.to_json())
  if config.reward_model.relabel:
    score = _make_gold(config, task)
    for split in pairs:
      path = folder / "pairs" / f"{split}.jsonl"
      relabeled = relabel_pairs(pairs[split], score, path, stop)
      if relabeled is None:
        return None
      pairs[split] = relabeled
  return pairs


def load_pairs(
    config: ml_collections.ConfigDict,
    split: str,
    task: base.Task,
    tokenizer: tokenizer_lib.Tokenizer,
    report: rows_lib.DataReport,
) -> list[Pair]:
  """Returns the pairs of `config.reward_model.train` or `held_out`.

  A row has the texts `prompt` (or `query`), `chosen` and `rejected`, which may
  be conversations for a chat task; a stop token spelled out at the end of a
  completion is removed. The report counts the rows that are left out.

  Raises:
    ValueError: the source is missing, or has no usable pair.
  """
  source = config.reward_model[split]
  if source == "task":
    rows = [
        rows_lib.Row(f"pair {i}", {"prompt": p, "chosen": c, "rejected": r})
        for i, (p, c, r) in enumerate(task.pairs(split), 1)
    ]
  else:
    rows = rows_lib.read_rows(f"config.{NAME}.{split}", source)
  limits = (
      config.sampling.max_prompt_tokens,
      config.reward_model.max_completion_tokens,
  )
  pairs, num_rows, fields = [], 0, {}
  for row in rows:
    num_rows, fields = num_rows + 1, row.fields or fields
    parsed = _parse_pair(task, row, tokenizer)
    if isinstance(parsed, Pair):
      prompt, completions = encode_pair(parsed, tokenizer)
      if len(prompt) > limits[0]:
        parsed = "too_long"
      elif max(map(len, completions)) > limits[1]:
        parsed = "pair_too_long"
    if isinstance(parsed, Pair):
      pairs.append(parsed)
    else:
      report.leave_out(split, parsed, row.place)
  report.read[split], report.used[split] = num_rows, len(pairs)
  if not pairs:
    raise ValueError(
        f"config.{NAME}.{split}={source!r}: no pair can be used."
        f" {'; '.join(report.lines())}; must be rows with the texts prompt or"
        " query, chosen and rejected (task.name='chat' takes messages too),"
        f" these have {sorted(fields)}"
    )
  return pairs


def _parse_pair(
    task: base.Task, row: rows_lib.Row, tokenizer: tokenizer_lib.Tokenizer
) -> Pair | str:
  """Returns the pair of a row, or a reason from `rows.REASONS`."""
  if row.fields is None:
    return "malformed"
  try:
    prompt, *texts = task.pair_texts(row.fields)
  except rows_lib.UnusableError as error:
    return error.reason
  has_text = isinstance(prompt, str) and prompt.strip()
  if not has_text and not base.are_messages(prompt):
    return "no_prompt"
  if not all(isinstance(text, str) for text in texts):
    return "no_answer"
  stop_text = tokenizer.decode([tokenizer.stop_id(prompt)])
  chosen, rejected = (text.removesuffix(stop_text) for text in texts)
  if not chosen.strip() or not rejected.strip():
    return "no_answer"
  if chosen == rejected:
    return "equal"
  return Pair(row.place, prompt, chosen, rejected)


def leave_out_shared(
    pairs: dict[str, list[Pair]], overlap: str, report: rows_lib.DataReport
) -> list[Pair]:
  """Returns the training pairs that are not also held-out pairs.

  Raises ValueError for shared pairs, unless `overlap` is "leave_out",
  and if no pair is left.
  """
  key = lambda pair: (
      base.plain_text(pair.prompt),
      frozenset((pair.chosen, pair.rejected)),
  )
  held_out = {key(pair): pair.place for pair in pairs[base.HELD_OUT]}
  shared = [pair for pair in pairs[base.TRAIN] if key(pair) in held_out]
  out = [pair for pair in pairs[base.TRAIN] if key(pair) not in held_out]
  if shared and (overlap == "error" or not out):
    first = shared[0]
    raise ValueError(
        f"config.{NAME}.train: {len(shared)} of {len(pairs[base.TRAIN])} pairs"
        f" are held-out pairs too, the first {first.place} ="
        f" {held_out[key(first)]}; must have none, or, of a part,"
        " config.task.overlap='leave_out'"
    )
  for pair in shared:
    report.leave_out(base.TRAIN, "held_out", pair.place)
  report.used[base.TRAIN] = len(out)
  return out


def _make_gold(
    config: ml_collections.ConfigDict, task: base.Task
) -> Callable[[Sequence[tuple[str, str]]], np.ndarray]:
  """Returns [(prompt, completion)] -> scores [N] by `reward_model.relabel`."""
  source = config.reward_model.relabel
  if source == "task":
    return lambda texts: np.array([task.reward_of(*text) for text in texts])
  mesh = sharding.make_mesh(config.mesh)
  scorer = frozen_models.load_scorer(config, f"{NAME}.relabel", source, mesh)
  return lambda texts: scorer.score(
      [reward_scorer.Text(*text) for text in texts]
  )


def relabel_pairs(
    pairs: Sequence[Pair],
    score: Callable[[Sequence[tuple[str, str]]], np.ndarray],
    path: pathlib.Path,
    stop: threading.Event,
) -> list[Pair] | None:
  """Returns the pairs with labels of a gold model; None if stopped.

  The completion with the higher score is chosen; ties go to the first. Pairs
  are appended to a JSON Lines file with both scores; pairs already in the file
  are not scored again.

  Source: Noukhovitch et al. 2024 (arXiv:2410.18252), the controlled setting.

  Args:
    pairs: training pairs, in the order of the file.
    score: [(prompt, completion)] -> scores [N], higher is better.
    stop: event checked before each batch of pairs.

  Raises:
    ValueError: the file has different pairs, or a score is not finite.
  """
  done = jsonl.read_jsonl(path)
  out = [_labelled(pair, line, path) for pair, line in zip(pairs, done)]
  writer = jsonl.LineWriter(path)
  try:
    while len(out) < len(pairs):
      if stop.is_set():
        return None
      batch = pairs[len(out) : len(out) + _LABEL_PAIRS]
      scores_Nx2 = score(
          [(p.prompt, text) for p in batch for text in (p.chosen, p.rejected)]
      ).reshape(-1, 2)
      for pair, (first, second) in zip(batch, scores_Nx2.tolist()):
        if not math.isfinite(first + second):
          raise ValueError(
              f"config.{NAME}.relabel: {pair.place} has the scores {first} and"
              f" {second}; must be finite ones"
          )
        record = {**dataclasses.asdict(pair), "scores": [first, second]}
        record["agrees"] = first >= second
        if not record["agrees"]:
          record |= {"chosen": pair.rejected, "rejected": pair.chosen}
        writer.write(record)
        out.append(_labelled(pair, record, path))
      print(f"{path.stem} pairs labelled: {len(out)}/{len(pairs)}", flush=True)
  finally:
    writer.close()
  return out


def _labelled(
    pair: Pair, record: Mapping[str, Any], path: pathlib.Path
) -> Pair:
  """Returns a pair with the label of a line; ValueError if the pair differs."""
  texts = {record.get("chosen"), record.get("rejected")}
  same_texts = texts == {pair.chosen, pair.rejected}
  if record.get("prompt") != pair.prompt or not same_texts:
    raise ValueError(
        f"{path} has other pairs than the data ({pair.place}); remove it to"
        " label them again"
    )
  names = (field.name for field in dataclasses.fields(Pair))
  return Pair(**{name: record[name] for name in names})


def encode_pair(
    pair: Pair, tokenizer: tokenizer_lib.Tokenizer
) -> batches.BatchRow:
  """Returns the ids of the prompt and of both completions with stop tokens."""
  prompt = tokenizer.encode_prompt(pair.prompt)
  return prompt, [
      [*tokenizer.encode(text, prompt), tokenizer.stop_id(pair.prompt)]
      for text in (pair.chosen, pair.rejected)
  ]


def make_examples(
    config: ml_collections.ConfigDict,
    pairs: Sequence[Pair],
    tokenizer: tokenizer_lib.Tokenizer,
) -> offline.Examples:
  """Returns examples of K = 2 completions, the chosen one first."""
  return offline.Examples(
      seed=config.seed,
      batch_size=config.reward_model.batch_size,
      num_rows=len(pairs),
      encode=lambda row, epoch: encode_pair(pairs[row], tokenizer),
      num_completions=2,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.reward_model.max_completion_tokens,
  )


# Loss and evaluation.


def _pair_loss(
    model: heads.ScalarModel,
    params: types.PyTree,
    loss_params: types.PyTree,
    batch: types.Batch,
    beta: jax.Array,
) -> tuple[jax.Array, metrics_lib.Totals]:
  """Returns the Bradley-Terry loss [] of a batch of pairs, and its totals."""
  del loss_params, beta
  rewards_Bx2 = _rewards(model, params, batch)
  right_B = rewards_Bx2[:, 0] > rewards_Bx2[:, 1]
  loss = pairwise.bradley_terry_loss(rewards_Bx2)
  totals = {"accuracy": metrics_lib.total(right_B, jnp.ones_like(right_B))}
  return loss, totals


def _rewards(
    model: heads.ScalarModel, params: types.PyTree, batch: types.Batch
) -> jax.Array:
  return model.completion_rewards(
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )


def _make_evaluate(
    config: ml_collections.ConfigDict,
    model: heads.ScalarModel,
    pairs: Sequence[Pair],
    tokenizer: tokenizer_lib.Tokenizer,
) -> Callable[[types.PyTree], dict[str, Any]]:
  """Returns a function from params to the pairs' `calibration_summary`."""
  size = config.reward_model.micro_batch_size or config.reward_model.batch_size
  examples = make_examples(config, pairs, tokenizer)
  rewards = jax.jit(functools.partial(_rewards, model))

  def evaluate(params: types.PyTree) -> dict[str, Any]:
    margins = []
    for start in range(0, len(pairs), size):
      rows = range(start, min(start + size, len(pairs)))
      encoded = [examples.encode(row, 0) for row in rows]
      # All batches have the same shape: the last one repeats its first pair.
      encoded += encoded[:1] * (size - len(rows))
      rewards_Bx2 = np.asarray(rewards(params, examples.pad(encoded, (size,))))
      margins.append((rewards_Bx2[:, 0] - rewards_Bx2[:, 1])[: len(rows)])
    return calibration_summary(np.concatenate(margins), num_bins=_NUM_BINS)

  return evaluate


def calibration_summary(
    margins_N: np.ndarray, *, num_bins: int
) -> dict[str, Any]:
  """Returns accuracy, log-loss and calibration of Bradley-Terry margins.

  The model prefers the completion with the higher reward with probability
  p = sigmoid(|margin|), from .5 to 1. Pairs are binned by p in bins of equal
  width; with n_b pairs in bin b, of which a share a_b is right,

      calibration_error = Σ_b n_b/N |a_b - mean p_b|

  Source: Guo et al. 2017 (arXiv:1706.04599), expected calibration error.

  Args:
    margins_N: [N] float, N at least 1: reward of the chosen minus reward of
      the rejected completion. A margin of 0 counts as half right.
    num_bins: number of bins, 1 or more.

  Returns:
    accuracy, accuracy_interval, loss (nats per pair), margin (mean),
    calibration_error, num_pairs, and `bins`: `num_pairs`, `predicted` and
    `right` of each non-empty bin.

  Raises:
    ValueError: a margin is not finite.
  """
  margins_N = np.asarray(margins_N, np.float64)
  if not np.isfinite(margins_N).all():
    raise ValueError("reward_model: a reward of a held-out pair is not finite")
  right_N = (np.sign(margins_N) + 1) / 2
  predicted_N = 1 / (1 + np.exp(-np.abs(margins_N)))
  bin_N = np.minimum(((predicted_N - 0.5) * 2 * num_bins).astype(int),
                     num_bins - 1)  # fmt: skip
  bins = []
  for b in np.unique(bin_N):
    in_bin_N = bin_N == b
    bins.append(
        {
            "num_pairs": int(in_bin_N.sum()),
            "predicted": float(predicted_N[in_bin_N].mean()),
            "right": float(right_N[in_bin_N].mean()),
        }
    )
  gaps = [b["num_pairs"] * abs(b["right"] - b["predicted"]) for b in bins]
  return {
      "accuracy": float(right_N.mean()),
      "accuracy_interval": evaluator.mean_interval(right_N),
      "loss": float(np.logaddexp(0, -margins_N).mean()),
      "margin": float(margins_N.mean()),
      "calibration_error": float(sum(gaps) / len(margins_N)),
      "num_pairs": len(margins_N),
      "bins": bins,
  }


def make_table(evaluation: dict[str, Any]) -> rich.table.Table:
  """Returns the evaluation as a table, with the accuracy of each bin."""
  low, high = evaluation["accuracy_interval"]
  agreement = ", ".join(
      f"{k} {v:.3f}" for k, v in evaluation["agreement"].items()
  )
  table = rich.table.Table(
      title=f"{evaluation['num_pairs']} held-out pairs", show_header=False
  )
  table.add_row(
      "accuracy", f"{evaluation['accuracy']:.3f} ({low:.3f} to {high:.3f})"
  )
  table.add_row("loss, nats a pair", f"{evaluation['loss']:.3f}")
  table.add_row("calibration error", f"{evaluation['calibration_error']:.3f}")
  table.add_row("labels that relabelling kept", agreement)
  for b in evaluation["bins"]:
    table.add_row(
        f"predicted {b['predicted']:.2f}, right",
        f"{b['right']:.2f} of {b['num_pairs']}",
    )
  return table
