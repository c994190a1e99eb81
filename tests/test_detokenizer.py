"""Incremental text: whole characters only, nothing of a stop leaks, ids keep their place in the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from parrot.engine.detokenizer import OutputText, StopMatcher, TextStream

MERGES = ["ab", "bc", "stop", "<s", "é", "日本", "本日", "🙂x"]


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, and some longer tokens that begin or end inside a character."""
    letters = _byte_letters()
    vocab = {letter: i for i, letter in enumerate(letters)}
    for text in MERGES:
        vocab.setdefault("".join(letters[b] for b in text.encode()), len(vocab))
    data = "日本".encode()
    for cut in (2, 4):
        vocab.setdefault("".join(letters[b] for b in data[cut - 1 : cut + 1]), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
ids_strategy = st.one_of(
    st.text(alphabet="abcstop<é日本🙂 \ufffd", max_size=30).map(lambda text: list(text.encode())),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40),
    st.lists(st.integers(256, VOCAB_SIZE - 1), max_size=20),
)
stops_strategy = st.lists(st.text(alphabet="abcstop<é日本🙂", min_size=1, max_size=5), max_size=3)


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def cut_at_first_stop(text: str, stops: Sequence[str]) -> str:
    """The obvious definition: the stop that is complete earliest, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def run(ids: Sequence[int], stops: Sequence[str]) -> tuple[OutputText, list[str], int]:
    """(text, pieces, number of ids taken before it stopped)."""
    output = OutputText(decode, stops)
    pieces: list[str] = []
    for taken, token_id in enumerate(ids, 1):
        pieces.append(output.push(token_id))
        if output.stopped:
            return output, pieces, taken
    pieces.append(output.finish())
    return output, pieces, len(ids)


@given(ids=ids_strategy, stops=stops_strategy)
def test_pieces_add_up_to_the_whole_text_cut_at_the_first_stop(ids: list[int], stops: list[str]) -> None:
    output, pieces, _ = run(ids, stops)
    assert "".join(pieces) == cut_at_first_stop(decode(ids), stops)
    assert output.text == "".join(pieces)


@given(ids=ids_strategy, stops=stops_strategy)
def test_only_what_could_become_a_stop_is_held_back(ids: list[int], stops: list[str]) -> None:
    output = OutputText(decode, stops)
    for end, token_id in enumerate(ids, 1):
        output.push(token_id)
        raw = decode(ids[:end])
        if output.stopped or raw.endswith("\ufffd"):
            return
        held = raw[len(output.text) :]
        assert raw == output.text + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(ids=ids_strategy, stops=stops_strategy)
def test_kept_ids_and_the_rest_of_the_cut_one_spell_the_text(ids: list[int], stops: list[str]) -> None:
    output, _, taken = run(ids, stops)
    if output.stopped:
        num_whole, rest = output.cut()
        assert num_whole < taken
        assert decode(ids[:num_whole]) + rest == output.text


@given(ids=ids_strategy, together=st.integers(1, 5))
def test_a_text_does_not_depend_on_how_many_ids_are_decoded_together(ids: list[int], together: int) -> None:
    output = OutputText(decode, [], together=together)
    pieces = [*map(output.push, ids), output.finish()]
    assert "".join(pieces) == output.text == run(ids, [])[0].text
    assert output.num_final == len(ids)


@given(text=st.text(max_size=40), stops=st.lists(st.text(max_size=4), max_size=3), data=st.data())
def test_stop_matching_does_not_depend_on_where_pieces_are_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher = StopMatcher(stops)
    out, at = "", 0
    while at < len(text) and not matcher.matched:
        size = data.draw(st.integers(1, 5))
        out += matcher.push(text[at : at + size])
        at += size
    out += "" if matcher.matched else matcher.flush()
    assert out == cut_at_first_stop(text, [stop for stop in stops if stop])


def test_a_character_of_four_bytes_comes_out_whole() -> None:
    stream = TextStream(decode)
    assert [stream.push([b]) for b in "🙂".encode()] == ["", "", "", "🙂"]


def test_a_character_that_never_ends_comes_out_at_the_end() -> None:
    output = OutputText(decode, [])
    assert [output.push(b) for b in b"a\xf0\x9f"] == ["a", "", ""]
    assert output.finish() == "\ufffd"
    assert output.text == "a\ufffd"


def test_a_stop_inside_a_token_leaves_its_beginning_as_text() -> None:
    ab = TOKENIZER.token_to_id("ab")
    output = OutputText(decode, ["bc"])
    assert output.push(ord("x")) == "x"
    assert output.push(ab) == "a"  # the b could begin the stop
    assert output.push(ord("c")) == ""
    assert output.stopped
    assert output.cut() == (1, "a")


def test_the_beginning_of_a_stop_is_given_back_when_no_stop_follows() -> None:
    output = OutputText(decode, ["stop"])
    assert [output.push(ord(c)) for c in "stoa"] == ["", "", "", "stoa"]


@pytest.mark.parametrize("context", [[], list(b"Code:")])
def test_context_is_never_part_of_the_text(context: list[int]) -> None:
    stream = TextStream(decode, context)
    assert "".join(stream.push([b]) for b in b" x = 1") == " x = 1"


def test_text_of_the_first_ids_is_no_part_of_a_stop() -> None:
    ids = TOKENIZER.encode("xyxyxy").ids
    assert len(ids) == 6
    output = OutputText(TOKENIZER.decode, ["xy", "yx"], num_unstoppable=3)
    for token in ids:
        output.push(token)
        if output.stopped:
            break
    assert output.text == "xyx"  # the first stop wholly after the third id comes right then
    assert output.cut() == (3, "")


def test_taken_text_and_final_ids_keep_step_with_the_text() -> None:
    output = OutputText(TOKENIZER.decode, ["stop"])
    taken = ""
    for token in TOKENIZER.encode("abcst").ids:
        output.push(token)
        taken += output.take()
        assert taken == output.text
        assert output.num_final <= len(TOKENIZER.encode(taken).ids)
    assert (taken, output.take()) == ("abc", "")
    output.finish()
    assert output.take() == "st"
    assert output.num_final == len(TOKENIZER.encode("abcst").ids)
