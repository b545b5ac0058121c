# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What process 0 does with its devices, a follower does too, in that order."""

import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.system import processes
from tba_jax.training import batches
from tba_jax.training import checkpoint
from tba_jax.training import cluster as cluster_lib
from tba_jax.training import device_work
from tba_jax.training import lora
from tba_jax.training import sharding
from tba_jax.training import train_step as train_step_lib
from tba_jax.transport import carrier_orbax
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


def make_rows(reward):
  fields = {name: np.zeros((2, 1)) for name in types.Batch.__dataclass_fields__}
  del fields["prepared"]
  return {**fields, "rewards": np.full((2, 1), reward)}


class DeviceWorkTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.checkpointer = mock.create_autospec(
        checkpoint.Checkpointer, instance=True
    )

  def make(self, cluster, peers=None):
    def train_step(state, batch):
      params = {"w": state.params["w"] + batch.rewards.sum()}
      state = train_step_lib.TrainState(
          **{**vars(state), "step": state.step + 1, "params": params}
      )
      return state, {"loss": batch.rewards.sum()}

    return device_work.DeviceWork(
        state=make_state(),
        train_step=train_step,
        whole=lora.ParamsMerger(
            "a base", lambda params: {"w": params["w"] + 5.0}
        ),
        checkpointer=self.checkpointer,
        mesh=sharding.make_mesh(tiny_model.make_config().mesh),
        cluster=cluster,
        peers=peers,
    )

  def follow(self, commands, peers=None):
    """Returns a follower's end, its work, and what it was given to place."""
    cluster = FakeCluster(commands)
    work = self.make(cluster, peers)
    placed = []

    def put_along(reward, **fields):
      placed.append(fields)
      return types.Batch(**make_rows(reward))

    follower = device_work.Follower(
        cluster=cluster, work=work, put_along=put_along
    )
    return follower.run(lambda: False), work, placed

  def test_a_follower_ends_in_the_state_of_process_0(self):
    cluster = FakeCluster()
    work = self.make(cluster)
    for step, reward in enumerate((1.0, 10.0)):
      rows = types.Batch(**make_rows(reward))
      cluster.broadcast("place", dict(step=step, num_missing=0, reward=reward))
      self.assertEqual(float(work.train(rows)["loss"]), 2 * reward)
    self.assertIs(work.gather(), work.state.params)
    self.assertIs(work.gather("sampling_params"), work.state.sampling_params)
    np.testing.assert_array_equal(
        work.gather_model()["w"], work.state.params["w"] + 5.0
    )
    work.scale_learning_rate(0.5)
    work.save(2, {"buffer": 1}, wait=True)
    cluster.end(processes.EXIT_OK)
    self.assertEqual(
        [command.name for command in cluster.told],
        ["place", "train"] * 2
        + ["gather"] * 2
        + ["gather_model", "scale", "save", "end"],
    )
    done, other, placed = self.follow(cluster.told)
    self.assertTrue(done)
    for a, b in ((work.state, other.state),):
      self.assertEqual(int(a.step), int(b.step))
      np.testing.assert_array_equal(a.params["w"], b.params["w"])
      self.assertEqual(float(b.learning_rate_scale), 0.5)
    self.assertEqual([p["step"] for p in placed], [0, 1])
    np.testing.assert_array_equal(placed[0]["ref_params"]["w"], [1, 1])
    first, second = self.checkpointer.save.call_args_list
    self.assertEqual(first.args[2], {"buffer": 1, "base": "a base"})
    # The host state is that of process 0 alone.
    self.assertEqual((second.args[0], "buffer" in second.args[2]), (2, False))
    self.assertTrue(second.kwargs["wait"])

  def test_params_are_gathered_to_be_published(self):
    cluster = FakeCluster()
    work = self.make(cluster)
    submit = mock.Mock(return_value=4)
    work.publish(submit, 5)
    submit.assert_called_once_with(5, work.state.params)
    self.assertEqual([c.name for c in cluster.told], ["gather"])

  def test_shards_are_published_by_each_process(self):
    cluster = FakeCluster()
    work = self.make(cluster, mock.create_autospec(carrier_orbax.Leader))
    # The second was left out for the third, as the publisher says.
    submit = mock.Mock(side_effect=[None, None, 6])
    work.publish(submit, 5, "sampling_params")
    work.publish(submit, 6)
    work.publish(submit, 7)
    cluster.end(processes.EXIT_OK)
    peers = mock.create_autospec(carrier_orbax.Helper, instance=True)
    peers.submit.return_value = None
    _, other, _ = self.follow(cluster.told, peers)
    self.assertEqual(
        peers.method_calls,
        [
            mock.call.submit(5, other.state.sampling_params),
            mock.call.submit(6, other.state.params),
            mock.call.submit(7, other.state.params),
            mock.call.forget(6),
        ],
    )

  def test_an_interrupted_run_is_one_for_all(self):
    end = cluster_lib.Command("end", {"status": processes.EXIT_INTERRUPTED})
    self.assertFalse(self.follow([end])[0])

  def test_an_error_of_process_0_ends_all_with_its_status(self):
    end = cluster_lib.Command("end", {"status": processes.EXIT_FATAL})
    with self.assertRaises(cluster_lib.Ended) as caught:
      self.follow([end])
    self.assertEqual(caught.exception.status, processes.EXIT_FATAL)

  @parameterized.parameters(True, False)
  def test_a_checkpoint_that_fails_ends_the_process(self, wait):
    self.checkpointer.save.side_effect = OSError("no space")
    fields = {"step": 1, "wait": wait}
    save = cluster_lib.Command("save", fields)
    with self.assertRaisesRegex(OSError, "no space"):
      self.follow([save])

  def test_an_unknown_command_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "'dance'"):
      self.follow([cluster_lib.Command("dance", {})])


class PlacerTest(absltest.TestCase):

  def test_another_process_makes_the_same_calls_without_the_batch(self):
    calls = []

    class Reference:
      version = 0

      def follow(self, step, ref_params):
        calls.append(("follow", step))

      def logprobs(self, prompts, prompt_mask, tokens, mask):
        calls.append(("logprobs", tokens.shape))
        return jnp.zeros(tokens.shape)

    def place(batch):
      shapes = {
          n: (x.shape, x.dtype)
          for n, x in vars(batch).items()
          if n != "prepared"
      }
      calls.append(("place", shapes))
      return types.Batch(**{n: jnp.zeros(*s) for n, s in shapes.items()})

    told = []
    make = lambda **kwargs: batches.Placer(
        Reference(), part_prompts=2, place=place, **kwargs
    )
    batch = types.Batch(
        **{name: np.ones((4, 2, 3), np.float32) for name in make_rows(0)}
    )
    leader = make(tell=lambda **fields: told.append(json.dumps(fields)))
    leader.follow(5, {})
    leader.put(batch, 5, num_missing=3)
    first, calls = calls, []
    make().put_along(ref_params={}, **json.loads(told[0]))
    self.assertEqual(calls, first)
    self.assertEqual(
        first[:1] + first[2:], [("follow", 5)] + [("logprobs", (2, 2, 3))] * 2
    )


if __name__ == "__main__":
  absltest.main()
