# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score program: equal to the sampler's log-probs, and to a forward's."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.losses import logprobs
from tba_jax.models import tokenizer
from tba_jax.programs import generate as programs_generate
from tests.programs import generate_test

configs_generate = variants.import_config("configs/generate.py")


class ScoreTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.folder = f"{cls.directory}/model"
    cls.model, cls.params = generate_test.make_folder(cls.folder)
    cls.tokenizer = tokenizer.load(cls.folder)

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

  def write(self, *records):
    self.input.write_text("\n".join(map(json.dumps, records)))

  def config(self, **changes):
    config = configs_generate.get_config("smoke")
    config.generate.model = self.folder
    config.generate.input = str(self.input)
    config.generate.output = str(self.output)
    config.generate.batch_lines = 2
    config.sampling.max_prompt_tokens = 6
    config.sampling.max_completion_tokens = 8
    for name, value in changes.items():
      section, _, key = name.partition("__")
      config[section][key] = value
    return config

  def run_program(self, **changes):
    config = self.config(**changes)
    validate.validate(config, program="score")
    with contextlib.redirect_stderr(io.StringIO()) as self.stderr:
      status = programs_generate.run_score(config, None, [])
    if status == 2:
      return status, []
    lines = self.output.read_text().splitlines()
    return status, [json.loads(line) for line in lines]

  def test_is_that_of_a_full_forward(self):
    pairs = [("1+2=", "3"), ("1", "23+4"), ("9+9=9", "0")]
    self.write(*({"prompt": p, "completion": c} for p, c in pairs))
    status, found = self.run_program(sampling__temperature=0.5)
    self.assertEqual((status, [r["line"] for r in found]), (0, [1, 2, 3]))
    for (prompt, completion), record in zip(pairs, found):
      ids = self.tokenizer.encode(completion)
      self.assertEqual(record["token_ids"], ids)
      prompt = self.tokenizer.encode(prompt)
      tokens = jnp.asarray([prompt + ids])
      logits = self.model.logits(self.params, tokens, jnp.ones(tokens.shape))
      expected = logprobs.token_logprobs(
          logits[0, len(prompt) - 1 : -1], tokens[0, len(prompt) :],
          temperature=0.5,
      )  # fmt: skip
      np.testing.assert_allclose(record["logprobs"], expected, atol=1e-4)
      self.assertAlmostEqual(record["logprob"], sum(record["logprobs"]), 4)

  def test_gives_what_the_sampler_said(self):
    self.write(*({"prompt": f"{n}+"} for n in range(3)))
    sampled = self.config()
    sampled.generate.output = str(self.output.with_name("sampled.jsonl"))
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(programs_generate.run_generate(sampled, None, []), 0)
    text = pathlib.Path(sampled.generate.output).read_text()
    pairs = [
        (r["prompt"], r["completions"][0])
        for r in map(json.loads, text.splitlines())
    ]
    self.write(
        *(
            {"prompt": prompt, "completion_token_ids": c["token_ids"]}
            for prompt, c in pairs
        )
    )
    for (_, completion), record in zip(pairs, self.run_program()[1]):
      self.assertEqual(record["token_ids"], completion["token_ids"])
      np.testing.assert_allclose(
          record["logprobs"], completion["logprobs"], atol=1e-4
      )

  def test_the_stop_token_may_be_asked_for(self):
    self.write({"prompt": "1", "completion": "2"})
    plain = self.run_program()[1][0]
    self.output.unlink()
    record = self.run_program(generate__append_stop_token=True)[1][0]
    self.assertEqual(
        record["token_ids"], [*plain["token_ids"], self.tokenizer.eos_id]
    )
    np.testing.assert_allclose(
        record["logprobs"][:-1], plain["logprobs"], atol=1e-5
    )
    self.assertLess(record["logprob"], plain["logprob"])

  def test_resumed_bytes_are_those_of_one_go(self):
    self.write(*({"prompt": "1", "completion": f"{n}"} for n in range(5)))
    self.run_program()
    whole = self.output.read_bytes()
    self.output.write_bytes(whole[: len(whole) // 2])
    self.assertEqual(self.run_program()[0], 0)
    self.assertEqual(self.output.read_bytes(), whole)

  def test_bad_lines_are_reported_and_the_rest_is_done(self):
    self.write(
        {"prompt": "1", "completion": ""},
        {"prompt": "1"},
        {"prompt": "1", "completion": "123456789"},
        {"prompt": "", "completion": "1"},
        {"prompt": "1", "completion_token_ids": [-1]},
        {"prompt": "1", "completion": "1"},
    )
    status, found = self.run_program()
    self.assertEqual((status, [r["line"] for r in found]), (1, [6]))
    for number, problem in (
        (1, "has 0 tokens"),
        (2, "exactly one of completion"),
        (3, "has 9 tokens: allowed 1 to config.sampling.max_completion"),
        (4, "the prompt is empty"),
        (5, "allowed a list of whole numbers"),
    ):
      self.assertRegex(
          self.stderr.getvalue(), f"in.jsonl:{number}: .*{problem}"
      )

  def test_wrong_settings(self):
    self.write({"prompt": "1", "completion": "1"})
    with self.assertRaisesRegex(validate.ConfigError, "temperature = 0.0"):
      self.run_program(sampling__temperature=0.0)
    self.assertEqual(self.run_program(sampling__max_prompt_tokens=60)[0], 2)
    self.assertIn("allowed up to 64", self.stderr.getvalue())


if __name__ == "__main__":
  absltest.main()
