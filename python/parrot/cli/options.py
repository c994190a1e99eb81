"""Options of the processes of the service: each stands once, for all commands that have it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..config import DEFAULT_MODEL, SchedulerConfig
from .topics import Topic

SCHEDULER_SWITCHES = [item.name for item in dataclasses.fields(SchedulerConfig) if item.type == "bool"]
MANAGER_SWITCHES = ("early_fill", "graph_eviction")
SWITCHES = [*SCHEDULER_SWITCHES, *MANAGER_SWITCHES]

Model = Annotated[
    str, typer.Option(help="smollm2, a Hugging Face directory, or a GGUF file.", rich_help_panel=Topic.MODEL)
]
Host = Annotated[str, typer.Option(help="Address of the HTTP API.", rich_help_panel=Topic.API)]
Port = Annotated[
    int, typer.Option(help="Port of the HTTP API; 0 takes a free one.", rich_help_panel=Topic.API)
]
EnginePort = Annotated[
    int,
    typer.Option(
        help="Port that engines join at; 0 takes a free one: the line printed when the API answers says "
        "which, and so does engine_address in the ready file.",
        rich_help_panel=Topic.JOINING,
    ),
]
SessionIdle = Annotated[
    float,
    typer.Option(
        "--session-idle-s", help="A session ends after so long unused.", rich_help_panel=Topic.SESSIONS
    ),
]
MaxQueuedCalls = Annotated[
    int,
    typer.Option(
        help="Calls that are submitted and not finished; more are refused with a 429.",
        rich_help_panel=Topic.SCHEDULING,
    ),
]
Off = Annotated[
    list[str] | None,
    typer.Option(
        "--off",
        metavar="NAME",
        help=f"Do without one of {', '.join(SWITCHES)} (docs/scheduling.md); may be repeated.",
        rich_help_panel=Topic.SCHEDULING,
    ),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON (url, engine_address, local_engine_address, pid) once the API answers.",
        rich_help_panel=Topic.PROCESS,
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        help="File of `parrot key new`: requests need one of its keys from now on.",
        rich_help_panel=Topic.API,
    ),
]
PublishedTemplates = Annotated[
    Path | None,
    typer.Option(
        "--published-templates",
        help="JSON list of prompts, or lists of messages: the constant text that they begin with is cached "
        "once for all tenants.",
        rich_help_panel=Topic.SCHEDULING,
    ),
]
Unprotected = Annotated[
    bool,
    typer.Option(
        "--unprotected",
        help="Serve other machines without keys: whoever can reach the port.",
        rich_help_panel=Topic.API,
    ),
]
EngineHost = Annotated[
    str,
    typer.Option(
        help="Address that engines join at; other than 127.0.0.1 with --curve-keys only.",
        rich_help_panel=Topic.JOINING,
    ),
]
CurveKeys = Annotated[
    Path | None,
    typer.Option(
        "--curve-keys",
        metavar="DIR",
        help="Keys of `parrot key curve`: engines join with them.",
        rich_help_panel=Topic.JOINING,
    ),
]
JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        help="A file on a local disk that keeps sessions, values and unfinished calls: a service that is "
        "started with it again, also after kill -9, goes on where it was.",
        rich_help_panel=Topic.SESSIONS,
    ),
]
DrainGrace = Annotated[
    float,
    typer.Option(
        "--drain-grace-s",
        help="What running calls have to finish after SIGTERM.",
        rich_help_panel=Topic.FAULTS,
    ),
]
StallAfter = Annotated[
    float,
    typer.Option(
        "--stall-after-s",
        help="Calls that make no step for so long run elsewhere.",
        rich_help_panel=Topic.FAULTS,
    ),
]
MaxRetries = Annotated[
    int,
    typer.Option(
        "--max-retries",
        help="How often a call runs again whose engine was lost.",
        rich_help_panel=Topic.FAULTS,
    ),
]
Aging = Annotated[
    float,
    typer.Option(
        "--aging-s",
        help="How long work that nobody waits for lets other calls pass; an application keeps the place of "
        "its arrival until its calls have run for six times as long. More for long applications.",
        rich_help_panel=Topic.SCHEDULING,
    ),
]
ParentPipe = Annotated[
    bool,
    typer.Option(
        "--parent-pipe",
        help="End when standard input ends, with whoever holds it.",
        rich_help_panel=Topic.PROCESS,
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda:N.", rich_help_panel=Topic.MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16; auto: float32 on a CPU, a half on a GPU.",
        rich_help_panel=Topic.MODEL,
    ),
]
DummyWeights = Annotated[
    bool,
    typer.Option(
        "--dummy-weights",
        help="Random weights: a directory without any will do; for timing.",
        rich_help_panel=Topic.MODEL,
    ),
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        help="native (own kernels), triton, torch, or auto: the first that can.",
        rich_help_panel=Topic.TUNING,
    ),
]
SharedPrefixAttention = Annotated[
    bool,
    typer.Option(
        "--shared-prefix-attention/--no-shared-prefix-attention",
        help="Decodes read a prefix that they share once per step (native backend).",
        rich_help_panel=Topic.TUNING,
    ),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="KV blocks of 16 tokens; by default as many as fit in memory.", rich_help_panel=Topic.TUNING
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Sequences in one step; by default 64 on a CPU, 128 or 256 on a GPU.",
        rich_help_panel=Topic.TUNING,
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one step, prefill and decode; by default 512 on a CPU, 2048 to 16384 on a GPU.",
        rich_help_panel=Topic.TUNING,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap",
        help="Plan the next step of a GPU while one runs.",
        rich_help_panel=Topic.TUNING,
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Record decode steps of a GPU once for each size and replay them (backends native and triton).",
        rich_help_panel=Topic.TUNING,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads of an engine; by default one per core, which engines of one serve divide.",
        rich_help_panel=Topic.TUNING,
    ),
]
Simulate = Annotated[
    Path | None,
    typer.Option(
        "--simulate",
        metavar="FILE",
        help="Without a model: steps take the time of this cost model, and the text is made up. "
        "--model still names the tokenizer.",
        rich_help_panel=Topic.MODEL,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Log all that happens; without it starts, ends, engines that come and go, and what is wrong.",
        rich_help_panel=Topic.PROCESS,
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class CommonOptions:
    """Of all three processes."""

    model: Model = DEFAULT_MODEL
    curve_keys: CurveKeys = None
    drain_grace_s: DrainGrace = 20.0
    stall_after_s: StallAfter = 30.0
    verbose: Verbose = False

    def fields(self) -> dict[str, Any]:
        """As a configuration names them."""
        return {name: value for name, value in _values(self).items() if name != "verbose"}


@dataclasses.dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Of a process with a manager."""

    host: Host = "127.0.0.1"
    port: Port = 8642
    engine_port: EnginePort = 8643
    engine_host: EngineHost = "127.0.0.1"
    session_idle_s: SessionIdle = 600.0
    max_queued_calls: MaxQueuedCalls = 100_000
    off: Off = None
    api_keys: ApiKeys = None
    published_templates: PublishedTemplates = None
    unprotected: Unprotected = False
    ready_file: ReadyFile = None
    journal: JournalFile = None
    max_retries: MaxRetries = 2
    aging_s: Aging = 10.0
    parent_pipe: ParentPipe = False

    def fields(self) -> dict[str, Any]:
        """As a :class:`~parrot.config.ManagerConfig` names them."""
        others = ("off", "aging_s", "parent_pipe")
        return {name: value for name, value in _values(self).items() if name not in others}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """Of a process with engines."""

    device: Device = "cpu"
    dtype: Dtype = "auto"
    dummy_weights: DummyWeights = False
    backend: BackendName = "auto"
    shared_prefix_attention: SharedPrefixAttention = True
    num_blocks: NumBlocks = None
    max_batch_size: MaxBatchSize = None
    max_batch_tokens: MaxBatchTokens = None
    overlap: Overlap = True
    cuda_graphs: CudaGraphs = True
    num_threads: NumThreads = None
    simulate: Simulate = None

    def fields(self) -> dict[str, Any]:
        """As an :class:`~parrot.config.EngineConfig` names them."""
        return _values(self)


def with_options(*groups: type, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups, some with other ``defaults``. It is called with one of each
    group, in this order, and with the options of its own by name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        options = [option for group in groups for option in _parameters(group, defaults)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = [group(**{name: given.pop(name) for name in _names(group)}) for group in groups]
            command(*made, **given)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *options)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        del run.__wrapped__
        return run

    return decorate


def _names(group: type) -> list[str]:
    return [item.name for item in dataclasses.fields(group)]


def _values(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _names(type(options))}


def _parameters(group: type, defaults: dict[str, Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(item.name, item.default),
            annotation=hints[item.name],
        )
        for item in dataclasses.fields(group)
    ]
