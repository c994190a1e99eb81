"""Random graphs with random completions, failures and cancellations, against a simple reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from graph_builder import flow_call, join, make_graph, submit, value
from parrot.errors import EngineError
from parrot.manager.call import Call, CallState
from parrot.manager.graph import Changes, Graph

FAILED = EngineError("boom").to_info()


@dataclass
class Program:
    """Calls and joins over variables v0, v1, ...: each reads variables with smaller numbers."""

    set_vars: list[str] = field(default_factory=list)
    calls: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    joins: dict[str, list[str]] = field(default_factory=dict)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    known: list[str] = []
    for index in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        kind = draw(st.sampled_from(["call", "call", "call", "join", "set"]))
        outputs = [f"v{index}"]
        if kind == "join" and inputs:
            program.joins[outputs[0]] = inputs
        elif kind == "set":
            program.set_vars.append(outputs[0])
        else:
            outputs += [f"w{index}"] if draw(st.booleans()) else []
            program.calls[f"C{index}"] = (inputs, outputs)
        known += outputs
    return program


class Reference:
    """What must have become of each variable: its text, or None for no value. Told every event."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.end: dict[str, str | None] = {}

    def spread(self) -> None:
        while True:
            new = {**self._joined(), **self._starved()}
            new = {name: end for name, end in new.items() if name not in self.end}
            if not new:
                return
            self.end.update(new)

    def _joined(self) -> dict[str, str | None]:
        return {
            name: None if None in ends else "+".join(map(str, ends))
            for name, sources in self.program.joins.items()
            for ends in [[self.end[source] for source in sources if source in self.end]]
            if None in ends or len(ends) == len(sources)
        }

    def _starved(self) -> dict[str, str | None]:
        return {
            output: None
            for inputs, outputs in self.program.calls.values()
            if any(name in self.end and self.end[name] is None for name in inputs)
            for output in outputs
        }


class Run:
    """Drives a graph with random events and checks it after each."""

    def __init__(self, program: Program, draw: st.DrawFn) -> None:
        self.draw = draw
        self.program = program
        self.reference = Reference(program)
        self.graph: Graph = make_graph()
        self.ready: list[Call] = []
        self.num_ready: dict[Call, int] = {}
        self.cancelled_any = False

    def start(self) -> None:
        calls = [flow_call(name, inputs, outputs) for name, (inputs, outputs) in self.program.calls.items()]
        variables = [join(name, *sources, separator="+") for name, sources in self.program.joins.items()]
        variables += [value(name) for name in self.program.set_vars]
        order = self.draw(st.permutations(calls))
        cut = self.draw(st.integers(0, len(order)))
        if self.draw(st.booleans()):
            cut = len(order)  # one submit, in any order
            self.take(submit(self.graph, *order, variables=variables).changes)
            return
        declared = [value(name) for _, outputs in self.program.calls.values() for name in outputs]
        self.take(submit(self.graph, *order[:cut], variables=[*variables, *declared]).changes)
        self.take(submit(self.graph, *order[cut:]).changes)

    def take(self, changes: Changes) -> None:
        for call in changes.ready:
            assert call.state is CallState.QUEUED
            assert all(binding.text is not None for binding in call.inputs.values())
            self.num_ready[call] = self.num_ready.get(call, 0) + 1
            self.ready.append(call)
        assert len(set(changes.ended)) == len(changes.ended)
        assert all(call.ended for call in changes.ended)
        self.ready = [call for call in self.ready if not call.ended]

    def step(self) -> bool:
        """One event; False when nothing is left to do."""
        pending = [name for name, variable in self.graph.variables.items() if variable.pending]
        to_set = [name for name in self.program.set_vars if name in pending]
        actions = ["complete"] * 4 * bool(self.ready) + ["set"] * 2 * bool(to_set)
        if not actions:
            return False
        action = self.draw(st.sampled_from([*actions, "fail", "cancel"]))
        if action == "set":
            name = self.draw(st.sampled_from(to_set))
            self.reference.end[name] = f"s-{name}"
            self.take(self.graph.set_value(name, f"s-{name}"))
        elif action == "cancel":
            name = self.draw(st.sampled_from(pending))
            self.cancelled_any = True
            self.reference.end[name] = None
            self.take(self.graph.cancel(name))
        elif self.ready:
            self.run_call(self.draw(st.sampled_from(self.ready)), fails=action == "fail")
        return True

    def run_call(self, call: Call, *, fails: bool) -> None:
        if call.state is CallState.QUEUED:
            call.dispatch("engine-0")
        step = call.next_step
        variable = call.steps[step].output.binding.variable
        if fails:
            for later in call.steps[step:]:
                self.reference.end.setdefault(later.output.binding.variable.id, None)
            self.take(self.graph.fail(call, FAILED))
            return
        if variable.pending:
            self.reference.end[variable.id] = f"o-{variable.id}"
        self.take(self.graph.complete(call, step, f"o-{variable.id}"))

    def check(self) -> None:
        self.reference.spread()
        for name, variable in self.graph.variables.items():
            if variable.pending:
                assert name not in self.reference.end
            elif name in self.reference.end:
                assert variable.value == self.reference.end[name]
            else:  # nobody needed it after a cancellation
                assert self.cancelled_any
                assert variable.error is not None
                assert variable.error.code == "cancelled"
                self.reference.end[name] = None
        for call in self.graph.calls.values():
            live_output = any(binding.variable.pending for binding in call.outputs.values())
            assert call.ended != live_output
            assert (call.request_id in self.graph.live) == live_output


@settings(max_examples=300, deadline=None)
@given(programs(), st.data())
def test_every_variable_ends_as_the_reference_says_and_no_call_runs_twice(
    program: Program, data: st.DataObject
) -> None:
    run = Run(program, data.draw)
    run.start()
    run.check()
    while run.step():
        run.check()
    assert all(not variable.pending for variable in run.graph.variables.values())
    assert not run.graph.live
    assert all(count == 1 for count in run.num_ready.values())


@settings(max_examples=200, deadline=None)
@given(programs(), st.data())
def test_cancel_never_takes_a_variable_that_somebody_still_needs(
    program: Program, data: st.DataObject
) -> None:
    run = Run(program, data.draw)
    run.start()
    graph = run.graph
    pending = [name for name, variable in graph.variables.items() if variable.pending]
    if not pending:
        return
    graph.cancel(data.draw(st.sampled_from(pending)))
    for variable in graph.variables.values():
        if variable.error is None or "everything that needed it" not in variable.error.message:
            continue
        readers = [consumer.call for consumer in variable.consumers]
        assert readers or variable.derived
        assert all(not derived.pending for derived in variable.derived)
        assert all(call.ended for call in readers)
