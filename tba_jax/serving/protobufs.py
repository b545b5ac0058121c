# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers of the Tinker API: passes, and results with tensors.

`_MESSAGES` lists fields with their public numbers. Passes with images, audio or
sparse tensors are refused.

Source: package `tinker` 0.38, tinker_public.proto and its request models.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool
from google.protobuf import message as message_lib
from google.protobuf import message_factory
import numpy as np

from tba_jax.serving import schemas

PROTO = "application/x-protobuf"

_FLOAT32, _INT64 = 1, 2  # Numbers of the enum DType.
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_NAMED = {"float32": _FLOAT32, "int64": _INT64}
_STOPPED, _TOO_LONG = 0, 1  # Numbers of the enum StopReason.

# Message -> (number, name, type); a capitalized type is a message, [] a list,
# {} a map from text, and ? marks an optional field.
_MESSAGES = {
    "Tensor": (
        (1, "dense", "bytes"), (2, "sparse_csr", "bytes"),
        (3, "dtype", "int32"), (4, "shape", "[int64]"),
    ),
    "EncodedText": ((1, "tokens", "bytes"),),
    "Chunk": (
        (1, "encoded_text", "EncodedText"), (2, "image", "bytes"),
        (3, "dmel", "bytes"),
    ),
    "Datum": (
        (1, "model_input", "[Chunk]"), (2, "loss_fn_inputs", "{Tensor}"),
        (3, "model_input_spans", "[bytes]"),
        (4, "loss_fn_input_spans", "[bytes]"),
    ),
    "LossConfigValue": ((1, "number", "double?"), (2, "text", "string?")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"), (2, "seq_id", "int32"),
        (3, "data", "[Datum]"), (4, "loss_fn", "string"),
        (5, "loss_fn_config", "{double}"), (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "{LossConfigValue}"),
    ),
    "BatchedTensor": (
        (1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"),
        (4, "trailing_shape", "[int64]"),
    ),
    "ArrayRecord": (
        (1, "type_tag", "string"), (2, "fields", "{BatchedTensor}"),
        (3, "num_datums", "int64"),
    ),
    "ForwardBackwardOutput": (
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "[ArrayRecord]"), (3, "metrics", "{double}"),
    ),
    "SampledSequence": (
        (1, "stop_reason", "int32"), (2, "tokens", "bytes"),
        (3, "logprobs", "bytes"),
    ),
    "SampleResponse": (
        (1, "sequences", "[SampledSequence]"), (2, "prompt_logprobs", "bytes"),
    ),
}  # fmt: skip


def _make_messages() -> dict[str, type[message_lib.Message]]:
  """Returns the class of each message of `_MESSAGES`."""
  field_type = descriptor_pb2.FieldDescriptorProto
  package = "tba_jax.serving"
  file = descriptor_pb2.FileDescriptorProto(
      name="tba_jax/serving.proto", package=package, syntax="proto3"
  )

  def add(
      message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str
  ) -> None:
    is_list, is_map = kind[0] == "[", kind[0] == "{"
    item = kind.strip("[]{}?")
    field = message.field.add(
        name=name,
        number=number,
        label=(
            field_type.LABEL_REPEATED
            if is_list or is_map
            else field_type.LABEL_OPTIONAL
        ),
    )
    if is_map:
      entry = "".join(word.title() for word in name.split("_")) + "Entry"
      nested = message.nested_type.add(name=entry)
      nested.options.map_entry = True
      add(nested, 1, "key", "string")
      add(nested, 2, "value", item)
      item = f"{message.name}.{entry}"
    if kind[-1] == "?":
      field.oneof_index = len(message.oneof_decl)
      field.proto3_optional = True
      message.oneof_decl.add(name=f"_{name}")
    if item[0].isupper():
      field.type = field_type.TYPE_MESSAGE
      field.type_name = f".{package}.{item}"
    else:
      field.type = getattr(field_type, f"TYPE_{item.upper()}")

  for name, fields in _MESSAGES.items():
    message = file.message_type.add(name=name)
    for row in fields:
      add(message, *row)
  # A separate pool: the official client may be loaded in the same process.
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return {
      name: message_factory.GetMessageClass(
          pool.FindMessageTypeByName(f"{package}.{name}")
      )
      for name in _MESSAGES
  }


_CLASSES = _make_messages()


@dataclasses.dataclass(frozen=True)
class Datum:
  """A sequence to learn from.

  tokens: [L] int32, input of the model.
  targets: [L] int32, token whose log-prob is taken at each position.
  inputs: further inputs of the loss by name: [L] float32, or [1].
  """

  tokens: np.ndarray
  targets: np.ndarray
  inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Pass:
  """A forward pass over sequences, with or without a backward one.

  forward_only: whether the gradient is left out.
  """

  loss: str
  config: Mapping[str, float | str]
  forward_only: bool
  data: Sequence[Datum]


@dataclasses.dataclass(frozen=True)
class PassResult:
  """Result of a pass.

  outputs: arrays [L] float32 of each sequence, by name.
  metrics: numbers by name, suffixed with how to combine parts: `loss:sum`.
  """

  outputs: Sequence[Mapping[str, np.ndarray]]
  metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class SampleResult:
  """Completions of a prompt.

  logprobs: their log-probs, nats.
  stopped: whether a stop token or stop string ended each.
  prompt_logprobs: [P] float32, nan where not computed; None if not requested.
  """

  tokens: Sequence[np.ndarray]
  logprobs: Sequence[np.ndarray]
  stopped: Sequence[bool]
  prompt_logprobs: np.ndarray | None


def pack_pass(body: schemas.Forward | schemas.ForwardBackward) -> bytes:
  """Returns the protocol buffer of a pass that came as JSON."""
  message = _CLASSES["ForwardBackwardRequest"](
      model_id=body.model_id,
      seq_id=body.seq_id,
      loss_fn=body.input.loss_fn,
      forward_only=isinstance(body, schemas.Forward),
  )
  for key, value in body.input.loss_fn_config.items():
    if isinstance(value, str):
      message.loss_fn_config_v2[key].text = value
    else:
      message.loss_fn_config_v2[key].number = value
  for datum in body.input.data:
    out = message.data.add()
    ids = datum.model_input.ids
    out.model_input.add().encoded_text.tokens = ids.tobytes()
    for key, tensor in datum.loss_fn_inputs.items():
      dtype = _NAMED[tensor.dtype]
      array = np.asarray(tensor.data, _DTYPES[dtype])
      tensor_out = out.loss_fn_inputs[key]
      tensor_out.dense, tensor_out.dtype = array.tobytes(), dtype
      tensor_out.shape.extend(tensor.shape or [array.size])
  # A retry to another process must have the same bytes.
  return message.SerializeToString(deterministic=True)


def address_of_pass(body: bytes) -> tuple[str, int, bool]:
  """Returns model id, sequence number and `forward_only` of a pass."""
  message = _parse("ForwardBackwardRequest", body)
  return message.model_id, message.seq_id, message.forward_only


def unpack_pass(body: bytes) -> Pass:
  """Returns the pass of a protocol buffer.

  Raises:
    ValueError: the body is no protocol buffer, or a sequence is malformed.
  """
  message = _parse("ForwardBackwardRequest", body)
  config: dict[str, float | str] = dict(message.loss_fn_config)
  for key, value in message.loss_fn_config_v2.items():
    config[key] = value.text if value.HasField("text") else value.number
  data = []
  for n, datum in enumerate(message.data):
    try:
      data.append(_datum(datum))
    except ValueError as error:
      raise ValueError(f"data[{n}]: {error}") from error
  if not data:
    raise ValueError("data is empty: must have one sequence or more")
  return Pass(message.loss_fn, config, message.forward_only, data)


def pack_pass_result(result: PassResult) -> bytes:
  """Returns the protocol buffer of a result."""
  fields = {}
  for name in result.outputs[0]:
    arrays = [np.asarray(out[name], "<f4") for out in result.outputs]
    offsets = np.cumsum([0, *(4 * array.size for array in arrays)])
    fields[name] = _CLASSES["BatchedTensor"](
        data=b"".join(array.tobytes() for array in arrays),
        offsets=offsets.astype("<i8").tobytes(),
        dtype=_FLOAT32,
    )
  record = _CLASSES["ArrayRecord"](
      type_tag="ArrayRecord", fields=fields, num_datums=len(result.outputs)
  )
  return _CLASSES["ForwardBackwardOutput"](
      loss_fn_output_type="ArrayRecord",
      loss_fn_outputs=[record],
      metrics=result.metrics,
  ).SerializeToString()


def pass_result_to_json(body: bytes) -> dict[str, Any]:
  """Returns the JSON form of a packed result."""
  message = _parse("ForwardBackwardOutput", body)
  outputs: list[dict[str, Any]] = []
  for record in message.loss_fn_outputs:
    outputs = [{} for _ in range(record.num_datums)]
    for name, tensor in record.fields.items():
      values = np.frombuffer(tensor.data, "<f4")
      ends = np.frombuffer(tensor.offsets, "<i8") // 4
      for out, start, end in zip(outputs, ends, ends[1:]):
        out[name] = {
            "data": _json_numbers(values[start:end]),
            "dtype": "float32",
            "shape": [int(end - start)],
        }
  return {
      "loss_fn_output_type": message.loss_fn_output_type,
      "loss_fn_outputs": outputs,
      "metrics": dict(
          zip(message.metrics, _json_numbers([*message.metrics.values()]))
      ),
  }


def _json_numbers(values: Sequence[float] | np.ndarray) -> list[float | str]:
  """Returns numbers for JSON; "NaN" and "±Infinity" as protocol buffers do."""
  array = np.asarray(values)
  out = array.tolist()
  if np.isfinite(array).all():
    return out
  names = {np.inf: "Infinity", -np.inf: "-Infinity"}
  return ["NaN" if x != x else names.get(x, x) for x in out]


def pack_sample_result(result: SampleResult) -> bytes:
  """Returns the protocol buffer of completions."""
  message = _CLASSES["SampleResponse"](
      sequences=[
          _CLASSES["SampledSequence"](
              stop_reason=_STOPPED if stopped else _TOO_LONG,
              tokens=np.asarray(tokens, "<i4").tobytes(),
              logprobs=np.asarray(logprobs, "<f4").tobytes(),
          )
          for tokens, logprobs, stopped in zip(
              result.tokens, result.logprobs, result.stopped, strict=True
          )
      ]
  )
  if result.prompt_logprobs is not None:
    message.prompt_logprobs = np.asarray(
        result.prompt_logprobs, "<f4"
    ).tobytes()
  return message.SerializeToString()


def sample_result_to_json(body: bytes) -> dict[str, Any]:
  """Returns the JSON form of packed completions."""
  message = _parse("SampleResponse", body)
  out: dict[str, Any] = {
      "type": "sample",
      "sequences": [
          {
              "stop_reason": (
                  "stop" if sequence.stop_reason == _STOPPED else "length"
              ),
              "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
              "logprobs": _json_numbers(
                  np.frombuffer(sequence.logprobs, "<f4")
              ),
          }
          for sequence in message.sequences
      ],
  }
  if message.prompt_logprobs:
    values = np.frombuffer(message.prompt_logprobs, "<f4")
    out["prompt_logprobs"] = [
        None if v == "NaN" else v for v in _json_numbers(values)
    ]
  return out


def _parse(name: str, body: bytes) -> Any:
  message = _CLASSES[name]()
  try:
    message.ParseFromString(body)
  except message_lib.DecodeError as error:
    raise ValueError(f"the body is not a {name}: {error}") from error
  return message


def _datum(message: Any) -> Datum:
  parts = []
  for chunk in message.model_input:
    if chunk.image or chunk.dmel:
      raise ValueError("a chunk is not encoded_text, the only kind served here")
    parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
  tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
  inputs = {
      name: _array(name, tensor)
      for name, tensor in message.loss_fn_inputs.items()
  }
  targets = inputs.pop("target_tokens", None)
  if targets is None:
    raise ValueError("loss_fn_inputs lacks target_tokens")
  if not len(tokens) or targets.shape != tokens.shape:
    raise ValueError(
        f"target_tokens of shape {targets.shape} for {len(tokens)} tokens of"
        " model_input: must be one for each, and at least one"
    )
  with np.errstate(invalid="ignore"):  # Non-finite numbers are refused below.
    ids = targets.astype(np.int32)
  if (ids != targets).any():
    raise ValueError("target_tokens: must be token ids, whole numbers")
  return Datum(tokens, ids, inputs)


def _array(name: str, tensor: Any) -> np.ndarray:
  dtype = _DTYPES.get(tensor.dtype)
  if dtype is None or tensor.sparse_csr:
    raise ValueError(f"{name}: must be dense float32 or int64")
  if len(tensor.dense) % dtype.itemsize:
    raise ValueError(
        f"{name}: {len(tensor.dense)} bytes are not a {dtype.name}"
    )
  array = np.frombuffer(tensor.dense, dtype)
  shape = tuple(tensor.shape) or (array.size,)
  if len(shape) > 1 or shape != array.shape:
    # A scalar is a tensor of one number.
    if shape == () or (array.size == 1 and np.prod(shape) == 1):
      return array.reshape(1)
    raise ValueError(f"{name} of shape {list(shape)}: must have one axis")
  return array
