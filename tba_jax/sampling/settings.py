# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of decoding, samplers and logged completions."""

import json

from tba_jax.sampling import samplers
from tba_jax.system import rules


def _are_texts(text: str) -> bool:
  """Returns whether a text is "" or a JSON list of non-empty, valid texts."""
  try:
    texts = json.loads(text or "[]")
    # The replacement character stands for an incomplete character.
    return isinstance(texts, list) and all(
        isinstance(item, str) and item and b"\xef\xbf\xbd" not in item.encode()
        for item in texts
    )
  except ValueError:
    return False


_STOP_TEXTS = rules.Allowed("'' or a JSON list of non-empty texts", _are_texts)
_URLS = rules.matching(
    r"|https?://[^\s,/]+/?(,https?://[^\s,/]+/?)*",
    "http://HOST:PORT, or https, separated by commas",
)

_s = rules.Setting
_STOPS = "completions in the buffer stopped at it"
_KEPT = rules.Fixed(
    "completions in the buffer have the tokens that truncated sampling kept",
    lambda *sides: len({*map(samplers.num_kept_of, sides)}) > 1,
)
_LENGTH = "completions in the buffer have this limit"

# fmt: off
SECTIONS = {
    "sampling": rules.Section("Decoding."),
    "offline": rules.Section("Logged completions"
        " (docs/guides/offline_data.md).", fixed="it determines which prompts"
        " are taken from the log"),
    "explore": rules.Section("Exploration while sampling; evaluations use only"
        " its lengths. Off by default (Lee et al. 2025, arXiv:2405.18540)."),
}

SETTINGS = {
    "sampling.temperature": _s(1.0, rules.ABOVE_0, "temperature of sampling and"
        " of the loss; 0 (greedy) is allowed in evaluate and generate",
        also=(0, ("evaluate", "generate")),
        fixed=rules.Fixed(
            "reference log-probs from searchers"
            " (config.reference.role='searcher') have this temperature",
            lambda old, new: new["reference.role"] == "searcher")),
    "sampling.top_k": _s(0, rules.FROM_0, "number of likeliest tokens to sample"
        " from; 0 = off", fixed=_KEPT),
    "sampling.top_p": _s(1.0, rules.ABOVE_0_TO_1, "total probability of the"
        " likeliest tokens to sample from; 1 = off", fixed=_KEPT),
    "sampling.min_p": _s(0.0, rules.BELOW_1, "minimum probability relative to"
        " the likeliest token's; 0 = off", fixed=_KEPT),
    "sampling.max_kept_tokens": _s(64, rules.COUNT, "most tokens that top_k,"
        " top_p and min_p keep in training; 4 bytes each, stored with every"
        " token",
        fixed=_KEPT),
    "sampling.stop_token_ids": _s("", rules.INTEGERS, "stop tokens in addition"
        " to the tokenizer's, as '5,17'", fixed=_STOPS),
    "sampling.stop_strings": _s("", _STOP_TEXTS, "texts that end a completion,"
        " as '[\"\\n\\n\", \"User:\"]'", fixed=_STOPS),
    "sampling.max_prompt_tokens": _s(16, rules.COUNT, "", fixed=_LENGTH,
        auto=True),
    "sampling.max_completion_tokens": _s(24, rules.COUNT, "", fixed=_LENGTH,
        auto=True),
    "sampling.num_slots": _s(256, rules.COUNT, "completions decoded at once;"
        " on accelerators a prompt's completions share its KV cache if"
        " sampling.max_prompt_tokens is at least max_completion_tokens",
        hosts="searcher", auto=True),
    "sampling.num_waiting": _s(0, rules.FROM_0, "completions that may give up"
        " their slot, with their KV cache, while their environment answers;"
        " takes the memory of as many additional slots", hosts="searcher"),
    "sampling.chunk_steps": _s(8, rules.COUNT, "decode steps between refills of"
        " finished slots, and between polls for newer params"
        " (`sampling.in_flight`) and for stop strings"),
    "sampling.prompt_buckets": _s(1, rules.COUNT, "padded prompt lengths: the"
        " maximum, its half, …"),
    "sampling.in_flight": _s("off",
        rules.one_of("off", "keep_cache", "recompute_cache"),
        "time at which searchers take newer params: after the completions in"
        " flight ('off'), or meanwhile, keeping or recomputing the KV cache"),

    "search.sampler": _s("jax", rules.one_of(*samplers.SAMPLERS),
        "program that decodes: this package, or vLLM servers"
        " (docs/guides/serving.md#sample-with-vllm)", hosts="searcher"),
    "search.quantization": _s("", rules.one_of("", "int8"), "dtype of weight"
        " matrices while decoding: '' = model.compute_dtype; 'int8' = rounded"
        " with a scale per output channel, half the bytes of bfloat16"
        " (docs/guides/scaling.md)", hosts="searcher"),
    "search.vllm_urls": _s("", _URLS, "addresses of vLLM servers, one per"
        " searcher, in order of their indices", hosts="searcher"),
    "search.vllm_folder": _s("", rules.TEXT, "folder for params, which the vLLM"
        " servers read at the same path; '' = the run directory's 'vllm'",
        hosts="searcher"),

    "offline.path": _s("", rules.TEXT, "file, or pattern of files, of JSON"
        " lines or JSON with the task's prompts and completions, or with"
        " episodes of several turns; '' = none", hosts="path", files=True),
    "offline.fraction": _s(1.0, rules.ABOVE_0_TO_1, "share of groups taken from"
        " the log, for prompts that it contains; all others are sampled, and"
        " none at 1"),
    "offline.reward_field": _s("reward", rules.TEXT, "field with the reward, in"
        " the log and in loss.baseline_file; '' = logged completions are judged"
        " like sampled ones"),

    "explore.fraction": _s(0.0, rules.UNIT, "share of completions with a random"
        " temperature, uniform between min_temperature and max_temperature"),
    "explore.min_temperature": _s(1.0, rules.ABOVE_0, ""),
    "explore.max_temperature": _s(1.0, rules.ABOVE_0, ""),
    "explore.min_tokens": _s(0, rules.FROM_0, "tokens before which no stop"
        " token is sampled"),
    "explore.max_tokens": _s(0, rules.FROM_0, "tokens after which a stop token"
        " is forced, so that no completion is cut off; 0 = off"),
}
# fmt: on
