"""Configuration: frozen dataclasses that validate themselves, built once at the edge (CLI or tests)."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from .errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "native", "triton", "torch"]
DEFAULT_MODEL = "smollm2"


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise :class:`ConfigError` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value} is outside [{low}, {high}]", param=name)


def is_loopback(name: str, host: str) -> bool:
    """Whether only this machine can reach ``host``; raises :class:`ConfigError` if it is no address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"{name} = {host!r} is not an IP address or 'localhost'", param=name) from None


def _stays_here(address: str) -> bool:
    """Whether a ZeroMQ address is one of this machine, or none yet."""
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return True
    try:
        return is_loopback("address", rest.rpartition(":")[0].strip("[]"))
    except ConfigError:  # a name, which may be anybody's
        return False


def own_engine_name() -> str:
    """This host and something random: engines that nobody named do not take each other's place. Not the
    process id, which is 1 in each of several containers of a host."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine process. ``max_batch_size`` sequences and ``max_batch_tokens`` tokens (prefill and decode
    together) are what one step computes at most; None: what suits the device."""

    manager_address: str
    model: str = DEFAULT_MODEL
    name: str = field(default_factory=own_engine_name)
    device: str = "cpu"
    dtype: DType = "auto"  # float32 on a CPU; on a GPU what the model was written in, if it is a half
    dummy_weights: bool = False  # random ones: only the model's configuration and tokenizer are read
    backend: Backend = "auto"  # whose operations compute the model; auto: native where it can be
    shared_prefix_attention: bool = True  # decodes read a common prefix once (native backend)
    block_size: int = 16
    num_blocks: int | None = None  # None: sized from free memory
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    overlap: bool = True  # on a GPU the next step is planned while one runs
    cuda_graphs: bool = True  # decode steps on a GPU are recorded once for each size (native backends)
    num_threads: int | None = None  # None: one per physical core this process may use
    heartbeat_s: float = 1.0
    manager_timeout_s: float = 60.0
    parent_pid: int | None = None  # end with this process, which must be the parent
    simulate: Path | None = None  # a cost model (engine/cost_file.py) whose time steps take, without a model
    write_cost: Path | None = None  # where the cost model is stored once it is known
    drain_grace_s: float = 20.0  # what running calls have to finish after SIGTERM
    stall_after_s: float = 30.0  # calls without a step for so long are reported
    curve_keys: Path | None = None  # a directory of parrot.curve, with which it joins a manager elsewhere

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, 16, 16)
        if re.fullmatch(r"[!-~]{1,128}", self.name) is None:
            raise ConfigError(
                f"name = {self.name!r:.200} is not 1 to 128 visible ASCII characters without a space",
                param="name",
            )
        if re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", self.device) is None:
            raise ConfigError(f"device = {self.device!r} is not cpu, cuda or cuda:N", param="device")
        if self.parent_pid is not None:
            check_range("parent_pid", self.parent_pid, 1, 2**31 - 1)
        if self.num_blocks is not None:
            check_range("num_blocks", self.num_blocks, 2, 2**31 - 1)
        if self.max_batch_size is not None:
            check_range("max_batch_size", self.max_batch_size, 1, 4096)
        if self.max_batch_tokens is not None:
            check_range("max_batch_tokens", self.max_batch_tokens, 16, 65536)
        check_range("heartbeat_s", self.heartbeat_s, 0.05, 60)
        check_range("manager_timeout_s", self.manager_timeout_s, 1, 3600)
        check_range("drain_grace_s", self.drain_grace_s, 0, 86400)
        check_range("stall_after_s", self.stall_after_s, 0.1, 86400)
        if self.num_threads is not None:
            check_range("num_threads", self.num_threads, 1, 1024)
        if self.dtype not in get_args(DType):
            known = ", ".join(get_args(DType))
            raise ConfigError(f"dtype = {self.dtype!r} is none of {known}", param="dtype")
        if self.backend not in get_args(Backend):
            known = ", ".join(get_args(Backend))
            raise ConfigError(f"backend = {self.backend!r} is none of {known}", param="backend")
        if self.curve_keys is None and not _stays_here(self.manager_address):
            raise ConfigError(
                f"manager_address = {self.manager_address!r} is on another machine, and calls would travel "
                "in the clear; join with --curve-keys DIR, a directory of `parrot key curve DIR`",
                param="manager_address",
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Switches of Algorithm 1, each of which can be turned off so that its gain can be measured."""

    group_placement: bool = True  # place a task group together
    prefix_affinity: bool = True  # place a call where its prefix is, or with queued sharers
    splitting: bool = True  # place a group or sharers on several engines where they end sooner so
    replication: bool = True  # send a call elsewhere than its prefix is when engines there are crowded
    objective_aware: bool = True  # cap an engine's tokens while it holds a latency-bound call
    application_order: bool = True  # a call inherits its application's arrival time
    tenant_shares: bool = True  # tenants share engines by weight, whatever each has queued
    aging: bool = True  # what has waited for aging_s is not overtaken any longer
    latency_capacity_tokens: int = 6144
    aging_s: float = 10.0
    max_queued: int = 1_000_000  # ready calls that wait for an engine
    max_queued_per_tenant: int = 1_000_000
    record: Path | None = None  # a file for every event, which manager.event_log replays

    def __post_init__(self) -> None:
        check_range("latency_capacity_tokens", self.latency_capacity_tokens, 1, 2**31 - 1)
        check_range("aging_s", self.aging_s, 0.001, 86400)
        check_range("max_queued", self.max_queued, 1, 2**31 - 1)
        check_range("max_queued_per_tenant", self.max_queued_per_tenant, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """One manager process. ``port`` and ``engine_port`` 0 mean a free port chosen by the system."""

    model: str = DEFAULT_MODEL
    host: str = "127.0.0.1"
    port: int = 8642
    engine_host: str = "127.0.0.1"
    engine_port: int = 0
    session_idle_s: float = 600.0
    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0
    stall_after_s: float = 30.0  # calls without a step for so long run elsewhere, and /ready says so
    drain_grace_s: float = 20.0  # what running calls have to finish after SIGTERM
    max_retries: int = 2
    max_calls_per_submit: int = 4096
    max_sources_per_submit: int = 65536  # of derived variables
    max_transforms_per_submit: int = 4096
    max_pattern_chars_per_submit: int = 131072  # of different patterns and JSON paths, which are compiled
    max_body_bytes: int = 32 * 2**20
    max_value_bytes: int = 8 * 2**20
    max_session_value_bytes: int = 256 * 2**20  # of all values that a live session holds
    max_tenant_value_bytes: int = 2**30  # of all sessions of a tenant, or of the one that has no key
    max_queued_calls: int = 100_000  # submitted and not finished
    default_max_tokens: int = 256
    early_fill: bool = True  # what waiting calls begin with is computed while engines have time to spare
    graph_eviction: bool = True  # engines are told which contexts the graph needs again, and how soon
    ready_file: Path | None = None
    api_keys: Path | None = None  # the file of keys that requests need; None: nobody needs one
    published_templates: Path | None = None  # JSON; what they begin with is cached for all tenants together
    curve_keys: Path | None = None  # a directory of parrot.curve: engines join with keys, encrypted
    unprotected: bool = False  # other machines may reach an API that asks nobody for a key
    journal: Path | None = None  # keeps sessions, values and unfinished calls over the manager's own death
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        self._check_protection()
        check_range("port", self.port, 0, 65535)
        check_range("engine_port", self.engine_port, 0, 65535)
        check_range("session_idle_s", self.session_idle_s, 0.1, 7 * 86400)
        check_range("heartbeat_s", self.heartbeat_s, 0.05, 60)
        check_range("lost_after_s", self.lost_after_s, 2 * self.heartbeat_s, 3600)
        check_range("stall_after_s", self.stall_after_s, 0.1, 86400)
        check_range("drain_grace_s", self.drain_grace_s, 0, 86400)
        check_range("max_retries", self.max_retries, 0, 100)
        check_range("max_queued_calls", self.max_queued_calls, 1, 2**31 - 1)
        check_range("default_max_tokens", self.default_max_tokens, 1, 2**20)

    def _check_protection(self) -> None:
        is_open = not is_loopback("host", self.host) and self.api_keys is None
        if is_open and not self.unprotected:
            raise ConfigError(
                f"host = {self.host!r} is reachable from other machines, and nothing asks them for a key; "
                "make keys with `parrot key new TENANT --file FILE` and serve with --api-keys FILE, or bind "
                "to 127.0.0.1 (--unprotected serves whoever can reach the port)",
                param="host",
            )
        if not is_loopback("engine_host", self.engine_host) and self.curve_keys is None:
            raise ConfigError(
                f"engine_host = {self.engine_host!r} is reachable from other machines, and nothing tells "
                "engines from strangers; make keys with `parrot key curve DIR` and serve with --curve-keys "
                "DIR, or bind to 127.0.0.1",
                param="engine_host",
            )
