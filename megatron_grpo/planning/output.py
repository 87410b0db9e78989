"""`plan --json`: one object, written row by row, so that a timetable of any length needs little memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.planning.epochs import epochs_object
from megatron_grpo.planning.facts import old_logprobs_summary

COMPACT = (",", ":")


def sizes_object(sizes: BatchSizes) -> dict[str, dict[str, Any]]:
    """The `parallel` and `batch` parts."""
    parallel = ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp", "dp_size", "expert_dp_size")
    batch = (
        "micro_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "steps_per_generation",
        "generation_batch_size",
        "num_generations",
        "num_iterations",
        "num_rollout_prompts",
        "num_train_prompts",
        "num_prompts_per_dp_group",
    )
    return {"parallel": {name: getattr(sizes.layout, name) for name in parallel}, "batch": {name: getattr(sizes, name) for name in batch}}


def write_plan(write: Callable[[str], Any], timetable: Timetable, *, num_rollouts: int, rest: Mapping[str, Any]) -> None:
    """The whole object. `rest` follows the timetable: pipeline, memory, cost, native_flags, warnings."""
    head = {**sizes_object(timetable.sizes), "old_logprobs": old_logprobs_summary(timetable, num_rollouts)}
    if epochs := epochs_object(timetable):
        head["epochs"] = epochs
    write(json.dumps(head, separators=COMPACT)[:-1] + ',"timetable":[')
    comma = ""
    for row in timetable_rows(timetable, num_rollouts):
        write(comma + row)
        comma = ","
    write("]," + json.dumps(rest, separators=COMPACT)[1:] + "\n")


def timetable_rows(timetable: Timetable, num_rollouts: int) -> Iterator[str]:
    """JSON objects, one per micro-step of the first rollouts, in micro-step order."""
    sizes = timetable.sizes
    slices, passes, size = sizes.micro_steps_per_rollout, sizes.num_iterations, sizes.micro_batch_size
    rows: dict[int, str] = {}  # by slice: the same in every rollout and pass
    for rollout in range(num_rollouts):
        first_prompt = rollout * sizes.num_rollout_prompts
        prompts: dict[int, str] = {}  # by slice: the same in every pass over this rollout
        for s in range(rollout * slices * passes, (rollout + 1) * slices * passes):
            row = timetable.micro_step(s)
            j, begin = row.slice_index, row.rows[0]
            if j not in rows:
                rows[j] = ",".join([f"[{x},{x + size}]" for x in range(begin, row.rows[1], size)])
            if j not in prompts:
                prompts[j] = _prompts(sizes, begin, row.rows[1], first_prompt)
            yield (
                f'{{"micro_step":{s},"optimizer_step":{row.optimizer_step},"rollout":{rollout},"pass":{row.pass_index},"slice":{j},'
                f'"sampled_by_version":{row.sampled_by_version},"trained_at_version":{row.optimizer_step},"staleness":{row.staleness},'
                f'"old_logprobs":"{row.old_logprobs}","rows":[{rows[j]}],"prompts":[{prompts[j]}]}}'
            )


def _prompts(sizes: BatchSizes, begin: int, end: int, first_prompt: int) -> str:
    """For each DP rank the distinct prompts of its rows, numbered over the run."""
    size, group = sizes.micro_batch_size, sizes.num_generations
    if group % size == 0:  # every rank holds rows of one prompt: whole stretches of ranks read the same
        numbers = range(begin // group, (end - 1) // group + 1)
        return ",".join(
            [",".join([f"[{p + first_prompt}]"] * ((min(end, (p + 1) * group) - max(begin, p * group)) // size)) for p in numbers]
        )
    if size <= group:  # of one prompt or of two
        ends = ((x // group + first_prompt, (x + size - 1) // group + first_prompt) for x in range(begin, end, size))
        return ",".join([f"[{a}]" if a == b else f"[{a},{b}]" for a, b in ends])
    cells = []
    for x in range(begin, end, size):
        cells.append("[" + ",".join(map(str, range(x // group + first_prompt, (x + size - 1) // group + first_prompt + 1))) + "]")
    return ",".join(cells)


def errors_object(problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "errors": [
            {"flags": list(problem.flags), "message": problem.message, "nearest": {k: list(v) for k, v in problem.nearest.items()}}
            for problem in problems
        ]
    }
