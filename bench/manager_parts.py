"""Where the manager's time goes: the parts of a call's life in one process, without sockets.

Graphs are ``width`` chains of ``depth`` calls. Every call has the same template of 2 KB, a value of 200 bytes
and the output of the call before it. A value of a part is its time per call of the graph.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from parrot import api, wire
from parrot.config import DEFAULT_MODEL, ManagerConfig, SchedulerConfig
from parrot.manager.analysis import deduce
from parrot.manager.application import Application
from parrot.manager.call import Call
from parrot.manager.clock import now_us
from parrot.manager.engines import Engine
from parrot.manager.prompts import CallPrompt, PromptBuilder, assemble
from parrot.manager.runs import Run, num_new_tokens
from parrot.manager.scheduler_bridge import SchedulerBridge
from parrot.manager.session import Session, SessionTable
from parrot.manager.slices import run_whole
from parrot.manager.submit_body import reading
from parrot.manager.tenants import Tenants
from parrot.models import resolve_model
from parrot.tokenizer import Tokenizer

from .service_load import call_body, filler, new_session_id
from .timing import Spread, print_table, show, spread

PARTS = ("read JSON", "insert", "PrefixHash", "encode", "queue", "FindEngine", "frame", "value")
_NUM_ENGINES = 16
_ANSWER = " The answer of this part is short, and the next one goes on from here."
_CONFIG = ManagerConfig(max_queued_calls=2**20)


@dataclass(frozen=True, slots=True)
class Sizes:
    """``graphs`` are pairs of width and depth; ``chain`` is the depth of the labelled get."""

    graphs: tuple[tuple[int, int], ...]
    repeats: int
    chain: int = 4096
    constant_tokens: int = 30_000


QUICK = Sizes(((1, 1), (1, 100), (100, 10), (1000, 1)), repeats=2)
FULL = Sizes(tuple((w, d) for w in (1, 10, 100, 1000) for d in (1, 10, 100) if w * d <= 10_000), repeats=5)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All graphs, the labelled get and the second long constant."""
    return {name: part(sizes) for name, part in MEASURES.items()}


def _shapes(sizes: Sizes) -> list[dict[str, Any]]:
    stage = Stage()
    rows = [_graph_row(stage, sizes, width, depth) for width, depth in sizes.graphs]
    print_table(
        f"microseconds per call of the graph, medians of {sizes.repeats}, one process, no sockets",
        ("width x depth", *PARTS, "sum"),
        [
            (
                f"{row['width']:,} x {row['depth']:,}",
                *(f"{row['us'][part]['median']:,.1f}" for part in PARTS),
                f"{sum(row['us'][part]['median'] for part in PARTS):,.0f}",
            )
            for row in rows
        ],
    )
    return rows


def _label(sizes: Sizes) -> Spread:
    stage = Stage()
    label = spread([stage.labelled_get_ms(sizes.chain) for _ in range(sizes.repeats)])
    print(f"labelled get on a live chain of {sizes.chain:,} calls: {show(label, 1)} ms", flush=True)
    return label


def _constant(sizes: Sizes) -> dict[str, Any]:
    constant = Stage().long_constant(sizes.constant_tokens, sizes.repeats)
    print(
        f"a constant of {constant['tokens']:,} tokens: the first time {constant['first_ms']:.1f} ms, "
        f"then {show(constant['second_ms'])} ms, {100 * constant['reused']:.1f} % reused",
        flush=True,
    )
    return constant


MEASURES: dict[str, Callable[[Sizes], Any]] = {"shapes": _shapes, "label": _label, "constant": _constant}


def _graph_row(stage: Stage, sizes: Sizes, width: int, depth: int) -> dict[str, Any]:
    runs = [stage.run_graph(width, depth) for _ in range(sizes.repeats + 1)][1:]
    us = {part: spread([run[part] / 1000 / (width * depth) for run in runs]) for part in PARTS}
    return {"width": width, "depth": depth, "us": us}


def _bodies(session_id: str, width: int, depth: int) -> Iterator[dict[str, Any]]:
    """The graph in as few submits as its calls fit in."""
    calls: list[dict[str, Any]] = []
    for index in range(width * depth):
        before = f"v-{index - width}" if index >= width else None
        calls.append(call_body(index, before))
    limit = _CONFIG.max_calls_per_submit
    for start in range(0, len(calls), limit):
        yield {"session_id": session_id, "calls": calls[start : start + limit]}


class Stage:
    """The manager's parts, with engines that exist only for the scheduler."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load(resolve_model(DEFAULT_MODEL))
        self._builder = PromptBuilder(self._tokenizer)
        self._tenants = Tenants()
        self._sessions = SessionTable(_CONFIG, self._tenants)
        self._number = 0
        self._ns: dict[str, int] = defaultdict(int)

    def run_graph(self, width: int, depth: int) -> dict[str, int]:
        """Nanoseconds of each part."""
        self._ns.clear()
        session, application = self._open()
        ready: list[Call] = []
        for body in _bodies(new_session_id(), width, depth):
            raw = json.dumps(body).encode()
            with self._timed("read JSON"):
                read = run_whole(reading(raw, _CONFIG))
            with self._timed("insert"):
                submitted = session.graph.add(read, now_us=now_us())
            ready += submitted.changes.ready
        with self._timed("PrefixHash"):
            for call in session.graph.calls.values():
                session.graph.prefix_hash(call, len(call.parts))
        bridge = self._bridge()
        while ready:
            runs = {run.run_id: run for run in self._encoded(ready, application)}
            self._queue(bridge, list(runs.values()))
            ready = self._answered(bridge, runs, session)
        self._sessions.remove(session.session_id)
        run_whole(session.graph.releasing())
        return dict(self._ns)

    def _encoded(self, calls: Sequence[Call], application: Application) -> Iterator[Run]:
        for call in calls:
            with self._timed("encode"):
                prompt = CallPrompt(
                    self._builder.encode(
                        self._builder.step_pieces(call, call.steps), first_step=0, domain=call.domain
                    )
                )
                assembled = assemble(prompt, call, call.steps)
            self._number += 1
            number = self._number
            yield Run(wire.CallId(number), wire.ContextId(number), call, application, assembled)

    def _queue(self, bridge: SchedulerBridge, runs: Sequence[Run]) -> None:
        with self._timed("queue"):
            for run in runs:
                bridge.submit(run, len(run.call.steps))

    def _answered(
        self, bridge: SchedulerBridge, runs: dict[wire.CallId, Run], session: Session
    ) -> list[Call]:
        """Place all runs, answer them, and return the calls that can run then."""
        with self._timed("FindEngine"):
            placements = bridge.schedule()
        if len(placements) != len(runs):
            raise RuntimeError(f"{len(placements)} of {len(runs)} calls were placed")
        ready: list[Call] = []
        for placement in placements:
            run = runs[wire.CallId(placement.call_id)]
            with self._timed("frame"):
                steps = run.call.dispatch("sim-0")
                wire.encode(run.dispatch(steps, wire.ContextId(placement.parent_context_id)))
            with self._timed("value"):
                ready += session.graph.complete(run.call, 0, _ANSWER).ready
            bridge.finish(run, run.prompt.num_tokens)
        return ready

    def labelled_get_ms(self, depth: int) -> float:
        """What a label at the end of a live chain costs until every call has its objective."""
        session, _ = self._open()
        (body,) = _bodies(new_session_id(), 1, depth)
        session.graph.add(api.SubmitBody.model_validate(body), now_us=now_us())
        began = perf_counter_ns()
        session.graph.label(f"v-{depth - 1}", "LATENCY")
        deduce(session.graph)
        took = perf_counter_ns() - began
        self._sessions.remove(session.session_id)
        run_whole(session.graph.releasing())
        return took / 1e6

    def long_constant(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """From the ready call to its frame: the first with a long constant, and later ones."""
        text = self._text_of(num_tokens)
        bridge = self._bridge()
        times, reused = [], 0.0
        for index in range(repeats + 1):
            session, application = self._open()
            value = {"name": "a", "kind": "input", "value": filler(200, index)}
            # Not the same object: the text of another request.
            prompt = "".join([text, "{{input:a}}{{output}}"])
            body = {
                "session_id": new_session_id(),
                "calls": [{"prompt": prompt, "placeholders": [value, _OUTPUT]}],
            }
            (call,) = session.graph.add(api.SubmitBody.model_validate(body), now_us=now_us()).calls
            began = perf_counter_ns()
            (run,) = self._encoded([call], application)
            bridge.submit(run, 1)
            (placement,) = bridge.schedule()
            wire.encode(run.dispatch(call.dispatch("sim-0"), wire.ContextId(placement.parent_context_id)))
            times.append((perf_counter_ns() - began) / 1e6)
            reused = placement.prefix_len / num_tokens
            bridge.finish(run, run.prompt.num_tokens + num_new_tokens(run.steps))
            self._sessions.remove(session.session_id)
        later = spread(times[1:])
        return {"tokens": num_tokens, "first_ms": times[0], "second_ms": later, "reused": min(reused, 1.0)}

    def _text_of(self, num_tokens: int) -> str:
        text = filler(8 * num_tokens)
        encoding = self._tokenizer.literal.encode_batch([text], add_special_tokens=False)[0]
        start, _ = encoding.token_to_chars(num_tokens) or (len(text), 0)
        return text[:start]

    def _open(self) -> tuple[Session, Application]:
        session = self._sessions.create()
        self._number += 1
        return session, Application(self._number, session, self._tenants.get(session.tenant), now_us())

    def _bridge(self) -> SchedulerBridge:
        bridge = SchedulerBridge(SchedulerConfig())
        model = wire.ModelInfo(
            "sim", self._tokenizer.fingerprint, self._tokenizer.vocab_size, 2**20, "none", "none"
        )
        cost = wire.CostModel(1000.0, 10.0, 10.0, 0.001, 2**24, 2**20)
        for index in range(_NUM_ENGINES):
            name = f"sim-{index}"
            register = wire.Register(wire.PROTOCOL_VERSION, name, name, 1, model, cost, 4096)
            bridge.add_engine(Engine(index + 1, name.encode(), register, "", 0.0))
        return bridge

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = perf_counter_ns()
        yield
        self._ns[part] += perf_counter_ns() - began


_OUTPUT = {"name": "output", "kind": "output", "sampling": {"max_tokens": 8}}
