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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base import launcher
from megatron_grpo.base.errors import ConfigError
from megatron_grpo.config import Parsed, remote_code
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import flag_of, sets_of
from megatron_grpo.config.optimizer import length_problems
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.data.chat import load_tokenizer, unread_options
from megatron_grpo.data.files import plain_name
from megatron_grpo.data.hub import find_model, is_path
from megatron_grpo.planning.check import Checked, check_parsed
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.planning.pictures import PictureFacts, learns_nothing
from megatron_grpo.rewards.loading import close_rewards, load_rewards, may_be_here
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.rollout.grammar import unreadable
from megatron_grpo.run.sources import (
    ADAPTERS,
    UNKNOWN,
    DataReader,
    Problems,
    bases_of_adapters,
    environment_of,
    find_reference,
    find_teacher,
    look_at_rows,
    look_at_template,
    part_of,
    read_held_out,
    rollout_func_of,
    rows_of,
    servers_that_answer,
    sight_of,
    teachers_that_answer,
    weights_to_begin_with,
)
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.stored import stored_names

if TYPE_CHECKING:
    from megatron_grpo.checkpoint.resume import Resume
    from megatron_grpo.data.eyes import Eyes
    from megatron_grpo.data.prompts import PromptRows, PromptStream
    from megatron_grpo.environments.protocol import Environment


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
    ref_model_path: Path | None  # where the reference is not the model as it begins
    teacher_path: Path | None  # of a teacher that the training ranks hold

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
    ref_model_path: Path | None = None
    teacher_path: Path | None = None


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
    absent = {flag: None for flag in ADAPTERS if flag in left_out}
    parsed = replace(parsed, config=parsed.config.with_values(absent))
    if imports := [spec for part, _, spec in _user_code(parsed.config) if not {part, spec} & set(left_out)]:
        print(f"plan imports {', '.join(imports)}, and so runs what stands at the top of these files.", file=sys.stderr)
    with redirect_stdout(sys.stderr):  # a reward function's file may print as it is loaded, and stdout is for the plan
        made, found, _ = _look_at(parsed, left_out)
    close_rewards(found.rewards)
    if made.checked.shape is None and (model := parsed.config.model.model):
        said = f"{model} is not on this machine, so that nobody looked at it: train says whether its architecture can be trained here."
        made = replace(made, warnings=[said, *made.warnings])
    return replace(made, not_checked=tuple(left_out.values()))


def _left_out(cfg: Config) -> dict[str, str]:
    """What `plan` does not look at, by part, each as it is told. It needs neither inputs nor a network, and answers at once."""
    model, rewards = cfg.model.model, cfg.rewards
    machine = "this machine's GPUs and memory, and whether output_dir can be written"
    parts = {"machine": machine, "tokenizer": "the tokenizer (chat template, prompt lengths in tokens)"}
    if cfg.rollout.vllm_mode == "server":
        parts |= {"servers": "the rollout servers (whether they answer, whose they are, how long their sequences may be)"}
    parts |= _left_out_of_teacher(cfg)
    if not model:
        parts |= {"model": "the model (none given)"}
    elif (Path(model).is_file() and model.endswith(".json")) or _is_elsewhere(cfg, "model", model):
        parts |= {"model": f"the model's weights ({model} is {'its configuration' if Path(model).is_file() else 'not on this machine'})"}
    elif Path(model).is_dir() and not any(Path(model).glob("*.safetensors*")) and not any(Path(model).glob("tokenizer*")):
        parts |= {"weights": f"the model's weights ({model} holds its configuration alone)"}
    for flag in ADAPTERS:
        directory = getattr(cfg.tuner, flag)
        if directory and _is_guest(cfg, flag) and not Path(directory).exists():
            parts |= {flag: f"{flag} ({directory} is not on this machine): ranks and targets are taken from the settings"}
    sets = [("dataset", "dataset", cfg.data.dataset), *((part_of(name), flag_of(name, cfg), at) for name, at in sets_of(cfg).items())]
    sets += [("dataset", "dataset", name) for name in cfg.data.further_datasets]
    named = [(part, flag, plain_name(where), f"the rows of {flag}") for part, flag, where in sets]
    begins = cfg.run.mcore_model if _is_guest(cfg, "mcore_model") else None
    named.append(("mcore_model", "mcore_model", begins or "", "the weights to begin with"))
    named.append(("ref_model", "ref_model", cfg.grpo.ref_model or "", "the reference model"))
    named.append(("teacher_model", "teacher_model", cfg.grpo.teacher_model or "", "the teacher"))
    if "reward_model" in rewards.reward_funcs:
        named.append(("reward_model", "reward_model", rewards.reward_model or "", "the classifier of the reward reward_model"))
    for part, flag, where, what in named:
        is_word = flag in ("ref_model", "teacher_model") and "/" not in where and not _is_guest(cfg, flag)  # which no repository is called
        if _is_elsewhere(cfg, flag, where) and not is_word:
            parts |= {part: f"{what} ({where} is not on this machine)"}
    if not cfg.data.dataset:
        parts |= {"dataset": "the data set (none given)"}
    if not rewards.reward_funcs:
        parts |= _left_out_of_teacher(cfg) or {"rewards": "reward functions (none given)"}
    if _is_guest(cfg, "report_to"):
        parts |= {"report_to": f"whether {' and '.join(cfg.run.report_to)} can be reported to"}
    return parts | _left_out_of_code(cfg)


def _left_out_of_code(cfg: Config) -> dict[str, str]:
    parts = {
        spec if part == "reward" else part: f"the {part} {spec} ({why})"
        for part, flag, spec in _user_code(cfg)
        if (why := _not_loaded(cfg, flag, spec))
    }
    if cfg.turns.tools and find_spec("transformers") is None:
        parts |= {"environment": "the tools (transformers, which describes them to the model, is not installed)"}
    return parts


def _user_code(cfg: Config) -> list[tuple[str, str, str]]:
    """(part, setting, file:name) of all that is imported to be looked at."""
    turns = [("environment", "environment", cfg.turns.environment), *(("environment", "tools", spec) for spec in cfg.turns.tools)]
    code = [*(("reward", "reward_funcs", spec) for spec in cfg.rewards.reward_funcs), *turns]
    return [(part, flag, spec) for part, flag, spec in (*code, ("rollout_func",) * 2 + (cfg.rollout.rollout_func,)) if spec and ":" in spec]


def _not_loaded(cfg: Config, flag: str, spec: str) -> str:
    """Why `plan` does not load what a foreign file names; empty where it does."""
    if not _is_guest(cfg, flag):
        return ""
    if Path(spec.rpartition(":")[0]).name == cfg.sources[flag]:
        return f"{cfg.sources[flag]} is read, not run"
    return "" if may_be_here(spec) else "not on this machine"


def _left_out_of_teacher(cfg: Config) -> dict[str, str]:
    told = "the teacher's servers (whether they answer, and whether they have the model's vocabulary)"
    if cfg.grpo.teacher_model_server:
        return {"teacher": told}
    if not cfg.grpo.teacher_model:
        return {}
    named = Path(cfg.grpo.teacher_model)
    if named.is_file() and named.suffix == ".json":
        return {"teacher_model": f"the teacher's weights ({named} is its configuration)"}
    if named.is_dir() and not any(named.glob("*.safetensors*")) and not any(named.glob("tokenizer*")):
        return {"teacher_model": f"the teacher's weights ({named} holds its configuration alone)"}
    return {"vocabulary of the teacher": "whether the teacher has the model's vocabulary"}


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
    paths |= {flag: getattr(cfg.tuner, flag) for flag in ADAPTERS}
    if cfg.run.mcore_model:
        from megatron_grpo.checkpoint.resume import resolved

        paths["mcore_model"] = resolved(cfg.run.mcore_model)
    return {name: str(Path(path).absolute()) for name, path in paths.items() if path not in (None, "auto", "never")}


def _unreadable(parsed: Parsed) -> set[str]:
    """What the command line names in a way that cannot be read, by part: that is said, and there is nothing to look at."""
    of_parts = {"model": ("model", "tokenizer", "weights"), "reward_funcs": ("rewards",)}
    return {part for name in parsed.unreadable for part in of_parts.get(name, (name,))}


def _look_at(parsed: Parsed, left_out: Collection[str]) -> tuple[Plan, Found, Resume | None]:
    """Settings first, then what they name, then whether the two go together."""
    problems, paths = Problems(), _absolute_paths(parsed.config)
    checked = problems.attempt(lambda: check_parsed(parsed))
    if not _begins_anew(parsed.config):
        from megatron_grpo.checkpoint.resume import find_checkpoints

        run = parsed.config.run
        problems.attempt(partial(find_checkpoints, run.output_dir, run.resume, overwrites=run.overwrite_output_dir))
    found = problems.attempt(lambda: read_inputs(parsed.config, {*left_out, *_unreadable(parsed)}))
    both: tuple[Plan, Resume | None] | None = None
    if checked is not None and found is not None and not problems:
        both = problems.attempt(lambda: _plan_of(parsed, checked, found, paths, is_asked_to_train="machine" not in left_out))
    if problems or found is None or both is None:
        close_rewards(found.rewards if found is not None else [])
        raise ConfigError(problems)
    made, resume = both
    return made, found, resume


def _plan_of(
    parsed: Parsed, checked: Checked, found: Found, paths: Mapping[str, str], *, is_asked_to_train: bool
) -> tuple[Plan, Resume | None]:
    fetched: dict[str, str] = {}  # Hub names, whose config.json has only now come
    if checked.shape is None and found.model_path is not None:
        fetched["model"] = str(found.model_path)
    if checked.teacher is None and found.teacher_path is not None:
        fetched["teacher_model"] = str(found.teacher_path)
    if fetched:
        here = check_parsed(replace(parsed, config=parsed.config.with_values(fetched)))
        typed = {"model": parsed.config.model.model, "teacher_model": parsed.config.grpo.teacher_model}
        checked = replace(here, config=here.config.with_values(typed))
    checked = replace(checked, config=checked.config.with_values(paths))
    rows = rows_of(found.prompts)
    pictures = PictureFacts.of(rows, checked.sizes) if rows is not None else None
    made = make_plan(checked, num_prompts=None if rows is None or rows.is_beginning else len(rows), pictures=pictures)
    checked = made.checked
    if problems := length_problems(checked.config.optimizer, made.timetable.num_steps):
        raise ConfigError(problems)
    if rows is not None and found.eyes is not None and not rows.most_pictures and checked.shape is not None:
        made = replace(made, warnings=[*made.warnings, *learns_nothing(checked.config, checked.shape)])
    if not is_asked_to_train and found.model_path and checked.config.model.trust_remote_code:  # who trains hears it as it runs
        made = replace(made, warnings=[*made.warnings, *filter(None, [remote_code.warning_of(found.model_path)])])
    if _begins_anew(checked.config) and not is_asked_to_train:
        return made, None
    from megatron_grpo.checkpoint.content import content_of
    from megatron_grpo.checkpoint.resume import judge_resume
    from megatron_grpo.data.prompts import PromptStream

    stream = found.prompts if isinstance(found.prompts, PromptStream) else None
    if stream is not None and checked.config.data.dataset_drop_last:
        stream.whole = checked.sizes.num_rollout_prompts
    content = content_of(checked.config, model_path=found.model_path, rows=rows, teacher_path=found.teacher_path)
    return made, judge_resume(checked.config, made.timetable, content, stream)


def _begins_anew(cfg: Config) -> bool:
    """Nothing lies where the run would write, and nothing is in its way. Then `plan` has nothing to judge, and answers at once."""
    out = Path(cfg.run.output_dir)
    nearest = next((path for path in (out, *out.absolute().parents) if path.exists()), out)
    return cfg.run.resume in ("auto", "never") and nearest != out and nearest.is_dir()


def read_inputs(cfg: Config, left_out: Collection[str] = ()) -> Found:
    """Reads model shape, data and rewards. Raises ConfigError with the problems of all of them at once.

    left_out: of the names in `_left_out`. The user's own code runs last: it may change the directory.
    """
    problems, trusts = Problems(), cfg.model.trust_remote_code
    if "report_to" not in left_out:
        problems.attempt(partial(check_report_to, cfg))
    shape = tokenizer = None
    model_path = None if "model" in left_out else problems.attempt(lambda: find_model(cfg.model.model, with_code=trusts))
    if model_path:
        problems.add([*filter(None, [remote_code.problem_of(model_path, is_trusted=trusts)])])
        shape = problems.attempt(partial(ModelShape.from_pretrained, model_path))
    if cfg.run.mcore_model and "mcore_model" not in left_out:
        problems.add(problems.attempt(partial(weights_to_begin_with, cfg, model_path)) or [])
    if model_path and shape and "weights" not in left_out:
        problems.attempt(partial(stored_names, model_path))
    problems.add(unreadable(cfg))
    if model_path and shape and cfg.tuner.tuner_type == "lora":
        problems.add(bases_of_adapters(cfg, model_path))
    if shape and "tokenizer" not in left_out:
        tokenizer = problems.attempt(partial(load_tokenizer, str(model_path), trust_remote_code=trusts))
    if tokenizer is not None:
        problems.add(unread_options(tokenizer, cfg.data.chat_template_kwargs))
    ref_model_path = None
    if cfg.grpo.ref_model and "ref_model" not in left_out:
        ref_model_path = problems.attempt(lambda: find_reference(cfg.grpo.ref_model or "", model_path, shape))
    teacher_path = None
    if cfg.grpo.teacher_model and "teacher_model" not in left_out:
        teacher_path = problems.attempt(partial(find_teacher, cfg, tokenizer))
    sight = (problems.attempt(lambda: sight_of(cfg, model_path, left_out)) if model_path and shape else None) or UNKNOWN
    environment = None if "environment" in left_out else problems.attempt(partial(environment_of, cfg, tokenizer))
    notes: Sequence[str] = ()
    if environment and tokenizer and model_path:
        notes = problems.attempt(partial(look_at_template, cfg, environment, tokenizer, model_path)) or ()
    reader = DataReader(cfg, tokenizer, sight, environment)
    prompts = None if "dataset" in left_out else problems.attempt(reader.read)
    held_out = read_held_out(reader, left_out, problems)
    rewards = [] if "rewards" in left_out else problems.attempt(partial(load_rewards, cfg, left_out=left_out))
    own = None if "rollout_func" in left_out or not cfg.rollout.rollout_func else problems.attempt(partial(rollout_func_of, cfg))
    every = [("dataset", prompts), *((flag_of(name, cfg), found) for name, found in held_out.items())]
    looked = [(flag, rows) for flag, found in every if (rows := rows_of(found))]
    look_at_rows(cfg, shape if tokenizer else None, rewards or [], looked, problems)
    longest = max((rows.longest_prompt or 0 for _, rows in looked), default=0)
    if cfg.rollout.vllm_mode == "server" and shape and "servers" not in left_out and launcher.read().rank == 0:
        most = max((rows.most_pictures for _, rows in looked), default=0)
        problems.add(problems.attempt(partial(servers_that_answer, cfg, shape, longest, sight.eyes, most)) or [])
    if cfg.grpo.teacher_model_server and shape and tokenizer is not None and "teacher" not in left_out and launcher.read().rank == 0:
        problems.add(problems.attempt(partial(teachers_that_answer, cfg, shape, tokenizer, longest)) or [])
    if problems or rewards is None:
        close_rewards(rewards or [])
        raise ConfigError(problems)
    return Found(
        model_path=model_path, shape=shape, prompts=prompts, held_out=held_out, rewards=rewards, environment=environment,
        rollout_func=own, notes=notes, eyes=sight.eyes, ref_model_path=ref_model_path,
        teacher_path=teacher_path,
    )  # fmt: skip


def read_to_evaluate(cfg: Config) -> Looked:
    """For `eval`: model, held-out sets and rewards. Raises ConfigError with the problems of all of them at once."""
    found = read_inputs(cfg, ("dataset", "report_to", "servers", "teacher", "ref_model", "teacher_model"))
    return Looked(**{field.name: getattr(found, field.name) for field in fields(Looked)})


def check_report_to(cfg: Config) -> None:
    """Services that are known and installed."""
    if set(cfg.run.report_to) <= {"none"}:
        return
    from megatron_grpo.metrics import report_to_problems

    if problems := report_to_problems(cfg.run.report_to):
        raise ConfigError(problems)
