# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The folders that a run of tunix saves."""

import pathlib

from absl.testing import absltest
import numpy as np
import safetensors.numpy

from benchmarks import tunix_grpo
from tba_jax.models.hf import hf
from tests.support import tiny_model


class TunixGrpoTest(absltest.TestCase):

  def test_saves_snapshot_as_hugging_face_folder(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    model = tiny_model.make_model()
    c = model.config
    hf.save(folder / "start", c, tiny_model.init_params(model))
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)
    D, H = c.width, c.head_dim
    params = {
        "embedder": {"input_embedding": make(c.vocab_size, D)},
        "final_norm": {"w": make(D)},
        "lm_head": {"w": make(D, c.vocab_size)},
        "layers": {
            i: {
                "input_layernorm": {"w": make(D)},
                "post_attention_layernorm": {"w": make(D)},
                "attn": {
                    "q_proj": {"w": make(D, c.num_heads, H)},
                    "k_proj": {"w": make(D, c.num_kv_heads, H)},
                    "v_proj": {"w": make(D, c.num_kv_heads, H)},
                    "o_proj": {"w": make(c.num_heads, H, D)},
                },
                "mlp": {
                    "gate_proj": {"kernel": make(D, c.mlp_width)},
                    "up_proj": {"kernel": make(D, c.mlp_width)},
                    "down_proj": {"kernel": make(c.mlp_width, D)},
                },
            }
            for i in range(c.num_layers)
        },
    }
    saved = folder / "saved"
    tunix_grpo.save(saved, params, start=folder / "start")
    # Refuses a name or a shape that is not the model's.
    self.assertEqual(hf.load(saved)[0], hf.load(folder / "start")[0])
    tensors = safetensors.numpy.load_file(saved / "model.safetensors")
    layer = params["layers"][1]
    weight_of = lambda name: tensors[f"model.layers.1.{name}.weight"].T
    x_TxD, x_TxNxH = make(3, D), make(3, c.num_heads, H)
    np.testing.assert_allclose(
        x_TxD @ weight_of("self_attn.k_proj"),
        np.einsum("TD,DNH->TNH", x_TxD, layer["attn"]["k_proj"]["w"]).reshape(
            3, -1
        ),
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        x_TxNxH.reshape(3, -1) @ weight_of("self_attn.o_proj"),
        np.einsum("TNH,NHD->TD", x_TxNxH, layer["attn"]["o_proj"]["w"]),
        rtol=1e-5,
        atol=1e-5,
    )
    for name in ("gate_proj", "up_proj", "down_proj"):
      np.testing.assert_array_equal(
          weight_of(f"mlp.{name}"), layer["mlp"][name]["kernel"]
      )
    np.testing.assert_array_equal(
        tensors["lm_head.weight"].T, params["lm_head"]["w"]
    )
