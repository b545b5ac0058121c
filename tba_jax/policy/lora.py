# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA).

    W x + alpha / rank · B A x

for the kernels W that `config.lora.targets` names. The base W is frozen; train
state, optimizer, checkpoints and published versions hold only A and B. Training
computes the formula above; sampling, evaluation and export merge B A into W.

Source: Hu et al. 2021 (arXiv:2106.09685), eq. 3 and §4.1.

Each expert of a layer of experts has factors of its own. Its kernels are
targets apart from dense and shared MLPs' (`expert_gate`).

Axes: N layers, E experts, r rank.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import hashlib
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_names
from tba_jax.models.net import products
from tba_jax.models.net import quantized
from tba_jax.policy import settings as settings_lib

PyTree = types.PyTree
_Path = tuple[str, ...]
_KERNEL = "kernel"
# Pieces of each file that enter its digest.
_PIECES = 256
_PIECE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Adapters:
  """A model's adapters as pure functions over nested dicts of arrays.

  init: (rng) -> adapters, float32: A normal with variance 1 / inputs, B zero,
    so that the policy starts as its base.
  attach: (base, adapters) -> params for training, with a `products.Adapted` in
    place of each adapted kernel.
  merge: (base, adapters) -> params of the model, in the dtypes of the base.
  logical_axes: adapters with a tuple of axis names in place of each leaf.
  """

  init: Callable[[jax.Array], PyTree]
  attach: Callable[[PyTree, PyTree], PyTree]
  merge: Callable[[PyTree, PyTree], PyTree]
  logical_axes: PyTree


@dataclasses.dataclass(frozen=True)
class ParamsMerger:
  """Merges adapters into the model's params.

  base: `base_name` of the base; "" without adapters.
  params: (trained params) -> params of the model, or what its sampler merges.
  """

  base: str
  params: Callable[[PyTree], PyTree]


def make(settings: Mapping[str, Any], model: Any) -> Adapters | None:
  """Returns the adapters of a model; None if the rank is 0.

  Args:
    settings: `config.lora`.
    model: a `models.transformer.Model`.

  Raises:
    ValueError: the model has no such target.
  """
  rank, scale = settings["rank"], settings["alpha"] / max(settings["rank"], 1)
  if not rank:
    return None
  kernels = _targets(settings["targets"], model.logical_axes)

  def init(rng: jax.Array) -> PyTree:
    shapes = jax.eval_shape(model.init, rng)
    adapters: dict[str, Any] = {}
    for (path, axes), key in zip(
        kernels.items(), jax.random.split(rng, len(kernels))
    ):
      shape = _get(shapes, path).shape
      lead = _num_lead(axes)
      num_out = quantized.num_out(axes[lead:])
      in_shape = shape[lead + num_out :]
      a = jax.random.normal(key, (*shape[:lead], rank, *in_shape), jnp.float32)
      b = jnp.zeros((*shape[: lead + num_out], rank), jnp.float32)
      factors = {"a": a / math.sqrt(math.prod(in_shape)), "b": b}
      _set(adapters, _place(path), factors)
    return adapters

  def adapt(fn: Callable[..., Any], base: PyTree, adapters: PyTree) -> PyTree:
    out = jax.tree.map(lambda x: x, base)  # New dicts, the same leaves.
    for path, axes in kernels.items():
      *parents, name = path
      node, factors = _get(out, parents), _get(adapters, _place(path))
      node[name] = fn(
          _num_lead(axes), node[name], factors["a"], scale * factors["b"]
      )
    return out

  logical_axes: dict[str, Any] = {}
  for path, axes in kernels.items():
    lead = _num_lead(axes)
    split = lead + quantized.num_out(axes[lead:])
    factors = {
        "a": (*axes[:lead], "lora_rank", *axes[split:]),
        "b": (*axes[:split], "lora_rank"),
    }
    _set(logical_axes, _place(path), factors)
  return Adapters(
      init=init,
      attach=lambda *trees: adapt(
          lambda _, *arrays: products.Adapted(*arrays), *trees
      ),
      merge=lambda *trees: adapt(_merged, *trees),
      logical_axes=logical_axes,
  )


def peft_tensors(
    model_config: config_lib.ModelConfig, adapters: PyTree
) -> dict[str, np.ndarray]:
  """Returns A, [r, in], and B, [out, r], of each layer as `peft` names them.

  Raises:
    ValueError: a target's kernel is not a separate [out, in] tensor in a
      Hugging Face folder, as in GPT-2 or fused in GPT-NeoX, or it belongs to
      experts, for which `peft` has another format.
  """
  out = {}
  if model_config.num_experts and "mlp" in adapters["blocks"]:
    raise ValueError(
        "config.export.adapter=True: peft has no file of adapters of experts;"
        " must be False, which merges them into the model"
    )
  for row in hf_names.rows(model_config):
    factors = adapters
    for name in row.path[:-1]:
      factors = factors.get(name, {})
    if row.path[-1] != "kernel" or "a" not in factors:
      continue
    num_out = factors["b"].ndim - 2
    if not row.is_plain or num_out != len(row.split[0]):
      raise ValueError(
          f"config.lora.targets: {row.path[-2]} of the family"
          f" {model_config.family} is no matrix [out, in] of a Hugging Face"
          " folder; must be others, or config.export.adapter=False"
      )
    rank = factors["a"].shape[1]
    for layer, name in enumerate(row.hf_names(model_config.num_layers)):
      for factor, shape in (("A", (rank, -1)), ("B", (-1, rank))):
        leaf = np.asarray(factors[factor.lower()][layer])
        out[adapter_folder.tensor_name(name, factor)] = leaf.reshape(shape)
  return out


def peft_tensors_or_none(
    model_config: config_lib.ModelConfig,
    folder: pathlib.Path | None,
    adapters: PyTree,
) -> dict[str, np.ndarray] | None:
  """Returns `peft_tensors`, None if adapters must be merged instead.

  Merging is needed if the base has no folder, is multimodal or has adapters, or
  if its files store matrices in another form, as of experts.

  Args:
    folder: Hugging Face folder of the base; None if from scratch.
  """
  if not hf_config.takes_adapters(folder):
    return None
  try:
    return peft_tensors(model_config, adapters)
  except ValueError:
    return None


def make_adapter_fn(
    settings: Mapping[str, Any], model: Any, folder: pathlib.Path | None
) -> Callable[[PyTree], adapter_folder.Adapter] | None:
  """Returns (adapters) -> adapter that vLLM loads; None if it would load none.

  Args:
    settings: `config.lora`.
    model: a `models.transformer.Model`.
    folder: Hugging Face folder of the base; None if from scratch.
  """
  if not settings["rank"]:
    return None
  targets = settings_lib.lora_names(settings["targets"])
  is_served = hf_names.are_served(model.config, targets)
  if not (is_served and hf_config.takes_adapters(folder)):
    return None
  return lambda adapters: adapter_folder.Adapter(
      peft_tensors(model.config, adapters),
      base=folder,
      rank=settings["rank"],
      alpha=settings["alpha"],
  )


def make_merger(
    adapters: Adapters | None,
    folder: pathlib.Path | None,
    seed: int,
    load_base: Callable[[], PyTree],
) -> ParamsMerger:
  """Returns the merger of a run.

  Args:
    adapters: None if all params are trained.
    folder: Hugging Face folder of the base; None if from scratch.
    seed: initialization seed of a base from scratch.
    load_base: () -> the base; called only with adapters.
  """
  if adapters is None:
    return ParamsMerger("", lambda params: params)
  base, merge = load_base(), jax.jit(adapters.merge)
  name = base_name(folder, seed)
  return ParamsMerger(name, lambda trained: merge(base, trained))


def base_name(folder: pathlib.Path | None, seed: int) -> str:
  """Returns a name for a run's base, independent of its path.

  A folder's name is a digest of the sizes and samples of its files, which
  distinguishes models of one shape.

  Args:
    folder: Hugging Face folder of the base; None if from scratch.
    seed: initialization seed of a base from scratch.
  """
  if folder is None:
    return f"scratch, seed {seed}"
  digest = hashlib.blake2b(digest_size=16)
  for path in hf_files.weight_files(hf_hub.find(folder)):
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
      for i in range(_PIECES):
        file.seek(i * size // _PIECES)
        digest.update(file.read(_PIECE_BYTES))
  return f"model {digest.hexdigest()}"


def check_base(saved: str, present: str) -> None:
  """Raises ValueError if a checkpoint's adapters belong to another base."""
  if saved != present:
    raise ValueError(
        f"config.init: the checkpoint's adapters belong to base {saved!r}, not"
        f" {present!r}; restore the model that the run started with"
    )


def kernel_names(model: Any) -> dict[str, bool]:
  """Returns the matrices that may have an adapter, True for the MLP's."""
  kernels = _kernels(("blocks",), model.logical_axes["blocks"])
  return {_target(path, axes): "mlp" in path[1] for path, axes in kernels}


def _targets(text: str, logical_axes: PyTree) -> dict[_Path, tuple[str, ...]]:
  """Returns the logical axes of each adapted kernel by its path."""
  kernels = dict(_kernels(("blocks",), logical_axes["blocks"]))
  known = sorted({_target(*item) for item in kernels.items()})
  wanted = settings_lib.lora_names(text) or known
  lacking = sorted(set(wanted) - set(known))
  if lacking:
    raise ValueError(
        f"config.lora.targets={text!r}: this model has no {lacking}; must be"
        f" 'all' or some of {known}"
    )
  return {
      path: axes
      for path, axes in kernels.items()
      if _target(path, axes) in wanted
  }


def _kernels(
    path: _Path, node: PyTree
) -> Iterator[tuple[_Path, tuple[str, ...]]]:
  """Yields paths and logical axes of all matrices but routers."""
  for name, child in sorted(node.items()):
    if isinstance(child, Mapping):
      yield from _kernels((*path, name), child)
    elif name == _KERNEL or {"experts", "mlp", "width"} <= set(child):
      yield (*path, name), child


def _place(path: _Path) -> _Path:
  """Returns the path of a kernel's factors: of experts the kernel's own."""
  return path[:-1] if path[-1] == _KERNEL else path


def _target(path: _Path, axes: tuple[str, ...]) -> str:
  """Returns the name of a kernel in `lora.targets`."""
  name = _place(path)[-1]
  return f"expert_{name}" if "experts" in axes else name


def _num_lead(axes: tuple[str, ...]) -> int:
  """Returns the number of axes in front of a matrix: N, or N and E."""
  return 2 if "experts" in axes else 1


def _merged(
    lead: int, kernel: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
  """Returns kernel + b a, [N, *out, *in], in the kernel's dtype."""
  times = lambda b, a: jnp.tensordot(b, a, axes=1, precision="highest")
  for _ in range(lead - 1):
    times = jax.vmap(times)

  def merge_layer(layer: tuple[jax.Array, ...]) -> jax.Array:
    kernel, a, b = layer
    product = times(b.astype(jnp.float32), a.astype(jnp.float32))
    return (kernel.astype(jnp.float32) + product).astype(kernel.dtype)

  # Layer by layer: a float32 copy of all experts would be large.
  return jax.lax.map(merge_layer, (kernel, a, b))


def _get(tree: PyTree, path: _Path) -> PyTree:
  for name in path:
    tree = tree[name]
  return tree


def _set(tree: dict[str, Any], path: _Path, value: PyTree) -> None:
  *parents, last = path
  for name in parents:
    tree = tree.setdefault(name, {})
  tree[last] = value
