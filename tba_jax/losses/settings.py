# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the objective."""

from tba_jax.losses import objective_table
from tba_jax.system import rules
from tba_jax.system import user_code

_NAME = rules.Allowed(
    f"{', '.join(map(repr, objective_table.OBJECTIVES))}, or"
    " FILE.py:FUNCTION that exists",
    lambda v: v in objective_table.OBJECTIVES
    or (".py:" in v and not user_code.problem_of_file(v)),
    tuple(objective_table.OBJECTIVES),
    lambda v: "FILE.py:FUNCTION of a function that exists;"
    f" {user_code.problem_of_file(v)}"
    if ".py:" in v
    else "",
)

_s = rules.Setting
_REWARDS = "rewards in the buffer were computed with it"

# fmt: off
SECTIONS = {
    "loss": rules.Section("The objective (docs/reference/objectives.md)."),
    "tempering": rules.Section("Target of `tb`, `tb_learned_z` and `ctb`:"
        " (exp(r/beta) · π_ref^(1/gamma))^(1/tau); 1 is the plain target."),
}

SETTINGS = {
    "loss.name": _s("tb", _NAME, "objective (docs/reference/objectives.md: how"
        " to choose or write one)", files=True,
        fixed="the loss params in the checkpoint belong to this objective"),
    "loss.scale": _s("unit", rules.one_of("unit", "paper"),
        "scale of squared losses: 'unit' gives a policy gradient, 'paper' the"
        " gradient of the paper's objective (2/beta times as large for tb)"),
    "loss.reward_weight": _s(1.0, rules.NOT_NEGATIVE, "factor on the rewards; 0"
        " makes the reference the target, which distills it"
        " (docs/guides/offline_data.md)", fixed=_REWARDS),
    "loss.beta": _s(
        0.05, rules.over_steps(rules.NOT_NEGATIVE),
        "weight of the KL to the reference, reward per nat; above 0 for "
        + ", ".join(objective_table.names("needs_beta"))),
    "loss.correction": _s("", rules.one_of("", *objective_table.CORRECTIONS),
        "importance correction (docs/reference/objectives.md); '' is the"
        " objective's default, for most a trust region of ratio_clip (none if"
        " that is 0)",
        fixed=rules.Fixed(
            "'decoupled' reads a proximal policy, which a checkpoint with"
            " another correction lacks",
            lambda *sides: any(
                side["loss.correction"] == "decoupled" for side in sides))),
    "loss.ratio_clip": _s(0.0, rules.BELOW_1, "trust region: a token's"
        " gradient is multiplied by its ratio to the behavior policy, and is 0"
        " if it would move the ratio further outside 1 - ratio_clip … 1 +"
        " ratio_clip; 0 = no correction"),
    "loss.clip_high": _s(0.0, rules.NOT_NEGATIVE, "upper half-width of an"
        " asymmetric clip; 0 = the same as ratio_clip"),
    "loss.ratio_cap": _s(8.0, rules.ABOVE_0, "largest ratio of truncate_*,"
        " mask_* and decoupled"),
    "loss.ratio_floor": _s(0.0, rules.NOT_NEGATIVE, "smallest ratio of mask_*"
        " (IcePop: 0.5, with ratio_cap 5)"),
    "loss.moment_cap": _s(0.04, rules.ABOVE_0, "cap on the mean (log ratio)^2"
        " over a prompt's tokens in m2_mask, nats^2"),
    "loss.divergence_cap": _s(0.15, rules.ABOVE_0, "largest divergence of"
        " dppo_*: of probabilities (tv), or nats (kl, usually 0.05)"),
    "loss.advantage": _s("", rules.one_of("", *objective_table.ADVANTAGES),
        "advantage (docs/reference/objectives.md); '' is 'std' for grpo, 'mean'"
        " for dr_grpo"),
    "loss.pass_k": _s(2, rules.COUNT, "k of pass_at_k",
        read_with=("loss.advantage", ("pass_at_k",))),
    "loss.anchor": _s("", rules.one_of("", "reference", "behavior", "ema"),
        "policy that the target is relative to: 'reference', 'behavior' (the"
        " sampling policy), or 'ema', the policy's moving average, estimated"
        " from behavior log-probs; '' is the objective's default"),
    "loss.ema_decay": _s(0.9,
        rules.Allowed("above 0 and below 1", lambda v: 0 < v < 1),
        "decay per step of the anchor 'ema'"),
    "loss.baseline": _s("",
        rules.one_of("", "group", "mean", "log_mean_exp", "file"),
        "estimate of a prompt's value: the 'group' mean of reward minus KL, the"
        " 'mean' reward, 'log_mean_exp' of the rewards, or the 'file'"
        " baseline_file; '' is the objective's default"),
    "loss.baseline_shift": _s(0.0, rules.UP_TO_0, "added to the baseline, task"
        " units; below 0 it raises all advantages (AsymRE, arXiv:2506.20520,"
        " uses -0.1)"),
    "loss.baseline_temperature": _s(1.0, rules.ABOVE_0, "temperature of"
        " log_mean_exp, task units"),
    "loss.baseline_file": _s("", rules.TEXT, "JSON lines with prompt,"
        " completions and rewards (docs/guides/offline_data.md): the value of a"
        " prompt is the log_mean_exp of its rewards", hosts="path", files=True),
    "loss.behavior_logprobs": _s("sampler",
        rules.one_of("sampler", "recomputed"), "'sampler': exact, as sampled;"
        " 'recomputed': under the proximal policy, as in Async RLHF's code",
        fixed="a checkpoint has the proximal policy only with 'recomputed'"),
    "loss.proximal_every_steps": _s(0, rules.FROM_0, "steps between updates of"
        " the proximal policy and of the value model behind PPO's advantages; 0"
        " = one round, or one step without rounds",
        fixed="the checkpoint's proximal policy is held for this many steps"),
    "loss.entropy_weight": _s(0.0, rules.NOT_NEGATIVE, "weight of an entropy"
        " bonus (mean entropy per token, nats)"),
    "loss.length_norm": _s("", rules.one_of("", *objective_table.LENGTH_NORMS),
        "divisor of a completion's log-prob: 1 ('none'), its number of tokens,"
        " sampling.max_completion_tokens, or the batch's mean number of tokens;"
        " '' is the objective's default"),
    "loss.include_stop_token": _s(True, rules.FLAG, "whether log-probs and"
        " masks include the stop token, or the tokens of a stop string",
        fixed="the reference log-probs in the buffer depend on it"),
    "loss.missing_stop": _s("keep",
        rules.one_of("keep", "replace", "add", "mask"),
        "reward of a completion without stop token: 'keep' it, 'replace' it"
        " with missing_stop_reward, 'add' that, or keep it and 'mask' its"
        " tokens", fixed=_REWARDS),
    "loss.missing_stop_reward": _s(-1.0, rules.NUMBER, "", fixed=_REWARDS),
    "loss.log_z_learning_rate": _s(1e-2, rules.ABOVE_0, "learning rate of log Z"
        " in tb_learned_z"),
    "loss.value_init": _s(
        "policy", rules.TEXT,
        "value model of " + ", ".join(objective_table.names("has_values"))
        + ": the 'policy' with a zero head, the run's 'reward_model', or a"
        " Hugging Face folder with a scalar head",
        hosts="path", files=True, fixed="the value model started from it"),
    "loss.value_learning_rate": _s(1e-3, rules.ABOVE_0, "peak learning rate of"
        " the value model, with the policy's schedule"),
    "loss.value_clip": _s(0.2, rules.NOT_NEGATIVE, "clip of ppo's values around"
        " the old ones; 0 = off"),
    "loss.value_weight": _s(0.1, rules.NOT_NEGATIVE, "weight of ppo's value"
        " loss"),
    "loss.gae_gamma": _s(1.0, rules.UNIT, "discount per token"),
    "loss.gae_lambda": _s(0.95, rules.UNIT, "lambda of GAE: 0 = one step, 1 ="
        " Monte Carlo"),
    "loss.whiten_advantages": _s(True, rules.FLAG, "whether advantages get mean"
        " 0 and variance 1 over a batch"),
    "loss.gkd_beta": _s(1.0, rules.UNIT, "divergence of gkd: 1 = KL(policy ||"
        " reference), 0 = KL(reference || policy); in between, the generalized"
        " Jensen-Shannon divergence, which is small near both ends"),
    "loss.subtb_lambda": _s(0.9, rules.ABOVE_0_TO_1, "subtrajectories of n"
        " tokens have weight lambda^n"),
    "loss.pair_contrast": _s(0.0, rules.NOT_NEGATIVE, "least difference of"
        " reward/beta, with tempering reward/(beta tau), in a pair of ctb,"
        " nats; other pairs are left out"),
    "loss.ties": _s("skip", rules.one_of("skip", "first"),
        "pairwise losses, if a prompt's rewards are all equal: 'skip' it,"
        " or prefer the 'first' completion to the last, as in Async RLHF's"
        " code"),

    "tempering.tau": _s(1.0, rules.over_steps(rules.ABOVE_0), ""),
    "tempering.gamma": _s(1.0, rules.over_steps(rules.ABOVE_0), ""),
}
# fmt: on
