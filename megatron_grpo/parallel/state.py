"""Process groups. The only module that asks Megatron-Core's `parallel_state` anything; everybody else asks `ParallelState`, in words."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.layout import Layout


class ParallelState:
    """Where this rank stands on the grid and the groups it belongs to. One a process; made by `start`."""

    def __init__(self, layout: Layout, *, device: torch.device, sequence_parallel: bool):
        from megatron.core import parallel_state as mpu

        self.layout = layout
        self.device = device
        self.sequence_parallel = sequence_parallel
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.pp_group = mpu.get_pipeline_model_parallel_group()
        self.cp_group = mpu.get_context_parallel_group()
        self.dp_group = mpu.get_data_parallel_group()
        self.dp_cp_group = mpu.get_data_parallel_group(with_context_parallel=True)
        self.ep_group = mpu.get_expert_model_parallel_group()
        self.etp_group = mpu.get_expert_tensor_parallel_group()
        self.tp_rank, self.tp_size = self.tp_group.rank(), layout.tp
        self.pp_rank, self.pp_size = self.pp_group.rank(), layout.pp
        self.cp_rank, self.cp_size = self.cp_group.rank(), layout.cp
        self.dp_rank, self.dp_size = self.dp_group.rank(), layout.dp_size
        self.ep_rank, self.ep_size = self.ep_group.rank(), layout.ep
        self.etp_rank, self.etp_size = self.etp_group.rank(), layout.etp

    @property
    def is_main(self) -> bool:
        """The rank that talks to people and writes files."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_first_of_share(self) -> bool:
        """One rank per data-parallel share: it sends and saves the rows whose home the share is."""
        return self.is_first_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def speaks_for_its_rows(self) -> bool:
        """One rank per data-parallel share: it tells the others what the loss stage found about the rows of that share."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def last_stage_rank(self) -> int:
        """Global rank, in this rank's pipeline, of the stage that owns the loss."""
        return dist.get_global_rank(self.pp_group, self.pp_size - 1)

    def from_last_stage(self, value: Any) -> Any:
        """What this rank's pipeline knows where the loss is, on all of its stages."""
        return collectives.from_rank(value, self.last_stage_rank, self.pp_group)


def start(layout: Layout, *, sequence_parallel: bool = False, seed: int = 0, timeout_minutes: float = 10.0) -> ParallelState:
    """Joins the launcher's job (RANK and friends in the environment) and builds every group. Call once a process.

    A single process without a launcher is a job of one rank. Uses NCCL with a GPU, else gloo and `parallel.cpu`.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        from megatron_grpo.parallel import cpu

        cpu.enable()
        device = torch.device("cpu")
    if not dist.is_initialized():
        _environment_of_a_single_process()
        dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(minutes=timeout_minutes))

    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    mpu.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    tensor_parallel.random.model_parallel_cuda_manual_seed(seed)
    return ParallelState(layout, device=device, sequence_parallel=sequence_parallel)


def _environment_of_a_single_process() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def stop() -> None:
    """Leaves the job. Safe to call twice."""
    if dist.is_initialized():
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        dist.destroy_process_group()
