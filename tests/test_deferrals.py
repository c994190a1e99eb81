"""Who has the process for heavy transforms next, and what becomes of an event that cannot go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from graph_builder import error_of, flow_call, prompt_call, read, submit, write
from graph_builder import value as set_to
from parrot import api
from parrot.config import ManagerConfig
from parrot.errors import SessionClosed
from parrot.manager.background import Background
from parrot.manager.call import CallState
from parrot.manager.deferrals import Deferrals
from parrot.manager.fair_lock import FairLock
from parrot.manager.flow import Changes
from parrot.manager.graph import Graph
from parrot.manager.operators import Budget
from parrot.manager.transforms import Failure, Work

LINES = "\n".join(f"{number}. word" for number in range(5000))
WAIT_S = 120


def derived(var_id: str, source: str, index: int) -> api.VariableBody:
    """Heavy for the value LINES, and unlike those of another index."""
    transforms = [{"op": "lines", "bullets": True}, {"op": "item", "index": index}]
    return api.VariableBody.model_validate(
        {"semantic_var_id": var_id, "sources": [{"semantic_var_id": source}], "transforms": transforms}
    )


def session(name: str, tenant: int = 1, *, num_values: int = 1) -> Graph:
    """Each value that it waits for has two heavy chains."""
    graph = Graph(name, config=ManagerConfig(), domain=tenant, may_defer=True)
    heavy = [derived(f"d{n}_{index}", f"v{n}", index) for n in range(num_values) for index in range(2)]
    submit(graph, variables=[*(set_to(f"v{n}") for n in range(num_values)), *heavy])
    return graph


def ends(graph: Graph) -> list[str | None]:
    variables = [one for one in graph.variables.values() if one.derivation is not None]
    return [None if one.pending else one.error.code if one.error else one.value for one in variables]


class Service:
    """Deferrals and all that is around them; to be made on a loop."""

    def __init__(self) -> None:
        self.background = Background()
        self.applied: list[Changes] = []
        self.num_turns = 0
        self.deferrals = Deferrals(self.background, apply=self.apply, turn=self.turn)

    def apply(self, changes: Changes) -> None:
        self.applied.append(changes)

    def turn(self) -> None:
        self.num_turns += 1

    def set(self, graph: Graph, var_id: str, text: str = LINES) -> None:
        later = graph.set_value(var_id, text).later
        assert later is not None
        self.deferrals.start(later)

    async def idle(self) -> None:
        await self.deferrals.wait(WAIT_S)
        assert self.deferrals.num_pending == 0
        self.deferrals.close()


class Worker:
    """In place of the process: which value had its turn."""

    def __init__(self) -> None:
        self.order: list[str] = []

    async def run(self, work: Work) -> tuple[str | Failure, float]:
        self.order.append(work.value.partition("\n")[0])
        await asyncio.sleep(0)  # all others come to wait
        return work.chain.run(work.value, Budget(work.max_bytes, work.left_s)), 0.0


def order_of(sets: Sequence[tuple[Graph, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions in the order in which chains of theirs were done."""

    async def scenario() -> list[str]:
        service, worker = Service(), Worker()
        monkeypatch.setattr(service.deferrals.worker, "run", worker.run)
        for graph, var_id in sets:
            service.set(graph, var_id, f"{graph.session_id}\n{LINES}")
        await service.idle()
        assert not service.background.failures
        return worker.order

    return asyncio.run(scenario())


def test_sessions_of_a_tenant_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, other = session("busy", num_values=8), session("other")
    order = order_of([*((busy, f"v{n}") for n in range(8)), (other, "v0")], monkeypatch)
    assert len(order) == 18
    assert order[:9].count("other") == 2  # at [2] and [5], on a machine that does not stand still in between
    assert None not in ends(busy) + ends(other)


def test_tenants_take_turns_however_many_sessions_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [session(f"s{n}") for n in range(8)]
    other = session("other", tenant=2)
    order = order_of([*((graph, "v0") for graph in crowd), (other, "v0")], monkeypatch)
    assert order[:9].count("other") == 2  # at [2] and [5], on a machine that does not stand still in between
    assert sorted(order) == sorted([*(f"s{n}" for n in range(8)), "other"] * 2)


def test_work_of_a_session_that_ended_while_it_waited_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[str]:
        service, worker = Service(), Worker()
        monkeypatch.setattr(service.deferrals.worker, "run", worker.run)
        graphs = [session("first"), session("closed")]
        for graph in graphs:
            service.set(graph, "v0", f"{graph.session_id}\n{LINES}")
        while not worker.order:
            await asyncio.sleep(0)  # the task of each starts in the first of these turns
        graphs[1].close(SessionClosed("closed").to_info())
        await service.idle()
        return worker.order

    assert asyncio.run(scenario()) == ["first", "first"]


def test_a_lock_whose_waiters_are_cancelled_goes_to_the_others() -> None:
    async def scenario() -> list[str]:
        lock, had = FairLock(), list[str]()
        release = asyncio.Event()

        async def use(name: str, until: asyncio.Event | None = None) -> None:
            async with lock.held(1, name):
                had.append(name)
                if until is not None:
                    await until.wait()

        tasks = [asyncio.create_task(use(name, release)) for name in ("a", "waits", "given", "last")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        await asyncio.sleep(0)
        assert had == ["a"]
        release.set()
        await tasks[0]  # which has passed it on to "given", whose task has not run since
        tasks[2].cancel()
        await asyncio.wait_for(tasks[3], WAIT_S)
        await asyncio.wait_for(use("again"), WAIT_S)
        return had

    had = asyncio.run(scenario())
    assert [name for name in had if name != "given"] == ["a", "last", "again"]


def test_what_is_left_of_an_event_whose_changes_cannot_be_applied_ends() -> None:
    class Failing(Service):
        def apply(self, changes: Changes) -> None:
            super().apply(changes)
            if len(self.applied) == 1:
                raise ValueError("a bug")

    graph = session("s")
    (call,) = submit(graph, flow_call("C", ["d0_0"], ["y"])).calls

    async def scenario() -> Failing:
        service = Failing()
        service.set(graph, "v0")
        await service.idle()
        return service

    service = asyncio.run(scenario())
    assert ends(graph) == ["word", "internal"]
    assert call.state is CallState.FAILED  # nobody had queued it
    assert error_of(graph, "y").code == "internal"
    assert service.applied[1].ended == [call]
    assert service.background.failures == {"transforms": 1}
    assert service.num_turns == 1


def test_an_event_goes_on_after_a_turn_that_fails() -> None:
    class Failing(Service):
        def turn(self) -> None:
            raise ValueError("a bug")

    graph = session("s")

    async def scenario() -> Failing:
        service = Failing()
        service.set(graph, "v0")
        await service.idle()
        return service

    assert asyncio.run(scenario()).background.failures == {"transforms": 2}
    assert ends(graph) == ["word", "word"]


def test_all_that_waits_for_a_transform_ends_when_the_worker_cannot_start_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    graph = session("s")
    heavy = [{"op": "lines", "bullets": True}]
    submit(graph, prompt_call("R", "{{input:v0}} {{output:z}}", read("v0", transforms=heavy)))
    (call,) = submit(graph, prompt_call("W", "{{output:x}}", write("x", transforms=heavy))).calls
    call.dispatch("engine-0")

    async def scenario() -> None:
        service = Service()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            service.set(graph, "v0")
            written = graph.complete(call, 0, LINES).later
            assert written is not None
            service.deferrals.start(written)
            await service.idle()
        assert service.background.failures == {"transforms": 2}

    asyncio.run(scenario())
    assert ends(graph) == ["internal", "internal"]
    assert [error_of(graph, name).code for name in "zx"] == ["internal"] * 2
    assert not graph.live
