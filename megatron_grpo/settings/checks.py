"""What is wrong with single values, and with pairs of settings that do not go together.

Sizes of batches and layouts are `sizing/rules.py`; the mathematics are `grpo/refused.py`. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.errors import Problem
from megatron_grpo.settings.config import Config

# name: (least, greatest, the least itself is allowed); None is no bound.
RANGES: dict[str, tuple[float | None, float | None, bool]] = {
    "padded_vocab_multiple": (1, None, True),
    "logprob_chunk_size": (1, None, True),
    "recompute_num_layers": (1, None, True),
    "moe_z_loss_coeff": (0, None, True),
    "distributed_timeout_minutes": (0, None, False),
    "max_tokens_per_micro_batch": (1, None, True),
    "max_prompt_length": (1, None, True),
    "max_completion_length": (1, None, True),
    "top_p": (0, 1, False),
    "top_k": (0, None, True),
    "vllm_gpu_memory_utilization": (0, 1, False),
    "vllm_kv_cache_memory_mb": (1, None, True),
    "vllm_max_model_len": (1, None, True),
    "vllm_max_num_seqs": (1, None, True),
    "sleep_level": (0, 2, True),
    "logp_difference_warn": (0, None, False),
    "reward_timeout": (0, None, False),
    "math_timeout": (0, None, False),
    "code_timeout": (0, None, False),
    "code_memory_mb": (1, None, True),
    "code_num_workers": (1, None, True),
    "reward_concurrency": (1, None, True),
    "lr": (0, None, True),
    "min_lr": (0, None, True),
    "lr_warmup_iters": (0, None, True),
    "lr_warmup_fraction": (0, 1, True),
    "weight_decay": (0, None, True),
    "adam_eps": (0, None, False),
    "clip_grad": (0, None, True),
    "optimizer_offload_fraction": (0, 1, True),
    "max_steps": (1, None, True),
    "num_train_epochs": (0, None, False),
    "seed": (0, 2**32 - 1, True),
    "save_steps": (0, None, True),
    "save_total_limit": (1, None, True),
    "log_completions_steps": (0, None, True),
    "eval_steps": (0, None, True),
    "eval_num_prompts": (1, None, True),
    "plan_rollouts": (1, None, True),
    "num_prompts": (1, None, True),
    "gpu_memory_gb": (0, None, False),
}
LARGEST_WEIGHT = 1e6  # times the largest reward (rewards.protocol), still a number whose square is one
BELOW_ONE = ("adam_beta1", "adam_beta2")


def value_problem(name: str, value: Any) -> tuple[str, list[Any]] | None:
    """(how the value must be, the nearest value that is so, where there is one), or None."""
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return "finite", []
    if name == "reward_weights" and any(abs(weight) > LARGEST_WEIGHT for weight in numbers):
        return f"at most {LARGEST_WEIGHT:g} each", []
    if value is None or isinstance(value, (str, bool, list)):
        return None
    if name in BELOW_ONE:
        return None if 0 <= value < 1 else ("at least 0 and below 1", [] if value >= 1 else [0.0])
    if name not in RANGES:
        return None
    least, most, inclusive = RANGES[name]
    above = least is None or value > least or (inclusive and value == least)
    if above and (most is None or value <= most):
        return None
    kind = type(value)
    low = f"at least {least}" if inclusive else f"above {least}"
    text = low if most is None else f"{low} and at most {most}"
    if not above:
        return text, [kind(least)] if inclusive else []
    return text, [kind(most)]


def validate(cfg: Config, unreadable: Collection[str] = ()) -> list[Problem]:
    """Every problem that can be known from the settings alone, but for sizes and mathematics.

    unreadable: settings whose values could not be read; nothing is said about them.
    """

    def typed(name: str) -> str:
        return cfg.typed.get(name, name)

    problems = []
    for section in cfg.groups().values():
        for name, value in vars(section).items():
            wrong = value_problem(name, value)
            if wrong and name not in unreadable:
                text, near = wrong
                use = f" Use {near[0]}." if near else ""
                problems.append(
                    Problem(
                        flags=(typed(name),),
                        message=f"{typed(name)} ({value}) must be {text}.{use}",
                        nearest={typed(name): near} if near else {},
                    )
                )
    for names, message, nearest in _pairs(cfg):
        if not set(names) & set(unreadable):
            problems.append(
                Problem(
                    flags=tuple(typed(name) for name in names),
                    message=message,
                    nearest={typed(name): values for name, values in nearest.items()},
                )
            )
    return problems


Pair = tuple[tuple[str, ...], str, dict[str, list[Any]]]


def _pairs(cfg: Config) -> Iterator[Pair]:
    yield from _training(cfg)
    yield from _sampling_and_rewards(cfg)
    yield from _files(cfg)


def _training(cfg: Config) -> Iterator[Pair]:
    model, opt = cfg.model, cfg.optimizer
    if model.moe_aux_loss_coeff != 0:
        yield (
            ("moe_aux_loss_coeff",),
            f"moe_aux_loss_coeff ({model.moe_aux_loss_coeff}) must be 0: the load-balancing loss "
            f"is computed per "
            "micro-batch, so that the gradient would depend on how a batch is cut. Use moe_z_loss_coeff, or "
            "0.",
            {"moe_aux_loss_coeff": [0.0]},
        )
    if model.recompute_granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(model, name) is not None:
                yield (
                    (name, "recompute_granularity"),
                    f"{name} ({getattr(model, name)}) belongs to recompute_granularity full, which is "
                    f"{model.recompute_granularity or 'not given'}. Leave it out, or use recompute_granularity full.",
                    {},
                )
    else:
        missing = [name for name in ("recompute_method", "recompute_num_layers") if getattr(model, name) is None]
        if missing:
            yield (
                ("recompute_granularity",),
                f"recompute_granularity full needs {' and '.join(missing)}, for example "
                f"recompute_method uniform "
                "and recompute_num_layers 1.",
                {},
            )
    if opt.min_lr > opt.lr:
        yield ("min_lr", "lr"), f"min_lr ({opt.min_lr}) must not be above lr ({opt.lr}).", {"min_lr": [opt.lr], "lr": [opt.min_lr]}
    if opt.lr_warmup_iters and opt.lr_warmup_fraction is not None:
        yield (
            ("lr_warmup_iters", "lr_warmup_fraction"),
            f"lr_warmup_iters ({opt.lr_warmup_iters}) and lr_warmup_fraction "
            f"({opt.lr_warmup_fraction}) both say how long the warm-up is. Keep one of them.",
            {"lr_warmup_iters": [0], "lr_warmup_fraction": ["none"]},
        )
    if opt.overlap_param_gather and not (opt.use_distributed_optimizer and opt.overlap_grad_reduce):
        yield (
            ("overlap_param_gather", "overlap_grad_reduce", "use_distributed_optimizer"),
            "overlap_param_gather needs "
            "overlap_grad_reduce "
            "true and use_distributed_optimizer true: it is the second half of the same exchange.",
            {"overlap_param_gather": [False]},
        )


def _sampling_and_rewards(cfg: Config) -> Iterator[Pair]:
    rollout, rewards, evaluation = cfg.rollout, cfg.rewards, cfg.eval
    longest = (cfg.data.max_prompt_length or 1) + rollout.max_completion_length
    if rollout.vllm_max_model_len is not None and rollout.vllm_max_model_len < longest:
        prompt = f"max_prompt_length ({cfg.data.max_prompt_length})" if cfg.data.max_prompt_length else "a prompt (at least 1 token)"
        yield (
            ("vllm_max_model_len", "max_prompt_length", "max_completion_length"),
            f"vllm_max_model_len "
            f"({rollout.vllm_max_model_len}) is less "
            f"than {prompt} + max_completion_length ({rollout.max_completion_length}) = {longest}. Use vllm_max_model_len {longest}.",
            {"vllm_max_model_len": [longest]},
        )
    weights, functions = len(rewards.reward_weights), len(rewards.reward_funcs)
    if weights and weights != functions:
        yield (
            ("reward_weights", "reward_funcs"),
            f"reward_weights has {weights} values for {functions} reward_funcs: one each, or none at all.",
            {},
        )
    if evaluation.eval_steps and not evaluation.eval_dataset:
        yield (
            ("eval_steps", "eval_dataset"),
            f"eval_steps ({evaluation.eval_steps}) needs an eval_dataset to evaluate on.",
            {"eval_steps": [0]},
        )
    names = [name.rpartition(":")[2] for name in rewards.reward_funcs]
    if evaluation.eval_reward and evaluation.eval_reward not in (*names, *rewards.reward_funcs):
        yield (
            ("eval_reward", "reward_funcs"),
            f"eval_reward ({evaluation.eval_reward}) is none of the reward_funcs ({', '.join(names) or 'none'}).",
            {"eval_reward": names[:1]} if names else {},
        )


def _files(cfg: Config) -> Iterator[Pair]:
    if cfg.plan.lengths and not Path(cfg.plan.lengths).is_file():
        yield ("lengths",), f"lengths: {cfg.plan.lengths} is not a file. It holds a prompt and a completion length a line.", {}
    if cfg.plan.png and not Path(cfg.plan.png).parent.is_dir():
        yield ("png",), f"png: the directory of {cfg.plan.png} does not exist.", {}
