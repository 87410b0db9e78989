"""`megatron-grpo mismatch`: measure the difference between trainer and sampler log-probs, and find the first operation that causes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.commands.analysis import traced, vllm_traced
from megatron_grpo.commands.analysis.args import MismatchArgs, read_mismatch_args
from megatron_grpo.commands.analysis.operations import (
    LIMITS,
    ComparedRow,
    Operation,
    compare_operations,
    make_sequence,
    one_per_micro_batch,
)
from megatron_grpo.commands.analysis.printing import print_report
from megatron_grpo.commands.analysis.report import (
    describe_differences,
    draw,
    find_worst_tokens,
    read_drift,
    report_lines,
    summarize_differences,
    worst_row,
)
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError, Problem, config_error, problem_with
from megatron_grpo.core.base.files import plot_obstacle
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.reference import FrozenPolicy
from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.rollout.probes import probe_sequences
from megatron_grpo.core.trainer.weight_sync import WeightSyncError, WeightSyncManager, check_weights
from megatron_grpo.core.types import Prompt
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.assemble.output import start_parallel
from megatron_grpo.run.assemble.policy import build_loaded
from megatron_grpo.run.config import ParsedConfig, sampling_mask
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import load_tokenizer
from megatron_grpo.run.metrics.rollout import TOKENS
from megatron_grpo.run.metrics.summary import USUAL
from megatron_grpo.run.models import find_model
from megatron_grpo.run.open_checkpoint import make_layout

WORST = 8  # tokens with the largest differences that are listed
TOGETHER = 4  # minimum rows of a micro-batch
LONGEST_ANSWER = 64  # maximum tokens of a newly sampled completion


def run_mismatch(argv: Sequence[str], parse: Callable[[Sequence[str]], ParsedConfig]) -> int:
    """Run the `mismatch` command and print its findings, as one JSON object with `--json`.

    Returns:
        The exit code; 1 if trainer and sampler differ by more than rounding.

    Raises:
        ConfigError: With all problems, before a model loads.
    """
    args = read_mismatch_args(argv, parse)
    cfg = _settings_for_comparison(args)
    model_path = find_model(cfg.model.model, with_code=cfg.model.trust_remote_code)
    shape = ModelShape.from_pretrained(model_path)
    layout, problems = make_layout(cfg, shape)
    if problems := [*problems, *_problems(layout, shape)]:
        raise ConfigError(problems)
    figure = _folder(args, cfg) / f"step_{args.step:06d}.png"
    try:
        figure.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise config_error("output_dir", f"{figure.parent} cannot be written. Name another --output_dir.") from None
    if "output_dir" in cfg.typed and (obstacle := plot_obstacle(figure)):
        raise config_error("output_dir", f"output_dir: {obstacle}")
    with CleanUp() as clean_up:
        parallel = start_parallel(cfg, layout, content={"question": f"{args.name} {args.row} {args.num_rows}"})
        clean_up.add(state.stop)
        findings, rows, operations = compare_rows(args, cfg, shape, model_path, parallel, clean_up)
        if collectives.rank() == 0:
            is_drawn = draw(figure, findings, rows, operations)
            print_report(findings, report_lines(findings, rows, operations, figure if is_drawn else None), as_json=cfg.plan.json)
    return EXIT_CRASH if findings["verdict"] else EXIT_DONE


def compare_rows(
    args: MismatchArgs, cfg: Config, shape: ModelShape, model_path: Path, parallel: ParallelState, clean_up: CleanUp
) -> tuple[dict[str, Any], list[ComparedRow], Sequence[Operation]]:
    """Score the rows with trainer and sampler, and compare their operations on one row. Collective.

    Returns:
        (the findings, as in `report.Findings`; compared rows; compared operations, none if the model is not supported).

    Raises:
        ConfigError: If `row` is beyond the rows that are compared.
    """
    dtype = cfg.model.torch_dtype
    tokenizer = load_tokenizer(str(model_path), trust_remote_code=cfg.model.trust_remote_code)
    rows, prompts, source, notes = _rows_to_compare(args, cfg, shape, tokenizer)
    number = len(prompts)
    if args.row is not None and args.row >= number:
        raise config_error("row", f"row ({args.row}) does not exist: {number} rows are compared. Use 0 to {number - 1}.")
    longest = max([*(len(row.tokens) for row in rows), *(len(prompt.token_ids) for prompt in prompts)])
    answer = min(cfg.rollout.max_completion_length, LONGEST_ANSWER)
    together = max(cfg.batch.micro_batch_size, TOGETHER)
    model = build_loaded(cfg, shape, parallel, model_path=model_path, checkpoint=args.checkpoint, micro_batch_size=together)
    engine = ColocatedEngine.build(
        cfg.rollout, model_path=model_path, dtype=dtype, max_model_len=min(longest + answer + 1, shape.max_position_embeddings),
        seed=cfg.run.seed, rank=parallel.rank, world_size=parallel.world_size, trust_remote_code=cfg.model.trust_remote_code,
    )  # fmt: skip
    clean_up.add(engine.close)
    sampling = SamplingSettings(n=1, max_completion_length=answer, temperature=cfg.rollout.temperature)
    # Fill the prefix cache before the sync, so that entries that survive the sync show up.
    engine.generate(prompts, replace(sampling, max_completion_length=1), seed=cfg.run.seed)
    WeightSyncManager(model, engine, verify=False, starts_as_checkpoint=False).sync_weights(args.step)
    rows = rows or _sample_rows(engine, prompts, sampling, seed=cfg.run.seed)
    scored = model.scorer.score([make_sequence(row.tokens.tolist(), row.opening) for row in rows])
    compared = [
        replace(row, trainer=np.where(row.is_sampled, trainer, 0).astype(np.float32)) for row, trainer in zip(rows, scored, strict=True)
    ]
    chosen = worst_row(compared) if args.row is None else args.row
    operations: Sequence[Operation] = ()
    limit = max(LIMITS[dtype], LIMITS[engine.dtype])
    if reason := traced.not_traced(model.chunks[0]) or vllm_traced.not_traced(engine):
        notes.append(f"The operations of this model are not compared: it {reason}.")
    else:
        score = one_per_micro_batch(model.scorer)
        operations = compare_operations(engine, model.chunks[0], score, compared[chosen], temperature=sampling.temperature, limit=limit)
    bound = max(USUAL[dtype], USUAL[engine.dtype])
    findings = {
        "subject": args.name,
        "step": args.step,
        "dtype": dtype,
        "ranks": parallel.world_size,
        "source": source,
        "rows": number,
        "difference": summarize_differences(compared, bound),
        "bound": bound,
        "worst_tokens": find_worst_tokens(compared, tokenizer, WORST),
        "drift": read_drift(args.run),
        "row": chosen,
        "limit": limit,
        "operations": [asdict(op) | {"over": op.is_over} for op in operations],
        "notes": notes,
        "push": _weight_sync_problem(model, engine, args.step, dtype),
        "named": [op.name for op in operations if op.is_over],
    }
    return findings | {"verdict": describe_differences(findings, operations)}, compared, operations


def _weight_sync_problem(model: FrozenPolicy, engine: ColocatedEngine, version: int, dtype: str) -> str:
    """Return the message of the run's own check of a weight sync, or an empty string."""
    try:
        check_weights(model, engine, version=version, is_low_precision=dtype != "float32")
    except WeightSyncError as error:
        return str(error)
    return ""


# ---- rows to compare -------------------------------------------------------------------------------------------------------------------


def _rows_to_compare(
    args: MismatchArgs, cfg: Config, shape: ModelShape, tokenizer: Any
) -> tuple[list[ComparedRow], list[Prompt], str, list[str]]:
    """Select the rows to compare.

    Returns:
        (rows that the run recorded with these weights; empty if they must be sampled, prompts of the rows, their source in words, notes for
        the user).
    """
    notes = list[str]()
    if sampling_mask.samples_from_part(cfg.rollout):
        notes.append(
            f"The run samples with {sampling_mask.describe(cfg.rollout)}; here all tokens stay, because tables "
            "of completions do not contain the sampling mask."
        )
    if args.cfg.rollout.bitwise_parity:
        notes.append("The run trains with the sampler's arithmetic (bitwise_parity); the trainer's own arithmetic is compared here.")
    is_as_run = args.dtype is None and not sampling_mask.samples_from_part(cfg.rollout)
    if args.run is not None and is_as_run and (rows := read_sampled_rows(args.run, version=args.step)):
        rows = evenly_spaced(rows, args.num_rows)
        return rows, _prompts(row.prompt for row in rows), "recorded by the run with these weights", notes
    if args.run is not None and (rows := read_sampled_rows(args.run)):
        run_prompts = list(dict.fromkeys(row.prompt for row in rows))
        prompts = _prompts(run_prompts[number % len(run_prompts)] for number in range(args.num_rows))
        return [], prompts, "sampled again from prompts of the run", notes
    probes = probe_sequences(tokenizer, vocab_size=shape.vocab_size, max_model_len=shape.max_position_embeddings)
    tokens = [probe.token_ids.tolist() for probe in probes]
    cut = [tokens[i % len(tokens)][: len(tokens[0]) * (i // len(tokens) + 1) // 4 + 1] for i in range(args.num_rows)]
    return [], _prompts(cut), "sampled again from random tokens, because no prompts are recorded", notes


def read_sampled_rows(run: Path, *, version: int | None = None) -> list[ComparedRow]:
    """Read the rows that weights of one version sampled, from a run's `completions/step_*.parquet`.

    Args:
        version: Weight version; None for the latest one recorded.

    Returns:
        The rows. Empty if nothing was recorded, or the run recorded no tokens.
    """
    tables: dict[int, list[Path]] = {}
    for path in sorted((run / "completions").glob("step_*")):
        if match := re.fullmatch(r"step_(\d{6,})(_\d+)?(\.parquet)?", path.name):
            tables.setdefault(int(match[1]), []).extend(sorted(path.glob("node_*.parquet")) if path.is_dir() else [path])
    versions = sorted(tables, reverse=True) if version is None else [version]
    for number in versions:
        if rows := [row for path in tables.get(number, []) for row in _rows(path)]:
            return rows
    return []


def _rows(path: Path) -> list[ComparedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        if not {"version", *TOKENS} <= set(pyarrow.parquet.read_schema(path).names):
            return []
        table = pyarrow.parquet.read_table(path, columns=list(TOKENS))
    except (OSError, pyarrow.ArrowException):
        return []
    rows = zip(*(table[name].to_pylist() for name in TOKENS), strict=True)
    compared = [
        ComparedRow.unscored(np.array(tokens, dtype=np.int64), np.array(logprobs, dtype=np.float32))
        for tokens, logprobs in rows
        if tokens is not None
    ]
    return [row for row in compared if row.is_sampled.any() and row.prompt]


def evenly_spaced(rows: list[ComparedRow], max_rows: int) -> list[ComparedRow]:
    """Return at most `max_rows` rows, evenly spaced.

    Args:
        max_rows: Maximum number of rows.
    """
    return [rows[i * len(rows) // max_rows] for i in range(max_rows)] if len(rows) > max_rows else rows


def _prompts(prompts: Iterable[Sequence[int]]) -> list[Prompt]:
    return [Prompt(number=n, row=n, raw="", token_ids=tuple(tokens), columns={}) for n, tokens in enumerate(prompts)]


def _sample_rows(engine: ColocatedEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[ComparedRow]:
    """Sample one completion per prompt. Collective; returns all rows on every rank, in the order of the prompts."""
    groups = [group for part in collectives.all_gather_object(engine.generate(prompts, sampling, seed=seed)) for group in part]
    completions = [group.completions[0] for group in sorted(groups, key=lambda group: group.prompt.number)]
    return [ComparedRow.unscored(c.sequence.token_ids, np.where(c.sequence.mask, c.logprobs, np.nan)) for c in completions]


def _settings_for_comparison(args: MismatchArgs) -> Config:
    """Return the run's settings without those that only training needs or that make operations unobservable."""
    cfg = args.cfg
    values: dict[str, Any] = {
        "vllm_mode": "colocate", "vllm_tensor_parallel_size": cfg.parallel.tensor_model_parallel_size, "vllm_enforce_eager": True,
        "sleep_level": 0, "beta": 0.0, "router_replay_mode": "disabled", "share_prefix": "false", "bitwise_parity": False,
    }  # fmt: skip
    if "transformer_impl" not in cfg.typed:
        values["transformer_impl"] = "local"
    if args.dtype is not None:
        values["vllm_dtype"] = None
    return cfg.with_values(values)


def _problems(layout: Layout, shape: ModelShape) -> list[Problem]:
    problems = []
    cut = {"pipeline_model_parallel_size": layout.pp, "context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep}
    for name, size in cut.items():
        if size > 1:
            message = f"{name} ({size}): mismatch compares whole layers, shard by shard. Leave it out: checkpoints load in any layout."
            problems.append(Problem(flags=(name,), nearest={name: [1]}, message=message))
    if not problems and layout.world_size > layout.tp:
        message = f"{layout.world_size} ranks hold several copies of a model that is split over {layout.tp} ranks. Start {layout.tp}."
        problems.append(problem_with(("world_size", "tensor_model_parallel_size"), message))
    if shape.vision is not None:
        problems.append(problem_with("model", "mismatch supports text models, and this is a vision-language model."))
    return problems


def _folder(args: MismatchArgs, cfg: Config) -> Path:
    if "output_dir" in cfg.typed:
        return Path(cfg.run.output_dir)
    return args.run / "mismatch" if args.run is not None else Path(f"{args.cfg.model.model}-mismatch")
