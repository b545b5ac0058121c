# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model that clients train: passes add to its gradient, a step consumes it.

Sequences are padded to powers of two in length and number, so that a server
compiles a few programs and none of them twice. Losses of tokens are sums, and
are the same however a batch is cut; objectives of groups are means over the
groups of one pass. All log-probs are at `sampling.temperature`.

Axes: N sequences of a pass, B sequences at a time, L tokens, and of groups B
prompts, K completions, P and T their tokens.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from tba_jax import types
from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.losses import build
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.losses import objective
from tba_jax.models import transformer
from tba_jax.policy import lora
from tba_jax.policy import sharding
from tba_jax.sampling import slots as slots_lib
from tba_jax.serving import messages
from tba_jax.serving import token_losses

PyTree = types.PyTree

_SHORTEST = 32  # Tokens of the shortest padded length.
# Compiled objectives, by name and settings, that are kept.
_GROUP_PROGRAMS = 32
# Inputs of a sequence of a group, beside its targets.
_NEEDED_OF_GROUPS = ("weights", "logprobs", "reward", "group")
_OF_GROUPS = (*_NEEDED_OF_GROUPS, "ref_logprobs", "staleness")
_SCALARS_OF_GROUPS = ("reward", "group", "staleness")
# Settings of `config.loss` that a pass may change. No others: some have no
# effect here, and `name` may be a file that is imported.
PASS_SETTINGS = (
    "scale", "beta", "correction", "ratio_clip", "clip_high", "ratio_cap",
    "moment_cap", "anchor", "ema_decay", "baseline", "baseline_shift",
    "baseline_temperature", "length_norm", "ties",
)  # fmt: skip
# Settings that have no effect in a server, and the only value of each. Those of
# sampling come with each request.
_FIXED_SETTINGS = {
    "loss.reward_weight": 1.0, "loss.missing_stop": "keep",
    "loss.entropy_weight": 0.0, "loss.behavior_logprobs": "sampler",
    "sampling.top_k": 0, "sampling.top_p": 1.0,
    "sampling.min_p": 0.0, "sampling.stop_strings": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AdamSettings:
  """Settings of one AdamW step, as of `torch.optim.AdamW`.

  grad_clip_norm: greatest global norm of the gradient; 0 does not clip.
  """

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0


class Programs:
  """Compiled programs of all models with the same trained part.

  Args:
    config: reads `loss`, `sampling`, `train`, `serve` and `lora.alpha`.
    model: the model, whose shape all share.
    base: its params, which adapters adapt; also the reference policy.
    rank: rank of the adapters; 0 trains all params.
    targets: matrices that have adapters, as `config.lora.targets`.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      model: transformer.Model,
      base: PyTree,
      *,
      rank: int,
      targets: str,
  ):
    self.config = config
    self._model = model
    self._base = base
    self.adapters = lora.make(
        {"rank": rank, "alpha": config.lora.alpha, "targets": targets}, model
    )
    self._sharding = slots_lib.params_sharding(base)
    trained = self.adapters or model
    self._shapes = jax.eval_shape(trained.init, jax.random.PRNGKey(0))
    self._shardings = sharding.param_shardings(
        sharding.make_mesh(config.mesh), trained
    )
    self._init = jax.jit(trained.init, out_shardings=self._shardings)
    self._merge = jax.jit(self.adapters.merge) if self.adapters else None
    self._update = jax.jit(_update, donate_argnums=(0, 1))
    self._zeros = jax.jit(
        lambda params: jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), params
        )
    )
    self._group_passes: collections.OrderedDict[Any, Any] = (
        collections.OrderedDict()
    )

  def init(self, seed: int) -> PyTree:
    """Returns new params to train: adapters, or a copy of the base."""
    if self.adapters is None:
      return jax.tree.map(jnp.copy, self._base)
    return self._init(jax.random.PRNGKey(seed))

  def init_optimizer(self, params: PyTree) -> PyTree:
    """Returns the state of Adam before its first step."""
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
    init = jax.jit(
        optax.scale_by_adam().init, out_shardings=shardings["opt_state"]
    )
    return init(params)

  def abstract_state(self) -> dict[str, PyTree]:
    """Returns shapes and shardings of `params` and `opt_state`."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    adam = jax.eval_shape(optax.scale_by_adam().init, self._shapes)
    mesh = jax.tree.leaves(self._shardings)[0].mesh
    like = functools.partial(jax.tree.map, place)
    return {
        "params": like(self._shapes, self._shardings),
        "opt_state": optax.ScaleByAdamState(
            count=place(adam.count, sharding.replicated(mesh)),
            mu=like(adam.mu, self._shardings),
            nu=like(adam.nu, self._shardings),
        ),
    }

  def zeros(self, params: PyTree) -> PyTree:
    """Returns a gradient of zeros, float32."""
    return self._zeros(params)

  def merged(self, params: PyTree) -> PyTree:
    """Returns the model's params, adapters merged into their base."""
    return params if self._merge is None else self._merge(self._base, params)

  def update(self, *args: Any) -> Any:
    return self._update(*args)

  def max_tokens(self) -> int:
    """Returns the most tokens of a sequence."""
    return (
        self.config.sampling.max_prompt_tokens
        + self.config.sampling.max_completion_tokens
    )

  # Losses of tokens.

  def token_pass(
      self, params: PyTree, grads: PyTree | None, asked: messages.Pass
  ) -> tuple[PyTree | None, messages.PassResult]:
    """Returns the gradient with that of a pass added, and the pass's result.

    Args:
      params: trained params.
      grads: gradient so far, which is donated; None runs forward alone.
      asked: a pass with a loss of `token_losses.LOSSES`.

    Raises:
      ValueError: the loss lacks an input, or has one that it does not read.
    """
    rows = [
        (datum, _token_inputs(n, datum, asked.loss))
        for n, datum in enumerate(asked.data)
    ]
    config = _token_config(asked)
    self.check_data(asked.data)
    outputs: list[dict[str, np.ndarray] | None] = [None] * len(rows)
    waiting = []
    run = self._token_forward if grads is None else self._token_pass
    with _donating():
      for places, B, L in self._cut([len(d.tokens) for d in asked.data]):
        arrays = _pad([rows[n] for n in places], B, L)
        arrays = jax.device_put(
            arrays, slots_lib.rows_sharding(self._sharding, B)
        )
        grads, total, logprobs, losses = run(
            params, grads, self._base, arrays, config
        )
        waiting.append((places, total, logprobs, losses))
    loss = 0.0
    for places, total, logprobs_BxL, losses_BxL in waiting:
      loss += float(total)
      logprobs_BxL, losses_BxL = map(np.asarray, (logprobs_BxL, losses_BxL))
      for row, n in enumerate(places):
        length = len(asked.data[n].tokens)
        outputs[n] = {
            "logprobs": logprobs_BxL[row, :length],
            "elementwise_loss": losses_BxL[row, :length],
        }
    return grads, messages.PassResult(outputs, {"loss:sum": loss})

  def logprobs(
      self, params: PyTree, sequences: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Returns [L] float32 of each sequence: nan, then log-probs of its tokens.

    Args:
      params: params of the model, not of adapters.
      sequences: [L] int32 each.
    """
    out = [np.full(len(ids), np.nan, np.float32) for ids in sequences]
    data = [
        messages.Datum(ids[:-1], ids[1:], {})
        for ids in sequences
        if len(ids) > 1
    ]
    places = [n for n, ids in enumerate(sequences) if len(ids) > 1]
    for some, B, L in self._cut([len(d.tokens) for d in data]):
      arrays = _pad([(data[n], {}) for n in some], B, L)
      arrays = jax.device_put(
          arrays, slots_lib.rows_sharding(self._sharding, B)
      )
      values_BxL = np.asarray(self._score(params, arrays))
      for row, n in enumerate(some):
        out[places[n]][1:] = values_BxL[row, : len(data[n].tokens)]
    return out

  @functools.cached_property
  def _score(self) -> Any:
    return jax.jit(self._target_logprobs)

  def check_data(self, data: Sequence[messages.Datum]) -> None:
    """Raises ValueError for a sequence that the model cannot take."""
    most, last = self.max_tokens(), self._model.config.vocab_size - 1
    for n, datum in enumerate(data):
      if len(datum.tokens) > most:
        raise ValueError(
            f"data[{n}] has {len(datum.tokens)} tokens: allowed up to {most},"
            " config.sampling.max_prompt_tokens + max_completion_tokens"
        )
      ids = np.concatenate([datum.tokens, datum.targets])
      if not 0 <= ids.min() <= ids.max() <= last:
        raise ValueError(f"data[{n}]: allowed token ids from 0 to {last}")

  def _cut(self, lengths: Sequence[int]) -> list[tuple[list[int], int, int]]:
    """Returns the sequences of each program call, and its B and L."""
    by_length: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
      by_length.setdefault(_power_of_two(max(length, _SHORTEST)), []).append(n)
    out = []
    for L, places in sorted(by_length.items()):
      most = max(1, self.config.serve.micro_batch_tokens // L)
      for start in range(0, len(places), most):
        some = places[start : start + most]
        out.append((some, min(_power_of_two(len(some)), most), L))
    return out

  @functools.cached_property
  def _token_forward(self) -> Any:
    """(params, grads, base, arrays, config) -> (grads, sum, logprobs, losses).

    It compiles once for each B and L: one program has all losses.
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
    logprobs_BxL = self._target_logprobs(self._attach(base, params), arrays)
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

    A sequence is a prompt of one token and a completion of the others.
    """
    tokens_BxL, targets_BxL = arrays["tokens"], arrays["targets"]
    rest_Bx1xL = jnp.pad(tokens_BxL[:, 1:], ((0, 0), (0, 1)))[:, None]
    temperature = self.config.sampling.temperature
    logprobs_Bx1xL = logprobs_lib.map_logits(
        self._model,
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

  def _attach(self, base: PyTree, params: PyTree) -> PyTree:
    return self.adapters.attach(base, params) if self.adapters else params

  # Objectives of groups.

  def group_pass(
      self, params: PyTree, grads: PyTree | None, asked: messages.Pass
  ) -> tuple[PyTree | None, messages.PassResult]:
    """As `token_pass`, with an objective of `losses/build.py`.

    The K sequences of a group have the same `group` and the same prompt, the
    tokens before the first `weights` that is not 0. A pass without
    `ref_logprobs` takes the log-probs of the base model.

    Raises:
      ValueError: the objective is not allowed here, or the sequences do not
        make groups.
    """
    self.check_data(asked.data)
    batch, places = self._groups(asked.data)
    is_given = all("ref_logprobs" in d.inputs for d in asked.data)
    grads, loss, logprobs_BxKxT = self.batch_pass(
        params, grads, asked.loss, asked.config, batch, has_reference=is_given
    )
    outputs: list[dict[str, np.ndarray] | None] = [None] * len(places)
    T = logprobs_BxKxT.shape[-1]
    for n, logprobs_T in zip(places, logprobs_BxKxT.reshape(-1, T)):
      datum = asked.data[n]
      start = _prompt_length(n, datum) - 1
      values = np.zeros(len(datum.tokens), np.float32)
      values[start:] = logprobs_T[: len(values) - start]
      outputs[n] = {"logprobs": values}
    return grads, messages.PassResult(
        outputs, {"loss:mean": loss, "groups:sum": float(len(batch.rewards))}
    )

  def batch_pass(
      self,
      params: PyTree,
      grads: PyTree | None,
      name: str,
      changes: Mapping[str, float | str],
      batch: types.Batch,
      *,
      has_reference: bool,
  ) -> tuple[PyTree | None, float, np.ndarray]:
    """Returns the gradient with that of a batch, the loss, log-probs [B, K, T].

    Args:
      params: trained params.
      grads: gradient so far, which is donated; None runs forward alone.
      name: name of the objective.
      changes: settings of it.
      batch: groups.
      has_reference: whether the batch has the reference's log-probs.

    Raises:
      ValueError: the objective is not allowed here, or needs larger groups.
    """
    config = objective_config(self.config, name, changes)
    num_groups, K = batch.rewards.shape
    least = build.min_completions(config.loss)
    if K < least:
      raise ValueError(
          f"loss_fn={name!r} needs groups of {least} or more, not {K}"
      )
    mean_tokens = groups_lib.mean_tokens(batch.completion_mask)
    prepared = {"mean_tokens": np.full(num_groups, mean_tokens, np.float32)}
    batch = dataclasses.replace(batch, prepared=prepared)
    beta = np.float32(config.loss.beta)
    has_reference |= not build.reads_reference(config.loss)
    size = config.train.micro_batch_prompts or num_groups
    cuts = [
        *range(0, num_groups - num_groups % size, size),
        *range(num_groups - num_groups % size, num_groups),
    ]
    ends = [*cuts[1:], num_groups]
    static = tuple(sorted((k, v) for k, v in changes.items() if k != "beta"))
    run = self._group_program(
        config, (name, static), has_reference, grads is not None
    )
    waiting = []
    with _donating():
      for start, end in zip(cuts, ends):
        micro = jax.tree.map(operator.itemgetter(slice(start, end)), batch)
        micro = jax.device_put(
            micro, slots_lib.rows_sharding(self._sharding, end - start)
        )
        share = np.float32((end - start) / num_groups)
        grads, *aux = run(params, grads, self._base, micro, beta, share)
        waiting.append(aux)
    loss = float(sum(np.asarray(total) for total, _ in waiting))
    return grads, loss, np.concatenate([np.asarray(x) for _, x in waiting])

  def _groups(
      self, data: Sequence[messages.Datum]
  ) -> tuple[types.Batch, list[int]]:
    """Returns the batch of a pass, and the sequences in its order."""
    P = self.config.sampling.max_prompt_tokens
    T = self.config.sampling.max_completion_tokens
    members: dict[int, list[int]] = {}
    for n, datum in enumerate(data):
      _check_group_inputs(n, datum)
      members.setdefault(int(datum.inputs["group"][0]), []).append(n)
    sizes = {group: len(some) for group, some in members.items()}
    K = max(sizes.values())
    for group, size in sizes.items():
      if size != K:
        raise ValueError(
            f"group {group} has {size} sequences, another has {K}: allowed"
            " groups of one size in a pass"
        )
    places = [n for some in members.values() for n in some]
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
    for b, (group, some) in enumerate(members.items()):
      first = data[some[0]]
      length = _prompt_length(some[0], first)
      prompt = first.tokens[:length]
      if length > P:
        raise ValueError(
            f"data[{some[0]}]: a prompt of {length} tokens; allowed up to"
            f" config.sampling.max_prompt_tokens = {P}"
        )
      prompts[b, P - length :], prompt_mask[b, P - length :] = prompt, 1
      for k, n in enumerate(some):
        datum = data[n]
        same = _prompt_length(n, datum) == length
        if not same or (datum.tokens[:length] != prompt).any():
          raise ValueError(
              f"data[{n}]: another prompt than the first of group {group}"
          )
        completion = datum.targets[length - 1 :]
        if (datum.tokens[length:] != completion[:-1]).any():
          raise ValueError(
              f"data[{n}]: allowed target_tokens that are model_input's next"
          )
        if len(completion) > T:
          raise ValueError(
              f"data[{n}]: a completion of {len(completion)} tokens; allowed up"
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

  def _group_program(
      self,
      config: ml_collections.ConfigDict,
      key: Any,
      has_reference: bool,
      has_grads: bool,
  ) -> Any:
    """Returns (params, grads, base, batch, beta, share) -> (grads, loss, …)."""
    key = (*key, has_reference, has_grads)
    if key in self._group_passes:
      return self._group_passes[key]
    while len(self._group_passes) >= _GROUP_PROGRAMS:
      self._group_passes.popitem(last=False)
    loss_fn = objective.make_pure_loss(config)
    temperature = config.sampling.temperature

    def logprobs_of(params, batch):
      return logprobs_lib.completion_logprobs(
          self._model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=temperature,
      )

    def loss_of(params, base, batch, beta, share):
      logprobs_BxKxT = logprobs_of(self._attach(base, params), batch)
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

    self._group_passes[key] = jax.jit(
        run, donate_argnums=1 if has_grads else ()
    )
    return self._group_passes[key]


class TrainingRun:
  """A model under training: params, optimizer state, gradient.

  num_steps: optimizer steps done.
  """

  def __init__(self, programs: Programs, params: PyTree, opt_state: PyTree):
    self.programs = programs
    self.params = params
    self.opt_state = opt_state
    self._grads: PyTree | None = None

  @property
  def num_steps(self) -> int:
    return int(self.opt_state.count)

  def run_pass(self, asked: messages.Pass) -> messages.PassResult:
    """Runs a pass; adds its gradient, unless it is forward alone.

    Raises:
      ValueError: the pass is wrong; the gradient is what it was.
    """
    run = self.programs.group_pass
    if asked.loss in token_losses.LOSSES:
      run = self.programs.token_pass
    if asked.forward_only:
      return run(self.params, None, asked)[1]
    grads = self._grads
    if grads is None:
      grads = self.programs.zeros(self.params)
    self._grads, result = run(self.params, grads, asked)
    return result

  def run_batch(
      self, name: str, changes: Mapping[str, float | str], batch: types.Batch
  ) -> float:
    """Adds the gradient of an objective of groups; returns the loss.

    The reference is the base model. Raises as `run_pass`.
    """
    grads = self._grads
    if grads is None:
      grads = self.programs.zeros(self.params)
    self._grads, loss, _ = self.programs.batch_pass(
        self.params, grads, name, changes, batch, has_reference=False
    )
    return loss

  def step(self, settings: AdamSettings) -> dict[str, float]:
    """Takes a step with the gradient, and drops it; returns metrics.

    Raises:
      ValueError: there is no gradient, or it is not finite; the params are what
        they were.
    """
    if self._grads is None:
      raise ValueError(
          "optim_step without a gradient: call forward_backward first"
      )
    numbers = np.array(dataclasses.astuple(settings), np.float32)
    grads, self._grads = self._grads, None
    self.params, self.opt_state, norm = self.programs.update(
        self.params, self.opt_state, grads, numbers
    )
    norm = float(norm)
    if not np.isfinite(norm):
      raise ValueError(
          f"the gradient has norm {norm}: no step was taken, and the gradient"
          " is dropped"
      )
    return {"grad_norm:mean": norm, "step:max": float(self.num_steps)}

  def load(self, params: PyTree, opt_state: PyTree | None) -> None:
    """Replaces the params, drops the gradient.

    Args:
      params: params to go on with.
      opt_state: their optimizer state; None begins a new one.
    """
    self.params, self._grads = params, None
    if opt_state is None:
      opt_state = self.programs.init_optimizer(params)
    self.opt_state = opt_state


@contextlib.contextmanager
def _donating() -> Iterator[None]:
  """Makes a ValueError one that says that the gradient is lost.

  Whoever sees a ValueError may go on with the gradient.
  """
  try:
    yield
  except ValueError as error:
    raise RuntimeError(str(error)) from error


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a setting that has no effect."""
  for key, only in _FIXED_SETTINGS.items():
    section, _, name = key.partition(".")
    if config[section][name] != only:
      raise ValueError(
          f"config.{key}={config[section][name]!r}: a server does not apply it;"
          f" allowed {only!r}"
      )
  _check_beta(f"config.loss.beta={config.loss.beta!r}", config.loss.beta)


def _check_beta(named: str, beta: float | str) -> None:
  """Raises ValueError for a beta that changes over steps."""
  if isinstance(beta, str):
    raise ValueError(f"{named}: a server does not apply it; allowed a number")


def objective_config(
    config: ml_collections.ConfigDict,
    name: str,
    changes: Mapping[str, float | str],
) -> ml_collections.ConfigDict:
  """Returns a config with an objective of groups, and settings of `loss`.

  Args:
    config: config of the server.
    name: name of the objective.
    changes: changed settings of it.

  Raises:
    ValueError: the objective or one of its settings is not allowed here.
  """
  row = build.OBJECTIVES.get(name)
  # A pass has no parameters but the policy's, and the log-probs of a reference.
  needs_more = lambda row: row.has_values or row.learns_log_z or row.has_teacher
  if row is None or needs_more(row):
    allowed = [n for n, r in build.OBJECTIVES.items() if not needs_more(r)]
    raise ValueError(
        f"loss_fn={name!r}: allowed"
        f" {', '.join([*token_losses.LOSSES, *allowed])}"
    )
  config = _loss_config(config, name, changes)
  _check_beta(f"loss_fn_config.beta={config.loss.beta!r}", config.loss.beta)
  if row.needs_beta and config.loss.beta == 0:
    raise ValueError(
        f"loss_fn={name!r} needs beta above 0: give it in loss_fn_config, or"
        " as config.loss.beta"
    )
  return config


def _loss_config(
    config: ml_collections.ConfigDict,
    name: str,
    changes: Mapping[str, float | str],
) -> ml_collections.ConfigDict:
  """Returns the config with a pass's objective and settings of `loss`."""
  config = config.copy_and_resolve_references()
  lines = [f"loss.name={name}"]
  for key, value in changes.items():
    if key not in PASS_SETTINGS:
      raise ValueError(
          f"loss_fn_config.{key}: allowed {', '.join(PASS_SETTINGS)}"
      )
    lines.append(f"loss.{key}={value}")
  try:
    config = load.apply_overrides(config, lines)
  except ValueError as error:
    raise ValueError(f"loss_fn_config: {error}") from error
  c, readers = config.loss, build.readers()
  by_correction = build.READ_BY_CORRECTIONS
  for key in changes:
    value, setting = c[key], settings_lib.SETTINGS[f"loss.{key}"]
    if not setting.allowed.test(value):
      raise ValueError(
          f"loss_fn_config.{key}={value!r}: allowed {setting.allowed.text}"
      )
    if value == setting.default:
      continue
    if name not in readers.get(key, (name,)):
      raise ValueError(
          f"loss_fn_config.{key}: loss_fn={name!r} does not read it; allowed"
          f" with {', '.join(readers[key])}"
      )
    own = build.correction(c)
    if own not in by_correction.get(key, (own,)):
      raise ValueError(
          f"loss_fn_config.{key}: correction {own!r} does not read it;"
          f" allowed with {', '.join(by_correction[key])}"
      )
    if reader := build.unread(c).get(key):
      raise ValueError(
          f"loss_fn_config.{key}: nothing reads it; allowed with {reader}"
      )
  # Settings of the server's own objective.
  for key in PASS_SETTINGS:
    if name not in readers.get(key, (name,)):
      c[key] = settings_lib.SETTINGS[f"loss.{key}"].default
  needs_clip = c.correction in build.CLIPS or (
      not c.correction and build.find(name).needs_ratio_clip
  )
  if needs_clip and not c.ratio_clip:
    why = f" and correction {c.correction!r}" if c.correction else ""
    raise ValueError(
        f"loss_fn={name!r}{why}: needs ratio_clip above 0, in loss_fn_config"
        " or as config.loss.ratio_clip"
    )
  if build.baseline(c) == "file":
    raise ValueError(
        f"loss_fn={name!r} has the baseline 'file', which a server does not"
        " have: give another as loss_fn_config.baseline"
    )
  return config


def _update(
    params: PyTree, opt_state: PyTree, grads: PyTree, settings: jax.Array
) -> tuple[PyTree, PyTree, jax.Array]:
  """Returns params and state after a step, and the gradient's norm."""
  rate, beta1, beta2, eps, decay, clip = settings
  norm = optax.tree.norm(grads)
  factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
  tx = optax.chain(
      optax.scale_by_adam(beta1, beta2, eps), optax.add_decayed_weights(decay)
  )
  as_params = jax.tree.map(
      lambda g, p: (factor * g).astype(p.dtype), grads, params
  )
  updates, (adam, _) = tx.update(
      as_params, (opt_state, optax.EmptyState()), params
  )
  new = optax.apply_updates(
      params, jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
  )
  keep = lambda new, old: jnp.where(jnp.isfinite(norm), new, old)
  return (
      jax.tree.map(keep, new, params),
      jax.tree.map(keep, adam, opt_state),
      norm,
  )


def _pad(
    rows: Sequence[tuple[messages.Datum, Mapping[str, np.ndarray]]],
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
    n: int, datum: messages.Datum, name: str
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


def _token_config(asked: messages.Pass) -> dict[str, np.ndarray]:
  """Returns index and settings of a token loss; ValueError for a wrong one."""
  names = list(token_losses.LOSSES)
  defaults = token_losses.LOSSES[asked.loss].config
  for key, value in asked.config.items():
    if key not in defaults or isinstance(value, str):
      raise ValueError(
          f"loss_fn_config.{key}={value!r}: allowed for {asked.loss}"
          f" {', '.join(defaults) or 'none'}, as numbers"
      )
  # Whatever the loss, the program takes the same names.
  settings = {
      key: 0.0 for loss in token_losses.LOSSES.values() for key in loss.config
  }
  settings |= {**defaults, **asked.config}
  return {
      "loss": np.int32(names.index(asked.loss)),
      **{key: np.float32(value) for key, value in settings.items()},
  }


def _check_group_inputs(n: int, datum: messages.Datum) -> None:
  """Raises ValueError unless a sequence has the inputs of a group's."""
  names = set(datum.inputs)
  lacking = [name for name in _NEEDED_OF_GROUPS if name not in names]
  if lacking or not names <= set(_OF_GROUPS):
    raise ValueError(
        f"data[{n}]: loss_fn_inputs has {', '.join(sorted(names))}; an"
        f" objective of groups reads {', '.join(_NEEDED_OF_GROUPS)} and, if"
        " given, ref_logprobs and staleness"
    )
  for name, values in datum.inputs.items():
    wanted = 1 if name in _SCALARS_OF_GROUPS else len(datum.tokens)
    if values.size != wanted or not np.isfinite(values).all():
      raise ValueError(
          f"data[{n}]: {name} has {values.size} entries: allowed {wanted}, all"
          " finite"
      )
  staleness = datum.inputs.get("staleness", (0,))[0]
  if staleness < 0:
    raise ValueError(f"data[{n}]: staleness={staleness}: allowed steps from 0")
  group = datum.inputs["group"][0]
  # A larger float32 may stand for its neighbors, too.
  is_exact = group == int(group) and abs(group) < 2**24
  if group.dtype.kind == "f" and not is_exact:
    raise ValueError(
        f"data[{n}]: group={group}: allowed a whole number, below 2**24 as"
        " float32"
    )


def _prompt_length(n: int, datum: messages.Datum) -> int:
  """Returns the tokens before the first that counts; ValueError if none."""
  counted = np.flatnonzero(datum.inputs["weights"])
  if not counted.size:
    raise ValueError(f"data[{n}]: weights are all 0: no token counts")
  if not set(datum.inputs["weights"].tolist()) <= {0.0, 1.0}:
    raise ValueError(f"data[{n}]: weights: allowed 0 and 1")
  return int(counted[0]) + 1


def _power_of_two(number: int) -> int:
  """Returns the least power of two that is not below a number."""
  return 1 << (number - 1).bit_length()
