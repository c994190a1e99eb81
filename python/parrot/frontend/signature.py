"""The parameters of a semantic function, and how a call's arguments are bound to its holes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TemplateError, UnknownPlaceholder
from .options import did_you_mean
from .prompt import Prompt


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter; one without a default must be given in each call."""

    name: str
    default: object = None
    required: bool = True
    by_position: bool = True


def parameters_of(body: Callable[..., Any], where: str) -> list[Parameter]:
    """The parameters of a body. Raises :class:`TemplateError` for ``*args`` and ``**kwargs``."""
    found: list[Parameter] = []
    for parameter in inspect.signature(body).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TemplateError(
                f"{where}: {parameter} is not possible: each hole of a template has a name",
                param=parameter.name,
            )
        required = parameter.default is parameter.empty
        found.append(
            Parameter(
                parameter.name,
                None if required else parameter.default,
                required,
                parameter.kind is not parameter.KEYWORD_ONLY,
            )
        )
    return found


def bind(
    parameters: Sequence[Parameter],
    prompt: Prompt,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    where: str,
) -> dict[str, object]:
    """Each argument under the name of its hole, defaults filled in.

    Raises :class:`UnknownPlaceholder` for an argument that is missing (with the line of its hole), unknown
    or given twice, and :class:`TypeError` for one too many.
    """
    bound = _positional(parameters, args, where)
    names = {parameter.name for parameter in parameters}
    for name, value in kwargs.items():
        if name in bound:
            raise UnknownPlaceholder(f"{where}: argument {name!r} is given twice", param=name)
        if name not in names and name not in prompt.outputs:
            known = [*(parameter.name for parameter in parameters), *prompt.outputs]
            raise UnknownPlaceholder(
                f"{where}: no placeholder {name!r}; "
                f"placeholders: {', '.join(known)}{did_you_mean(name, known)}",
                param=name,
            )
        bound[name] = value
    for parameter in parameters:
        if parameter.name in bound or parameter.name in prompt.outputs:
            continue
        if parameter.required:
            place = prompt.inputs[parameter.name]
            raise UnknownPlaceholder(
                f"{place}: no argument {parameter.name!r} for {{{{input:{parameter.name}}}}}",
                param=parameter.name,
            )
        bound[parameter.name] = parameter.default
    return bound


def _positional(parameters: Sequence[Parameter], args: Sequence[object], where: str) -> dict[str, object]:
    names = [parameter.name for parameter in parameters if parameter.by_position]
    if len(args) > len(names):
        takes = f"{len(names)} positional argument{'' if len(names) == 1 else 's'}"
        listed = f" ({', '.join(names)})" if names else ""
        raise TypeError(f"{where} takes {takes}{listed}, but {len(args)} were given")
    return dict(zip(names, args, strict=False))
