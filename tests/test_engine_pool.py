"""Calls and the blocks of an engine's pool: preemption, refusal, abort, eviction, and who gives up first."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_harness import Harness, MakeHarness, Oracle, greedy_oracle, load, prompt_of
from parrot.wire import CallId, ContextId


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> MakeHarness:
    loaded = load(tiny_model)
    return lambda **options: Harness(*loaded, **options)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return greedy_oracle(tiny_model)


def test_preempted_calls_give_the_same_ids(make: MakeHarness, oracle: Oracle) -> None:
    prompts = [prompt_of(14 + i, seed=i) for i in range(8)]
    harness = make(num_blocks=10)
    results = harness.run(*[harness.submit(prompt, max_tokens=40) for prompt in prompts])
    assert harness.engine.stats().preemptions > 0
    assert [result.ids for result in results] == [oracle(prompt, 40) for prompt in prompts]


def test_many_calls_with_shared_prefixes_run_in_a_cache_for_a_few(make: MakeHarness, oracle: Oracle) -> None:
    prefixes = [prompt_of(20, seed=i) for i in range(4)]
    prompts = [prefixes[i % 4] + prompt_of(i % 7, seed=200 + i % 14) for i in range(112)]
    harness = make(num_blocks=12)
    calls = [harness.submit(prompt, max_tokens=40 + i % 10) for i, prompt in enumerate(prompts)]
    results = harness.run(*calls)
    expected = {prompt: oracle(prompt, 49) for prompt in set(map(tuple, prompts))}
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.ids == expected[tuple(prompt)][: 40 + i % 10]
    stats = harness.engine.stats()
    assert stats.preemptions > 0
    assert stats.evicted_blocks > 0
    assert stats.cached_tokens > 0


def test_a_call_that_needs_the_whole_pool_runs_although_the_cache_fills_it(
    make: MakeHarness, oracle: Oracle
) -> None:
    harness = make(num_blocks=4)
    prompt = prompt_of(21, seed=5)
    harness.generate(prompt, max_tokens=8)
    assert harness.generate([*prompt, 7], max_tokens=42).ids == oracle([*prompt, 7], 42)


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [(60, 10, ["60", "10", "5 blocks", "4 of this engine"]), (10_000, 5, ["10000", "10005"])],
)
def test_a_call_that_can_never_fit_is_refused_at_once_with_the_numbers(
    make: MakeHarness, length: int, max_tokens: int, numbers: list[str]
) -> None:
    harness = make(num_blocks=4)
    running = harness.submit(prompt_of(20), max_tokens=4)
    refused = harness.submit(prompt_of(length), max_tokens=max_tokens)
    harness.step()
    error = harness.results[refused].error
    assert error is not None
    assert error.code == "prompt_too_long"
    assert all(number in error.message for number in numbers)
    assert harness.run(running)[0].error is None


def test_abort_in_the_middle_of_decoding_returns_the_blocks(make: MakeHarness, oracle: Oracle) -> None:
    harness = make()
    prompts = [prompt_of(30, seed=1), prompt_of(30, seed=2)]
    first, second = (harness.submit(prompt, max_tokens=50) for prompt in prompts)
    for _ in range(10):
        harness.step()
    held = harness.engine.tree.num_held_blocks
    harness.engine.abort([CallId(first), CallId(999)])
    assert harness.engine.tree.num_held_blocks < held
    assert harness.run(second)[0].ids == oracle(prompts[1], 50)
    assert not harness.results[first].ended


def test_abort_of_waiting_and_preempted_calls_leaves_nothing_behind(make: MakeHarness) -> None:
    harness = make(num_blocks=6, max_batch_size=4)
    calls = [harness.submit(prompt_of(20, seed=i), max_tokens=40) for i in range(6)]
    while harness.engine.stats().preemptions == 0:
        harness.step()
    harness.engine.abort([CallId(call) for call in calls])
    assert not harness.engine.has_work
    tree = harness.engine.tree
    assert tree.num_free_blocks + tree.num_evictable_blocks == tree.num_blocks
    harness.run()


def test_evicted_contexts_are_reported_unless_they_were_freed(make: MakeHarness) -> None:
    harness = make(num_blocks=8)
    kept = harness.submit(prompt_of(40, seed=1), max_tokens=1)
    freed = harness.submit(prompt_of(40, seed=2), max_tokens=1)
    harness.run()
    harness.engine.free_contexts([ContextId(freed), ContextId(12345)])
    harness.generate(prompt_of(100, seed=3), max_tokens=1)
    assert [context_id for context_id, _ in harness.evicted] == [kept]
    assert harness.evicted[0][1] < 40


def test_the_application_that_arrived_first_is_admitted_first(make: MakeHarness) -> None:
    harness = make(max_batch_size=1)
    late = harness.submit(prompt_of(4, seed=1), max_tokens=1, arrival=20)
    early = harness.submit(prompt_of(4, seed=2), max_tokens=1, arrival=10)
    harness.run()
    done = [reply.call_id for reply in harness.log if type(reply).__name__ == "CallDone"]
    assert done == [early, late]


def test_the_application_that_arrived_last_gives_up_its_blocks(make: MakeHarness) -> None:
    harness = make(num_blocks=8)
    late = harness.submit(prompt_of(20, seed=1), max_tokens=60, arrival=20)
    early = harness.submit(prompt_of(20, seed=2), max_tokens=60, arrival=10)
    harness.run()
    assert harness.engine.stats().preemptions > 0
    done = [reply.call_id for reply in harness.log if type(reply).__name__ == "CallDone"]
    assert done == [early, late]
