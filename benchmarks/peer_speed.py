# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch or vLLM on a Hugging Face folder, in a separate process.

    python peer_speed.py generate|vllm|gradient FOLDER DTYPE B K P T RUNS

Prints RESULT and the list of seconds per run in one line, after a warm-up run.
`generate` and `vllm` sample B x K completions of T tokens; `gradient` computes
the loss of as many and its gradient, with float32 params and autocast for
bfloat16. All use a GPU if PyTorch finds one. A FOLDER with only a config.json
gets random weights. Needs only transformers with torch, or vllm.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import random
import sys
import time

# Prefix of the result line.
RESULT = "seconds: "
_FIRST_ID, _LAST_ID = 3, 250


def _prompts(seed: int, count: int, length: int) -> list[list[int]]:
  rng = random.Random(seed)
  draw = lambda: rng.randint(_FIRST_ID, _LAST_ID)
  return [[draw() for _ in range(length)] for _ in range(count)]


def _load(folder: str, dtype: str):
  """Returns the model and its device, a GPU if there is one."""
  import torch
  import transformers

  device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
  cls, torch_dtype = transformers.AutoModelForCausalLM, getattr(torch, dtype)
  if any(pathlib.Path(folder).glob("*.safetensors")):
    model = cls.from_pretrained(folder, dtype=torch_dtype)
  else:
    shape = transformers.AutoConfig.from_pretrained(folder)
    with device:
      model = cls.from_config(shape, dtype=torch_dtype)
  return model.to(device), device


def generate(
    folder: str, dtype: str, shape: Sequence[int]
) -> Callable[[int], None]:
  """Returns a function of a seed that samples by Hugging Face's `generate`."""
  import torch

  B, K, P, T = shape
  model, device = _load(folder, dtype)
  model.eval().generation_config.eos_token_id = None

  def run(seed: int) -> None:
    ids = torch.tensor(_prompts(seed, B, P)).repeat_interleave(K, 0).to(device)
    with torch.inference_mode():
      out = model.generate(
          ids,
          attention_mask=torch.ones_like(ids),
          do_sample=True,
          top_k=0,
          min_new_tokens=T,
          max_new_tokens=T,
          pad_token_id=0,
      ).cpu()
    _check(out.shape[1] - P, T)

  return run


def vllm(
    folder: str, dtype: str, shape: Sequence[int]
) -> Callable[[int], None]:
  """Returns a function of a seed that samples by vLLM, without compilation."""
  # In GiB; the default takes most of the memory.
  os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
  import vllm as vllm_lib

  B, K, P, T = shape
  engine = vllm_lib.LLM(
      folder,
      dtype=dtype,
      max_model_len=P + T,
      max_num_seqs=B * K,
      enable_prefix_caching=True,
      enforce_eager=True,
      skip_tokenizer_init=True,
  )
  sampling = vllm_lib.SamplingParams(
      n=K, max_tokens=T, ignore_eos=True, logprobs=0, detokenize=False
  )

  def run(seed: int) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(seed, B, P)]
    out = engine.generate(prompts, sampling, use_tqdm=False)
    _check(sum(len(c.token_ids) for o in out for c in o.outputs), B * K * T)

  return run


def gradient(
    folder: str, dtype: str, shape: Sequence[int]
) -> Callable[[int], None]:
  """Returns a function of a seed that computes loss and gradient in PyTorch."""
  import torch

  B, K, P, T = shape
  model, device = _load(folder, "float32")
  model.train()

  def run(seed: int) -> None:
    prompts = torch.tensor(_prompts(seed, B, P)).repeat_interleave(K, 0)
    prompt_ids = torch.tensor(_prompts(-1 - seed, B * K, T)).to(device)
    weights = torch.linspace(-1.0, 1.0, B * K, device=device)
    with torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"
    ):
      logits = model(
          torch.cat([prompts.to(device), prompt_ids], 1),
          use_cache=False,
          logits_to_keep=T + 1,
      ).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float(), -1)
    logprobs = logprobs.gather(-1, prompt_ids[..., None])[..., 0].sum(-1)
    model.zero_grad()
    (weights * logprobs).mean().backward()
    if device.type == "cuda":
      torch.cuda.synchronize()

  return run


def _check(count: int, expected: int) -> None:
  if count != expected:
    raise RuntimeError(f"{count} tokens, where {expected} were asked for")


PROGRAMS = {"generate": generate, "vllm": vllm, "gradient": gradient}


def main(argv: Sequence[str]) -> None:
  program, folder, dtype, *shape, runs = argv
  run = PROGRAMS[program](folder, dtype, [int(n) for n in shape])
  run(0)
  seconds = []
  for seed in range(1, 1 + int(runs)):
    start = time.perf_counter()
    run(seed)
    seconds.append(time.perf_counter() - start)
  print(RESULT + json.dumps(seconds), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
