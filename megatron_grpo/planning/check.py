"""The whole configuration, checked at once: what `train` and `plan` do before anything else. Neither torch nor the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.batching.dialects import DIALECTS
from megatron_grpo.batching.plan import BatchPlan, settle, size_problems
from megatron_grpo.batching.sizes import Model
from megatron_grpo.config import Config
from megatron_grpo.errors import ConfigError
from megatron_grpo.flags import Parsed, parse
from megatron_grpo.planning.model import read_model_config, shape_of
from megatron_grpo.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A configuration that passes, its sizes, and the model's config.json where it is at hand."""

    config: Config
    plan: BatchPlan
    hf_config: dict[str, Any] | None
    parsed: Parsed


def check(argv: Sequence[str], *, launcher_world_size: int | None = None) -> Checked:
    """Parse and check everything. Raises ConfigError with all that is wrong, in the user's words."""
    return check_parsed(parse(argv, launcher_world_size=launcher_world_size, dialects=DIALECTS))


def check_parsed(parsed: Parsed) -> Checked:
    cfg = parsed.config
    hf_config, model_problems = read_model_config(cfg.model.model)
    shape = shape_of(hf_config) if hf_config else Model()
    problems = [*parsed.problems, *validate(cfg, parsed.unreadable), *model_problems]
    problems += size_problems(cfg, shape, others_pass=not problems, unreadable=parsed.unreadable)
    if problems:
        raise ConfigError(problems)
    plan = BatchPlan.from_config(cfg, num_layers=shape.num_layers, num_experts=shape.num_experts,
                                 num_attention_heads=shape.num_attention_heads, num_query_groups=shape.num_query_groups)
    settle(cfg, plan)
    return Checked(config=cfg, plan=plan, hf_config=hf_config, parsed=parsed)
