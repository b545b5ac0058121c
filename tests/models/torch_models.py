# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of `transformers` for the cases of `cases.py`. Needs torch."""

import tempfile

import numpy as np
import torch
import transformers

from tests.models import cases

# More threads wait for each other longer than they compute.
torch.set_num_threads(1)


def make(
    case: str, num_labels: int = 0, seed: int | None = None
) -> torch.nn.Module:
  """Returns a case's model; with labels it has a scalar head."""
  auto = transformers.AutoModelForCausalLM
  if num_labels:
    auto = transformers.AutoModelForSequenceClassification
  with tempfile.TemporaryDirectory() as folder:
    cases.write(folder, case, seed=seed, num_labels=num_labels)
    model, report = auto.from_pretrained(folder, output_loading_info=True)
  for problem, names in report.items():
    if names:
      raise ValueError(f"{case}: {problem}: {names}")
  return model.eval()


def multimodal(case: str) -> torch.nn.Module:
  """Returns a model with a vision tower, and a case as language model."""
  text = cases.hf_settings(case)
  if text["model_type"].startswith("qwen3_5"):
    name = cases.CASES[case][0]
    vision = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2,
        out_hidden_size=32, num_position_embeddings=4,
    )  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, eos_token_id=1
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    state = make(case).model.state_dict()
    model.model.language_model.load_state_dict(state)
    model.lm_head.load_state_dict(make(case).lm_head.state_dict())
    return model.eval()
  vision = dict(
      hidden_size=16, intermediate_size=16, num_hidden_layers=1,
      num_attention_heads=2, image_size=28, patch_size=14,
  )  # fmt: skip
  kind, settings = "Gemma3", dict(mm_tokens_per_image=4)
  if text["model_type"] == "gemma4_text":
    kind, settings = "Gemma4", {}
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        position_embedding_size=4,
    )  # fmt: skip
  if text["model_type"] == "ministral3":
    tie = text.get("tie_word_embeddings", False)
    kind, settings = "Mistral3", dict(tie_word_embeddings=tie)
    vision |= dict(model_type="pixtral")
  config = getattr(transformers, f"{kind}Config")(
      text_config=text, vision_config=vision, eos_token_id=1, **settings
  )
  model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
  language = make(case)
  model.model.language_model.load_state_dict(language.model.state_dict())
  model.lm_head.load_state_dict(language.lm_head.state_dict())
  model.tie_weights()
  return model.eval()


def logits(model: torch.nn.Module, tokens, mask) -> np.ndarray:
  """Returns the model's logits; positions count real tokens."""
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  with torch.no_grad():
    return model(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
    ).logits.numpy()


def values(model: torch.nn.Module, tokens, mask) -> np.ndarray:
  """Returns what a scalar head gives at every position [B, L, labels]."""
  found = []
  hook = model.score.register_forward_hook(lambda *args: found.append(args[-1]))
  logits(model, tokens, mask)
  hook.remove()
  return found[0].numpy()


def gradients(model: torch.nn.Module, tokens, mask) -> dict[str, np.ndarray]:
  """Returns the gradients of minus the log-probs of all tokens but the first.

  They are those of tensors in a folder, by name.
  """
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  tokens, mask = torch.tensor(tokens), torch.tensor(mask)
  model.zero_grad()
  logits = model(
      tokens, attention_mask=mask, position_ids=torch.tensor(positions)
  ).logits
  logprobs = torch.log_softmax(logits[:, :-1], -1)
  chosen = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
  (-(chosen * mask[:, :-1]).sum()).backward()
  out = {}
  for name, param in model.named_parameters():
    grad = param.grad.numpy()
    head, _, tail = name.partition(".experts.")
    if not tail or model.config.model_type in ("gpt_oss", "gemma4_text"):
      out[name] = grad
      continue
    # A module stacks what the folder has one by one.
    names = ("gate", "up") if tail == "gate_up_proj" else ("down",)
    for expert, own in enumerate(grad):
      for part, piece in zip(names, np.split(own, len(names))):
        out[f"{head}.experts.{expert}.{part}_proj.weight"] = piece
  return out


def greedy(
    model: torch.nn.Module, tokens, mask
) -> tuple[np.ndarray, np.ndarray]:
  """Returns `generate`'s greedy tokens and the top-two margin of each."""
  with torch.no_grad():
    out = model.generate(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=cases.NUM_TOKENS,
        min_new_tokens=cases.NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
  top = torch.stack(out.logits, 1).topk(2, -1).values.numpy()
  return out.sequences.numpy()[:, tokens.shape[1] :], top[..., 0] - top[..., 1]
