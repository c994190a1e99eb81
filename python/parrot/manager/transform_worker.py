"""The process that applies transforms which would hold the loop for too long.

Most operators keep the interpreter's lock for as long as they take, so that a thread would not do. The
process is started when a first value needs it, has the same code, and takes one chain at a time over a pipe.
It ends with the manager, whatever ends that: its input ends then, and the kernel kills even one that is
stopped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from pydantic import TypeAdapter

from ..api import Transform
from ..parent_death import end_with_parent
from .operators import Budget
from .transforms import Chain, Failure, Work, compile_chain

log = logging.getLogger(__name__)
_TIMEOUT_S = 60.0  # for a chain, which may take 0.1 s of processor time, and for the start of the process
_PIECE = 2**18  # characters or bytes that are converted at once, less than a millisecond
_WORK = struct.Struct("<QQQd")  # bytes of the key, bytes of the value, limit of a result, seconds left
_ANSWER = struct.Struct("<?dQ")  # whether it has a result, seconds spent, bytes of the result or reason
_transforms = TypeAdapter(tuple[Transform, ...])


class TransformWorker:
    """The process and the thread that talks to it. :meth:`run` is for one loop; :meth:`close` ends both."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transforms")
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.num_runs = 0

    async def run(self, work: Work) -> tuple[str | Failure, float]:
        """The result, or why there is none, and the processor time that it took. Work is done in order."""
        self.num_runs += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def close(self) -> None:
        """End the process; work that is under way is finished here, slower for everybody else."""
        self._is_closed = True
        self._stop()
        self._thread.shutdown(wait=False)

    def _run(self, work: Work) -> tuple[str | Failure, float]:
        try:
            return self._ask(work)
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # the last one: no thread to be had
            if not self._is_closed:
                log.warning("the process for transforms is lost (%s: %s)", type(error).__name__, error)
            self._stop()
        budget = Budget(work.max_bytes, work.left_s)
        return work.chain.run(work.value, budget), budget.spent_s

    def _ask(self, work: Work) -> tuple[str | Failure, float]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        key, value = work.chain.key.encode(), list(_encoded(work.value))
        head = _WORK.pack(len(key), sum(map(len, value)), work.max_bytes, work.left_s)
        hung = threading.Timer(_TIMEOUT_S, process.kill)
        hung.start()
        try:
            process.stdin.writelines((head, key, *value))
            process.stdin.flush()
            has_result, spent_s, size = _ANSWER.unpack(_read(process.stdout, _ANSWER.size))
            data = _read(process.stdout, size)
        finally:
            hung.cancel()
        text = _decoded(data)
        return text if has_result else Failure(text), spent_s

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise EOFError("closed")
        # It ends with the thread that is here now, which is there until the worker is closed.
        command = [sys.executable, "-m", "parrot.manager.transform_worker", str(os.getpid())]
        # In a session of its own: Ctrl-C is for the manager, which still needs it while it drains.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _encoded(text: str) -> Iterator[bytes]:
    """In pieces: each keeps the interpreter's lock. Half surrogate pairs stay what they are."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE].encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    pieces, start = [], 0
    while start < len(data):
        end = min(start + _PIECE, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:  # within a character
            end += 1
        pieces.append(data[start:end].decode("utf-8", "surrogatepass"))
        start = end
    return "".join(pieces)


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("its output has ended")
    return data


@functools.lru_cache(maxsize=256)
def _chain(key: bytes) -> Chain:
    return compile_chain(_transforms.validate_json(key), where="transforms")


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer until ``source`` ends."""
    while head := source.read(_WORK.size):
        key_size, value_size, max_bytes, left_s = _WORK.unpack(head)
        chain = _chain(_read(source, key_size))
        value = _decoded(_read(source, value_size))
        budget = Budget(max_bytes, left_s)
        result = chain.run(value, budget)
        text = result.reason if isinstance(result, Failure) else result
        pieces = list(_encoded(text))
        sink.write(_ANSWER.pack(isinstance(result, str), budget.spent_s, sum(map(len, pieces))))
        sink.writelines(pieces)
        sink.flush()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
