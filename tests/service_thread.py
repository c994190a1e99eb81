"""A manager and its HTTP API in a thread: for tests whose clients block, and that share one service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from manager_harness import running_manager, serving


@contextmanager
def service_in_thread(model: Path, **config: object) -> Iterator[str]:
    """A service with one scripted engine; yields its URL. Whatever ends the thread is raised here."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with (
            running_manager(model, **{"lost_after_s": 60.0, **config}) as manager,
            serving(manager) as url,
        ):
            await manager.add_engine()
            started.set_result((url, asyncio.get_running_loop(), stop))
            await stop.wait()

    def main() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=main, name="service")
    thread.start()
    url, loop, stop = started.result()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
