"""Follows the file of API keys: what changes there holds within a second, without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from ..errors import ConfigError
from .background import Background
from .key_file import read_key_file
from .tenants import Tenants

log = logging.getLogger(__name__)
_EVERY_S = 1.0
_HANGS_AFTER_S = 5.0

T = TypeVar("T")


class KeyWatch:
    """Reads the file again when it has changed. One that is wrong changes nothing: the keys in use stay, and
    the log says what is wrong with it."""

    def __init__(self, path: Path, tenants: Tenants, background: Background) -> None:
        self.num_failures = 0  # files that could not be read
        self._path = path
        self._tenants = tenants
        self._background = background
        self._seen: object = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow; the file as it is now is read once more, for it may have changed since."""
        self._task = self._background.start("key-watch", self._look)

    def close(self) -> None:
        """Follow no more."""
        if self._task is not None:
            self._task.cancel()

    def read_now(self) -> None:
        """Read the file again, whether or not it seems to have changed."""
        self._wake.set()

    async def _look(self) -> None:
        state = await self._in_thread(lambda: _state_of(self._path))
        if state != self._seen or self._wake.is_set():
            self._wake.clear()
            self._seen = state
            await self._read()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), _EVERY_S)

    async def _read(self) -> None:
        try:
            content = await self._in_thread(lambda: read_key_file(self._path))
        except ConfigError as error:
            self.num_failures += 1
            log.error("the API keys stay as they were: %s", error.message)
            return
        except Exception:  # or the file would be followed no more
            self.num_failures += 1
            log.exception("the API keys stay as they were")
            return
        self._tenants.replace_keys(content)
        log.info("%d API keys of %d tenants", len(content.keys), len(content.tenants))

    async def _in_thread(self, look: Callable[[], T]) -> T:
        """The result of a look at the file; one that hangs (a network mount that is gone) is said once."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        # A thread of its own: one that hangs must not keep the process from ending, as the pool's would.
        threading.Thread(target=_run, args=(loop, look, result), name="key-file", daemon=True).start()
        done, _ = await asyncio.wait((result,), timeout=_HANGS_AFTER_S)
        if not done:
            self.num_failures += 1
            log.error(
                "api_keys = %s: it cannot be looked at for %g s now; the API keys stay as they were, "
                "revoked ones too, until that works again",
                self._path,
                _HANGS_AFTER_S,
            )
        return await result


def _run(loop: asyncio.AbstractEventLoop, look: Callable[[], T], result: asyncio.Future[T]) -> None:
    found: T | None = None
    problem: Exception | None = None
    try:
        found = look()
    except Exception as error:
        problem = error

    def tell() -> None:
        if result.done():
            return
        if problem is None:
            result.set_result(cast(T, found))
        else:
            result.set_exception(problem)

    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(tell)


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    """Differs whenever the file was written, replaced or taken away."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
