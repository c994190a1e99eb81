"""The listener and the ready file."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from parrot.errors import ConfigError, PortInUse
from parrot.manager.engine import Engine
from parrot.manager.engines import EngineRegistry
from parrot.manager.server import bind_listener, where_engines_join, write_ready_file


def test_a_hundred_parallel_starts_find_free_ports() -> None:
    listeners = [bind_listener("127.0.0.1", 0) for _ in range(100)]
    assert len({listener.getsockname()[1] for listener in listeners}) == 100
    for listener in listeners:
        listener.close()


def test_a_taken_port_is_a_typed_error_that_names_it() -> None:
    with bind_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            bind_listener("127.0.0.1", port)


def test_a_bound_port_accepts_before_anything_serves() -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname(), timeout=60).close()


@pytest.mark.parametrize(("num_engines", "waiting"), [(0, "calls wait for the first engine, "), (1, "")])
def test_calls_are_said_to_wait_only_while_no_engine_has_joined(num_engines: int, waiting: str) -> None:
    registry = Mock(EngineRegistry, alive=[Mock(Engine)] * num_engines, address="tcp://127.0.0.1:2")
    assert where_engines_join(registry) == f"{waiting}engines join at tcp://127.0.0.1:2"


def test_the_ready_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(path, "http://127.0.0.1:1", {"engine_address": "tcp://127.0.0.1:2"})
    assert json.loads(path.read_text())["url"] == "http://127.0.0.1:1"
    assert [file.name for file in tmp_path.iterdir()] == ["ready.json"]


def test_a_ready_file_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/ready\.json cannot be written"):
        write_ready_file(tmp_path / "missing" / "ready.json", "http://127.0.0.1:1", {})


def test_a_reply_does_not_wait_for_the_acknowledgement_of_the_one_before() -> None:
    async def main() -> None:
        async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nodelay.set_result(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        nodelay: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        listener = bind_listener("127.0.0.1", 0)
        async with await asyncio.start_server(look, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await nodelay
            writer.close()

    asyncio.run(main())
