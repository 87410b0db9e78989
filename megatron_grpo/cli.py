"""Command line `megatron-grpo <command>`.

The configuration is parsed and checked completely before anything that the command needs is imported.

Exit codes: 0 done; 2 the configuration is wrong and nothing was started; 3 interrupted and saved; 1 anything else.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_grpo import __version__
from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.cleanup import die_with_parent, without_gc
from megatron_grpo.core.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, Problem
from megatron_grpo.run import jobs
from megatron_grpo.run.terminal import replace_unencodable

if TYPE_CHECKING:
    from megatron_grpo.run.config import ParsedConfig
    from megatron_grpo.run.config.parse import FrameworkNames
    from megatron_grpo.run.config.settings import Config

# The commands, in the order of --help. `run`: the function. `takes`: its arguments in order, by the names in `_arguments`. `needs`: linux;
# launcher (may run as ranks); files (LEAST_FILES open files); quiet (libraries print nothing). `usage` and `help`: what --help shows; the
# first line of `help` is that of the overview.
COMMANDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LEAST_FILES = 128  # files that a process must be allowed to open: a rank that trains a tiny model and samples opens about 160


def _by_need(function: str) -> Any:
    """Return a method that imports the function `module:name`, below `commands`, when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _imported(f"megatron_grpo.commands.{function}")(*args, **kwargs)

    return staticmethod(call)


class Analysis:
    """Implementation of `run.assemble.AnalysisHooks` that imports each analysis tool when it is used."""

    replica_check = _by_need("analysis.replica_check:ReplicaCheck")
    step_dumps = _by_need("analysis.step_dump:StepDumps")
    bitwise_parity = _by_need("analysis.bitwise_parity:switch_on")
    vllm_bitwise_parity = _by_need("analysis.vllm_bitwise_parity:prepare")


class Planning:
    """Implementation of `run.assemble.Planner` that imports the planner when it is used."""

    make_plan = _by_need("planning.command:make_plan")
    print_report = _by_need("planning.report:print_report")
    choose_offload = _by_need("planning.command:choose_offload")
    describe_offload = _by_need("planning.report:describe_offload")


def load_dialects() -> FrameworkNames:
    """Return what `compat` knows of other systems' names and scripts."""
    from megatron_grpo.commands.compat import DIALECTS

    return DIALECTS


def train(argv: list[str], parts: Mapping[str, Any]) -> int:
    """Run the `train` command."""
    from megatron_grpo.run.signals import signals_before_run

    with signals_before_run():
        parsed = _parsed_to_train(argv)
        from megatron_grpo.run.terminal import ignore_closed_terminal

        ignore_closed_terminal()
        with without_gc():
            from megatron_grpo.run.validate import load_inputs

            run, inputs = load_inputs(parsed, has_sampler="engine" in parts)
            from megatron_grpo.run.assemble import RunParts
            from megatron_grpo.run.lifecycle import run_training

        return run_training(run, inputs, RunParts(analysis=Analysis(), planner=Planning(), **parts))


def _parsed_to_train(argv: list[str]) -> ParsedConfig:
    """Parse the command line of `train`.

    As `_parsed`, but `--print_config` also shows derived values, and one process where the settings ask for several is a problem.
    """
    launched, requested = launcher.read(), jobs.number_asked_for()
    world_size = launched.world_size if launched.is_launched else requested and requested[1]
    parsed = _parse(argv, world_size)
    if world_size is None and (requested := _model_parallel(parsed.config)):
        parsed = _parse(argv, requested[1])
    if parsed.print_config:
        from megatron_grpo.run.check import check_parsed

        _print_config(check_parsed(parsed).config)
    if not launched.is_launched:
        parsed.problems.extend(_not_launched(argv, parsed.config, requested))
    from megatron_grpo.run.jobs import problems_with_limits

    parsed.problems.extend(problems_with_limits(parsed.config))
    return parsed


def _model_parallel(config: Config) -> tuple[str, int] | None:
    """Return the settings that need more than one process where no world size is given, and the number of processes.

    The number is the product of the tensor, pipeline and context parallel sizes. None if all of them are 1 or a world size is given.
    """
    parallel = config.parallel
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {config.typed.get(name, name): getattr(parallel, name) for name in names if getattr(parallel, name) > 1}
    if not sizes or config.sources.get("world_size") != "default":
        return None
    return " x ".join(f"{name} ({size})" for name, size in sizes.items()), math.prod(sizes.values())


def _not_launched(argv: list[str], config: Config, requested: tuple[str, int] | None) -> list[Problem]:
    """Return a problem if this is one process and the environment or the configuration asks for more."""
    number = config.parallel.world_size or 1
    if requested is None and number > 1:  # a number below one is refused with the parallel sizes
        name = config.typed.get("world_size", "world_size")
        source = config.sources.get("world_size", "")
        requested = (f"{name} ({number})" if "NPROC_PER_NODE" not in source else f"NPROC_PER_NODE of {source}", number)
    return [jobs.not_launched_problem(requested[0], requested[1], argv)] if requested else []


def plan(argv: list[str]) -> int:
    """Run the `plan` command."""
    from megatron_grpo.commands.planning.report import run_plan

    parsed, world_size = _parse(argv, None), _launched_world_size()
    if world_size is not None and "world_size" not in parsed.config.typed:  # without a launcher, the user may plan for any number of ranks
        parsed = _parse(argv, world_size)
    return run_plan(parsed)


def evaluate(parsed: ParsedConfig) -> int:
    """Run the `eval` command."""
    with without_gc():
        from megatron_grpo.run.evaluating import run_eval

    return run_eval(parsed, Analysis().vllm_bitwise_parity)


class _ConfigShown(Exception):
    """Signal that `--print_config` was given and has been answered."""


def _parsed(argv: Sequence[str], *, is_launched: bool = True) -> ParsedConfig:
    """Parse the settings, with all problems found in them.

    Args:
        argv: Command-line arguments after the command.
        is_launched: Whether a launcher may have started this process.

    Raises:
        _ConfigShown: `--print_config` was given.
    """
    parsed = _parse(argv, _launched_world_size() if is_launched else None)
    if parsed.print_config:
        _print_config(parsed.config)
    return parsed


def _launched_world_size() -> int | None:
    launched = launcher.read()
    return launched.world_size if launched.is_launched else None


def _parse(argv: Sequence[str], world_size: int | None) -> ParsedConfig:
    from megatron_grpo.run.config import parse

    return parse(argv, launcher_world_size=world_size, dialects=load_dialects)


def _print_config(config: Config) -> NoReturn:
    if launcher.read().rank == 0:
        from megatron_grpo.commands.start.show import print_config

        print_config(config)
    raise _ConfigShown


_HELP, _HELP_SEARCH = ("-h", "--help", "help"), ("--help-search", "--help_search")


def _problems_of_process(command: str) -> Iterator[Problem]:
    """Yield problems of the process itself that a command cannot work with: its directory, launcher and open-file limit."""
    try:
        os.getcwd()
    except FileNotFoundError:
        yield Problem(flags=(), message="the working directory of this command has been removed. Start it in another directory.")
    if "launcher" in COMMANDS[command]["needs"]:
        yield from launcher.read().problems
    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if "files" in COMMANDS[command]["needs"] and 0 <= files < LEAST_FILES:
        message = (
            f"the limit of open files is {files}, and {command} needs more. Run `ulimit -n {max(hard_limit, 65536)}` before the command."
        )
        yield Problem(flags=(), message=message)


def main(argv: Sequence[str] | None = None, **parts: Any) -> int:
    """Run one command and return its exit code.

    Without `argv` this is the program itself, and the command runs in a child process.

    Args:
        argv: Command-line arguments, the command first. None reads `sys.argv`.
        parts: Custom components for `train`, such as a sampler, a reference or a gradient check. See `run.assemble.RunParts`.

    Returns:
        The exit code: 0 done, 1 failed, 2 configuration error, 3 interrupted and saved, 130 after a keyboard interrupt.
    """
    if argv is None:
        from megatron_grpo.run.supervisor import supervised

        return supervised(lambda: main(sys.argv[1:], **parts))
    replace_unencodable()
    if not argv or argv[0] in _HELP and len(argv) == 1:
        from megatron_grpo.commands.start.show import print_overview

        print_overview()
        return EXIT_DONE if argv else EXIT_CONFIG
    if argv[0] == "--version":
        print(__version__)
        return EXIT_DONE
    if argv[0] in _HELP and argv[1] in COMMANDS:  # `--help plan`
        argv = [argv[1], "--help", *argv[2:]]
    elif argv[0] in (*_HELP, *_HELP_SEARCH):  # without a command: settings, which are those of train
        argv = ["train", "--help" if argv[0] in _HELP else argv[0], *argv[1:]]
    try:
        return run(argv[0], list(argv[1:]), parts)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the one place that catches every error
        return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Report an error that ended a command, and return the exit code. Call it while the error is handled.

    Args:
        error: Exception that `run` raised.
    """
    if isinstance(error, _ConfigShown):
        return EXIT_DONE
    if isinstance(error, KeyboardInterrupt):
        return 128 + 2
    if isinstance(error, BrokenPipeError):  # `plan | head`; a training run that loses its reader is a RunError
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return EXIT_DONE  # rich exits like this, after it has redirected standard output
    from megatron_grpo.run.failures import report

    code = report(error)
    if isinstance(error, ConfigError) and launcher.read().has_other_machines:
        from megatron_grpo.core.parallel.state import report_failure

        report_failure(error)
    return code


def run(command: str, words: list[str], parts: Mapping[str, Any]) -> int:
    """Run one command in this process and return its exit code.

    Args:
        command: Name of the command.
        words: Its arguments.
        parts: Custom components for `train`.

    Raises:
        ConfigError: If the command or its settings are wrong. Whatever else ends a command is raised too; see `exit_code`.
    """
    row = COMMANDS.get(command)
    if row is None:
        from megatron_grpo.run.config.table import close_to

        close = close_to(command, list(COMMANDS), limit=1)
        hint = f"Did you mean {close[0]}?" if close else f"Commands: {', '.join(COMMANDS)}."
        raise ConfigError(f"{command!r} is not a command. {hint}")
    if any(word in _HELP[:2] for word in words):
        from megatron_grpo.commands.start.show import print_help

        print_help(command, words[1:] if words[0] in _HELP[:2] else ())
        return EXIT_DONE
    if words and words[0] in _HELP_SEARCH:
        from megatron_grpo.commands.start.show import print_matching

        print_matching(words[1:])
        return EXIT_DONE
    if sys.platform != "linux" and "linux" in row["needs"]:
        supported = "only `plan`, `init` and `completion` run (docs/dependencies.md)"
        raise ConfigError(f"{command} requires Linux; this is {sys.platform}, where {supported}.")
    if problems := list(_problems_of_process(command)):
        raise ConfigError(problems)
    if launcher.read().by_torchrun:
        die_with_parent()  # a script of the user's own has no supervisor
    if "quiet" in row["needs"]:
        from megatron_grpo.run.terminal import quiet_libraries

        quiet_libraries()
    values = _arguments(row, words, parts)
    return _imported(row["run"])(*(values[name] for name in row["takes"]))


def _arguments(row: Mapping[str, Any], words: list[str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the function of a command may take, by name. Settings are parsed only if it takes them.

    Args:
        row: The command's row of `COMMANDS`.
        words: Its arguments.
        parts: Custom components for `train`.
    """
    values: dict[str, Any] = {"words": words, "parts": parts, "parse": _parsed, "plan": plan}
    positional = list(takewhile(lambda word: not word.startswith("-"), words)) if "positional" in row["takes"] else []
    if "settings" in row["takes"]:
        values |= {"positional": positional, "settings": _parsed(words[len(positional) :], is_launched="launcher" in row["needs"])}
    return values


def _imported(function: str) -> Any:
    """Import a function, or class, that is given as `module:name`."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
