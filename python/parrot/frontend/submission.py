"""What one request to ``/v1/submit`` carries: variables, calls and labels gathered until it is sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..api import CallBody, LabelBody, SubmitBody, VariableBody
from ..errors import ErrorInfo, ParrotError, UpstreamFailed
from . import background
from .objective import Objective

MAX_CALLS = 4096  # the service takes no more in one submit
MAX_CHARS = 8 * 2**20  # of prompts and values; well below the service's 32 MiB of JSON


@dataclass(eq=False, slots=True)
class Submission:
    """One submit, open until it is sent; by its ``id`` it can be sent again if the answer was lost. ``left``
    ends when it is on its way, ``sent`` when the service has taken or refused it; ``needs`` are earlier
    submits, not taken yet, whose variables it reads; ``reads_earlier`` tells whether it reads any variable of
    an earlier submit."""

    variables: list[VariableBody] = field(default_factory=list)
    calls: list[CallBody] = field(default_factory=list)
    labels: dict[str, Objective] = field(default_factory=dict)
    needs: set[Submission] = field(default_factory=set)
    reads_earlier: bool = False
    left: Future[None] = field(default_factory=Future)
    sent: Future[None] = field(default_factory=Future)
    num_chars: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def full(self) -> bool:
        """Whether it should be sent before more is added."""
        return len(self.calls) >= MAX_CALLS or self.num_chars >= MAX_CHARS

    def add_variable(self, body: VariableBody) -> None:
        """Declare a variable."""
        self.variables.append(body)
        self.num_chars += len(body.value or "")

    def add_call(self, body: CallBody) -> None:
        """Add a call; its variables are declared before it."""
        self.calls.append(body)
        self.num_chars += len(body.prompt or "") + sum(len(m.content) for m in body.messages or ())
        self.num_chars += sum(len(p.value or "") for p in body.placeholders)

    def label(self, variable_ids: Iterable[str], perf: Objective) -> None:
        """Label variables declared here."""
        self.labels.update((variable_id, perf) for variable_id in variable_ids)

    def read(self, earlier: Submission) -> None:
        """Note that a variable of an earlier submit is read here."""
        self.reads_earlier = True
        if not earlier.sent.done() or earlier.sent.exception() is not None:
            self.needs.add(earlier)

    async def taken(self) -> bool:
        """Wait until the service has taken it; False if it was refused."""
        try:
            await background.outcome(self.sent)
        except Exception:  # for those who ask for it
            return False
        return True

    def leave(self) -> None:
        """Wake who waits for it to be on its way."""
        if not self.left.done():
            self.left.set_result(None)

    def finish(self, error: BaseException | None) -> None:
        """Wake who waits for the answer, and drop what was sent."""
        self.leave()
        if error is None:
            self.sent.set_result(None)
        else:
            self.sent.set_exception(error)
        self.variables, self.calls, self.labels, self.needs = [], [], {}, set()

    def body(self, session_id: str, create_session: bool) -> SubmitBody:
        """The request body."""
        return SubmitBody(
            session_id=session_id,
            submit_id=self.id,
            create_session=create_session,
            variables=tuple(self.variables),
            calls=tuple(self.calls),
            labels=tuple(
                LabelBody(semantic_var_id=name, criteria=perf.criteria, target_ms=perf.target_ms)
                for name, perf in self.labels.items()
            ),
        )

    def check_needs(self) -> None:
        """Raise :class:`UpstreamFailed` if a submit that this one builds on was refused."""
        for earlier in self.needs:
            error = earlier.sent.exception() if earlier.sent.done() else None
            if isinstance(error, ParrotError):
                raise UpstreamFailed(
                    f"an earlier submit, whose variables are read here, failed: {error.message}",
                    causes=(error.to_info(), *error.causes),
                )

    def error_for(self, producer: str | None, error: ParrotError) -> ErrorInfo:
        """``error``, which refused the whole submit, as seen by a variable that ``producer`` would fill."""
        info = error.to_info()
        if producer is None:
            return info
        message = f"function {producer!r} did not start: {error.message}"
        return ErrorInfo(info.code, message, info.param, info.causes)
