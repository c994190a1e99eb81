"""The engine's step loop against transformers' generate: batching, reuse, preemption, programs, failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_harness import Harness, Result, load
from parrot.engine.model import DecoderModel
from parrot.errors import DuplicateRequest
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallId, ContextId, Dispatch, Fill, FreeContext, Generate, Sampling, pack_ids

MakeHarness = Callable[..., Harness]
Oracle = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture
def make(loaded: tuple[DecoderModel, Tokenizer]) -> MakeHarness:
    def build(**options: int) -> Harness:
        return Harness(*loaded, **options)

    return build


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    """Greedy ids by transformers, one prompt at a time, end-of-sequence ignored."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return generate


def prompt_of(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


# --- the same ids as one request at a time -----------------------------------------------------------------


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


# --- blocks ------------------------------------------------------------------------------------------------


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


# --- programs of several verbs -----------------------------------------------------------------------------


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


# --- where an output ends ----------------------------------------------------------------------------------


def test_end_of_sequence_ends_the_output_and_stays_out_of_the_context(
    loaded: tuple[DecoderModel, Tokenizer], oracle: Oracle
) -> None:
    model, tokenizer = loaded
    prompt, follow = prompt_of(20, seed=4), prompt_of(5, seed=5)
    expected = oracle(prompt, 12)
    eos = next(token for i, token in enumerate(expected) if i >= 3 and token not in expected[:i])
    at = expected.index(eos)
    harness = Harness(model, dataclasses.replace(tokenizer, eos_ids=frozenset({eos})))
    sampling = Sampling(max_tokens=30)
    (result,) = harness.run(
        harness.submit_verbs([prompt, sampling, follow, Sampling(max_tokens=4, ignore_eos=True)])
    )
    assert result.ids == expected[:at]
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].num_generated == at + 1
    assert result.ids_of(1) == oracle(prompt + expected[:at] + follow, 4)


def test_two_outputs_after_each_other_go_on_after_an_end_of_sequence(
    loaded: tuple[DecoderModel, Tokenizer], oracle: Oracle
) -> None:
    model, tokenizer = loaded
    prompt = prompt_of(20, seed=4)
    expected = oracle(prompt, 12)
    eos = next(token for i, token in enumerate(expected) if i >= 3 and token not in expected[:i])
    harness = Harness(model, dataclasses.replace(tokenizer, eos_ids=frozenset({eos})))
    again = Sampling(max_tokens=3, ignore_eos=True)
    (result,) = harness.run(harness.submit_verbs([prompt, Sampling(max_tokens=30), again]))
    at = expected.index(eos)
    assert result.ids + result.ids_of(1) == expected[:at] + oracle(prompt + expected[:at], 3)


def readable_output(harness: Harness) -> tuple[list[int], Result]:
    """A prompt whose greedy output begins with whole, different characters, some of them in one id."""
    for seed in range(500):
        prompt = prompt_of(12, seed=1000 + seed)
        result = harness.generate(prompt, max_tokens=10)
        start = result.outputs[0].text[:8]
        if len(set(start)) >= 7 and "\ufffd" not in start:
            return prompt, harness.generate(prompt, max_tokens=24)
    raise AssertionError("no prompt gave readable text")


@pytest.mark.parametrize(("start", "size"), [(3, 1), (4, 3), (6, 5), (0, 2)])
def test_a_stop_string_cuts_text_and_context_at_the_same_place(
    make: MakeHarness, oracle: Oracle, start: int, size: int
) -> None:
    harness = make()
    prompt, whole = readable_output(harness)
    text = whole.outputs[0].text
    stop = text[start : start + size]
    follow = prompt_of(6, seed=8)
    sampling = Sampling(max_tokens=24, stop=(stop, "never there"), ignore_eos=True)
    call = harness.submit_verbs(
        [prompt, sampling, follow, Sampling(max_tokens=5, ignore_eos=True)], stream=True
    )
    (result,) = harness.run(call)
    output = result.outputs[0]
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"
    assert result.chunks[1] == output.text
    assert harness.tokenizer.decode(result.ids) == output.text
    assert result.ids_of(1) == oracle(prompt + result.ids + follow, 5)
    tokens = harness.engine.tree.tokens(call).tolist()
    assert tokens == (prompt + result.ids + follow + result.ids_of(1))[: len(tokens)]


def test_streamed_chunks_add_up_to_the_text(make: MakeHarness) -> None:
    harness = make()
    calls = [harness.submit(prompt_of(10, seed=i), max_tokens=30, stream=i != 2) for i in range(4)]
    for i, result in enumerate(harness.run(*calls)):
        assert result.chunks.get(1, "") == ("" if i == 2 else result.outputs[0].text)


def test_a_text_cut_inside_a_character_is_the_text_of_its_ids(make: MakeHarness) -> None:
    harness = make()
    for result in harness.run(*[harness.submit(prompt_of(6, seed=i), max_tokens=5) for i in range(20)]):
        assert result.outputs[0].text == harness.tokenizer.decode(result.ids)


# --- sampling ----------------------------------------------------------------------------------------------


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


# --- failures ----------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_fail_their_call_alone(
    make: MakeHarness, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    forward = harness.runner.forward

    def poisoned(*args: object) -> torch.Tensor:
        logits = forward(*args).clone()  # type: ignore[arg-type]
        if len(logits) == 2:
            logits[0, 5] = float("nan")
        return logits

    prompts = [prompt_of(10, seed=1), prompt_of(10, seed=2)]
    calls = [harness.submit(prompt) for prompt in prompts]
    monkeypatch.setattr(harness.runner, "forward", poisoned)
    bad, good = harness.run(*calls)
    assert bad.error is not None
    assert bad.error.code == "engine_error"
    assert good.ids == oracle(prompts[1], 8)


def test_a_step_that_raises_fails_its_calls_and_the_engine_lives_on(
    make: MakeHarness, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(max_batch_size=2)
    calls = [harness.submit(prompt_of(10, seed=i)) for i in range(3)]
    harness.step()

    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(harness.runner, "forward", broken)
        harness.step()
    first, second, third = harness.run(*calls)
    for result in (first, second):
        assert result.error is not None
        assert result.error.code == "engine_error"
        assert "device lost" in result.error.message
    assert third.ids == oracle(prompt_of(10, seed=2), 8)


@pytest.mark.parametrize(
    ("verbs", "param"),
    [
        ((Fill(pack_ids([1, 999_999]), ContextId(7)),), "token_ids"),
        ((Fill(pack_ids([1, -1]), ContextId(7)),), "token_ids"),
        ((Fill(b"abc", ContextId(7)),), "token_ids"),
        ((Fill(pack_ids([1]), ContextId(7)), Generate(Sampling(), ContextId(8))), "verbs"),
        ((), "verbs"),
        ((Fill(pack_ids([1]), ContextId(7)), Generate(Sampling(top_p=2.0), ContextId(7))), "top_p"),
    ],
)
def test_a_program_that_cannot_run_is_refused_by_name(
    make: MakeHarness, verbs: tuple[Fill | Generate, ...], param: str
) -> None:
    harness = make()
    (result,) = harness.run(harness.submit_verbs(verbs))
    assert result.error is not None
    assert (result.error.code, result.error.param) == ("invalid_request", param)


def test_ids_in_use_are_refused(make: MakeHarness) -> None:
    harness = make()
    call = harness.submit(prompt_of(5), max_tokens=2)
    dispatch = Dispatch(CallId(call), 1, 0, "LATENCY", (Fill(pack_ids([4]), ContextId(50)),))
    with pytest.raises(DuplicateRequest):
        harness.engine.submit(dispatch)
    reuse = harness.submit_verbs([Fill(pack_ids([4]), ContextId(call))])
    assert harness.run(call, reuse)[1].error is not None
    assert harness.results[call].error is None


def test_reset_forgets_calls_and_contexts_so_that_ids_may_start_again(
    make: MakeHarness, oracle: Oracle
) -> None:
    harness = make()
    harness.generate(prompt_of(20), max_tokens=3)
    harness.submit(prompt_of(30), max_tokens=30)
    harness.step()
    harness.engine.reset()
    assert not harness.engine.has_work
    harness.results.clear()
    harness.next_id = 1
    prompt = prompt_of(20, seed=3)
    assert harness.generate(prompt, max_tokens=3).ids == oracle(prompt, 3)


def test_timing_and_counters_describe_the_call(make: MakeHarness) -> None:
    harness = make()
    result = harness.generate(prompt_of(40), max_tokens=6)
    timing = result.outputs[0].timing
    assert timing.received_us <= timing.admitted_us <= timing.first_token_us < timing.finished_us
    stats = harness.engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (40, 5)
    assert stats.num_steps == 6
    assert 0 < stats.busy_us <= timing.finished_us - timing.received_us + 1_000_000
