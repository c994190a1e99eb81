"""Early fill in the engine: prefixes of waiting calls, computed when nobody else wants the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine_harness import Harness, load
from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import OverlappingEngine
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallId, ContextId, CostModel, Sampling


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 200, length)]


def fill(harness: Harness, ids: Sequence[int], domain: int = 1) -> int:
    return harness.submit_verbs([list(ids)], domain=domain, early_fill=True)


def cost(base_us: float, per_prefill_token_us: float, num_blocks: int = 256) -> CostModel:
    return CostModel(base_us, 0.0, per_prefill_token_us, 0.0, 16 * num_blocks, num_blocks)


def test_a_filled_prefix_is_found_by_the_call_that_begins_with_it(
    model: tuple[DecoderModel, Tokenizer],
) -> None:
    harness, fresh = Harness(*model), Harness(*model)
    prefix, rest = prompt(1, 150), prompt(2, 20)
    early = fill(harness, prefix)
    (filled,) = harness.run(early)
    assert filled.done is not None
    assert filled.done.num_tokens == 150
    assert filled.fills[0].num_tokens == 150
    stats = harness.engine.stats()
    assert (stats.early_fills, stats.early_fill_tokens, stats.prefill_tokens) == (1, 150, 150)
    assert stats.num_held_blocks == 0
    result = harness.generate(prefix + rest)
    assert result.fills[0].cached_tokens == 150
    assert result.ids == fresh.generate(prefix + rest).ids
    assert harness.generate(prefix + rest, domain=2).fills[0].cached_tokens == 0


@pytest.mark.parametrize("engine_type", [Engine, OverlappingEngine])
@pytest.mark.parametrize("verbs", [[[]], [[5, 6, 7], Sampling(max_tokens=9, ignore_eos=True)], [[5], [6]]])
def test_more_or_less_than_one_prefix_is_refused_and_no_other_call_with_it(
    model: tuple[DecoderModel, Tokenizer], verbs: list[list[int] | Sampling], engine_type: type[Engine]
) -> None:
    harness = Harness(*model, engine_type=engine_type)
    early = harness.submit_verbs(verbs, early_fill=True)
    result, refused = harness.run(harness.submit(prompt(1, 20)), early)
    assert result.error is None
    assert refused.error is not None
    assert refused.error.message == f"call {early}: an early fill is one Fill of at least one id"


def test_calls_go_first_and_share_what_is_there_of_an_unfinished_prefix(
    model: tuple[DecoderModel, Tokenizer],
) -> None:
    harness = Harness(*model, max_batch_tokens=32)
    prefix = prompt(1, 160)
    early = fill(harness, prefix)
    for _ in range(2):
        harness.step()
    assert harness.engine.tree.num_held_blocks == 0, "between steps an early fill is cache"
    call = harness.submit(prefix + prompt(2, 8), max_tokens=4)
    while not harness.results[call].done:
        before = harness.engine.counters.early_fill_tokens
        harness.step()
        assert harness.engine.counters.early_fill_tokens == before
    assert harness.results[call].fills[0].cached_tokens == 64
    harness.run(early)
    assert harness.engine.counters.early_fill_tokens == 64 + 1, "the call computed the rest, but for the last"


def test_beside_running_calls_pieces_cost_a_hundredth_of_the_steps(
    model: tuple[DecoderModel, Tokenizer],
) -> None:
    harness = Harness(*model, cost_model=cost(base_us=5_000.0, per_prefill_token_us=20.0))
    call = harness.submit(prompt(1, 20), max_tokens=60)
    harness.step()
    early = fill(harness, prompt(2, 70))
    pieces = []
    for number in range(1, 50):
        before = harness.engine.counters.early_fill_tokens
        harness.step()
        done = harness.engine.counters.early_fill_tokens
        pieces.append(done - before)
        assert 20 * done <= 50 * number, "50 us of each step, 20 for a token"
    assert max(pieces) <= 18, "about the least that is worth a piece"
    assert sum(pieces) == 70
    alone = Harness(*model).generate(prompt(1, 20), max_tokens=60)
    first, second = harness.run(call, early)
    assert first.ids == alone.ids
    assert second.done is not None


def test_an_idle_engine_takes_pieces_that_hold_up_nobody_for_long(
    model: tuple[DecoderModel, Tokenizer],
) -> None:
    harness = Harness(*model, cost_model=cost(base_us=1_000.0, per_prefill_token_us=500.0))
    early = fill(harness, prompt(1, 100))
    harness.step()
    assert harness.engine.counters.early_fill_tokens == 40
    harness.run(early)


def test_several_prefixes_are_filled_in_one_batch(model: tuple[DecoderModel, Tokenizer]) -> None:
    harness = Harness(*model, max_batch_tokens=512)
    fills = [fill(harness, prompt(seed, 40)) for seed in range(3)]
    harness.step()
    assert all(harness.results[number].done for number in fills)


def test_together_they_are_at_most_a_quarter_of_the_pool(model: tuple[DecoderModel, Tokenizer]) -> None:
    harness = Harness(*model, num_blocks=40)
    first, second = fill(harness, prompt(1, 100)), fill(harness, prompt(2, 100))
    results = harness.run(first, second)
    assert results[0].done is not None
    assert results[1].error is not None
    assert "14 blocks" in results[1].error.message
    harness.engine.free_contexts([ContextId(first)])
    assert harness.run(fill(harness, prompt(2, 100)))[0].done is not None


def test_calls_take_the_blocks_of_prefixes_that_were_filled_for_others(
    model: tuple[DecoderModel, Tokenizer],
) -> None:
    harness, fresh = Harness(*model, num_blocks=24, max_batch_tokens=32), Harness(*model)
    harness.run(fill(harness, prompt(1, 40)))
    unfinished = fill(harness, prompt(3, 45))
    harness.step()
    big = prompt(2, 360)
    call = harness.submit(big, max_tokens=8)
    result, filled = harness.run(call, unfinished)
    assert result.ids == fresh.generate(big).ids
    assert harness.evicted[0][0] == 1
    assert harness.engine.counters.preemptions == 0
    assert filled.done is not None, "once there is room again"


def test_nothing_is_filled_ahead_while_a_call_waits_for_room(model: tuple[DecoderModel, Tokenizer]) -> None:
    harness = Harness(*model, num_blocks=24, cost_model=cost(5_000.0, 1.0, num_blocks=24))
    calls = [harness.submit(prompt(seed, 180), max_tokens=30) for seed in (1, 2)]
    early = fill(harness, prompt(3, 60))
    while not harness.results[calls[0]].done:
        harness.step()
        if harness.engine.stats().num_waiting:
            assert harness.engine.counters.early_fill_tokens == 0
    assert harness.engine.counters.preemptions == 0
    results = harness.run(*calls, early)
    assert results[-1].done is not None


def test_what_a_call_is_computing_is_not_filled_beside_it(model: tuple[DecoderModel, Tokenizer]) -> None:
    harness = Harness(*model, cost_model=cost(5_000.0, 0.1))
    prefix = prompt(1, 40)
    early = fill(harness, prefix + prompt(2, 20))
    call = harness.submit(prefix, max_tokens=20)
    harness.step()
    assert harness.engine.counters.early_fill_tokens == 0
    harness.run(call, early)
    assert harness.engine.counters.early_fill_tokens == 20


def test_an_aborted_fill_leaves_what_it_has_as_cache(model: tuple[DecoderModel, Tokenizer]) -> None:
    harness = Harness(*model, max_batch_tokens=32)
    prefix = prompt(1, 100)
    early = fill(harness, prefix)
    harness.step()
    harness.engine.abort([CallId(early)])
    assert not harness.engine.has_work
    assert harness.engine.tree.num_held_blocks == 0
    assert harness.generate(prefix).fills[0].cached_tokens == 32


def test_a_step_that_fails_ends_its_early_fills_and_holds_nothing(
    model: tuple[DecoderModel, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(*model)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    early = fill(harness, prompt(1, 50))
    with monkeypatch.context() as patch:
        patch.setattr(harness.runner, "forward", fail)
        (result,) = harness.run(early)
    assert result.error is not None
    assert harness.run(fill(harness, prompt(1, 50)))[0].done is not None
