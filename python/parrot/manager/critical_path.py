"""Targets in time, carried from labelled variables to everything they need (paper section 5.2).

Two passes over the cone of the labels that have a time. Upwards from what runs next: how long the critical
path to a variable still is. Downwards from the variables: by when each step has to start, so that what is
left after it fits. Times are estimates, from the engines' cost models at the load that latency-bound calls
allow.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

from .call import Call, InputPart, TextPart
from .cone import NODES_AT_ONCE, Cone, Node, Unit, dependencies
from .demand import Demand, earliest
from .pace import CHARS_PER_TOKEN, Pace
from .variable import Variable

MARGIN = 2  # a deadline is urgent once it is nearer than so many times the critical path


class CriticalPath:
    """``start_by_us``: of each unfinished unit, the latest start that keeps every target. ``urgent``: the
    labelled nodes whose deadline needs latency-bound calls from now on. ``review_us``: when the next one may
    become urgent; None if none can. ``cone``: of the labels with a time."""

    def __init__(self, labels: Mapping[Node, Demand], *, pace: Pace, now_us: int) -> None:
        self._labels = {node: demand for node, demand in labels.items() if demand.has_time}
        self.cone = Cone(self._labels)
        self._pace = pace
        self._now_us = now_us
        self._num_tokens: dict[Variable, float] = {}
        self._took_us: dict[Unit, tuple[float, float]] = {}
        self.start_by_us: dict[Unit, int] = {}
        self.urgent: set[Node] = set()
        self.review_us: int | None = None

    def measuring(self) -> Generator[None, None, None]:
        """Find all of that; yields now and then (:mod:`parrot.manager.slices`), and the graph may go on."""
        yield from self.cone.growing()
        self._judge((yield from self._remaining()))
        yield from self._carry_down()

    def _remaining(self) -> Generator[None, None, dict[Node, float]]:
        """Microseconds of the critical path up to the end of each node. A producer that came to a variable
        since the cone was built is left out: its submit has made the graph stale again."""
        remaining: dict[Node, float] = {}
        for number, node in enumerate(reversed(self.cone.readers_first)):
            if number % NODES_AT_ONCE == 0:
                yield
            before = max((remaining.get(below, 0.0) for below in dependencies(node)), default=0.0)
            if isinstance(node, Variable):
                self._num_tokens[node] = self._tokens_of(node)
                remaining[node] = before
            else:
                self._took_us[node] = self._estimate(*node)
                remaining[node] = before + sum(self._took_us[node])
        return remaining

    def _judge(self, remaining: Mapping[Node, float]) -> None:
        for node, demand in self._labels.items():
            if demand.due_us is None:
                continue
            urgent_us = demand.due_us - round(MARGIN * remaining[node])
            if urgent_us <= self._now_us:
                self.urgent.add(node)
            else:
                self.review_us = earliest(self.review_us, urgent_us)

    def _carry_down(self) -> Generator[None, None, None]:
        end_by_us: dict[Node, int | None] = {}
        for number, node in enumerate(self.cone.readers_first):
            if number % NODES_AT_ONCE == 0:
                yield
            demand = self._labels.get(node)
            due_us = None if demand is None else demand.due_us
            due_us = earliest(
                due_us, *(self._needed_by(reader, end_by_us) for reader in self.cone.readers[node])
            )
            if isinstance(node, Variable):
                first_us = None if demand is None or node.producer is not None else demand.first_token_by_us
                end_by_us[node] = earliest(due_us, first_us)
                continue
            prefill_us, decode_us = self._took_us[node]
            first_by_us = self._first_token_by(node)
            start_us = earliest(
                None if due_us is None else due_us - round(prefill_us + decode_us),
                None if first_by_us is None else first_by_us - round(prefill_us),
            )
            if start_us is not None:
                self.start_by_us[node] = start_us

    def _needed_by(self, reader: Node, end_by_us: Mapping[Node, int | None]) -> int | None:
        return end_by_us[reader] if isinstance(reader, Variable) else self.start_by_us.get(reader)

    def _first_token_by(self, unit: Unit) -> int | None:
        call, index = unit
        demands = (self._labels.get(unit), self._labels.get(call.steps[index].output.binding.variable))
        return earliest(*(demand.first_token_by_us for demand in demands if demand is not None))

    def _estimate(self, call: Call, index: int) -> tuple[float, float]:
        if index < call.next_step:
            return 0.0, 0.0
        step = call.steps[index]
        num_tokens = sum(map(self._part_tokens, step.parts))
        return self._pace.prefill_us(num_tokens), self._pace.decode_us(
            step.output.binding.sampling.max_tokens
        )

    def _part_tokens(self, part: TextPart | InputPart) -> float:
        if isinstance(part, TextPart):
            return len(part.text) / CHARS_PER_TOKEN
        binding = part.binding
        if binding.text is None and binding.variable is not None:
            return self._num_tokens.get(binding.variable, 0.0)
        return len(binding.text or binding.constant or "") / CHARS_PER_TOKEN

    def _tokens_of(self, variable: Variable) -> float:
        """What a variable's text may come to; 0 for one that the client will set."""
        if variable.value is not None:
            return len(variable.value) / CHARS_PER_TOKEN
        if variable.producer is not None:
            return variable.producer.steps[variable.producer_step].output.binding.sampling.max_tokens
        return sum(self._num_tokens.get(source, 0.0) for source in variable.sources)
