"""Reading the body of a semantic function: where its template is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import TemplateError
from ..template import parse_template, single_brace_hint
from .prompt import Marker, Prompt, chat_prompt, text_prompt
from .signature import Parameter
from .typed import Typed, from_annotation

Body = Callable[..., Any]
_HOLE = re.compile(r"\{\{\s*(input|output)\b")


def has_holes(text: str) -> bool:
    """Whether a docstring is meant as a template."""
    return _HOLE.search(text) is not None


def build_prompt(body: Body, docstring: str, parameters: Sequence[Parameter], where: str) -> Prompt:
    """The checked prompt of a body: its docstring if that has holes, else what the body returns.

    Raises :class:`TemplateError` naming the function and, for a hole, the line."""
    if has_holes(docstring):
        return text_prompt(docstring, where)
    returned = body(**{parameter.name: Marker(parameter.name, where) for parameter in parameters})
    if isinstance(returned, str):
        return text_prompt(inspect.cleandoc(returned), where)
    if isinstance(returned, (list, tuple)):
        return chat_prompt(returned, where)
    if returned is None:
        parse_template(docstring, where=where)  # names a misspelt hole, if that is what is wrong
        lack = "its docstring has no holes" if docstring else "it has no docstring"
        reason = single_brace_hint(docstring) or "its body returned nothing; forgotten `return`?"
        raise TemplateError(f"{where}: {lack}, and {reason}")
    raise TemplateError(
        f"{where}: neither its docstring has holes nor does the body return a template (text, or a list of "
        f"P.system, P.user and P.assistant), but {type(returned).__name__}"
    )


def result_type(body: Body, where: str) -> Typed | None:
    """What the return annotation says of the output; None for text. Raises :class:`TypeError` for one that
    nothing can be generated for."""
    try:
        annotation = inspect.get_annotations(body, eval_str=True).get("return")
    except Exception:  # an annotation for type checkers only
        return None
    return from_annotation(annotation, where)
