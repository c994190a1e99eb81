"""A session as the client sees it: what waits to be submitted, and the gets that follow.

Calls made together travel in one submit. It is sent on a get, set or cancel, or else 2 ms after its first
call or the end of a ``P.batch()``; a get puts its label into the submit that it sends, and leaves beside it:
the service holds a get that names a submit until that has come. Submits of a session go out one after the
other, so that a variable is declared before it is read. The session is created on the way by the first of
them.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future

from ..api import CallBody, CancelBody, GetBody, GetReply, SetBody, SubmitReply
from ..errors import (
    GetTimeout,
    InvalidRequest,
    ParrotError,
    SessionClosed,
    SessionNotFound,
    error_from_info,
)
from . import background
from .client import Client
from .objective import Objective
from .submission import Submission
from .variable import TRANSIENT, SemanticVariable

FLUSH_S = 0.002
_POLL_S = 20.0  # one long poll; several make up a long get
_CROWDED_POLL_S = 1.0  # when more gets wait than the client keeps connections for
_LAST_SUBMIT_S = 0.5  # how long the end of a session waits for a submit that is under way
_GRACE_S = 1.0  # what the network may add to a get's timeout


class Session:
    """Variables and calls of one application run. Thread-safe.

    A ``renewable`` session (a connection's default one) that expired is replaced under a new id, as long as
    the submit that finds out reads no variable of the old one.
    """

    def __init__(self, client: Client, *, renewable: bool) -> None:
        self.id = _new_id()
        self._client = client
        self._renewable = renewable
        self._lock = threading.Lock()
        self._order = asyncio.Lock()
        self._pending: Submission | None = None
        self._num_holds = 0
        self._deliveries: set[Future[None]] = set()
        self._created = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it ended on this side."""
        return self._closed

    def submit(
        self, call: CallBody, inputs: Sequence[SemanticVariable], outputs: Sequence[SemanticVariable]
    ) -> None:
        """Queue a call. Raises :class:`SessionClosed`, or :class:`InvalidRequest` for a bad derived input."""
        with self._lock:
            pending = self._open()
            for variable in inputs:
                self._declare(variable, pending)
            for variable in outputs:
                variable.attach(self, pending, producer=call.function)
            pending.add_call(call)
            if pending.full:
                self._flush()

    def start_gets(
        self,
        variables: Sequence[SemanticVariable],
        perf: Objective | None,
        timeout: float | None,
        *,
        eager: bool,
    ) -> list[Future[str]]:
        """Label those that the next submit carries (for others the get does it), then wait for each.

        Without ``eager`` the submit keeps its 2 ms, so that gets started together share it."""
        with self._lock:
            for variable in variables:
                if variable.submission is None:
                    self._declare(variable, self._open())
            if self._pending is not None and perf is not None:
                self._pending.label([v.id for v in variables if v.submission is self._pending], perf)
            if eager or self._num_holds:
                self._flush()
        return [background.run(self._get(variable, perf, timeout)) for variable in variables]

    def set_value(self, variable: SemanticVariable, value: str) -> None:
        """Give a declared variable its value; returns when the service has it."""
        body = SetBody(session_id=self.id, semantic_var_id=variable.id, value=value)
        self._tell(variable, "/v1/set", body)
        variable.settle(value)

    def cancel(self, variable: SemanticVariable) -> None:
        """Cancel a variable; returns when the service knows."""
        with self._lock:
            if variable.submission is None:
                self._declare(variable, self._open())
        self._tell(variable, "/v1/cancel", CancelBody(session_id=self.id, semantic_var_id=variable.id))

    def hold(self) -> None:
        """Keep calls back until :meth:`release`, or until a get needs one of them."""
        with self._lock:
            self._num_holds += 1

    def release(self) -> None:
        """End a hold. With the outermost one, what waits gets its 2 ms anew, so that the calls and the get
        that follow go with it."""
        with self._lock:
            self._num_holds -= 1
            if self._num_holds == 0 and self._pending is not None:
                self._flush_later(self._pending)

    def close(self) -> None:
        """End the session here and, without waiting, at the service."""
        work = self.end()
        if work is not None:
            background.run(work)

    def end(self) -> Coroutine[None, None, None] | None:
        """Refuse further use; returns the work of telling the service, or None if it ended before."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            unsent, self._pending = self._pending, None
        if unsent is not None:
            unsent.finish(SessionClosed(f"session {self.id} was closed before this was submitted"))
        return self._delete()

    # --- with the lock held --------------------------------------------------------------------------------

    def _open(self) -> Submission:
        if self._closed:
            raise SessionClosed(
                f"session {self.id} is closed; make calls inside its `with P.session():` block"
            )
        if self._pending is None:
            self._pending = Submission()
            self._flush_later(self._pending)
        return self._pending

    def _flush_later(self, pending: Submission) -> None:
        background.call_later(FLUSH_S, lambda: self._flush_if_still(pending))

    def _declare(self, variable: SemanticVariable, pending: Submission) -> None:
        if variable.submission is not None:
            if variable.session is not self:
                raise InvalidRequest(
                    f"variable {variable.id} belongs to session {variable.session and variable.session.id}, "
                    f"not to {self.id}; pass its value instead",
                    param=variable.id,
                )
            if variable.submission is not pending:
                pending.read(variable.submission)
            return
        for source in variable.sources:
            self._declare(source, pending)
        pending.add_variable(variable.to_body())
        variable.attach(self, pending)

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        delivery = background.run(self._deliver(pending))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    # --- on the loop ---------------------------------------------------------------------------------------

    def _flush_if_still(self, pending: Submission) -> None:
        with self._lock:
            if self._pending is pending and not self._num_holds:
                self._flush()

    async def _deliver(self, submission: Submission) -> None:
        try:
            async with self._order:
                submission.check_needs()
                await self._send(submission)
        except BaseException as error:
            submission.finish(
                error if isinstance(error, Exception) else SessionClosed("the program is ending")
            )
            if not isinstance(error, ParrotError):
                raise
        else:
            submission.finish(None)

    async def _send(self, submission: Submission) -> None:
        try:
            await self._submit(submission, create=not self._created)
        except SessionNotFound:
            if not self._renewable or submission.reads_earlier:
                raise
            self.id = _new_id()
            await self._submit(submission, create=True)
        except ParrotError:
            if not self._created:
                self.id = _new_id()  # the old one may exist at the service, without anything that we know of
            raise
        self._created = True

    async def _submit(self, submission: Submission, *, create: bool) -> None:
        body = submission.body(self.id, create)
        submission.leave()
        reply = await self._client.post("/v1/submit", body, SubmitReply, repeatable=True)
        self._client.durable = reply.durable

    async def _get(self, variable: SemanticVariable, perf: Objective | None, timeout: float | None) -> str:
        limit = None if timeout is None else timeout + _GRACE_S
        try:
            async with asyncio.timeout(limit):
                reply = await self._poll(variable, perf, timeout)
        except TimeoutError:
            raise GetTimeout(
                f"variable {variable.id} ({variable.origin}) has no value after {timeout} s; "
                "it is still pending and may be asked for again"
            ) from None
        except ParrotError as error:
            if not isinstance(error, TRANSIENT):
                variable.settle(error.to_info())
            raise
        value = reply.value or ""
        variable.settle(value, reply.logprobs)
        return value

    async def _poll(
        self, variable: SemanticVariable, perf: Objective | None, timeout: float | None
    ) -> GetReply:
        clock = asyncio.get_running_loop().time
        deadline = math.inf if timeout is None else clock() + timeout
        reply = None if timeout == 0 else await self._ask_beside(variable, perf, deadline)
        if reply is None:
            await self._until_sent(variable)
        while True:
            if reply is not None and reply.status == "ready":
                return reply
            if reply is not None and clock() >= deadline:
                raise TimeoutError
            # Once it was answered the label is known there; a target must not move with every answer.
            reply = await self._ask(variable, perf if reply is None else None, deadline)

    async def _ask_beside(
        self, variable: SemanticVariable, perf: Objective | None, deadline: float
    ) -> GetReply | None:
        """The answer to a get that leaves together with its variable's submit. None: there was no such get,
        or none that counts, since the submit was refused or went to another session, or the get itself has
        failed, which its submit may explain. The variable is then asked for when that was answered."""
        submission = variable.submission
        if submission is None or submission.sent.done():
            return None
        await background.outcome(submission.left)
        session_id = self.id
        asked = asyncio.ensure_future(self._ask(variable, perf, deadline, beside=submission))
        taken = asyncio.ensure_future(submission.taken())
        try:
            await asyncio.wait((asked, taken), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and not (taken.result() and self.id == session_id):
                return None
            return await asked
        except ParrotError:
            return None
        finally:
            asked.cancel()
            taken.cancel()

    async def _ask(
        self,
        variable: SemanticVariable,
        label: Objective | None,
        deadline: float,
        *,
        beside: Submission | None = None,
    ) -> GetReply:
        """One long poll. ``beside`` its submit it is not repeated: what went wrong may be known when that was
        answered."""
        left_s = deadline - asyncio.get_running_loop().time()
        wait_s = min(_CROWDED_POLL_S if self._client.crowded else _POLL_S, max(0.0, left_s))
        body = GetBody(
            session_id=self.id,
            semantic_var_id=variable.id,
            submit_id=None if beside is None else beside.id,
            criteria=None if label is None else label.criteria,
            target_ms=None if label is None else label.target_ms,
            timeout_ms=math.ceil(wait_s * 1000),
        )
        return await self._client.post("/v1/get", body, GetReply, wait_s=wait_s, repeatable=beside is None)

    async def _until_sent(self, variable: SemanticVariable) -> None:
        submission = variable.submission
        if submission is None:
            return
        try:
            await background.outcome(submission.sent)
        except ParrotError as error:
            info = submission.error_for(variable.producer, error)
            variable.settle(info)
            raise error_from_info(info) from None

    def _tell(self, variable: SemanticVariable, path: str, body: SetBody | CancelBody) -> None:
        with self._lock:
            self._flush()
        background.wait(background.run(self._send_after(variable, path, body)))

    async def _send_after(self, variable: SemanticVariable, path: str, body: SetBody | CancelBody) -> None:
        await self._until_sent(variable)
        await self._client.send("POST", path, body, repeatable=True)

    async def _delete(self) -> None:
        try:
            async with asyncio.timeout(_LAST_SUBMIT_S), self._order:
                pass
        except TimeoutError:
            for delivery in list(self._deliveries):
                delivery.cancel()
        if self._created:
            await self._client.send("DELETE", f"/v1/session/{self.id}")


class Batch:
    """``with P.batch():`` - calls made inside travel together: with a get inside that needs them, or else,
    once the block has ended, with the get that follows or after 2 ms. What the service refuses surfaces at a
    get."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> Batch:
        self._session.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._session.release()


def _new_id() -> str:
    return f"s-{secrets.token_hex(16)}"
