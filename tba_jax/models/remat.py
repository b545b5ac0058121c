# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a forward pass keeps of each layer for the gradient: `train.remat`.

The rest is computed again on the way back. "none" computes nothing twice, and
keeps everything; "dots" keeps the results of a layer's products, since what
lies between costs less to compute than to write and read; "full" keeps the
stream before a layer, and runs the layer twice.
"""

from collections.abc import Callable

import jax

from tba_jax.models import layers

# Name -> what is kept, None where nothing is computed again.
REMATS = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(layers.PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def check(remat: str) -> None:
  """Raises ValueError where there is no such setting."""
  if remat not in REMATS:
    raise ValueError(f"train.remat={remat!r}: allowed {tuple(REMATS)}")


def wrap(layer: Callable, remat: str) -> Callable:
  """Returns a layer, to be scanned over, that keeps what `remat` says."""
  if REMATS[remat] is None:
    return layer
  return jax.checkpoint(layer, policy=REMATS[remat], prevent_cse=False)
