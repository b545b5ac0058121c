# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GRPO, in an interpreter that has TRL.

    python -m benchmarks.trl_grpo FOLDER

`peer_grpo.run` starts it and says what it reads and writes.
"""

import json
import os
import pathlib
import sys

from benchmarks import peer_grpo


def main(folder: pathlib.Path) -> None:
  os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
  # Packages not installed with this one.
  import datasets
  import torch
  import transformers
  import trl

  c = json.loads((folder / "settings.json").read_text())
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  tokenizer = transformers.AutoTokenizer.from_pretrained(c["model"])
  model = transformers.AutoModelForCausalLM.from_pretrained(
      c["model"], dtype=torch.float32
  )

  def take_snapshot() -> None:
    path = folder / f"step{len(clock.step_ends)}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)

  clock = peer_grpo.Clock(c, take_snapshot)

  class StepEnds(transformers.TrainerCallback):

    def on_step_end(self, args, state, control, **_):
      clock.end_step()
      control.should_training_stop = clock.is_over

  data, reward_fn = {"prompt": c["prompts"]}, peer_grpo.rewards
  if "task" in c:
    data["prompt_id"] = c["prompt_ids"]
    reward_fn = peer_grpo.make_task_rewards(c)
  schedule = {"lr_scheduler_type": "constant"}
  if "limit_s" not in c:
    schedule = {
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {
            "lr_end": c["learning_rate"] / 10, "power": 1.0
        },
    }  # fmt: skip
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
      warmup_steps=0,
      adam_beta2=0.99,
      max_grad_norm=1.0,
      shuffle_dataset=False,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      dataloader_pin_memory=False,
      save_strategy="no",
      logging_strategy="no",
      report_to="none",
      disable_tqdm=True,
      seed=c["seed"],
  )
  trainer = trl.GRPOTrainer(
      model=model,
      reward_funcs=reward_fn,
      args=args,
      train_dataset=datasets.Dataset.from_dict(data),
      processing_class=tokenizer,
      callbacks=[StepEnds()],
  )
  trainer.train()
  clock.write(folder, ("torch", "transformers", "trl"))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
