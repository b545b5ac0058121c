# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that are gone, each with its old default and what to write instead.

A config or run directory that still has one is taken as it is where its value
is the old default, and of a run that is resumed also where the setting did not
affect what the run computes. Any other value is refused with what to write.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Removed:
  """A setting that is gone.

  default: old default, which is what the code does now.
  instead: replacement that a message names.
  resume: whether it could change when a run was resumed.
  """

  default: bool | int | float | str
  instead: str
  resume: bool = True


def _adam(section: str, name: str, default: float) -> dict[str, Removed]:
  """Returns the row of a constant of a stage's AdamW."""
  instead = f"{section} trains with AdamW at {name} = {default!r}"
  return {f"{section}.{name}": Removed(default, instead, resume=False)}


def _shape(**defaults: bool | int | float | str) -> dict[str, Removed]:
  """Returns the rows of fields of a new model's shape, with old defaults."""
  instead = (
      "a new model has the plain blocks of its family; for another shape, start"
      " from a Hugging Face folder (init), whose config.json says it"
  )
  return {
      f"model.{name}": Removed(default, instead, resume=False)
      for name, default in defaults.items()
  }


_CORES = "start the run on the cores that it may use: taskset -c 0-3 …"

# fmt: off
REMOVED: Mapping[str, Removed] = {
    **_shape(
        rope_theta=10000.0, norm_epsilon=1e-5, attention_bias=False,
        mlp_bias=False, sliding_window=0, rope_type="default", rope_factor=1.0,
        rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
        rope_original_positions=8192, rotary_fraction=1.0,
        parallel_residual=False, activation="silu", scale_attention=True,
        scale_attention_by_layer=False),
    **_adam("sft", "b1", 0.9),
    **_adam("sft", "epsilon", 1e-8),
    **_adam("reward_model", "b1", 0.9),
    **_adam("reward_model", "b2", 0.999),
    **_adam("reward_model", "epsilon", 1e-8),
    **_adam("reward_model", "weight_decay", 0.0),
    "optimizer.state_dtype": Removed(
        "float32", "the optimizer's moments are float32", resume=False),
    "reward_model.log_every_steps": Removed(
        25, "progress is printed every 25 steps", resume=False),
    "reward.start_deadline_s": Removed(
        60.0, "a reward worker has 60 s to start; load what is slow at its"
        " first completion, within reward.deadline_s"),
    "evaluate.resamples": Removed(
        1000, "intervals are of 1000 bootstrap resamples"),
    "evaluate.confidence": Removed(
        0.95, "intervals are of 95 %; samples.jsonl and eval.jsonl have what"
        " others need"),
    "search.pull_every_s": Removed(
        0.02, "searchers poll for versions as often as their number allows"),
    "trainer.start_deadline_s": Removed(
        300.0, "the trainer's processes have 300 s to join; start them within"
        " that"),
    "trainer.deadline_s": Removed(
        1800.0, "the trainer's other processes wait 1800 s for process 0"),
    "guards.learning_rate_factor": Removed(
        0.5, "guards.action='lower_learning_rate' halves the learning rate"),
    "store.probe_timeout_s": Removed(
        5.0, "a service silent for 5 s, or a third of store.deadline_s, is"
        " restarted; set that one"),
    "cores.trainer": Removed("", _CORES),
    "cores.searcher": Removed("", _CORES),
    "cores.store": Removed("", _CORES),
    "log.num_samples": Removed(8, "each write of samples.jsonl has 8 samples"),
    "log.profile_asked_steps": Removed(
        5, "SIGUSR1 profiles 5 steps; log.profile_num_steps sets those of"
        " log.profile_first_step"),
}
# Values of settings that are gone, by (key, value).
VALUES = {
    ("loss.name", "copg"): (
        "FILE.py:FUNCTION; it is an example of a loss of one's own now:"
        " examples/copg.py:copg_loss"
    ),
}
# fmt: on


# Whole sections that are gone, with what to write instead.
_SECTIONS = {
    "cores": _CORES,
}


def note(key: str) -> str:
  """Returns what to write instead of a key; "" if it is not a removed one."""
  if key in REMOVED:
    return f"this setting is gone; {REMOVED[key].instead}"
  if key in _SECTIONS:
    return f"these settings are gone; {_SECTIONS[key]}"
  return ""


def note_on_error(error: BaseException) -> str:
  """Returns what to write instead of a section that a config file sets."""
  words = re.findall(r"'(\w+)'", str(error))
  is_lookup = isinstance(error, (AttributeError, KeyError))
  return note(words[0]) if is_lookup and words else ""


def is_default(key: str, value: Any) -> bool:
  """Whether a removed setting has its old default, as a value or a text."""
  if key not in REMOVED:
    return False
  default = REMOVED[key].default
  return value == default or str(value) == str(default)
