"""The life of one rollout server: it takes its port, loads the model, answers, and leaves nothing behind however it ends.

vLLM leaves its EngineCore behind, with all its memory and under another name, when the process that started it is killed. So the kernel
ends what a server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import context
from pathlib import Path
from typing import Any

from megatron_grpo.base.cleanup import CleanUp, die_with_parent
from megatron_grpo.base.errors import EXIT_DONE, RunError, config_error
from megatron_grpo.base.files import write_whole
from megatron_grpo.checkpoint.fingerprints import model_fingerprint
from megatron_grpo.config import Parsed, remote_code
from megatron_grpo.config.config import ServeConfig
from megatron_grpo.config.servers import TOKEN_VARIABLE
from megatron_grpo.data.chat import load_tokenizer, vocabulary_of
from megatron_grpo.servers.serve_settings import Serving, check_serving
from megatron_grpo.weights.shape import flat

STOPPING = (signal.SIGTERM, signal.SIGINT)
SAY_EVERY = 10.0  # seconds, while the model loads
STRANGERS = 128  # connections that have not shown the token; as many again may come before the first of them is closed
SECONDS = 10.0  # that one of them has to say what it wants, its TLS handshake included
SILENCE = 60.0  # seconds between two words of asyncio on the same trouble

Place = tuple[str, int]  # of the other end


class _Stopped(BaseException):
    """A signal came before the server answered: there is nothing to end but the engine that is being built."""


def serve(parsed: Parsed) -> int:
    """`megatron-grpo serve`. Returns the exit code."""
    serving = check_serving(parsed)
    os.environ.pop(TOKEN_VARIABLE, None)  # the engine's processes need it not
    listener = take_port(serving.cfg.serve)
    with CleanUp(listener.close) as clean_up:
        address = f"{serving.scheme}://{reachable(serving.cfg.serve.host)}:{listener.getsockname()[1]}"
        if warning := _in_the_clear(serving, address):
            _say(warning)
        if serving.cfg.model.trust_remote_code and (code := remote_code.warning_of(serving.model_path)):
            _say(code)
        try:
            with _stopped_by_signals(), _progress(serving):
                from megatron_grpo.servers.serve_engine import ServedEngine

                let_no_child_outlive()
                engine = ServedEngine.build(serving)
        except _Stopped:
            _say("stopped while the model was loading")
            return EXIT_DONE
        clean_up.add(engine.close)
        asyncio.run(_answer(serving, engine, listener, address, clean_up))
    _say("ended")
    return EXIT_DONE


async def _answer(serving: Serving, engine: Any, listener: Listener, address: str, clean_up: CleanUp) -> None:
    """Returns after a signal. Raises RunError where the engine died."""
    cfg = serving.cfg.serve
    app = _app(serving, engine)
    server = _http(app.asgi(serving.token, listener.has_shown_the_token), cfg)
    asyncio.get_running_loop().set_exception_handler(now_and_then())
    was_asked = asyncio.Event()
    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, was_asked.set)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # its connections will not keep the next server from this port
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if answering.done():
            raise RunError(f"the server cannot listen: {answering.exception() or 'uvicorn says why above'}.")
        await asyncio.sleep(0.01)
    if cfg.address_file is not None:
        write_whole(cfg.address_file, address + "\n")
        clean_up.add(lambda: _remove(Path(str(cfg.address_file)), address))
    kind = "ready, frozen," if cfg.frozen else "ready"
    room = f", adapters to rank {engine.adapter_rank}" if engine.adapter_rank else ""
    _say(f"{kind} at {address} ({engine.dtype}, {engine.max_model_len} tokens, {engine.max_num_seqs} sequences at once{room}); the token "
         f"is {serving.token_place}")  # fmt: skip
    while not was_asked.is_set() and not engine.is_dead and not answering.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(was_asked.wait(), 0.5)
    died = engine.is_dead and not was_asked.is_set()
    await app.stop()
    server.should_exit = True
    await answering
    if died:
        raise RunError("the engine of this server died; what it said is above. Start the server again.")


def _app(serving: Serving, engine: Any) -> Any:
    from megatron_grpo.servers.serve_app import App, FrozenApp
    from megatron_grpo.servers.serve_state import ServerMetrics

    common: dict[str, Any] = dict(
        model=str(serving.model_path), shape=flat(serving.shape), metrics=ServerMetrics(), tells_metrics=serving.cfg.serve.metrics, say=_say
    )
    if not serving.cfg.serve.frozen:
        return App(engine, **common)
    path = serving.model_path
    tokenizer = load_tokenizer(str(path), trust_remote_code=serving.cfg.model.trust_remote_code, warns=False)  # `serve` has
    return FrozenApp(engine, vocabulary=vocabulary_of(tokenizer), fingerprint=model_fingerprint(path), **common)


def _http(app: Any, cfg: ServeConfig) -> Any:
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn would raise a signal again when it has stopped, and so end the process before its engine.
            yield

    return Quiet(uvicorn.Config(
        app, ssl_certfile=cfg.ssl_certfile, ssl_keyfile=cfg.ssl_keyfile, ws="none", lifespan="off", access_log=False, log_level="error",
        server_header=False, date_header=False, timeout_graceful_shutdown=2, timeout_keep_alive=30, backlog=STRANGERS,
        http="h11", proxy_headers=False,  # it bounds a request's head; nobody says for himself from where he comes
    ))  # fmt: skip


# ---- where it listens


class Listener(socket.socket):
    """Accepts for asyncio. Who has not shown the token has little time and little room, and cannot keep its owner out.

    Too many strangers: the oldest goes, of the host that has most of them.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.strangers: dict[Place, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        place = address[:2]
        self.strangers = {known: one for known, one in self.strangers.items() if one.fileno() >= 0} | {place: connection}
        asyncio.get_running_loop().call_later(SECONDS, self._send_away, place, connection)
        if len(self.strangers) > STRANGERS:
            crowded = Counter(host for host, _ in self.strangers).most_common(1)[0][0]
            oldest = next(known for known in self.strangers if known[0] == crowded)
            self._send_away(oldest, self.strangers[oldest])
        return connection, address

    def has_shown_the_token(self, place: Place) -> None:
        """It may stay."""
        self.strangers.pop(place, None)

    def _send_away(self, place: Place, connection: socket.socket) -> None:
        if self.strangers.get(place) is connection:
            del self.strangers[place]
            with contextlib.suppress(OSError):  # it has gone by itself
                connection.shutdown(socket.SHUT_RDWR)


def now_and_then() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of asyncio's errors: of accepting alone it has thousands a second where there is no descriptor left."""
    said: dict[str, float] = {}

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        what, now = str(context.get("message")), time.monotonic()
        if now - said.get(what, -SILENCE) >= SILENCE:
            said[what] = now
            loop.default_exception_handler(context)

    return handle


def take_port(cfg: ServeConfig) -> Listener:
    """Taken before the model loads, so that a port in use is said at once; nobody is answered before uvicorn listens."""
    try:
        try:
            return _bound(cfg, shares=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return _bound(cfg, shares=True)  # with what an earlier server's connections leave there for a minute
    except OSError as error:
        use = " Use another one; 0 is any free port." if error.errno == errno.EADDRINUSE else ""
        said = f"host {cfg.host}, port {cfg.port} cannot be listened at: {error.strerror or error}.{use}"
        raise config_error(("host", "port"), said) from error


def _bound(cfg: ServeConfig, *, shares: bool) -> Listener:
    """shares: another socket may have the port too, if it shares it as well and does not listen. A server that loads does not."""
    family, kind, protocol, _, place = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = Listener(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
    try:
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener


def reachable(host: str) -> str:
    """The host by which others reach a server that listens at `host`, as it stands in a URL."""
    if host in ("0.0.0.0", "::", ""):
        host = _own_name()
    return f"[{host}]" if ":" in host else host


def _own_name() -> str:
    """This machine's name, where it leads here from elsewhere: on many machines it leads to 127.0.1.1."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not ipaddress.ip_address(socket.gethostbyname(name)).is_loopback:
            return name
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of nobody; nothing is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


def _in_the_clear(serving: Serving, address: str) -> str | None:
    host = serving.cfg.serve.host
    if serving.scheme == "https" or host == "localhost":
        return None
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    return (
        f"WARNING: {address} is reached without TLS: the token, prompts and completions travel in the clear, and who reads the token can "
        "do what the trainer can. Use --ssl_certfile. Weights travel beside HTTP, in the clear with TLS too."
    )


def _remove(path: Path, address: str) -> None:
    """If it is still this server's."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text().strip() == address:
            path.unlink()


# ---- while it loads


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(serving: Serving) -> Iterator[None]:
    rollout, begun, has_loaded = serving.cfg.rollout, time.monotonic(), threading.Event()
    what = f"loading {serving.model_path} ({serving.dtype}, TP {rollout.vllm_tensor_parallel_size})"

    def tell() -> None:
        while not has_loaded.wait(SAY_EVERY):
            _say(f"{what}: {time.monotonic() - begun:.0f} s")

    _say(what)
    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        has_loaded.set()
    _say(f"loaded in {time.monotonic() - begun:.0f} s")


def _say(line: str) -> None:
    print(f"serve: {line}", flush=True)


# ---- what it starts


class EndsWithParent(context.SpawnProcess):
    """A child, started afresh, that the kernel kills when its parent dies; and so are its own children."""

    def __reduce__(self) -> Any:
        # So the child calls _begin before it imports anything for its work.
        return _begin, (os.getpid(),), self.__dict__


def let_no_child_outlive() -> None:
    """From now on for every process that `multiprocessing` starts here. The thread that starts one must live as long as it does."""
    context.SpawnContext.Process = EndsWithParent


def _begin(parent: int) -> EndsWithParent:
    die_with_parent(parent)
    let_no_child_outlive()
    from megatron_grpo.rollout import vllm_patches

    vllm_patches.quiet()
    return EndsWithParent.__new__(EndsWithParent)
