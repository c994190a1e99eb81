"""A submit that is being checked: everything it would add, beside the graph and not yet in it.

Nothing here touches the graph, so that a submit is taken whole or refused whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from ..api import CallBody, LabelBody, PlaceholderBody, SubmitBody, VariableBody
from ..config import ManagerConfig
from ..errors import DoubleProducer, DuplicateRequest, InvalidRequest, RequestTooLarge, VariableNotFound
from ..wire import CallId
from .call import Call, Timing
from .cycles import checking_cycles
from .demand import Demand
from .holes import CallShape, shaping_call
from .prompt_table import ParsedPrompt, PromptTable
from .tenants import public_id
from .transforms import compiling_chain
from .value_bytes import size_of
from .variable import Derivation, Source, Variable


@dataclass(frozen=True, slots=True)
class Setting:
    """What a call inherits from its session. ``call_ids`` never repeats one; ``prompts`` serves all
    sessions."""

    session_id: str
    domain: int
    config: ManagerConfig
    call_ids: Iterator[CallId]
    prompts: PromptTable


@dataclass(slots=True)
class Draft:
    """``producers``, ``derivations`` and ``values`` say where variables, new or old, come from."""

    variables: dict[str, Variable] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    producers: dict[Variable, tuple[Call, int]] = field(default_factory=dict)
    derivations: dict[Variable, Derivation] = field(default_factory=dict)
    values: dict[Variable, str] = field(default_factory=dict)
    demands: dict[Variable, Demand] = field(default_factory=dict)  # all labels of a variable as one
    num_value_bytes: int = 0  # of values and of constants of inputs
    reaches_old: bool = False  # a variable of an earlier submit gets its origin in this one


def check_value_size(value: str, what: str, config: ManagerConfig) -> None:
    """Raise :class:`RequestTooLarge` for a value above the limit."""
    limit = config.max_value_bytes
    if len(value) > limit or (4 * len(value) > limit and len(value.encode()) > limit):
        raise RequestTooLarge(f"{what}: the value is above the limit of {limit} bytes", param="value")


def drafting(
    body: SubmitBody,
    *,
    setting: Setting,
    variables: Mapping[str, Variable],
    live: Mapping[str, Call],
    now_us: int,
) -> Generator[None, None, Draft]:
    """Check a submit against the graph's ``variables`` and ``live`` calls.

    It yields between calls, and while one is taken apart (:mod:`parrot.manager.slices`). What other requests
    did to the graph in the meantime is looked at before it ends, and must not change between that and
    :meth:`Graph.add`'s insertion.
    Raises the typed errors of a bad request, naming function, placeholder or variable.
    """
    return _Drafter(setting, variables, live, now_us).building(body)


class _Drafter:
    def __init__(
        self, setting: Setting, variables: Mapping[str, Variable], live: Mapping[str, Call], now_us: int
    ) -> None:
        self._setting = setting
        self._old = variables
        self._live = live
        self._now_us = now_us
        self._draft = Draft()
        self._claimed: set[Variable] = set()
        self._request_ids: set[str] = set()

    def building(self, body: SubmitBody) -> Generator[None, None, Draft]:
        limit = self._setting.config.max_calls_per_submit
        if len(body.calls) > limit:
            raise RequestTooLarge(f"{len(body.calls)} calls are above the limit of {limit} per submit")
        for variable in body.variables:
            self._declare(variable)
            yield
        outputs = []
        for call in body.calls:
            outputs.append(self._declare_placeholders(call))
            yield
        for variable in body.variables:
            yield from self._derive(variable)
            yield
        for call, output_vars in zip(body.calls, outputs, strict=True):
            yield from self._add_call(call, output_vars)
            yield
        for label in body.labels:
            self._label(label)
            yield
        yield from checking_cycles(self._draft)
        self._check_again()
        return self._draft

    def _check_again(self) -> None:
        """Other submits of the session, and values that were set, may have come in between."""
        for var_id in self._draft.variables:
            if var_id in self._old:
                raise DoubleProducer(f"variable {var_id} was made by another submit meanwhile", param=var_id)
        for variable in self._claimed:
            if variable.has_origin:
                raise DoubleProducer(describe_origin(variable), param=variable.id)
        for request_id in self._request_ids:
            self._check_request_id(request_id, request_id)

    # --- variables ---

    def _declare(self, body: VariableBody) -> None:
        variable = self._find_or_make(body.semantic_var_id)
        if body.value is None and body.sources is None:
            if body.transforms:
                raise InvalidRequest(f"variable {variable.id} has transforms, but no sources")
            return
        self._claim(variable)
        if body.value is not None:
            if body.transforms:
                raise InvalidRequest(f"variable {variable.id} has transforms, but no sources")
            self._set(variable, body.value)

    def _declare_placeholders(self, body: CallBody) -> dict[str, Variable]:
        """Variables that the call brings along; returns those of its outputs by name."""
        outputs: dict[str, Variable] = {}
        for placeholder in body.placeholders:
            if placeholder.kind == "output":
                variable = self._find_or_make(placeholder.semantic_var_id or f"v-{secrets.token_hex(8)}")
                self._claim(variable)
                outputs[placeholder.name] = variable
            elif placeholder.value is not None:
                self._declare_input(placeholder, placeholder.value)
        return outputs

    def _declare_input(self, placeholder: PlaceholderBody, value: str) -> None:
        if placeholder.semantic_var_id is None:
            check_value_size(value, f"input {placeholder.name!r}", self._setting.config)
            self._draft.num_value_bytes += size_of(value)
            return
        variable = self._find_or_make(placeholder.semantic_var_id)
        self._claim(variable)
        self._set(variable, value)

    def _derive(self, body: VariableBody) -> Generator[None, None, None]:
        if body.sources is None:
            return
        variable = self._find(body.semantic_var_id)
        where = f"variable {variable.id}"
        sources = []
        for number, source in enumerate(body.sources, start=1):
            chain = yield from compiling_chain(source.transforms, where=f"{where}, source {number}")
            sources.append(Source(self._find(source.semantic_var_id), chain))
            yield
        chain = yield from compiling_chain(body.transforms, where=where)
        self._draft.derivations[variable] = Derivation(tuple(sources), body.separator, chain)

    def _set(self, variable: Variable, value: str) -> None:
        check_value_size(value, f"variable {variable.id}", self._setting.config)
        self._draft.num_value_bytes += size_of(value)
        self._draft.values[variable] = value

    def _label(self, label: LabelBody) -> None:
        variable, demands = self._find(label.semantic_var_id), self._draft.demands
        demand = Demand.of(label.criteria, label.target_ms, now_us=self._now_us)
        known = demands.get(variable)
        demands[variable] = demand if known is None else known.merge(demand)

    def _find_or_make(self, var_id: str) -> Variable:
        known = self._old.get(var_id) or self._draft.variables.get(var_id)
        if known is None:
            known = self._draft.variables[var_id] = Variable(var_id)
        return known

    def _find(self, var_id: str) -> Variable:
        known = self._draft.variables.get(var_id) or self._old.get(var_id)
        if known is None:
            raise VariableNotFound(
                f"no variable {var_id!r} in session {public_id(self._setting.session_id)}", param=var_id
            )
        return known

    def _claim(self, variable: Variable) -> None:
        """The variable gets its one origin."""
        if variable in self._claimed or variable.has_origin:
            raise DoubleProducer(describe_origin(variable), param=variable.id)
        self._claimed.add(variable)
        if variable.id in self._old:
            self._draft.reaches_old = True

    # --- calls ---

    def _add_call(self, body: CallBody, output_vars: dict[str, Variable]) -> Generator[None, None, None]:
        request_id = self._take_request_id(body)
        where = body.function or request_id
        prompt = self._setting.prompts.get(body, where=where, domain=self._setting.domain)
        shape = yield from shaping_call(
            body,
            prompt,
            where=where,
            input_var=self._find,
            output_vars=output_vars,
            max_tokens=self._setting.config.default_max_tokens,
        )
        for placeholder in body.placeholders:
            if placeholder.kind == "input" and placeholder.semantic_var_id is not None:
                self._find(placeholder.semantic_var_id)
        call = self._make_call(body, request_id, prompt, shape)
        for step in call.steps:
            self._draft.producers[step.output.binding.variable] = (call, step.index)
        self._draft.calls.append(call)

    def _take_request_id(self, body: CallBody) -> str:
        request_id = body.request_id or f"r-{secrets.token_hex(8)}"
        self._check_request_id(request_id, body.function or "a call")
        if request_id in self._request_ids:
            raise DuplicateRequest(
                f"{body.function or 'a call'}: request_id {request_id!r} appears twice", param="request_id"
            )
        self._request_ids.add(request_id)
        return request_id

    def _check_request_id(self, request_id: str, where: str) -> None:
        if request_id in self._live:
            raise DuplicateRequest(
                f"{where}: request_id {request_id!r} is in use by a live call", param="request_id"
            )

    def _make_call(self, body: CallBody, request_id: str, prompt: ParsedPrompt, shape: CallShape) -> Call:
        return Call(
            call_id=next(self._setting.call_ids),
            request_id=request_id,
            session_id=self._setting.session_id,
            function=body.function,
            model=body.model,
            domain=self._setting.domain,
            roles=prompt.roles,
            steps=tuple(shape.steps),
            inputs=shape.inputs,
            outputs=shape.outputs,
            demand=body.objective and Demand.of(body.objective, body.target_ms, now_us=self._now_us),
            timing=Timing(self._now_us),
        )


def describe_origin(variable: Variable) -> str:
    """Why a variable can take no second producer or value."""
    if not variable.pending:
        return f"variable {variable.id} has ended already ({variable.state})"
    if variable.producer is not None:
        return f"variable {variable.id} is an output of {variable.producer.name} already"
    if variable.derivation is not None:
        return f"variable {variable.id} is derived from others already"
    return f"variable {variable.id} would get two producers or values in one submit"
