"""What deduction said of a session's graph."""

from __future__ import annotations

from graph_builder import make_graph, submit
from parrot import api
from parrot.manager.analysis import deduce
from parrot.manager.graph import Graph


def deduced(*calls: api.CallBody, labels: dict[str, api.Criteria], **fields: object) -> Graph:
    graph = make_graph()
    submit(graph, *calls, labels=labels, **fields)
    deduce(graph)
    return graph


def latency_calls(graph: Graph) -> set[str]:
    return {call.request_id for call in graph.calls.values() if call.objective == "LATENCY"}


def groups(graph: Graph) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for call in graph.calls.values():
        if call.task_group is not None:
            assert call.objective == "THROUGHPUT"
            found.setdefault(call.task_group, set()).add(call.request_id)
    return found


def depths(graph: Graph) -> dict[str, int | None]:
    return {call.request_id: call.depth for call in graph.calls.values()}
