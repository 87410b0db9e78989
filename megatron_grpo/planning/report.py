"""The `plan` command, and the plan for people: sizes, the figure, what it costs, what is unusual. Colours only where they are seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from megatron_grpo.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from megatron_grpo.config import Parsed
from megatron_grpo.planning.check import check_parsed
from megatron_grpo.planning.command import Plan
from megatron_grpo.planning.figure import draw, draw_png, legend
from megatron_grpo.planning.room import LINK
from megatron_grpo.planning.summary import (
    epoch_in_words,
    epochs_object,
    errors_object,
    native_flags,
    old_logprobs_summary,
    sizes_object,
    staleness,
)

if TYPE_CHECKING:
    from rich.console import Console


def run_plan(parsed: Parsed, look_at: Callable[[Parsed], Plan]) -> int:
    """Print the plan; the exit code. Raises ConfigError, except with --json, which prints the errors as its answer.

    look_at: makes the plan of what was parsed, and looks at what it names (`inputs.look_at_everything`).
    """
    as_json = parsed.config.plan.json
    try:
        if parsed.print_config:
            from megatron_grpo.config.show import print_config

            print_config(check_parsed(parsed).config)
            return EXIT_DONE
        made = look_at(parsed)
        if png := made.checked.config.plan.png:
            draw_png(made.timetable, made.checked.config.plan.plan_rollouts, png)
        if as_json:
            sys.stdout.write(made.as_json())
            if made.not_checked:  # the object has the keys that it always had
                print(f"Not checked: {'; '.join(made.not_checked)}.", file=sys.stderr)
        else:
            print_report(made)
        return EXIT_DONE
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps(errors_object(error.problems), separators=(",", ":")))
        return EXIT_CONFIG


def print_report(made: Plan, *, file: TextIO | None = None, is_short: bool = False) -> None:
    """Everything, or with is_short what `train` says at its start: sizes and warnings."""
    from rich.console import Console

    console = Console(file=file or sys.stdout, highlight=False, soft_wrap=False)
    sizes, cfg = made.checked.sizes, made.checked.config
    _sizes(console, made)
    if not is_short:
        console.rule("[bold]timetable", align="left", style="dim")
        for line in draw(made.timetable, cfg.plan.plan_rollouts, width=console.width):
            console.print(line, no_wrap=True, overflow="crop")
        for meaning in legend(sizes):
            console.print(meaning, style="dim", markup=False)
        console.print()
        if made.memory:
            _memory(console, made.memory, made.cost or {})
        if made.pictures:
            console.rule("[bold]pictures", align="left", style="dim")
            for sentence in made.pictures.told():
                console.print(sentence, markup=False)
            console.print()
        if made.servers:
            console.rule("[bold]rollout servers", align="left", style="dim")
            for sentence in servers_in_words(made.servers, (made.cost or {}).get("weight_push_bytes")):
                console.print(sentence, markup=False)
            console.print()
        if made.cost:
            _cost(console, made.cost)
        if cfg.plan.dialect:
            console.rule("[bold]the same in native flags", align="left", style="dim")
            console.print(_to_paste(native_flags(cfg, sizes), console.width), markup=False)
            console.print()
    if made.checked.parsed.defaults:
        _defaults(console, made)
    if made.not_checked:
        console.print(f"Not checked: {'; '.join(made.not_checked)}.", style="dim", markup=False)
    if made.warnings:
        console.rule("[bold]worth knowing", align="left", style="dim")
        for warning in made.warnings:
            console.print(f"• {warning}", style="yellow" if not warning.startswith(("Note", "Your", "What differs")) else "", markup=False)


def _defaults(console: Console, made: Plan) -> None:
    from rich.table import Table

    console.rule(f"[bold]defaults that differ in {made.checked.config.plan.dialect}, and were not typed", align="left", style="dim")
    out = Table(box=None, pad_edge=False)
    for name in ("name", "theirs", "ours", "used"):
        out.add_column(name, overflow="fold", no_wrap=name == "name")
    for row in made.checked.parsed.defaults:
        out.add_row(row.name.rpartition(".")[2], row.theirs, row.ours, row.used)
    console.print(out, markup=False)
    console.print()


def _sizes(console: Console, made: Plan) -> None:
    from rich.table import Table

    grid = sizes_object(made.checked.sizes)["parallel"]
    console.rule("[bold]sizes", align="left", style="dim")
    shown = "  ".join(f"{name} {value}" for name, value in grid.items() if value not in (None, 1) or name in ("world_size", "dp_size"))
    console.print(shown, markup=False)
    out = Table(box=None, pad_edge=False, show_header=False)
    out.add_column(justify="left")
    out.add_column(justify="right", style="bold")
    out.add_column(style="dim")
    for row in _size_rows(made):
        out.add_row(*row)
    console.print(out)
    console.print()


def _size_rows(made: Plan) -> Iterator[tuple[str, str, str]]:
    sizes, timetable = made.checked.sizes, made.timetable
    mbs, dp, a, group = sizes.micro_batch_size, sizes.dp_size, sizes.gradient_accumulation_steps, sizes.num_generations
    yield "micro-step", f"{mbs * dp}", f"completions = micro_batch_size {mbs} x dp_size {dp}"
    yield "optimizer step", f"{sizes.global_batch_size}", f"completions = {a} micro-steps; {sizes.num_train_prompts:g} prompts"
    passes = f", {sizes.num_iterations} passes" if sizes.num_iterations > 1 else ""
    steps = sizes.steps_per_generation
    each = (
        f"{steps:g} optimizer step{'' if steps == 1 else 's'}"
        if isinstance(steps, int)
        else f"{sizes.generation_batch_size}/{sizes.global_batch_size} of an optimizer step"
    )
    yield "rollout", f"{sizes.generation_batch_size}", f"completions = {sizes.num_rollout_prompts} prompts x {group}; {each}{passes}"
    if timetable.num_steps is not None:
        rollouts = -(-timetable.first_of(timetable.num_steps) // (sizes.micro_steps_per_rollout * sizes.num_iterations))
        data = f" over {made.num_prompts} prompts" if made.num_prompts else ""
        yield "run", f"{timetable.num_steps}", f"optimizer steps, {rollouts} rollouts{data}"
    if epochs := epochs_object(timetable):
        yield "epoch", f"{epochs['optimizer_steps']:.4g}", epoch_in_words(epochs, made.checked)
    shown = made.checked.config.plan.plan_rollouts
    old = old_logprobs_summary(timetable, shown)
    stale = [str(r) for r, is_stale in enumerate(old["rollouts"]) if is_stale]
    who = "; every row is on-policy"
    if stale:
        who = f"; stale rollouts {', '.join(stale[:8])}{', ...' if len(stale) > 8 else ''} of {shown}"
    yield "forward-only", f"{old['slices_recomputed']}", f"of {old['slices_total']} slices{who}"
    if sizes.async_rollout_depth:
        (mean, most), (without, _) = staleness(sizes), staleness(replace(sizes, async_rollout_depth=0))
        why = f"optimizer steps on average, at most {most}, between sampling and training; {without:.3g} if training waited"
        yield "one rollout ahead", f"{mean:.3g}", why
    is_shared, _, why = str(made.sharing).partition(": ")
    yield "shared prompts", is_shared, why
    if sizes.layout.pp > 1:
        m = made.cost["sharing"]["micro_batches_of_rank_shared"] if made.cost else a
        why = f"= (pp - 1) / (vpp x m + pp - 1), pp {sizes.layout.pp}, vpp {sizes.layout.vpp or 1}, m {m} micro-batches a rank"
        yield "pipeline bubble", f"{made.bubble:.1%}", why


def _memory(console: Console, memory: dict[str, Any], cost: dict[str, Any]) -> None:
    from rich.table import Table

    console.rule("[bold]memory of one rank", align="left", style="dim")
    if cost:
        console.print(trainable(cost), markup=False)
    names = {
        "weights_bytes": "weights",
        "adapters_bytes": "adapters",
        "gradients_bytes": "gradients",
        "optimizer_bytes": "optimizer",
        "reference_bytes": "reference",
        "teacher_bytes": "teacher",
        "activations_bytes": "activations",
        "logits_bytes": "logits",
    }
    stages = memory["stages"] if len(memory["stages"]) <= 4 else [memory["stages"][i] for i in (0, 1, -2, -1)]
    out = Table(box=None, pad_edge=False)
    out.add_column("GB")
    for stage in stages:
        out.add_column(f"stage {stage['stage']}", justify="right")
    for key, name in names.items():
        if any(stage[key] for stage in stages):
            out.add_row(name, *(gigabytes(stage[key]) for stage in stages))
    for phase in stages[0]["phases"]:
        peak = [stage["phases"][phase] for stage in stages]
        out.add_row(
            f"peak: {phase.replace('_', ' ')}", *(gigabytes(value) for value in peak), style="bold" if phase == memory["peak_phase"] else ""
        )
    console.print(out)
    _beside_the_policy(console, memory)
    if memory["gpu_memory_bytes"]:
        is_small_enough = memory["peak_bytes"] <= memory["gpu_memory_bytes"]
        verdict = "fits in" if is_small_enough else "does NOT fit in"
        console.print(
            f"the peak, {gigabytes(memory['peak_bytes'])} GB, {verdict} {gigabytes(memory['gpu_memory_bytes'])} GB"
            + f"; the KV cache does NOT hold one sequence of {memory['longest_sequence']:,} tokens" * (is_small_enough > memory["fits"]),
            style="green" if memory["fits"] else "bold red",
            markup=False,
        )
    if saved := max(stage["activations_saved_bytes"] for stage in memory["stages"]):
        console.print(
            f"each prompt once: a micro-batch has {memory['tokens_per_micro_batch']:,} tokens on a rank in place of "
            f"{memory['tokens_per_micro_batch_apart']:,}, which saves {gigabytes(saved)} GB of activations",
            markup=False,
        )
    for assumption in [*tower_in_words(memory), *memory["assumptions"]]:
        console.print(f"  {assumption}", style="dim", markup=False)
    console.print()


def tower_in_words(memory: dict[str, Any]) -> list[str]:
    """What sees pictures takes of the first stage, and what to do about it; nothing of a model that does not see."""
    if "tower" not in memory:
        return []
    tower, here = memory["tower"], memory["stages"][0]["num_layers"]
    layers, first = tower["outweighs"]["layers"], tower["outweighs"]["first"]
    even = "" if first in (None, here) else f": stages are most even with decoder_first_pipeline_num_layers {first}, which is {here} now"
    return [
        f"vision tower, on stage 0: {tower['parameters'] / 1e9:.2f} B parameters ({tower['trainable_parameters'] / 1e9:.2f} B train), "
        f"{gigabytes(tower['static_bytes'])} GB, and {gigabytes(tower['activations_bytes'])} GB for up to "
        f"{tower['patches_per_micro_batch']:,} patches; as much as {layers:g} layers{even}"
    ]


def _beside_the_policy(console: Console, memory: dict[str, Any]) -> None:
    sampler = memory["sampler"]
    if not sampler["weights_bytes"]:
        console.print("vLLM: on rollout servers, nothing here", markup=False)
    else:
        console.print(
            f"vLLM: weights {gigabytes(sampler['weights_bytes'])} GB, "
            + (f"room for an adapter {gigabytes(sampler['adapters_bytes'])} GB, " if sampler["adapters_bytes"] else "")
            + f"KV cache {gigabytes(sampler['kv_cache_bytes'])} GB "
            f"({sampler['kv_cache_tokens']:,} tokens)",
            markup=False,
        )
        console.print(room_in_words(memory["offload"]), markup=False)
    if staged := memory["staged_bytes"]:
        console.print(f"async_save: the host holds {gigabytes(staged)} GB for a rank, its share of a checkpoint", markup=False)


def room_in_words(offload: dict[str, Any]) -> str:
    """What the policy gives away while the sampler works."""
    given = [name for name in ("model", "optimizer") if offload[name]]
    said = " and ".join(f"offload_{name}" for name in given or ("model", "optimizer"))
    freed, host, seconds = (offload[("" if given else "most_") + name] for name in ("freed_bytes", "host_bytes", "seconds_per_rollout"))
    does = "frees" if given else "if they were on, they would free"
    return (
        f"{said} {'on' if given else 'off'} ({offload['why']}): {does} {gigabytes(freed)} GB of a rank while vLLM samples; the host holds "
        f"{gigabytes(host)} GB for the rank then, and the way there and back takes {seconds:.2g} s a rollout at {LINK / 1e9:g} GB/s"
    )


def _cost(console: Console, cost: dict[str, Any]) -> None:
    console.rule("[bold]work per rollout", align="left", style="dim")
    if "flops_per_rollout" in cost:
        total = cost["flops_per_rollout_total"]
        for phase, flops in cost["flops_per_rollout"].items():
            if flops:
                console.print(f"{phase.replace('_', ' '):<20}{flops / 1e12:>14,.2f} TFLOP {flops / total:>5.0%}", markup=False)
        once = f", and {gigabytes(cost['base_push_bytes'])} GB once, before the first" if cost["base_push_bytes"] else ""
        console.print(f"{'weight push':<20}{gigabytes(cost['weight_push_bytes']):>14} GB{once}", markup=False)
        calls, buckets = cost["weight_push_collectives"], cost["weight_push_buckets"]
        received = f"the busiest rank receives {gigabytes(cost['weight_push_received_bytes'])} GB"
        console.print(f"{'':<20}{calls:>14,} collectives of {buckets:,} bucket{'s' * (buckets != 1)}; {received}", markup=False)
        console.print(f"{'checkpoint':<20}{gigabytes(cost['checkpoint_bytes']):>14} GB", markup=False)
        if experts := cost.get("experts"):
            console.print(
                f"{'replayed experts':<20}{gigabytes(experts['bytes_of_rollout']):>14} GB a rollout, {experts['bytes_of_token']:,} bytes a "
                f"token; in a checkpoint up to {gigabytes(experts['checkpoint_bytes'])} GB besides",
                markup=False,
            )
        if kept := cost.get("kept"):
            console.print(
                f"{'kept words':<20}{gigabytes(kept['bytes_of_rollout']):>14} GB a rollout at most, {kept['bytes_of_token']:,} bytes a "
                f"drawn token; in a checkpoint up to {gigabytes(kept['checkpoint_bytes'])} GB besides",
                markup=False,
            )
        for assumption in cost["assumptions"]:
            console.print(f"  {assumption}", style="dim", markup=False)
    _sharing(console, cost["sharing"])
    if "packing" in cost:
        packing = cost["packing"]
        console.print(
            f"lengths: {packing['mean_tokens_per_micro_batch']:,.0f} tokens per micro-batch "
            f"({packing['min_tokens_per_micro_batch']:,} to "
            f"{packing['max_tokens_per_micro_batch']:,}); packed {packing['packing_efficiency']:.1%} useful, padded it would be "
            f"{packing['padded_efficiency']:.1%}",
            markup=False,
        )
    console.print()


def _sharing(console: Console, sharing: dict[str, Any]) -> None:
    apart, shared = sharing["tokens_apart"], sharing["tokens_shared"]
    step = f"an optimizer step computes {apart:,} tokens in {sharing['micro_batches_apart']:,} micro-batches"
    if sharing["shares"]:
        step += (
            f" with a prompt for every completion, and {shared:,} ({1 - shared / apart:.1%} fewer) in {sharing['micro_batches_shared']:,} "
            f"with each prompt once: {sharing['groups']:,} groups in {sharing['pieces']:,} pieces"
        )
        if sharing["bubble_apart"]:
            step += f"; pipeline stages wait {sharing['bubble_apart']:.1%} and {sharing['bubble_shared']:.1%} of it"
    console.print(step, markup=False)
    if sharing["shares"] and "flops_apart" in sharing:
        before, after = (sum(sharing[f"flops_{way}"].values()) for way in ("apart", "shared"))
        console.print(
            f"log-probs and training of a rollout: {before / 1e12:,.2f} TFLOP with a prompt for every completion, {after / 1e12:,.2f} "
            f"({1 - after / before:.1%} fewer) with each prompt once",
            markup=False,
        )
    if budget := sharing["budget"]:
        bubble = f", pipeline stages would wait {budget['bubble']:.1%}" if budget["bubble"] else ""
        console.print(
            f"max_tokens_per_micro_batch {budget['max_tokens_per_micro_batch']} would do ({budget['why']}): {budget['tokens']:,} tokens in "
            f"{budget['micro_batches_of_rank']:,} micro-batches a rank{bubble}",
            markup=False,
        )


def _to_paste(flags: str, width: int) -> str:
    """The flags on several lines, each continued with a backslash."""
    lines = [""]
    for flag in flags.split(" --"):
        flag = flag if flag.startswith("--") else f"--{flag}"
        if lines[-1] and len(lines[-1]) + len(flag) + 3 > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{flag}"
    return " \\\n".join(lines)


def trainable(cost: dict[str, Any]) -> str:
    """How much of the model trains, in a line."""
    some, all_ = cost["trainable_parameters"], cost["parameters"]
    return f"trainable parameters: {counted(some)} of {counted(all_)} ({100 * some / all_:.3g} %)"


def counted(value: int) -> str:
    """3.1 M, 7.6 B."""
    unit, name = next(((unit, name) for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if value >= unit), (1, ""))
    return f"{value / unit:.3g}{name}"


def gigabytes(value: float) -> str:
    """In units of 10^9 bytes; small models in three significant digits."""
    return f"{value / 1e9:.2f}" if value >= 1e7 else f"{value / 1e9:.3g}"


def servers_in_words(servers: dict[str, Any], push_bytes: int | None) -> list[str]:
    """How many there are, what they are asked at a time, and who pushes. push_bytes: of one push, where the model is known."""
    some = ", ".join(servers["addresses"][:4]) + (", ..." if len(servers["addresses"]) > 4 else "")
    files = f"{' and ' if some else ''}whoever writes to {', '.join(servers['files'])}" if servers["files"] else ""
    lines = [
        f"{servers['num_servers'] or 'no'} rollout server{'s' * (servers['num_servers'] != 1)} named: {some}{files}",
        f"each is asked {servers['prompts_per_call']} prompts a call, {servers['calls_per_server']} calls at a time (if it decodes "
        f"{servers['max_num_seqs']} sequences together, its default)",
    ]
    sent = f"{push_bytes / 1e9:.3g} GB, " if push_bytes is not None else ""
    lines.append(f"a push is {sent}gathered to rank 0, which sends each byte once for all workers of all servers")
    return lines
