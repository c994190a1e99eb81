"""When objectives are deduced: small graphs within the turn, large ones in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from graph_builder import prompt_call, write
from manager_harness import Manager, running_manager, until
from parrot import api
from parrot.manager import objectives
from parrot.manager.graph import Graph


def run(model: Path, scenario: Callable[[Manager], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_manager(model) as manager:
            await scenario(manager)

    asyncio.run(main())


def chain(length: int) -> list[api.CallBody]:
    calls = [prompt_call("c0", "Begin {{output:o}}", write("o", "v0"))]
    for i in range(1, length):
        read = api.PlaceholderBody(name="i", kind="input", semantic_var_id=f"v{i - 1}")
        calls.append(prompt_call(f"c{i}", "{{input:i}} {{output:o}}", read, write("o", f"v{i}")))
    return calls


def graph_of(manager: Manager, session: str) -> Graph:
    return manager.service._sessions.get(session).graph


def labelled(graph: Graph) -> int:
    return sum(call.objective == "LATENCY" for call in graph.calls.values())


def label(session: str, var_id: str) -> api.GetBody:
    return api.GetBody(session_id=session, semantic_var_id=var_id, criteria="LATENCY", timeout_ms=0)


def test_labels_that_travel_with_a_small_graph_are_there_when_it_is_placed(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        session = manager.submit(*chain(50), labels=[{"semantic_var_id": "v49", "criteria": "LATENCY"}])
        assert labelled(graph_of(manager, session)) == 50

    run(tiny_model, scenario)


def test_a_large_graph_is_deduced_while_the_loop_goes_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "AT_ONCE", 100)

    async def scenario(manager: Manager) -> None:
        session = manager.submit(*chain(1500))
        graph = graph_of(manager, session)
        await manager.service.get(label(session, "v1499"))
        turns = 0
        while labelled(graph) == 0:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 2
        assert labelled(graph) == 1500

    run(tiny_model, scenario)


def test_a_label_that_comes_meanwhile_is_deduced_after_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "AT_ONCE", 100)

    async def scenario(manager: Manager) -> None:
        other = prompt_call("other", "Else {{output:o}}", write("o", "w"))
        session = manager.submit(*chain(1500), other)
        graph = graph_of(manager, session)
        await manager.service.get(label(session, "v1499"))
        await asyncio.sleep(0)
        await manager.service.get(label(session, "w"))
        await until(lambda: labelled(graph) == 1501)

    run(tiny_model, scenario)


def test_a_session_may_end_while_its_objectives_are_deduced(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objectives, "AT_ONCE", 100)

    async def scenario(manager: Manager) -> None:
        session = manager.submit(*chain(1500))
        await manager.service.get(label(session, "v1499"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        manager.service.delete_session(session)
        await until(lambda: not manager.executor._objectives._running)

    run(tiny_model, scenario)
    assert not caplog.records
