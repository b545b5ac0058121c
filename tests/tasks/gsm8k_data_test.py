# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TFDS builder: from JSONL by hand or by download, without TensorFlow."""

import functools
import http.server
import json
import pathlib
import subprocess
import sys
import threading

from absl.testing import absltest

from tba_jax.tasks import gsm8k_data
from tba_jax.tasks import rows

_ROWS = {
    "train": [
        {"question": f"What is {i}+1?", "answer": f"It is é.\n#### {i + 1}"}
        for i in range(12)
    ],
    "test": [{"question": "What is 50+1?", "answer": "#### 51"}],
}


class Gsm8kBuilderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.published, self.out = folder / "published", folder / "out"
    self.published.mkdir()
    for split, result in _ROWS.items():
      text = "".join(json.dumps(row) + "\n" for row in result)
      (self.published / f"{split}.jsonl").write_text(text)

  def check(self, prepared):
    for split, result in _ROWS.items():
      read = list(rows.read_rows("k", f"{prepared}[{split}]"))
      # Rows keep the order of the file.
      self.assertEqual([row.fields for row in read], result)
      self.assertEqual(read[0].place, f"gsm8k[{split}]:1")
    with self.assertRaisesRegex(ValueError, r"one of \['test', 'train'\]"):
      list(rows.read_rows("k", f"{prepared}[dev]"))

  def test_prepares_from_folder_without_tensorflow(self):
    code = (
        "import sys; from tba_jax.tasks import gsm8k_data;"
        f"gsm8k_data.main([{str(self.out)!r}, '--manual_dir',"
        f" {str(self.published)!r}]);"
        "sys.exit(bool({'tensorflow', 'jax'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], check=True,
                          capture_output=True, text=True)  # fmt: skip
    prepared = self.out / "gsm8k" / "1.0.0"
    self.assertEqual(process.stdout.split()[-1], str(prepared))
    self.check(prepared)

  def test_prepares_by_download(self):
    class Quiet(http.server.SimpleHTTPRequestHandler):

      def log_message(self, *args):
        del args

    handler = functools.partial(Quiet, directory=str(self.published))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    self.addCleanup(server.server_close)
    self.addCleanup(server.shutdown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    self.enter_context(
        absltest.mock.patch.object(gsm8k_data.Gsm8kBuilder, "url", url)
    )
    self.check(gsm8k_data.prepare(str(self.out), manual_dir=None))
