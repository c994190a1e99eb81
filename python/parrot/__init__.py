"""Parrot serves LLM applications: whole graphs of prompt templates joined by Semantic Variables.

``import parrot as P`` gives the front end. Its names are loaded on first use, so that the import stays fast
and the service's processes do not load the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import GetTimeout, ParrotError
    from .frontend.combine import gather
    from .frontend.combine import map_calls as map
    from .frontend.connection import Connection, batch, connect, session
    from .frontend.function import Function, function, template
    from .frontend.function import function as SemanticFunction
    from .frontend.objective import LATENCY, THROUGHPUT, Objective, Perf, deadline, tpot, ttft
    from .frontend.options import Output
    from .frontend.prompt import assistant, system, user
    from .frontend.values import Outputs
    from .frontend.variable import SemanticVariable, join
    from .frontend.variable import SemanticVariable as variable

    __version__: str
else:
    # Loaded here, so that a later first import cannot put the module in the place of the function P.template.
    import_module(f"{__name__}.template")
    del template

_HOMES = {
    "GetTimeout": ("errors", "GetTimeout"),
    "LATENCY": ("frontend.objective", "LATENCY"),
    "THROUGHPUT": ("frontend.objective", "THROUGHPUT"),
    "Connection": ("frontend.connection", "Connection"),
    "Function": ("frontend.function", "Function"),
    "Output": ("frontend.options", "Output"),
    "Outputs": ("frontend.values", "Outputs"),
    "ParrotError": ("errors", "ParrotError"),
    "Objective": ("frontend.objective", "Objective"),
    "Perf": ("frontend.objective", "Perf"),
    "SemanticFunction": ("frontend.function", "function"),
    "SemanticVariable": ("frontend.variable", "SemanticVariable"),
    "assistant": ("frontend.prompt", "assistant"),
    "batch": ("frontend.connection", "batch"),
    "connect": ("frontend.connection", "connect"),
    "deadline": ("frontend.objective", "deadline"),
    "function": ("frontend.function", "function"),
    "gather": ("frontend.combine", "gather"),
    "join": ("frontend.variable", "join"),
    "map": ("frontend.combine", "map_calls"),
    "session": ("frontend.connection", "session"),
    "system": ("frontend.prompt", "system"),
    "template": ("frontend.function", "template"),
    "tpot": ("frontend.objective", "tpot"),
    "ttft": ("frontend.objective", "ttft"),
    "user": ("frontend.prompt", "user"),
    "variable": ("frontend.variable", "SemanticVariable"),
}

__all__ = [
    "LATENCY",
    "THROUGHPUT",
    "Connection",
    "Function",
    "GetTimeout",
    "Objective",
    "Output",
    "Outputs",
    "ParrotError",
    "Perf",
    "SemanticFunction",
    "SemanticVariable",
    "assistant",
    "batch",
    "connect",
    "deadline",
    "function",
    "gather",
    "join",
    "map",
    "session",
    "system",
    "template",
    "tpot",
    "ttft",
    "user",
    "variable",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'parrot' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("parrot-serve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
