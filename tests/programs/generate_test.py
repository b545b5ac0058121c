# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""generate and score: formats, continuing, equality with a forward pass."""

import contextlib
import io
import json
import pathlib
import re
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.losses import logprobs
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.programs import generate as programs_generate
from tba_jax.system import processes
from tests.support import sentencepiece_case
from tests.support import tiny_model
from tests.support import two_turns

configs_generate = variants.import_config("configs/generate.py")

_WORDS = [str(n) for n in range(10)] + ["+", "="]


def make_folder(path: str):
  """Writes a model of 15 tokens and returns it with its params."""
  tokenizer = tokenizer_lib.word_level(_WORDS, r"\d|.")
  model = tiny_model.make_model(vocab_size=tokenizer.vocab_size)
  params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
  hf.save(path, model.config, params, tokenizer)
  return model, params


class ProgramCase(absltest.TestCase):
  """Runs `program` on a file; it has no test of its own."""

  program = "generate"

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = f"{directory}/model"
    cls.model, cls.params = make_folder(cls.folder)
    cls.forward = staticmethod(jax.jit(cls.model.logits))
    cls.tokenizer = tokenizer_lib.load(cls.folder)

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.input = self.directory / "in.jsonl"
    self.output = self.directory / "out.jsonl"
    self.write(*({"prompt": f"{n}+{n}="} for n in range(5)))

  def write(self, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    self.input.write_text("\n".join(lines))

  def config(self, **changes):
    config = configs_generate.get_config("smoke")
    config.generate.model = self.folder
    config.generate.input = str(self.input)
    config.generate.output = str(self.output)
    config.generate.num_completions = 3
    config.generate.batch_lines = 2
    config.sampling.max_prompt_tokens = 6
    config.sampling.max_completion_tokens = 8
    for name, value in changes.items():
      section, _, key = name.partition("__")
      config[section][key] = value
    return config

  def run_program(self, **changes):
    config = self.config(**changes)
    validate.validate(config, program=self.program)
    run = getattr(programs_generate, f"run_{self.program}")
    with contextlib.redirect_stderr(io.StringIO()) as self.stderr:
      return run(config, None, [])

  def records(self):
    return [json.loads(line) for line in self.output.read_text().splitlines()]

  def expected(self, prompt, ids, temperature):
    """Returns a completion's log-probs by a full forward pass."""
    tokens = prompt + ids
    # Padded, so that one compilation is enough.
    padded = np.array([tokens + [0] * (16 - len(tokens))])
    logits = self.forward(self.params, padded, np.ones(padded.shape))
    result = logprobs.token_logprobs(
        logits[:, :-1], jnp.asarray(padded[:, 1:]), temperature=temperature
    )
    return np.asarray(result)[0, len(prompt) - 1 : len(tokens) - 1]


class GenerateTest(ProgramCase):

  def test_writes_records_with_logprobs(self):
    self.assertEqual(self.run_program(sampling__temperature=2.0), 0)
    records = self.records()
    self.assertEqual([r["line"] for r in records], [1, 2, 3, 4, 5])
    tokenizer, reasons = self.tokenizer, set()
    for record in records:
      self.assertLen(record["completions"], 3)
      prompt = tokenizer.encode(record["prompt"])
      for completion in record["completions"]:
        ids = completion["token_ids"]
        reasons.add(completion["finish_reason"])
        stopped = completion["finish_reason"] == "stop"
        self.assertEqual(ids[-1] == tokenizer.eos_id, stopped)
        self.assertTrue(stopped or len(ids) == 8)
        self.assertEqual(
            completion["text"], tokenizer.decode(ids[:-1] if stopped else ids)
        )
        expected = self.expected(prompt, ids, temperature=2.0)
        np.testing.assert_allclose(completion["logprobs"], expected, atol=1e-4)
    self.assertEqual(reasons, {"stop", "length"})

  def test_python_result_matches_program_output(self):
    self.run_program(generate__batch_lines=5)
    config = self.config(generate__input="", generate__output="")
    inputs = [f"{n}+{n}=" for n in range(4)] + [{"prompt": "4+4="}]
    result = programs_generate.complete(config, inputs)
    lines = [{"line": n, **r} for n, r in enumerate(result, start=1)]
    self.assertEqual(lines, self.records())
    self.assertEqual(programs_generate.complete(config, []), [])
    with self.assertRaisesRegex(ValueError, "input 2: the prompt is empty"):
      programs_generate.complete(config, ["1", ""])

  def test_resumed_bytes_match_one_go(self):
    self.run_program()
    whole = self.output.read_bytes()
    self.output.write_bytes(whole[: len(whole) // 2])
    self.assertEqual(self.run_program(generate__batch_lines=3), 0)
    self.assertEqual(self.output.read_bytes(), whole)
    self.assertIn("were done before", self.stderr.getvalue())
    self.assertEqual(self.run_program(sampling__top_k=2), 2)
    self.assertIn("begun with config.sampling.top_k", self.stderr.getvalue())

  def test_other_weights_of_same_path_do_not_resume(self):
    folder = self.directory / "model"
    shutil.copytree(self.folder, folder)
    self.assertEqual(self.run_program(generate__model=str(folder)), 0)
    before = self.output.read_bytes()
    params = tiny_model.init_params(self.model)
    hf.save(folder, self.model.config, params, self.tokenizer)
    self.assertEqual(self.run_program(generate__model=str(folder)), 2)
    self.assertIn("begun with weights = 'model ", self.stderr.getvalue())
    self.assertEqual(self.output.read_bytes(), before)

  def test_bad_lines_are_reported_and_rest_is_done(self):
    self.write(
        {"prompt": "1"},
        {"prompt": ""},
        {"prompt": "1234567"},
        "{",
        {"prompt": 3},
        {"messages": [{"role": "user", "content": "1"}]},
        {"prompt_token_ids": [3, 99]},
        {"prompt": "1", "prompt_token_ids": [3]},
        {"prompt": "\ud800"},
        {},
        {"prompt_token_ids": [3, 4]},
    )
    self.assertEqual(self.run_program(), 1)
    self.assertEqual([r["line"] for r in self.records()], [1, 11])
    self.assertEqual(self.records()[1]["prompt"], "01")
    printed = self.stderr.getvalue()
    for number, problem in (
        (2, "the prompt is empty"),
        (3, "has 7 tokens: must have 1 to config.sampling.max_prompt_tok"),
        (4, "not JSON"),
        (5, "prompt is int: must be a text"),
        (6, "must have a chat_template"),
        (7, "prompt_token_ids: must be a list of whole numbers from 0 to 14"),
        (8, "exactly one of"),
        (9, "not text"),
        (10, "exactly one of"),
    ):
      self.assertRegex(printed, f"in.jsonl:{number}: .*{problem}")
    self.assertIn("2 lines done, 9 failed", printed)

  def test_other_fields_are_copied(self):
    own = {"id": 7, "answer": ["2", None], "completion": "\ud800"}
    self.write(
        {"prompt": "1", **own, "max_tokens": 2, "line": 9, "completions": 3},
        {"prompt_token_ids": [3], "id": 8, "seed": 1},
    )
    self.assertEqual(self.run_program(), 0)
    first, second = self.records()
    self.assertEqual({name: first[name] for name in own}, own)
    self.assertEqual(set(first), {"line", "prompt", "completions", *own})
    self.assertEqual(first["line"], 1)
    self.assertLen(first["completions"], 3)
    self.assertEqual(set(second), {"line", "prompt", "completions", "id"})

  def test_line_seed_is_independent_of_position(self):
    seeded = {"prompt": "1", "seed": 5}
    others = {"prompt": "1"}, {"prompt": "2"}
    self.write(seeded, *others, seeded, {"prompt": "1", "seed": -1})
    self.assertEqual(self.run_program(), 1)
    one, plain, _, same = (r["completions"] for r in self.records())
    self.assertEqual(one, same)
    self.assertNotEqual(one, plain)
    self.assertIn("in.jsonl:5: seed=-1: must be", self.stderr.getvalue())

  def test_stop_tokens_and_min_p(self):
    ids = ",".join(str(n) for n in range(3, 15))
    self.assertEqual(self.run_program(sampling__stop_token_ids=ids), 0)
    ends = set()
    for record in self.records():
      for completion in record["completions"]:
        if completion["finish_reason"] == "stop":
          ends.add(completion["token_ids"][-1])
        self.assertTrue(all(i < 3 for i in completion["token_ids"][:-1]))
    self.assertGreater(len(ends), 1)
    self.output.unlink()
    # Only the likeliest token is left.
    self.run_program(sampling__min_p=0.999)
    for record in self.records():
      for completion in record["completions"]:
        np.testing.assert_allclose(completion["logprobs"], 0, atol=1e-6)
    self.output.unlink()
    with self.assertRaisesRegex(ValueError, r"ids=\[99\]: must be 0 to 14"):
      self.run_program(sampling__stop_token_ids="99")
    with self.assertRaisesRegex(
        validate.ConfigError, "sampling.stop_token_ids"
    ):
      self.run_program(sampling__stop_token_ids="3,x")

  def test_stop_strings_max_tokens_and_plain_logprobs(self):
    self.write(*({"prompt": f"{n}+", "max_tokens": 6 - n} for n in range(7)))
    self.assertEqual(
        self.run_program(
            sampling__stop_strings='["1", "+="]',
            sampling__top_k=5,
            generate__num_completions=6,
            generate__plain_logprobs=True,
        ),
        1,
    )
    self.assertIn(
        "in.jsonl:7: max_tokens=0: must be a whole number from 1 to 8",
        self.stderr.getvalue(),
    )
    tokenizer, cut = self.tokenizer, 0
    for number, record in enumerate(self.records()):
      for completion in record["completions"]:
        ids, reason = completion["token_ids"], completion["finish_reason"]
        self.assertLessEqual(len(ids), 6 - number)
        stop_token = ids[-1] == tokenizer.eos_id
        text = tokenizer.decode(ids[:-1] if stop_token else ids)
        if len(ids) < 6 - number:
          self.assertEqual(reason, "stop")
        if reason == "stop" and not stop_token:
          cut += 1
          self.assertEndsWith(text, ("1", "+="))
          self.assertEqual(completion["text"], text[: -1 - text.endswith("=")])
        else:
          self.assertEqual(completion["text"], text)
          self.assertNotRegex(text, r"1|\+=")
        self.assertLen(completion["plain_logprobs"], len(ids))
        more = np.subtract(completion["logprobs"], completion["plain_logprobs"])
        self.assertGreater(more.min(), 0.0)
    self.assertGreater(cut, 3)

  def test_greedy_gives_same_completion_each_time(self):
    self.run_program(sampling__temperature=0.0)
    for record in self.records():
      self.assertLen({c["text"] for c in record["completions"]}, 1)
      # The model's, not those of a choice without alternatives.
      self.assertLess(max(record["completions"][0]["logprobs"]), 0.0)

  def test_wrong_settings_are_named_before_anything_is_read(self):
    for changes, message in (
        ({"generate__model": "no/such"}, "config.generate.model = 'no/such'"),
        ({"generate__input": ""}, "config.generate.input = ''"),
        ({"generate__output": str(self.input)}, "another file than"),
        ({"generate__output": str(self.directory)}, "the name of a file"),
        ({"generate__output": f"{self.input}/x"}, "a file in a folder"),
        ({"sampling__temperature": -1.0}, "config.sampling.temperature = -1.0"),
        ({"tokenizer__bos": "maybe"}, "config.tokenizer.bos = 'maybe'"),
        *(
            ({"sampling__stop_strings": wrong}, "a JSON list of non-empty")
            for wrong in (
                '"1"',
                "[1]",
                '[""]',
                "[",
                '["\\ud800"]',
                '["\ufffd"]',
            )
        ),
    ):
      with self.assertRaisesRegex(validate.ConfigError, message):
        validate.validate(self.config(**changes), program="generate")

  def test_refuses_overlong_prompt_before_encoding_whole(self):
    long = "1+" * 500_000
    self.write(
        {"prompt": long},
        {"messages": [{"role": "user", "content": long}]},
        {"prompt": "1+2="},
    )
    lengths, encode = [], tokenizer_lib.Tokenizer.encode

    def counted(tokenizer, text, after=()):
      lengths.append(len(text))
      return encode(tokenizer, text, after)

    with mock.patch.object(tokenizer_lib.Tokenizer, "encode", counted):
      self.assertEqual(self.run_program(), programs_generate.EXIT_BAD_LINES)
    self.assertEqual(lengths, [len("1+2=")])
    self.assertEqual(
        self.stderr.getvalue().count("the prompt has 1000000 characters"), 2
    )
    self.assertEqual([r["line"] for r in self.records()], [3])

  def test_too_long_cache_is_one_clear_error(self):
    self.assertEqual(self.run_program(sampling__max_prompt_tokens=60), 2)
    self.assertRegex(
        self.stderr.getvalue(), "^error: sampling.max_prompt_tokens=60"
    )


class PlayTest(ProgramCase):
  """Lines are seeds of environments."""

  @classmethod
  def setUpClass(cls):
    super(ProgramCase, cls).setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = f"{directory}/model"
    words = ["a", "b", "c", "d", ":", "?", "add: ", "error", "\n", *"0123"]
    tokenizer = tokenizer_lib.word_level(words, r"add: |error|\n|.")
    model = tiny_model.make_model(vocab_size=tokenizer.vocab_size)
    hf.save(cls.folder, model.config, tiny_model.init_params(model), tokenizer)
    cls.tokenizer = tokenizer_lib.load(cls.folder)

  def config(self, **changes):
    config = super().config(sampling__max_completion_tokens=12, **changes)
    if "task" not in changes:
      config.task = ml_collections.ConfigDict(
          {
              "name": "environment",
              "source": f"{two_turns.__file__}:{self.environment}",
          }
      )
    config.reward.backend, config.reward.num_workers = "pool", 2
    return config

  environment = "TwoTurns"

  def test_episode_records_speaker_of_each_turn(self):
    self.write(*({"seed": seed, "id": f"n{seed}"} for seed in range(6)))
    self.assertEqual(self.run_program(), 0)
    records, counts = self.records(), set()
    for seed, record in enumerate(records):
      self.assertEqual((record["seed"], record["id"]), (seed, f"n{seed}"))
      self.assertEqual(record["prompt"], "abcd"[seed % 4] + ":")
      for one in record["completions"]:
        turns = one["turns"]
        # The environment repeats the last letter, and pays a turn's length.
        said = [t["text"] for t in turns if t["role"] == "policy"]
        answers = [t["text"] for t in turns if t["role"] == "environment"]
        for text, answer in zip(said, answers):
          # The last letter of a longer word may be unknown.
          ids = self.tokenizer.encode(f"{text[-1:]}:")
          self.assertEqual(answer, self.tokenizer.decode(ids))
        finished = one["finish_reason"] == "stop"
        counts.add((len(said), finished))
        if finished:
          self.assertTrue(one["success"])
          self.assertAlmostEqual(one["reward"], len("".join(said)) / 4)
        # Only the policy's tokens have log-probs.
        given = [i for i, x in enumerate(one["logprobs"]) if x is None]
        ids = [one["token_ids"][i] for i in given]
        self.assertEqual(self.tokenizer.decode(ids), "".join(answers))
    self.assertIn((2, True), counts)

  @pytest.mark.slow
  def test_environments_text_is_in_folders_chat_template(self):
    chat = self.directory / "chat"
    shutil.copytree(self.folder, chat)
    (chat / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}?{% endif %}"
    )
    self.write({"seed": 2})
    changes = {"generate__model": str(chat), "tokenizer__chat": True}
    self.assertEqual(self.run_program(**changes), 0)
    self.assertEqual(self.records()[0]["prompt"], "c:?")

  @pytest.mark.slow
  def test_resumed_bytes_match_one_go(self):
    self.write(*({"seed": seed} for seed in range(5)))
    self.assertEqual(self.run_program(), 0)
    whole = self.output.read_bytes()
    self.output.write_bytes(whole[: len(whole) // 2])
    self.assertEqual(self.run_program(), 0)
    self.assertEqual(self.output.read_bytes(), whole)

  def test_failures_and_bad_lines_are_reported(self):
    self.environment = "FailsToBegin"
    self.write({"seed": 0}, {"seed": 2}, {"prompt": "a"}, {"seed": -1})
    with mock.patch.object(validate, "validate"):
      self.assertEqual(self.run_program(), 1)
    good, bad = self.records()
    self.assertLen(good["completions"], 3)
    self.assertNotIn("failure", good)
    self.assertEqual(bad["completions"], [])
    self.assertIn("no seed 2", bad["failure"])
    self.assertIn("in.jsonl:3: must be seed", self.stderr.getvalue())
    self.assertIn("in.jsonl:4: seed=-1", self.stderr.getvalue())

  def test_calls_of_tools_are_shown(self):
    encode, stop = self.tokenizer.encode, [self.tokenizer.eos_id]
    spans = [
        (encode("add: 12") + stop, True),
        (encode("3\n"), False),
        (encode("3"), True),
        (encode("a") + stop, True),
        (encode("b:"), False),
    ]
    turns = programs_generate.turns_of(
        self.tokenizer,
        np.concatenate([ids for ids, _ in spans]),
        np.concatenate([[by] * len(ids) for ids, by in spans]),
        # The environment says nothing after the third turn, which a stop
        # string ended.
        np.cumsum([len(ids) for ids, _ in spans])[[0, 2, 3]],
        [{"function": {"name": "add"}}],
    )
    call = {"name": "add", "arguments": "12"}
    self.assertEqual(
        turns,
        [
            {"role": "policy", "text": "add: 12", "calls": [call]},
            {"role": "tool", "text": "3\n"},
            {"role": "policy", "text": "3"},
            {"role": "policy", "text": "a"},
            {"role": "environment", "text": "b:"},
        ],
    )


class ScoreTest(ProgramCase):

  program = "score"

  def test_logprobs_match_full_forward(self):
    pairs = [("1+2=", "3"), ("1", "23+4"), ("9+9=9", "0")]
    self.write(
        *({"prompt": p, "completion": c, "id": f"x{p}"} for p, c in pairs)
    )
    self.assertEqual(self.run_program(sampling__temperature=0.5), 0)
    actual = self.records()
    self.assertEqual([r["line"] for r in actual], [1, 2, 3])
    for (prompt, completion), record in zip(pairs, actual):
      ids = self.tokenizer.encode(completion)
      self.assertEqual(record["token_ids"], ids)
      self.assertEqual(record["id"], f"x{prompt}")
      # What a log of completions needs.
      self.assertEqual(record["prompt"], prompt)
      self.assertEqual(record["completion"], completion)
      prompt = self.tokenizer.encode(prompt)
      expected = self.expected(prompt, ids, temperature=0.5)
      np.testing.assert_allclose(record["logprobs"], expected, atol=1e-4)
      self.assertAlmostEqual(record["logprob"], sum(record["logprobs"]), 4)

  def test_samples_of_run_are_scored_as_they_were_sampled(self):
    encode = self.tokenizer.encode
    ids = [*encode("1"), *encode("2"), self.tokenizer.eos_id]
    one = {"prompt": "3+", "completion": "12"}
    tokens = self.tokenizer.tokens(ids)
    wrong = tokens[::-1], [*tokens, "no"], [1]
    self.write(
        one | {"tokens": tokens, "logprobs": [0.0] * 3},
        *(one | {"tokens": some} for some in wrong),
    )
    self.assertEqual(self.run_program(), 1)
    (first,) = self.records()
    self.assertEqual(first["token_ids"], ids)
    self.assertLess(max(first["logprobs"]), 0)
    self.assertEqual(self.stderr.getvalue().count("tokens: must be"), 3)

  def test_stop_token_is_appended_once(self):
    ids = [*self.tokenizer.encode("12"), self.tokenizer.eos_id]
    self.write(
        {"prompt": "3+", "completion": "12"},
        {"prompt": "3+", "completion_token_ids": ids},
    )
    self.assertEqual(self.run_program(generate__append_stop_token=True), 0)
    self.assertEqual([r["token_ids"] for r in self.records()], [ids, ids])

  def test_encodes_completion_as_continuation_of_prompt(self):
    words = sentencepiece_case.make()
    model = tiny_model.make_model(vocab_size=words.vocab_size)
    folder = str(self.directory / "words")
    hf.save(folder, model.config, tiny_model.init_params(model), words)
    self.write({"prompt": "a:", "completion": "42"})
    self.assertEqual(self.run_program(generate__model=folder), 0)
    (record,) = self.records()
    self.assertEqual(words.tokens(record["token_ids"]), ["42"])

  def test_bad_lines_are_reported_and_rest_is_done(self):
    self.write(
        {"prompt": "1", "completion": ""},
        {"prompt": "1"},
        {"prompt": "1", "completion": "123456789"},
        {"prompt": "", "completion": "1"},
        {"prompt": "1", "completion_token_ids": [-1]},
        {"prompt": "1", "completion": "1"},
    )
    self.assertEqual(self.run_program(), 1)
    self.assertEqual([r["line"] for r in self.records()], [6])
    for number, problem in (
        (1, "has 0 tokens"),
        (2, "exactly one of completion"),
        (3, "has 9 tokens: must have 1 to config.sampling.max_completion"),
        (4, "the prompt is empty"),
        (5, "must be a list of whole numbers"),
    ):
      self.assertRegex(
          self.stderr.getvalue(), f"in.jsonl:{number}: .*{problem}"
      )

  def test_reports_log_of_episodes(self):
    eos = self.tokenizer.eos_id
    ids = [*self.tokenizer.encode("12"), eos, *self.tokenizer.encode("=3"), eos]
    mask = [True, True, True, False, True, True]
    # Batches of two: the last one is padded.
    self.write(
        *(
            {
                "seed": seed,
                "prompt": prompt,
                "completions": [
                    {
                        "text": "12",
                        "token_ids": ids,
                        "logprobs": [-1.0 if m else None for m in mask],
                        "reward": seed,
                    }
                ],
            }
            for seed, prompt in ((0, "3+"), (2, "4+4"), (3, "6"), (4, "5"))
        )
    )
    config = self.config(
        generate__input="", generate__output="", sampling__temperature=0.5
    )
    config.offline.path = str(self.input)
    config.task = ml_collections.ConfigDict(
        {"name": "environment", "source": f"{two_turns.__file__}:TwoTurns"}
    )
    validate.validate(config, program="score")
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
      self.assertEqual(programs_generate.run_score(config, None, []), 0)
      with mock.patch.object(
          programs_generate, "score", side_effect=KeyboardInterrupt
      ):
        self.assertEqual(programs_generate.run_score(config, None, []), 75)
    self.assertNotIn("lines done", stderr.getvalue())
    self.assertNotIn("resumes", stderr.getvalue())
    config.generate.input = config.generate.output = str(self.input)
    with self.assertRaisesRegex(
        validate.ConfigError,
        r"(?s)generate.input = .*: must be '' with offline.path"
        r".*generate.output = .*: must be '' with",
    ):
      validate.validate(config, program="score")
    known = [
        self.expected(self.tokenizer.encode(prompt), ids, 0.5)[mask]
        for prompt in ("3+", "4+4", "5")
    ]
    printed = stdout.getvalue()
    self.assertStartsWith(
        printed,
        "3 completions of 3 training prompts; left out: 1 are of held-out"
        " seeds\n",
    )
    self.assertIn("15 learned tokens, 0 lost by re-rendering", printed)
    for what, mean in (
        ("tokens", np.mean(known)),
        ("completions", np.mean(np.sum(known, axis=1))),
    ):
      (found,) = re.findall(f"log-probs of {what}, nats: mean (.*?),", printed)
      self.assertAlmostEqual(float(found), mean, delta=5e-4 * abs(mean))

  def test_refuses_wrong_settings(self):
    self.write({"prompt": "1", "completion": "1"})
    with self.assertRaisesRegex(validate.ConfigError, "temperature = 0.0"):
      self.run_program(sampling__temperature=0.0)
    self.assertEqual(self.run_program(sampling__max_prompt_tokens=60), 2)
    self.assertIn("must be at most 64", self.stderr.getvalue())


class LinesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.source = self.folder / "in.jsonl"
    self.target = self.folder / "made" / "out.jsonl"
    self.config = configs_generate.get_config("smoke")
    self.config.generate.input = str(self.source)
    self.config.generate.output = str(self.target)
    self.config.generate.batch_lines = 2
    self.write([json.dumps({"n": n}) for n in range(7)])
    self.batches = []
    self.end_after = None

  def write(self, lines):
    self.source.write_text("\n".join(lines) + "\n")

  def run_all(self, **settings):
    def prepare(number, record):
      del number
      if record["n"] < 0:
        raise ValueError("below 0")
      return record["n"]

    def answer(numbers):
      if self.end_after is not None and len(self.batches) == self.end_after:
        raise KeyboardInterrupt
      self.batches.append(numbers)
      return [{"square": n * n} for n in numbers]

    self.stderr = io.StringIO()
    with contextlib.redirect_stderr(self.stderr):
      return programs_generate.run_lines(
          self.config,
          settings or {"model": "m"},
          prepare=prepare,
          answer=answer,
      )

  def found(self):
    return self.target.read_bytes()

  def test_answers_stand_in_order_with_their_lines(self):
    self.write(['{"n": 2}', "", '{"n": -1}', "no", '{"n": 5}'])
    counts = self.run_all()
    self.assertEqual(counts, programs_generate.Counts(before=0, done=2, bad=2))
    self.assertEqual(
        [json.loads(line) for line in self.found().splitlines()],
        [{"line": 1, "square": 4}, {"line": 5, "square": 25}],
    )
    printed = self.stderr.getvalue()
    self.assertIn(f"{self.source}:3: below 0\n", printed)
    self.assertIn(f"{self.source}:4: not JSON", printed)

  def test_continues_after_any_byte(self):
    self.run_all()
    whole = self.found()
    for size in (1, 18, len(whole) // 2, len(whole) - 1, len(whole)):
      self.target.write_bytes(whole[:size])
      self.batches.clear()
      counts = self.run_all()
      self.assertEqual(self.found(), whole)
      done = whole[:size].count(b"\n")
      self.assertEqual((counts.before, counts.done), (done, 7 - done))
      self.assertEqual(sum(self.batches, []), list(range(done, 7)))

  def test_each_batch_is_on_disk_before_next(self):
    self.end_after = 2
    with self.assertRaises(KeyboardInterrupt):
      self.run_all()
    self.assertEqual(self.found().count(b"\n"), 4)

  def test_other_settings_do_not_continue(self):
    self.run_all(model="m", temperature=1.0)
    before = self.found()
    with self.assertRaisesRegex(ValueError, "temperature = 1.0, now it is 0.5"):
      self.run_all(model="m", temperature=0.5)
    self.source.write_text('{"n": 1}\n')
    with self.assertRaisesRegex(ValueError, "begun with input_sha256"):
      self.run_all(model="m", temperature=1.0)
    self.assertEqual(self.found(), before)

  def test_file_of_another_program_is_kept(self):
    self.target.parent.mkdir()
    self.target.write_text("precious\n")
    with self.assertRaisesRegex(ValueError, "out.jsonl: exists already"):
      self.run_all()
    self.assertEqual(self.found(), b"precious\n")

  def test_refuses_foreign_output_line(self):
    self.run_all()
    with self.target.open("ab") as file:
      file.write(b"{}\n")
    with self.assertRaisesRegex(ValueError, "out.jsonl:8: not a line"):
      self.run_all()

  def test_one_process_writes(self):
    self.run_all()
    with self.target.open("ab") as file:
      self.assertTrue(processes.try_lock(file.fileno()))
      with self.assertRaisesRegex(ValueError, "another process is writing"):
        self.run_all()

  def test_bad_line_does_not_affect_other_lines(self):
    bad = {
        3: (b'{"n": 1', "not JSON: .*column 8"),
        4: (b'{"n": "\xff"}', "not UTF-8 from byte 8 on"),
        5: (b"[1, 2]", "not a JSON object"),
        6: (b"[" * 100_000, "not JSON"),
        7: (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    }
    lines = [
        b'\xef\xbb\xbf{"n": 1}\r',
        b"",
        *(data for data, _ in bad.values()),
    ]
    self.source.write_bytes(b"\n".join([*lines, b'{"n": 4}']))
    counts = self.run_all()
    self.assertEqual((counts.done, counts.bad), (2, 5))
    written = [json.loads(line) for line in self.found().splitlines()]
    self.assertEqual([r["line"] for r in written], [1, 8])
    for number, (_, problem) in bad.items():
      self.assertRegex(self.stderr.getvalue(), f"in.jsonl:{number}: {problem}")

  def test_exit_status(self):
    for result, status in (
        (programs_generate.Counts(0, 3, 0), 0),
        (programs_generate.Counts(2, 3, 1), 1),
        (ValueError("wrong x"), 2),
        (FileNotFoundError("no y"), 2),
        (KeyboardInterrupt(), 75),
    ):
      with (
          mock.patch.object(programs_generate, "score", side_effect=[result]),
          mock.patch.object(processes, "prepare_compiling"),
          contextlib.redirect_stderr(io.StringIO()),
      ):
        actual = programs_generate.run_score(self.config, None, [])
      self.assertEqual(actual, status)
