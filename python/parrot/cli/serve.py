"""``parrot serve``, ``parrot manager`` and ``parrot engine``: the processes of the service."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import EngineConfig, ManagerConfig, SchedulerConfig, check_range, own_engine_name
from ..errors import ConfigError
from .gpus import check_device, gpu_devices
from .options import (
    MANAGER_SWITCHES,
    SCHEDULER_SWITCHES,
    SWITCHES,
    CommonOptions,
    EngineOptions,
    ManagerOptions,
    with_options,
)
from .topics import Topic


@with_options(CommonOptions, ManagerOptions, EngineOptions, engine_port=0)
def serve(
    common: CommonOptions,
    manager: ManagerOptions,
    engine: EngineOptions,
    *,
    engines: Annotated[
        int, typer.Option(help="Engine processes to start and keep alive.", rich_help_panel=Topic.MODEL)
    ] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="all|N,N",
            help="One engine on every GPU, or on those named, in place of --engines and --device.",
            rich_help_panel=Topic.MODEL,
        ),
    ] = None,
) -> None:
    """Serve a model: a manager and engines on this machine.

    Engines that end are started again. More can join with `parrot engine --manager tcp://127.0.0.1:PORT`,
    PORT being the engine port."""
    devices = _devices(engines, engine.device, gpus)
    if engine.simulate is not None:
        from ..engine.cost_file import read_cost

        read_cost(engine.simulate)  # raises what each engine would end with
    config = _manager_config(common, manager)
    fields = {**common.fields(), **engine.fields()}
    engine_configs = [
        EngineConfig(manager_address="", name=f"engine-{index}", **{**fields, **own})
        for index, own in enumerate(_own_options(engine, devices))
    ]
    if engine.simulate is None:
        _check_engines(engine.device, gpus)
    _run_manager(config, engine_configs, manager.parent_pipe, common.verbose)


def _own_options(engine: EngineOptions, devices: list[str]) -> list[dict[str, Any]]:
    """What an engine of each device has for itself. Several on the CPU divide its cores, unless the user says
    how many threads an engine has."""
    if engine.num_threads is not None or engine.simulate is not None or set(devices) != {"cpu"}:
        return [{"device": device} for device in devices]
    from ..engine.process import num_physical_cores

    each, rest = divmod(num_physical_cores(), len(devices))
    return [{"device": "cpu", "num_threads": max(1, each + (index < rest))} for index in range(len(devices))]


def _check_engines(device: str, gpus: str | None) -> None:
    """Raise, before anything listens, what every engine would end with at each start."""
    from ..cpu_isa import checked_cpu_isa

    checked_cpu_isa()
    if gpus is None:
        check_device(device)


def _devices(engines: int, device: str, gpus: str | None) -> list[str]:
    """Where each engine runs."""
    check_range("engines", engines, 1, 64)
    if gpus is None:
        return [device] * engines
    if engines != 1 or device != "cpu":
        raise ConfigError(
            "--gpus says which engines there are; leave out --engines and --device", param="gpus"
        )
    return gpu_devices(gpus)


@with_options(CommonOptions, ManagerOptions)
def manager(common: CommonOptions, options: ManagerOptions) -> None:
    """Run a manager alone.

    Engines join it with `parrot engine --manager tcp://127.0.0.1:PORT`, PORT being the engine port."""
    _run_manager(_manager_config(common, options), [], options.parent_pipe, common.verbose)


@with_options(CommonOptions, EngineOptions)
def engine(
    common: CommonOptions,
    options: EngineOptions,
    *,
    manager: Annotated[
        str,
        typer.Option(help="Address to join, such as tcp://127.0.0.1:8643.", rich_help_panel=Topic.REQUIRED),
    ],
    name: Annotated[
        str,
        typer.Option(
            default_factory=own_engine_name,
            show_default="the host and a random suffix",
            help="Name of the engine. One that starts under the name of another takes its place.",
            rich_help_panel=Topic.JOINING,
        ),
    ],
    manager_timeout_s: Annotated[
        float,
        typer.Option(
            "--manager-timeout-s",
            help="End after so long without word from the manager.",
            rich_help_panel=Topic.FAULTS,
        ),
    ] = 60.0,
    parent_pid: Annotated[
        int | None,
        typer.Option(
            "--parent-pid",
            help="End with this process, which must be the parent.",
            rich_help_panel=Topic.PROCESS,
        ),
    ] = None,
    write_cost: Annotated[
        Path | None,
        typer.Option(
            "--write-cost",
            metavar="FILE",
            help="Store what steps cost, as the engine measures it at its start.",
            rich_help_panel=Topic.TUNING,
        ),
    ] = None,
) -> None:
    """Run one engine and join a manager."""
    config = EngineConfig(
        manager_address=manager,
        name=name,
        manager_timeout_s=manager_timeout_s,
        parent_pid=parent_pid,
        write_cost=write_cost,
        **common.fields(),
        **options.fields(),
    )
    from ..engine.server import run_engine

    _log_to_stderr(common.verbose)
    run_engine(config)


def _manager_config(common: CommonOptions, options: ManagerOptions) -> ManagerConfig:
    """Without the optimisations named in ``off``; raises :class:`ConfigError` for other names."""
    off = options.off or []
    for name in off:
        if name not in SWITCHES:
            raise ConfigError(f"--off {name} is none of {', '.join(SWITCHES)}", param="off")
    switched: dict[str, Any] = {name: name not in off for name in SCHEDULER_SWITCHES}
    scheduler = SchedulerConfig(aging_s=options.aging_s, **switched)
    switched = {name: name not in off for name in MANAGER_SWITCHES}
    return ManagerConfig(scheduler=scheduler, **common.fields(), **options.fields(), **switched)


def _run_manager(
    config: ManagerConfig, engines: list[EngineConfig], parent_pipe: bool, verbose: bool
) -> None:
    from ..manager.server import run_manager

    _log_to_stderr(verbose)
    run_manager(config, engines=engines, parent_pipe=parent_pipe)


# Where a manager serves, what came back, who joins, what tenants share, when it ends; and so of an engine.
_TOLD = (
    "manager.server",
    "manager.recovery",
    "manager.engines",
    "manager.published",
    "engine.server",
    "engine.link",
)


def _log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in _TOLD:
        logging.getLogger(f"parrot.{name}").setLevel(logging.INFO)
