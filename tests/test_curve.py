"""Keys of engines: what is on disk, and who gets through to the manager's socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from parrot import wire
from parrot.config import EngineConfig, ManagerConfig
from parrot.curve import EngineKeys, KeyPair, load_engine_keys, load_manager_keys, make_curve_keys
from parrot.engine.link import EXIT_MANAGER_SILENT, Link, LinkConfig, Stop
from parrot.errors import ConfigError
from parrot.manager.engine_socket import RouterSocket
from test_link import REGISTER, STATS

# A handshake that is refused never ends; one that is not takes milliseconds, on a machine that is not busy.
_REFUSED_S = 0.4


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_curve_keys(tmp_path / "curve")
    return tmp_path / "curve"


@contextmanager
def dealer(address: str, keys: EngineKeys | None) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.manager)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


class Manager:
    """A router and what has come to it."""

    def __init__(self, directory: Path | None) -> None:
        self.router = RouterSocket("127.0.0.1", 0, directory)
        self.arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.router.start(self.arrived.put_nowait)


def run(directory: Path | None, scenario: Callable[[Manager], Awaitable[None]]) -> None:
    async def main() -> None:
        manager = Manager(directory)
        try:
            await scenario(manager)
        finally:
            manager.router.close()

    asyncio.run(main())


async def gets_through(manager: Manager, keys: EngineKeys | None, within_s: float = 60.0) -> bool:
    with dealer(manager.router.address, keys) as socket:
        socket.send(b"hello")
        try:
            identity, frame = await asyncio.wait_for(manager.arrived.get(), within_s)
        except TimeoutError:
            return False
        assert frame == b"hello"
        assert manager.router.send(identity, [b"welcome"])
        assert await asyncio.to_thread(socket.poll, 60_000)
        return socket.recv() == b"welcome"


async def is_refused(manager: Manager, keys: EngineKeys | None) -> bool:
    return not await gets_through(manager, keys, _REFUSED_S)


def stranger(keys: EngineKeys) -> EngineKeys:
    return EngineKeys(KeyPair(*zmq.curve_keypair()), keys.manager)


def test_only_an_engine_with_an_admitted_key_gets_through(directory: Path) -> None:
    keys = load_engine_keys(directory)

    async def scenario(manager: Manager) -> None:
        assert await gets_through(manager, keys)
        assert await is_refused(manager, None)
        assert await is_refused(manager, stranger(keys))
        impostor = KeyPair(keys.own.public, zmq.curve_keypair()[1])
        assert await is_refused(manager, EngineKeys(impostor, keys.manager))
        assert await gets_through(manager, keys)

    run(directory, scenario)


@pytest.mark.parametrize(
    ("manager_keys", "engine_keys"), [("own", "none"), ("own", "stranger"), ("none", "own")]
)
def test_an_engine_whose_keys_do_not_fit_waits_and_both_sides_say_why(
    directory: Path, manager_keys: str, engine_keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = load_engine_keys(directory)
    keys = {"none": None, "own": own, "stranger": stranger(own)}[engine_keys]

    async def scenario(manager: Manager) -> None:
        link = Link(LinkConfig(manager.router.address, 0.05, 3.0, curve=keys), REGISTER, STATS)
        link.start()
        stop = await asyncio.to_thread(link.events.get, timeout=60)
        assert isinstance(stop, Stop)
        assert stop.exit_code == EXIT_MANAGER_SILENT
        assert "no word from the manager" in stop.reason
        assert "--curve-keys" in stop.reason
        link.send(wire.Draining("epoch", "nobody is there"))
        await asyncio.to_thread(link.close, stop.reason)

    with caplog.at_level(logging.WARNING):
        run(directory if manager_keys == "own" else None, scenario)
    told = [record.message for record in caplog.records if record.name == "parrot.manager.refusals"]
    told += [record.message for record in caplog.records if "is not admitted" in record.message]
    assert told
    assert "failed" not in caplog.text
    assert len(told) < 4 or engine_keys == "stranger", (
        "a peer that tries again and again is told of now and then"
    )


def test_keys_of_engines_come_and_go_while_the_manager_runs(directory: Path, tmp_path: Path) -> None:
    async def scenario(manager: Manager) -> None:
        make_curve_keys(directory, "gpu-7")
        other = tmp_path / "elsewhere"
        other.mkdir()
        (other / "manager.key").write_bytes((directory / "manager.key").read_bytes())
        (directory / "gpu-7.key_secret").rename(other / "engine.key_secret")
        assert await gets_through(manager, load_engine_keys(other))
        (directory / "engines" / "gpu-7.key").unlink()
        assert await is_refused(manager, load_engine_keys(other))
        (directory / "engines" / "broken.key").write_text("nothing")
        assert await gets_through(manager, load_engine_keys(directory))

    run(directory, scenario)


def test_an_engine_talks_to_its_own_manager_only(directory: Path, tmp_path: Path) -> None:
    keys = load_engine_keys(directory)
    make_curve_keys(tmp_path / "other")
    public = (directory / "engines" / "engine.key").read_bytes()
    (tmp_path / "other" / "engines" / "engine.key").write_bytes(public)  # it would like to have this engine

    async def scenario(manager: Manager) -> None:
        assert await is_refused(manager, keys)

    run(tmp_path / "other", scenario)


def test_secret_keys_are_for_their_owner_and_public_keys_stay_once_made(directory: Path) -> None:
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.*"))
    assert files == ["engine.key_secret", "engines/engine.key", "manager.key", "manager.key_secret"]
    for path in directory.glob("*.key_secret"):
        assert path.stat().st_mode & 0o077 == 0
    before = load_manager_keys(directory)
    assert [path.name for path in make_curve_keys(directory, "gpu-7")] == ["gpu-7.key", "gpu-7.key_secret"]
    assert load_manager_keys(directory) == before
    assert before.secret.decode() not in repr(before)
    with pytest.raises(ConfigError, match="has keys of gpu-7 already"):
        make_curve_keys(directory, "gpu-7")
    for name in ("manager", "../x", ""):
        with pytest.raises(ConfigError, match="is no name of an engine's key"):
            make_curve_keys(directory, name)


def test_keys_that_cannot_be_used_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"manager\.key_secret cannot be used .No such.*key curve"):
        load_manager_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none/manager\.key cannot be used"):
        load_engine_keys(tmp_path / "none")
    (directory / "manager.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644 of .*manager\.key_secret gives the key away"):
        load_manager_keys(directory)
    (directory / "engine.key_secret").write_text((directory / "manager.key").read_text())
    with pytest.raises(ConfigError, match="it has no pair of keys"):
        load_engine_keys(directory)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_other_machines_need_curve_keys_at_both_ends(host: str, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_host.*parrot key curve DIR.*--curve-keys DIR.*127"):
        ManagerConfig(engine_host=host)
    assert ManagerConfig(engine_host=host, curve_keys=directory).engine_host == host
    address = f"tcp://[{host}]:8643" if ":" in host else f"tcp://{host}:8643"
    for elsewhere in (address, "tcp://manager:8643"):
        with pytest.raises(ConfigError, match=r"manager_address.*in the clear.*--curve-keys DIR"):
            EngineConfig(elsewhere)
        assert EngineConfig(elsewhere, curve_keys=directory).manager_address == elsewhere
    for here in ("", "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/x"):
        assert EngineConfig(here).curve_keys is None
