# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GRPO on countdown, in an interpreter that has TRL.

    python -m benchmarks.trl_grpo FOLDER

`peer_grpo.run` starts it and says what it reads and writes.
"""

import json
import os
import pathlib
import sys
from typing import Any

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

  def take_snapshot() -> dict[str, Any]:
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
    }

  clock = peer_grpo.Clock(c, take_snapshot)

  class StepEnds(transformers.TrainerCallback):

    def on_step_end(self, args, state, control, **_):
      clock.end_step()

  args = trl.GRPOConfig(
      output_dir=str(folder / "trainer"),
      per_device_train_batch_size=(
          c["prompts_per_batch"] * c["completions_per_prompt"]
      ),
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
      lr_scheduler_type="polynomial",
      lr_scheduler_kwargs={"lr_end": c["learning_rate"] / 10, "power": 1.0},
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
      reward_funcs=peer_grpo.rewards,
      args=args,
      train_dataset=datasets.Dataset.from_dict({"prompt": c["prompts"]}),
      processing_class=tokenizer,
      callbacks=[StepEnds()],
  )
  trainer.train()
  for step, params in clock.snapshots.items():
    model.load_state_dict(params)
    model.save_pretrained(folder / f"step{step}")
    tokenizer.save_pretrained(folder / f"step{step}")
  clock.write(folder, ("torch", "transformers", "trl"))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
