"""Compatibility rules among the settings of the mathematics. No torch here, because `plan` uses them too.

`problems` are refused before anything starts; `warnings` are legal and probably not intended. The allowed values of a single setting are in
`core.settings` and `run.config.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.rollout.sampling_mask import find_mask_flag, training_structured_outputs
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.run.config.rules import PLUG_INS, Rule, broken_rules, changed, make_namespace
from megatron_grpo.run.config.sampling_mask import NOTE, SAMPLING_MASK
from megatron_grpo.run.config.settings import Config

# Allowed scale_rewards of each estimator: the default, or what the estimator does anyway.
SCALES_OF_ESTIMATOR: Mapping[str, tuple[str, ...]] = {
    "grpo": ("group", "batch", "none", "gdpo"),
    "rloo": ("group", "none"),
    "reinforce_plus_plus": ("group", "batch"),
    "reinforce_plus_plus_baseline": ("group", "batch"),
    "gdpo": ("group", "gdpo"),
}
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "luspo", "fipo")
# These always use the whole sequence: the level of the ratio only affects the bias correction of the KL.
SEQUENCE_LOSS_TYPES = ("vespo", "real")
# These sum over tokens, so a ratio shared by a whole sequence counts once per token.
LOSS_TYPES_OVER_TOKENS = ("bnpo", "dapo", "dr_grpo", "cispo", "sequence_sum", "fipo")
ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")


def problems(config: Config) -> list[Problem]:
    """Return every combination of settings that has no meaning, each with its reason."""
    return list(broken_rules((*RULES, *SAMPLING_MASK), _settings(config)))


def group_problems(cfg: GrpoConfig, *, generation: int, global_batch: int, group: int, passes: int) -> list[Problem]:
    """Return problems of batch sizes that do not suit the loss.

    Args:
        group: Completions per prompt.
    """
    c = SimpleNamespace(loss_type=cfg.loss_type, generation=generation, global_batch=global_batch, group=group, passes=passes)
    return list(broken_rules([GROUP_RULES], c))


def warnings(config: Config) -> list[str]:
    """Return warnings about settings that are legal but probably not intended."""
    return [problem.message for problem in broken_rules((NOTE, *WARNINGS), _settings(config))]


def _settings(config: Config) -> SimpleNamespace:
    cfg = config.grpo
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    bound = find_mask_flag(config.rollout) if training_structured_outputs(config.rollout) is not None else None
    dropping = " and ".join(name for name in ("dynamic_sample", "exclude_zero_std_groups") if getattr(cfg, name))
    return make_namespace(config, bounding=bound, high=high, dropping=dropping)


# ---- computed neighbours


def _is_gdpo(c: SimpleNamespace) -> bool:
    return "gdpo" in (c.advantage_estimator, c.scale_rewards) or c.multi_objective_aggregation == "normalize_then_sum"


def _other_scale(c: SimpleNamespace) -> dict[str, Any] | None:
    allowed = SCALES_OF_ESTIMATOR.get(c.advantage_estimator, (c.scale_rewards,))
    return {"allowed": allowed, "them": " or ".join(allowed)} if c.scale_rewards not in allowed else None


# fmt: off
RULES = (
    # the objective
    Rule("delta loss_type", lambda c: c.delta is not None and c.loss_type not in CLIPPED_LOSS_TYPES,
         "delta ({delta}) bounds the unclipped term of the clipped surrogate, which loss_type {loss_type} does not have. Leave "
         f"delta out, or use loss_type {', '.join(CLIPPED_LOSS_TYPES)}."),
    Rule("loss_type rollout_importance_sampling_mode",
         lambda c: c.loss_type == "vespo" and c.rollout_importance_sampling_mode.startswith("sequence_"),
         "loss_type vespo multiplies the corrections of all tokens into one sequence weight; rollout_importance_sampling_mode "
         "{rollout_importance_sampling_mode} gives every token the sequence's correction, so it would be counted once per token. Use "
         "a token mode or none.", {"rollout_importance_sampling_mode": ["token_truncate", "token_mask", "none"]}),
    # the loss of `real` is one number per group, not a sum over tokens that could be weighted one by one
    Rule("loss_type {name}", lambda c: c.loss_type == "real"
         and changed(c, "rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "top_entropy_quantile"),
         "{name} ({value}) applies to single tokens, but loss_type real is a function of a group's mean log-ratios. Leave {name} "
         "out, or use another loss_type.", lambda c: {} if c.off is None else {c.name: [c.off]}),
    # the KL and its reference
    Rule("kl_estimator use_bias_correction_kl",
         lambda c: c.beta > 0 and not c.kl_in_reward and c.kl_estimator == "k1" and not c.use_bias_correction_kl,
         "kl_estimator k1 in the loss without use_bias_correction_kl has a gradient with zero mean and only adds noise. Set "
         "use_bias_correction_kl true, or use k2 or k3, or kl_in_reward."),
    Rule("kl_in_reward beta", lambda c: c.kl_in_reward and c.beta == 0,
         "kl_in_reward subtracts beta x KL from the reward, but beta is 0. Use a beta above 0, for example 0.04."),
    Rule("kl_in_reward advantage_estimator", lambda c: c.kl_in_reward and _is_gdpo(c),
         "kl_in_reward needs a single reward before the baseline; gdpo normalizes each reward function separately. Put the KL in the "
         "loss (kl_in_reward false), or use another advantage_estimator."),
    Rule("sync_ref_model beta", lambda c: c.sync_ref_model and c.beta == 0,
         "sync_ref_model updates the reference model, and beta 0 uses none. Use a beta above 0, or leave it out."),
    (
        Rule("ref_model beta", lambda c: c.ref_model is not None and c.beta == 0,
             "ref_model ({ref_model}) is the reference of the KL penalty, but beta is 0. Use a beta above 0, or leave it out."),
        Rule("ref_model ref_adapters", lambda c: c.ref_model is not None and c.ref_adapters is not None,
             "ref_model ({ref_model}) and ref_adapters ({ref_adapters}) both set the reference. Keep one of them."),
        Rule("sync_ref_model tuner_type", lambda c: c.sync_ref_model and c.tuner_type == "lora",
             "sync_ref_model is not supported with tuner_type lora: a mixture of two adapters is not an adapter of rank r. Leave it "
             "out; the reference is then the initial model.", {"sync_ref_model": [False]}),
    ),
    # advantages
    Rule("scale_rewards advantage_estimator", _other_scale,
         "scale_rewards {scale_rewards} selects the std of advantage_estimator grpo; {advantage_estimator} has a fixed one. Use "
         "advantage_estimator grpo, or scale_rewards {them}.", lambda c: {"scale_rewards": c.allowed, "advantage_estimator": ["grpo"]}),
    Rule("multi_objective_aggregation", lambda c: c.multi_objective_aggregation == "normalize_then_sum"
         and (c.advantage_estimator not in ("grpo", "gdpo") or c.scale_rewards not in ("group", "gdpo")),
         "multi_objective_aggregation normalize_then_sum is another name for advantage_estimator gdpo and cannot be combined with "
         "advantage_estimator {advantage_estimator} and scale_rewards {scale_rewards}. Leave those out."),
    # the correction for the engine mismatch
    Rule("rollout_is_geometric rollout_importance_sampling_mode",
         lambda c: c.rollout_is_geometric and not c.rollout_importance_sampling_mode.startswith("sequence_"),
         "rollout_is_geometric applies to sequence ratios, but rollout_importance_sampling_mode is "
         "{rollout_importance_sampling_mode}. Use sequence_truncate or sequence_mask, or leave it out."),
    Rule("rollout_importance_sampling_min rollout_importance_sampling_threshold",
         lambda c: (least := c.rollout_importance_sampling_min) is not None and least >= c.rollout_importance_sampling_threshold,
         "rollout_importance_sampling_min ({rollout_importance_sampling_min}) must be below rollout_importance_sampling_threshold "
         "({rollout_importance_sampling_threshold})."),
    Rule("rollout_importance_sampling_min rollout_importance_sampling_mode",
         lambda c: c.rollout_importance_sampling_min is not None and c.rollout_importance_sampling_mode == "none",
         "rollout_importance_sampling_min ({rollout_importance_sampling_min}) bounds a correction that is disabled. Set "
         "rollout_importance_sampling_mode, or leave it out."),
    # router replay
    Rule("router_replay_mode old_logprobs", lambda c: c.router_replay_mode == "R2" and c.old_logprobs == "rollout",
         "router_replay_mode R2 replays the routing of the pass for old log-probs, and old_logprobs rollout has no such pass. Use "
         "old_logprobs auto, or router_replay_mode R3.", {"old_logprobs": ["auto"], "router_replay_mode": ["R3", "disabled"]}),
    Rule("router_replay_mode vllm_enable_prefix_caching", lambda c: c.router_replay_mode == "R3" and not c.vllm_enable_prefix_caching,
         "router_replay_mode R3 needs vllm_enable_prefix_caching true; otherwise vLLM returns no routed experts. Use true.",
         {"vllm_enable_prefix_caching": [True]}),
    PLUG_INS["a teacher, mathematics"],
    # an entropy bonus that adapts
    Rule("{name} use_adaptive_entropy",
         lambda c: not c.use_adaptive_entropy and [field for field in changed(c, *ADAPTIVE) if field["name"] in c.cfg.typed],
         "{name} ({value:g}) has no effect without use_adaptive_entropy true. Set it, or leave this out.",
         {"use_adaptive_entropy": [True]}),
    Rule("entropy_coef entropy_coef_min entropy_coef_max",
         lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
         "use_adaptive_entropy starts at entropy_coef ({entropy_coef:g}), which is not between entropy_coef_min "
         "({entropy_coef_min:g}) and entropy_coef_max ({entropy_coef_max:g})."),
)

GROUP_RULES = (
    Rule("loss_type global_batch_size num_generations", lambda c: c.loss_type == "real" and c.global_batch % c.group,
         "loss_type real compares the completions of a group within a step, but {global_batch} completions are not a multiple of "
         "num_generations ({group}). Use a global batch that is a multiple of {group}.",
         lambda c: {"global_batch_size": [n * c.group for n in (c.global_batch // c.group, -(-c.global_batch // c.group)) if n]}),
    Rule("loss_type num_iterations", lambda c: c.loss_type == "real" and c.passes > 1 and c.generation % c.global_batch,
         "loss_type real compares the completions of a group within a step; with num_iterations above 1 and rollouts that are not a "
         "multiple of global_batch_size, a step may contain a group twice. Use num_iterations 1, or a rollout of whole steps.",
         {"num_iterations": [1]}),
)

WARNINGS = (
    Rule("", lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
         "cispo: epsilon_high is not set; 5.0 is used. Other systems fall back to epsilon 0.2, which bounds every ratio to 0.2 and makes "
         "all weights equal."),
    Rule("", lambda c: c.loss_type == "cispo" and c.epsilon_high is not None and c.epsilon_high <= 1,
         "cispo: epsilon_high ({epsilon_high}) bounds the ratio itself, which is near 1: every weight becomes {epsilon_high}. "
         "Typical values are around 5.0."),
    Rule("", lambda c: c.loss_type == "sapo" and c.epsilon_high is not None,
         "sapo does not clip: epsilon_high ({epsilon_high}) has no effect. Use sapo_temperature_pos and sapo_temperature_neg."),
    Rule("", lambda c: c.loss_type == "luspo" and c.importance_sampling_level == "token",
         "luspo with importance_sampling_level token sums token losses, which equals sequence_sum. The paper uses "
         "importance_sampling_level sequence."),
    Rule("", lambda c: c.loss_type in SEQUENCE_LOSS_TYPES and c.importance_sampling_level != "token",
         "{loss_type} already uses sequence ratios: importance_sampling_level {importance_sampling_level} only changes the ratio "
         "that corrects the KL."),
    Rule("", lambda c: c.loss_type in SEQUENCE_LOSS_TYPES and c.epsilon_high is not None,
         "{loss_type} does not clip: epsilon_high ({epsilon_high}) has no effect."),
    Rule("", lambda c: c.loss_type in CLIPPED_LOSS_TYPES and c.delta is not None and c.delta <= 1 + c.high and {"bound": 1 + c.high},
         "delta ({delta}) is not above 1 + epsilon_high ({bound:g}): it also clips positive advantages, unlike dual clip."),
    Rule("", lambda c: c.loss_type in CLIPPED_LOSS_TYPES and c.importance_sampling_level != "token" and c.epsilon >= 0.01,
         "importance_sampling_level {importance_sampling_level}: the ratio is a mean over a sequence and stays close to 1; epsilon "
         "{epsilon} never clips. GSPO uses about 3e-4."),
    Rule("", lambda c: c.importance_sampling_level == "sequence" and c.loss_type in LOSS_TYPES_OVER_TOKENS,
         "importance_sampling_level sequence with loss_type {loss_type} counts a sequence once per token, so long sequences weigh "
         "more. GSPO is loss_type grpo."),
    Rule("", lambda c: c.advantage_estimator == "reinforce_plus_plus" and (c.exclude_zero_std_groups or c.dynamic_sample),
         "advantage_estimator reinforce_plus_plus compares with the whole batch: zero-std groups also carry a signal, but "
         "exclude_zero_std_groups and dynamic_sample drop them."),
    Rule("", lambda c: c.kl_in_reward and c.dropping,
         "kl_in_reward with {dropping}: a group with equal rewards is dropped although the KL penalties of its completions differ and "
         "carry a signal. To train such groups, leave {dropping} out."),
    PLUG_INS["warnings of a teacher"],
    Rule("", lambda c: c.tuner_type == "lora" and c.lora_dropout > 0,
         "lora_dropout {lora_dropout:g}: dropout applies in training but not in sampling, so the ratio differs from 1 even before "
         "the first step, and the gradient belongs to another policy than the sampling one. Use 0 to train the sampling policy."),
)
# fmt: on
