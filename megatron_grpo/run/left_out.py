"""Parts that `plan` does not check, with the reason for each. No inputs and no network are needed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megatron_grpo.base import given
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import flag_of, sets_of
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.data.files import plain_name
from megatron_grpo.data.hub import is_path
from megatron_grpo.rewards.loading import may_be_here
from megatron_grpo.run.inputs import ADAPTERS, part_of

Absent = Iterator[tuple[str, str]]  # (name of one of `inputs.PARTS`, or a reward; text). Of two about one part the later one holds.


def left_out_of_plan(cfg: Config) -> dict[str, str]:
    """Return {part of `inputs.PARTS`, or a reward: what is not checked and why}."""
    return dict(_absent(cfg))


def _absent(cfg: Config) -> Absent:
    yield "machine", "this machine's GPUs and memory, and whether output_dir can be written"
    yield "tokenizer", "the tokenizer (chat template, prompt lengths in tokens)"
    if cfg.rollout.vllm_mode == "server":
        yield "servers", "the rollout servers (whether they answer, whose they are, how long their sequences may be)"
    yield from _of_teacher(cfg)
    yield from _of_model(cfg)
    yield from _elsewhere(cfg)
    if not cfg.data.dataset:
        yield "dataset", "the data set (none given)"
    if not cfg.rewards.reward_funcs:
        yield from _of_teacher(cfg) if cfg.grpo.teacher_flag else [("rewards", "reward functions (none given)")]
    if _is_guest(cfg, "report_to"):
        yield "report_to", f"whether {' and '.join(cfg.run.report_to)} can be reported to"
    for part, flag, spec in user_code(cfg):
        if why := _not_loaded(cfg, flag, spec):
            yield spec if part == "reward" else part, f"the {part} {spec} ({why})"
    if cfg.turns.tools and find_spec("transformers") is None:
        yield "environment", "the tools (transformers, which describes them to the model, is not installed)"


def _of_teacher(cfg: Config) -> Absent:
    named = Path(cfg.grpo.teacher_model or "")
    if cfg.grpo.teacher_model_server:
        yield "teacher", "the teacher's servers (whether they answer, and whether they have the model's vocabulary)"
    elif not cfg.grpo.teacher_model:
        return
    elif named.is_file() and named.suffix == ".json":
        yield "teacher_model", f"the teacher's weights ({named} is its configuration)"
    elif _is_configuration_alone(named):
        yield "teacher_model", f"the teacher's weights ({named} holds its configuration alone)"
    else:
        yield "vocabulary of the teacher", "whether the teacher has the model's vocabulary"


def _of_model(cfg: Config) -> Absent:
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


def _elsewhere(cfg: Config) -> Absent:
    """Yield what may exist only on the machine of the run: names on the Hub, and paths in another system's configuration."""
    sets = [("dataset", "dataset", cfg.data.dataset), *((part_of(name), flag_of(name, cfg), at) for name, at in sets_of(cfg).items())]
    sets += [("dataset", "dataset", name) for name in cfg.data.further_datasets]
    named = [(part, flag, plain_name(where), f"the rows of {flag}") for part, flag, where in sets]
    if _is_guest(cfg, "mcore_model"):
        named.append(("mcore_model", "mcore_model", cfg.run.mcore_model or "", "the weights to begin with"))
    named.append(("ref_model", "ref_model", cfg.grpo.ref_model or "", "the reference model"))
    named.append(("teacher_model", "teacher_model", cfg.grpo.teacher_model or "", "the teacher"))
    if "reward_model" in cfg.rewards.reward_funcs:
        named.append(("reward_model", "reward_model", cfg.rewards.reward_model or "", "the classifier of the reward reward_model"))
    for part, flag, where, what in named:
        is_word = flag in ("ref_model", "teacher_model") and "/" not in where and not _is_guest(cfg, flag)  # not a repository's name
        if _is_elsewhere(cfg, flag, where) and not is_word:
            yield part, f"{what} ({where} is not on this machine)"


def user_code(cfg: Config) -> list[tuple[str, str, str]]:
    """Return (part, setting, file:name) for all user code that validation imports."""
    turns = [("environment", "environment", cfg.turns.environment), *(("environment", "tools", spec) for spec in cfg.turns.tools)]
    code = [*(("reward", "reward_funcs", spec) for spec in cfg.rewards.reward_funcs), *turns]
    return [
        (part, flag, spec) for part, flag, spec in (*code, ("rollout_func",) * 2 + (cfg.rollout.rollout_func,)) if spec and _is_file(spec)
    ]


def _is_file(spec: str) -> bool:
    """Return whether an entry names a function of a file or module, not a built-in and not an object of a program."""
    return ":" in spec and not given.is_given(spec)


def _not_loaded(cfg: Config, flag: str, spec: str) -> str:
    """Return why `plan` does not load the code that another system's configuration names; "" if it does."""
    if not _is_guest(cfg, flag):
        return ""
    if Path(spec.rpartition(":")[0]).name == cfg.sources[flag]:
        return f"{cfg.sources[flag]} is read, not run"
    return "" if may_be_here(spec) else "not on this machine"


def _is_guest(cfg: Config, name: str) -> bool:
    """Return whether a setting comes from another system's configuration file, which was written for another machine."""
    return cfg.plan.dialect is not None and cfg.sources.get(name, "default") not in (COMMAND_LINE, "default")


def _is_elsewhere(cfg: Config, name: str, value: str | None) -> bool:
    if not value:
        return False
    return not given.is_given(value) and not Path(value).exists() and (_is_guest(cfg, name) or not is_path(value))
