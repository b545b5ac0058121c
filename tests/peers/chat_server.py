# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A server of a small model that speaks in chats, for tests with clients."""

import dataclasses
import pathlib
import re
from typing import Any

from absl.testing import absltest

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.system import processes
from tests.support import harness
from tests.support import tiny_model
from tests.support import waiting

_WORDS = (
    "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "\n",
    "What is ", " + ", "?", *"0123456789",
)  # fmt: skip
_PATTERN = "|".join([*map(re.escape, _WORDS), r"[\s\S]"])
_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class ChatServer:
  """Where a server answers.

  url: its address.
  key: its key.
  model: name of the model, which is its folder.
  """

  url: str
  key: str
  model: str


def start(
    case: absltest.TestCase, workdir: pathlib.Path, **overrides: Any
) -> ChatServer:
  """Starts a server, which ends with the test, and waits until it answers.

  Args:
    case: test or, in `setUpClass`, test class.
    workdir: place of the model and of the server's files.
    overrides: changed settings; `serve__port` stands for `serve.port`.
  """
  model = workdir / "model"
  tokenizer = tokenizer_lib.word_level(_WORDS, _PATTERN)
  tokenizer.chat_template = _TEMPLATE
  net = tiny_model.make_model(
      vocab_size=tokenizer.vocab_size,
      width=64,
      mlp_width=128,
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      max_positions=128,
  )
  hf.save(str(model), net.config, tiny_model.init_params(net), tokenizer)
  port = processes.free_port()
  settings = {
      "init": model,
      "serve.port": port,
      "sampling.max_prompt_tokens": 64,
      "sampling.max_completion_tokens": 16,
      "sampling.num_slots": 32,
      **{name.replace("__", "."): value for name, value in overrides.items()},
  }
  process = harness.Process(
      harness.command(
          "serve", workdir, config="configs/serve.py", overrides=settings
      ),
      workdir / "server.log",
  )
  case.addClassCleanup(process.close)
  waiting.wait_until(
      lambda: "\nkey " in process.log.read_text(),
      process.text,
      180.0,
      is_lost=lambda: not process.is_running,
  )
  key = process.log.read_text().splitlines()[-1].removeprefix("key ")
  return ChatServer(f"http://127.0.0.1:{port}", key, str(model))
