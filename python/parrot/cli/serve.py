"""``parrot serve``, ``parrot manager`` and ``parrot engine``: the processes of the service."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..config import (
    DEFAULT_MODEL,
    Backend,
    DType,
    EngineConfig,
    ManagerConfig,
    SchedulerConfig,
    check_range,
)
from ..errors import ConfigError

_SCHEDULER_SWITCHES = [item.name for item in dataclasses.fields(SchedulerConfig) if item.type == "bool"]
_MANAGER_SWITCHES = ("early_fill", "graph_eviction")
SWITCHES = [*_SCHEDULER_SWITCHES, *_MANAGER_SWITCHES]

Model = Annotated[str, typer.Option(help="smollm2, a Hugging Face directory, or a GGUF file.")]
Host = Annotated[str, typer.Option(help="Address of the HTTP API.")]
Port = Annotated[int, typer.Option(help="Port of the HTTP API; 0 takes a free one.")]
EnginePort = Annotated[
    int,
    typer.Option(
        help="Port that engines join at; 0 takes a free one: the line printed when the API answers says "
        "which, and so does engine_address in the ready file."
    ),
]
SessionIdle = Annotated[float, typer.Option("--session-idle-s", help="A session ends after so long unused.")]
MaxQueuedCalls = Annotated[
    int, typer.Option(help="Calls that are submitted and not finished; more are refused with a 429.")
]
Off = Annotated[
    list[str] | None,
    typer.Option("--off", metavar="NAME", help=f"Do without one of {', '.join(SWITCHES)}; may be repeated."),
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="Written as JSON (url, engine_address, pid) once the API answers.")
]
ApiKeys = Annotated[
    Path | None,
    typer.Option("--api-keys", help="File of `parrot key new`: requests need one of its keys from now on."),
]
PublishedTemplates = Annotated[
    Path | None,
    typer.Option(
        "--published-templates",
        help="JSON list of prompts, or lists of messages: the constant text that they begin with is cached "
        "once for all tenants.",
    ),
]
Unprotected = Annotated[
    bool, typer.Option("--unprotected", help="Serve other machines without keys: whoever can reach the port.")
]
EngineHost = Annotated[
    str, typer.Option(help="Address that engines join at; other than 127.0.0.1 with --curve-keys only.")
]
CurveKeys = Annotated[
    Path | None,
    typer.Option("--curve-keys", metavar="DIR", help="Keys of `parrot key curve`: engines join with them."),
]
JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        help="A file on a local disk that keeps sessions, values and unfinished calls: a service that is "
        "started with it again, also after kill -9, goes on where it was.",
    ),
]
DrainGrace = Annotated[
    float, typer.Option("--drain-grace-s", help="What running calls have to finish after SIGTERM.")
]
StallAfter = Annotated[
    float,
    typer.Option("--stall-after-s", help="Calls that make no step for so long run elsewhere."),
]
MaxRetries = Annotated[
    int, typer.Option("--max-retries", help="How often a call runs again whose engine was lost.")
]
Aging = Annotated[
    float,
    typer.Option(
        "--aging-s",
        help="How long work that nobody waits for lets other calls pass; an application keeps the place of "
        "its arrival for six times as long. More for a service of long applications.",
    ),
]
ParentPipe = Annotated[
    bool, typer.Option("--parent-pipe", help="End when standard input ends, with whoever holds it.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda:N.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16; auto: float32 on a CPU, a half on a GPU.")
]
DummyWeights = Annotated[
    bool, typer.Option("--dummy-weights", help="Random weights: a directory without any will do; for timing.")
]
BackendName = Annotated[
    str,
    typer.Option("--backend", help="native (own kernels), triton, torch, or auto: native on a CPU that can."),
]
SharedPrefixAttention = Annotated[
    bool,
    typer.Option(
        "--shared-prefix-attention/--no-shared-prefix-attention",
        help="Decodes read a prefix that they share once per step (native backend).",
    ),
]
NumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks of 16 tokens; by default as many as fit in memory.")
]
MaxBatchSize = Annotated[
    int | None, typer.Option(help="Sequences in one step; by default 64 on a CPU, 128 or 256 on a GPU.")
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one step, prefill and decode; by default 512 on a CPU, 2048 to 8192 on a GPU."
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Record decode steps of a GPU once for each size and replay them (backends native and triton).",
    ),
]
NumThreads = Annotated[int | None, typer.Option(help="CPU threads of an engine; by default one per core.")]
Simulate = Annotated[
    Path | None,
    typer.Option(
        "--simulate",
        metavar="FILE",
        help="Without a model: steps take the time of this cost model, and the text is made up. "
        "--model still names the tokenizer.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")]


def serve(
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8642,
    engines: Annotated[int, typer.Option(help="Engine processes to start and keep alive.")] = 1,
    engine_port: EnginePort = 0,
    engine_host: EngineHost = "127.0.0.1",
    curve_keys: CurveKeys = None,
    device: Device = "cpu",
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="all|N,N",
            help="One engine on every GPU, or on those named, in place of --engines and --device.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    dummy_weights: DummyWeights = False,
    backend: BackendName = "auto",
    shared_prefix_attention: SharedPrefixAttention = True,
    num_blocks: NumBlocks = None,
    max_batch_size: MaxBatchSize = None,
    max_batch_tokens: MaxBatchTokens = None,
    cuda_graphs: CudaGraphs = True,
    num_threads: NumThreads = None,
    simulate: Simulate = None,
    session_idle_s: SessionIdle = 600.0,
    max_queued_calls: MaxQueuedCalls = 100_000,
    off: Off = None,
    api_keys: ApiKeys = None,
    published_templates: PublishedTemplates = None,
    unprotected: Unprotected = False,
    ready_file: ReadyFile = None,
    journal: JournalFile = None,
    drain_grace_s: DrainGrace = 20.0,
    stall_after_s: StallAfter = 30.0,
    max_retries: MaxRetries = 2,
    aging_s: Aging = 10.0,
    parent_pipe: ParentPipe = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model: a manager and the engines it keeps alive, on this machine.

    More engines can join with `parrot engine --manager tcp://127.0.0.1:PORT`, PORT being the engine port."""
    devices = _devices(engines, device, gpus)
    manager_config = _manager_config(
        off or [],
        aging_s,
        model=model,
        host=host,
        port=port,
        engine_port=engine_port,
        engine_host=engine_host,
        curve_keys=curve_keys,
        session_idle_s=session_idle_s,
        max_queued_calls=max_queued_calls,
        api_keys=api_keys,
        published_templates=published_templates,
        unprotected=unprotected,
        ready_file=ready_file,
        journal=journal,
        drain_grace_s=drain_grace_s,
        stall_after_s=stall_after_s,
        max_retries=max_retries,
    )
    engine_configs = [
        EngineConfig(
            manager_address="",
            curve_keys=curve_keys,
            model=model,
            name=f"engine-{index}",
            device=engine_device,
            dtype=cast(DType, dtype),
            dummy_weights=dummy_weights,
            backend=cast(Backend, backend),
            shared_prefix_attention=shared_prefix_attention,
            num_blocks=num_blocks,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            cuda_graphs=cuda_graphs,
            num_threads=num_threads,
            simulate=simulate,
            drain_grace_s=drain_grace_s,
            stall_after_s=stall_after_s,
        )
        for index, engine_device in enumerate(devices)
    ]
    _run_manager(manager_config, engine_configs, parent_pipe, verbose)


def _devices(engines: int, device: str, gpus: str | None) -> list[str]:
    """Where each engine runs."""
    check_range("engines", engines, 1, 64)
    if gpus is None:
        return [device] * engines
    if engines != 1 or device != "cpu":
        raise ConfigError(
            "--gpus says which engines there are; leave out --engines and --device", param="gpus"
        )
    from .gpus import gpu_devices

    return gpu_devices(gpus)


def manager(
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8642,
    engine_port: EnginePort = 8643,
    engine_host: EngineHost = "127.0.0.1",
    curve_keys: CurveKeys = None,
    session_idle_s: SessionIdle = 600.0,
    max_queued_calls: MaxQueuedCalls = 100_000,
    off: Off = None,
    api_keys: ApiKeys = None,
    published_templates: PublishedTemplates = None,
    unprotected: Unprotected = False,
    ready_file: ReadyFile = None,
    journal: JournalFile = None,
    drain_grace_s: DrainGrace = 20.0,
    stall_after_s: StallAfter = 30.0,
    max_retries: MaxRetries = 2,
    aging_s: Aging = 10.0,
    parent_pipe: ParentPipe = False,
    verbose: Verbose = False,
) -> None:
    """Run a manager alone.

    Engines join it with `parrot engine --manager tcp://127.0.0.1:PORT`, PORT being the engine port."""
    config = _manager_config(
        off or [],
        aging_s,
        model=model,
        host=host,
        port=port,
        engine_port=engine_port,
        engine_host=engine_host,
        curve_keys=curve_keys,
        session_idle_s=session_idle_s,
        max_queued_calls=max_queued_calls,
        api_keys=api_keys,
        published_templates=published_templates,
        unprotected=unprotected,
        ready_file=ready_file,
        journal=journal,
        drain_grace_s=drain_grace_s,
        stall_after_s=stall_after_s,
        max_retries=max_retries,
    )
    _run_manager(config, [], parent_pipe, verbose)


def engine(
    manager: Annotated[str, typer.Option(help="Address to join, such as tcp://127.0.0.1:8643.")],
    name: Annotated[str, typer.Option(help="A name of its own for each engine of a manager.")] = "engine-0",
    model: Model = DEFAULT_MODEL,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    dummy_weights: DummyWeights = False,
    backend: BackendName = "auto",
    shared_prefix_attention: SharedPrefixAttention = True,
    num_blocks: NumBlocks = None,
    max_batch_size: MaxBatchSize = None,
    max_batch_tokens: MaxBatchTokens = None,
    cuda_graphs: CudaGraphs = True,
    num_threads: NumThreads = None,
    manager_timeout_s: Annotated[
        float, typer.Option("--manager-timeout-s", help="End after so long without word from the manager.")
    ] = 60.0,
    parent_pid: Annotated[
        int | None, typer.Option("--parent-pid", help="End with this process, which must be the parent.")
    ] = None,
    simulate: Simulate = None,
    drain_grace_s: DrainGrace = 20.0,
    stall_after_s: StallAfter = 30.0,
    curve_keys: CurveKeys = None,
    write_cost: Annotated[
        Path | None,
        typer.Option("--write-cost", metavar="FILE", help="Store what the engine measures at its start."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run one engine and join a manager."""
    config = EngineConfig(
        manager_address=manager,
        name=name,
        model=model,
        device=device,
        dtype=cast(DType, dtype),
        dummy_weights=dummy_weights,
        backend=cast(Backend, backend),
        shared_prefix_attention=shared_prefix_attention,
        num_blocks=num_blocks,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        cuda_graphs=cuda_graphs,
        num_threads=num_threads,
        manager_timeout_s=manager_timeout_s,
        parent_pid=parent_pid,
        simulate=simulate,
        drain_grace_s=drain_grace_s,
        stall_after_s=stall_after_s,
        write_cost=write_cost,
        curve_keys=curve_keys,
    )
    from ..engine.server import run_engine

    _log_to_stderr(verbose)
    run_engine(config)


def _manager_config(off: list[str], aging_s: float, **options: Any) -> ManagerConfig:
    """``options`` without the optimisations named in ``off``; raises :class:`ConfigError` for other names."""
    for name in off:
        if name not in SWITCHES:
            raise ConfigError(f"--off {name} is none of {', '.join(SWITCHES)}", param="off")
    switched: dict[str, Any] = {name: name not in off for name in _SCHEDULER_SWITCHES}
    scheduler = SchedulerConfig(aging_s=aging_s, **switched)
    options |= {name: name not in off for name in _MANAGER_SWITCHES}
    return ManagerConfig(scheduler=scheduler, **options)


def _run_manager(
    config: ManagerConfig, engines: list[EngineConfig], parent_pipe: bool, verbose: bool
) -> None:
    from ..manager.server import run_manager

    _log_to_stderr(verbose)
    run_manager(config, engines=engines, parent_pipe=parent_pipe)


def _log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in ("server", "recovery", "engines"):  # where it serves, what came back, who joins, when it ends
        logging.getLogger(f"parrot.manager.{name}").setLevel(logging.INFO)
