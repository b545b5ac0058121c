# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes of token losses, and log-probs of sequences.

Sequences are padded to powers of two in length and number, so that a server
compiles only a few programs. Losses are sums, so they do not depend on how a
batch is split. All log-probs are at `sampling.temperature`.

Axes: B sequences at a time, L tokens.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.serving import protobufs
from tba_jax.serving import token_losses
from tba_jax.serving import trainable as trainable_lib

PyTree = types.PyTree

_SHORTEST = 32  # Tokens of the shortest padded length.


class TokenPasses:
  """Passes of models with the same trained part."""

  def __init__(self, trainable: trainable_lib.Trainable):
    self._trainable = trainable
    self._config = trainable.config

  def run(
      self, params: PyTree, grads: PyTree | None, request: protobufs.Pass
  ) -> tuple[PyTree | None, protobufs.PassResult]:
    """Adds the gradient of a pass; returns the sum, and the pass's result.

    Args:
      grads: gradient so far, which is donated; None = forward pass only.
      request: a pass with a loss of `token_losses.LOSSES`.

    Raises:
      ValueError: an input is missing, or the loss does not read it.
    """
    rows = [
        (datum, _token_inputs(n, datum, request.loss))
        for n, datum in enumerate(request.data)
    ]
    config = _token_config(request)
    outputs: list[dict[str, np.ndarray] | None] = [None] * len(rows)
    waiting = []
    run = self._token_forward if grads is None else self._token_pass
    with trainable_lib.donating():
      for places, B, L in self._cut([len(d.tokens) for d in request.data]):
        arrays = _pad([rows[n] for n in places], B, L)
        arrays = self._trainable.place_rows(arrays)
        grads, total, logprobs, losses = run(
            params, grads, self._trainable.base, arrays, config
        )
        waiting.append((places, total, logprobs, losses))
    loss = 0.0
    for places, total, logprobs_BxL, losses_BxL in waiting:
      loss += float(total)
      logprobs_BxL, losses_BxL = map(np.asarray, (logprobs_BxL, losses_BxL))
      for row, n in enumerate(places):
        length = len(request.data[n].tokens)
        outputs[n] = {
            "logprobs": logprobs_BxL[row, :length],
            "elementwise_loss": losses_BxL[row, :length],
        }
    return grads, protobufs.PassResult(outputs, {"loss:sum": loss})

  def logprobs(
      self, params: PyTree, sequences: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Returns the log-probs of each sequence's tokens, nan for the first.

    Args:
      params: full model, not adapters.
      sequences: [L] int32 each; the results are [L] float32.
    """
    out = [np.full(len(ids), np.nan, np.float32) for ids in sequences]
    data = [
        protobufs.Datum(ids[:-1], ids[1:], {})
        for ids in sequences
        if len(ids) > 1
    ]
    places = [n for n, ids in enumerate(sequences) if len(ids) > 1]
    for cut, B, L in self._cut([len(d.tokens) for d in data]):
      arrays = _pad([(data[n], {}) for n in cut], B, L)
      arrays = self._trainable.place_rows(arrays)
      values_BxL = np.asarray(self._score(params, arrays))
      for row, n in enumerate(cut):
        out[places[n]][1:] = values_BxL[row, : len(data[n].tokens)]
    return out

  @functools.cached_property
  def _score(self) -> Any:
    return jax.jit(self._target_logprobs)

  def _cut(self, lengths: Sequence[int]) -> list[tuple[list[int], int, int]]:
    """Returns the indices of sequences, B and L of each program call."""
    by_length: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
      by_length.setdefault(_power_of_two(max(length, _SHORTEST)), []).append(n)
    out = []
    for L, places in sorted(by_length.items()):
      most = max(1, self._config.serve.micro_batch_tokens // L)
      for start in range(0, len(places), most):
        cut = places[start : start + most]
        out.append((cut, min(_power_of_two(len(cut)), most), L))
    return out

  @functools.cached_property
  def _token_forward(self) -> Any:
    """(params, grads, base, arrays, config) -> (grads, sum, logprobs, losses).

    It compiles once for each B and L: one program contains all losses.
    """
    return jax.jit(
        lambda params, grads, *inputs: (
            grads,
            *self._token_loss(params, *inputs),
        )
    )

  @functools.cached_property
  def _token_pass(self) -> Any:
    """As `_token_forward`; adds the gradient to `grads`, which is donated."""

    def run(params, grads, *inputs):
      def loss_fn(params):
        total, *aux = self._token_loss(params, *inputs)
        return total, aux

      (total, aux), new = jax.value_and_grad(loss_fn, has_aux=True)(params)
      return (jax.tree.map(jnp.add, grads, new), total, *aux)

    return jax.jit(run, donate_argnums=1)

  def _token_loss(
      self,
      params: PyTree,
      base: PyTree,
      arrays: Mapping[str, jax.Array],
      config: Mapping[str, jax.Array],
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sum of a token loss, log-probs [B, L] and losses [B, L]."""
    logprobs_BxL = self._target_logprobs(
        self._trainable.attach(base, params), arrays
    )
    losses_BxL = jax.lax.switch(
        config["loss"],
        [loss.fn for loss in token_losses.LOSSES.values()],
        logprobs_BxL,
        arrays,
        config,
    )
    losses_BxL = losses_BxL * arrays["mask"]
    return losses_BxL.sum(), logprobs_BxL, losses_BxL

  def _target_logprobs(
      self, params: PyTree, arrays: Mapping[str, jax.Array]
  ) -> jax.Array:
    """Returns [B, L] float32, the log-prob of each target, nats.

    A sequence's first token is the prompt, the others are the completion.
    """
    tokens_BxL, targets_BxL = arrays["tokens"], arrays["targets"]
    rest_Bx1xL = jnp.pad(tokens_BxL[:, 1:], ((0, 0), (0, 1)))[:, None]
    temperature = self._config.sampling.temperature
    logprobs_Bx1xL = logprobs_lib.map_logits(
        self._trainable.model,
        params,
        tokens_BxL[:, :1],
        jnp.ones_like(tokens_BxL[:, :1], jnp.float32),
        rest_Bx1xL,
        lambda logits, tokens: logprobs_lib.token_logprobs(
            logits, tokens, temperature=temperature
        ),
        targets_BxKxT=targets_BxL[:, None],
    )
    return logprobs_Bx1xL[:, 0]


def _pad(
    rows: Sequence[tuple[protobufs.Datum, Mapping[str, np.ndarray]]],
    B: int,
    L: int,
) -> dict[str, np.ndarray]:
  """Returns tokens and targets [B, L] int32, mask and inputs float32."""
  out = {name: np.zeros((B, L), np.int32) for name in ("tokens", "targets")}
  for name in ("mask", "weights", "logprobs", "advantages"):
    out[name] = np.zeros((B, L), np.float32)
  for b, (datum, inputs) in enumerate(rows):
    length = len(datum.tokens)
    out["tokens"][b, :length] = datum.tokens
    out["targets"][b, :length] = datum.targets
    out["mask"][b, :length] = 1
    for name, values in inputs.items():
      out[name][b, :length] = values
  return out


def _token_inputs(
    n: int, datum: protobufs.Datum, name: str
) -> dict[str, np.ndarray]:
  """Returns the inputs of a token loss, [L] each; ValueError if wrong."""
  loss = token_losses.LOSSES[name]
  unknown = sorted(set(datum.inputs) - set(loss.inputs))
  if unknown:
    raise ValueError(
        f"data[{n}]: loss_fn_inputs has {', '.join(unknown)}; {name} reads"
        f" target_tokens, {', '.join(loss.inputs)}"
    )
  out = {}
  for key in loss.inputs:
    values = datum.inputs.get(key)
    if values is None and key in loss.optional:
      values = np.full(len(datum.tokens), loss.optional[key], np.float32)
    if values is None:
      raise ValueError(f"data[{n}]: loss_fn_inputs lacks {key} for {name}")
    if values.shape != datum.tokens.shape:
      raise ValueError(
          f"data[{n}]: {key} has {len(values)} entries for"
          f" {len(datum.tokens)} tokens"
      )
    out[key] = values
  return out


def _token_config(request: protobufs.Pass) -> dict[str, np.ndarray]:
  """Returns index and settings of a token loss; ValueError if invalid."""
  names = list(token_losses.LOSSES)
  defaults = token_losses.LOSSES[request.loss].config
  for key, value in request.config.items():
    if key not in defaults or isinstance(value, str):
      raise ValueError(
          f"loss_fn_config.{key} = {value!r}: must be, for {request.loss},"
          f" {', '.join(defaults) or 'none'}, as numbers"
      )
  # The program takes the settings of all losses, whichever it runs.
  settings = {
      key: 0.0 for loss in token_losses.LOSSES.values() for key in loss.config
  }
  settings |= {**defaults, **request.config}
  return {
      "loss": np.int32(names.index(request.loss)),
      **{key: np.float32(value) for key, value in settings.items()},
  }


def _power_of_two(number: int) -> int:
  """Returns the smallest power of two that is at least `number`."""
  return 1 << (number - 1).bit_length()
