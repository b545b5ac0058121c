# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of `export` and `sweep`."""

from tba_jax.system import rules

_s = rules.Setting

# fmt: off
SECTIONS = {
    "export": rules.Section("`--program=export`.", hosts="searcher"),
    "sweep": rules.Section("`--program=sweep`: each objective at each lag with"
        " each seed.", hosts="searcher"),
}

SETTINGS = {
    "export.dtype": _s("", rules.DTYPE_OR_OWN, "dtype of the tensors; '' = as"
        " trained"),
    "export.adapter": _s(False, rules.FLAG, "whether to write the factors of"
        " lora.rank alone, as the package peft does, instead of the model with"
        " them merged in"),

    "sweep.objectives": _s("", rules.TEXT, "settings of each objective, 'NAME:"
        " KEY=VALUE …; NAME: …'"),
    "sweep.staleness_steps": _s("0,1,2,4,16", rules.INTEGERS,
        "lags: a batch is sampled this many steps before it is trained on"),
    "sweep.mini_batches": _s("2,16", rules.INTEGERS, "lags: rounds of this many"
        " mini-batches are sampled at their start"),
    "sweep.seeds": _s("0,1,2", rules.INTEGERS, ""),
}
# fmt: on


CHECKS = (rules.require("export.adapter", bool, {"lora.rank": "above 0"}),)
