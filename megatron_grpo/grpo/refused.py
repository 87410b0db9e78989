"""Which of the settings of the mathematics go together. No torch here: `plan` asks too.

`problems` are refused before anything starts; `warnings` are legal and probably not what was meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_grpo.base.errors import Problem
from megatron_grpo.config import kept
from megatron_grpo.config.config import Config, GrpoConfig
from megatron_grpo.config.grammar import flag_of, of_training

# What scale_rewards may say next to an estimator: the default, or what the estimator does anyway.
SCALES_OF_ESTIMATOR: Mapping[str, tuple[str, ...]] = {
    "grpo": ("group", "batch", "none", "gdpo"),
    "rloo": ("group", "none"),
    "reinforce_plus_plus": ("group", "batch"),
    "reinforce_plus_plus_baseline": ("group", "batch"),
    "gdpo": ("group", "gdpo"),
}
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "luspo", "fipo")
# These look at the whole sequence by themselves: the level of the ratio is left for the KL's correction alone.
SEQUENCE_LOSS_TYPES = ("vespo", "real")
# What they do to a token depends on the sign of its sequence's one advantage, or on what follows in the sequence.
OF_ONE_SIGN = ("vespo", "fipo", "real")
# These add tokens up, so a ratio shared by a whole sequence counts once per token.
LOSS_TYPES_OVER_TOKENS = ("bnpo", "dapo", "dr_grpo", "cispo", "sequence_sum", "fipo")


def problems(config: Config) -> list[Problem]:
    """Every combination that has no meaning, each with its reason. What a single value may be stands beside it, in `config.config`."""
    cfg = config.grpo
    return [
        *_objective(cfg),
        *_kl(cfg),
        *_reference(config),
        *_advantages(cfg),
        *_corrections(cfg),
        *_replay(config),
        *_teacher(config),
        *_adaptive_entropy(cfg, config.typed),
    ]


def sampling_problems(config: Config) -> list[Problem]:
    """What training draws from. (Evaluations may draw from anything, and rows that were recorded have been drawn.)"""
    return [Problem(flags=flags, message=message, nearest=nearest) for flags, message, nearest in kept.pairs(config)]


def _replay(config: Config) -> list[Problem]:
    mode = config.grpo.router_replay_mode
    if mode == "R2" and config.batch.old_logprobs == "rollout":
        return [
            Problem(
                flags=("router_replay_mode", "old_logprobs"),
                message="router_replay_mode R2 replays what the pass for old log-probs chose, and with old_logprobs rollout there is none. "
                "Use old_logprobs auto, or router_replay_mode R3.",
                nearest={"old_logprobs": ["auto"], "router_replay_mode": ["R3", "disabled"]},
            )
        ]
    if mode == "R3" and not config.rollout.vllm_enable_prefix_caching:
        return [
            Problem(
                flags=("router_replay_mode", "vllm_enable_prefix_caching"),
                message="router_replay_mode R3 needs vllm_enable_prefix_caching true, without which vLLM returns no experts. Use true.",
                nearest={"vllm_enable_prefix_caching": [True]},
            )
        ]
    return []


def _teacher(config: Config) -> list[Problem]:
    cfg, flag = config.grpo, config.grpo.teacher_flag
    if flag is None:
        message = (
            f"teacher_kl_coef ({cfg.teacher_kl_coef}) weighs what a teacher says, and there is none. Name it with teacher_model, or its "
            "servers with teacher_model_server, or leave this out."
        )
        flags = ("teacher_kl_coef", "teacher_model")
        return [Problem(flags=flags, message=message)] if cfg.teacher_kl_coef != GrpoConfig().teacher_kl_coef else []
    found = _served_teacher(config) if flag == "teacher_model_server" else []
    if cfg.loss_type in OF_ONE_SIGN:
        message = (
            f"{flag} gives each token an advantage of its own, and loss_type {cfg.loss_type} weighs a whole sequence by the "
            "one advantage that it has. Use grpo, dapo, or another loss_type of single tokens."
        )
        found.append(Problem(flags=(flag, "loss_type"), message=message, nearest={"loss_type": ["grpo", "dapo"]}))
    if cfg.off_policy_sequence_mask_delta is not None:
        message = (
            f"{flag} gives each token an advantage of its own, and off_policy_sequence_mask_delta drops sequences whose one advantage is "
            "below 0. Leave one of them out."
        )
        found.append(Problem(flags=(flag, "off_policy_sequence_mask_delta"), message=message))
    dropped = [name for name in ("dynamic_sample", "exclude_dead_groups") if getattr(cfg, name)]
    if dropped and not config.rewards.reward_funcs:
        message = (
            f"{' and '.join(dropped)} leaves out groups whose rewards are equal, and without reward_funcs those are all groups. Leave "
            f"{'them' if len(dropped) > 1 else 'it'} out: a teacher teaches by every group."
        )
        found.append(Problem(flags=(*dropped, flag), message=message, nearest={name: [False] for name in dropped}))
    if cfg.oversample_ratio > 1 and not config.rewards.reward_funcs:
        message = (
            f"oversample_ratio ({cfg.oversample_ratio:g}) samples more groups than are trained and keeps those whose rewards differ, and "
            "without reward_funcs none do: what is sampled besides would be thrown away. Use 1."
        )
        found.append(Problem(flags=("oversample_ratio", flag), message=message, nearest={"oversample_ratio": [1.0]}))
    return found


def _served_teacher(config: Config) -> list[Problem]:
    """What servers cannot say: vLLM tells of drawn tokens the log-probs of a whole softmax at temperature 1."""
    found, flag = [], "teacher_model_server"
    rollout = config.rollout
    drawn_otherwise = {"temperature": (rollout.temperature, 1.0), "top_p": (rollout.top_p, 1.0), "top_k": (rollout.top_k, 0),
                       "min_p": (rollout.min_p, 0.0)}  # fmt: skip
    for name, (value, plain) in drawn_otherwise.items():
        if value != plain:
            message = (
                f"{flag}: a server's log-probs are those of its whole softmax at temperature 1, and with {name} ({value}) tokens are "
                f"drawn from another distribution than that. Use {name} {plain:g}, or teacher_model."
            )
            found.append(Problem(flags=(flag, name), message=message, nearest={name: [plain]}))
    if of_training(rollout) is not None:
        message = (
            f"{flag}: a server's log-probs are those of its whole softmax, and with {flag_of(rollout)} tokens are drawn from the words "
            "that a grammar leaves. Leave it out, or use teacher_model."
        )
        found.append(Problem(flags=(flag, flag_of(rollout)), message=message))
    return found


def _objective(cfg: GrpoConfig) -> list[Problem]:
    found = []
    if cfg.delta is not None and cfg.loss_type not in CLIPPED_LOSS_TYPES:
        found.append(
            Problem(
                flags=("delta", "loss_type"),
                message=f"delta ({cfg.delta}) bounds the unclipped term of the clipped surrogate, and loss_type {cfg.loss_type} has none. "
                f"Leave delta out, or use loss_type {', '.join(CLIPPED_LOSS_TYPES)}.",
            )
        )
    mode = cfg.rollout_importance_sampling_mode
    if cfg.loss_type == "vespo" and mode.startswith("sequence_"):
        found.append(
            Problem(
                flags=("loss_type", "rollout_importance_sampling_mode"),
                message=f"loss_type vespo multiplies the correction of every token into the sequence's weight: rollout_importance_sampling_"
                f"mode {mode}, which gives all tokens the sequence's, would count it once per token. Use a mode per token, or none.",
                nearest={"rollout_importance_sampling_mode": ["token_truncate", "token_mask", "none"]},
            )
        )
    return [*found, *_of_real(cfg)]


ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")


def _adaptive_entropy(cfg: GrpoConfig, typed: Collection[str]) -> list[Problem]:
    """typed: settings that somebody gave."""
    if not cfg.use_adaptive_entropy:
        return [
            Problem(
                flags=(name, "use_adaptive_entropy"),
                message=f"{name} ({getattr(cfg, name):g}) does nothing without use_adaptive_entropy true. Give that, or leave it out.",
                nearest={"use_adaptive_entropy": [True]},
            )
            for name in ADAPTIVE
            if name in typed and getattr(cfg, name) != getattr(GrpoConfig(), name)
        ]
    if not cfg.entropy_coef_min <= cfg.entropy_coef <= cfg.entropy_coef_max:
        message = (
            f"use_adaptive_entropy begins with entropy_coef ({cfg.entropy_coef:g}), which is not between entropy_coef_min "
            f"({cfg.entropy_coef_min:g}) and entropy_coef_max ({cfg.entropy_coef_max:g})."
        )
        return [Problem(flags=("entropy_coef", "entropy_coef_min", "entropy_coef_max"), message=message)]
    return []


def _of_real(cfg: GrpoConfig) -> list[Problem]:
    """Its loss is one number a group, not a sum over tokens that could be weighed one by one."""
    factors = {
        "rollout_importance_sampling_mode": (cfg.rollout_importance_sampling_mode, "none"),
        "off_policy_sequence_mask_delta": (cfg.off_policy_sequence_mask_delta, None),
        "top_entropy_quantile": (cfg.top_entropy_quantile, 1.0),
    }
    return [
        Problem(
            flags=("loss_type", name),
            message=f"{name} ({value}) is a factor of single tokens, and loss_type real is a function of a whole group's mean log-ratios, "
            f"which has none. Leave {name} out, or use another loss_type.",
            nearest={} if off is None else {name: [off]},
        )
        for name, (value, off) in factors.items()
        if cfg.loss_type == "real" and value != off
    ]


def group_problems(cfg: GrpoConfig, *, generation: int, global_batch: int, group: int, passes: int) -> list[Problem]:
    """Where sizes that go together do not suit the loss. generation, global_batch, group: in completions. passes: over a rollout."""
    if cfg.loss_type != "real":
        return []
    if global_batch % group:
        near = [size for size in (global_batch // group * group, -(-global_batch // group) * group) if size]
        return [
            Problem(
                flags=("loss_type", "global_batch_size", "num_generations"),
                message=f"loss_type real compares the completions of a group within a step, and a step of {global_batch} completions holds "
                f"no whole number of groups of {group}. Use a global batch that is a multiple of {group}.",
                nearest={"global_batch_size": near},
            )
        ]
    if passes > 1 and generation % global_batch:
        return [
            Problem(
                flags=("loss_type", "num_iterations"),
                message="loss_type real compares the completions of a group within a step, and with num_iterations above 1 where rollouts "
                "straddle steps a step may hold a group twice. Use num_iterations 1, or rollouts of whole steps.",
                nearest={"num_iterations": [1]},
            )
        ]
    return []


def _kl(cfg: GrpoConfig) -> list[Problem]:
    found = []
    if cfg.beta > 0 and not cfg.kl_in_reward and cfg.kl_estimator == "k1" and not cfg.use_bias_correction_kl:
        found.append(
            Problem(
                flags=("kl_estimator", "use_bias_correction_kl"),
                message="kl_estimator k1 in the loss without use_bias_correction_kl has a gradient of zero mean: it would only add noise. "
                "Set use_bias_correction_kl true, or use k2 or k3, or kl_in_reward.",
            )
        )
    if cfg.kl_in_reward and cfg.beta == 0:
        found.append(
            Problem(
                flags=("kl_in_reward", "beta"),
                message="kl_in_reward subtracts beta x KL from the reward, and beta is 0. Give a beta above 0, for example 0.04.",
            )
        )
    if cfg.kl_in_reward and _is_gdpo(cfg):
        found.append(
            Problem(
                flags=("kl_in_reward", "advantage_estimator"),
                message="kl_in_reward needs one reward to subtract from before the baseline; gdpo normalises each reward function on its "
                "own. Put the KL in the loss (kl_in_reward false), or use another advantage_estimator.",
            )
        )
    if cfg.sync_ref_model and cfg.beta == 0:
        found.append(
            Problem(
                flags=("sync_ref_model", "beta"),
                message="sync_ref_model moves a reference model, and with beta 0 there is none. Give a beta above 0, or leave it out.",
            )
        )
    return found


def _reference(config: Config) -> list[Problem]:
    name, ref_adapters = config.grpo.ref_model, config.tuner.ref_adapters
    if name is not None and config.grpo.beta == 0:
        message = f"ref_model ({name}) is what the KL is measured against, and beta is 0. Give a beta above 0, or leave it out."
        return [Problem(flags=("ref_model", "beta"), message=message)]
    if name is not None and ref_adapters is not None:
        message = f"ref_model ({name}) and ref_adapters ({ref_adapters}) both say what the reference is. Keep one of them."
        return [Problem(flags=("ref_model", "ref_adapters"), message=message)]
    if not (config.grpo.sync_ref_model and config.tuner.tuner_type == "lora"):
        return []
    return [
        Problem(
            flags=("sync_ref_model", "tuner_type"),
            message="sync_ref_model does not go with tuner_type lora: a mix of two products B A is not of rank r, so no adapter is "
            "the mixed reference. Leave it out: the reference is the model as the run began.",
            nearest={"sync_ref_model": [False]},
        )
    ]


def _is_gdpo(cfg: GrpoConfig) -> bool:
    return "gdpo" in (cfg.advantage_estimator, cfg.scale_rewards) or cfg.multi_objective_aggregation == "normalize_then_sum"


def _advantages(cfg: GrpoConfig) -> list[Problem]:
    found = []
    allowed = SCALES_OF_ESTIMATOR.get(cfg.advantage_estimator, (cfg.scale_rewards,))
    if cfg.scale_rewards not in allowed:
        found.append(
            Problem(
                flags=("scale_rewards", "advantage_estimator"),
                message=f"scale_rewards {cfg.scale_rewards} chooses the std of advantage_estimator grpo; {cfg.advantage_estimator} has its "
                f"own. Use advantage_estimator grpo, or scale_rewards {' or '.join(allowed)}.",
                nearest={"scale_rewards": list(allowed), "advantage_estimator": ["grpo"]},
            )
        )
    summed_late = cfg.multi_objective_aggregation == "normalize_then_sum"
    if summed_late and (cfg.advantage_estimator not in ("grpo", "gdpo") or cfg.scale_rewards not in ("group", "gdpo")):
        found.append(
            Problem(
                flags=("multi_objective_aggregation",),
                message="multi_objective_aggregation normalize_then_sum is advantage_estimator gdpo under another name: it cannot be "
                f"combined with advantage_estimator {cfg.advantage_estimator} and scale_rewards {cfg.scale_rewards}. Leave those out.",
            )
        )
    return found


def _corrections(cfg: GrpoConfig) -> list[Problem]:
    found = []
    mode = cfg.rollout_importance_sampling_mode
    if cfg.rollout_is_geometric and not mode.startswith("sequence_"):
        found.append(
            Problem(
                flags=("rollout_is_geometric", "rollout_importance_sampling_mode"),
                message=f"rollout_is_geometric is about a whole sequence's ratio, and rollout_importance_sampling_mode is {mode}. "
                "Use sequence_truncate or sequence_mask, or leave it out.",
            )
        )
    least, most = cfg.rollout_importance_sampling_min, cfg.rollout_importance_sampling_threshold
    if least is not None and least >= most:
        found.append(
            Problem(
                flags=("rollout_importance_sampling_min", "rollout_importance_sampling_threshold"),
                message=f"rollout_importance_sampling_min ({least}) must be below rollout_importance_sampling_threshold ({most}).",
            )
        )
    if cfg.rollout_importance_sampling_min is not None and mode == "none":
        found.append(
            Problem(
                flags=("rollout_importance_sampling_min", "rollout_importance_sampling_mode"),
                message=f"rollout_importance_sampling_min ({cfg.rollout_importance_sampling_min}) bounds a correction that is off. "
                "Choose a rollout_importance_sampling_mode, or leave it out.",
            )
        )
    return found


def warnings(config: Config) -> list[str]:
    """Legal, and worth a line before the run."""
    cfg = config.grpo
    found = [*kept.warnings(config.rollout)]
    if cfg.loss_type == "cispo" and cfg.epsilon_high is None:
        found.append(
            "cispo: epsilon_high is not given; 5.0 is used. TRL and Megatron-SWIFT would fall back to epsilon 0.2 here, which bounds every "
            "ratio to 0.2 and so makes all weights equal."
        )
    if cfg.loss_type == "cispo" and cfg.epsilon_high is not None and cfg.epsilon_high <= 1:
        found.append(
            f"cispo: epsilon_high ({cfg.epsilon_high}) bounds the ratio itself, which is near 1: every weight becomes {cfg.epsilon_high}. "
            "Values around 5.0 are meant."
        )
    if cfg.loss_type == "sapo" and cfg.epsilon_high is not None:
        found.append(f"sapo has no clip: epsilon_high ({cfg.epsilon_high}) does nothing. See sapo_temperature_pos and _neg.")
    if cfg.loss_type == "luspo" and cfg.importance_sampling_level == "token":
        found.append(
            "luspo with importance_sampling_level token sums what tokens lose: it is sequence_sum. Its paper's ratio is the sequence's: "
            "importance_sampling_level sequence."
        )
    if cfg.loss_type in SEQUENCE_LOSS_TYPES and cfg.importance_sampling_level != "token":
        found.append(
            f"{cfg.loss_type} looks at the whole sequence by itself: importance_sampling_level {cfg.importance_sampling_level} changes "
            "only the ratio that corrects the KL."
        )
    if cfg.loss_type in SEQUENCE_LOSS_TYPES and cfg.epsilon_high is not None:
        found.append(f"{cfg.loss_type} has no clip: epsilon_high ({cfg.epsilon_high}) does nothing.")
    epsilon_high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    if cfg.loss_type in CLIPPED_LOSS_TYPES:
        if cfg.delta is not None and cfg.delta <= 1 + epsilon_high:
            found.append(
                f"delta ({cfg.delta}) is not above 1 + epsilon_high ({1 + epsilon_high:g}): it also clips positive advantages, and is not "
                "dual clip."
            )
        if cfg.importance_sampling_level != "token" and cfg.epsilon >= 0.01:
            found.append(
                f"importance_sampling_level {cfg.importance_sampling_level}: the ratio is a mean over a sequence and hardly leaves 1; "
                f"epsilon {cfg.epsilon} will never clip. GSPO uses about 3e-4."
            )
    if cfg.importance_sampling_level == "sequence" and cfg.loss_type in LOSS_TYPES_OVER_TOKENS:
        found.append(
            f"importance_sampling_level sequence with loss_type {cfg.loss_type} counts a sequence once per token: long ones weigh more. "
            "GSPO is loss_type grpo."
        )
    if cfg.advantage_estimator == "reinforce_plus_plus" and (cfg.exclude_dead_groups or cfg.dynamic_sample):
        found.append(
            "reinforce_plus_plus compares with the whole batch: a group with equal rewards still says something there, and is taken out."
        )
    found += _of_teacher(config)
    if config.tuner.tuner_type == "lora" and config.tuner.lora_dropout > 0:
        found.append(
            f"lora_dropout {config.tuner.lora_dropout:g}: the policy that trains drops parts of its input, the one that samples does not, "
            "so their ratio is not 1 even before the first step, and the gradient is that of another policy. 0 trains the one that samples."
        )
    return found


def _of_teacher(config: Config) -> list[str]:
    cfg, found = config.grpo, []
    if cfg.teacher_flag and config.rewards.reward_funcs and (cfg.exclude_dead_groups or cfg.dynamic_sample):
        found.append(
            f"{cfg.teacher_flag}: a group with equal rewards is still taught token by token, and exclude_dead_groups and dynamic_sample "
            "take it out."
        )
    if cfg.teacher_flag and cfg.importance_sampling_level == "sequence":
        found.append(
            f"{cfg.teacher_flag} with importance_sampling_level sequence: the ratio is the sequence's, so what the teacher says of single "
            "tokens is averaged over it. importance_sampling_level token, or sequence_token, keeps it apart."
        )
    return found
