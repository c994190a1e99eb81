"""The ledger of contexts that ended calls left on engines."""

from __future__ import annotations

from parrot.manager.contexts import ContextLedger
from parrot.wire import ContextId


def context(number: int) -> ContextId:
    return ContextId(number)


def make_ledger(limit: int = 100) -> ContextLedger:
    ledger = ContextLedger()
    for engine_id in (1, 2):
        ledger.engine_joined(engine_id, limit)
    return ledger


def test_a_sessions_contexts_come_out_by_engine_and_only_once() -> None:
    ledger = make_ledger()
    ledger.add(1, context(10), 5, session_id="s")
    ledger.add(2, context(20), 5, session_id="s")
    ledger.add(1, context(11), 5, session_id="t")
    ledger.add(1, context(12), 5, session_id=None)
    assert ledger.take_session("s") == {1: [10], 2: [20]}
    assert ledger.take_session("s") == {}
    assert ledger.of_engine(1) == {11: 5, 12: 5}


def test_evicted_contexts_and_those_of_a_lost_engine_are_forgotten() -> None:
    ledger = make_ledger()
    for number, engine in ((10, 1), (11, 1), (20, 2)):
        ledger.add(engine, context(number), 8, session_id="s")
    gone = ledger.cut(1, context(10), 0)
    assert gone is not None
    assert gone.session_id == "s"
    assert ledger.cut(1, context(11), 5) is None
    assert ledger.cut(1, context(99), 0) is None
    assert ledger.of_engine(1) == {11: 5}
    ledger.engine_lost(2)
    assert ledger.take_session("s") == {1: [11]}
    assert len(ledger) == 0


def test_cuts_may_come_in_any_order() -> None:
    ledger = make_ledger()
    ledger.add(1, context(10), 50, session_id=None)
    ledger.cut(1, context(10), 16)
    ledger.cut(1, context(10), 32)
    assert ledger.of_engine(1) == {10: 16}


def test_only_the_newest_contexts_of_an_engine_are_known() -> None:
    ledger = make_ledger(limit=3)
    dropped = []
    for number in range(10, 15):
        for old in ledger.add(1, context(number), 8, session_id=None):
            ledger.cut(1, old, 0)
            dropped.append(old)
    assert dropped == [10, 11]
    assert list(ledger.of_engine(1)) == [12, 13, 14]


def test_a_snapshot_says_nothing_of_what_came_after_it() -> None:
    ledger = make_ledger()
    for number, frame in ((10, 1), (11, 2), (12, 5)):
        ledger.add(1, context(number), 20, session_id=None, frame=frame)
    correction = ledger.compare(1, 5, {context(11): 7, context(13): 9})
    assert correction.cut == {10: 0, 11: 7}
    assert correction.strangers == [13]
