# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GKD, by an interpreter with TRL.

    python -m benchmarks.trl_gkd FOLDER

The study `distill` starts it through `peer_grpo.run`. Settings: model, teacher
(Hugging Face folders), prompts and completions in the order of training, batch
(completions of a step), num_steps, snapshot_steps, max_completion_tokens,
learning_rate (decays linearly to a tenth), lmbda, divergence_beta, temperature,
seed.
"""

import os
import pathlib
import sys

from benchmarks import trl_run


def main(folder: pathlib.Path) -> None:
  os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
  run = trl_run.Run(folder)
  c, tokenizer = run.settings, run.tokenizer
  # Not dependencies of this package.
  import datasets
  from trl.experimental import gkd

  # Encode separately: in one text, a token may span the end of the prompt and
  # the beginning of the completion.
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
      **trl_run.linear_decay(c["learning_rate"]),
      train_sampling_strategy="sequential",
      **trl_run.SETTINGS,
      seed=c["seed"],
  )
  trainer = gkd.GKDTrainer(
      model=run.model,
      teacher_model=trl_run.load_model(c["teacher"]),
      args=args,
      train_dataset=datasets.Dataset.from_dict(data),
      processing_class=tokenizer,
      callbacks=[run.callback],
  )
  run.train(trainer)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
