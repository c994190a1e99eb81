"""An engine with three blocks under everything that can go wrong at once, against one with room for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_harness import Harness, load, prompt_of
from parrot.engine.batch import StepLogits
from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import OverlappingEngine
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallId, ContextId, Grammar

NUM_BLOCKS = 3
SHARED = prompt_of(17, seed=99)
PROMPTS = [prompt_of(5, seed=1), prompt_of(16, seed=2), SHARED, [*SHARED, 40], [*SHARED[:12], 7, 8, 9]]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1, "seed": 5, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "logit_bias": ((70, 4.0),)},
    {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(3, 512, 5))},
    {"grammar": Grammar("regex", "[a-f]{4,20}!"), "ignore_eos": False},
    {"grammar": Grammar("choices", json.dumps(["alpha", "alphabet"])), "ignore_eos": False},
]
NEVER: list[tuple[list[int], dict[str, Any], str]] = [  # prompt, options, code of the error
    ([5, 100_000], {}, "invalid_request"),
    ([5, -1], {}, "invalid_request"),
    (prompt_of(60), {}, "prompt_too_long"),
    (prompt_of(20), {"max_tokens": 40}, "prompt_too_long"),
    ([5], {"logit_bias": ((10**6, 1.0),)}, "invalid_request"),
    ([5], {"stop_token_ids": (10**6,)}, "invalid_request"),
    (
        [5],
        {"grammar": Grammar("schema", '{"type": "integer", "minimum": 5, "maximum": 4}')},
        "invalid_request",
    ),
    ([5], {"temperature": float("nan")}, "invalid_request"),
]
SUBMIT = st.tuples(
    st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), st.integers(1, 25)
)
EVENTS = st.one_of(
    SUBMIT,
    SUBMIT,
    st.tuples(st.just("never"), st.integers(0, len(NEVER) - 1)),
    st.tuples(st.just("abort"), st.integers(1, 12)),
    st.tuples(st.just("free"), st.integers(1, 12)),
    st.tuples(st.just("fault"), st.sampled_from(["nan", "raise"])),
    st.tuples(st.just("step"), st.integers(1, 9)),
)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture(scope="module")
def expected(loaded: tuple[DecoderModel, Tokenizer]) -> Callable[[int, int, int], list[int]]:
    """Ids of a call that has an engine to itself."""

    @cache
    def ids(prompt: int, kind: int, max_tokens: int) -> list[int]:
        result = Harness(*loaded).generate(PROMPTS[prompt], max_tokens=max_tokens, **KINDS[kind])
        assert result.error is None
        return result.ids

    return ids


class Story:
    """What is done to the engine, and what was asked of it."""

    def __init__(self, loaded: tuple[DecoderModel, Tokenizer], engine_type: type[Engine]) -> None:
        self.harness = Harness(
            *loaded, num_blocks=NUM_BLOCKS, max_batch_size=4, max_batch_tokens=20, engine_type=engine_type
        )
        self.asked: dict[int, tuple[int, int, int]] = {}
        self.refused: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.most_failed = 0  # by faults so far
        self._forward = self.harness.runner.forward
        self._fault = ""
        self.harness.runner.forward = self._run  # type: ignore[method-assign]

    def _run(self, *args: Any) -> StepLogits:
        fault, self._fault = self._fault, ""
        if fault == "raise":
            self.most_failed += 4  # those of the step
            raise RuntimeError("device lost")
        logits = self._forward(*args).logits
        if fault == "nan" and len(logits):
            self.most_failed += 1
            logits = logits.clone()
            logits[0, 7] = float("nan")
        return StepLogits(logits)

    def tell(self, event: tuple[Any, ...]) -> None:
        match event:
            case "submit", prompt, kind, max_tokens:
                call = self.harness.submit(PROMPTS[prompt], max_tokens=max_tokens, **KINDS[kind])
                self.asked[call] = prompt, kind, max_tokens
            case "never", at:
                prompt_ids, options, code = NEVER[at]
                self.refused[self.harness.submit(prompt_ids, **{"max_tokens": 3, **options})] = code
            case "abort", call:
                if call in self.asked and not self.harness.results[call].ended:
                    self.aborted.add(call)
                self.harness.engine.abort([CallId(call)])
            case "free", call:
                self.harness.engine.free_contexts([ContextId(call)])
            case "fault", kind:
                self._fault = kind
            case "step", count:
                for _ in range(count):
                    self.harness.step()

    def finish(self) -> None:
        self._fault = ""
        self.harness.run()


@pytest.mark.parametrize("engine_type", [Engine, OverlappingEngine])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, min_size=5, max_size=30))
def test_every_call_ends_as_it_would_alone_or_typed_and_the_pool_is_whole(
    loaded: tuple[DecoderModel, Tokenizer],
    expected: Callable[[int, int, int], list[int]],
    engine_type: type[Engine],
    events: list[tuple[Any, ...]],
) -> None:
    story = Story(loaded, engine_type)
    for event in events:
        story.tell(event)
    story.finish()
    results, num_failed = story.harness.results, 0
    for call, code in story.refused.items():
        error = results[call].error
        assert error is not None
        assert error.code == code
    for call, asked in story.asked.items():
        result = results[call]
        if call in story.aborted:
            assert not result.ended
        elif result.error is not None:
            assert result.error.code == "engine_error"
            num_failed += 1
        else:
            assert result.ids == expected(*asked)
    assert num_failed <= story.most_failed
    tree = story.harness.engine.tree
    assert tree.num_held_blocks == 0
    assert tree.num_free_blocks + tree.num_evictable_blocks == NUM_BLOCKS
    assert story.harness.engine.stats().pool_breaches == 0
    assert story.harness.generate(PROMPTS[3], max_tokens=25).ids == expected(3, 0, 25)
