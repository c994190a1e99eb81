"""Semantic functions: a prompt template with named holes, called like a Python function.

A call binds every hole, queues itself in its session and returns at once with the variables of its outputs.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from pydantic import ValidationError

from ..api import CallBody, MessageBody, PlaceholderBody
from ..errors import DoubleProducer, TemplateError, UnknownPlaceholder
from .body import build_prompt, has_holes, result_type
from .connection import session_for_call
from .objective import Asked, Objective, to_objective
from .options import Output, check_text, did_you_mean, invalid, refuse
from .prompt import Prompt, check_parameters, text_prompt
from .signature import Parameter, bind, parameters_of
from .typed import Typed
from .values import Outputs, to_text
from .variable import SemanticVariable

Body = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller said about a function's calls."""

    model: str | None = None
    objective: Objective | None = None
    outputs: Output | Mapping[str, Output] | None = None
    result: Typed | None = None  # the return annotation of a function with one output

    def output(self, name: str, where: str) -> Output | None:
        """How the output ``name`` is decoded. Raises :class:`InvalidRequest` if it is typed twice."""
        output = self.outputs
        if isinstance(output, Mapping):
            output = output.get(name)
        return output if self.result is None else (output or Output()).typed_as(self.result, where)


_OPTIONS = ("model", "objective", "outputs")


class Function:
    """A semantic function; made by :func:`function` or :func:`template`."""

    def __init__(
        self,
        name: str,
        where: str,
        parameters: Sequence[Parameter],
        build: Callable[[], Prompt],
        options: Options,
    ) -> None:
        self.__name__ = name
        self._where = where
        self._parameters = parameters
        self._build = build
        self._options = options
        self._prompt: Prompt | None = None
        self._decoding: dict[str, Output | None] = {}  # by output, with the prompt

    @property
    def prompt(self) -> Prompt:
        """The checked template. Raises :class:`TemplateError`, also in the first call, if it is wrong."""
        if self._prompt is None:
            prompt = self._build()
            check_parameters(prompt, [parameter.name for parameter in self._parameters], self._where)
            self._check_options(prompt)
            self._decoding = {name: self._options.output(name, self._where) for name in prompt.outputs}
            self._prompt = prompt
        return self._prompt

    def with_options(
        self,
        *,
        model: str | None = None,
        objective: Asked | None = None,
        outputs: Output | Mapping[str, Output] | None = None,
        **unknown: object,
    ) -> Function:
        """The same function under other options; what is not given stays."""
        refuse(unknown, f"{self.__name__}.with_options", _OPTIONS)
        options = replace(
            self._options,
            model=model or self._options.model,
            objective=self._options.objective if objective is None else to_objective(objective),
            outputs=self._options.outputs if outputs is None else outputs,
        )
        return Function(self.__name__, self._where, self._parameters, self._build, options)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Queue a call; returns its output variable or, for several outputs, an :class:`Outputs`.

        Arguments are variables or plain Python values, by position or name. An output's name takes a
        variable made beforehand. Raises :class:`UnknownPlaceholder` for a missing or unknown argument,
        :class:`TypeError` for too many or one without text, :class:`DoubleProducer` for an output that has a
        producer or a value already, and :class:`InvalidRequest` for a variable of another session.
        """
        prompt = self.prompt
        bound = bind(self._parameters, prompt, args, kwargs, self._where)
        inputs = {name: self._argument(name, bound[name]) for name in prompt.inputs}
        outputs = {name: self._result(name, bound.get(name)) for name in prompt.outputs}
        variables = {name: value for name, value in inputs.items() if isinstance(value, SemanticVariable)}
        session = session_for_call(variables | outputs, self._where)
        call = self._body(prompt, inputs, outputs)
        for name, variable in outputs.items():
            option = self._decoding[name]
            if option is not None and option.typed is not None:
                variable.set_type(option.typed)
        session.submit(call, list(variables.values()), list(outputs.values()))
        return next(iter(outputs.values())) if len(outputs) == 1 else Outputs(outputs)

    def __repr__(self) -> str:
        return f"<{self._where}>"

    def _body(
        self,
        prompt: Prompt,
        inputs: Mapping[str, SemanticVariable | str],
        outputs: Mapping[str, SemanticVariable],
    ) -> CallBody:
        placeholders = [
            PlaceholderBody(name=name, kind="input", value=value)
            if isinstance(value, str)
            else PlaceholderBody(name=name, kind="input", semantic_var_id=value.id)
            for name, value in inputs.items()
        ]
        for name, variable in outputs.items():
            option = self._decoding[name]
            sampling = None if option is None else option.sampling
            placeholders.append(
                PlaceholderBody(name=name, kind="output", semantic_var_id=variable.id, sampling=sampling)
            )
        objective = self._options.objective
        try:
            return CallBody(
                function=self.__name__,
                model=self._options.model,
                prompt=prompt.text,
                messages=_message_bodies(prompt),
                placeholders=tuple(placeholders),
                objective=None if objective is None else objective.criteria,
                target_ms=None if objective is None else objective.target_ms,
            )
        except ValidationError as error:
            raise invalid(self._where, error) from None

    def _argument(self, name: str, value: object) -> SemanticVariable | str:
        if isinstance(value, SemanticVariable):
            return value
        where = f"{self._where}: argument {name!r}"
        try:
            text = to_text(value)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
        return check_text(text, where)

    def _result(self, name: str, variable: object) -> SemanticVariable:
        if variable is None:
            return SemanticVariable(name=name[:64])
        if not isinstance(variable, SemanticVariable):
            raise TypeError(
                f"{self._where}: {name!r} is an output; pass a SemanticVariable without a value, "
                f"not {type(variable).__name__}"
            )
        if not variable.assignable:
            raise DoubleProducer(
                f"{self._where}: the variable passed for output {name!r} is {variable.origin} already",
                param=name,
            )
        return variable

    def _check_options(self, prompt: Prompt) -> None:
        if self._options.result is not None and len(prompt.outputs) > 1:
            raise TemplateError(
                f"{self._where}: -> {self._options.result.name} types a single output, but the template has "
                f"{', '.join(prompt.outputs)}; type them by outputs={{'{next(iter(prompt.outputs))}': "
                "P.Output(schema=...)}",
                param="return",
            )
        if self._options.outputs is None or isinstance(self._options.outputs, Output):
            return
        for name in self._options.outputs:
            if name not in prompt.outputs:
                raise UnknownPlaceholder(
                    f"{self._where}: outputs= names {name!r}, but the template has no {{{{output:{name}}}}}; "
                    f"outputs: {', '.join(prompt.outputs)}{did_you_mean(name, prompt.outputs)}",
                    param=name,
                )


@overload
def function(body: Body, /) -> Function: ...


@overload
def function(
    *,
    model: str | None = None,
    objective: Asked | None = None,
    outputs: Output | Mapping[str, Output] | None = None,
    **unknown: object,
) -> Callable[[Body], Function]: ...


def function(
    body: Body | None = None,
    /,
    *,
    model: str | None = None,
    objective: Asked | None = None,
    outputs: Output | Mapping[str, Output] | None = None,
    **unknown: object,
) -> Function | Callable[[Body], Function]:
    """Make a semantic function of a Python function, as ``@P.function`` or ``@P.function(...)``.

    The template is the docstring if that has holes; else the body returns it, as text or as a list of
    ``P.system(...)``, ``P.user(...)`` and ``P.assistant(...)``. Parameters are the input holes.

    ``outputs`` says how outputs are decoded: one :class:`Output` for all, or a mapping by name.
    A return annotation other than text (``-> Invoice``, ``-> int``) types a single output, as ``schema=``
    of :class:`Output` does. ``objective`` labels every call at submit. Raises :class:`TemplateError` for a
    bad docstring template and :class:`TypeError` for an unknown option.
    """
    refuse(unknown, "P.function", _OPTIONS)
    options = Options(model, None if objective is None else to_objective(objective), outputs)
    if body is None:
        return lambda decorated: _from_body(decorated, options)
    return _from_body(body, options)


def template(
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    model: str | None = None,
    objective: Asked | None = None,
    outputs: Output | Mapping[str, Output] | None = None,
    **unknown: object,
) -> Function:
    """Make a semantic function of a template kept as text or, given a :class:`~pathlib.Path`, in a file.

    Its parameters are its input holes, in order of appearance. Raises :class:`TemplateError`.
    """
    refuse(unknown, "P.template", ("name", *_OPTIONS))
    if isinstance(source, str):
        text, name, place = source, name or "template", "P.template"
    else:
        path = Path(source)
        text, name, place = path.read_text(encoding="utf-8"), name or path.stem, str(path)
    where = f"function {name!r} ({place})"
    prompt = text_prompt(text, where)
    options = Options(model, None if objective is None else to_objective(objective), outputs)
    made = Function(name, where, [Parameter(hole) for hole in prompt.inputs], lambda: prompt, options)
    _ = made.prompt  # checks it now
    return made


def _message_bodies(prompt: Prompt) -> tuple[MessageBody, ...] | None:
    if prompt.messages is None:
        return None
    return tuple(MessageBody(role=message.role, content=message.content) for message in prompt.messages)


def _from_body(body: Body, options: Options) -> Function:
    if not inspect.isfunction(body) or inspect.iscoroutinefunction(body):
        raise TypeError(f"P.function decorates a plain function, not {body!r}")
    code = body.__code__
    where = f"function {body.__name__!r} ({code.co_filename}:{code.co_firstlineno})"
    options = replace(options, result=result_type(body, where))
    parameters = parameters_of(body, where)
    docstring = inspect.cleandoc(body.__doc__ or "")
    build = functools.partial(build_prompt, body, docstring, parameters, where)
    made = Function(body.__name__, where, parameters, build, options)
    functools.update_wrapper(made, body)
    if has_holes(docstring):
        _ = made.prompt  # checks it now
    return made
