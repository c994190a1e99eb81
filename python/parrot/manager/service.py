"""What a client can ask for: sessions with their graphs, and one-call sessions for the OpenAI routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from pathlib import Path

from .. import api
from ..errors import (
    Cancelled,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    ParrotError,
    RequestTooLarge,
    ServiceStopping,
    SessionClosed,
)
from ..garbage import IdleCollector
from ..grammars import unconstrainable
from ..tokenizer import EncodedPrompt, Piece, TokenBytes
from .call import Call
from .clock import now_s, now_us
from .early_gets import EarlyGets, SubmitKey
from .executor import Executor
from .holes import make_grammar
from .journal import Journal
from .key_watch import KeyWatch
from .logprobs import read_logprobs, to_body
from .recovery import recover
from .session import SessionTable
from .single import Pieces, SingleCall
from .slices import run_in_slices, run_whole
from .tenants import DEFAULT_TENANT, public_id
from .variable import Variable
from .views import graph_view

log = logging.getLogger(__name__)
_THREAD_CHARS = 16 * 1024
_SWEEP_S = 5.0


class Service:
    """Requests in; answers, or a :class:`ParrotError`, out. Lives on the loop."""

    def __init__(self, executor: Executor, journal: Journal | None = None) -> None:
        self.executor = executor
        self.journal = journal
        if journal is not None:
            executor.refusal_type = ServiceStopping
        self.config = executor.config
        self.token_bytes = TokenBytes(executor.prompts.tokenizer.backend)
        self.tenants = executor.tenants
        self._sessions = SessionTable(self.config, self.tenants, journal=journal, may_defer=True)
        self._idle_collector = IdleCollector()
        self.recovered = asyncio.Event()  # what is about sessions waits for it
        if journal is None:
            self.recovered.set()
        self._submitting: dict[tuple[str, str], asyncio.Future[None]] = {}  # the last one of each session
        self._early_gets = EarlyGets()
        self._sweep: asyncio.TimerHandle | None = None
        path = self.config.api_keys
        self.key_watch = None if path is None else KeyWatch(path, self.tenants, executor.background)

    @property
    def num_sessions(self) -> int:
        """Live ones, detached ones left out."""
        return len(self._sessions)

    def start(self) -> None:
        """Begin to expire sessions, and to follow the file of API keys."""
        if self.key_watch is not None:
            self.key_watch.start()
        self._sweep_later()

    def _sweep_later(self) -> None:
        interval_s = min(_SWEEP_S, self.config.session_idle_s / 4)
        self._sweep = asyncio.get_running_loop().call_later(interval_s, self._expire)

    async def recover(self) -> None:
        """Take up the sessions on record where they were. Raises :class:`JournalError`."""
        if self.journal is not None:
            await recover(self.journal, self._sessions, self.executor)
            self.journal.start()
        self.recovered.set()

    async def saved(self) -> None:
        """Wait until all that was taken so far survives this process. Raises :class:`JournalUnavailable`."""
        if self.journal is not None:
            await self.journal.committed(self.journal.last_ticket)

    def check_open(self, num_calls: int = 0) -> None:
        """Raise :class:`Unavailable` or :class:`Overloaded` if so many calls cannot be taken now."""
        self.executor.check_open(num_calls)
        if self.journal is not None:
            self.journal.check()

    def close(self) -> None:
        """End everything that is pending with :class:`Unavailable`."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self.key_watch is not None:
            self.key_watch.close()
        self.executor.refusal = self.executor.refusal or "the service has ended"
        refusal = self.executor.refusal_type(self.executor.refusal).to_info()
        self.executor.close_all(refusal)
        self._early_gets.close(refusal)
        self.executor.deferrals.close()

    def _expire(self) -> None:
        self._sweep_later()
        background = self.executor.background
        with background.guarded("session-expiry"):
            for session in self._sessions.take_idle():
                log.info("session %s expired", session.session_id)
                with background.guarded("session-expiry"):
                    self.executor.close(session, SessionClosed("the session expired").to_info())
            num_ended = self.executor.counts.by_state.total()
            num_busy = self.executor.dispatcher.num_busy + len(self._submitting)
            self._idle_collector.sweep(num_ended, num_busy)

    # --- sessions ---

    def create_session(
        self, session_id: str | None = None, *, tenant: str = DEFAULT_TENANT, by_submit: bool = False
    ) -> api.SessionReply:
        """A new session, with an id of the client's choice or a random one. ``by_submit``: see
        :meth:`SessionRecorder.opened`."""
        self.check_open()
        session = self._sessions.create(session_id, tenant=tenant, by_submit=by_submit)
        self.executor.open(session)
        shown = public_id(session.session_id)
        return api.SessionReply(session_id=shown, idle_s=self.config.session_idle_s)

    def delete_session(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """End a session: what is pending in it ends with :class:`SessionClosed`, its contexts are freed."""
        session = self._sessions.remove(session_id, tenant=tenant)
        if self.executor.is_open(session):  # not once the service has ended
            self.executor.close(session, SessionClosed("the session was deleted").to_info())

    def submit(self, body: api.SubmitBody, *, tenant: str = DEFAULT_TENANT) -> api.SubmitReply:
        """:meth:`submitting` without a pause."""
        return run_whole(self.submitting(body, tenant=tenant))

    async def submit_in_slices(
        self, body: api.SubmitBody, *, tenant: str = DEFAULT_TENANT
    ) -> api.SubmitReply:
        """:meth:`submitting` in slices of the loop's time, after the session's earlier submits: one that
        comes again while its first copy is being checked must find that taken."""
        key = (tenant, body.session_id)
        submit = SubmitKey(*key, body.submit_id or "")
        before = self._submitting.get(key)
        ended = self._submitting[key] = asyncio.get_running_loop().create_future()
        try:
            if before is not None:
                await asyncio.wait((before,))
            reply = await run_in_slices(self.submitting(body, tenant=tenant))
            self._early_gets.wake(submit)
            return reply
        except ParrotError as refusal:
            self._early_gets.wake(submit, refusal.to_info())
            raise
        finally:
            ended.set_result(None)
            if self._submitting[key] is ended:
                del self._submitting[key]

    def submitting(
        self, body: api.SubmitBody, *, tenant: str = DEFAULT_TENANT
    ) -> Generator[None, None, api.SubmitReply]:
        """Take in variables, calls and labels, whole or not at all; yields while they are checked."""
        limit = self.config.max_calls_per_submit
        if len(body.calls) > limit:
            raise RequestTooLarge(
                f"{len(body.calls)} calls in one submit, the limit is {limit}", param="calls"
            )
        taken_before = self._taken_before(body, tenant)
        if taken_before is not None:
            return taken_before
        self.check_open(len(body.calls))
        self.tenants.get(tenant).check_calls(len(body.calls))
        for call in body.calls:
            self.check_model(call.model)
            self._refuse_hopeless(call, tenant)
            for placeholder in call.placeholders:
                if placeholder.sampling is not None:
                    _refuse_prompt_logprobs(placeholder.sampling)
                    self.check_sampling(placeholder.sampling)
            yield
        if body.create_session:
            self.create_session(body.session_id, tenant=tenant, by_submit=True)
        session = self._sessions.get(body.session_id, tenant=tenant)
        try:
            calls = yield from self.executor.adding(self.executor.application_of(session), body)
        except ParrotError:
            if body.create_session and self.executor.is_open(session):
                self.delete_session(body.session_id, tenant=tenant)
            raise
        reply = self._submit_reply(body.session_id, calls)
        yield
        return reply

    def _refuse_hopeless(self, call: api.CallBody, tenant: str) -> None:
        """Raise :class:`PromptTooLong` for a prompt whose constants alone are too long. Holes are no text:
        only where they could matter is the template parsed for it."""
        limits, builder = self.executor.dispatcher.limits, self.executor.prompts
        if limits is None or not builder.is_hopeless(_num_template_chars(call), limits):
            return
        domain = self.tenants.get(tenant).number
        prompt = self._sessions.prompts.get(call, where=call.function or "a call", domain=domain)
        builder.refuse_hopeless(prompt.num_constant_chars, limits, call.function or "")

    def _taken_before(self, body: api.SubmitBody, tenant: str) -> api.SubmitReply | None:
        """The answer to a submit that came before, if its ``submit_id`` says that this one did."""
        if body.submit_id is None:
            return None
        session = self._sessions.find(body.session_id, tenant=tenant)
        calls = session.graph.submits.get(body.submit_id) if session is not None else None
        if calls is None:
            return None
        is_same = len(calls) == len(body.calls) and all(
            asked.request_id in (None, call.request_id) and asked.function == call.function
            for asked, call in zip(body.calls, calls, strict=True)
        )
        if not is_same:
            raise DuplicateRequest(
                f"submit_id {body.submit_id!r} is that of another submit of this session", param="submit_id"
            )
        return self._submit_reply(body.session_id, calls)

    def _submit_reply(self, session_id: str, calls: Sequence[Call]) -> api.SubmitReply:
        return api.SubmitReply(
            session_id=session_id, calls=tuple(map(_submitted, calls)), durable=self.journal is not None
        )

    async def get(self, body: api.GetBody, *, tenant: str = DEFAULT_TENANT) -> api.GetReply:
        """Wait for a variable; raises its typed error if it failed."""
        until = None if body.timeout_ms is None else now_s() + body.timeout_ms / 1000
        await self._until_submitted(body, tenant)
        session = self._sessions.get(body.session_id, tenant=tenant)
        variable = session.graph.variable(body.semantic_var_id)
        if body.criteria is not None and self.executor.is_open(session):
            session.graph.label(variable.id, body.criteria, target_ms=body.target_ms, now_us=now_us())
            self.executor.relabel(self.executor.application_of(session))
        with session.in_use():
            ended = await variable.wait(None if until is None else max(0.0, until - now_s()))
            if session.recorder is not None:
                await session.recorder.committed()
        if not ended:
            return api.GetReply(semantic_var_id=variable.id, status="pending")
        value = variable.result()
        logprobs = self._logprobs(variable)
        return api.GetReply(semantic_var_id=variable.id, status="ready", value=value, logprobs=logprobs)

    async def _until_submitted(self, body: api.GetBody, tenant: str) -> None:
        """Wait for the submit that a get names, unless it has come."""
        if body.submit_id is None:
            return
        session = self._sessions.find(body.session_id, tenant=tenant)
        if session is None or body.submit_id not in session.graph.submits:
            self.check_open()
            submit = SubmitKey(tenant, body.session_id, body.submit_id)
            await self._early_gets.wait(submit, body.timeout_ms)

    def _logprobs(self, variable: Variable) -> tuple[api.TokenLogprobs, ...] | None:
        """Of what the variable's producer generated, if that was asked for."""
        if variable.producer is None:
            return None
        logprobs = variable.producer.steps[variable.producer_step].output.binding.logprobs
        return None if logprobs is None else to_body(read_logprobs(logprobs, self.token_bytes))

    def set_value(self, body: api.SetBody, *, tenant: str = DEFAULT_TENANT) -> None:
        """A value from outside."""
        self.check_open()
        graph = self._sessions.get(body.session_id, tenant=tenant).graph
        self.executor.apply(graph.set_value(body.semantic_var_id, body.value))
        self.executor.turn()

    def cancel(self, body: api.CancelBody, *, tenant: str = DEFAULT_TENANT) -> None:
        """Cancel a variable, and stop what nobody else needs."""
        graph = self._sessions.get(body.session_id, tenant=tenant).graph
        changes = graph.cancel(body.semantic_var_id)
        if changes.stopped:
            log.info("variable %s was cancelled, %d calls stop", body.semantic_var_id, len(changes.stopped))
        self.executor.apply(changes)
        self.executor.turn()

    def graph(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> api.GraphReply:
        """The session's calls and variables."""
        return graph_view(self._sessions.get(session_id, tenant=tenant).graph)

    def check_model(self, name: str | None) -> None:
        """Raise :class:`ModelNotFound` for a model not served here; the last part of a path will do."""
        if name not in (None, self.config.model, Path(self.config.model).name):
            raise ModelNotFound(
                f"model {name!r:.100} is not served here; {self.config.model!r} is", param="model"
            )

    def check_sampling(self, sampling: api.SamplingBody, *, grammar_param: str | None = None) -> None:
        """Raise :class:`InvalidRequest` for an id outside the vocabulary, and for a constraint where the
        tokenizer cannot do any (``grammar_param``: its name, else its kind)."""
        tokenizer = self.executor.prompts.tokenizer
        grammar = make_grammar(sampling)
        if grammar is not None and not tokenizer.can_constrain:
            raise unconstrainable(grammar, param=grammar_param)
        vocab_size = tokenizer.vocab_size
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{name}: token id {wrong} is outside the vocabulary [0, {vocab_size}); leave it out",
                    param=name,
                )

    # --- one-call sessions ---

    async def encode(
        self, prompt: Sequence[Piece] | Sequence[int], max_tokens: int, *, tenant: str = DEFAULT_TENANT
    ) -> EncodedPrompt:
        """Ids of a tenant's prompt, checked against model and cache. Raises :class:`PromptTooLong`."""
        fill = await self._encode(prompt, self.tenants.get(tenant).number)
        if not len(fill.token_ids):
            raise InvalidRequest("the prompt is empty", param="prompt")
        limits = self.executor.dispatcher.limits
        if limits is not None:
            limits.check(len(fill.token_ids), max_tokens)
        return fill

    async def _encode(self, prompt: Sequence[Piece] | Sequence[int], domain: int) -> EncodedPrompt:
        builder, limits = self.executor.prompts, self.executor.dispatcher.limits
        pieces = [piece for piece in prompt if isinstance(piece, Piece)]
        if len(pieces) < len(prompt):
            return builder.from_ids([token for token in prompt if isinstance(token, int)])
        num_chars = sum(len(piece.text) for piece in pieces)
        if limits is not None:
            builder.refuse_hopeless(num_chars, limits)
        if num_chars > _THREAD_CHARS:  # unless most of it is known from other prompts
            num_chars = builder.num_new_chars([pieces], first_step=0, domain=domain)
        if num_chars > _THREAD_CHARS:
            return (await asyncio.to_thread(builder.encode, [pieces], first_step=0, domain=domain))[0]
        return builder.encode([pieces], first_step=0, domain=domain)[0]

    def start_singles(
        self,
        asked: Sequence[tuple[EncodedPrompt, api.SamplingBody]],
        pieces: Pieces,
        *,
        stream: bool,
        tenant: str = DEFAULT_TENANT,
    ) -> list[SingleCall]:
        """Run latency-bound calls outside any session; :meth:`end_single` must follow for each.

        A prompt that several have is computed once by an engine that runs several of them: each forks the
        context of the first."""
        self.executor.check_open(len(asked), num_ready=len(asked))
        self.tenants.get(tenant).check_calls(len(asked))
        singles = []
        for index, (fill, sampling) in enumerate(asked):
            session = self._sessions.create_detached(tenant=tenant)
            single = SingleCall(session, pieces, index=index, stream=stream)
            self._start_single(single, fill, sampling)
            singles.append(single)
        return singles

    def _start_single(self, single: SingleCall, fill: EncodedPrompt, sampling: api.SamplingBody) -> None:
        session = single.session
        output = api.PlaceholderBody(name="output", kind="output", sampling=sampling)
        call = api.CallBody(prompt="{{output}}", placeholders=(output,), objective="LATENCY")
        body = api.SubmitBody(session_id=public_id(session.session_id), calls=(call,))
        self.executor.add(self.executor.open(session, single), body, fill)

    def end_single(self, single: SingleCall) -> None:
        """Forget the call; if it still runs, its client has left, and it stops within one engine step."""
        if not self.executor.is_open(single.session):
            return
        if not single.call.ended:
            log.info("client left, call %s stops", single.call.request_id)
        self.executor.close(single.session, Cancelled("the client left").to_info())


def _num_template_chars(call: api.CallBody) -> int:
    """Characters of a prompt as it was written, holes and what no output follows included."""
    return len(call.prompt or "") + sum(len(message.content) for message in call.messages or ())


def _submitted(call: Call) -> api.SubmittedCall:
    outputs = {name: binding.variable.id for name, binding in call.outputs.items()}
    return api.SubmittedCall(request_id=call.request_id, outputs=outputs)


def _refuse_prompt_logprobs(sampling: api.SamplingBody) -> None:
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not possible in a session; ask /v1/completions with echo and logprobs",
            param="prompt_logprobs",
        )
