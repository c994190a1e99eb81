"""For how long an application's calls have run, by which it keeps its place in the queue."""

from __future__ import annotations

from typing import cast

from parrot.manager.application import Application
from parrot.manager.key_file import TenantLimits
from parrot.manager.session import Session
from parrot.manager.tenants import Tenant


def application() -> Application:
    session = cast(Session, None)  # not looked at
    return Application(1, session, Tenant("default", 1, TenantLimits()), arrival_us=0)


def test_time_in_which_several_calls_run_counts_once_and_time_in_which_all_wait_not_at_all() -> None:
    app = application()
    assert app.ran_us(90) == 0
    app.run_placed(100)
    app.run_placed(110)
    assert app.ran_us(115) == 15
    app.run_left(120)
    app.run_left(130)
    assert app.ran_us(900) == 30
    app.run_placed(1_000)
    assert app.ran_us(1_005) == 35


def test_an_application_that_arrives_anew_has_not_run_yet() -> None:
    app = application()
    app.run_placed(100)
    app.run_left(150)
    app.arrives(200)
    assert (app.arrival_us, app.ran_us(300)) == (200, 0)


def test_a_run_that_still_ends_while_the_application_arrives_anew_counts_from_there() -> None:
    app = application()
    app.run_placed(100)
    app.arrives(200)
    assert app.ran_us(210) == 10
    app.run_left(250)
    assert app.ran_us(300) == 50
