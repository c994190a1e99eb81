"""The event loop on which the front end does its I/O: one daemon thread per process, started on first use.

A forked child starts without it and gets a loop of its own when it first needs one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

from ..errors import ParrotError

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="parrot-client", daemon=True)
            _thread.start()
        return _loop


def run(work: Coroutine[None, None, T]) -> Future[T]:
    """Start ``work`` on the loop; cancelling the future cancels it there."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def call_later(delay_s: float, action: Callable[[], object]) -> None:
    """Run ``action`` on the loop after ``delay_s``; it must not block."""
    running = loop()
    running.call_soon_threadsafe(running.call_later, delay_s, action)


def wait(future: Future[T]) -> T:
    """The result of ``future``; an interrupt while waiting cancels the work. An error of Parrot's says itself
    what is wrong and where: the frames of this loop, in which it came up, are left out of its trace."""
    try:
        return future.result()
    except ParrotError as error:
        raise error.with_traceback(None) from error.__cause__
    except BaseException:
        future.cancel()
        raise


async def outcome(future: Future[T]) -> T:
    """Await a future that others wait for too: being cancelled here leaves it alone."""
    wrapped = asyncio.wrap_future(future)
    # asyncio reports an exception that nobody retrieved, which is no news if the waiter has gone.
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(wrapped)


def stop() -> None:
    """End the loop: what still runs on it is cancelled. Called once, at interpreter exit."""
    global _loop, _thread
    with _lock:
        running, thread, _loop, _thread = _loop, _thread, None, None
    if running is None or thread is None:
        return
    asyncio.run_coroutine_threadsafe(_cancel_all(), running)
    thread.join(0.3)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=0.2) if tasks else None
    asyncio.get_running_loop().stop()


def _forget() -> None:
    global _lock, _loop, _thread
    _lock, _loop, _thread = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget)
