# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fits a config to a machine: the argument `hardware=NAME` of paper configs.

`apply` reads a finished config (starting model, batch sizes, frozen models) and
sets the trainer mesh, micro-batches, rematerialization, the number of searchers
and their mesh. Memory decides. `tools/memory_model.py` counts bytes exactly but
needs JAX and the model's config file, neither of which a config file may rely
on; `bytes_a_param` approximates it, and a test compares the two.
"""

from collections.abc import Sequence
import dataclasses
import math
import pathlib

import ml_collections

from tba_jax.losses import objective_table
from tba_jax.models import head_layout
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_names
from tba_jax.policy import settings as policy_settings
from tba_jax.sampling import samplers


@dataclasses.dataclass(frozen=True)
class Hardware:
  """A machine shared by trainer and searchers, or the trainer's TPU slice.

  kind: accelerator, as in `--program=plan`.
  gib: memory per device.
  devices: number of devices in the machine or slice.
  hosts: number of hosts in the slice, with one process each; 0 = a single
    machine for the whole run.
  searcher: device counts that a searcher may have, on the shared machine or on
    a separate host.
  """

  kind: str
  gib: int
  devices: int
  hosts: int = 0
  searcher: tuple[int, ...] = (1, 2, 4)


HARDWARE = {
    "colab": Hardware("t4", 16, 1, searcher=(1,)),
    "1xh100": Hardware("h100", 80, 1, searcher=(1,)),
    "4xa100": Hardware("a100-80", 80, 4),
    "8xh100": Hardware("h100", 80, 8),
    "8xh200": Hardware("h200", 141, 8),
    # The names of v5p slices count cores, of which a chip has two.
    "v5p-8": Hardware("v5p", 95, 4),
    "v6e-8": Hardware("v6e", 32, 8),
    "v5e-16": Hardware("v5e", 16, 16, hosts=4, searcher=(1, 4, 8)),
    "v5p-16": Hardware("v5p", 95, 8, hosts=2, searcher=(4,)),
    "v5e-64": Hardware("v5e", 16, 64, hosts=16, searcher=(1, 4, 8)),
}
# Models used in configs, which may not be downloaded -> (billions of params,
# most devices that split its heads and divide its vocabulary).
MODELS = {
    "EleutherAI/pythia-410m-deduped": (0.41, 16),
    "EleutherAI/pythia-1b-deduped": (1.01, 8),
    "EleutherAI/pythia-2.8b-deduped": (2.78, 32),
    "Qwen/Qwen2.5-0.5B": (0.49, 16),
    "Qwen/Qwen2.5-7B": (7.62, 32),
    "meta-llama/Llama-3.1-8B": (8.03, 32),
    "meta-llama/Llama-3.2-1B": (1.24, 32),
    "openai-community/gpt2": (0.12, 1),
    "realtreetune/rho-1b-sft-GSM8K": (1.10, 32),
}
# Fraction of device memory for param-shaped arrays, including `_LOGITS_GIB` for
# a chunk of logits and its gradient (`losses/logprobs.py`). Activations and
# caches get the rest; a test checks with `plan` that it suffices.
_SHARE = 0.728
# The largest such fraction for a role that only decodes: it keeps nothing for
# gradients, and some of its copies exist only while it does not decode.
_DECODE_SHARE = 0.85
_LOGITS_GIB = 2
# Splitting sequences further leaves each device too little work.
_MAX_SEQUENCE = 4
# Beyond this, devices are better used for fsdp.
_MOST_TENSOR = 32
# Settings tied to one mesh; a run resumed on another mesh resets all of them.
TRAINER_MESH = (
    "mesh.data", "mesh.fsdp", "mesh.sequence", "mesh.tensor",
    "trainer.num_processes",
)  # fmt: skip
SEARCHER_MESH = ("search.mesh.data", "search.mesh.fsdp", "search.mesh.tensor")
# Settings that `propose` returns.
MESH_KEYS = (*TRAINER_MESH, *SEARCHER_MESH, "search.num_searchers")


def apply(c: ml_collections.ConfigDict, name: str) -> None:
  """Fits the config to the named hardware, in place; "" changes nothing.

  Raises:
    ValueError: the name is unknown, or the run does not fit; lists hardware
      that it fits.
  """
  if not name:
    return
  if name not in HARDWARE:
    raise ValueError(
        f"config argument hardware={name!r}: must be one of"
        f" {', '.join(HARDWARE)}"
    )
  if start(c) == "scratch":
    raise ValueError(
        f"config argument hardware={name!r}: must be left out for a model from"
        " scratch; set config.mesh and config.search.mesh instead"
    )
  try:
    _set(c, HARDWARE[name])
  except ValueError as error:
    raise ValueError(
        f"config argument hardware={name!r}: {error}; {what_fits(c)}"
    ) from error


def propose_or_name(c: ml_collections.ConfigDict, name: str) -> dict[str, int]:
  """Returns `propose` for named hardware; errors list hardware that fits."""
  if start(c) == "scratch":
    raise ValueError(f"{name}: meshes are proposed only for pretrained models")
  try:
    return propose(c, HARDWARE[name])
  except ValueError as error:
    raise ValueError(f"{name}: {error}; {what_fits(c)}") from error


def what_fits(c: ml_collections.ConfigDict) -> str:
  """Returns a phrase listing the hardware that the run fits."""
  fits = [name for name in HARDWARE if _fits(c, HARDWARE[name])]
  return f"this run fits {', '.join(fits) or 'none of the known hardware'}"


def propose(c: ml_collections.ConfigDict, hardware: Hardware) -> dict[str, int]:
  """Returns values of `MESH_KEYS` for a run on this hardware.

  Raises:
    ValueError: the model cannot be read, or the run does not fit.
  """
  c = ml_collections.ConfigDict(c.to_dict())
  _set_mesh(c, hardware)
  out = {}
  for key in MESH_KEYS:
    section, _, name = key.rpartition(".")
    values = c.search.mesh if section == "search.mesh" else c[section]
    out[key] = values[name]
  return out


def size_of(c: ml_collections.ConfigDict) -> tuple[float, int]:
  """Returns (billions of params, largest tensor axis) of the starting model.

  Raises:
    ValueError: the model is not in `MODELS` and cannot be read.
  """
  if start(c) in MODELS:
    return MODELS[start(c)]
  shape = hf_config.read(start(c))
  divided = math.gcd(shape.vocab_size, *shape.mlp_widths.values(), _MOST_TENSOR)
  # The largest power of two.
  most = 1
  while most < divided and not head_layout.problem_of(shape, 2 * most):
    most *= 2
  return hf_names.num_params(shape) / 1e9, most


def usable_gb(hardware: Hardware, *, is_tight: bool = False) -> float:
  """Returns the GB of a device left for a role's param-shaped arrays.

  Trainer and searcher share a single device.

  Args:
    is_tight: whether the role only decodes, and does not fit with less.
  """
  is_shared = hardware.devices == 1
  share = _DECODE_SHARE if is_tight and not is_shared else _SHARE
  gb = (share * hardware.gib - _LOGITS_GIB) * 2**30 / 1e9
  return gb / 2 if is_shared else gb


def sends_adapters(c: ml_collections.ConfigDict) -> bool:
  """Returns whether a searcher passes LoRA adapters on, without their base.

  Other samplers and models need merged params. A model that cannot be read
  counts among them, which is an upper bound on memory.
  """
  takes_adapters = samplers.SAMPLERS[c.search.sampler].takes_adapters
  if not (c.lora.rank and takes_adapters) or start(c) == "scratch":
    return False
  folder = pathlib.Path(start(c)).expanduser()
  targets = policy_settings.lora_names(c.lora.targets)
  try:
    is_served = hf_names.are_served(hf_config.read(folder), targets)
    return is_served and hf_config.takes_adapters(folder)
  except (ValueError, OSError):
    return False


def searcher_copies(c: ml_collections.ConfigDict) -> dict[str, str]:
  """Returns the copies of the policy's params on a searcher's devices, by name.

  Values are the dtypes of the copy: "decode", as the sampler decodes, or
  "param", as `model.param_dtype`. Of samplers elsewhere, params are sent from
  the host; adapters, if they must be merged, are merged on the devices.
  """
  copies = {}
  if samplers.SAMPLERS[c.search.sampler].is_here:
    copies["params"] = copies["params of a version that comes in"] = "decode"
  if c.lora.rank and not sends_adapters(c):
    copies["base of the adapters"] = "param"
    copies["base with a version's adapters merged"] = "param"
  return copies


def bytes_a_param(
    c: ml_collections.ConfigDict, hardware: Hardware
) -> dict[str, int]:
  """Returns an upper bound on the bytes per policy param, by component.

  trainer: params, gradients and two Adam moments in float32; a copy to publish;
    the reference, in the compute dtype if it is fixed; the proximal policy and
    the previous round's params, if they differ. With LoRA, the base model, and
    for evaluations a copy with merged adapters and the params to decode with.
  value_model: params, gradients and two Adam moments; older params if the
    proximal policy has some.
  evaluation: params that process 0 of several gathers, and decodes with.
  searcher: `searcher_copies`; int8 counts as the compute dtype.
  server: the params of a sampler that decodes elsewhere.

  The reference counts towards the trainer or the searcher, whichever holds it.
  """
  loss, rounds = c.loss, c.rounds
  round_steps = max(rounds.mini_batches, 1) * rounds.passes
  holds = (loss.proximal_every_steps or round_steps) > 1
  copy = 4 if _is_float32(c, hardware) else 2
  base = 4 if c.model.param_dtype == "float32" else 2
  reference = copy if c.reference.mode == "fixed" else 4
  is_searchers = objective_table.holds_reference(c, "searcher")
  trainer = 16 + copy + reference * (not is_searchers)
  if loss.behavior_logprobs == "recomputed" or loss.correction == "decoupled":
    trainer += 4 * holds
  trainer += 4 * (rounds.mini_batches > 0 and rounds.lag_rounds > 0)
  sizes = {"decode": copy, "param": base}
  is_here = samplers.SAMPLERS[c.search.sampler].is_here
  copies = searcher_copies(c)
  searcher = sum(sizes[dtypes] for dtypes in copies.values())
  if "base of the adapters" not in copies:  # It would be the reference.
    searcher += (base if c.lora.rank else reference) * is_searchers
  return {
      "trainer": 2 * base + copy if c.lora.rank else trainer,
      "value_model": (16 + 4 * holds)
      * objective_table.find(loss.name).has_values,
      "evaluation": 2 * copy,
      "searcher": searcher,
      "server": 0 if is_here else copy,
  }


def start(c: ml_collections.ConfigDict) -> str:
  """Returns the model that the first stage starts from, or "scratch"."""
  return c.sft.init if c.init == "sft" else c.init


def _fits(c: ml_collections.ConfigDict, hardware: Hardware) -> bool:
  try:
    _set(ml_collections.ConfigDict(c.to_dict()), hardware)
  except ValueError:
    return False
  return True


def _set(c: ml_collections.ConfigDict, hardware: Hardware) -> None:
  fsdp, least = _set_mesh(c, hardware)
  _set_memory(c, hardware, fsdp, least)


def _set_mesh(
    c: ml_collections.ConfigDict, hardware: Hardware
) -> tuple[int, int]:
  """Sets the meshes; returns (fsdp, fewest devices that hold the policy)."""
  billions, most_tensor = size_of(c)
  several = hardware.devices > 1
  share = usable_gb(hardware)
  frozen = _frozen_gb(c, billions)
  bytes_per_param = bytes_a_param(c, hardware)
  state = billions * bytes_per_param["trainer"]
  least = _power(math.ceil(state / share))
  state += billions * bytes_per_param["value_model"]
  shards = _power(math.ceil((state + frozen) / share))

  size, count = hardware.devices, c.search.num_searchers
  searcher = _searcher(c, hardware, billions, frozen)
  if not hardware.hosts:
    size = max(shards, size // 4)
    count = (hardware.devices - size) // searcher if several else 1
  if max(size, shards) > hardware.devices or count < 1:
    raise ValueError(
        f"{billions:.3g} B params and the reward models need {shards} devices"
        f" of {hardware.gib} GiB for the trainer, plus devices for searchers"
    )
  if not hardware.hosts:  # No device stays idle.
    left = hardware.devices - count * searcher
    size = max(size, _power(left + 1) // 2)
  if hardware.hosts > 1:
    host, evaluation = size // hardware.hosts, bytes_per_param["evaluation"]
    needed = billions * evaluation / host + state / size
    if needed > usable_gb(hardware, is_tight=True):
      raise ValueError(
          f"an evaluation needs {needed:.0f} GB per device of a host, which"
          f" gathers the params on its {host} devices of {hardware.gib} GiB"
      )
  # Training splits batches of any size; earlier stages need even splits.
  batches = _batch_sizes(c)
  fsdp, tensor = math.gcd(size, *batches), 1
  sequence = size // fsdp
  while (fsdp * tensor < shards or sequence > _MAX_SEQUENCE) and (
      tensor < most_tensor and sequence > 1
  ):
    tensor, sequence = 2 * tensor, sequence // 2
  if fsdp * tensor < shards or sequence > _MAX_SEQUENCE:
    raise ValueError(
        f"{size} devices cannot split batches of"
        f" {' and '.join(map(str, batches))} examples"
    )
  c.mesh.fsdp, c.mesh.sequence, c.mesh.tensor = fsdp, sequence, tensor
  c.trainer.num_processes = max(hardware.hosts, 1)
  c.search.num_searchers = count
  if not samplers.SAMPLERS[c.search.sampler].is_here:
    searcher = 1  # Its server has the devices.
  c.search.mesh.tensor = math.gcd(searcher, most_tensor)
  c.search.mesh.fsdp = searcher // c.search.mesh.tensor
  c.sampling.num_slots = -(-c.sampling.num_slots // searcher) * searcher
  return fsdp, least


def _is_float32(c: ml_collections.ConfigDict, hardware: Hardware) -> bool:
  # A T4 has no bfloat16.
  return hardware.kind == "t4" or c.model.compute_dtype == "float32"


def _searcher(
    c: ml_collections.ConfigDict,
    hardware: Hardware,
    billions: float,
    frozen: float,
) -> int:
  """Returns the fewest devices that hold the params of a searcher."""
  bytes_per_param = bytes_a_param(c, hardware)
  here = billions * bytes_per_param["searcher"] + frozen
  server = billions * bytes_per_param["server"]
  for is_tight in (False, True):
    for size in hardware.searcher:
      split = 1 if server else size  # A searcher with a server has one device.
      needed = here / split + server / size
      if needed <= usable_gb(hardware, is_tight=is_tight):
        return size
  raise ValueError(
      f"a searcher's {here + server:.0f} GB of params do not fit on"
      f" {hardware.searcher[-1]} devices of {hardware.gib} GiB"
  )


def _frozen_gb(c: ml_collections.ConfigDict, billions: float) -> float:
  """Returns the GB of the models that judge completions."""
  if c.reward.backend == "model":
    return 4 * billions  # As large as the policy, float32.
  if c.task.name == "red_team":
    # Victim and guard in bfloat16; the small classifiers are negligible.
    return 2 * 2 * 8.03 if c.task.victim_template == "chat" else 1.0
  return 0.0


def _batch_sizes(c: ml_collections.ConfigDict) -> Sequence[int]:
  """Returns the batch sizes of the stages that precede training."""
  out = []
  if c.init == "sft":
    out.append(c.sft.batch_size)
  if c.reward.backend == "model":
    out.append(c.reward_model.batch_size)
  return out


def _set_memory(
    c: ml_collections.ConfigDict, hardware: Hardware, fsdp: int, least: int
) -> None:
  """Scales micro-batches, remat and dtype from the configs' 80 GiB."""
  scale = hardware.gib / 80
  each = max(1, int(c.train.micro_batch_prompts * scale))
  c.train.micro_batch_prompts = _divisor(c.train.prompts_per_batch, fsdp * each)
  for section in (c.sft, c.reward_model):
    # Independent of the mesh: a stage's model depends on these settings.
    unit = math.gcd(hardware.devices, section.batch_size)
    micro = section.micro_batch_size or section.batch_size
    most = max(1, int(micro * scale) * least // unit)
    section.micro_batch_size = unit * _divisor(section.batch_size // unit, most)
  c.train.remat = "dots" if hardware.gib >= 80 and least == 1 else "full"
  if _is_float32(c, hardware):
    c.model.compute_dtype = "float32"


def _power(number: int) -> int:
  """Returns the smallest power of two that is at least `number`."""
  return 1 << max(number - 1, 0).bit_length()


def _divisor(number: int, most: int) -> int:
  """Returns the largest divisor of `number` that is at most `most`."""
  return max(n for n in range(1, min(number, most) + 1) if number % n == 0)
