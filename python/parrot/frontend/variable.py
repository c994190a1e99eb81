"""Semantic variables: futures with an id, set by the caller, produced by a call, or derived from others."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from ..api import (
    Default,
    Item,
    Join,
    JsonPath,
    Lines,
    Regex,
    SourceBody,
    Split,
    Strip,
    Template,
    TokenLogprobs,
    ToNumber,
    Transform,
    VariableBody,
)
from ..errors import (
    AuthenticationError,
    DoubleProducer,
    ErrorInfo,
    GetTimeout,
    InvalidRequest,
    Overloaded,
    ParrotError,
    ServiceUnreachable,
    Unavailable,
    error_from_info,
)
from . import background
from .objective import Asked, Objective, Perf, to_objective
from .options import check_text, check_timeout, invalid

if TYPE_CHECKING:
    from .session import Session
    from .submission import Submission
    from .typed import Typed

TRANSIENT = (
    AuthenticationError,
    ServiceUnreachable,
    GetTimeout,
    Overloaded,
    Unavailable,
)  # say nothing about how a variable ended
_NAME = re.compile(r"[A-Za-z_]\w{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Derivation:
    """Where a derived variable's value comes from: its sources joined, then transformed, in the service."""

    sources: tuple[SemanticVariable, ...]
    separator: str = "\n"
    transforms: tuple[Transform, ...] = ()


class SemanticVariable:
    """A value that exists now or later.

    ``SemanticVariable("text")`` has its value; ``SemanticVariable()`` gets one by :meth:`set` or as the
    output of a call; calls return variables that the service will fill. ``name`` shows up in the session's
    graph. A variable belongs to the session in which it is first used. Raises :class:`TypeError` for a
    value that is not a string, :class:`InvalidRequest` for one with half of a surrogate pair.
    """

    __slots__ = (
        *("_derivation", "_error", "_logprobs", "_producer", "_session", "_submission", "_typed", "_value"),
        *("id", "name"),
    )

    def __init__(self, value: str | None = None, name: str | None = None) -> None:
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"the value of a SemanticVariable is text, not {type(value).__name__}: convert it with str() "
                "or json.dumps(), or pass it to the semantic function as a plain argument"
            )
        if name is not None and not _NAME.match(name):
            raise ValueError(f"{name!r} is not a name of up to 64 letters, digits and underscores")
        self.name = name or "var"
        self.id = f"{self.name}-{secrets.token_hex(8)}"
        self._value = value if value is None else check_text(value, f"variable {self.name!r}")
        self._error: ErrorInfo | None = None
        self._logprobs: tuple[TokenLogprobs, ...] | None = None
        self._typed: Typed | None = None
        self._derivation: Derivation | None = None
        self._producer: str | None = None
        self._session: Session | None = None
        self._submission: Submission | None = None

    # --- waiting -------------------------------------------------------------------------------------------

    def get(self, perf: Asked = Perf.LATENCY, timeout: float | None = None, *, raw: bool = False) -> Any:
        """The value, once it is there; ``perf`` labels what produces it (OSDI 2024 paper, section 5.2).

        It is text, or for a typed output a value of its type (``raw``: its text all the same). Raises the
        error with which the variable ended, :class:`ServiceUnreachable`, or :class:`GetTimeout` after
        ``timeout`` seconds, which leaves the variable as it is; 0 asks without waiting.
        """
        text = background.wait(self._start_get(to_objective(perf).begin(), timeout, eager=True))
        return text if raw else self._parsed(text)

    async def aget(
        self, perf: Asked = Perf.LATENCY, timeout: float | None = None, *, raw: bool = False
    ) -> Any:
        """As :meth:`get`, for coroutines. Those started together travel in one submit."""
        text = await asyncio.wrap_future(self._start_get(to_objective(perf).begin(), timeout, eager=False))
        return text if raw else self._parsed(text)

    def logprobs(self, perf: Asked = Perf.LATENCY, timeout: float | None = None) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of what the model wrote, id by id, for an output with
        ``P.Output(logprobs=...)``. Waits and raises as :meth:`get` does; :class:`InvalidRequest` if they were
        not asked for."""
        self.get(perf, timeout, raw=True)
        return self._known_logprobs()

    async def alogprobs(
        self, perf: Asked = Perf.LATENCY, timeout: float | None = None
    ) -> tuple[TokenLogprobs, ...]:
        """As :meth:`logprobs`, for coroutines."""
        await self.aget(perf, timeout, raw=True)
        return self._known_logprobs()

    def __await__(self) -> Generator[None, None, Any]:
        return self.aget().__await__()

    def done(self) -> bool:
        """Whether the variable has ended, with a value or an error; asks the service without waiting."""
        try:
            background.wait(self._start_get(None, 0.0, eager=True))
        except GetTimeout:
            return False
        except ParrotError as error:
            if isinstance(error, TRANSIENT) and self._error is None:
                raise
        return True

    def set(self, value: str) -> None:
        """Give a variable without producer its value. Raises :class:`DoubleProducer` if it has one."""
        if not isinstance(value, str):
            raise TypeError(f"the value of a SemanticVariable is text, not {type(value).__name__}")
        check_text(value, f"variable {self.name!r}")
        if not self.assignable:
            raise DoubleProducer(f"variable {self.id} cannot be set: it is {self.origin}")
        if self._session is None:
            self._value = value
        else:
            self._session.set_value(self, value)

    def cancel(self) -> None:
        """End the variable as cancelled; calls that nobody else needs stop. One that ended stays."""
        if not self.settled:
            self._own_session().cancel(self)

    # --- derived variables ---------------------------------------------------------------------------------

    def strip(self, chars: str | None = None) -> SemanticVariable:
        """The value without white space (or ``chars``) at both ends; each item of a list."""
        return self._derive(Strip, chars=chars)

    def regex(self, pattern: str, group: int | str = 0, *, every: bool = False) -> SemanticVariable:
        """``group`` of the first match of ``pattern``; no match fails the derived variable. ``every``: a list
        of that group in all matches."""
        return self._derive(Regex, pattern=pattern, group=group, every=every)

    def json(self, path: str = "$") -> SemanticVariable:
        """What the JSON path selects first in the value parsed as JSON (a fenced block is unwrapped)."""
        return self._derive(JsonPath, path=path)

    def split(self, separator: str, *, keep_empty: bool = False, quoted: bool = False) -> SemanticVariable:
        """A list of the parts between separators; ``quoted`` reads the text as CSV."""
        return self._derive(Split, separator=separator, keep_empty=keep_empty, quoted=quoted)

    def lines(self, *, bullets: bool = False) -> SemanticVariable:
        """A list of the lines that are not empty, stripped; ``bullets`` removes what begins the item of a
        list (``-``, ``1.``)."""
        return self._derive(Lines, bullets=bullets)

    def item(self, index: int | str) -> SemanticVariable:
        """One item of a list (negative: from the end), or one value of an object by key."""
        return self._derive(Item, index=index)

    def join(self, separator: str = "\n") -> SemanticVariable:
        """The items of a list as one text."""
        return self._derive(Join, separator=separator)

    def template(self, text: str) -> SemanticVariable:
        """``text`` with the value in place of every ``{{value}}``."""
        return self._derive(Template, text=text)

    def to_number(self) -> SemanticVariable:
        """Text that is a decimal number as a number; anything else fails. Each item of a list."""
        return self._derive(ToNumber)

    def default(self, value: str) -> SemanticVariable:
        """``value`` instead, if a transform before this one failed or gave null or nothing. That the variable
        itself fails is no reason: its error goes on."""
        return self._derive(Default, value=value)

    # --- for the session -----------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The session it belongs to; None until it is first used."""
        if self._session is None and self._derivation is not None:
            return next((s.session for s in self._derivation.sources if s.session is not None), None)
        return self._session

    @property
    def submission(self) -> Submission | None:
        """The submit that declared it or, for an output, that carries its call."""
        return self._submission

    @property
    def producer(self) -> str | None:
        """The name of the function whose output it is."""
        return self._producer

    @property
    def origin(self) -> str:
        """Where its value comes from, in words."""
        if self._producer is not None:
            return f"an output of {self._producer}"
        if self._derivation is not None:
            return "derived"
        return "to be set by the caller" if self._value is None else "set by the caller"

    @property
    def settled(self) -> bool:
        """Whether its end, value or error, is known here without asking the service."""
        return self._value is not None or self._error is not None

    @property
    def assignable(self) -> bool:
        """Whether a call may still produce it, or :meth:`set` give it a value."""
        return self._value is None and self._producer is None and self._derivation is None

    @property
    def sources(self) -> tuple[SemanticVariable, ...]:
        """The variables that a derived variable reads."""
        return () if self._derivation is None else self._derivation.sources

    def attach(self, session: Session, submission: Submission, producer: str | None = None) -> None:
        """Bind it to a session; called by the session, under its lock."""
        self._session, self._submission = session, submission
        if producer is not None:
            self._producer = producer

    def settle(self, outcome: str | ErrorInfo, logprobs: tuple[TokenLogprobs, ...] | None = None) -> None:
        """Remember how it ended, so that later gets need no service."""
        self._logprobs = logprobs
        if isinstance(outcome, str):
            self._value = outcome
        else:
            self._error = outcome

    def set_type(self, typed: Typed) -> None:
        """Its text, which a call will write, is a value of this type."""
        self._typed = typed

    def _parsed(self, text: str) -> Any:
        return text if self._typed is None else self._typed.parse(text)

    def _known_logprobs(self) -> tuple[TokenLogprobs, ...]:
        if self._logprobs is None:
            raise InvalidRequest(
                f"variable {self.id} ({self.origin}) has no log-probabilities; ask for them with "
                "P.Output(logprobs=0), or how many alternatives you want with each",
                param="logprobs",
            )
        return self._logprobs

    def to_body(self) -> VariableBody:
        """How the variable is declared to the service. Raises :class:`InvalidRequest`."""
        if self._derivation is None:
            return VariableBody(semantic_var_id=self.id, value=self._value)
        try:
            return VariableBody(
                semantic_var_id=self.id,
                sources=tuple(SourceBody(semantic_var_id=source.id) for source in self.sources),
                separator=self._derivation.separator,
                transforms=self._derivation.transforms,
            )
        except ValidationError as error:
            raise invalid(f"variable {self.id}", error) from None

    def _start_get(self, perf: Objective | None, timeout: float | None, *, eager: bool) -> Future[str]:
        check_timeout(timeout)
        if self.settled:
            ended: Future[str] = Future()
            if self._error is not None:
                ended.set_exception(error_from_info(self._error))
            else:
                ended.set_result(self._value or "")
            return ended
        return self._own_session().start_gets([self], perf, timeout, eager=eager)[0]

    def _own_session(self) -> Session:
        from .connection import session_of

        return session_of([self])

    def _derive(self, transform: type[Transform], **arguments: object) -> SemanticVariable:
        try:
            step = transform.model_validate(arguments)
        except ValidationError as error:
            raise invalid(f"{self.name}.{transform.__name__.lower()}()", error) from None
        if self._derivation is None:
            return derived(Derivation((self,), transforms=(step,)), self.name)
        whole = self._derivation
        # One chain, so that a list passes from split to item as a list and not as text.
        chain = Derivation(whole.sources, whole.separator, (*whole.transforms, step))
        return derived(chain, self.name)

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be formatted into text: pass it to a semantic function as an "
            "argument, or use .get() for its value"
        )

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} has no text yet to add to: put it into a template, by passing it to a "
            "semantic function or with .template('... {{value}}'), or use P.join"
        )

    __radd__ = __add__

    def __repr__(self) -> str:
        state = "failed" if self._error else "pending" if self._value is None else "ready"
        return f"<SemanticVariable {self.id} {state}>"


def derived(derivation: Derivation, name: str) -> SemanticVariable:
    """A new derived variable."""
    variable = SemanticVariable(name=name)
    variable._derivation = derivation
    return variable


def join(variables: Iterable[SemanticVariable | str], separator: str = "\n") -> SemanticVariable:
    """The values of many variables (or texts) as one text: the fan-in of a map-reduce."""
    sources = tuple(
        source if isinstance(source, SemanticVariable) else SemanticVariable(source) for source in variables
    )
    if not sources:
        raise ValueError("P.join needs at least one variable")
    return derived(Derivation(sources, separator), "joined")
