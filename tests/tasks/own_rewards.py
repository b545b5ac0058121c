# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards as a user writes them, for the tests of own tasks."""

NOT_A_FUNCTION = 3


def short(prompt, completion, row):
  return 1.0 / (1 + len(completion))


def short_and_why(prompt, completion, row):
  return {"reward": short(prompt, completion, row), "length": len(completion)}


def says_color(prompt, completion, row):
  return float(row["color"] in completion and prompt in completion)


def why(prompt, completion, row):
  if completion == row["answer"]:
    return None
  return f"not {row['color']}: {completion}"


def broken(prompt, completion, row):
  raise RuntimeError("a bug of the user's")


def leaves(prompt, completion, row):
  raise SystemExit(3)


def verifier(prompt, completion, row):
  return 0.0
