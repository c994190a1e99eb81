"""Where an output ends: end of sequence, stop strings, streamed chunks, cut characters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine_harness import Harness, MakeHarness, Oracle, Result, greedy_oracle, load, prompt_of
from parrot.engine.model import DecoderModel
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import Grammar, Sampling


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture
def make(loaded: tuple[DecoderModel, Tokenizer]) -> MakeHarness:
    return lambda **options: Harness(*loaded, **options)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return greedy_oracle(tiny_model)


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[a-z]{9}")])
def test_ends_that_are_no_ids_of_the_model_harm_no_call(
    loaded: tuple[DecoderModel, Tokenizer], grammar: Grammar | None
) -> None:
    """Files name such ids: of a larger tokenizer, or -1 for none."""
    model, tokenizer = loaded
    odd = dataclasses.replace(tokenizer, eos_ids=tokenizer.eos_ids | {-1, 512, 100_000, 2**40})
    options: dict[str, object] = {"max_tokens": 12, "ignore_eos": False, "grammar": grammar}
    if grammar is None:
        options["min_tokens"] = 12
    results = [Harness(model, t).generate(prompt_of(20, seed=4), **options) for t in (odd, tokenizer)]
    assert results[0].error is None
    assert results[0].ids == results[1].ids


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
