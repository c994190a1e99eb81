"""The embedded service: a child process with a small model, for programs that name no service.

It is started once per process and model, in the background, and ends with this process: it reads the end of
its standard input, so it goes even when this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

from ..config import DEFAULT_MODEL
from ..errors import ModelPackageMissing, ParrotError, ServiceUnreachable, SetupError
from . import background

START_LIMIT_S = 600.0  # a first start converts the model
_QUIET_S = 1.0
_POLL_S = 0.03
_EXIT_S = 0.2
_LOG_TAIL = 20

_lock = threading.Lock()
_services: dict[str, EmbeddedService] = {}


def service(model: str = DEFAULT_MODEL) -> EmbeddedService:
    """The embedded service of this process for ``model``, started if need be; returns without waiting for it.

    Raises :class:`SetupError` with the command that helps.
    """
    with _lock:
        existing = _services.get(model)
        if existing is None or existing.ended:
            check_installed()
            existing = _services[model] = EmbeddedService(model)
        return existing


def check_installed() -> None:
    """Raise :class:`SetupError` unless PyTorch is there; the import of it is left to the service."""
    if find_spec("torch") is None:
        raise SetupError(
            "the embedded service needs PyTorch: pip install 'parrot-serve[torch]' "
            "(or name a running service with P.connect(url) or PARROT_URL)"
        )


class EmbeddedService:
    """One child process. ``find_url`` waits for it and raises what kept it from starting."""

    def __init__(self, model: str, *, command: list[str] | None = None) -> None:
        self._model = model
        self._directory = Path(tempfile.mkdtemp(prefix="parrot-"))
        self.log_path = self._directory / "service.log"
        self._ready_file = self._directory / "ready.json"
        self._started = time.monotonic()
        self._url: Future[str] = Future()
        self._pid = os.getpid()
        self._stopped = False
        self.process = self._start(command or _command(model))
        threading.Thread(target=self._watch, name="parrot-embedded", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended; unknown in a forked child, where it is taken to live."""
        return self._pid == os.getpid() and self.process.poll() is not None

    async def find_url(self) -> str:
        """The service's URL, once it answers. Raises :class:`SetupError` if it did not start, and
        :class:`ServiceUnreachable` if it ended since; both name the log."""
        url = await background.outcome(self._url)
        if self.ended:
            raise ServiceUnreachable(
                f"the embedded service ended with exit code {self.process.returncode}; "
                f"its log is {self.log_path}"
            )
        return url

    def stop(self) -> None:
        """End the process by closing its standard input; returns without waiting long."""
        if self._pid != os.getpid():
            return
        failed = self._url.done() and self._url.exception() is not None
        self._stopped = True
        self.detach()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        if not failed:
            shutil.rmtree(self._directory, ignore_errors=True)

    def detach(self) -> None:
        """Close our end of its standard input; in a forked child this only drops the child's copy."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        argv = [*command, "--port", "0", "--ready-file", str(self._ready_file), "--parent-pipe"]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this program, which then ends the service
            )

    def _watch(self) -> None:
        progress = _Progress(self._model)
        try:
            while not self._ready_file.exists():
                self._check_alive()
                progress.update(time.monotonic() - self._started)
                time.sleep(_POLL_S)
            url = json.loads(self._ready_file.read_text())["url"]
            progress.end(time.monotonic() - self._started)
            self._url.set_result(url)
        except ParrotError as error:
            self._url.set_exception(error)
        except Exception as error:
            self._url.set_exception(SetupError(f"the embedded service's ready file is broken: {error!r}"))

    def _check_alive(self) -> None:
        if self._stopped:
            raise ServiceUnreachable("the embedded service was stopped while it started")
        if self.process.poll() is not None:
            raise self._failure()
        if time.monotonic() - self._started > START_LIMIT_S:
            self.process.kill()
            raise SetupError(
                f"the embedded service was not ready after {START_LIMIT_S:g} s; its log is {self.log_path}"
            )

    def _failure(self) -> SetupError:
        """What the service said last; its `error:` line ends with the command that helps."""
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        named = [line.removeprefix("error: ") for line in lines[-_LOG_TAIL:] if line.startswith("error: ")]
        words = named[-1] if named else lines[-1] if lines else f"exit code {self.process.returncode}"
        kind = ModelPackageMissing if "parrot model install" in words else SetupError
        return kind(f"the embedded service did not start: {words} (its log: {self.log_path})")


class _Progress:
    """Words on standard error, once the start takes longer than a moment."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._shown = False

    def update(self, elapsed_s: float) -> None:
        if elapsed_s < _QUIET_S or self._shown:
            return
        self._shown = True
        print(f"parrot: starting an embedded service with {self._model} ...", file=sys.stderr, flush=True)

    def end(self, elapsed_s: float) -> None:
        if self._shown:
            print(
                f"parrot: the embedded service takes calls after {elapsed_s:.1f} s; they run once its "
                "engine has loaded the model",
                file=sys.stderr,
                flush=True,
            )


def stop_all() -> None:
    """End every embedded service of this process."""
    with _lock:
        services = list(_services.values())
        _services.clear()
    for each in services:
        each.stop()


def _command(model: str) -> list[str]:
    return [sys.executable, "-m", "parrot.cli.main", "serve", "--model", model]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for each in _services.values():
        each.detach()


os.register_at_fork(after_in_child=_after_fork)
