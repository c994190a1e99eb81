"""The processes under test: a manager with a journal, and engines that join it through faulty wires."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

import httpx

from .wire_faults import FaultyWire

START_S = 120.0
_POLL_S = 0.05
_COUNTERS = ("call_retries", "stalls", "frame_losses", "engines_cut_off", "frames_dropped", "cache_snapshots")


class Process:
    """A child that can be killed, stopped, and started again."""

    def __init__(self, arguments: list[str], log: IO[bytes]) -> None:
        self._argv = [sys.executable, "-m", "parrot.cli.main", *arguments]
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """It was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it, once more if it has ended."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._child = subprocess.Popen(self._argv, stdout=self._log, stderr=self._log, env=environment)

    def signal(self, number: int) -> None:
        """Send a signal, if somebody is there to take it."""
        if self._child is not None and self.is_running:
            self._child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()

    def end(self, timeout_s: float = 20.0) -> int | None:
        """SIGTERM, and SIGKILL for one that stays; its exit code."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self._child is None:
            return None
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None


class Fleet:
    """A manager and its engines; ``directory`` gets their log, the journal and the ready file."""

    def __init__(self, directory: Path, model: Path, *, num_engines: int, seed: int) -> None:
        self._directory = directory
        self._log = (directory / "service.log").open("wb")
        self._ready_file = directory / "ready.json"
        self._model = model
        self.model = str(model)
        self.wires = [FaultyWire(seed + number) for number in range(num_engines)]
        self.manager = self._manager(0, 0)
        self.engines: list[Process] = []
        self.url = ""
        self.counters: Counter[str] = Counter()  # of all lives of the manager, as far as it could be asked

    def _manager(self, port: int, engine_port: int) -> Process:
        options = {
            "model": self._model,
            "port": port,
            "engine-port": engine_port,
            "ready-file": self._ready_file,
            "journal": self._directory / "journal.sqlite",
            "session-idle-s": 15,
            "stall-after-s": 10,
            "max-retries": 20,  # faults come so often that a call may well be hit several times
            "drain-grace-s": 5,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return Process(["manager", *arguments, "-v"], self._log)

    async def start(self) -> None:
        """Everything runs and is ready."""
        ready = await self._start_manager()
        self.url = ready["url"]
        http_port = int(self.url.rsplit(":", 1)[1])
        engine_port = int(ready["engine_address"].rsplit(":", 1)[1])
        for number, wire in enumerate(self.wires):
            await wire.start(engine_port)
            self.engines.append(self._engine(number, wire.port))
            self.engines[-1].start()
        running = self.manager
        self.manager = self._manager(http_port, engine_port)  # from its first restart on
        self.manager._child = running._child
        if not await self.wait_until(lambda state: len(state["engines"]) == len(self.wires)):
            raise TimeoutError(f"the engines did not join within {START_S:g} s; see {self._log.name}")

    def _engine(self, number: int, port: int) -> Process:
        options = {
            "manager": f"tcp://127.0.0.1:{port}",
            "name": f"engine-{number}",
            "model": self._model,
            "num-blocks": 128,
            "num-threads": 1,
            "stall-after-s": 10,
            "drain-grace-s": 5,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return Process(["engine", *arguments, "-v"], self._log)

    async def _start_manager(self) -> dict[str, Any]:
        self._ready_file.unlink(missing_ok=True)
        self.manager.start()
        while not self._ready_file.exists():
            assert self.manager.is_running, f"the manager ended; see {self._log.name}"
            await asyncio.sleep(_POLL_S)
        ready: dict[str, Any] = json.loads(self._ready_file.read_text())
        return ready

    async def restart_manager(self) -> None:
        """kill -9, and a new one on the same ports, with the same journal."""
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            await self.count()
        self.manager.kill()
        await self._start_manager()

    async def state(self) -> dict[str, Any]:
        """Living engines and the gauges of calls and sessions; raises when nobody answers."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            engines = (await client.get("/v1/engines")).json()["engines"]
            page = (await client.get("/metrics")).text
        numbers = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return {
            "engines": [engine for engine in engines if engine["alive"]],
            "metrics": {name: float(value) for name, value in numbers.items()},
        }

    async def count(self) -> None:
        """Add what this life of the manager has counted."""
        metrics = (await self.state())["metrics"]
        for name in _COUNTERS:
            self.counters[name] += int(metrics[f"parrot_{name}_total"])

    async def wait_until(self, condition: Any, timeout_s: float = START_S) -> bool:
        """Whether the state came to be so in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            try:
                if condition(await self.state()):
                    return True
            except (httpx.HTTPError, KeyError, ValueError):
                pass
            await asyncio.sleep(_POLL_S * 4)
        return False

    async def close(self) -> list[int | None]:
        """End everything in order; exit codes, the manager's first."""
        for engine in self.engines:
            engine.signal(signal.SIGCONT)
        codes = [await asyncio.to_thread(self.manager.end)]
        codes += await asyncio.gather(*(asyncio.to_thread(engine.end) for engine in self.engines))
        for wire in self.wires:
            await wire.close()
        self._log.close()
        return codes
