# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs, memory and collective traffic of a program, from its HLO text.

XLA's own cost analysis counts a loop body once; here it is counted once per
iteration. Figures are for one device.
"""

import collections
from collections.abc import Callable, Iterator
import dataclasses
import functools
import math
import re

import numpy as np

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
    "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+|f8\w+|c64|c128)\[([\d,]*)\]")
# A kernel's attributes may continue on further lines, some of them with braces
# at the start.
_END = re.compile(r"^\}(, execution_thread=.*)?\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# A tiled layout: the axes, minor one first, and the tile of the last axes.
_TILED = re.compile(
    r"\b(pred|bf16|[suf]\d+|f8\w+|c64|c128)\[([\d,]*)\](?:\{([^}]*)\})?"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# On TPU, reduce-scatter is a fusion of an all-reduce and a slice of its result.
_REDUCE_SCATTER = "all-reduce-scatter"


# Number of queries x keys x head width products in a splash attention kernel.
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)_")
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# The same for packed rows on a GPU (`models/kernels/gpu_rows.py`).
_ROWS = re.compile(r"packed_rows_(forward|queries|keys)")
_ROWS_PRODUCTS = {"forward": 2, "queries": 3, "keys": 4}
# Products of each group of rows with its own matrix, and sums of the gradient.
_GROUPED = re.compile(r"ragged-dot-none|tgmm|grouped_products|grouped_sums")
# Libraries that a GPU calls: matrix products, whose axes are in the call's
# configuration, and attention with its gradient.
_LIBRARY = re.compile(
    r'custom_call_target="__(cublas|cudnn\$fmhaSoftmax(?:Backward)?)\b'
)
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["([\d",]*)"\]')
_CUDNN_PRODUCTS = {"cudnn$fmhaSoftmax": 2, "cudnn$fmhaSoftmaxBackward": 5}
_KERNEL = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = .* custom-call\("
    r'.*custom_call_target="([^"]+)"',
    re.M,
)
_WORKSPACE = re.compile(r"\b[su]8\[\d+\](?:\{[^}]*\})?")

# Attention that reads only the used part of a cache
# (`models/kernels/ragged_attention.py`): its first float operand holds the
# queries, the others keys and values.
_RAGGED = re.compile(r"ragged_decode_attention")

# Instructions that move no data.
_FREE = frozenset((
    "after-all", "bitcast", "constant", "get-tuple-element", "parameter",
    "partition-id", "replica-id", "tuple",
))  # fmt: skip
# Instructions that read only the returned part of their first operand.
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
# Instruction that updates its first operand -> index of the operand it writes.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Costs:
  """Arithmetic and traffic of a device in one run of a program.

  flops: operations of matrix products and convolutions, 2 per multiply-add, of
    grouped-product kernels, and of attention kernels as if there were no window
    and each row were one sequence; other kernels are not counted.
  collectives: kind -> bytes that the device receives.
  memory_bytes: bytes read from and written to the device's main memory, with
    the padding of tiled layouts; without data that stays in a faster memory.
  cache_bytes: part of `memory_bytes` for caches of ragged attention, counted in
    full. The kernel reads only the pages that its rows need, a number that the
    program does not show.
  network_bytes: bytes that the device receives from other hosts, over its own
    network link.
  """

  flops: float
  collectives: dict[str, float]
  memory_bytes: float
  cache_bytes: float
  network_bytes: float = 0.0

  @property
  def collective_bytes(self) -> float:
    return sum(self.collectives.values())


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  constant: int | None
  parameter: int | None
  is_root: bool

  def called(self, *keys: str) -> list[str]:
    """Returns the computations named by attributes such as `body=%name`."""
    out = []
    for key in keys:
      match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
      if match:
        out += re.findall(r"[\w.\-]+", match[1])
    return out


_Computation = dict[str, _Instruction]


def costs(text: str, host_size: int = 0, trips: int = 1) -> Costs:
  """Returns the costs of a module, as `compiled.as_text()` prints it.

  A conditional is counted as its most expensive branch.

  Args:
    host_size: devices of a host, if hosts are joined by a network; else 0.
    trips: iterations of a loop whose number is decided at run time; such a loop
      nested in another one counts as one iteration.
  """
  computations, entry = _parse(text)
  flops, collectives = _walk(computations, entry, set(), _received, trips)
  moved = _moved(computations, entry, trips)
  network = {}
  if host_size:
    between_hosts = functools.partial(_between_hosts, host_size=host_size)
    _, network = _walk(computations, entry, set(), between_hosts, trips)
  return Costs(
      flops,
      dict(sorted(collectives.items())),
      moved,
      moved - _moved(_without_caches(computations), entry, trips),
      sum(network.values()),
  )


def kernels(text: str) -> dict[str, int]:
  """Returns how often a module's text calls each kernel from outside XLA.

  Library kernels are named by the call's target, Pallas kernels on TPU by their
  own name.
  """
  counts = collections.Counter()
  for name, target in _KERNEL.findall(text):
    if target == "tpu_custom_call":
      target = re.sub(r"[.\d]+$", "", name)
    counts[target.removeprefix("__")] += 1
  return dict(sorted(counts.items()))


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
  """Returns the computations by name, and the name of the entry."""
  computations: dict[str, _Computation] = {}
  entry, current = "", None
  for line in text.splitlines():
    if current is None:
      if header := _COMPUTATION.match(line):
        current = computations.setdefault(header[2], {})
        entry = header[2] if header[1] else entry
    elif _END.match(line):
      current = None
    elif match := _INSTRUCTION.match(line):
      instruction = _parse_instruction(match[2], match[3], bool(match[1]))
      if instruction is not None:
        current[instruction.name] = instruction
  if not entry:
    raise ValueError("no ENTRY computation: not the text of an HLO module")
  return computations, entry


def _closing(text: str, start: int) -> int:
  """Returns the index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i
  raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _parse_instruction(
    name: str, text: str, is_root: bool
) -> _Instruction | None:
  end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
  opcode = re.match(r"\s*([\w\-]+)\(", text[end:])
  if opcode is None:
    return None
  start = end + opcode.end() - 1
  close = _closing(text, start)
  inside = text[start + 1 : close]
  number = int(inside) if re.fullmatch(r"-?\d+", inside) else None
  return _Instruction(
      name=name,
      type=text[:end],
      opcode=opcode[1],
      operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
      attributes=text[close + 1 :],
      constant=number if opcode[1] == "constant" else None,
      parameter=number if opcode[1] == "parameter" else None,
      is_root=is_root,
  )


def _num_bytes(type_text: str) -> float:
  return sum(
      _BYTES.get(dtype, 1) * math.prod(shape)
      for dtype, shape in _arrays(type_text)
  )


def _stored_bytes(type_text: str) -> float:
  """Returns the bytes of arrays in main memory, padded to their tiles."""
  total = 0.0
  for dtype, shape, layout in _TILED.findall(type_text):
    if "S(" in layout:
      continue
    sizes = [int(n) for n in shape.split(",") if n]
    order, _, tiling = layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", tiling)
    if tile and order:
      axes = [int(axis) for axis in order.split(",")]
      edges = [int(n) for n in tile[1].split(",")][::-1]
      for axis, edge in zip(axes, edges):
        sizes[axis] = -(-sizes[axis] // edge) * edge
    total += _BYTES.get(dtype, 1) * math.prod(sizes)
  return total


def _arrays(type_text: str) -> Iterator[tuple[str, list[int]]]:
  """Yields dtype and shape of each array of a type."""
  for dtype, shape in _ARRAY.findall(type_text):
    yield dtype, [int(n) for n in shape.split(",") if n]


def _shape(computation: _Computation, name: str) -> list[int]:
  return next(_arrays(computation[name].type))[1]


def _walk(
    computations: dict[str, _Computation],
    name: str,
    channels: set[str],
    received: Callable[[_Computation, _Instruction, str], float],
    trips: int,
) -> tuple[float, dict[str, float]]:
  """Returns FLOPs and collective bytes of one run of a computation.

  Args:
    computations: all computations of the module, by name.
    channels: ids already counted in this run; an asynchronous collective
      appears in several fusions under one channel.
    received: (computation, collective, kind) -> bytes.
    trips: argument of `costs`.
  """
  flops, collectives = 0.0, {}
  computation = computations[name]

  def add(run: tuple[float, dict[str, float]], times: int = 1) -> None:
    nonlocal flops
    flops += times * run[0]
    for kind, size in run[1].items():
      collectives[kind] = collectives.get(kind, 0.0) + times * size

  for op in computation.values():
    kind = op.opcode.removesuffix("-start")
    if kind == "all-reduce" and name.startswith(_REDUCE_SCATTER):
      kind = "reduce-scatter"
    if op.opcode == "while":
      # Transfers begun before the loop may go on in it; others are new traffic
      # in each iteration.
      times, inner = _num_trips(computations, op, trips)
      for called in op.called("condition", "body"):
        run = _walk(computations, called, set(channels), received, inner)
        add(run, times)
    elif op.opcode == "conditional":
      branches = op.called(
          "branch_computations", "true_computation", "false_computation"
      )
      runs = [
          _walk(computations, b, set(channels), received, trips)
          for b in branches
      ]
      add(max(runs, key=lambda f: (sum(f[1].values()), f[0])))
    elif op.opcode in ("fusion", "call", "async-start"):
      for called in op.called("calls", "to_apply"):
        add(_walk(computations, called, channels, received, trips))
    elif op.opcode in ("dot", "convolution"):
      add((_product_flops(computation, op), {}))
    elif op.opcode == "custom-call":
      add((_kernel_flops(computation, op), {}))
    elif kind in _COLLECTIVES:
      channel = re.search(r"channel_id=(\d+)", op.attributes)
      if channel is None or channel[1] not in channels:
        channels |= {channel[1]} if channel else set()
        add((0.0, {kind: received(computation, op, kind)}))
  return flops, collectives


def _moved(
    computations: dict[str, _Computation], name: str, trips: int
) -> float:
  """Returns the bytes of main memory that one run of a computation moves."""
  total = 0.0
  for op in computations[name].values():
    times, inner = 1, trips
    if op.opcode == "while":
      times, inner = _num_trips(computations, op, trips)
    moved = [_moved(computations, called, inner) for called in _runs(op)]
    if op.opcode == "while":
      total += times * sum(moved)
    elif op.opcode == "conditional":
      total += max(moved)
    else:
      total += sum(moved) or _moved_by(computations, computations[name], op)
  return total


def _without_caches(
    computations: dict[str, _Computation],
) -> dict[str, _Computation]:
  """Returns a module without the cache operands of ragged attention."""

  def change(computation: _Computation, op: _Instruction) -> _Instruction:
    is_kernel = op.opcode == "custom-call" and _RAGGED.search(
        op.name + op.attributes
    )
    if not is_kernel:
      return op
    is_float = lambda name: computation[name].type.startswith(("bf16", "f"))
    caches = list(filter(is_float, op.operands))[1:]
    operands = tuple(name for name in op.operands if name not in caches)
    return dataclasses.replace(op, operands=operands)

  return {
      name: {key: change(computation, op) for key, op in computation.items()}
      for name, computation in computations.items()
  }


def _runs(op: _Instruction) -> list[str]:
  """Returns the computations that an instruction runs one by one."""
  keys = {
      "while": ("condition", "body"),
      "conditional": (
          "branch_computations",
          "true_computation",
          "false_computation",
      ),
      "call": ("to_apply",),
      "async-start": ("calls",),
  }.get(op.opcode, ())
  return op.called(*keys)


def _moved_by(
    computations: dict[str, _Computation],
    computation: _Computation,
    op: _Instruction,
) -> float:
  """Returns the bytes of main memory that an instruction reads and writes."""
  if op.opcode in _FREE or op.opcode.endswith("-done") or _runs(op):
    return 0.0
  operands = [computation[o].type for o in op.operands if o in computation]
  if op.opcode == "fusion":
    return _moved_by_fusion(computations, operands, op)
  if op.opcode in _SLICES:
    return 2 * _stored_bytes(op.type)
  if op.opcode in _UPDATES:
    return 2 * _stored_bytes(operands[_UPDATES[op.opcode]])
  if _LIBRARY.search(op.attributes):
    result = _WORKSPACE.sub("", op.type)
    return sum(map(_stored_bytes, operands)) + _stored_bytes(result)
  if op.opcode.startswith("all-reduce") or not op.opcode.endswith("-start"):
    return sum(map(_stored_bytes, operands)) + _stored_bytes(op.type)
  if op.opcode.removesuffix("-start") in _COLLECTIVES:
    # The type lists the operands, then the results.
    return _stored_bytes(op.type)
  arrays = [match[0] for match in _TILED.finditer(op.type)]
  if op.opcode.removesuffix("-start") in _SLICES:
    # The type lists the operand, then the result.
    read = _in_memory_of(arrays[1].replace("S(1)", ""), operands[0])
    return _stored_bytes(read) + _stored_bytes(arrays[1])
  # The type of a copy lists its target, its source and a context.
  return sum(map(_stored_bytes, operands)) + _stored_bytes(arrays[0])


def _parameters(
    computations: dict[str, _Computation], fusion: _Instruction
) -> tuple[_Computation, dict[int, str]]:
  """Returns what a fusion calls, and the names of its parameters by number."""
  inside = computations[fusion.called("calls")[0]]
  numbered = {op.parameter: op.name for op in inside.values()}
  numbered.pop(None, None)
  return inside, numbered


def _moved_by_fusion(
    computations: dict[str, _Computation],
    operands: list[str],
    fusion: _Instruction,
) -> float:
  """Returns the bytes that a fusion moves; it slices and updates in place."""

  def uses(
      inside: _Computation, name: str
  ) -> Iterator[tuple[_Computation, str, _Instruction]]:
    """Yields the instructions that use a value, also in nested fusions."""
    for op in inside.values():
      for number, operand in enumerate(op.operands):
        if operand != name:
          continue
        if op.opcode == "bitcast":
          yield from uses(inside, op.name)
        elif op.opcode == "fusion":
          nested, parameters = _parameters(computations, op)
          yield from uses(nested, parameters[number])
        else:
          yield inside, name, op

  total, updated = 0.0, 0.0
  inside, parameters = _parameters(computations, fusion)
  for number, parameter in parameters.items():
    operand, read = operands[number], 0.0
    for within, name, op in uses(inside, parameter):
      if op.opcode in _SLICES and op.operands[0] == name:
        # The slice lies in the operand's memory and takes no memory itself.
        read += _stored_bytes(_in_memory_of(op.type, operand))
      elif op.opcode in _UPDATES and op.operands[0] == name:
        update = within[op.operands[_UPDATES[op.opcode]]].type
        read += _stored_bytes(_in_memory_of(update, operand))
        updated += _stored_bytes(operand)
      else:
        read = _stored_bytes(operand)
        break
    total += min(read, _stored_bytes(operand))
  result_bytes = _stored_bytes(fusion.type)
  return total + max(0.0, result_bytes - updated)


def _in_memory_of(type_text: str, other: str) -> str:
  return type_text if "S(" not in other else ""


def _num_trips(
    computations: dict[str, _Computation], loop: _Instruction, trips: int
) -> tuple[int, int]:
  """Returns a loop's number of iterations, and the `trips` of nested loops.

  A loop whose number is decided at run time counts `trips` iterations.
  """
  if match := _TRIPS.search(loop.attributes):
    return int(match[1]), trips
  names = loop.called("condition", "body")
  condition, body = (computations[name] for name in names)
  bound, compare = _scalar(computations, condition, _root(condition).name)
  if compare is None or compare.opcode != "compare" or bound is None:
    return trips, 1
  # Counters begin at 0; an unrolled body adds more than 1.
  counter = condition.get(compare.operands[0])
  index = counter and re.search(r"\bindex=(\d+)", counter.attributes)
  if not index:
    return bound, trips
  step, _ = _scalar(computations, body, _root(body).operands[int(index[1])])
  return -(-bound // (step or 1)), trips


def _root(computation: _Computation) -> _Instruction:
  (root,) = (op for op in computation.values() if op.is_root)
  return root


def _scalar(
    computations: dict[str, _Computation],
    computation: _Computation,
    name: str,
) -> tuple[int | None, _Instruction | None]:
  """Returns the constant of a counter's update or test, and the instruction.

  The instruction may be in a fusion, with the constant outside or inside.
  """
  op = computation[name]
  constants = [
      computation[operand].constant
      for operand in op.operands
      if operand in computation and computation[operand].constant is not None
  ]
  if op.opcode == "fusion":
    called = computations[op.called("calls")[0]]
    inside = [x.constant for x in called.values() if x.constant is not None]
    # The fusion's operands are the counter and the constant, in some order.
    root = _root(called)
    counter = [o for o in op.operands if computation[o].constant is None]
    constants += inside
    op = dataclasses.replace(root, operands=tuple(counter))
  return (max(constants) if constants else None), op


def _received(computation: _Computation, op: _Instruction, kind: str) -> float:
  """Returns the bytes that a device receives in a collective over a ring."""
  operands = op.operands
  if kind == "collective-permute":
    # Further operands are output buffers.
    operands = operands[:1]
  size = sum(_num_bytes(computation[name].type) for name in operands)
  parts = _groups(op.attributes).shape[1]
  remote_share = (parts - 1) / parts
  return {
      "all-gather": size * (parts - 1),
      "all-reduce": 2 * size * remote_share,
      "reduce-scatter": size * remote_share,
      "all-to-all": size * remote_share,
      "ragged-all-to-all": size * remote_share,
  }.get(kind, size)


def _between_hosts(
    computation: _Computation, op: _Instruction, kind: str, host_size: int
) -> float:
  """Returns the bytes that a device's network link receives in a collective.

  A ring enters each host once, and its bytes are spread over the links of the
  group's devices on that host.
  """
  received = _received(computation, op, kind)
  if kind == "collective-permute":
    pairs = re.findall(r"\{(\d+),(\d+)\}", op.attributes)
    crosses = any(int(a) // host_size != int(b) // host_size for a, b in pairs)
    return received * crosses
  worst = 0.0
  for group in _groups(op.attributes):
    counts = np.unique(group // host_size, return_counts=True)[1]
    if len(counts) > 1:
      least = int(counts.min())
      if kind.endswith("all-to-all"):
        share = (len(group) - least) / (len(group) - 1)
      else:
        share = 1 / least
      worst = max(worst, share * received)
  return worst


def _groups(attributes: str) -> np.ndarray:
  """Returns the devices of each group of a collective, [groups, size].

  Devices are numbered as in the mesh, hosts one after another.
  """
  # Axes of a mesh: mesh['a'=2,'b'=4] {'b'}, with ':(1)2' for part of an axis.
  if match := re.search(
      r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes
  ):
    sizes = {a: int(n) for a, n in re.findall(r"'(\w+)'=(\d+)", match[1])}
    parts = {
        axis: (int(before or 1), int(size or sizes[axis]))
        for axis, before, size in re.findall(
            r"'(\w+)'(?::\((\d+)\)(\d+))?", match[2]
        )
    }
    shape = []
    for axis, size in sizes.items():
      before, inside = parts.get(axis, (size, 1))
      shape += [before, inside, size // (before * inside)]
    devices = np.arange(math.prod(shape)).reshape(shape)
    inside = range(1, len(shape), 3)
    rest = [i for i in range(len(shape)) if i not in inside]
    size = math.prod(shape[i] for i in inside)
    return devices.transpose(*rest, *inside).reshape(-1, size)
  # Groups x size, as [4,2]<=[8] or [4,2]<=[2,4]T(1,0).
  if match := re.search(
      r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?",
      attributes,
  ):
    count, size = int(match[1]), int(match[2])
    shape = [int(n) for n in match[3].split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    if match[4]:
      devices = devices.transpose([int(n) for n in match[4].split(",")])
    return devices.reshape(count, size)
  if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
    groups = re.findall(r"\{([\d,]+)\}", match[1])
    return np.array([[int(n) for n in group.split(",")] for group in groups])
  return np.arange(2)[None]


def _product_flops(computation: _Computation, op: _Instruction) -> float:
  """Returns the FLOPs of a dot, or of a convolution as XLA counts it."""
  lhs, rhs = (_shape(computation, name) for name in op.operands[:2])
  out = next(_arrays(op.type))[1]
  if op.opcode == "dot":
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
    axes = [int(n) for n in match[1].split(",") if n] if match else []
    return 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in axes)
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
  count = lambda key: int(
      (re.search(rf"\b{key}=(\d+)", op.attributes) or [0, 1])[1]
  )
  lhs_of, rhs_of, out_of = (
      dict(zip(label, shape))
      for label, shape in zip(labels.groups(), (lhs, rhs, out))
  )
  window = re.search(r"window=\{([^}]*)\}", op.attributes)
  fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1] if window else ""))
  num_axes = len(out) - 2
  each = lambda key, default: fields.get(
      key, "x".join([default] * num_axes)
  ).split("x")
  strides, pads = each("stride", "1"), each("pad", "0_0")
  lhs_dilates, rhs_dilates = each("lhs_dilate", "1"), each("rhs_dilate", "1")
  positions = math.prod(
      _num_positions(
          lhs_of[str(axis)],
          rhs_of[str(axis)],
          out_of[str(axis)],
          stride=int(strides[axis]),
          pad=int(pads[axis].split("_")[0]),
          lhs_dilate=int(lhs_dilates[axis]),
          rhs_dilate=int(rhs_dilates[axis]),
      )
      for axis in range(num_axes)
  )
  features = lhs_of["f"] // count("feature_group_count") * rhs_of["o"]
  batch = lhs_of["b"] // count("batch_group_count")
  return 2.0 * positions * features * batch


def _kernel_flops(computation: _Computation, op: _Instruction) -> float:
  """Returns the FLOPs of a kernel that `Costs` counts; 0 for any other.

  Attention queries are the last Q of S tokens, and each sees the tokens up to
  its own.
  """
  if _GROUPED.search(op.name + op.attributes):
    rhs, out = _shape(computation, op.operands[-1]), next(_arrays(op.type))[1]
    rows, matrices = (out, rhs) if len(rhs) == 3 else (rhs, out)
    return 2.0 * rows[0] * math.prod(matrices[1:])
  splash, library = _SPLASH.search(op.name), _LIBRARY.search(op.attributes)
  if library and library[1] == "cublas":
    lhs, out = _shape(computation, op.operands[0]), next(_arrays(op.type))[1]
    axes = _CONTRACTED.search(op.attributes)[1].split('","')
    return 2.0 * math.prod(out) * math.prod(lhs[int(axis)] for axis in axes)
  rows = _ROWS.search(op.name + op.attributes)
  if not splash and not library and not rows:
    return 0.0
  shapes = [
      shape
      for name in op.operands
      for dtype, shape in _arrays(computation[name].type)
      if dtype in ("bf16", "f16", "f32") and len(shape) > 2
  ]
  if splash:
    products = _SPLASH_PRODUCTS[splash[1]]
    (*sequences, Q, Dh), S = shapes[0], shapes[1][-2]
  else:
    products = _ROWS_PRODUCTS[rows[1]] if rows else _CUDNN_PRODUCTS[library[1]]
    (B, Q, H, Dh), S = shapes[0], shapes[1][1]
    sequences = B, H
  pairs = math.prod(sequences) * (Q * (S - Q) + Q * (Q + 1) / 2)
  return 2.0 * products * pairs * Dh


def _num_positions(
    size: int,
    kernel: int,
    out: int,
    *,
    stride: int,
    pad: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
  """Returns the pairs of output and kernel entry that meet an input entry."""
  starts = np.arange(out)[:, None] * stride - pad
  at = starts + np.arange(kernel)[None] * rhs_dilate
  inside = (at >= 0) & (at <= (size - 1) * lhs_dilate)
  return int((inside & (at % lhs_dilate == 0)).sum())
