# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run with its default; the code has no second default.

A config file calls `get_config`, changes what its experiment needs, and
returns it. Units are in the names (`_s`, `_steps`, `_tokens`) or beside them.
"""

import ml_collections

from tba_jax.config import settings_red_team
from tba_jax.config import settings_rewards
from tba_jax.config import variants

parse_arg = variants.parse_arg


def get_config() -> ml_collections.ConfigDict:
  """Returns the base config: every key, with the default of the system."""
  d = lambda **fields: ml_collections.ConfigDict(fields)
  c = d()
  # Of params, prompt order, sampling and replay draws.
  c.seed = 0

  # The task's own fields stand beside its name (`tba_jax/tasks/`).
  c.task = d(name="arithmetic")

  c.tokenizer = d(
      # "task" builds the word-level tokenizer of the task; anything else is a
      # folder with Hugging Face tokenizer files.
      source="task",
      # Whether the tokenizer's BOS opens a prompt: "auto" (where the tokenizer
      # itself puts one), "always" (where it has one) or "never".
      bos="auto",
  )

  # Shape of the policy; a Hugging Face folder in `init` brings its own, but for
  # the two dtypes.
  c.model = d(
      family="llama",  # as in tba_jax/models/transformer.py
      num_layers=3,
      width=64,  # of the residual stream
      num_heads=4,
      num_kv_heads=4,  # below num_heads: grouped queries
      head_dim=16,  # of one head, even
      mlp_width=172,  # hidden units of a block's MLP
      rope_theta=10000.0,  # base of the rotary angles
      norm_epsilon=1e-5,  # added to a norm's mean square
      tie_embeddings=False,  # one table for embedding and unembedding
      max_positions=128,  # of prompt and completion together
      param_dtype="float32",  # of the params, which the optimizer changes
      # Of activations; "auto" is bfloat16 on an accelerator, float32 on a CPU.
      compute_dtype="auto",
      # What only some families have (see `tba_jax/models/config.py`).
      attention_bias=False,  # llama, qwen3, gpt_neox
      mlp_bias=False,  # llama
      sliding_window=0,  # of mistral, tokens; 0: none
      rope_type="default",  # or "linear", "llama3"
      rope_factor=1.0,
      rope_low_freq_factor=1.0,
      rope_high_freq_factor=4.0,
      rope_original_positions=8192,
      rotary_fraction=1.0,  # of a head that positions turn: gpt_neox
      parallel_residual=False,  # MLP beside attention: gpt_neox
      activation="silu",  # of an MLP without gate: gpt2, gpt_neox
      scale_attention=True,  # gpt2: scores over sqrt(head_dim)
      scale_attention_by_layer=False,  # gpt2: and over 1 + the layer's index
  )

  # Low-rank adapters, trained in place of the policy's params (docs/lora.md).
  c.lora = d(
      rank=0,  # 0 = all params are trained
      alpha=16.0,  # the factors' product counts alpha / rank times
      # Products of the blocks: "all", or some of q, k, v, o, gate, up, down.
      targets="all",
  )

  # What the policy and the reference start from: "scratch", "sft" (made by
  # config.sft in WORKDIR/sft when it is not there yet), or a Hugging Face
  # folder.
  c.init = "sft"

  # Devices along each axis.
  c.mesh = d(
      data=1,
      fsdp=1,
      sequence=1,  # of the trainer, for long completions
      tensor=1,
  )
  # Logical axis of a parameter or activation -> mesh axis ("" = replicated).
  c.sharding = d(
      batch="data,fsdp",
      length="sequence",  # tokens of a sequence, padded to divide evenly
      layers="",
      vocab="tensor",
      width="fsdp",
      mlp="tensor",
      heads="tensor",
      kv_heads="tensor",
      head_dim="",
      labels="",  # what a scalar head gives
      positions="",  # learned ones
      lora_rank="",  # of adapters
  )

  # Sections `sft`, `reward`, `reward_model` and `evaluate`.
  c.update(settings_rewards.get_config())

  c.sampling = d(
      temperature=1.0,  # of sampling and of the loss alike
      top_k=0,  # 0 = off
      top_p=1.0,  # 1 = off
      min_p=0.0,  # least probability, as a share of the likeliest's; 0 = off
      stop_token_ids="",  # beside the tokenizer's stop token: "5,17"
      stop_strings="",  # texts that stop, a JSON list: '["\n\n", "User:"]'
      max_prompt_tokens=16,
      max_completion_tokens=24,
      num_rows=256,  # completions decoded at the same time
      chunk_steps=8,  # most decode steps between refills of finished rows
      prompt_buckets=1,  # lengths prompts are padded to: the most, its half, …
      # Newer params are taken between rounds ("off"), or between chunks too,
      # with the cache as it is ("keep_cache") or made again
      # ("recompute_cache").
      in_flight="off",
  )

  c.search = d(
      num_searchers=1,
      prompts_per_round=32,
      samples_per_prompt=8,  # S
      # Fresh prompts that the trainer grants (and, with wait_for_fresh,
      # awaits) per optimizer step.
      prompts_per_step=32,
      # Steps that sampling may run ahead of training: 0 only with lockstep.
      lead_steps=1,
      # True: step t waits until its own fresh prompts are there. False: the
      # trainer recycles what the buffer holds.
      wait_for_fresh=True,
      lockstep=False,  # staleness 0: sample with the version of the step
      credits=4,  # blocks that a searcher may hold unacknowledged
      lease_s=15.0,  # a silent searcher's prompts are granted again
      pull_every_s=0.02,  # shortest time between two looks for a version
      starvation_s=180.0,  # no fresh group for so long ends the trainer
      # Devices of one searcher, all of its own process, and what they split.
      mesh=d(
          data=1,  # devices that split the rows of one searcher
          fsdp=1,  # that split rows, and params by config.sharding
          tensor=1,  # that split params by config.sharding, and heads of caches
      ),
      cpu_devices=0,  # virtual CPU devices of a searcher; 0 = those there are
  )

  c.loss = d(
      name="tb",  # docs/objectives.md tells when to use which
      # Of the squared losses: "unit" has the gradient of a policy gradient,
      # "paper" that of the objective's paper (of tb 2/beta times it).
      scale="unit",
      # Linear from beta to beta_final over beta_decay_steps, and beta_final
      # from beta_stop_steps on (0 steps = constant beta).
      beta=0.05,  # weight of the KL to the reference: smaller = further
      beta_final=0.05,
      beta_decay_steps=0,
      beta_stop_steps=0,
      # Importance correction: "" is the objective's own, with the trust region
      # of ratio_clip (of a token's ratio; of a completion's with
      # proximal_rloo), and none at ratio_clip=0. Others: "none", "clip_token",
      # "clip_sequence", "cispo" (bound ratio_clip), "truncate_token",
      # "truncate_sequence", "mask_token" (bound ratio_cap), "decoupled" (both:
      # the trust region is around the proximal policy).
      correction="",
      ratio_clip=0.0,  # trust region on the behavior ratio; 0 = the paper's
      ratio_cap=8.0,  # the largest ratio of "truncate_*" and "mask_token"
      # Log-probs of the policy that sampled: "sampler" gives them exactly;
      # "recomputed" takes those of the proximal policy, as Async RLHF's code.
      behavior_logprobs="sampler",
      # A proximal policy, and the values of which PPO makes its advantages, are
      # held for so many steps; 0 = for a round, without rounds for one step.
      proximal_every_steps=0,
      # A completion's log-prob is the sum of its tokens' over: "none" 1,
      # "tokens" their number, "max_tokens" sampling.max_completion_tokens,
      # "mean_tokens" the mean number in the batch; "" is the objective's own.
      length_norm="",
      include_stop_token=True,
      # A completion without stop token: "keep" its reward, "replace" it by
      # missing_stop_reward, or "add" that to it.
      missing_stop="keep",
      missing_stop_reward=-1.0,
      log_z_learning_rate=1e-2,  # of "tb_learned_z"
      # Of "ppo" and "subtb". The value model starts from the "policy", with a
      # head of zeros, or from a Hugging Face folder with a scalar head.
      value_init="policy",
      value_learning_rate=1e-3,  # in the schedule of the policy
      value_clip=0.2,  # of "ppo", around the held values; 0 = off
      value_weight=0.1,  # of the value loss of "ppo"
      gae_gamma=1.0,  # discount a token
      gae_lambda=0.95,  # 0 = one step, 1 = all that follows
      whiten_advantages=True,  # to mean 0 and variance 1 over a batch
      subtb_lambda=0.9,  # weight of a part of n tokens is lambda^n
  )

  # The policy that the KL is measured against: "fixed", or at every
  # `every_steps` steps "reset" to the policy, or moved towards it by "ema":
  # ema_decay · reference + (1 - ema_decay) · policy.
  c.reference = d(mode="fixed", every_steps=50, ema_decay=0.9)

  c.optimizer = d(
      learning_rate=1e-4,
      learning_rate_final=1e-4,  # at the last step
      # After the warm-up: "constant", "linear", "cosine", or
      # "warmup_stable_decay": a peak of stable_steps, then a cosine of
      # decay_steps (0 = to the end of the run; more may go past it).
      schedule="linear",
      warmup_steps=0,
      stable_steps=0,
      decay_steps=0,
      b1=0.9,
      b2=0.99,
      epsilon=1e-8,
      weight_decay=0.0,
      grad_clip_norm=1.0,  # 0 = off
      # Of Adam's first moment, "float32" or "bfloat16"; its second is float32.
      state_dtype="float32",
  )

  c.train = d(
      num_steps=320,  # optimizer updates of the run
      prompts_per_batch=32,  # B
      completions_per_prompt=8,  # K
      micro_batch_prompts=32,  # prompts in one forward-backward
      # What a forward pass keeps of each layer for the gradient: all ("none"),
      # the results of its products ("dots"), or its input alone ("full"). The
      # less, the less memory, and the more is computed twice.
      remat="dots",
      # Schedules of learning rate, beta and reward temperature follow every
      # optimizer step (0), or move once in so many steps (a round), as the
      # papers' code does.
      per_round_steps=0,
      wall_clock_limit_s=0.0,  # of one trainer process; 0 = none
  )

  c.replay = d(
      capacity_per_prompt=100,  # completions of one prompt; the oldest go
      capacity=200_000,  # completions in all
      recent_fraction=1.0,  # the papers' m
      recent_window_steps=4,  # arrivals of so many steps count as recent
      selection="uniform",  # replay draws in a prompt: "uniform" or "reward"
      # Of "reward": weights exp(reward / temperature). Linear to the final one
      # over decay_steps (0 = constant).
      reward_temperature=1.0,
      reward_temperature_final=1.0,
      reward_temperature_decay_steps=0,
      dedupe=True,  # a completion equal to an older one replaces it
      warm_start_completions=0,  # sampled before step 0
      max_segment_mb=64.0,  # of the journal
  )

  # The processes of the trainer: docs/many_devices.md.
  c.trainer = d(
      num_processes=1,  # of one mesh; process 0 decides, the others follow
      # host:port at which process 0 waits for the others; "" = a free port of
      # this machine, which --program=train chooses.
      coordinator="",
      cpu_devices=0,  # virtual CPU devices of a process; 0 = those there are
      start_deadline_s=300.0,  # in which all must have come
      heartbeat_s=100.0,  # a process that is silent for so long is dead
      deadline_s=1800.0,  # of the others for the next word of process 0
      # In which all must have written a checkpoint; then it has failed.
      save_deadline_s=1200.0,
  )

  # The regime of Asynchronous RLHF instead of replay: a round is mini_batches
  # (N) batches, all sampled with one version, trained on in their order in each
  # of `passes` (T) passes, N·T steps, and then left. lag_rounds=1: one-step
  # off-policy, round r trains on what the policy of round r-2 sampled; 0:
  # sampling and training alternate. mini_batches=0 = no rounds; `set_rounds`
  # of tba_jax/config/variants.py makes the other settings fit.
  c.rounds = d(mini_batches=0, passes=1, lag_rounds=1)

  # The newest params go to the searchers.
  c.publish = d(
      every_steps=1,
      keep_versions=3,  # that stay readable
      # Of their bytes: "store" (any hosts, up to some 100 MB), "files" (one
      # host, or a shared directory), "orbax" (shards, in a shared directory or
      # on gs://), "auto": by size and place.
      carrier="auto",
      # Of files and shards: "" = memory of this host (/dev/shm; without it the
      # run's directory); else one that all share, of shards also gs://….
      directory="",
      dtype="",  # of published floats: "float32", "bfloat16"; "" = as trained
  )

  # Collapse guards. `action`: "off", "warn", "lower_learning_rate" or "stop".
  c.guards = d(
      action="warn",
      min_entropy=0.01,  # nats a token
      max_kl=50.0,  # nats a completion, to the reference
      max_accuracy_drop=0.2,  # of held-out pass@1 below its first value
      learning_rate_factor=0.5,
      max_logprob_gap=1e-3,  # nats a token, trainer - sampler at staleness 0
  )

  # Of the whole run, to go on from.
  c.checkpoint = d(
      every_steps=40,
      every_s=0.0,  # and where none was saved for so long; 0 = by steps alone
      keep=2,  # newest ones that stay
      # Of the older ones stay, until you remove them: those whose step divides
      # by this, and one in so many seconds; 0 = none.
      keep_every_steps=0,
      keep_every_s=0,
      # The policy that did best on the task's validation split while training,
      # as the Hugging Face folder WORKDIR/best/model.
      keep_best=False,
  )

  c.store = d(
      # "" = a unix socket in the spool directory; "HOST:0" a free TCP port of
      # an interface, "HOST:7001-7009" one of a range: docs/hosts.md.
      address="",
      # "HOST:PORT" at which the store tells other hosts where it is; "" = in
      # the spool directory.
      locator="",
      secret_file="",  # 32 bytes, mode 0600; "" = made in the spool directory
      # Of mutual TLS (jax 0.11), PEM: this host's own two, and the authority's.
      tls_cert_file="",
      tls_key_file="",
      tls_ca_file="",
      insecure=False,  # other hosts without secret or TLS: docs/security.md
      spool_dir="",  # "" = a 0700 directory of this user and workdir
      deadline_s=60.0,  # of one operation, a change of generation included
      probe_timeout_s=5.0,  # a silent service is replaced after this
  )

  # CPU cores of each role, as "0" or "0,1" or "0-3"; "" = decided by the
  # supervisor from the cores that it may use; "all" = no pinning.
  c.cores = d(trainer="", searcher="", store="")

  # Of the programs `generate` and `score`.
  c.generate = d(
      # A Hugging Face folder, a run directory (its newest checkpoint), or
      # RUN/checkpoints/STEP.
      model="",
      input="",  # file with a JSON object a line
      output="",  # the same, made or continued
      num_completions=1,  # of each prompt
      batch_lines=64,  # lines that are worked on, and written, together
      append_stop_token=False,  # `score` ends a completion with it
      plain_logprobs=False,  # write those before top-k, top-p, min-p too
      chat=False,  # lay a `prompt` out as a user's message
      dtype="",  # of the model: "float32", "bfloat16"; "" = the folder's own
  )

  # Of `--program=export`. dtype of the tensors: "float32" or "bfloat16"; "" is
  # the one that was trained.
  c.export = d(dtype="")

  # Of `--program=sweep`: an objective's runs are all of its lags times seeds.
  c.sweep = d(
      # "NAME: KEY=VALUE …; NAME: …", what each objective sets for itself.
      objectives="",
      # Lags: a batch is sampled so many steps before it is trained on ("0,4"),
      # or rounds of so many mini-batches are sampled at their begin ("2,16").
      staleness_steps="0,1,2,4,16",
      mini_batches="2,16",
      seeds="0,1,2",
      workers=1,  # processes that make runs at the same time
  )

  # Periods of `metrics.jsonl` and `samples.jsonl`, and samples written then.
  c.log = d(
      every_steps=1,
      samples_every_steps=20,
      num_samples=8,
      writers="",  # also "csv", "tensorboard", "wandb", separated by commas
      wandb_project="tba_jax",
      wandb_mode="offline",  # or "online", which needs an account
      profile_first_step=10,  # that jax.profiler captures into `profile/`
      profile_num_steps=0,  # 0 = captures none
      profile_asked_steps=5,  # captured at each SIGUSR1
  )
  c.update(settings_red_team.get_config())
  return c
