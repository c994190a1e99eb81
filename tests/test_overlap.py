"""The step loop with the device ahead of the host gives what the plain one gives. On the CPU a launched step
is over at once, but its ids are taken in as late as on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_harness import Harness, Result, load, prompt_of
from parrot.engine import overlap
from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import LaunchedIds, OverlappingEngine
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallDone, CallId, ContextId, ContextsEvicted, Grammar, Sampling

Parts = tuple[DecoderModel, Tokenizer]
Ran = tuple[Harness, list[int]]  # with the id of each call


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> Parts:
    return load(tiny_model)


@dataclass(frozen=True)
class Planned:
    """A call, the step before which it comes, and the one before which it is given up."""

    verbs: tuple[list[int] | Sampling, ...]
    at_step: int
    stream: bool
    early_fill: bool
    gone_at: int | None


def plan(rng: random.Random) -> list[Planned]:
    """Calls of every kind, some of which share beginnings."""
    stems = [prompt_of(rng.randrange(1, 40), seed=rng.randrange(2)) for _ in range(2)]
    return [planned(rng, stems) for _ in range(rng.randrange(1, 7))]


def planned(rng: random.Random, stems: list[list[int]]) -> Planned:
    def prompt() -> list[int]:
        return [*rng.choice(stems)[: rng.randrange(1, 40)], rng.randrange(3, 256)]

    early_fill = rng.random() < 0.1
    parts = [part for _ in range(rng.choice((1, 1, 2))) for part in (prompt(), sampling(rng))]
    return Planned(
        verbs=(prompt(),) if early_fill else tuple(parts),
        at_step=rng.randrange(12),
        stream=rng.random() < 0.5,
        early_fill=early_fill,
        gone_at=rng.randrange(1, 30) if rng.random() < 0.2 else None,
    )


def sampling(rng: random.Random) -> Sampling:
    """Outputs that end at any offset, by an id, by their length or by their text."""
    kind = rng.randrange(8)
    return Sampling(
        max_tokens=rng.randrange(1, 14),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(1000),
        top_k=20 if kind == 1 else -1,
        stop_token_ids=tuple(range(3, 512, rng.choice((4, 9)))) if rng.random() < 0.5 else (),
        ignore_eos=rng.random() < 0.5,
        presence_penalty=1.0 if kind == 2 else 0.0,
        stop=("e",) if kind == 3 else (),
        logprobs=2 if kind == 4 else None,
        min_tokens=1 if kind == 5 else 0,
        grammar=Grammar("regex", "[ab]{2,5}c") if kind == 6 else None,
    )


def run(parts: Parts, engine_type: type[Engine], calls: list[Planned], **limits: int) -> Ran:
    harness = Harness(*parts, engine_type=engine_type, **limits)
    numbers: dict[int, int] = {}
    for step in range(31):
        for number, call in enumerate(calls):
            if call.at_step == step:
                flags = {"stream": call.stream, "early_fill": call.early_fill}
                numbers[number] = harness.submit_verbs(list(call.verbs), arrival=number, **flags)
            if call.gone_at == step and number in numbers:
                harness.engine.abort([CallId(numbers[number])])
        harness.step()
    harness.run()
    return harness, [numbers[number] for number in range(len(calls))]


def told(result: Result) -> object:
    """All that the replies of a call say, but when."""
    outputs = [
        (out.verb, out.text, out.token_ids, out.num_generated, out.finish_reason, out.logprobs is None)
        for out in result.outputs
    ]
    fills = [(fill.verb, fill.num_tokens) for fill in result.fills]
    return fills, outputs, dict(result.chunks), result.done and result.done.num_tokens, result.error


def check_context(harness: Harness, call_id: int, call: Planned) -> None:
    """What the cache has under the context of a finished call is a beginning of its text."""
    ids: list[int] = []
    outputs = iter(range(len(harness.results[call_id].outputs)))
    for verb in call.verbs:
        ids += verb if isinstance(verb, list) else harness.results[call_id].ids_of(next(outputs))
    if call_id in harness.engine._cached:
        cached = harness.engine.tree.tokens(call_id).tolist()
        assert cached == ids[: len(cached)]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from((8, 12, 64)), tokens=st.sampled_from((16, 64)))
def test_any_mix_of_calls_is_told_the_same(parts: Parts, seed: int, num_blocks: int, tokens: int) -> None:
    calls = plan(random.Random(seed))
    limits = {"num_blocks": num_blocks, "max_batch_tokens": tokens}
    plain, plain_ids = run(parts, Engine, calls, **limits)
    ahead, ahead_ids = run(parts, OverlappingEngine, calls, **limits)
    for call, theirs, mine in zip(calls, plain_ids, ahead_ids, strict=True):
        if call.gone_at is None:
            assert told(ahead.results[mine]) == told(plain.results[theirs])
            if ahead.results[mine].done:
                check_context(ahead, mine, call)


def test_an_output_that_ends_at_any_offset_leaves_its_context_exact(parts: Parts) -> None:
    prompt = prompt_of(12)
    expected = Harness(*parts).generate(prompt, max_tokens=12).ids
    for offset, last in enumerate(expected):
        if last in expected[:offset]:
            continue
        harness = Harness(*parts, engine_type=OverlappingEngine)
        other = harness.submit(prompt_of(7, seed=9), max_tokens=12)
        call = harness.submit(prompt, max_tokens=12, stop_token_ids=(last,))
        harness.run()
        assert harness.results[call].ids == expected[:offset]
        assert harness.results[other].done
        assert harness.results[call].done == CallDone(CallId(call), ContextId(call), len(prompt) + offset)
        assert harness.engine.tree.tokens(call).tolist() == prompt + expected[:offset]


def test_a_step_is_launched_before_the_ids_of_the_one_before_are_waited_for(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Watched(LaunchedIds):
        def __init__(self, ids: torch.Tensor) -> None:
            events.append("launch")
            super().__init__(ids)

        def wait(self) -> list[int | None]:
            events.append("wait")
            return super().wait()

    monkeypatch.setattr(overlap, "LaunchedIds", Watched)
    harness = Harness(*parts, engine_type=OverlappingEngine)
    assert len(harness.generate(prompt_of(5), max_tokens=4).ids) == 4
    assert events == ["launch", *["launch", "wait"] * 3, "wait"]
    events.clear()
    assert len(harness.generate(prompt_of(6), max_tokens=3, presence_penalty=1.0).ids) == 3
    assert events == ["launch", "wait"] * 3


def test_a_device_that_fails_behind_a_commit_ends_the_calls_and_the_cache(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(*parts, engine_type=OverlappingEngine)
    expected = harness.generate(prompt_of(20), max_tokens=4).ids
    call = harness.submit(prompt_of(20), max_tokens=9)
    for _ in range(3):
        harness.step()

    def fail(_ids: LaunchedIds) -> list[int | None]:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(LaunchedIds, "wait", fail)
        harness.step()
    [result] = harness.run(call)
    assert result.error is not None
    assert "illegal memory access" in result.error.message
    assert dict(harness.evicted) == {1: 0}
    assert harness.generate(prompt_of(20), max_tokens=4).ids == expected


def test_a_step_that_cannot_be_launched_costs_its_calls_and_no_id_before_it(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(*parts, engine_type=OverlappingEngine)
    expected = harness.generate(prompt_of(5), max_tokens=1).ids
    ends = harness.submit(prompt_of(5), max_tokens=1)
    goes_on = harness.submit(prompt_of(9, seed=4), max_tokens=5)
    harness.step()

    def fail(*_args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(harness.runner, "forward", fail)
        harness.step()
    first, second = harness.run(ends, goes_on)
    assert first.ids == expected
    assert second.error is not None
    assert "out of memory" in second.error.message


def test_blocks_are_taken_from_nobody_while_ids_are_on_their_way(parts: Parts) -> None:
    prompts = [prompt_of(29, seed=1), prompt_of(13, seed=2)]
    expected = [Harness(*parts).generate(prompt, max_tokens=9).ids for prompt in prompts]
    harness = Harness(*parts, engine_type=OverlappingEngine, num_blocks=4)
    results = harness.run(*[harness.submit(prompt, max_tokens=9) for prompt in prompts])
    assert [result.ids for result in results] == expected
    assert harness.engine.counters.preemptions > 0


def test_a_call_given_up_while_its_id_is_on_its_way_is_gone(parts: Parts) -> None:
    harness = Harness(*parts, engine_type=OverlappingEngine)
    expected = Harness(*parts).generate(prompt_of(9, seed=4), max_tokens=5).ids
    gone = harness.submit(prompt_of(5), max_tokens=9, stream=True)
    stays = harness.submit(prompt_of(9, seed=4), max_tokens=5)
    for _ in range(3):
        harness.step()
    told_before = len(harness.log)
    harness.engine.abort([CallId(gone)])
    [result] = harness.run(stays)
    assert result.ids == expected
    assert all(getattr(reply, "call_id", stays) == stays for reply in harness.log[told_before:])
    assert harness.results[gone].done is None


@pytest.mark.parametrize(("num_blocks", "lengths"), [(4, (31, 14)), (5, (31, 30))])
def test_what_is_evicted_in_the_step_that_takes_in_a_calls_end_is_reported_behind_that_end(
    parts: Parts, num_blocks: int, lengths: tuple[int, int]
) -> None:
    harness = Harness(*parts, num_blocks=num_blocks, engine_type=OverlappingEngine)
    first = harness.submit(prompt_of(lengths[0], seed=1), max_tokens=3)
    harness.run(first, harness.submit(prompt_of(lengths[1], seed=2), max_tokens=30))
    # The other one needs a block, of which only the end that is on its way makes one free.
    done = next(i for i, reply in enumerate(harness.log) if isinstance(reply, CallDone))
    evicted = next(i for i, reply in enumerate(harness.log) if isinstance(reply, ContextsEvicted))
    assert evicted == done + 1
    assert harness.evicted[0][0] == first
