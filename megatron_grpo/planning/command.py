"""The `plan` command: check, gather, print. For people by default, for programs with `--json`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from megatron_grpo.base.files import written_whole
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.compat import DIALECTS
from megatron_grpo.config import Parsed, parse
from megatron_grpo.planning.check import Checked, check_parsed
from megatron_grpo.planning.epochs import as_long_as_there, epoch_problems
from megatron_grpo.planning.facts import bubble_fraction, native_flags
from megatron_grpo.planning.output import errors_object, write_plan
from megatron_grpo.planning.servers import servers_of
from megatron_grpo.planning.sharing import Sharing, decide
from megatron_grpo.planning.warnings import defaults_of, warnings_of

if TYPE_CHECKING:
    from megatron_grpo.planning.lengths import Lengths
    from megatron_grpo.planning.parameters import Tuning
    from megatron_grpo.planning.pictures import PictureFacts

MOST_SAVED = 20_000  # micro-steps in the plan.json of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `plan` shows."""

    checked: Checked
    timetable: Timetable  # as long as the run, where that is known
    num_prompts: int | None  # of the data set
    memory: dict[str, Any] | None
    cost: dict[str, Any] | None
    sharing: Sharing
    warnings: list[str]
    not_checked: tuple[str, ...] = ()  # what `train` would look at besides
    pictures: PictureFacts | None = None  # of the data set, where it has some

    @property
    def servers(self) -> dict[str, Any] | None:
        """Of the rollout servers, where they sample."""
        return servers_of(self.checked.config, self.checked.sizes)

    @property
    def bubble(self) -> float:
        """Share of an optimizer step that a pipeline stage waits: with a token budget, by the micro-batches that it makes, if known."""
        return self.cost["sharing"]["bubble_shared"] if self.cost else bubble_fraction(self.checked.sizes)

    def rest(self) -> dict[str, Any]:
        """The part of the JSON object after the timetable."""
        sizes, cfg = self.checked.sizes, self.checked.config
        servers = {"servers": self.servers} if self.servers else {}
        pictures = {"pictures": self.pictures.as_json()} if self.pictures else {}
        return {
            "pipeline": {"bubble_fraction": self.bubble},
            **servers,
            **pictures,
            "memory": self.memory,
            "cost": self.cost,
            "native_flags": native_flags(cfg, sizes),
            "warnings": [*self.warnings, *defaults_of(self.checked)],
        }

    def write_json(self, write: Any, *, num_rollouts: int | None = None) -> None:
        write_plan(write, self.timetable, num_rollouts=num_rollouts or self.checked.config.plan.plan_rollouts, rest=self.rest())

    def save(self, path: Path) -> None:
        """The JSON object of the whole run, or of its first MOST_SAVED micro-steps' rollouts where it is longer; whole or not at all."""
        sizes, steps = self.checked.sizes, self.timetable.num_steps
        per_rollout = sizes.micro_steps_per_rollout * sizes.num_iterations
        micro_steps = MOST_SAVED if steps is None else min(self.timetable.first_of(steps), MOST_SAVED)
        with written_whole(path) as stream, io.TextIOWrapper(stream, encoding="utf-8") as file:
            self.write_json(file.write, num_rollouts=max(1, -(-micro_steps // per_rollout)))


def make_plan(checked: Checked, *, num_prompts: int | None = None, pictures: PictureFacts | None = None) -> Plan:
    """The plan of a configuration that passes. num_prompts, pictures: of the data set where the caller knows it.

    Raises ConfigError where the file of lengths cannot be read, and where an epoch does not come out.
    """
    cfg, sizes = checked.config, checked.sizes
    if num_prompts is None:
        num_prompts = cfg.plan.num_prompts
    checked, notes = as_long_as_there(checked, num_prompts)
    cfg = checked.config
    timetable = Timetable.of_length(
        sizes, max_steps=cfg.run.max_steps, num_train_epochs=cfg.run.num_train_epochs, num_prompts=num_prompts,
        drops_last=cfg.data.dataset_drop_last,
    )  # fmt: skip
    if problems := epoch_problems(checked, timetable):
        raise ConfigError(problems)
    sharing = decide(cfg, checked.shape)
    memory, cost, tuning = _estimates(checked, sharing)
    return Plan(
        checked=checked,
        timetable=timetable,
        num_prompts=num_prompts,
        memory=memory,
        cost=cost,
        sharing=sharing,
        warnings=[
            *warnings_of(checked, timetable, memory, cost, tuning.push if tuning else None),
            *notes,
            *(pictures.warnings() if pictures else ()),
        ],
        pictures=pictures,
    )


def _estimates(checked: Checked, sharing: Sharing) -> tuple[dict[str, Any] | None, dict[str, Any] | None, Tuning | None]:
    """(memory, cost, what trains), each None where neither a model nor lengths tell."""
    cfg, sizes, shape = checked.config, checked.sizes, checked.shape
    if shape is None and not cfg.plan.lengths:
        return None, None, None
    from megatron_grpo.planning.budget import suggest_budget
    from megatron_grpo.planning.computed import Step
    from megatron_grpo.planning.cost import estimate_cost
    from megatron_grpo.planning.lengths import read_lengths
    from megatron_grpo.planning.memory import estimate_memory
    from megatron_grpo.planning.parameters import Tuning
    from megatron_grpo.planning.room import ways_to_fit

    lengths = read_lengths(cfg.plan.lengths) if cfg.plan.lengths else None
    memory = tuning = None
    if shape is not None:
        tuning = Tuning.of(cfg, shape)
        memory = estimate_memory(shape, sizes, cfg, tuning, lengths, shares=sharing.least_saving is not None, teacher=checked.teacher)
        if memory["fits"] is False:
            memory["would_fit"] = ways_to_fit(checked, lambda other: _memory_of(other, lengths))
    step = Step.of(sharing, sizes, cfg, lengths)
    cost = estimate_cost(shape, sizes, cfg, tuning, lengths, sharing, step, teacher=checked.teacher)
    cost["sharing"]["budget"] = suggest_budget(cfg, shape, sharing, step, memory)
    return memory, cost, tuning


def _memory_of(checked: Checked, lengths: Lengths | None) -> dict[str, Any]:
    from megatron_grpo.planning.memory import estimate_memory
    from megatron_grpo.planning.parameters import Tuning

    cfg, shape = checked.config, checked.shape
    assert shape is not None
    shares = decide(cfg, shape).least_saving is not None
    return estimate_memory(shape, checked.sizes, cfg, Tuning.of(cfg, shape), lengths, shares=shares, teacher=checked.teacher)


def run_plan(argv: Sequence[str], look_at: Callable[[Parsed], Plan], *, launcher_world_size: int | None = None) -> int:
    """Print the plan; the exit code. Raises ConfigError, except with --json, which prints the errors as its answer.

    look_at: makes the plan of what was parsed, and looks at what it names (`inputs.look_at_everything`).
    """
    as_json = False
    try:
        # Without a launcher of its own, `plan` may ask about any number of ranks.
        parsed = parse(argv, dialects=DIALECTS)
        if launcher_world_size is not None and "world_size" not in parsed.config.typed:
            parsed = parse(argv, launcher_world_size=launcher_world_size, dialects=DIALECTS)
        as_json = parsed.config.plan.json
        if parsed.print_config:
            from megatron_grpo.config.show import print_config

            print_config(check_parsed(parsed).config)
            return EXIT_DONE
        made = look_at(parsed)
        if png := made.checked.config.plan.png:
            from megatron_grpo.planning.png import draw_png

            draw_png(made, png)
        if as_json:
            made.write_json(sys.stdout.write)
            if made.not_checked:  # the object has the keys that it always had
                print(f"Not checked: {'; '.join(made.not_checked)}.", file=sys.stderr)
        else:
            from megatron_grpo.planning.report import print_report

            print_report(made)
        return EXIT_DONE
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps(errors_object(error.problems), separators=(",", ":")))
        return EXIT_CONFIG
