"""A TCP proxy between an engine and its manager that knows where a ZeroMQ message ends (ZMTP 3, no security),
so that it can lose or delay whole messages, let nothing through for a while, or cut the connection."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Faults:
    """What happens to messages now, in both directions."""

    loss: float = 0.0  # chance of a message to vanish
    delay_s: float = 0.0  # at most; the order stays
    partitioned: bool = False  # every message vanishes


class FaultyWire:
    """One engine connects to ``port``; the other end is the manager's engine port."""

    def __init__(self, seed: int) -> None:
        self.faults = Faults()
        self.num_lost = 0
        self.port = 0
        self._manager_port = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, manager_port: int) -> None:
        """Listen on a free port."""
        self._manager_port = manager_port
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End, with all connections."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Reset the connections that are there; the engine connects again."""
        for connection in self._connections:
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        up: asyncio.StreamWriter | None = None
        try:
            back, up = await asyncio.open_connection("127.0.0.1", self._manager_port)
            pumps = [
                asyncio.create_task(self._pump(reader, up)),
                asyncio.create_task(self._pump(back, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the manager is down, or the connection was cut
        finally:
            self._connections.discard(task)
            for end in (writer, up):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            missing = _GREETING_BYTES
            while missing:  # each end waits for the beginning of the other's before it sends the rest
                part = await reader.read(missing)
                if not part:
                    return
                writer.write(part)
                missing -= len(part)
            while True:
                message, is_command = await _read_message(reader)
                if not is_command and await self._loses():
                    self.num_lost += 1
                    continue
                writer.write(message)
                await writer.drain()

    async def _loses(self) -> bool:
        if self.faults.delay_s:
            await asyncio.sleep(self._random.uniform(0, self.faults.delay_s))
        return self.faults.partitioned or self._random.random() < self.faults.loss


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """All frames of a message, or one command."""
    message = b""
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & _LONG else 1)
        message += flags + size + await reader.readexactly(int.from_bytes(size, "big"))
        if flags[0] & _COMMAND:
            return message, True
        if not flags[0] & _MORE:
            return message, False
