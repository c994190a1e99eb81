"""The engine when blocks are short: 512 calls in a cache for 40, preemption at block edges, late messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_harness import Harness, load
from parrot.engine.model import DecoderModel
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallId, ContextId, ContextUses

MakeHarness = Callable[..., Harness]
NUM_NEW = 20  # into a second or third block: calls outgrow what they were admitted with


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture
def make(loaded: tuple[DecoderModel, Tokenizer]) -> MakeHarness:
    return lambda **options: Harness(*loaded, **options)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=length)


def hint_at_random(harness: Harness, rng: random.Random) -> None:
    """News of contexts that exist, that are gone and that never were."""
    ids = tuple(ContextId(rng.randrange(1, harness.next_id + 5)) for _ in range(8))
    columns = [tuple(rng.randrange(most) for _ in ids) for most in (40, 3, 20)]
    harness.engine.uses.add(ContextUses(ids, *columns))


def test_512_calls_in_a_cache_for_40_give_what_they_give_with_room(make: MakeHarness) -> None:
    prefixes = [prompt_of(13 + i, seed=i) for i in range(6)]  # ends before, on and behind a block's edge
    prompts = [prefixes[i % 6] + prompt_of(i % 5, seed=100 + i % 7) for i in range(512)]
    different = sorted(set(map(tuple, prompts)))
    roomy = make(num_blocks=4096, max_batch_size=64, max_batch_tokens=512)
    results = roomy.run(*[roomy.submit(prompt, max_tokens=NUM_NEW) for prompt in different])
    expected = {prompt: result.ids for prompt, result in zip(different, results, strict=True)}

    rng = random.Random(0)
    harness = make(num_blocks=120, max_batch_size=64, max_batch_tokens=512)  # for 40 calls
    calls = [harness.submit(prompt, max_tokens=NUM_NEW) for prompt in prompts]
    while harness.engine.has_work:
        hint_at_random(harness, rng)
        harness.step()
    assert [harness.results[call].ids for call in calls] == [expected[tuple(prompt)] for prompt in prompts]
    stats = harness.engine.stats()
    assert stats.preemptions > 0
    assert stats.evicted_blocks > 0
    assert stats.hinted_contexts > 0
    assert stats.num_held_blocks == 0


@pytest.mark.parametrize("is_evicted", [False, True], ids=["still cached", "evicted"])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_call_preempted_around_a_blocks_edge_goes_on_as_if_it_had_not_been(
    make: MakeHarness, length: int, is_evicted: bool
) -> None:
    prompt = prompt_of(11, seed=3)
    undisturbed = make().generate(prompt, max_tokens=30)
    harness = make()
    call_id = harness.submit(prompt, max_tokens=30)
    while (call := harness.engine._live[CallId(call_id)]).num_computed < length:
        harness.step()
    harness.submit(prompt_of(5, seed=4), max_tokens=40, arrival=-1)
    harness.step()
    harness.engine._preempt(call)
    if is_evicted:
        harness.engine.tree.clear_cache()
    assert harness.run(call_id)[0].ids == undisturbed.ids
    assert harness.engine.stats().preemptions == 1


def test_late_messages_for_a_finished_call_do_not_touch_the_next_one(make: MakeHarness) -> None:
    harness = make()
    prompt = prompt_of(20, seed=1)
    first = harness.submit(prompt, max_tokens=4)
    harness.run()
    second = harness.submit(prompt, max_tokens=4)
    harness.step()
    harness.engine.abort([CallId(first)])
    harness.engine.uses.add(ContextUses((ContextId(second),), (0,), (0,), (0,)))
    harness.engine.free_contexts([ContextId(first), ContextId(second)])
    one, other = harness.run(first, second)
    assert one.ids == other.ids
    assert other.fills[0].cached_tokens == 19
    harness.engine.abort([CallId(first), CallId(second)])
    assert harness.generate(prompt, max_tokens=4).fills[0].cached_tokens == 19
