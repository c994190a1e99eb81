"""The last frames that an engine has sent, which the manager may ask for again."""

from __future__ import annotations

from collections import deque

MAX_FRAMES = 1024
MAX_BYTES = 8 * 2**20


class SentFrames:
    """As many of the newest as their bounds allow; numbers rise by one."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def add(self, number: int, frame: bytes) -> None:
        """The next frame has been sent."""
        self._frames.append((number, frame))
        self._num_bytes += len(frame)
        while len(self._frames) > MAX_FRAMES or self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._frames.popleft()[1])

    def since(self, number: int) -> list[bytes]:
        """The frame of this number and all after it; empty if it is kept no more."""
        if not self._frames or number < self._frames[0][0]:
            return []
        return [frame for sent, frame in self._frames if sent >= number]
