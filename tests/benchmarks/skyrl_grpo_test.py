# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop that trains on SkyRL's server."""

import io
import pathlib
import subprocess
import tarfile
from unittest import mock

from absl.testing import absltest
import numpy as np

from benchmarks import peer_grpo
from benchmarks import served
from benchmarks import skyrl_grpo
from tba_jax.models import tokenizer as tokenizer_lib

_STOP = 9


class _Tokenizer:
  """Has a token for each digit."""

  def encode_chat(self, messages):
    (message,) = messages
    return [int(digit) for digit in message["content"]]

  def decode(self, ids):
    return "".join(map(str, ids))


def _answer(value):
  return mock.Mock(result=mock.Mock(return_value=value))


class SkyrlGrpoTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.enter_context(
        mock.patch.object(tokenizer_lib, "load", lambda _: _Tokenizer())
    )
    # One right completion, one that is cut off, one wrong.
    groups = [(7, _STOP), (7, 7), (1, _STOP)]
    sequences = [mock.Mock(tokens=t, logprobs=[-1.0, -2.0]) for t in groups]
    self.sampler = mock.Mock()
    self.sampler.sample.return_value = _answer(mock.Mock(sequences=sequences))
    self.client = mock.Mock()
    self.client.save_weights_and_get_sampling_client.return_value = _answer(
        self.sampler
    )
    self.client.save_weights_for_sampler.side_effect = self.save
    self.judged = []
    self.enter_context(
        mock.patch.object(
            peer_grpo, "make_task_rewards", lambda settings: self.rewards
        )
    )
    self.settings = {
        "model": "model",
        "rank": 4,
        "learning_rate": 0.5,
        "prompts": [[{"content": text}] for text in ("12", "34", "56")],
        "prompt_ids": [20, 30, 40],
        "prompts_per_batch": 2,
        "completions_per_prompt": 3,
        "max_completion_tokens": 2,
        "stop_ids": [_STOP],
        "num_steps": 3,
        "snapshot_steps": 2,
    }

  def rewards(self, *, completions, completion_ids, prompt_id):
    self.judged += [
        (text, ids, index)
        for ((message,), ids, index) in zip(
            completions, completion_ids, prompt_id, strict=True
        )
        for text in [message["content"]]
    ]
    return [float(ids == [7, _STOP]) for ids in completion_ids]

  def save(self, name):
    places = self.folder / "checkpoints" / "model-1" / "sampler_weights"
    places.mkdir(parents=True, exist_ok=True)
    text = name.encode()
    with tarfile.open(places / f"{name}.tar.gz", "w:gz") as packed:
      info = tarfile.TarInfo("adapter_config.json")
      info.size = len(text)
      packed.addfile(info, io.BytesIO(text))
    path = f"tinker://model-1/sampler_weights/{name}"
    return _answer(mock.Mock(path=path))

  def run_it(self):
    serve = mock.MagicMock()
    serve.return_value.__enter__.return_value = ("address", "key")
    version = mock.Mock(stdout="0.4.0\n")
    with (
        mock.patch.object(served, "serve_skyrl", serve),
        mock.patch.object(served, "make_client", lambda *_: self.client),
        mock.patch.object(subprocess, "run", lambda *_, **__: version),
    ):
      return skyrl_grpo.run(self.folder, self.settings)

  def test_trains_on_prompts_in_order_and_keeps_adapters(self):
    result = self.run_it()
    asked = [c.args[0].to_ints() for c in self.sampler.sample.call_args_list]
    self.assertEqual(asked, [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4], [5, 6]])
    self.assertLen(result["step_ends"], 3)
    self.assertEqual(result["versions"], {"skyrl": "0.4.0"})
    kept = sorted(self.folder.glob("step*/adapter_config.json"))
    self.assertEqual([p.parent.name for p in kept], ["step2", "step3"])
    self.assertEqual([p.read_text() for p in kept], ["kept0", "kept1"])

  def test_judges_text_without_its_stop_token(self):
    self.run_it()
    self.assertEqual(
        self.judged[:3],
        [("7", [7, _STOP], 20), ("77", [7, 7], 20), ("1", [1, _STOP], 20)],
    )

  def test_trains_on_advantages_of_groups(self):
    self.run_it()
    data, loss = self.client.forward_backward.call_args_list[0].args
    self.assertEqual(loss, "importance_sampling")
    self.assertLen(data, 6)
    self.assertEqual(
        self.client.optim_step.call_args.args[0].learning_rate, 0.5
    )
    actual = [d.loss_fn_inputs["advantages"].data for d in data[:3]]
    expected = np.array([[2.0], [-1.0], [-1.0]]) / np.sqrt(3.0)
    expected = expected * [0.0, 1.0, 1.0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    # Nothing to learn from equal rewards.
    self.assertEqual(skyrl_grpo.advantages([0.5, 0.5]), [0.0, 0.0])
