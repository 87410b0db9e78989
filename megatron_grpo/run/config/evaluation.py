"""Settings of evaluation, and of the best checkpoint. No torch.

They determine the held-out sets, the completions per prompt and how these are sampled; and by which metric checkpoints are compared, and in
which direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from megatron_grpo.run.config.rules import Rule, changed
from megatron_grpo.run.config.settings import Config, DataConfig
from megatron_grpo.run.config.table import close_to

ALONE = "eval"  # name of the set that eval_dataset names
SPLIT = "split_dataset_ratio"  # holds out rows of the training set
SUM = "weighted sum"  # of the rewards, as in training; no function has such a name
PENALTIES = ("length", "soft_overlong", "repetition")  # built-in rewards that are never above 0
ANSWERING = ("accuracy", "math", "code", "environment")  # built-in rewards that are 1 for a completion that solves its task
COMPLETIONS = 8  # per prompt, if they are sampled and num_generations_eval is not set
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Metrics of a rollout and of a step by which checkpoints may be compared. docs/metrics.md lists all names.
_ROLLOUTS = ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")
_STEPS = (
    *("loss", "grad_norm", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("sampling/kl_k1", "sampling/kl_k3"),
)
_OWN = "environment/"  # prefix of metrics that an environment defines


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling:
    """Sampling settings of evaluations. A None means the value of training.

    Args:
        n: Completions per prompt.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Nucleus sampling.
        top_k: Top-k sampling.
        min_p: Min-p sampling.
        max_completion_length: Tokens.
        more: Further fields of vLLM's SamplingParams.
    """

    n: int
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_completion_length: int | None = None
    more: Mapping[str, Any] | None = None


def list_sets(cfg: Config) -> dict[str, str]:
    """Return {name: path or Hub name} of the held-out sets, the one of `eval_dataset` first."""
    single_set = cfg.eval.eval_dataset or (cfg.data.dataset if cfg.data.split_dataset_ratio else "")
    return ({ALONE: single_set} if single_set else {}) | dict(cfg.eval.eval_datasets)


def find_set_flag(name: str, cfg: Config) -> str:
    """Return the setting that names a set."""
    if name != ALONE or not (cfg.eval.eval_dataset or cfg.data.split_dataset_ratio):
        return "eval_datasets"
    return "eval_dataset" if cfg.eval.eval_dataset else SPLIT


def choose_data_config(cfg: Config, flag: str) -> DataConfig:
    """Return the data settings of a held-out set; those of the training set where it is a part of it.

    Args:
        flag: The setting that names the set, from `find_set_flag`.
    """
    strategy = cfg.eval.eval_truncation_strategy or cfg.data.truncation_strategy
    if flag == SPLIT:
        return replace(cfg.data, truncation_strategy=strategy)
    columns = cfg.eval.eval_columns or cfg.data.columns
    return replace(cfg.data, truncation_strategy=strategy, dataset_split=cfg.eval.eval_dataset_split or "", columns=columns)


def name_curve(name: str) -> str:
    """Return the name under which a set's scores are plotted and logged to tracking services."""
    return ALONE if name == ALONE else f"{ALONE}/{name}"


def ks(n: int) -> list[int]:
    """Return the values of k for which pass@k is reported: powers of two up to n, and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def eval_sampling(cfg: Config) -> EvalSampling:
    """Return how evaluations sample.

    With `eval_dataset` alone and one completion per prompt they are greedy. Everything else, episodes included, is sampled at the training
    temperature.
    """
    cfg_eval = cfg.eval
    is_plain = (
        bool(cfg_eval.eval_dataset or cfg.data.split_dataset_ratio)
        and not cfg_eval.eval_datasets
        and cfg_eval.num_generations_eval in (None, 1)
        and not cfg.turns.plays
    )
    temperature = cfg_eval.eval_temperature
    if temperature is None:
        temperature = 0.0 if is_plain else cfg.rollout.temperature
    return EvalSampling(
        n=cfg_eval.num_generations_eval or (COMPLETIONS if temperature else 1),
        temperature=temperature,
        top_p=cfg_eval.eval_top_p,
        top_k=cfg_eval.eval_top_k,
        min_p=cfg_eval.eval_min_p,
        max_completion_length=cfg_eval.eval_max_completion_length,
        more=cfg_eval.eval_generation_kwargs or None,
    )


def longest_completion(cfg: Config) -> int:
    """Return the maximum completion length of training and evaluations in tokens, which the sampler must support."""
    limit = cfg.eval.eval_max_completion_length if list_sets(cfg) else None
    return max(cfg.rollout.max_completion_length, limit or 0)


def longest_context(cfg: Config, prompt: int) -> int:
    """Return the maximum length of prompt and completion together in tokens.

    With agents it is `vllm_max_model_len`, since they write prompts of their own and an episode may have several contexts.
    """
    configured = cfg.rollout.vllm_max_model_len if cfg.turns.has_agent else None
    return configured or prompt + longest_completion(cfg)


def list_reward_maxima(cfg: Config) -> list[float]:
    """Return the maximum that each reward contributes to the sum of a correct completion: its weight if positive, 0 for penalties."""
    weights = cfg.rewards.reward_weights or [1.0] * len(cfg.rewards.reward_funcs)
    return [max(0.0, weight) * (spec not in PENALTIES) for spec, weight in zip(cfg.rewards.reward_funcs, weights)]


def find_score(cfg: Config, names: Sequence[str]) -> str:
    """Return the reward that evaluations report as their score.

    Args:
        names: Names of the reward functions, in the order of `reward_funcs`.

    Returns:
        SUM if several rewards train, else the name of the one; "" without rewards, when nothing is evaluated.
    """
    weights = cfg.rewards.reward_weights or [1.0] * len(names)
    train = [name for name, weight in zip(names, weights) if weight] or list(names[:1])
    score = cfg.eval.eval_reward or (SUM if len(train) > 1 else next(iter(train), ""))
    return dict(zip(cfg.rewards.reward_funcs, names)).get(score, score)


def find_pass_reward(cfg: Config, names: Sequence[str]) -> str:
    """Return the reward by which pass@k counts completions as right where the score is a sum.

    Args:
        names: Names of the reward functions, in the order of `reward_funcs`.

    Returns:
        The first built-in one that solves the task. "" without one, or with `eval_pass_threshold`: then the score counts.
    """
    if find_score(cfg, names) != SUM or cfg.eval.eval_pass_threshold is not None:
        return ""
    return next((name for spec, name in zip(cfg.rewards.reward_funcs, names) if spec in ANSWERING), "")


def describe_rules(cfg: Config) -> str:
    """Return a description of how completions are generated, if not by a single answer; "" otherwise.

    Scores under different descriptions are not comparable.
    """
    turns = cfg.turns
    if not turns.plays:
        return cfg.rollout.rollout_func or ""
    player = turns.agent or turns.agent_command or f"{turns.environment} {' '.join(turns.tools)}"
    return f"{player} max_turns {turns.max_turns} turn_history {turns.turn_history}"


# ---- the best checkpoint


def find_best_metric(cfg: Config) -> str | None:
    """Return the full name of `metric_for_best_model`: `eval` and `eval/NAME` stand for the score of a set."""
    metric = cfg.run.metric_for_best_model
    return f"{metric}/mean@{eval_sampling(cfg).n}" if metric in [name_curve(name) for name in list_sets(cfg)] else metric


def is_greater_better(cfg: Config) -> bool:
    """Return whether a larger metric is better. As in transformers, this is false by default for names that end in "loss"."""
    setting, metric = cfg.run.greater_is_better, cfg.run.metric_for_best_model or ""
    return not metric.endswith("loss") if setting is None else setting


def _rewards(cfg: Config) -> list[str]:
    """Return the reward names as metrics use them."""
    return [spec.rpartition(":")[2] for spec in cfg.rewards.reward_funcs]


def _held_out(cfg: Config) -> Iterator[str]:
    n, rewards = eval_sampling(cfg).n, _rewards(cfg)
    passes = [f"pass@1/{name}" for name in rewards if len(rewards) > 1]
    episodes = ["mean_turns", "failed"] if cfg.turns.plays else []
    for curve in map(name_curve, list_sets(cfg)):
        yield curve
        for name in (f"mean@{n}", *(f"pass@{k}" for k in ks(n)), *rewards, *passes, "mean_length", "clipped_ratio", *episodes):
            yield f"{curve}/{name}"


def _training(cfg: Config) -> Iterator[str]:
    grpo = cfg.grpo
    yield from _ROLLOUTS
    yield from (f"rewards/{name}/mean" for name in _rewards(cfg))
    yield from _STEPS
    if grpo.beta:
        yield "kl_in_reward" if grpo.kl_in_reward else "kl"
    if grpo.log_entropy or grpo.entropy_coef or grpo.use_adaptive_entropy or grpo.top_entropy_quantile < 1:
        yield "entropy"
    if grpo.dynamic_sample or grpo.oversample_ratio > 1:
        yield "dynamic_sample/reward"


# ---- rules


def _unknown_reward(c: SimpleNamespace) -> dict[str, Any] | None:
    names = _rewards(c.cfg)
    is_known = not c.eval_reward or c.eval_reward in (*names, *c.reward_funcs)
    return None if is_known else {"told": ", ".join(names) or "none", "near": {"eval_reward": names[:1]} if names else {}}


def _own_limit(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem if evaluations need the same completion length as training, and it differs."""
    player = c.player if c.plays else "rollout_func" if c.rollout_func else None
    return {"own": player} if player and c.eval_max_completion_length not in (None, c.max_completion_length) else None


def _uses_held_out_set(c: SimpleNamespace) -> bool:
    """Return whether the best checkpoint is chosen by a held-out set."""
    return c.metric_for_best_model is not None and (c.metric_for_best_model == ALONE or c.metric_for_best_model.startswith(f"{ALONE}/"))


def _unknown_metric(c: SimpleNamespace) -> dict[str, Any] | None:
    metric, known_metrics = c.metric_for_best_model, [*_held_out(c.cfg), *_training(c.cfg)]
    if metric is None or metric in known_metrics or (metric.startswith(_OWN) and c.plays):
        return None
    close = close_to(metric, known_metrics)
    return {"told": ", ".join(known_metrics), "near": {"metric_for_best_model": close} if close else {}}


def _steps_apart(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem if checkpoints are written at steps that are not evaluated."""
    save, evaluate = c.save_steps, c.eval_steps
    if not _uses_held_out_set(c) or (save and evaluate and save % evaluate == 0):
        return None
    return {"near": {"eval_steps": [save]} if save else {"save_steps": [evaluate]} if evaluate else {}}


# fmt: off
EVALUATION = (
    Rule("eval_steps eval_dataset eval_datasets", lambda c: c.eval_steps and not list_sets(c.cfg),
         "eval_steps ({eval_steps}) requires held-out prompts. Set eval_dataset, or eval_datasets name=path.", {"eval_steps": [0]}),
    Rule("eval_reward reward_funcs", _unknown_reward,
         "eval_reward ({eval_reward}) is not in reward_funcs ({told}).", lambda c: c.near),
    Rule("eval_dataset reward_funcs", lambda c: c.cfg.grpo.teacher_flag and list_sets(c.cfg) and not c.reward_funcs,
         "an evaluation requires reward_funcs to score completions. Set one; with reward_weights 0 it does not affect training."),
    Rule("num_generations_eval eval_temperature", lambda c: c.eval_temperature == 0 and (c.num_generations_eval or 1) > 1,
         "num_generations_eval ({num_generations_eval}) with eval_temperature 0 would generate the same completion {num_generations_eval} "
         "times. Use num_generations_eval 1, or an eval_temperature above 0.",
         lambda c: {"num_generations_eval": [1], "eval_temperature": [c.temperature]}),
    Rule("{name} eval_temperature", lambda c: c.eval_temperature == 0 and [
            field for field in changed(c, "eval_top_p", "eval_top_k", "eval_min_p") if field["value"]],
         "{name} ({value}) has no effect with eval_temperature 0 (greedy sampling). Omit it."),
    Rule("eval_max_completion_length {own}", _own_limit,
         "eval_max_completion_length ({eval_max_completion_length}) is not supported with {own}, which uses max_completion_length "
         "({max_completion_length}) for training and evaluation. Omit it.",
         lambda c: {"eval_max_completion_length": [c.max_completion_length]}),
    Rule("split_dataset_ratio eval_dataset", lambda c: c.eval_dataset and c.split_dataset_ratio,
         "split_dataset_ratio ({split_dataset_ratio}) and eval_dataset ({eval_dataset}) both define the held-out set. Use one of them, or "
         "eval_datasets.", {"split_dataset_ratio": [0.0]}),
    Rule("{name} eval_dataset", lambda c: not (c.eval_dataset or c.eval_datasets) and changed(c, "eval_dataset_split", "eval_columns"),
         "{name} ({value}) has no effect without eval_dataset or eval_datasets. Omit it."),
    Rule("eval_datasets", lambda c: [{"name": name} for name in c.eval_datasets if not _NAME.fullmatch(name)],
         "eval_datasets: {name!r} is not a valid name of a set: files and metrics contain it. Use letters, digits, _ . and -."),
    Rule("eval_datasets eval_dataset", lambda c: ALONE in c.eval_datasets and (c.eval_dataset or c.split_dataset_ratio)
         and {"flag": find_set_flag(ALONE, c.cfg)}, "eval_datasets: the name eval is reserved for the set of {flag}. Use another name."),
)

BEST = (
    Rule("greater_is_better metric_for_best_model", lambda c: c.metric_for_best_model is None and c.greater_is_better is not None
         and {"said": str(c.greater_is_better).lower()},
         "greater_is_better ({said}) has no effect without metric_for_best_model. Omit it."),
    Rule("load_best_model_at_end metric_for_best_model", lambda c: c.metric_for_best_model is None and c.load_best_model_at_end,
         "load_best_model_at_end true requires metric_for_best_model, which selects the checkpoint. Set it.",
         {"load_best_model_at_end": [False]}),
    Rule("load_best_model_at_end export_hf",
         lambda c: c.metric_for_best_model is not None and c.load_best_model_at_end and not c.export_hf,
         "load_best_model_at_end true has no effect with export_hf false. Use export_hf true, or omit it.",
         {"export_hf": [True]}),
    (
        Rule("metric_for_best_model eval_dataset", lambda c: _uses_held_out_set(c) and not list_sets(c.cfg),
             "metric_for_best_model ({metric_for_best_model}) requires held-out prompts, and eval_dataset is not set. Set it, or use "
             "reward.", {"metric_for_best_model": ["reward"]}),
        Rule("metric_for_best_model", _unknown_metric,
             "metric_for_best_model ({metric_for_best_model}) is not a metric of this run. Supported: {told}.", lambda c: c.near),
        Rule("metric_for_best_model save_steps eval_steps", _steps_apart,
             "metric_for_best_model ({metric_for_best_model}) compares evaluated checkpoints, so save_steps ({save_steps}) must be a "
             "multiple of eval_steps ({eval_steps}), and both above 0.", lambda c: c.near),
        Rule("metric_for_best_model save_steps",
             lambda c: c.metric_for_best_model is not None and not c.save_steps and not c.save_interval_seconds,
             "metric_for_best_model ({metric_for_best_model}) selects among several checkpoints, and save_steps 0 writes only one. Set "
             "save_steps."),
    ),
)
# fmt: on
