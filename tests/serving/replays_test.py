# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay on the server: groups that enter, and the steps on them."""

from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.chat_api import strict_json
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas
from tba_jax.serving import served_replay
from tests.support import serving_case
from tests.support import waiting

_BODY = {
    "prompts_per_batch": 2,
    "completions_per_prompt": 2,
    "num_steps": 3,
    "adam_params": {"learning_rate": 0.01},
}


_ADDRESS = {"session_id": "s", "replay_seq_id": 0, "base_model": "scratch"}


def _row(ids, reward, version=0, **changes):
  return {
      "ids": list(ids),
      "mask": [1] * len(ids),
      "logprobs": [-0.5 * i for i in ids],
      "version": version,
      "stopped": True,
      "reward": reward,
      **changes,
  }


def _group(prompt, *, size=2, version=0):
  rows = [_row([5 + s, 6, 7], float(s), version) for s in range(size)]
  return served_replay.pack_group([prompt, 3], rows)


def _replay(config=None, **changes):
  config = config or serving_case.make_config()
  tokenizer = tokenizer_lib.word_level(["a"], r"\w+")
  return served_replay.ServedReplay(
      config,
      strict_json.read(schemas.CreateReplay, {**_BODY, **_ADDRESS, **changes}),
      tokenizer,
  )


class ReplayTest(absltest.TestCase):

  def test_draws_batches_of_inserted_groups(self):
    replay = _replay(prompts_per_batch=1)
    row = _row(
        [5, 6, 7],
        1.5,
        mask=[1, 0, 1],
        logprobs=[-0.25, 0.0, -0.75],
        version=2,
    )
    replay.insert(served_replay.pack_group([1, 2], [row, _row([8], 0.0)]), 0)
    batch, metrics = replay.draw(3)
    (k,) = np.flatnonzero(batch.rewards[0] == 1.5)
    self.assertEqual(batch.prompt_tokens[0, -2:].tolist(), [1, 2])
    self.assertEqual(batch.prompt_mask.sum(), 2)
    self.assertEqual(batch.completion_tokens[0, k, :3].tolist(), [5, 6, 7])
    self.assertEqual(batch.completion_mask[0, k, :4].tolist(), [1, 0, 1, 0])
    self.assertEqual(
        batch.behavior_logprobs[0, k, :3].tolist(), [-0.25, 0, -0.75]
    )
    with self.subTest("each has the age of its version"):
      self.assertEqual(batch.staleness_steps[0, [k, 1 - k]].tolist(), [1, 3])
    self.assertEqual(metrics["reward_mean"], 0.75)
    self.assertEqual(metrics["fresh_share"], 1.0)

  def test_leaves_out_stop_tokens_if_config_does(self):
    config = serving_case.make_config()
    config.loss.include_stop_token = False
    stop = tokenizer_lib.word_level(["a"], r"\w+").eos_id
    replay = _replay(config, prompts_per_batch=1)
    rows = [_row([5, stop], 1.0), _row([stop], 0.0)]
    replay.insert(served_replay.pack_group([3], rows), 0)
    batch, _ = replay.draw(0)
    order = np.argsort(-batch.rewards[0])
    masks = batch.completion_mask[0, order, :2]
    self.assertEqual(masks.tolist(), [[1, 0], [0, 0]])

  def test_accounts_for_inserted_groups(self):
    replay = _replay(
        prompts_per_batch=1, replay={"capacity": 5, "recent_fraction": 0.5}
    )
    for step in range(6):
      for n in range(3):
        replay.insert(_group(3 * step + n, version=step), step)
      replay.draw(step)
      state = replay.state()
      self.assertEqual(state["groups"], 3 * step + 3)
      self.assertEqual(
          state["entered"],
          state["trained"] + state["untrained"] + state["evicted"],
      )
    self.assertEqual(state["stored"], 5)
    self.assertGreater(state["evicted"], 0)

  def test_step_waits_for_its_groups(self):
    replay = _replay()
    self.assertEqual(replay.missing(0), 2)
    replay.insert(_group(1), 0)
    replay.insert(_group(2), 0)
    self.assertEqual((replay.missing(0), replay.missing(1)), (0, 2))
    replay = _replay(groups_per_step=0)
    self.assertEqual(replay.missing(3), 1)
    replay.insert(_group(1), 0)
    self.assertEqual(replay.missing(3), 0)

  def test_continues_as_before_from_its_state(self):
    a, b = (_replay(replay={"selection": "reward"}) for _ in range(2))
    for step in range(3):
      a.insert(_group(step % 2 + 1, size=3, version=step), step)
      a.draw(step)
    b.set_state(a.get_state())
    for replay in (a, b):
      replay.insert(_group(7), 3)
    (one, _), (two, _) = a.draw(3), b.draw(3)
    jax.tree.map(np.testing.assert_array_equal, vars(one), vars(two))
    self.assertEqual(a.state(), b.state())

  def test_rows_of_episodes_are_grouped_by_their_prompt(self):
    def episode(reward, *prompts, is_task=True):
      rows = [
          {
              "is_task": is_task,
              "prompt_ids": [p],
              "completion_ids": [5, 6],
              "sampled_mask": [1, 1],
              "logprobs": [-1.0, -2.0],
              "versions": [4, 3],
              "stopped": True,
          }
          for p in prompts
      ]
      return {"reward": reward, "rows": rows}

    groups, left_out = served_replay.groups_of_episodes(
        [
            episode(1.0, 1, 2),
            episode(0.0, 1, 3),
            episode(None, 1),
            episode(1.0, 1, is_task=False),
        ],
        2,
    )
    self.assertEqual(left_out, 4)
    (group,) = groups
    self.assertEqual(group["prompt_ids"], [1])
    self.assertEqual([r["reward"] for r in group["completions"]], [1.0, 0.0])
    self.assertEqual([r["version"] for r in group["completions"]], [3, 3])

  def test_refuses_rewards_of_another_number_or_too_few(self):
    one = {"tokens": [5], "logprobs": [-1.0], "stop_reason": "stop"}
    result = {"sequences": [one], "prompt_ids": [1], "version": 0}
    group = served_replay.group_of_sample(result, [3e38], 1)
    self.assertEqual(group["completions"][0]["reward"], 3e38)
    with self.assertRaisesRegex(ValueError, "rewards: must be 1 numbers"):
      served_replay.group_of_sample(result, [1.0, 2.0], 1)
    with self.assertRaisesRegex(ValueError, "1 completions: must be 2 or more"):
      served_replay.group_of_sample(result, [1.0], 2)

  def test_refuses_wrong_settings(self):
    for changes, message in (
        ({"x": 1}, "replay.x: must be one of capacity"),
        ({"recent_fraction": 2.0}, "replay.recent_fraction = 2.0: must be"),
        ({"selection": "best"}, "replay.selection = 'best': must be"),
        ({"capacity": "x"}, "replay: .*capacity"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        _replay(replay=changes)


class ServedReplayTest(absltest.TestCase):

  def _play(self, stops):
    """Trains three steps; restarts the server before the calls in `stops`."""
    self.workdir = self.create_tempdir().full_path
    self.server, self.calls = self._start(), 0
    self.stops = stops
    _, response = self._ask("create_session", {})
    status, made = self._ask(
        "create_replay",
        {
            **_BODY,
            "session_id": response["session_id"],
            "replay_seq_id": 0,
            "base_model": "scratch",
            "lora_config": {"rank": 2, "seed": 1},
            "loss_fn_config": {"beta": 0.1},
        },
    )
    self.assertEqual(status, 200, made)
    self.replay, sampler = made["replay_id"], made["sampling_session_id"]
    self.server.result((status, made))
    self._ask(f"replays/{self.replay}/start", {})
    for step in range(1, 4):
      for n in range(2):
        self._sample(sampler, [2 * step + n + 1], seed=step)
      state = self._wait_for(step)
    return state

  def _start(self):
    server = serving_case.HttpServer(self.workdir, checkpoint_every_steps=2)
    self.addCleanup(server.close)
    return server

  def _ask(self, path, body=None):
    self.calls += 1
    if self.calls in self.stops:
      self.server.close()
      self.server = self._start()
    return self.server.ask(f"api/v1/{path}", body)

  def _sample(self, sampler, prompt, seed):
    body = {
        "sampling_session_id": sampler,
        "num_samples": 2,
        "into": "replay",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 4, "seed": seed},
    }
    status, asked = self._ask("asample", body)
    self.assertEqual(status, 200, asked)
    result = self.server.result((status, asked))
    rewards = [float(s["tokens"][0] % 3) for s in result["sequences"]]
    body = {"request_id": asked["request_id"], "rewards": rewards}
    for _ in range(2):  # The second is the same.
      status, response = self._ask(f"replays/{self.replay}/reward", body)
      self.assertEqual(status, 200, response)

  def _wait_for(self, step):
    def state():
      return self.server.ask(f"api/v1/replays/{self.replay}")[1]

    is_last = step == _BODY["num_steps"]

    def is_done():
      now = state()
      # Its end comes after its last version.
      return now["version"] >= step and not (is_last and now["running"])

    waiting.wait_until(
        is_done,
        lambda: str(state()),
        120.0,
        is_lost=lambda: state()["reason"] not in ("", "not started", "done"),
    )
    return state()

  @pytest.mark.slow
  def test_failed_version_save_ends_replay_with_reason(self):
    save = mock.patch.object(
        saved_weights.SavedWeights,
        "save_version",
        side_effect=OSError("disk full"),
    )
    save.start()
    self.addCleanup(save.stop)
    with self.assertRaisesRegex(AssertionError, "disk full"):
      self._play(stops=())
    state = self.server.ask(f"api/v1/replays/{self.replay}")[1]
    self.assertEqual((state["running"], state["version"]), (False, 0))

  @pytest.mark.slow
  def test_trains_and_continues_after_restarts_with_same_bits(self):
    expected = self._play(stops=())
    self.assertEqual([s["step"] for s in expected["steps"]], [1, 2, 3])
    self.assertEqual((expected["running"], expected["reason"]), (False, "done"))
    self.assertEqual(expected["counts"]["groups"], 6)
    counts = expected["counts"]
    self.assertEqual(counts["entered"], 12)
    self.assertEqual(
        counts["trained"] + counts["untrained"] + counts["evicted"], 12
    )
    self.assertGreater(counts["trained"], 6)
    self.assertTrue(
        all(s["metrics"]["grad_norm:mean"] > 0 for s in expected["steps"])
    )
    # Between a sample and its reward, and while a step is taken.
    result = self._play(stops=(11, 15))
    self.assertEqual(result["steps"], expected["steps"])
    with self.subTest("says what a client may not ask of it"):
      for path, body, message in (
          ("optim_step", {"model_id": self.replay}, "the server numbers"),
          (
              f"replays/{self.replay}/reward",
              {"request_id": "x", "rewards": []},
              "no sample",
          ),
          ("replays/x/start", {}, "there is none"),
          (
              "create_episode",
              {
                  "sampling_session_id": result["sampling_session_id"],
                  "into": "replay",
                  "group": "a",
                  "num_episodes": 1,
              },
              "2 episodes or more",
          ),
      ):
        status, response = self._ask(path, body)
        self.assertIn(message, response["error"])

  def test_episodes_enter_as_group_once_all_have_finished(self):
    self.stops, self.calls = (), 0
    self.workdir = self.create_tempdir().full_path
    self.server = self._start()
    _, response = self._ask("create_session", {})
    _, made = self._ask(
        "create_replay",
        {
            **_BODY,
            "session_id": response["session_id"],
            "replay_seq_id": 0,
            "base_model": "scratch",
        },
    )
    replay = made["replay_id"]
    asked = {
        "sampling_session_id": made["sampling_session_id"],
        "into": "replay",
        "group": "a",
        "num_episodes": 3,
    }
    call = {"model": "scratch", "max_tokens": 2}
    call["messages"] = [{"role": "user", "content": "1+2"}]
    for reward in (1.0, 0.0, None):
      _, episode = self._ask("create_episode", asked)
      self.server.ask(f"{episode['path'].strip('/')}/chat/completions", call)
      end = f"episodes/{episode['episode_id']}/finish"
      _, done = self._ask(end, {"reward": reward})
    self.assertEqual(
        {k: done[k] for k in ("groups", "rows_left_out")},
        {"groups": 1, "rows_left_out": 1},
    )
    counts = lambda: self._ask(f"replays/{replay}")[1]["counts"]
    waiting.wait_until(
        lambda: counts().get("entered") == 2, lambda: str(counts()), 60.0
    )
    status, response = self._ask("create_episode", asked)
    self.assertEqual(status, 422)
    self.assertIn("group a has its 3 episodes", response["error"])

  @pytest.mark.slow
  def test_begins_with_checkpoint(self):
    self.stops, self.calls = (), 0
    self.workdir = self.create_tempdir().full_path
    self.server = self._start()
    result = lambda path, body: self.server.result(self._ask(path, body))
    _, session = self._ask("create_session", {})
    base = {**session, "base_model": "scratch"}
    lora = {"rank": 3, "seed": 1}
    _, made = self._ask(
        "create_model", {**base, "model_seq_id": 0, "lora_config": lora}
    )
    model = {"model_id": made["model_id"]}
    asked = {"data": [serving_case.datum([3, 4, 5])]}
    asked["loss_fn"] = "cross_entropy"
    result("forward_backward", {**model, "forward_backward_input": asked})
    result("optim_step", {**model, "adam_params": {"learning_rate": 0.1}})
    path = result("save_weights", {**model, "path": "a"})["path"]
    body = {**_BODY, **base, "replay_seq_id": 0, "model_path": path}
    for _ in range(2):  # The second is the same.
      status, made = self._ask("create_replay", body)
      self.assertEqual(status, 200, made)

    def scores(sampler):
      prompt = {"type": "encoded_text", "tokens": [3, 4, 5]}
      body = {"prompt": {"chunks": [prompt]}, "prompt_logprobs": True}
      body |= {"sampling_session_id": sampler, "sampling_params": {}}
      return result("asample", body)["prompt_logprobs"][1:]

    begun = scores(made["sampling_session_id"])
    for number, (of, is_same) in enumerate(
        [({"model_path": path}, True), ({"base_model": "scratch"}, False)]
    ):
      of = {**session, **of, "sampling_session_seq_id": number}
      _, other = self._ask("create_sampling_session", of)
      actual = scores(other["sampling_session_id"])
      self.assertEqual(actual == begun, is_same)
    for changes, message in (
        (
            {"lora_config": lora},
            "lora_config: must be left out with model_path",
        ),
        ({"model_path": f"{path}x"}, "no such checkpoint"),
    ):
      _, response = self._ask(
          "create_replay", {**body, **changes, "replay_seq_id": 1}
      )
      self.assertIn(message, response["error"])
