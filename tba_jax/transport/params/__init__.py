# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions of the params, from the trainer to its searchers.

In the store, `p/<epoch>.<step>/meta` is a version's manifest and `p_cur` a
pointer to the newest version, written last to commit it (`manifest.py`). The
leaves are moved by a carrier (`carriers.py`). A reader accepts a version only
if its manifest is authentic and has the expected leaves, and all digests match.
It requests a version that it cannot read under `ask/params/<name>`: the trainer
then sends the version again, in case its keys were overwritten or deleted.

The leaves include the log-probs of `probe.py`, with which a searcher checks the
params that it has made of the other leaves.
"""
