"""Compatibility rules among the settings of the mathematics. No torch here, because `plan` uses them too.

`problems` are refused before anything starts; `warnings` are legal and probably not intended. The allowed values of a single setting are in
`config.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config, GrpoConfig
from megatron_grpo.config.rules import Rule, broken, changed, settings_of
from megatron_grpo.config.sampling_mask import NOTE, SAMPLING_MASK, flag_of, of_training

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
# Their loss of a token depends on the sign of its sequence's single advantage, or on later tokens of the sequence.
OF_ONE_SIGN = ("vespo", "fipo", "real")
# These sum over tokens, so a ratio shared by a whole sequence counts once per token.
LOSS_TYPES_OVER_TOKENS = ("bnpo", "dapo", "dr_grpo", "cispo", "sequence_sum", "fipo")
ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")


def problems(config: Config) -> list[Problem]:
    """Return every combination of settings that has no meaning, each with its reason."""
    return list(broken((*RULES, *SAMPLING_MASK), _settings(config)))


def group_problems(cfg: GrpoConfig, *, generation: int, global_batch: int, group: int, passes: int) -> list[Problem]:
    """Return problems of batch sizes that do not suit the loss.

    Args:
        cfg: The GRPO settings.
        generation: Rollout size, in completions.
        global_batch: Global batch size, in completions.
        group: Completions per prompt.
        passes: Passes over a rollout.
    """
    c = SimpleNamespace(loss_type=cfg.loss_type, generation=generation, global_batch=global_batch, group=group, passes=passes)
    return list(broken([GROUP_RULES], c))


def warnings(config: Config) -> list[str]:
    """Return warnings about settings that are legal but probably not intended."""
    return [problem.message for problem in broken((NOTE, *WARNINGS), _settings(config))]


def _settings(config: Config) -> SimpleNamespace:
    cfg = config.grpo
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    bound = flag_of(config.rollout) if of_training(config.rollout) is not None else None
    return settings_of(config, bounding=bound, high=high)


# ---- computed neighbours


def _dropped(c: SimpleNamespace) -> dict[str, Any] | None:
    names = [name for name in ("dynamic_sample", "exclude_zero_std_groups") if getattr(c, name)]
    found = {"names": names, "flags": " ".join(names), "both": " and ".join(names), "it": "them" if len(names) > 1 else "it"}
    return found if names and c.teacher and not c.reward_funcs else None


def _is_gdpo(c: SimpleNamespace) -> bool:
    return "gdpo" in (c.advantage_estimator, c.scale_rewards) or c.multi_objective_aggregation == "normalize_then_sum"


def _other_scale(c: SimpleNamespace) -> dict[str, Any] | None:
    allowed = SCALES_OF_ESTIMATOR.get(c.advantage_estimator, (c.scale_rewards,))
    return {"allowed": allowed, "them": " or ".join(allowed)} if c.scale_rewards not in allowed else None


# fmt: off
RULES = (
    # the objective
    Rule("delta loss_type", lambda c: c.delta is not None and c.loss_type not in CLIPPED_LOSS_TYPES,
         "delta ({delta}) bounds the unclipped term of the clipped surrogate, and loss_type {loss_type} has none. Leave delta out, or use "
         f"loss_type {', '.join(CLIPPED_LOSS_TYPES)}."),
    Rule("loss_type rollout_importance_sampling_mode",
         lambda c: c.loss_type == "vespo" and c.rollout_importance_sampling_mode.startswith("sequence_"),
         "loss_type vespo multiplies the correction of every token into the sequence's weight: rollout_importance_sampling_mode "
         "{rollout_importance_sampling_mode}, which gives all tokens the sequence's, would count it once per token. Use a mode per token, "
         "or none.", {"rollout_importance_sampling_mode": ["token_truncate", "token_mask", "none"]}),
    # the loss of `real` is one number per group, not a sum over tokens that could be weighted one by one
    Rule("loss_type {name}", lambda c: c.loss_type == "real"
         and changed(c, "rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "top_entropy_quantile"),
         "{name} ({value}) is a factor of single tokens, and loss_type real is a function of a whole group's mean log-ratios, which has "
         "none. Leave {name} out, or use another loss_type.", lambda c: {} if c.off is None else {c.name: [c.off]}),
    # the KL and its reference
    Rule("kl_estimator use_bias_correction_kl",
         lambda c: c.beta > 0 and not c.kl_in_reward and c.kl_estimator == "k1" and not c.use_bias_correction_kl,
         "kl_estimator k1 in the loss without use_bias_correction_kl has a gradient of zero mean: it would only add noise. Set "
         "use_bias_correction_kl true, or use k2 or k3, or kl_in_reward."),
    Rule("kl_in_reward beta", lambda c: c.kl_in_reward and c.beta == 0,
         "kl_in_reward subtracts beta x KL from the reward, and beta is 0. Give a beta above 0, for example 0.04."),
    Rule("kl_in_reward advantage_estimator", lambda c: c.kl_in_reward and _is_gdpo(c),
         "kl_in_reward needs one reward to subtract from before the baseline; gdpo normalises each reward function on its own. Put the KL "
         "in the loss (kl_in_reward false), or use another advantage_estimator."),
    Rule("sync_ref_model beta", lambda c: c.sync_ref_model and c.beta == 0,
         "sync_ref_model moves a reference model, and with beta 0 there is none. Give a beta above 0, or leave it out."),
    (
        Rule("ref_model beta", lambda c: c.ref_model is not None and c.beta == 0,
             "ref_model ({ref_model}) is what the KL is measured against, and beta is 0. Give a beta above 0, or leave it out."),
        Rule("ref_model ref_adapters", lambda c: c.ref_model is not None and c.ref_adapters is not None,
             "ref_model ({ref_model}) and ref_adapters ({ref_adapters}) both say what the reference is. Keep one of them."),
        Rule("sync_ref_model tuner_type", lambda c: c.sync_ref_model and c.tuner_type == "lora",
             "sync_ref_model does not go with tuner_type lora: a mix of two products B A is not of rank r, so no adapter is the mixed "
             "reference. Leave it out: the reference is the model as the run began.", {"sync_ref_model": [False]}),
    ),
    # advantages
    Rule("scale_rewards advantage_estimator", _other_scale,
         "scale_rewards {scale_rewards} chooses the std of advantage_estimator grpo; {advantage_estimator} has its own. Use "
         "advantage_estimator grpo, or scale_rewards {them}.", lambda c: {"scale_rewards": c.allowed, "advantage_estimator": ["grpo"]}),
    Rule("multi_objective_aggregation", lambda c: c.multi_objective_aggregation == "normalize_then_sum"
         and (c.advantage_estimator not in ("grpo", "gdpo") or c.scale_rewards not in ("group", "gdpo")),
         "multi_objective_aggregation normalize_then_sum is advantage_estimator gdpo under another name: it cannot be combined with "
         "advantage_estimator {advantage_estimator} and scale_rewards {scale_rewards}. Leave those out."),
    # the correction for the engine mismatch
    Rule("rollout_is_geometric rollout_importance_sampling_mode",
         lambda c: c.rollout_is_geometric and not c.rollout_importance_sampling_mode.startswith("sequence_"),
         "rollout_is_geometric is about a whole sequence's ratio, and rollout_importance_sampling_mode is "
         "{rollout_importance_sampling_mode}. Use sequence_truncate or sequence_mask, or leave it out."),
    Rule("rollout_importance_sampling_min rollout_importance_sampling_threshold",
         lambda c: (least := c.rollout_importance_sampling_min) is not None and least >= c.rollout_importance_sampling_threshold,
         "rollout_importance_sampling_min ({rollout_importance_sampling_min}) must be below rollout_importance_sampling_threshold "
         "({rollout_importance_sampling_threshold})."),
    Rule("rollout_importance_sampling_min rollout_importance_sampling_mode",
         lambda c: c.rollout_importance_sampling_min is not None and c.rollout_importance_sampling_mode == "none",
         "rollout_importance_sampling_min ({rollout_importance_sampling_min}) bounds a correction that is off. Choose a "
         "rollout_importance_sampling_mode, or leave it out."),
    # router replay
    Rule("router_replay_mode old_logprobs", lambda c: c.router_replay_mode == "R2" and c.old_logprobs == "rollout",
         "router_replay_mode R2 replays what the pass for old log-probs chose, and with old_logprobs rollout there is none. Use "
         "old_logprobs auto, or router_replay_mode R3.", {"old_logprobs": ["auto"], "router_replay_mode": ["R3", "disabled"]}),
    Rule("router_replay_mode vllm_enable_prefix_caching", lambda c: c.router_replay_mode == "R3" and not c.vllm_enable_prefix_caching,
         "router_replay_mode R3 needs vllm_enable_prefix_caching true, without which vLLM returns no experts. Use true.",
         {"vllm_enable_prefix_caching": [True]}),
    # a teacher
    Rule("teacher_kl_coef teacher_model", lambda c: not c.teacher and changed(c, "teacher_kl_coef"),
         "teacher_kl_coef ({teacher_kl_coef}) weighs what a teacher says, and there is none. Name it with teacher_model, or its servers "
         "with teacher_model_server, or leave this out."),
    # vLLM returns log-probs of sampled tokens over the full softmax at temperature 1
    Rule("teacher_model_server {name}",
         lambda c: c.teacher == "teacher_model_server" and changed(c, "temperature", "top_p", "top_k", "min_p"),
         "teacher_model_server: a server's log-probs are those of its whole softmax at temperature 1, and with {name} ({value}) tokens are "
         "drawn from another distribution than that. Use {name} {off:g}, or teacher_model.", lambda c: {c.name: [c.off]}),
    Rule("teacher_model_server {bounding}", lambda c: c.teacher == "teacher_model_server" and c.bounding,
         "teacher_model_server: a server's log-probs are those of its whole softmax, and with {bounding} tokens are drawn from the words "
         "that a grammar leaves. Leave it out, or use teacher_model."),
    Rule("{teacher} loss_type", lambda c: c.teacher and c.loss_type in OF_ONE_SIGN,
         "{teacher} gives each token an advantage of its own, and loss_type {loss_type} weighs a whole sequence by the one advantage that "
         "it has. Use grpo, dapo, or another loss_type of single tokens.", {"loss_type": ["grpo", "dapo"]}),
    Rule("{teacher} off_policy_sequence_mask_delta", lambda c: c.teacher and c.off_policy_sequence_mask_delta is not None,
         "{teacher} gives each token an advantage of its own, and off_policy_sequence_mask_delta drops sequences whose one advantage is "
         "below 0. Leave one of them out."),
    Rule("{flags} {teacher}", _dropped,
         "{both} leaves out groups whose rewards are equal, and without reward_funcs those are all groups. Leave {it} out: a teacher "
         "teaches by every group.", lambda c: dict.fromkeys(c.names, [False])),
    Rule("oversample_ratio {teacher}", lambda c: c.teacher and c.oversample_ratio > 1 and not c.reward_funcs,
         "oversample_ratio ({oversample_ratio:g}) samples more groups than are trained and keeps those whose rewards differ, and without "
         "reward_funcs none do: what is sampled besides would be thrown away. Use 1.", {"oversample_ratio": [1.0]}),
    # an entropy bonus that adapts
    Rule("{name} use_adaptive_entropy",
         lambda c: not c.use_adaptive_entropy and [one for one in changed(c, *ADAPTIVE) if one["name"] in c.cfg.typed],
         "{name} ({value:g}) does nothing without use_adaptive_entropy true. Give that, or leave it out.",
         {"use_adaptive_entropy": [True]}),
    Rule("entropy_coef entropy_coef_min entropy_coef_max",
         lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
         "use_adaptive_entropy begins with entropy_coef ({entropy_coef:g}), which is not between entropy_coef_min ({entropy_coef_min:g}) "
         "and entropy_coef_max ({entropy_coef_max:g})."),
)

GROUP_RULES = (
    Rule("loss_type global_batch_size num_generations", lambda c: c.loss_type == "real" and c.global_batch % c.group,
         "loss_type real compares the completions of a group within a step, and a step of {global_batch} completions holds no whole number "
         "of groups of {group}. Use a global batch that is a multiple of {group}.",
         lambda c: {"global_batch_size": [n * c.group for n in (c.global_batch // c.group, -(-c.global_batch // c.group)) if n]}),
    Rule("loss_type num_iterations", lambda c: c.loss_type == "real" and c.passes > 1 and c.generation % c.global_batch,
         "loss_type real compares the completions of a group within a step, and with num_iterations above 1 where rollouts straddle steps "
         "a step may hold a group twice. Use num_iterations 1, or rollouts of whole steps.", {"num_iterations": [1]}),
)

WARNINGS = (
    Rule("", lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
         "cispo: epsilon_high is not given; 5.0 is used. TRL and Megatron-SWIFT would fall back to epsilon 0.2 here, which bounds every "
         "ratio to 0.2 and so makes all weights equal."),
    Rule("", lambda c: c.loss_type == "cispo" and c.epsilon_high is not None and c.epsilon_high <= 1,
         "cispo: epsilon_high ({epsilon_high}) bounds the ratio itself, which is near 1: every weight becomes {epsilon_high}. Values "
         "around 5.0 are meant."),
    Rule("", lambda c: c.loss_type == "sapo" and c.epsilon_high is not None,
         "sapo has no clip: epsilon_high ({epsilon_high}) does nothing. See sapo_temperature_pos and _neg."),
    Rule("", lambda c: c.loss_type == "luspo" and c.importance_sampling_level == "token",
         "luspo with importance_sampling_level token sums what tokens lose: it is sequence_sum. Its paper's ratio is the sequence's: "
         "importance_sampling_level sequence."),
    Rule("", lambda c: c.loss_type in SEQUENCE_LOSS_TYPES and c.importance_sampling_level != "token",
         "{loss_type} looks at the whole sequence by itself: importance_sampling_level {importance_sampling_level} changes only the ratio "
         "that corrects the KL."),
    Rule("", lambda c: c.loss_type in SEQUENCE_LOSS_TYPES and c.epsilon_high is not None,
         "{loss_type} has no clip: epsilon_high ({epsilon_high}) does nothing."),
    Rule("", lambda c: c.loss_type in CLIPPED_LOSS_TYPES and c.delta is not None and c.delta <= 1 + c.high and {"bound": 1 + c.high},
         "delta ({delta}) is not above 1 + epsilon_high ({bound:g}): it also clips positive advantages, and is not dual clip."),
    Rule("", lambda c: c.loss_type in CLIPPED_LOSS_TYPES and c.importance_sampling_level != "token" and c.epsilon >= 0.01,
         "importance_sampling_level {importance_sampling_level}: the ratio is a mean over a sequence and hardly leaves 1; epsilon "
         "{epsilon} will never clip. GSPO uses about 3e-4."),
    Rule("", lambda c: c.importance_sampling_level == "sequence" and c.loss_type in LOSS_TYPES_OVER_TOKENS,
         "importance_sampling_level sequence with loss_type {loss_type} counts a sequence once per token: long ones weigh more. GSPO is "
         "loss_type grpo."),
    Rule("", lambda c: c.advantage_estimator == "reinforce_plus_plus" and (c.exclude_zero_std_groups or c.dynamic_sample),
         "reinforce_plus_plus compares with the whole batch: a group with equal rewards still says something there, and is taken out."),
    Rule("", lambda c: c.teacher and c.reward_funcs and (c.exclude_zero_std_groups or c.dynamic_sample),
         "{teacher}: a group with equal rewards is still taught token by token, and exclude_zero_std_groups and dynamic_sample "
         "take it out."),
    Rule("", lambda c: c.teacher and c.importance_sampling_level == "sequence",
         "{teacher} with importance_sampling_level sequence: the ratio is the sequence's, so what the teacher says of single tokens is "
         "averaged over it. importance_sampling_level token, or sequence_token, keeps it apart."),
    Rule("", lambda c: c.tuner_type == "lora" and c.lora_dropout > 0,
         "lora_dropout {lora_dropout:g}: the policy that trains drops parts of its input, the one that samples does not, so their ratio is "
         "not 1 even before the first step, and the gradient is that of another policy. 0 trains the one that samples."),
)
# fmt: on
