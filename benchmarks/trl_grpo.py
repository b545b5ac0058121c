# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of TRL's GRPO on countdown, in an interpreter that has TRL.

    python -m benchmarks.trl_grpo FOLDER

reads FOLDER/settings.json and writes FOLDER/step20 (Hugging Face folders) and
so on, and FOLDER/result.json with the Unix time at the end of each step, from
which the time of keeping snapshots is taken out. Beside TRL and torch it needs
only the packages of `tba_jax.tasks`. `run` starts it; `TBA_JAX_TRL` names the
interpreter, by default this one.
"""

from collections.abc import Mapping
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tba_jax.system import processes
from tba_jax.tasks import countdown

VARIABLE = "TBA_JAX_TRL"
_DEADLINE_S = 1200.0


def python() -> str:
  """Returns the interpreter that `run` uses."""
  return os.environ.get(VARIABLE, sys.executable)


def is_installed() -> bool:
  code = "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"
  return subprocess.run([python(), "-c", code], check=False).returncode == 0


def run(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Trains in a process of its own; returns its result.

  Args:
    folder: made, for settings, snapshots, log and result.
    settings: keywords of TRL (learning_rate, beta, scale_rewards), model (a
      Hugging Face folder), prompts, prompts_per_batch, completions_per_prompt,
      min_completion_tokens, max_completion_tokens, num_steps, snapshot_steps,
      seed.

  Raises:
    RuntimeError: the process failed; with the end of its log.
  """
  folder.mkdir(parents=True)
  (folder / "settings.json").write_text(json.dumps(settings))
  with (folder / "log.txt").open("w") as log:
    done = subprocess.run(
        [python(), "-m", "benchmarks.trl_grpo", str(folder)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=processes.package_environment(),
        timeout=_DEADLINE_S,
        check=False,
    )
  if done.returncode:
    tail = (folder / "log.txt").read_text()[-2000:]
    raise RuntimeError(f"{folder} ended with {done.returncode}: {tail}")
  return json.loads((folder / "result.json").read_text())


def main(folder: pathlib.Path) -> None:
  os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
  # Not installed with this package.
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
  snapshots: dict[int, dict[str, Any]] = {}
  step_ends: list[float] = []

  class Snapshots(transformers.TrainerCallback):
    """Keeps copies of the params in memory, outside of the clock."""

    paused_s = 0.0

    def on_step_end(self, args, state, control, **_):
      step_ends.append(time.time() - self.paused_s)
      step = state.global_step
      if step % c["snapshot_steps"] == 0 or step == c["num_steps"]:
        snapshots[step] = {
            name: value.detach().clone()
            for name, value in model.state_dict().items()
        }
        self.paused_s += time.time() - step_ends[-1] - self.paused_s

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
      generation_kwargs={"min_new_tokens": c["min_completion_tokens"]},
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
      reward_funcs=_rewards,
      args=args,
      train_dataset=datasets.Dataset.from_dict({"prompt": c["prompts"]}),
      processing_class=tokenizer,
      callbacks=[Snapshots()],
  )
  trainer.train()
  for step, params in snapshots.items():
    model.load_state_dict(params)
    model.save_pretrained(folder / f"step{step}")
    tokenizer.save_pretrained(folder / f"step{step}")
  packages = ("torch", "transformers", "trl")
  versions = {name: importlib.metadata.version(name) for name in packages}
  result = {"step_ends": step_ends, "versions": versions}
  (folder / "result.json").write_text(json.dumps(result))


def _rewards(
    prompts: list[str], completions: list[str], **_: Any
) -> list[float]:
  """Returns 1 for a correct completion, else 0."""
  return [
      float(_is_correct(*texts))
      for texts in zip(prompts, completions, strict=True)
  ]


def _is_correct(prompt: str, completion: str) -> bool:
  numbers, target = prompt.split(">")
  numbers = [int(number) for number in numbers.split(",")]
  key = countdown.solution_key(numbers, int(target), completion)
  return key is not None


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
