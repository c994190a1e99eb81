"""Sessions: found by id and tenant only, and gone when idle."""

from __future__ import annotations

import re

import pytest

from graph_builder import SESSION_ID, flow_call, submit
from parrot.config import ManagerConfig
from parrot.errors import DuplicateRequest, InternalError, SessionNotFound
from parrot.manager.key_file import KeyFile
from parrot.manager.session import SessionTable
from parrot.manager.tenants import Tenants, public_id


class Clock:
    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SessionTable:
    return SessionTable(ManagerConfig(session_idle_s=10.0), clock=clock)


@pytest.fixture
def keyed(clock: Clock) -> SessionTable:
    """Of a service with keys, whose tenants have names."""
    return SessionTable(ManagerConfig(session_idle_s=10.0), Tenants(KeyFile()), clock=clock)


def test_ids_are_random_or_the_clients_own(table: SessionTable) -> None:
    one, other = table.create(), table.create()
    assert one.session_id != other.session_id
    assert re.fullmatch("s-[0-9a-f]{32}", one.session_id)
    assert table.create(SESSION_ID).session_id == SESSION_ID
    assert table.get(SESSION_ID).graph.session_id == SESSION_ID
    assert len(table) == 3
    with pytest.raises(DuplicateRequest):
        table.create(SESSION_ID)


def test_a_foreign_session_looks_like_one_that_never_was(keyed: SessionTable) -> None:
    mine = keyed.create(SESSION_ID, tenant="mine")
    with pytest.raises(SessionNotFound) as foreign:
        keyed.get(SESSION_ID, tenant="other")
    with pytest.raises(SessionNotFound):
        keyed.get(mine.session_id, tenant="other")
    with pytest.raises(SessionNotFound):
        keyed.remove(SESSION_ID, tenant="other")
    assert keyed.remove(SESSION_ID, tenant="mine") is mine
    with pytest.raises(SessionNotFound) as gone:
        keyed.get(SESSION_ID, tenant="other")
    assert foreign.value.message == gone.value.message


def test_an_id_that_another_tenant_has_is_free(keyed: SessionTable) -> None:
    mine, theirs = keyed.create(SESSION_ID, tenant="mine"), keyed.create(SESSION_ID, tenant="other")
    assert mine.session_id != theirs.session_id
    assert keyed.get(SESSION_ID, tenant="mine") is mine
    assert keyed.get(SESSION_ID, tenant="other") is theirs
    assert {public_id(session.session_id) for session in (mine, theirs)} == {SESSION_ID}
    with pytest.raises(DuplicateRequest):
        keyed.create(SESSION_ID, tenant="other")


def test_with_keys_a_session_that_names_no_tenant_is_a_bug(keyed: SessionTable) -> None:
    for make in (keyed.create, keyed.create_detached):
        with pytest.raises(InternalError, match="no tenant 'default'"):
            make()


def test_the_isolation_domain_is_the_tenants(keyed: SessionTable) -> None:
    one, other, foreign = (
        keyed.create(tenant="a"),
        keyed.create(tenant="a"),
        keyed.create_detached(tenant="b"),
    )
    assert one.domain == other.domain != foreign.domain
    assert submit(foreign.graph, flow_call("A", [], ["x"])).calls[0].domain == foreign.domain


def test_call_ids_are_unique_and_prefix_hashes_comparable_across_sessions(table: SessionTable) -> None:
    one, other = (
        (session.graph, submit(session.graph, flow_call("A", [], ["x"])).calls[0])
        for session in (table.create(), table.create())
    )
    assert one[1].call_id != other[1].call_id
    assert one[0].prefix_hash(one[1], 1) == other[0].prefix_hash(other[1], 1)
    assert one[0].prefix_hash(one[1], 2) != other[0].prefix_hash(other[1], 2)


def test_sessions_expire_when_idle(table: SessionTable, clock: Clock) -> None:
    used, idle = table.create(), table.create()
    clock.now_us = 9_000_000
    table.get(used.session_id)
    clock.now_us = 10_000_000
    assert table.take_idle() == []
    clock.now_us = 10_000_001
    assert table.take_idle() == [idle]
    with pytest.raises(SessionNotFound):
        table.get(idle.session_id)
    assert table.get(used.session_id) is used


def test_a_session_in_which_a_request_waits_is_not_idle(table: SessionTable, clock: Clock) -> None:
    session = table.create()
    with session.in_use(), session.in_use():
        clock.now_us = 60_000_000
        assert table.take_idle() == []
    clock.now_us = 70_000_000
    assert table.take_idle() == []
    clock.now_us = 70_000_001
    assert table.take_idle() == [session]


def test_a_detached_session_is_in_no_table(table: SessionTable, clock: Clock) -> None:
    session = table.create_detached()
    assert len(table) == 0
    with pytest.raises(SessionNotFound):
        table.get(session.session_id)
    clock.now_us = 60_000_000
    assert table.take_idle() == []
