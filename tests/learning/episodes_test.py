# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions with tokens of an environment, from the wire to the gradient."""

import dataclasses
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax import types
from tba_jax.learning import device_work
from tba_jax.learning import learner
from tba_jax.mesh import cluster
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tests.support import base_config
from tests.support import fakes
from tests.support import table_policy
from tests.transport.groups import fake_groups

_B, _K, _T = table_policy.B, table_policy.K, table_policy.T
_EOS = table_policy.EOS
_SECRET = bytes(32)
_LIMITS = dict(
    vocab_size=table_policy.V,
    max_prompt_tokens=3,
    max_completion_tokens=_T,
    columns={"ref_logprobs": ()},
)
# Completions' tokens that the policy sampled, in two turns; the second token
# is an environment's.
_SAMPLED = np.array(
    [[1, 0, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]],
    np.bool_,
)
_LENGTHS = np.array([5, 3, 4, 5], np.int32)


def make_groups(junk: float) -> list[types.Group]:
  """Returns groups with `junk` as log-probs of tokens that are not sampled."""
  rng = np.random.default_rng(0)
  groups = []
  for prompt_id in range(_B):
    # Tokens from 2 on stop nothing.
    tokens = rng.integers(2, table_policy.V, (_K, _T)).astype(np.int32)
    tokens[2, 1] = tokens[1, 2] = _EOS
    logprobs = -rng.random((2, _K, _T), np.float32)
    logprobs[:, ~_SAMPLED] = junk
    groups.append(
        types.Group(
            prompt_id=prompt_id,
            visit=0,
            position=prompt_id,
            prompt_tokens=np.array([2 + prompt_id], np.int32),
            completion_tokens=tokens,
            completion_lengths=_LENGTHS,
            sampled_mask=_SAMPLED,
            stopped=np.array([False, True, False, False]),
            behavior_logprobs=logprobs[0],
            rewards=rng.random(_K, np.float32),
            versions=np.zeros(_K, np.int32),
            epoch=1,
            ref_logprobs=logprobs[1],
        )
    )
  return groups


class EpisodesTest(parameterized.TestCase):

  def make_config(self, **loss):
    return base_config.make(
        train__prompts_per_batch=_B,
        train__micro_batch_prompts=1,
        **{f"loss__{name}": value for name, value in loss.items()},
    )

  def carry(self, groups):
    """Returns the groups after wire and journal."""
    data = wire.encode(*messages.pack_groups(groups), _SECRET)
    path = pathlib.Path(self.create_tempdir().full_path)
    log = journal.Journal(path, max_segment_bytes=1 << 20, on_event=print)
    log.append([data])
    ((_, data),) = log.replay(0)
    log.close()
    return messages.unpack_groups(*wire.decode(data, _SECRET))

  def store(self, groups):
    """Returns a buffer with the groups, saved and restored."""
    settings = dict(max_completion_tokens=_T, recent_fraction=0.0)
    buffer = fake_groups.make_buffer(**settings)
    for group in self.carry(groups):
      self.assertIsNone(messages.reject_reason(group, **_LIMITS))
      buffer.insert(group, 0)
    again = fake_groups.make_buffer(**settings)
    again.set_state(buffer.get_state())
    return again

  def make_batch(self, config, buffer):
    reference = absltest.mock.Mock()
    reference.version.return_value = 0
    work = device_work.DeviceWork(
        config,
        state=mock.Mock(learning_rate_scale=1.0),
        train_step=None,
        reference=reference,
        merger=None,
        checkpointer=None,
        cluster=cluster.Cluster(),
    )
    tokenizer = fakes.FakeTokenizer()
    trained = learner.Learner(config, tokenizer, buffer, work)
    batch = trained.make(buffer.sample(_B, _K, 1))
    reference.logprobs.assert_not_called()
    return jax.tree.map(np.asarray, batch)

  @parameterized.product(
      name=["tb", "rloo", "grpo", "subtb", "ppo"], stop_token=[True, False]
  )
  @pytest.mark.slow
  def test_tokens_of_the_environment_do_not_count(self, name, stop_token):
    config = self.make_config(name=name, include_stop_token=stop_token)
    losses = table_policy.make_config(name=name)
    results = []
    for junk in (0.0, -7.0, 3.0):
      batch = self.make_batch(config, self.store(make_groups(junk)))
      results.append(
          table_policy.evaluate(losses, table_policy.make_params(), batch)
      )
    (loss, _, gradient), *others = results
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(any(np.any(x) for x in jax.tree.leaves(gradient)))
    for other_loss, _, other in others:
      self.assertEqual(loss, other_loss)
      jax.tree.map(np.testing.assert_array_equal, gradient, other)

  @parameterized.parameters(True, False)
  def test_batch_counts_the_sampled_tokens(self, stop_token):
    config = self.make_config(include_stop_token=stop_token)
    batch = self.make_batch(config, self.store(make_groups(5.0)))
    counted = _SAMPLED.copy()
    if not stop_token:  # Each turn may end with one.
      counted[1, 2] = counted[2, 1] = False
    groups = {int(g.prompt_tokens[0]): g for g in make_groups(5.0)}
    for b in range(_B):
      group = groups[int(batch.prompt_tokens[b, -1])]
      texts = {
          tuple(np.where(np.arange(_T) < n, tokens, 0)): k
          for k, (tokens, n) in enumerate(
              zip(group.completion_tokens, _LENGTHS, strict=True)
          )
      }
      for k in range(_K):
        j = texts[tuple(batch.completion_tokens[b, k])]
        np.testing.assert_array_equal(batch.completion_mask[b, k], counted[j])
        for name in ("behavior_logprobs", "ref_logprobs"):
          np.testing.assert_array_equal(
              getattr(batch, name)[b, k],
              np.where(_SAMPLED[j], getattr(group, name)[j], 0.0),
          )

  def test_counts_are_those_of_the_mask(self):
    groups = make_groups(1.0)
    tokens = _B * int(_SAMPLED.sum())
    self.assertEqual(sum(g.num_tokens for g in groups), tokens)
    buffer = self.store(groups)
    self.assertEqual(buffer.untrained(), (_B, _B * _K, tokens))
    draw = buffer.sample(_B, _K, 1)
    self.assertEqual(draw.stats()["completion_tokens"], tokens / (_B * _K))
    ids = draw.ids[0]
    trained = buffer.mark_drawn(ids)
    self.assertEqual(trained, (1, _K, tokens // _B))
    self.assertEqual(buffer.untrained(), (1, _K, tokens // _B))
    left = buffer.untrained()
    rows, _ = buffer.table.find(draw.ids[1])
    buffer.remove(rows)
    self.assertEqual(left - buffer.untrained(), (1, _K, tokens // _B))

  def test_reference_logprobs_are_kept_of_sampled_tokens(self):
    groups = [
        dataclasses.replace(group, ref_logprobs=None)
        for group in make_groups(1.0)
    ]
    buffer = self.store_without_reference(groups)
    draw = buffer.sample(_B, _K, 1)
    buffer.set_ref_logprobs(draw.ids, np.full((_B, _K, _T), -2.0), 0)
    draw = buffer.sample(_B, _K, 1)
    np.testing.assert_array_equal(
        draw.ref_logprobs, np.where(draw.sampled_mask, -2.0, 0.0)
    )

  def store_without_reference(self, groups):
    buffer = fake_groups.make_buffer(
        max_completion_tokens=_T, recent_fraction=0.0
    )
    for group in self.carry(groups):
      buffer.insert(group, 0)
    return buffer
