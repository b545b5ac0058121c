# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of runs of TRL's trainers, by an interpreter with TRL."""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any

from benchmarks import peer_grpo

# Keywords of the trainers' settings.
SETTINGS = {
    "warmup_steps": 0,
    "adam_beta2": 0.99,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Run:
  """A run in a folder of `peer_grpo.run`.

  settings: content of `settings.json`.
  tokenizer, model: objects of transformers, of `settings["model"]`, in float32.
  callback: trainer callback that stops the clock and takes snapshots.
  """

  def __init__(self, folder: pathlib.Path):
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # Not dependencies of this package.
    import torch
    import transformers

    self._folder = folder
    self.settings = c = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    self.tokenizer = transformers.AutoTokenizer.from_pretrained(c["model"])
    self.model = load_model(c["model"])
    self._clock = clock = peer_grpo.Clock(c, self._take_snapshot)

    class StepEnds(transformers.TrainerCallback):

      def on_step_end(self, args, state, control, **_):
        clock.end_step()
        control.should_training_stop = clock.is_over

    self.callback = StepEnds()

  def _take_snapshot(self) -> None:
    path = self._folder / f"step{len(self._clock.step_ends)}"
    self.model.save_pretrained(path)
    self.tokenizer.save_pretrained(path)

  def train(self, trainer: Any) -> None:
    """Trains and writes the result."""
    trainer.train()
    self._clock.write(self._folder, ("torch", "transformers", "trl"))


def load_model(folder: str) -> Any:
  """Returns the model of a Hugging Face folder, params in float32."""
  import torch
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
  )


def linear_decay(learning_rate: float) -> Mapping[str, Any]:
  """Returns keywords of a learning rate that decays linearly to a tenth."""
  return {
      "lr_scheduler_type": "polynomial",
      "lr_scheduler_kwargs": {"lr_end": learning_rate / 10, "power": 1.0},
  }
