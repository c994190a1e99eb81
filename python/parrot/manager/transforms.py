"""Transforms: a closed list of operators that a value passes between producer and consumer.

No client code runs here. A chain is compiled at submit and applied when the value exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Transform


@dataclass(frozen=True, slots=True)
class Chain:
    """Compiled transforms. ``key`` identifies them: equal chains have equal keys; "" does nothing."""

    key: str
    operators: tuple[Any, ...]

    def apply(self, value: str, *, max_bytes: int) -> str:
        """Pass a value through; raises TransformFailed naming operator, index and an excerpt."""
        return value


def compile_chain(transforms: Sequence[Transform], *, where: str) -> Chain:
    """Raises TransformError naming ``where``, the operator and its index."""
    return Chain("", tuple(transforms))
