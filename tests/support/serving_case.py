# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine, for tests of the server."""

import json

import numpy as np

from configs import serve as serve_config
from tba_jax.serving import messages

SESSION = "session"
MODEL = f"{SESSION}:train:0"


def make_config(**changes):
  """Returns the smallest server's config, with changes of `serve`."""
  config = serve_config.get_config("smoke")
  for name, value in changes.items():
    config.serve[name] = value
  return config


def datum(ids, **inputs):
  """Returns a sequence that predicts its next tokens, as JSON."""
  tensors = {"target_tokens": np.asarray(ids[1:], np.int64)}
  for name, values in inputs.items():
    dtype = np.int64 if name == "group" else np.float32
    tensors[name] = np.asarray(values, dtype)
  return {
      "model_input": {
          "chunks": [{"type": "encoded_text", "tokens": list(ids[:-1])}]
      },
      "loss_fn_inputs": {
          name: {
              "data": array.tolist(),
              "dtype": array.dtype.name,
              "shape": list(array.shape),
          }
          for name, array in tensors.items()
      },
  }


def pass_body(data, loss="cross_entropy", config=None, *, forward=False):
  """Returns the body of a pass, as the engine takes it."""
  name = "forward_input" if forward else "forward_backward_input"
  asked = {"data": data, "loss_fn": loss, "loss_fn_config": config or {}}
  return messages.pack_pass(
      {"model_id": MODEL, name: asked}, forward_only=forward
  )


def adam_body(learning_rate=0.01, **more):
  """Returns the body of an optim_step."""
  adam = {"learning_rate": learning_rate, **more}
  return json.dumps({"model_id": MODEL, "adam_params": adam}).encode()
