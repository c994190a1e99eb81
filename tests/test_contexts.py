"""The ledger of contexts that finished calls left on engines."""

from __future__ import annotations

from parrot.manager.contexts import ContextLedger
from parrot.wire import ContextId


def context(number: int) -> ContextId:
    return ContextId(number)


def test_a_sessions_contexts_come_out_by_engine_and_only_once() -> None:
    ledger = ContextLedger()
    ledger.add("s", 1, context(10))
    ledger.add("s", 2, context(20))
    ledger.add("t", 1, context(11))
    assert ledger.take_session("s") == {1: [10], 2: [20]}
    assert ledger.take_session("s") == {}
    assert len(ledger) == 1


def test_evicted_contexts_and_those_of_a_lost_engine_are_forgotten() -> None:
    ledger = ContextLedger()
    for number, engine in ((10, 1), (11, 1), (20, 2)):
        ledger.add("s", engine, context(number))
    ledger.evicted(context(10))
    ledger.evicted(context(99))
    ledger.engine_lost(2)
    assert ledger.take_session("s") == {1: [11]}
    assert len(ledger) == 0
