"""The command `megatron-grpo referee DUMP --of trl --config train.py`: compares a step of another system with the reference."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.commands.analysis.printing import print_report, table_lines
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError, config_error, problem_with
from megatron_grpo.core.base.files import plot_obstacle
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.read import split_flags
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import InvalidValueError, read_value, table
from megatron_grpo_referee.dump import SYSTEMS, Dump, refusal
from megatron_grpo_referee.findings import Finding, findings, first_different, incomplete_groups

EXIT_DIFFERENT = 3
OWN = ("--of", "--step", "--weights")
IN_DUMP = "loss_scale_factor"  # setting of verl that the hook writes


def run_referee(argv: Sequence[str], parse: Callable[[Sequence[str]], ParsedConfig]) -> int:
    """Run the `referee` command and print its findings.

    Args:
        parse: Parses settings, in the names of the system that `--dialect` names.

    Returns:
        The exit code: 0 if nothing differs beyond rounding, 3 if something does.

    Raises:
        ConfigError: With all problems of the command line, the settings and the dump.
    """
    path, system, step, weights, rest = _read(argv)
    reader = import_module(f"megatron_grpo_referee.{system}")
    parsed = parse([*SYSTEMS[system]["words"], *rest])
    png = parsed.config.plan.png
    s = read_step_settings(parsed.config)
    s.weights = weights
    # Settings that do not affect the numbers of a step, such as the sampler's, may be unsupported here.
    typed = {word.lstrip("-+").partition("=")[0].replace("-", "_") for word in rest}
    needed = {"dialect", "config", *vars(s), *(name for name in typed if not name.endswith(IN_DUMP))}
    decides = [flag for one in parsed.problems for flag in one.flags if any(re.match(name, flag) for name in SYSTEMS[system]["decides"])]
    aside = [one for one in parsed.problems if one.flags and not {*needed, *decides} & {*one.flags}]
    problems = [one for one in parsed.problems if one not in aside]
    problems += [problem_with("png", f"png: {wrong}")] if png and (wrong := plot_obstacle(Path(png))) else []
    if problems:
        raise ConfigError(problems)
    dump: Dump = reader.read(path, step, s)
    for name in vars(s).keys() & dump.settings.keys() - parsed.config.typed.keys():
        setattr(s, name, _read_setting(name, dump.settings[name]))
    if s.use_adaptive_entropy:
        raise refusal("use_adaptive_entropy changes entropy_coef in each step: type false and the entropy_coef of this step.")
    found, lacks = findings(dump, s), [*dump.lacks, *(f"Not used here: {one}" for one in aside if IN_DUMP not in str(one))]
    if incomplete_groups(dump, s):
        lacks.append("The dump has parts of groups only (num_generations "
                     f"{s.num_generations}), so that its advantages are not recomputed. Dump all ranks of a whole rollout.")  # fmt: skip
    first = first_different(found)
    result = {
        "source": dump.source, "step": dump.step, "rows": len(dump.rollout), "micro_batches": len(dump.micro_batches), "ranks": dump.ranks,
        "findings": [asdict(one) | {"parts": one.is_different} for one in found], "first": first and first.quantity,
        "cause": first and first.cause, "lacks": lacks,
    }  # fmt: skip
    print_report(result, report_lines(dump, found, lacks), as_json=parsed.config.plan.json)
    if png:
        from megatron_grpo_referee.figure import draw

        print(draw(dump, found, Path(png)), file=sys.stderr if parsed.config.plan.json else sys.stdout, flush=True)
    return EXIT_DIFFERENT if first else EXIT_DONE


def _read(argv: Sequence[str]) -> tuple[Path, str, int | None, str | None, list[str]]:
    example = "megatron-grpo referee DUMP --of slime|verl|trl|swift|native [--config their_script_or_yaml]"
    if not argv or argv[0].startswith("-"):
        raise config_error("referee", f"referee needs a dump first: {example}")
    path, (typed_values, rest) = Path(argv[0]), split_flags(argv[1:], OWN)
    values = {name: typed[-1] for name, typed in typed_values.items() if typed}
    system, step = values.get("--of", ""), values.get("--step")
    if system not in SYSTEMS:
        raise refusal(f"--of ({system or 'nothing'}) must name the system that wrote the dump: {', '.join(SYSTEMS)}.")
    if step is not None and not step.isdecimal():
        raise refusal(f"--step ({step or 'nothing'}) must be the number of a step.")
    if not path.exists():
        raise refusal(f"{path} does not exist.")
    weights = values.get("--weights")
    if weights is not None and not (Path(weights) / "config.json").is_file():
        raise refusal(f"--weights ({weights}) must be the directory of a Hugging Face model (config.json).")
    return path, system, None if step is None else int(step), weights, rest


def _read_setting(name: str, value: Any) -> Any:
    """Validate a setting of a dump, which may be untrusted or come from another version."""
    setting = table()[name]
    try:
        return value if value == setting.default else read_value(setting, () if value == [] else value)
    except InvalidValueError as bad:
        raise refusal(f"{name} in the settings of the dump {bad}.") from None


def read_step_settings(cfg: Config) -> SimpleNamespace:
    """Return the settings that decide the numbers of a step."""
    return SimpleNamespace(
        **vars(cfg.grpo), num_generations=cfg.batch.num_generations, reward_weights=cfg.rewards.reward_weights,
        max_completion_length=cfg.rollout.max_completion_length, temperature=cfg.rollout.temperature,
        num_reward_funcs=len(cfg.rewards.reward_weights or cfg.rewards.reward_funcs), old_logprobs=cfg.batch.old_logprobs,
    )  # fmt: skip


def report_lines(dump: Dump, found: Sequence[Finding], lacks: Sequence[str]) -> list[str]:
    """Format the findings as a table."""
    where = "" if dump.step is None else f", step {dump.step}"
    lines = [f"{dump.source}{where}: {len(dump.rollout)} rows, {len(dump.micro_batches)} micro-batches, {dump.ranks} ranks.", ""]
    table = [("quantity", "theirs", "ours", "factor", "rows", "cause")]
    for one in found:
        factor = "-" if one.factor is None else f"{one.factor:.6g}"
        rows = f"{one.num_different}/{one.num_rows}" if one.row >= 0 else "step"
        table.append((one.quantity, f"{one.theirs:.7g}", f"{one.ours:.7g}", factor, rows, one.cause or "-"))
    lines += [*table_lines(table, (0, 5)), "", *lacks]
    first = first_different(found)
    if first is None:
        lines.append("Nothing differs by more than rounding." if found else "The dump has nothing that can be compared.")
    else:
        where = f", most in row {first.row}" if first.row >= 0 else ""
        lines.append(f"The first number that differs is {first.quantity}{where}: {first.cause}.")
        if first is not found[0]:
            lines.append(f"The numbers above it agree: look at the code that computes {first.quantity} from them.")
    return lines
