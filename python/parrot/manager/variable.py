"""Semantic variables inside the manager: single-assignment values with many readers (paper section 4.2)."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..api import Criteria
from ..errors import ErrorInfo, InternalError, error_from_info
from .demand import Demand
from .transforms import Chain

if TYPE_CHECKING:
    from .call import Call, InputBinding


class VariableState(enum.StrEnum):
    """A variable leaves PENDING once, for READY (it has a value) or FAILED (it has an error)."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


_PENDING, _READY, _FAILED = VariableState  # see call.py


class Consumer(NamedTuple):
    """A call that reads a variable: ``binding`` is first needed by step ``binding.first_step``."""

    call: Call
    binding: InputBinding


class Source(NamedTuple):
    """One variable that a derived variable reads, and what happens to its value first."""

    variable: Variable
    chain: Chain


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a derived variable comes from others: each source through its chain, joined, then ``chain``."""

    sources: tuple[Source, ...]
    separator: str
    chain: Chain


@dataclass(eq=False, slots=True)
class Variable:
    """One semantic variable of a session. Only :class:`~parrot.manager.graph.Graph` changes its state.

    It is produced by a call (``producer``), derived from others (``derivation``), or set from outside (both
    None). ``demand`` is what gets have asked of it; None if nobody has.
    """

    id: str
    state: VariableState = _PENDING
    value: str | None = None
    error: ErrorInfo | None = None
    producer: Call | None = None
    producer_step: int = 0
    derivation: Derivation | None = None
    num_missing_sources: int = 0
    consumers: list[Consumer] = field(default_factory=list)
    derived: list[Variable] = field(default_factory=list)  # once per source entry that names this variable
    demand: Demand | None = None
    _waiters: set[asyncio.Future[None]] = field(default_factory=set, repr=False)

    @property
    def criteria(self) -> Criteria | None:
        """The strictest label; None if nobody has asked for it."""
        return None if self.demand is None else self.demand.criteria

    @property
    def pending(self) -> bool:
        """Whether it has neither a value nor an error yet."""
        return self.state is _PENDING

    @property
    def name(self) -> str:
        """How messages name it: with the function that it is an output of."""
        function = self.producer.function if self.producer is not None else ""
        return f"variable {self.id} (an output of {function})" if function else f"variable {self.id}"

    @property
    def sources(self) -> tuple[Variable, ...]:
        """The variables that a derived variable reads; empty for others."""
        return tuple(source.variable for source in self.derivation.sources) if self.derivation else ()

    @property
    def has_origin(self) -> bool:
        """Whether a second producer or value would be one too many."""
        return not self.pending or self.producer is not None or self.derivation is not None

    @property
    def has_waiters(self) -> bool:
        """Whether a getter waits for it."""
        return bool(self._waiters)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the variable ends; False if ``timeout_s`` passed first (0 polls). Many may wait."""
        if not self.pending:
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            return not self.pending
        finally:
            self._waiters.discard(waiter)
        return True

    def result(self) -> str:
        """The value of an ended variable; raises its typed error if it failed."""
        if self.error is not None:
            raise error_from_info(self.error)
        if self.value is None:
            raise InternalError(f"variable {self.id} was read while pending")
        return self.value

    def end(self, value: str | None, error: ErrorInfo | None) -> None:
        """Give it its value or its error, and wake the getters. For the graph only."""
        self.value, self.error = value, error
        self.state = _READY if error is None else _FAILED
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
