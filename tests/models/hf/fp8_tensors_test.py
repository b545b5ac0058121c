# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrices in FP8, as a folder has them, against `transformers`."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_tensors
from tests.support import tiny_model

try:
  import torch
  from transformers.integrations import finegrained_fp8
except ImportError:
  torch = None

_NAME = "model.layers.0.self_attn.q_proj.weight"
_SCALE = f"{_NAME}_scale_inv"
_QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def _packed(*shape: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns numbers with all finite codes, and factors of their blocks."""
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, shape, dtype=np.uint8)
  codes[codes % 128 == 127] = 0
  blocks = *shape[:-2], *(-(-n // 128) for n in shape[-2:])
  return codes, rng.uniform(0.1, 2, blocks).astype(np.float32)


def _as_fp8(codes: np.ndarray) -> np.ndarray:
  return codes.view(jnp.dtype("float8_e4m3fn"))


class DequantizeTest(parameterized.TestCase):

  def test_codes_are_those_of_e4m3(self):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    values = hf_files.dequantize_fp8(codes, np.ones((1, 1), np.float32))
    expected = _as_fp8(codes).astype(np.float32)
    np.testing.assert_array_equal(values, expected, strict=True)

  @parameterized.parameters((128, 256), (200, 300), (3, 130, 257), (1, 5))
  @absltest.skipIf(torch is None, "torch is not installed")
  def test_equals_transformers(self, *shape):
    codes, scales = _packed(*shape)
    expected = finegrained_fp8._dequantize_fp8_weight(
        torch.tensor(codes).view(torch.float8_e4m3fn),
        torch.tensor(scales),
        [128, 128],
        torch.float32,
    )
    values = hf_files.dequantize_fp8(codes, scales)
    np.testing.assert_array_equal(values, expected.numpy(), strict=True)


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write(self, **tensors) -> hf_tensors.AnyFiles:
    safetensors.numpy.save_file(tensors, self.folder / hf_files.WEIGHTS)
    return hf_tensors.open_files(self.folder)

  @parameterized.parameters("float32", "bfloat16")
  def test_slices_equal_those_of_the_whole(self, dtype):
    codes, scales = _packed(2, 200, 300)
    scales = scales.astype(jnp.dtype(dtype))
    bias = np.ones(200, np.float32)
    files = self.write(**{
        _NAME: _as_fp8(codes), _SCALE: scales, "bias": bias,
    })  # fmt: skip
    self.assertEqual(files.shapes, {_NAME: (2, 200, 300), "bias": (200,)})
    self.assertEqual(files.dtypes, {_NAME: "F32", "bias": "F32"})
    whole = hf_files.dequantize_fp8(codes, scales)
    for index in (
        (slice(None), slice(None), slice(None)),
        (slice(1, 2), slice(127, 129), slice(255, 257)),
        (slice(0, 1), slice(128, 200), slice(0, 128)),
        (slice(0, 2), slice(3, 4), slice(299, 300)),
    ):
      np.testing.assert_array_equal(files.read(_NAME, index), whole[index])
    np.testing.assert_array_equal(files.read("bias", (slice(9),)), bias[:9])

  @parameterized.parameters(
      (dict(scale=None), r"_scale_inv is missing; must be \[2, 3\] of BF16"),
      (
          dict(scale=np.ones((1, 2), np.float32)),
          r"\[200, 300\] in FP8: .*is \[1, 2\] of F32; must be \[2, 3\]",
      ),
      (dict(scale=np.ones((2, 3), np.uint8)), r"is \[2, 3\] of U8; must be"),
      (
          dict(codes=np.zeros(200, np.uint8), scale=np.ones(2, np.float32)),
          r"\[200\] in FP8",
      ),
  )
  def test_refuses_factors_of_other_shapes(self, changes, message):
    codes, scales = _packed(200, 300)
    codes = changes.get("codes", codes)
    scales = changes.get("scale", scales)
    tensors = {_NAME: _as_fp8(codes), _SCALE: scales}
    with self.assertRaisesRegex(ValueError, f"tensor {_NAME}.*{message}"):
      self.write(**{k: v for k, v in tensors.items() if v is not None})


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    model = tiny_model.make_model(mlp_width=200)
    self.params = tiny_model.init_params(model)
    hf.save(self.folder, model.config, self.params)

  def quantize(self) -> None:
    """Puts the folder's MLPs into FP8, and their values into the params."""
    config = self.folder / "config.json"
    settings = json.loads(config.read_text())
    settings["quantization_config"] = _QUANTIZED
    config.write_text(json.dumps(settings))
    path = self.folder / hf.WEIGHTS
    tensors = safetensors.numpy.load(path.read_bytes())
    mlp = self.params["blocks"]["mlp"]
    for name in ("gate", "up", "down"):
      values = []
      for layer in range(len(mlp[name]["kernel"])):
        key = f"model.layers.{layer}.mlp.{name}_proj.weight"
        codes, scales = _packed(*tensors[key].shape)
        scales /= 1000
        tensors |= {key: _as_fp8(codes), f"{key}_scale_inv": scales}
        values.append(hf_files.dequantize_fp8(codes, scales))
      mlp[name] = {"kernel": np.stack(values)}
    path.write_bytes(safetensors.numpy.save(tensors))

  def test_loads_as_the_dequantized_model(self):
    self.quantize()
    config, params = hf.load(self.folder, dtype="float32")
    self.assertNotIn("quantization_config", hf_config.to_hf(config))
    for name in ("gate", "up", "down"):
      found = params["blocks"]["mlp"][name]["kernel"]
      expected = self.params["blocks"]["mlp"][name]["kernel"]
      np.testing.assert_array_equal(found, expected)

  def test_adapter_is_merged_into_dequantized_base(self):
    self.quantize()
    config = self.folder / "config.json"
    settings = json.loads(config.read_text())
    del settings["dtype"]
    config.write_text(json.dumps(settings))
    adapter = pathlib.Path(self.create_tempdir().full_path)
    name = "model.layers.0.mlp.down_proj.weight"
    down = self.params["blocks"]["mlp"]["down"]["kernel"]
    D, F = down[0].shape
    a, b = np.ones((1, F), np.float32), np.ones((D, 1), np.float32)
    adapter_folder.write(
        adapter,
        {
            adapter_folder.tensor_name(name, factor): x
            for factor, x in (("A", a), ("B", b))
        },
        base=self.folder,
        rank=1,
        alpha=0.5,
    )
    cache = pathlib.Path(self.create_tempdir().full_path)
    merged = adapter_folder.find(adapter, pathlib.Path, cache, weights=True)
    _, params = hf.load(merged, dtype="float32")
    found = params["blocks"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(found[0], down[0] + np.float32(0.5))
    np.testing.assert_array_equal(found[1], down[1])
    del settings["quantization_config"]
    self.assertEqual(
        json.loads((merged / "config.json").read_text()),
        settings | {"dtype": "bfloat16"},
    )

  @parameterized.parameters(
      dict(modules_to_not_convert=["lm_head"], scale_fmt="ue8m0"),
      dict(dequantize=False, expert_dtype="fp8", modules_to_convert=None),
  )
  def test_reads_settings_without_effect(self, **others):
    settings = json.loads((self.folder / "config.json").read_text())
    settings["quantization_config"] = _QUANTIZED | others
    self.assertEqual(
        hf_config.from_hf(settings), hf_config.from_hf({
            **settings, "quantization_config": _QUANTIZED,
        })
    )  # fmt: skip

  @parameterized.parameters(
      dict(quant_method="fbgemm_fp8"),
      dict(weight_block_size=[1, 128]),
      dict(weight_block_size=None),
      dict(activation_scheme="static"),
      dict(fmt="e5m2"),
      dict(expert_dtype="fp4"),
      dict(bits=8),
  )
  def test_refuses_other_formats(self, **others):
    settings = json.loads((self.folder / "config.json").read_text())
    settings["quantization_config"] = _QUANTIZED | others
    message = "quantization_config=.*supported: None or .*'fp8'.*128, 128"
    with self.assertRaisesRegex(ValueError, message):
      hf_config.from_hf(settings)


if __name__ == "__main__":
  absltest.main()
