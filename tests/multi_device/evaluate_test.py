# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of eight devices, evaluated on four: params and rows are split."""

from absl.testing import absltest

from tba_jax.config import variants
from tba_jax.learning import model_source
from tba_jax.programs import evaluate
from tests.programs import evaluate_test
from tests.support import cpu_devices

arithmetic = variants.import_config("configs/arithmetic.py")

cpu_devices.make(4)


def setUpModule():
  cpu_devices.skip_without(4)


class EvaluateTest(absltest.TestCase):

  def test_run_of_more_devices_is_evaluated_on_available_ones(self):
    config = arithmetic.get_config("smoke")
    config.sft.num_steps = 30
    workdir = self.create_tempdir().full_path
    evaluate_test.make_workdir(config, workdir)
    folder = f"{workdir}/sft/model"
    expected = evaluate.run(config, workdir, ["3", folder])
    config.mesh.update(data=2, fsdp=4)
    mesh = model_source.mesh_here(config.mesh)
    self.assertEqual(mesh.size, 4)
    for operand in ("3", folder):
      _, policy, params, _ = evaluate.load_source(
          config, workdir, operand, mesh
      )
      kernel = params["blocks"]["mlp"]["up"]["kernel"]
      self.assertEqual(4 * kernel.addressable_data(0).size, kernel.size)
      (reference,) = {
          id(actual): actual
          for actual in evaluate.make_references(
              config, workdir, policy, mesh
          ).values()
      }.values()
      kernel = reference._params["blocks"]["mlp"]["up"]["kernel"]
      self.assertEqual(4 * kernel.addressable_data(0).size, kernel.size)
    actual = evaluate.run(config, workdir, ["3", folder])
    for name, one in expected.items():
      self.assertEqual(actual[name]["pass_at_1"], one["pass_at_1"])
      self.assertEqual(actual[name]["mean_length"], one["mean_length"])
      self.assertAlmostEqual(actual[name]["kl"], one["kl"], places=4)
