"""Validation for `train` and `plan`: settings, their inputs (`run.inputs`), `output_dir`, and the parts that `plan` does not check."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run import python_objects
from megatron_grpo.run.check import CheckedConfig, check_parsed
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.evaluation import find_set_flag, list_sets
from megatron_grpo.run.config.read import COMMAND_LINE
from megatron_grpo.run.config.rules.policy import sampler_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.write import absolute_paths
from megatron_grpo.run.data.chat import find_clock
from megatron_grpo.run.data.files import is_path, split_count
from megatron_grpo.run.inputs import ADAPTERS, Problems, ValidatedInputs, name_part, read_inputs
from megatron_grpo.run.rewards.loading import close_rewards, may_exist
from megatron_grpo.run.schedule import ScheduledRun, schedule_run

Absent = Iterator[tuple[str, str]]  # (name of one of `inputs.PARTS`, or a reward; text). Of two about one part the later one holds.


def find_unchecked_parts(cfg: Config) -> Absent:
    """Yield parts of `inputs.PARTS`, and rewards, that `plan` does not check, each with what is not checked and why."""
    yield "machine", "this machine's GPUs and memory, and whether output_dir can be written"
    yield "tokenizer", "the tokenizer (chat template, prompt lengths in tokens)"
    if cfg.rollout.vllm_mode == "server":
        yield "servers", "the rollout servers (whether they respond, their owner, their maximum sequence length)"
    yield from _find_absent_teacher(cfg)
    yield from _find_absent_model(cfg)
    yield from _parts_on_other_machines(cfg)
    if not cfg.data.dataset:
        yield "dataset", "the data set (none given)"
    if not cfg.rewards.reward_funcs:
        yield from _find_absent_teacher(cfg) if cfg.grpo.teacher_flag else [("rewards", "reward functions (none given)")]
    if _is_guest(cfg, "report_to"):
        yield "report_to", f"whether {' and '.join(cfg.run.report_to)} can be reported to"
    for part, flag, spec in user_code(cfg):
        if reason := _not_loaded(cfg, flag, spec):
            yield spec if part == "reward" else part, f"the {part} {spec} ({reason})"
    if cfg.turns.tools and find_spec("transformers") is None:
        yield "environment", "the tools (transformers, which describes them to the model, is not installed)"


def _find_absent_teacher(cfg: Config) -> Absent:
    path = Path(cfg.grpo.teacher_model or "")
    if cfg.grpo.teacher_model_server:
        yield "teacher", "the teacher's servers (whether they respond, and whether they have the model's vocabulary)"
    elif not cfg.grpo.teacher_model:
        return
    elif path.is_file() and path.suffix == ".json":
        yield "teacher_model", f"the teacher's weights ({path} is its configuration)"
    elif _is_configuration_alone(path):
        yield "teacher_model", f"the teacher's weights ({path} holds its configuration alone)"
    else:
        yield "vocabulary of the teacher", "whether the teacher has the model's vocabulary"


def _find_absent_model(cfg: Config) -> Absent:
    model = cfg.model.model
    if not model:
        yield "model", "the model (none given)"
    elif (Path(model).is_file() and model.endswith(".json")) or _is_elsewhere(cfg, "model", model):
        yield "model", f"the model's weights ({model} is {'its configuration' if Path(model).is_file() else 'not on this machine'})"
    elif _is_configuration_alone(Path(model)):
        yield "weights", f"the model's weights ({model} holds its configuration alone)"
    for flag in ADAPTERS:
        directory = getattr(cfg.tuner, flag)
        if directory and _is_guest(cfg, flag) and not Path(directory).exists():
            yield flag, f"{flag} ({directory} is not on this machine): ranks and targets are taken from the settings"


def _is_configuration_alone(model: Path) -> bool:
    return model.is_dir() and not any(model.glob("*.safetensors*")) and not any(model.glob("tokenizer*"))


def _parts_on_other_machines(cfg: Config) -> Absent:
    """Yield what may exist only on the machine of the run: names on the Hub, and paths in another system's configuration."""
    sets = [
        ("dataset", "dataset", cfg.data.dataset),
        *((name_part(name), find_set_flag(name, cfg), set_path) for name, set_path in list_sets(cfg).items()),
    ]
    sets += [("dataset", "dataset", name) for name in cfg.data.further_datasets]
    parts = [(part, flag, split_count(path)[0], f"the rows of {flag}") for part, flag, path in sets]
    if _is_guest(cfg, "mcore_model"):
        parts.append(("mcore_model", "mcore_model", cfg.run.mcore_model or "", "the weights to begin with"))
    parts.append(("ref_model", "ref_model", cfg.grpo.ref_model or "", "the reference model"))
    parts.append(("teacher_model", "teacher_model", cfg.grpo.teacher_model or "", "the teacher"))
    if "reward_model" in cfg.rewards.reward_funcs:
        parts.append(("reward_model", "reward_model", cfg.rewards.reward_model or "", "the classifier of the reward reward_model"))
    for part, flag, path, description in parts:
        is_word = flag in ("ref_model", "teacher_model") and "/" not in path and not _is_guest(cfg, flag)  # not a repository's name
        if _is_elsewhere(cfg, flag, path) and not is_word:
            yield part, f"{description} ({path} is not on this machine)"


def user_code(cfg: Config) -> list[tuple[str, str, str]]:
    """Return (part, setting, file:name) for all user code that validation imports."""
    turns = [("environment", "environment", cfg.turns.environment), *(("environment", "tools", spec) for spec in cfg.turns.tools)]
    turns += [("environment", flag, getattr(cfg.turns, flag)) for flag in ("agent", "agent_verdict")]
    code = [*(("reward", "reward_funcs", spec) for spec in cfg.rewards.reward_funcs), *turns]
    code.append(("rollout_func", "rollout_func", cfg.rollout.rollout_func))
    # neither built-in functions nor objects of a program
    return [(part, flag, spec) for part, flag, spec in code if spec and ":" in spec and not python_objects.is_given(spec)]


def _not_loaded(cfg: Config, flag: str, spec: str) -> str:
    """Return why `plan` does not load the code that another system's configuration names; "" if it does."""
    if not _is_guest(cfg, flag):
        return ""
    if Path(spec.rpartition(":")[0]).name == cfg.sources[flag]:
        return f"{cfg.sources[flag]} is read, not run"
    return "" if may_exist(spec) else "not on this machine"


def _is_guest(cfg: Config, name: str) -> bool:
    """Return whether a setting comes from another system's configuration file, which was written for another machine."""
    return cfg.plan.dialect is not None and cfg.sources.get(name, "default") not in (COMMAND_LINE, "default")


def _is_elsewhere(cfg: Config, name: str, value: str | None) -> bool:
    if not value:
        return False
    return not python_objects.is_given(value) and not Path(value).exists() and (_is_guest(cfg, name) or not is_path(value))


def load_inputs(parsed: ParsedConfig, *, has_sampler: bool = False) -> tuple[ScheduledRun, ValidatedInputs]:
    """Return the schedule and the inputs of a training run.

    Args:
        has_sampler: Whether a custom sampler replaces vLLM and the servers that the settings name.

    Raises:
        ConfigError: With all problems of settings and inputs.
    """
    return _validate(parsed, ("servers",) if has_sampler else (), is_asked_to_train=True, has_sampler=has_sampler)


def validate_run(parsed: ParsedConfig) -> tuple[ScheduledRun, ValidatedInputs, tuple[str, ...]]:
    """Return the schedule of a run, its inputs without rewards, and what was not checked, for the `plan` command.

    Raises:
        ConfigError: With all problems that `train` would report about what was checked.
    """
    left_out = dict(find_unchecked_parts(parsed.config))
    absent = {flag: None for flag in ADAPTERS if flag in left_out}
    parsed = replace(parsed, config=parsed.config.with_values(absent))
    if imports := [spec for part, _, spec in user_code(parsed.config) if not {part, spec} & set(left_out)]:
        print(f"plan imports {', '.join(imports)}, which executes the top-level code of these files.", file=sys.stderr)
    with redirect_stdout(sys.stderr):  # the file of a reward function may print when it is loaded, and stdout is for the plan
        run, inputs = _validate(parsed, left_out, is_asked_to_train=False)
    close_rewards(inputs.rewards)
    return run, inputs, tuple(left_out.values())


def _validate(
    parsed: ParsedConfig, left_out: Collection[str], *, is_asked_to_train: bool, has_sampler: bool = False
) -> tuple[ScheduledRun, ValidatedInputs]:
    """Validate the settings, then the inputs they name, then their combination."""
    problems, paths = Problems(), _absolute_paths(parsed.config)
    checked = problems.attempt(lambda: check_parsed(parsed))
    if not _begins_anew(parsed.config):
        from megatron_grpo.run.checkpoint.resume import find_checkpoints

        run_cfg = parsed.config.run
        problems.attempt(partial(find_checkpoints, run_cfg.output_dir, run_cfg.resume, overwrites=run_cfg.overwrite_output_dir))
    inputs = problems.attempt(lambda: read_inputs(parsed.config, {*left_out, *_unreadable(parsed)}))
    run = None
    if checked is not None and inputs is not None and not problems:
        run = problems.attempt(
            lambda: _schedule(parsed, checked, inputs, paths, is_asked_to_train=is_asked_to_train, has_sampler=has_sampler)
        )
    if inputs is None or run is None:
        close_rewards(inputs.rewards if inputs is not None else [])
        raise ConfigError(problems)
    return run, inputs


def _unreadable(parsed: ParsedConfig) -> set[str]:
    """Return the input parts to skip because a value on the command line could not be parsed, which is reported already."""
    parts_by_setting = {"model": ("model", "tokenizer", "weights"), "reward_funcs": ("rewards",)}
    return {part for name in parsed.unreadable for part in parts_by_setting.get(name, (name,))}


def _schedule(
    parsed: ParsedConfig,
    checked: CheckedConfig,
    inputs: ValidatedInputs,
    paths: Mapping[str, Any],
    *,
    is_asked_to_train: bool,
    has_sampler: bool,
) -> ScheduledRun:
    """Return the schedule of a run with these inputs, and set how the run begins in them."""
    fetched: dict[str, str] = {}  # Hub names whose config.json has been downloaded by now
    if checked.shape is None and inputs.model_path is not None:
        fetched["model"] = str(inputs.model_path)
    if checked.teacher is None and inputs.teacher_path is not None:
        fetched["teacher_model"] = str(inputs.teacher_path)
    if fetched:
        checked_here = check_parsed(replace(parsed, config=parsed.config.with_values(fetched)))
        typed_values = {"model": parsed.config.model.model, "teacher_model": parsed.config.grpo.teacher_model}
        checked = replace(checked_here, config=checked_here.config.with_values(typed_values))
    checked, rows = replace(checked, config=checked.config.with_values(paths)), inputs.rows
    if not has_sampler and checked.shape is not None and (problems := sampler_problems(checked.shape)):
        raise ConfigError(problems)
    run = schedule_run(checked, None if rows is None or rows.is_beginning else len(rows))
    cfg = run.checked.config
    if not is_asked_to_train and _begins_anew(cfg):
        return run
    from megatron_grpo.run.checkpoint.fingerprints import DAY, compute_fingerprints
    from megatron_grpo.run.checkpoint.resume import plan_resume

    if inputs.prompts is not None and cfg.data.dataset_drop_last:
        inputs.prompts.epoch_multiple = run.checked.sizes.num_rollout_prompts
    content = compute_fingerprints(cfg, model_path=inputs.model_path, rows=rows, teacher_path=inputs.teacher_path)
    if clock := find_clock(inputs.tokenizer):
        content[DAY] = clock.day
    inputs.resume = plan_resume(cfg, run.schedule, content, inputs.prompts)
    return run


def _begins_anew(cfg: Config) -> bool:
    """Return whether there is no output directory yet and nothing prevents creating it. Then `plan` need not judge a resume."""
    out = Path(cfg.run.output_dir)
    nearest = next((path for path in (out, *out.absolute().parents) if path.exists()), out)
    return cfg.run.resume in ("auto", "never") and nearest != out and nearest.is_dir()


def _absolute_paths(cfg: Config) -> dict[str, Any]:
    """Return, as absolute paths, the settings that are used or recorded after the user's code has run.

    That code may change the working directory.
    """
    existing = absolute_paths({name: value for section in cfg.groups().values() for name, value in vars(section).items()})
    paths = {"output_dir": cfg.run.output_dir, "resume": cfg.run.resume, "lengths": cfg.plan.lengths, "png": cfg.plan.png}
    paths |= {flag: getattr(cfg.tuner, flag) for flag in ADAPTERS}
    if cfg.run.mcore_model:
        from megatron_grpo.run.checkpoint.resume import checkpoint_path

        paths["mcore_model"] = checkpoint_path(cfg.run.mcore_model)
    return existing | {name: str(Path(path).absolute()) for name, path in paths.items() if path not in (None, "auto", "never")}
