# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the task: its name, and properties of the tasks' fields."""

from tba_jax.system import rules

# Fields of tasks that name files or folders, which may have different paths on
# different hosts.
FILES = frozenset("data instructions test train validation".split())
PATHS = frozenset("classifier_folder encoder victim".split())
# Fields whose text names files or folders on the machine, or commands.
NAMING_FILES = (
    FILES | PATHS | frozenset("opponent rewards reason source verifier".split())
)

_s = rules.Setting

# fmt: off
SECTIONS = {
    "task": rules.Section("The task: its name and its own fields.",
        fixed="prompts and rewards of the run are the task's"),
}

SETTINGS = {
    "task.name": _s("arithmetic", rules.TEXT, "name of a task in"
        " tba_jax/tasks/"),
}
# fmt: on
