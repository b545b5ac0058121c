# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every paper config on each hardware: valid and within memory, or refused."""

import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import jax
import pytest

from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.mesh import sharding
from tba_jax.models import checks
from tba_jax.tools import memory_model
from tba_jax.tools import plan
from tests.support import hub_cache

_SHAPES = json.loads(
    (
        pathlib.Path(__file__).parents[1] / "models" / "published_configs.json"
    ).read_text()
)
# Models of the configs -> the published config.json with their shape.
_HUB = {
    **{name: name for name in hardware.MODELS if name in _SHAPES},
    "realtreetune/rho-1b-sft-GSM8K": "microsoft/rho-math-1b-v0.1",
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": (
        "EleutherAI/pythia-6.9b-deduped"
    ),
}
# Frozen models of red-teaming, with their sizes in parameters.
_FROZEN = {
    "facebook/roberta-hate-speech-dynabench-r4-target": 0.12e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9,
    "meta-llama/Llama-Guard-3-8B": 8.03e9,
    "sentence-transformers/all-MiniLM-L6-v2": 0.02e9,
    "vicgalle/gpt2-alpaca": 0.12e9,
}
# Data that need no download, and few of them.
_DATA = {
    "gsm8k": ["task.data=synthetic", "task.synthetic_prompts=100"],
    "math": ["task.train=synthetic", "task.test=synthetic",
             "task.synthetic_prompts=100"],
    "no_robots": ["task.data=synthetic", "task.synthetic_prompts=20"],
    "red_team": ["task.instructions=synthetic"],
    "tldr": ["task.data=synthetic", "task.synthetic_prompts=20"],
}  # fmt: skip
# Beginnings of the names of what has the shape of the params in a searcher.
_PARAMS = ("params", "base", "reference")
# What an evaluation adds to a trainer of adapters.
_MERGED = (
    "base with adapters merged", "params that an evaluation decodes with"
)  # fmt: skip
# Config -> the hardware that it fits, all others refuse it.
_ALL = "4xa100 8xh100 8xh200 v5p-8 v6e-8 v5e-16 v5p-16 v5e-64"
_ONE = f"1xh100 {_ALL}"
_FITS = {
    "gsm8k/tba": _ONE,
    "gsm8k/tba:model=qwen2.5-0.5b": _ONE,
    "gsm8k/tba:model=llama-3.2-1b": _ONE,
    "gsm8k/async_rlhf:method=online_dpo": _ONE,
    "gsm8k/async_rlhf:method=ppo": _ALL,
    "math": "8xh100 8xh200 v5p-16 v5e-64",
    "no_robots": "8xh100 8xh200 v5p-16 v5e-64",
    "no_robots:stage=sft": "8xh100 8xh200 v5p-16 v5e-64",
    "red_team:model=gpt2": f"colab {_ONE}",
    "red_team:model=llama": _ALL,
    "tldr/tba": _ONE,
    "tldr/tba:model=pythia-1b": _ONE,
    "tldr/tba:model=pythia-2.8b": _ALL,
    "tldr/async_rlhf:method=online_dpo": _ONE,
    "tldr/async_rlhf:method=ppo": _ONE,
    "tldr/sft": _ONE,
    "tldr/reward_model": _ONE,
}


class HardwareTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    cache = hub_cache.make(self)
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "tokenizer.json").write_text("{}")
    # These stand in for the hub's models: they have their sizes alone.
    patch = mock.patch.object(checks, "check_folder", autospec=True)
    patch.start()
    self.addCleanup(patch.stop)
    for name in (*_HUB, *_FROZEN):
      shape = _SHAPES[_HUB.get(name, name)]
      (folder / "config.json").write_text(json.dumps(shape))
      snapshot = hub_cache.add(cache, name, folder)
      size = int(_FROZEN.get(name, 1))
      _write_weights(snapshot / "model.safetensors", size)

  def load(self, spec, name):
    config, _, arg = spec.partition(":")
    data = next(d for c, d in _DATA.items() if config.startswith(c))
    arg = ",".join(filter(None, (arg, f"hardware={name}")))
    few = ["evaluate.num_prompts=1", "evaluate.final_prompts=1"]
    return load.load_config(f"configs/{config}.py:{arg}", data + few)

  @parameterized.parameters(*_FITS.items())
  @pytest.mark.slow
  def test_config_fits_or_is_refused(self, spec, fits):
    program = {
        "tldr/sft": "sft",
        "tldr/reward_model": "reward_model",
        "no_robots:stage=sft": "sft",
    }.get(spec, "plan")
    result = []
    for name, here in hardware.HARDWARE.items():
      try:
        config = self.load(spec, name)
      except ValueError as error:
        self.assertIn(f"; this run fits {', '.join(fits.split())}", str(error))
        continue
      result.append(name)
      with self.subTest(name):
        validate.validate(config, program=program)
        if program == "plan" and here.devices == 1:
          validate.validate(config, program="one_process")
        if program == "plan":
          parts = plan.memory_sections(config, None, [here.kind])
          rows = [row for _, part in parts for row in part]
          self.assertEqual([r for r in rows if r[1].startswith("NO")], [])
    self.assertEqual(result, fits.split())

  @parameterized.parameters(
      ("gsm8k/tba", "4xa100"),
      ("gsm8k/async_rlhf:method=online_dpo", "4xa100"),
      ("gsm8k/async_rlhf:method=ppo", "4xa100"),
      ("red_team:model=gpt2", "colab"),
      ("red_team:model=llama", "8xh100"),
      ("tldr/tba:model=pythia-1b", "v5e-16"),
  )
  @pytest.mark.slow
  def test_bytes_per_param_match_memory_model(self, spec, name):
    config, here = self.load(spec, name), hardware.HARDWARE[name]
    config.trainer.num_processes = 1
    own = memory_model.trainer(config, _one_device(here))
    needed = hardware.bytes_a_param(config, here)
    count = sum(x.size for x in jax.tree.leaves(own.params))
    left_out = {model.source.name for model in own.frozen}
    if config.lora.rank:  # Adapters are small beside their base.
      left_out |= {
          "adapters", "optimizer", "copy that is published", "gradients",
      }  # fmt: skip
    parts = own.resident | own.step | own.evaluation
    names = [*own.resident, "gradients"]
    names += _MERGED if config.lora.rank else ()
    size = sum(parts.get(name, 0) for name in names if name not in left_out)
    expected = needed["trainer"] + needed["value_model"]
    # A value model has no unembedding.
    self.assertBetween(size / count / expected, 0.95, 1.05)

    own = memory_model.searcher(config, _one_device(here))
    names = [n for n in own.resident if n.startswith(_PARAMS)]
    size = sum(own.resident[name] for name in names)
    self.assertBetween(size / count / needed["searcher"], 0.95, 1.05)


def _one_device(here):
  platform = "tpu" if here.kind.startswith("v") else "gpu"
  axes = ("data", "fsdp", "sequence", "tensor")
  return sharding.abstract_mesh(dict.fromkeys(axes, 1), platform)


def _write_weights(path, size):
  """Writes the header of a file of bfloat16 weights; the rest is a hole."""
  header = json.dumps(
      {"w": {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}}
  ).encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header)
  os.truncate(path, 8 + len(header) + 2 * size)
