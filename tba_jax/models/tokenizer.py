# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, based on Hugging Face's fast tokenizers.

`load` reads a folder of tokenizer files; `word_level` makes the small
tokenizers of the built-in tasks. With a tokenizer.json, neither imports torch.
For word-level tokenizers, only chats and saving import transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"
FILES = hf_files.TOKENIZER_FILES
# Maximum number of characters of a library's error to show.
_MAX_ERROR = 300
# Date given to chat templates, fixed so that a run's prompts do not change.
# Llama 3's templates have the same default.
_TODAY = datetime.date(2024, 7, 26)
# tokenizer_config.json of a word-level tokenizer.
_OF_WORDS = {
    "backend": "tokenizers",
    "clean_up_tokenization_spaces": False,
    "eos_token": EOS_TOKEN,
    "model_max_length": int(1e30),
    "pad_token": PAD_TOKEN,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNK_TOKEN,
}
# Content of an assistant turn, used to find what the template writes after it.
_MARK = "\N{SECTION SIGN}turn\N{SECTION SIGN}"
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# Names of a message's field for its thinking part.
_REASONING = re.compile(r"\b(reasoning_content|reasoning|thinking)\b")

# Spaces as spelled in tokens, and texts that no word begins with.
_BLANKS = ("\N{LOWER ONE EIGHTH BLOCK}", "\u0120")
_INSIDE = ("\0", "\n", "|")

Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Answered:
  """Token ids of a prompt and its answer, for fine-tuning.

  prompt: ids before the first trained id.
  completion: ids from the first to the last trained id.
  trained: whether each id of the completion is trained on: ids in assistant
    turns, including the tokens that end them.
  num_untrained: assistant turns that are not trained on, because the chat
    template writes them differently once more turns follow.
  """

  prompt: list[int]
  completion: list[int]
  trained: list[bool]
  num_untrained: int = 0


class Tokenizer:
  """A fast tokenizer with the stop rules of completions.

  vocab_size: largest id, including special tokens, plus 1.
  longest_token: characters of the longest token.
  pad_id: id that fills arrays; the stop token's if there is no pad token.
    Lengths and masks define padding, never this id.
  bos_id: id of the BOS token, or None.
  turn_ends: stop tokens of the tokenizer and the model, and the token that ends
    a turn in the chat template.
  stop_ids: ids that end a completion: `turn_ends` and added stop ids.
  stop_strings: texts that end a completion; initially empty.
  after_turn: text that the chat template writes after the last turn.
  """

  def __init__(
      self,
      fast: Any,
      *,
      bos: str = "auto",
      chat: bool = False,
      template_arguments: Mapping[str, Any] | None = None,
      folder: pathlib.Path | None = None,
  ):
    """Wraps a fast tokenizer.

    Args:
      fast: the tokenizer, a `transformers.PreTrainedTokenizerFast`.
      bos: whether prompts start with the BOS token: "auto" (if `fast` itself
        adds it), "always" (if it has one) or "never".
      chat: whether a plain-text prompt is treated as a user message.
      template_arguments: further arguments of the chat template.
      folder: directory of the tokenizer's files, which `save` copies.

    Raises:
      ValueError: `fast` has no eos_token, or no chat template despite `chat`.
    """
    if fast.eos_token_id is None:
      raise ValueError(
          "the tokenizer has no eos_token: a completion could never stop;"
          " set eos_token in tokenizer_config.json"
      )
    self._fast, self._folder = fast, folder
    # Ids may have gaps.
    vocabulary = fast.get_vocab()
    self.vocab_size = max(vocabulary.values()) + 1
    self.longest_token = max(map(len, vocabulary))
    self.eos_id = int(fast.eos_token_id)
    self.stop_ids = frozenset((self.eos_id,))
    self.stop_strings: tuple[str, ...] = ()
    self.bos_id = None if fast.bos_token_id is None else int(fast.bos_token_id)
    self.pad_id = (
        self.eos_id if fast.pad_token_id is None else int(fast.pad_token_id)
    )
    first = fast.encode("a", add_special_tokens=True)[:1]
    adds_bos = bos == "always" or (bos == "auto" and first == [self.bos_id])
    self._adds_bos = adds_bos and self.bos_id is not None
    self._chat, self._arguments = chat, dict(template_arguments or {})
    if chat and not self.chat_template:
      raise ValueError(f"config.tokenizer.chat=True: {self._no_template()}")
    self._inside, self._added = self._find_inside(), {}
    self._inside_ids = self._ids(self._inside)
    if self._inside:
      added = fast.added_tokens_decoder.items()
      self._added = {int(i): token.content for i, token in added}
    self._turn_end, self._closers, self.after_turn = self._find_turn_ends()
    self.turn_ends = self.stop_ids | {self._turn_end}
    self.stop_ids |= self.turn_ends

  def encode(self, text: str, after: Sequence[int] = ()) -> list[int]:
    """Returns the ids of `text` without adding special tokens.

    Args:
      after: ids that the text follows; () for a separate text. SentencePiece
        adds a space before a text and after a special token, but not within.
    """
    if len(after) and self._inside:
      before = self._added.get(int(after[-1]), self._inside)
      start, ids = self._ids(before), self._ids(before + text)
      if ids[: len(start)] == start:
        return ids[len(start) :]
    return self._ids(text)

  def _ids(self, text: str) -> list[int]:
    return self._fast.encode(text, add_special_tokens=False)

  def _find_inside(self) -> str:
    """Returns a text after which the tokenizer adds no space.

    Returns "" if it does not add a space before separate texts either.
    """
    spelled = lambda ids: "".join(self.tokens(ids))
    alone = spelled(self._ids("a"))
    for text in _INSIDE if alone[:1] in _BLANKS else ():
      start, ids = self._ids(text), self._ids(f"{text}a")
      is_cut = ids[: len(start)] == start
      if is_cut and spelled(ids[len(start) :]) == alone[1:]:
        return text
    return ""

  def add_stop_ids(self, ids: Iterable[int]) -> None:
    """Adds tokens that end a completion.

    Raises:
      ValueError: an id is not in the vocabulary.
    """
    ids = frozenset(ids)
    if any(not 0 <= i < self.vocab_size for i in ids):
      raise ValueError(
          f"config.sampling.stop_token_ids={sorted(ids)}: must be 0 to"
          f" {self.vocab_size - 1}"
      )
    self.stop_ids |= ids

  def add_turn_ends(self, ids: Iterable[int]) -> None:
    """Adds tokens that the model uses to end a turn.

    A model may sample tokens that have no text here.
    """
    self.turn_ends |= frozenset(ids)
    self.stop_ids |= self.turn_ends

  def add_stop_strings(self, strings: Iterable[str]) -> None:
    """Adds texts that end a completion."""
    self.stop_strings = tuple(dict.fromkeys((*self.stop_strings, *strings)))

  def encode_prompt(
      self, prompt: str | Messages, tools: Sequence[Mapping[str, Any]] = ()
  ) -> list[int]:
    """Returns the ids of a prompt.

    The BOS rule applies to plain texts; messages only get the special tokens of
    the chat template, which also writes the schemas of tools.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    messages = self.messages(prompt)
    if messages is not None:
      return self.encode(self.chat_text(messages, tools=tools))
    ids = self.encode(prompt)
    if self._adds_bos and ids[:1] != [self.bos_id]:
      ids.insert(0, self.bos_id)
    return ids

  def encode_answered(
      self, prompt: str | Messages, answer: str
  ) -> Answered | None:
    """Returns the ids of a prompt and its answer, including the answer's end.

    A chat prompt may also have assistant turns. A turn is trained on if the
    chat's ids begin with the ids of the chat up to that turn, encoded as if it
    were the last one.

    Returns:
      The ids; None if the answer cannot be encoded in this way.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    messages = self.messages(prompt)
    if messages is None:
      before = self.encode_prompt(prompt)
      ids = [*self.encode(answer, before), self.eos_id]
      return Answered(before, ids, [True] * len(ids))
    chat = [*messages, {"role": "assistant", "content": answer}]
    places = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
    heads = [self._through(chat[: i + 1]) for i in places]
    ids, _ = heads[-1]
    if not ids:
      return None
    turns = [
        range(start, len(head))
        for head, start in heads
        if head and ids[: len(head)] == head
    ]
    first = turns[0].start
    sampled = {i for turn in turns for i in turn}
    return Answered(
        ids[:first],
        ids[first:],
        [i in sampled for i in range(first, len(ids))],
        len(places) - len(turns),
    )

  def _through(self, chat: Messages) -> tuple[list[int], int]:
    """Returns a chat's ids to the end of its last turn, and the turn's start.

    The ids are [] if they do not begin with the ids of the turn's prompt.
    """
    before = self.encode_chat(chat[:-1])
    ids = self.encode(self.chat_text(chat, asks=False))
    start = len(before)
    if ids[:start] != before:
      return [], start
    for at in range(start, len(ids)):
      if ids[at] in self.turn_ends:
        return ids[: at + 1], start
    return [*ids, self._turn_end], start

  def stop_id(self, prompt: str | Messages) -> int:
    """Returns the id that ends an answer to a prompt.

    For a chat it is the id that ends a turn in the chat template, otherwise the
    stop token.
    """
    return self.eos_id if self.messages(prompt) is None else self._turn_end

  def prompt_text(self, prompt: str | Messages) -> str:
    """Returns a prompt's text, including the chat template's special tokens."""
    messages = self.messages(prompt)
    return prompt if messages is None else self.chat_text(messages)

  def messages(self, prompt: str | Messages) -> Messages | None:
    """Returns the messages of a prompt; None if it is plain text."""
    if not isinstance(prompt, str):
      return prompt
    return [{"role": "user", "content": prompt}] if self._chat else None

  def encode_chat(self, messages: Messages) -> list[int]:
    """Returns the ids of `chat_text`."""
    return self.encode(self.chat_text(messages))

  @property
  def chat_template(self) -> str | None:
    """Jinja chat template; None if the tokenizer has none."""
    return self._fast.chat_template

  @chat_template.setter
  def chat_template(self, template: str | None) -> None:
    self._fast.chat_template = template

  @property
  def reads_reasoning(self) -> bool:
    """Whether the chat template reads the thinking part of a message."""
    return _REASONING.search(self.chat_template or "") is not None

  def chat_text(
      self,
      messages: Messages,
      *,
      asks: bool = True,
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """Returns the text of a chat.

    The tokenizer's chat template writes all special tokens. A template that
    asks for today's date gets `_TODAY`.

    Args:
      messages: turns, each with `role` and `content`.
      asks: whether the text ends with the start of an assistant turn.
      tools: JSON schemas of the tools that the assistant may call.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    if not self.chat_template:
      raise ValueError(self._no_template())
    today = lambda match: repr(_TODAY.strftime(match[2]))
    tools = list(tools) or None
    try:
      # There may be a separate template for tools.
      template = self._fast.get_chat_template(tools=tools)
      return self._fast.apply_chat_template(
          [dict(message) for message in messages],
          chat_template=_CLOCK.sub(today, template),
          tokenize=False,
          add_generation_prompt=asks,
          tools=tools,
          **self._arguments,
      )
    except Exception as error:  # A template may raise anything.
      raise ValueError(
          f"{self._file()}: the chat template refuses it: {error}"
      ) from error

  def _file(self) -> str:
    """Returns the name of the file that contains the chat template."""
    folder = self._folder
    if folder is None:
      return "the tokenizer of the task's own words"
    jinja = folder / "chat_template.jinja"
    return str(jinja if jinja.is_file() else folder / "tokenizer_config.json")

  def _no_template(self) -> str:
    return (
        f"{self._file()}: must have a chat_template, there or in a"
        " chat_template.jinja in the same folder, because chat prompts need"
        " one; otherwise give prompts as text"
    )

  def _find_turn_ends(self) -> tuple[int, frozenset[int], str]:
    """Finds how the chat template ends the assistant's turns.

    Returns:
      The token that ends the last turn of a chat; all tokens that may close a
      turn, since templates may use another one once more turns follow; and the
      text after the last turn.
    """
    none = self.eos_id, frozenset((self.eos_id,)), ""
    user, assistant = f"user {_MARK}", f"assistant {_MARK}"
    chat = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]

    def write(chat: Messages, asks: bool = False) -> str:
      try:
        return self.chat_text(chat, asks=asks)
      except ValueError:  # No template, or one for other kinds of chats.
        return ""

    text, longer = write(chat), write([*chat, *chat[:1]])
    if user not in text or assistant not in text:
      return none
    if assistant not in longer:
      longer = text
    before, _, last = text.rpartition(assistant)
    head, _, between = before.rpartition(user)
    inner = longer.rpartition(assistant)[2]
    _, user_end = self._find_special(self._encode_end(between))
    _, end = self._find_special(self._encode_end(last))
    inner_ids = self._encode_end(inner)
    place, inner_end = self._find_special(inner_ids)
    # The text may end with several special tokens, and then begin the next turn
    # if the template always asks for an answer.
    ids = [i for i in self._encode_end(last) if self._is_special(i)]
    known = [i for i in ids if i in (self.eos_id, user_end)]
    if ids and text != write(chat, asks=True):
      end = ids[-1]
    end = next(iter(known), end)
    rest = inner_ids[place + 1 :]
    place, start = self._find_special(rest)
    has_start = start is not None and not self.decode(rest[:place]).strip()
    if inner_end in self.encode(head) and not has_start:
      inner_end = None  # It begins the next turn.
    ends = [i for i in (end, inner_end) if i is not None]
    closers = frozenset((*ends, self.eos_id))
    return (ends or [self.eos_id])[0], closers, last

  def _encode_end(self, text: str) -> list[int]:
    """Returns the ids of what the chat template writes after a turn."""
    return self.encode(text, self.encode(_MARK))

  def _is_special(self, i: int) -> bool:
    added = self._fast.added_tokens_decoder
    return i == self.eos_id or (i in added and added[i].special)

  def _find_special(self, ids: Sequence[int]) -> tuple[int, int | None]:
    """Returns the index of the first special token, and that token or None.

    If there is none, an added token preceded only by white space counts.
    """
    for place, i in enumerate(ids):
      if self._is_special(i):
        return place, i
    for place, i in enumerate(ids):
      if self.decode([i]).strip():
        return place, i if i in self._fast.added_tokens_decoder else None
    return 0, None

  def split_stop(self, ids: Sequence[int]) -> tuple[list[int], int | None]:
    """Returns a turn without its final stop token, and that token.

    The token is None if a stop string or the length limit ended the turn.
    """
    ids = [int(i) for i in ids]
    if ids and ids[-1] in self.stop_ids:
      return ids[:-1], ids[-1]
    return ids, None

  def encode_answer(
      self,
      answer: str | Messages,
      turn: Sequence[int] | None = None,
      chat: Messages = (),
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> list[int]:
    """Returns the ids that follow a turn of the policy.

    For messages, these are the ids that the chat template writes after the
    assistant's turn, up to its next turn. They include the end of the turn if a
    stop string ended it, but not if a stop token did, unless the template does
    not use that token.

    Args:
      answer: text or messages that follow the turn.
      turn: ids of the turn, including the token that ended it; None for a turn
        that ends as in the template.
      chat: messages before the turn; () stands for any chat.
      tools: JSON schemas of the tools that the assistant may call.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    messages = self.messages(answer)
    if messages is None:
      return self.encode(answer, () if turn is None else turn)
    chat = [
        *(chat or [{"role": "user", "content": "question"}]),
        {"role": "assistant", "content": _MARK},
        *messages,
    ]
    _, mark, after = self.chat_text(chat, tools=tools).rpartition(_MARK)
    if not mark:
      raise ValueError(
          f"{self._file()}: the chat template leaves out the assistant's turns:"
          " must be one that writes them before what answers them"
      )
    ids, stop = self._encode_end(after), self._turn_end
    if turn is not None:
      _, stop = self.split_stop(turn)
    if stop is None:
      return ids
    common = os.path.commonprefix([after, self.after_turn])
    for place, i in enumerate(ids):
      if not common.startswith(self.decode(ids[: place + 1], within=True)):
        break
      if i == stop:
        return ids[place + 1 :]
    place, end = self._find_special(ids)
    is_closed = stop == end or (
        end in self._closers and self._is_written(stop, tools)
    )
    return ids[place + 1 :] if is_closed else ids

  def _is_written(self, stop: int, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the chat template also uses a token to end turns."""
    template = self._fast.get_chat_template(tools=list(tools) or None)
    return stop in self.turn_ends and (
        (stop == self.eos_id and "eos_token" in template)
        or self.decode([stop]) in template
    )

  def decode(self, ids: Sequence[int], *, within: bool = False) -> str:
    """Returns the text of `ids`, including special tokens.

    Word-level tokenizers write no spaces, so that the tokens "1", "2" and the
    token "12" decode alike: compare ids or `tokens` where that matters.

    Args:
      within: whether other text precedes the ids: SentencePiece drops a space
        at the beginning of a text.
    """
    before = self._inside_ids if within else []
    text = self._fast.decode(
        [*before, *map(int, ids)],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return text[len(self._inside) :] if within else text

  def tokens(self, ids: Sequence[int]) -> list[str | None]:
    """Returns the token string of each id; None if the tokenizer lacks it.

    A model's vocabulary is often padded to a round size.
    """
    return self._fast.convert_ids_to_tokens([int(i) for i in ids])

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Returns the text of each id, with "�" for an incomplete character.

    A byte-level "Ġ" or a SentencePiece "▁" becomes a space. An id that the
    tokenizer lacks has no text.
    """

    def text_of(token: str | None) -> str:
      if token is None:
        return ""
      space = " " * token.startswith("▁")
      text = self._fast.convert_tokens_to_string([token])
      return space + text.lstrip(space)

    return [text_of(token) for token in self.tokens(ids)]

  def ids_of(self, tokens: Sequence[str | None]) -> list[int] | None:
    """Returns the ids of token strings; None if any is unknown."""
    ids = [self._id_of.get(token) for token in tokens]
    return None if None in ids else ids

  @functools.cached_property
  def _id_of(self) -> Mapping[str, int]:
    return self._fast.get_vocab()

  def without_special(self, ids: Sequence[int]) -> list[int]:
    """Returns the ids that are not special tokens."""
    return [int(i) for i in ids if not self._is_special(int(i))]

  def decode_completion(
      self,
      ids: Sequence[int],
      length: int,
      stopped: bool,
      sampled: Sequence[bool] | None = None,
  ) -> str:
    """Returns a completion's text, as a reward sees it.

    If it has tokens of an environment, this is the whole text, including
    special tokens. Otherwise the final stop token is removed, and so is the
    first stop string with everything after it. Other special tokens stay, so
    that a reward does not mistake a broken completion for a correct one.

    Args:
      ids: [T] token ids, of which the first `length` count.
      length: tokens of the completion, including its stop token.
      stopped: whether a stop token or a stop string ended it.
      sampled: [T], whether the policy sampled a token; None means all.
    """
    ids = [int(i) for i in ids[:length]]
    if sampled is not None and not all(sampled[:length]):
      return self.decode(ids, within=True)
    if stopped:
      ids, _ = self.split_stop(ids)
    text = self.decode(ids, within=True)
    starts = [text.find(string) for string in self.stop_strings]
    return text[: min((at for at in starts if at >= 0), default=len(text))]

  def decode_completions(self, completions: Any) -> list[str]:
    """Returns the texts of the S `types.Completions`, as a reward sees them."""
    return [
        self.decode_completion(tokens, int(length), bool(stopped), sampled)
        for tokens, length, stopped, sampled in zip(
            completions.tokens,
            completions.lengths,
            completions.stopped,
            completions.sampled_mask,
        )
    ]

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the tokenizer's files into `folder`.

    Copies the original files if there are any, since transformers 5 writes a
    tokenizer_config.json that transformers 4 cannot read.
    """
    target = pathlib.Path(folder)
    if self._folder is not None and (self._folder / FILES[0]).is_file():
      hf_files.copy_files(FILES, self._folder, target)
      return
    hf_files.save_tokenizer(self._fast, target)


class Dialogue:
  """Messages of a completion so far, as context for the chat template."""

  def __init__(
      self,
      tokenizer: Tokenizer,
      first: str | Messages,
      tools: Sequence[Mapping[str, Any]],
  ):
    """Starts with the first observation; `tools` are JSON schemas."""
    self._tokenizer, self._tools = tokenizer, tools
    self.chat = list(tokenizer.messages(first) or ())

  def encode_answer(
      self,
      text: str,
      turn: Sequence[int],
      observation: str | Messages,
  ) -> list[int]:
    """Returns the ids of an answer and adds turn and answer to the messages.

    Args:
      turn: its ids, including the stop token or stop string.
      observation: the environment's answer.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    ids = self._tokenizer.encode_answer(
        observation, turn, self.chat, self._tools
    )
    if isinstance(observation, str):
      observation = [{"role": "user", "content": observation}]
    if self.chat:
      self.chat += [{"role": "assistant", "content": text}, *observation]
    return ids


class _Words:
  """A fast word-level tokenizer with the interface that `Tokenizer` uses.

  Ids and texts equal the equivalent transformers tokenizer's, which is
  only created for chats and files.
  """

  eos_token_id, bos_token_id, pad_token_id = 1, None, 0

  def __init__(self, words: Sequence[str], pattern: str):
    self._vocabulary = {}
    for word in (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *words):
      if word in self._vocabulary:
        raise ValueError(f"word {word!r} occurs twice in the vocabulary")
      self._vocabulary[word] = len(self._vocabulary)
    self._pattern = pattern
    self._inner = self._make()
    # A special token written in a text is one token, as in transformers.
    self._inner.add_special_tokens([PAD_TOKEN, EOS_TOKEN, UNK_TOKEN])

  def _make(self) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        models.WordLevel(self._vocabulary, unk_token=UNK_TOKEN)
    )
    inner.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex(self._pattern), behavior="isolated"
    )
    inner.decoder = decoders.Fuse()
    return inner

  @classmethod
  def load(cls, folder: pathlib.Path) -> "_Words | None":
    """Returns the tokenizer that `word_level` saved in a folder, or None."""
    here = [folder / name for name in FILES if (folder / name).exists()]
    if here != [folder / name for name in FILES[:2]]:
      return None
    try:
      # Read before tokenizer.json, which may be large for subword tokenizers.
      if hf_files.read_json(here[1]) != _OF_WORDS:
        return None
      file = hf_files.read_json(here[0])
      words = [*file["model"]["vocab"]][3:]
      made = cls(words, file["pre_tokenizer"]["pattern"]["Regex"])
    except Exception:  # transformers will report the reason.
      return None
    # Post-processors only add special tokens, which are not wanted here.
    file["post_processor"] = None
    return made if json.loads(made._inner.to_str()) == file else None

  @functools.cached_property
  def _theirs(self) -> Any:
    return hf_files.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=self._make(),
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
    )

  def __getattr__(self, name: str) -> Any:
    return getattr(self._theirs, name)

  @property
  def chat_template(self) -> str | None:
    # A chat template can only be set on the transformers tokenizer.
    return self._theirs.chat_template if "_theirs" in vars(self) else None

  @chat_template.setter
  def chat_template(self, template: str | None) -> None:
    self._theirs.chat_template = template

  def get_vocab(self) -> dict[str, int]:
    return self._inner.get_vocab()

  def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
    return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(
      self,
      ids: list[int],
      *,
      skip_special_tokens: bool,
      clean_up_tokenization_spaces: bool,
  ) -> str:
    del clean_up_tokenization_spaces  # There are no spaces between words.
    return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

  def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
    return [self._inner.id_to_token(i) for i in ids]


class TextTokenizer:
  """An encoder's tokenizer, which adds the special tokens.

  pad_id: id that fills rows; 0 if the tokenizer has no pad token.
  """

  def __init__(self, fast: Any):
    self._fast = fast
    self.pad_id = 0 if fast.pad_token_id is None else int(fast.pad_token_id)

  def encode(self, text: str, max_tokens: int) -> list[int]:
    """Returns the ids of a text, truncated to `max_tokens`."""
    return self._fast.encode(
        text, add_special_tokens=True, truncation=True, max_length=max_tokens
    )


def load_configured(
    folder: str | os.PathLike[str], settings: Mapping[str, Any]
) -> Tokenizer:
  """Returns a folder's tokenizer with the settings of `config.tokenizer`.

  Raises:
    ValueError: `load` fails.
  """
  return load(
      folder,
      bos=settings["bos"],
      chat=settings["chat"],
      template_arguments=json.loads(settings["template_arguments"] or "{}"),
  )


def load(
    folder: str | os.PathLike[str],
    *,
    bos: str = "auto",
    chat: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
) -> Tokenizer:
  """Returns the tokenizer of a folder of Hugging Face files.

  Args:
    folder: a path, or a model of the hub (`hf_hub`).
    bos: rule for the BOS token, see `Tokenizer`.
    chat: whether a plain-text prompt is treated as a user message.
    template_arguments: further arguments of the chat template.

  Raises:
    ValueError: there is no such folder, fast tokenizer or stop token, or no
      chat template despite `chat`.
  """
  path = hf_hub.find(folder, weights=False)
  fast = _Words.load(path) or _load_fast(folder)
  config = path / "config.json"
  if fast.eos_token_id is None and config.is_file():
    # GPT-2's tokenizer files name no stop token.
    hf = hf_files.read_json(config)
    ids = hf.get("eos_token_id") if isinstance(hf, dict) else None
    first = ids[0] if isinstance(ids, list) and ids else ids
    if isinstance(first, int):
      fast.eos_token = fast.convert_ids_to_tokens(first)
  return Tokenizer(
      fast,
      bos=bos,
      chat=chat,
      template_arguments=template_arguments,
      folder=path,
  )


def load_texts(folder: str | os.PathLike[str]) -> TextTokenizer:
  """Returns the tokenizer of an encoder's folder.

  Raises:
    ValueError: there is no such folder or fast tokenizer.
  """
  return TextTokenizer(_load_fast(folder))


def _load_fast(folder: str | os.PathLike[str]) -> Any:
  """Returns a folder's `transformers.PreTrainedTokenizerFast`."""
  path = hf_hub.find(folder, weights=False)
  if not path.is_dir():
    raise ValueError(f"{folder}: no such folder")
  # AutoTokenizer imports torch if it is installed, which costs each role
  # seconds and hundreds of MB: use it only if there is no tokenizer.json.
  transformers = hf_files.import_transformers()
  if (path / FILES[0]).exists():
    loader = transformers.PreTrainedTokenizerFast
  elif any((path / name).exists() for name in (*FILES, "vocab.txt")):
    loader = transformers.AutoTokenizer
  else:
    raise ValueError(
        f"{folder}: no tokenizer there; must be a folder with {FILES[0]}, as"
        " `save_pretrained` of transformers writes it"
    )
  try:
    fast = loader.from_pretrained(str(path), local_files_only=True)
    # Settings of a wrong type only fail on first use.
    fast.decode(fast.encode("a"), skip_special_tokens=True)
  except Exception as error:  # tokenizers raises Exception itself.
    why = " ".join(str(error).split())[:_MAX_ERROR]
    raise ValueError(
        f"{folder}: no tokenizer there: {why or repr(error)}; fetch or save"
        " its files again"
    ) from error
  if not isinstance(fast, transformers.PreTrainedTokenizerFast):
    raise ValueError(
        f"{folder}: {type(fast).__name__} is not a fast tokenizer; must be"
        f" a folder with a {FILES[0]}"
    )
  _follow_config(fast, path / FILES[1])
  return fast


def _follow_config(fast: Any, path: pathlib.Path) -> None:
  """Makes a tokenizer add BOS and EOS as specified in tokenizer_config.json.

  transformers 5 only reads tokenizer.json, which lacks the rule in folders,
  such as DeepSeek's, that relied on Llama's tokenizer class to add it.
  """
  settings = hf_files.read_json(path) if path.is_file() else {}
  ids = fast.encode("a", add_special_tokens=True)
  adds = {
      "add_bos_token": ids[:1] == [fast.bos_token_id],
      "add_eos_token": ids[-1:] == [fast.eos_token_id],
  }
  wanted = {name: settings.get(name) for name in adds}
  wanted = adds | {k: v for k, v in wanted.items() if isinstance(v, bool)}
  if wanted != adds:
    for name, value in wanted.items():
      setattr(fast, name, value)


def content_lengths(
    tokenizer: Tokenizer, tokens: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
  """Returns [...] int, the number of tokens before a completion's end marker.

  The marker is a stop token in last position, or the first stop string; a token
  with text before the stop string is counted.

  Args:
    tokenizer: source of stop tokens and stop strings.
    tokens: [..., T] int.
    lengths: [...] int, including the stop token.
  """
  last = np.take_along_axis(tokens, np.maximum(lengths, 1)[..., None] - 1, -1)
  is_stop = np.isin(last[..., 0], list(tokenizer.stop_ids))
  contents = lengths - (is_stop & (lengths > 0))
  if tokenizer.stop_strings:
    for index in np.ndindex(contents.shape):
      ids = tokens[index][: contents[index]].tolist()
      contents[index] = _before_stop_string(tokenizer, ids)
  return contents


def content_mask(
    tokenizer: Tokenizer, tokens: np.ndarray, sampled_mask: np.ndarray
) -> np.ndarray:
  """Returns [..., T] bool, the sampled tokens without end markers.

  Environment tokens separate the turns of a completion; each turn may end with
  a stop token or stop string.

  Args:
    tokenizer: source of stop tokens and stop strings.
    tokens: [..., T] int.
    sampled_mask: [..., T] bool, True on the tokens that the policy sampled.
  """
  T = tokens.shape[-1]
  tokens_NxT = tokens.reshape(-1, T)
  steps = np.diff(
      sampled_mask.reshape(-1, T).astype(np.int8), prepend=0, append=0
  )
  # Row, first token and length of each turn.
  rows_M, starts_M = np.nonzero(steps == 1)
  lengths_M = np.nonzero(steps == -1)[1] - starts_M
  columns_MxT = np.minimum(starts_M[:, None] + np.arange(T), T - 1)
  turns_MxT = tokens_NxT[rows_M[:, None], columns_MxT]
  contents_M = content_lengths(tokenizer, turns_MxT, lengths_M)
  content_NxT = np.zeros(tokens_NxT.shape, np.bool_)
  for row, start, count in zip(rows_M, starts_M, contents_M):
    content_NxT[row, start : start + count] = True
  return content_NxT.reshape(tokens.shape)


def _before_stop_string(tokenizer: Tokenizer, ids: list[int]) -> int:
  """Returns the number of tokens with text before the first stop string."""
  decode = functools.partial(tokenizer.decode, within=True)
  text = decode(ids)
  starts = [text.find(string) for string in tokenizer.stop_strings]
  start = min((at for at in starts if at >= 0), default=-1)
  if start < 0:
    return len(ids)
  count = len(ids)
  while count and decode(ids[: count - 1])[:start] == text[:start]:
    count -= 1
  return count


def word_level(words: Sequence[str], pattern: str) -> Tokenizer:
  """Returns a tokenizer with one id per word and three special tokens.

  Ids 0, 1 and 2 are `<pad>`, `<eos>` and `<unk>`; word i has id 3 + i. A text
  is cut into the matches of the regular expression `pattern` and the pieces
  between them; pieces that are not words become `<unk>`. Decoding joins tokens
  without spaces.

  Raises:
    ValueError: a word occurs twice or is a special token.
  """
  return Tokenizer(_Words(words, pattern))
