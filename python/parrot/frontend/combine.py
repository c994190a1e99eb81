"""Fan-out over a function and waiting for many variables at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from . import background
from .connection import current_session, session_of
from .function import Function
from .objective import Asked, Perf, to_objective
from .options import check_timeout
from .session import Session
from .variable import SemanticVariable


def map_calls(fn: Function, items: Iterable[object], /, **fixed: object) -> list[Any]:
    """``[fn(item, **fixed) for item in items]``, submitted together, with the call that joins them if it
    follows at once. Each item is the first argument."""
    session = current_session()
    session.hold()
    try:
        return [fn(item, **fixed) for item in items]
    finally:
        session.release()


def gather(
    *variables: SemanticVariable, perf: Asked = Perf.LATENCY, timeout: float | None = None
) -> tuple[Any, ...]:
    """Label all variables, then wait for all: the labels travel with the calls that they are about.

    Returns the values in order. Raises the first error met, :class:`GetTimeout` included; the other
    variables go on.
    """
    objective = to_objective(perf).begin()
    check_timeout(timeout)
    for variable in variables:
        if not isinstance(variable, SemanticVariable):
            raise TypeError(
                f"P.gather takes variables, each as an argument of its own, not {type(variable).__name__}; "
                "for a list write P.gather(*variables)"
            )
    by_session: dict[Session, list[SemanticVariable]] = {}
    for variable in dict.fromkeys(variables):
        if not variable.settled:
            by_session.setdefault(session_of([variable]), []).append(variable)
    waits: list[Future[str]] = []
    for session, group in by_session.items():
        waits += session.start_gets(group, objective, timeout, eager=True)
    if waits:
        background.wait(background.run(_all(waits)))
    return tuple(variable.get() for variable in variables)


async def _all(waits: Iterable[Future[str]]) -> None:
    await asyncio.gather(*(asyncio.wrap_future(wait) for wait in waits))
