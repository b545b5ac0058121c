# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler that drives a vLLM server, against the server's protocol."""

import functools
import gc
import os
import pathlib
import threading
import time
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models.hf import hf
from tba_jax.policy import lora
from tba_jax.sampling import requests
from tba_jax.sampling import vllm
from tba_jax.transport.params import probe
from tests.support import fake_vllm
from tests.support import sampler_case
from tests.support import scripted_turns
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


_TURNS_T = 12


@functools.cache
def _next_logprobs_fn():
  model = tiny_model.make_model()

  def logprobs(params, tokens_1xL, place):
    logits = model.logits(params, tokens_1xL, jnp.ones_like(tokens_1xL))
    return jax.nn.log_softmax(logits[0, place])

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
    self.enter_context(mock.patch.object(vllm, "AGAIN_S", 0.0))
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
    for tokens, length, recorded in zip(
        completions.tokens, completions.lengths, completions.logprobs
    ):
      # What follows a token has no part in its log-prob.
      whole = np.zeros((1, 7), np.int32)
      whole[0, : len(prompt)] = prompt
      whole[0, len(prompt) :][:4] = tokens
      found = self.logprobs(params, whole)[0, len(prompt) - 1 :]
      wanted = found[:length]
      np.testing.assert_allclose(recorded[:length], wanted, atol=1e-5)
      self.assertEqual(tokens[length:].tolist(), [0] * (4 - length))
      self.assertEqual(recorded[length:].tolist(), [0.0] * (4 - length))

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
    tokens = np.random.default_rng(0).integers(16, size=(2, 6), dtype=np.int32)
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
    # What the server still samples is not waited for.
    self.assertIn("/pause?mode=abort", self.server.calls)

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
    before = self.server
    self.server = fake_vllm.Server(folder, before.port, before.max_model_len)

  def test_lost_call_alone_is_asked_again(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    counts, calls = [], [*self.server.calls]

    def fail(count):
      counts.append(count)
      if count == 2:
        raise ConnectionAbortedError

    self.server.on_generate = fail
    asked = [_request(i, 3, i + 2) for i in range(3)]
    found = sampler.sample(params, asked, version=2)
    for request, completions in zip(asked, found):
      self.check(completions, self.params[1], request.prompt_tokens)
    self.assertLen(counts, 4)
    self.assertEqual(self.server.calls, calls)
    self.assertLen(self.events, 1)

  def test_turn_without_an_answer_is_asked_again(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    sampler.warm_up(params)
    go = threading.Event()
    self.addCleanup(go.set)
    self.server.on_generate = lambda count: count > 2 or go.wait(60)
    self.enter_context(mock.patch.object(vllm, "TURN_S", 5.0))
    (found,) = sampler.sample(params, [_request(5, 3, 4)], version=2)
    self.check(found, self.params[1], [3, 4])
    ((_, message),) = self.events
    self.assertIn("timed out", message)

  def test_server_is_resumed_after_a_failed_pause(self):
    sampler = self.make()

    def fail(path):
      if path == "/pause?mode=wait" and self.server.calls.count(path) == 1:
        raise ConnectionAbortedError

    self.server.on_post = fail
    sampler.put(self.params[1])
    self.assertEqual(
        self.server.calls[:3],
        ["/pause?mode=wait", "/resume", "/pause?mode=wait"],
    )

  def test_slow_pause_marks_progress(self):
    sampler = self.make()
    slow = lambda path: path.startswith("/pause") and time.sleep(1.5)
    self.server.on_post = slow
    sampler.put(self.params[1])
    self.assertGreater(self.progress, 0)

  def test_probe_waits_for_the_server(self):
    sampler = self.make()
    params = sampler.put(self.params[1])
    tokens = np.random.default_rng(0).integers(16, size=(2, 6), dtype=np.int32)

    def fail(count):
      if count == 1:
        raise ConnectionAbortedError

    self.server.on_generate = fail
    np.testing.assert_allclose(
        sampler.token_logprobs(params, tokens),
        self.logprobs(self.params[1], tokens),
        atol=1e-5,
    )
    self.assertGreater(self.progress, 0)
    self.server.on_generate = lambda count: time.sleep(3)
    sampler.deadline_s = 1.0
    with self.assertRaisesRegex(vllm.UnreachableError, "timed out.* for 1 s"):
      sampler.token_logprobs(params, tokens)

  def test_wrong_replies_are_refused(self):
    sampler = self.make()
    params = sampler.put(self.params[1])

    def at(**fields):
      return lambda choice: choice["logprobs"]["content"][0].update(fields)

    def token(token_id):
      def change(choice):
        choice["token_ids"][0] = token_id
        at(token_id=token_id)(choice)

      return change

    span = lambda **fields: lambda c: c["weight_versions"][0].update(fields)
    for change, why in (
        (at(logprob=np.inf), "other tokens"),
        (at(logprob="high"), "without log-probs"),
        (token(10**6), "other tokens"),
        (token(2.0), "other tokens"),
        (span(end=10**9), "without log-probs"),
        (span(start=-1), "without log-probs"),
        (lambda choice: choice.update(logprobs=[1]), "without log-probs"),
        (lambda choice: choice.update(index=0), "not 3 choices"),
        (lambda choice: choice.pop("index"), "not 3 choices"),
        (lambda choice: choice.update(index="a"), "not 3 choices"),
    ):
      self.server.change = change
      with self.subTest(why), self.assertRaisesRegex(ValueError, why):
        sampler.generate(params, [3, 4], 3, 4, 0)
    with mock.patch.object(self.server, "get", return_value=[]):
      with self.assertRaisesRegex(ValueError, "no JSON object"):
        sampler.check_is_alive()

  def test_sampled_token_is_among_kept_ones(self):
    self.server.logprobs_mode = "processed_logprobs"
    sampler = self.make(top_k=2, num_kept=2)
    params = sampler.put(self.params[1])

    def change(choice):
      first = choice["logprobs"]["content"][0]
      first["top_logprobs"] = [
          top
          for top in first["top_logprobs"]
          if top["token_id"] != first["token_id"]
      ]

    self.server.change = change
    with self.assertRaisesRegex(ValueError, "is not among the kept ones"):
      sampler.generate(params, [3, 4], 1, 4, 0)

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

  def make_turns(self, **settings):
    """Returns a sampler for completions of up to twelve tokens."""
    self.server.max_model_len = 3 + _TURNS_T
    return self.make(max_completion_tokens=_TURNS_T, has_turns=True, **settings)

  def check_turns(self, asked, found, turns, params, **ends):
    """Checks each token of the completions; returns numbers of turns."""

    def next_logprobs(seen):
      whole = np.zeros((1, 3 + _TURNS_T), np.int32)
      whole[0, : len(seen)] = seen
      return np.asarray(_next_logprobs_fn()(params, whole, len(seen) - 1))

    return scripted_turns.check(
        self,
        asked,
        found,
        turns,
        next_logprobs,
        version=2,
        most=_TURNS_T,
        **ends,
    )

  def test_turns_follow_the_whole_history(self):
    sampler, turns = self.make_turns(), scripted_turns.Scripted()
    params = sampler.put(self.params[1])
    asked = [_request(5, 3, 4, n=8), _request(6, 2, n=8), _request(7, 9, 8, 7)]
    found = sampler.sample(params, asked, version=2, turns=turns)
    counts = self.check_turns(asked, found, turns, self.params[1])
    self.assertContainsSubset({0, 1, 2}, {*counts})
    # Without environments a completion is a turn.
    for c in sampler.sample(params, asked, version=2):
      self.assertFalse((c.tokens[:, :-1] == 1)[c.sampled_mask[:, 1:]].any())

  def test_lost_turns_are_sampled_again_and_environments_go_on(self):
    sampler, turns = self.make_turns(), scripted_turns.Scripted()
    params = sampler.put(self.params[1])
    restarted = threading.Timer(0.2, self.restart, [str(self.folder / "start")])
    ended = []
    turns.end, end = lambda *turn: ended.append(turn) or end(*turn), turns.end

    def die(count):
      if count > 2 and ended and not self.events:
        raise ConnectionAbortedError

    def on_event(*event):
      self.events.append(event)
      self.server.close()
      restarted.start()

    self.server.on_generate, sampler.on_event = die, on_event
    asked = [_request(5, 3, 4, n=8), _request(6, 2, n=8)]
    found = sampler.sample(params, asked, version=2, turns=turns)
    restarted.join()
    counts = self.check_turns(asked, found, turns, self.params[1])
    # No environment saw a turn twice.
    self.assertLen(ended, sum(counts))
    ((kind, _),) = self.events
    self.assertEqual(kind, "sampler_lost")

  def test_newer_params_sample_later_turns(self):
    sampler, turns = self.make_turns(), scripted_turns.Scripted()
    params = sampler.put(self.params[1])
    end, taken = turns.end, []

    def note_end(*turn):
      end(*turn)
      if not taken:
        taken.append(sampler.put(self.params[2]))

    turns.end = note_end
    newer = lambda: (7, taken[0]) if taken else None
    asked = [_request(5, 3, 4, n=16)]
    (found,) = sampler.sample(
        params, asked, version=2, newer=newer, turns=turns
    )
    # Later turns reuse no prefix that older params computed.
    self.assertContainsSubset(
        {(params.name, params.name), (taken[0].name, taken[0].name)},
        self.server.salts,
    )
    both = 0
    for versions, mask in zip(found.token_versions, found.sampled_mask):
      self.assertTrue((np.diff(versions[mask]) >= 0).all())
      both += {*versions[mask].tolist()} == {2, 7}
    np.testing.assert_array_equal(found.token_versions[~found.sampled_mask], -1)
    self.assertGreater(both, 0)

  def test_stop_strings_end_turns_wherever_the_server_does(self):
    pieces = "ab cdefghijklmno"
    text_fn = lambda ids: "".join(pieces[i] for i in ids)
    strings = ["da", "mm", "g"]
    end = lambda ids: next(
        (
            n
            for n in range(1, len(ids) + 1)
            if any(string in text_fn(ids[:n]) for string in strings)
        ),
        None,
    )
    sampler = self.make_turns(
        stop_ids=(), stop_strings=strings, text_fn=text_fn
    )
    params = sampler.put(self.params[1])
    asked = [_request(5, 3, 4, n=8), _request(6, 2, n=8)]
    # Where we do; too early; nowhere.
    for stop_at in (end, lambda ids: min(2, len(ids)), lambda ids: None):
      self.server.stop_at, turns = stop_at, scripted_turns.Scripted()
      found = sampler.sample(params, asked, version=2, turns=turns)
      counts = self.check_turns(
          asked, found, turns, self.params[1],
          stops=(), strings=strings, text_fn=text_fn,
      )  # fmt: skip
      self.assertGreater(max(counts), 1)

  def test_kept_tokens_are_the_sampled_support(self):
    self.server.logprobs_mode = "processed_logprobs"
    truncation = dict(temperature=0.7, top_p=0.85, min_p=0.05, num_kept=4)
    request = _request(5, 3, 4, n=8)
    for tie in (None, 1):
      self.server.tie, self.server.asked = tie, []
      sampler = self.make(**truncation)
      params = sampler.put(self.params[1])
      (found,) = sampler.sample(params, [request], version=2)
      counts = set()
      for s, length in enumerate(found.lengths):
        np.testing.assert_array_equal(found.kept_ids[s, length:], -1)
        for t in range(length):
          kept = found.kept_ids[s, t]
          kept = kept[kept >= 0]
          counts.add(len(kept))
          seen = [3, 4, *found.tokens[s, :t]]
          whole = np.zeros((1, 15), np.int32)
          whole[0, : len(seen)] = seen
          logprobs = np.asarray(
              _next_logprobs_fn()(self.params[1], whole, len(seen) - 1)
          )
          # All others are less likely.
          likeliest = np.argsort(-logprobs)[: len(kept)]
          np.testing.assert_array_equal(kept, likeliest)
          place = kept.tolist().index(found.tokens[s, t])
          expected = jax.nn.log_softmax(logprobs[kept] / 0.7)[place]
          self.assertAlmostEqual(found.logprobs[s, t], expected, places=4)
      self.assertGreater(len(counts), 1)
      top_ks = {asked["top_k"] for asked in self.server.asked}
      self.assertEqual(top_ks, {4} if tie is None else {3, 4})
      for asked in self.server.asked:
        self.assertEqual(asked["logprobs"], 5)
        self.assertTrue(asked["top_k"] == 4 or asked["max_tokens"] == 1)
    with self.assertRaisesRegex(ValueError, r"--max-logprobs=20: must be 31"):
      self.make(top_k=30, num_kept=30).put(self.params[1])
    self.server.logprobs_mode = "raw_logprobs"
    with self.assertRaisesRegex(ValueError, "must be processed_logprobs"):
      self.make(top_k=4, num_kept=4).put(self.params[1])

  def make_adapters(self):
    """Returns two adapters of the served model, and the merged params."""
    settings = {"rank": 3, "alpha": 6.0, "targets": "all"}
    adapters = lora.make(settings, self.model)
    to_adapter = lora.make_adapter_fn(
        settings, self.model, self.folder / "start"
    )
    trees = [
        jax.tree.map(
            lambda x, seed=seed: x
            + 0.3 * jax.random.normal(jax.random.PRNGKey(seed), x.shape),
            adapters.init(jax.random.PRNGKey(seed)),
        )
        for seed in (1, 2)
    ]
    merged = [adapters.merge(self.params[0], tree) for tree in trees]
    return [to_adapter(tree) for tree in trees], merged

  def test_adapters_are_sent_unmerged(self):
    (first, second), merged = self.make_adapters()
    with self.assertRaisesRegex(
        ValueError, r"--max-lora-rank=0: must be 3 or more .* --enable-lora"
    ):
      self.make().put(first)
    self.server.max_lora_rank = 8
    sampler = self.make_turns()
    params = sampler.put(first)
    self.assertCountEqual(
        [file.name for file in params.folder.iterdir()],
        ["adapter_config.json", "adapter_model.safetensors"],
    )
    tokens = np.random.default_rng(0).integers(16, size=(2, 7), dtype=np.int32)
    asked = [_request(5, 3, 4, n=8)]
    for adapter, expected in zip((params, sampler.put(second)), merged):
      np.testing.assert_allclose(
          sampler.token_logprobs(adapter, tokens),
          self.logprobs(expected, tokens),
          atol=1e-4,
      )
      turns = scripted_turns.Scripted()
      found = sampler.sample(adapter, asked, version=2, turns=turns)
      self.check_turns(asked, found, turns, expected)
    self.assertEqual(
        self.server.calls, ["/resume", *2 * ["/v1/load_lora_adapter"]]
    )

  def test_refused_adapter_is_no_lost_server(self):
    (first, _), _ = self.make_adapters()
    self.server.max_lora_rank, self.server.max_loras = 8, 1
    with self.assertRaisesRegex(ValueError, r"--max-loras=1: must be 2 or"):
      self.make().put(first)
    self.server.max_loras = 2
    for error in (RuntimeError("target modules"), FileNotFoundError("folder")):

      def refuse(path, error=error):
        if path == "/v1/load_lora_adapter":
          raise error

      self.server.on_post = refuse
      with self.assertRaisesRegex(
          ValueError,
          rf"{error}.*LORA_UPDATING=1 and --enable-lora.*search.vllm_folder.*"
          "lora.targets",
      ):
        self.make().put(first)

  def test_lost_adapters_requests_are_aborted(self):
    (first, _), _ = self.make_adapters()
    self.server.max_lora_rank = 8
    sampler = self.make()
    params = sampler.put(first)

    def lose(count):
      if count == 2:
        self.server.adapters.clear()
        raise ConnectionAbortedError

    self.server.on_generate = lose
    asked = [_request(i, 3, i + 2) for i in range(3)]
    self.assertLen(sampler.sample(params, asked, version=2), 3)
    load = "/v1/load_lora_adapter"
    self.assertEqual(
        self.server.calls, ["/resume", load, "/abort_requests", load]
    )

  def test_restarted_server_gets_adapters(self):
    (first, _), (merged, _) = self.make_adapters()
    self.server.max_lora_rank = 8
    sampler, turns = self.make_turns(), scripted_turns.Scripted()
    params = sampler.put(first)
    # It restarts while environments answer.
    answers = turns.answers

    def restart(wait_s):
      if not self.events:
        self.server.adapters.clear()
      return answers(wait_s)

    turns.answers = restart
    asked = [_request(5, 3, 4, n=8)]
    found = sampler.sample(params, asked, version=2, turns=turns)
    self.check_turns(asked, found, turns, merged)
    self.assertEqual({kind for kind, _ in self.events}, {"sampler_lost"})

  def test_newer_adapter_samples_later_turns(self):
    (first, second), _ = self.make_adapters()
    self.server.max_lora_rank = 8
    sampler, turns = self.make_turns(), scripted_turns.Scripted()
    params, taken, end = sampler.put(first), [], turns.end

    def note_end(*turn):
      end(*turn)
      if not taken:
        taken.append(sampler.put(second))

    turns.end = note_end
    (found,) = sampler.sample(
        params,
        [_request(5, 3, 4, n=16)],
        version=2,
        newer=lambda: (7, taken[0]) if taken else None,
        turns=turns,
    )
    self.assertEqual({*found.token_versions[found.sampled_mask]}, {2, 7})
    self.assertEqual(
        self.server.salts, {(name, name) for name in self.server.adapters}
    )

  def test_requests_of_a_stream_begin_before_the_last_are_over(self):
    sampler = self.make(num_rows=4)
    params = sampler.put(self.params[1])
    go, begun, found = threading.Event(), [], {}
    # The first call is held until a later request has finished.
    self.server.on_generate = lambda count: count > 1 or go.wait(20)
    asked = [_request(i, 3, 4, n=2) for i in range(5)]
    coming = iter([asked[:1], asked[1:2], None, asked[2:], None])

    def more():
      batch = next(coming, None)
      begun.append(2 * len(batch or ()))
      return batch

    for some in sampler.stream(params, more, version=2):
      if not found:
        self.assertEqual([number for number, _ in some], [1])
        self.assertEqual(begun, [2, 2])  # Rows are full.
        go.set()
      found |= dict(some)
    self.assertCountEqual(found, range(5))
    for completions in found.values():
      self.check(completions, self.params[1], [3, 4])

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
