# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends of completions, and their log-probs under the model as it is."""

import functools

from absl.testing import parameterized
import jax
import numpy as np

from tba_jax.sampling import decode
from tests.support import fakes
from tests.support import sampler_case

_V, _T = 6, 8
_PIECES = ["<pad>", "<eos>", "a", "ab", "b", "\n"]


def _text(ids) -> str:
  return "".join(_PIECES[i] for i in ids)


_sampler = functools.partial(sampler_case.make, max_completion_tokens=_T)


class EndingsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = fakes.FakeModel(_V, 12)
    cls.params = cls.model.init(jax.random.key(3))
    # All tokens about as likely, the stop token less.
    cls.params = jax.tree.map(lambda x: 0.2 * x, cls.params)
    cls.params["bias"] = cls.params["bias"].at[1].set(-1.0)
    cls.requests = [
        decode.Request(np.array(prompt), index, 0, 11)
        for index, prompt in enumerate([[2], [3, 4], [5, 2, 4]])
    ]
    cls.sampler = _sampler(cls.model)
    cls.whole = cls.sample(cls, cls.sampler)

  def sample(self, sampler, requests=None):
    return sampler.sample(self.params, requests or self.requests, version=5)

  @parameterized.parameters(1, 5)
  def test_stop_strings(self, chunk_steps):
    strings = ["bab", "\na"]
    found = self.sample(
        _sampler(
            self.model,
            chunk_steps=chunk_steps,
            stop_strings=strings,
            text_fn=_text,
        )
    )
    reasons = []
    for cut, whole in zip(found, self.whole):
      for sample, tokens in enumerate(whole.tokens):
        length, stopped = whole.lengths[sample], whole.stopped[sample]
        reason = "stop" if stopped else "length"
        for end in range(1, length - stopped + 1):
          if any(string in _text(tokens[:end]) for string in strings):
            length, stopped, reason = end, False, "stop_string"
            break
        reasons.append(reason)
        self.assertEqual(cut.lengths[sample], length)
        self.assertEqual(cut.stopped[sample], reason != "length")
        for array, other, fill in (
            (cut.tokens, whole.tokens, 0),
            (cut.logprobs, whole.logprobs, 0.0),
            (cut.token_versions, whole.token_versions, -1),
        ):
          np.testing.assert_array_equal(
              array[sample, :length], other[sample, :length]
          )
          np.testing.assert_array_equal(array[sample, length:], fill)
    self.assertGreater(
        min(reasons.count(r) for r in ("stop", "stop_string", "length")), 2
    )

  def test_respects_max_tokens_of_a_request(self):
    limits = [3, None, 1]
    requests = [
        decode.Request(r.prompt_tokens, r.prompt_id, 0, 11, max_tokens=limit)
        for r, limit in zip(self.requests, limits)
    ]
    all_found = self.sample(self.sampler, requests)
    for found, whole, limit in zip(all_found, self.whole, limits):
      limit = limit or _T
      lengths = np.minimum(whole.lengths, limit)
      np.testing.assert_array_equal(found.lengths, lengths)
      kept = np.arange(_T) < lengths[:, None]
      np.testing.assert_array_equal(found.tokens, whole.tokens * kept)
      np.testing.assert_array_equal(found.logprobs, whole.logprobs * kept)
      stopped = whole.stopped & (whole.lengths <= limit)
      np.testing.assert_array_equal(found.stopped, stopped)
    for limit in (0, _T + 1):
      wrong = decode.Request(np.array([2]), 7, 0, 1, max_tokens=limit)
      with self.assertRaisesRegex(
          ValueError, f"prompt 7: max_tokens={limit}: must be 1 to .*=8"
      ):
        self.sample(self.sampler, [wrong])

  @parameterized.parameters(
      {"temperature": 0.7, "top_k": 3},
      {"temperature": 0.0},
  )
  def test_plain_logprobs_are_those_of_the_model(self, **settings):
    found = self.sample(_sampler(self.model, **settings))
    differ = 0.0
    for request, completions in zip(self.requests, found):
      for tokens, length, plain, exact in zip(
          completions.tokens,
          completions.lengths,
          completions.plain_logprobs,
          completions.logprobs,
      ):
        seen = list(request.prompt_tokens)
        np.testing.assert_array_equal(plain[length:], 0.0)
        for position, token in enumerate(tokens[:length]):
          temperature = settings["temperature"] or 1.0
          expected_V = fakes.next_logprobs(self.params, seen, temperature)
          self.assertAlmostEqual(plain[position], expected_V[token], places=4)
          differ = max(differ, exact[position] - plain[position])
          seen.append(token)
    # Dropped tokens make the tokens kept likelier.
    self.assertGreater(differ, 0.1)

  @parameterized.parameters(
      ({"top_k": 3}, 3, 3), ({"top_p": 0.99}, 2, 2), ({"min_p": 0.5}, 6, 0)
  )
  def test_records_the_tokens_it_samples_from(self, truncated, num_kept, size):
    settings = {"temperature": 0.7, "num_kept": num_kept, **truncated}
    found = self.sample(_sampler(self.model, **settings))
    sizes = set()
    for request, c in zip(self.requests, found):
      self.assertEqual(c.kept_ids.shape, (11, _T, num_kept))
      self.assertTrue((c.kept_ids[~c.sampled_mask] == -1).all())
      for sample, length in enumerate(c.lengths):
        seen = list(request.prompt_tokens)
        for t, token in enumerate(c.tokens[sample, :length]):
          kept = [i for i in c.kept_ids[sample, t].tolist() if i >= 0]
          sizes.add(len(kept))
          logprobs_V = fakes.next_logprobs(self.params, seen, 0.7)
          self.assertIn(token, kept)
          others = np.delete(logprobs_V, kept)
          self.assertGreaterEqual(
              min(logprobs_V[kept]), max(others, default=-np.inf) - 1e-4
          )
          if not size:  # All that are half as likely as the likeliest.
            least = logprobs_V.max() + np.log(0.5)
            self.assertLen(kept, (logprobs_V >= least).sum())
          expected = logprobs_V[token] - np.logaddexp.reduce(logprobs_V[kept])
          self.assertAlmostEqual(c.logprobs[sample, t], expected, places=4)
          seen.append(token)
    self.assertEqual(sizes == {size}, size > 0)

  def test_one_version_and_nothing_dropped(self):
    for found in self.whole:
      np.testing.assert_array_equal(found.plain_logprobs, found.logprobs)
      sampled = np.arange(_T) < found.lengths[:, None]
      np.testing.assert_array_equal(
          found.token_versions, np.where(sampled, 5, -1)
      )
      np.testing.assert_array_equal(found.versions, [5] * 11)
