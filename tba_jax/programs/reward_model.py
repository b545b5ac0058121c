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

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import rich.console
import rich.table

from tba_jax import types
from tba_jax.config import stages
from tba_jax.losses import metrics as metrics_lib
from tba_jax.losses import preference
from tba_jax.models import config as config_lib
from tba_jax.models import heads
from tba_jax.models import hf
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import reward_model
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import build
from tba_jax.tasks import rows as rows_lib
from tba_jax.training import batches
from tba_jax.training import evaluator
from tba_jax.training import offline
from tba_jax.training import policy
from tba_jax.training import sharding
from tba_jax.training import train_step

# Pairs of completions, one of them preferred: read, relabelled, in batches.


# Tells these random numbers from others of the same seed.
_STREAM = 0xB7
_PROMPT_FIELDS = ("prompt", "query")
# Pairs are labelled, and written, so many at a time.
_LABEL_PAIRS = 256


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two completions of a prompt, texts without stop token.

  place: where the pair came from.
  chosen: the better one by the label.
  agrees: whether the label is the one that was read; True before relabelling.
  """

  place: str
  prompt: str
  chosen: str
  rejected: str
  agrees: bool = True


def read_pairs(
    rows: Iterable[rows_lib.Row],
    split: str,
    report: rows_lib.DataReport,
    *,
    fits: Callable[[Pair], str],
    stop_text: str,
) -> list[Pair]:
  """Returns the pairs of rows; the report gets those that are left out.

  A row has `prompt` (or `query`), `chosen` and `rejected`, texts. A stop token
  that is written out at the end of a completion is taken off.

  Args:
    rows: of the split.
    split: its name in the report.
    report: counts and places.
    fits: pair -> "", or a reason of `rows.REASONS` to leave it out.
    stop_text: of the tokenizer.
  """
  pairs, num_rows = [], 0
  for row in rows:
    num_rows += 1
    found = _pair(row, stop_text)
    reason = found if isinstance(found, str) else fits(found)
    if reason:
      report.leave_out(split, reason, row.place)
    else:
      pairs.append(found)
  report.read[split], report.used[split] = num_rows, len(pairs)
  return pairs


def _pair(row: rows_lib.Row, stop_text: str) -> Pair | str:
  """Returns the pair of a row, or what is wrong with it."""
  if row.fields is None:
    return "malformed"
  prompt = next((row.fields[f] for f in _PROMPT_FIELDS if f in row.fields), "")
  texts = [row.fields.get(name) for name in ("chosen", "rejected")]
  if not isinstance(prompt, str) or not prompt.strip():
    return "no_prompt"
  if not all(isinstance(text, str) for text in texts):
    return "no_answer"
  chosen, rejected = (text.removesuffix(stop_text) for text in texts)
  if not chosen.strip() or not rejected.strip():
    return "no_answer"
  if chosen == rejected:
    return "equal"
  return Pair(row.place, prompt, chosen, rejected)


def load_pairs(
    source: str,
    key: str,
    split: str,
    task: base.Task,
    report: rows_lib.DataReport,
    *,
    fits: Callable[[Pair], str],
    stop_text: str,
) -> list[Pair]:
  """Returns the pairs of a source; see `read`.

  Args:
    source: of rows, or "task": those that the task makes.
    key: of the setting that names it, for messages.
    split: "train" or "held_out".
    task: of the run.
    report, fits, stop_text: as `read`.

  Raises:
    ValueError: the source is not there, or no pair of it can be used.
  """
  if source == "task":
    found = enumerate(task.pairs(split), 1)
    rows = [
        rows_lib.Row(f"pair {i}", {"prompt": p, "chosen": c, "rejected": r})
        for i, (p, c, r) in found
    ]
  else:
    rows = rows_lib.read_rows(key, source)
  pairs = read_pairs(rows, split, report, fits=fits, stop_text=stop_text)
  if not pairs:
    raise ValueError(
        f"{key}={source!r}: no pair can be used. {'; '.join(report.lines())}"
    )
  return pairs


def relabel_pairs(
    pairs: Sequence[Pair],
    score: Callable[[Sequence[tuple[str, str]]], np.ndarray],
    path: pathlib.Path,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Pair] | None:
  """Returns the pairs in the order of a gold model; None where it was stopped.

  The completion with the higher score is the chosen one, the first of equals.
  Pairs with both scores are written to a file of JSON lines as they come; what
  stands there already is not scored again.

  Source: Noukhovitch et al. 2024 (arXiv:2410.18252), the controlled setting.

  Args:
    pairs: in the order of the file.
    score: [(prompt, completion)] -> scores [N], higher is better.
    path: of the file, made or continued.
    on_progress: called with (pairs done, pairs in all).
    should_stop: asked before each part.

  Raises:
    ValueError: the file is of other pairs.
  """
  done = jsonl.read_jsonl(path)
  out = [_labelled(pair, line, path) for pair, line in zip(pairs, done)]
  writer = jsonl.LineWriter(path)
  try:
    while len(out) < len(pairs):
      if should_stop():
        return None
      some = pairs[len(out) : len(out) + _LABEL_PAIRS]
      scores_Nx2 = score(
          [(p.prompt, text) for p in some for text in (p.chosen, p.rejected)]
      ).reshape(-1, 2)
      for pair, (first, second) in zip(some, scores_Nx2.tolist()):
        record = {**dataclasses.asdict(pair), "scores": [first, second]}
        record["agrees"] = first >= second
        if not record["agrees"]:
          record |= {"chosen": pair.rejected, "rejected": pair.chosen}
        writer.write(record)
        out.append(_labelled(pair, record, path))
      if on_progress is not None:
        on_progress(len(out), len(pairs))
  finally:
    writer.close()
  return out


def _labelled(
    pair: Pair, record: Mapping[str, Any], path: pathlib.Path
) -> Pair:
  """Returns the pair as a line has it."""
  texts = {record.get("chosen"), record.get("rejected")}
  if record.get("prompt") != pair.prompt or texts != {
      pair.chosen,
      pair.rejected,
  }:
    raise ValueError(
        f"{path} has other pairs than the data ({pair.place}); remove it to"
        " label them anew"
    )
  names = ("place", "prompt", "chosen", "rejected", "agrees")
  return Pair(**{name: record[name] for name in names})


class PairExamples:
  """Batches of pairs, a pure function of the seed and the step."""

  def __init__(
      self,
      pairs: Sequence[Pair],
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      seed: int,
      batch_size: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
  ):
    """Takes the pairs, all of which fit.

    Args:
      pairs: each pass over them is in a new order.
      tokenizer: its stop token ends a completion.
      seed: of the order.
      batch_size: B.
      max_prompt_tokens: P.
      max_completion_tokens: T, with the stop token.
    """
    self._pairs = pairs
    self._tokenizer = tokenizer
    self._seed = seed
    self._batch_size = batch_size
    self._lengths = max_prompt_tokens, max_completion_tokens

  def chunk(self, first: int, last: int, size: int) -> types.Batch:
    """Returns the batches of steps first … last - 1, on the host.

    Args:
      first: step.
      last: step after the last one, at most first + size.
      size: C, batches that the result has room for.

    Returns:
      A batch whose leaves are [C, B, …], with K = 2: the chosen completion and
      the rejected one. What no step fills is 0.
    """
    B, count = self._batch_size, len(self._pairs)
    places = np.arange(first * B, last * B)
    chosen = []
    for epoch in np.unique(places // count):
      order = np.random.default_rng(
          [self._seed, _STREAM, int(epoch)]
      ).permutation(count)
      chosen += order[places[places // count == epoch] % count].tolist()
    return self._pad([self._pairs[i] for i in chosen], (size, B))

  def batch(self, pairs: Sequence[Pair], size: int) -> types.Batch:
    """Returns pairs as a batch with room for `size`, on the host."""
    return self._pad(pairs, (size,))

  def _pad(self, pairs: Sequence[Pair], shape: tuple[int, ...]) -> types.Batch:
    max_prompt_tokens, max_completion_tokens = self._lengths
    encoded = (encode_pairs(pair, self._tokenizer) for pair in pairs)
    return batches.pad_sequences(
        [(prompt, texts) for prompt, *texts in encoded],
        shape,
        num_completions=2,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
    )


def encode_pairs(
    pair: Pair, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[list[int], list[int], list[int]]:
  """Returns the ids of prompt, chosen and rejected, these with stop token."""
  ids = lambda text: [*tokenizer.encode(text), tokenizer.eos_id]
  return (
      tokenizer.encode_prompt(pair.prompt),
      ids(pair.chosen),
      ids(pair.rejected),
  )


# How good a reward model is on pairs whose better completion is known.


def calibration_summary(
    margins_N: np.ndarray,
    *,
    num_bins: int,
    resamples: int,
    confidence: float,
) -> dict[str, Any]:
  """Returns accuracy, log-loss and calibration of Bradley-Terry margins.

  The model says that the completion of the higher reward is the better one,
  with probability p = sigmoid(|margin|), from .5 to 1. Bins of equal width hold
  the pairs by p; with n_b pairs of which a share a_b was right,

      calibration_error = Σ_b n_b/N |a_b - mean p_b|

  Source: Guo et al. 2017 (arXiv:1706.04599), expected calibration error.

  Args:
    margins_N: [N] float, reward of the better minus that of the other one, N at
      least 1. A margin of 0 is half right.
    num_bins: at least 1.
    resamples, confidence: of the bootstrap interval of the accuracy.

  Returns:
    accuracy, accuracy_interval, loss (nats a pair), margin (mean),
    calibration_error, num_pairs, and `bins`: a record with `num_pairs`,
    `predicted` and `right` for each bin that is not empty.

  Raises:
    ValueError: there is no pair, or a margin is not finite.
  """
  margins_N = np.asarray(margins_N, np.float64)
  if not len(margins_N) or not np.isfinite(margins_N).all():
    raise ValueError(
        "margins of pairs: allowed one or more, all of them finite"
    )
  right_N = (np.sign(margins_N) + 1) / 2
  predicted_N = 1 / (1 + np.exp(-np.abs(margins_N)))
  bin_N = np.minimum(((predicted_N - 0.5) * 2 * num_bins).astype(int),
                     num_bins - 1)  # fmt: skip
  bins = []
  for b in np.unique(bin_N):
    own = bin_N == b
    bins.append(
        {
            "num_pairs": int(own.sum()),
            "predicted": float(predicted_N[own].mean()),
            "right": float(right_N[own].mean()),
        }
    )
  gaps = [b["num_pairs"] * abs(b["right"] - b["predicted"]) for b in bins]
  return {
      "accuracy": float(right_N.mean()),
      "accuracy_interval": evaluator.mean_interval(
          right_N, num_resamples=resamples, confidence=confidence
      ),
      "loss": float(np.logaddexp(0, -margins_N).mean()),
      "margin": float(margins_N.mean()),
      "calibration_error": float(sum(gaps) / len(margins_N)),
      "num_pairs": len(margins_N),
      "bins": bins,
  }


# What a reward model learns from pairs, and how good it is on them.


_NUM_BINS = 10


def make_pair_loss_fn(model: heads.ScalarModel) -> Callable[..., Any]:
  """Returns the Bradley-Terry loss of a batch of pairs, K = 2.

  Args:
    model: gives the rewards.

  Returns:
    loss_fn(params, loss_params, batch, beta) -> (loss [], totals), as
    `objective.make_loss_fn`; loss_params and beta play no part.
  """

  def loss_fn(
      params: types.PyTree,
      loss_params: types.PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    del loss_params, beta
    rewards_Bx2 = _rewards(model, params, batch)
    right_B = rewards_Bx2[:, 0] > rewards_Bx2[:, 1]
    loss = preference.bradley_terry_loss(rewards_Bx2)
    totals = {"accuracy": metrics_lib.total(right_B, jnp.ones_like(right_B))}
    return loss, totals

  return loss_fn


def make_pair_evaluate(
    config: ml_collections.ConfigDict,
    model: heads.ScalarModel,
    examples: PairExamples,
    pairs: Sequence[Pair],
) -> Callable[[types.PyTree], dict[str, Any]]:
  """Returns params -> what `calibration.summarize` says of the pairs.

  Args:
    config: reads `reward_model` and `evaluate`.
    model: gives the rewards.
    examples: makes batches of pairs.
    pairs: at least one.
  """
  size = config.reward_model.micro_batch_size or config.reward_model.batch_size
  rewards = jax.jit(lambda params, batch: _rewards(model, params, batch))

  def evaluate(params: types.PyTree) -> dict[str, Any]:
    margins = []
    for start in range(0, len(pairs), size):
      some = pairs[start : start + size]
      # Of one shape: what is missing is there twice.
      full = [*some, *[some[0]] * (size - len(some))]
      rewards_Bx2 = np.asarray(rewards(params, examples.batch(full, size)))
      margins.append((rewards_Bx2[:, 0] - rewards_Bx2[:, 1])[: len(some)])
    return calibration_summary(
        np.concatenate(margins),
        num_bins=_NUM_BINS,
        resamples=config.evaluate.resamples,
        confidence=config.evaluate.confidence,
    )

  return evaluate


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


NAME = "reward_model"
_SPLITS = (base.TRAIN, base.HELD_OUT)


def run_reward_model(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline.run_program(
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
    on_progress: offline.Progress | None = None,
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
  stages.check(config, folder, section=NAME)
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
  make_examples = lambda split: PairExamples(
      pairs[split],
      start.tokenizer,
      seed=config.seed,
      batch_size=settings.batch_size,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=settings.max_completion_tokens,
  )
  evaluate = make_pair_evaluate(
      config,
      start.model,
      make_examples(base.HELD_OUT),
      pairs[base.HELD_OUT][: settings.evaluate_pairs],
  )
  job = _make_job(config, folder, start, make_examples(base.TRAIN), evaluate)
  params, done = offline.train(config, job, stop=stop, on_progress=on_progress)
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
    examples: PairExamples,
    evaluate: Callable[[types.PyTree], dict[str, Any]],
) -> offline.Job:
  """Returns what `offline_training.train` makes the reward model of."""
  step_config = offline.step_config(config, NAME)
  mesh = sharding.make_mesh(config.mesh)
  return offline.Job(
      name=NAME,
      folder=folder,
      init_state=lambda: train_step.init_state(
          step_config, start.model, start.params(), mesh
      ),
      abstract_state=train_step.abstract_state(step_config, start.model, mesh),
      train_step=train_step.make_train_step(
          step_config,
          start.model,
          mesh,
          loss_fn=make_pair_loss_fn(start.model),
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
      self._folder = policy.sft_folder(workdir)
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
        compute_dtype=config_lib.compute_dtype(
            config.model, jax.default_backend()
        ),
    )
    if self._shape.num_labels not in (0, 1):
      raise ValueError(
          f"config.reward_model.init={source!r}: its head gives"
          f" {self._shape.num_labels} labels; allowed 1, or a policy"
      )
    self.model = heads.make_scalar_model(
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
) -> dict[str, list[Pair]] | None:
  """Returns the pairs of both splits; None where it was stopped."""
  settings = config.reward_model
  limits = (
      (config.sampling.max_prompt_tokens, "too_long"),
      *[(settings.max_completion_tokens, "answer_too_long")] * 2,
  )

  def fits(pair: Pair) -> str:
    found = zip(encode_pairs(pair, tokenizer), limits)
    return next((why for ids, (most, why) in found if len(ids) > most), "")

  task = build.make_task(config.task)
  report = rows_lib.DataReport()
  pairs = {
      split: load_pairs(
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
    found = relabel_pairs(
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


def _check_disjoint(pairs: dict[str, list[Pair]]) -> None:
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
  scorer = reward_model.load_scorer(config, f"{NAME}.relabel", source)
  return lambda texts: scorer.score(
      [reward_model.Text(*text) for text in texts]
  )
