# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of decoding, of who decodes, and of logged completions."""

import json

from tba_jax.sampling import samplers
from tba_jax.system import rules


def _are_texts(text: str) -> bool:
  """Tells whether a text is "" or a JSON list of complete, non-empty texts."""
  try:
    texts = json.loads(text or "[]")
    # The replacement character stands for an incomplete character.
    return isinstance(texts, list) and all(
        isinstance(item, str) and item and b"\xef\xbf\xbd" not in item.encode()
        for item in texts
    )
  except ValueError:
    return False


_STOP_TEXTS = rules.Allowed(
    "'' or a JSON list of texts, none of them empty", _are_texts
)
_URLS = rules.matching(
    r"|https?://[^\s,/]+/?(,https?://[^\s,/]+/?)*",
    "http://HOST:PORT, or https, separated by commas",
)

_s = rules.Setting
_STOPS = "completions in the buffer ended by it"
_LENGTH = "completions in the buffer have it as their limit"

# fmt: off
SECTIONS = {
    "sampling": rules.Section("Decoding."),
    "offline": rules.Section("Completions that others sampled"
        " (docs/guides/offline_data.md).", fixed="which prompts are taken from"
        " the log follows from it"),
    "explore": rules.Section("Sampling for exploration, of which evaluations"
        " use the lengths alone. The defaults change nothing (Lee et al. 2025,"
        " arXiv:2405.18540)."),
}

SETTINGS = {
    "sampling.temperature": _s(1.0, rules.ABOVE_0, "temperature of sampling and"
        " of the loss; 0 (greedy) is allowed in evaluate and generate",
        also=(0, ("evaluate", "generate")),
        fixed=rules.Fixed(
            "the reference's log-probs that searchers sent"
            " (config.reference.role='searcher') have this temperature",
            lambda old, new: new["reference.role"] == "searcher")),
    "sampling.top_k": _s(0, rules.FROM_0, "number of likeliest tokens; 0 ="
        " off"),
    "sampling.top_p": _s(1.0, rules.ABOVE_0_TO_1, "probability of the likeliest"
        " tokens; 1 = off"),
    "sampling.min_p": _s(0.0, rules.BELOW_1, "minimum probability relative to"
        " the likeliest token's; 0 = off"),
    "sampling.stop_token_ids": _s("", rules.INTEGERS, "stop tokens beside the"
        " tokenizer's own, as '5,17'", fixed=_STOPS),
    "sampling.stop_strings": _s("", _STOP_TEXTS,
        "texts that stop, as '[\"\\n\\n\", \"User:\"]'", fixed=_STOPS),
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
        " takes the memory of that many further slots", hosts="searcher"),
    "sampling.chunk_steps": _s(8, rules.COUNT, "decode steps between refills of"
        " finished slots, and between polls for newer params"
        " (`sampling.in_flight`) and for stop strings"),
    "sampling.prompt_buckets": _s(1, rules.COUNT, "padded prompt lengths: the"
        " maximum, its half, …"),
    "sampling.in_flight": _s("off",
        rules.one_of("off", "keep_cache", "recompute_cache"),
        "searchers finish what they decode before they take newer params"
        " ('off'), or go on with them, keeping or recomputing the KV cache"),

    "search.sampler": _s("jax", rules.one_of(*samplers.SAMPLERS),
        "program that decodes: this package, or vLLM servers"
        " (docs/guides/serving.md#sample-with-vllm)", hosts="searcher"),
    "search.quantization": _s("", rules.one_of("", "int8"), "dtype of the"
    " matrices"
        " that a searcher decodes with: '' = model.compute_dtype; 'int8' ="
        " rounded, with a scale for each output channel, half the bytes of"
        " bfloat16 (docs/guides/scaling.md)", hosts="searcher"),
    "search.vllm_urls": _s("", _URLS, "addresses of vLLM servers, one for each"
        " searcher, in the order of their indices", hosts="searcher"),
    "search.vllm_folder": _s("", rules.TEXT, "folder for params that the vLLM"
        " servers read at the same path; '' = the run directory's 'vllm'",
        hosts="searcher"),

    "offline.path": _s("", rules.TEXT, "JSON lines with prompts of the task and"
        " completions; '' = none", hosts="path", files=True),
    "offline.fraction": _s(1.0, rules.ABOVE_0_TO_1, "share of the groups that"
    " are"
        " taken from the log, of prompts that it has; the others are sampled,"
        " at 1 none"),
    "offline.reward_field": _s("reward", rules.TEXT, "field with the reward,"
        " there and in loss.baseline_file; '' = none is read, and completions"
        " are judged as sampled ones are"),

    "explore.fraction": _s(0.0, rules.UNIT, "share of completions sampled at"
        " their own temperature, uniform between min_temperature and"
        " max_temperature"),
    "explore.min_temperature": _s(1.0, rules.ABOVE_0, ""),
    "explore.max_temperature": _s(1.0, rules.ABOVE_0, ""),
    "explore.min_tokens": _s(0, rules.FROM_0, "tokens before which no stop"
        " token is sampled"),
    "explore.max_tokens": _s(0, rules.FROM_0, "tokens after which a stop token"
        " is sampled, so that none is cut off; 0 = no such limit"),
}
# fmt: on
