"""Each optimisation leaves its mark in /metrics when a run should use it, and none when it is switched off.

A real manager, two real engines with a tiny model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from graph_builder import join, prompt_call, write
from manager_harness import Manager, running_manager, until
from parrot import api
from parrot.config import SchedulerConfig
from parrot.manager.metrics import Metrics
from parrot.manager.slices import run_whole
from test_metrics import Page, parse
from test_uses import real_engine

pytestmark = pytest.mark.system
SHORT = api.SamplingBody(max_tokens=4, ignore_eos=True)
LONG = api.SamplingBody(max_tokens=60, ignore_eos=True)
LONGEST = api.SamplingBody(max_tokens=400, ignore_eos=True)  # so that a busy machine fills early meanwhile
TEXT = " ".join(f"fact {number}" for number in range(25)) + ". "
ROLE = " ".join(f"rule {number}" for number in range(20)) + ". "

Workload = Callable[[Manager], Awaitable[None]]


def total(page: Page, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(number for (key, have), number in page.items() if key == f"parrot_{name}" and wanted <= have)


def reader(name: str, prompt: str, sampling: api.SamplingBody = SHORT) -> api.CallBody:
    return prompt_call(name, prompt + f" {{{{output:{name}}}}}", write(name, sampling=sampling))


async def get_all(manager: Manager, session: str, *names: str) -> None:
    for name in names:
        assert await manager.get(session, name, timeout_ms=60_000) is not None, name


async def waiting_call(manager: Manager) -> None:
    """A reviewer waits for a long program."""
    session = manager.submit(reader("code", "Write", LONGEST), reader("review", ROLE + "{{input:code}}"))
    await get_all(manager, session, "review")


async def same_text(manager: Manager) -> None:
    """Six calls at once on one long text; each engine takes four."""
    names = [f"q{number}" for number in range(6)]
    session = manager.submit(reader("warm", TEXT))
    await get_all(manager, session, "warm")
    calls = [reader(name, f"{TEXT} and question {name}", LONG) for name in names]
    await get_all(manager, manager.submit(*calls), *names)


async def map_reduce(manager: Manager) -> None:
    """Six calls that share nothing feed one that somebody waits for."""
    names = [f"m{number}" for number in range(6)]
    calls = [reader(name, f"{name} {number} begins alone", LONG) for number, name in enumerate(names)]
    label = api.LabelBody(semantic_var_id="sum", criteria="LATENCY")
    variables = [join("all", *names).model_dump()]
    session = manager.submit(*calls, reader("sum", "{{input:all}}"), variables=variables, labels=[label])
    await get_all(manager, session, "sum")


async def strangers(manager: Manager) -> None:
    """Calls that have nothing to do with each other."""
    for number in range(3):
        session = manager.submit(reader("x", f"{number} alone in the world"))
        await get_all(manager, session, "x")


def measure(model: Path, *workloads: Workload, share_prefixes: bool = True, **switches: bool) -> Page:
    """The page of metrics after these workloads, one after the other."""
    scheduler = SchedulerConfig(**{key: on for key, on in switches.items() if key != "early_fill"})
    early_fill = switches.get("early_fill", True)
    pages: list[Page] = []

    async def main() -> None:
        async with running_manager(model, scheduler=scheduler, early_fill=early_fill) as manager:
            with ExitStack() as stack:
                address = manager.registry.address
                for name in ("engine-0", "engine-1"):
                    stack.enter_context(real_engine(model, address, 256, name, share_prefixes=share_prefixes))
                await until(lambda: len(manager.registry.alive) == 2)
                for workload in workloads:
                    await workload(manager)
                scraped = run_whole(Metrics(manager.service, manager.registry).scraping())
                pages.append(parse(scraped.content.decode()))

    asyncio.run(main())
    return pages[0]


PLACEMENTS = {
    "affinity": ("placed_prefix", "placed_sharers"),
    "group": ("placed_group",),
    "split": ("splits",),
    "replication": ("replications",),
}


def counts(page: Page) -> dict[str, float]:
    found = {
        name: sum(total(page, "placements_total", kind=kind) for kind in kinds)
        for name, kinds in PLACEMENTS.items()
    }
    return found | {
        "early fill": total(page, "early_fills_total", event="finished"),
        "early fill used": total(page, "early_fill_tokens_total", event="used"),
        "early fill on engines": total(page, "engine_early_fill_tokens_total"),
        "copy on write": total(page, "engine_cow_copies_total"),
        "shared kernel": total(page, "engine_shared_decodes_total"),
    }


def test_every_optimisation_is_used_by_the_calls_that_it_is_for(tiny_model: Path) -> None:
    found = counts(measure(tiny_model, waiting_call, same_text, map_reduce))
    assert all(found.values()), found


def test_none_is_counted_when_it_is_switched_off(tiny_model: Path) -> None:
    off = {"early_fill": False, "prefix_affinity": False, "group_placement": False}
    found = counts(measure(tiny_model, waiting_call, same_text, map_reduce, share_prefixes=False, **off))
    assert found.pop("copy on write") > 0, "it is no choice: an engine shares what it finds"
    assert not any(found.values()), found


def test_calls_that_share_nothing_use_none(tiny_model: Path) -> None:
    found = counts(measure(tiny_model, strangers))
    assert not any(found.values()), found
