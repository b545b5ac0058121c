# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses a page of the report."""

import html.parser
import json
import os
import pathlib

# Harmless wherever a model or a user writes it.
HOSTILE = (
    "</script><script>alert(1)</script><img src=x"
    " onerror=\"document.title='broken'\">\x1b[2J\u202e\u2028\x00\ud800&lt;"
)


class Page(html.parser.HTMLParser):
  """The elements, URLs and data of a page."""

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__()
    self.tags: list[str] = []
    self.urls: list[str] = []
    self._text, self._in_data = "", False
    self.source = pathlib.Path(path).read_text("utf-8")
    self.feed(self.source)
    self.data = json.loads(self._text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    for name, value in attrs:
      if name in ("src", "href", "action", "srcset", "data"):
        self.urls.append(value)
    self._in_data = ("id", "page-data") in attrs

  def handle_endtag(self, tag):
    self._in_data = False

  def handle_data(self, data):
    if self._in_data:
      self._text += data
