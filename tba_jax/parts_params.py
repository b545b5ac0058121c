# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts by which what is trained travels from the trainer to the searchers."""

from collections.abc import Callable
import functools

import jax
import ml_collections
import numpy as np

from tba_jax import device_work
from tba_jax import local_mesh
from tba_jax import lora
from tba_jax import policy as policy_lib
from tba_jax import publication
from tba_jax import puller as puller_lib
from tba_jax import recorder as recorder_lib
from tba_jax import run_directory
from tba_jax import types
from tba_jax import versions
from tba_jax.carriers import build as carriers_build
from tba_jax.transport import base


def make_whole(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    place: local_mesh.Place = local_mesh.ONE_DEVICE,
) -> lora.Whole:
  """Returns what makes a searcher's params of what is trained.

  Adapters have it load their base, to where the searcher's params lie.

  Raises:
    ValueError: the base cannot be read.
  """

  return lora.make_whole(
      policy.adapters,
      policy.folder,
      config.seed,
      lambda: place.put(
          policy_lib.initial_params(policy, config.seed, place.model)
      ),
  )


def make_params_fn(
    policy: policy_lib.Policy,
    whole: lora.Whole,
    place: local_mesh.Place = local_mesh.ONE_DEVICE,
) -> Callable[[dict[str, np.ndarray]], types.PyTree]:
  """Returns (published leaves by path) -> params where the searcher's lie.

  Of leaves on the host each device gets its own part alone.
  """
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))

  def params_fn(leaves: dict[str, np.ndarray]) -> types.PyTree:
    trained = jax.device_put(versions.unflatten(leaves, like), place.trained)
    return place.put(whole.params(trained))

  return params_fn


def make_publisher(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    epoch: int,
    work: device_work.DeviceWork,
    make_transport: Callable[[], base.Transport],
    recorder: recorder_lib.Recorder,
    on_event: Callable[[str, str], None],
) -> publication.Publisher:
  """Returns the publisher of a run's params, its thread started."""
  specs = versions.published(
      versions.expected_leaves(work.state.params), config.publish.dtype
  )
  return publication.Publisher(
      make_transport,
      epoch=epoch,
      run_id=run.run_id,
      secret=run.secret,
      base_name=work.base,
      carriers=carriers_build.make_writers(config, run, specs, work.peers),
      dtype=config.publish.dtype,
      keep_versions=config.publish.keep_versions,
      on_event=on_event,
      span=functools.partial(recorder.span, lane="publish"),
  )


def make_puller(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
    place: local_mesh.Place,
    base_name: str,
    make_transport: Callable[[], base.Transport],
    on_event: Callable[[str, str], None],
) -> puller_lib.Puller:
  """Returns the puller of what a run trains; see `lora.Whole.base`."""
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))
  places = None if place.trained is None else versions.by_path(place.trained)
  return puller_lib.Puller(
      make_transport,
      run_id=run.run_id,
      secret=run.secret,
      base_name=base_name,
      expected=versions.expected_leaves(like),
      carriers=carriers_build.make_readers(
          config, run, placement=places and places.get
      ),
      dtype=config.publish.dtype,
      every_s=config.search.pull_every_s,
      on_event=on_event,
  )
