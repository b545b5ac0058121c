# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler that drives a vLLM server, against the server's protocol."""

import functools
import gc
import os
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models.hf import hf
from tba_jax.sampling import requests
from tba_jax.sampling import vllm
from tba_jax.transport.params import probe
from tests.support import fake_vllm
from tests.support import sampler_case
from tests.support import tiny_model


def _request(prompt_id, *tokens, n=3, **fields):
  return requests.Request(np.array(tokens, np.int32), prompt_id, 0, n, **fields)


@functools.cache
def _logprobs_fn(is_tied):
  model = tiny_model.make_model(tie_embeddings=is_tied)

  def logprobs(params, tokens_BxL):
    logits = model.logits(params, tokens_BxL, jnp.ones_like(tokens_BxL))
    return logprobs_lib.token_logprobs(
        logits[:, :-1], tokens_BxL[:, 1:], temperature=1.0
    )

  return jax.jit(logprobs)


class VllmTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.model = tiny_model.make_model()
    self.params = [
        self.model.init(jax.random.PRNGKey(seed)) for seed in range(3)
    ]
    start = self.folder / "start"
    hf.save(start, self.model.config, self.params[0])
    self.server = fake_vllm.Server(str(start))
    self.addCleanup(lambda: self.server.close())
    self.events = []
    self.progress = 0

  def make(self, *, deadline_s=20.0, **settings):
    def count():
      self.progress += 1

    return vllm.VllmSampler(
        sampler_case.make_settings(**settings),
        self.model.config,
        url=self.server.url + "/",
        folder=self.folder / "versions",
        deadline_s=deadline_s,
        on_event=lambda *event: self.events.append(event),
        on_progress=count,
    )

  def logprobs(self, params, tokens_BxL):
    is_tied = self.model.config.tie_embeddings
    return np.asarray(_logprobs_fn(is_tied)(params, tokens_BxL))

  def check(self, completions, params, prompt):
    """Checks that the params' log-probs are those of what was sampled."""
    for tokens, length, told in zip(
        completions.tokens, completions.lengths, completions.logprobs
    ):
      # What follows a token has no part in its log-prob.
      whole = np.zeros((1, 7), np.int32)
      whole[0, : len(prompt)] = prompt
      whole[0, len(prompt) :][:4] = tokens
      found = self.logprobs(params, whole)[0, len(prompt) - 1 :]
      wanted = found[:length]
      np.testing.assert_allclose(told[:length], wanted, atol=1e-5)
      self.assertEqual(tokens[length:].tolist(), [0] * (4 - length))
      self.assertEqual(told[length:].tolist(), [0.0] * (4 - length))

  @pytest.mark.slow
  def test_completions_are_those_of_the_params(self):
    sampler = self.make()
    asked = [_request(5, 3, 4), _request(6, 2, n=2), _request(7, 9, 8, 7)]
    for version, params in ((4, self.params[1]), (9, self.params[2])):
      found = sampler.sample(sampler.put(params), asked, version=version)
      self.assertLen(found, 3)
      for request, completions in zip(asked, found):
        self.assertLen(completions.tokens, request.num_completions)
        self.check(completions, params, request.prompt_tokens)
        np.testing.assert_array_equal(completions.versions, version)
        np.testing.assert_array_equal(
            completions.token_versions,
            np.where(completions.sampled_mask, version, -1),
        )
        ends = completions.tokens[
            np.arange(len(completions.tokens)), completions.lengths - 1
        ]
        np.testing.assert_array_equal(completions.stopped, ends == 1)
    # Stops and cuts are both among them, and completions differ.
    stopped = np.concatenate([c.stopped for c in found])
    self.assertTrue(stopped.any() and not stopped.all())
    self.assertGreater(len(np.unique(found[0].tokens, axis=0)), 1)
    load = ["/pause?mode=wait", "/collective_rpc", "/update_weight_version",
            "/resume"]  # fmt: skip
    self.assertEqual(self.server.calls, 2 * load)
    self.assertEqual(self.events, [])
    self.assertGreater(self.progress, 0)

  def test_unreferenced_params_delete_their_files(self):
    sampler = self.make()
    first = sampler.put(self.params[1])
    second = sampler.put(self.params[2])
    names = lambda: sorted(p.name for p in (self.folder / "versions").iterdir())
    self.assertEqual(names(), sorted([first.name, second.name]))
    del first
    gc.collect()
    self.assertEqual(names(), [second.name])

  def test_probe_identifies_server_params(self):
    sampler = self.make()
    tokens = np.random.default_rng(0).integers(16, size=(2, 7), dtype=np.int32)
    for params in self.params:
      wanted = self.logprobs(params, tokens)
      found = sampler.token_logprobs(sampler.put(params), tokens)
      np.testing.assert_allclose(found, wanted, atol=1e-5)
    leaves = {
        probe.TOKENS: tokens,
        probe.LOGPROBS: np.asarray(wanted),
        probe.MAX_GAP: np.float32(1e-3),
    }
    check = probe.Check(sampler.token_logprobs, 1e-3)
    self.assertEqual(check.problem(leaves, sampler.put(self.params[2])), "")
    wrong = check.problem(leaves, sampler.put(self.params[1]))
    self.assertIn("nats a token off the trainer's", wrong)

  def test_params_of_before_are_loaded_again_after_others_were_refused(self):
    sampler = self.make()
    good = sampler.put(self.params[1])
    sampler.put(self.params[2])
    (found,) = sampler.sample(good, [_request(5, 3, 4)], version=2)
    self.check(found, self.params[1], [3, 4])

  def test_restarted_server_gets_params(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    # It has lost its weights while nothing was sampled.
    self.server.weights = "default"
    self.server.read_weights(str(self.folder / "start"))
    (found,) = sampler.sample(params, [_request(5, 3, 4)], version=2)
    self.check(found, self.params[1], [3, 4])

  def test_completions_of_other_weights_are_sampled_once_more(self):
    sampler = self.make()
    params = sampler.put(self.params[1])

    def restart(count):
      if count == 1:
        self.server.read_weights(str(self.folder / "start"))
        self.server.weights = "default"

    self.server.on_generate = restart
    (found,) = sampler.sample(params, [_request(5, 3, 4)], version=2)
    self.check(found, self.params[1], [3, 4])

  def test_sampler_waits_for_dead_server(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    start = str(self.folder / "start")

    def die(count):
      if count == 2:
        raise ConnectionAbortedError

    self.server.on_generate = die
    restarted = threading.Timer(0.2, self.restart, (start,))

    def on_event(*event):
      self.events.append(event)
      self.server.close()
      restarted.start()

    sampler.on_event = on_event
    asked = [_request(i, 3, i + 2) for i in range(3)]
    found = sampler.sample(params, asked, version=2)
    restarted.join()
    for request, completions in zip(asked, found):
      self.check(completions, self.params[1], request.prompt_tokens)
    ((kind, message),) = self.events
    self.assertEqual(kind, "sampler_lost")
    self.assertIn(self.server.url, message)

  def restart(self, folder):
    self.server = fake_vllm.Server(folder, self.server.port)

  def test_permanently_dead_server_is_named(self):
    sampler = self.make(deadline_s=1.0)
    params = sampler.put(self.params[1])
    self.server.close()
    self.addCleanup(self.restart, str(self.folder / "start"))
    with self.assertRaisesRegex(
        vllm.UnreachableError,
        rf"no vLLM server answers at {self.server.url} .* for 1 s"
        r" \(config.search.starvation_s\); start it with VLLM_SERVER_DEV",
    ):
      sampler.sample(params, [_request(5, 3, 4)], version=2)

  def test_health_check_detects_hanging_server(self):
    sampler = self.make(deadline_s=1.0)
    params = sampler.put(self.params[1])
    hung = threading.Event()
    self.server.on_generate = lambda count: hung.wait()
    self.enter_context(mock.patch.object(vllm, "HEALTH_S", 0.1))
    asked = []

    def dead():
      asked.append(1)
      if len(asked) < 3:
        return
      hung.set()
      raise vllm.UnreachableError("no answer")

    sampler.check_is_alive = dead
    (found,) = sampler.sample(params, [_request(5, 3, 4)], version=2)
    self.check(found, self.params[1], [3, 4])
    self.assertEqual(self.events, [("sampler_lost", "no answer")])

  def test_weights_changed_by_another_client_raise(self):
    sampler = self.make()
    params = sampler.put(self.params[1])

    def change(count):
      self.server.weights = "somebody's"

    self.server.on_generate = change
    with self.assertRaisesRegex(RuntimeError, "does another client change"):
      sampler.sample(params, [_request(5, 3, 4)], version=2)

  def test_repeatedly_failing_server_raises_its_error(self):
    sampler = self.make()
    params = sampler.put(self.params[1])

    def fail(count):
      raise ValueError("no room")

    self.server.on_generate = fail
    with self.assertRaisesRegex(RuntimeError, r"5 attempts .*500.*no room"):
      sampler.sample(params, [_request(5, 3, 4)], version=2)
    self.assertLen(self.events, 5)

  def test_newer_params_go_on_with_completions(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    waits, go = threading.Event(), threading.Event()

    def hold(count):
      if count == 2:
        waits.set()
        go.wait()

    self.server.on_generate = hold
    taken = []

    def newer():
      if waits.is_set() and not taken:
        taken.append(sampler.put(self.params[2]))
        self.assertIn("/pause?mode=keep", self.server.calls)
        go.set()
        return 7, taken[0]
      return None

    asked = [_request(5, 3, 4), _request(6, 2)]
    found = sampler.sample(params, asked, version=2, newer=newer)
    versions = sorted(int(c.versions[0]) for c in found)
    self.assertEqual(versions, [2, 7])
    for request, completions in zip(asked, found):
      own = self.params[1 if completions.versions[0] == 2 else 2]
      self.check(completions, own, request.prompt_tokens)
    self.assertEqual(self.server.calls[-1], "/reset_prefix_cache")

  def test_wrong_options_of_the_server_are_named(self):
    self.server.max_model_len = 6
    with self.assertRaisesRegex(
        ValueError, r"--max-model-len=6: must be 7 or more"
    ):
      self.make().put(self.params[1])
    with self.assertRaisesRegex(
        ValueError, r"--logprobs-mode=raw_logprobs: must be processed_logprobs"
    ):
      self.make(temperature=0.7).put(self.params[1])
    self.server.max_model_len, self.server.drops_versions = 7, True
    sampler = self.make()
    with self.assertRaisesRegex(ValueError, "without log-probs or versions"):
      sampler.warm_up(sampler.put(self.params[1]))

  def test_tied_head_is_written_separately(self):
    tied = tiny_model.make_model(tie_embeddings=True)
    params = tied.init(jax.random.PRNGKey(3))
    folder = self.folder / "tied"
    hf.save(folder, tied.config, params)
    self.model = tied
    self.server.folder = str(folder)
    with self.assertRaisesRegex(ValueError, "untied head, because vLLM"):
      self.make().put(params)
    self.server.folder = str(self.folder / "start")
    sampler = self.make()
    (found,) = sampler.sample(
        sampler.put(params), [_request(5, 3, 4)], version=2
    )
    self.check(found, params, [3, 4])

  def test_key_is_sent(self):
    self.server.key = "secret"
    with self.assertRaisesRegex(ValueError, r"refused \(401\)"):
      self.make().put(self.params[1])
    with mock.patch.dict(os.environ, {vllm.KEY_VARIABLE: "secret"}):
      sampler = self.make()
    (found,) = sampler.sample(
        sampler.put(self.params[1]), [_request(5, 3, 4)], version=2
    )
    self.check(found, self.params[1], [3, 4])
