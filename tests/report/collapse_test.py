# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that are made to collapse name their cause; healthy ones name none.

The runs train a table of logits with the objectives, samples and metrics of the
package. Token 2 is the right one at each place of a completion.
"""

import functools
import math
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax import types
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.report import diagnosis
from tba_jax.report import evidence
from tba_jax.report import run_reader
from tests.report import findings_test
from tests.support import table_policy

B, K, T, V = 6, 8, 6, 7
EOS, RIGHT, WRONG = 1, 2, 5
# Steps after which something goes wrong.
LATE = 50
PROMPTS = jnp.asarray([[0, 0, b + 1] for b in range(B)], jnp.int32)


def find(lines):
  return diagnosis.collapse(run_reader.RunData(lines=lines))


def share(tokens, mask, token=RIGHT):
  return ((tokens == token) * mask).sum(-1) / T


def noise(tokens, mask, rng):
  return rng.normal(size=tokens.shape[:2])


def right(tokens, mask, rng):
  return share(tokens, mask)


def length(tokens, mask, rng):
  return mask.sum(-1) / T


def ends(tokens, mask):
  return ((tokens == EOS) * mask).any(-1).astype(float)


def table(**logits):
  """Returns logits of tokens, named t<id>; 0 for the others."""
  out = np.zeros((V, T, V), np.float32)
  for name, value in logits.items():
    out[..., int(name[1:])] = value
  return out


@jax.jit
def sample(params, sharpness, key):
  """Returns tokens and mask [B, K, T], sampled at 1 / sharpness."""
  logits = params["table"][PROMPTS[:, -1]][:, None] * sharpness
  logits = jnp.broadcast_to(logits, (B, K, T, V))
  tokens = jax.random.categorical(key, logits).astype(jnp.int32)
  stops = tokens == EOS
  mask = (jnp.cumsum(stops, axis=2) - stops == 0).astype(jnp.float32)
  return tokens, mask


@jax.jit
def logprobs(params, sharpness, tokens, mask):
  every = jax.nn.log_softmax(params["table"][PROMPTS[:, -1]] * sharpness)
  every = jnp.broadcast_to(every[:, None], (B, K, T, V))
  return jnp.take_along_axis(every, tokens[..., None], -1)[..., 0] * mask


@functools.cache
def make_step(name, clip):
  config = table_policy.make_config(name=name, ratio_clip=clip)
  config.sampling.temperature = 1.0
  loss_fn = objective.make_loss_fn(config, table_policy.MODEL)
  optimizer = optax.scale_by_adam()

  @jax.jit
  def step(params, opt_state, batch, rate, beta):
    (_, totals), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        params, {}, batch, beta
    )
    updates, opt_state = optimizer.update(grads, opt_state)
    updates = jax.tree.map(lambda u: -rate * u, updates)
    return (
        optax.apply_updates(params, updates),
        opt_state,
        metrics_lib.finish(totals),
    )

  return optimizer.init, step


def train(
    name,
    score,
    *,
    steps=100,
    rate,
    logits,
    clip=0.0,
    beta=0.0,
    lag=lambda i: 0,
    sharpness=lambda i: 1.0,
    judge=None,
):
  """Returns the records of `metrics.jsonl` of a run.

  Args:
    name, clip, beta: `config.loss.name`, `ratio_clip` and β.
    score: (tokens, mask, rng) -> rewards [B, K], or step -> such a function.
    steps: number of steps.
    rate: Adam's rate by step.
    logits: initial policy and reference.
    lag: steps by which the sampler's params are behind, by step.
    sharpness: factor of the sampler's logits, unknown to the trainer, by step.
    judge: (tokens, mask) -> held-out values, measured every 10 steps.
  """
  init, step_fn = make_step(name, clip)
  params = {"table": jnp.asarray(logits)}
  history, opt_state, key = [params], init(params), jax.random.key(0)
  records = []
  for i in range(steps):
    behind = min(i, lag(i))
    sampler = history[i - behind]
    tokens, mask = sample(sampler, sharpness(i), jax.random.fold_in(key, i))
    host = np.asarray(tokens), np.asarray(mask)
    rewards = score(i)(*host, np.random.default_rng(i))
    batch = types.Batch(
        prompt_tokens=PROMPTS,
        prompt_mask=jnp.ones(PROMPTS.shape),
        completion_tokens=tokens,
        completion_mask=mask,
        behavior_logprobs=logprobs(sampler, sharpness(i), tokens, mask),
        ref_logprobs=logprobs(history[0], 1.0, tokens, mask),
        rewards=jnp.asarray(rewards, jnp.float32),
        staleness_steps=jnp.full((B, K), float(behind)),
    )
    params, opt_state, metrics = step_fn(
        history[-1], opt_state, batch, rate(i), beta
    )
    history.append(params)
    record = {f"train/{k}": float(v) for k, v in metrics.items()}
    record |= {
        "step": i,
        "replay/completion_tokens": float(host[1].sum(-1).mean()),
        "replay/stop_rate": float(ends(*host).mean()),
        "replay/staleness_histogram": {str(behind): B * K},
    }
    if judge and i % 10 == 0:
      held_out = sample(params, 1.0, jax.random.fold_in(key, steps + i))
      values = judge(*map(np.asarray, held_out))
      record["eval/mean_reward"] = float(values.mean())
      error = float(values.std()) / math.sqrt(values.size)
      record["eval/mean_reward_stderr"] = error
    records.append(record)
  return records


def always(value):
  return lambda i: value


def change(before, after):
  return lambda i: before if i < LATE else after


STALE = lambda i: max(0, i - LATE)  # The sampler gets no new params.
TUNED = table(t2=1.5)

HEALTHY = {
    "rloo": dict(name="rloo", score=always(right), logits=table()),
    "tb_stale": dict(name="tb", score=always(right), logits=TUNED,
                     lag=always(3), beta=0.05),
    "grpo_clipped": dict(name="grpo", score=always(right), logits=TUNED,
                         lag=always(2), clip=0.2, judge=share),
    "longer": dict(name="rloo", score=always(right), judge=share,
                   logits=table(t1=1.5, t2=1.0)),
}  # fmt: skip
COLLAPSED = {
    "entropy": dict(name="rloo", score=always(noise), logits=table(),
                    rate=always(0.6)),
    # The judge sees what the reward does not: token 5 is wrong.
    "KL": dict(name="rloo", steps=120, judge=share, logits=table(t2=3, t5=-1),
               rate=always(0.1),
               score=always(
                   lambda t, m, _: share(t, m) + 4 * share(t, m, WRONG))),
    "effective sample size": dict(
        name="rloo", steps=110, lag=STALE, judge=share, logits=TUNED,
        score=change(right, lambda t, m, _: 1 - share(t, m)),
        rate=change(0.05, 0.3)),
    "clipped share": dict(
        name="grpo", clip=0.2, steps=110, lag=STALE, judge=share, logits=TUNED,
        score=change(right, lambda t, m, _: 1 - share(t, m)),
        rate=change(0.05, 0.3)),
    # A sampler that has lost its weights.
    "log-prob gap": dict(name="rloo", score=always(right), logits=TUNED,
                         rate=always(0.05), sharpness=change(1.0, 0.0)),
    "length": dict(name="rloo", score=always(length), logits=table(t1=1.5),
                   rate=always(0.1), judge=ends),
}  # fmt: skip


class CollapseTest(parameterized.TestCase):

  @parameterized.parameters(*COLLAPSED)
  def test_names_cause(self, cause):
    records = train(**COLLAPSED[cause])
    result = find(records)
    self.assertEqual(result.cause, cause, result.sentence)
    self.assertIsNone(result.until)
    self.assertStartsWith(
        result.sentence, f"Collapse by {cause} since step {result.step}: "
    )
    # Numbers depend on the machine.
    words = lambda line: re.sub(r"\d[\d.e-]*", "#", line)
    frozen = findings_test.FINDINGS[f"trained, {cause}"]["collapse"]
    self.assertEqual(words(result.line), words(frozen))
    # Before it went wrong, the same run is healthy.
    self.assertIsNone(find(records[: result.step]))

  @parameterized.parameters(*HEALTHY)
  def test_is_silent_about_healthy_runs(self, name):
    records = train(**{"rate": always(0.05)} | HEALTHY[name])
    first, last = (
        np.mean([r["train/reward_mean"] for r in part])
        for part in (records[:10], records[-10:])
    )
    self.assertGreater(last, first + 0.2)
    for end in range(20, len(records) + 1, 20):
      self.assertIsNone(find(records[:end]))


class FindTest(absltest.TestCase):

  def test_findings_need_only_kept_metrics(self):
    records = train(**COLLAPSED["KL"])
    more = [
        r | {"time/step_s": 1.0, "eval/kind/pass_at_1": 0.5} for r in records
    ]
    kept = [evidence.relevant_fields(r) for r in more]
    self.assertNotIn("time/step_s", kept[0])
    self.assertNotIn("eval/kind/pass_at_1", kept[0])
    self.assertEqual(find(kept), find(records))
