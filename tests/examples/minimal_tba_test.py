# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one-file example computes what the package computes."""

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import minimal_tba
from tba_jax.config import settings
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import tb
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer


def _batch():
  """Returns prompts, completions that stop early or never, and rewards."""
  ids = np.arange(4)
  prompts_BxP = minimal_tba.prompt_tokens("train", ids)
  rng = np.random.default_rng(0)
  tokens_BxKxT = np.concatenate(
      [minimal_tba.solution_tokens(ids, rng) for _ in range(2)]
      + [rng.integers(3, 40, (4, 1, minimal_tba.T))],
      axis=1,
  ).astype(np.int32)
  return prompts_BxP, tokens_BxKxT, rng.random((4, 3)).astype(np.float32)


def _package_model():
  head_dim = minimal_tba.WIDTH // minimal_tba.NUM_HEADS
  return transformer.make_model(
      config_lib.ModelConfig(
          family="llama",
          vocab_size=minimal_tba.TOKENIZER.vocab_size,
          num_layers=minimal_tba.NUM_LAYERS,
          width=minimal_tba.WIDTH,
          num_heads=minimal_tba.NUM_HEADS,
          num_kv_heads=minimal_tba.NUM_HEADS,
          head_dim=head_dim,
          mlp_width=minimal_tba.MLP_WIDTH,
          tie_embeddings=False,
          max_positions=128,
          param_dtype="float32",
          compute_dtype="float32",
          pad_id=None,
          bos_id=None,
          eos_id=None,
      )
  )


def _package_params(params):
  """Returns the example's params as the package's Llama has them."""
  N, H = minimal_tba.NUM_LAYERS, minimal_tba.NUM_HEADS
  kernel = lambda x: {"kernel": x}
  scale = lambda x: {"scale": x}
  heads = lambda x: kernel(
      x.reshape(N, minimal_tba.WIDTH, H, -1).transpose(0, 2, 3, 1)
  )
  blocks = params["blocks"]
  return {
      "embed": {"embedding": params["embedding"]},
      "blocks": {
          "attention_norm": scale(blocks["attention_norm"]),
          "attention": {
              **{name: heads(blocks[name]) for name in "qkv"},
              "o": kernel(
                  blocks["o"]
                  .reshape(N, H, -1, minimal_tba.WIDTH)
                  .transpose(0, 3, 1, 2)
              ),
          },
          "mlp_norm": scale(blocks["mlp_norm"]),
          "mlp": {
              "gate": kernel(blocks["gate"].transpose(0, 2, 1)),
              "up": kernel(blocks["up"].transpose(0, 2, 1)),
              "down": kernel(blocks["down"].transpose(0, 2, 1)),
          },
      },
      "final_norm": scale(params["final_norm"]),
      "head": kernel(params["head"].T),
  }


class MinimalTbaTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # The example is plain JAX: it broadcasts as NumPy does, in its thread too.
    name = "jax_numpy_rank_promotion"
    self.addCleanup(jax.config.update, name, getattr(jax.config, name))
    jax.config.update(name, "allow")
    rng = jax.random.PRNGKey(0)
    self.params = minimal_tba.init_params(rng)
    self.ref_params = jax.tree.map(lambda x: 1.1 * x, self.params)

  def test_loss_and_gradient_match_package(self):
    prompts_BxP, tokens_BxKxT, rewards_BxK = _batch()
    model = _package_model()
    mask_BxKxT = (tokens_BxKxT != minimal_tba.PAD).astype(np.float32)

    def logprobs(params):
      logits_BxKxTxV = model.completion_logits(
          _package_params(params),
          prompts_BxP,
          jnp.ones_like(prompts_BxP),
          tokens_BxKxT,
      )
      logprobs_BxKxTxV = jax.nn.log_softmax(logits_BxKxTxV)
      chosen = jnp.take_along_axis(
          logprobs_BxKxTxV, tokens_BxKxT[..., None], axis=-1
      )
      return chosen[..., 0]

    def package_loss(params):
      logprobs_BxKxT = logprobs(params)
      groups = groups_lib.Groups(
          logprobs_BxKxT=logprobs_BxKxT,
          kl_logprobs_BxKxT=logprobs_BxKxT,
          behavior_logprobs_BxKxT=logprobs_BxKxT,
          ref_logprobs_BxKxT=logprobs(self.ref_params),
          mask_BxKxT=mask_BxKxT,
          weights_BxKxT=mask_BxKxT,
          rewards_BxK=rewards_BxK,
      )
      config = settings.get_config()
      return tb.tb_loss(groups, config.loss, minimal_tba.BETA)[0]

    result = jax.jit(jax.value_and_grad(minimal_tba.tb_loss_fn))(
        self.params, self.ref_params, prompts_BxP, tokens_BxKxT, rewards_BxK
    )
    expected = jax.jit(jax.value_and_grad(package_loss))(self.params)
    chex.assert_trees_all_close(result, expected, rtol=2e-4, atol=2e-5)

  def test_completions_end_with_stop_token(self):
    prompts_BxP, _, _ = _batch()
    tokens = np.asarray(
        minimal_tba.sample(self.params, prompts_BxP, jax.random.PRNGKey(1))
    )
    self.assertEqual(
        tokens.shape, (4, minimal_tba.NUM_COMPLETIONS, minimal_tba.T)
    )
    for row in tokens.reshape(-1, minimal_tba.T).tolist():
      stop = row.index(minimal_tba.EOS) if minimal_tba.EOS in row else None
      if stop is not None:
        self.assertEqual(set(row[stop + 1 :]) - {minimal_tba.PAD}, set())

  @pytest.mark.slow
  def test_cached_greedy_decoding_matches_full_forward(self):
    tokens_BxS = jnp.asarray(_batch()[0])
    S = tokens_BxS.shape[1]
    expected, _ = minimal_tba.forward(self.params, tokens_BxS)
    _, cache = minimal_tba.forward(self.params, tokens_BxS[:, :-1])
    cache = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))), cache
    )
    result, _ = minimal_tba.forward(
        self.params, tokens_BxS[:, -1:], cache, S - 1
    )
    chex.assert_trees_all_close(
        result[:, 0], expected[:, -1], rtol=1e-4, atol=1e-5
    )

  @pytest.mark.slow
  def test_runs(self):
    before, after = minimal_tba.main(0, sft_steps=2, num_steps=3)
    self.assertBetween(before, 0, 1)
    self.assertBetween(after, 0, 1)

  def test_error_of_searcher_ends_trainer(self):
    buffer = minimal_tba.ReplayBuffer(0)
    searcher = minimal_tba.Searcher({}, buffer, 0)  # Params that can't sample.
    searcher.start()
    with self.assertRaises(KeyError):
      buffer.draw(searcher.error)
