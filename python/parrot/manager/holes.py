"""From the template and bindings of one submitted call to its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from ..api import CallBody, PlaceholderBody, SamplingBody
from ..errors import InvalidRequest, TemplateError, UnknownPlaceholder
from ..template import Constant, Hole, Segment, no_output_reason, parse_template
from ..wire import Grammar, Sampling
from .call import InputBinding, InputPart, OutputBinding, OutputPart, Step, TextPart
from .transforms import compile_chain
from .variable import Variable

Resolve = Callable[[str], Variable]


@dataclass(slots=True)
class CallShape:
    """The steps of a call and its bindings by name; inputs that no output comes after are left out."""

    steps: list[Step] = field(default_factory=list)
    inputs: dict[str, InputBinding] = field(default_factory=dict)
    outputs: dict[str, OutputBinding] = field(default_factory=dict)


def shape_call(
    body: CallBody, *, where: str, input_var: Resolve, output_vars: dict[str, Variable], max_tokens: int
) -> CallShape:
    """Cut a call into steps. ``input_var`` finds an input's variable by id (or raises VariableNotFound);
    ``output_vars`` has the variable of each output placeholder; ``max_tokens`` is the default of an output.

    Raises :class:`TemplateError`, :class:`UnknownPlaceholder`, :class:`TransformError` or
    :class:`InvalidRequest` naming ``where``, the placeholder and the line.
    """
    return _Shaper(body, where, input_var, output_vars, max_tokens).shape()


class _Shaper:
    def __init__(
        self,
        body: CallBody,
        where: str,
        input_var: Resolve,
        output_vars: dict[str, Variable],
        max_tokens: int,
    ) -> None:
        self._body = body
        self._where = where
        self._segments = _parse(body, where)
        self._input_var = input_var
        self._output_vars = output_vars
        self._max_tokens = max_tokens
        self._inputs = _by_name(body, "input", where)
        self._outputs = _by_name(body, "output", where)
        self._shape = CallShape()

    def shape(self) -> CallShape:
        self._check_names()
        waiting: list[tuple[Segment, int]] = []
        for segment, message in self._segments:
            if isinstance(segment, Hole) and segment.kind == "output":
                self._add_step(waiting, segment, message)
                waiting = []
            else:
                waiting.append((segment, message))
        return self._shape

    def _check_names(self) -> None:
        holes = [(hole, message) for hole, message in self._segments if isinstance(hole, Hole)]
        outputs = {hole.name for hole, _ in holes if hole.kind == "output"}
        if not outputs:
            messages = self._body.messages or ()
            text = "\n".join([self._body.prompt or "", *(message.content for message in messages)])
            raise TemplateError(f"{self._where}: {no_output_reason(text)}")
        inputs = {hole.name for hole, _ in holes if hole.kind == "input"}
        bound = {"input": self._inputs.keys() | outputs, "output": self._outputs.keys()}
        for hole, message in holes:
            if hole.name not in bound[hole.kind]:
                place = _place(self._body, self._where, message)
                raise UnknownPlaceholder(
                    f"{place}, line {hole.line}: {{{{{hole.kind}:{hole.name}}}}} has no binding",
                    param=hole.name,
                )
        unused = [("input", name) for name in self._inputs if name not in inputs]
        unused += [("output", name) for name in self._outputs if name not in outputs]
        for kind, name in unused:
            raise UnknownPlaceholder(
                f"{self._where}: {kind} {name!r} is bound, but the template has no {{{{{kind}:{name}}}}}",
                param=name,
            )

    def _add_step(self, waiting: list[tuple[Segment, int]], hole: Hole, message: int) -> None:
        index = len(self._shape.steps)
        parts: list[TextPart | InputPart] = []
        for segment, of_message in waiting:
            if isinstance(segment, Constant):
                parts.append(TextPart(segment.text, of_message))
            else:
                parts.append(InputPart(self._input(segment.name, index), of_message))
        binding = self._output(hole.name)
        self._shape.outputs[hole.name] = binding
        self._shape.steps.append(Step(index, tuple(parts), OutputPart(binding, message)))

    def _input(self, name: str, step: int) -> InputBinding:
        known = self._shape.inputs.get(name)
        if known is not None:
            return known
        placeholder = self._inputs.get(name)
        where = f"{self._where}, input {name!r}"
        chain = compile_chain(placeholder.transforms if placeholder else (), where=where)
        own = self._shape.outputs.get(name)
        if own is not None:
            variable: Variable | None = own.variable
            if placeholder and (placeholder.value is not None or placeholder.semantic_var_id):
                raise InvalidRequest(f"{where} reads the output of that name; bind nothing else", param=name)
        else:
            variable = self._named_input(placeholder, where)
        constant = placeholder.value if placeholder and variable is None else None
        binding = InputBinding(name, variable, chain, step, constant)
        self._shape.inputs[name] = binding
        return binding

    def _named_input(self, placeholder: PlaceholderBody | None, where: str) -> Variable | None:
        """The variable that an input placeholder names, or None for a constant."""
        if placeholder is not None and placeholder.semantic_var_id is not None:
            return self._input_var(placeholder.semantic_var_id)
        if placeholder is None or placeholder.value is None:
            raise InvalidRequest(f"{where} needs a semantic_var_id or a value")
        return None

    def _output(self, name: str) -> OutputBinding:
        placeholder = self._outputs[name]
        chain = compile_chain(placeholder.transforms, where=f"{self._where}, output {name!r}")
        sampling = make_sampling(placeholder.sampling or SamplingBody(), self._max_tokens)
        return OutputBinding(name, self._output_vars[name], chain, sampling)


def make_sampling(body: SamplingBody, max_tokens: int) -> Sampling:
    """The wire form of how an output is decoded, with the service's default length."""
    return Sampling(
        max_tokens=body.max_tokens or max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=make_grammar(body),
    )


def make_grammar(body: SamplingBody) -> Grammar | None:
    """The wire form of what the text of an output must be."""
    if body.json_schema is not None:
        return Grammar("schema", json.dumps(body.json_schema))
    if body.choices is not None:
        return Grammar("choices", json.dumps(body.choices))
    return None if body.regex is None else Grammar("regex", body.regex)


def _parse(body: CallBody, where: str) -> list[tuple[Segment, int]]:
    """The segments of the prompt, or of all messages, each with the index of its message."""
    if body.messages is None:
        return [(segment, 0) for segment in parse_template(body.prompt or "", where=where)]
    segments: list[tuple[Segment, int]] = []
    for index, message in enumerate(body.messages):
        place = _place(body, where, index)
        for segment in parse_template(message.content, where=place):
            if isinstance(segment, Hole) and segment.kind == "output" and message.role != "assistant":
                raise TemplateError(
                    f"{place}, line {segment.line}: output {segment.name!r} belongs in an assistant message",
                    param=segment.name,
                )
            segments.append((segment, index))
    _check_across_messages(body, segments, where)
    return segments


def _place(body: CallBody, where: str, message: int) -> str:
    """``where`` and, in a chat, the message, counted from 1: a line says nothing without it."""
    if body.messages is None:
        return where
    return f"{where}, message {message + 1} ({body.messages[message].role})"


def _check_across_messages(body: CallBody, segments: list[tuple[Segment, int]], where: str) -> None:
    """What parse_template checks within one template, for all messages together."""
    seen: set[tuple[str, str]] = set()
    for segment, index in segments:
        if not isinstance(segment, Hole):
            continue
        if segment.kind == "output":
            place = f"{_place(body, where, index)}, line {segment.line}: output {segment.name!r}"
            if ("output", segment.name) in seen:
                raise TemplateError(f"{place} appears a second time", param=segment.name)
            if ("input", segment.name) in seen:
                raise TemplateError(f"{place} is read before it is produced", param=segment.name)
        seen.add((segment.kind, segment.name))


def _by_name(body: CallBody, kind: str, where: str) -> dict[str, PlaceholderBody]:
    placeholders: dict[str, PlaceholderBody] = {}
    for placeholder in body.placeholders:
        if placeholder.kind != kind:
            continue
        if placeholder.name in placeholders:
            raise InvalidRequest(
                f"{where}: {kind} {placeholder.name!r} is bound twice", param=placeholder.name
            )
        _check_fields(placeholder, where)
        placeholders[placeholder.name] = placeholder
    return placeholders


def _check_fields(placeholder: PlaceholderBody, where: str) -> None:
    name = placeholder.name
    if placeholder.kind == "output" and placeholder.value is not None:
        raise InvalidRequest(f"{where}: output {name!r} cannot have a value", param=name)
    if placeholder.kind == "input" and placeholder.sampling is not None:
        raise InvalidRequest(f"{where}: input {name!r} cannot have sampling options", param=name)
