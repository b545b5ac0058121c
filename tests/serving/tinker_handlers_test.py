# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What clients learn about models and their checkpoints."""

import datetime
import http.client
import time
from unittest import mock

from absl.testing import absltest

from tba_jax.serving import handlers
from tests.support import serving_case


class TrainingRunsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.server = serving_case.HttpServer(self.create_tempdir().full_path)
    self.addCleanup(self.server.close)
    _, response = self.server.ask("api/v1/create_session", {})
    self.session = response["session_id"]

  def test_returns_user_metadata_of_model(self):
    ask, began = self.server.ask, time.time()
    body = {"session_id": self.session, "model_seq_id": 0}
    made = {"base_model": "scratch", "lora_config": {"rank": 2}}
    response = {"renderer_name": "qwen3_instruct"}
    self.server.result(
        ask("api/v1/create_model", {**body, **made, "user_metadata": response})
    )
    one = f"{self.session}:train:0"
    kept = {"model_id": one, "seq_id": 1, "path": "first"}
    saved = self.server.result(ask("api/v1/save_weights", kept))
    status, run = ask(f"api/v1/training_runs/{one}")
    self.assertEqual(status, 200, run)
    self.assertEqual(run["user_metadata"], response)
    self.assertEqual((run["is_lora"], run["lora_rank"]), (True, 2))
    self.assertEqual(run["last_checkpoint"]["tinker_path"], saved["path"])
    self.assertIsNone(run["last_sampler_checkpoint"])
    asked = datetime.datetime.fromisoformat(run["last_request_time"])
    self.assertBetween(asked.timestamp(), began, time.time())

    with self.subTest("a model that a checkpoint makes has its own"):
      load = {**body, "model_seq_id": 1, "path": saved["path"]}
      response = {"renderer_name": "role_colon"}
      load |= {"optimizer": False, "user_metadata": response}
      self.server.result(ask("api/v1/load_weights", load))
      _, run = ask(f"api/v1/training_runs/{self.session}:train:1")
      self.assertEqual(run["user_metadata"], response)
      self.assertEqual((run["base_model"], run["lora_rank"]), ("scratch", 2))

    with self.subTest("and all there is is listed, the newest first"):
      _, response = ask("api/v1/training_runs?limit=1&offset=1")
      (run,) = response["training_runs"]
      self.assertEqual(run["training_run_id"], one)
      self.assertEqual(
          response["cursor"], {"limit": 1, "offset": 1, "total_count": 2}
      )
      _, response = ask("api/v1/checkpoints")
      self.assertEqual(response["checkpoints"], [run["last_checkpoint"]])
      _, response = ask("api/v1/sessions")
      self.assertEqual(response["sessions"], [self.session])
      status, response = ask("api/v1/checkpoints?limit=0")
      self.assertEqual(
          (status, "limit = '0'" in response["error"]), (422, True)
      )

    status, _ = ask("api/v1/training_runs/none")
    self.assertEqual(status, 404)
    lora = {"lora_config": {"rank": 2, "alpha": 1}, "model_seq_id": 2}
    status, response = ask("api/v1/create_model", {**body, **made, **lora})
    self.assertEqual((status, "alpha: not" in response["error"]), (422, True))

  def test_refuses_tinker_only_loss_with_alternative(self):
    ask = self.server.ask
    body = {"session_id": self.session, "sampling_session_seq_id": 0}
    _, made = ask(
        "api/v1/create_sampling_session", {**body, "base_model": "scratch"}
    )
    status, response = ask(
        "api/v1/asample",
        {
            "sampling_session_id": made["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]},
            "num_samples": 1,
            "sampling_params": {"max_tokens": 1},
            "record_stability_info": True,
        },
    )
    self.assertEqual(status, 422)
    self.assertIn("loss_fn=importance_sampling", response["error"])

  def test_refused_prompt_has_reason(self):
    ask = self.server.ask
    body = {"session_id": self.session, "sampling_session_seq_id": 0}
    _, made = ask(
        "api/v1/create_sampling_session", {**body, "base_model": "scratch"}
    )
    for tokens, why in (
        (
            [3] * 24,
            "must be up to config.sampling.max_prompt_tokens = 16 and"
            " config.sampling.max_completion_tokens = 8 together",
        ),
        ([500], "prompt_tokens: must be integers from 0 to "),
    ):
      chunks = [{"type": "encoded_text", "tokens": tokens}]
      response = self.server.result(
          ask(
              "api/v1/asample",
              {
                  "sampling_session_id": made["sampling_session_id"],
                  "prompt": {"chunks": chunks},
                  "num_samples": 1,
                  "sampling_params": {"max_tokens": 1},
              },
          )
      )
      self.assertIn(why, response["error"])
      # No number of the server's own.
      self.assertNotRegex(response["error"], r"prompt \d")

  def test_body_may_be_too_large_or_too_slow(self):
    most = handlers.MOST_OF_JSON + handlers.BYTES_OF_TOKEN * 24
    passes, proto = handlers.MOST_OF_JSON_PASS, "application/x-protobuf"
    for path, kind, most, allowed in (
        ("create_session", "", most, "."),
        ("asample", "", most, "."),
        ("forward_backward", "application/json", passes, proto),
        ("forward_backward", proto, handlers.MOST_BYTES, "."),
    ):
      with self.subTest(path=path, kind=kind):
        # Refused before it has come, and so before it is read as JSON.
        status, response = self._begin(path, most + 1, **{"Content-Type": kind})
        self.assertEqual(status, 413)
        self.assertRegex(response, f"more than {most} bytes.*{allowed}")
    chunks = (b'{"tags": ["' if n == 0 else b"a" * 2**16 for n in range(40))
    connection = self._connection()
    connection.request(
        "POST", "/api/v1/create_session", chunks, self._headers()
    )
    self.assertEqual(connection.getresponse().status, 413)
    tags = {"tags": ["a" * 2**20]}
    self.assertEqual(self.server.ask("api/v1/create_session", tags)[0], 200)
    with mock.patch.object(handlers, "_BODY_S", 0.2):
      status, response = self._begin("create_session", 9)
      self.assertEqual(status, 408)
      self.assertIn("took more than 0.2 s", response)

  def _headers(self, **more):
    return {"X-API-Key": serving_case.KEY, **more}

  def _connection(self):
    address = self.server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    self.addCleanup(connection.close)
    return connection

  def _begin(self, path, size, **headers):
    """Sends the first byte of a body; returns status and answer."""
    connection = self._connection()
    connection.putrequest("POST", f"/api/v1/{path}")
    for name, value in self._headers(**headers).items():
      connection.putheader(name, value)
    connection.putheader("Content-Length", str(size))
    connection.endheaders(b"{")
    answer = connection.getresponse()
    return answer.status, answer.read().decode()

  def test_refuses_deeply_nested_or_binary_body(self):
    for body, message in (
        (b'{"tags": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "recursion"),
        (b'{"tags": "\\ud800"}', "hex escape"),
        (b"\xff", "not JSON"),
    ):
      connection = self._connection()
      connection.request(
          "POST", "/api/v1/create_session", body, self._headers()
      )
      answer = connection.getresponse()
      self.assertEqual(answer.status, 422)
      self.assertIn(message, answer.read().decode())

  def test_reports_unwritable_journal(self):
    with mock.patch.object(
        self.server.engine.registry, "add_session", side_effect=OSError("full")
    ):
      status, response = self.server.ask("api/v1/create_session", {})
    self.assertEqual(
        (status, response["error"]), (503, "full: ask again later")
    )
