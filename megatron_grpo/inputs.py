"""What a run reads before any model loads: settings, model shape, data, rewards. Every fault in any of them is reported at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.checkpoint import holds_run, resumes_from
from megatron_grpo.data.chat import load_tokenizer
from megatron_grpo.data.prompts import PromptStream, load_rows, open_stream
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.metrics import report_to_problems
from megatron_grpo.planning.check import check_parsed
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.rewards.loading import check_columns, close_rewards, load_rewards
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.settings import Parsed
from megatron_grpo.settings.config import Config
from megatron_grpo.weights.fit import length_problems
from megatron_grpo.weights.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything here has been looked at and can be used."""

    model_path: Path
    shape: ModelShape
    prompts: PromptStream
    held_out: PromptStream | None
    rewards: list[RewardFunction]

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(stream.rows.longest_prompt for stream in (self.prompts, self.held_out) if stream is not None)


def read_everything(parsed: Parsed) -> tuple[Plan, Inputs]:
    """The plan and the inputs of a training run. Raises ConfigError with all that is wrong with either."""
    problems: list[Problem] = []
    inputs = made = None
    try:
        checked = check_parsed(parsed)
    except ConfigError as error:
        checked, problems = None, list(error.problems)
    try:
        inputs = read_inputs(parsed.config)
        if checked is not None and checked.shape is None:  # a Hub name, whose config.json has only now been fetched
            name, parsed.config.model.model = parsed.config.model.model, str(inputs.model_path)
            checked = check_parsed(parsed)
            parsed.config.model.model = name
        if checked is not None:
            made = make_plan(checked, num_prompts=len(inputs.prompts))
            check_resume(parsed.config, made.timetable)
    except ConfigError as error:
        known = {problem.message for problem in problems}
        problems += [problem for problem in error.problems if problem.message not in known]
    if problems:
        if inputs is not None:
            close_rewards(inputs.rewards)
        raise ConfigError(problems)
    return made, inputs


def read_inputs(cfg: Config) -> Inputs:
    """Reads model shape, data and rewards. Raises ConfigError with the problems of all of them at once."""
    problems: list[Problem] = []

    def attempt(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    attempt(partial(check_output_dir, cfg))
    problems += report_to_problems(cfg.run.report_to)
    model_path = attempt(partial(find_model, cfg.model.model))
    shape = attempt(lambda: ModelShape.from_pretrained(model_path)) if model_path else None
    tokenizer = attempt(lambda: load_tokenizer(str(model_path))) if shape else None
    if tokenizer:
        prompts = attempt(lambda: open_stream(cfg.data, tokenizer, seed=cfg.run.seed))
    else:  # its rows can be looked at all the same
        prompts = attempt(lambda: load_rows(cfg.data))
    held_out = None
    if cfg.eval.eval_dataset and tokenizer:
        held_out = attempt(
            lambda: open_stream(cfg.data, tokenizer, seed=0, dataset=cfg.eval.eval_dataset, shuffle=False, flag="eval_dataset")
        )
    rewards = attempt(lambda: load_rewards(cfg))
    if rewards and prompts:
        rows = prompts.rows if tokenizer else prompts
        attempt(lambda: check_columns(rewards, rows.column_names()))
    for stream, flag in ((prompts, "dataset"), (held_out, "eval_dataset")):
        if tokenizer and stream:
            problems += _lengths_of_data(cfg, shape, stream, flag)
    if problems:
        close_rewards(rewards or [])
        raise ConfigError(problems)
    return Inputs(model_path=model_path, shape=shape, prompts=prompts, held_out=held_out, rewards=rewards)


def _lengths_of_data(cfg: Config, shape: ModelShape, stream: PromptStream, flag: str) -> list[Problem]:
    """Sequences too long for the model, where only the data tells how long they are: `planning.check` judges what is set."""
    longest = cfg.rollout.max_completion_length
    if cfg.data.max_prompt_length is not None or length_problems(shape, 1 + longest):
        return []
    return length_problems(shape, stream.rows.longest_prompt + longest, flags=(flag, "max_completion_length"))


def check_output_dir(cfg: Config) -> None:
    """An output_dir that holds a run is continued (`--resume auto`) or cleared (`--overwrite_output_dir`), never mixed."""
    out = cfg.run.output_dir
    in_the_way = next((path for path in (Path(out), *Path(out).parents) if path.exists() and not path.is_dir()), None)
    if in_the_way:
        where = "is a file" if in_the_way == Path(out) else f"cannot be made: {in_the_way} is a file"
        raise ConfigError([Problem(flags=("output_dir",), message=f"output_dir ({out}) {where}. Name a folder.")])
    if cfg.run.overwrite_output_dir and cfg.run.resume not in ("auto", "never"):
        raise ConfigError([Problem(
            flags=("overwrite_output_dir", "resume"),
            message=f"overwrite_output_dir starts afresh and resume ({cfg.run.resume}) continues. Leave one of them out.")])  # fmt: skip
    if holds_run(out) and cfg.run.resume == "never" and not cfg.run.overwrite_output_dir:
        raise ConfigError([Problem(
            flags=("output_dir", "resume"),
            message=f"output_dir ({out}) holds an earlier run and resume is never. Use --resume auto to continue it, "
                    "--overwrite_output_dir to replace it, or another output_dir.")])  # fmt: skip


def check_resume(cfg: Config, timetable: Timetable) -> None:
    """A rollout that is under way is finished with the sizes it began with; between rollouts they may change."""
    found = None if cfg.run.overwrite_output_dir else resumes_from(cfg.run.output_dir, cfg.run.resume)
    if found is None or "batch" not in found[1]:
        return
    directory, facts = found
    step, rollouts, pending = facts["progress"]["step"], facts["progress"]["num_rollouts"], facts["num_pending"]
    now = timetable.plan.stream_sizes
    before = {name: value for name, value in facts["batch"].items() if now.get(name) != value}
    if not before or (not pending and timetable.is_between_rollouts(step, rollouts)):
        return
    changes = ", ".join(f"{name} was {value} and is {now[name]}" for name, value in before.items())
    uneven = f"{rollouts} rollouts are not {step} optimizer steps with them"
    why = f"{pending} of its samples are still to be trained" if pending else uneven
    raise ConfigError([Problem(
        flags=(*before, "resume"), nearest={name: [value] for name, value in before.items()},
        message=f"{changes}, and {directory} cannot be continued with other sizes: {why}. Resume with the old ones, "
                "or begin a new run from its weights (--model OLD_OUTPUT_DIR/hf, another --output_dir).")])  # fmt: skip


def find_model(name: str) -> Path:
    """The directory of a Hugging Face checkpoint; a Hub name is fetched first."""
    if not name:
        raise ConfigError([Problem(flags=("model",), message="model is missing: give a Hugging Face checkpoint directory or a Hub name.")])
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([Problem(
            flags=("model",), message=f"model ({name}) is neither a directory here nor a model that can be fetched from the Hub: {reason}"
        )]) from error  # fmt: skip
