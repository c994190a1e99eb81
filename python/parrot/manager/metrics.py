"""``GET /metrics``: what the service, its engines and its calls are doing, for Prometheus.

Everything is read when somebody asks. Labels take their values from closed sets, but for the names of
engines: ``MAX_ENGINES`` of them have series of their own, the others share one.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..wire import EngineStats
from .call_counts import Histogram
from .engines import Engine, EngineRegistry
from .families import Row, counter, gauge, histogram, info, keyed, single
from .readiness import unready_reason
from .scrape import Page, scraping
from .service import Service
from .tenant_metrics import tenant_families

MAX_ENGINES = 100
OTHER_ENGINES = "(others)"
_STATES = ("ready", "silent", "draining", "stalled", "lost", "left")
_LAG_EVERY_S = 0.25
_LAG_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

Read = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("running", "Calls in the batch.", lambda stats: stats.num_running),
    ("waiting", "Calls that wait for room in the engine.", lambda stats: stats.num_waiting),
    ("turn_seconds", "How long the loop's present turn lasts.", lambda stats: stats.turn_us / 1e6),
    ("free_blocks", "KV blocks that hold nothing.", lambda stats: stats.num_free_blocks),
    ("evictable_blocks", "KV blocks of the cache.", lambda stats: stats.num_evictable_blocks),
    ("held_blocks", "KV blocks of calls.", lambda stats: stats.num_held_blocks),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("steps", "Steps.", lambda stats: stats.num_steps),
    ("busy_seconds", "Time inside steps.", lambda stats: stats.busy_us / 1e6),
    ("expected_seconds", "The same by the cost model.", lambda stats: stats.expected_us / 1e6),
    ("prefill_tokens", "Prompt tokens computed.", lambda stats: stats.prefill_tokens),
    ("decode_tokens", "Tokens generated.", lambda stats: stats.decode_tokens),
    ("cached_tokens", "Prompt tokens found in the cache.", lambda stats: stats.cached_tokens),
    ("forks", "Contexts that began with a cached prefix.", lambda stats: stats.forks),
    ("cow_copies", "Partial blocks copied on the first write.", lambda stats: stats.cow_copies),
    ("evicted_blocks", "KV blocks evicted.", lambda stats: stats.evicted_blocks),
    ("early_fills", "Prefixes computed ahead of their calls.", lambda stats: stats.early_fills),
    ("early_fill_tokens", "Prompt tokens computed for them.", lambda stats: stats.early_fill_tokens),
    ("shared_decodes", "Tokens that shared the reading of a prefix.", lambda stats: stats.shared_decodes),
    ("preemptions", "Calls that lost their blocks.", lambda stats: stats.preemptions),
    ("calls_ended", "Calls that left the engine.", lambda stats: stats.calls_ended),
    ("dropped_messages", "Frames that were no message.", lambda stats: stats.dropped_messages),
    ("pool_breaches", "KV caches that broke and were made anew.", lambda stats: stats.pool_breaches),
)


class Metrics(Collector):
    """What one manager tells of itself, in a registry of its own. Lives on the loop."""

    def __init__(self, service: Service, registry: EngineRegistry) -> None:
        self._service = service
        self._registry = registry
        self._lag = LoopLag()
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def scraping(self, accept: str = "") -> Generator[None, None, Page]:
        """The page for a request with this ``Accept`` header, in slices (slices.py)."""
        self._lag.start()
        return scraping(self._collectors, accept)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._calls()
        yield from self._state()
        yield from self._engines()
        yield from tenant_families(self._service.tenants, self._service.key_watch)
        yield from _process()

    def _calls(self) -> Iterator[Metric]:
        executor = self._service.executor
        counts, dispatcher = executor.counts, executor.dispatcher
        present = {
            "unfinished": executor.num_live,
            "busy": dispatcher.num_busy,
            "queued": dispatcher.num_queued,
        }
        tokens = {
            "prompt": counts.prompt_tokens,
            "cached": counts.cached_tokens,
            "output": counts.output_tokens,
        }
        phases = [((phase,), values) for phase, values in counts.seconds.items()]
        yield gauge("calls", "Unfinished ones.", keyed(present), "state")
        yield counter("calls_ended", "Calls that have ended.", keyed(counts.by_state), "state")
        yield counter("calls_failed", "Calls that failed.", keyed(counts.failures_by_code), "code")
        yield counter("call_retries", "Calls that ran again.", single(dispatcher.num_retries))
        yield counter("tokens", "Tokens of ended calls.", keyed(tokens), "kind")
        yield counter("placements", "What the scheduler did.", keyed(executor.scheduler.counters()), "kind")
        early = executor.early.counters
        yield counter("early_fills", "Prefixes filled ahead.", keyed(early.fills()), "event")
        yield counter("early_fill_tokens", "Tokens of those.", keyed(early.token_counts()), "event")
        yield histogram("call_seconds", "Phases of calls that are done.", phases, "phase")

    def _state(self) -> Iterator[Metric]:
        executor, registry = self._service.executor, self._registry
        is_ready = unready_reason(self._service, registry) is None
        yield info("build", "The version that serves.", version=__version__)
        yield gauge("ready", "Whether calls can run.", single(is_ready))
        yield gauge("sessions", "Live sessions.", single(self._service.num_sessions))
        overdue = single(executor.watchdog.num_overdue)
        yield counter("overdue_calls", "Calls that an engine lost while it went on with others.", overdue)
        yield counter("stalls", "Work that waited and made no step.", single(executor.watchdog.num_stalls))
        yield counter("frames_dropped", "Frames that were no message.", single(registry.num_dropped_frames))
        failures = keyed(registry.background.failures)
        yield counter("background_failures", "Turns of background work that failed.", failures, "loop")
        breaches = single(executor.replies.num_breaches)
        yield counter("protocol_breaches", "Replies that cannot be right.", breaches)
        yield counter("frame_losses", "Frames that never came.", single(registry.num_lost_frames))
        yield counter("engines_cut_off", "Engines whose frames did not come.", single(registry.num_cut_off))
        resends = single(registry.num_resends)
        yield counter("frame_resends", "Times that frames of an engine were asked for again.", resends)
        yield counter("cache_snapshots", "Reports of whole caches.", single(executor.knowledge.num_snapshots))
        yield histogram("loop_lag_seconds", "How late the loop is.", [((), self._lag.histogram)])

    def _engines(self) -> Iterator[Metric]:
        engines = self._registry.engines
        states = {state: sum(engine.state == state for engine in engines) for state in _STATES}
        alive = [engine for engine in engines if engine.alive]
        named = alive[:MAX_ENGINES]
        slowdowns: list[Row] = [((engine.name,), engine.slowdown.factor) for engine in named]
        yield gauge("engines", "Engines by state.", keyed(states), "state")
        yield gauge("engine_slowdown", "Step time over that of the cost model.", slowdowns, "engine")
        yield gauge("engine_cost_us", "Parts of the cost model of now.", _costs(named), "engine", "part")
        yield gauge(
            "engine_dispatched",
            "Calls sent and not ended.",
            _each(alive, lambda engine: engine.num_dispatched),
            "engine",
        )
        for name, text, read in _GAUGES:
            yield gauge(f"engine_{name}", text, _each(alive, _of_stats(read)), "engine")
        for name, text, read in _COUNTERS:
            yield counter(f"engine_{name}", text, _each(alive, _of_stats(read)), "engine")


def _costs(engines: Sequence[Engine]) -> list[Row]:
    return [
        ((engine.name, name.removesuffix("_us")), value)
        for engine in engines
        for name, value in asdict(engine.cost).items()
        if name.endswith("_us")
    ]


class LoopLag:
    """How late timers of the running loop are; measured from the first time that somebody looks."""

    def __init__(self) -> None:
        self.histogram = Histogram(_LAG_BOUNDS_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, unless that has been done."""
        if self._timer is None:
            self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_EVERY_S
        self._timer = loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        self.histogram.observe(max(0.0, asyncio.get_running_loop().time() - due))
        self._wait()


def _each(engines: Sequence[Engine], read: Callable[[Engine], float]) -> list[Row]:
    rows: list[Row] = [((engine.name,), read(engine)) for engine in engines[:MAX_ENGINES]]
    if len(engines) > MAX_ENGINES:
        rows.append(((OTHER_ENGINES,), sum(map(read, engines[MAX_ENGINES:]))))
    return rows


def _of_stats(read: Read) -> Callable[[Engine], float]:
    return lambda engine: 0 if engine.stats is None else read(engine.stats)


def _process() -> Iterator[Metric]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    yield counter("cpu_seconds", "CPU time of the manager.", single(usage.ru_utime + usage.ru_stime))
    yield gauge("resident_bytes", "Memory of the manager.", single(pages * resource.getpagesize()))
