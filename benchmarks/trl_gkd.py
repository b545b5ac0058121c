# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GKD, in an interpreter that has TRL.

    python -m benchmarks.trl_gkd FOLDER

`distill` starts it, through `peer_grpo.run`. Settings: model and teacher
(Hugging Face folders), prompts and completions in the order of training, batch
(completions of a step), num_steps, snapshot_steps, max_completion_tokens,
learning_rate (decays linearly to a tenth), lmbda, divergence_beta, temperature,
seed.
"""

import json
import os
import pathlib
import sys

from benchmarks import peer_grpo


def main(folder: pathlib.Path) -> None:
  os.environ.update(
      HF_HUB_OFFLINE="1",
      TOKENIZERS_PARALLELISM="false",
      TRL_EXPERIMENTAL_SILENCE="1",
  )
  # Packages not installed with this one.
  import datasets
  import torch
  import transformers
  from trl.experimental import gkd

  c = json.loads((folder / "settings.json").read_text())
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  tokenizer = transformers.AutoTokenizer.from_pretrained(c["model"])
  model, teacher = (
      transformers.AutoModelForCausalLM.from_pretrained(
          c[name], dtype=torch.float32
      )
      for name in ("model", "teacher")
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

  # Apart: as one text, the end of a prompt and the beginning of a completion
  # may be one token.
  encode = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
  prompts = encode(c["prompts"])
  completions = encode(
      [text + tokenizer.eos_token for text in c["completions"]]
  )
  data = {
      "prompt": c["prompts"],
      "input_ids": [p + y for p, y in zip(prompts, completions, strict=True)],
      "completion_mask": [
          [0] * len(p) + [1] * len(y) for p, y in zip(prompts, completions)
      ],
  }
  args = gkd.GKDConfig(
      output_dir=str(folder / "trainer"),
      per_device_train_batch_size=c["batch"],
      max_steps=c["num_steps"],
      max_new_tokens=c["max_completion_tokens"],
      lmbda=c["lmbda"],
      beta=c["divergence_beta"],
      temperature=c["temperature"],
      learning_rate=c["learning_rate"],
      lr_scheduler_type="polynomial",
      lr_scheduler_kwargs={"lr_end": c["learning_rate"] / 10, "power": 1.0},
      warmup_steps=0,
      adam_beta2=0.99,
      max_grad_norm=1.0,
      train_sampling_strategy="sequential",
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
  trainer = gkd.GKDTrainer(
      model=model,
      teacher_model=teacher,
      args=args,
      train_dataset=datasets.Dataset.from_dict(data),
      processing_class=tokenizer,
      callbacks=[StepEnds()],
  )
  trainer.train()
  clock.write(folder, ("torch", "transformers", "trl"))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
