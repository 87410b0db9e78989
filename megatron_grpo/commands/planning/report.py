"""The `plan` command and its report in the terminal: sizes, training schedule, memory, cost and warnings.

Colours are written only if the output is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from megatron_grpo.commands.planning.command import Plan, plan_run
from megatron_grpo.commands.planning.summary import (
    describe_epoch,
    epochs_object,
    errors_object,
    native_flags,
    old_logprobs_summary,
    rollouts_in_periods,
    sizes_object,
    staleness,
)
from megatron_grpo.core.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from megatron_grpo.run.check import check_parsed
from megatron_grpo.run.config import ParsedConfig

if TYPE_CHECKING:
    from rich.console import Console

HELD = ("weights", "adapters", "gradients", "optimizer", "reference", "teacher", "activations", "logits")  # parts that a stage holds


def run_plan(parsed: ParsedConfig) -> int:
    """Print the plan and return the exit code.

    Raises:
        ConfigError: If the configuration is invalid. With `--json`, the errors are printed as the JSON object instead.
    """
    as_json = parsed.config.plan.json
    try:
        if parsed.print_config:
            from megatron_grpo.commands.start.show import print_config

            print_config(check_parsed(parsed).config)
            return EXIT_DONE
        plan = plan_run(parsed)
        if png := plan.checked.config.plan.png:
            from megatron_grpo.commands.planning.figure import draw_png

            draw_png(plan.schedule, plan.checked.config.plan.plan_rollouts, png)
        if as_json:
            sys.stdout.write(plan.as_json())
            if plan.not_checked:  # on stderr, so that the keys of the object stay the same
                print(f"Not checked: {'; '.join(plan.not_checked)}.", file=sys.stderr)
        else:
            print_report(plan)
        return EXIT_DONE
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps(errors_object(error.problems), separators=(",", ":")))
        return EXIT_CONFIG


def print_report(plan: Plan, *, file: TextIO | None = None, is_short: bool = False) -> None:
    """Print the report.

    Args:
        file: Output stream; standard output by default.
        is_short: Print only what `train` shows at its start: sizes and warnings.
    """
    from rich.console import Console

    console = Console(file=file or sys.stdout, highlight=False, soft_wrap=False)
    for title, lines in _sections(plan, console.width, is_short=is_short):
        console.rule(f"[bold]{title}", align="left", style="dim")
        _print(console, *lines)
        console.print()
    if plan.not_checked:
        _print(console, (f"Not checked: {'; '.join(plan.not_checked)}.", "dim"))
    if plan.warnings:
        console.rule("[bold]warnings and notes", align="left", style="dim")
        _print(
            console,
            *((f"• {warning}", "" if warning.startswith(("Note", "Your", "What differs")) else "yellow") for warning in plan.warnings),
        )


# A line of text, a (text, style) pair, or a rich table.
Line = Any


def _print(console: Console, *lines: Line) -> None:
    for line in lines:
        text, style = line if isinstance(line, tuple) else (line, None)
        console.print(text, style=style, markup=False)


def _sections(plan: Plan, width: int, *, is_short: bool) -> Iterator[tuple[str, Iterable[Line]]]:
    """Yield (title, lines) of each section."""
    sizes, cfg = plan.checked.sizes, plan.checked.config
    yield "sizes", _sizes(plan)
    if not is_short:
        from megatron_grpo.commands.planning.figure import draw, legend

        yield "training schedule", [*draw(plan.schedule, cfg.plan.plan_rollouts, width=width), *((line, "dim") for line in legend(sizes))]
        if plan.memory:
            yield "memory of one rank", _memory(plan.memory, plan.cost or {})
        if plan.images:
            from megatron_grpo.commands.planning.images import describe_images

            yield "images", describe_images(plan.images)
        if plan.servers:
            yield "rollout servers", describe_servers(plan.servers, (plan.cost or {}).get("weight_push_bytes"))
        if plan.cost:
            yield "work per rollout", _cost(plan.cost)
        if cfg.plan.dialect:
            yield "the same in native flags", [_as_shell_lines(native_flags(cfg, sizes), width)]
    if plan.checked.parsed.defaults:
        yield f"defaults that differ in {cfg.plan.dialect}, not set by you", [_defaults(plan)]


def _defaults(plan: Plan) -> Line:
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for name in ("name", "theirs", "ours", "used"):
        out.add_column(name, overflow="fold", no_wrap=name == "name")
    for row in plan.checked.parsed.defaults:
        out.add_row(row.name.rpartition(".")[2], row.theirs, row.ours, row.used)
    return out


def _sizes(plan: Plan) -> Iterator[Line]:
    from rich.table import Table

    grid = sizes_object(plan.checked.sizes)["parallel"]
    yield "  ".join(f"{name} {value}" for name, value in grid.items() if value not in (None, 1) or name in ("world_size", "dp_size"))
    out = Table(box=None, pad_edge=False, show_header=False)
    out.add_column(justify="left")
    out.add_column(justify="right", style="bold")
    out.add_column(style="dim")
    for row in _size_rows(plan):
        out.add_row(*row)
    yield out


def _size_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    sizes, schedule = plan.checked.sizes, plan.schedule
    mbs, dp, a, group = sizes.micro_batch_size, sizes.dp_size, sizes.gradient_accumulation_steps, sizes.num_generations
    yield "micro-step", f"{mbs * dp}", f"completions = micro_batch_size {mbs} x dp_size {dp}"
    yield "optimizer step", f"{sizes.global_batch_size}", f"completions = {a} micro-steps; {sizes.num_train_prompts:g} prompts"
    passes = f", {sizes.num_iterations} passes" if sizes.num_iterations > 1 else ""
    steps = sizes.steps_per_generation
    per_step = (
        f"{steps:g} optimizer step{'' if steps == 1 else 's'}"
        if isinstance(steps, int)
        else f"{sizes.generation_batch_size}/{sizes.global_batch_size} of an optimizer step"
    )
    yield "rollout", f"{sizes.generation_batch_size}", f"completions = {sizes.num_rollout_prompts} prompts x {group}; {per_step}{passes}"
    if schedule.num_steps is not None:
        rollouts = -(-schedule.find_first_micro_step(schedule.num_steps) // (sizes.micro_steps_per_rollout * sizes.num_iterations))
        data = f" over {plan.num_prompts} prompts" if plan.num_prompts else ""
        yield "run", f"{schedule.num_steps}", f"optimizer steps, {rollouts} rollouts{data}"
    if epochs := epochs_object(schedule):
        yield "epoch", f"{epochs['optimizer_steps']:.4g}", describe_epoch(epochs, plan.checked)
    old = old_logprobs_summary(schedule, rollouts_in_periods(schedule))
    stale = [str(r) for r, is_stale in enumerate(old["rollouts"]) if is_stale]
    stale_text = "; every row is on-policy"
    if stale:
        stale_text = f"; {len(stale)} of {len(old['rollouts'])} rollouts are stale: {', '.join(stale[:8])}{', ...' * (len(stale) > 8)}"
    yield "forward-only", f"{old['slices_recomputed']}", f"of {old['slices_total']} slices{stale_text}"
    if sizes.async_rollout_depth:
        (mean, max_staleness), (mean_without, _) = staleness(sizes), staleness(replace(sizes, async_rollout_depth=0))
        explanation = (
            f"optimizer steps on average, at most {max_staleness}, between sampling and training; {mean_without:.3g} without async rollouts"
        )
        yield "one rollout ahead" if not sizes.partial_rollouts else "partial rollouts", f"{mean:.3g}", explanation
    is_shared, _, explanation = str(plan.sharing).partition(": ")
    yield "shared prompts", is_shared, explanation
    if sizes.layout.pp > 1:
        m = plan.cost["sharing"]["micro_batches_of_rank_shared"] if plan.cost else a
        explanation = f"= (pp - 1) / (vpp x m + pp - 1), pp {sizes.layout.pp}, vpp {sizes.layout.vpp or 1}, m {m} micro-batches per rank"
        yield "pipeline bubble", f"{plan.bubble:.1%}", explanation


def _memory(memory: dict[str, Any], cost: dict[str, Any]) -> Iterator[Line]:
    if cost:
        yield trainable(cost)
    yield _stages(memory)
    yield from _sampler_lines(memory)
    if memory["gpu_memory_bytes"]:
        is_enough = memory["peak_bytes"] <= memory["gpu_memory_bytes"]
        cache = f"; the KV cache does NOT hold one sequence of {memory['longest_sequence']:,} tokens" * (is_enough > memory["fits"])
        peak, gpu = gigabytes(memory["peak_bytes"]), gigabytes(memory["gpu_memory_bytes"])
        verdict = f"peak {peak} GB {'fits in' if is_enough else 'does NOT fit in'} {gpu} GB{cache}"
        yield verdict, "green" if memory["fits"] else "bold red"
    if saved := max(stage["activations_saved_bytes"] for stage in memory["stages"]):
        yield (
            f"shared prefixes: a micro-batch has {memory['tokens_per_micro_batch']:,} tokens on a rank instead of "
            f"{memory['tokens_per_micro_batch_apart']:,}, which saves {gigabytes(saved)} GB of activations"
        )
    yield from ((f"  {assumption}", "dim") for assumption in [*describe_tower(memory), *memory["assumptions"]])


def _stages(memory: dict[str, Any]) -> Line:
    """Return a table of memory in GB: one column per pipeline stage (the first two and last two if there are more than four).

    Rows are the parts that a stage holds, and the peak of each phase.
    """
    from rich.table import Table

    stages = memory["stages"] if len(memory["stages"]) <= 4 else [memory["stages"][i] for i in (0, 1, -2, -1)]
    out = Table(box=None, pad_edge=False)
    out.add_column("GB")
    for stage in stages:
        out.add_column(f"stage {stage['stage']}", justify="right")
    for name in HELD:
        if any(stage[f"{name}_bytes"] for stage in stages):
            out.add_row(name, *(gigabytes(stage[f"{name}_bytes"]) for stage in stages))
    for phase in stages[0]["phases"]:
        name, peaks = phase.replace("push", "sync").replace("_", " "), (gigabytes(stage["phases"][phase]) for stage in stages)
        out.add_row(f"peak: {name}", *peaks, style="bold" if phase == memory["peak_phase"] else "")
    return out


def describe_tower(memory: dict[str, Any]) -> list[str]:
    """Describe what the vision tower costs the first stage, and the layer split that balances it. Empty for a text model.

    Args:
        memory: `memory` object of the plan.
    """
    if "tower" not in memory:
        return []
    tower, first_layers = memory["tower"], memory["stages"][0]["num_layers"]
    layers, first = tower["outweighs"]["layers"], tower["outweighs"]["first"]
    balance_note = (
        ""
        if first in (None, first_layers)
        else f": stages are most balanced with decoder_first_pipeline_num_layers {first} (now {first_layers})"
    )
    return [
        f"vision tower, on stage 0: {tower['parameters'] / 1e9:.2f} B parameters ({tower['trainable_parameters'] / 1e9:.2f} B train), "
        f"{gigabytes(tower['static_bytes'])} GB, and {gigabytes(tower['activations_bytes'])} GB for up to "
        f"{tower['patches_per_micro_batch']:,} patches; equivalent to {layers:g} layers{balance_note}"
    ]


def _sampler_lines(memory: dict[str, Any]) -> Iterator[Line]:
    sampler = memory["sampler"]
    if not sampler["weights_bytes"]:
        yield "vLLM: on rollout servers, no memory here"
    else:
        adapters = f"adapter {gigabytes(sampler['adapters_bytes'])} GB, " if sampler["adapters_bytes"] else ""
        cache = f"KV cache {gigabytes(sampler['kv_cache_bytes'])} GB ({sampler['kv_cache_tokens']:,} tokens)"
        if states := sampler["state_bytes_per_sequence"] * sampler["sequences_at_once"]:
            cache += f", of which the recurrent states of {sampler['sequences_at_once']} sequences need {gigabytes(states)} GB"
        yield f"vLLM: weights {gigabytes(sampler['weights_bytes'])} GB, {adapters}{cache}"
        yield describe_offload(memory["offload"])
    if staged := memory["staged_bytes"]:
        yield f"async_save: {gigabytes(staged)} GB of host memory per rank, its share of a checkpoint"


def describe_offload(offload: dict[str, Any]) -> str:
    """Describe in one sentence what the policy offloads while vLLM samples.

    Args:
        offload: `offload` object of the plan's `memory`.
    """
    from megatron_grpo.commands.planning.memory import LINK

    enabled = [name for name in ("model", "optimizer") if offload[name]]
    flags = " and ".join(f"offload_{name}" for name in enabled or ("model", "optimizer"))
    freed, host, seconds = (offload[("" if enabled else "most_") + name] for name in ("freed_bytes", "host_bytes", "seconds_per_rollout"))
    does = "frees" if enabled else "enabled, they would free"
    return (
        f"{flags} {'on' if enabled else 'off'} ({offload['why']}): {does} {gigabytes(freed)} GB per rank during sampling; they take "
        f"{gigabytes(host)} GB of host memory per rank, and the transfers take {seconds:.2g} s per rollout at {LINK / 1e9:g} GB/s"
    )


def _cost(cost: dict[str, Any]) -> Iterator[Line]:
    if "flops_per_rollout" in cost:
        total = cost["flops_per_rollout_total"]
        for phase, flops in cost["flops_per_rollout"].items():
            if flops:
                yield f"{phase.replace('_', ' '):<20}{flops / 1e12:>14,.2f} TFLOP {flops / total:>5.0%}"
        base_note = f", and {gigabytes(cost['base_push_bytes'])} GB once, before the first sync" if cost["base_push_bytes"] else ""
        yield f"{'weight sync':<20}{gigabytes(cost['weight_push_bytes']):>14} GB{base_note}"
        calls, buckets = cost["weight_push_collectives"], cost["weight_push_buckets"]
        received = f"the busiest rank receives {gigabytes(cost['weight_push_received_bytes'])} GB"
        yield f"{'':<20}{calls:>14,} collectives of {buckets:,} bucket{'s' * (buckets != 1)}; {received}"
        yield f"{'checkpoint':<20}{gigabytes(cost['checkpoint_bytes']):>14} GB"
        kinds = (
            ("experts", "replayed experts", "per rollout", "per token"),
            ("kept", "sampling masks", "per rollout at most", "per sampled token"),
        )
        for part, name, a_rollout, a_token in kinds:
            if cache_cost := cost.get(part):
                yield (
                    f"{name:<20}{gigabytes(cache_cost['bytes_of_rollout']):>14} GB {a_rollout}, {cache_cost['bytes_of_token']:,} bytes "
                    f"{a_token}; "
                    f"adds up to {gigabytes(cache_cost['checkpoint_bytes'])} GB to a checkpoint"
                )
        yield from ((f"  {assumption}", "dim") for assumption in cost["assumptions"])
    yield from _sharing(cost["sharing"])
    if packing := cost.get("packing"):
        least, max_tokens = packing["min_tokens_per_micro_batch"], packing["max_tokens_per_micro_batch"]
        yield (
            f"lengths: {packing['mean_tokens_per_micro_batch']:,.0f} tokens per micro-batch ({least:,} to {max_tokens:,}); packed "
            f"{packing['packing_efficiency']:.1%} useful, padded it would be {packing['padded_efficiency']:.1%}"
        )
    if partial := cost.get("partial_rollouts"):
        speedups = ", ".join(
            f"{depth}: {cache_cost['mean']:.2f} ({cache_cost['min']:.2f} to {cache_cost['max']:.2f})"
            for depth, cache_cost in partial["speedup_of_sampling"].items()
        )
        yield f"speedup of sampling by async_rollout_depth, {partial['groups_of_engine']} groups per engine: {speedups}"
        yield from ((f"  {assumption}", "dim") for assumption in partial["assumptions"])


def _sharing(sharing: dict[str, Any]) -> Iterator[Line]:
    tokens_apart, shared = sharing["tokens_apart"], sharing["tokens_shared"]
    step = f"an optimizer step computes {tokens_apart:,} tokens in {sharing['micro_batches_apart']:,} micro-batches"
    if sharing["shares"]:
        step += (
            f" with a copy of the prompt per completion, and {shared:,} ({1 - shared / tokens_apart:.1%} fewer) in "
            f"{sharing['micro_batches_shared']:,} with shared prefixes: {sharing['groups']:,} groups in {sharing['pieces']:,} pieces"
        )
        if sharing["bubble_apart"]:
            step += f"; pipeline bubble {sharing['bubble_apart']:.1%} and {sharing['bubble_shared']:.1%}"
    yield step
    if sharing["shares"] and "flops_apart" in sharing:
        flops_apart, flops_shared = (sum(sharing[f"flops_{way}"].values()) for way in ("apart", "shared"))
        yield (
            f"log-probs and training of a rollout: {flops_apart / 1e12:,.2f} TFLOP with a copy of the prompt per completion, "
            f"{flops_shared / 1e12:,.2f} ({1 - flops_shared / flops_apart:.1%} fewer) with shared prefixes"
        )
    if budget := sharing["budget"]:
        bubble = f", pipeline bubble {budget['bubble']:.1%}" if budget["bubble"] else ""
        yield (
            f"max_tokens_per_micro_batch {budget['max_tokens_per_micro_batch']} is sufficient ({budget['why']}): {budget['tokens']:,} "
            f"tokens in {budget['micro_batches_of_rank']:,} micro-batches per rank{bubble}"
        )


def _as_shell_lines(flags: str, width: int) -> str:
    """Return the flags on several lines, joined by backslash continuations."""
    lines = [""]
    for flag in flags.split(" --"):
        flag = flag if flag.startswith("--") else f"--{flag}"
        if lines[-1] and len(lines[-1]) + len(flag) + 3 > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{flag}"
    return " \\\n".join(lines)


def trainable(cost: dict[str, Any]) -> str:
    """Return one line with the number of trainable parameters and their share of the model.

    Args:
        cost: `cost` object of the plan.
    """
    num_trainable, all_ = cost["trainable_parameters"], cost["parameters"]
    return f"trainable parameters: {format_count(num_trainable)} of {format_count(all_)} ({100 * num_trainable / all_:.3g} %)"


def format_count(value: int) -> str:
    """Format a count with a unit, for example `3.1 M` or `7.6 B`.

    Args:
        value: The count.
    """
    unit, name = next(((unit, name) for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if value >= unit), (1, ""))
    return f"{value / unit:.3g}{name}"


def gigabytes(value: float) -> str:
    """Format bytes as GB (10^9 bytes); values below 0.01 GB with three significant digits.

    Args:
        value: Number of bytes.
    """
    return f"{value / 1e9:.2f}" if value >= 1e7 else f"{value / 1e9:.3g}"


def describe_servers(servers: dict[str, Any], sync_bytes: int | None) -> list[str]:
    """Describe the rollout servers: their addresses, the size of a call, and the weight sync.

    Args:
        servers: `servers` object of the plan.
        sync_bytes: Bytes of one weight sync; None if the model is unknown.
    """
    addresses = ", ".join(servers["addresses"][:4]) + (", ..." if len(servers["addresses"]) > 4 else "")
    files = f"{' and ' if addresses else ''}servers that register in {', '.join(servers['files'])}" if servers["files"] else ""
    lines = [
        f"{servers['num_servers'] or 'no'} rollout server{'s' * (servers['num_servers'] != 1)}: {addresses}{files}",
        f"each gets {servers['prompts_per_call']} prompts per request, {servers['calls_per_server']} requests at a time (if it decodes "
        f"{servers['max_num_seqs']} sequences together, the default)",
    ]
    size_text = f"{sync_bytes / 1e9:.3g} GB, " if sync_bytes is not None else ""
    lines.append(f"a weight sync is {size_text}gathered on rank 0, which sends each byte once to the workers of all servers")
    return lines
