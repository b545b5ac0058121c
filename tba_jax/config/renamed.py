# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Former names of settings, programs and configs, for error messages."""

import fnmatch
import re

# Old key -> new key; a section stands for all its keys.
KEYS: dict[str, str] = {
    "logged": "offline",
    "logged.share": "offline.fraction",
    "sampling.num_rows": "sampling.num_slots",
    "search.weights": "search.quantization",
    "search.solved_from": "search.solved_threshold",
    "task.right_from": "task.correct_threshold",
    "task.made_up_prompts": "task.synthetic_prompts",
    "task.made_up_pairs": "task.synthetic_pairs",
    "evaluate.beside": "evaluate.background",
    "reward.where": "reward.backend",
    "reward.environment": "reward.env_vars",
}
# (key pattern, old value) -> new value.
VALUES: dict[tuple[str, str], str] = {
    ("task.name", "own"): "custom",
    ("task.*", "made_up"): "synthetic",
    ("search.sampler", "own"): "jax",
}
# Old program -> new program.
PROGRAMS: dict[str, str] = {
    "replay": "rerun",
}
# Old config file -> new files, the first for TBA and the last for the rest.
CONFIGS: dict[str, tuple[str, ...]] = {
    "configs/gsm8k.py": ("configs/gsm8k/tba.py", "configs/gsm8k/async_rlhf.py"),
    "configs/gsm8k_calculator.py": ("configs/gsm8k/calculator.py",),
    "configs/tldr.py": ("configs/tldr/tba.py", "configs/tldr/async_rlhf.py"),
    "configs/tldr_reward_model.py": ("configs/tldr/reward_model.py",),
    "configs/tldr_sft.py": ("configs/tldr/sft.py",),
}


def new_key(key: str) -> str | None:
  """Returns the current name of a renamed key, or None."""
  if key in KEYS:
    return KEYS[key]
  section, dot, name = key.rpartition(".")
  parent = new_key(section) if dot else None
  return parent and f"{parent}.{name}"


def new_config(path_and_arg: str) -> str | None:
  """Returns the current `FILE[:ARG,…]` of a renamed config, or None."""
  path, _, arg = path_and_arg.partition(":")
  args = [item for item in arg.split(",") if item not in ("", "method=tba")]
  is_other = any(item.startswith("method=") for item in args)
  for old, new in CONFIGS.items():
    if path == old or path.endswith(f"/{old}"):
      file = path.removesuffix(old) + new[is_other and len(new) - 1]
      return ":".join([file, ",".join(args)]) if args else file
  return None


def explain(error: str) -> str:
  """Appends to an error the new names of the old ones that it quotes."""
  notes = []
  for old, new in KEYS.items():
    if re.search(rf"['\"]{re.escape(old.rpartition('.')[2])}['\"]", error):
      notes.append(f"config.{old} is now config.{new}")
  for old, new in PROGRAMS.items():
    if f"--program={old}:" in error:
      notes.append(f"--program={old} is now --program={new}")
  return "; ".join([error, *notes])


def explain_values(error: str) -> str:
  """Appends the new value to each line of an error about an old value."""
  lines = error.split("\n")
  for i, line in enumerate(lines):
    if match := re.match(r"config\.([\w.]+) ?= ?['\"](\w+)", line):
      for (keys, old), new in VALUES.items():
        note = f"; {old!r} is now {new!r}"
        if old == match[2] and fnmatch.fnmatch(match[1], keys):
          lines[i] = line.removesuffix(note) + note
  return "\n".join(lines)
