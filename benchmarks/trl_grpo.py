# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GRPO, by an interpreter with TRL.

    python -m benchmarks.trl_grpo FOLDER

`peer_grpo.run` starts it and documents its input and output.
"""

import pathlib
import sys

from benchmarks import peer_grpo
from benchmarks import trl_run


def main(folder: pathlib.Path) -> None:
  run = trl_run.Run(folder)
  c = run.settings
  # Not dependencies of this package.
  import datasets
  import trl

  data, reward_fn = {"prompt": c["prompts"]}, peer_grpo.rewards
  if "task" in c:
    data["prompt_id"] = c["prompt_ids"]
    reward_fn = peer_grpo.make_task_rewards(c)
  schedule = {"lr_scheduler_type": "constant"}
  if "limit_s" not in c:
    schedule = trl_run.linear_decay(c["learning_rate"])
  micro = c.get("micro_batch_prompts", c["prompts_per_batch"])
  args = trl.GRPOConfig(
      output_dir=str(folder / "trainer"),
      per_device_train_batch_size=micro * c["completions_per_prompt"],
      gradient_accumulation_steps=c["prompts_per_batch"] // micro,
      num_generations=c["completions_per_prompt"],
      max_completion_length=c["max_completion_tokens"],
      max_steps=c["num_steps"],
      temperature=1.0,
      top_k=0,
      generation_kwargs={
          "min_new_tokens": c["max_completion_tokens"] * c["full_length"]
      },
      cache_implementation="static",
      beta=c["beta"],
      scale_rewards=c["scale_rewards"],
      learning_rate=c["learning_rate"],
      **schedule,
      shuffle_dataset=False,
      **trl_run.SETTINGS,
      seed=c["seed"],
  )
  trainer = trl.GRPOTrainer(
      model=run.model,
      reward_funcs=reward_fn,
      args=args,
      train_dataset=datasets.Dataset.from_dict(data),
      processing_class=run.tokenizer,
      callbacks=[run.callback],
  )
  run.train(trainer)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
