# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of training: stages, optimizer, batches and processes."""

import types
from typing import Any

from tba_jax.system import rules
from tba_jax.transport import addresses

_s = rules.Setting
_STAGE = "the stage was trained with it"
_ROUNDS = rules.Fixed(
    "it determines the prompts of a round (config.rounds.mini_batches)",
    lambda old, new: new["rounds.mini_batches"] > 0,
)


# fmt: off
def _stage(name: str, rows: str, **defaults: Any) -> dict[str, rules.Setting]:
  """Returns optimizer and period settings of a stage (`offline.py`)."""
  c, auto = types.SimpleNamespace(**defaults), name == "sft"
  # SFT may skip evaluations, since the run evaluates its initial policy; it
  # does not evaluate the reward model.
  evaluated = rules.FROM_0 if auto else rules.COUNT
  settings = {
      "num_steps": _s(c.num_steps, rules.COUNT, "optimizer updates", auto=auto),
      "batch_size": _s(c.batch_size, rules.COUNT, f"{rows} per step"),
      "micro_batch_size": _s(
          0, rules.FROM_0, f"{rows} per forward-backward pass, rounded up to"
          " divide over the mesh; 0 = batch_size", auto=auto),
      "learning_rate": _s(c.learning_rate, rules.ABOVE_0,
        "peak, after the warm-up; unless constant, decays to 0", auto=auto),
      "schedule": _s("cosine", rules.one_of("constant", "linear", "cosine"),
        "learning rate decay"),
      "warmup_steps": _s(c.warmup_steps, rules.FROM_0, "", auto=auto),
      "weight_decay": _s(0.0, rules.NOT_NEGATIVE, ""),
      "b2": _s(c.b2, rules.BELOW_1, "Adam's b2"),
      "grad_clip_norm": _s(1.0, rules.NOT_NEGATIVE, "0 = off"),
      "evaluate_every_steps": _s(c.evaluate_every_steps, evaluated,
          "steps between evaluations on held-out data" + "; 0 = none" * auto),
      "checkpoint_every_steps": _s(c.checkpoint_every_steps, rules.COUNT,
          "steps between checkpoints to resume from"),
      "log_every_steps": _s(c.log_every_steps, rules.COUNT, ""),
  }
  return {f"{name}.{key}": setting for key, setting in settings.items()}


SECTIONS = {
    "sft": rules.Section("Supervised fine-tuning on the task's solutions, with"
        " `init=sft`.", hosts="own", fixed=_STAGE),
    "reward_model": rules.Section("`--program=reward_model`: a scalar head"
        " trained on pairs of completions (docs/guides/offline_data.md).",
        hosts="own", fixed=_STAGE),
    "optimizer": rules.Section("AdamW."),
    "train": rules.Section("Size of the run and of its batches."),
    "trainer": rules.Section("The trainer's processes"
        " (docs/guides/scaling.md).", hosts="searcher"),
    "guards": rules.Section("Collapse detection.", hosts="searcher"),
    "checkpoint": rules.Section("Checkpoints of the run, to resume from.",
        hosts="searcher"),
}

SETTINGS = {
    "sft.init": _s("scratch", rules.TEXT, "initial model: 'scratch' or a"
        " Hugging Face folder", files=True),
    **_stage("sft", "examples", num_steps=2400, batch_size=64,
             learning_rate=3e-3, warmup_steps=100, b2=0.99,
             evaluate_every_steps=600, checkpoint_every_steps=400,
             log_every_steps=50),

    "reward_model.init": _s("sft", rules.TEXT, "initial model: 'sft'"
        " (WORKDIR/sft/model), or the Hugging Face folder of a policy or of a"
        " reward model", files=True),
    "reward_model.train": _s("task", rules.TEXT, "pairs to train on: a source"
        " of rows (docs/guides/your_data.md), or 'task' for pairs that the task"
        " generates", files=True),
    "reward_model.held_out": _s("task", rules.TEXT, "pairs to evaluate on",
        files=True),
    "reward_model.relabel": _s("", rules.TEXT, "judge of the better completion"
        " of a pair: '' the data, 'task' the task's reward, or the"
        " Hugging Face folder of a gold model", files=True),
    "reward_model.max_completion_tokens": _s(112, rules.COUNT,
        "pairs with a longer completion are skipped"),
    "reward_model.evaluate_pairs": _s(1024, rules.COUNT,
        "maximum number of held-out pairs"),
    **_stage("reward_model", "pairs", num_steps=300, batch_size=32,
             learning_rate=1e-3, warmup_steps=10, b2=0.999,
             evaluate_every_steps=100, checkpoint_every_steps=100,
             log_every_steps=25),

    "optimizer.learning_rate": _s(1e-4, rules.ABOVE_0, "peak, after the"
        " warm-up", auto=True),
    "optimizer.learning_rate_final": _s(1e-4, rules.NOT_NEGATIVE,
        "rate after the last step, at most learning_rate", auto=True),
    "optimizer.schedule": _s("linear",
        rules.one_of("constant", "linear", "cosine", "warmup_stable_decay"),
        "decay after the warm-up; 'warmup_stable_decay' is constant for"
        " stable_steps, then a cosine over decay_steps"),
    "optimizer.warmup_steps": _s(0, rules.FROM_0, ""),
    "optimizer.stable_steps": _s(0, rules.FROM_0, ""),
    "optimizer.decay_steps": _s(0, rules.FROM_0, "length of the decay, which"
        " may extend past the end of the run; 0 = until the end"),
    "optimizer.full_lag_steps": _s(0.0, rules.NOT_NEGATIVE,
        "mean staleness of a batch up to which the learning rate is unchanged;"
        " beyond it, the rate falls as 1/staleness, because the bias of stale"
        " gradients grows as staleness times rate (arXiv:2607.01083); 0 ="
        " off"),
    "optimizer.sample_share_power": _s(0.0, rules.NOT_NEGATIVE,
        "exponent of the batch's effective sample share"
        " (train/effective_sample_share) as a factor on the learning rate; 1 as"
        " in VCPO (arXiv:2602.17616), 0 = off"),
    "optimizer.b1": _s(0.9, rules.BELOW_1, ""),
    "optimizer.b2": _s(0.99, rules.BELOW_1, ""),
    "optimizer.epsilon": _s(1e-8, rules.ABOVE_0, ""),
    "optimizer.weight_decay": _s(0.0, rules.NOT_NEGATIVE, ""),
    "optimizer.grad_clip_norm": _s(1.0, rules.NOT_NEGATIVE, "0 = off"),

    "train.num_steps": _s(320, rules.COUNT, "optimizer updates; extending a run"
        " stretches the remaining learning rate decay",
        hosts="searcher"),
    "train.prompts_per_batch": _s(32, rules.COUNT, "B", fixed=_ROUNDS,
        auto=True),
    "train.completions_per_prompt": _s(8, rules.COUNT, "K", fixed=_ROUNDS),
    "train.micro_batch_prompts": _s(32, rules.COUNT, "full-length prompts per"
        " forward-backward pass (gradient accumulation); shorter ones are"
        " packed", auto=True),
    "train.micro_batch_completions": _s(0, rules.FROM_0,
        "completions of each of these prompts; 0 = all K. A smaller number"
        " splits groups, which saves memory and costs one more forward pass",
        auto=True),
    "train.remat": _s("dots", rules.one_of("none", "dots", "full"),
        "rematerialization: the forward pass keeps everything ('none'), results"
        " of matrix products ('dots'), or only layer inputs ('full', least"
        " memory)", auto=True),
    "train.router_replay": _s(False, rules.FLAG, "router replay: searchers"
        " record the experts that each token used, and the trainer uses them"
        " again",
        fixed="completions in the buffer record their experts only with it"),
    "train.per_round_steps": _s(0, rules.FROM_0, "schedules change once per"
        " this many steps (a round), as in the papers' code; 0 = every step"),
    "train.wall_clock_limit_s": _s(0.0, rules.NOT_NEGATIVE,
        "time limit of a trainer process, after which the run ends; 0 = none. A"
        " changed setting resumes the run", hosts="searcher"),
    "train.nonfinite": _s("stop", rules.one_of("stop", "skip"),
        "reaction to a non-finite loss or gradient, which never changes the"
        " params: 'stop' the run, or 'skip' to the next batch",
        hosts="searcher"),

    "trainer.num_processes": _s(1, rules.COUNT, "processes that share the mesh;"
        " process 0 leads", auto=True),
    "trainer.coordinator": _s("", addresses.HOST_PORT, "address at which the"
        " others join process 0; '' = a free port of this machine, chosen by"
        " `--program=train`", hosts="own"),
    "trainer.cpu_devices": _s(0, rules.FROM_0, "virtual CPU devices per"
        " process; 0 = the machine's devices"),
    "trainer.heartbeat_s": _s(100.0, rules.WAIT, "silence after which a process"
        " counts as dead"),
    "trainer.save_deadline_s": _s(1200.0, rules.wait(1),
        "time limit for all processes to write a checkpoint"),

    "guards.action": _s("warn",
        rules.one_of("off", "warn", "lower_learning_rate", "stop"), ""),
    "guards.min_entropy": _s(0.01, rules.NOT_NEGATIVE, "nats per token"),
    "guards.max_kl": _s(50.0, rules.ABOVE_0, "KL to the reference, nats per"
        " completion"),
    "guards.max_accuracy_drop": _s(0.2, rules.ABOVE_0_TO_1,
        "drop of a split's pass@1 below its first value"),
    "guards.max_failure_rise": _s(0.05, rules.ABOVE_0_TO_1,
        "rise in the share of unjudged training completions; a clear rise above"
        " it stops the run, with any action but 'off'. 1 = no limit"),
    "guards.max_logprob_gap": _s(0.0, rules.NOT_NEGATIVE,
        "mean |trainer - sampler| log-prob at staleness 0, nats per token; 0 ="
        " 1e-3 in float32, 0.1 if either rounds to bfloat16, 0.3 with"
        " search.quantization=int8, and no limit with explore or offline.path;"
        " also raises the gap at which searchers refuse published params"),

    "checkpoint.every_steps": _s(40, rules.COUNT, ""),
    "checkpoint.every_s": _s(0.0, rules.NOT_NEGATIVE, "longest time between"
        " checkpoints; 0 = off"),
    "checkpoint.keep": _s(2, rules.COUNT, "newest checkpoints to keep"),
    "checkpoint.keep_every_steps": _s(0, rules.FROM_0, "keep checkpoints at"
        " multiples of this step permanently; 0 = none"),
    "checkpoint.keep_every_s": _s(0, rules.FROM_0, "keep one checkpoint per"
        " this many seconds permanently; 0 = none"),
    "checkpoint.keep_best": _s(False, rules.FLAG, "keep the policy with the"
        " best evaluation during training, as the Hugging Face folder"
        " WORKDIR/best/model"),
    "checkpoint.keep_journal": _s(False, rules.FLAG, "keep the whole journal,"
        " so that --program=rerun can start at step 0 and at any checkpoint,"
        " not only at the newest `keep`"),
}
# fmt: on
