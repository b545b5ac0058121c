# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The generate program: formats, prompts, resuming, equality with a forward."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.losses import logprobs
from tba_jax.models import hf
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.programs import generate as programs_generate
from tests.support import tiny_model

configs_generate = variants.import_config("configs/generate.py")

_WORDS = [str(n) for n in range(10)] + ["+", "="]


def make_folder(path: str):
  """Writes a model of 15 tokens and returns it with its params."""
  tokenizer = tokenizer_lib.word_level(_WORDS, r"\d|.")
  model = tiny_model.make_model(vocab_size=tokenizer.vocab_size)
  params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
  hf.save(path, model.config, params, tokenizer)
  return model, params


class GenerateTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = f"{directory}/model"
    cls.model, cls.params = make_folder(cls.folder)

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
    validate.validate(config, program="generate")
    with contextlib.redirect_stderr(io.StringIO()) as self.stderr:
      return programs_generate.run_generate(config, None, [])

  def records(self):
    return [json.loads(line) for line in self.output.read_text().splitlines()]

  def test_format_and_logprobs(self):
    self.assertEqual(self.run_program(sampling__temperature=2.0), 0)
    records = self.records()
    self.assertEqual([r["line"] for r in records], [1, 2, 3, 4, 5])
    tokenizer = tokenizer_lib.load(self.folder)
    reasons = set()
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
        tokens = jnp.asarray([prompt + ids])
        logits = self.model.logits(self.params, tokens, jnp.ones(tokens.shape))
        expected = logprobs.token_logprobs(
            logits[0, len(prompt) - 1 : -1], tokens[0, len(prompt) :],
            temperature=2.0,
        )  # fmt: skip
        np.testing.assert_allclose(completion["logprobs"], expected, atol=1e-4)
    self.assertEqual(reasons, {"stop", "length"})

  def test_python_gives_what_the_program_writes(self):
    self.run_program(generate__batch_lines=5)
    config = self.config(generate__input="", generate__output="")
    inputs = [f"{n}+{n}=" for n in range(4)] + [{"prompt": "4+4="}]
    found = programs_generate.complete(config, inputs)
    lines = [{"line": n, **r} for n, r in enumerate(found, start=1)]
    self.assertEqual(lines, self.records())
    self.assertEqual(programs_generate.complete(config, []), [])
    with self.assertRaisesRegex(ValueError, "input 2: the prompt is empty"):
      programs_generate.complete(config, ["1", ""])

  def test_resumed_bytes_are_those_of_one_go(self):
    self.run_program()
    whole = self.output.read_bytes()
    self.output.write_bytes(whole[: len(whole) // 2])
    self.assertEqual(self.run_program(generate__batch_lines=3), 0)
    self.assertEqual(self.output.read_bytes(), whole)
    self.assertIn("were done before", self.stderr.getvalue())
    self.assertEqual(self.run_program(sampling__top_k=2), 2)
    self.assertIn("begun with config.sampling.top_k", self.stderr.getvalue())

  def test_bad_lines_are_reported_and_the_rest_is_done(self):
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
        (3, "has 7 tokens: allowed 1 to config.sampling.max_prompt_tokens = 6"),
        (4, "not JSON"),
        (5, "prompt is int: allowed a text"),
        (6, "no chat_template"),
        (7, "prompt_token_ids: allowed a list of whole numbers from 0 to 14"),
        (8, "exactly one of"),
        (9, "not text"),
        (10, "exactly one of"),
    ):
      self.assertRegex(printed, f"in.jsonl:{number}: .*{problem}")
    self.assertIn("2 lines done, 9 could not be done", printed)

  def test_a_seed_of_a_line_holds_wherever_it_stands(self):
    seeded = {"prompt": "1", "seed": 5}
    others = {"prompt": "1"}, {"prompt": "2"}
    self.write(seeded, *others, seeded, {"prompt": "1", "seed": -1})
    self.assertEqual(self.run_program(), 1)
    one, plain, _, same = (r["completions"] for r in self.records())
    self.assertEqual(one, same)
    self.assertNotEqual(one, plain)
    self.assertIn("in.jsonl:5: seed=-1: allowed", self.stderr.getvalue())

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
    self.assertEqual(self.run_program(sampling__stop_token_ids="99"), 2)
    self.assertIn("stop_token_ids=[99]: allowed 0", self.stderr.getvalue())
    with self.assertRaisesRegex(validate.ConfigError, "allowed '' or token"):
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
        "in.jsonl:7: max_tokens=0: allowed a whole number from 1 to 8",
        self.stderr.getvalue(),
    )
    tokenizer = tokenizer_lib.load(self.folder)
    cut = 0
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
    for wrong in ('"1"', "[1]", '[""]', "[", '["\\ud800"]', '["\ufffd"]'):
      with self.assertRaisesRegex(validate.ConfigError, "a JSON list of texts"):
        self.run_program(sampling__stop_strings=wrong)

  def test_greedy_gives_the_same_completion_each_time(self):
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
        ({"sampling__temperature": -1.0}, "config.sampling.temperature = -1.0"),
        ({"tokenizer__bos": "maybe"}, "config.tokenizer.bos = 'maybe'"),
    ):
      with self.assertRaisesRegex(validate.ConfigError, message):
        validate.validate(self.config(**changes), program="generate")

  def test_too_long_a_cache_is_one_clear_error(self):
    self.assertEqual(self.run_program(sampling__max_prompt_tokens=60), 2)
    self.assertRegex(
        self.stderr.getvalue(), "^error: sampling.max_prompt_tokens=60"
    )


if __name__ == "__main__":
  absltest.main()
