"""From the journal to live sessions: the graphs of a manager that was killed, and its unfinished calls.

A variable that had ended has the end that is on record, whatever transforms or limits would make of it now;
nothing that a client was told can change. The rest follows from the graph (:func:`resuming`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Generator, Iterator, Sequence

import msgspec
from pydantic import ValidationError

from ..api import CallBody, SubmitBody
from ..errors import JournalError, ParrotError
from .clock import now_us
from .demand import Demand
from .draft import drafting
from .executor import Executor
from .graph import Changes, Graph
from .journal import Journal
from .journal_store import Kind, Row
from .recorder import (
    ChosenIds,
    SessionRecorder,
    decode_error,
    decode_generated,
    decode_ids,
    decode_label,
    decode_text,
)
from .session import SessionTable
from .slices import run_in_slices
from .submit_body import reading
from .value_bytes import size_of
from .variable import Variable

log = logging.getLogger(__name__)
_GROUP_BYTES = 2**20


async def recover(journal: Journal, sessions: SessionTable, executor: Executor) -> None:
    """Rebuild every session on record and queue its unfinished calls; they are placed when engines join.
    Whatever else is due on the loop runs meanwhile, and must not use the sessions.

    Raises :class:`JournalError` for a journal that is damaged, or that the present limits refuse."""
    started = time.monotonic()
    # Nothing of what is built becomes garbage, and looking for it would take a third of the time.
    gc.disable()
    try:
        num_sessions, num_live = await _recover_all(journal, sessions, executor)
    finally:
        gc.enable()
    log.info(
        "journal %s: %d sessions with %d unfinished calls are back after %.2f s",
        journal.path,
        num_sessions,
        num_live,
        time.monotonic() - started,
    )


async def _recover_all(journal: Journal, sessions: SessionTable, executor: Executor) -> tuple[int, int]:
    """How many sessions came back, and how many calls that have not ended."""
    # What the wall clock said then is a time of this process's own clock, which may be in its past.
    wall_offset_us = now_us() - time.time_ns() // 1000
    num_sessions = num_live = 0
    on_record = journal.recover()
    # In a thread: rows are checked and inflated, which does not need the interpreter's lock.
    while group := await asyncio.to_thread(_take_group, on_record):
        for rows in group:
            num_live += await run_in_slices(
                _recovering_session(rows, journal, sessions, executor, wall_offset_us)
            )
            executor.turn()
        num_sessions += len(group)
    return num_sessions, num_live


def _take_group(on_record: Iterator[list[Row]]) -> list[list[Row]]:
    """The next sessions, about as much as is read in a moment; none at the end."""
    group: list[list[Row]] = []
    num_bytes = 0
    while num_bytes < _GROUP_BYTES:
        rows = next(on_record, None)
        if rows is None:
            break
        group.append(rows)
        num_bytes += sum(len(row.data) for row in rows)
    return group


def _recovering_session(
    rows: Sequence[Row], journal: Journal, sessions: SessionTable, executor: Executor, wall_offset_us: int
) -> Generator[None, None, int]:
    """How many of its calls have not ended."""
    try:
        opening = rows[0]
        if opening.kind is not Kind.OPEN:
            raise ValueError(f"its first row is {opening.kind.value!r}")
        recorder = SessionRecorder(journal, opening.session)
        session = sessions.restore(opening.name, opening.data.decode(), recorder)
        for row in rows[1:]:
            yield from _replaying(session.graph, row, wall_offset_us)
        changes = yield from resuming(session.graph)
        yield from executor.restoring(session, changes)
    except (ParrotError, ValidationError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise JournalError(
            f"journal = {journal.path}: session {rows[0].name} cannot be rebuilt ({error}); start with "
            "the limits that it was written under, or move it away to start without its sessions",
            param="journal",
        ) from error
    return len(session.graph.live)


def _replaying(graph: Graph, row: Row, wall_offset_us: int) -> Generator[None, None, None]:
    if row.kind is Kind.SUBMIT:
        body = _with_ids((yield from reading(row.data, graph.setting.config)), decode_ids(row.extra))
        yield from _taking(graph, body, min(int(row.name) + wall_offset_us, now_us()))
        return
    variable = graph.variable(row.name)
    match row.kind:
        case Kind.VALUE:
            value = decode_text(row.data)
            graph.values.count(size_of(value))
            variable.end(value, None)
        case Kind.ERROR:
            variable.end(None, decode_error(row.data))
        case Kind.OUTPUT:
            _write(variable, row)
        case Kind.LABEL:
            label = decode_label(row.data)
            asked_us = min(label.asked_us + wall_offset_us, now_us())
            graph.ask(variable, Demand.of(label.criteria, label.target_ms, now_us=asked_us))
        case _:
            raise ValueError(f"a row of kind {row.kind.value!r} after the first")
    yield


def _taking(graph: Graph, body: SubmitBody, submitted_us: int) -> Generator[None, None, None]:
    """A submit that was taken before. Nothing is delivered before :func:`resuming`, and a request id may
    come again: the call that had it is not known yet to have ended."""
    draft = yield from drafting(
        body, setting=graph.setting, variables=graph.variables, live={}, now_us=submitted_us
    )
    graph.insert(draft, body)
    for variable, value in draft.values.items():
        variable.end(value, None)


def resuming(graph: Graph) -> Generator[None, None, Changes]:
    """Go on where the restored calls were: those with an end for every output have ended, the others run from
    the first output whose text is not there. Nothing else may happen to the graph meanwhile."""
    graph.live.clear()
    flow = graph.new_flow()
    for call in graph.calls.values():
        is_written = [step.output.binding.raw is not None for step in call.steps]
        call.next_step = call.num_dispatched = (*is_written, False).index(False)
        flow.settle(call)
        if call.ended:
            call.next_step = call.num_dispatched = len(call.steps)
        else:
            graph.live[call.request_id] = call
        yield
    calls = list(graph.live.values())
    flow = graph.new_flow()  # what ended before is no news
    yield from flow.delivering_existing(calls, [one for one in graph.variables.values() if one.pending])
    flow.run()
    for call in calls:
        flow.wake(call)
        for step in call.steps[: call.next_step]:
            if step.output.binding.variable.pending:  # the manager died while it was transformed
                flow.written(call, step.index)
        yield
    graph.is_stale = bool(calls)
    return graph.finish(flow)


def _write(variable: Variable, row: Row) -> None:
    """What an engine had generated for a variable."""
    if variable.producer is None:
        raise ValueError(f"variable {variable.id} has text of an engine, but no producer")
    output = variable.producer.steps[variable.producer_step].output.binding
    known = decode_generated(row.extra)
    output.raw, output.token_ids, output.logprobs = decode_text(row.data), known.token_ids, known.logprobs


def _with_ids(body: SubmitBody, chosen: Sequence[ChosenIds]) -> SubmitBody:
    """The body with the ids that the service chose then."""
    if len(chosen) != len(body.calls):
        raise ValueError(f"a submit of {len(body.calls)} calls has ids for {len(chosen)}")
    if all(map(_has_ids, body.calls)):
        return body
    return body.model_copy(update={"calls": tuple(map(_call_with_ids, body.calls, chosen))})


def _has_ids(call: CallBody) -> bool:
    return call.request_id is not None and all(
        placeholder.semantic_var_id is not None or placeholder.kind == "input"
        for placeholder in call.placeholders
    )


def _call_with_ids(call: CallBody, chosen: ChosenIds) -> CallBody:
    placeholders = tuple(
        placeholder.model_copy(update={"semantic_var_id": chosen.outputs[placeholder.name]})
        if placeholder.kind == "output" and placeholder.semantic_var_id is None
        else placeholder
        for placeholder in call.placeholders
    )
    return call.model_copy(update={"request_id": chosen.request_id, "placeholders": placeholders})
