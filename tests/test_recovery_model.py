"""Managers killed at any point: the graph that comes back equals the one in memory."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graph_builder import body, join, prompt_call, value, write
from parrot import api, wire
from parrot.errors import ErrorInfo, ParrotError
from parrot.manager.graph import Graph
from recovery_harness import Service, SyncJournal, view

TRANSFORMS = [[], [{"op": "strip"}], [{"op": "split", "separator": ","}, {"op": "item", "index": 1}]]
TEXTS = st.sampled_from(["", " a ", "a,b", "c"])


class KilledAtAnyPoint(RuleBasedStateMachine):
    """The graph in memory is what the one that comes back must equal; values that were told must not
    change."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.service = Service(SyncJournal(Path(self.directory.name, "journal")))
        self.numbers = itertools.count()
        self.told: dict[tuple[str, str], str | ErrorInfo] = {}

    def teardown(self) -> None:
        self.service.journal.store.close()
        self.directory.cleanup()

    def pick(self, data: st.DataObject) -> Graph:
        return self.service.graphs[data.draw(st.sampled_from(sorted(self.service.graphs)))]

    has_session = precondition(lambda self: self.service.graphs)

    @rule()
    def open(self) -> None:
        if len(self.service.graphs) < 3:
            self.service.table.create(f"s-{next(self.numbers):032x}")

    @has_session
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        self.service.table.remove(graph.session_id)
        graph.close(ErrorInfo("session_closed", "it was deleted"))
        self.told = {key: end for key, end in self.told.items() if key[0] != graph.session_id}

    @has_session
    @rule(data=st.data(), num_calls=st.integers(1, 3), named=st.booleans())
    def submit(self, data: st.DataObject, num_calls: int, named: bool) -> None:
        graph = self.pick(data)
        known, calls = sorted(graph.variables), []
        new = f"v{next(self.numbers)}"
        text = data.draw(st.none() | TEXTS)
        variables = [value(new, text)]
        known.append(new)
        if text is None and len(known) > 1:
            sources = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
            derived = f"d{next(self.numbers)}"
            variables.append(join(derived, *sources, transforms=data.draw(st.sampled_from(TRANSFORMS))))
            known.append(derived)
        for _ in range(num_calls):
            calls.append(self.draw_call(data, known))
        labels: dict[str, api.Criteria] = {}
        if data.draw(st.booleans()):
            labels[data.draw(st.sampled_from(known))] = "LATENCY"
        submitted = body(*calls, variables=variables, labels=labels)
        if named:
            submitted = submitted.model_copy(update={"submit_id": f"s{next(self.numbers)}"})
        self.attempt(lambda: graph.add(submitted, now_us=0))

    def draw_call(self, data: st.DataObject, known: list[str]) -> api.CallBody:
        inputs = data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        outputs = [f"o{next(self.numbers)}" for _ in range(data.draw(st.integers(1, 2)))]
        holes = [f"{{{{input:{name}}}}}" for name in inputs[:1]]
        holes += [f"{{{{output:{outputs[0]}}}}}"] + [f"{{{{input:{name}}}}}" for name in inputs[1:]]
        holes += [f"{{{{output:{name}}}}}" for name in outputs[1:]]
        chains = [write(name, transforms=data.draw(st.sampled_from(TRANSFORMS))) for name in outputs]
        known += outputs
        name = data.draw(st.sampled_from(["f", "g", "h", "i", "j"]))
        return prompt_call(name, " ".join(holes), *chains)

    @has_session
    @rule(data=st.data(), text=TEXTS)
    def set_value(self, data: st.DataObject, text: str) -> None:
        graph = self.pick(data)
        if graph.variables:
            name = data.draw(st.sampled_from(sorted(graph.variables)))
            self.attempt(lambda: graph.set_value(name, text))

    @has_session
    @rule(data=st.data(), text=TEXTS)
    def complete(self, data: st.DataObject, text: str) -> None:
        graph = self.pick(data)
        ready = [name for name, call in graph.live.items() if call.ready_steps()]
        if ready:
            call = graph.live[data.draw(st.sampled_from(ready))]
            if call.next_step == call.num_dispatched:
                call.dispatch("engine-0")
            graph.complete(call, call.next_step, text, wire.pack_ids([call.next_step]))

    @has_session
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        if graph.live:
            call = graph.live[data.draw(st.sampled_from(sorted(graph.live)))]
            graph.fail(call, ErrorInfo("engine_error", "it broke"))

    @has_session
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        if graph.variables:
            graph.cancel(data.draw(st.sampled_from(sorted(graph.variables))))

    @has_session
    @rule(data=st.data(), criteria=st.sampled_from(["LATENCY", "THROUGHPUT"]))
    def label(self, data: st.DataObject, criteria: api.Criteria) -> None:
        graph = self.pick(data)
        if graph.variables:
            graph.label(data.draw(st.sampled_from(sorted(graph.variables))), criteria)

    @rule()
    def kill(self) -> None:
        before = {name: view(graph) for name, graph in self.service.graphs.items()}
        self.service = self.service.after_a_kill()
        assert {name: view(graph) for name, graph in self.service.graphs.items()} == before

    @staticmethod
    def attempt(event: Any) -> None:
        with contextlib.suppress(ParrotError):
            event()

    @invariant()
    def what_was_told_stays(self) -> None:
        for name, graph in self.service.graphs.items():
            for variable in graph.variables.values():
                end = variable.error if variable.value is None else variable.value
                if end is not None:
                    assert self.told.setdefault((name, variable.id), end) == end
        known = {(name, var_id) for name, graph in self.service.graphs.items() for var_id in graph.variables}
        assert set(self.told) <= known


TestKilledAtAnyPoint = KilledAtAnyPoint.TestCase
TestKilledAtAnyPoint.settings = settings(max_examples=25, stateful_step_count=30)
