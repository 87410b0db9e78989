"""Process groups. The only module that reads Megatron-Core's `parallel_state`; all others use `ParallelState`."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import ConfigError, Problem, RunError
from megatron_grpo.core.base.launcher import LaunchInfo
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.layout import Layout

SECONDS_BETWEEN_WORDS = 10.0  # between two messages of a rank that waits for others
SECONDS_TO_LEAVE_WORD = 30.0  # for a rank that cannot join to tell the others why


class ParallelState:
    """Position of this rank on the parallelism grid, and its process groups. One instance per process, made by `start`."""

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
        self.edp_group = mpu.get_expert_data_parallel_group()  # the ranks that hold the same shards of the same experts
        self.expert_group = mpu.get_expert_tensor_and_model_parallel_group()  # the ranks that share a stage's experts
        self.tp_rank, self.tp_size = self.tp_group.rank(), layout.tp
        self.pp_rank, self.pp_size = self.pp_group.rank(), layout.pp
        self.cp_rank, self.cp_size = self.cp_group.rank(), layout.cp
        self.dp_rank, self.dp_size = self.dp_group.rank(), layout.dp_size
        self.ep_rank, self.ep_size = self.ep_group.rank(), layout.ep
        self.etp_rank, self.etp_size = self.etp_group.rank(), layout.etp

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is in the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_model_parallel_src(self) -> bool:
        """Whether this rank sends and saves the rows of its data-parallel rank: one rank per model-parallel group."""
        return self.is_first_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def reports_its_rows(self) -> bool:
        """Whether this rank sends what the loss stage computed for its rows to other ranks: one rank per model-parallel group."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    def from_last_stage(self, value: Any) -> Any:
        """Return the last stage's `value` on all stages of this rank's pipeline. Collective over the pipeline.

        Args:
            value: Any object that can be pickled; ignored on the other stages.
        """
        return collectives.from_rank(value, dist.get_global_rank(self.pp_group, self.pp_size - 1), self.pp_group)


def start(
    layout: Layout, *, sequence_parallel: bool = False, seed: int = 0, timeout_minutes: float = 10.0, facts: Mapping[str, str] | None = None
) -> ParallelState:
    """Join the launcher's job and create every process group. Call once per process.

    A single process without a launcher is a job of one rank. Uses NCCL with a GPU, otherwise gloo and `parallel.cpu`. Prints which ranks
    are missing while it waits.

    Args:
        timeout_minutes: Time to wait for other ranks here and in collectives, in minutes.
        facts: Values by name that must be equal on all ranks.

    Raises:
        RunError: A rank does not join within `timeout_minutes`.
        ConfigError: `facts` differ between ranks. Raised on every rank, before any model-parallel group is created.
    """
    launched = launcher.read()
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        if layout.tp > 1:  # Megatron-Core asks for it: a layer's communication then starts before its product, and overlaps with it
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read at the first use of a GPU
        device = torch.device("cuda", choose_gpu(launched, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        from megatron_grpo.core.parallel import cpu

        cpu.enable()
        device = torch.device("cpu")
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        store = rendezvous(launched, timeout=timeout)
        if has_gpu:
            check_gpu_not_shared(store, launched, f"{torch.cuda.get_device_properties(device).uuid}")
        if not launched.is_launched:
            tcp_store = store.underlying_store
            assert isinstance(tcp_store, dist.TCPStore)  # opened in `rendezvous`
            launcher.become_single(tcp_store.port)
        dist.init_process_group(
            "nccl" if has_gpu else "gloo", store=store, rank=launched.rank, world_size=launched.world_size, timeout=timeout
        )

    _check_equal_on_all_ranks(facts or {}, collectives.long_timeout_group())  # created here, where all ranks arrive at the same time
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


def _check_equal_on_all_ranks(facts: Mapping[str, str], group: collectives.Group) -> None:
    """Raise one ConfigError on all ranks if a fact differs between ranks: by name, with a rank and both values. Collective."""
    if len(set(collectives.all_gather_object(hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest(), group))) == 1:
        return
    ranks, problems = collectives.all_gather_object(dict(facts), group), []
    for name in dict.fromkeys(name for rank_versions in ranks for name in rank_versions):
        values = [rank_versions.get(name, "none") for rank_versions in ranks]
        if different_rank := next((rank for rank, value in enumerate(values) if value != values[0]), None):
            message = (
                f"{name} differs between ranks: rank 0 has {values[0]}, rank {different_rank} has {values[different_rank]}. Use the "
                "same value on all ranks."
            )
            problems.append(Problem(flags=(name,), message=message))
    raise ConfigError(problems)


def choose_gpu(launched: LaunchInfo, visible: int) -> int:
    """Return the index of this rank's GPU among those it sees. Launchers show a task all GPUs of its machine, or only its own.

    Args:
        visible: Number of GPUs that this process sees.

    Raises:
        ConfigError: Neither is the case.
    """
    if launched.local_rank < visible:
        return launched.local_rank
    if visible == 1:
        return 0
    raise ConfigError(
        f"rank {launched.rank} has LOCAL_RANK {launched.local_rank} and sees {visible} GPUs. Start one rank per GPU, or check "
        "CUDA_VISIBLE_DEVICES."
    )


def check_gpu_not_shared(store: dist.Store, launched: LaunchInfo, gpu: str) -> None:
    """Raise ConfigError on the second rank of a GPU: NCCL supports one rank per GPU, and its message would be less clear."""
    if store.add(f"gpu/{gpu}", 1) > 1:
        raise ConfigError(
            f"rank {launched.rank} would share GPU {gpu} with another rank; NCCL supports one rank per GPU. Start one rank per GPU "
            "(--nproc_per_node), or make one GPU visible to each rank (srun --gpus-per-task 1)."
        )


def rendezvous(
    launched: LaunchInfo, *, timeout: timedelta, interval: float = SECONDS_BETWEEN_WORDS, print_line: Callable[[str], None] | None = None
) -> dist.PrefixStore:
    """Return the job's store, once every rank has reached it. Prints the missing ranks at regular intervals.

    `init_process_group` would wait just as long without a message. A launcher that restarts ranks may keep its store, with the addresses of
    ranks that are dead; and neither its count of restarts nor any other of its variables is equal on all ranks of an attempt. So rank 0
    makes up a name for the attempt, and sends it to each rank under a key that only this process of that rank has written.

    Args:
        interval: Time between two messages, in seconds.
        print_line: Prints a message; None prints to standard error.

    Raises:
        RunError: A rank has not arrived within `timeout`.
        ConfigError: Another rank has reported why it cannot join, or the port cannot be opened.
    """
    arrival = _RankWait(
        launched, end=time.monotonic() + timeout.total_seconds(), timeout=timeout, interval=interval, print_line=print_line or _print_line
    )
    arrival.store = store = _store_of_the_job(launched, arrival.end, interval, arrival.print_line)
    store.set_timeout(timeout)
    word = uuid.uuid4().hex
    attempt = word if launched.rank == 0 else arrival.answer_to(word, store)
    prefix_store = dist.PrefixStore(f"megatron_grpo/{attempt}", store)
    prefix_store.set(f"here/{launched.rank}", "1")
    arrival.wait_for_all(prefix_store, store, attempt)
    return prefix_store


def report_failure(error: ConfigError) -> None:
    """Tell the ranks of other machines, which wait in `rendezvous`, why this one cannot join."""
    launched, end = launcher.read(), time.monotonic() + SECONDS_TO_LEAVE_WORD
    if dist.is_initialized():
        return
    with suppress(RuntimeError, RunError, ConfigError):  # no other rank is reachable
        store = _store_of_the_job(launched, end, SECONDS_TO_LEAVE_WORD, _print_line)
        store.set(_failure_key(launched), f"rank {launched.rank} on {socket.gethostname()} was rejected: {error}")
        holds = launched.rank == 0 and not launched.launcher_holds_store
        while holds and store.add("megatron_grpo/heard", 0) < launched.world_size - 1 and time.monotonic() < end:
            time.sleep(0.1)  # the store lives in this process: it stays until the others have read, or their time is up


def _failure_key(launched: LaunchInfo) -> str:
    """Return the store key of a refusal.

    It contains the world size: a refused job is refused again, but a launcher that keeps its store may continue with fewer ranks.
    """
    return f"megatron_grpo/refused/{launched.world_size}"


class _RankWait:
    """State of a rank that waits for the others. `end` is a time of time.monotonic."""

    store: dist.Store  # the job's store, once it is reached

    def __init__(self, launched: LaunchInfo, *, end: float, timeout: timedelta, interval: float, print_line: Callable[[str], None]):
        self.launched, self.end, self.print_line = launched, end, print_line
        self._timeout, self._every = timeout, interval
        self._next_token, self._nap = time.monotonic() + interval, 0.005

    def answer_to(self, word: str, store: dist.Store) -> str:
        """Return the name of the attempt, which rank 0 sends to each rank it sees."""
        store.set(f"megatron_grpo/word/{self.launched.rank}", word)
        while not store.check([f"megatron_grpo/attempt/{word}"]):
            self._pause(lambda: [0], prints=self.launched.is_logging_rank or self.launched.rank == 1)
        return store.get(f"megatron_grpo/attempt/{word}").decode()

    def wait_for_all(self, prefix_store: dist.PrefixStore, store: dist.Store, attempt: str) -> None:
        """Wait until every rank has arrived in the store of this attempt, `prefix_store`."""
        missing: list[int] = list(range(self.launched.world_size))
        if self.launched.rank != 0:  # rank 0 looks for all; every rank looking for every other would overload the store
            while not prefix_store.check(["all"]):
                self._pause(lambda: [rank for rank in missing if not prefix_store.check([f"here/{rank}"])], prints=False)
            return
        words: dict[int, bytes] = {}
        while missing := [rank for rank in missing if not prefix_store.check([f"here/{rank}"])]:
            for rank in missing:
                if store.check([f"megatron_grpo/word/{rank}"]) and (word := store.get(f"megatron_grpo/word/{rank}")) != words.get(rank):
                    store.set(f"megatron_grpo/attempt/{word.decode()}", attempt)
                    words[rank] = word
            self._pause(lambda: missing, prints=True)
        prefix_store.set("all", "1")

    def _pause(self, missing: Callable[[], list[int]], *, prints: bool) -> None:
        time_now = time.monotonic()
        if self.store.check([_failure_key(self.launched)]):
            refusal = ConfigError(self.store.get(_failure_key(self.launched)).decode())
            self.store.add("megatron_grpo/heard", 1)
            raise refusal
        if time_now >= self.end:
            minutes = self._timeout.total_seconds() / 60
            waiting = _waiting_for(missing(), self.launched)
            raise RunError(f"{waiting} timed out after {minutes:g} minutes (distributed_timeout_minutes).")
        if time_now >= self._next_token:
            self._next_token = time_now + self._every
            if prints:
                self.print_line(_waiting_for(missing(), self.launched))
        self._nap = min(2 * self._nap, 0.2, self._every)
        time.sleep(self._nap)  # `store.wait` with a time limit would write two lines of C++ for each


def _store_of_the_job(launched: LaunchInfo, end: float, interval: float, print_line: Callable[[str], None]) -> dist.TCPStore:
    """Return torchrun's store if it holds one; otherwise the store that rank 0 opens for all."""
    hosts = launched.rank == 0 and not launched.launcher_holds_store
    if not hosts:
        _wait_for_the_host(launched, end, interval, print_line)
    try:
        store = dist.TCPStore(
            launched.address, launched.port, is_master=hosts, wait_for_workers=False, multi_tenant=hosts and launched.is_launched,
            timeout=timedelta(seconds=max(30.0, interval)),
        )  # fmt: skip
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"rank {launched.rank} cannot open port {launched.port} of {launched.address} (MASTER_ADDR, MASTER_PORT), the rendezvous "
            f"address: {str(error).splitlines()[0]}. Use another MASTER_PORT.") from error  # fmt: skip
    return store


def _wait_for_the_host(launched: LaunchInfo, end: float, interval: float, print_line: Callable[[str], None]) -> None:
    """Wait until the store's address accepts connections.

    TCPStore waits too, but prints a page of C++ for each attempt and does not say which rank it waits for.
    """
    next_token = time.monotonic() + interval
    while True:
        try:
            socket.create_connection((launched.address, launched.port), timeout=interval).close()
            return
        except OSError as error:
            time_now = time.monotonic()
            if time_now >= next_token and (launched.is_logging_rank or launched.rank == 1):
                print_line(f"{_waiting_for([0], launched)}: {error.strerror or error}")
                next_token = time_now + interval
            if time_now >= end:
                raise RunError(f"No response from rank 0 at {launched.address}:{launched.port}: {error}.") from None
            time.sleep(min(0.2, interval))


def _waiting_for(missing: list[int], launched: LaunchInfo) -> str:
    ranks_text = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    address = f"{launched.address}:{launched.port}"
    return f"waiting for {len(missing)} of {launched.world_size} ranks at {address} (rank{'s' if len(missing) > 1 else ''} {ranks_text})"


def _print_line(text: str) -> None:
    print(f"megatron-grpo: {text}", file=sys.stderr, flush=True)


def stop() -> None:
    """Leave the job. Safe to call twice."""
    if dist.is_initialized():
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        dist.destroy_process_group()
