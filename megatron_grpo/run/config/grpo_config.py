"""`GRPOConfig`: the settings of a run as one typed dataclass, for Python programs. No torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megatron_grpo.core import settings as step
from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.run.config import settings as run
from megatron_grpo.run.config.table import canonical, close_to, names


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """Other names of settings, with the same types and defaults, so that editors and type checkers know them."""

    adam_epsilon: float = 1e-8
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    dual_clip: float | None = None
    exit_duration_in_mins: float | None = None
    ft_rank_heartbeat_timeout: float = 300.0
    grad_norm_skip_threshold: float | None = None
    learning_rate: float = 1e-6
    load: str = ""
    lora_r: int = 8
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    lr_scheduler_type: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    make_vocab_size_divisible_by: int = 128
    mask_truncated_completions: bool = False
    max_epochs: float | None = None
    max_grad_norm: float = 1.0
    model_name_or_path: str = ""
    num_processes: int | None = None
    off_policy_mask_threshold: float | None = None
    resume_from_checkpoint: str = "auto"
    save: str = "output"
    save_interval: int = 0
    skip_grad_norm_threshold: float | None = None
    stop_words: list[str] = field(default_factory=list)
    structured_outputs_regex: str | None = None
    swanlab_exp_name: str | None = None
    swanlab_project: str | None = None
    tau_neg: float = 1.05
    tau_pos: float = 1.0
    train_iters: int | None = None
    train_type: Literal["full", "lora"] = "full"
    vllm_guided_decoding_regex: str | None = None
    wandb_exp_name: str | None = None
    wandb_project: str | None = None
    warmup_ratio: float | None = None
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class GRPOConfig(
    Aliases, run.PlanConfig, run.EvalConfig, run.RunConfig, step.OptimizerConfig, step.GrpoConfig, run.RewardConfig,
    run.TurnsConfig, step.RolloutConfig, run.DataConfig, step.BatchConfig, step.KernelConfig, step.ParallelConfig,
    step.TunerConfig, step.ModelConfig,
):  # fmt: skip
    """Settings of a run: every setting of `megatron-grpo train --help`, and its aliases, as a keyword.

    `megatron-grpo train --help NAME` explains a setting, with its unit. Names are checked at once; values when a run is planned or started.
    With `dialect`, names of that system are accepted as well. A setting can be assigned (`args.learning_rate = 1e-5`) until `train` is
    called, and `dataclasses.replace` works.

    Args:
        explicit: Leave it out: settings that were passed or assigned, which `dataclasses.replace` copies.

    Raises:
        ConfigError: If a name is not a setting.
    """

    explicit: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in self.explicit.items())})"


_FIELDS = {field.name for field in fields(GRPOConfig)} - {"explicit"}
_set_fields = GRPOConfig.__init__


def _all_names(name: str) -> set[str]:
    """Return every name of the setting that has this name; the name alone if no setting has it."""
    setting = names().get(canonical(name))
    return {setting.name, *setting.aliases} if setting else {name}


@functools.wraps(_set_fields)
def _init(self: GRPOConfig, **settings: Any) -> None:
    if "explicit" in settings:  # dataclasses.replace, which passes every field
        settings = _replaced(settings.pop("explicit"), settings)
    field_names = {name: _all_names(name) & _FIELDS for name in settings}
    unknown = [] if settings.get("dialect") else [name for name, fields_named in field_names.items() if not fields_named]
    if unknown:
        raise ConfigError([_unknown(name) for name in unknown])
    values = {field: settings[name] for name, fields_named in field_names.items() for field in fields_named}
    _set_fields(self, **values, explicit=settings)


def _replaced(old_settings: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explicit settings after `dataclasses.replace`: those of before, and those that differ from them."""
    old_config = GRPOConfig(**old_settings)
    changed = {name: value for name, value in settings.items() if name not in _FIELDS or value != getattr(old_config, name)}
    hidden = {name_hidden for name in changed for name_hidden in _all_names(name)}
    return {name: value for name, value in old_settings.items() if name not in hidden} | changed


def _unknown(name: str) -> Problem:
    close = close_to(name, sorted(_FIELDS), limit=1)
    hint = f" Did you mean {close[0]}?" if close else " `megatron-grpo train --help` lists all settings."
    return Problem(flags=(name,), message=f"{name} is not a setting of train.{hint}")


def _assign(self: GRPOConfig, name: str, value: Any) -> None:
    """Change one setting, as users of TRL do, and remember that it is explicit."""
    self.__dict__.update(vars(replace(self, **{name: value})))


# Set afterwards: a dataclass that inherits frozen ones must be frozen itself, and editors read the generated signature.
GRPOConfig.__init__ = _init  # type: ignore[method-assign]
GRPOConfig.__setattr__ = _assign  # type: ignore[method-assign, assignment]
