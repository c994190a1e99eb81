"""Every switch of `parrot serve --off` changes what is placed where, or in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from parrot.cli.options import SWITCHES
from parrot.simulation.engine import EngineSpec
from parrot.wire import CostModel
from simulation import Placement, Submit, call, play, text


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a switch is for, in small. ``holds`` is true of the placements with it and of no others."""

    submits: Sequence[Submit]
    engines: Sequence[EngineSpec]
    holds: Callable[[list[Placement]], bool]
    scheduler: dict[str, Any] = field(default_factory=dict)


def engine(*, capacity: int = 64_000, num_blocks: int = 4000, per_sequence_us: float = 10) -> EngineSpec:
    return EngineSpec(CostModel(4000, per_sequence_us, 20, 0.05, min(capacity, num_blocks * 16), num_blocks))


def single(at_s: float, name: str, num_prompt: int, num_output: int = 20, **options: Any) -> Submit:
    """One call with a prompt of its own."""
    start = sum(map(ord, name)) * 37
    return Submit(at_s, [call(text(start, num_prompt), name, max_tokens=num_output)], **options)


def chat(at_s: float, name: str, num_prompt: int, num_output: int) -> Submit:
    return single(at_s, name, num_prompt, num_output, labels=[(name, "LATENCY")])


def before(placements: list[Placement], first: str, second: str) -> bool:
    order = [name for name, _ in placements]
    return order.index(first) < order.index(second)


def together(placements: list[Placement], *names: str) -> bool:
    return len({engine for name, engine in placements if name in names}) == 1


def prefix_affinity() -> Scenario:
    """The second call of a prompt goes where the first one was, though that engine is the busier one."""
    prompt = text(0, 900)
    submits = [
        Submit(0, [call(f"{prompt} {text(920, 20)}", "first")]),
        single(1.0, "resident", 40, 400),
        Submit(1.1, [call(f"{prompt} {text(960, 20)}", "second")]),
    ]
    return Scenario(submits, [engine()] * 2, lambda p: together(p, "first", "resident", "second"))


def group_placement() -> Scenario:
    """Of a group the longest call gets an engine to itself, as its end is what the consumer waits for."""
    names, lengths = ("short", "brief", "long"), (10, 10, 100)
    maps = [
        call(text(300 * n, 40), name, max_tokens=length)
        for n, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    graph = Submit(0, [*maps, call(text(0, 9), "reduce", names)], [("reduce", "LATENCY")])
    return Scenario(
        [graph],
        [engine(per_sequence_us=1000)] * 2,
        lambda p: together(p, "short", "brief") and not together(p, *names),
    )


def splitting() -> Scenario:
    """A group that one engine could take goes to two, since it is done sooner so."""
    names = [f"part{n}" for n in range(6)]
    maps = [call(text(100 * n, 40), name, max_tokens=60) for n, name in enumerate(names)]
    graph = Submit(0, [*maps, call(text(0, 9), "reduce", names)], [("reduce", "LATENCY")])
    return Scenario([graph], [engine(per_sequence_us=1000)] * 2, lambda p: not together(p, *names))


def replication() -> Scenario:
    """A hot prompt is computed on the second engine too, before the first has all of its calls."""
    prompt = text(0, 900)
    names = [f"hot{n}" for n in range(20)]
    calls = [Submit(0.005 * n, [call(f"{prompt} {text(10 * n, 9)}", name)]) for n, name in enumerate(names)]
    return Scenario(calls, [engine()] * 2, lambda p: not together(p, *names))


def objective_aware() -> Scenario:
    """While a chat runs, work that nobody waits for comes in only up to the bound, so that the next chat is
    before the rest of it."""
    bulk = [single(0.1, f"bulk{n}", 900, labels=[(f"bulk{n}", "THROUGHPUT")]) for n in range(10)]
    submits = [chat(0, "chat", 40, 200), *bulk, chat(0.2, "next_chat", 40, 20)]
    return Scenario(
        submits, [engine()], lambda p: before(p, "next_chat", "bulk9"), {"latency_capacity_tokens": 3000}
    )


def application_order() -> Scenario:
    """The later steps of a running application go before strangers that came after its first one."""
    steps = [call(text(0, 400), "a0"), call(text(1, 400), "a1", ["a0"]), call(text(2, 400), "a2", ["a1"])]
    strangers = [single(0.01, f"s{n}", 400) for n in range(4)]
    return Scenario([Submit(0, steps), *strangers], [engine(capacity=600)], lambda p: before(p, "a2", "s3"))


def tenant_shares() -> Scenario:
    """A tenant with one call does not wait for all that another one has queued."""
    many = [single(0, f"x{n}", 400, tenant="x") for n in range(6)]
    one = single(0.01, "y", 400, tenant="y")
    return Scenario([*many, one], [engine(capacity=600)], lambda p: before(p, "y", "x3"))


def aging() -> Scenario:
    """A call too large for the room beside a stream of small ones gets an engine after a while."""
    small = [single(0.03 * n, f"small{n}", 280) for n in range(60)]
    big = single(0.2, "big", 1800)
    return Scenario(
        [*small, big], [engine(capacity=2000)], lambda p: before(p, "big", "small50"), {"aging_s": 0.2}
    )


def graph_eviction() -> Scenario:
    """What a later call of the graph begins with survives strangers that come and go in between."""
    prompt = text(0, 400)
    calls = [
        call(text(600, 30), "slow", max_tokens=400),
        call(prompt, "first"),
        call(prompt, "last", ["slow"]),
    ]
    strangers = [single(0.6 + 0.2 * n, f"s{n}", 480) for n in range(5)]
    return Scenario(
        [Submit(0, calls), *strangers], [engine(num_blocks=64)] * 2, lambda p: together(p, "first", "last")
    )


def early_fill() -> Scenario:
    """A call's prompt is computed on the idle engine while it waits for its input, and draws it there."""
    calls = [call(text(600, 30), "slow", max_tokens=200), call(text(0, 400), "last", ["slow"])]
    return Scenario([Submit(0, calls)], [engine()] * 2, lambda p: not together(p, "slow", "last"))


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    make.__name__: make
    for make in (
        prefix_affinity,
        group_placement,
        splitting,
        replication,
        objective_aware,
        application_order,
        tenant_shares,
        aging,
        graph_eviction,
        early_fill,
    )
}


def test_every_switch_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(SWITCHES)


@pytest.mark.parametrize("switch", SCENARIOS)
def test_a_switch_changes_placements(switch: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[switch]()
    keys = tmp_path / "keys.json" if any(s.tenant != "default" for s in scenario.submits) else None

    def placed(*off: str) -> list[Placement]:
        return play(scenario.submits, scenario.engines, off=off, keys=keys, **scenario.scheduler)

    with_it, without = placed(), placed(switch)
    assert scenario.holds(with_it), with_it
    assert not scenario.holds(without), without


def test_the_same_events_give_the_same_placements() -> None:
    """Session ids and the key of the prefix hash are random in every run; nothing may depend on them."""
    rng = random.Random(1)
    prompts = [text(100 * n, 300) for n in range(5)]
    submits = []
    for n in range(60):
        names = [f"{n}.{step}" for step in range(3)]
        calls = [call(f"{rng.choice(prompts)} {text(rng.randrange(1000), 30)}", name) for name in names[:2]]
        calls.append(call(text(n, 10), names[2], names[:2], max_tokens=rng.randrange(1, 60)))
        labels = [(names[2], "LATENCY")] if rng.random() < 0.5 else []
        submits.append(Submit(rng.random() * 3, calls, labels))
    engines = [engine(num_blocks=200, capacity=3000)] * 5
    first, second = play(submits, engines), play(submits, engines)
    assert len(first) == 180
    assert first == second
