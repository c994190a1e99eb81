"""What goes into a call as a plain argument, and what comes back from one with several outputs."""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterator

from .variable import SemanticVariable


class Outputs:
    """The outputs of a call that has several: ``r.code``, ``r["code"]``, or in order by iteration."""

    __slots__ = ("_variables",)

    def __init__(self, variables: dict[str, SemanticVariable]) -> None:
        self._variables = variables

    def __getattr__(self, name: str) -> SemanticVariable:
        if name.startswith("_") or name not in self._variables:
            raise AttributeError(
                f"no output {name!r}; outputs: {', '.join(self._variables)}{self._advice(name)}"
            )
        return self._variables[name]

    def _advice(self, name: str) -> str:
        """For what a single output has and several have not."""
        if name.startswith("_") or not hasattr(SemanticVariable, name):
            return ""
        first = next(iter(self._variables))
        return f"; take one, `result.{first}.{name}`" + (", or `P.gather(*result)`" if name == "get" else "")

    def __getitem__(self, name: str) -> SemanticVariable:
        return self._variables[name]

    def __iter__(self) -> Iterator[SemanticVariable]:
        return iter(self._variables.values())

    def __len__(self) -> int:
        return len(self._variables)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={variable!r}' for name, variable in self._variables.items())})"


def to_text(value: object) -> str:
    """A plain argument as text: numbers by ``str``, lists and dicts as JSON. Raises :class:`TypeError` for
    what has no obvious text."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bool, numbers.Number)):
        return str(value)
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"cannot be written as JSON ({error}); for a list of variables use P.join"
            ) from None
    if isinstance(value, Outputs):
        raise TypeError(f"is a call's set of outputs; pass one of them: {value!r}")
    if value is None:
        raise TypeError("is None, which has no text; pass '' to leave it empty (forgotten `return`?)")
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"is {name} itself, not what it returns; call it and pass the result")
    raise TypeError(f"an object of type {type(value).__name__} has no obvious text; convert it with str()")
