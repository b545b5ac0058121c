# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""In-process environments for tests of the sampler."""

import numpy as np

MAX_TURNS = 3


class Scripted:
  """Environments whose answers are functions of a completion's tokens.

  An answer has several tokens, possibly a stop token. Completions end after
  three turns.

  longest: maximum tokens of an answer.
  most_live: maximum number of completions between first turn and last answer.
  """

  def __init__(self, delay: int = 0, longest: int = 2):
    self._delay = delay
    self.longest = longest
    self._ended = []
    self._calls = 0
    self._num_turns = {}
    self._live = set()
    self.most_live = 0
    self.cuts = set()

  def end(self, owner, tokens):
    self._num_turns[owner] = turn = self._num_turns.get(owner, 0) + 1
    self._live.add(owner)
    self.most_live = max(self.most_live, len(self._live))
    self._ended.append(
        (owner, None if turn == MAX_TURNS else self.answer(tokens))
    )

  def cut(self, owner, tokens):
    self.cuts.add(owner)
    self._live.discard(owner)

  def answers(self, wait_s):
    wait = wait_s > 0
    self._calls += 1
    if not wait and self._calls % (self._delay + 1):
      return []
    # Answer the newest first, and delay others.
    count = 1 if self._delay else len(self._ended)
    out = [self._ended.pop() for _ in self._ended[:count]]
    if wait and not out:
      raise AssertionError("nothing to wait for")
    self._live -= {owner for owner, ids in out if ids is None}
    return out

  def answer(self, tokens):
    total = int(np.sum(tokens))
    most = self.longest
    ids = [1 + total % 5, *(2 + i % 4 for i in range(most - 1))]
    return np.array(ids[: total % (most + 1)], np.int32)


def check(
    case,
    requests,
    found,
    turns,
    next_logprobs,
    *,
    version,
    stops=(1,),
    strings=(),
    text_fn=None,
    most,
):
  """Checks each token of completions; returns their numbers of turns.

  Args:
    case: test case with the assertions.
    requests, found: requests and their completions.
    turns: environments that answered.
    next_logprobs: (token ids) -> [V] log-probs of the next token.
    version: expected version of each token.
    stops, strings, text_fn: ends of a turn.
    most: most tokens of a completion.
  """
  counts = []
  for index, (request, completions) in enumerate(zip(requests, found)):
    for sample, tokens in enumerate(completions.tokens):
      length = completions.lengths[sample]
      mask = completions.sampled_mask[sample]
      seen, turn, given, count = list(request.prompt_tokens), [], [], 0
      for t in range(length):
        token = int(tokens[t])
        case.assertEqual(mask[t], not given)
        logprob = completions.logprobs[sample, t]
        if given:
          case.assertEqual(token, given.pop(0))
          case.assertEqual(logprob, 0.0)
          case.assertEqual(completions.token_versions[sample, t], -1)
        else:
          expected_V = next_logprobs(seen)
          case.assertAlmostEqual(logprob, expected_V[token], places=4)
          case.assertEqual(completions.token_versions[sample, t], version)
          turn.append(token)
        seen.append(token)
        if turn and (
            token in stops or any(s in text_fn(turn) for s in strings)
        ):
          count, turn = count + 1, []
          given = (
              [] if count == MAX_TURNS else list(turns.answer(tokens[: t + 1]))
          )
      np.testing.assert_array_equal(tokens[length:], 0)
      np.testing.assert_array_equal(mask[length:], False)
      is_over = count == MAX_TURNS and not turn
      case.assertEqual(completions.stopped[sample], is_over)
      case.assertEqual((index, sample) in turns.cuts, not is_over)
      if not is_over:  # The answer or the next token did not fit.
        case.assertGreaterEqual(length + len(given), most)
      counts.append(count)
  return counts
