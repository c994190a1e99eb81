"""A manager in this process, real but for its engines, which answer from a script."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import uvicorn
import zmq
import zmq.asyncio

from graph_builder import prompt_call, read
from parrot import api, wire
from parrot.config import ManagerConfig
from parrot.manager import engines
from parrot.manager.app import create_app
from parrot.manager.clock import now_us
from parrot.manager.engines import EngineRegistry
from parrot.manager.executor import Executor
from parrot.manager.http_protocol import GuardedProtocol
from parrot.manager.journal import Journal
from parrot.manager.key_file import load_keys
from parrot.manager.server import bind_listener
from parrot.manager.service import Service
from parrot.tokenizer import Tokenizer

Scenario = Callable[["Manager"], Awaitable[None]]
Reply = Callable[[str], str]  # the prompt's text so far -> what is generated


def zero_stats() -> wire.EngineStats:
    return wire.EngineStats(now_us(), *[0] * (len(wire.EngineStats.__struct_fields__) - 1))


class ScriptedEngine:
    """Answers each Generate with ``reply(text of the context)``. While ``held``, it answers no dispatch, and
    while ``is_mute`` no ping. Its heartbeats say ``stats``, ``sequence``, ``num_missing`` and ``cost``."""

    def __init__(self, address: str, tokenizer: Tokenizer, reply: Reply, name: str = "engine-0") -> None:
        self.name, self.reply = name, reply
        self.held = False
        self.epoch = secrets.token_hex(4)
        self.dispatches: list[wire.Dispatch] = []
        self.early_fills: list[wire.Dispatch] = []
        self.other: list[wire.ToEngine] = []
        self.pings: list[wire.Ping] = []
        self.is_mute = False
        self.stats: wire.EngineStats | None = None
        self.cost: wire.StepCost | None = None
        self.sequence = self.num_missing = 0
        self.num_tokens = 4096
        self.max_model_len = 1024
        self.max_batch_size = 64
        self.max_batch_tokens = 0
        self._tokenizer = tokenizer
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        await self.register()
        self._task = asyncio.create_task(self._serve())

    async def register(self) -> None:
        """The first message, and again when another manager answers."""
        model = wire.ModelInfo(
            "tiny",
            self._tokenizer.fingerprint,
            self._tokenizer.vocab_size,
            self.max_model_len,
            "float32",
            "cpu",
        )
        cost = wire.CostModel(1000.0, 10.0, 10.0, 0.01, self.num_tokens, self.num_tokens // 16)
        registration = wire.Register(
            wire.PROTOCOL_VERSION,
            self.name,
            self.epoch,
            1,
            model,
            cost,
            self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
        )
        await self.send_message(registration)

    async def send_message(self, message: wire.FromEngine) -> None:
        await self._socket.send(wire.encode(message))

    async def die(self) -> None:
        """Say goodbye and be gone."""
        await self._socket.send(wire.encode(wire.Goodbye(self.epoch, "killed by the test")))
        self.close(linger_ms=60_000)  # it ends as soon as the goodbye is on the wire

    def close(self, linger_ms: int = 0) -> None:
        if self._task is not None:
            self._task.cancel()
        self._context.destroy(linger=linger_ms)

    async def answer(self, dispatch: wire.Dispatch, *, num_outputs: int | None = None) -> None:
        """Reply to a held dispatch; only to its first ``num_outputs`` Generates if given."""
        replies = list(self._replies(dispatch))
        if num_outputs is not None:
            ends = [i for i, reply in enumerate(replies) if isinstance(reply, wire.GenerateDone)]
            replies = replies[: ends[num_outputs - 1] + 1] if num_outputs else []
        await self.send(*replies)

    async def send(self, *replies: wire.Reply) -> None:
        await self._socket.send(wire.encode(wire.StepReplies(self.epoch, replies, zero_stats())))

    async def beat(self) -> None:
        stats = self.stats or zero_stats()
        await self.send_message(wire.Heartbeat(self.epoch, stats, self.sequence, self.num_missing, self.cost))

    async def _serve(self) -> None:
        while True:
            message = wire.decode_to_engine(await self._socket.recv())
            await asyncio.sleep(0)
            if isinstance(message, wire.Dispatch) and message.early_fill:
                self.early_fills.append(message)
                if not self.held:
                    await self.answer(message)
            elif isinstance(message, wire.Dispatch):
                self.dispatches.append(message)
                if not self.held:
                    await self.answer(message)
            elif isinstance(message, wire.Ping):
                self.pings.append(message)
                if not self.is_mute:
                    await self.beat()
            else:
                self.other.append(message)

    @property
    def prompts(self) -> list[str]:
        """Text of the first Fill of every dispatch."""
        return [self._decode(self._first_ids(dispatch)) for dispatch in self.dispatches]

    def _first_ids(self, dispatch: wire.Dispatch) -> list[int]:
        first = dispatch.verbs[0]
        assert isinstance(first, wire.Fill)
        return [int(token) for token in wire.unpack_ids(first.token_ids)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.backend.decode(list(ids), skip_special_tokens=False)

    def _replies(self, dispatch: wire.Dispatch) -> list[wire.Reply]:
        ids: list[int] = []
        replies: list[wire.Reply] = []
        context_id = wire.ContextId(0)
        for index, verb in enumerate(dispatch.verbs):
            if isinstance(verb, wire.Fill):
                context_id = verb.context_id
                part = [int(token) for token in wire.unpack_ids(verb.token_ids)]
                ids += part
                replies.append(wire.FillDone(dispatch.call_id, index, len(part), 0))
            elif isinstance(verb, wire.Generate):
                text = self.reply(self._decode(ids))
                generated = [int(token) for token in self._tokenizer.encode(text)]
                ids += generated
                if dispatch.stream:
                    replies.append(wire.Chunk(dispatch.call_id, index, text))
                timing = wire.Timing(*[now_us()] * 4)
                replies.append(
                    wire.GenerateDone(
                        dispatch.call_id,
                        index,
                        text,
                        wire.pack_ids(generated),
                        len(generated),
                        "stop",
                        timing,
                    )
                )
        return [*replies, wire.CallDone(dispatch.call_id, context_id, len(ids))]


class Manager:
    """Service, executor, registry and the engines that have joined."""

    def __init__(self, config: ManagerConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        keys = load_keys(config.api_keys)
        self.journal = None if config.journal is None else Journal.open(config.journal, about={})
        self.registry = EngineRegistry(config)
        self.executor = Executor(config, tokenizer, self.registry, keys)
        self.service = Service(self.executor, self.journal)
        self.engines: list[ScriptedEngine] = []

    async def add_engine(
        self, reply: Reply = lambda _: "ok", name: str = "engine-0", **limits: int
    ) -> ScriptedEngine:
        engine = ScriptedEngine(self.registry.address, self.tokenizer, reply, name)
        for key, value in limits.items():
            setattr(engine, key, value)
        self.engines.append(engine)
        await engine.join()
        await until(lambda: any(known.registration.epoch == engine.epoch for known in self.registry.alive))
        return engine

    def submit(self, *calls: api.CallBody, session_id: str | None = None, **fields: object) -> str:
        """Submit calls, in a new session unless one is given; returns the session's id."""
        session_id = session_id or self.service.create_session().session_id
        body = {"session_id": session_id, "calls": [call.model_dump() for call in calls], **fields}
        self.service.submit(api.SubmitBody.model_validate(body))
        return session_id

    async def get(self, session_id: str, var_id: str, timeout_ms: int | None = 120_000) -> str | None:
        body = api.GetBody(session_id=session_id, semantic_var_id=var_id, timeout_ms=timeout_ms)
        return (await self.service.get(body)).value

    async def time_out(self, name: str = "engine-0") -> None:
        """This engine is lost, as if it had been silent for so long; what it says meanwhile is late."""

        def is_lost() -> bool:
            for engine in self.registry.alive:
                if engine.name == name:
                    engine.last_seen -= 2 * self.config.lost_after_s
            return all(engine.name != name for engine in self.registry.alive)

        await until(is_lost)

    def pass_without_progress(self, share: float, name: str = "engine-0") -> None:
        """So much of the time after which an engine that makes no step is given up, as if it had passed."""
        for engine in self.registry.alive:
            if engine.name == name:
                engine.progress.since -= share * self.config.stall_after_s

    def check_at_rest(self) -> None:
        """Nothing is queued, nothing runs, and every engine's load is zero."""
        assert self.executor.dispatcher.num_busy == 0
        self.check_load()
        assert all(engine.num_dispatched == 0 for engine in self.registry.alive)

    def check_load(self) -> None:
        """Scheduler and registry agree on how many calls each engine has."""
        scheduler = self.executor.scheduler._scheduler
        scheduler.check_invariants()
        for engine in self.registry.alive:
            assert scheduler.engine_load(engine.engine_id)[0] == engine.num_dispatched


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def running_manager(
    model: Path, /, *, silent_beats: float = 1e6, **config: object
) -> AsyncIterator[Manager]:
    """A manager without HTTP, whose heartbeat is fast. On a busy machine an engine may well be silent for
    many of them: it is paused or lost for it only where a test says so (``silent_beats``, ``lost_after_s``,
    :meth:`Manager.time_out`)."""
    fields = {"model": str(model), "heartbeat_s": 0.05, "lost_after_s": 600.0, **config}
    with patch.object(engines, "SILENT_BEATS", silent_beats):
        async with _running(Manager(ManagerConfig(**fields), Tokenizer.load(model))) as manager:  # type: ignore[arg-type]
            yield manager


@asynccontextmanager
async def _running(manager: Manager) -> AsyncIterator[Manager]:
    await manager.service.recover()
    manager.registry.start(manager.executor)
    manager.service.start()
    try:
        yield manager
    finally:
        manager.service.close()
        for engine in manager.engines:
            engine.close()
        await manager.registry.close()
        if manager.journal is not None:
            manager.journal.close()


@asynccontextmanager
async def serving(manager: Manager) -> AsyncIterator[str]:
    """The manager's HTTP API on a free port; yields its URL."""
    listener = bind_listener("127.0.0.1", 0)
    app = create_app(manager.service, manager.registry)
    config = uvicorn.Config(
        app, http=GuardedProtocol, ws="none", log_config=None, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def run(model: Path, scenario: Scenario, **config: object) -> None:
    """The scenario, with a manager that has no engine yet."""

    async def main() -> None:
        async with running_manager(model, **config) as manager:
            await scenario(manager)

    asyncio.run(main())


def last_word(text: str) -> str:
    return text.split()[-1] + "!"


# three calls, each of which reads what the one before it wrote
CHAIN = (
    prompt_call("first", "Say {{input:x}} {{output:a}}", read("x", value="hello")),
    prompt_call("second", "Then {{input:a}} {{output:b}}"),
    prompt_call("third", "Last {{input:b}} {{output:c}}"),
)
