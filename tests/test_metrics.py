"""``/metrics``: a page that Prometheus can read, with the numbers of the calls, and of bounded size."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec

from graph_builder import prompt_call
from manager_harness import Manager, running_manager, serving, zero_stats
from parrot.manager.call_counts import Histogram
from parrot.manager.exposition import gauge, histogram
from parrot.manager.metrics import MAX_ENGINES, OTHER_ENGINES, Metrics

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+)\Z')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\.)*)"')
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Page:
    """All samples; fails for a line that is none and for a sample whose family has no type."""
    page: Page = {}
    families: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert kind in ("counter", "gauge", "histogram")
            assert name not in families, f"{name} is there twice"
            families.add(name)
        elif not line.startswith("# HELP "):
            match = LINE.match(line)
            assert match, line
            name, labels, value = match.groups()
            assert name in families or re.sub(r"_(bucket|sum|count)\Z", "", name) in families
            key = (name, frozenset(LABEL.findall(labels or "")))
            assert key not in page, key
            page[key] = float(value)
    return page


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
            await asyncio.sleep(0.05)
            async with httpx.AsyncClient(base_url=url) as client:
                reply = await client.get("/metrics")
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            page = parse(reply.text)
            assert value(page, "calls_ended_total", state="done") == 3
            assert value(page, "calls_ended_total", state="cancelled") == 1
            assert value(page, "call_seconds_count", phase="total") == 3
            assert value(page, "call_seconds_bucket", phase="total", le="+Inf") == 3
            assert value(page, "placements_total", kind="placed") == 3
            assert value(page, "engines", state="ready") == 1
            assert value(page, "engine_free_blocks", engine="engine-0") == 7
            assert value(page, "engine_held_blocks", engine="engine-0") == 3
            assert value(page, "engine_decode_tokens_total", engine="engine-0") == 99
            assert value(page, "engine_pool_breaches_total", engine="engine-0") == 1
            assert value(page, "ready") == 1
            assert value(page, "sessions") == 4
            assert value(page, "calls", state="unfinished") == 0
            assert value(page, "resident_bytes") > 10e6

    asyncio.run(main())


async def cancel_one(manager: Manager) -> None:
    session = manager.submit(
        prompt_call("waits", "{{input:x}} {{output:a}}"), variables=[{"semantic_var_id": "x"}]
    )
    manager.service.delete_session(session)
    manager.service.create_session()


def test_many_engines_share_a_series_so_that_the_page_stays_small() -> None:
    def engine(number: int) -> Any:
        stats = msgspec.structs.replace(zero_stats(), num_running=2)
        slowdown = SimpleNamespace(factor=1.0)
        return SimpleNamespace(
            name=f"e{number}", state="ready", alive=True, stats=stats, num_dispatched=2, slowdown=slowdown
        )

    fleet: Any = SimpleNamespace(engines=[engine(number) for number in range(1000)])
    metrics = Metrics(None, fleet)  # type: ignore[arg-type]
    page = parse("".join(metrics._engines()))
    names = {text for _, labels in page for key, text in labels if key == "engine"}
    assert len(names) == MAX_ENGINES + 1
    assert value(page, "engine_running", engine=OTHER_ENGINES) == 2 * (1000 - MAX_ENGINES)
    assert sum(v for (name, _), v in page.items() if name == "parrot_engine_running") == 2000


def test_label_values_are_escaped() -> None:
    page = parse(gauge("engine_up", "x", [({"engine": 'a"b\\c\nd'}, 1)]))
    assert list(page) == [("parrot_engine_up", frozenset({("engine", r"a\"b\\c\nd")}))]


def test_buckets_of_a_histogram_add_up() -> None:
    values = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        values.observe(seconds)
    page = parse(histogram("waits", "x", [({}, values)]))
    buckets = [value(page, "waits_bucket", le=end) for end in ("0.1", "1", "+Inf")]
    assert buckets == [2, 3, 4]
    assert value(page, "waits_count") == 4
    assert abs(value(page, "waits_sum") - 7.65) < 1e-9
