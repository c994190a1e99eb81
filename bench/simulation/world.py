"""A simulated service and its clients: the arms of a comparison, network delay, and what is measured."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from parrot import api
from parrot.config import ManagerConfig, SchedulerConfig
from parrot.dummy_model import write_dummy_model
from parrot.engine.cost_file import read_cost
from parrot.engine.made_up import MadeUpText
from parrot.simulation.cluster import Cluster, running_cluster
from parrot.simulation.engine import EngineSpec
from parrot.simulation.loop import SimulatedLoop, run_simulated
from parrot.tokenizer import Tokenizer

from .applications import Application, Argument, Part, Step, Value

COSTS = Path(__file__).parents[1] / "costs"
NETWORK_S = (0.2, 0.3)  # of one request and its answer
SESSION_IDLE_S = 60.0  # after which contexts that no graph needs are let go
_SAMPLE_S = 0.5
_SWITCHES = {item.name for item in dataclasses.fields(SchedulerConfig) if item.type == "bool"}
# What a service that sees only single requests can have: the shortest queue.
BASELINE_OFF = ("group_placement", "prefix_affinity", "objective_aware", "application_order")


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison. ``off`` are switches of `parrot serve --off`. Clients that are not
    ``whole_graph`` send each call by itself when its inputs are there, and pay the network for each."""

    name: str
    off: tuple[str, ...] = ()
    whole_graph: bool = True
    capacity_tokens: int | None = None
    share_prefixes: bool = True
    cache_prefixes: bool = True

    def engine(self, cost: str, capacity_tokens: int | None) -> EngineSpec:
        """The engine of this arm; its own cap goes before the workload's."""
        spec = EngineSpec(
            read_cost(COSTS / f"{cost}.json"),
            share_prefixes=self.share_prefixes,
            cache_prefixes=self.cache_prefixes,
        )
        cap = self.capacity_tokens or capacity_tokens
        return spec if cap is None else spec.capped(cap)

    def manager(self, *, latency_capacity_tokens: int | None = None, **fields: Any) -> ManagerConfig:
        """The manager of this arm."""
        switches: dict[str, Any] = {name: False for name in self.off if name in _SWITCHES}
        if latency_capacity_tokens is not None:
            switches["latency_capacity_tokens"] = latency_capacity_tokens
        others: dict[str, Any] = {name: False for name in self.off if name not in _SWITCHES}
        fields = {"session_idle_s": SESSION_IDLE_S, **fields}
        return ManagerConfig(model="simulated", scheduler=SchedulerConfig(**switches), **others, **fields)


@dataclass(frozen=True, slots=True)
class Done:
    """An application that has ended. ``first_token_s`` is that of its answer, on the simulated clock."""

    number: int  # of those that were started
    kind: str
    began_s: float
    ended_s: float
    num_output: int
    answer_tokens: int
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    cached_tokens: int
    answer: str

    @property
    def latency_s(self) -> float:
        """From the user's request to the answer."""
        return self.ended_s - self.began_s

    @property
    def ms_per_token(self) -> float:
        """Normalised latency."""
        return self.latency_s * 1000 / self.num_output

    @property
    def decode_ms(self) -> float:
        """Milliseconds between two tokens of the answer."""
        return (self.last_token_s - self.first_token_s) * 1000 / max(self.answer_tokens - 1, 1)


@dataclass(slots=True)
class World:
    """One run: the cluster, its clients' randomness, and what they saw."""

    loop: SimulatedLoop
    cluster: Cluster
    arm: Arm
    rng: random.Random
    done: list[Done] = field(default_factory=list)
    num_started: int = 0
    peak_kv_tokens: int = 0  # of one engine, held by calls

    def of(self, kind: str) -> list[Done]:
        """Ended applications of a kind."""
        return [one for one in self.done if one.kind == kind]

    async def run(self, application: Application) -> Done:
        """Run an application as this arm's clients do."""
        runner = _whole if self.arm.whole_graph or len(application.steps) == 1 else _step_by_step
        self.num_started += 1
        ended = await runner(self, application, self.num_started)
        self.done.append(ended)
        return ended

    async def half_way(self) -> None:
        """To the service, or back."""
        await asyncio.sleep(self.rng.uniform(*NETWORK_S) / 2)

    async def sample(self) -> None:
        """Keep the peaks up to date, for ever."""
        while True:
            for actor in self.cluster.engines:
                held = actor.engine.tree.num_held_blocks * 16
                self.peak_kv_tokens = max(self.peak_kv_tokens, held)
            await asyncio.sleep(_SAMPLE_S)


async def _whole(world: World, application: Application, number: int) -> Done:
    """One round trip: all calls at once, and the get of the answer with them."""
    began_s = world.loop.time()
    await world.half_way()
    graph, values = await _serve(world, application, application.steps)
    await world.half_way()
    return _done(number, application, (began_s, world.loop.time()), graph.calls, values[-1])


async def _step_by_step(world: World, application: Application, number: int) -> Done:
    """A round trip for each call, as soon as the outputs that it reads have come."""
    began_s = world.loop.time()
    known: dict[str, asyncio.Future[str]] = {
        variable: world.loop.create_future() for step in application.steps for variable, _ in step.outputs
    }

    async def run_step(step: Step) -> api.GraphReply:
        prompt = "".join([await _written(part, known) for part in step.prompt])
        await world.half_way()
        alone = dataclasses.replace(step, prompt=(prompt,))
        graph, values = await _serve(world, application, [alone])
        await world.half_way()
        for (variable, _), value in zip(step.outputs, values, strict=True):
            known[variable].set_result(value)
        return graph

    graphs = await asyncio.gather(*map(run_step, application.steps))
    calls = [call for graph in graphs for call in graph.calls]
    answer = known[application.steps[-1].name].result()
    return _done(number, application, (began_s, world.loop.time()), calls, answer)


async def _written(part: Part, known: dict[str, asyncio.Future[str]]) -> str:
    if isinstance(part, Value):
        return await known[part.variable]
    return part.text if isinstance(part, Argument) else part


async def _serve(
    world: World, application: Application, steps: Sequence[Step]
) -> tuple[api.GraphReply, list[str]]:
    """Submit calls as a session of their own, which is left to expire, and wait for the last outputs."""
    service, tenant = world.cluster.service, application.tenant
    session_id = service.create_session(tenant=tenant).session_id
    answer = steps[-1].name
    body = {
        "session_id": session_id,
        "calls": [_call(step, application) for step in steps],
        "labels": [{"semantic_var_id": answer, "criteria": application.objective}],
    }
    service.submit(api.SubmitBody.model_validate(body), tenant=tenant)
    values = []
    for variable, _ in steps[-1].outputs:
        get = api.GetBody(session_id=session_id, semantic_var_id=variable)
        values.append((await service.get(get, tenant=tenant)).value or "")
    return service.graph(session_id, tenant=tenant), values


def _call(step: Step, application: Application) -> dict[str, Any]:
    pieces: list[str] = []
    placeholders: list[dict[str, Any]] = []
    for number, part in enumerate(step.prompt):
        if isinstance(part, str):
            pieces.append(part)
            continue
        pieces.append(f"{{{{input:i{number}}}}}")
        source = {"semantic_var_id": part.variable} if isinstance(part, Value) else {"value": part.text}
        placeholders.append({"name": f"i{number}", "kind": "input", **source})
    for number, (variable, num_tokens) in enumerate(step.outputs):
        pieces.append(f"{{{{output:o{number}}}}}")
        sampling = {"max_tokens": num_tokens, "ignore_eos": True}
        placeholders.append(
            {"name": f"o{number}", "kind": "output", "semantic_var_id": variable, "sampling": sampling}
        )
    return {"function": application.kind, "prompt": "".join(pieces), "placeholders": placeholders}


def _done(
    number: int,
    application: Application,
    span_s: tuple[float, float],
    calls: Sequence[api.CallView],
    answer: str,
) -> Done:
    last = calls[-1]
    return Done(
        number,
        application.kind,
        *span_s,
        application.num_output,
        last.output_tokens,
        (last.timing.first_token_us or 0) / 1e6,
        (last.timing.finished_us or 0) / 1e6,
        sum(call.prompt_tokens for call in calls),
        sum(call.cached_tokens for call in calls),
        answer,
    )


@cache
def tokenizer() -> Tokenizer:
    """One word per id, 32,000 of them."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(write_dummy_model(Path(directory), "llama-7b"))


@cache
def _made_up_text() -> MadeUpText:
    return MadeUpText(tokenizer())


Workload = Callable[[World], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gave, and what it cost."""

    world: World
    simulated_s: float
    wall_s: float
    num_events: int  # step loops of engines
    placements: dict[str, int]


def simulate(
    arm: Arm,
    workload: Workload,
    *,
    seed: int,
    cost: str,
    num_engines: int,
    capacity_tokens: int | None = None,
    **manager: Any,
) -> Run:
    """Run a workload on a cluster of equal engines; the same seed gives the same run."""

    async def main(loop: SimulatedLoop) -> Run:
        spec = arm.engine(cost, capacity_tokens)
        async with running_cluster(
            loop, arm.manager(**manager), tokenizer(), [spec] * num_engines, _made_up_text()
        ) as cluster:
            started = time.perf_counter()
            world = World(loop, cluster, arm, random.Random(seed))
            async with _sampled(world):
                await workload(world)
            return Run(
                world,
                loop.time(),
                time.perf_counter() - started,
                sum(engine.num_events for engine in cluster.engines),
                cluster.executor.scheduler.counters(),
            )

    return run_simulated(main)


@asynccontextmanager
async def _sampled(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.sample())
    try:
        yield
    finally:
        task.cancel()


async def at_intervals(world: World, rate: float, applications: list[Application]) -> list[Done]:
    """Start applications at random times, so many per second on average (Poisson); wait for all."""
    tasks: list[asyncio.Task[Done]] = []
    for application in applications:
        tasks.append(asyncio.create_task(world.run(application)))
        await asyncio.sleep(world.rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))
