# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of metrics and logs."""

from tba_jax.system import rules

# Writers, and the package that each needs.
WRITERS = {
    "csv": "",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}

_s = rules.Setting

# fmt: off
SECTIONS = {
    "log": rules.Section("Metrics, samples and profiles.", hosts="searcher"),
}

SETTINGS = {
    "log.every_steps": _s(1, rules.COUNT, "steps between lines of"
        " metrics.jsonl"),
    "log.samples_every_steps": _s(20, rules.FROM_0, "steps between writes of"
        " samples.jsonl, besides the last one; 0 = never", auto=True),
    "log.writers": _s("", rules.subset_of(*WRITERS), "writers in addition to"
        " metrics.jsonl"),
    "log.trackio_project": _s("tba_jax", rules.NAME, ""),
    "log.wandb_project": _s("tba_jax", rules.NAME, ""),
    "log.wandb_mode": _s("offline", rules.one_of("offline", "online"),
        "'online' needs an account"),
    "log.profile_first_step": _s(10, rules.COUNT, "first step that jax.profiler"
        " captures into `profile/`"),
    "log.profile_num_steps": _s(0, rules.FROM_0, "steps captured; 0 = none"),
}
# fmt: on


def _writers(c: rules.Values) -> rules.Problems:
  for name in c["log.writers"].split(","):
    package = WRITERS.get(name)
    if lack := package and not c.elsewhere and rules.lacks(package, name):
      yield "log.writers", f"{name} {lack}"


CHECKS = (_writers,)
