"""Lifecycle of a rollout server: bind the port, load the model, answer requests, and end all child processes.

When a server process is killed, vLLM's EngineCore process survives under another name and keeps its memory. Therefore the children of a
server ask the kernel to kill them when their parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import context
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.cleanup import CleanUp, die_with_parent
from megatron_grpo.core.base.errors import EXIT_DONE, RunError, config_error
from megatron_grpo.core.base.files import atomic_write_text
from megatron_grpo.core.weights.shape import flat_values
from megatron_grpo.plugins.listener import MAX_UNAUTHENTICATED, Listener, rate_limited_handler
from megatron_grpo.plugins.servers.addresses import TOKEN_VARIABLE, is_loopback
from megatron_grpo.plugins.servers.serve_settings import ServeSettings, check_serving
from megatron_grpo.run.checkpoint.fingerprints import model_fingerprint
from megatron_grpo.run.config import ParsedConfig, remote_code
from megatron_grpo.run.config.settings import ServeConfig
from megatron_grpo.run.data.chat import fingerprint_vocabulary, load_tokenizer
from megatron_grpo.run.signals import handle_signals

STOPPING = (signal.SIGTERM, signal.SIGINT)
SECONDS_BETWEEN_LINES = 10.0  # seconds between two progress lines while the model loads


class _StoppedBySignal(BaseException):
    """A signal arrived while the engine was being built, before the server answered."""


def serve(parsed: ParsedConfig) -> int:
    """Run `megatron-grpo serve` until a signal arrives.

    Returns:
        The exit code.

    Raises:
        ConfigError: The settings are invalid, or the port is in use.
        RunError: The engine died.
    """
    serving = check_serving(parsed)
    os.environ.pop(TOKEN_VARIABLE, None)  # the engine's processes do not need it
    listener = take_port(serving.cfg.serve)
    with CleanUp(listener.close) as clean_up:
        address = f"{serving.scheme}://{reachable_host(serving.cfg.serve.host)}:{listener.getsockname()[1]}"
        if warning := _in_the_clear(serving, address):
            _print_line(warning)
        if serving.cfg.model.trust_remote_code and (code := remote_code.make_code_warning(serving.model_path)):
            _print_line(code)
        try:
            with handle_signals(STOPPING, _stop), _progress(serving):
                from megatron_grpo.plugins.servers.serve_engine import ServedEngine

                bind_children_to_parent()
                engine = ServedEngine.build(serving)
        except _StoppedBySignal:
            _print_line("stopped while the model was loading")
            return EXIT_DONE
        clean_up.add(engine.close)
        asyncio.run(_answer(serving, engine, listener, address, clean_up))
    _print_line("ended")
    return EXIT_DONE


async def _answer(serving: ServeSettings, engine: Any, listener: Listener, address: str, clean_up: CleanUp) -> None:
    """Answer requests until a signal arrives. Raises RunError if the engine died."""
    cfg = serving.cfg.serve
    app = _app(serving, engine)
    server = _http(app.asgi(serving.token, listener.has_shown_the_token), cfg)
    asyncio.get_running_loop().set_exception_handler(rate_limited_handler())
    was_asked = asyncio.Event()
    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, was_asked.set)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # so the next server can bind this port at once
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if answering.done():
            raise RunError(f"The server cannot listen: {answering.exception() or 'see the error of uvicorn above'}.")
        await asyncio.sleep(0.01)
    if cfg.address_file is not None:
        atomic_write_text(cfg.address_file, address + "\n")
        clean_up.add(lambda: _remove(Path(str(cfg.address_file)), address))
    kind = "ready, frozen," if cfg.frozen else "ready"
    adapters_text = f", adapters up to rank {engine.adapter_rank}" if engine.adapter_rank else ""
    _print_line(f"{kind} at {address} ({engine.dtype}, {engine.max_model_len} tokens, {engine.max_num_seqs} sequences at "
        f"once{adapters_text}); "
               "the token "
         f"is {serving.token_place}")  # fmt: skip
    while not was_asked.is_set() and not engine.is_dead and not answering.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(was_asked.wait(), 0.5)
    is_dead = engine.is_dead and not was_asked.is_set()
    await app.stop()
    server.should_exit = True
    await answering
    if is_dead:
        raise RunError("The engine of this server died; see its output above. Start the server again.")


def _app(serving: ServeSettings, engine: Any) -> Any:
    from megatron_grpo.plugins.servers.serve_app import App, FrozenApp
    from megatron_grpo.plugins.servers.serve_state import ServerMetrics

    common: dict[str, Any] = dict(
        model=str(serving.model_path),
        shape=flat_values(serving.shape),
        metrics=ServerMetrics(),
        serves_metrics=serving.cfg.serve.metrics,
        print_line=_print_line,
    )
    if not serving.cfg.serve.frozen:
        return App(engine, **common)
    path = serving.model_path
    tokenizer = load_tokenizer(str(path), trust_remote_code=serving.cfg.model.trust_remote_code, warns=False)  # `serve` has warned
    return FrozenApp(engine, vocabulary=fingerprint_vocabulary(tokenizer), fingerprint=model_fingerprint(path), **common)


def _http(app: Any, cfg: ServeConfig) -> Any:
    import uvicorn

    class ServerWithoutSignals(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn would raise the signal again after it has stopped, which would end the process before its engine.
            yield

    return ServerWithoutSignals(uvicorn.Config(
        app, ssl_certfile=cfg.ssl_certfile, ssl_keyfile=cfg.ssl_keyfile, ws="none", lifespan="off", access_log=False, log_level="error",
        server_header=False, date_header=False, timeout_graceful_shutdown=2, timeout_keep_alive=30, backlog=MAX_UNAUTHENTICATED,
        http="h11", proxy_headers=False,  # h11 limits the size of request headers; clients must not set their own address
    ))  # fmt: skip


# ---- listening socket


def take_port(cfg: ServeConfig) -> Listener:
    """Bind the port before the model loads, so that a port in use is reported at once. No request is answered before uvicorn listens.

    Raises:
        ConfigError: The address cannot be bound.
    """
    try:
        try:
            return _bound(cfg, shares=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return _bound(cfg, shares=True)  # connections of an earlier server may stay in TIME_WAIT for a minute
    except OSError as error:
        use = " Use another port; 0 selects a free one." if error.errno == errno.EADDRINUSE else ""
        message = f"Cannot listen on host {cfg.host}, port {cfg.port}: {error.strerror or error}.{use}"
        raise config_error(("host", "port"), message) from error


def _bound(cfg: ServeConfig, *, shares: bool) -> Listener:
    """Return a socket bound to the port.

    Args:
        shares: Whether to set SO_REUSEADDR. Then the port may be shared with another socket that has it set and does not listen; a server
            that loads its model does not set it.
    """
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = Listener(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
    try:
        listener.bind(sockaddr)
    except OSError:
        listener.close()
        raise
    return listener


def reachable_host(host: str) -> str:
    """Return the host name, in URL form, by which other machines reach a server.

    Args:
        host: Address at which it listens; "0.0.0.0", "::" and "" mean all addresses.
    """
    if host in ("0.0.0.0", "::", ""):
        host = _own_name()
    return f"[{host}]" if ":" in host else host


def _own_name() -> str:
    """Return this machine's host name if it does not resolve to a loopback address (on many machines 127.0.1.1), else its address."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not is_loopback(socket.gethostbyname(name)):
            return name
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); nothing is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


def _in_the_clear(serving: ServeSettings, address: str) -> str | None:
    if serving.scheme == "https" or is_loopback(serving.cfg.serve.host):
        return None
    return (
        f"WARNING: {address} has no TLS: the token, prompts and completions are sent unencrypted, and anyone who reads the token has "
        "the trainer's permissions. Use --ssl_certfile. Weights are sent over separate connections, unencrypted even with TLS."
    )


def _remove(path: Path, address: str) -> None:
    """Delete the address file if it still contains this server's address."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text().strip() == address:
            path.unlink()


# ---- model loading


def _stop(number: int, frame: object) -> None:
    raise _StoppedBySignal


@contextlib.contextmanager
def _progress(serving: ServeSettings) -> Iterator[None]:
    rollout, start, has_loaded = serving.cfg.rollout, time.monotonic(), threading.Event()
    activity_text = f"loading {serving.model_path} ({serving.dtype}, TP {rollout.vllm_tensor_parallel_size})"

    def print_progress() -> None:
        while not has_loaded.wait(SECONDS_BETWEEN_LINES):
            _print_line(f"{activity_text}: {time.monotonic() - start:.0f} s")

    _print_line(activity_text)
    threading.Thread(target=print_progress, daemon=True).start()
    try:
        yield
    finally:
        has_loaded.set()
    _print_line(f"loaded in {time.monotonic() - start:.0f} s")


def _print_line(line: str) -> None:
    print(f"serve: {line}", flush=True)


# ---- child processes


class ParentBoundProcess(context.SpawnProcess):
    """Spawned process that the kernel kills when its parent dies; the same holds for its own children."""

    def __reduce__(self) -> Any:
        # Unpickling calls _begin in the child before any other import.
        return _init_child, (os.getpid(),), self.__dict__


def bind_children_to_parent() -> None:
    """Make every process that `multiprocessing` spawns from now on a `ParentBoundProcess`.

    The thread that starts such a process must live as long as the process.
    """
    context.SpawnContext.Process = ParentBoundProcess


def _init_child(parent: int) -> ParentBoundProcess:
    die_with_parent(parent)
    bind_children_to_parent()
    from megatron_grpo.core.rollout import vllm_patches

    vllm_patches.quiet()
    return ParentBoundProcess.__new__(ParentBoundProcess)
