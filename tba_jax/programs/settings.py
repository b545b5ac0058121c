# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of `train` on one machine, and of `generate`."""

import re

from tba_jax.system import processes
from tba_jax.system import rules


def _are_numbers(text: str) -> bool:
  try:
    # Longer numbers are not devices, and would make lists as long.
    return not re.search(r"\d{5}", text) and bool(processes.parse_cores(text))
  except ValueError:
    return False


_DEVICES = rules.Allowed(
    "'', 'cpu', or accelerators as 0  0,2  0-3",
    lambda v: v in ("", "cpu") or _are_numbers(v),
)

_s = rules.Setting

# fmt: off
SECTIONS = {
    "run": rules.Section("Processes of `train` on this machine.", hosts="own"),
    "devices": rules.Section("Accelerators of each role, as '0', '0,1' or"
        " '0-3', or 'cpu'. '' lets the supervisor split this machine's:"
        " first the trainer's, then each searcher's; a single one is shared"
        " (run.processes).", hosts="own"),
    "generate": rules.Section("`--program=generate` and `score`"
        " (docs/guides/generate.md).", hosts="searcher"),
}

SETTINGS = {
    "run.processes": _s("auto", rules.one_of("auto", "many", "one"),
        "'one': trainer and searchers are threads of one process, on one"
        " accelerator; 'many': each is a process; 'auto': 'one' where the"
        " machine has a single accelerator and nothing assigns it"),

    "devices.trainer": _s("", _DEVICES, ""),
    "devices.searcher": _s("", _DEVICES, "devices of all searchers together"),

    "generate.model": _s("", rules.TEXT, "a Hugging Face folder, ORG/NAME of"
        " the hub, a run directory (its newest checkpoint), or"
        " RUN/checkpoints/STEP"),
    "generate.input": _s("", rules.TEXT, "file of JSON lines"),
    "generate.output": _s("", rules.TEXT, "file of JSON lines, created or"
        " continued"),
    "generate.num_completions": _s(1, rules.COUNT, "completions per prompt"),
    "generate.batch_lines": _s(64, rules.COUNT, "lines processed at a time"),
    "generate.append_stop_token": _s(False, rules.FLAG, "whether `score`"
        " appends it to a completion"),
    "generate.plain_logprobs": _s(False, rules.FLAG, "whether to write"
        " log-probs before top-k, top-p and min-p too"),
    "generate.chat": _s(False, rules.FLAG, "format a prompt as a user's"
        " message"),
    "generate.dtype": _s("", rules.DTYPE_OR_OWN, "dtype of the model; '' = the"
        " folder's"),
}
# fmt: on
