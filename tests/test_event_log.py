"""The scheduler's events on record, of a whole manager."""

from __future__ import annotations

import asyncio
from pathlib import Path

from graph_builder import prompt_call, read, write
from manager_harness import running_manager, until
from parrot.config import SchedulerConfig
from parrot.manager.event_log import replay

OTHER_KEY = bytes(range(100, 116))


def test_a_managers_run_replays_to_the_same_placements(tiny_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "events"
    calls = [
        prompt_call(f"c{i}", f"Word {i} of {{{{input:x}}}} {{{{output:o{i}}}}}", read("x")) for i in range(6)
    ]

    async def scenario() -> None:
        config = SchedulerConfig(record=record)
        async with running_manager(tiny_model, scheduler=config) as manager:
            for name in ("one", "two"):
                await manager.add_engine(name=name)
            for _ in range(5):
                session = manager.submit(prompt_call("w", "Say {{output:x}}", write("x")), *calls)
                await manager.get(session, "o5")
            await until(lambda: manager.executor.dispatcher.num_busy == 0)

    asyncio.run(scenario())
    with record.open("rb") as log:
        passes = list(replay(log, hash_key=OTHER_KEY))
    assert sum(len(recorded) for recorded, _ in passes) == 35
    assert all(recorded == replayed for recorded, replayed in passes)
