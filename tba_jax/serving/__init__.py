# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training and sampling over HTTP; each line imports from those below it.

app                      paths
*_handlers, handlers     HTTP to requests, and results to HTTP
engine                   the thread that does requests, by the parts
replays                  models that the server trains by itself
served_models            models under training, made again after a kill
agent_episodes           calls of agents: episodes, completions
sample_batches           samples that are decoded together
saved_weights            checkpoints, versions and exports
served_base              the base model and compiled programs
trained_model, *_passes  gradients and steps of a model
request_queue            requests in their order; crash_guard: deadly ones
request_journal          requests that outlive a kill
registry, database       whatever else does
schemas, protobufs       messages: requests and replies
"""
