"""What the manager knows of engines' caches is what they have, whatever frames are lost or late."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graph_builder import make_graph, prompt_call, read, submit
from manager_harness import running_manager, until, zero_stats
from parrot import wire
from parrot.config import ManagerConfig, SchedulerConfig
from parrot.engine.sent_frames import SentFrames
from parrot.manager.application import Application
from parrot.manager.engine_socket import Receiver
from parrot.manager.engines import Engine, EngineRegistry
from parrot.manager.key_file import TenantLimits
from parrot.manager.knowledge import PrefixKnowledge
from parrot.manager.prompts import RunPrompt
from parrot.manager.runs import Run
from parrot.manager.scheduler_bridge import SchedulerBridge
from parrot.manager.session import SessionTable
from parrot.manager.tenants import Tenant
from test_uses import real_engine, rounds

EPOCH = "epoch"
LENGTH = 64  # tokens of each context, a boundary every 16
GRID = np.arange(16, LENGTH + 1, 16, dtype=np.int32)


class Wire:
    """Stands in for the socket: hands what the manager sends to the engine, unless it is lost."""

    address = local_address = "nowhere"

    def __init__(self) -> None:
        self.sent: list[wire.ToEngine] = []
        self.is_cut = False

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:  # noqa: ARG002
        if not self.is_cut:
            self.sent += map(wire.decode_to_engine, frames)
        return True

    def start(self, receive: Receiver) -> None:  # noqa: ARG002
        raise AssertionError("the manager's loop is not running here")

    def close(self) -> None:
        pass


class Owner:
    """What the executor does for these tests."""

    def __init__(self, registry: EngineRegistry) -> None:
        self.bridge = SchedulerBridge(SchedulerConfig())
        self.knowledge = PrefixKnowledge(registry, self.bridge, None)
        self.runs: dict[int, Run] = {}

    def admits_engine(self, registration: wire.Register) -> None:  # noqa: ARG002
        return None

    def engine_joined(self, engine: Engine) -> None:
        self.engine = engine
        self.bridge.add_engine(engine)
        self.knowledge.engine_joined(engine)

    def engine_lost(self, engine: Engine, reason: str) -> None:  # noqa: ARG002
        self.bridge.remove_engine(engine)
        self.knowledge.engine_lost(engine)
        self.runs.clear()

    def frames_lost(self, engine: Engine) -> None:
        """Calls run again; these tests need only that they do not run any longer."""
        for run in self.runs.values():
            self.bridge.cancel(run)
        self.knowledge.free(engine.engine_id, [run.context_id for run in self.runs.values()])
        self.runs.clear()

    def engine_paused(self, engine: Engine, paused: bool) -> None:
        pass

    def engine_slowed(self, engine: Engine, slowdown: float) -> None:
        pass

    def engine_repriced(self, engine: Engine) -> None:
        pass

    def heartbeat(self) -> None:
        pass

    def engine_replied(self, engine: Engine, replies: tuple[wire.Reply, ...]) -> None:
        for reply in replies:
            match reply:
                case wire.CallDone():
                    run = self.runs.pop(reply.call_id, None)
                    if run is not None:
                        self.bridge.finish(run, reply.num_tokens)
                        self.knowledge.left(engine, run, reply.num_tokens)
                case wire.ContextsEvicted():
                    self.knowledge.evicted(engine, reply)
                case wire.ContextSnapshot():
                    self.knowledge.reported(engine, reply)


def ids_of(number: int) -> wire.Ids:
    """Of the prompt of a call: no two share their first token."""
    return np.arange(number * LENGTH, (number + 1) * LENGTH, dtype=np.int32)


class LossyEvictions(RuleBasedStateMachine):
    """A model engine whose frames are dropped and come out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.socket = Wire()
        self.registry = EngineRegistry(ManagerConfig(), self.socket)
        self.owner = Owner(self.registry)
        self.registry._events = self.owner
        graph = make_graph()
        self.call = submit(graph, prompt_call("F", "text {{output:x}}")).calls[0]
        session = SessionTable(ManagerConfig()).create()
        self.application = Application(1, session, Tenant("default", 1, TenantLimits()), arrival_us=0)
        self.numbers: Iterator[int] = itertools.count(1)
        self.join(EPOCH)

    def teardown(self) -> None:
        self.loop.close()

    def join(self, epoch: str) -> None:
        self.epoch = epoch
        self.contexts: dict[int, int] = {}  # what the engine has
        self.frames: list[bytes] = []  # on their way
        self.sent = SentFrames()
        self.sequence = 0
        model = wire.ModelInfo("tiny", "f", 100, 1024, "float32", "cpu")
        cost = wire.CostModel(1000.0, 10.0, 10.0, 0.01, 100_000, 64)
        self.receive(wire.Register(wire.PROTOCOL_VERSION, "engine", epoch, 1, model, cost, 64))

    def receive(self, message: wire.FromEngine | bytes) -> None:
        """All that the manager does about it, its answers included."""
        frame = message if isinstance(message, bytes) else wire.encode(message)
        self.loop.call_soon(self.registry._receive, [b"identity", frame])
        self.loop.run_until_complete(asyncio.sleep(0.0))  # frames go out in the turn after this one
        self.loop.run_until_complete(asyncio.sleep(0.0))

    def reply(self, *replies: wire.Reply) -> None:
        self.sequence += 1
        frame = wire.encode(wire.StepReplies(self.epoch, replies, zero_stats(), sequence=self.sequence))
        self.sent.add(self.sequence, frame)
        self.frames.append(frame)

    def listen(self) -> None:
        """The engine takes in what the manager sent."""
        messages, self.socket.sent = self.socket.sent, []
        for message in messages:
            if isinstance(message, wire.FreeContexts):
                for context_id in message.context_ids:
                    self.contexts.pop(context_id, None)
            elif isinstance(message, wire.ReportContexts):
                context_ids = tuple(map(wire.ContextId, self.contexts))
                self.reply(wire.ContextSnapshot(context_ids, tuple(self.contexts.values())))
            elif isinstance(message, wire.Resend):
                self.frames += self.sent.since(message.sequence)

    @rule(evicts=st.booleans(), data=st.data())
    def step(self, evicts: bool, data: st.DataObject) -> None:
        """A call runs and ends; its context may push out another one in the same step."""
        number = next(self.numbers)
        call_id, context_id = wire.CallId(number), wire.ContextId(number)
        prompt = RunPrompt(ids_of(number), GRID, (), GRID)
        run = Run(call_id, context_id, self.call, self.application, prompt)
        self.owner.bridge.submit(run, 1)
        assert self.owner.bridge.schedule()
        self.owner.runs[call_id] = run
        evicted = self.evict(data) if evicts and self.contexts else ()
        self.contexts[context_id] = LENGTH
        self.reply(*evicted, wire.CallDone(call_id, context_id, LENGTH))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def only_evict(self, data: st.DataObject) -> None:
        self.reply(*self.evict(data))

    def evict(self, data: st.DataObject) -> tuple[wire.ContextsEvicted]:
        context_id = data.draw(st.sampled_from(sorted(self.contexts)))
        left = data.draw(st.integers(0, self.contexts[context_id] // 16)) * 16
        self.contexts[context_id] = left
        if left == 0:
            del self.contexts[context_id]
        return (wire.ContextsEvicted((wire.ContextId(context_id),), (left,)),)

    @precondition(lambda self: self.frames)
    @rule(place=st.integers(0, 3))
    def deliver(self, place: int) -> None:
        self.receive(self.frames.pop(min(place, len(self.frames) - 1)))

    @precondition(lambda self: self.frames)
    @rule(place=st.integers(0, 3))
    def lose(self, place: int) -> None:
        self.frames.pop(min(place, len(self.frames) - 1))

    @rule()
    def lose_what_the_manager_sends(self) -> None:
        self.socket.sent.clear()

    @rule()
    def heartbeat(self) -> None:
        self.receive(wire.Heartbeat(self.epoch, zero_stats(), self.sequence))

    @rule()
    def work(self) -> None:
        self.listen()

    @rule()
    def restart(self) -> None:
        self.join(self.epoch + "'")
        assert self.owner.knowledge.ledger.of_engine(self.owner.engine.engine_id) == {}

    @rule()
    def come_to_rest(self) -> None:
        """Nothing is lost any more: soon the manager knows what the engine has."""
        for _ in range(6):
            while self.frames or self.socket.sent:
                self.listen()
                while self.frames:
                    self.receive(self.frames.pop(0))
            self.heartbeat()
        self.listen()
        assert self.owner.engine.frames.is_complete
        engine_id = self.owner.engine.engine_id
        assert self.owner.knowledge.ledger.of_engine(engine_id) == self.contexts
        for number, length in self.contexts.items():
            assert self.known_prefix(number) == length

    def known_prefix(self, number: int) -> int:
        """What the scheduler would hope to find there for a call of this prompt."""
        scheduler, probe = self.owner.bridge._scheduler, next(self.numbers)
        prompt = RunPrompt(ids_of(number), GRID, (), GRID)
        run = Run(wire.CallId(probe), wire.ContextId(probe), self.call, self.application, prompt)
        self.owner.bridge.submit(run, 1)
        (candidate,) = scheduler.explain(probe)
        self.owner.bridge.cancel(run)
        return candidate.prefix_len

    @invariant()
    def the_index_is_whole(self) -> None:
        self.owner.bridge._scheduler.check_invariants()


TestLossyEvictions = LossyEvictions.TestCase
TestLossyEvictions.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)


def test_a_lost_frame_is_noticed_by_the_next_heartbeat(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running_manager(tiny_model) as manager:
            engine = await manager.add_engine()
            await manager.get(manager.submit(prompt_call("F", "Some text {{output:x}}")), "x")
            assert not any(isinstance(message, wire.ReportContexts) for message in engine.other)
            await engine._socket.send(wire.encode(wire.Heartbeat(engine.epoch, zero_stats(), 3)))
            await until(lambda: any(isinstance(sent, wire.ReportContexts) for sent in engine.other))

    asyncio.run(scenario())


@pytest.mark.system
def test_stale_knowledge_costs_work_and_no_right_answer(tiny_model: Path) -> None:
    """The manager never hears of evictions, so that it names contexts that are gone."""
    values: dict[bool, list[str | None]] = {}

    async def scenario(hears: bool) -> None:
        async with running_manager(tiny_model) as manager:
            knowledge = manager.executor.knowledge
            if not hears:
                knowledge.evicted = lambda *_: None  # type: ignore[method-assign]
            with real_engine(tiny_model, manager.registry.address, num_blocks=48) as engine:
                await until(lambda: bool(manager.registry.alive))
                session = manager.submit(*rounds(2))
                names = [name for number in range(2) for name in (f"read{number}", f"pass{number}c")]
                values[hears] = [await manager.get(session, name, timeout_ms=60_000) for name in names]
                assert engine.stats().evicted_blocks > 0
                engine_id = manager.registry.alive[0].engine_id
                # The pool holds two or three of these prompts. What ended last is booked behind its value.
                await until(lambda: (len(knowledge.ledger.of_engine(engine_id)) > 5) == (not hears))

    for hears in (True, False):
        asyncio.run(scenario(hears))
    assert values[True] == values[False]


@pytest.mark.system
def test_a_real_engine_says_what_it_has(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running_manager(tiny_model) as manager:
            with real_engine(tiny_model, manager.registry.address, num_blocks=48) as engine:
                await until(lambda: bool(manager.registry.alive))
                knowledge = manager.executor.knowledge
                session = manager.submit(*rounds(1))
                await manager.get(session, "pass0c", timeout_ms=60_000)
                known = manager.registry.alive[0]
                before = knowledge.ledger.of_engine(known.engine_id)
                knowledge.ledger.add(known.engine_id, wire.ContextId(999), 50, session_id=None)
                known.frames.lose_up_to(known.frames.newest + 1)
                await until(lambda: knowledge.num_snapshots > 0)
                assert known.frames.is_complete
                assert knowledge.ledger.of_engine(known.engine_id) == before
                assert len(before) == len(engine._cached.snapshot().context_ids)

    asyncio.run(scenario())


@pytest.mark.system
def test_a_context_of_which_nobody_was_told_is_freed(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running_manager(tiny_model) as manager:
            with real_engine(tiny_model, manager.registry.address, num_blocks=256) as engine:
                await until(lambda: bool(manager.registry.alive))
                await manager.get(manager.submit(*rounds(1)), "pass0c")
                known = manager.registry.alive[0]
                ledger = manager.executor.knowledge.ledger
                stranger, *others = ledger.of_engine(known.engine_id)
                ledger.cut(known.engine_id, stranger, 0)  # as if the end of its call had never come
                known.frames.lose_up_to(known.frames.newest + 1)
                await until(lambda: stranger not in engine._cached.snapshot().context_ids)
                assert set(others) <= set(engine._cached.snapshot().context_ids)

    asyncio.run(scenario())


def test_a_second_long_constant_is_known_and_all_of_it_is_expected_to_be_there(tiny_model: Path) -> None:
    constant = " ".join(f"rule {number} says so." for number in range(4000))

    async def scenario() -> None:
        async with running_manager(tiny_model) as manager:
            engine = await manager.add_engine(max_model_len=2**18, num_tokens=2**20)
            dispatcher = manager.executor.dispatcher
            prompt = constant + " {{input:value}} {{output:x}}"
            await manager.get(manager.submit(prompt_call("F", prompt, read("value", value="one"))), "x")
            engine.held = True
            manager.submit(prompt_call("F", prompt, read("value", value="another")))
            assert not dispatcher._encoding, "no thread is needed for what is known"
            (run,) = dispatcher._runs.values()
            assert len(run.prompt.first) > 30_000
            (decided,) = manager.executor.scheduler._scheduler.explain(run.run_id)
            assert decided.prefix_len >= 0.99 * len(run.prompt.first)

    asyncio.run(scenario())
