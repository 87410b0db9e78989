"""What the settings of evaluation come to: which sets, how many completions of each prompt, how they are drawn. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.tuner import Pair

ALONE = "eval"  # the set that eval_dataset names
SPLIT = "split_dataset_ratio"  # holds rows of the data set itself out
SUM = "weighted sum"  # of the rewards, as they train; no function has such a name
PENALTIES = ("length", "soft_overlong", "repetition")  # built in, and never above 0
COMPLETIONS = 8  # of each prompt, where they are drawn and nobody says how many
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HowEvaluated:
    """n: completions of each prompt. temperature: 0 is greedy. The rest is that of training where it is None."""

    n: int
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_completion_length: int | None = None  # tokens
    more: Mapping[str, Any] | None = None  # of vLLM's SamplingParams


def sets_of(cfg: Config) -> dict[str, str]:
    """{name: path or Hub name} of the held-out sets, that of eval_dataset first."""
    alone = cfg.eval.eval_dataset or (cfg.data.dataset if cfg.data.split_dataset_ratio else "")
    return ({ALONE: alone} if alone else {}) | dict(cfg.eval.eval_datasets)


def flag_of(name: str, cfg: Config) -> str:
    """The setting that names this set."""
    if name != ALONE or not (cfg.eval.eval_dataset or cfg.data.split_dataset_ratio):
        return "eval_datasets"
    return "eval_dataset" if cfg.eval.eval_dataset else SPLIT


def curve_of(name: str) -> str:
    """Under which name a set's scores are plotted, and told to tracking services."""
    return ALONE if name == ALONE else f"{ALONE}/{name}"


def ks(n: int) -> list[int]:
    """1, 2, 4 ... and n: the k of pass@k that are told."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def how_evaluated(cfg: Config) -> HowEvaluated:
    """One answer to each prompt of eval_dataset alone is greedy; all else, episodes too, is drawn at the temperature of training."""
    said = cfg.eval
    is_plain = (
        bool(said.eval_dataset or cfg.data.split_dataset_ratio)
        and not said.eval_datasets
        and said.num_generations_eval in (None, 1)
        and not cfg.turns.plays
    )
    temperature = said.eval_temperature
    if temperature is None:
        temperature = 0.0 if is_plain else cfg.rollout.temperature
    return HowEvaluated(
        n=said.num_generations_eval or (COMPLETIONS if temperature else 1),
        temperature=temperature,
        top_p=said.eval_top_p,
        top_k=said.eval_top_k,
        min_p=said.eval_min_p,
        max_completion_length=said.eval_max_completion_length,
        more=said.eval_generation_kwargs or None,
    )


def longest_completion(cfg: Config) -> int:
    """Tokens, of training and of evaluations: what the sampler must have room for."""
    asked = cfg.eval.eval_max_completion_length if sets_of(cfg) else None
    return max(cfg.rollout.max_completion_length, asked or 0)


def most_of(cfg: Config) -> list[float]:
    """What each reward adds to the sum of a completion that is right: its weight, where it can be above 0."""
    weights = cfg.rewards.reward_weights or [1.0] * len(cfg.rewards.reward_funcs)
    return [max(0.0, weight) * (spec not in PENALTIES) for spec, weight in zip(cfg.rewards.reward_funcs, weights)]


def score_of(cfg: Config, names: Sequence[str]) -> str:
    """What counts: SUM where several rewards train, else the one; "" where there is none, and nothing is evaluated.

    names: of the functions, in the order of reward_funcs.
    """
    weights = cfg.rewards.reward_weights or [1.0] * len(names)
    train = [name for name, weight in zip(names, weights) if weight] or list(names[:1])
    asked = cfg.eval.eval_reward or (SUM if len(train) > 1 else next(iter(train), ""))
    return dict(zip(cfg.rewards.reward_funcs, names)).get(asked, asked)


def rules_in_words(cfg: Config) -> str:
    """Who makes the answers, and by which rules: scores of other ones do not compare. "" where a prompt gets one answer."""
    turns = cfg.turns
    if not turns.plays:
        return cfg.rollout.rollout_func or ""
    return f"{turns.environment} {' '.join(turns.tools)} max_turns {turns.max_turns} turn_history {turns.turn_history}"


def evaluation_pairs(cfg: Config) -> Iterator[Pair]:
    """Settings of evaluation that do not go together."""
    said = cfg.eval
    if said.eval_steps and not sets_of(cfg):
        yield (
            ("eval_steps", "eval_dataset", "eval_datasets"),
            f"eval_steps ({said.eval_steps}) needs an eval_dataset, or eval_datasets name=path, to evaluate on.",
            {"eval_steps": [0]},
        )
    names = [name.rpartition(":")[2] for name in cfg.rewards.reward_funcs]
    if said.eval_reward and said.eval_reward not in (*names, *cfg.rewards.reward_funcs):
        yield (
            ("eval_reward", "reward_funcs"),
            f"eval_reward ({said.eval_reward}) is none of the reward_funcs ({', '.join(names) or 'none'}).",
            {"eval_reward": names[:1]} if names else {},
        )
    if cfg.grpo.teacher_flag and sets_of(cfg) and not cfg.rewards.reward_funcs:
        yield (
            ("eval_dataset", "reward_funcs"),
            "an evaluation scores completions by reward_funcs, and there are none. Name one: with reward_weights 0 it is only watched.",
            {},
        )
    if said.eval_temperature == 0 and (said.num_generations_eval or 1) > 1:
        yield (
            ("num_generations_eval", "eval_temperature"),
            f"num_generations_eval ({said.num_generations_eval}) with eval_temperature 0 would be {said.num_generations_eval} times the "
            f"same completion. Use num_generations_eval 1, or an eval_temperature above 0.",
            {"num_generations_eval": [1], "eval_temperature": [cfg.rollout.temperature]},
        )
    if said.eval_temperature == 0:
        for flag in ("eval_top_p", "eval_top_k", "eval_min_p"):
            if getattr(said, flag):
                message = f"{flag} ({getattr(said, flag)}) does nothing with eval_temperature 0, which is greedy. Leave it out."
                yield (flag, "eval_temperature"), message, {}
    own = "environment" if cfg.turns.environment else "tools" if cfg.turns.tools else "rollout_func" if cfg.rollout.rollout_func else None
    if own and said.eval_max_completion_length not in (None, cfg.rollout.max_completion_length):
        yield (
            ("eval_max_completion_length", own),
            f"eval_max_completion_length ({said.eval_max_completion_length}) does not go with {own}, which has one limit for training and "
            f"evaluation, max_completion_length ({cfg.rollout.max_completion_length}). Leave it out.",
            {"eval_max_completion_length": [cfg.rollout.max_completion_length]},
        )
    if said.eval_dataset and cfg.data.split_dataset_ratio:
        message = f"split_dataset_ratio ({cfg.data.split_dataset_ratio}) and eval_dataset ({said.eval_dataset}) both say what is held out."
        yield (SPLIT, "eval_dataset"), f"{message} Keep one of them, or name sets in eval_datasets.", {SPLIT: [0.0]}
    for name in said.eval_datasets:
        if not _NAME.fullmatch(name):
            message = f"eval_datasets: {name!r} cannot name a set: files and metrics are named after it. Use letters, digits, _ . and -."
            yield ("eval_datasets",), message, {}
        if name == ALONE and (said.eval_dataset or cfg.data.split_dataset_ratio):
            message = f"eval_datasets: {ALONE} is the name of {flag_of(ALONE, cfg)}'s own set. Use another name."
            yield ("eval_datasets", "eval_dataset"), message, {}
