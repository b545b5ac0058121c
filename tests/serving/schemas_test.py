# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schemas of requests: what is taken, and what each refusal says."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import strict_json
from tba_jax.serving import schemas as api

_USER = {"role": "user", "content": "a"}
_CHAT = {"model": "m", "messages": [_USER]}
_TEXT = {"model": "m", "prompt": "a"}
_SAMPLE = {
    "sampling_session_id": "s",
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {},
}
_REPLAY = {
    "session_id": "s", "replay_seq_id": 0, "base_model": "m", "adam_params": {},
    "prompts_per_batch": 1, "completions_per_prompt": 2, "num_steps": 1,
}  # fmt: skip
_MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "m"}


def _chunk(*tokens):
  return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def _drawn(**params):
  return {"sampling_params": params}


class JsonTest(absltest.TestCase):

  def test_body_must_be_json_object(self):
    for body in (
        b"", b"[", b"\xff", b"NaN", b'{"a": NaN}', b'{"a": -Infinity}',
        b'{"a": "\\uD83D."}', b'{"a": ' + b"[" * 10**5, b'{"a": 1}x',
        b'{"a": ' + b"9" * 5000 + b"}",
    ):  # fmt: skip
      with self.assertRaisesRegex(ValueError, "the body is not JSON: "):
        strict_json.parse_json(body)
    for body in (b"[1]", b"null", b"3"):
      with self.assertRaisesRegex(ValueError, "must be a JSON object"):
        strict_json.parse_json(body)
    whole = b'{"a": "\\ud83d\\ude00"}'
    self.assertEqual(strict_json.parse_json(whole), {"a": "\N{GRINNING FACE}"})

  def test_order_of_keys_does_not_matter(self):
    self.assertEqual(
        strict_json.in_one_form(b'{"a": 1, "b": 2}'),
        strict_json.in_one_form(b'{"b":2,"a":1}'),
    )
    with self.assertRaisesRegex(ValueError, "Out of range"):
      strict_json.in_one_form(b'{"unread": 1e999}')


class RefusalsTest(parameterized.TestCase):

  @parameterized.parameters(
      # No type is taken for another.
      (api.OfModel, {"model_id": 3}, "model_id = 3: must be a valid string"),
      (api.OfModel, {}, "model_id: is missing"),
      (api.OfModel, {"model_id": "m", "seq_id": "1"}, "seq_id = '1': must be"),
      (api.OfModel, {"model_id": "m", "seq_id": 1.0}, "seq_id = 1.0: must be"),
      (api.OfModel, {"model_id": "m", "seq_id": True}, "seq_id = True: must"),
      (api.OfModel, {"model_id": "m", "seq_id": 2**62}, "must be less than"),
      (api.OfModel, {"model_id": "m", "seq_id": -1}, "seq_id = -1: must be"),
      (api.RetrieveFutures, {"target": {"sampling_session_id": "s"},
                             "timeout": 10**400}, "timeout = 1.*: must be"),
      (api.RetrieveFutures, {"target": {"sampling_session_id": "s"},
                             "timeout": float("inf")}, "must be a finite"),
      (api.RetrieveFutures, {"target": [1]}, "target = .1.: must be an object"),
      (api.LoadWeights, {"path": "p", "optimizer": "yes"},
       "optimizer = 'yes': "),
      (api.OptimStep, {}, "adam_params: is missing"),
      (api.OptimStep, {"adam_params": {"rate": 3}}, "adam_params: rate: not"),
      (api.OptimStep, {"adam_params": {"beta1": 1}}, "adam_params.beta1 = 1: "),
      (api.OptimStep, {"adam_params": {"eps": -1.0}}, "adam_params.eps = -1.0"),
      (api.OptimStep, {"adam_params": {"learning_rate": 1e39}}, "must be less"),
      (api.SaveWeights, {"path": 5}, "path = 5: must be"),
      (api.SaveWeights, {"path": "unnamed-1"},
       "path = 'unnamed-1': .* the prefix"),
      (api.SaveWeights, {"path": "../x"},
       "path = '../x': must be a name of letters"),
      (api.SaveWeights, {"path": "a", "overwrite": 1},
       "overwrite = 1: must be"),
      (api.CreateModel, {**_MODEL, "lora_config": {"rank": -1}},
       "lora_config.rank = -1: must be greater"),
      (api.CreateModel, {**_MODEL, "lora_config": {"rank": 2, "alpha": 1}},
       "lora_config: alpha: not supported by this server; fields are rank"),
      (api.CreateModel, {**_MODEL, "optimizer_config": {"type": "muon"}},
       "optimizer_config.type = 'muon': must be 'adamw'"),
      (api.CreateModel, {**_MODEL, "user_metadata": {"a": [float("inf")]}},
       r"^user_metadata.a.0. = inf: must be a finite number"),
      (api.FinishEpisode, {}, "reward: is missing"),
      (api.FinishEpisode, {"reward": 1e39}, "reward = 1e.39: must be less"),
      (api.FinishEpisode, {"reward": True}, "reward = True: must be"),
      (api.FinishEpisode, {"reward": 1.0, "x": 1}, "x: not supported"),
      *((api.RewardSample, {"request_id": "r", "rewards": [reward]},
         r"rewards.0. = .*: must be")
        for reward in (1e39, 10**400, float("nan"), True, "1", None)),
      (api.CreateEpisode, {"x": 1}, "x: not supported .* fields are"),
      (api.CreateEpisode, {"into": "y"}, "into = 'y': must be"),
      (api.CreateEpisode, {"group": "../g"}, "group = '../g': must be"),
      (api.CreateReplay, {**_REPLAY, "num_steps": 0}, "num_steps = 0: must be"),
      (api.CreateReplay, {**_REPLAY, "num_steps": None}, "num_steps = None: "),
      (api.CreateReplay, {**_REPLAY, "x": 1}, "x: not supported"),
      (api.CreateReplay, {**_REPLAY, "prompts_per_batch": 2**20},
       "prompts_per_batch = 1048576, .* must be up to 65536"),
      (api.CreateReplay, {**_REPLAY, "replay": {"capacity": []}},
       "replay.capacity = .*: must be a number, a text"),
      (api.CreateReplay, {**_REPLAY, "model_path": "p",
                          "lora_config": {"rank": 1}}, "must be left out with"),
      *((api.CreateReplay, {**_REPLAY, "loss_fn_config": {"a": value}},
         "loss_fn_config.a = .*: must be a number or a text")
        for value in ([], None, 10**400, True)),
      (api.LoadWeights, [1], "must be an object"),
  )  # fmt: skip
  def test_error_names_field_and_constraint(self, kind, body, message):
    with self.assertRaisesRegex(ValueError, message) as raised:
      strict_json.read(kind, body)
    self.assertNotIn("\n", str(raised.exception))
    self.assertLess(len(str(raised.exception)), 501)

  @parameterized.parameters(
      ({"num_samples": 0}, "num_samples = 0: must be"),
      ({"num_samples": 4097}, "num_samples = 4097: must be"),
      ({"prompt": [1]}, "prompt = .1.: must be an object"),
      ({"prompt": _chunk(-1)}, r"prompt.chunks.0..tokens.0. = -1: must be"),
      ({"prompt": _chunk("1")}, r"prompt.chunks.0..tokens.0. = '1': must be"),
      ({"prompt": _chunk(2**31)}, "must be less than"),
      ({"prompt": {"chunks": [{"type": "image"}]}}, "must be 'encoded_text'"),
      ({"prompt": {"chunks": [[]]}}, r"prompt.chunks.0. = ..: must be an obj"),
      (_drawn(stop=[2**40]), "stop = .*: must be a text, .* of token ids"),
      (_drawn(stop=[-1]), "stop = .*: must be a text, .* of token ids"),
      (_drawn(stop=[""]), "none empty"),
      (_drawn(stop=["x"] * 65), "up to 64"),
      (_drawn(stop=["x", 1]), "stop = .*: must be a text"),
      (_drawn(temperature=1e-37), "temperature = 1e-37: must be 0, or .001"),
      (_drawn(temperature=-1), "temperature = -1.*: must be 0, or .001"),
      (_drawn(top_p=1e-320), "top_p = .*: must be greater"),
      (_drawn(top_k=-5), "top_k = -5: must be greater"),
      (_drawn(max_tokens=0), "max_tokens = 0: must be greater"),
      (_drawn(seed="a"), "seed = 'a': must be"),
      (_drawn(y=2), "sampling_params: y: not supported"),
      ({"prompt_logprobs_last_n": -1}, "prompt_logprobs_last_n = -1: must be"),
      ({"record_stability_info": True}, "loss_fn=importance_sampling"),
      ({"into": "buffer"}, "into = 'buffer': must be"),
      ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs: not supported"),
  )
  def test_samples(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      strict_json.read(api.Sample, {**_SAMPLE, **changes})

  @parameterized.parameters(
      ({"n": 129}, "n = 129: must be less"),
      ({"n": 0}, "n = 0: must be greater"),
      ({"n": True}, "n = True: must be"),
      ({"presence_penalty": 0.5}, "presence_penalty: not supported"),
      ({"response_format": {"type": "json_object"}}, "response_format: not"),
      ({"top_logprobs": 3}, "top_logprobs: not supported"),
      ({"logprobs": 5}, "logprobs = 5: must be true or 1"),
      ({"tool_choice": "required"}, "tool_choice = 'required': must be"),
      ({"tools": [1]}, r"tools.0. = 1: must be an object"),
      ({"tools": [{"type": "function", "function": {}}]}, "name: is missing"),
      ({"max_tokens": 0}, "max_tokens = 0: must be"),
      ({"stop": 5}, "stop = 5: must be a text"),
      ({"stop": [3]}, "stop = .3.: must be a text"),
      ({"prompt": "a"}, "prompt: not supported"),
      ({"messages": []}, "messages = ..: must have at least 1 item"),
      ({"messages": [{"role": "x"}]}, r"messages.0..role = 'x': must be"),
      ({"messages": ["a"]}, r"messages.0. = 'a': must be an object"),
      ({"messages": [{**_USER, "content": [{"type": "image_url"}]}]},
       r"messages.0..content = .*: must be a text, or parts"),
      ({"messages": [{**_USER, "content": ["a"]}]}, "must be a text, or parts"),
      ({"messages": [{**_USER, "tool_calls": [{}]}]}, "function: is missing"),
      ({"messages": [{**_USER, "name": 3}]}, r"messages.0..name = 3: must be"),
  )  # fmt: skip
  def test_chats(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      strict_json.read(chat_requests.ChatRequest, {**_CHAT, **changes})

  def test_prompts_of_completions(self):
    for prompt in ("", [], ["a", "b"], [1.5], [True], [-1], {}, 3):
      with self.assertRaisesRegex(ValueError, "must be one text, or a list of"):
        strict_json.read(chat_requests.TextRequest, {**_TEXT, "prompt": prompt})
    with self.assertRaisesRegex(ValueError, "prompt: is missing"):
      strict_json.read(chat_requests.TextRequest, {"model": "m"})
    self.assertEqual(
        strict_json.read(
            chat_requests.TextRequest, {**_TEXT, "prompt": ["a"]}
        ).prompt,
        "a",
    )


class ReadingTest(absltest.TestCase):

  def test_accepts_neutral_fields(self):
    nothing = dict(topk_prompt_logprobs=0, base_model=None, seq_id=None, x=[])
    plain = strict_json.read(api.Sample, _SAMPLE)
    body = {**_SAMPLE, **nothing, "type": "sample"}
    self.assertEqual(strict_json.read(api.Sample, body), plain)
    nothing = dict(response_format={"type": "text"}, logit_bias={}, n=1)
    nothing |= dict(modalities=["text"], presence_penalty=0.0, top_logprobs=0)
    nothing |= dict(best_of=1, max_tokens=None, stop=None, tools=None)
    plain = strict_json.read(chat_requests.ChatRequest, _CHAT)
    self.assertEqual(
        strict_json.read(chat_requests.ChatRequest, {**_CHAT, **nothing}), plain
    )

  def test_integers_are_taken_for_floats(self):
    drawn = strict_json.read(api.SamplingParams, {"temperature": 1, "top_p": 1})
    self.assertEqual((drawn.temperature, drawn.top_p), (1.0, 1.0))

  def test_stops_of_samples_are_ids_or_texts(self):
    for stop, expected in (
        (None, (None, ())),
        ("a", (None, ("a",))),
        (["a", "b"], (None, ("a", "b"))),
        ([3, 1], ((3, 1), ())),
        ([], ((), ())),
    ):
      drawn = strict_json.read(api.SamplingParams, {"stop": stop})
      self.assertEqual(drawn.stops, expected)

  def test_messages_have_one_form(self):
    """Those of the official client have fields that are null."""
    call = {"name": "f", "arguments": "{}"}
    plain = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "i", "type": "function", "function": call}],
    }
    forms = (
        plain,
        {**plain, "content": None, "refusal": None, "annotations": []},
        {**plain, "content": [], "audio": None},
    )
    for form in forms:
      body = {**_CHAT, "messages": [_USER, form]}
      result = strict_json.read(chat_requests.ChatRequest, body).chat
      self.assertEqual(result, [_USER, plain])

  def test_tools_are_kept_unless_choice_is_none(self):
    tool = {"function": {"x": 1, "parameters": {}, "name": "f"}, "type": "t"}
    body = {**_CHAT, "tools": [tool]}
    result = strict_json.read(chat_requests.ChatRequest, body).offered_tools
    self.assertEqual(str(result), str([tool]))  # Also their order.
    result = strict_json.read(
        chat_requests.ChatRequest, {**body, "tool_choice": "none"}
    )
    self.assertEqual(result.offered_tools, [])

  def test_newer_name_of_limit_counts(self):
    body = {**_CHAT, "max_tokens": 5, "max_completion_tokens": 3}
    self.assertEqual(
        strict_json.read(chat_requests.ChatRequest, body).most_tokens, 3
    )
    self.assertIsNone(
        strict_json.read(chat_requests.ChatRequest, _CHAT).most_tokens
    )

  def test_replay_waits_for_its_prompts_by_default(self):
    result = strict_json.read(api.CreateReplay, _REPLAY)
    self.assertEqual(result.groups_each_step, 1)
    again = strict_json.read(api.CreateReplay, result.model_dump())
    self.assertEqual(again, result)
    result = strict_json.read(
        api.CreateReplay, {**_REPLAY, "groups_per_step": 0}
    )
    self.assertEqual(result.groups_each_step, 0)
