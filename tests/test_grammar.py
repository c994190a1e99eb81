"""Matchers, masks and the cache of compiled grammars; that the model does not wait for masks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_harness import Harness, load
from parrot.engine import grammar as grammar_module
from parrot.engine.grammar import Grammars, Matcher, unpack_masks
from parrot.errors import InvalidRequest
from parrot.tokenizer import Tokenizer
from parrot.wire import Grammar

VOCAB_SIZE = 600  # above the tokenizer's, as models pad it
YES_NO = Grammar("choices", json.dumps(["yes", "no"]))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


def matcher(grammars: Grammars, grammar: Grammar, *, fast_forward: bool = True) -> Matcher:
    return Matcher(grammars.compile(grammar).result().deep_copy(), grammar, fast_forward=fast_forward)


def allowed(grammars: Grammars, *matchers: Matcher) -> list[set[int]]:
    table = unpack_masks(grammars.start_masks(matchers).result(), VOCAB_SIZE, torch.device("cpu"))
    assert table.shape == (len(matchers), VOCAB_SIZE)
    return [set(torch.nonzero(row)[:, 0].tolist()) for row in table]


def test_masks_allow_what_the_grammar_does_and_nothing_beyond_the_vocabulary(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    first, digits = matcher(grammars, YES_NO), matcher(grammars, Grammar("regex", "[0-9]+"))
    at_start = allowed(grammars, first, digits)
    texts = [{tokenizer.decode([token]) for token in ids} for ids in at_start]
    assert {"y", "n"} <= texts[0]
    assert all("yes".startswith(text) or "no".startswith(text) for text in texts[0])
    assert texts[1] == set("0123456789")
    digits.accept(tokenizer.backend.encode("7").ids[0])
    assert allowed(grammars, digits)[0] == at_start[1] | tokenizer.eos_ids


def test_both_ways_to_expand_a_mask_agree() -> None:
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 19), dtype=np.int64).astype(np.int32)
    words = torch.from_numpy(masks)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    expected = bits.bool().flatten(1)[:, :VOCAB_SIZE]
    assert torch.equal(unpack_masks(masks, VOCAB_SIZE, torch.device("cpu")), expected)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_forced_ids_spell_the_text_either_way(
    grammars: Grammars, tokenizer: Tokenizer, fast_forward: bool
) -> None:
    spec = Grammar("regex", "prefix-(left|right)-suffix")
    follower = matcher(grammars, spec, fast_forward=fast_forward)
    ids = follower.begin(100)
    assert bool(ids) == fast_forward
    while not follower.finished:
        choice = min(allowed(grammars, follower)[0])
        ids += [choice, *follower.accept(choice)]
    assert tokenizer.decode(ids) in ("prefix-left-suffix", "prefix-right-suffix")


def test_a_text_without_any_choice_is_left_to_be_sampled(grammars: Grammars) -> None:
    only = Grammar("choices", '["constant"]')
    assert matcher(grammars, only).begin(100) == []
    assert matcher(grammars, Grammar("regex", "constant[ab]")).begin(3) == []


def test_an_id_that_does_not_fit_is_an_error_of_the_request(grammars: Grammars, tokenizer: Tokenizer) -> None:
    follower = matcher(grammars, YES_NO)
    with pytest.raises(InvalidRequest) as error:
        follower.accept(tokenizer.backend.encode("z").ids[0])
    assert error.value.param == "choices"
    with pytest.raises(InvalidRequest):
        follower.check()


@pytest.mark.parametrize("grammar", [Grammar("schema", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]")])
def test_what_no_text_satisfies_is_refused_in_plain_words(grammars: Grammars, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="no text satisfies it; change or leave out") as error:
        grammars.compile(grammar).result()
    assert error.value.param == grammar.kind


def test_the_cache_is_bounded_and_keeps_what_is_used(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED", 3)
    kept = grammars.compile(YES_NO)
    for number in range(6):
        grammars.compile(Grammar("regex", f"a{{{number + 1}}}"))
        assert grammars.compile(YES_NO) is kept
    assert len(grammars._compiled) == 3


def test_a_grammar_of_another_tenant_is_compiled_anew(grammars: Grammars) -> None:
    mine = grammars.compile(YES_NO, 1)
    assert grammars.compile(YES_NO, 2) is not mine
    assert grammars.compile(YES_NO, 1) is mine


def test_a_crash_in_the_compiler_is_an_error_of_its_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def crash(self: Grammars, grammar: Grammar) -> Future[None]:
        raise Panic

    monkeypatch.setattr(Grammars, "_compile", crash)
    with pytest.raises(InvalidRequest, match="Panic while it was compiled"):
        grammars.compile(YES_NO).result()


def test_masks_are_computed_while_the_model_runs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, model_runs = Harness(*load(tiny_model)), threading.Event()
    forward, compute = harness.runner.forward, Grammars._masks
    num_masks = []

    def run(*args: Any) -> torch.Tensor:
        model_runs.set()
        return forward(*args)

    def masks(self: Grammars, matchers: Any) -> Any:
        assert model_runs.wait(60), "the model waits for masks"
        model_runs.clear()
        num_masks.append(len(matchers))
        return compute(self, matchers)

    monkeypatch.setattr(harness.runner, "forward", run)
    monkeypatch.setattr(Grammars, "_masks", masks)
    grammar = Grammar("regex", "[a-f]{5,20}!")
    result = harness.generate([5, 6, 7], max_tokens=80, ignore_eos=False, grammar=grammar)
    assert result.outputs[0].text.endswith("!")
    assert len(num_masks) > 2
