"""From the template and bindings of one submitted call to its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from ..api import CallBody, PlaceholderBody, SamplingBody
from ..errors import InvalidRequest, TemplateError, UnknownPlaceholder
from ..template import no_output_reason
from ..wire import Grammar, Sampling
from .call import InputBinding, InputPart, OutputBinding, OutputPart, Step, TextPart
from .prompt_table import ParsedPrompt, place
from .transforms import compiling_chain
from .variable import Variable

Resolve = Callable[[str], Variable]
_DEFAULT_SAMPLING = SamplingBody()


@dataclass(slots=True)
class CallShape:
    """The steps of a call and its bindings by name; inputs that no output comes after are left out."""

    steps: list[Step] = field(default_factory=list)
    inputs: dict[str, InputBinding] = field(default_factory=dict)
    outputs: dict[str, OutputBinding] = field(default_factory=dict)


def shaping_call(
    body: CallBody,
    prompt: ParsedPrompt,
    *,
    where: str,
    input_var: Resolve,
    output_vars: dict[str, Variable],
    max_tokens: int,
) -> Generator[None, None, CallShape]:
    """Cut a call into steps; yields between them and while transforms are compiled.

    ``prompt`` is the call's own; ``input_var`` finds an input's variable by id (or raises VariableNotFound);
    ``output_vars`` has the variable of each output placeholder; ``max_tokens`` is the default of an output.

    Raises :class:`TemplateError`, :class:`UnknownPlaceholder`, :class:`TransformError` or
    :class:`InvalidRequest` naming ``where``, the placeholder and the line.
    """
    return _Shaper(body, prompt, where, input_var, output_vars, max_tokens).shaping()


class _Shaper:
    def __init__(
        self,
        body: CallBody,
        prompt: ParsedPrompt,
        where: str,
        input_var: Resolve,
        output_vars: dict[str, Variable],
        max_tokens: int,
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._where = where
        self._input_var = input_var
        self._output_vars = output_vars
        self._max_tokens = max_tokens
        self._inputs: dict[str, PlaceholderBody] = {}
        self._outputs: dict[str, PlaceholderBody] = {}
        self._new_inputs: list[InputBinding] = []  # of the present step
        self._shape = CallShape()

    def shaping(self) -> Generator[None, None, CallShape]:
        self._sort_placeholders()
        self._check_names()
        for index, (before, hole) in enumerate(self._prompt.steps):
            parts: list[TextPart | InputPart] = []
            for part in before:
                if isinstance(part, TextPart):
                    parts.append(part)
                else:
                    parts.append(InputPart((yield from self._input(part.name, index)), part.message))
            binding = yield from self._output(hole.name)
            self._shape.outputs[hole.name] = binding
            first_inputs = tuple(self._new_inputs)
            self._new_inputs.clear()
            self._shape.steps.append(
                Step(index, tuple(parts), OutputPart(binding, hole.message), first_inputs)
            )
        return self._shape

    def _sort_placeholders(self) -> None:
        for placeholder in self._body.placeholders:
            placeholders = self._inputs if placeholder.kind == "input" else self._outputs
            if placeholder.name in placeholders:
                raise InvalidRequest(
                    f"{self._where}: {placeholder.kind} {placeholder.name!r} is bound twice",
                    param=placeholder.name,
                )
            _check_fields(placeholder, self._where)
            placeholders[placeholder.name] = placeholder

    def _check_names(self) -> None:
        prompt = self._prompt
        if not prompt.outputs:
            messages = self._body.messages or ()
            text = "\n".join([self._body.prompt or "", *(message.content for message in messages)])
            raise TemplateError(f"{self._where}: {no_output_reason(text)}")
        inputs, outputs = self._inputs.keys(), self._outputs.keys()
        if outputs == prompt.outputs and inputs <= prompt.inputs <= inputs | outputs:
            return
        self._raise_unbound()
        self._raise_unused()

    def _raise_unbound(self) -> None:
        bound = {"input": self._inputs.keys() | self._prompt.outputs, "output": self._outputs.keys()}
        for hole in self._prompt.holes:
            if hole.name not in bound[hole.kind]:
                here = place(self._body, self._where, hole.message)
                raise UnknownPlaceholder(
                    f"{here}, line {hole.line}: {{{{{hole.kind}:{hole.name}}}}} has no binding",
                    param=hole.name,
                )

    def _raise_unused(self) -> None:
        unused = [("input", name) for name in self._inputs if name not in self._prompt.inputs]
        unused += [("output", name) for name in self._outputs if name not in self._prompt.outputs]
        for kind, name in unused:
            raise UnknownPlaceholder(
                f"{self._where}: {kind} {name!r} is bound, but the template has no {{{{{kind}:{name}}}}}",
                param=name,
            )

    def _input(self, name: str, step: int) -> Generator[None, None, InputBinding]:
        known = self._shape.inputs.get(name)
        if known is not None:
            return known
        placeholder = self._inputs.get(name)
        where = f"{self._where}, input {name!r}"
        chain = yield from compiling_chain(placeholder.transforms if placeholder else (), where=where)
        own = self._shape.outputs.get(name)
        if own is not None:
            variable: Variable | None = own.variable
            if placeholder and (placeholder.value is not None or placeholder.semantic_var_id):
                raise InvalidRequest(f"{where} reads the output of that name; bind nothing else", param=name)
        else:
            variable = self._named_input(placeholder, where)
        constant = placeholder.value if placeholder and variable is None else None
        text = None if chain.key else constant  # it is there, and nothing happens to it
        binding = InputBinding(name, variable, chain, step, constant, text)
        self._shape.inputs[name] = binding
        self._new_inputs.append(binding)
        return binding

    def _named_input(self, placeholder: PlaceholderBody | None, where: str) -> Variable | None:
        """The variable that an input placeholder names, or None for a constant."""
        if placeholder is not None and placeholder.semantic_var_id is not None:
            return self._input_var(placeholder.semantic_var_id)
        if placeholder is None or placeholder.value is None:
            raise InvalidRequest(f"{where} needs a semantic_var_id or a value")
        return None

    def _output(self, name: str) -> Generator[None, None, OutputBinding]:
        placeholder = self._outputs[name]
        where = f"{self._where}, output {name!r}"
        chain = yield from compiling_chain(placeholder.transforms, where=where)
        yield
        sampling = make_sampling(placeholder.sampling or _DEFAULT_SAMPLING, self._max_tokens)
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


def _check_fields(placeholder: PlaceholderBody, where: str) -> None:
    name = placeholder.name
    if placeholder.kind == "output" and placeholder.value is not None:
        raise InvalidRequest(f"{where}: output {name!r} cannot have a value", param=name)
    if placeholder.kind == "input" and placeholder.sampling is not None:
        raise InvalidRequest(f"{where}: input {name!r} cannot have sampling options", param=name)
