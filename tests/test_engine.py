"""The engine's step loop against transformers' generate: batching, reuse, programs, sampling, counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_harness import Harness, MakeHarness, Oracle, greedy_oracle, load, prompt_of
from parrot.wire import ContextId, FreeContext, Sampling


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> MakeHarness:
    loaded = load(tiny_model)
    return lambda **options: Harness(*loaded, **options)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return greedy_oracle(tiny_model)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 150])
def test_greedy_ids_are_those_of_transformers(make: MakeHarness, oracle: Oracle, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    assert make().generate(prompt, max_tokens=20).ids == oracle(prompt, 20)


def test_a_batch_of_different_lengths_gives_what_each_call_gives_alone(
    make: MakeHarness, oracle: Oracle
) -> None:
    prompts = [prompt_of(5 + 13 * i, seed=i) for i in range(12)]
    harness = make(max_batch_size=8)
    results = harness.run(*[harness.submit(prompt, max_tokens=10 + i) for i, prompt in enumerate(prompts)])
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.ids == oracle(prompt, 10 + i)


def test_calls_that_arrive_in_the_middle_of_others_change_nothing(make: MakeHarness, oracle: Oracle) -> None:
    harness = make()
    calls: list[tuple[int, list[int]]] = []
    for i in range(6):
        prompt = prompt_of(40, seed=i % 3) + prompt_of(i, seed=100 + i)
        calls.append((harness.submit(prompt, max_tokens=12), prompt))
        for _ in range(3):
            harness.step()
    for (_, prompt), result in zip(calls, harness.run(*[call for call, _ in calls]), strict=True):
        assert result.ids == oracle(prompt, 12)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_fully_cached_prompt_gives_the_same_ids_every_time(
    make: MakeHarness, oracle: Oracle, length: int
) -> None:
    prompt = prompt_of(length, seed=9)
    harness = make()
    runs = [harness.generate(prompt, max_tokens=9) for _ in range(3)]
    assert [run.ids for run in runs] == [oracle(prompt, 9)] * 3
    assert [run.fills[0].cached_tokens for run in runs] == [0, length - 1, length - 1]
    assert harness.engine.stats().forks == 2


def test_forks_that_diverge_inside_one_partial_block_give_their_own_ids(
    make: MakeHarness, oracle: Oracle
) -> None:
    shared = prompt_of(16 + 5, seed=1)
    harness = make()
    harness.generate(shared, max_tokens=1)
    prompts = [[*shared, 40 + i] for i in range(4)]
    results = harness.run(*[harness.submit(prompt, max_tokens=14) for prompt in prompts])
    assert [result.ids for result in results] == [oracle(prompt, 14) for prompt in prompts]
    assert all(result.fills[0].cached_tokens == len(shared) for result in results)
    assert harness.engine.stats().cow_copies >= 3


def test_calls_that_share_a_prefix_compute_it_once(make: MakeHarness, oracle: Oracle) -> None:
    shared = prompt_of(200, seed=2)
    prompts = [shared + prompt_of(3, seed=50 + i) for i in range(16)]
    harness = make(max_batch_tokens=8192)  # room for all of them in one step
    results = harness.run(*[harness.submit(prompt, max_tokens=4) for prompt in prompts])
    assert harness.engine.stats().prefill_tokens < 200 + 16 * 32
    assert [result.ids for result in results] == [oracle(prompt, 4) for prompt in prompts]


def test_a_call_does_not_wait_for_a_prefix_that_is_computed_already(make: MakeHarness) -> None:
    shared = prompt_of(60, seed=2)
    harness = make(max_batch_tokens=100)
    harness.generate(shared, max_tokens=1)
    harness.submit(shared + prompt_of(150, seed=3), max_tokens=20)
    harness.step()
    second = harness.submit(shared + prompt_of(2, seed=4), max_tokens=1)
    harness.step()
    assert harness.results[second].done is not None
    harness.run()


def test_another_domain_shares_no_tokens(make: MakeHarness, oracle: Oracle) -> None:
    prompt = prompt_of(50, seed=3)
    harness = make()
    first, other, again = (harness.generate(prompt, domain=domain) for domain in (1, 2, 1))
    assert [r.fills[0].cached_tokens for r in (first, other, again)] == [0, 0, 49]
    assert first.ids == other.ids == again.ids == oracle(prompt, 8)


def test_a_long_prefill_does_not_hold_up_decodes(make: MakeHarness) -> None:
    harness = make(max_batch_tokens=64)
    decoding = harness.submit(prompt_of(10, seed=1), max_tokens=8, arrival=20)
    harness.step()
    prefilling = harness.submit(prompt_of(600, seed=2), max_tokens=1, arrival=10)
    for _ in range(7):
        harness.step()
    assert harness.results[decoding].done is not None
    assert harness.results[prefilling].done is None
    harness.run()


def test_outputs_and_later_inputs_of_one_call_continue_one_context(make: MakeHarness, oracle: Oracle) -> None:
    first, second = prompt_of(20, seed=1), prompt_of(9, seed=2)
    sampling = Sampling(max_tokens=7, ignore_eos=True)
    harness = make()
    (result,) = harness.run(harness.submit_verbs([first, sampling, second, sampling, sampling]))
    a = oracle(first, 7)
    b = oracle(first + a + second, 14)
    assert [result.ids_of(i) for i in range(3)] == [a, b[:7], b[7:]]
    assert [(fill.verb, fill.num_tokens) for fill in result.fills] == [(0, 20), (2, 9)]
    assert [output.verb for output in result.outputs] == [1, 3, 4]
    assert result.done is not None
    assert result.done.num_tokens == 20 + 7 + 9 + 14 - 1


def test_a_prompt_filled_in_two_parts_equals_one_part(make: MakeHarness, oracle: Oracle) -> None:
    prompt = prompt_of(45, seed=3)
    harness = make()
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    (result,) = harness.run(harness.submit_verbs([prompt[:30], [], prompt[30:], sampling]))
    assert result.ids == oracle(prompt, 6)
    assert [fill.num_tokens for fill in result.fills] == [30, 0, 15]


def test_a_fill_alone_leaves_its_tokens_in_the_cache(make: MakeHarness) -> None:
    harness = make()
    prompt = prompt_of(70, seed=3)
    (result,) = harness.run(harness.submit_verbs([prompt]))
    assert result.done is not None
    assert result.done.num_tokens == 70
    assert harness.generate([*prompt, 5]).fills[0].cached_tokens == 70


def test_an_empty_context_is_legal_and_a_generate_onto_it_is_an_error(make: MakeHarness) -> None:
    harness = make()
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    empty, late, bare = harness.run(
        harness.submit_verbs([[]]),
        harness.submit_verbs([[], prompt_of(5), sampling]),
        harness.submit_verbs([[], sampling]),
    )
    assert empty.done is not None
    assert empty.done.num_tokens == 0
    assert len(late.ids) == 3
    assert bare.error is not None
    assert bare.error.code == "engine_error"


def test_a_context_freed_by_the_call_itself_is_forgotten(make: MakeHarness) -> None:
    harness = make()
    call = harness.submit_verbs([prompt_of(20), Sampling(max_tokens=2), FreeContext(ContextId(1))])
    harness.run(call)
    with pytest.raises(KeyError):
        harness.engine.tree.tokens(1)


def test_a_seeded_output_is_the_same_alone_and_in_a_batch(make: MakeHarness) -> None:
    options = [
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.4, "top_p": 0.8, "seed": 2},
        {"temperature": 0.9, "seed": 3},
        {},
    ]
    prompts = [prompt_of(18, seed=7 + i // 3) for i in range(4)]
    alone = [make().generate(prompt, **o).ids for prompt, o in zip(prompts, options, strict=True)]
    harness = make()
    batch = harness.run(*[harness.submit(p, **o) for p, o in zip(prompts, options, strict=True)])
    assert [result.ids for result in batch] == alone
    assert alone[0] != alone[2]


def test_every_id_of_a_sampled_output_has_its_own_number(make: MakeHarness) -> None:
    result = make().generate(prompt_of(5), max_tokens=30, temperature=100.0, seed=5)
    assert len(set(result.ids)) > 20


def test_timing_and_counters_describe_the_call(make: MakeHarness) -> None:
    harness = make()
    result = harness.generate(prompt_of(40), max_tokens=6)
    timing = result.outputs[0].timing
    assert timing.received_us <= timing.admitted_us <= timing.first_token_us < timing.finished_us
    stats = harness.engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (40, 5)
    assert stats.num_steps == 6
    assert 0 < stats.busy_us <= timing.finished_us - timing.received_us + 1_000_000
