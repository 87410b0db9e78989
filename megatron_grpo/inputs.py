"""What is looked at before any model loads: settings, output_dir, model, data, rewards. Every fault in any of them is reported at once.

This is the one list, for `train` and for `plan`, so that the two cannot come to different answers. `plan` leaves out what `_left_out`
names, and says so. Nothing here imports torch before it has to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_grpo import launcher
from megatron_grpo.data.chat import load_tokenizer
from megatron_grpo.data.files import is_path
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.planning.check import Checked, check_parsed
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.planning.pictures import PictureFacts
from megatron_grpo.planning.tower import learns_nothing
from megatron_grpo.rewards.loading import check_columns, close_rewards, load_rewards, may_be_here
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.rollout.own_loading import load_rollout_func
from megatron_grpo.settings import Parsed
from megatron_grpo.settings.config import Config
from megatron_grpo.settings.evaluation import flag_of, sets_of
from megatron_grpo.settings.read import COMMAND_LINE
from megatron_grpo.settings.turns import EPISODE_COLUMNS
from megatron_grpo.weights.fit import length_problems
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.stored import stored_names

if TYPE_CHECKING:
    from megatron_grpo.checkpoint.resume import Resume
    from megatron_grpo.data.eyes import Eyes
    from megatron_grpo.data.prompts import PromptRows, PromptStream
    from megatron_grpo.environments.protocol import Environment


_ADAPTERS = ("adapters", "ref_adapters")  # settings that name a directory of PEFT's


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What an evaluation needs. Everything here has been looked at and can be used."""

    model_path: Path
    shape: ModelShape
    held_out: Mapping[str, PromptStream]  # sets by name
    rewards: list[RewardFunction]
    eyes: Eyes | None  # of a model that sees
    environment: type[Environment] | None  # whose objects are episodes, where completions are
    rollout_func: Callable[..., Any] | None  # that makes completions
    notes: Sequence[str]  # what a person should know of them

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(stream.longest_prompt for stream in self.streams)

    @property
    def most_pictures(self) -> int:
        """Of a prompt."""
        return max(stream.rows.most_pictures for stream in self.streams)

    @property
    def streams(self) -> list[PromptStream]:
        return list(self.held_out.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Looked):
    """What a run needs."""

    prompts: PromptStream
    resume: Resume  # how the run begins

    @property
    def streams(self) -> list[PromptStream]:
        return [self.prompts, *self.held_out.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was looked at and is right, as far as it was to be looked at."""

    model_path: Path | None
    shape: ModelShape | None
    prompts: PromptStream | PromptRows | None
    held_out: Mapping[str, PromptStream | PromptRows]
    rewards: list[RewardFunction]
    environment: type[Environment] | None = None
    eyes: Eyes | None = None
    rollout_func: Callable[..., Any] | None = None
    notes: Sequence[str] = ()


def read_everything(parsed: Parsed, *, has_sampler: bool = False) -> tuple[Plan, Inputs]:
    """For `train`: the plan and the inputs of a run. Raises ConfigError with all that is wrong with either.

    has_sampler: it was written elsewhere, and stands in for the servers that the settings name.
    """
    made, found, resume = _look_at(parsed, {"servers": "the rollout servers"} if has_sampler else {})
    assert resume is not None  # left out of a plan alone
    return made, Inputs(**{field.name: getattr(found, field.name) for field in fields(Found)}, resume=resume)


def look_at_everything(parsed: Parsed) -> Plan:
    """For `plan`: the plan alone, with what was not looked at. Raises ConfigError with all that `train` would refuse of the rest."""
    left_out = _left_out(parsed.config)
    absent = {flag: None for flag in _ADAPTERS if flag in left_out}
    parsed = replace(parsed, config=parsed.config.with_values(absent))
    with redirect_stdout(sys.stderr):  # a reward function's file may print as it is loaded, and stdout is for the plan
        made, found, _ = _look_at(parsed, left_out)
    close_rewards(found.rewards)
    return replace(made, not_checked=tuple(left_out.values()))


def _left_out(cfg: Config) -> dict[str, str]:
    """What `plan` does not look at, by part, each as it is told. It needs neither inputs nor a network, and answers at once."""
    model, rewards = cfg.model.model, cfg.rewards
    machine = "this machine's GPUs and memory, and whether output_dir can be written"
    parts = {"machine": machine, "tokenizer": "the tokenizer (chat template, prompt lengths in tokens)"}
    if cfg.rollout.vllm_mode == "server":
        parts |= {"servers": "the rollout servers (whether they answer, whose they are, how long their sequences may be)"}
    if not model:
        parts |= {"model": "the model (none given)"}
    elif (Path(model).is_file() and model.endswith(".json")) or _is_elsewhere(cfg, "model", model):
        parts |= {"model": f"the model's weights ({model} is {'its configuration' if Path(model).is_file() else 'not on this machine'})"}
    elif Path(model).is_dir() and not any(Path(model).glob("*.safetensors*")) and not any(Path(model).glob("tokenizer*")):
        parts |= {"weights": f"the model's weights ({model} holds its configuration alone)"}
    for flag in _ADAPTERS:
        directory = getattr(cfg.tuner, flag)
        if directory and _is_guest(cfg, flag) and not Path(directory).exists():
            parts |= {flag: f"{flag} ({directory} is not on this machine): ranks and targets are taken from the settings"}
    sets = [("dataset", "dataset", cfg.data.dataset), *((part_of(name), flag_of(name, cfg), at) for name, at in sets_of(cfg).items())]
    for part, flag, where in sets:
        if _is_elsewhere(cfg, flag, where):
            parts |= {part: f"the rows of {flag} ({where} is not on this machine)"}
    if not cfg.data.dataset:
        parts |= {"dataset": "the data set (none given)"}
    if not rewards.reward_funcs:
        parts |= {"rewards": "reward functions (none given)"}
    if "reward_model" in rewards.reward_funcs and _is_elsewhere(cfg, "reward_model", rewards.reward_model):
        parts |= {"reward_model": f"the classifier of the reward reward_model ({rewards.reward_model} is not on this machine)"}
    if _is_guest(cfg, "reward_funcs"):
        absent = [spec for spec in rewards.reward_funcs if not may_be_here(spec)]
        parts |= {spec: f"the reward {spec} (not on this machine)" for spec in absent}
    specs = [spec for spec in (cfg.turns.environment, *cfg.turns.tools) if spec and ":" in spec]
    if (_is_guest(cfg, "environment") or _is_guest(cfg, "tools")) and not all(map(may_be_here, specs)):
        parts |= {"environment": f"the environment ({', '.join(specs)} is not on this machine)"}
    if _is_guest(cfg, "report_to"):
        parts |= {"report_to": f"whether {' and '.join(cfg.run.report_to)} can be reported to"}
    return parts


def _is_guest(cfg: Config, name: str) -> bool:
    """Whether a setting comes from a foreign file, which was written for another machine."""
    return cfg.plan.dialect is not None and cfg.sources.get(name, "default") not in (COMMAND_LINE, "default")


def _is_elsewhere(cfg: Config, name: str, value: str | None) -> bool:
    """Whether a setting names something that only the machine of the run may have: on the Hub, or at a path of a foreign file."""
    if not value:
        return False
    return not Path(value).exists() and (_is_guest(cfg, name) or not is_path(value))


def _absolute_paths(cfg: Config) -> dict[str, str]:
    """Settings whose paths are used after the user's code has run, which may change the directory; as they have to be then."""
    paths = {"output_dir": cfg.run.output_dir, "resume": cfg.run.resume, "lengths": cfg.plan.lengths, "png": cfg.plan.png}
    paths |= {flag: getattr(cfg.tuner, flag) for flag in _ADAPTERS}
    return {name: str(Path(path).absolute()) for name, path in paths.items() if path not in (None, "auto", "never")}


Read = TypeVar("Read")


def _unreadable(parsed: Parsed) -> set[str]:
    """What the command line names in a way that cannot be read, by part: that is said, and there is nothing to look at."""
    of_parts = {"model": ("model", "tokenizer", "weights"), "reward_funcs": ("rewards",)}
    return {part for name in parsed.unreadable for part in of_parts.get(name, (name,))}


class _Problems(list[Problem]):
    """All that is found wrong, each thing once."""

    def attempt(self, read: Callable[[], Read]) -> Read | None:
        """What `read` gives, or None."""
        try:
            return read()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def add(self, found: Collection[Problem]) -> None:
        known = {problem.message for problem in self}
        self += [problem for problem in found if problem.message not in known]


def _look_at(parsed: Parsed, left_out: Collection[str]) -> tuple[Plan, Found, Resume | None]:
    """Settings first, then what they name, then whether the two go together."""
    problems, paths = _Problems(), _absolute_paths(parsed.config)
    checked = problems.attempt(lambda: check_parsed(parsed))
    found = problems.attempt(lambda: read_inputs(parsed.config, {*left_out, *_unreadable(parsed)}))
    both: tuple[Plan, Resume | None] | None = None
    if checked is not None and found is not None:
        both = problems.attempt(lambda: _plan_of(parsed, checked, found, paths, is_asked_to_train="machine" not in left_out))
    if problems or found is None or both is None:
        close_rewards(found.rewards if found is not None else [])
        raise ConfigError(problems)
    made, resume = both
    return made, found, resume


def _plan_of(
    parsed: Parsed, checked: Checked, found: Found, paths: Mapping[str, str], *, is_asked_to_train: bool
) -> tuple[Plan, Resume | None]:
    if checked.shape is None and found.model_path is not None:  # a Hub name, whose config.json has only now been fetched
        here = check_parsed(replace(parsed, config=parsed.config.with_values({"model": str(found.model_path)})))
        checked = replace(here, config=here.config.with_values({"model": parsed.config.model.model}))
    checked = replace(checked, config=checked.config.with_values(paths))
    rows = _rows_of(found.prompts)
    pictures = PictureFacts.of(rows, checked.sizes) if rows is not None else None
    made = make_plan(checked, num_prompts=None if rows is None else len(rows), pictures=pictures)
    if rows is not None and found.eyes is not None and not rows.most_pictures and checked.shape is not None:
        made = replace(made, warnings=[*made.warnings, *learns_nothing(checked.config, checked.shape)])
    if _begins_anew(checked.config) and not is_asked_to_train:
        return made, None
    from megatron_grpo.checkpoint.content import content_of
    from megatron_grpo.checkpoint.resume import judge_resume
    from megatron_grpo.data.prompts import PromptStream

    stream = found.prompts if isinstance(found.prompts, PromptStream) else None
    content = content_of(checked.config, model_path=found.model_path, rows=rows)
    return made, judge_resume(checked.config, made.timetable, content, stream)


def _rows_of(prompts: PromptStream | PromptRows | None) -> PromptRows | None:
    if prompts is None:
        return None
    from megatron_grpo.data.prompts import PromptStream

    return prompts.rows if isinstance(prompts, PromptStream) else prompts


def _begins_anew(cfg: Config) -> bool:
    """Nothing lies where the run would write, and nothing is in its way. Then `plan` has nothing to judge, and answers at once."""
    out = Path(cfg.run.output_dir)
    nearest = next((path for path in (out, *out.absolute().parents) if path.exists()), out)
    return cfg.run.resume in ("auto", "never") and nearest != out and nearest.is_dir()


def read_inputs(cfg: Config, left_out: Collection[str] = ()) -> Found:
    """Reads model shape, data and rewards. Raises ConfigError with the problems of all of them at once.

    left_out: of the names in `_left_out`. The user's own code runs last: it may change the directory.
    """
    problems = _Problems()
    if not _begins_anew(cfg):
        from megatron_grpo.checkpoint.resume import find_checkpoints

        problems.attempt(partial(find_checkpoints, cfg.run.output_dir, cfg.run.resume, overwrites=cfg.run.overwrite_output_dir))
    if "report_to" not in left_out:
        problems.attempt(partial(check_report_to, cfg))
    shape = tokenizer = None
    model_path = None if "model" in left_out else problems.attempt(partial(find_model, cfg.model.model))
    if model_path:
        shape = problems.attempt(partial(ModelShape.from_pretrained, model_path))
    if model_path and shape and "weights" not in left_out:
        problems.attempt(partial(stored_names, model_path))
    if model_path and shape and cfg.tuner.tuner_type == "lora":
        problems.add(_bases_of_adapters(cfg, model_path))
    if shape and "tokenizer" not in left_out:
        tokenizer = problems.attempt(partial(load_tokenizer, str(model_path)))
    sight = (problems.attempt(lambda: _sight_of(cfg, model_path, left_out)) if model_path and shape else None) or UNKNOWN
    environment = None if "environment" in left_out else problems.attempt(partial(_environment, cfg, tokenizer))
    notes: Sequence[str] = ()
    if environment and tokenizer and model_path:
        notes = problems.attempt(partial(_look_at_template, cfg, environment, tokenizer, model_path)) or ()
    reader = _Reader(cfg, tokenizer, sight, environment)
    prompts = None if "dataset" in left_out else problems.attempt(reader.read)
    held_out = _read_held_out(reader, left_out, problems)
    rewards = [] if "rewards" in left_out else problems.attempt(partial(load_rewards, cfg, left_out=left_out))
    own = None if "rollout_func" in left_out else problems.attempt(partial(load_rollout_func, cfg))
    every = [("dataset", prompts), *((flag_of(name, cfg), found) for name, found in held_out.items())]
    looked = [(flag, rows) for flag, found in every if (rows := _rows_of(found))]
    _look_at_rows(cfg, shape if tokenizer else None, rewards or [], looked, problems)
    if cfg.rollout.vllm_mode == "server" and shape and "servers" not in left_out and launcher.read().rank == 0:
        longest = max((rows.longest_prompt or 0 for _, rows in looked), default=0)
        most = max((rows.most_pictures for _, rows in looked), default=0)
        problems.add(problems.attempt(partial(_servers, cfg, shape, longest, sight.eyes, most)) or [])
    if problems or rewards is None:
        close_rewards(rewards or [])
        raise ConfigError(problems)
    return Found(
        model_path=model_path, shape=shape, prompts=prompts, held_out=held_out, rewards=rewards, environment=environment,
        rollout_func=own, notes=notes, eyes=sight.eyes,
    )  # fmt: skip


def _environment(cfg: Config, tokenizer: Any) -> type[Environment] | None:
    """The class of a run's episodes. Raises ConfigError."""
    if not cfg.turns.plays:
        return None
    from megatron_grpo.environments.loading import load_environment

    return load_environment(cfg, tokenizer)


def _look_at_template(cfg: Config, environment: type[Environment], tokenizer: Any, model_path: Path) -> list[str]:
    """What it does to the turns of episodes. Raises ConfigError where they would not be seen."""
    flag = "environment" if cfg.turns.environment else "tools"
    if not getattr(tokenizer, "chat_template", None):
        message = f"{flag}: the model's tokenizer has no chat template (a base model?), and turns are written by one. Use a chat model."
        raise ConfigError([Problem(flags=(flag, "model"), message=message)])
    from megatron_grpo.environments.loading import template_of
    from megatron_grpo.environments.probe import look_at

    template = template_of(cfg, environment, tokenizer, model_path=model_path)
    return look_at(template, environment, history=cfg.turns.turn_history, flag=flag)  # type: ignore[arg-type]  # one of its choices


def _columns(cfg: Config, rows: PromptRows, flag: str) -> tuple[str, ...]:
    """What rewards can count on: columns of the data, and of episodes. Raises ConfigError where a name means both."""
    names = rows.column_names()
    if not cfg.turns.plays:
        return names
    if both := [name for name in names if name in EPISODE_COLUMNS]:
        message = f"{flag} has the column {', '.join(both)}, and rewards get that name of an episode. Give the column another one."
        raise ConfigError([Problem(flags=(flag,), message=message)])
    return (*names, *EPISODE_COLUMNS)


def _check_columns(cfg: Config, rewards: list[RewardFunction], rows: PromptRows, flag: str) -> None:
    if cfg.rollout.rollout_func is not None:  # which may give them columns that nobody knows yet
        return
    check_columns(rewards, _columns(cfg, rows, flag), flag=flag)


def read_to_evaluate(cfg: Config) -> Looked:
    """For `eval`: model, held-out sets and rewards. Raises ConfigError with the problems of all of them at once."""
    problems = _Problems()
    shape = tokenizer = None
    model_path = problems.attempt(partial(find_model, cfg.model.model))
    if model_path:
        shape = problems.attempt(partial(ModelShape.from_pretrained, model_path))
        problems.attempt(partial(stored_names, model_path))
    if model_path and shape and cfg.tuner.tuner_type == "lora":
        problems.add(_bases_of_adapters(cfg, model_path))
    if shape:
        tokenizer = problems.attempt(partial(load_tokenizer, str(model_path)))
    sight = (problems.attempt(lambda: _sight_of(cfg, model_path, ())) if model_path and shape else None) or UNKNOWN
    environment, notes = problems.attempt(partial(_environment, cfg, tokenizer)), list[str]()
    if environment and tokenizer and model_path:
        notes = problems.attempt(partial(_look_at_template, cfg, environment, tokenizer, model_path)) or []
    held_out = _read_held_out(_Reader(cfg, tokenizer, sight, environment), (), problems)
    rewards = problems.attempt(partial(load_rewards, cfg))
    own = problems.attempt(partial(load_rollout_func, cfg))
    looked = [(flag_of(name, cfg), rows) for name, found in held_out.items() if (rows := _rows_of(found))]
    _look_at_rows(cfg, shape if tokenizer else None, rewards or [], looked, problems)
    if problems or model_path is None or shape is None or rewards is None:
        close_rewards(rewards or [])
        raise ConfigError(problems)
    streams = cast("Mapping[str, PromptStream]", held_out)
    return Looked(
        model_path=model_path, shape=shape, held_out=streams, rewards=rewards, environment=environment, rollout_func=own, notes=notes,
        eyes=sight.eyes,
    )  # fmt: skip


def _read_held_out(reader: _Reader, left_out: Collection[str], problems: _Problems) -> dict[str, PromptStream | PromptRows]:
    names = [name for name in sets_of(reader.cfg) if part_of(name) not in left_out]
    read = {name: problems.attempt(partial(reader.read, name)) for name in names}
    return {name: found for name, found in read.items() if found is not None}


def part_of(name: str) -> str:
    """What stands for a held-out set among the parts that are left out."""
    return f"held-out set {name}"


def _look_at_rows(
    cfg: Config, shape: ModelShape | None, rewards: list[RewardFunction], looked: list[tuple[str, PromptRows]], problems: _Problems
) -> None:
    """Whether rewards find their columns in every set, and prompts their place in the model. looked: (setting, rows)."""
    for flag, rows in looked:
        if rewards:
            problems.attempt(partial(_check_columns, cfg, rewards, rows, flag))
        if shape:
            problems.add(_lengths_of_data(cfg, shape, rows, flag))


def _servers(cfg: Config, shape: ModelShape, longest_prompt: int, eyes: Eyes | None, most_pictures: int) -> list[Problem]:
    """Of rollout servers that answer already. The rank that will speak to them looks; the others may have no way to them."""
    from megatron_grpo.rollout.adapters import lora_push
    from megatron_grpo.rollout.fleet import needs_of, problems_with_servers

    lora = lora_push(cfg, shape, on_gpu=None)
    return problems_with_servers(cfg, needs_of(cfg, longest_prompt, lora, eyes=eyes, most_pictures=most_pictures))


def _bases_of_adapters(cfg: Config, model_path: Path) -> list[Problem]:
    """Adapters that were trained beside another model than this one."""
    from megatron_grpo.checkpoint.content import base_problems

    named = {flag: getattr(cfg.tuner, flag) for flag in _ADAPTERS}
    return [problem for flag, directory in named.items() if directory for problem in base_problems(directory, model_path, flag=flag)]


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a model's eyes."""

    eyes: Eyes | None
    is_blind: bool  # it has none


UNKNOWN = Sight(None, is_blind=False)


def _sight_of(cfg: Config, model_path: Path, left_out: Collection[str]) -> Sight:
    from megatron_grpo.data.eyes import eyes_of, sees
    from megatron_grpo.weights.shape import read_config

    if not sees(read_config(model_path)):
        return Sight(None, is_blind=True)
    is_config_alone = "weights" in left_out and not (model_path / "preprocessor_config.json").exists()
    return Sight(None if is_config_alone else eyes_of(cfg.data, model_path), is_blind=False)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the data sets of a run, as its model and its episodes need them."""

    cfg: Config
    tokenizer: Any
    sight: Sight
    environment: type[Environment] | None

    def read(self, held_out: str | None = None) -> PromptStream | PromptRows:
        """A stream of prompts; without a tokenizer its rows, which can be looked at all the same. held_out: name of a set."""
        from megatron_grpo.data.prompts import check_for_episodes, check_pictures, load_rows, open_stream
        from megatron_grpo.data.tokens import FEW

        cfg = self.cfg
        flag = "dataset" if held_out is None else flag_of(held_out, cfg)
        dataset = cfg.data.dataset if held_out is None else sets_of(cfg)[held_out]
        if not self.tokenizer:
            rows = load_rows(cfg.data, dataset=dataset, flag=flag, eyes=self.sight.eyes, is_blind=self.sight.is_blind)
            check_pictures(rows, at_most=FEW)
            if self.environment is not None:
                check_for_episodes(rows, flag)
            return rows
        seed, shuffle = (cfg.run.seed, None) if held_out is None else (0, False)
        tools = None if self.environment is None else self.environment.tools
        return open_stream(
            cfg.data, self.tokenizer, dataset=dataset, flag=flag, seed=seed, shuffle=shuffle, eyes=self.sight.eyes, tools=tools
        )


def check_report_to(cfg: Config) -> None:
    """Services that are known and installed."""
    if set(cfg.run.report_to) <= {"none"}:
        return
    from megatron_grpo.metrics import report_to_problems

    if problems := report_to_problems(cfg.run.report_to):
        raise ConfigError(problems)


def _lengths_of_data(cfg: Config, shape: ModelShape, rows: PromptRows, flag: str) -> list[Problem]:
    """Sequences too long for the model, where only the data tells how long they are: `planning.check` judges what is set."""
    longest = cfg.rollout.max_completion_length
    if cfg.data.max_prompt_length is not None or rows.longest_prompt is None or length_problems(shape, 1 + longest):
        return []
    return length_problems(shape, rows.longest_prompt + longest, flags=(flag, "max_completion_length"))


def find_model(name: str) -> Path:
    """The directory of a Hugging Face checkpoint; a Hub name is fetched first."""
    if not name:
        raise ConfigError([Problem(flags=("model",), message="model is missing: give a Hugging Face checkpoint directory or a Hub name.")])
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    if is_path(name):
        what = "is a file" if path.is_file() else "does not exist"
        beside = sorted(config.parent.name for config in path.parent.glob("*/config.json"))[:8]
        there = f" In {path.parent}: {', '.join(beside)}." if beside else ""
        raise ConfigError([Problem(
            flags=("model",),
            message=f"model ({name}) {what}. It is a directory with config.json, tokenizer files and *.safetensors, or a Hub name.{there}"
        )])  # fmt: skip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([Problem(
            flags=("model",), message=f"model ({name}) is neither a directory here nor a model that can be fetched from the Hub: {reason}"
        )]) from error  # fmt: skip
