"""The sum of the per-engine load of the manager equals the calls in flight, whatever happens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from graph_builder import prompt_call, write
from manager_harness import Manager, ScriptedEngine, running_manager, until
from parrot import api, wire
from parrot.errors import ErrorInfo

NUM_EVENTS = 120


def check(manager: Manager) -> None:
    """Scheduler and registry say the same of each engine; together they have every run that was placed."""
    manager.check_load()
    in_flight = [run for run in manager.executor.dispatcher._runs.values() if run.engine is not None]
    assert sum(engine.num_dispatched for engine in manager.registry.alive) == len(in_flight)


class Events:
    """What can happen, chosen at random."""

    def __init__(self, manager: Manager, seed: int) -> None:
        self.manager = manager
        self.rng = random.Random(seed)
        self.sessions: list[str] = []
        self.num_engines = 0
        self.answered: set[tuple[str, int]] = set()

    async def join(self) -> None:
        self.num_engines += 1
        await self.manager.add_engine(name=f"engine-{self.num_engines}", held=True, max_batch_size=4)

    async def submit(self) -> None:
        first = prompt_call("first", "Say {{output:a}}", write("a"))
        wide = [prompt_call(f"w{i}", "After {{input:a}} {{output:o}}", write("o", f"o{i}")) for i in range(3)]
        self.sessions.append(self.manager.submit(first, *wide))

    async def answer(self) -> None:
        engine = self.living()
        waiting = [one for one in engine.dispatches if (engine.name, one.call_id) not in self.answered]
        for dispatch in self.rng.sample(waiting, min(2, len(waiting))):
            self.answered.add((engine.name, dispatch.call_id))
            if self.rng.random() < 0.2:
                error = ErrorInfo("engine_error", "it failed")
                await engine.send(wire.CallFailed(dispatch.call_id, error))
            else:
                await engine.answer(dispatch)

    async def cancel(self) -> None:
        session = self.rng.choice(self.sessions)
        var_id = self.rng.choice(("a", "o0", "o2"))
        self.manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id=var_id))

    async def delete(self) -> None:
        session = self.sessions.pop(self.rng.randrange(len(self.sessions)))
        self.manager.service.delete_session(session)

    async def die(self) -> None:
        engine = self.living()
        await engine.die()
        self.manager.engines.remove(engine)
        await until(lambda: all(one.name != engine.name for one in self.manager.registry.alive))
        await self.join()

    def living(self) -> ScriptedEngine:
        return self.rng.choice(self.manager.engines)

    async def happen(self) -> None:
        events = [self.submit, self.submit, self.answer, self.answer, self.answer, self.answer]
        if self.sessions:
            events += [self.cancel, self.delete]
        if self.rng.random() < 0.1:
            events += [self.die]
        await self.rng.choice(events)()


@pytest.mark.parametrize("seed", range(3))
def test_load_equals_calls_in_flight_after_every_event(tiny_model: Path, seed: int) -> None:
    async def main() -> None:
        async with running_manager(
            tiny_model, heartbeat_s=0.05, lost_after_s=30.0, max_retries=50
        ) as manager:
            events = Events(manager, seed)
            await events.join()
            await events.join()
            for _ in range(NUM_EVENTS):
                await events.happen()
                check(manager)
                await asyncio.sleep(0.002)
                check(manager)
            assert events.answered
            for session in events.sessions:
                manager.service.delete_session(session)
            check(manager)
            assert manager.executor.dispatcher.num_busy == 0

    asyncio.run(main())
