"""`megatron-grpo replay STEP_DUMP`: repeat a recorded step of a run on this machine, in any layout, and diagnose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.commands.analysis.diagnosis import IsolatedRow, diagnose, report_lines
from megatron_grpo.commands.analysis.printing import print_report
from megatron_grpo.commands.analysis.replica_check import list_tensors
from megatron_grpo.commands.analysis.step_dump import StepDump, list_row_keys, with_fingerprints
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError, config_error, problem_with
from megatron_grpo.core.grpo.zero_gradient import RowKind
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.policy.gradient_check import non_finite_rows
from megatron_grpo.core.policy.policy import Policy, ReducedGradient
from megatron_grpo.core.policy.requirements import OPTIMIZER_SETTINGS
from megatron_grpo.core.settings import ParallelConfig
from megatron_grpo.core.trainer.sample_buffer import SampleBuffer
from megatron_grpo.core.types import GlobalBatch, MicroBatch, RowKey, Sample
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.assemble import PolicyParts
from megatron_grpo.run.assemble.output import start_parallel
from megatron_grpo.run.assemble.policy import build_policy
from megatron_grpo.run.checkpoint import rng_state
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import InvalidValueError, Setting, read_value, table
from megatron_grpo.run.models import find_model
from megatron_grpo.run.open_checkpoint import load_weights, make_layout, undamaged_checkpoint

# Settings of the run that are not applied: a replay has its own layout, updates no weights, and scores every row alone, so that more
# micro-batches are summed than in the run, in float32.
_OTHERS = (*vars(ParallelConfig()), "resume", "output_dir", "model", "adapters", "ref_adapters", "share_prefix", "sync_ref_model",
           "micro_batch_size", "max_tokens_per_micro_batch", "optimizer_cpu_offload", "vllm_mode", *OPTIMIZER_SETTINGS)  # fmt: skip


def run_replay(words: Sequence[str], parsed: ParsedConfig) -> int:
    """Run the `replay` command.

    Args:
        words: Positional arguments of the command line: the directory of one step dump.

    Returns:
        The exit code.

    Raises:
        ConfigError: With all problems of the command line, the step dump and the settings.
    """
    problems = list(parsed.problems)
    if len(words) != 1:
        message = "replay needs one step dump: megatron-grpo replay OUTPUT_DIR/debug_dump/step_000012_not_finite"
        raise ConfigError([*problems, problem_with("replay", message)])
    try:
        step_dump = StepDump(words[0])
    except ValueError as error:
        raise ConfigError([*problems, problem_with("replay", f"{error}. Name a folder of OUTPUT_DIR/debug_dump.")]) from None
    if problems:
        raise ConfigError(problems)
    cfg, model, checkpoint = _settings(step_dump, parsed.config)
    findings = replay(step_dump, cfg, model, checkpoint)
    if collectives.rank() == 0:
        result = findings | {"rows": [asdict(row) for row in findings["rows"]]}
        print_report(result, report_lines(findings), as_json=cfg.plan.json)
    state.stop()
    return EXIT_DONE


def _settings(step_dump: StepDump, typed_cfg: Config) -> tuple[Config, Path, Path | None]:
    """Return the configuration of the replay, the model, and the checkpoint with the weights.

    The configuration is that of the run, overridden by typed settings. The checkpoint is None if the step dump contains the weights.
    """
    facts, known_settings = step_dump.facts, table()
    known_names = known_settings.keys() - set(_OTHERS)
    values = {name: _read(known_settings[name], value) for name, value in facts["settings"].items() if name in known_names}
    flags = {name: value for name, value in list_settings(typed_cfg).items() if name in typed_cfg.typed}
    weights, checkpoint = facts["weights"], None
    if facts["has_images"]:
        raise config_error("replay", "its rows have images, which a step dump does not contain: replay supports text only.")
    if facts["settings"].get("beta") and "beta" not in flags and not step_dump.forward("references"):
        raise config_error("replay", "its loss has a KL term (beta), and no log-probs of the reference were recorded: ranks hung. "
                           "Use --beta 0 to replay the rest of its loss.")  # fmt: skip
    model = flags.get("model") or (step_dump.path / "weights" if weights["folder"] == "weights" else facts["model"])
    if "resume" in flags:
        checkpoint = flags["resume"]
    elif weights["folder"] == "adapter":
        values["adapters"] = str(step_dump.path / "adapter")
        if not (step_dump.path / "adapter" / "adapter_config.json").is_file():
            raise config_error("replay", f"{step_dump.path / 'adapter'}, the adapter before the step, does not exist. Copy the "
                               "complete step dump, or name a checkpoint with --resume.")  # fmt: skip
    elif weights["folder"] is None and "model" not in flags:
        checkpoint = weights.get("checkpoint")
        if checkpoint is not None and not Path(checkpoint).is_dir():
            raise config_error("resume", f"the step dump has no weights, and the checkpoint before it, {checkpoint}, does not "
                               "exist. Copy it and name it with --resume, or name a model with --model.")  # fmt: skip
    if checkpoint is not None:
        undamaged_checkpoint(Path(checkpoint))
    values |= {"offload_model": "false", "offload_optimizer": "false", "micro_batch_size": 1}
    return typed_cfg.with_values(values | {"model": str(model)} | flags), find_model(str(model)), Path(checkpoint) if checkpoint else None


def _read(setting: Setting, value: Any) -> Any:
    """Validate a setting of the run from a file: a step dump may be untrusted or come from another version."""
    try:
        return value if value == setting.default else read_value(setting, () if value == [] else value)
    except InvalidValueError as error:
        raise config_error("replay", f"{setting.name} in the settings of the step dump {error}. Copy the step dump again.") from None


def open_policy(
    cfg: Config, model: Path, checkpoint: Path | None, content: dict[str, str], *, num_steps: int, parts: PolicyParts
) -> Policy:  # fmt: skip
    """Build the policy under the layout of `cfg`, with the weights of `model` or of a checkpoint of any layout. Collective.

    Starts the parallel job.

    Args:
        checkpoint: Checkpoint with the weights; None for those of `model`.
        content: Values that must be equal on all ranks.

    Raises:
        ConfigError: If the layout does not suit the model.
    """
    layout, misfits = make_layout(cfg, ModelShape.from_pretrained(model))
    if misfits:
        raise ConfigError(misfits)
    parallel = start_parallel(cfg, layout, content=content)
    if cfg.rollout.bitwise_parity:
        from megatron_grpo.commands.analysis.bitwise_parity import switch_on

        switch_on()
    policy = build_policy(cfg, parallel, model_path=model, num_steps=num_steps, parts=parts)
    if checkpoint is not None:
        load_weights(policy.chunks, checkpoint)
    return policy


def fill_buffer(policy: Policy, samples: Sequence[Sample], left_out: frozenset[RowKind] = frozenset()) -> SampleBuffer:
    """Return a buffer with the samples, which rank 0 distributes. Collective.

    Args:
        left_out: Kinds of rows that are not trained.
    """
    empty = SampleBuffer(parallel=policy.parallel, cut=policy.cut, zero_gradient=left_out)
    return empty.restored(samples if policy.parallel.is_rank_zero else [])


def replay(step_dump: StepDump, cfg: Config, model: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Compute the gradient of a recorded step, then every row of it alone, and diagnose the result. Collective.

    Starts the parallel job. The optimizer does not run.

    Args:
        checkpoint: Checkpoint with the weights; None for those of `model`.

    Raises:
        ConfigError: If rows of the step are missing, if they do not divide over these ranks, or if the layout does not suit the model.
    """
    samples = step_dump.samples()
    missing = list_row_keys(step_dump.step) - {sample.key for sample in samples}
    if missing:
        ranks = sorted(missing)[:8]
        raise config_error("replay", f"{len(missing)} of its {len(list_row_keys(step_dump.step))} rows are missing ({ranks}): the "
                           "ranks that had them hung, and could not write them.")  # fmt: skip
    recorded = PolicyParts(reference=lambda _, initial, __: RecordedReference(step_dump.forward("references"), initial.parallel))
    content = {"step dump": step_dump.path.name}
    policy = open_policy(cfg, model, checkpoint, content, num_steps=step_dump.step.index + 1, parts=recorded)
    parallel = policy.parallel
    buffer = fill_buffer(policy, samples, policy.loss.zero_gradient)
    try:
        _, batch = buffer.batch(step_dump.step, token_weight_fn=policy.loss.token_weights)
    except ValueError as error:
        raise config_error("world_size", f"the rows cannot be split over these ranks: {error}. Use one rank.") from None
    policy.restore_entropy(step_dump.facts.get("guard", {}))
    if (step_dump.path / rng_state.FILE).exists():
        rng_state.restore(step_dump.path / rng_state.FILE)
    weights = _weights(step_dump, policy)
    gradient, first = _forward(policy, batch)
    rows = _rows(step_dump, policy, batch, gradient, {sample.key: sample.prompt_number for sample in samples})
    copies = _copies(step_dump, policy, batch)
    return diagnose(step_dump, parallel.layout, gradient.metrics, weights, first, rows, copies)


class RecordedReference:
    """A reference that returns the log-probs recorded by the run.

    Args:
        logprobs: Recorded log-probs by row, float32.
    """

    chunks = saved_chunks = ()

    def __init__(self, logprobs: Mapping[RowKey, np.ndarray], parallel: Any):
        self._logprobs, self._parallel = logprobs, parallel

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the recorded log-probs of each micro-batch, float32 [C]."""
        logprobs = []
        for micro in micro_batches:
            values = np.zeros(len(micro.targets), dtype=np.float32)
            for index, row in enumerate(micro.rows):  # type: ignore[attr-defined]  # the reference is called for training rows only
                if row in self._logprobs:  # a row without a gradient that fills a micro-batch here, and did not in the run
                    values[micro.sequence == index] = self._logprobs[row]
            logprobs.append(values)
        return logprobs

    def last_stage_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the log-probs as `logprobs` does, on the last pipeline stage only; an empty list elsewhere."""
        return self.logprobs(micro_batches) if self._parallel.is_last_stage else []

    def after_step(self, step: int, policy: Any) -> None:
        """Do nothing: the reference is fixed."""


class _StopAfterGradients(Exception):
    """Hooks of a training step that end it when the gradient is summed, by raising themselves."""

    def on_gradients_reduced(self, gradient: ReducedGradient) -> None:
        self.gradient = gradient
        raise self

    def on_pre_optimizer_step(self, gradient: ReducedGradient, skipped_step: Any) -> None:
        raise AssertionError("never reached")


def _forward(policy: Policy, batch: GlobalBatch) -> tuple[ReducedGradient, str | None]:
    """Run the step up to its summed gradient. Collective.

    Returns:
        (the summed gradient, the first module with an output that is not finite or None).
    """
    stopped = _StopAfterGradients()
    with first_not_finite(policy.chunks) as names, suppress(_StopAfterGradients):
        policy.train_step(batch, stopped)
        raise config_error("replay", "nothing in this step trains: all of its rows were filtered.")
    return stopped.gradient, next((name for name in collectives.all_gather_object(names[0] if names else None) if name), None)


@contextmanager
def first_not_finite(chunks: Sequence[torch.nn.Module]) -> Iterator[list[str]]:
    """Record the names of modules whose output is not finite, in the order of execution.

    Only the first such module is recorded.

    Yields:
        The list of names, which is filled while the context is active.
    """
    first: list[str] = []

    def watch(name: str, module: Any, args: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not first and any(isinstance(x, torch.Tensor) and not bool(torch.isfinite(x.detach()).all()) for x in tensors):
            first.append(name)

    with CleanUp() as hooks:
        for name, module in (part for chunk in chunks for part in chunk.named_modules()):
            if name and not any(module.children()):
                hooks.add(module.register_forward_hook(partial(watch, name)).remove)
        yield first


def _weights(step_dump: StepDump, policy: Policy) -> dict[str, Any]:
    """Compare the weights with those of the run by fingerprint, and find those that are not finite. Collective."""
    recorded: dict[str, str] = step_dump.facts["weights"].get("fingerprints", {})
    marks: dict[str, str] = {}
    faults: dict[str, str] = {}
    adapters = policy.named_adapters() if policy.adapters is not None else ()
    for name, tensor in with_fingerprints(chain(policy.exchange.stream(policy.tensors(), "weights"), adapters), marks):
        indices = torch.nonzero(~torch.isfinite(tensor))
        if len(indices):
            first = indices[0].tolist()
            value = float(tensor[tuple(first)])
            faults[name] = f"{len(indices)} of its {tensor.numel()} values, the first at {first}: {value:g}"
    equal = [name for name, mark in marks.items() if recorded.get(name) == mark]
    return {"tensors": len(marks), "recorded": len(recorded), "same": len(equal), "not_finite": faults}


def _rows(
    step_dump: StepDump, policy: Policy, batch: GlobalBatch, gradient: ReducedGradient, prompts: Mapping[RowKey, int]
) -> list[IsolatedRow]:
    """Compute every row of the step alone, on all ranks. Collective."""
    recorded = step_dump.forward("logprobs")
    measured: dict[RowKey, IsolatedRow] = {}
    norms: dict[RowKey, float] = {}
    for micro, logprobs, norm in policy.each_alone(batch):
        [key] = micro.rows
        norms[key] = norm
        if logprobs is not None:
            _, cause = non_finite_rows(micro, logprobs, gradient.references.get(key))
            forward, run = gradient.logprobs[key], recorded.get(key)
            gap, token = _largest(np.abs(forward - micro.sampler_logprobs))
            measured[key] = IsolatedRow(
                key=key, norm=norm, what=cause, num_tokens=len(logprobs), gap=gap, token=token, prompt_number=prompts[key],
                forward=None if run is None else _largest(np.abs(forward - run))[0],
            )  # fmt: skip
    merged: dict[RowKey, IsolatedRow] = {}
    for rows, norms_of_rank in collectives.all_gather_object((measured, norms)):
        merged = rows | merged
        for key, norm in norms_of_rank.items():
            if key in merged and not norm <= merged[key].norm:
                merged[key] = replace(merged[key], norm=norm)
    return [merged[key] for key in sorted(merged)]


def _largest(values: np.ndarray) -> tuple[float, int]:
    """Return the largest number and its index; (0, -1) for an empty array. NaN is returned only if all numbers are NaN."""
    if not len(values):
        return 0.0, -1
    index = int(np.nanargmax(values)) if not np.isnan(values).all() else 0
    return float(values[index]), index


def _copies(step_dump: StepDump, policy: Policy, batch: GlobalBatch) -> list[dict[str, Any]]:
    """Compute loss and gradient norm with each rank's copy of a weight that differed between ranks. Collective.

    Copies are skipped if this layout does not hold the weight in the same shape.
    """
    mismatches = []
    tensors = list_tensors(policy)
    for rank, label, copy in step_dump.replicas():
        kind, _, name = label.partition(" ")
        tensor = tensors.get(name)
        if kind != "weight" or tensor is None or tensor.shape != copy.shape:
            continue
        saved = tensor.detach().clone()
        tensor.detach().copy_(copy)
        gradient, _ = _forward(policy, batch)
        tensor.detach().copy_(saved)
        mismatches.append({"rank": rank, "name": name, "loss": gradient.metrics["loss"], "grad_norm": gradient.metrics["grad_norm"]})
    return mismatches
