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
from parrot.garbage import IdleCollector
from parrot.manager.call import Call
from parrot.manager.graph import Graph
from parrot.manager.variable import Variable


def call(name: str, before: str | None = None) -> api.CallBody:
    holes = [{"name": "y", "kind": "output", "semantic_var_id": name}]
    if before is not None:
        holes.append({"name": "x", "kind": "input", "semantic_var_id": before})
    prompt = "Say {{output:y}}" if before is None else "After {{input:x}} {{output:y}}"
    return api.CallBody.model_validate({"request_id": name, "prompt": prompt, "placeholders": holes})


def is_ours(found: object) -> bool:
    return type(found).__module__.startswith("parrot.")


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


def test_a_session_that_is_deleted_before_its_calls_have_ended_leaves_no_cycle(tiny_model: Path) -> None:
    async def main() -> None:
        async with running_manager(tiny_model) as manager:
            engine = await manager.add_engine()
            engine.held = True
            shared = manager.submit(*[call(name) for name in "abcd"], call("e", "a"), call("f", "b"))
            await asyncio.sleep(0.05)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                manager.service.delete_session(shared)
                await asyncio.sleep(0.05)
                gc.collect()
                found = {type(each).__qualname__ for each in gc.garbage if is_ours(each)}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
            assert not found

    asyncio.run(main())


def test_the_collector_leaves_what_is_there_at_the_start_alone() -> None:
    program = (
        "import gc; from parrot.garbage import keep_out_of_the_way; keep_out_of_the_way(); "
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


def test_what_lives_for_a_while_is_not_looked_at_while_as_much_goes_as_comes() -> None:
    program = (
        "import gc\nfrom collections import deque\nfrom parrot.garbage import keep_out_of_the_way\n"
        "keep_out_of_the_way()\nbefore = [each['collections'] for each in gc.get_stats()]\n"
        "live = deque(([] for _ in range(100_000)), maxlen=100_000)\n"
        "for _ in range(30):\n    live.extend([] for _ in range(20_000))\n"
        "assert [each['collections'] for each in gc.get_stats()] == before\n"
        "for _ in range(600_000):\n    live.append([])\n    live[-1].append(live[-1])\n"
        "assert [each['collections'] for each in gc.get_stats()] != before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
