"""A KV cache whose bookkeeping broke: noticed, told, and made anew, with every call's text still right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_harness import Harness, load
from parrot._core import ContextTree
from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.pool_guard import PoolGuard
from parrot.errors import EngineError
from parrot.tokenizer.tokenizer import Tokenizer

LEAK = 1 << 40  # a context that no call has


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture
def harness(loaded: tuple[DecoderModel, Tokenizer]) -> Harness:
    return Harness(*loaded, num_blocks=64)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


def leak(tree: ContextTree) -> None:
    """Hold a block as if a call had it."""
    ids = np.arange(3, 20, dtype=np.int32)
    context = np.array([LEAK], dtype=np.int64)
    tree.open(LEAK, 7, ids, 0)
    tree.reserve(context, np.array([17], dtype=np.int32), ids, np.empty(17, dtype=np.int32))
    tree.commit(context)


class Broken:
    """A tree of which some verbs fail, as a broken one's may, until it is reset."""

    def __init__(self, tree: ContextTree, *verbs: str) -> None:
        self._tree = tree
        self._verbs = verbs

    def reset(self) -> None:
        self._verbs = ()
        self._tree.reset()

    def __getattr__(self, name: str) -> Any:
        return self._fail if name in self._verbs else getattr(self._tree, name)

    def _fail(self, *_: object) -> None:
        raise RuntimeError("KV cache invariant broken: for the test")


def put_in_place(engine: Engine, tree: Any) -> None:
    engine.tree = engine._waiting._tree = engine._cached._tree = engine._early._tree = tree


def test_blocks_held_for_nobody_are_noticed_when_the_last_call_ends_and_return(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    alone = harness.generate(prompt_of(40, 1)).ids
    leak(harness.engine.tree)
    call = harness.submit(prompt_of(40, 1))
    with caplog.at_level(logging.ERROR):
        (result,) = harness.run(call)
    assert result.ids == alone
    stats = harness.engine.stats()
    assert (stats.pool_breaches, stats.num_held_blocks) == (1, 0)
    assert stats.num_free_blocks == 64
    assert sum("made anew: 2 blocks are held" in record.message for record in caplog.records) == 1
    assert {context_id for context_id, _ in harness.evicted} == {1, call}
    assert harness.generate(prompt_of(40, 1)).ids == alone
    assert harness.engine.stats().pool_breaches == 1


def test_a_broken_tree_is_made_anew_in_the_middle_of_calls_that_then_give_the_same_ids(
    harness: Harness,
) -> None:
    prompts = [prompt_of(50, seed) for seed in range(6)]
    expected = [harness.generate(prompt, max_tokens=20).ids for prompt in prompts]
    calls = [harness.submit(prompt, max_tokens=20) for prompt in prompts]
    for _ in range(4):
        harness.step()
    engine = harness.engine
    engine._pool_guard = PoolGuard(check_every_us=0)
    put_in_place(engine, Broken(engine.tree, "check_invariants"))
    harness.step()
    assert [result.ids for result in harness.run(*calls)] == expected
    assert engine.stats().pool_breaches == 1


@pytest.mark.parametrize("verbs", [("reserve",), ("reserve", "free"), ("open", "free", "release")])
def test_a_tree_that_raises_ends_its_calls_with_typed_errors_and_the_engine_goes_on(
    harness: Harness, verbs: tuple[str, ...]
) -> None:
    alone = harness.generate(prompt_of(40, 1)).ids
    calls = [harness.submit(prompt_of(40, seed)) for seed in (2, 3)]
    harness.step()
    calls.append(harness.submit(prompt_of(40, 4)))
    engine = harness.engine
    whole = engine.tree
    put_in_place(engine, Broken(whole, *verbs))
    harness.step()
    if "free" not in verbs:
        put_in_place(engine, whole)
    results = harness.run(*calls)
    errors = [result.error for result in results if result.error is not None]
    assert errors
    assert {error.code for error in errors} == {"engine_error"}
    assert harness.generate(prompt_of(40, 1)).ids == alone
    assert engine.stats().pool_breaches == ("free" in verbs)


def test_the_whole_tree_is_looked_at_only_when_it_is_due() -> None:
    now = 0
    guard = PoolGuard(lambda: now, check_every_us=100)
    broken: Any = Broken(ContextTree(4), "check_invariants")
    now = 99
    guard.check(broken, is_idle=True)
    now = 100
    with pytest.raises(EngineError, match="invariant broken"):
        guard.check(broken, is_idle=True)
    guard.check(broken, is_idle=True)
