# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions that a program can check: "use no commas", "exactly five words".

A prompt asks about a topic and adds one to three instructions, each on a
different aspect of the answer, as in IFEval (Zhou et al. 2023,
arXiv:2311.07911). The reward is the share of instructions followed. The checks
depend only on the text, without word lists or language detection, so that a
completion always gets the same reward. For the kinds of instructions that
IFEval also has, a test compares the checks with the package `if-verifiable`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
import string
from typing import Any, ClassVar

import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import base

# Split of prompts on held-out topics with held-out kinds of instructions.
NEW_KINDS = "new_kinds"

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_LETTER = re.compile(r"[^\W\d_]")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
_MAX_DRAWS = 50  # attempts to draw a new prompt


def words_of(text: str) -> list[str]:
  """Returns the words of a text; "It's well-known." has two."""
  return _WORD.findall(text)


def count_word(text: str, word: str) -> int:
  """Returns how often a word occurs in a text, ignoring case."""
  return sum(w.casefold() == word.casefold() for w in words_of(text))


def count_sentences(text: str) -> int:
  """Returns the number of sentences; the last one may be unfinished."""
  parts = _SENTENCE_END.split(text)
  return sum(bool(_WORD.search(part)) for part in parts)


def _lines(text: str) -> list[str]:
  return [line.strip() for line in text.splitlines() if line.strip()]


def _has_bullets(text: str, count: int) -> bool:
  lines = _lines(text)
  return len(lines) == count and all(
      re.match(r"[-*] +\S", line) for line in lines
  )


def _has_numbers(text: str, count: int) -> bool:
  lines = _lines(text)
  return len(lines) == count and all(
      re.match(rf"{number}[.)] +\S", line)
      for number, line in enumerate(lines, 1)
  )


def _is_json(text: str, key: str) -> bool:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return False
  return (
      isinstance(value, dict)
      and [*value] == [key]
      and isinstance(value[key], str)
      and bool(_WORD.search(value[key]))
  )


def _is_wrapped(text: str, left: str, right: str) -> bool:
  text = text.strip()
  inner = text[len(left) : len(text) - len(right)]
  return (
      text.startswith(left)
      and text.endswith(right)
      and _WORD.search(inner) is not None
      and left not in inner
      and right not in inner
  )


@dataclasses.dataclass
class _Draft:
  """An unfinished completion, which instructions shape one after another.

  words: text so far, split at white space.
  most: maximum number of words.
  end: final characters of the text.
  """

  words: list[str]
  most: int = 100
  end: str = "."


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of instruction.

  aspect: property of the answer that it constrains; unique within a prompt.
  wordings: texts of the instruction, with `{}` for its value.
  holds: (text, value) -> whether the text follows the instruction.
  shape: (draft, value); changes a draft so that it follows the instruction.
  write: (text, value) -> the draft's text, laid out.
  """

  aspect: str
  wordings: Sequence[str]
  values: Sequence[Any]
  holds: Callable[[str, Any], bool]
  shape: Callable[[_Draft, Any], None] = lambda draft, value: None
  write: Callable[[str, Any], str] = lambda text, value: text


_KEYWORDS = """
    time light water people work world small strong simple often always never
    today little money color green story heart music garden bright
    """.split()
_STARTERS = (
    "Well Indeed Today Sometimes Imagine Honestly Remember First".split()
)
_ENDINGS = (
    "the end",
    "thank you",
    "that is all",
    "good luck",
    "stay curious",
    "have fun",
    "take care",
    "I hope this helps",
)
_KEYS = "answer text reply result message summary".split()


def _set_words(draft: _Draft, count: int) -> None:
  draft.most = min(draft.most, count)


def _set_end(end: str) -> Callable[[_Draft, Any], None]:
  def shape(draft: _Draft, value: Any) -> None:
    draft.end = end.format(value)

  return shape


def _add_words(times: int) -> Callable[[_Draft, str], None]:
  return lambda draft, word: draft.words.extend([word] * times)


def _start_with(draft: _Draft, word: str) -> None:
  draft.words.insert(0, word)


def _as_lines(mark: str) -> Callable[[str, int], str]:
  """Returns a function that makes a list, with the text as its last item."""
  return lambda text, count: "\n".join(
      f"{mark.format(i)} {text if i == count else 'ok'}"
      for i in range(1, count + 1)
  )


# Filler words for drafts; no instruction concerns them.
_FILLERS = "we like it very much so that all go on".split()

# fmt: off
KINDS: Mapping[str, Kind] = {
    "lowercase": Kind(
        "case",
        ("Use only lowercase letters.", "Write everything in lowercase.",
         "Do not use any capital letters."),
        ("",), lambda text, _: text == text.lower(),
        write=lambda text, _: text.lower()),
    "uppercase": Kind(
        "case",
        ("Use only capital letters.", "Write everything in capital letters.",
         "Your answer has to be in all caps."),
        ("",), lambda text, _: text == text.upper(),
        write=lambda text, _: text.upper()),
    "words": Kind(
        "length",
        ("Answer in exactly {} words.", "Use exactly {} words.",
         "Your answer must have exactly {} words."),
        range(3, 9), lambda text, n: len(words_of(text)) == n,
        shape=_set_words),
    "at_most_words": Kind(
        "length",
        ("Use at most {} words.", "Answer in no more than {} words.",
         "Do not use more than {} words."),
        range(6, 13), lambda text, n: len(words_of(text)) <= n,
        shape=_set_words),
    "sentences": Kind(
        "length",
        ("Write exactly {} sentences.", "Answer in exactly {} sentences.",
         "Your answer must have {} sentences."),
        (2, 3), lambda text, n: count_sentences(text) == n,
        write=lambda text, n: text.replace(" ", "! ", n - 1)),
    "contains": Kind(
        "content",
        ('Include the word "{}".', 'Your answer must have the word "{}" in it.',
         'Use the word "{}" in your answer.'),
        _KEYWORDS, lambda text, word: count_word(text, word) > 0,
        shape=_add_words(1)),
    "avoids": Kind(
        "avoidance",
        ('Do not use the word "{}".', 'Avoid the word "{}".',
         'Your answer must not have the word "{}" in it.'),
        ("the", "a", "is", "and", "of"),
        lambda text, word: count_word(text, word) == 0),
    "starts_with": Kind(
        "start",
        ('Begin with the word "{}".', 'Start your answer with "{}".',
         'The first word of your answer must be "{}".'),
        _STARTERS, lambda text, word: [
            w.casefold() for w in words_of(text)[:1]] == [word.casefold()],
        shape=_start_with),
    "ends_with": Kind(
        "end",
        ('End with the words "{}".', 'Finish your answer with "{}".',
         'The last words of your answer must be "{}".'),
        _ENDINGS, lambda text, end: text.rstrip(
            string.whitespace + ".!").casefold().endswith(end.casefold()),
        shape=_set_end(" {}")),
    "question": Kind(
        "end",
        ("Answer with a question.", "End with a question mark.",
         "Your answer must end with a question."),
        ("",), lambda text, _: text.rstrip().endswith("?"),
        shape=_set_end("?")),
    "exclamation": Kind(
        "end",
        ("End with an exclamation mark.",
         "Your answer must end with an exclamation mark.",
         "Finish with an exclamation mark."),
        ("",), lambda text, _: text.rstrip().endswith("!"),
        shape=_set_end("!")),
    "no_comma": Kind(
        "punctuation",
        ("Do not use any commas.", "Use no commas.",
         "Your answer must not have any commas."),
        ("",), lambda text, _: "," not in text),
    "quoted": Kind(
        "wrap",
        ("Put your whole answer in double quotes.",
         "Wrap your answer in double quotation marks.",
         "Your answer must begin and end with double quotes."),
        ("",), lambda text, _: _is_wrapped(text, '"', '"'),
        write=lambda text, _: f'"{text}"'),
    "bullets": Kind(
        "layout",
        ('Answer with exactly {} bullet points, each on a line that begins with'
         ' "- ".', 'List exactly {} items, one a line, each after a "-".',
         'Write a list of exactly {} lines, each beginning with "- ".'),
        (2, 3), _has_bullets, write=_as_lines("-")),
    "json": Kind(
        "layout",
        ('Answer with a JSON object that has the single key "{}".',
         'Reply only with JSON: one object with the one key "{}" and a text.',
         'Your answer must be a JSON object with just the key "{}".'),
        _KEYS, _is_json,
        write=lambda text, key: json.dumps({key: text})),
    "numbered": Kind(
        "layout",
        ('Answer with exactly {} numbered lines: "1. ", "2. " and so on.',
         'Write a numbered list of exactly {} items, beginning with "1. ".'),
        (2, 3), _has_numbers, write=_as_lines("{}.")),
    "twice": Kind(
        "content",
        ('Use the word "{}" at least twice.',
         'The word "{}" must be in your answer two times or more.'),
        _KEYWORDS, lambda text, word: count_word(text, word) >= 2,
        shape=_add_words(2)),
    "brackets": Kind(
        "wrap",
        ("Put your whole answer in double angular brackets, as in <<answer>>.",
         "Wrap your answer in << and >>."),
        ("",), lambda text, _: _is_wrapped(text, "<<", ">>"),
        write=lambda text, _: f"<<{text}>>"),
    "no_period": Kind(
        "punctuation",
        ("Do not use any periods.", "Use no full stops."),
        ("",), lambda text, _: "." not in text,
        write=lambda text, _: text.replace(".", "")),
    "digits": Kind(
        "content",
        ("Include a number, written in digits.",
         "Your answer must have a number in digits."),
        ("",), lambda text, _: re.search(r"[0-9]", text) is not None,
        shape=lambda draft, _: draft.words.append("12")),
}
# fmt: on
HELD_OUT_KINDS = ("numbered", "twice", "brackets", "no_period", "digits")
# Order in which aspects shape and lay out a draft.
_LAID_OUT = ("length", "punctuation", "case", "layout", "wrap")

TOPICS = (
    "the sea", "winter", "honey bees", "old bridges", "coffee", "chess",
    "football", "mountains", "the moon", "bread", "bicycles", "cats", "dogs",
    "rain", "libraries", "trains", "space travel", "volcanoes", "painting",
    "the piano", "gardening", "robots", "castles", "whales", "deserts",
    "chocolate", "tea", "forests", "rivers", "clocks", "maps", "birds",
    "cooking", "dreams", "friendship", "snow", "dancing", "cheese", "airplanes",
    "islands", "horses", "photography", "the sun", "clouds", "poetry",
    "swimming", "markets", "computers", "kites", "butterflies", "elephants",
    "camping", "rainbows", "stars", "apples", "tomatoes", "spring", "autumn",
    "summer", "fishing", "running", "sleep", "laughter", "schools", "teachers",
    "doctors", "farmers", "bakers", "sailing", "lighthouses", "pyramids",
    "dinosaurs", "penguins", "owls", "foxes", "wolves", "frogs", "spiders",
    "ants", "trees", "flowers", "roses", "mushrooms", "rice", "soup", "pizza",
    "ice cream", "holidays", "birthdays", "letters", "newspapers", "telephones",
    "movies", "theater", "jazz", "guitars", "drums", "singing", "yoga",
    "hiking", "skiing", "tennis", "puzzles", "toys", "cities", "villages",
    "houses", "windows", "doors", "chairs", "mirrors", "candles", "fire",
    "wind", "thunder", "earthquakes", "glaciers", "beaches", "caves", "oceans",
)  # fmt: skip
REQUESTS = (
    "Tell me something about {}.",
    "Write about {}.",
    "Describe {}.",
    "Say something about {}.",
    "What do you think about {}?",
    "Why do people like {}?",
    "Give me a fact about {}.",
    "What should I know about {}?",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a prompt.

  kind: key of `KINDS`.
  value: number or text that it asks for; "" if it needs none.
  """

  kind: str
  value: Any
  text: str


@dataclasses.dataclass(frozen=True)
class InstructionPrompt:
  """A prompt: a request and instructions for the answer."""

  request: str
  instructions: tuple[Instruction, ...]

  @property
  def text(self) -> str:
    return " ".join([self.request, *(i.text for i in self.instructions)])


def follows(instruction: Instruction, completion: str) -> bool:
  """Returns whether a completion follows an instruction; False without letters.

  Thoughts and surrounding white space are ignored.
  """
  text = answers.after_thinking(completion).strip()
  if _LETTER.search(text) is None:
    return False
  return KINDS[instruction.kind].holds(text, instruction.value)


class Instructions(base.Task):
  """Questions about topics, with instructions on the form of the answer.

  Splits: "train"; "held_out", on other topics; and "new_kinds", on these other
  topics with `held_out_kinds`, which no training prompt has.

  max_instructions: maximum number of instructions in a prompt; the minimum is
    one.
  train_prompts: number of prompts to train on.
  held_out_prompts: number of prompts in each other split.
  held_out_fraction: share of the topics held out from training.
  held_out_kinds: kinds of instructions held out, separated by commas.
  split_seed: seed of topics, splits and prompts.
  """

  name: ClassVar[str] = "instructions"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {
      "max_instructions": 3,
      "train_prompts": 4000,
      "held_out_prompts": 512,
      "held_out_fraction": 0.2,
      "held_out_kinds": ",".join(HELD_OUT_KINDS),
      "split_seed": 0,
  }
  more_splits: ClassVar = (NEW_KINDS,)

  def __init__(
      self,
      *,
      max_instructions: int,
      train_prompts: int,
      held_out_prompts: int,
      held_out_fraction: float,
      held_out_kinds: str,
      split_seed: int,
  ):
    base.check_integer("max_instructions", max_instructions, 1, 3)
    base.check_integer("train_prompts", train_prompts, 1, 20_000)
    base.check_integer("held_out_prompts", held_out_prompts, 1, 2_000)
    base.check_fraction("held_out_fraction", held_out_fraction)
    new_kinds = [name.strip() for name in held_out_kinds.split(",")]
    if not set(new_kinds) < set(KINDS):
      raise ValueError(
          f"config.task.held_out_kinds={held_out_kinds!r}: must be some, not"
          f" all, of {', '.join(KINDS)}, separated by commas"
      )
    rng = np.random.default_rng([split_seed, 0x1F])
    topics = [TOPICS[i] for i in rng.permutation(len(TOPICS))]
    cut = round(held_out_fraction * len(topics))
    if not 0 < cut < len(topics):
      raise ValueError(
          f"config.task.held_out_fraction={held_out_fraction} of"
          f" {len(topics)} topics leaves a split without any"
      )
    kinds = [name for name in KINDS if name not in new_kinds]
    self._prompts = {
        base.TRAIN: _make_prompts(
            rng, train_prompts, topics[cut:], kinds, max_instructions
        ),
        base.HELD_OUT: _make_prompts(
            rng, held_out_prompts, topics[:cut], kinds, max_instructions
        ),
        NEW_KINDS: _make_prompts(
            rng, held_out_prompts, topics[:cut], new_kinds, max_instructions
        ),
    }
    # Indices of the prompts that are not dropped.
    self._indices = {
        split: [*range(len(some))] for split, some in self._prompts.items()
    }

  def _prompt(self, split: str, index: int) -> InstructionPrompt:
    return self._prompts[split][self.source_index(split, index)]

  def num_prompts(self, split: str) -> int:
    base.check_split(split, self.more_splits)
    return len(self._indices.get(split, ()))

  def source_index(self, split: str, index: int) -> int:
    base.check_split(split, self.more_splits)
    return self._indices[split][index]

  def prompt(self, split: str, index: int) -> str:
    return self._prompt(split, index).text

  def instructions(self, split: str, index: int) -> tuple[Instruction, ...]:
    """Returns the instructions of a prompt."""
    return self._prompt(split, index).instructions

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    parts = {
        i.kind: float(follows(i, completion))
        for i in self.instructions(split, index)
    }
    reward = sum(parts.values()) / len(parts)
    judged = base.judgement_of(reward, reward == 1, completion)
    return dataclasses.replace(judged, parts=parts)

  def judge_cut_off(
      self, split: str, index: int, completion: str
  ) -> base.Judgement:
    """Returns no reward, because how the answer would end is unknown."""
    kinds = (i.kind for i in self.instructions(split, index))
    return base.Judgement(0.0, None, dict.fromkeys(kinds, 0.0))

  def reward(self, split: str, index: int, completion: str) -> float:
    return self.judge(split, index, completion).reward

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    return self.judge(split, index, completion).key

  def explain(self, split: str, index: int, completion: str) -> str:
    broken = [
        i.text
        for i in self.instructions(split, index)
        if not follows(i, completion)
    ]
    return f"does not follow: {' '.join(broken)}" if broken else ""

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns a text that follows all instructions; `rng` is not used.

    The text ignores the topic.
    """
    return _follow(self.instructions(split, index))

  def drop_long(
      self, tokenizer: Any, max_prompt_tokens: int, max_answer_tokens: int = 0
  ) -> None:
    fits = lambda it: len(tokenizer.encode_prompt(it)) <= max_prompt_tokens
    for split, indices in self._indices.items():
      prompts = self._prompts[split]
      self._indices[split] = [i for i in indices if fits(prompts[i].text)]
      if not self._indices[split]:
        raise ValueError(
            f"config.sampling.max_prompt_tokens={max_prompt_tokens}: every"
            f" prompt of the split {split!r} is longer"
        )

  def tokenizer_words(self) -> Sequence[str]:
    return [*string.printable]

  @property
  def tokenizer_pattern(self) -> str:
    return r"[\s\S]"

  @property
  def max_prompt_tokens(self) -> int:
    return max(len(p.text) for some in self._prompts.values() for p in some)

  @property
  def max_completion_tokens(self) -> int:
    longest = max(
        len(_follow(p.instructions))
        for some in self._prompts.values()
        for p in some
    )
    return longest + 1  # and the stop token


def _make_prompts(
    rng: np.random.Generator,
    count: int,
    topics: Sequence[str],
    kinds: Sequence[str],
    most: int,
) -> list[InstructionPrompt]:
  """Returns distinct prompts whose instructions can all be followed.

  Raises ValueError if they are too few.
  """
  prompts: dict[str, InstructionPrompt] = {}
  for number in range(count):
    for _ in range(_MAX_DRAWS):
      # Kinds take turns, so that those compatible with few others are not rare.
      first = kinds[number % len(kinds)]
      made = _make_prompt(rng, topics, kinds, first, 1 + rng.integers(most))
      text = _follow(made.instructions)
      can_follow = all(follows(i, text) for i in made.instructions)
      if can_follow and made.text not in prompts:
        prompts[made.text] = made
        break
    else:
      raise ValueError(
          f"config.task: no {count} distinct prompts about {len(topics)} topics"
          f" with the kinds {', '.join(kinds)}; ask for fewer train_prompts or"
          " held_out_prompts"
      )
  return list(prompts.values())


def _make_prompt(
    rng: np.random.Generator,
    topics: Sequence[str],
    kinds: Sequence[str],
    first: str,
    count: int,
) -> InstructionPrompt:
  """Returns a prompt with up to `count` instructions."""
  pick = lambda items: items[rng.integers(len(items))]
  chosen = {KINDS[first].aspect: first}
  for i in rng.permutation(len(kinds)):
    if len(chosen) < count:
      chosen.setdefault(KINDS[kinds[i]].aspect, kinds[i])
  names = [*chosen.values()]
  instructions = []
  for i in rng.permutation(len(names)):
    kind = KINDS[names[i]]
    value = pick(kind.values)
    wording = pick(kind.wordings).replace("{}", str(value))
    instructions.append(Instruction(names[i], value, wording))
  return InstructionPrompt(
      pick(REQUESTS).format(pick(topics)), tuple(instructions)
  )


def _follow(instructions: Sequence[Instruction]) -> str:
  """Returns a text that tries to follow all instructions; some conflict."""
  draft = _Draft([])
  for i in instructions:
    KINDS[i.kind].shape(draft, i.value)
  count = min(draft.most, 8) - len(words_of(draft.end))
  draft.words.extend(_FILLERS[: max(count - len(draft.words), 0)])
  text = " ".join(draft.words) + draft.end
  values = {KINDS[i.kind].aspect: i for i in instructions}
  for i in (values[aspect] for aspect in _LAID_OUT if aspect in values):
    text = KINDS[i.kind].write(text, i.value)
  return text
