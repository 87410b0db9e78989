"""Reads what settings name: a model's directory, the data sets and episodes that go with it, rollout servers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import flag_of, longest_completion, sets_of
from megatron_grpo.data.hub import find_model
from megatron_grpo.rewards.loading import check_columns
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.weights.fit import length_problems
from megatron_grpo.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.data.eyes import Eyes
    from megatron_grpo.data.prompts import PromptRows, PromptStream
    from megatron_grpo.environments.protocol import Environment
    from megatron_grpo.servers.teachers import Needs as TeacherNeeds

ADAPTERS = ("adapters", "ref_adapters")  # settings that name a directory of PEFT's


Read = TypeVar("Read")


class Problems(list[Problem]):
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


def find_reference(name: str, model_path: Path | None, shape: ModelShape | None) -> Path:
    """The directory of `ref_model`, which is looked at as the model is: it has the same shape and the same vocabulary.

    model_path, shape: of the model, as far as it is known. Raises ConfigError.
    """
    from megatron_grpo.checkpoint.content import vocabulary_fingerprint
    from megatron_grpo.weights.stored import stored_names

    if "/" not in name and not Path(name).exists():
        raise _of_reference(f"ref_model ({name}) is neither a directory here nor a Hub name, which is owner/name.")
    path = find_model(name, flag="ref_model")
    theirs = ModelShape.from_pretrained(path)
    stored_names(path)
    if shape is not None and theirs != shape:
        other = [f.name for f in fields(ModelShape) if getattr(theirs, f.name) != getattr(shape, f.name)]
        told = ", ".join(f"{name} {getattr(theirs, name)} (model: {getattr(shape, name)})" for name in other)
        raise _of_reference(f"ref_model ({name}) is not of the model's shape: {told}. A reference is held in "
                            "the model's own layout.")  # fmt: skip
    if model_path is not None and vocabulary_fingerprint(path) not in (None, vocabulary_fingerprint(model_path)):
        raise _of_reference(f"ref_model ({name}) has another vocabulary than the model: the same token ids would be other words.")
    return path


def _of_reference(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("ref_model", "model"), message=message)])


def find_teacher(cfg: Config, tokenizer: Any) -> Path:
    """The directory of `teacher_model`: a model of any size, whose tokenizer has the words of the policy's.

    tokenizer: the policy's, None where it is not known. Raises ConfigError.
    """
    from megatron_grpo.data.chat import load_tokenizer, vocabulary_of
    from megatron_grpo.planning.models import of_teacher
    from megatron_grpo.weights.stored import stored_names

    name, flag, trusts = cfg.grpo.teacher_model or "", "teacher_model", cfg.model.trust_remote_code
    if "/" not in name and not Path(name).exists():
        message = f"teacher_model ({name}) is neither a directory here nor a Hub name, which is owner/name."
        raise ConfigError([Problem(flags=(flag,), message=message)])
    path = find_model(name, flag=flag, with_code=trusts)
    try:
        ModelShape.from_pretrained(path)
        stored_names(path)
    except ConfigError as error:
        raise ConfigError([of_teacher(problem) for problem in error.problems]) from error
    if tokenizer is None:
        return path
    if vocabulary_of(load_tokenizer(str(path), trust_remote_code=trusts, flag=flag)) != vocabulary_of(tokenizer):
        message = (
            f"teacher_model ({name}) has a tokenizer with other words than the policy's: the same token ids would be other text. A teacher "
            "is of the policy's family, with the same vocabulary."
        )
        raise ConfigError([Problem(flags=(flag, "model"), message=message)])
    return path


def bases_of_adapters(cfg: Config, model_path: Path) -> list[Problem]:
    """Adapters that were trained beside another model than this one."""
    from megatron_grpo.checkpoint.content import base_problems

    named = {flag: getattr(cfg.tuner, flag) for flag in ADAPTERS}
    return [problem for flag, directory in named.items() if directory for problem in base_problems(directory, model_path, flag=flag)]


def weights_to_begin_with(cfg: Config, model_path: Path | None) -> list[Problem]:
    """What a checkpoint's weights say against beginning with them. Raises ConfigError where there is none."""
    from megatron_grpo.checkpoint.resume import problems_of_beginning

    return problems_of_beginning(cfg, model_path)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a model's eyes."""

    eyes: Eyes | None
    is_blind: bool  # it has none


UNKNOWN = Sight(None, is_blind=False)


def sight_of(cfg: Config, model_path: Path, left_out: Collection[str]) -> Sight:
    from megatron_grpo.data.eyes import eyes_of, sees
    from megatron_grpo.weights.shape import read_config

    if not sees(read_config(model_path)):
        return Sight(None, is_blind=True)
    is_config_alone = "weights" in left_out and not (model_path / "preprocessor_config.json").exists()
    return Sight(None if is_config_alone else eyes_of(cfg.data, model_path), is_blind=False)


def environment_of(cfg: Config, tokenizer: Any) -> type[Environment] | None:
    """The class of a run's episodes. Raises ConfigError."""
    if not cfg.turns.plays:
        return None
    from megatron_grpo.environments.loading import load_environment

    return load_environment(cfg, tokenizer)


def rollout_func_of(cfg: Config) -> Callable[..., Any] | None:
    """The function that `rollout_func` names, which runs the user's file. Raises ConfigError."""
    from megatron_grpo.environments.loading import load_rollout_func

    return load_rollout_func(cfg)


def look_at_template(cfg: Config, environment: type[Environment], tokenizer: Any, model_path: Path) -> list[str]:
    """What it does to the turns of episodes. Raises ConfigError where they would not be seen."""
    flag = "environment" if cfg.turns.environment else "tools"
    if not getattr(tokenizer, "chat_template", None):
        message = f"{flag}: the model's tokenizer has no chat template (a base model?), and turns are written by one. Use a chat model."
        raise ConfigError([Problem(flags=(flag, "model"), message=message)])
    from megatron_grpo.environments.loading import look_at, template_of

    template = template_of(cfg, environment, tokenizer, model_path=model_path)
    return look_at(template, environment, history=cfg.turns.turn_history, flag=flag)  # type: ignore[arg-type]  # one of its choices


@dataclass(frozen=True, slots=True)
class DataReader:
    """Reads the data sets of a run, as its model and its episodes need them."""

    cfg: Config
    tokenizer: Any
    sight: Sight
    environment: type[Environment] | None

    def read(self, held_out: str | None = None) -> PromptStream | PromptRows:
        """A stream of prompts; without a tokenizer its rows, which can be looked at all the same. held_out: name of a set."""
        from megatron_grpo.data.checks import check_for_episodes, check_pictures
        from megatron_grpo.data.prompts import load_rows, open_stream
        from megatron_grpo.data.streamed import open_prompts, rows_to_look_at
        from megatron_grpo.data.tokens import FEW

        cfg = self.cfg
        flag = "dataset" if held_out is None else flag_of(held_out, cfg)
        # Of a held-out set, all of which is asked, every row is read; of the training set maybe only as the run goes.
        named: dict[str, Any] = {} if held_out is None else {"dataset": sets_of(cfg)[held_out], "flag": flag}
        if not self.tokenizer:
            look = rows_to_look_at if held_out is None else load_rows
            rows = look(cfg.data, eyes=self.sight.eyes, is_blind=self.sight.is_blind, seed=cfg.run.seed, **named)
            check_pictures(rows, at_most=FEW)
            if self.environment is not None:
                check_for_episodes(rows, flag)
            return rows
        tools = None if self.environment is None else self.environment.tools
        if held_out is None:
            return open_prompts(cfg.data, self.tokenizer, seed=cfg.run.seed, eyes=self.sight.eyes, tools=tools)
        return open_stream(
            cfg.data, self.tokenizer, seed=0, shuffle=False, eyes=self.sight.eyes, tools=tools, data_seed=cfg.run.seed, **named
        )  # fmt: skip


def read_held_out(reader: DataReader, left_out: Collection[str], problems: Problems) -> dict[str, PromptStream | PromptRows]:
    names = [name for name in sets_of(reader.cfg) if part_of(name) not in left_out]
    read = {name: problems.attempt(partial(reader.read, name)) for name in names}
    return {name: found for name, found in read.items() if found is not None}


def part_of(name: str) -> str:
    """What stands for a held-out set among the parts that are left out."""
    return f"held-out set {name}"


def rows_of(prompts: PromptStream | PromptRows | None) -> PromptRows | None:
    if prompts is None:
        return None
    from megatron_grpo.data.prompts import PromptStream

    return prompts.rows if isinstance(prompts, PromptStream) else prompts


def look_at_rows(
    cfg: Config, shape: ModelShape | None, rewards: list[RewardFunction], looked: list[tuple[str, PromptRows]], problems: Problems
) -> None:
    """Whether rewards find their columns in every set, and prompts their place in the model. looked: (setting, rows)."""
    for flag, rows in looked:
        if rows.album is not None:
            from megatron_grpo.data.checks import check_without_pictures

            for why in _blind(cfg):
                problems.attempt(partial(check_without_pictures, rows, flag, why))
        if rewards:
            problems.attempt(partial(find_columns, cfg, rewards, rows, flag))
        if shape:
            problems.add(_lengths_of_data(cfg, shape, rows, flag))


def _blind(cfg: Config) -> Iterator[str]:
    """What was asked for that cannot be with pictures."""
    if cfg.rollout.rollout_func is not None:
        yield "rollout_func does not go with them: what it returns has no place for pictures"
    if flag := cfg.grpo.teacher_flag:
        yield f"{flag} does not go with them: a teacher is shown text alone"


_EPISODE_COLUMNS = ("messages", "turn_rewards", "num_turns", "ended")  # that reward functions get of an episode, by these names


def find_columns(cfg: Config, rewards: list[RewardFunction], rows: PromptRows, flag: str) -> None:
    """`check_columns`, of the columns of the data and of episodes. Raises ConfigError, also where a name means both."""
    if cfg.rollout.rollout_func is not None:  # which may give them columns that nobody knows yet
        return
    names, of_episodes = rows.column_names(), _EPISODE_COLUMNS if cfg.turns.plays else ()
    if both := [name for name in names if name in of_episodes]:
        message = f"{flag} has the column {', '.join(both)}, and rewards get that name of an episode. Give the column another one."
        raise ConfigError([Problem(flags=(flag,), message=message)])
    without = lambda wanted: "" if set(wanted).intersection(of_episodes) else rows.without(wanted)  # noqa: E731
    check_columns(rewards, (*names, *of_episodes), flag=flag, without=without)


def _lengths_of_data(cfg: Config, shape: ModelShape, rows: PromptRows, flag: str) -> list[Problem]:
    """Sequences too long for the model, where only the data tells how long they are: `planning.check` judges what is set."""
    longest = longest_completion(cfg)
    if cfg.data.max_prompt_length is not None or rows.longest_prompt is None or length_problems(shape, 1 + longest):
        return []
    return length_problems(shape, rows.longest_prompt + longest, flags=(flag, "max_completion_length"))


def servers_that_answer(cfg: Config, shape: ModelShape, longest_prompt: int, eyes: Eyes | None, most_pictures: int) -> list[Problem]:
    """Of rollout servers that answer already. The rank that will speak to them looks; the others may have no way to them."""
    from megatron_grpo.rollout.adapters import lora_push
    from megatron_grpo.servers.fleet import needs_of, problems_with_servers

    lora = lora_push(cfg, shape, on_gpu=None)
    return problems_with_servers(cfg, needs_of(cfg, shape, longest_prompt, lora, eyes=eyes, most_pictures=most_pictures))


def needs_of_teacher(cfg: Config, shape: ModelShape, tokenizer: Any, longest_prompt: int) -> TeacherNeeds:
    """What a teacher's servers must have. longest_prompt: of the data, in tokens."""
    from megatron_grpo.data.chat import vocabulary_of
    from megatron_grpo.servers.teachers import Needs

    longest = longest_prompt + cfg.rollout.max_completion_length
    if cfg.turns.environment or cfg.rollout.rollout_func:  # may begin with more than the data's prompt: as long as the sampler has room for
        given = cfg.rollout.vllm_max_model_len if cfg.rollout.rollout_func else None
        longest = given or longest_prompt + longest_completion(cfg)
    return Needs(max_model_len=longest + 1, vocabulary=vocabulary_of(tokenizer), vocab_size=shape.vocab_size)


def teachers_that_answer(cfg: Config, shape: ModelShape, tokenizer: Any, longest_prompt: int) -> list[Problem]:
    """What is wrong with servers of a teacher that answer already. The rank that will speak to them looks."""
    from megatron_grpo.servers.teachers import Teacher

    return Teacher.build(cfg, needs_of_teacher(cfg, shape, tokenizer, longest_prompt)).problems()
