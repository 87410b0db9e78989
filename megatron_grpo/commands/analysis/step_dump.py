"""Dump of one optimizer step: files that a run writes when a step is faulty, so that it can be repeated elsewhere.

OUTPUT_DIR/debug_dump/step_000012_not_finite/
    step_dump.json  reason, settings, rows of the training schedule, metrics of the step, fingerprints of all weights (whole tensors)
    rows/           samples of the step, in the format in which checkpoints store waiting rows: tokens, advantages, log-probs, versions
    forward/        log-probs of the training forward and of the reference, by row
    rng.npz         random generators of all ranks
    weights/        the model before the step (a Hugging Face checkpoint), or adapter/; neither if it is too large
    replicas/       each rank's copies that differ, if the replica check found some

The directory gets its name when it is complete. `analysis.replay` reads it.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo import __version__
from megatron_grpo.commands.analysis.fingerprint import fingerprint
from megatron_grpo.core.base.files import atomic_write, parse_json
from megatron_grpo.core.batching.schedule import MicroStep, ScheduledStep
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.policy import Policy, ReducedGradient
from megatron_grpo.core.trainer.sample_buffer import SampleBuffer
from megatron_grpo.core.trainer.step_monitor import DumpReason
from megatron_grpo.core.types import RowKey, Sample
from megatron_grpo.core.weights.lora import peft_name
from megatron_grpo.run.checkpoint import rng_state
from megatron_grpo.run.checkpoint.distributed import CheckpointError, errors_on_all_ranks
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.checkpoint.samples import read_samples, serialize_samples
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.export import drain_rest
from megatron_grpo.run.hf_writer import HfWriter, write_adapter

FORMAT, FACTS = 1, "step_dump.json"
MAX_REPLICA_BYTES = 64 * 1024**2  # maximum bytes of differing copies that a rank writes
GB = 1000**3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDumps:
    """Writer of a run's step dumps.

    Args:
        folder: Directory of the step dumps.
        cfg: Configuration of the run.
        model_path: Directory of the initial model of the run.
        last_checkpoint: Returns the directory of the newest checkpoint; None if there is none.
        print_line: Prints a message.
    """

    folder: Path
    cfg: Config
    model_path: Path
    last_checkpoint: Callable[[], Path | None] = lambda: None
    print_line: Callable[[str], None] = field(default=print)

    def write(self, moment: DumpReason, buffer: SampleBuffer, policy: Policy, gradient: ReducedGradient) -> Path | None:
        """Write a step dump. Collective.

        A failure is reported, and does not affect the run.

        Args:
            policy: Policy before the update.

        Returns:
            The directory; None if step dumps are off or it could not be written.
        """
        if not self.cfg.run.debug_dump_steps:
            return None
        path = self.folder / f"step_{moment.step.index + 1:06d}_{moment.kind}"
        try:
            with self._whole(path) as partial:
                random = rng_state.gather_states()
                with errors_on_all_ranks(f"writing {partial}"):
                    _write_own(partial, moment, buffer, policy, gradient)
                    if random is not None:
                        (partial / rng_state.FILE).write_bytes(random)
                weights = self._weights(partial, policy)
                with errors_on_all_ranks(f"writing {partial / FACTS}"):
                    if collectives.rank() == 0:
                        facts = self._facts(moment, buffer) | _measured(policy, gradient) | {"weights": weights}
                        (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        except CheckpointError as error:
            self.print_line(f"WARNING: the step dump {path} could not be written: {error}")
            return None
        self.print_line(f"the step is written to {path} ({_describe(weights)}); replay it with: megatron-grpo replay {path}")
        return path

    def dump_on_hang(self, moment: DumpReason, buffer: SampleBuffer, policy: Policy) -> None:
        """Write what this rank has while other ranks hang: its rows, and the location of the weights. Not collective."""
        if not self.cfg.run.debug_dump_steps:
            return
        path = self.folder / f"step_{moment.step.index + 1:06d}_{moment.kind}"
        (path / "rows").mkdir(parents=True, exist_ok=True)
        keys = list_row_keys(moment.step)
        samples = [sample for key, sample in buffer.samples.items() if key in keys]
        if samples:
            with atomic_write(path / "rows" / f"rank_{collectives.rank():05d}.npz") as stream:
                stream.write(serialize_samples(samples))
        facts = self._facts(moment, buffer) | {"weights": self._elsewhere(0)}
        with atomic_write(path / FACTS, writer=f"{collectives.rank():05d}") as stream:  # the last complete file of all ranks stays
            stream.write(f"{json.dumps(facts, indent=1)}\n".encode())

    @contextmanager
    def _whole(self, path: Path) -> Iterator[Path]:
        """Create a directory that all ranks write to. Rank 0 renames it when it is complete, and removes the oldest step dumps."""
        partial, first = path.with_name(f".{path.name}.partial"), collectives.rank() == 0
        with errors_on_all_ranks(f"creating {partial}"):
            if first:
                for leftover in self.folder.glob(".step_*.partial"):  # left by a run that was killed while it wrote
                    shutil.rmtree(leftover, ignore_errors=True)
                for part in ("rows", "forward", "replicas"):
                    (partial / part).mkdir(parents=True)
        try:
            yield partial
            with errors_on_all_ranks(f"publishing {path}"):
                if first:
                    shutil.rmtree(path, ignore_errors=True)
                    partial.rename(path)
                    for old in sorted(self.folder.glob("step_*"), key=lambda dump: dump.stat().st_mtime)[: -self.cfg.run.debug_dump_steps]:
                        shutil.rmtree(old, ignore_errors=True)
        finally:
            if first:
                shutil.rmtree(partial, ignore_errors=True)

    def _facts(self, moment: DumpReason, buffer: SampleBuffer) -> dict[str, Any]:
        samples = [sample for key, sample in buffer.samples.items() if key in list_row_keys(moment.step)]
        step, layout = moment.step, buffer.parallel.layout
        return {
            "format": FORMAT, "written_by": f"megatron_grpo {__version__}", "torch": torch.__version__,
            "kind": moment.kind, "why": moment.words, "step": step.index + 1, "version": step.index,
            "micro_steps": [asdict(micro) for micro in step.micro_steps],
            "mismatches": [asdict(mismatch) for mismatch in moment.finding.mismatches] if moment.finding else [],
            "has_images": any(sample.images for sample in samples), "model": str(self.model_path), "settings": list_settings(self.cfg),
            "layout": {name: getattr(layout, name) for name in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp")}
                      | {"sequence_parallel": buffer.parallel.sequence_parallel},
        }  # fmt: skip

    def _weights(self, partial: Path, policy: Policy) -> dict[str, Any]:
        """Write the model unless it is too large, or the adapter. Collective.

        Returns:
            The `weights` object of step_dump.json, with fingerprints of all whole tensors.
        """
        tensors, exchange, first = policy.tensors(), policy.exchange, collectives.rank() == 0
        size, bound = exchange.whole_bytes(tensors), int(self.cfg.run.debug_dump_weights_gb * GB)
        marks: dict[str, str] = {}
        stream = with_fingerprints(exchange.stream(tensors, "weights"), marks)
        facts = self._elsewhere(size)
        if policy.adapters is None and size <= bound:
            with errors_on_all_ranks(f"writing {partial / 'weights'}"), drain_rest(stream) as remaining:
                if first:
                    with HfWriter(partial / "weights", self.model_path, expected=exchange.map.expected_hf_names()) as writer:
                        for name, tensor in remaining:
                            writer(name, tensor)
            facts = {"folder": "weights", "bytes": size}
        else:
            deque(stream, maxlen=0)
        if policy.adapters is not None:
            stream = with_fingerprints(policy.named_adapters(), marks)
            with errors_on_all_ranks(f"writing {partial / 'adapter'}"), drain_rest(stream) as remaining:
                if first:
                    peft_tensors = ((peft_name(name, exchange.map.shape), tensor) for name, tensor in remaining)
                    write_adapter(partial / "adapter", peft_tensors, policy.adapters.config, {})
            facts = {"folder": "adapter", "bytes": 0, "base": str(self.model_path)}
        return facts | {"fingerprints": marks}

    def _elsewhere(self, size: int) -> dict[str, Any]:
        last = self.last_checkpoint()
        return {"folder": None, "bytes": size, "checkpoint": str(last) if last else None}


class StepDump:
    """A step dump that has been written.

    Raises:
        ValueError: If the directory is not a complete step dump of the format that this version reads.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        facts = self.path / FACTS
        try:
            self.facts: dict[str, Any] = parse_json(facts.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a step dump: its {FACTS} cannot be read ({error})") from None
        written = self.facts.get("format") if isinstance(self.facts, dict) else None
        if written != FORMAT:
            raise ValueError(f"{path} has format {written}; this version reads format {FORMAT}")
        for file in (facts, *sorted(self.path.glob("*/rank_*.npz")), *self.path.glob(rng_state.FILE)):
            try:
                self._check_file(file)
            except Exception as error:  # noqa: BLE001 - np.load and zipfile raise various exceptions for a truncated or foreign file
                raise ValueError(f"{path} is not a complete step dump: {file.name if file.parent == self.path else file} cannot be read "
                                 f"({type(error).__name__}: {error})") from None  # fmt: skip

    def _check_file(self, file: Path) -> None:
        """Read the parts of a file that a replay uses, to check them. Raises any exception."""
        if file.name == FACTS:
            if not self.step.micro_steps:
                raise ValueError("its step has no rows")
            {name: float(value) for name, value in self.facts.get("metrics", {}).items()}
            required = ("kind", "why", "has_images", "model", "mismatches")
            _ = [self.facts[name] for name in required], dict(self.facts["settings"]), dict(self.facts["weights"])["folder"]
        elif file.parent.name == "rows":
            read_samples(file)
        else:
            with np.load(file, allow_pickle=False) as arrays:
                _ = [arrays[name].shape for name in arrays.files]

    @property
    def step(self) -> ScheduledStep:
        """The step from the training schedule, with its micro-steps only."""
        micro_steps = tuple(MicroStep(**{**fields, "rows": tuple(fields["rows"])}) for fields in self.facts["micro_steps"])
        nothing = range(0)
        return ScheduledStep(index=self.facts["version"], arriving=nothing, immediate=nothing, launches=nothing, evaluates=nothing,
                    micro_steps=micro_steps, old_logprob_slices=(), keeps=(), last_use=())  # fmt: skip

    def samples(self) -> list[Sample]:
        """Return the samples of the step in order, without duplicates."""
        by_key = {sample.key: sample for path in sorted((self.path / "rows").glob("*.npz")) for sample in read_samples(path)}
        return [by_key[key] for key in sorted(by_key)]

    def forward(self, kind_wanted: str) -> dict[RowKey, np.ndarray]:
        """Return recorded log-probs by row, float32 [masked]."""
        labeled = [(label.split("/"), values) for _, label, values in self._arrays("forward")]
        return {(int(rollout), int(row)): values for (kind, rollout, row), values in labeled if kind == kind_wanted}

    def lacks(self) -> list[str]:
        """Return the missing parts that a replay would compare with or restore. Step dumps of a hang contain fewer parts."""
        parts = {"its log-probs (forward/): they are not compared": any((self.path / "forward").glob("*.npz")),
                 f"its generators ({rng_state.FILE}): dropout differs": (self.path / rng_state.FILE).exists()}  # fmt: skip
        return [words for words, is_there in parts.items() if not is_there]

    def replicas(self) -> list[tuple[int, str, torch.Tensor]]:
        """Return (rank, "kind name", values) of the copies that differ, by ranks."""
        copies = []
        for rank, label, raw in self._arrays("replicas"):
            name, dtype, shape = label.split("|")
            copies.append((rank, name, torch.from_numpy(raw).view(getattr(torch, dtype)).view([int(n) for n in shape.split(",") if n])))
        return copies

    def _arrays(self, folder: str) -> Iterator[tuple[int, str, np.ndarray]]:
        """Yield (rank, name, array) for each array of the files in a folder."""
        for path in sorted((self.path / folder).glob("rank_*.npz")):
            with np.load(path, allow_pickle=False) as file:
                yield from ((int(path.stem.removeprefix("rank_")), name, file[name]) for name in file.files)


def list_row_keys(step: Any) -> set[RowKey]:
    """Return the keys of the rows that a step trains."""
    return {(micro.rollout, row) for micro in step.micro_steps for row in range(*micro.rows)}


def with_fingerprints(stream: Iterable[tuple[str, torch.Tensor]], marks: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream of (name, tensor) through, and store the fingerprint of each tensor."""
    for name, tensor in stream:
        marks[name] = f"{int(fingerprint(tensor)) % (1 << 64):016x}"
        yield name, tensor


def _write_own(partial: Path, moment: DumpReason, buffer: SampleBuffer, policy: Policy, gradient: ReducedGradient) -> None:
    """Write the files of this rank."""
    name, keys = f"rank_{collectives.rank():05d}.npz", list_row_keys(moment.step)
    if samples := [sample for sample in buffer.to_save() if sample.key in keys]:
        (partial / "rows" / name).write_bytes(serialize_samples(samples))
    if policy.parallel.reports_its_rows:
        arrays = {f"logprobs/{r}/{i}": values for (r, i), values in gradient.logprobs.items()}
        arrays |= {f"references/{r}/{i}": values for (r, i), values in gradient.references.items()}
        np.savez(partial / "forward" / name, allow_pickle=False, **arrays)
    finding = moment.finding
    if finding is not None and policy.parallel.rank in {rank for mismatch in finding.mismatches[:1] for rank, _ in mismatch.copies}:
        copies: dict[str, np.ndarray] = {}
        for label, tensor in finding.mine.items():
            if sum(array.nbytes for array in copies.values()) + tensor.nbytes <= MAX_REPLICA_BYTES:
                raw = tensor.detach().cpu().contiguous()
                described = f"{label}|{str(raw.dtype).removeprefix('torch.')}|{','.join(map(str, raw.shape))}"
                copies[described] = raw.reshape(-1).view(torch.uint8).numpy()
        if copies:
            np.savez(partial / "replicas" / name, allow_pickle=False, **copies)


def _measured(policy: Policy, gradient: ReducedGradient) -> dict[str, Any]:
    """Return the metrics of the step. Numbers that are not finite become strings, because JSON has none."""
    metrics = {name: value if np.isfinite(value) else str(value) for name, value in gradient.metrics.items()}
    return {"metrics": metrics, "guard": policy.gradient_check_state(), "num_loss_tokens": gradient.batch.num_loss_tokens}


def _describe(weights: Mapping[str, Any]) -> str:
    if weights["folder"]:
        return "with its weights" if weights["folder"] == "weights" else "with its adapter"
    size = f"its weights, {weights['bytes'] / GB:.3g} GB, are above debug_dump_weights_gb"
    return f"{size}; the nearest are in {weights['checkpoint'] or 'the initial model of the run'}"
