# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings and digests that all hosts of a run must share."""

import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.learning import agreement
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.policy import policy
from tba_jax.run import metrics
from tba_jax.tasks import task_table
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tests.support import base_config
from tests.support import in_process

_SECRET = b"s" * 32
_RUN = mock.Mock(workdir=pathlib.Path("/runs/a"), run_id="run", secret=_SECRET)
_SIDES = "this searcher (a:/x)", "the trainer (b:/y)"


def _settings(**overrides):
  # Through JSON, as on the wire.
  values = load.flatten(base_config.make(**overrides).to_dict())
  return json.loads(json.dumps(values))


class CheckHostsTest(parameterized.TestCase):

  def check(self, searcher=True, **overrides):
    differences.check_hosts(
        _settings(**overrides), _settings(), _SIDES, searcher=searcher
    )

  def test_equal_settings_agree(self):
    self.check()
    self.check(searcher=False)

  def test_each_key_is_named_with_both_values_and_sides(self):
    with self.assertRaises(load.ConfigError) as caught:
      self.check(loss__beta=0.1, sampling__temperature=0.5, search__lease_s=9.0)
    beta, temperature = str(caught.exception).splitlines()
    self.assertIn(
        "config.loss.beta = 0.1 at this searcher (a:/x), 0.05 at the trainer"
        " (b:/y)",
        beta,
    )
    self.assertIn("config.sampling.temperature = 0.5", temperature)

  @parameterized.parameters(
      {"store__spool_dir": "/tmp/x"},
      {"devices__searcher": "3"},
      {"init": "/models/other/place"},
      {"tokenizer__source": "/models/other/place"},
      {"sft__num_steps": 7},
  )
  def test_paths_and_devices_of_a_host_may_differ(self, **overrides):
    self.check(**overrides)
    self.check(searcher=False, **overrides)

  @parameterized.parameters(
      {"train__num_steps": 640},
      {"search__num_searchers": 9},
      {"mesh__data": 8},
      {"sampling__num_slots": 512},
  )
  def test_a_searcher_may_differ_in_more(self, **overrides):
    self.check(**overrides)
    with self.assertRaisesRegex(
        load.ConfigError, next(iter(overrides)).replace("__", ".")
    ):
      self.check(searcher=False, **overrides)

  def test_a_path_may_differ_from_a_path_alone(self):
    sides = ({"reward.model": a} for a in ("/a/m", "models/m", "reward_model"))
    here, there, name = sides
    differences.check_hosts(here, there, _SIDES, searcher=True)
    with self.assertRaisesRegex(load.ConfigError, "config.reward.model = "):
      differences.check_hosts(here, name, _SIDES, searcher=True)

  def test_a_missing_task_field_has_its_default(self):
    whole = _settings().items()
    left_out = {k: v for k, v in whole if not k.startswith("task.")}
    left_out["task.name"] = "gsm8k"
    fields = task_table.fields("gsm8k")
    given = left_out | {f"task.{name}": v for name, v in fields.items()}
    for pair in ((left_out, given), (given, left_out)):
      differences.check_hosts(*pair, _SIDES, searcher=False)

  def test_a_missing_key_has_its_default(self):
    older = _settings()
    del older["loss.ratio_clip"]
    differences.check_hosts(older, _settings(), _SIDES, searcher=True)
    with self.assertRaisesRegex(load.ConfigError, "loss.ratio_clip = 0.0"):
      differences.check_hosts(
          older, _settings(loss__ratio_clip=0.2), _SIDES, searcher=True
      )


class AgreementTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(self.store)
    self.events = mock.create_autospec(metrics.EventLog, instance=True)

  def describe(self, digests=None, **overrides):
    described = agreement.describe(base_config.make(**overrides), _RUN)
    return {**described, "digests": digests or {}}

  def put(self, described, run=_RUN, epoch=0):
    agreement.put(self.transport, described, run, epoch)

  def make(self, **digests):
    return agreement.Agreement(self.describe(digests), _RUN, self.events)

  def test_a_searcher_checks_each_trainer(self):
    agreed = self.make()
    self.assertFalse(agreed.holds(self.transport))
    self.put(self.describe(search__lease_s=3.0))
    self.assertTrue(agreed.holds(self.transport))
    # A trainer with other settings takes over.
    self.put(self.describe(loss__beta=0.1))
    with self.assertRaisesRegex(
        agreement.DiffersError,
        r"config.loss.beta = 0.05 at this searcher \(",
    ):
      agreed.holds(self.transport)

  def test_settings_of_an_earlier_start_or_store_are_ignored(self):
    agreed = self.make()
    self.put(self.describe(loss__beta=0.1), epoch=3)
    old = self.transport.get(agreement.KEY)
    # Nor is a missing or forged message taken for one that agrees.
    self.assertFalse(agreed.holds(self.transport, 4))
    self.put(self.describe(), epoch=4)
    self.assertTrue(agreed.holds(self.transport, 4))
    self.assertEqual(agreed.epoch, 4)
    self.store.lose()
    self.transport.reconnect()
    self.transport.put(agreement.KEY, old)
    self.assertFalse(agreed.holds(self.transport))
    self.assertFalse(agreed.holds(self.transport, 3))

  def test_differing_settings_are_read_again(self):
    connect = lambda: in_process.InProcessTransport(self.store)
    wait = lambda: self.make().wait(connect, lambda: False)
    # An old message, which the trainer replaces; then its own settings differ.
    self.put(self.describe(loss__beta=0.1))
    put = lambda beta: lambda _: self.put(self.describe(loss__beta=beta))
    with mock.patch.object(agreement.time, "sleep", side_effect=put(0.05)):
      wait()
    self.put(self.describe(loss__beta=0.1))
    with mock.patch.object(agreement.time, "sleep", side_effect=put(0.1)):
      with self.assertRaises(agreement.DiffersError):
        wait()

  def test_a_stop_ends_the_wait(self):
    stops = [False, False, True]
    with mock.patch.object(agreement.time, "sleep", autospec=True):
      self.make().wait(lambda: self.transport, lambda: stops.pop(0))
    self.assertEqual(stops, [])

  def test_waits_while_the_store_is_lost(self):
    transport = mock.create_autospec(byte_store.Transport, instance=True)
    self.put(self.describe())
    data = self.transport.get(agreement.KEY)
    transport.generation = self.transport.generation
    transport.get.side_effect = [byte_store.TransportError("gone"), data]
    with mock.patch.object(agreement.time, "sleep", autospec=True):
      self.make().wait(lambda: transport, lambda: False)
    transport.reconnect.assert_called_once()
    transport.close.assert_called_once()
    self.assertEqual(self.events.write.call_args.args[0], "store_lost")

  def test_forged_and_malformed_messages_are_ignored(self):
    agreed = self.make()
    other = mock.Mock(run_id="run", secret=b"x" * 32)
    self.put(self.describe(loss__beta=0.1), other)
    for _ in range(2):
      self.assertFalse(agreed.holds(self.transport))
    self.events.write.assert_called_once()
    # Signed messages of another key, or with missing or wrong fields.
    for message in (
        {"run": "run", "key": "work/s", "settings": {}, "digests": {}},
        {"run": "run", "key": agreement.KEY},
        {**self.describe(), "run": "run", "key": agreement.KEY, "settings": 3},
        {**self.describe(), "run": "run", "key": agreement.KEY, "digests": []},
    ):
      self.transport.put(agreement.KEY, wire.encode_message(message, _SECRET))
      self.assertFalse(agreed.holds(self.transport), message)

  def test_different_digests_are_named(self):
    self.put(self.describe({"config.task": "a", "config.init": "b"}))
    agreed = self.make(**{"config.task": "c", "config.tokenizer": "d"})
    with self.assertRaisesRegex(
        agreement.DiffersError, r"^config.task: .*searcher \(.*trainer \(.*$"
    ):
      agreed.holds(self.transport)

  def test_digests_depend_on_model_tokenizer_and_data(self):
    def digests(**overrides):
      config = base_config.make(init="scratch", **overrides)
      made = policy.make_policy(config, "unused")
      return agreement.describe(config, _RUN, made)["digests"]

    mine = digests()
    for overrides, keys in (
        ({"loss__beta": 0.1}, set()),
        ({"model__compute_dtype": "bfloat16"}, set()),
        ({"model__num_layers": 1}, {"config.init"}),
        ({"sampling__stop_token_ids": "3"}, {"config.tokenizer"}),
    ):
      found = digests(**overrides)
      self.assertEqual({k for k in mine if mine[k] != found[k]}, keys)
    # Searchers that hold the reference start from the trainer's very params.
    held = digests(reference__role="searcher")
    self.assertEqual(set(held) - set(mine), {"config.reference"})
    other_start = digests(reference__role="searcher", seed=1)
    self.assertNotEqual(
        held["config.reference"], other_start["config.reference"]
    )
    other_data = digests(task__split_seed=5)
    self.assertNotEqual(mine["config.task"], other_data["config.task"])

  def test_digests_depend_on_the_content_of_logs_alone(self):
    def digests(text, name):
      path = self.create_tempfile(name, text).full_path
      for key in ("offline__path", "loss__baseline_file"):
        baseline = "file" if key == "loss__baseline_file" else ""
        config = base_config.make(
            init="scratch", loss__baseline=baseline, **{key: path}
        )
        made = policy.make_policy(config, "unused")
        yield agreement.describe(config, _RUN, made)["digests"][
            "config." + key.replace("__", ".")
        ]

    self.assertEqual([*digests("a\n", "a")], [*digests("a\n", "b")])
    for one, other in zip(digests("a\n", "a"), digests("a\nb\n", "c")):
      self.assertNotEqual(one, other)
    # A loss of one's own may leave a missing file unread.
    config = base_config.make(init="scratch", loss__baseline_file="/no/such")
    agreement.describe(config, _RUN, policy.make_policy(config, "unused"))


class CheckProcessesTest(absltest.TestCase):

  def test_process_0_names_differing_process(self):
    config = base_config.make()
    mine = agreement.describe(config, _RUN)
    other = agreement.describe(base_config.make(train__num_steps=7), _RUN)
    cluster = mock.create_autospec(cluster_lib.Cluster, instance=True)
    cluster.collect.return_value = {1: mine, 2: other}
    with self.assertRaisesRegex(
        ValueError,
        r"config.train.num_steps = 7 at process 2 \(.*\), \d+ at process 0 \(",
    ):
      agreement.check_processes(cluster, config, _RUN)
    cluster.collect.return_value.pop(2)
    agreement.check_processes(cluster, config, _RUN)
