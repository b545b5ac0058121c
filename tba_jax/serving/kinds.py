# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests, as named in the journal, and their outcomes."""

from collections.abc import Mapping

# Requests of a model; a forward pass changes nothing.
FORWARD = "forward"
FORWARD_BACKWARD = "forward_backward"
OPTIM_STEP = "optim_step"
CREATE, LOAD = "create_model", "load_weights"
SAVE, SAVE_SAMPLER = "save_weights", "save_weights_for_sampler"
EXPORT = "save_weights_external"
# Requests of a replay: a new group, a step, start and stop.
INSERT, TRAIN = "replay_insert", "replay_step"
START, STOP = "replay_start", "replay_stop"
# Completions, and completions that are to be rewarded for a replay.
SAMPLE, SAMPLE_INTO = "sample", "sample_into_replay"
# An agent's call outside any episode, and the owner of all such calls.
ANSWER, ANSWERS = "answer", "answers"
# A call in an episode, and its end.
CALL, FINISH = "call", "finish_episode"
# Kinds executed in batches, in order of arrival.
DECODED = (SAMPLE, SAMPLE_INTO, ANSWER, CALL, FINISH)
# Kinds repeated when a model is restored from a checkpoint.
REPEATED = (FORWARD_BACKWARD, OPTIM_STEP, LOAD, INSERT, TRAIN)
# Body of the server's own requests to save a version.
PUBLISH = b"{}"

# A result, or {"error": text, "category": "user" or "server"}.
Outcome = bytes | Mapping[str, str]


def failure(text: str, category: str = "user") -> dict[str, str]:
  return {"error": text, "category": category}


def is_of_server(outcome: Outcome) -> bool:
  return not isinstance(outcome, bytes) and outcome["category"] == "server"


def newest_sampler(replay: str) -> str:
  """Returns the sampling session of a replay's newest version."""
  return f"{replay}:newest"
