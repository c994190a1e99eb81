"""``/metrics``: a page that Prometheus can read, with the numbers of the calls, and of bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from graph_builder import prompt_call
from manager_harness import Manager, running_manager, serving, until, zero_stats
from parrot.manager.call_counts import Histogram
from parrot.manager.families import counter, gauge, histogram, info
from parrot.manager.metrics import MAX_ENGINES, OTHER_ENGINES, Metrics
from parrot.manager.scrape import SAMPLES_AT_A_TIME, scraping
from parrot.manager.slices import run_whole
from parrot.wire import EngineStats, StepCost

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def parse(text: str) -> Page:
    """All samples of a page in Prometheus' text format, read by the library's own reader."""
    return samples_of(text_string_to_metric_families(text))


def samples_of(families: Iterable[Metric]) -> Page:
    """All samples; fails for a family or a sample that is there twice and for one without a type."""
    page: Page = {}
    names: set[str] = set()
    for family in families:
        assert family.type in ("counter", "gauge", "histogram", "info"), family
        assert family.name not in names, f"{family.name} is there twice"
        names.add(family.name)
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in page, key
            page[key] = float(sample.value)
    return page


class Families(Collector):
    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def written(*families: Metric, accept: str = "") -> str:
    """The page of these families."""
    registry = CollectorRegistry()
    registry.register(Families(*families))
    return run_whole(scraping(registry, accept)).content.decode()


def value(page: Page, name: str, **labels: str) -> float:
    return page[(f"parrot_{name}", frozenset(labels.items()))]


def test_the_page_counts_what_has_happened(tiny_model: Path) -> None:
    async def main() -> None:
        async with running_manager(tiny_model) as manager, serving(manager) as url:
            engine = await manager.add_engine(lambda text: "ok" if "good" in text else "")
            engine.stats = msgspec.structs.replace(
                zero_stats(), num_free_blocks=7, num_held_blocks=3, decode_tokens=99, pool_breaches=1
            )
            for number in range(3):
                session = manager.submit(prompt_call(f"good-{number}", "good {{output:a}}"))
                await manager.get(session, "a")
            await cancel_one(manager)
            await engine.beat()
            await until(lambda: manager.registry.alive[0].stats == engine.stats)
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                reply = await client.get("/metrics")
                open_reply = await client.get("/metrics", headers={"Accept": OPEN})
            assert reply.headers["content-type"] == PLAIN
            assert open_reply.headers["content-type"].startswith(
                "application/openmetrics-text; version=1.0.0"
            )
            page = parse(reply.text)
            assert samples_of(open_families(open_reply.text)).keys() == page.keys()
            assert value(page, "calls_ended_total", state="done") == 3
            assert value(page, "calls_ended_total", state="cancelled") == 1
            assert value(page, "call_seconds_count", phase="total") == 3
            assert value(page, "call_seconds_bucket", phase="total", le="+Inf") == 3
            assert value(page, "placements_total", kind="placed") == 3
            assert value(page, "engines", state="ready") == 1
            assert value(page, "engine_free_blocks", engine="engine-0") == 7
            assert value(page, "engine_held_blocks", engine="engine-0") == 3
            assert value(page, "engine_cost_us", engine="engine-0", part="base") == 1000
            assert value(page, "engine_cost_us", engine="engine-0", part="per_kv_token") == 0.01
            assert value(page, "engine_decode_tokens_total", engine="engine-0") == 99
            assert value(page, "engine_pool_breaches_total", engine="engine-0") == 1
            assert value(page, "ready") == 1
            assert value(page, "sessions") == 4
            assert value(page, "calls", state="unfinished") == 0
            assert value(page, "resident_bytes") > 10e6

    asyncio.run(main())


def test_every_number_of_an_engine_is_under_its_own_name() -> None:
    numbers = {name: n for n, name in enumerate(EngineStats.__struct_fields__, start=1)}
    seconds = {"busy_us": "busy_seconds", "expected_us": "expected_seconds", "turn_us": "turn_seconds"}
    engine = SimpleNamespace(
        name="e",
        state="ready",
        alive=True,
        stats=EngineStats(**numbers),
        num_dispatched=99,
        slowdown=SimpleNamespace(factor=1.5),
        cost=StepCost(1, 2, 3, 4),
    )
    fleet: Any = SimpleNamespace(engines=[engine])
    page = parse(written(*Metrics(None, fleet)._engines()))  # type: ignore[arg-type]
    shown = {name.removeprefix("parrot_engine_").removesuffix("_total"): v for (name, _), v in page.items()}
    told = {seconds.get(name, name.removeprefix("num_")): n for name, n in numbers.items()}
    told |= {name: told[name] / 1e6 for name in seconds.values()} | {"dispatched": 99, "slowdown": 1.5}
    for internal in ("clock_us", "hinted_contexts"):
        del told[internal]
    assert {name: shown[name] for name in told} == told


async def cancel_one(manager: Manager) -> None:
    session = manager.submit(
        prompt_call("waits", "{{input:x}} {{output:a}}"), variables=[{"semantic_var_id": "x"}]
    )
    manager.service.delete_session(session)
    manager.service.create_session()


def test_many_engines_share_a_series_so_that_the_page_stays_small() -> None:
    def engine(number: int) -> Any:
        stats = msgspec.structs.replace(zero_stats(), num_running=2)
        return SimpleNamespace(
            name=f"e{number}",
            state="ready",
            alive=True,
            stats=stats,
            num_dispatched=2,
            slowdown=SimpleNamespace(factor=1.0),
            cost=StepCost(1, 2, 3, 4),
        )

    fleet: Any = SimpleNamespace(engines=[engine(number) for number in range(1000)])
    metrics = Metrics(None, fleet)  # type: ignore[arg-type]
    page = parse(written(*metrics._engines()))
    names = {text for _, labels in page for key, text in labels if key == "engine"}
    assert len(names) == MAX_ENGINES + 1
    assert value(page, "engine_running", engine=OTHER_ENGINES) == 2 * (1000 - MAX_ENGINES)
    assert sum(v for (name, _), v in page.items() if name == "parrot_engine_running") == 2000


def test_label_values_are_escaped() -> None:
    text = written(gauge("engine_up", "x", [(('a"b\\c\nd',), 1)], "engine"))
    assert r'engine="a\"b\\c\nd"' in text
    assert list(parse(text)) == [("parrot_engine_up", frozenset({("engine", 'a"b\\c\nd')}))]


def test_buckets_of_a_histogram_add_up() -> None:
    values = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        values.observe(seconds)
    page = parse(written(histogram("waits", "x", [((), values)])))
    buckets = [value(page, "waits_bucket", le=end) for end in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert value(page, "waits_count") == 4
    assert abs(value(page, "waits_sum") - 7.65) < 1e-9


@pytest.mark.parametrize("number", [0, 1, SAMPLES_AT_A_TIME, 2 * SAMPLES_AT_A_TIME + 1])
@pytest.mark.parametrize("accept", ["", OPEN])
def test_a_page_made_in_slices_is_that_of_the_library(accept: str, number: int) -> None:
    rows = [((f"t{n}",), n) for n in range(number)]
    families = (counter("used", "x", rows, "who"), gauge("up", "y", rows, "who"), info("build", "z", a="b"))
    registry = CollectorRegistry()
    registry.register(Families(*families))
    whole = openmetrics_latest(registry) if accept else generate_latest(registry)
    slices = list(scraping(registry, accept))
    assert written(*families, accept=accept) == whole.decode()
    assert len(slices) >= 2 * number / SAMPLES_AT_A_TIME


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "nonsense;;=,",
        "application/openmetrics-text; version=abc",
        "text/plain; version=1.x, text/html",
    ],
)
def test_what_no_format_is_known_by_is_answered_in_plain_text(accept: str) -> None:
    page = run_whole(scraping(CollectorRegistry(), accept))
    assert page.content_type.startswith("text/plain")
