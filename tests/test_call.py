"""A call's program of verbs and the bookkeeping of its ids, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from parrot.engine.call import EngineCall, FillSpan
from parrot.engine.id_buffer import IdBuffer
from parrot.errors import InvalidRequest
from parrot.wire import (
    CallId,
    ContextId,
    Dispatch,
    Fill,
    FreeContext,
    Generate,
    Sampling,
    Verb,
    pack_ids,
    unpack_ids,
)

EOS = frozenset({0})
HERE = ContextId(4)


def decode(ids: Sequence[int]) -> str:
    """Two letters per id: ab, bc, cd ..."""
    return "".join(chr(97 + i) + chr(98 + i) for i in ids)


def encode(text: str) -> np.ndarray:
    """One id of 100 + letter per letter: never what was generated."""
    return np.array([100 + ord(c) - 97 for c in text], dtype=np.int32)


def call_of(*verbs: Verb) -> EngineCall:
    call = EngineCall(Dispatch(CallId(1), 1, 5, "LATENCY", verbs), received_us=1)
    call.advance(decode, EOS)
    return call


def fill(*ids: int) -> Fill:
    return Fill(pack_ids(list(ids)), HERE)


def generate(max_tokens: int = 9, *stop: str) -> Generate:
    return Generate(Sampling(max_tokens=max_tokens, stop=stop), HERE)


@pytest.mark.parametrize(
    ("verbs", "public_len"),
    [
        ((fill(1, 2, 3),), 4),
        ((fill(1, 2, 3),), -1),
        ((generate(), fill(1, 2)), 2),
        ((fill(1), fill(1, 2)), 2),
    ],
)
def test_only_text_that_the_context_begins_with_is_public(verbs: tuple[Verb, ...], public_len: int) -> None:
    last = msgspec.structs.replace(verbs[-1], public_len=public_len)
    with pytest.raises(InvalidRequest, match="can be public") as refused:
        call_of(*verbs[:-1], last)
    assert refused.value.param == "public_len"


@pytest.mark.parametrize("domain", [0, -1, 2**63])
def test_no_call_is_of_the_public_domain(domain: int) -> None:
    with pytest.raises(InvalidRequest, match=f"of the domain {domain}; tenants have numbers from 1"):
        EngineCall(Dispatch(CallId(1), domain, 5, "LATENCY", (fill(1),)), received_us=1)


@pytest.mark.parametrize("context_id", [0, -1, 2**63])
def test_a_number_that_no_context_has_is_refused(context_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"in the contexts \[{context_id}\], expected one"):
        call_of(Fill(pack_ids([1]), ContextId(context_id)))


def feed(call: EngineCall, *ids: int) -> list[str]:
    """Sample these ids; the reasons to end that were given."""
    reasons = []
    for token in ids:
        call.num_computed = len(call.ids)
        assert call.output is not None
        reasons.append(call.accept(call.output, token, now_us=7)[1])
    return [reason for reason in reasons if reason]


def test_an_id_buffer_grows_and_shrinks() -> None:
    ids = IdBuffer(2)
    for start in range(0, 90, 30):
        ids.extend(range(start, start + 30))
    assert ids.view().tolist() == list(range(90))
    assert ids.view(85, 999).tolist() == [85, 86, 87, 88, 89]
    ids.truncate(3)
    ids.extend(np.array([7], dtype=np.int32))
    assert ids.view().tolist() == [0, 1, 2, 7]
    for token_id in range(40):
        ids.append(token_id)
        assert ids.last == token_id
    assert ids.view(3).tolist() == [7, *range(40)]
    small = IdBuffer(0)
    for token_id in range(40):
        small.append(token_id)
    assert small.view().tolist() == list(range(40))


def test_fills_before_a_generate_are_entered_together() -> None:
    call = call_of(fill(1, 2), fill(), fill(3), generate(), fill(4))
    assert call.ids.view().tolist() == [1, 2, 3]
    assert list(call.fills) == [FillSpan(0, 0, 2), FillSpan(1, 2, 2), FillSpan(2, 2, 3)]
    assert call.output is not None
    assert call.output.verb == 3
    assert (call.num_fill_ids, call.max_generated) == (4, 9)


def test_fills_are_replied_once_computed_with_their_part_of_the_cached_prefix() -> None:
    call = call_of(fill(1, 2, 3), fill(4, 5), generate())
    call.admitted(4, now_us=3)
    assert [(done.num_tokens, done.cached_tokens) for done in call.take_filled()] == [(3, 3)]
    call.admitted(1, now_us=9)  # preempted meanwhile: what it found first is what counts
    call.num_computed = 5
    assert [(done.verb, done.cached_tokens) for done in call.take_filled()] == [(1, 1)]
    assert call.admitted_us == 3


def test_end_of_sequence_is_sampled_but_not_kept() -> None:
    call = call_of(fill(5), generate())
    assert feed(call, 1, 2, 0) == ["stop"]
    assert call.output is not None
    done = call.finish_output(call.output, "stop", encode, now_us=8)
    assert done.text == "bccd"
    assert unpack_ids(done.token_ids).tolist() == [1, 2]
    assert done.num_generated == 3
    assert not call.ended  # the reply to its Fill is still to come
    call.take_filled()
    assert call.ended


def test_a_stop_at_the_border_of_ids_keeps_the_ids_before_it() -> None:
    call = call_of(fill(5), generate(9, "de"), fill(6), generate())
    assert feed(call, 1, 2, 3) == ["stop"]  # bc cd|de
    assert call.output is not None
    done = call.finish_output(call.output, "stop", encode, now_us=8)
    assert done.text == "bccd"
    assert unpack_ids(done.token_ids).tolist() == [1, 2]
    assert call.num_computed == 3
    call.advance(decode, EOS)
    assert call.ids.view().tolist() == [5, 1, 2, 6]


def test_kept_text_that_begins_inside_the_cut_id_is_encoded_anew() -> None:
    call = call_of(fill(5), generate(9, "dd"), fill(6), generate())
    assert feed(call, 1, 2, 3) == ["stop"]  # bc c|d d|e
    assert call.output is not None
    done = call.finish_output(call.output, "stop", encode, now_us=8)
    assert done.text == "bcc"
    assert unpack_ids(done.token_ids).tolist() == [1, 102]
    assert call.num_computed == 2
    call.advance(decode, EOS)
    assert call.ids.view().tolist() == [5, 1, 102, 6]


def test_the_limit_ends_an_output_and_its_last_id_stays() -> None:
    call = call_of(fill(5), generate(2))
    assert feed(call, 1, 2) == ["length"]


def test_a_second_generate_computes_the_last_id_again_if_it_was_computed() -> None:
    call = call_of(fill(5, 6), generate(), generate())
    feed(call, 1, 0)
    assert call.num_computed == 3
    assert call.output is not None
    call.finish_output(call.output, "stop", encode, now_us=8)
    call.advance(decode, EOS)
    assert (call.num_computed, call.num_remaining) == (2, 1)


def test_free_context_frees_others_at_once_and_its_own_at_the_end() -> None:
    other = ContextId(77)
    call = EngineCall(
        Dispatch(CallId(1), 1, 5, "LATENCY", (FreeContext(other), fill(1), FreeContext(HERE))), received_us=1
    )
    assert call.advance(decode, EOS) == [other]
    assert call.frees_context


@pytest.mark.parametrize("verbs", [(), (Fill(b"123", HERE),), (fill(1), Fill(b"", ContextId(5)))])
def test_programs_that_cannot_run_are_refused(verbs: tuple[Verb, ...]) -> None:
    with pytest.raises(InvalidRequest):
        call_of(*verbs)


@pytest.mark.parametrize("bad", [-1, 100])
def test_ids_outside_the_vocabulary_are_refused_by_value(bad: int) -> None:
    call = EngineCall(Dispatch(CallId(1), 1, 5, "LATENCY", (fill(3, bad),)), received_us=1)
    with pytest.raises(InvalidRequest, match=f"token id {bad} is outside"):
        call.check(100)


def test_sampling_parameters_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens = 0"):
        call_of(fill(1), generate(0)).check(100)
