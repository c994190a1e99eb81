"""What a manager makes is freed without the cyclic collector."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from manager_harness import running_manager
from parrot import api
from parrot.manager.call import Call
from parrot.manager.garbage import IdleCollector
from parrot.manager.graph import Graph
from parrot.manager.variable import Variable


def call(name: str, before: str | None = None) -> api.CallBody:
    holes = [{"name": "y", "kind": "output", "semantic_var_id": name}]
    if before is not None:
        holes.append({"name": "x", "kind": "input", "semantic_var_id": before})
    prompt = "Say {{output:y}}" if before is None else "After {{input:x}} {{output:y}}"
    return api.CallBody.model_validate({"request_id": name, "prompt": prompt, "placeholders": holes})


def num_alive() -> int:
    return sum(isinstance(found, Call | Variable | Graph) for found in gc.get_objects())


def test_a_deleted_session_is_freed_at_once(tiny_model: Path) -> None:
    gc.collect()
    before = num_alive()

    async def main() -> None:
        async with running_manager(tiny_model) as manager:
            await manager.add_engine()
            derived = {"semantic_var_id": "d", "sources": [{"semantic_var_id": "b"}]}
            session = manager.submit(call("a"), call("b", "a"), call("c", "b"), variables=[derived])
            await manager.get(session, "c")
            await manager.get(session, "d")
            await asyncio.sleep(0)
            assert num_alive() >= before + 7
            gc.disable()
            try:
                manager.service.delete_session(session)
                await asyncio.sleep(0)
                assert num_alive() == before
            finally:
                gc.enable()

    asyncio.run(main())


def test_the_collector_leaves_what_is_there_at_the_start_alone() -> None:
    program = (
        "import gc; from parrot.manager.garbage import keep_out_of_the_way; keep_out_of_the_way(); "
        "assert gc.get_freeze_count() > 1000, gc.get_freeze_count(); assert gc.isenabled(); "
        "class A: pass\na = A(); a.a = a; del a; import weakref\n"
        "assert gc.collect() > 0"
    )
    subprocess.run([sys.executable, "-c", program.replace("; class", "\nclass")], check=True, timeout=60)


def test_everything_is_looked_at_once_after_work_and_never_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: looks.append(1))
    collector = IdleCollector()
    for num_ended, num_busy in [(0, 0), (0, 0), (5, 0), (9, 3), (9, 3), (9, 0)]:
        collector.sweep(num_ended, num_busy)
        expected = (num_ended, num_busy) == (9, 0)
        assert len(looks) == expected
    collector.sweep(9, 0)
    assert len(looks) == 1
    collector.sweep(10, 0)
    collector.sweep(10, 0)
    assert len(looks) == 2
