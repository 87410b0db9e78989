"""The `megatron-grpo dry-run` command: try data, chat template and rewards on a few rows. No weights are read.

Every reward function scores three completions of each row: the row's own answer, an empty text, and garbage. A run would meet all three,
and a function that fails on one of them ends it, possibly hours after its start.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from megatron_grpo.core.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError, RewardError, config_error, one_line
from megatron_grpo.core.images import num_tokens
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.settings import EQUAL_REWARDS
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.run import inputs
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.read import split_flags
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import PromptEncoder, SpecialTokens, decode_completion, end_of_prompt, find_opened_tag
from megatron_grpo.run.data.checks import PromptDataset, check_images, check_template, encoded, spread_indices
from megatron_grpo.run.data.prompts import load_rows
from megatron_grpo.run.inputs import InputStep, ValidatedInputs, find_columns, find_row_notes, read_inputs, settings_of_sampler
from megatron_grpo.run.plug_ins import READERS
from megatron_grpo.run.rewards.loading import close_rewards
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction, Score
from megatron_grpo.run.rewards.reward_manager import as_batch
from megatron_grpo.run.rewards.scoring import score

ROWS = 8
MOST_LENGTHS = 5000  # maximum rows that are tokenized, evenly spaced
WIDTH = 400  # characters of the prompt that is shown
ANSWERS = ("answer", "solution", "completion")  # columns that may hold one, if answer_column is not set
GARBAGE = "zqxj \u00e9\u4e16\U0001f600 <think> \\boxed{ {{ ((1/0 \x00 ]] "
QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """Scores of one reward function on one kind of completion.

    Args:
        scores: One for each completion.
        seconds: Duration of the call.
        error: The message that would end the run; "" if the call succeeded.
    """

    scores: tuple[Score, ...] = ()
    seconds: float = 0.0
    error: str = ""

    @property
    def numbers(self) -> list[float]:
        """The scores that are not None."""
        return [value for value in self.scores if value is not None]

    @property
    def mean(self) -> float | None:
        """Mean of the scores that are not None; None if all are."""
        return sum(self.numbers) / len(self.numbers) if self.numbers else None


@dataclass(slots=True, kw_only=True)
class DryRun:
    """Everything that a dry run found, in the order of --json.

    Args:
        num_rows: Rows of the data set.
        columns: Number of rows with a value and use of each column, by its name.
        num_tokenised: Rows that were tokenized.
        lengths: Tokens of a prompt, by name of the quantile.
        num_too_long: Prompts longer than `max_prompt_length`.
        prompt: The first prompt, as the model receives it.
        images: A line about the images; "" without any.
        wrong: Problems that a run would hit, in sentences.
        notes: Other findings, in sentences.
        episodes: Course of an episode, by what the model says at every turn.
        rewards: Scores by reward function, then by kind of completion.
    """

    num_rows: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    num_tokenised: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    num_too_long: int = 0
    prompt: str = ""
    images: str = ""
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    episodes: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, dict[str, RewardTrial]] = field(default_factory=dict)


def run_dry_run(argv: Sequence[str], parse: Callable[[Sequence[str]], ParsedConfig]) -> int:
    """Run the command and print its findings, with --json as one object.

    Returns:
        The exit code: 1 if a run would fail.

    Raises:
        ConfigError: If a run could not even begin.
    """
    num_rows, other_words = _rows_asked(argv)
    parsed = parse(other_words)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    cfg = parsed.config
    with redirect_stdout(sys.stderr):  # a reward function may print, and stdout is for the report
        result = dry_run(cfg, num_rows)
    print(json.dumps({"passed": not result.wrong, **asdict(result)}, indent=1) if cfg.plan.json else report_lines(result, cfg))
    return EXIT_CRASH if result.wrong else EXIT_DONE


def _rows_asked(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Return the value of --rows and the remaining arguments."""
    values, other_words = split_flags(argv, ("--rows",))
    text = [str(ROWS), *values["--rows"]][-1]
    if not text.isdecimal() or int(text) < 1:
        raise config_error("rows", f"rows ({text or 'nothing'}) is a number of rows, 1 or more.")
    return int(text), other_words


def untokenized_rows(cfg: Config, inputs: ValidatedInputs) -> None:
    """Read rows without tokenizing them. They are tokenized one by one later, so that each failure can be reported."""
    inputs.rows = load_rows(cfg.data, image_spec=inputs.image_spec, is_blind=inputs.is_blind, seed=cfg.run.seed)
    check_images(inputs.rows, at_most=MOST_LENGTHS)
    if inputs.tokenizer is not None:
        check_template(inputs.rows, inputs.tokenizer, "dataset")


PARTS = (
    InputStep("model", inputs.model),
    InputStep("tokenizer", inputs.tokenizer, needs="model_path"),
    InputStep("the options of the template", inputs.template_options, needs="tokenizer"),
    InputStep("image processor", inputs.image_spec, needs="tokenizer"),
    InputStep("stop", inputs.stop_strings, "stop", "tokenizer"),
    InputStep("dataset", untokenized_rows),
    InputStep("environment", READERS["environment"], "environment tools agent agent_command"),
    InputStep("the held-out sets", inputs.held_out_sets, needs="tokenizer rows"),
    InputStep("the end of answers", inputs.end_of_answers, needs="tokenizer"),
    InputStep("rewards", inputs.rewards),  # the user's code comes last: it may change the working directory
)


def dry_run(cfg: Config, num_rows: int = ROWS) -> DryRun:
    """Run all checks of a dry run.

    Raises:
        ConfigError: With all problems, if model, data or rewards cannot be opened.
    """
    inputs = read_inputs(cfg, parts=PARTS)
    rows = inputs.rows
    assert rows is not None  # otherwise `read_inputs` has raised
    cfg = settings_of_sampler(cfg, inputs.tokenizer)
    try:
        inputs.sets.append(("dataset", rows))
        result = DryRun(num_rows=len(rows), columns=rows.uses(), notes=[*inputs.notes, *find_row_notes(cfg, inputs)])
        if rows.is_beginning:
            result.notes.append(f"streaming: only the first {len(rows):,} rows were checked; a run checks the others when it reads them.")
        tools = inputs.environment.tools if inputs.environment is not None else ()
        encode = PromptEncoder(
            inputs.tokenizer, system=cfg.data.system, options=cfg.data.template_options, tools=tools, image_spec=inputs.image_spec
        )
        _check_prompts(result, cfg, rows, encode)
        batches = _batches(result, cfg, inputs, rows, spread_indices(len(rows), num_rows), encode)
        for function in inputs.rewards:
            _check_reward(result, cfg, rows, batches, function)
        _check_rewards_together(result, cfg, batches)
        return result
    finally:
        close_rewards(inputs.rewards)


# -- prompts ------------------------------------------------------------------------------------------------------------------------------


def _check_prompts(result: DryRun, cfg: Config, rows: PromptDataset, encode: PromptEncoder) -> None:
    tokens: list[int] = []  # of each image
    lengths, rejections = [], Counter[str]()
    for index in spread_indices(len(rows), MOST_LENGTHS):
        try:
            images, token_ids = rows.images(index), encoded(rows, encode, index)
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything, and such errors are what this looks for
            rejections[f"{type(error).__name__}: {one_line(error)}"] += 1
            continue
        lengths.append(len(token_ids))
        tokens += [num_tokens(image) for image in images]
        result.prompt = result.prompt or encode.tokenizer.decode(token_ids)
    result.num_tokenised = len(lengths) + rejections.total()
    if tokens:
        result.images = (
            f"Images: {len(tokens):,} with {sum(tokens) / len(tokens):,.0f} tokens on average, at most {max(tokens):,}: "
            f"{sum(tokens) / max(1, sum(lengths)):.0%} of all prompt tokens. None is damaged."
        )
    for fault, count in rejections.most_common(3):
        result.wrong.append(f"The tokenizer or its chat template rejects {count} of {result.num_tokenised} prompts: {fault}")
    if any(length == 0 for length in lengths):
        result.wrong.append(f"{lengths.count(0)} prompts have no tokens.")
    if lengths:
        result.lengths = {name: int(np.quantile(lengths, share, method="nearest")) for name, share in QUANTILES.items()}
    _check_limit(result, cfg, lengths)
    counts = Counter(rows.prompt_key(index) for index in range(len(rows)))
    if twice := len(rows) - len(counts):
        result.notes.append(f"{twice} of {len(rows)} prompts are duplicates; the most frequent prompt occurs {max(counts.values())} times.")


def _check_limit(result: DryRun, cfg: Config, lengths: Sequence[int]) -> None:
    limit = cfg.data.max_prompt_length
    result.num_too_long = sum(length > limit for length in lengths) if limit else 0
    if not result.num_too_long:
        return
    text = f"{result.num_too_long} of {result.num_tokenised} prompts are longer than max_prompt_length ({limit})"
    if cfg.data.truncation_strategy == "raise":
        result.wrong.append(f"{text}, and truncation_strategy raise rejects them. Use max_prompt_length {max(lengths)}, delete or left.")
    else:
        result.notes.append(f"{text}: truncation_strategy {cfg.data.truncation_strategy} {_TRUNCATED[cfg.data.truncation_strategy]}.")


_TRUNCATED = {"delete": "skips them", "left": "removes their first tokens, and with them the start of the chat template"}


# -- rewards ------------------------------------------------------------------------------------------------------------------------------


def _batches(
    result: DryRun, cfg: Config, inputs: ValidatedInputs, rows: PromptDataset, indices: Sequence[int], encode: PromptEncoder
) -> dict[str, RewardBatch]:
    """Return the batches to score, by kind of completion.

    With an environment they are the episodes in which the model gives that completion at every turn.
    """
    answers = [_find_answer(rows, index, cfg) for index in indices]
    kinds: dict[str, list[str | None]] = {"nothing": [""] * len(indices), "garbage": [GARBAGE] * len(indices)}
    if any(answers):
        opening = SpecialTokens(inputs.tokenizer).render_opening(cfg.data.template_options)
        rest = [_continuation(rows.raw(index), opening, text) for index, text in zip(indices, answers, strict=True)]
        kinds = {"its answer": rest, **kinds}
    if inputs.environment is not None:
        from megatron_grpo.plugins.environments.loading import find_template_notes

        try:
            result.notes += find_template_notes(cfg, inputs.environment, inputs.tokenizer, inputs.model_path)
        except ConfigError as error:
            result.wrong += [problem.message for problem in error.problems]
            return {}
    # Rewards of single answers do not see the tokens of a prompt.
    token_ids = [(0,) if inputs.environment is None else tuple(encoded(rows, encode, index)) for index in indices]
    prompts = [
        Prompt(number=number, row=int(rows.keep[index]), raw=rows.raw(index), token_ids=token_ids[number], columns=rows.columns(index))
        for number, index in enumerate(indices)
    ]
    if inputs.environment is None:
        skips = cfg.rollout.generation_kwargs.get("skip_special_tokens", True)
        decode = {"its answer": partial(decode_completion, inputs.tokenizer, skip_special_tokens=skips)}
        return {kind: _batch(prompts, texts, inputs.tokenizer, decode.get(kind)) for kind, texts in kinds.items()}
    from megatron_grpo.plugins.environments.dry_run import play_rows

    batches = {}
    outputs = {kind: [text or "" for text in texts] for kind, texts in kinds.items()}
    for kind, groups, summary, faults in play_rows(cfg, inputs, prompts, outputs):
        batches[kind], result.episodes[kind] = as_batch(groups), summary
        result.wrong += [f"The environment, where the model says {kind}: {fault}." for fault in faults]
    return {kind: batch for kind, batch in batches.items() if len(batch)}


def _check_reward(result: DryRun, cfg: Config, rows: PromptDataset, batches: Mapping[str, RewardBatch], function: RewardFunction) -> None:
    try:
        find_columns(cfg, [function], rows, "dataset")
    except ConfigError as error:
        result.wrong += [problem.message for problem in error.problems]
        return
    strict = replace(function, on_error="raise")
    results = {kind: _judge(strict, batch) for kind, batch in batches.items()}
    result.rewards[function.name] = results
    for kind, row in results.items():
        if row.error:
            ends = "and ends the run" if cfg.rewards.reward_on_error == "raise" else "and those completions have no score"
            result.wrong.append(f"On {kind}: {row.error} ({ends}: reward_on_error {cfg.rewards.reward_on_error})")
    scored = [value for row in results.values() for value in row.numbers]
    if not scored and any(row.scores for row in results.values()):
        messages = result.wrong if "its answer" in results else result.notes  # without an answer no good completion was tried
        messages.append(f"Reward `{function.name}` returns None for all tested completions, so it has no effect on the run.")
    elif _says_nothing(results):  # normal for rewards of a format or a length
        result.notes.append(f"Reward `{function.name}` returns {scored[0]:g} for all tested completions.")
    elif {"its answer", "garbage"} <= results.keys():
        best, worst = results["its answer"].mean, results["garbage"].mean
        if best is not None and worst is not None and best <= worst:
            result.notes.append(f"Reward `{function.name}` does not score the data set's answers higher than garbage.")
    if results:
        slowest = max(results, key=lambda kind: results[kind].seconds)
        _check_speed(result, cfg, function, results[slowest], len(batches[slowest]))


def _check_rewards_together(result: DryRun, cfg: Config, batches: Mapping[str, RewardBatch]) -> None:
    """Add the findings that concern all reward functions together."""
    if batches and "its answer" not in batches:
        names = cfg.rewards.answer_column or " or ".join(ANSWERS)
        result.notes.append(f"No row has {names}, so no correct completion was tested. Name the column of answers with answer_column.")
    elif result.rewards and all(map(_says_nothing, result.rewards.values())):
        result.wrong.append(
            "No reward scores the data set's answers differently from garbage. If good completions look like them, training learns nothing."
        )


def _says_nothing(results: Mapping[str, RewardTrial]) -> bool:
    """Return whether several kinds of completions all received the same score."""
    scored = {value for row in results.values() for value in row.numbers}
    is_constant = bool(scored) and math.isclose(min(scored), max(scored), rel_tol=EQUAL_REWARDS)
    return len(results) > 1 and is_constant and not any(row.error for row in results.values())


def _check_speed(result: DryRun, cfg: Config, function: RewardFunction, slowest: RewardTrial, num_rows: int) -> None:
    """Add a problem if scoring would exceed `reward_timeout`.

    A function is called once with all completions of a rollout that its rank scores.
    """
    try:
        sizes = checked_sizes(cfg)
    except ConfigError:  # `plan` reports wrong sizes
        return
    count = -(-sizes.generation_batch_size // sizes.layout.world_size)
    seconds = slowest.seconds / num_rows * count
    if seconds > cfg.rewards.reward_timeout:
        result.wrong.append(
            f"Reward `{function.name}` took {slowest.seconds:.3g} s for {num_rows} completions. A rank scores {count} at a time: "
            f"{seconds:,.0f} s if the time is proportional to their number, and reward_timeout is {cfg.rewards.reward_timeout:g}."
        )


def _find_answer(rows: PromptDataset, index: int, cfg: Config) -> str | None:
    row = rows.rows[int(rows.keep[index])] | rows.columns(index)
    names = (cfg.rewards.answer_column,) if cfg.rewards.answer_column else ANSWERS
    value = next((row[name] for name in names if row.get(name) is not None), None)
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def _continuation(prompt: Any, opening: str, answer: str | None) -> str | None:
    """Return what a model would sample of an answer, without the tag that the end of the prompt has opened."""
    tag = find_opened_tag(end_of_prompt(prompt, opening))
    if answer is None or tag is None or not answer.lstrip().startswith(f"<{tag}>"):
        return answer
    return answer.lstrip().removeprefix(f"<{tag}>").lstrip()


def _batch(
    prompts: Sequence[Prompt], texts: Sequence[str | None], tokenizer: Any, decode: Callable[[Sequence[int]], str] | None
) -> RewardBatch:
    """Build a batch from the prompts that have a text: as it is, or with `decode` what is left of it where a model samples its tokens."""
    groups = []
    for prompt, text in zip(prompts, texts, strict=True):
        if text is not None:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            sampled = decode(ids) if decode else text
            completion = make_completion(prompt.token_ids, ids, [0.0] * len(ids), text=sampled, finish_reason="stop", version=0)
            groups.append(Group(prompt=prompt, completions=(completion,)))
    return replace(as_batch(groups), labels=[f"data-set row {group.prompt.row}" for group in groups])


def _judge(function: RewardFunction, batch: RewardBatch) -> RewardTrial:
    start = time.perf_counter()
    try:
        scores = tuple(row[0] for row in score([function], batch).rows)
    except RewardError as error:
        return RewardTrial(seconds=time.perf_counter() - start, error=str(error))
    return RewardTrial(scores=scores, seconds=time.perf_counter() - start)


# -- report -------------------------------------------------------------------------------------------------------------------------------


def report_lines(result: DryRun, cfg: Config) -> str:
    """Return the report as text."""
    prompt_text = result.prompt if len(result.prompt) <= WIDTH else result.prompt[:WIDTH] + " ..."
    tokenized_share = "" if result.num_tokenised == result.num_rows else f", {result.num_tokenised:,} of them tokenised"
    lines = [
        f"{cfg.data.dataset}: {result.num_rows:,} prompts{tokenized_share}",
        "",
        "The first prompt, as the model receives it:",
        prompt_text,
        "",
    ]
    lines += ["Columns:", *(f"  {name:<22}{use}" for name, use in result.columns.items()), ""]
    if result.lengths:
        lines.append("Tokens of a prompt: " + ", ".join(f"{name} {length:,}" for name, length in result.lengths.items()))
    lines += [result.images] if result.images else []
    if result.episodes:
        lines += ["", "Episodes in which the model answers at every turn with", *(f"  {kind}: {s}" for kind, s in result.episodes.items())]
    lines += ["", *_table(result)] if result.rewards else []
    for title, texts in (("Problems", result.wrong), ("Notes", result.notes)):
        lines += ["", f"{title}:", *(f"  {number}. {text}" for number, text in enumerate(texts, 1))] if texts else []
    count = len(result.wrong)
    return "\n".join([*lines, "", f"{count} problem{'s' * (count > 1)}." if count else "No problems."])


def _table(result: DryRun) -> Iterator[str]:
    """Yield a line for each function and kind of completion: lowest, mean and highest score, and seconds."""
    yield f"{'reward':<24}{'on':<12}{'lowest':>10}{'mean':>10}{'highest':>10}{'seconds':>10}"
    for name, kinds in result.rewards.items():
        for kind, row in kinds.items():
            values = ("", "fails", "") if row.error else ("", "None", "")
            if row.numbers:
                values = (f"{min(row.numbers):.4g}", f"{row.mean:.4g}", f"{max(row.numbers):.4g}")
            yield f"{name[:23]:<24}{kind:<12}" + "".join(f"{value:>10}" for value in values) + f"{row.seconds:>10.3f}"
