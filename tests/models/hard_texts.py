# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts on which tokenizers differ."""

from collections.abc import Sequence

import numpy as np

_PIECES = (
    # Blanks and ends of lines.
    *(" ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n "),
    *("\u00a0", "\u3000", "\u2028", "\v", "\f", "\u200b", "\x85"),
    # Digits and numbers.
    *"0123456789", *("12", "123", "1234", "12345678", "3.14", "1,234.50"),
    *("-7", "½", "²", "٣٤", "１２", "Ⅷ", "①"),
    # Contractions and letters' case.
    *("'s", "'S", "'ll", "'LL", "'re", "don't", "I'M", "’s", "HTTPServer"),
    *("camelCase", "Hello", "world", "the", "The", "THE", "a", "I", "x"),
    # Code.
    *("def f(x):", "return", "{", "}", "();", "->", "==", "!=", "//", "/*"),
    *("#include <a.h>", "self.x += 1", "<div>", "</p>", "&&", "$x", "`", "\\n"),
    # Punctuation.
    *('.,;:!?"\'()[]-_=+*/%^~|@#', "...", "—", "«", "。", "，", "！", "…"),
    *("=====", "-----", "''''", "```"),
    # Scripts, with combining marks composed and not.
    *("naïve", "nai\u0308ve", "é", "e\u0301", "Å", "A\u030a", "\u212b", "ﬁ"),
    *("việc", "vie\u0323\u0302c", "Straße", "İstanbul", "нещо", "Ελλάδα"),
    *("日本語", "中文字符", "ひらがな", "カタカナ", "한국어"),
    *("العربية", "עברית", "हिन्दी", "ไทย", "ភាសា", "தமிழ்", "ქართული", "ꙮ"),
    "\u1112\u1161\u11ab",
    # Beyond the basic plane, and bytes of one character in several tokens.
    *("🎉", "👩\u200d👩\u200d👧", "🇫🇷", "😶\u200d🌫️", "𝔘𝔫𝔦", "𐐷", "𓀀"),
    *("\U000e0067", "\x00", "\x1b[0m", "\ufeff", "\ufffd", "\u0300"),
)  # fmt: skip


def make(count: int, special: Sequence[str] = (), seed: int = 0) -> list[str]:
  """Returns `count` texts, the first of them single pieces.

  Args:
    count: number of texts.
    special: further pieces, tokens that a text may hold.
    seed: seed of the choice.
  """
  rng = np.random.default_rng(seed)
  pieces = [*_PIECES, *special]
  texts = ["", *pieces, *(f" {p}" for p in pieces), *(f"{p} " for p in pieces)]
  while len(texts) < count:
    num = int(rng.integers(2, 12))
    picked = rng.integers(0, len(pieces), num)
    if special and rng.random() < 0.3:
      picked[0] = len(pieces) - 1 - int(rng.integers(len(special)))
    rng.shuffle(picked)
    sep = (" ", "")[int(rng.random() < 0.6)]
    texts.append(sep.join(pieces[i] for i in picked))
  return texts[:count]
