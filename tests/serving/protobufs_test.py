# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers of the Tinker API: what is read, and what is refused."""

import json

from absl.testing import parameterized
import numpy as np

from tba_jax.serving import protobufs
from tests.support import serving_case

_DATA = [
    serving_case.datum([1, 2, 3], weights=[0.0, 1.0]),
    serving_case.datum([4, 5], weights=[1.0]),
]


def _changed(**changes):
  """Returns a pass whose first sequence has these fields."""
  return serving_case.pass_body([{**_DATA[0], **changes}])


class ProtobufsTest(parameterized.TestCase):

  def test_unpacks_pass(self):
    body = serving_case.pass_body(
        _DATA,
        "ppo",
        {"clip_low_threshold": 0.0, "x": "text", "y": ""},
        forward=True,
    )
    self.assertEqual(
        protobufs.address_of_pass(body), (serving_case.MODEL, 0, True)
    )
    result = protobufs.unpack_pass(body)
    self.assertEqual(result.loss, "ppo")
    self.assertEqual(
        result.config, {"clip_low_threshold": 0.0, "x": "text", "y": ""}
    )
    self.assertTrue(result.forward_only)
    first, second = result.data
    np.testing.assert_array_equal(first.tokens, [1, 2])
    np.testing.assert_array_equal(first.targets, [2, 3])
    np.testing.assert_array_equal(first.inputs["weights"], [0, 1])
    np.testing.assert_array_equal(second.tokens, [4])

  def test_result_keeps_bits_of_each_sequence(self):
    outputs = [
        {"logprobs": np.array([-0.1, -0.2], np.float32)},
        {"logprobs": np.array([-0.3], np.float32)},
    ]
    body = protobufs.pack_pass_result(
        protobufs.PassResult(outputs, {"loss:sum": 0.5})
    )
    result = protobufs.pass_result_to_json(body)
    self.assertEqual(result["metrics"], {"loss:sum": 0.5})
    for expected, out in zip(outputs, result["loss_fn_outputs"], strict=True):
      self.assertEqual(out["logprobs"]["data"], expected["logprobs"].tolist())

  def test_completions_keep_their_ids_and_gaps(self):
    body = protobufs.pack_sample_result(
        protobufs.SampleResult(
            [np.array([7, 8], np.int32), np.array([9], np.int32)],
            [np.array([-1.0, -2.0]), np.array([-3.0])],
            [True, False],
            np.array([np.nan, -0.5], np.float32),
        )
    )
    result = protobufs.sample_result_to_json(body)
    self.assertEqual(result["prompt_logprobs"], [None, -0.5])
    self.assertEqual(
        [(s["tokens"], s["logprobs"], s["stop_reason"])
         for s in result["sequences"]],
        [([7, 8], [-1.0, -2.0], "stop"), ([9], [-3.0], "length")],
    )  # fmt: skip

  @parameterized.parameters(
      (
          dict(model_input={"chunks": [{"type": "image"}]}),
          "must be 'encoded_text'",
      ),
      (dict(model_input={"chunks": []}), "for 0 tokens"),
      (dict(loss_fn_inputs={}), "lacks target_tokens"),
      (
          dict(loss_fn_inputs=serving_case.datum([1, 2])["loss_fn_inputs"]),
          r"shape \(1,\) for 2 tokens",
      ),
      (
          dict(
              loss_fn_inputs={
                  "target_tokens": {
                      "data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]
                  }
              }
          ),
          "must have one axis",
      ),
      *(
          (
              dict(
                  loss_fn_inputs={
                      "target_tokens": {"data": [1, id], "dtype": dtype}
                  }
              ),
              message,
          )
          for id, dtype, message in (
              (2**32 + 4, "int64", "target_tokens: must be token ids"),
              (4.5, "float32", "target_tokens: must be token ids"),
              (4.5, "int64", "must be a valid integer"),
              (2**70, "int64", "must be less than"),
              (1e39, "float32", "must be less than"),
          )
      ),
  )  # fmt: skip
  def test_refuses_malformed_sequence_and_names_it(self, changes, message):
    with self.assertRaisesRegex(ValueError, rf"data\[0\].*{message}"):
      protobufs.unpack_pass(_changed(**changes))

  def test_refuses_non_message(self):
    for read in (protobufs.unpack_pass, protobufs.address_of_pass):
      with self.assertRaisesRegex(ValueError, "not a ForwardBackwardRequest"):
        read(b"\xff\xff")
    with self.assertRaisesRegex(ValueError, "data is empty"):
      protobufs.unpack_pass(serving_case.pass_body([]))

  def test_repeated_json_pass_has_same_bytes(self):
    """In whatever order maps have their keys."""
    names = [f"name_{n}" for n in range(20)]
    bodies = []
    for order in (names, names[::-1]):
      data = [serving_case.datum([1, 2], **{name: [1.0] for name in order})]
      config = {name: 1.0 for name in order}
      bodies.append(serving_case.pass_body(data, "ppo", config))
    self.assertEqual(*bodies)

  def test_nonfinite_results_are_json(self):
    values = np.array([np.nan, -np.inf, np.inf, 1.0], np.float32)
    result = protobufs.pass_result_to_json(
        protobufs.pack_pass_result(
            protobufs.PassResult([{"logprobs": values}], {"loss:sum": np.nan})
        )
    )
    json.dumps(result, allow_nan=False)
    self.assertEqual(result["metrics"], {"loss:sum": "NaN"})
    self.assertEqual(
        result["loss_fn_outputs"][0]["logprobs"]["data"],
        ["NaN", "-Infinity", "Infinity", 1.0],
    )
