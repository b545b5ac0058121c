# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine: order, exactly one effect of a request, and its numbers."""

import json
import threading
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax.learning import checkpoint
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.serving import engine as engine_lib
from tba_jax.serving import protobufs
from tba_jax.serving import schemas
from tba_jax.serving import trained_model
from tests.support import serving_case
from tests.support import waiting

_MODEL = serving_case.MODEL
_DATA = [
    serving_case.datum([1, 2, 3, 4, 5], weights=[0.0, 0.0, 1.0, 1.0]),
    serving_case.datum([3, 4, 5, 6, 7, 8], weights=[1.0] * 5),
]


class _Server:
  """An engine with its thread; `kill` leaves all as a kill would."""

  def __init__(self, workdir, config=None, **changes):
    config = config or serving_case.make_config(**changes)
    self.engine = engine_lib.Engine(config, workdir, lambda ids: None)
    self.thread = threading.Thread(target=self.engine.run, daemon=True)
    self.thread.start()

  def create(self, rank=2, seed=1):
    lora = schemas.LoraConfig(rank=rank, seed=seed)
    spec = self.engine.base.spec_of(_MODEL, lora)
    self.engine.registry.add_session(serving_case.SESSION)
    self.engine.registry.add_model(_MODEL, serving_case.SESSION, spec)
    return self.ask("create_model", 0, b"{}")

  def ask(self, kind, seq, body, owner=_MODEL):
    """Returns the outcome of a request."""
    return self.wait(self.engine.queue.submit(kind, owner, seq, body).id)

  def wait(self, id):
    read = lambda: self.engine.journal.outcome(id)
    waiting.wait_until(lambda: read().is_done, f"no outcome of {id}", 300.0)
    outcome = read()
    if outcome.failure is not None:
      return outcome.failure["error"]
    return outcome.result

  def train(self, seq, loss="cross_entropy", data=_DATA, config=None):
    """Asks for a pass and a step; returns both outcomes."""
    body = serving_case.pass_body(data, loss, config)
    return (
        self.ask("forward_backward", seq, body),
        self.ask("optim_step", seq + 1, serving_case.adam_body()),
    )

  def logprobs(self, seq):
    body = serving_case.pass_body(_DATA, forward=True)
    result = protobufs.pass_result_to_json(self.ask("forward", seq, body))
    return [out["logprobs"]["data"] for out in result["loss_fn_outputs"]]

  def sample(self, sampler, seq, **params):
    body = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "num_samples": 2,
        "prompt_logprobs": True,
        "sampling_params": {"max_tokens": 6, **params},
    }
    raw = json.dumps(body).encode()
    result = self.ask("sample", seq, raw, owner=sampler)
    return protobufs.sample_result_to_json(result)

  def close(self):
    self.engine.stop()
    self.thread.join(60)


class EngineTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path

  def _start(self, **changes):
    server = _Server(self.workdir, **changes)
    self.addCleanup(server.close)
    return server

  @pytest.mark.slow
  def test_continues_after_kill_with_same_bits(self):
    """Two starts do what one does, whatever lies between two calls."""
    server = self._start()
    server.create()
    server.train(1)
    # A gradient under way, and a pass whose result nobody has read.
    server.ask("forward_backward", 3, serving_case.pass_body(_DATA))
    accepted = server.engine.queue.submit("optim_step", _MODEL, 4, b"{")
    self.assertIn("not JSON", server.wait(accepted.id))
    server.ask("optim_step", 5, serving_case.adam_body())
    self.assertIn(
        "without a gradient", server.ask("optim_step", 6, b'{"adam_params":{}}')
    )
    server.ask("forward_backward", 7, serving_case.pass_body(_DATA))
    server.close()

    # Another thread of the first has stopped: as after a kill, its memory and
    # what it had not finished are gone.
    for checkpoint_every_steps in (2, 100):
      again = self._start(checkpoint_every_steps=checkpoint_every_steps)
      expected = again.ask("optim_step", 8, serving_case.adam_body())
      run = again.engine.models.get(_MODEL).run
      self.assertEqual(run.num_steps, 3)
      logprobs = again.logprobs(9)
      again.close()

    with self.subTest("as one start"):
      self.workdir = self.create_tempdir().full_path
      one = self._start(checkpoint_every_steps=100)
      one.create()
      one.train(1)
      one.train(3)
      _, step = one.train(5)
      self.assertEqual(json.loads(step), json.loads(expected))
      self.assertEqual(one.logprobs(7), logprobs)

  @pytest.mark.slow
  def test_does_requests_in_order_of_their_numbers(self):
    server = self._start(gap_deadline_s=1.5)
    server.create()
    step = server.engine.queue.submit(
        "optim_step", _MODEL, 2, serving_case.adam_body()
    )
    result = server.ask("forward_backward", 1, serving_case.pass_body(_DATA))
    self.assertIn(b"step:max", server.wait(step.id))
    with self.subTest("again"):
      again = server.ask("forward_backward", 1, serving_case.pass_body(_DATA))
      self.assertEqual(again, result)
      self.assertEqual(server.engine.models.get(_MODEL).run.num_steps, 1)
    with self.subTest("gap"):
      late = server.ask("optim_step", 4, serving_case.adam_body())
      self.assertIn(
          "waited 2 s (config.serve.gap_deadline_s) for seq_id 3", late
      )
      server.ask("forward_backward", 3, serving_case.pass_body(_DATA))
      self.assertIn(
          b"step:max", server.ask("optim_step", 5, serving_case.adam_body())
      )

  @pytest.mark.slow
  def test_passes_and_steps_match_optax(self):
    """Padding, adapters and the cut of a batch change nothing."""
    server = self._start()
    server.create(rank=0)
    engine = server.engine
    model, params = engine.base.policy.model, jax.tree.map(
        np.asarray, engine.base.params
    )

    def loss_fn(params):
      total = 0.0
      for ids, first in (([1, 2, 3, 4, 5], 2), ([3, 4, 5, 6, 7, 8], 0)):
        logits = model.logits(
            params, jnp.array([ids]), jnp.ones((1, len(ids)), jnp.int32)
        )
        logprobs = logprobs_lib.token_logprobs(
            logits[0, :-1], jnp.array(ids[1:]), temperature=1.0
        )
        total -= logprobs[first:].sum()
      return total

    grads = jax.grad(loss_fn)(params)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1),
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = optax.apply_updates(params, updates)

    for seq, data in ((1, _DATA[:1]), (2, _DATA[1:])):
      server.ask("forward_backward", seq, serving_case.pass_body(data))
    body = serving_case.adam_body(
        eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0
    )
    metrics = json.loads(server.ask("optim_step", 3, body))["metrics"]
    np.testing.assert_allclose(
        metrics["grad_norm:mean"], optax.tree.norm(grads), rtol=1e-4
    )
    result = engine.models.get(_MODEL).run.params
    # Adam's first step of a gradient near 0 may have either sign.
    close = jax.tree.map(
        lambda a, b: np.mean(np.abs(a - b) < 1e-5), result, expected
    )
    self.assertGreater(min(jax.tree.leaves(close)), 0.97)

  @pytest.mark.slow
  def test_objectives_of_groups_match_trainer(self):
    """Trajectory balance by its formula, with VarGrad's log Z."""
    server = self._start()
    server.create()
    server.train(1)
    data, rewards = [], [0.0, 1.0, 3.0]
    for k, reward in enumerate(rewards):
      data.append(
          serving_case.datum(
              [1, 2, 3 + k, 4, 5],
              weights=[0.0, 1.0, 1.0, 1.0],
              logprobs=[0.0, -1.0, -1.0, -1.0],
              reward=[reward],
              group=[7],
          )
      )
    beta = 0.3
    body = serving_case.pass_body(data, "tb", {"beta": beta})
    result = protobufs.pass_result_to_json(
        server.ask("forward_backward", 3, body)
    )
    engine = server.engine
    run = engine.models.get(_MODEL).run

    def seq_logprobs(params):
      tokens = [[1, 2, 3 + k, 4, 5] for k in range(3)]
      values = run.programs.tokens.logprobs(
          params, [np.array(ids, np.int32) for ids in tokens]
      )
      return np.array([v[2:].sum() for v in values])

    rho = seq_logprobs(run.programs.trainable.merged(run.params))
    rho = rho - seq_logprobs(engine.base.params)
    residual = rho - np.array(rewards) / beta
    residual -= residual.mean()
    np.testing.assert_allclose(
        result["metrics"]["loss:mean"],
        # By config.loss.scale.
        beta / 2 * np.mean(residual**2),
        rtol=1e-4,
    )
    self.assertEqual(result["metrics"]["groups:sum"], 1)
    with self.subTest("refuses"):
      of_group = lambda id: {
          **data[2],
          "loss_fn_inputs": {
              **data[2]["loss_fn_inputs"],
              "group": {"data": [id], "dtype": "float32"},
          },
      }
      for change, message in (
          (dict(data=data[:2] + [data[2], _DATA[0]]), "reads weights"),
          (dict(loss="ppo2"), "must be cross_entropy"),
          (dict(loss="subtb"), "must be cross_entropy"),
          (dict(config={"beta": -1.0}), "loss_fn_config.beta = -1.0"),
          (dict(config={"x": 1.0}), "loss_fn_config.x"),
          (dict(data=data[:1]), "needs groups of 2"),
          *(
              (dict(data=[*data[:2], of_group(id)]), f"data[2]: group = {id}")
              for id in (0.5, 2.0**24)
          ),
      ):
        asked = {"data": data, "loss": "tb", "config": {"beta": beta}, **change}
        seq = engine.journal.last_seq(_MODEL) + 1
        body = serving_case.pass_body(**asked)
        self.assertIn(message, server.ask("forward_backward", seq, body))

  @pytest.mark.slow
  def test_does_not_repeat_failed_pass(self):
    """Neither a pass that failed, nor a forward one, has an effect."""
    server = self._start(checkpoint_every_steps=100)
    server.create()
    # As by a version, or in memory, that could not do it.
    with mock.patch.object(
        trained_model.TrainedModel, "run_pass", side_effect=ValueError("x")
    ):
      self.assertEqual(
          server.ask("forward_backward", 1, serving_case.pass_body(_DATA)), "x"
      )
    server.ask("forward", 2, serving_case.pass_body(_DATA, forward=True))
    server.close()

    again = self._start(checkpoint_every_steps=100)
    with mock.patch.object(
        trained_model.TrainedModel, "run_pass", autospec=True
    ) as run_pass:
      step = again.ask("optim_step", 3, serving_case.adam_body())
    run_pass.assert_not_called()
    self.assertIn("without a gradient", step)

  def test_replayed_step_drops_gradient_again(self):
    server = self._start(checkpoint_every_steps=100)
    server.create()
    huge = [serving_case.datum([1, 2, 3], weights=[3e38, 3e38])]
    server.ask("forward_backward", 1, serving_case.pass_body(huge))
    self.assertIn(
        "gradient is dropped",
        server.ask("optim_step", 2, serving_case.adam_body()),
    )
    server.close()
    again = self._start(checkpoint_every_steps=100)
    self.assertIn(
        "without a gradient",
        again.ask("optim_step", 3, serving_case.adam_body()),
    )

  def test_reports_unrepeatable_request(self):
    """A model whose requests end otherwise than before is not served."""
    server = self._start(checkpoint_every_steps=100)
    server.create()
    server.train(1)
    server.close()
    again = self._start(checkpoint_every_steps=100)
    with mock.patch.object(
        trained_model.TrainedModel, "run_pass", side_effect=ValueError("x")
    ):
      request = again.engine.queue.submit(
          "optim_step", _MODEL, 3, serving_case.adam_body()
      )
      self.assertIn(
          f"{_MODEL}:1 cannot be done again: x", again.wait(request.id)
      )
    outcome = again.engine.journal.outcome(request.id)
    self.assertEqual(outcome.failure["category"], "server")
    # Nothing is left of the attempt.
    self.assertIn(b"step:max", again.train(4)[1])

  @pytest.mark.slow
  def test_damaged_checkpoint_is_server_error(self):
    server = self._start(checkpoint_every_steps=1)
    server.create()
    server.train(1)
    server.close()
    again = self._start(checkpoint_every_steps=1)
    with mock.patch.object(
        checkpoint.Checkpointer,
        "restore",
        side_effect=ValueError("damaged"),
    ):
      request = again.engine.queue.submit(
          "optim_step", _MODEL, 3, serving_case.adam_body()
      )
      self.assertIn("damaged", again.wait(request.id))
    outcome = again.engine.journal.outcome(request.id)
    self.assertEqual(outcome.failure["category"], "server")
    self.assertEqual(again.engine.models.in_memory, [])
    self.assertIn(b"step:max", again.train(4)[1])

  @pytest.mark.slow
  def test_samples_from_current_checkpoint_of_path(self):
    server = self._start()
    server.create()
    save = b'{"path": "a", "overwrite": true}'
    path = json.loads(server.ask("save_weights", 1, save))["path"]
    server.engine.registry.add_sampler("s", "", path)
    before = server.sample("s", 1, seed=5)
    server.train(2)
    server.ask("save_weights", 4, save)
    after = server.sample("s", 2, seed=5)
    self.assertNotEqual(after["prompt_logprobs"], before["prompt_logprobs"])

  def test_save_killed_before_its_outcome_is_done_again(self):
    server = self._start()
    server.create()
    engine, path, written = server.engine, f"tinker://{_MODEL}/weights/a", []

    def stop(outcomes):
      self.assertIn(f"{_MODEL}:1", outcomes)
      written.append(engine.registry.checkpoint(path))
      engine.stop()  # Without the outcome.

    with mock.patch.object(engine.journal, "finish", stop):
      engine.queue.submit("save_weights", _MODEL, 1, b'{"path": "a"}')
      server.thread.join(60)
    self.assertIsNotNone(*written)
    again = self._start()
    self.assertEqual(json.loads(again.wait(f"{_MODEL}:1"))["path"], path)
    self.assertIn(
        "give overwrite", again.ask("save_weights", 2, b'{"path": "a"}')
    )

  def test_names_of_checkpoints_are_checked_and_have_default(self):
    server = self._start()
    server.create()
    for seq, (kind, body, message) in enumerate(
        (
            ("save_weights_for_sampler", b'{"path": 5}', "path = 5: must be"),
            ("save_weights", b'{"path": "unnamed-1"}', "without the prefix"),
            ("save_weights", b'{"path": "a", "overwrite": 1}', "overwrite = 1"),
            ("save_weights", b"{}", b"/weights/seq-4"),
        ),
        start=1,
    ):
      self.assertIn(message, server.ask(kind, seq, body))

  def test_failed_checkpoint_does_not_stop_engine(self):
    server = self._start()
    server.create()
    with mock.patch.object(
        checkpoint.Checkpointer, "close", side_effect=OSError("full")
    ), self.assertLogs(level="ERROR") as logs:
      server.engine.models.forget(_MODEL)
    self.assertIn("full", logs.output[0])

  @pytest.mark.slow
  def test_versions_do_not_change_and_checkpoints_load(self):
    server = self._start()
    server.create()
    server.train(1)
    saved = json.loads(server.ask("save_weights", 3, b'{"path": "a"}'))["path"]
    version = json.loads(server.ask("save_weights_for_sampler", 4, b"{}"))
    sampler = version["sampling_session_id"]
    before, logprobs = server.sample(sampler, 1, seed=5), server.logprobs(5)
    again = server.ask("save_weights", 6, b'{"path": "a"}')
    self.assertIn("give overwrite", again)
    server.train(7)
    self.assertNotEqual(server.logprobs(9), logprobs)

    with self.subTest("version"):
      after = server.sample(sampler, 2, seed=5)
      self.assertEqual(after, before)
      sequence = before["sequences"][0]
      self.assertLen(sequence["logprobs"], len(sequence["tokens"]))
      self.assertIsNone(before["prompt_logprobs"][0])
    with self.subTest("after a restart"):
      server.close()
      server = self._start()
      self.assertEqual(server.sample(sampler, 3, seed=5), before)
    with self.subTest("load"):
      body = json.dumps({"path": saved, "optimizer": True}).encode()
      server.ask("load_weights", 10, body)
      self.assertEqual(server.logprobs(11), logprobs)
    with self.subTest("refuses"):
      body = json.dumps({"path": saved + "x", "optimizer": True}).encode()
      self.assertIn("no such checkpoint", server.ask("load_weights", 12, body))

  def test_samples_have_log_probs_of_model(self):
    server = self._start()
    server.engine.registry.add_sampler("s", "", "")
    result = server.sample("s", 1)
    programs = server.engine.base.scorer()
    for sequence in result["sequences"]:
      ids = np.array([1, 2, 3, *sequence["tokens"]], np.int32)
      (values,) = programs.logprobs(server.engine.base.params, [ids])
      np.testing.assert_allclose(sequence["logprobs"], values[3:], atol=1e-4)
      np.testing.assert_allclose(
          result["prompt_logprobs"][1:], values[1:3], atol=1e-4
      )
    self.assertNotEqual(
        result["sequences"][0]["tokens"], result["sequences"][1]["tokens"]
    )

  @pytest.mark.slow
  def test_on_policy_ratios_are_1_at_any_temperature(self):
    """However a completion is drawn: of token losses, and of groups."""
    for of_server, loss in ((1.0, "importance_sampling"), (0.7, "ppo")):
      self.workdir = self.create_tempdir().full_path
      config = serving_case.make_config()
      config.sampling.temperature = of_server
      server = _Server(self.workdir, config)
      self.addCleanup(server.close)
      server.create()
      server.train(1)  # Adapters of zeros would be the base model.
      version = json.loads(server.ask("save_weights_for_sampler", 3, b"{}"))
      sampler, seq = version["sampling_session_id"], 4
      for n, drawn in enumerate(
          (
              {"temperature": 0.7},
              {"temperature": 1.0},
              {"temperature": 0.0},
              {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
          )
      ):
        actual = server.sample(sampler, n, seed=n, **drawn)
        sequences = [([1, 2, 3, *s["tokens"]], s) for s in actual["sequences"]]
        inputs = lambda s: {
            "logprobs": [0.0, 0.0, *s["logprobs"]],
            "advantages": [0.0, 0.0] + [1.0] * len(s["tokens"]),
        }
        data = [serving_case.datum(ids, **inputs(s)) for ids, s in sequences]
        groups = [
            serving_case.datum(
                ids,
                logprobs=[0.0, 0.0, *s["logprobs"]],
                weights=[0.0, 0.0] + [1.0] * len(s["tokens"]),
                reward=[k],
                group=[0],
            )
            for k, (ids, s) in enumerate(sequences)
        ]
        for name, some in ((loss, data), ("cispo", data), ("tb", groups)):
          body = serving_case.pass_body(some, name, forward=True)
          result = protobufs.pass_result_to_json(
              server.ask("forward", seq, body)
          )
          seq += 1
          for out, (_, s) in zip(result["loss_fn_outputs"], sequences):
            values = np.array(out["logprobs"]["data"][2:])
            with self.subTest(of_server=of_server, loss=name, **drawn):
              ratio = np.exp(values - s["logprobs"])
              np.testing.assert_allclose(ratio, 1, atol=1e-4)
              if name == loss:
                losses = out["elementwise_loss"]["data"][2:]
                np.testing.assert_allclose(losses, -1, atol=1e-4)

  @pytest.mark.slow
  def test_completions_take_age_from_pass(self):
    """`ema` divides by it; one that is not given counts as 1."""
    server = self._start()
    server.create()
    losses = []
    for seq, staleness in enumerate(([], [1], [4]), start=1):
      inputs = {"staleness": staleness} if staleness else {}
      data = [
          serving_case.datum(
              [1, 2, 3 + k, 4],
              weights=[0.0, 1.0, 1.0],
              logprobs=[0.0, -1.0, -1.0 - k],
              reward=[0],
              group=[0],
              **inputs,
          )
          for k in range(2)
      ]
      body = serving_case.pass_body(
          data, "tb", {"beta": 0.3, "anchor": "ema"}, forward=True
      )
      result = protobufs.pass_result_to_json(server.ask("forward", seq, body))
      losses.append(result["metrics"]["loss:mean"])
    self.assertEqual(losses[0], losses[1])
    self.assertLess(losses[2], losses[1])

  @pytest.mark.slow
  def test_continues_from_older_checkpoint_if_newest_is_damaged(self):
    """The requests between the two still have their bodies."""
    save = checkpoint.Checkpointer.save
    complete = lambda *args, wait: save(*args, wait=True)
    with mock.patch.object(checkpoint.Checkpointer, "save", complete):
      server = self._start(checkpoint_every_steps=1)
      server.create()
      for seq in (1, 3):
        server.train(seq)
      expected = server.logprobs(5)
      server.close()
    folder = server.engine.weights.model_folder(_MODEL) / "state"
    newest = max((f for f in folder.iterdir() if f.name.isdecimal()),
                 key=lambda f: int(f.name))  # fmt: skip
    for file in newest.rglob("*"):
      if file.is_file():
        file.write_bytes(b"")
    again = self._start(checkpoint_every_steps=1)
    self.assertEqual(again.logprobs(6), expected)
    self.assertTrue((folder / f"damaged-{newest.name}").exists())
    dropped = [r.seq for r, _ in again.engine.journal.since(_MODEL, -1)
               if r.body is None]  # fmt: skip
    self.assertEqual(dropped, [0, 1, 2])

  def test_makes_room_for_models_and_reads_them_again(self):
    server = self._start(max_models=1)
    server.create()
    server.train(1)
    expected = server.logprobs(3)
    server.ask("forward_backward", 4, serving_case.pass_body(_DATA))
    other = "session:train:1"
    lora = schemas.LoraConfig(rank=2, seed=2)
    spec = server.engine.base.spec_of(other, lora)
    server.engine.registry.add_model(other, "session", spec)
    server.ask("create_model", 0, b"{}", owner=other)
    self.assertEqual(server.engine.models.in_memory, [other])
    self.assertEqual(server.logprobs(5), expected)
    # The gradient under way came with it.
    step = server.ask("optim_step", 6, serving_case.adam_body())
    self.assertEqual(json.loads(step)["metrics"]["step:max"], 2)
