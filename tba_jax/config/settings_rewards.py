# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings for what stands beside training."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the sections `sft`, `reward`, `reward_model` and `evaluate`."""
  d = lambda **fields: ml_collections.ConfigDict(fields)
  c = d()
  # Supervised fine-tuning on the task's own solutions (init = "sft").
  c.sft = d(
      # What it starts from: "scratch", or a Hugging Face folder.
      init="scratch",
      num_steps=2400,  # of supervised fine-tuning
      batch_size=64,  # examples a step
      micro_batch_size=0,  # examples in one forward-backward; 0 = batch_size
      learning_rate=3e-3,  # after the warm-up; then to 0 by the schedule
      schedule="cosine",
      warmup_steps=100,
      weight_decay=0.0,
      b1=0.9,  # of Adam, as b2
      b2=0.99,
      grad_clip_norm=1.0,  # 0 = off
      evaluate_every_steps=600,  # held-out pass@1
      checkpoint_every_steps=400,  # to go on from after a crash
      log_every_steps=50,
  )

  # Where completions get their rewards: docs/your_task.md.
  c.reward = d(
      # "process": of the task, in the role itself, for rewards that are fast
      # and never hang; "pool": in worker processes of each role, which may be
      # killed; "model": of the reward model in `reward.model`, in the role.
      where="process",
      num_workers=2,  # of the pool
      deadline_s=10.0,  # of one completion, from when a worker has it
      start_deadline_s=60.0,  # of a worker's start
      memory_mb=0,  # address space of a worker; 0 = not limited
      fallback=0.0,  # reward of a completion that could not be judged
      # A Hugging Face folder with a scalar head, or "reward_model", the one
      # that the program of this name left in WORKDIR.
      model="reward_model",
      batch_size=32,  # completions that the model scores at a time
      # Which role judges what is trained on: "searcher", right after it has
      # sampled, or "trainer", as it takes completions in.
      role="searcher",
  )

  # Of `--program=reward_model`: a scalar head learns from pairs of completions
  # (docs/preferences.md).
  c.reward_model = d(
      # Pairs to learn from: a source of rows as docs/your_task.md has them, or
      # "task", those that the task itself makes.
      train="task",
      held_out="task",  # pairs to measure with
      # Who says which completion of a pair is better: "" the data, "task" the
      # task's own reward, or a gold model's Hugging Face folder.
      relabel="",
      # What it starts from: "sft" (WORKDIR/sft/model), or a Hugging Face folder
      # of a policy or of a reward model.
      init="sft",
      max_completion_tokens=128,  # pairs with a longer completion are left out
      num_steps=300,
      batch_size=32,  # pairs a step
      micro_batch_size=0,  # pairs in one forward-backward; 0 = batch_size
      learning_rate=1e-3,  # after the warm-up; then to 0 by the schedule
      schedule="cosine",
      warmup_steps=10,
      weight_decay=0.0,
      b1=0.9,  # of Adam, as b2
      b2=0.999,
      grad_clip_norm=1.0,  # 0 = off
      evaluate_pairs=1024,  # held-out pairs, at most
      evaluate_every_steps=100,
      checkpoint_every_steps=100,
      log_every_steps=25,
  )

  c.evaluate = d(
      every_steps=80,  # 0 = only before and after
      beside=True,  # in a thread, while steps go on; not so in lockstep
      deadline_s=600.0,  # of one beside the steps; then it is given up
      num_prompts=256,  # while training
      num_completions=8,  # k of pass@k
      final_prompts=1000,  # before and after
      batch_prompts=64,  # decoded at a time
      greedy=False,  # also the likeliest completion of each prompt
      # Who compares completions with the task's reference, for the win-rate:
      # "" nobody, "task" its own reward, "command" `judge_command`, or a gold
      # model's Hugging Face folder.
      judge="",
      judge_command="",  # reads pairs and writes verdicts: docs/preferences.md
      judge_deadline_s=60.0,  # of one pair
      resamples=1000,  # of the bootstrap intervals
      confidence=0.95,  # of these intervals
      # Of the program: task settings to evaluate with, one after the other, as
      # "prompt_format=tba;prompt_format=sft"; "" = those of the run.
      variants="",
  )
  return c
