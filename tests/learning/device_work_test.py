# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A follower repeats the device work of process 0."""

import json
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import train_step as train_step_lib
from tba_jax.learning import work_parts
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.mesh import sharding
from tba_jax.policy import lora
from tba_jax.policy import reference_policy
from tba_jax.programs import replica
from tba_jax.system import processes
from tba_jax.transport.params import peers as peers_lib
from tests.support import base_config
from tests.support import tiny_model


class FakeCluster(cluster_lib.Cluster):
  """Keeps what is told; hears what another one was told."""

  def __init__(self, heard=()):
    super().__init__()
    self.told = []
    self._to_hear = list(heard)

  def broadcast(self, name, fields=None):
    self.told.append(cluster_lib.Command(name, dict(fields or {})))

  def receive(self, should_stop):
    return self._to_hear.pop(0)


def make_state():
  return train_step_lib.TrainState(
      step=jnp.asarray(0),
      params={"w": jnp.zeros(2)},
      opt_state=(),
      loss_params={},
      loss_opt_state=(),
      proximal_params={},
      ref_params={"w": jnp.ones(2)},
      sampling_params={"w": jnp.full(2, -1.0)},
      learning_rate_scale=jnp.asarray(1.0),
  )


def make_batch(reward):
  fields = {
      name: np.zeros((2, 1), np.float32)
      for name in types.columns_of(types.Batch)
  }
  return types.Batch(
      **{**fields, "rewards": np.full((2, 1), reward, np.float32)}
  )


class DeviceWorkTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.checkpointer = mock.create_autospec(
        checkpoint.Checkpointer, instance=True
    )

  def make(self, cluster, peers=None, config=None, answer=None):
    def train_step(state, batch):
      params = {"w": state.params["w"] + batch.rewards.sum()}
      state = train_step_lib.TrainState(
          **{**vars(state), "step": state.step + 1, "params": params}
      )
      return state, {"loss": batch.rewards.sum()}

    self.reference = mock.create_autospec(
        reference_policy.Reference, instance=True
    )
    self.reference.name = "a reference"
    self.reference.logprobs.side_effect = lambda *args: jnp.zeros(args[2].shape)
    return device_work.DeviceWork(
        config or base_config.make(),
        state=make_state(),
        train_step=train_step,
        reference=self.reference,
        merger=lora.ParamsMerger(
            "a base", lambda params: {"w": params["w"] + 5.0}
        ),
        checkpointer=self.checkpointer,
        cluster=cluster,
        task="a task",
        peers=peers,
        answer=answer,
    )

  def follow(self, commands, peers=None, answer=None):
    """Returns a follower's end and its work."""
    cluster = FakeCluster(commands)
    work = self.make(cluster, peers, answer=answer)
    # A batch of zeros where process 0's is summed over processes.
    work._put = lambda batch: jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), batch
    )
    return replica.Replica(cluster, work)(lambda: False), work

  def test_evaluated_params_are_gathered_in_the_dtype_of_computing(self):
    config = base_config.make()
    config.model.compute_dtype = "bfloat16"
    cluster = FakeCluster()
    cluster.num_processes = 2
    with (
        mock.patch.object(sharding, "make_gather", lambda _: lambda tree: tree),
        mock.patch.object(sharding, "make_spread"),
    ):
      work = self.make(cluster, config=config)
    blocks = {"norm": jnp.zeros((2, 3)), "kernel": jnp.zeros((2, 3, 3))}
    work.merger = lora.ParamsMerger("", lambda params: {"blocks": blocks})
    found = work.gather_model()["blocks"]
    self.assertEqual(found["norm"].dtype, jnp.float32)
    self.assertEqual(found["kernel"].dtype, jnp.bfloat16)

  def test_a_follower_ends_in_the_state_of_process_0(self):
    cluster = FakeCluster()
    work = self.make(cluster)
    for _ in range(2):
      batch, _ = work.place(make_batch(0.0), None)
      work.train(batch)
    np.testing.assert_array_equal(
        work.gather_model()["w"], work.state.params["w"] + 5.0
    )
    work.scale_learning_rate(0.5)
    work.save(2, {"buffer": 1}, wait=True)
    cluster.end(processes.EXIT_OK)
    self.assertEqual(
        [command.name for command in cluster.told],
        ["place", "train"] * 2 + ["gather_model", "scale", "save", "end"],
    )
    commands = json.loads(json.dumps([vars(c) for c in cluster.told]))
    done, other = self.follow(cluster_lib.Command(**c) for c in commands)
    self.assertTrue(done)
    self.assertEqual(int(other.state.step), 2)
    chex.assert_trees_all_equal(other.state, work.state)
    self.assertEqual(float(other.state.learning_rate_scale), 0.5)
    first, second = self.checkpointer.save.call_args_list
    self.assertEqual(
        first.args[2],
        {
            "buffer": 1,
            "base": "a base",
            "reference": "a reference",
            "task": "a task",
        },
    )
    # Only process 0 has a host state.
    self.assertEqual((second.args[0], "buffer" in second.args[2]), (2, False))
    self.assertTrue(second.kwargs["wait"])

  def test_the_reference_computes_groups_without_log_probs(self):
    cluster = FakeCluster()
    leader = self.make(cluster)
    batch = types.Batch(
        **{
            name: np.ones((8, 2, 3), np.float32)
            for name in types.columns_of(types.Batch)
        },
    )
    # Slots of the first five groups.
    slots = np.full((8, 2, 3), 40, np.int32)
    slots[:5] = np.arange(30).reshape(5, 2, 3)
    missing = types.Rows(np.zeros((2, 2, 10), np.int32), slots)
    self.reference.logprobs.side_effect = None
    self.reference.logprobs.return_value = jnp.full((8, 2, 3), 7.0)
    placed, computed = leader.place(batch, missing)
    (call,) = self.reference.logprobs.call_args_list
    # A moving reference is in the state.
    self.assertIs(call.args[4], leader.state.ref_params)
    expected = np.where(np.arange(8) < 5, 7.0, 1.0)[:, None, None]
    for found in (placed.ref_logprobs, computed):
      np.testing.assert_array_equal(found, np.broadcast_to(expected, (8, 2, 3)))
    self.assertIsNone(leader.place(batch, None)[1])
    # Another process makes the same calls without the batch.
    cluster.end(processes.EXIT_OK)
    told = [
        cluster_lib.Command(c.name, json.loads(json.dumps(c.fields)))
        for c in cluster.told
    ]
    self.follow(told)
    rows = self.reference.logprobs.call_args.args[5]
    self.assertEqual(rows.token_indices.shape, (2, 2, 10))

  def test_publishing_gathers_the_params(self):
    cluster = FakeCluster()
    work = self.make(cluster)
    submit = mock.Mock(return_value=4)
    work.publish(submit, 5)
    submit.assert_called_once_with(5, work.state.params)
    self.assertEqual([c.name for c in cluster.told], ["publish"])

  def test_a_version_has_the_answer_of_all_processes_to_the_probe(self):
    cluster, submit = FakeCluster(), mock.Mock()
    asked = []

    def answer(params, base):
      asked.append(params)
      return "answer", base

    with mock.patch.object(device_work.DeviceWork, "base_params", "the base"):
      work = self.make(cluster, answer=answer)
      work.publish(submit, 5, "sampling_params")
      published = work.state.sampling_params
      submit.assert_called_once_with(
          5, {**published, "probe": ("answer", "the base")}
      )
      cluster.end(processes.EXIT_OK)
      _, other = self.follow(cluster.told, answer=answer)
    # A forward pass over a mesh is a collective.
    self.assertLen(asked, 2)
    self.assertIs(asked[1], other.state.sampling_params)

  def test_each_process_publishes_its_shards(self):
    cluster = FakeCluster()
    work = self.make(cluster, mock.create_autospec(peers_lib.Leader))
    # The publisher skips the second version.
    submit = mock.Mock(side_effect=[None, None, 6])
    work.publish(submit, 5, "sampling_params")
    work.publish(submit, 6)
    work.publish(submit, 7)
    cluster.end(processes.EXIT_OK)
    peers = mock.create_autospec(peers_lib.Helper, instance=True)
    peers.submit.return_value = None
    _, other = self.follow(cluster.told, peers)
    self.assertEqual(
        peers.method_calls,
        [
            mock.call.submit(5, other.state.sampling_params),
            mock.call.submit(6, other.state.params),
            mock.call.submit(7, other.state.params),
            mock.call.forget(6),
        ],
    )

  def test_an_interruption_ends_all_processes(self):
    end = cluster_lib.Command("end", {"status": processes.EXIT_INTERRUPTED})
    self.assertFalse(self.follow([end])[0])

  def test_an_error_of_process_0_ends_all_with_its_status(self):
    end = cluster_lib.Command("end", {"status": processes.EXIT_FATAL})
    with self.assertRaises(cluster_lib.Ended) as caught:
      self.follow([end])
    self.assertEqual(caught.exception.status, processes.EXIT_FATAL)

  @parameterized.parameters(True, False)
  def test_failed_checkpoint_ends_process(self, wait):
    self.checkpointer.save.side_effect = OSError("no space")
    fields = {"step": 1, "wait": wait}
    save = cluster_lib.Command("save", fields)
    with self.assertRaisesRegex(OSError, "no space"):
      self.follow([save])

  def test_an_unknown_command_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "'dance'"):
      self.follow([cluster_lib.Command("dance", {})])

  def test_the_reference_of_searchers_is_not_held(self):
    model, config = tiny_model.make_model(), tiny_model.make_config()
    policy = mock.Mock(model=model, adapters=None, folder=None)
    params = tiny_model.init_params(model)
    mesh = sharding.make_mesh(config.mesh)
    make = lambda: work_parts.make_reference(config, policy, params, mesh)
    with mock.patch.object(
        reference_policy, "Reference", autospec=True
    ) as made:
      make()
      config.reference.role = "searcher"
      make()
    self.assertEqual(
        [call.args[1] is None for call in made.call_args_list], [False, True]
    )
    # Log-probs that come with groups are of this version.
    self.assertEqual(make().version(50), 0)
