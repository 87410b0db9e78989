"""`megatron-grpo <command>`: reads the command line, checks everything, and only then imports what the command needs.

Exit codes: 0 done; 2 the configuration is wrong and nothing was started; 3 interrupted and saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_grpo import __version__
from megatron_grpo.errors import EXIT_CONFIG, EXIT_CRASH, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, Interrupted, RewardError

Command = Callable[..., int]


def launcher_world_size() -> int | None:
    """The number of ranks that torchrun (or another launcher) started; None without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def is_first_rank() -> bool:
    """Before any process group exists: every rank parses the same flags, one of them speaks."""
    return os.environ.get("RANK", "0") == "0"


def train(argv: list[str], **parts: Any) -> int:
    """The training run. parts: for `build.build_run`."""
    from megatron_grpo.planning.check import check_parsed
    from megatron_grpo.settings import parse
    from megatron_grpo.sizing.dialects import DIALECTS

    parsed = parse(argv, launcher_world_size=launcher_world_size(), dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(check_parsed(parsed).config)
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    from megatron_grpo.inputs import read_everything

    plan, inputs = read_everything(parsed)
    from megatron_grpo.build import run_training

    return run_training(plan, inputs, **parts)


def plan(argv: list[str]) -> int:
    """Checks the whole configuration and prints the timetable, memory and cost of a run. Needs no GPU and no launcher."""
    from megatron_grpo.inputs import look_at_everything
    from megatron_grpo.planning.command import run_plan

    return run_plan(argv, look_at_everything, launcher_world_size=launcher_world_size())


COMMANDS: dict[str, Command] = {"train": train, "plan": plan}


def _print_config(config: object) -> int:
    if is_first_rank():
        from megatron_grpo.settings.show import print_config

        print_config(config)
    return EXIT_DONE


def report(error: ConfigError) -> None:
    """All problems, numbered, to standard error."""
    if not is_first_rank():
        return
    count = len(error.problems)
    print(f"megatron-grpo: {count} problem{'s' if count > 1 else ''} in the configuration; nothing was started.", file=sys.stderr)
    for number, problem in enumerate(error.problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)


def main(argv: Sequence[str] | None = None, **parts: Any) -> int:
    """Run one command and return its exit code. Without `argv` this is the program itself, and the command runs in a child of it.

    parts: a sampler, a reference or a guard written elsewhere, for `train`; `build.build_run` says which there are.
    """
    if argv is None:
        from megatron_grpo.run.supervisor import supervised

        return supervised(lambda: main(sys.argv[1:], **parts))
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        from megatron_grpo.settings.show import print_overview

        print_overview(COMMANDS)
        return EXIT_DONE if words else EXIT_CONFIG
    if words[0] == "--version":
        print(__version__)
        return EXIT_DONE
    command, rest = words[0], words[1:]
    try:
        if command not in COMMANDS:
            from megatron_grpo.settings.table import close_to

            close = close_to(command, list(COMMANDS), limit=1)
            hint = f"Did you mean {close[0]}?" if close else f"The commands are: {', '.join(COMMANDS)}."
            raise ConfigError(f"{command!r} is not a command. {hint}")
        if any(word in ("-h", "--help") for word in rest):
            from megatron_grpo.settings.show import print_help

            print_help(command, COMMANDS[command])
            return EXIT_DONE
        return COMMANDS[command](rest, **parts)
    except ConfigError as error:
        report(error)
        return EXIT_CONFIG
    except Interrupted as error:
        if is_first_rank():
            print(f"megatron-grpo: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except RewardError:  # the user's function, not ours: `build` has said what it did
        return EXIT_CRASH
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:  # `plan | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except Exception as error:  # noqa: BLE001 - the one place: says what happened in a line, keeps the traceback
        import traceback

        traceback.print_exc()
        print(f"megatron-grpo: rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CRASH
