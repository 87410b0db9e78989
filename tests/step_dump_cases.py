"""Steps with faults on two real ranks and a recorder that dumps them, and their replay with the command."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import torch

from megatron_grpo.core.batching.schedule import MicroStep, ScheduledStep
from tests import parity_cases as cases


def find_step(samples, index: int, rows_per_slice: int) -> ScheduledStep:
    """Return the schedule's step like `parity_cases.find_step`."""
    micro_steps = tuple(
        MicroStep(micro_step=n, optimizer_step=index, rollout=samples[first].rollout, pass_index=0, slice_index=n,
                  rows=(first, first + rows_per_slice), sampled_by_version=index, on_policy_version=index,
                  staleness=0, old_logprobs="on_policy")
        for n, first in enumerate(range(0, len(samples), rows_per_slice))
    )  # fmt: skip
    no = range(0)
    return ScheduledStep(
        index=index,
        arriving=no,
        immediate=no,
        launches=no,
        evaluates=no,
        micro_steps=micro_steps,
        old_logprob_slices=(),
        keeps=(),
        last_use=(),
    )


def make_step_recorder(policy, cfg, path, folder: Path, *, check: int = 0, ends_run: bool = True, said: list | None = None):
    from megatron_grpo.commands.analysis.replica_check import ReplicaCheck
    from megatron_grpo.commands.analysis.step_dump import StepDumps
    from megatron_grpo.core.trainer.step_monitor import StepMonitor
    from megatron_grpo.run.assemble.output import version_check

    print_line = (said if said is not None else []).append
    step_dumps = StepDumps(folder=folder, cfg=cfg, model_path=Path(path), print_line=print_line)
    return StepMonitor(
        policy,
        lambda: step_dumps,
        replica_check=ReplicaCheck(check) if check else None,
        ends_run=ends_run,
        gap=version_check(cfg),
        print_line=print_line,
    )


def take(policy, step_callback, samples, index: int):
    """Take one step like the training loop."""
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

    pending = SampleBuffer(parallel=policy.parallel, cut=policy.cut).restored(samples if policy.parallel.is_rank_zero else [])
    step = find_step(samples, index, policy.cut.rows_per_slice)
    pending, batch = pending.batch(step, token_weight_fn=policy.loss.token_weights)
    with step_callback(step, pending) as beside:
        return policy.train_step(batch, beside)


def flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    """Flip one bit of one number in place."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    words = tensor.detach().view(-1).view(whole)
    mask = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
    words[at] = words[at] ^ torch.tensor(mask, dtype=torch.int64).to(whole)


def make_samples(samples, poison: dict[int, dict] | None = None):
    """Return on-policy samples, some of them with changed fields."""
    return [dataclasses.replace(sample, **(poison or {}).get(sample.row, {})) for sample in samples]


def replayed(rank: int, world: int, path, *flags: str) -> tuple[int, dict | str]:
    """Run `megatron-grpo replay` on this rank; return the exit code and its output, parsed if it is JSON."""
    from megatron_grpo import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(["replay", str(path), *flags])
    text = out.getvalue()
    return code, json.loads(text[text.index("{") :]) if "--json" in flags and "{" in text else text


__all__ = ["cases"]
