# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents that play episodes over HTTP, with the official client and without."""

import importlib.util
import unittest
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax.serving import sample_batches
from tests.support import serving_case

_ASK = [{"role": "user", "content": "1+2"}]


def _body(messages=_ASK, **fields):
  return {"model": "scratch", "messages": messages, "max_tokens": 2, **fields}


class AgentsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.server = self._start()

  def _start(self):
    server = serving_case.HttpServer(self.workdir)
    self.addCleanup(server.close)
    return server

  def _episode(self, **body):
    body = body or {"base_model": "scratch"}
    status, response = self.server.ask("api/v1/create_episode", body)
    self.assertEqual(status, 200, response)
    return response["episode_id"], response["path"].strip("/")

  def _read(self, id):
    status, response = self.server.ask(f"api/v1/episodes/{id}")
    self.assertEqual(status, 200, response)
    return response

  def test_episode_outlives_restart_and_ends_with_reward(self):
    id, path = self._episode()
    status, first = self.server.ask(f"{path}/chat/completions", _body())
    self.assertEqual(status, 200, first)
    response = first["choices"][0]["message"]
    self.server.close()

    self.server = self._start()
    with self.subTest("the official client asks again after a lost answer"):
      _, again = self.server.ask(
          f"{path}/chat/completions",
          _body(),
          **{"x-stainless-retry-count": "1"},
      )
      self.assertEqual(again, first)
    chat = [*_ASK, response, {"role": "user", "content": "3"}]
    status, second = self.server.ask(f"{path}/chat/completions", _body(chat))
    self.assertEqual(status, 200, second)
    end = (f"api/v1/episodes/{id}/finish", {"reward": 0.5})
    for _ in range(2):
      _, response = self.server.ask(*end)
      self.assertEqual(response["episode_id"], id)
    episode = self._read(id)
    self.assertEqual((episode["reward"], episode["calls"]), (0.5, 2))
    (row,) = episode["rows"]
    ids = row["prompt_ids"] + row["completion_ids"]
    answers = [a["choices"][0]["token_ids"] for a in (first, second)]
    n = len(first["prompt_token_ids"])
    self.assertEqual(ids[:n], first["prompt_token_ids"])
    self.assertEqual(ids[n : n + len(answers[0])], answers[0])
    self.assertEqual(ids, second["prompt_token_ids"] + answers[1])
    self.assertEqual(sum(row["sampled_mask"]), sum(map(len, answers)))
    self.assertEqual(set(row["versions"]), {0, -1})
    with self.subTest("the log-probs are of the params that sampled"):
      engine = self.server.engine
      (values,) = engine.base.scorer().logprobs(
          engine.base.params, [np.array(ids, np.int32)]
      )
      np.testing.assert_allclose(
          row["logprobs"][: len(answers[0])],
          values[n : n + len(answers[0])],
          atol=1e-4,
      )
    with self.subTest("and after its end it is closed"):
      status, response = self.server.ask(f"{path}/chat/completions", _body())
      self.assertEqual(status, 410)
      self.assertIn("has finished", response["error"]["message"])
      self.assertEqual(
          next(self.server.engine.journal.since(id, -1))[0].body, None
      )
      status, response = self.server.ask(end[0], {"reward": 1.0})
      self.assertEqual(status, 422)

  def test_key_names_episode(self):
    """So that a client whose answer was lost may ask again."""
    key, body = {"Idempotency-Key": "a"}, {"base_model": "scratch"}
    ask = lambda body: self.server.ask("api/v1/create_episode", body, **key)
    self.assertEqual(ask(body), ask(body))
    status, response = ask(
        {"base_model": "", "model_path": ""} | body | {"x": 0}
    )
    self.assertEqual(status, 200, response)
    status, response = ask({**body, "model_path": self._version()})
    self.assertEqual(status, 422)
    self.assertIn("another episode came with this key", response["error"])

  def test_retried_call_runs_again_after_server_error(self):
    id, path = self._episode()
    call, again = f"{path}/chat/completions", {"x-stainless-retry-count": "1"}
    with mock.patch.object(
        sample_batches.SampleBatches,
        "complete",
        side_effect=RuntimeError("no memory"),
    ):
      status, response = self.server.ask(call, _body())
      self.assertEqual(status, 500, response)
      self.assertIn("no memory", response["error"]["message"])
    status, response = self.server.ask(call, _body(), **again)
    self.assertEqual(status, 200, response)
    self.assertEqual(self.server.ask(call, _body(), **again), (200, response))
    self.assertEqual(self._read(id)["calls"], 1)

  def test_reports_errors_in_api_format(self):
    _, path = self._episode()
    long = [{"role": "user", "content": "1" * 30}]
    for where, body, status, message in (
        ("chat/completions", _body(n=3), 400, "n = 3"),
        ("chat/completions", _body(top_p=2.0), 400, "top_p = 2"),
        ("chat/completions", _body(long), 400, "context_length_exceeded"),
        (
            "chat/completions",
            {"model": "scratch", "prompt": "1"},
            400,
            "messages",
        ),
        ("completions", _body(), 400, "messages: not supported"),
        ("completions", {"model": "x", "prompt": "1"}, 400, "model = 'x'"),
        ("embeddings", {}, 404, "docs/reference/server.md"),
    ):
      with self.subTest(message=message):
        result, response = self.server.ask(f"{path}/{where}", body)
        self.assertEqual(result, status, response)
        self.assertIn(message, str(response["error"]))
    _, response = self.server.ask(f"{path}/chat/completions", _body(long))
    self.assertEqual(response["error"]["code"], "context_length_exceeded")
    for where, body, status, message in (
        ("create_episode", {"model_path": "x"}, 404, "no such checkpoint"),
        ("create_episode", {}, 422, "base_model = None: must be 'scratch'"),
        ("create_episode", {"base_model": "scratch", "x": 1}, 422, "x: not"),
        ("episodes/x/finish", {"reward": 1.0}, 404, "episode x"),
        ("episodes/x/finish", {"reward": 1e39}, 422, "reward = 1e+39"),
        ("episodes/x", None, 404, "episode x"),
    ):
      result, response = self.server.ask(f"api/v1/{where}", body)
      self.assertEqual(
          (result, message in response["error"]), (status, True), response
      )
    empty, _ = self._episode()
    end = f"api/v1/episodes/{empty}/finish"
    _, response = self.server.ask(end, {})
    self.assertIn("reward: is missing", response["error"])
    _, response = self.server.ask(end, {"reward": 1.0})
    self.assertEqual(self._read(empty)["rows"], [])

  @unittest.skipIf(
      importlib.util.find_spec("openai") is None, "needs the package openai"
  )
  def test_official_client_plays_episode(self):
    import openai

    id, path = self._episode()
    client = openai.OpenAI(
        base_url=f"{self.server.url}/{path}", api_key=serving_case.KEY
    )
    (model,) = client.models.list().data
    ask = dict(model=model.id, max_tokens=2, logprobs=True)
    answer = client.chat.completions.create(messages=_ASK, **ask)
    (choice,) = answer.choices
    self.assertLen(choice.logprobs.content, answer.usage.completion_tokens)
    self.assertEqual(choice.version, 0)
    chat = [*_ASK, choice.message, {"role": "user", "content": "3"}]
    *parts, usage = client.chat.completions.create(
        messages=chat,
        stream=True,
        stream_options={"include_usage": True},
        **ask,
    )
    self.assertGreater(usage.usage.completion_tokens, 0)
    response = "".join(p.choices[0].delta.content or "" for p in parts)
    self.assertIn(parts[-1].choices[0].finish_reason, ("stop", "length"))
    (row,) = self._read(id)["rows"]
    self.assertEqual(
        sum(row["sampled_mask"]),
        answer.usage.completion_tokens + usage.usage.completion_tokens,
    )
    decode = self.server.engine.base.policy.tokenizer.decode_completion
    ids = row["completion_ids"][-usage.usage.completion_tokens :]
    self.assertEqual(response, decode(ids, len(ids), row["stopped"]))
    text = client.completions.create(
        model=model.id, prompt=[4, 5], max_tokens=1
    )
    self.assertEqual(text.prompt_token_ids, [4, 5])
    with self.assertRaisesRegex(openai.BadRequestError, "n = 2"):
      client.chat.completions.create(messages=_ASK, n=2, **ask)
    client.close()

  @unittest.skipIf(
      importlib.util.find_spec("openai") is None, "needs the package openai"
  )
  def test_official_client_samples_without_episode(self):
    import openai

    client = openai.OpenAI(
        base_url=f"{self.server.url}/v1", api_key=serving_case.KEY
    )
    (model,) = client.models.list().data
    ask = dict(model=model.id, max_tokens=3, seed=1, n=3)
    whole = client.chat.completions.create(messages=_ASK, **ask)
    response = [choice.message.content for choice in whole.choices]
    self.assertLen(response, 3)
    self.assertEqual(
        whole.usage.completion_tokens,
        sum(len(choice.token_ids) for choice in whole.choices),
    )
    streamed = ["", "", ""]
    *parts, usage = client.chat.completions.create(
        messages=_ASK,
        stream=True,
        stream_options={"include_usage": True},
        **ask,
    )
    for part in parts:
      (choice,) = part.choices
      streamed[choice.index] += choice.delta.content or ""
    self.assertEqual(streamed, response)
    self.assertEqual(usage.usage, whole.usage)
    text = client.completions.create(prompt="1+", **ask)
    self.assertEqual([choice.index for choice in text.choices], [0, 1, 2])
    with self.assertRaisesRegex(openai.NotFoundError, "must be 'scratch'"):
      client.completions.create(prompt="1", model="gpt")
    with self.assertRaisesRegex(openai.BadRequestError, "n = 129"):
      client.completions.create(prompt="1", model=model.id, n=129)
    client.close()
    with self.subTest("and with a version of a model"):
      path = self._version()
      body = {"model": path, "prompt": "1", "max_tokens": 1}
      status, response = self.server.ask("oai/api/v1/completions", body)
      self.assertEqual((status, response["model"]), (200, path), response)

  def _version(self):
    """Returns the path of a new model's version."""
    ask = lambda path, body: self.server.ask(f"api/v1/{path}", body)
    _, session = ask("create_session", {})
    body = {**session, "model_seq_id": 0, "base_model": "scratch"}
    _, made = ask("create_model", {**body, "lora_config": {"rank": 2}})
    body = {"model_id": made["model_id"], "path": "a"}
    return self.server.result(ask("save_weights_for_sampler", body))["path"]
