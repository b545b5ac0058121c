# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads mutated messages and files of each format.

    python -m tests.chaos fuzz FORMAT[,FORMAT …]|all COUNT [SEED]

Mutations are seeded, by bytes and by structure. Of the formats with a digest,
nothing is accepted that was not written; half of the mutated wire messages are
signed with the run's own key, as those of another version of the package would
be. A reader raises its documented error and no other, and allocates no more
than a multiple of what it reads. The first fault ends the program; its input
is kept. A sound format of 10,000 inputs and more leaves a row in
`runs.jsonl.gz`, of which `faults` makes a table.

| format | input | reader |
|---|---|---|
| `wire` | a block of completions | `messages.decode`, `unpack_groups` |
| `journal` | a segment, and the log of acknowledgements | `Journal`, `AckLog` |
| `checkpoint` | the host state | `host_state.read` |
| `config` | config.json of a run, overrides | `load_config`, `validate` |
| `jsonl` | rows of a data set, logs | `read_rows`, `read_jsonl` |
| `hf` | files of a model's folder | `hf.load`, `tokenizer.load` |
| `params` | a published version | `manifest.read_version` |
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import io
import json
import pathlib
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from typing import Any
import zipfile

import jax
import ml_collections
import numpy as np

from benchmarks import results
from tba_jax import types
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.learning import host_state
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.tasks import rows
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tba_jax.transport.params import manifest
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import store_chunks
from tba_jax.transport.params import version as version_lib
from tests.chaos import chaos
from tests.chaos import mutations

_SECRET = bytes(range(32))
_TELL_EVERY_S = 10.0
# Results of so many inputs are kept.
_KEPT_COUNT = 10_000
# Memory that a reader may allocate, per byte of its input, and besides.
_TIMES, _BYTES = 30, 4 << 20


class Accepted(Exception):
  """A reader accepted what was not written."""


@dataclasses.dataclass(frozen=True)
class Format:
  """How a format is fuzzed.

  mutate: rng -> a mutated input.
  read: function that reads an input; raises `Accepted`.
  allowed: documented errors.
  """

  mutate: Callable[[random.Random], bytes]
  read: Callable[[bytes], None]
  allowed: type[Exception] | tuple[type[Exception], ...] = ValueError


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns what was refused and accepted by format.

  Args:
    config: not read.
    operands: formats, number of mutated inputs of each, seed.

  Raises:
    RuntimeError: a reader failed; names the file with its input.
    ValueError: an operand is wrong.
  """
  del config
  names, count, seed = [*operands, *("all", "10000", "0")[len(operands) :]][:3]
  names = list(FORMATS) if names == "all" else names.split(",")
  if unknown := sorted(set(names) - set(FORMATS)):
    raise ValueError(
        f"formats {unknown}: must be one of {', '.join(FORMATS)}, all"
    )
  out = {}
  for name in names:
    with tempfile.TemporaryDirectory(prefix="tba_jax_fuzz_") as folder:
      made = FORMATS[name](pathlib.Path(folder))
      out[name] = _fuzz(name, made, int(count), int(seed))
    print(f"{name}: {json.dumps(out[name])}", file=sys.stderr, flush=True)
    if int(count) >= _KEPT_COUNT:
      kept = {"format": name, "count": int(count), "seed": int(seed)}
      results.keep(chaos.FOLDER, kept | out[name], chaos.KEY)
  return {"count": int(count), "seed": int(seed), "formats": out}


def _fuzz(name: str, made: Format, count: int, seed: int) -> dict[str, Any]:
  outcomes = collections.Counter()
  most, began = 0, time.monotonic()
  told = began
  rng = random.Random(f"{seed} {name}")
  tracemalloc.start()
  try:
    for i in range(count):
      data = made.mutate(rng)
      used = _read(name, made, data, f"{i} of seed {seed}", outcomes)
      if used > _TIMES * len(data) + _BYTES:
        # What is imported at its first use is not its input's.
        used = _read(name, made, data, f"{i} of seed {seed}", None)
        if used > _TIMES * len(data) + _BYTES:
          raise RuntimeError(
              f"{name}, input {i} of seed {seed}, kept as {_keep(name, data)}:"
              f" {used} bytes were allocated for {len(data)}"
          )
      most = max(most, used)
      if time.monotonic() > told + _TELL_EVERY_S:
        told = time.monotonic()
        print(f"{name}: {i + 1} of {count}", file=sys.stderr, flush=True)
  finally:
    tracemalloc.stop()
  return {
      "seconds": round(time.monotonic() - began, 1),
      "most_bytes_allocated": most,
      **dict(sorted(outcomes.items())),
  }


def _read(
    name: str,
    made: Format,
    data: bytes,
    which: str,
    outcomes: collections.Counter[str] | None,
) -> int:
  """Reads an input, counts the outcome, and returns the bytes allocated."""
  tracemalloc.reset_peak()
  before = tracemalloc.get_traced_memory()[0]
  outcome = "accepted"
  try:
    made.read(data)
  except made.allowed as error:
    outcome = f"refused ({getattr(error, 'reason', type(error).__name__)})"
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    raise RuntimeError(
        f"{name}, input {which}, kept as {_keep(name, data)}:"
        f" {type(error).__name__}: {error}"
    ) from error
  if outcomes is not None:
    outcomes[outcome] += 1
  return tracemalloc.get_traced_memory()[1] - before


def _keep(name: str, data: bytes) -> str:
  with tempfile.NamedTemporaryFile(
      prefix=f"fuzz_{name}_", delete=False
  ) as file:
    file.write(data)
  return file.name


def _groups(rng: np.random.Generator) -> list[types.Group]:
  """Returns three groups of two completions."""
  return [
      types.Group(
          prompt_id=i,
          visit=0,
          position=i,
          epoch=1,
          prompt_tokens=rng.integers(3, 9, 4).astype(np.int32),
          completion_tokens=rng.integers(3, 9, (2, 5)).astype(np.int32),
          completion_lengths=np.array([5, 3], np.int32),
          sampled_mask=np.arange(5) < np.array([[5], [3]]),
          stopped=np.array([True, False]),
          behavior_logprobs=rng.normal(size=(2, 5)).astype(np.float32),
          rewards=rng.normal(size=2).astype(np.float32),
          versions=np.array([1, 2], np.int32),
      )
      for i in range(3)
  ]


_RUN = wire.RunIdentity("run", _SECRET)


def _block() -> tuple[str, bytes]:
  """Returns key and message of a block."""
  header, arrays = messages.pack_groups(_groups(np.random.default_rng(0)))
  units = {"prompts": 3, "completions": 6, "tokens": 24}
  key = messages.block_key("s000", 7)
  header |= {"sid": "s000", "sequence": 7, "totals": units, "amount": units}
  return key, messages.encode(_RUN, key, header, arrays)


def _seal(body: bytes) -> bytes:
  """Returns a message with any body, signed."""
  prefix = struct.pack("<4sHHQ", wire.MAGIC, wire.SCHEMA, 0, len(body))
  # The module's own digest: a message signed otherwise is refused for it.
  return prefix + wire.message_digest(prefix, body, _SECRET) + body  # pylint: disable=protected-access


def _body_mutant(rng: random.Random, body: bytes) -> bytes:
  """Returns a mutated safetensors part: of its table, header or bytes."""
  (size,) = struct.unpack_from("<Q", body)
  table, data = json.loads(body[8 : 8 + size]), body[8 + size :]
  kind = rng.randrange(3)
  if kind == 0:
    return mutations.of_bytes(rng, body)
  if kind == 1:
    text = mutations.json_text(rng, table)
  else:
    inner = json.loads(table["__metadata__"]["header"])
    table["__metadata__"]["header"] = mutations.json_text(rng, inner).decode()
    text = json.dumps(table).encode()
  return struct.pack("<Q", len(text)) + text + data


def _wire(folder: pathlib.Path) -> Format:
  del folder
  key, sent = _block()

  def mutate(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
      return b"\0" + mutations.of_bytes(rng, sent)
    return b"\1" + _seal(_body_mutant(rng, sent[48:]))

  def read(data: bytes) -> None:
    signed, data = data[0], data[1:]
    header, arrays = messages.decode(_RUN, key, data, "block")
    if not signed and data != sent:
      raise Accepted("forged")
    messages.unpack_groups(header, arrays)

  return Format(mutate, read)


def _journal(folder: pathlib.Path) -> Format:
  rng = random.Random(0)
  payloads = [rng.randbytes(rng.randrange(400)) for _ in range(8)]
  log = journal.Journal(
      folder / "sent", max_segment_bytes=1 << 20, on_event=lambda *_: None
  )
  log.append(payloads)
  log.close()
  acks = journal.AckLog(folder / "sent")
  for i in range(4):
    acks.add(f"s{i}", [i, 2 * i, 3 * i, 4 * i])
    acks.sync()
  marks = {tuple([sid, *mark]) for sid, mark in acks.marks.items()}
  (segment,) = (folder / "sent").glob("segment-*")
  sent = segment.read_bytes(), acks.path.read_bytes()
  place = folder / "read"
  place.mkdir()

  def mutate(rng: random.Random) -> bytes:
    which = rng.randrange(2)
    return bytes([which]) + mutations.of_bytes(rng, sent[which], sent)

  def read(data: bytes) -> None:
    which, data = data[0], data[1:]
    for path in place.iterdir():
      path.unlink()
    if which:
      (place / acks.path.name).write_bytes(data)
      read_log = journal.AckLog(place)
      result = {tuple([sid, *mark]) for sid, mark in read_log.marks.items()}
      if not result <= marks:
        raise Accepted(f"{result - marks} was not acknowledged")
      return
    (place / segment.name).write_bytes(data)
    opened = journal.Journal(
        place, max_segment_bytes=1 << 20, on_event=lambda *_: None
    )
    result = [payload for _, payload in opened.replay(0)]
    # What is appended to a damaged journal is read after it.
    opened.append([b"more"])
    again = [payload for _, payload in opened.replay(0)]
    opened.close()
    if again != [*result, b"more"]:
      raise Accepted("the journal is another after an append")
    rest = iter(payloads)
    if not all(payload in rest for payload in result):
      raise Accepted("a record that was not written, or in another order")

  return Format(mutate, read)


def _checkpoint(folder: pathlib.Path) -> Format:
  del folder
  rng = np.random.default_rng(0)
  state = {
      "step": 3,
      "rows": {"ids": np.arange(40), "rewards": rng.normal(size=40)},
      "rng": rng.bit_generator.state,
      "names": ["a", "b"],
      "scalar": np.float32(1.5),
  }
  out = io.BytesIO()
  host_state.write(out, host_state.pack(state))
  sent = out.getvalue()
  with zipfile.ZipFile(io.BytesIO(sent)) as archive:
    members = {name: archive.read(name) for name in archive.namelist()}

  def mutate(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
      return b"\0" + mutations.of_bytes(rng, sent)
    # A member with other content and a checksum that fits.
    changed = dict(members)
    name = rng.choice(list(changed))
    changed[name] = mutations.of_bytes(rng, changed[name])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
      for name, data in changed.items():
        archive.writestr(name, data)
    return b"\1" + out.getvalue()

  def read(data: bytes) -> None:
    result = host_state.read(io.BytesIO(data[1:]))
    if not data[0] and not _equal(result, state):
      raise Accepted("another state")

  return Format(mutate, read)


def _equal(a: Any, b: Any) -> bool:
  if isinstance(b, dict):
    return (
        isinstance(a, dict)
        and a.keys() == b.keys()
        and all(_equal(a[key], b[key]) for key in b)
    )
  if isinstance(b, np.ndarray | np.generic):
    return np.asarray(a).dtype == b.dtype and np.array_equal(a, b)
  return a == b


def _config(folder: pathlib.Path) -> Format:
  plain = settings.get_config()
  plain.task = ml_collections.ConfigDict({"name": "arithmetic"})
  run_directory.create(str(folder), plain)
  path = folder / "config.json"
  text = path.read_bytes()
  saved = json.loads(text)
  keys = [
      f"{section}.{key}" if isinstance(value, Mapping) else section
      for section, value in saved["config"].items()
      for key in (value if isinstance(value, Mapping) else (section,))
  ]
  values = (
      *("", "0", "-1", "1", "2", "0.5", "nan", "inf", "-inf", "1e400", "None"),
      *("True", "False", "[]", "{}", "()", "(1,)", "[1,2]", "'a'", "a", "a,b"),
      *("10**9", "9" * 30, "é", "\0", "/", "gs://a", "x:y", "lambda: 0"),
      *("__import__('os')", "(" * 300, "1 if 1 else 2"),
  )

  def mutate(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
      if rng.random() < 0.5:
        return b"\0" + mutations.of_bytes(rng, text)
      return b"\0" + mutations.json_text(rng, saved)
    pairs = []
    for _ in range(rng.randint(1, 3)):
      key, value = rng.choice(keys), rng.choice(values)
      if rng.random() < 0.1:
        key = mutations.of_bytes(rng, key.encode()).decode(errors="replace")
      pairs.append(f"{key}={value}")
    return b"\1" + "\n".join(pairs).encode()

  def read(data: bytes) -> None:
    if data[0]:
      # Line breaks of mutated keys make more overrides, which are as wrong.
      overrides = data[1:].decode().split("\n")
      changed = load.apply_overrides(
          plain.copy_and_resolve_references(), overrides
      )
    else:
      path.write_bytes(data[1:])
      changed = load.complete(run_directory.load_config(str(folder)))
    validate.validate(changed)
    if not data[0]:
      run_directory.open_run(str(folder), changed)

  return Format(mutate, read)


def _jsonl(folder: pathlib.Path) -> Format:
  records = [
      {"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "step": i,
       "more": {"a": [1, 2.5, None]}}
      for i in range(6)
  ]  # fmt: skip
  lines = [json.dumps(record).encode() for record in records]
  text = b"\n".join(lines) + b"\n"
  path = folder / "rows.jsonl"

  def mutate(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
      return mutations.of_bytes(rng, text)
    some = list(lines)
    i = rng.randrange(len(some))
    some[i] = mutations.json_text(rng, records[i])
    return b"\n".join(some)

  def read(data: bytes) -> None:
    path.write_bytes(data)
    for row in rows.read_rows("config.task.train", str(path)):
      if row.fields is not None:
        rows.text_of(row.fields, "prompt")
    # Logs are read with whole lines alone, whatever is in them.
    for record in jsonl.read_jsonl(path):
      if not isinstance(record, dict):
        raise Accepted("no object")

  return Format(mutate, read)


def _hf(folder: pathlib.Path) -> Format:
  words = [str(digit) for digit in range(10)]
  tokenizer = tokenizer_lib.word_level(words, r"\d")
  shape = hf.ModelConfig(
      family="llama", vocab_size=16, num_layers=1, width=8, num_heads=2,
      num_kv_heads=1, head_dim=4, mlp_width=8, rope_theta=10000.0,
      norm_epsilon=1e-5, tie_embeddings=False, max_positions=32,
      param_dtype="float32", compute_dtype="float32", pad_id=0, bos_id=None,
      eos_id=1,
  )  # fmt: skip
  model = transformer.make_model(shape, remat=settings.get_config().train.remat)
  params = model.init(jax.random.key(0))
  place = folder / "model"
  hf.save(place, shape, params, tokenizer)
  sent = {path.name: path.read_bytes() for path in place.iterdir()}
  names = sorted(sent)
  others = list(sent.values())

  def mutate(rng: random.Random) -> bytes:
    i = rng.randrange(len(names))
    data = sent[names[i]]
    if names[i].endswith(".json") and rng.random() < 0.7:
      return bytes([i]) + mutations.json_text(rng, json.loads(data))
    if names[i].endswith(".safetensors") and rng.random() < 0.7:
      (size,) = struct.unpack_from("<Q", data)
      text = mutations.json_text(rng, json.loads(data[8 : 8 + size]))
      return bytes([i]) + struct.pack("<Q", len(text)) + text + data[8 + size :]
    return bytes([i]) + mutations.of_bytes(rng, data, others)

  def read(data: bytes) -> None:
    name = names[data[0]]
    (place / name).write_bytes(data[1:])
    try:
      hf.load(place)
      text = tokenizer_lib.load(place)
      text.encode("12")
    finally:
      (place / name).write_bytes(sent[name])

  return Format(mutate, read)


class _Map(byte_store.Transport):
  """A store in a dictionary."""

  generation = 1

  def __init__(self):
    self.data: dict[str, bytes] = {}

  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    self.data[key] = bytes(value)
    return True

  def get(self, key: str) -> bytes | None:
    return self.data.get(key)

  def list(self, directory: str) -> dict[str, bytes]:
    return {k: v for k, v in self.data.items() if k.startswith(directory + "/")}

  def delete(self, key: str) -> None:
    self.data.pop(key, None)

  def reconnect(self, deadline_s: float | None = None) -> int:
    return 1

  def close(self) -> None:
    """Does nothing."""


def _params(folder: pathlib.Path) -> Format:
  run = run_directory.RunInfo(folder, "run", folder, _SECRET)
  leaves = {
      "a": np.arange(300, dtype=np.float32),
      "b": np.arange(12, dtype=np.int32).reshape(3, 4),
  }
  specs = version_lib.specs_of(leaves)
  carriers = {
      "store": store_chunks.StoreChunks(),
      "files": shared_files.SharedFiles(
          folder / "params", run_id=run.run_id, secret=_SECRET
      ),
  }
  stores, inputs = [], []
  for i, carrier in enumerate(carriers.values()):
    version, store = version_lib.Version(1, i), _Map()
    manifest.send_version(store, carrier.pack(version, leaves), run)
    stores.append((version, store))
    inputs += [(i, key) for key in store.data]
  file = next((folder / "params").glob("*.params/*"))
  sent_file = file.read_bytes()
  inputs.append((1, ""))

  def mutate(rng: random.Random) -> bytes:
    number = rng.randrange(len(inputs))
    which, key = inputs[number]
    sent = stores[which][1].data[key] if key else sent_file
    signed = key.startswith("p") and sent[:4] == wire.MAGIC
    if signed and rng.random() < 0.5:
      return bytes([number, 1]) + _seal(_body_mutant(rng, sent[48:]))
    return bytes([number, 0]) + mutations.of_bytes(rng, sent)

  def read(data: bytes) -> None:
    (which, key), signed, data = inputs[data[0]], data[1], data[2:]
    version, store = stores[which]
    before = dict(store.data)
    try:
      if key:
        store.data[key] = data
      else:
        file.write_bytes(data)
      pointer = manifest.read_pointer(store, run)
      result = manifest.read_version(
          store,
          version if signed else pointer,
          run,
          carriers=carriers,
          expected=specs,
      )
      if result is not None and not signed and not _equal(result, leaves):
        raise Accepted("other params")
      if result is not None and version_lib.specs_of(result) != specs:
        raise Accepted("params of another shape")
    finally:
      store.data = before
      if not key:
        file.write_bytes(sent_file)

  return Format(mutate, read, wire.WireError)


FORMATS: Mapping[str, Callable[[pathlib.Path], Format]] = {
    "wire": _wire,
    "journal": _journal,
    "checkpoint": _checkpoint,
    "config": _config,
    "jsonl": _jsonl,
    "hf": _hf,
    "params": _params,
}
