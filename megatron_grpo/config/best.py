"""Which checkpoint is the best: by which number, under which of its names, and whether more of it is better. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import ALONE, curve_of, how_evaluated, ks, sets_of
from megatron_grpo.config.table import close_to
from megatron_grpo.config.tuner import Pair

# Of metrics.jsonl: what a rollout and a step say of how good the policy is. docs/metrics.md has all names.
_ROLLOUTS = ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")
_STEPS = ("loss", "grad_norm", "sampling/logp_difference/mean", "sampling/logp_difference/max", "sampling/kl_k1", "sampling/kl_k3")
_OWN = "environment/"  # what an environment measures has names of its own


def metric_of(cfg: Config) -> str | None:
    """The full name of what `metric_for_best_model` says: `eval` and `eval/NAME` stand for the score of a set."""
    asked = cfg.run.metric_for_best_model
    return f"{asked}/mean@{how_evaluated(cfg).n}" if asked in [curve_of(name) for name in sets_of(cfg)] else asked


def is_greater_better(cfg: Config) -> bool:
    """As in transformers: less is better of what is called a loss, more of everything else."""
    said, metric = cfg.run.greater_is_better, cfg.run.metric_for_best_model or ""
    return not metric.endswith("loss") if said is None else said


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    run, metric = cfg.run, cfg.run.metric_for_best_model
    if metric is None:
        if run.greater_is_better is not None:
            message = f"greater_is_better ({str(run.greater_is_better).lower()}) does nothing without metric_for_best_model. Leave it out."
            yield ("greater_is_better", "metric_for_best_model"), message, {}
        if run.load_best_model_at_end:
            message = "load_best_model_at_end true exports the best checkpoint, and nothing says which is best. Give metric_for_best_model."
            yield ("load_best_model_at_end", "metric_for_best_model"), message, {"load_best_model_at_end": [False]}
        return
    if run.load_best_model_at_end and not run.export_hf:
        message = "load_best_model_at_end true is about what export_hf writes, which is false. Use export_hf true, or leave it out."
        yield ("load_best_model_at_end", "export_hf"), message, {"export_hf": [True]}
    is_held_out = metric == ALONE or metric.startswith(f"{ALONE}/")
    known = [*_held_out(cfg), *_training(cfg)]
    is_own = metric.startswith(_OWN) and cfg.turns.plays
    if metric not in known and not is_own:
        if is_held_out and not sets_of(cfg):
            message = f"metric_for_best_model ({metric}) is of held-out prompts, and there is no eval_dataset. Give one, or use reward."
            yield ("metric_for_best_model", "eval_dataset"), message, {"metric_for_best_model": ["reward"]}
        else:
            close = close_to(metric, known)
            message = f"metric_for_best_model ({metric}) is nothing that this run tells. It is one of: {', '.join(known)}."
            yield ("metric_for_best_model",), message, {"metric_for_best_model": close} if close else {}
    elif is_held_out and (not run.save_steps or not cfg.eval.eval_steps or run.save_steps % cfg.eval.eval_steps):
        message = (
            f"metric_for_best_model ({metric}) compares checkpoints that were evaluated, so save_steps ({run.save_steps}) must be a "
            f"multiple of eval_steps ({cfg.eval.eval_steps}), and neither 0."
        )
        near = {"eval_steps": [run.save_steps]} if run.save_steps else {"save_steps": [cfg.eval.eval_steps]} if cfg.eval.eval_steps else {}
        yield ("metric_for_best_model", "save_steps", "eval_steps"), message, near
    elif not run.save_steps and not run.save_interval_seconds:
        message = f"metric_for_best_model ({metric}) chooses among checkpoints, and save_steps 0 writes one alone. Give save_steps."
        yield ("metric_for_best_model", "save_steps"), message, {}


def _rewards(cfg: Config) -> list[str]:
    return [spec.rpartition(":")[2] for spec in cfg.rewards.reward_funcs]


def _held_out(cfg: Config) -> Iterator[str]:
    n, rewards = how_evaluated(cfg).n, _rewards(cfg)
    each = [f"pass@1/{name}" for name in rewards if len(rewards) > 1]
    episodes = ["mean_turns", "failed"] if cfg.turns.plays else []
    for curve in map(curve_of, sets_of(cfg)):
        yield curve
        for name in (f"mean@{n}", *(f"pass@{k}" for k in ks(n)), *rewards, *each, "mean_length", "clipped_ratio", *episodes):
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
