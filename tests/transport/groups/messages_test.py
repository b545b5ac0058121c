# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of packing: groups survive the wire; malformed blocks do not."""

import dataclasses
import functools

from absl.testing import parameterized
import numpy as np

from tba_jax import types
from tba_jax.transport import wire
from tba_jax.transport.groups import messages

SECRET = b"k" * 32
_ROUTES = {"routes": (2, 2), "prompt_routes": (2, 2)}


def make_group(position=0, *, num_completions=3, num_tokens=5, prompt=4):
  rng = np.random.default_rng(position)
  lengths = rng.integers(1, num_tokens + 1, num_completions).astype(np.int32)
  return types.Group(
      prompt_id=position % 7,
      visit=position // 7,
      position=position,
      prompt_tokens=rng.integers(0, 9, prompt).astype(np.int32),
      completion_tokens=rng.integers(
          0, 9, (num_completions, num_tokens)
      ).astype(np.int32),
      completion_lengths=lengths,
      sampled_mask=np.arange(num_tokens) < lengths[:, None],
      stopped=lengths < num_tokens,
      behavior_logprobs=-rng.random((num_completions, num_tokens), np.float32),
      rewards=rng.random(num_completions, np.float32),
      versions=np.full(num_completions, 2, np.int32),
      epoch=1,
  )


def with_ref_logprobs(group):
  ref_logprobs = group.behavior_logprobs - 1
  return dataclasses.replace(group, ref_logprobs=ref_logprobs)


def with_routes(group, num_layers=2):
  """Adds the routes of two of six experts a token."""
  rng = np.random.default_rng(group.position)
  make = lambda tokens: rng.integers(
      0, 6, (*tokens.shape, num_layers, 2), np.uint8
  )
  return dataclasses.replace(
      group,
      routes=make(group.completion_tokens),
      prompt_routes=make(group.prompt_tokens),
  )


def with_turn_rewards(group):
  return dataclasses.replace(group, turn_rewards=group.behavior_logprobs / 2)


class PackingTest(parameterized.TestCase):

  @parameterized.parameters(
      lambda group: group, with_ref_logprobs, with_routes, with_turn_rewards
  )
  def test_groups_survive_the_wire_bit_for_bit(self, add):
    groups = [make_group(0), make_group(11, prompt=2), make_group(5)]
    groups = [add(group) for group in groups]
    header, arrays = messages.pack_groups(groups)
    data = wire.encode(header, arrays, SECRET)
    back = messages.unpack_groups(*wire.decode(data, SECRET))
    self.assertLen(back, 3)
    for group, copy in zip(groups, back):
      for field in dataclasses.fields(types.Group):
        a, b = getattr(group, field.name), getattr(copy, field.name)
        np.testing.assert_array_equal(a, b, strict=True)

  @parameterized.named_parameters(
      ("missing_array", "arrays", "rewards", None),
      ("dtype", "arrays", "rewards", np.zeros((2, 3), np.float64)),
      ("rows", "arrays", "rewards", np.zeros((2, 4), np.float32)),
      ("groups", "arrays", "versions", np.zeros((3, 3), np.int32)),
      ("axes", "arrays", "stopped", np.zeros((2, 3, 5), np.bool_)),
      ("no_mask", "arrays", "sampled_mask", None),
      ("unknown", "arrays", "surprise", np.zeros((2, 3, 5), np.float32)),
      ("number_as_array", "arrays", "visit", np.zeros(2, np.int64)),
      ("mask_axes", "arrays", "sampled_mask", np.ones((2, 3), np.bool_)),
      ("mask_dtype", "arrays", "sampled_mask", np.ones((2, 3, 5), np.int32)),
      ("tokens", "arrays", "behavior_logprobs", np.zeros((2, 3, 4), "f4")),
      ("prompt", "arrays", "prompt_tokens", np.zeros(7, np.int32)),
      ("list", "header", "position", "0"),
      ("count", "header", "visit", [0]),
      ("number", "header", "prompt_id", [0, 1.5]),
      ("bool", "header", "epoch", [True, 1]),
      ("length", "header", "prompt_lengths", [-1, 9]),
      ("gone", "header", "position", None),
  )
  def test_a_malformed_block_is_refused(self, where, name, value):
    header, arrays = messages.pack_groups([make_group(0), make_group(1)])
    target = {"header": header, "arrays": arrays}[where]
    if value is None:
      del target[name]
    else:
      target[name] = value
    with self.assertRaisesRegex(ValueError, name):
      messages.unpack_groups(header, arrays)


class RejectTest(parameterized.TestCase):

  @parameterized.parameters(
      ("reward", {"rewards": np.array([0, np.inf, 1], "f4")}),
      ("logprob", {"behavior_logprobs": np.full((3, 5), -np.inf, "f4")}),
      ("length", {"completion_lengths": np.array([1, 0, 2], "i4")}),
      ("length", {"completion_lengths": np.array([1, 6, 2], "i4")}),
      ("length", {
          "completion_lengths": np.array([1, 6, 2], "i4"),
          "completion_tokens": np.ones((3, 6), "i4"),
          "sampled_mask": np.ones((3, 6), np.bool_),
          "behavior_logprobs": np.zeros((3, 6), "f4"),
      }),
      ("length", {"prompt_tokens": np.zeros(5, "i4")}),
      ("token", {"completion_tokens": np.full((3, 5), 9, "i4")}),
      ("token", {"prompt_tokens": np.full(2, -1, "i4")}),
      # Tokens after the end; a completion without policy tokens.
      ("mask", {"sampled_mask": np.ones((3, 5), np.bool_)}),
      ("mask", {"sampled_mask": np.arange(15).reshape(3, 5) == 0}),
      # As where no environment could begin.
      ("environment", {"sampled_mask": np.zeros((3, 5), np.bool_)}),
  )  # fmt: skip
  def test_group_is_rejected_for_its_content(self, reason, changes):
    group = make_group()
    self.assertIsNone(self.reason(group))
    self.assertEqual(self.reason(dataclasses.replace(group, **changes)), reason)

  def test_malformed_reference_logprobs_are_refused(self):
    group = with_ref_logprobs(make_group())
    header, arrays = messages.pack_groups([group])
    arrays["ref_logprobs"] = arrays["ref_logprobs"][:, :, :-1]
    with self.assertRaisesRegex(ValueError, "ref_logprobs"):
      messages.unpack_groups(header, arrays)

  def test_only_computing_role_sends_reference_logprobs(self):
    without, group = make_group(), with_ref_logprobs(make_group())
    of_searcher = {"ref_logprobs": ()}
    self.assertIsNone(self.reason(group, columns=of_searcher))
    self.assertEqual(self.reason(group), "reference")
    self.assertEqual(self.reason(without, columns=of_searcher), "reference")
    group.ref_logprobs[1, 2] = np.nan
    self.assertEqual(self.reason(group, columns=of_searcher), "logprob")
    # No batch takes the group.
    group.ref_logprobs[:] = np.nan
    self.assertIsNone(self.reason(group, columns=of_searcher))
    group.ref_logprobs[:] = -np.inf
    self.assertEqual(self.reason(group, columns=of_searcher), "logprob")

  @parameterized.parameters("routes", "prompt_routes")
  def test_malformed_routes_are_refused(self, name):
    header, arrays = messages.pack_groups([with_routes(make_group())])
    for wrong in (
        None,
        arrays[name][..., :-1],
        arrays[name][..., None],
        arrays[name][:-1],
        arrays[name].astype(np.int32),
    ):
      changed = {**arrays, name: wrong}
      if wrong is None:
        del changed[name]
      with self.assertRaisesRegex(ValueError, "routes"):
        messages.unpack_groups(header, changed)

  def test_routes_are_those_of_the_trainers_model(self):
    reason = functools.partial(self.reason, columns=_ROUTES, num_experts=6)
    without, group = make_group(), with_routes(make_group())
    self.assertIsNone(reason(group))
    self.assertEqual(reason(without), "routes")
    self.assertEqual(self.reason(group), "routes")
    self.assertEqual(reason(with_routes(make_group(), 3)), "routes")
    for name in ("routes", "prompt_routes"):
      wrong = with_routes(make_group())
      getattr(wrong, name)[0] = 6
      self.assertEqual(reason(wrong), "routes")

  def test_experts_past_256_take_two_bytes(self):
    reason = functools.partial(self.reason, columns=_ROUTES, num_experts=1536)
    for name in ("routes", "prompt_routes"):
      group = with_routes(make_group())
      getattr(group, name)[0] = 255, 5  # Expert 1535.
      self.assertIsNone(reason(group))
      getattr(group, name)[0] = 0, 6
      self.assertEqual(reason(group), "routes")

  def test_kept_tokens_contain_the_sampled_ones(self):
    columns = {"kept_ids": (3,)}
    reason = functools.partial(self.reason, columns=columns)
    group = make_group()
    kept = np.full((*group.completion_tokens.shape, 3), -1, np.int32)
    kept[..., 1] = group.completion_tokens
    group = dataclasses.replace(group, kept_ids=kept)
    header, arrays = messages.pack_groups([group])
    (back,) = messages.unpack_groups(header, arrays)
    np.testing.assert_array_equal(back.kept_ids, kept, strict=True)
    self.assertIsNone(reason(back))
    self.assertEqual(reason(make_group()), "kept_ids")
    self.assertEqual(self.reason(group), "kept_ids")
    self.assertEqual(self.reason(group, columns={"kept_ids": (4,)}), "kept_ids")
    for wrong in (9, -2):
      for place in (0, 1):
        changed = kept.copy()
        changed[0, 0, place] = wrong
        changed = dataclasses.replace(group, kept_ids=changed)
        self.assertEqual(reason(changed), "kept_ids")
    changed = kept.copy()
    changed[0, 0, 1] = (group.completion_tokens[0, 0] + 1) % 9
    changed = dataclasses.replace(group, kept_ids=changed)
    self.assertEqual(reason(changed), "kept_ids")

  def test_rewards_of_turns_are_there_if_the_loss_reads_them(self):
    reason = functools.partial(self.reason, columns={"turn_rewards": ()})
    without, group = make_group(), with_turn_rewards(make_group())
    self.assertIsNone(reason(group))
    self.assertIsNone(self.reason(without))
    self.assertEqual(reason(without), "turn_rewards")
    self.assertEqual(self.reason(group), "turn_rewards")
    group.turn_rewards[0, 0] = np.inf
    self.assertEqual(reason(group), "reward")

  def test_a_block_may_have_a_group_without_a_prompt_among_routes(self):
    group, empty = with_routes(make_group(0)), make_group(1)
    empty = dataclasses.replace(empty, prompt_tokens=empty.prompt_tokens[:0])
    empty.completion_lengths[:] = 0
    empty.sampled_mask[:] = False
    unpacked = messages.unpack_groups(*messages.pack_groups([empty, group]))
    reasons = [self.reason(g, columns=_ROUTES, num_experts=6) for g in unpacked]
    self.assertEqual(reasons, ["environment", None])

  def test_prompt_from_no_environment_is_rejected(self):
    group = make_group()
    empty = dataclasses.replace(group, prompt_tokens=group.prompt_tokens[:0])
    self.assertEqual(self.reason(empty), "length")
    empty.completion_lengths[:] = 0
    empty.sampled_mask[:] = False
    (unpacked,) = messages.unpack_groups(*messages.pack_groups([empty]))
    self.assertEmpty(unpacked.prompt_tokens)
    self.assertEqual(self.reason(unpacked), "environment")

  def reason(self, group, *, columns=None, num_experts=0):
    return messages.reject_reason(
        group,
        vocab_size=9,
        max_prompt_tokens=4,
        max_completion_tokens=5,
        columns=columns or {},
        num_experts=num_experts,
    )
