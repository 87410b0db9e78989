"""What is wrong with single values, and with pairs of settings that do not go together.

Sizes of batches and layouts are `batching/rules.py`; the mathematics are `grpo/validation.py`. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.base.files import why_not_drawn
from megatron_grpo.config import (
    ahead,
    begins,
    best,
    evaluation,
    grammar,
    own,
    passed_on,
    precision,
    schedule,
    servers,
    streaming,
    tuner,
    turns,
)
from megatron_grpo.config.config import Config
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.config.secrets import secrets_in
from megatron_grpo.config.table import bytes_of, table

LARGEST_WEIGHT = 1e6  # times the largest reward (rewards.protocol), still a number whose square is one


def value_problem(name: str, value: Any) -> tuple[str, list[Any]] | None:
    """(how the value must be, the nearest value that is so, where there is one), or None."""
    if name == "reward_weights" and any(abs(weight) > LARGEST_WEIGHT for weight in value):
        return f"at most {LARGEST_WEIGHT:g} each", []
    allowed = table()[name].range
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        is_good = all(isinstance(one, str) or allowed.admits(one) for one in value)
        return None if is_good else (f"{allowed} each", [])
    if value is None or isinstance(value, (str, bool)):
        return None
    if allowed.admits(value):
        return None
    return str(allowed), [type(value)(near) for near in allowed.nearest(value)]


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
    problems += [
        Problem(flags=(typed(name),), message=f"{typed(name)} seems to hold {held}. Settings are written to config.yaml and to tracking "
                "services; a secret belongs into an environment variable.")
        for name, held in secrets_in(cfg)
    ]  # fmt: skip
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


def _pairs(cfg: Config) -> Iterator[tuner.Pair]:
    yield from _training(cfg)
    yield from precision.pairs(cfg)
    yield from schedule.pairs(cfg)
    yield from tuner.pairs(cfg)
    yield from servers.pairs(cfg)
    yield from ahead.pairs(cfg)
    yield from turns.pairs(cfg)
    yield from own.pairs(cfg)
    yield from passed_on.pairs(cfg)
    yield from grammar.pairs(cfg)
    yield from _sampling_and_rewards(cfg)
    yield from _mixtures(cfg)
    yield from streaming.pairs(cfg)
    yield from _files(cfg)
    yield from best.pairs(cfg)
    yield from begins.pairs(cfg)
    yield from _of_a_server(cfg)


def _of_a_server(cfg: Config) -> Iterator[tuner.Pair]:
    """On the command line. A file may describe both, the run and its servers."""
    for name in vars(cfg.serve):
        if name in cfg.typed and cfg.sources.get(name) == COMMAND_LINE:
            yield (name,), f"{cfg.typed[name]} is read by `megatron-grpo serve` alone, and changes nothing in a run. Leave it out.", {}


def _training(cfg: Config) -> Iterator[tuner.Pair]:
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
    if opt.overlap_param_gather and not (opt.use_distributed_optimizer and opt.overlap_grad_reduce):
        yield (
            ("overlap_param_gather", "overlap_grad_reduce", "use_distributed_optimizer"),
            "overlap_param_gather needs "
            "overlap_grad_reduce "
            "true and use_distributed_optimizer true: it is the second half of the same exchange.",
            {"overlap_param_gather": [False]},
        )


def _sampling_and_rewards(cfg: Config) -> Iterator[tuner.Pair]:
    rollout, rewards = cfg.rollout, cfg.rewards
    longest = (cfg.data.max_prompt_length or 1) + evaluation.longest_completion(cfg)
    if rollout.vllm_max_model_len is not None and rollout.vllm_max_model_len < longest:
        prompt = f"max_prompt_length ({cfg.data.max_prompt_length})" if cfg.data.max_prompt_length else "a prompt (at least 1 token)"
        is_longer = evaluation.longest_completion(cfg) > rollout.max_completion_length
        said = "eval_max_completion_length" if is_longer else "max_completion_length"
        yield (
            ("vllm_max_model_len", "max_prompt_length", said),
            f"vllm_max_model_len "
            f"({rollout.vllm_max_model_len}) is less "
            f"than {prompt} + {said} ({evaluation.longest_completion(cfg)}) = {longest}. Use vllm_max_model_len {longest}.",
            {"vllm_max_model_len": [longest]},
        )
    weights, functions = len(rewards.reward_weights), len(rewards.reward_funcs)
    if weights and weights != functions:
        yield (
            ("reward_weights", "reward_funcs"),
            f"reward_weights has {weights} values for {functions} reward_funcs: one each, or none at all.",
            {},
        )
    yield from evaluation.evaluation_pairs(cfg)


def _mixtures(cfg: Config) -> Iterator[tuner.Pair]:
    data = cfg.data
    sets, weights = 1 + len(data.further_datasets), data.interleave_prob
    if len(weights) == sets == 1 and data.dataset:
        message = "interleave_prob weighs several data sets against each other, and there is one. Leave it out, or name more in dataset."
        yield ("interleave_prob", "dataset"), message, {"interleave_prob": []}
    elif weights and len(weights) != sets:
        yield ("interleave_prob", "dataset"), f"interleave_prob has {len(weights)} weights for {sets} data sets: one each, or none.", {}
    if not weights and data.stopping_strategy != "first_exhausted":
        message = f"stopping_strategy ({data.stopping_strategy}) says where a mixture by interleave_prob ends, and there are no weights."
        yield ("stopping_strategy", "interleave_prob"), message, {"stopping_strategy": ["first_exhausted"]}
    if data.further_datasets and not data.dataset:
        yield ("further_datasets", "dataset"), "further_datasets come after dataset, which is not given.", {}
    if len(set(data.columns.values())) < len(data.columns):
        yield ("columns",), "columns: two columns cannot get one name.", {}


def _files(cfg: Config) -> Iterator[tuner.Pair]:
    run = cfg.run
    if bytes_of(run.max_shard_size) is None:
        yield ("max_shard_size",), f"max_shard_size ({run.max_shard_size}) is a size above 0, such as 5GB, 500MB or 2GiB.", {}
    for name in ("hub_model_id", "hub_private_repo"):
        if getattr(run, name) is not None and not run.push_to_hub:
            message = f"{name} ({getattr(run, name)}) does nothing without push_to_hub true. Give that, or leave it out."
            yield (name, "push_to_hub"), message, {"push_to_hub": [True]}
    if run.push_to_hub and not run.export_hf:
        yield (
            ("push_to_hub", "export_hf"),
            "push_to_hub true uploads what export_hf writes, which is false. Use export_hf true.",
            {"export_hf": [True], "push_to_hub": [False]},
        )
    for name in ("audit_steps", "audit_action"):
        if cfg.sources.get(name) == COMMAND_LINE and not run.audit:  # a file that a run has written has every setting
            message = f"{name} ({getattr(run, name)}) does nothing without audit true. Give that, or leave it out."
            yield (name, "audit"), message, {"audit": [True]}
    if cfg.sources.get("capsule_weights_gb") == COMMAND_LINE and run.capsules == 0:
        message = f"capsule_weights_gb ({run.capsule_weights_gb:g}) does nothing with capsules 0. Use capsules 1, or leave it out."
        yield ("capsule_weights_gb", "capsules"), message, {"capsules": [1]}
    if cfg.plan.lengths and not Path(cfg.plan.lengths).is_file():
        yield ("lengths",), f"lengths: {cfg.plan.lengths} is not a file. It holds a prompt and a completion length a line.", {}
    if cfg.plan.png and not Path(cfg.plan.png).parent.is_dir():
        yield ("png",), f"png: the directory of {cfg.plan.png} does not exist.", {}
    elif cfg.plan.png and (wrong := why_not_drawn(Path(cfg.plan.png))):
        yield ("png",), f"png: {wrong}", {}
