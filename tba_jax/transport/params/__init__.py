# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions of the params, from the trainer to its searchers.

In the store, `p/<epoch>.<step>/meta` is a version's manifest and `p_cur` a
pointer to the newest version, written last to commit it (`manifest.py`). The
leaves are moved by a carrier (`carriers.py`). A reader accepts a version only
if its manifest is authentic and has the expected leaves, and all digests match.
For a version that it cannot read it asks under `ask/params/<name>`: the trainer
sends it again, in case its keys were overwritten or deleted.

Among the leaves are the log-probs of `probe.py`, by which a searcher checks
what it has made of the others.
"""
