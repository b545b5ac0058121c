# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training and sampling over HTTP; each line imports from those below it.

app                      routes
*_handlers, handlers     HTTP to requests, and results to HTTP
engine                   the thread that executes requests
replays                  models that the server trains by itself
served_models            models under training, rebuilt after a kill
agent_episodes           agents' calls: episodes, completions
sample_batches           samples that are decoded together
saved_weights            checkpoints, versions and exports
served_base              the base model and compiled programs
trained_model, *_passes  gradients and steps of a model
request_queue            requests in order; crash_guard: deadly requests
request_journal          requests that outlive a kill
registry, database       everything else that outlives a kill
schemas, protobufs       requests and replies, except agents' (chat_api)
"""
