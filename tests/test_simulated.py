"""An engine that is simulated: its time is the cost model's, its text a function of the prompt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parrot import wire
from parrot.engine.live_cost import HELD_OUT, LiveCost
from parrot.engine.simulated import SimulatedEngine, SimulatedRunner, Stretch
from parrot.simulation.engine import EngineActor, EngineSpec
from parrot.simulation.loop import SimulatedLoop, run_simulated
from parrot.tokenizer import Tokenizer
from parrot.wire import CallId, ContextId, CostModel, Dispatch, Fill, Generate, Sampling, pack_ids
from simulation import COST, made_up_text, words_tokenizer
from tiny_models import byte_level_tokenizer, write_tokenizer

Timeline = list[tuple[int, object]]


def dispatch(number: int, prompt: Sequence[int], **sampling: object) -> Dispatch:
    fields = {"max_tokens": 8, "ignore_eos": True, **sampling}
    verbs = (
        Fill(pack_ids(prompt), ContextId(number)),
        Generate(Sampling(**fields), ContextId(number)),  # type: ignore[arg-type]
    )
    return Dispatch(CallId(number), 1, number, "THROUGHPUT", verbs)


def play(
    events: Sequence[tuple[int, wire.ToEngine]], spec: EngineSpec, *, stretches: bool = True
) -> tuple[Timeline, EngineActor]:
    """What an engine replies, and when, to messages that come at these times (microseconds)."""
    timeline: Timeline = []

    async def main(loop: SimulatedLoop) -> EngineActor:
        def receive(message: wire.FromEngine) -> None:
            assert isinstance(message, wire.StepReplies | wire.Heartbeat)
            said = message.replies if isinstance(message, wire.StepReplies) else (message.stats,)
            timeline.extend((loop.now_us(), one) for one in said)

        actor = EngineActor("engine", spec, words_tokenizer(), made_up_text(), loop, receive)
        if not stretches:
            actor.engine.stretch = lambda: None  # type: ignore[method-assign]
        for when_us, message in events:
            loop.call_at_us(when_us, actor.deliver, message)
        await asyncio.sleep(3600)
        assert not actor.engine.has_work
        actor.engine.tree.check_invariants()
        assert actor.engine.tree.num_held_blocks == 0
        return actor

    return timeline, run_simulated(main)


def generated(timeline: Timeline) -> dict[int, wire.GenerateDone]:
    return {reply.call_id: reply for _, reply in timeline if isinstance(reply, wire.GenerateDone)}


def test_a_lone_call_takes_the_time_of_its_steps() -> None:
    timeline, _ = play([(1000, dispatch(1, range(100, 200), max_tokens=5))], EngineSpec(COST))
    prefill = 4000 + 10 + 20 * 100 + 100
    decodes = sum(4000 + 10 + length for length in range(101, 105))
    done = generated(timeline)[1]
    assert done.timing == wire.Timing(1000, 1000, 1000 + prefill, 1000 + prefill + decodes)
    assert done.num_generated == 5
    assert timeline[-1][0] == done.timing.finished_us


def test_a_shared_prefix_is_loaded_once_or_once_per_sequence() -> None:
    shared, took = list(range(60, 1020)), {}
    calls = [(0, dispatch(1, shared, max_tokens=1))]
    calls += [(10**6, dispatch(n, [*shared, 30 + n], max_tokens=2)) for n in (2, 3, 4)]
    for share in (True, False):
        done = generated(play(calls, EngineSpec(COST, share_prefixes=share))[0])[4]
        took[share] = done.timing.finished_us - done.timing.first_token_us
    assert took == {True: 4000 + 30 + 960 + 3 * 2, False: 4000 + 30 + 3 * 962}


def test_without_a_prefix_cache_nothing_is_found() -> None:
    prompt = list(range(100, 300))
    calls = [(0, dispatch(1, prompt)), (10**6, dispatch(2, prompt))]
    cached = {}
    for cache in (True, False):
        timeline, _ = play(calls, EngineSpec(COST, cache_prefixes=cache))
        fills = [reply for _, reply in timeline if isinstance(reply, wire.FillDone)]
        cached[cache] = fills[-1].cached_tokens
    assert cached == {True: 199, False: 0}


def test_a_simulated_engine_that_is_slower_than_it_said_learns_what_its_steps_take() -> None:
    true, now = CostModel(12_000, 30, 60, 3, 64_000, 4_000), [0]
    engine = SimulatedEngine(
        SimulatedRunner(true, words_tokenizer(), max_positions=4096),
        words_tokenizer(),
        made_up_text(),
        max_batch_size=16,
        max_batch_tokens=256,
        clock=lambda: now[0],
        wait_until=lambda end_us: now.__setitem__(0, end_us),
    )
    engine._cost_model, engine._live_cost = COST, LiveCost(COST)
    for number in range(1, 120):
        engine.submit(dispatch(number, range(100, 100 + 3 * number), max_tokens=number % 40 + 1))
        for _ in range(number % 7):
            engine.step()
    while engine.has_work:
        engine.step()
    assert engine.counters.num_steps > 3 * HELD_OUT
    learned = engine.changed_cost
    assert learned is not None
    for batch, prefill, kv_tokens in ((1, 0, 100), (8, 0, 3000), (2, 200, 400)):
        truth = true.step_us(batch, prefill, kv_tokens)
        assert learned.step_us(batch, prefill, kv_tokens) == pytest.approx(truth, rel=0.1)
    assert engine._early._cost == engine._cost_model
    # What is expected of steps is what was learned.
    busy_us, expected_us = engine.counters.busy_us, engine.counters.expected_us
    engine.submit(dispatch(500, range(50, 90), max_tokens=30))
    while engine.has_work:
        engine.step()
    took = engine.counters.busy_us - busy_us
    assert took == pytest.approx(engine.counters.expected_us - expected_us, rel=0.15)


def test_equal_prompts_give_equal_texts_and_others_do_not() -> None:
    prompts = ([100, 101, 102], [100, 101, 103], [100, 101, 102])
    timeline, _ = play([(0, dispatch(n, ids)) for n, ids in enumerate(prompts, 1)], EngineSpec(COST))
    texts = [done.text for _, done in sorted(generated(timeline).items())]
    assert texts[0] == texts[2] != texts[1]
    encoded = words_tokenizer().encode(texts[0])
    assert encoded.tobytes() == generated(timeline)[1].token_ids


def test_outputs_end_by_themselves_unless_told_not_to() -> None:
    calls = [dispatch(n, [100 + n], max_tokens=50, ignore_eos=False, min_tokens=5) for n in range(1, 20)]
    done = generated(play([(0, call) for call in calls], EngineSpec(COST))[0])
    lengths = {reply.num_generated for reply in done.values()}
    assert len(lengths) > 5
    assert all(5 < length <= 50 for length in lengths)
    assert {reply.finish_reason for reply in done.values()} == {"stop"}


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("choices", '["yes", "no"]', "yes|no"),
        ("regex", "[a-c]{2}", "[a-c]{2}"),
        ("schema", '{"type": "array"}', r"\[[\s\S]*\]"),
    ],
)
def test_a_grammar_is_followed(kind: str, source: str, pattern: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_tokenizer(), eos_token="<|im_end|>"))
    engine = SimulatedEngine(
        SimulatedRunner(COST, tokenizer, max_positions=1000),
        tokenizer,
        made_up_text(),
        max_batch_size=4,
        max_batch_tokens=64,
        clock=lambda: 0,
        wait_until=lambda _: None,
    )
    grammar = wire.Grammar(kind, source)  # type: ignore[arg-type]
    engine.submit(dispatch(1, [100, 101], max_tokens=60, ignore_eos=False, grammar=grammar))
    replies: list[wire.Reply] = []
    while engine.has_work:
        replies += engine.step()
    (done,) = (reply for reply in replies if isinstance(reply, wire.GenerateDone))
    assert re.fullmatch(pattern, done.text)


CALLS = st.lists(
    st.tuples(
        st.integers(0, 300_000),  # arrival
        st.integers(1, 60),  # prompt: so many of the shared words, and one of its own
        st.integers(1, 40),  # outputs
        st.booleans(),  # ends by itself
        st.integers(0, 400_000),  # aborted at; above 300,000 never
    ),
    min_size=1,
    max_size=12,
)


# A call comes and is aborted at the microsecond in which a step ends.
AT_ONCE = [
    *[(1, 1, 1, False, 0)] * 6,
    (1, 1, 1, False, 2),
    (3, 1, 4, False, 20_172),
    (24_193, 1, 1, False, 0),
]


@example(AT_ONCE, 8, 1)
@settings(max_examples=40, deadline=None)
@given(CALLS, st.sampled_from([8, 14, 4000]), st.integers(1, 5))
def test_steps_taken_together_end_as_if_taken_one_by_one(
    calls: list[tuple[int, int, int, bool, int]], num_blocks: int, max_batch_size: int
) -> None:
    cost = CostModel(4000, 10, 20, 2, 64_000, num_blocks)
    spec = EngineSpec(cost, max_batch_size=max_batch_size, max_batch_tokens=48)
    events: list[tuple[int, wire.ToEngine]] = []
    for n, (arrival, prompt_len, max_tokens, natural, aborted) in enumerate(calls, 1):
        prompt = [*range(100, 100 + prompt_len), 50 + n]
        events.append((arrival, dispatch(n, prompt, max_tokens=max_tokens, ignore_eos=not natural)))
        if aborted < 300_000:
            events.append((arrival + aborted, wire.Abort((CallId(n),))))
    together, actor = play(events, spec)
    singly, slow = play(events, spec, stretches=False)
    assert generated(together) == generated(singly)
    assert actor.num_events <= slow.num_events


def test_within_a_stretch_heartbeats_tell_of_the_steps_that_are_over() -> None:
    calls: list[tuple[int, wire.ToEngine]] = [
        (0, dispatch(n, range(100 * n, 100 * n + 50), max_tokens=300)) for n in (1, 2, 3)
    ]
    pings: list[tuple[int, wire.ToEngine]] = [(t, wire.Ping("m")) for t in range(50_000, 1_400_000, 70_000)]
    told = {}
    for stretches in (True, False):
        timeline, _ = play([*calls, *pings], EngineSpec(COST), stretches=stretches)
        beats = [one for _, one in timeline if isinstance(one, wire.EngineStats)]
        told[stretches] = [(b.num_steps, b.decode_tokens, b.busy_us, b.expected_us) for b in beats]
    assert len(told[True]) == len(pings)
    for together, singly in zip(told[True], told[False], strict=True):
        # An engine that steps one by one has counted the step that it is in.
        assert 0 <= singly[0] - together[0] <= 1
        assert 0 <= singly[1] - together[1] <= 3
        assert 0 <= singly[2] - together[2] < 6000
    assert all(busy <= expected for _, _, busy, expected in told[True]), "it seems slower than it said"


def test_the_step_that_runs_when_something_comes_is_the_last_of_a_stretch() -> None:
    stretch = Stretch(100, first_us=1000.0, growth_us=2.0)
    assert stretch.duration_us(1) == 1000
    assert stretch.duration_us(3) == 3006
    assert [stretch.steps_within(t) for t in (0, 1, 1000, 1001, 3006, 3007, 10**9)] == [1, 1, 1, 2, 3, 4, 100]
