# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes of group objectives: a mean over the groups of one pass.

The K sequences of a group share a number, `group`, and a prompt: the tokens
before the first target of nonzero weight. Without `ref_logprobs`, the reference
is the base model. All log-probs are at `sampling.temperature`.

Axes: B prompts, K completions, P and T their tokens.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.serving import protobufs
from tba_jax.serving import trainable as trainable_lib

PyTree = types.PyTree

# Most compiled objectives kept, keyed by name and settings.
_GROUP_PROGRAMS = 32
# Inputs of each sequence of a group, besides its targets.
_NEEDED_OF_GROUPS = ("weights", "logprobs", "reward", "group")
_OF_GROUPS = (*_NEEDED_OF_GROUPS, "ref_logprobs", "staleness")
_SCALARS_OF_GROUPS = ("reward", "group", "staleness")


class GroupPasses:
  """Passes of models with the same trained part.

  Args:
    objective_config: function (name, changed settings) -> config of the
      objective; raises ValueError if a server does not support it.
  """

  def __init__(
      self,
      trainable: trainable_lib.Trainable,
      objective_config: Callable[
          [str, Mapping[str, float | str]], ml_collections.ConfigDict
      ],
  ):
    self._trainable = trainable
    self._objective_config = objective_config
    self._programs: collections.OrderedDict[Any, Any] = (
        collections.OrderedDict()
    )

  def run(
      self, params: PyTree, grads: PyTree | None, request: protobufs.Pass
  ) -> tuple[PyTree | None, protobufs.PassResult]:
    """Adds the gradient of a pass; returns the sum, and the pass's result.

    Args:
      grads: gradient so far, which is donated; None = forward pass only.
      request: a pass with an objective of `losses/objective_table.py`.

    Raises:
      ValueError: a server does not support the objective, or the sequences do
        not form groups.
    """
    batch, places = self._groups(request.data)
    is_given = all("ref_logprobs" in d.inputs for d in request.data)
    grads, loss, logprobs_BxKxT = self.run_batch(
        params,
        grads,
        request.loss,
        request.config,
        batch,
        has_reference=is_given,
    )
    outputs: list[dict[str, np.ndarray] | None] = [None] * len(places)
    T = logprobs_BxKxT.shape[-1]
    for n, logprobs_T in zip(places, logprobs_BxKxT.reshape(-1, T)):
      datum = request.data[n]
      start = _prompt_length(n, datum) - 1
      values = np.zeros(len(datum.tokens), np.float32)
      values[start:] = logprobs_T[: len(values) - start]
      outputs[n] = {"logprobs": values}
    return grads, protobufs.PassResult(
        outputs, {"loss:mean": loss, "groups:sum": float(len(batch.rewards))}
    )

  def run_batch(
      self,
      params: PyTree,
      grads: PyTree | None,
      name: str,
      changes: Mapping[str, float | str],
      batch: types.Batch,
      *,
      has_reference: bool,
  ) -> tuple[PyTree | None, float, np.ndarray]:
    """Adds the gradient of a batch; returns sum, loss, log-probs [B, K, T].

    Args:
      grads: gradient so far, which is donated; None = forward pass only.
      changes: settings of the objective that differ from the server's.
      has_reference: whether the batch has the reference's log-probs.

    Raises:
      ValueError: a server does not support the objective, or it needs larger
        groups.
    """
    config = self._objective_config(name, changes)
    num_groups, K = batch.rewards.shape
    least = objective_table.min_completions(config.loss)
    if K < least:
      raise ValueError(
          f"loss_fn={name!r} needs groups of {least} or more, not {K}"
      )
    mean_tokens = groups_lib.mean_tokens(batch.completion_mask)
    prepared = {"mean_tokens": np.full(num_groups, mean_tokens, np.float32)}
    batch = dataclasses.replace(batch, prepared=prepared)
    beta = np.float32(config.loss.beta)
    has_reference |= not objective_table.reads_reference(config.loss)
    size = config.train.micro_batch_prompts or num_groups
    cuts = [
        *range(0, num_groups - num_groups % size, size),
        *range(num_groups - num_groups % size, num_groups),
    ]
    ends = [*cuts[1:], num_groups]
    static = tuple(sorted((k, v) for k, v in changes.items() if k != "beta"))
    run = self._program(
        config, (name, static), has_reference, grads is not None
    )
    waiting = []
    with trainable_lib.donating():
      for start, end in zip(cuts, ends):
        micro = jax.tree.map(operator.itemgetter(slice(start, end)), batch)
        micro = self._trainable.place_rows(micro)
        share = np.float32((end - start) / num_groups)
        grads, *aux = run(
            params, grads, self._trainable.base, micro, beta, share
        )
        waiting.append(aux)
    loss = float(sum(np.asarray(total) for total, _ in waiting))
    return grads, loss, np.concatenate([np.asarray(x) for _, x in waiting])

  def _groups(
      self, data: Sequence[protobufs.Datum]
  ) -> tuple[types.Batch, list[int]]:
    """Returns the batch of a pass, and the index of each row's sequence."""
    P = self._trainable.config.sampling.max_prompt_tokens
    T = self._trainable.config.sampling.max_completion_tokens
    members: dict[int, list[int]] = {}
    for n, datum in enumerate(data):
      _check_group_inputs(n, datum)
      members.setdefault(int(datum.inputs["group"][0]), []).append(n)
    sizes = {group: len(rows) for group, rows in members.items()}
    K = max(sizes.values())
    for group, size in sizes.items():
      if size != K:
        raise ValueError(
            f"group {group} has {size} sequences, another has {K}: must be"
            " groups of one size in a pass"
        )
    places = [n for rows in members.values() for n in rows]
    shape = (len(members), K)
    prompts = np.zeros((len(members), P), np.int32)
    prompt_mask = np.zeros(prompts.shape, np.float32)
    tokens = np.zeros((*shape, T), np.int32)
    floats = {
        name: np.zeros(tokens.shape, np.float32)
        for name in ("weights", "logprobs", "ref_logprobs")
    }
    rewards, staleness = np.zeros(shape, np.float32), np.zeros(
        shape, np.float32
    )
    for b, (group, rows) in enumerate(members.items()):
      first = data[rows[0]]
      length = _prompt_length(rows[0], first)
      prompt = first.tokens[:length]
      if length > P:
        raise ValueError(
            f"data[{rows[0]}]: a prompt of {length} tokens; must be up to"
            f" config.sampling.max_prompt_tokens = {P}"
        )
      prompts[b, P - length :], prompt_mask[b, P - length :] = prompt, 1
      for k, n in enumerate(rows):
        datum = data[n]
        same = _prompt_length(n, datum) == length
        if not same or (datum.tokens[:length] != prompt).any():
          raise ValueError(
              f"data[{n}]: another prompt than the first of group {group}"
          )
        completion = datum.targets[length - 1 :]
        if (datum.tokens[length:] != completion[:-1]).any():
          raise ValueError(
              f"data[{n}]: target_tokens: must be model_input's next"
          )
        if len(completion) > T:
          raise ValueError(
              f"data[{n}]: a completion of {len(completion)} tokens; must be up"
              f" to config.sampling.max_completion_tokens = {T}"
          )
        tokens[b, k, : len(completion)] = completion
        for name, array in floats.items():
          if name in datum.inputs:
            values = datum.inputs[name][length - 1 :]
            array[b, k, : len(values)] = values
        rewards[b, k] = datum.inputs["reward"][0]
        staleness[b, k] = datum.inputs.get("staleness", (0,))[0]
    mask = (floats["weights"] > 0).astype(np.float32)
    batch = types.Batch(
        prompt_tokens=prompts,
        prompt_mask=prompt_mask,
        completion_tokens=tokens,
        completion_mask=mask,
        behavior_logprobs=floats["logprobs"] * mask,
        ref_logprobs=floats["ref_logprobs"] * mask,
        rewards=rewards,
        staleness_steps=staleness,
    )
    return batch, places

  def _program(
      self,
      config: ml_collections.ConfigDict,
      key: Any,
      has_reference: bool,
      has_grads: bool,
  ) -> Any:
    """Returns (params, grads, base, batch, beta, share) -> (grads, loss, …)."""
    key = (*key, has_reference, has_grads)
    if key in self._programs:
      return self._programs[key]
    while len(self._programs) >= _GROUP_PROGRAMS:
      self._programs.popitem(last=False)
    loss_fn = objective.make_pure_loss(config)
    temperature = config.sampling.temperature

    def logprobs_of(params, batch):
      return logprobs_lib.completion_logprobs(
          self._trainable.model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=temperature,
      )

    def loss_of(params, base, batch, beta, share):
      logprobs_BxKxT = logprobs_of(self._trainable.attach(base, params), batch)
      loss, _ = loss_fn(logprobs_BxKxT, {}, batch, beta)
      return share * loss, jax.lax.stop_gradient(logprobs_BxKxT)

    def run(params, grads, base, batch, beta, share):
      if not has_reference:
        ref = logprobs_of(base, batch) * batch.completion_mask
        batch = dataclasses.replace(batch, ref_logprobs=ref)
      if not has_grads:
        return (grads, *loss_of(params, base, batch, beta, share))
      (loss, aux), new = jax.value_and_grad(loss_of, has_aux=True)(
          params, base, batch, beta, share
      )
      return jax.tree.map(jnp.add, grads, new), loss, aux

    self._programs[key] = jax.jit(run, donate_argnums=1 if has_grads else ())
    return self._programs[key]


def _check_group_inputs(n: int, datum: protobufs.Datum) -> None:
  """Raises ValueError unless a sequence has the inputs of a group member."""
  names = set(datum.inputs)
  lacking = [name for name in _NEEDED_OF_GROUPS if name not in names]
  if lacking or not names <= set(_OF_GROUPS):
    raise ValueError(
        f"data[{n}]: loss_fn_inputs has {', '.join(sorted(names))}; an"
        f" objective of groups reads {', '.join(_NEEDED_OF_GROUPS)} and, if"
        " given, ref_logprobs and staleness"
    )
  for name, values in datum.inputs.items():
    size = 1 if name in _SCALARS_OF_GROUPS else len(datum.tokens)
    if values.size != size or not np.isfinite(values).all():
      raise ValueError(
          f"data[{n}]: {name} has {values.size} entries: must be {size}, all"
          " finite"
      )
  staleness = datum.inputs.get("staleness", (0,))[0]
  if staleness < 0:
    raise ValueError(
        f"data[{n}]: staleness = {staleness}: must be steps from 0"
    )
  group = datum.inputs["group"][0]
  # From 2**24 on, float32 does not represent every integer.
  is_exact = group == int(group) and abs(group) < 2**24
  if group.dtype.kind == "f" and not is_exact:
    raise ValueError(
        f"data[{n}]: group = {group}: must be a whole number, below 2**24 as"
        " float32"
    )


def _prompt_length(n: int, datum: protobufs.Datum) -> int:
  """Returns the number of prompt tokens; ValueError if all weights are 0."""
  counted = np.flatnonzero(datum.inputs["weights"])
  if not counted.size:
    raise ValueError(f"data[{n}]: weights are all 0: no token counts")
  if not set(datum.inputs["weights"].tolist()) <= {0.0, 1.0}:
    raise ValueError(f"data[{n}]: weights: must be 0 and 1")
  return int(counted[0]) + 1
