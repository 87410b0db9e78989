"""Rule-based built-in rewards: `accuracy`, `format`, `length`, `soft_overlong`, `cosine`, `repetition`, `environment`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error
from megatron_grpo.plugins.rewards.answers import alternatives, final_answer, needed_columns, right_answers, same_answer
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import end_of_prompt, find_opened_tag
from megatron_grpo.run.rewards.protocol import ReadsOpening, RowFailure, Score, read_text

if TYPE_CHECKING:
    from megatron_grpo.plugins.rewards.math import MathReward


class AccuracyReward:
    """1 if the completion's final answer equals the correct one as text, else 0; None if the row has no correct answer.

    Args:
        exact: Whether the whole completion must equal the answer.
    """

    def __init__(self, *, needs: tuple[tuple[str, ...], ...], exact: bool):
        self.needs, self.exact = needs, exact

    def __call__(self, completions: list[Any], **columns: Any) -> list[Score]:
        return [self._score(read_text(completion), right) for completion, right in zip(completions, right_answers(columns, self.needs))]

    def _score(self, text: str, right: Any) -> Score:
        answers = alternatives(right)
        if not answers:
            return None
        if self.exact:
            return float(text in answers)
        answer_given = final_answer(text)
        return float(any(same_answer(answer_given, final_answer(answer)) for answer in answers))


def build_accuracy(config: Config) -> AccuracyReward:
    """Create the reward `accuracy`."""
    return AccuracyReward(needs=needed_columns(config), exact=config.rewards.accuracy_exact)


class FormatReward(ReadsOpening):
    """1 for a completion made of the given tags, each once and in order, with nothing around them; else 0.

    A tag that the end of the prompt has opened (`<think>` in the generation prompt of a chat template) counts as part of the completion.
    """

    def __init__(self, tags: Sequence[str]):
        self.tags = tags
        self._marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        elements = [rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags]
        self._pattern = re.compile(r"\s*" + r"\s*".join(elements) + r"\s*", re.DOTALL)

    def __call__(self, completions: list[Any], prompts: Sequence[Any] = (), **columns: Any) -> list[float]:
        is_episode = "turn_rewards" in columns  # whose messages contain what the template has opened
        openings = ["" if is_episode else self._opened(prompt) for prompt in prompts] or [""] * len(completions)
        return [float(self._is_right(opening + read_text(completion))) for opening, completion in zip(openings, completions, strict=True)]

    def _is_right(self, text: str) -> bool:
        # The count comes first: without it a second <think> could hide inside `.*?`.
        return all(text.count(mark) == 1 for mark in self._marks) and self._pattern.fullmatch(text) is not None

    def _opened(self, prompt: Any) -> str:
        """Return what the prompt has begun of the answer, from the first tag on."""
        end = end_of_prompt(prompt, self.opening)
        if not isinstance(prompt, str) and prompt and prompt[-1]["role"] == "assistant":  # an answer that the model continues
            return end[end.index(self._marks[0]) :] if self._marks[0] in end else ""
        tag = find_opened_tag(end)
        return f"<{tag}>" if tag in self.tags else ""


def build_format(config: Config) -> FormatReward:
    """Create the reward `format`.

    Raises:
        ConfigError: If the tags are not distinct names.
    """
    tags = config.rewards.format_tags
    invalid = [tag for tag in tags if not re.fullmatch(r"[A-Za-z_][\w-]*", tag)]
    if invalid or not tags or len(set(tags)) < len(tags):
        message = f"format_tags {tags} must be different names without brackets, such as: think answer."
        raise config_error("format_tags", message)
    return FormatReward(tags)


def build_length(config: Config) -> Callable[..., list[float]]:
    """Create the reward `length`.

    `-|tokens - target| / max_completion_length`: 0 at the target length, -1 at a distance of max_completion_length.

    Raises:
        ConfigError: If the target is out of range.
    """
    target, longest = config.rewards.length_target, config.rollout.max_completion_length
    if not 0 <= target <= longest:
        message = f"length_target ({target}) must be between 0 and max_completion_length ({longest}) tokens."
        raise ConfigError([Problem(flags=("length_target",), message=message, nearest={"length_target": [max(0, min(target, longest))]})])
    return lambda completion_ids, **columns: [-abs(len(token_ids) - target) / longest for token_ids in completion_ids]


def build_soft_overlong(config: Config) -> Callable[..., list[float]]:
    """Create the reward `soft_overlong`.

    `min(0, -(tokens - (limit - ramp)) / ramp)`: 0 up to the ramp, -1 at the limit. Source: DAPO, equation 13.

    Raises:
        ConfigError: If limit or ramp is out of range.
    """
    longest = config.rollout.max_completion_length
    limit = longest if config.grpo.soft_max_length is None else config.grpo.soft_max_length
    ramp = config.grpo.soft_cache_length
    problems = []
    if limit > longest:
        message = (
            f"soft_max_length ({limit}) exceeds max_completion_length ({longest}), so no completion reaches it. Use {longest} or less."
        )
        flags = ("soft_max_length", "max_completion_length")
        problems.append(Problem(flags=flags, message=message, nearest={"soft_max_length": [longest]}))
    if ramp is None or not 1 <= ramp <= limit:
        fault = "is not given" if ramp is None else f"is {ramp}"
        usual = max(1, limit // 5)
        message = f"soft_overlong needs soft_cache_length, the width of its ramp, between 1 and soft_max_length ({limit}) tokens; it \
{fault}. A common value is a fifth of the limit, {usual}."
        problems.append(Problem(flags=("soft_cache_length",), message=message, nearest={"soft_cache_length": [usual]}))
    if problems or ramp is None:
        raise ConfigError(problems)
    return lambda completion_ids, **columns: [min(0.0, -(len(token_ids) - (limit - ramp)) / ramp) for token_ids in completion_ids]


class CosineReward:
    """Length-dependent reward: correct answers score higher when short, wrong ones are penalized less when long, along half a cosine.

    `end + (start - end) * (1 + cos(pi * min(tokens, L) / L)) / 2`, from `cosine_min_len_value_*` at length 0 to `cosine_max_len_value_*`
    at `L = cosine_max_len`. The reward `math` decides which answers are correct. Source: arXiv 2502.03373, section 4; the names are
    Megatron-SWIFT's.

    Args:
        correct: The reward `math`.
        right: (value at length 0, value at `max_length`) of correct answers.
        wrong: The same for wrong answers.
        max_length: L, in tokens.
    """

    def __init__(self, correct: MathReward, *, right: tuple[float, float], wrong: tuple[float, float], max_length: int):
        self.correct, self.right, self.wrong, self.max_length = correct, right, wrong, max_length
        self.needs = correct.needs

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[Score | RowFailure]:
        verdicts = self.correct(completions=completions, **columns)
        return [self._score(verdict, len(token_ids)) for verdict, token_ids in zip(verdicts, completion_ids)]

    def _score(self, verdict: Score | RowFailure, length: int) -> Score | RowFailure:
        if not isinstance(verdict, float):
            return verdict
        start, end = self.right if verdict >= 1 else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * min(length, self.max_length) / self.max_length)) / 2

    def close(self) -> None:
        """Stop the processes of the reward `math`."""
        self.correct.close()


def build_cosine(config: Config) -> CosineReward:
    """Create the reward `cosine`."""
    from megatron_grpo.plugins.rewards.math import build_math

    settings = config.rewards
    max_length = config.rollout.max_completion_length if settings.cosine_max_len is None else settings.cosine_max_len
    return CosineReward(
        build_math(config),
        right=(settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct),
        wrong=(settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong),
        max_length=max_length,
    )


def build_repetition(config: Config) -> Callable[..., list[float]]:
    """Create the reward `repetition`: a penalty proportional to the share of repeated n-grams (of tokens) in a completion.

    `(1 - distinct / all) * repetition_max_penalty`, 0 for completions shorter than one n-gram. Source: Demystifying Long Chain-of-Thought
    Reasoning (arXiv 2502.03373), appendix C.2; as TRL's `get_repetition_penalty_reward`.
    """
    n, max_penalty = config.rewards.repetition_n_grams, config.rewards.repetition_max_penalty

    def score(token_ids: Sequence[int]) -> float:
        total = len(token_ids) - n + 1
        distinct = len({tuple(token_ids[start : start + n]) for start in range(total)})
        return (1 - distinct / total) * max_penalty if distinct < total else 0.0

    return lambda completion_ids, **columns: [score(token_ids) for token_ids in completion_ids]


def build_environment(config: Config) -> Callable[..., list[float]]:
    """Create the reward `environment`: the discounted sum of the rewards of an episode's turns.

    The environment of the episode gave these rewards. See docs/turns.md.
    """
    discount = config.turns.turn_discount

    def environment(completions: Sequence[object], turn_rewards: Sequence[Sequence[float | None]], **columns: object) -> list[float]:
        """Return the sum over turns t of discount^t r_t per episode. A turn without a reward adds nothing."""
        return [sum(discount**turn * (reward or 0.0) for turn, reward in enumerate(rewards)) for rewards in turn_rewards]

    return environment
