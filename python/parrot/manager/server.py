"""The manager process: listener, engine socket, child engines, HTTP server, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from .. import huge_pages
from ..config import EngineConfig, ManagerConfig, is_loopback
from ..errors import ConfigError, ParrotError, PortInUse
from ..garbage import keep_out_of_the_way, keep_what_is_there
from ..models import resolve_model
from ..tokenizer import Tokenizer
from .app import create_app
from .engines import EngineRegistry
from .executor import Executor
from .http_protocol import GuardedProtocol
from .journal import Journal
from .key_file import KeyFile, load_keys
from .service import Service
from .supervisor import Supervisor

log = logging.getLogger(__name__)
_SWITCH_S = 0.001  # how long a thread that prepares a prompt may keep the loop waiting
_ANSWER_GRACE_S = 2  # for answers that are being written when everything has ended
_AT_ONCE_S = 0.2  # for engines to end when there is no time


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises :class:`PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio's own loop, too, sends each reply at once (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise PortInUse(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port, or 0 "
                "for a free one",
                param="port",
            ) from None
        raise
    listener.setblocking(False)
    return listener


def run_manager(
    config: ManagerConfig,
    *,
    engines: Sequence[EngineConfig] = (),
    parent_pipe: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT (or, with ``parent_pipe``, until standard input ends).

    ``engines`` are started as child processes; their ``manager_address`` is filled in here. Raises
    :class:`PortInUse`, :class:`ModelFileError`, :class:`JournalError` and the other set-up errors before
    anything but probes is answered.
    """
    # The tokenizer's thread pool does not survive the forks that start engines, and says so.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keys = load_keys(config.api_keys)
    with contextlib.closing(bind_listener(config.host, config.port)) as listener:
        tokenizer = Tokenizer.load(resolve_model(config.model, weights=False))
        journal = None
        if config.journal is not None:
            journal = Journal.open(config.journal, about={"tokenizer": tokenizer.fingerprint})
        uvloop.run(_Manager(config, keys, engines, tokenizer, listener, journal).run(parent_pipe))


def _ignore_signals() -> None:
    """Nothing is left to be hurried: until the process has ended one more signal must not kill it. The loop,
    which would put the default back when it is closed, must not have its handlers any more."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, and with word of when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening.set()


class _Manager:
    def __init__(
        self,
        config: ManagerConfig,
        keys: KeyFile | None,
        engines: Sequence[EngineConfig],
        tokenizer: Tokenizer,
        listener: socket.socket,
        journal: Journal | None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._engine_configs = engines
        self._tokenizer = tokenizer
        self._listener = listener
        self._journal = journal
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_urgent = False  # asked twice to end

    async def run(self, parent_pipe: bool) -> None:
        registry = EngineRegistry(self._config)
        try:
            self._executor = Executor(self._config, self._tokenizer, registry, self._keys)
        except ParrotError:
            await registry.close()  # its open socket would keep the process from ending
            raise
        supervisor = Supervisor(
            self._engine_configs,
            registry.local_address,
            on_exit=registry.process_ended,
            is_hung=registry.has_hung,
            has_joined=registry.has_joined,
            on_hopeless=self._executor.engines_do_not_start,
            background=registry.background,
        )
        self._service = Service(self._executor, self._journal)
        self._server = self._http_server(create_app(self._service, registry, supervisor))
        self._watch_signals(parent_pipe)
        sys.setswitchinterval(_SWITCH_S)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._starting = asyncio.create_task(self._start(registry, supervisor))
        try:
            await asyncio.wait((serving, self._starting), return_when=asyncio.FIRST_COMPLETED)
            if self._starting.done() and not self._starting.cancelled():
                self._starting.result()
            await serving
        finally:
            self._starting.cancel()
            await self._end_serving(serving)
            self._service.close()
            await supervisor.close(_AT_ONCE_S if self._is_urgent else None)
            await registry.close()
            if self._journal is not None:
                self._journal.close()
            if self._config.ready_file is not None:
                self._config.ready_file.unlink(missing_ok=True)
            _ignore_signals()
            log.info("manager ended")

    async def _start(self, registry: EngineRegistry, supervisor: Supervisor) -> None:
        """Everything but the HTTP server, which answers probes meanwhile."""
        keep_out_of_the_way()
        await self._service.recover()
        keep_what_is_there()
        registry.start(self._executor)
        self._service.start()
        supervisor.start()
        await asyncio.to_thread(huge_pages.gather)
        await self._server.listening.wait()
        self._announce(registry)

    async def _end_serving(self, serving: asyncio.Task[None]) -> None:
        """Only if the start has failed is there something to end."""
        if not serving.done():
            self._server.force_exit = self._server.should_exit = True
            await asyncio.wait((serving,))

    def _http_server(self, app: FastAPI) -> _Server:
        uvicorn_config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_ANSWER_GRACE_S,
        )
        return _Server(uvicorn_config)

    def _announce(self, registry: EngineRegistry) -> None:
        host, port = self._listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("serving %s on %s; %s", self._config.model, url, where_engines_join(registry))
        if self._config.api_keys is None and not is_loopback("host", host):
            log.warning("nobody needs a key: whoever can reach %s may use the service", url)
        if self._config.ready_file is not None:
            addresses = {"engine_address": registry.address, "local_engine_address": registry.local_address}
            write_ready_file(self._config.ready_file, url, addresses)

    def _watch_signals(self, parent_pipe: bool) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, self._config.drain_grace_s)
        if self._service.key_watch is not None:
            loop.add_signal_handler(signal.SIGHUP, self._service.key_watch.read_now)
        if parent_pipe:
            threading.Thread(target=_wait_for_eof, args=(loop, self._stop), daemon=True).start()

    def _stop(self, grace_s: float) -> None:
        """Drain and end; asked a second time, or before it has started, end at once."""
        if self._starting is not None and not self._starting.done():
            log.info("ending before all has started")
            self._starting.cancel()
            self._server.force_exit = self._server.should_exit = True
            return
        if self._stopping is None:
            log.info("draining: running calls have %g s to finish", grace_s)
            self._stopping = asyncio.get_running_loop().create_task(self._drain(grace_s))
            return
        log.warning("asked again to end: what still runs is given up")
        self._is_urgent = True
        self._stopping.cancel()
        self._server.force_exit = self._server.should_exit = True

    async def _drain(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        try:
            await self._executor.drain(grace_s)
        finally:
            self._service.close()
            # What is left of the grace belongs to streams whose clients read slowly.
            self._server.config.timeout_graceful_shutdown = max(
                _ANSWER_GRACE_S, int(until - time.monotonic())
            )
            self._server.should_exit = True


def where_engines_join(registry: EngineRegistry) -> str:
    """In words, for the line that says that the API answers; an engine that is left of an earlier manager
    may have joined by then."""
    waiting = "" if registry.alive else "calls wait for the first engine, "
    return f"{waiting}engines join at {registry.address}"


def write_ready_file(path: Path, url: str, addresses: Mapping[str, str]) -> None:
    """Atomically: whoever sees the file sees all of it. ``addresses``: where engines join, by the names of
    the fields. Raises :class:`ConfigError`."""
    body = json.dumps({"url": url, **addresses, "pid": os.getpid()})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(body)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"ready_file = {path} cannot be written ({error.strerror}); name a file in a directory that "
            "exists and is yours",
            param="ready_file",
        ) from None


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: Callable[[float], None]) -> None:
    # os.read, not sys.stdin: a thread inside a buffered read would block the interpreter's end.
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(stop, 0.0)
