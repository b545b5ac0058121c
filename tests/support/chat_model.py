# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a character tokenizer and a chat template."""

import pathlib
import string

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tests.support import tiny_model

_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes the model's folder and returns it."""
  tokenizer = tokenizer_lib.word_level(list(string.printable), r"[\s\S]")
  model = tiny_model.make_model(
      vocab_size=tokenizer.vocab_size, max_positions=512
  )
  hf.save(folder, model.config, tiny_model.init_params(model), tokenizer)
  (folder / "chat_template.jinja").write_text(_TEMPLATE)
  return folder
