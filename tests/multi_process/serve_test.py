# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `serve` program with the official client, killed between its calls."""

import http.client
import importlib.util
import json
import os
import pathlib
import signal
import stat
import unittest

from absl.testing import absltest
import numpy as np

from tba_jax.programs import serve
from tests.support import harness


def _needs(*names):
  lacking = [n for n in names if importlib.util.find_spec(n) is None]
  return unittest.skipIf(lacking, f"needs {', '.join(lacking)}")


def _datum(tinker, ids, **inputs):
  return tinker.types.Datum(
      model_input=tinker.types.ModelInput.from_ints(ids[:-1]),
      loss_fn_inputs={"target_tokens": np.array(ids[1:]), **inputs},
  )


def _cross_entropy(data, logprobs):
  loss = -sum(
      (x * datum.loss_fn_inputs["weights"].to_torch()).sum()
      for datum, x in zip(data, logprobs, strict=True)
  )
  return loss, {}


class KeyTest(absltest.TestCase):

  def test_is_made_once_and_refused_if_empty(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    key = serve.load_or_make_key(folder)
    self.assertEqual(serve.load_or_make_key(folder), key)
    (folder / "key").write_text("\n")
    with self.assertRaisesRegex(ValueError, "key is empty: delete it"):
      serve.load_or_make_key(folder)


@_needs("starlette", "uvicorn")
class ServeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def _start(self):
    server = harness.Served(self.workdir)
    self.addCleanup(lambda: server.process.process.kill())
    return server

  def _begin(self, server, path, body, size=None):
    """Sends a request, or the beginning of its body; returns its connection."""
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    near = http.client.HTTPConnection(server.url.removeprefix("http://"))
    self.addCleanup(near.close)
    near.putrequest("POST", f"/api/v1/{path}")
    near.putheader("X-API-Key", server.key)
    near.putheader("Content-Length", str(size or len(body)))
    near.endheaders(body)
    return near

  def test_reports_invalid_request(self):
    server = self._start()
    key = self.workdir / "serve" / "key"
    self.assertEqual(stat.S_IMODE(os.stat(key).st_mode), 0o600)
    status, said = server.post("create_session", {"tags": []})
    self.assertEqual(status, 200)
    session = said["session_id"]
    model = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "scratch",
        "lora_config": {"rank": 2},
    }
    # Starts no compilation, but that of new params.
    self.assertEqual(server.post("create_model", model)[0], 200)
    one = f"{session}:train:0"
    step = {"model_id": one, "seq_id": 1, "adam_params": {}}
    self.assertEqual(server.post("optim_step", step)[0], 200)
    for path, body, status, message in (
        ("create_session", b"[", 422, "not JSON"),
        ("create_modle", {}, 404, "docs/reference/server.md"),
        (
            "create_model",
            {**model, "base_model": "x"},
            422,
            "must be 'scratch'",
        ),
        (
            "create_model",
            {**model, "lora_config": {"rank": -1}},
            422,
            "rank = -1",
        ),
        ("create_model", {**model, "session_id": "x"}, 404, "session x"),
        ("optim_step", {**step, "model_id": "x"}, 404, "model x"),
        ("optim_step", {**step, "seq_id": "1"}, 422, "seq_id = '1'"),
        ("optim_step", {**step, "adam_params": {"eps": 1}}, 422, "was another"),
        (
            "forward_backward",
            {"model_id": one},
            422,
            "forward_backward_input: is missing",
        ),
        ("asample", {"sampling_session_id": "x"}, 422, "prompt: is missing"),
        ("retrieve_future", {"request_id": "x"}, 410, "not known"),
        ("retrieve_futures", b'{"timeout": NaN}', 422, "not JSON"),
    ):
      with self.subTest(path=path, message=message):
        result, said = server.post(path, body)
        self.assertEqual(result, status, said)
        self.assertIn(message, said["error"])
    result, said = server.post("create_session", {}, **{"X-API-Key": "tml-x"})
    self.assertEqual((result, "key" in said["error"]), (401, True))
    result, said = server.post("retrieve_future", {"request_id": f"{one}:1"})
    self.assertIn("without a gradient", said["error"])
    self.assertEqual(said["category"], "user")

  def test_ends_in_order_at_signal(self):
    server = self._start()
    _, session = server.post("create_session", {})
    model = {**session, "model_seq_id": 0, "base_model": "scratch"}
    model.pop("type")
    _, made = server.post("create_model", {**model, "lora_config": {"rank": 1}})
    # Its predecessor does not come.
    step = {"model_id": made["model_id"], "seq_id": 2, "adam_params": {}}
    _, step = server.post("optim_step", step)
    asked = {"request_id": step["request_id"]}
    for number in (signal.SIGTERM, signal.SIGINT):
      with self.subTest(number):
        waits = self._begin(server, "retrieve_future", asked)
        slow = self._begin(server, "create_session", b"{", size=9)
        self.assertEqual(server.post("create_session", {})[0], 200)
        gone = self._begin(server, "create_session", b"{", size=9)
        gone.close()  # Is no news.
        server.stop(number)  # Within few lines.
        for connection, status in ((waits, 408), (slow, 503)):
          self.assertEqual(connection.getresponse().status, status)
      if number == signal.SIGTERM:
        server.start()

  @_needs("tinker")
  def test_official_client_sees_no_kill(self):
    """Each kind of call is followed by a kill of the server."""
    import tinker

    server = self._start()
    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    adam = tinker.types.AdamParams(learning_rate=0.01)
    data = [
        _datum(tinker, [1, 2, 3, 4, 5], weights=np.ones(4, np.float32)),
        _datum(tinker, [5, 4, 3], weights=np.array([0, 1], np.float32)),
    ]

    def train(kill):
      training = client.create_lora_training_client(
          "scratch", rank=2, seed=1
      ).result()
      kill()
      for n in range(2):
        training.forward_backward(data, "cross_entropy").result()
        if n == 0:
          kill()
        # On its way, accepted or done.
        step = training.optim_step(adam)
        if n == 1:
          kill()
        metrics = step.result().metrics
      path = training.save_state("a").result().path
      sampling = training.save_weights_and_get_sampling_client().result()
      kill()
      result = training.forward(data, "cross_entropy").result()
      sample = sampling.sample(
          tinker.types.ModelInput.from_ints([1, 2]),
          2,
          tinker.types.SamplingParams(max_tokens=4, seed=3),
      ).result()
      return (
          metrics,
          result.metrics,
          [list(out["logprobs"].data) for out in result.loss_fn_outputs],
          [list(s.tokens) for s in sample.sequences],
      ), path

    expected, path = train(lambda: None)
    actual, _ = train(server.kill)
    self.assertEqual(actual, expected)
    self.assertEqual(expected[0]["step:max"], 2)

    if importlib.util.find_spec("torch") is not None:
      with self.subTest("a client-side loss is the same step"):
        norms = []
        for of_client in (False, True):
          training = client.create_training_client_from_state_with_optimizer(
              path
          ).result()
          if of_client:
            training.forward_backward_custom(data, _cross_entropy).result()
          else:
            training.forward_backward(data, "cross_entropy").result()
          norms.append(training.optim_step(adam).result().metrics)
        self.assertEqual(*norms)
        self.assertEqual(norms[0]["step:max"], 3)
    client.close("success").result()
