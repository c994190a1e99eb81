"""The tokenizer of made-up words: one id each, there and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parrot.tokenizer import Piece, PromptEncoder
from parrot.tokenizer.synthetic import word
from simulation import text, words_tokenizer

FIRST_WORD = 4  # behind the control tokens and the lone space


def test_words_are_distinct() -> None:
    words = [word(index) for index in range(60_000)]
    assert len(set(words)) == len(words)
    assert all(w.isalpha() and w.islower() for w in words)


@given(st.lists(st.integers(FIRST_WORD, 1999), min_size=1, max_size=50))
def test_ids_come_back_from_their_text(ids: list[int]) -> None:
    tokenizer = words_tokenizer()
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids


def test_a_prompt_has_an_id_for_each_word_however_it_is_cut() -> None:
    encoder = PromptEncoder(words_tokenizer())
    whole = encoder.encode([Piece(text(0, 300), control=True)])
    pieces = [Piece(text(0, 100), control=True), Piece(" " + text(100, 100)), Piece(" " + text(200, 100))]
    cut = encoder.encode(pieces)
    assert len(whole.token_ids) == 301
    assert np.array_equal(whole.token_ids, cut.token_ids)
    assert int(whole.token_ids[0]) == words_tokenizer().bos_id
