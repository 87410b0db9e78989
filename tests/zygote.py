"""The process that ranks are forked from: it has imported everything, has one thread, and never runs a test itself.

Importing torch, transformers, Megatron-Core and vLLM takes about 7 s; a fork takes milliseconds. `tests.ranks` starts it as `python
tests/zygote.py FD`. It serves one request at a time over that socket: fork N ranks, collect their results, kill the remaining processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What a rank of any test may need. vLLM loads its worker, model runner and attention modules late; here they are loaded once for all.
MODULES = (
    "cloudpickle", "numpy", "torch", "torch.distributed", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
    "megatron.core", "megatron.core.models.gpt.gpt_model", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer",
    "megatron.core.distributed", "megatron.core.pipeline_parallel", "megatron.core.dist_checkpointing",
    "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3", "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe", "vllm.model_executor.model_loader.reload",
    "vllm.distributed.device_communicators.cpu_communicator", "vllm.distributed.elastic_ep.elastic_execute", "compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base", "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.lora.worker_manager", "vllm.lora.punica_wrapper.punica_cpu", "peft",
    "vllm.entrypoints.launchers.cli_args", "vllm.v1.core.sched.scheduler", "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.pool.flash_maxsim", "torch.profiler._cupti_monitor", "torch.utils.serialization.config",
    "pyarrow.parquet", "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
GRACE_AFTER_FAILURE = 0.5  # seconds in which the other ranks of a failed run may still report their own error


def send(sock: socket.socket, message: Any) -> None:
    blob = pickle.dumps(message)
    sock.sendall(struct.pack("<Q", len(blob)) + blob)


def receive(sock: socket.socket) -> Any:
    """Return one message. Raises EOFError when the other end has closed."""
    (size,) = struct.unpack("<Q", _exactly(sock, 8))
    return pickle.loads(_exactly(sock, size))


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other end of the socket is closed")
        parts += part
    return bytes(parts)


@dataclass
class Rank:
    pid: int
    result: socket.socket
    log: Any  # an open file: the rank's stdout and stderr
    received: bytearray = field(default_factory=bytearray)
    outcome: tuple[str, Any] | None = None  # ("value", pickled) or ("error", text)


def main(fd: int) -> None:
    control = socket.socket(fileno=fd)
    gc.disable()
    missing = {}
    sys.path[0] = str(ROOT)
    for name in (*MODULES, *_own_modules()):
        try:
            importlib.import_module(name)
        except ImportError as error:  # an optional part; the test that needs it says so better than we could
            missing[name] = str(error)
    _prepare_engines()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:  # a forked child has only the forking thread: locks held by any other would stay locked for ever
        send(control, {"error": f"the zygote owns {len(threads)} threads after its imports; forking it would not be safe"})
        return
    send(control, {"ready": True, "missing": missing})
    while True:
        try:
            request = receive(control)
        except EOFError:
            os._exit(0)  # some library prints pages about its own leaks at a regular exit
        send(control, serve(control, request))


def _prepare_engines() -> None:
    """Do what vLLM does before a process's first engine, half of its start: it walks all loggers and modules."""
    try:
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed
        from vllm.platforms import current_platform
    except ImportError:
        return
    configure_logging_if_needed(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)  # done, and inherited by every fork


def _own_modules() -> list[str]:
    """Import the package's modules and those that tests share, which took most of the time of a short test's rank."""
    files = [file for folder in ("megatron_grpo", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
    kept = [file for file in files if not file.name.startswith(("test_", "conftest", "__")) and (file.parent / "__init__.py").exists()]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in kept]


def serve(control: socket.socket, request: dict) -> dict:
    """Run one request: {"call": pickled, "world_size", "timeout", "path": sys.path, "cwd", "env"} -> {"outcomes": [...], "reason"}."""
    listener = socket.create_server(("127.0.0.1", 0))  # opened here and inherited: nobody can take the port in between
    port = listener.getsockname()[1]
    ranks = [_fork(request, rank, port, listener, control) for rank in range(request["world_size"])]
    listener.close()
    reason = _supervise(control, ranks, time.monotonic() + request["timeout"], request["timeout"])
    outcomes = [(*rank.outcome, _tail(rank.log)) for rank in ranks]
    for rank in ranks:
        rank.result.close()
        rank.log.close()
    return {"outcomes": outcomes, "reason": reason}


def _supervise(control: socket.socket, ranks: list[Rank], deadline: float, timeout: float) -> str | None:
    """Wait until each rank has an outcome. Returns None on success, else what went wrong. Leaves no process behind."""
    reason = None
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, None)
    for rank in ranks:
        selector.register(rank.result, selectors.EVENT_READ, rank)
    while any(rank.outcome is None for rank in ranks):
        left = deadline - time.monotonic()
        if left <= 0:
            reason = reason or f"not finished after {timeout} s"
            break
        for key, _ in selector.select(left):
            if key.data is None:  # nobody sends anything during a run: the socket is closed, the tests have gone
                _kill(ranks)
                os._exit(1)
            if _read(key.data):
                selector.unregister(key.data.result)
                if key.data.outcome[0] == "error" and reason is None:
                    reason = f"rank {ranks.index(key.data)} failed"
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
    selector.close()
    stuck = [rank for rank in ranks if rank.outcome is None]
    for rank in stuck:
        _signal(rank.pid, signal.SIGUSR1)  # faulthandler writes to the log where it is
    if stuck:
        time.sleep(0.2)  # to write it
    for rank in stuck:
        rank.outcome = ("killed", None)
    if reason is None:
        for rank in ranks:
            rank.result.sendall(b"x")  # all are done: only now may the one that serves the store leave
        end = time.monotonic() + 5
        while time.monotonic() < end and not all(_gone(rank.pid) for rank in ranks):
            time.sleep(0.002)
    _kill(ranks)
    return reason


def _read(rank: Rank) -> bool:
    """Read what has arrived. Returns True once the rank's outcome is known."""
    part = rank.result.recv(1 << 20)
    rank.received += part
    if not part:
        _, status = os.waitpid(rank.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"
        rank.pid = 0
        rank.outcome = ("error", f"the process {what} without a result")
        return True
    if len(rank.received) < 8:
        return False
    (size,) = struct.unpack("<Q", rank.received[:8])
    if len(rank.received) < 8 + size:
        return False
    rank.outcome = pickle.loads(bytes(rank.received[8:]))
    return True


def _gone(pid: int) -> bool:
    return pid == 0 or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.pid:
            _signal(-rank.pid, signal.SIGKILL)  # the rank leads a process group: its own children go too
            os.waitpid(rank.pid, 0)
            rank.pid = 0


def _signal(pid: int, number: int) -> None:
    try:
        (os.killpg if pid < 0 else os.kill)(abs(pid), number)
    except ProcessLookupError:
        pass


def _tail(log: Any, size: int = 6000) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - size))
    return log.read().decode(errors="replace")


def _fork(request: dict, rank: int, port: int, listener: socket.socket, control: socket.socket) -> Rank:
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()
    pid = os.fork()
    if pid:
        theirs.close()
        try:
            os.setpgid(pid, pid)
        except (ProcessLookupError, PermissionError):
            pass  # the child did it first
        return Rank(pid=pid, result=ours, log=log)
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the zygote
        ours.close()
        control.close()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)
        gc.enable()
        gc.set_threshold(50_000, 20, 100)  # what a rank of a test allocates is small, and the zygote's heap is not looked at
        # An engine that closes thaws all that is frozen: each collection behind it would walk, and copy, the zygote's heap, a second long.
        gc.freeze = gc.unfreeze = lambda: None
        outcome = _run(request, rank, port, listener)
        try:
            blob = pickle.dumps(outcome)
        except Exception:  # noqa: BLE001 - the value cannot travel: that is the test's to mend
            blob = pickle.dumps(("error", traceback.format_exc()))
        theirs.sendall(struct.pack("<Q", len(blob)) + blob)
        theirs.recv(1)  # wait until all have reported
    finally:
        os._exit(0)  # an engine's or a process group's own teardown costs a second and tests nothing


def _run(request: dict, rank: int, port: int, listener: socket.socket) -> tuple[str, Any]:
    try:
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        world_size = request["world_size"]
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
        import cloudpickle
        import torch.distributed as dist

        function, args = pickle.loads(request["call"])
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", port, world_size, True, wait_for_workers=False, master_listen_fd=listener.detach())
        else:
            listener.close()
            store = dist.TCPStore("127.0.0.1", port, world_size, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        value = function(rank, world_size, *args)
        return "value", cloudpickle.dumps(value)
    except BaseException:  # noqa: BLE001 - SystemExit of a test is a failure as well
        return "error", traceback.format_exc()


if __name__ == "__main__":
    main(int(sys.argv[1]))
