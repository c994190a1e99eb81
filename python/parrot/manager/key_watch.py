"""Follows the file of API keys: what changes there holds within a second, without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from ..errors import ConfigError
from .key_file import read_key_file
from .tenants import Tenants

log = logging.getLogger(__name__)
_EVERY_S = 1.0


class KeyWatch:
    """Reads the file again when it has changed. One that is wrong changes nothing: the keys in use stay, and
    the log says what is wrong with it."""

    def __init__(self, path: Path, tenants: Tenants) -> None:
        self.num_failures = 0  # files that could not be read
        self._path = path
        self._tenants = tenants
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow; the file as it is now is read once more, for it may have changed since."""
        self._task = asyncio.create_task(self._follow(), name="key-watch")

    def close(self) -> None:
        """Follow no more."""
        if self._task is not None:
            self._task.cancel()

    def read_now(self) -> None:
        """Read the file again, whether or not it seems to have changed."""
        self._wake.set()

    async def _follow(self) -> None:
        seen: object = None
        while True:
            state = _state_of(self._path)
            if state != seen or self._wake.is_set():
                self._wake.clear()
                seen = state
                await self._read()
            try:
                await asyncio.wait_for(self._wake.wait(), _EVERY_S)
            except TimeoutError:
                continue

    async def _read(self) -> None:
        try:
            content = await asyncio.to_thread(read_key_file, self._path)
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


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    """Differs whenever the file was written, replaced or taken away."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
