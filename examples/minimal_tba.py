# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance with Asynchrony in one file: JAX, optax and NumPy.

    python examples/minimal_tba.py [--seed=N]

A small Llama is fine-tuned on solutions of countdown (reach a number from three
others), then improved by reinforcement learning: a searcher thread samples with
slightly old params and fills a replay buffer; the trainer draws from it and
minimizes the trajectory balance loss with the VarGrad estimate of log Z
(Bartoldson et al. 2025, arXiv:2503.18929). A minute on a laptop.

The package does the same with processes instead of threads, a journal,
checkpoints, meshes and Hugging Face models; only its task and tokenizer are
used here.

Axes: B prompts, K completions of a prompt, P prompt tokens, T completion
tokens, L = P + T, V vocabulary, D width, H heads, Dh head width, N layers.
"""

import argparse
import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.tasks import task_table as build_tasks

PyTree = Any

NUM_LAYERS, WIDTH, NUM_HEADS, MLP_WIDTH = 3, 64, 4, 172
SFT_STEPS, SFT_BATCH, SFT_LEARNING_RATE = 500, 64, 3e-3
STEPS, LEARNING_RATE = 250, 6e-4
NUM_PROMPTS, NUM_COMPLETIONS = 32, 8  # B and K, of a round and of a batch
BETA = 0.05  # KL coefficient, reward per nat
LEAD_ROUNDS = 1  # rounds that the searcher may be ahead of the trainer
CAPACITY = 128  # groups in the buffer
RECENT_FRACTION = 0.75  # of a batch, drawn from the newest round


# --- Task --------------------------------------------------------------------

TASK = build_tasks.find("countdown")(
    numbers=3,
    max_number=12,
    max_target=99,
    min_solutions=3,
    held_out_fraction=0.15,
    split_seed=0,
)
TOKENIZER = tokenizer_lib.word_level(
    TASK.tokenizer_words(), TASK.tokenizer_pattern
)
PAD, EOS = TOKENIZER.pad_id, TOKENIZER.eos_id
P, T = TASK.max_prompt_tokens, TASK.max_completion_tokens


def prompt_tokens(split: str, ids: np.ndarray) -> np.ndarray:
  """Returns [B, P] int32. A number is one token: all prompts are as long."""
  texts = [TASK.prompt(split, int(i)) for i in ids]
  return np.array([TOKENIZER.encode(text) for text in texts], np.int32)


def solution_tokens(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns [B, 1, T] int32, a random right completion of each prompt."""
  out = np.full((len(ids), 1, T), PAD, np.int32)
  for row, i in zip(out[:, 0], ids):
    text = TASK.reference_completion("train", int(i), rng)
    tokens = [*TOKENIZER.encode(text), EOS]
    row[: len(tokens)] = tokens
  return out


def rewards_of(split: str, ids: np.ndarray, tokens_BxKxT: np.ndarray):
  """Returns [B, K] float32: 1 for a right completion that stopped, else 0."""
  out = np.zeros(tokens_BxKxT.shape[:2], np.float32)
  for b, k in np.ndindex(*out.shape):
    row = tokens_BxKxT[b, k].tolist()
    if EOS in row:
      text = TOKENIZER.decode(row[: row.index(EOS)])
      out[b, k] = TASK.reward(split, int(ids[b]), text)
  return out


# --- Model: Llama ------------------------------------------------------------


def init_params(rng: jax.Array) -> PyTree:
  """Returns params; those of the blocks are stacked, [N, ...]."""
  N, D, F, V = NUM_LAYERS, WIDTH, MLP_WIDTH, TOKENIZER.vocab_size
  keys = iter(jax.random.split(rng, 9))
  normal = lambda *s: jax.random.normal(next(keys), s) / s[-2] ** 0.5
  return {
      "embedding": 0.1 * jax.random.normal(next(keys), (V, D)),
      "blocks": {
          "attention_norm": jnp.ones((N, D)),
          "q": normal(N, D, D),
          "k": normal(N, D, D),
          "v": normal(N, D, D),
          "o": normal(N, D, D),
          "mlp_norm": jnp.ones((N, D)),
          "gate": normal(N, D, F),
          "up": normal(N, D, F),
          "down": normal(N, F, D),
      },
      "final_norm": jnp.ones(D),
      "head": normal(D, V),
  }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def rotate(x_BxSxHxDh: jax.Array, positions_S: jax.Array) -> jax.Array:
  """Applies rotary positions (Su et al. 2021, arXiv:2104.09864)."""
  half = x_BxSxHxDh.shape[-1] // 2
  angles = positions_S[:, None] * 10000.0 ** (-jnp.arange(half) / half)
  cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
  a, b = x_BxSxHxDh[..., :half], x_BxSxHxDh[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(params: PyTree, tokens_BxS: jax.Array, cache=None, start=0):
  """Returns logits [B, S, V] of tokens at positions start, start + 1, ….

  The KV cache, two arrays [N, B, L, H, Dh] of the positions before `start`,
  comes back with these tokens in it; without one, L = S.
  """
  B, S = tokens_BxS.shape
  heads = lambda x: x.reshape(B, S, NUM_HEADS, WIDTH // NUM_HEADS)
  if cache is None:
    empty = jnp.zeros((NUM_LAYERS, *heads(jnp.zeros((B, S, WIDTH))).shape))
    cache = empty, empty
  positions_S = start + jnp.arange(S)
  sees_SxL = jnp.arange(cache[0].shape[2]) <= positions_S[:, None]
  write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
      old, new, start, axis=1
  )

  def block(x, layer):
    w, keys, values = layer
    h = rms_norm(x, w["attention_norm"])
    q = rotate(heads(h @ w["q"]), positions_S)
    keys = write(keys, rotate(heads(h @ w["k"]), positions_S))
    values = write(values, heads(h @ w["v"]))
    scores = jnp.einsum("bshd,blhd->bhsl", q, keys) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(sees_SxL, scores, -1e30))
    mixed = jnp.einsum("bhsl,blhd->bshd", weights, values)
    x = x + mixed.reshape(B, S, WIDTH) @ w["o"]
    h = rms_norm(x, w["mlp_norm"])
    x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return x, (keys, values)

  x = params["embedding"][tokens_BxS]
  x, cache = jax.lax.scan(block, x, (params["blocks"], *cache))
  return rms_norm(x, params["final_norm"]) @ params["head"], cache


# --- Sampler -----------------------------------------------------------------


@jax.jit
def sample(params: PyTree, prompts_BxP: jax.Array, key: jax.Array):
  """Returns K completions of each prompt, [B, K, T], PAD after EOS."""
  logits, cache = forward(params, prompts_BxP)
  # A prompt is read once; its completions go on from copies of its cache.
  spread = lambda x, axis: jnp.repeat(x, NUM_COMPLETIONS, axis=axis)
  room = ((0, 0), (0, 0), (0, T), (0, 0), (0, 0))
  cache = jax.tree.map(lambda x: jnp.pad(spread(x, 1), room), cache)
  logits_RxV = spread(logits[:, -1], 0)

  def step(carry, t):
    logits_RxV, cache, done_R = carry
    token_R = jax.random.categorical(jax.random.fold_in(key, t), logits_RxV)
    token_R = jnp.where(done_R, PAD, token_R)
    logits, cache = forward(params, token_R[:, None], cache, P + t)
    return (logits[:, 0], cache, done_R | (token_R == EOS)), token_R

  done_R = jnp.zeros(len(logits_RxV), bool)
  carry = (logits_RxV, cache, done_R)
  tokens_TxR = jax.lax.scan(step, carry, jnp.arange(T))[1]
  return tokens_TxR.T.reshape(len(prompts_BxP), NUM_COMPLETIONS, T)


# --- Trajectory balance ------------------------------------------------------


def sequence_logprobs(
    params: PyTree, prompts_BxP: jax.Array, tokens_BxKxT: jax.Array
) -> jax.Array:
  """Returns log π(y|x) of each completion, [B, K], nats, EOS included."""
  B, K, _ = tokens_BxKxT.shape
  prompts_RxP = jnp.repeat(prompts_BxP, K, axis=0)
  tokens_RxT = tokens_BxKxT.reshape(B * K, T)
  inputs = jnp.concatenate([prompts_RxP, tokens_RxT], axis=1)[:, :-1]
  logits_RxTxV = forward(params, inputs)[0][:, P - 1 :]
  logprobs_RxT = -optax.softmax_cross_entropy_with_integer_labels(
      logits_RxTxV, tokens_RxT
  )
  return (logprobs_RxT * (tokens_RxT != PAD)).sum(axis=1).reshape(B, K)


def vargrad_tb_loss(logprobs_BxK, ref_logprobs_BxK, rewards_BxK) -> jax.Array:
  """Returns the trajectory balance loss with the VarGrad estimate of log Z.

      log Ẑ(x) = 1/K Σₖ [r(x, yₖ)/β + log π_ref(yₖ|x) - log π(yₖ|x)]
      loss = β/2 · 1/(BK) Σ_b Σₖ (sg[log Ẑ(x_b)] + log π - log π_ref - r/β)²

  Source: arXiv:2503.18929, eq. 4 and 5; the factor β/2 gives the gradient the
  scale of a policy gradient. Which policy drew the completions does not enter,
  so the loss holds for old data too.
  """
  gap_BxK = rewards_BxK / BETA + ref_logprobs_BxK - logprobs_BxK
  log_z_Bx1 = jax.lax.stop_gradient(gap_BxK.mean(axis=1, keepdims=True))
  return BETA / 2 * jnp.mean(jnp.square(log_z_Bx1 - gap_BxK))


def tb_loss_fn(params, ref_params, prompts_BxP, tokens_BxKxT, rewards_BxK):
  return vargrad_tb_loss(
      sequence_logprobs(params, prompts_BxP, tokens_BxKxT),
      sequence_logprobs(ref_params, prompts_BxP, tokens_BxKxT),
      rewards_BxK,
  )


def sft_loss_fn(params: PyTree, prompts_BxP, tokens_BxKxT) -> jax.Array:
  return -sequence_logprobs(params, prompts_BxP, tokens_BxKxT).mean()


# --- Replay buffer -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt [P], its completions [K, T], their rewards [K], and the version
  (optimizer step) of the params that drew them."""

  prompt: np.ndarray
  tokens: np.ndarray
  rewards: np.ndarray
  version: int


class ReplayBuffer:
  """The newest CAPACITY groups; the searcher waits where it is far ahead."""

  def __init__(self, seed: int):
    self._rng = np.random.default_rng(seed)
    self._groups: list[Group] = []
    self._changed = threading.Condition()
    self._added = self._drawn = 0  # rounds and batches
    self.closed = False

  def add(self, groups: list[Group]) -> None:
    """Adds a round; waits where the searcher is LEAD_ROUNDS ahead."""
    with self._changed:
      may_add = lambda: self.closed or self._added < self._drawn + LEAD_ROUNDS
      self._changed.wait_for(may_add)
      self._groups = (self._groups + groups)[-CAPACITY:]
      self._added += 1
      self._changed.notify_all()

  def draw(self, error: list[BaseException]) -> list[Group]:
    """Returns B groups, once there is a round that was not drawn from yet."""
    with self._changed:
      while self._added <= self._drawn:
        self._changed.wait(1.0)
        if error:
          raise error[0]
      recent, older = self._groups[-NUM_PROMPTS:], self._groups[:-NUM_PROMPTS]
      num_recent = round(RECENT_FRACTION * NUM_PROMPTS)
      self._drawn += 1
      self._changed.notify_all()
    num_older = NUM_PROMPTS - num_recent
    pick = lambda groups, n: list(
        groups[i] for i in self._rng.choice(len(groups), n, replace=False)
    )
    return pick(recent, num_recent) + pick(older or recent, num_older)

  def close(self) -> None:
    with self._changed:
      self.closed = True
      self._changed.notify_all()


# --- Searcher and trainer ----------------------------------------------------


class Searcher(threading.Thread):
  """Samples rounds with the newest params that the trainer published."""

  def __init__(self, params: PyTree, buffer: ReplayBuffer, seed: int):
    super().__init__(daemon=True)
    self.published = (0, params)  # (version, params), assigned as one: not torn
    self.error: list[BaseException] = []
    self._buffer = buffer
    self._key = jax.random.PRNGKey(seed)
    self._rng = np.random.default_rng(seed + 1)

  def run(self) -> None:
    try:
      while not self._buffer.closed:
        version, params = self.published
        ids = self._rng.integers(TASK.num_prompts("train"), size=NUM_PROMPTS)
        prompts = prompt_tokens("train", ids)
        self._key, key = jax.random.split(self._key)
        tokens = np.asarray(sample(params, prompts, key))
        rewards = rewards_of("train", ids, tokens)
        rows = zip(prompts, tokens, rewards)
        self._buffer.add([Group(*row, version) for row in rows])
    except BaseException as error:  # The trainer raises it.
      self.error.append(error)


def make_step(loss_fn, optimizer: optax.GradientTransformation):
  @jax.jit
  def step(params, opt_state, *inputs):
    grads = jax.grad(loss_fn)(params, *inputs)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step


def fine_tune(params: PyTree, num_steps: int, seed: int) -> PyTree:
  optimizer = optax.adam(
      optax.cosine_decay_schedule(SFT_LEARNING_RATE, num_steps)
  )
  step, opt_state = make_step(sft_loss_fn, optimizer), optimizer.init(params)
  rng = np.random.default_rng(seed)
  for _ in range(num_steps):
    ids = rng.integers(TASK.num_prompts("train"), size=SFT_BATCH)
    inputs = prompt_tokens("train", ids), solution_tokens(ids, rng)
    params, opt_state = step(params, opt_state, *inputs)
  return params


def train(params: PyTree, num_steps: int, seed: int, report) -> PyTree:
  """Trains beside a searcher thread; returns the params."""
  rate = optax.linear_schedule(LEARNING_RATE, LEARNING_RATE / 10, num_steps)
  clip = optax.clip_by_global_norm(1.0)
  optimizer = optax.chain(clip, optax.adam(rate, b2=0.99))
  step_fn, opt_state = make_step(tb_loss_fn, optimizer), optimizer.init(params)
  ref_params, buffer = params, ReplayBuffer(seed)
  searcher = Searcher(params, buffer, seed)
  searcher.start()
  for step in range(num_steps):
    groups = buffer.draw(searcher.error)
    prompts = np.stack([g.prompt for g in groups])
    tokens = np.stack([g.tokens for g in groups])
    rewards = np.stack([g.rewards for g in groups])
    params, opt_state = step_fn(
        params, opt_state, ref_params, prompts, tokens, rewards
    )
    searcher.published = (step + 1, params)
    if (step + 1) % 25 == 0:
      reward, age = rewards.mean(), [step - g.version for g in groups]
      report(f"step {step + 1}: reward {reward:.2f}, staleness {np.mean(age)}")
  buffer.close()
  searcher.join(30.0)
  return params


def pass_at_1(params: PyTree, num_prompts: int = 256) -> float:
  """Returns the share of right completions of held-out prompts."""
  ids = np.arange(num_prompts)
  prompts = prompt_tokens("held_out", ids)
  tokens = np.asarray(sample(params, prompts, jax.random.PRNGKey(7)))
  return float(rewards_of("held_out", ids, tokens).mean())


def main(
    seed: int, sft_steps: int = SFT_STEPS, num_steps: int = STEPS
) -> tuple[float, float]:
  """Returns held-out pass@1 after fine-tuning and after training."""
  start = time.time()
  report = lambda text: print(
      f"{time.time() - start:5.1f} s  {text}", flush=True
  )
  report("supervised fine-tuning")
  params = fine_tune(init_params(jax.random.PRNGKey(seed)), sft_steps, seed)
  before = pass_at_1(params)
  report(f"held-out pass@1 {before:.2f}; trajectory balance with asynchrony")
  after = pass_at_1(train(params, num_steps, seed, report))
  report(f"held-out pass@1 {before:.2f} before, {after:.2f} after")
  return before, after


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--seed", type=int, default=0)
  main(parser.parse_args().seed)
