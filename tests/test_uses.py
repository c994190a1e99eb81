"""What engines are told of the future of contexts: by the graph, in time, and only what changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_harness import load, watch
from graph_builder import finish, flow_call, join, make_graph, prompt_call, read, submit, value, write
from manager_harness import Manager, running_manager, until
from parrot import api, wire
from parrot._core import ContextTree
from parrot.api import SamplingBody
from parrot.engine.engine import Engine
from parrot.engine.link import Link, LinkConfig
from parrot.engine.runner import ModelRunner
from parrot.engine.server import _serve
from parrot.engine.uses import PendingUses
from parrot.manager.prompt_trie import NO_USE, NextUse, PromptTrie
from parrot.manager.uses import UNKNOWN_STEPS, GraphSteps, part_keys

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=8)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PATHS, st.sets(st.integers(0, 7)), st.lists(st.integers(0, 2), max_size=4).map(tuple))
def test_the_next_use_is_the_longest_prefix_that_unfinished_calls_have(
    paths: list[tuple[int, ...]], finished: set[int], wanted: tuple[int, ...]
) -> None:
    trie = PromptTrie[int]()
    for number, path in enumerate(paths):
        trie.add(number, path)
    for number in finished & set(range(len(paths))):
        trie.remove(number, paths[number])
    left = {number: path for number, path in enumerate(paths) if number not in finished}
    expected = NO_USE
    for end in range(1, len(wanted) + 1):
        sharers = [number for number, path in left.items() if path[:end] == wanted[:end]]
        if sharers:
            expected = NextUse(end, len(sharers), min(sharers))
    assert trie.next_use(wanted, lambda number: number) == expected


def test_parts_are_equal_where_text_will_be_whether_or_not_it_is_there_yet() -> None:
    graph = make_graph()
    one, other = submit(
        graph,
        prompt_call("F", "Same {{input:a}} {{input:b}} one {{output:x}}"),
        prompt_call(
            "G", "Same {{input:a}} {{input:b}} two {{output:y}}", read("b", transforms=[{"op": "strip"}])
        ),
        variables=[value("a"), value("b", "B")],
    ).calls
    before, after = part_keys(one), part_keys(other)
    assert before[:2] == after[:2]
    assert before[3] != after[3], "a transform makes it another text"
    graph.set_value("a", "A")
    assert (part_keys(one), part_keys(other)) == (before, after)


def test_an_output_is_the_same_part_as_a_later_input_of_its_variable() -> None:
    graph = make_graph()
    first, second = submit(
        graph,
        prompt_call("F", "Hello {{output:x}}"),
        prompt_call("G", "Hello {{input:x}} and {{output:y}}"),
    ).calls
    assert part_keys(first) == part_keys(second)[:2]


def test_steps_are_the_longest_way_from_what_can_run() -> None:
    graph = make_graph()
    a, b, c, d, outside = submit(
        graph,
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["a", "ab"], ["c"]),
        flow_call("D", ["c"], ["d"]),
        flow_call("E", ["client"], ["e"]),
        variables=[join("ab", "a", "b"), value("client")],
    ).calls
    steps = GraphSteps()
    assert [steps(call) for call in (d, c, b, a, outside)] == [3, 2, 1, 0, UNKNOWN_STEPS]
    finish(graph, "A", "text")
    steps = GraphSteps()
    assert [steps(call) for call in (b, c, d)] == [0, 1, 2]


def test_only_cached_contexts_are_told_and_the_last_word_counts() -> None:
    tree, pending = ContextTree(8), PendingUses()
    for context_id in (1, 2):
        tree.open(context_id, 0, np.empty(0, np.int32), 0)
        tree.release(context_id)
    ids = tuple(map(wire.ContextId, (1, 2, 3)))
    pending.add(wire.ContextUses(ids, (5, 5, 5), (1, 1, 1), (2, 2, 2)))
    pending.add(wire.ContextUses(ids[:1], (2**40,), (0,), (-1,)))
    assert pending.apply(tree, {ids[0], ids[1]}) == 2
    assert pending.apply(tree, {ids[0], ids[1]}) == 0
    tree.check_invariants()


# --- the manager, with engines that answer from a script ---


def run(model: Path, scenario: Callable[[Manager], Awaitable[None]], **config: object) -> None:
    async def main() -> None:
        async with running_manager(model, **config) as manager:
            await scenario(manager)

    asyncio.run(main())


def told(messages: list[wire.ToEngine]) -> dict[int, tuple[int, int, int]]:
    """Context -> what was last said of it."""
    last: dict[int, tuple[int, int, int]] = {}
    for message in messages:
        if isinstance(message, wire.ContextUses):
            columns = (message.prefix_lengths, message.remaining_uses, message.steps_to_next_use)
            last |= dict(zip(message.context_ids, zip(*columns, strict=True), strict=True))
    return last


WORDS = "some words and many more words"
SHARED = "Read the following with care and at length. {{input:text}} Then "
READERS = (
    prompt_call("one", SHARED + "say one {{output:a}}", read("text", value=WORDS)),
    prompt_call("two", "The first of them was this one: {{input:a}} {{output:b}}"),
    prompt_call("three", "Second {{input:b}} {{output:c}}"),
    prompt_call("four", SHARED + "say four of {{input:c}} {{output:d}}", read("text", value=WORDS)),
)


def test_a_context_is_kept_up_to_where_an_unfinished_call_agrees_with_it(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(lambda text: text.split()[-1] + "!")
        engine.held = True
        session = manager.submit(*READERS)
        await until(lambda: len(engine.dispatches) == 1)
        await engine.answer(engine.dispatches[0])
        await until(lambda: len(engine.dispatches) == 2)
        first = engine.dispatches[0].verbs[0]
        assert isinstance(first, wire.Fill)
        length, uses, steps = told(engine.other)[first.context_id]
        prompt = manager.tokenizer.decode(wire.unpack_ids(first.token_ids)[:length])
        assert SHARED.replace("{{input:text}}", WORDS).startswith(prompt)
        assert "some words and" in prompt
        assert (uses, steps) == (1, 2)
        await engine.answer(engine.dispatches[1])
        await until(lambda: len(engine.dispatches) == 3)
        await until(lambda: told(engine.other)[first.context_id] == (length, 1, 1))
        second = engine.dispatches[1].verbs[0]
        assert isinstance(second, wire.Fill)
        assert told(engine.other)[second.context_id][2] == UNKNOWN_STEPS, "its constant beginning alone"
        for number in (2, 3):
            await until(lambda number=number: len(engine.dispatches) == number + 1)
            await engine.answer(engine.dispatches[number])
        await manager.get(session, "d")
        await until(lambda: told(engine.other)[first.context_id][2] == UNKNOWN_STEPS)
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_context_has_no_use_left_when_its_last_consumer_has_ended(tiny_model: Path) -> None:
    calls = (
        prompt_call("one", "{{input:text}} say one {{output:a}}", read("text", value=WORDS)),
        prompt_call("two", "{{input:text}} say two of {{input:a}} {{output:b}}", read("text", value=WORDS)),
        prompt_call("never", "Wait {{input:outside}} {{output:c}}"),
    )

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        variables = [value("outside").model_dump()]
        session = manager.submit(*calls, variables=variables)
        await manager.get(session, "b")
        contexts = [dispatch.verbs[0].context_id for dispatch in engine.dispatches]
        await until(lambda: all(told(engine.other).get(context) == (0, 0, 0) for context in contexts))

    run(tiny_model, scenario)


def test_nothing_is_said_of_eviction_when_it_is_switched_off(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        session = manager.submit(*READERS)
        await manager.get(session, "d")
        assert not told(engine.other)

    run(tiny_model, scenario, graph_eviction=False)


# --- the manager with a real engine ---


@contextmanager
def real_engine(
    model: Path, address: str, num_blocks: int, name: str = "engine-0", *, share_prefixes: bool = True
) -> Iterator[Engine]:
    """An engine in a thread, joined to the manager by its socket."""
    import torch

    weights, tokenizer = load(model, share_prefixes=share_prefixes)
    runner = ModelRunner(weights, num_blocks, torch.float32, torch.device("cpu"))
    engine = Engine(runner, tokenizer, max_batch_size=4, max_batch_tokens=256)
    watch(engine)
    info = wire.ModelInfo(
        "tiny", tokenizer.fingerprint, tokenizer.vocab_size, weights.config.max_positions, "float32", "cpu"
    )
    cost = wire.CostModel(1000.0, 10.0, 10.0, 0.01, num_blocks * 16, num_blocks)
    registration = wire.Register(wire.PROTOCOL_VERSION, name, f"epoch-{name}", 1, info, cost, 4)
    link = Link(LinkConfig(address, 0.05, 60.0), registration, engine.stats())
    link.start()
    loop = threading.Thread(target=_serve, args=(engine, link, registration.epoch, 60.0))
    loop.start()
    try:
        yield engine
    finally:
        link.stop("the test is over")
        loop.join(10)
        link.close("the test is over")


def rounds(num_rounds: int) -> list[api.CallBody]:
    """A long text is read in every round; between two of them three others pass through the cache."""
    sampling = SamplingBody(max_tokens=4, ignore_eos=True)
    calls = [prompt_call("begin", "Begin {{output:last}}", write("last", sampling=sampling))]
    last = "last"

    def follow(name: str, text: str) -> None:
        nonlocal last
        prompt = f"{{{{input:text}}}} after {{{{input:{last}}}}} {{{{output:{name}}}}}"
        calls.append(prompt_call(name, prompt, read("text", value=text), write(name, sampling=sampling)))
        last = name

    for number in range(num_rounds):
        follow(f"read{number}", " ".join(f"word{n}" for n in range(60)))
        for other in "abc":
            follow(f"pass{number}{other}", " ".join(f"{other}{number}x{n}" for n in range(40)))
    return calls


@pytest.mark.system
def test_a_real_engine_computes_less_again_when_it_is_told_of_the_graph(tiny_model: Path) -> None:
    computed: dict[bool, int] = {}  # prompt tokens, by graph_eviction

    def scenario_with(graph_eviction: bool) -> Callable[[Manager], Awaitable[None]]:
        async def scenario(manager: Manager) -> None:
            with real_engine(tiny_model, manager.registry.address, num_blocks=48) as engine:
                await until(lambda: bool(manager.registry.alive))
                session = manager.submit(*rounds(3))
                assert await manager.get(session, "pass2c", timeout_ms=60_000) is not None
                computed[graph_eviction] = engine.counters.prefill_tokens
                assert (engine.counters.hinted_contexts > 0) == graph_eviction
                assert engine.stats().evicted_blocks > 0

        return scenario

    for graph_eviction in (False, True):
        run(tiny_model, scenario_with(graph_eviction), graph_eviction=graph_eviction)
    assert computed[True] < 0.85 * computed[False]
