# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of meshes, from figures as a compiler would give them."""

import math
import types
from unittest import mock

from absl.testing import absltest

from tba_jax.config import settings
from tba_jax.tools import compile as compiler
from tba_jax.tools import mesh_search
from tba_jax.tools import plan
from tba_jax.tools import targets

_CHIP = targets.Chip(
    hbm_bytes=10**9,
    flops_per_s=1e12,
    memory_bytes_per_s=1e9,
    link_bytes_per_s=1e8,
)


def _compiled(arithmetic_s=0.0, memory_s=0.0, links_s=0.0, error=""):
  return compiler.Compiled(
      fits=not error,
      peak_bytes=10**8,
      arithmetic_s=arithmetic_s,
      links_s=links_s,
      memory_bytes=memory_s * _CHIP.memory_bytes_per_s,
      error=error,
  )


class MeshesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()
    device = types.SimpleNamespace(
        device_kind="a chip", platform="tpu", process_index=0
    )
    self.enter_context(mock.patch.dict(targets.CHIPS, {"a chip": _CHIP}))
    self.enter_context(
        mock.patch.object(targets, "devices", lambda name: [device] * 8)
    )
    # A role is its mesh, of which `compile_program` makes figures.
    role = lambda sizes, *names: compiler.RolePrograms(
        {n: compiler.Program((n, sizes), 0, "") for n in names}, {}
    )
    self.enter_context(
        mock.patch.object(
            compiler,
            "trainer",
            lambda config, *_: role(dict(config.mesh), "train_step"),
        )
    )
    self.enter_context(
        mock.patch.object(
            compiler,
            "searcher",
            lambda config, *_: role(
                dict(config.search.mesh), "prefill", "decode_chunk"
            ),
        )
    )
    self.enter_context(
        mock.patch.object(compiler, "compile_program", self.figures)
    )

  def figures(self, program, others, device, host_size):
    del others, device, host_size
    name, sizes = program.lower
    if name == "train_step":
      if sizes["data"] > 1:
        return _compiled(error="needs 2 GB; try less"), ""
      # Arithmetic 2 s, links 6 s for fsdp 8, less with tensor.
      return _compiled(2.0, 1.0, 6.0 * sizes["fsdp"] / 8), ""
    if name == "prefill":
      return _compiled(0.5), ""
    return _compiled(memory_s=0.01 * sizes["data"]), ""

  def test_meshes_have_all_devices(self):
    for num_devices in (1, 6, 8, 64):
      tried = mesh_search.trainer_meshes(num_devices)
      for sizes in (*tried, *mesh_search.searcher_meshes(num_devices)):
        self.assertEqual(math.prod(sizes.values()), num_devices)
        self.assertLessEqual(sizes["tensor"], 8)
      self.assertLen(
          {mesh_search.describe(sizes) for sizes in tried}, len(tried)
      )

  def test_chooses_fastest_fitting_mesh(self):
    devices = targets.devices("")
    tried = [*mesh_search.try_trainer(self.config, devices)]
    self.assertEqual(
        {mesh_search.describe(c.sizes): c.seconds for c in tried},
        {
            "fsdp 8": 6.0,
            "data 8": math.inf,
            "fsdp 4 x tensor 2": 3.0,
            "data 4 x tensor 2": math.inf,
            "fsdp 2 x tensor 4": 2.0,
            "data 2 x tensor 4": math.inf,
            "tensor 8": 2.0,
        },
    )
    rows = dict(mesh_search.rows("mesh", tried))
    self.assertIn("needs 2 GB; try less", rows["data 8"])
    self.assertIn("--config.mesh.fsdp=2", rows["chosen"])
    self.assertIn("--config.mesh.tensor=4", rows["chosen"])
    self.assertStartsWith(
        dict(mesh_search.rows("mesh", tried[1:2]))["chosen"], "NO mesh"
    )

  def test_plan_balances_best_meshes(self):
    config = self.config
    config.search.update(prompts_per_step=32, samples_per_prompt=8)
    config.sampling.update(num_slots=64, max_completion_tokens=100)
    operands = ["v5e:2x4", "--meshes"]
    rows = dict(
        row for _, rows in plan.plan(config, None, operands) for row in rows
    )
    # 256 completions in 64 slots are 4 times 100 steps of .01 s; 32 prompts in
    # prefills of 4 take 8 times .5 s.
    self.assertEqual(
        rows["sampling for one step, one searcher, at least"], "8 s"
    )
    self.assertStartsWith(rows["searchers that balance one trainer"], "4;")

  def test_kinds_without_number_of_devices_are_refused(self):
    with self.assertRaisesRegex(ValueError, "--meshes: needs topologies"):
      list(plan.plan(self.config, None, ["v5e", "--meshes"]))
