"""`megatron-grpo <command>`: reads the command line, checks everything, and only then imports what the command needs.

Exit codes: 0 done; 2 the configuration is wrong and nothing was started; 3 interrupted and saved; 1 anything else.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_grpo import __version__
from megatron_grpo.base import launcher
from megatron_grpo.base.cleanup import die_with_parent
from megatron_grpo.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, Problem
from megatron_grpo.run.terminal import speak_plainly

if TYPE_CHECKING:
    from megatron_grpo.config.config import Config

Command = Callable[..., int]
LEAST_FILES = 128  # that a process must be allowed to open: a rank that trains a tiny model and samples has some 160


class Analysis:
    """`run.build.Analysis`."""

    def audit(self, every: int) -> Any:
        from megatron_grpo.analysis.audit import Audit

        return Audit(every)

    def capsules(self, **facts: Any) -> Any:
        from megatron_grpo.analysis.capsule import Capsules

        return Capsules(**facts)

    def same_bits(self) -> None:
        from megatron_grpo.analysis.same_bits_switch import switch_on

        switch_on()

    def same_bits_of_vllm(self) -> None:
        from megatron_grpo.analysis.vllm_same_bits import prepare

        prepare()


def train(argv: list[str], **parts: Any) -> int:
    """Trains a model with GRPO: draws answers with vLLM, scores them with reward functions, learns from them with Megatron-Core."""
    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse
    from megatron_grpo.planning.check import check_parsed

    launched, asked = launcher.read(), launcher.number_asked_for()
    if launched.by_torchrun:
        die_with_parent()  # a script of the user's own has no supervisor
    world_size = launched.world_size if launched.is_launched else asked and asked[1]
    parsed = parse(argv, launcher_world_size=world_size, dialects=DIALECTS)
    if world_size is None and (asked := _model_parallel(parsed.config)):
        parsed = parse(argv, launcher_world_size=asked[1], dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(check_parsed(parsed).config)
    if not launched.is_launched:
        parsed.problems.extend(_not_launched(argv, parsed.config, asked))
    from megatron_grpo.run.limits import problems_with_limits
    from megatron_grpo.run.quiet import quiet_libraries
    from megatron_grpo.run.terminal import outlive_terminal

    parsed.problems.extend(problems_with_limits(parsed.config))
    outlive_terminal()
    quiet_libraries()
    from megatron_grpo.run.inputs import read_everything

    made, inputs = read_everything(parsed, has_sampler="engine" in parts)
    from megatron_grpo.run.build import Parts
    from megatron_grpo.run.life import run_training

    return run_training(made, inputs, Parts(analysis=Analysis(), **parts))


def _model_parallel(config: Config) -> tuple[str, int] | None:
    """What asks for more than one process where nobody said how many: the sizes that one copy of the model is cut into."""
    parallel = config.parallel
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {config.typed.get(name, name): getattr(parallel, name) for name in names if getattr(parallel, name) > 1}
    if not sizes or config.sources.get("world_size") != "default":
        return None
    return " x ".join(f"{name} ({size})" for name, size in sizes.items()), math.prod(sizes.values())


def _not_launched(argv: list[str], config: Config, asked: tuple[str, int] | None) -> list[Problem]:
    """One process where the environment or the configuration says that there should be more."""
    number = config.parallel.world_size or 1
    if asked is None and number > 1:  # less than one is for the sizes to say
        name = config.typed.get("world_size", "world_size")
        source = config.sources.get("world_size", "")
        asked = (f"{name} ({number})" if "NPROC_PER_NODE" not in source else f"NPROC_PER_NODE of {source}", number)
    return [launcher.not_launched_problem(asked[0], asked[1], argv)] if asked else []


def plan(argv: list[str]) -> int:
    """Checks the whole configuration and prints the timetable, memory and cost of a run. Needs no GPU and no launcher."""
    from functools import partial

    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse
    from megatron_grpo.planning.report import run_plan
    from megatron_grpo.run.inputs import look_at_everything

    launched, read = launcher.read(), partial(parse, argv, dialects=DIALECTS)
    return run_plan(read, look_at_everything, launcher_world_size=launched.world_size if launched.is_launched else None)


def export(argv: list[str]) -> int:
    """Writes a checkpoint of any layout as a Hugging Face model or PEFT adapter; or adds an adapter to its base (--merge_lora true)."""
    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse

    launched = launcher.read()
    parsed = parse(argv, launcher_world_size=launched.world_size if launched.is_launched else None, dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(parsed.config)
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    from megatron_grpo.run.exporting import run_export

    return run_export(parsed)


def evaluate(argv: list[str]) -> int:
    """Samples held-out sets with a model, an export, an adapter or a checkpoint (--resume) of any layout, and scores them."""
    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse

    launched = launcher.read()
    if launched.by_torchrun:
        die_with_parent()
    parsed = parse(argv, launcher_world_size=launched.world_size if launched.is_launched else None, dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(parsed.config)
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    from megatron_grpo.run.evaluating import run_eval

    return run_eval(parsed, Analysis().same_bits_of_vllm)


def serve(argv: list[str]) -> int:
    """A rollout server: one vLLM engine that a run owns, pushes weights to and samples from (train --vllm_mode server)."""
    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse

    parsed = parse(argv, dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(parsed.config)
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    from megatron_grpo.servers.serve_life import serve as serve_until_stopped

    return serve_until_stopped(parsed)


def doctor(argv: list[str]) -> int:
    """Says what is installed, what each absence switches off, and whether it works here. Takes --json and no settings."""
    from megatron_grpo.run.doctor import run_doctor

    return run_doctor(argv)


def rehearse(argv: list[str]) -> int:
    """Tries data set, chat template and rewards of a training run on a few rows (--rows 8), with the flags of train. Loads no weights."""
    read = _reader()
    from megatron_grpo.run.rehearse import run_rehearsal

    return run_rehearsal(argv, read)


def mismatch(argv: list[str]) -> int:
    """Compares trainer and sampler of a run, a checkpoint or a model, token by token, and names the operation where they part.

    --row N looks into row N, not into the worst; --rows: so many are compared; --dtype: both sides are loaded in it. Without settings it is
    one process; --tensor_model_parallel_size under torchrun compares shard by shard. Exit codes: 0 nothing differs by more than rounding,
    1 something is named, 2 the question is wrong and nothing was loaded.
    """
    if launcher.read().by_torchrun:
        die_with_parent()
    read = _reader()
    from megatron_grpo.analysis.mismatch import run_mismatch

    return run_mismatch(argv, read)


def replay(argv: list[str]) -> int:
    """Takes a kept step of a run (OUTPUT_DIR/capsules/...) again, in any layout, and says what is wrong with it. Takes --json."""
    from itertools import takewhile

    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse

    launched = launcher.read()
    if launched.by_torchrun:
        die_with_parent()
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    size = launched.world_size if launched.is_launched else None
    parsed = parse(argv[len(words) :], launcher_world_size=size, dialects=DIALECTS)
    if parsed.print_config:
        return _print_config(parsed.config)
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    from megatron_grpo.analysis.replay import run_replay

    return run_replay(words, parsed)


def whatif(argv: list[str]) -> int:
    """What another loss, clip, correction, batch size or staleness would have made of a recorded step (--try "loss_type=dapo" ...)."""
    if launcher.read().by_torchrun:
        die_with_parent()
    read = _reader()
    from megatron_grpo.analysis.whatif import run_whatif

    return run_whatif(argv, read)


COMMANDS: dict[str, Command] = {
    "train": train, "plan": plan, "rehearse": rehearse, "eval": evaluate, "export": export, "serve": serve, "doctor": doctor,
    "mismatch": mismatch, "replay": replay, "whatif": whatif,
}  # fmt: skip


def _reader() -> Callable[..., Any]:
    """Reads the settings of a command that has words of its own; libraries are quiet from here on."""
    from functools import partial

    from megatron_grpo.compat import DIALECTS
    from megatron_grpo.config import parse
    from megatron_grpo.run.quiet import quiet_libraries

    quiet_libraries()
    launched = launcher.read()
    return partial(parse, launcher_world_size=launched.world_size if launched.is_launched else None, dialects=DIALECTS)


def _problems_of_process(command: str) -> Iterator[Problem]:
    """What it was started with that no command can work with, whatever it is asked."""
    try:
        os.getcwd()
    except FileNotFoundError:
        yield Problem(flags=(), message="the directory that this command was started in has been removed. Start it in another one.")
    if command not in ("serve", "doctor"):
        yield from launcher.read().problems
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if command in ("train", "eval", "serve") and 0 <= files < LEAST_FILES:
        message = (
            f"this process may have {files} files open, and {command} needs more. Say `ulimit -n {max(most, 65536)}` before the command."
        )
        yield Problem(flags=(), message=message)


def _print_config(config: Config) -> int:
    if launcher.read().rank == 0:
        from megatron_grpo.config.show import print_config

        print_config(config)
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, **parts: Any) -> int:
    """Run one command and return its exit code. Without `argv` this is the program itself, and the command runs in a child of it.

    parts: a sampler, a reference or a guard written elsewhere, for `train`; `run.build.Parts` says which there are.
    """
    if argv is None:
        from megatron_grpo.run.supervisor import supervised

        return supervised(lambda: main(sys.argv[1:], **parts))
    words = list(argv)
    speak_plainly()
    if not words or words[0] in ("-h", "--help", "help"):
        from megatron_grpo.config.show import print_overview

        print_overview(COMMANDS)
        return EXIT_DONE if words else EXIT_CONFIG
    if words[0] == "--version":
        print(__version__)
        return EXIT_DONE
    command, rest = words[0], words[1:]
    try:
        if command not in COMMANDS:
            from megatron_grpo.config.table import close_to

            close = close_to(command, list(COMMANDS), limit=1)
            hint = f"Did you mean {close[0]}?" if close else f"The commands are: {', '.join(COMMANDS)}."
            raise ConfigError(f"{command!r} is not a command. {hint}")
        if any(word in ("-h", "--help") for word in rest):
            from megatron_grpo.config.show import print_help

            print_help(command, COMMANDS[command])
            return EXIT_DONE
        if sys.platform != "linux" and command != "plan":
            raise ConfigError(f"{command} needs Linux, and this is {sys.platform}: here `plan` alone runs (docs/dependencies.md).")
        if problems := list(_problems_of_process(command)):
            raise ConfigError(problems)
        if command == "train":
            from megatron_grpo.run.signals import heard_before_the_run

            with heard_before_the_run():
                return COMMANDS[command](rest, **parts)
        return COMMANDS[command](rest, **parts)
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:  # `plan | head`: the reader has seen enough; a training run that loses its reader is a RunError
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the one place where every way to end is said and counted
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            return EXIT_DONE  # rich leaves like this, with standard output put aside
        from megatron_grpo.run.failures import report

        code = report(error)
        if isinstance(error, ConfigError) and launcher.read().has_other_machines:
            from megatron_grpo.parallel.state import leave_word

            leave_word(error)
        return code
