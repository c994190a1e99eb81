"""Ids of a segmented prompt are those of the whole prompt, whatever the tokenizer and wherever it is cut."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.errors import InvalidRequest
from parrot.tokenizer import Piece, PromptEncoder, Tokenizer
from parrot.tokenizer.layout import CutKind
from tiny_models import CORPUS, write_tokenizer
from tokenizer_zoo import BUILDERS, FULLY_CUT, write_zoo

FRAGMENTS = [
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000", "\x00"),
    *("'", "'s", "'l", "l", "'re", " 're", "the", " the", "The", "1", "12", "345", " 7"),
    *(".", "...", "!?", " -", "(", "_", "▁", "é", "e\u0301", "\u0301", "\u0323", "ä"),
    *("你", "好，", "世", "😀", "👨\u200d👩", "한", "\u1112\u1161", "\u11ab", "Привет", " мир"),
    *("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<s>", "</s>", "{{output:x}}", "<0x0A>"),
    "for i in range(10):",
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
pieces_of_text = st.lists(st.builds(Piece, texts, st.booleans()), max_size=5)
many_examples = settings(max_examples=30, deadline=None)


@cache
def zoo() -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(path) for name, path in write_zoo(Path(mkdtemp())).items()}


@cache
def literal_backend(name: str) -> tokenizers.Tokenizer:
    """The tokenizer as saved, blind to control strings."""
    spec = json.loads(zoo()[name].backend.to_str())
    spec["post_processor"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.encode_special_tokens = True
    return backend


def without_bos(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    assert not tokenizer.add_bos or ids[0] == tokenizer.bos_id
    return ids[int(tokenizer.add_bos) :].tolist()


def after_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return list(dropwhile(lambda token: token == tokenizer.bos_id, ids))


def cut(text: str, positions: Sequence[int]) -> list[str]:
    edges = [0, *sorted(p % (len(text) + 1) for p in positions), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", BUILDERS)
@many_examples
@given(text=texts, positions=st.lists(st.integers(0, 200), max_size=6))
def test_literal_text_cut_anywhere_gives_the_ids_of_the_whole(
    name: str, text: str, positions: list[int]
) -> None:
    tokenizer = zoo()[name]
    prompt = PromptEncoder(tokenizer).encode([Piece(part) for part in cut(text, positions)])
    expected = literal_backend(name).encode(text, add_special_tokens=False).ids
    assert without_bos(tokenizer, prompt.token_ids) == expected


@pytest.mark.parametrize("name", BUILDERS)
@many_examples
@given(text=texts, positions=st.lists(st.integers(0, 200), max_size=6))
def test_control_text_cut_anywhere_gives_the_ids_of_the_whole(
    name: str, text: str, positions: list[int]
) -> None:
    tokenizer = zoo()[name]
    prompt = PromptEncoder(tokenizer).encode([Piece(part, control=True) for part in cut(text, positions)])
    expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
    if tokenizer.add_bos:  # the prompt has one BOS, however many its text begins with
        expected = [tokenizer.bos_id, *after_bos(tokenizer, expected)]
    assert prompt.token_ids.tolist() == expected


def reference(tokenizer: Tokenizer, name: str, pieces: Sequence[Piece]) -> list[int]:
    """Runs between control tokens, each encoded whole: prompts in which no text precedes another run."""
    control = sorted(tokenizer.layout.control_ids, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, control)) + ")")
    items: list[str | int] = [""]
    for index, piece in enumerate(pieces):
        parts = pattern.split(piece.text) if piece.control else [piece.text]
        for position, part in enumerate(parts):
            if position % 2:
                items += [tokenizer.layout.control_ids[part], ""]
            else:
                items[-1] = f"{items[-1]}{part}"
        assert index == 0 or not (piece.control and pieces[index - 1].control)
    ids: list[int] = []
    for item in items:
        ids += (
            [item]
            if isinstance(item, int)
            else literal_backend(name).encode(item, add_special_tokens=False).ids
        )
    return ids


@pytest.mark.parametrize(
    "name", ["byte-level-digits", "byte-level-qwen2-nfc", "sentencepiece-prepend", "unigram"]
)
@many_examples
@given(parts=st.lists(texts, max_size=6), control_first=st.booleans())
def test_constants_and_values_in_turn_give_the_ids_of_their_runs(
    name: str, parts: list[str], control_first: bool
) -> None:
    tokenizer = zoo()[name]
    pieces = [Piece(part, control=(i % 2 == 0) == control_first) for i, part in enumerate(parts)]
    ids = PromptEncoder(tokenizer).encode(pieces).token_ids.tolist()
    expected = reference(tokenizer, name, pieces)
    if tokenizer.add_bos:
        expected = [tokenizer.bos_id, *after_bos(tokenizer, expected)]
    assert ids == expected


@pytest.mark.parametrize("name", BUILDERS)
@many_examples
@given(before=pieces_of_text, after=pieces_of_text, continues=st.booleans())
def test_no_later_text_changes_the_ids_before_a_boundary(
    name: str, before: list[Piece], after: list[Piece], continues: bool
) -> None:
    encoder = PromptEncoder(zoo()[name])
    prefix = encoder.encode(before, continues=continues)
    whole = encoder.encode([*before, *after], continues=continues)
    assert np.all(np.diff(prefix.boundaries) > 0)
    for boundary in prefix.boundaries:
        assert 0 < boundary <= len(prefix.token_ids)
        assert np.array_equal(whole.token_ids[:boundary], prefix.token_ids[:boundary])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("byte-level-gpt2", Piece("And we'l"), Piece("l see")),  # two pre-tokens become a contraction
        ("byte-level-gpt2", Piece("a  "), Piece(" b")),
        ("byte-level-llama3", Piece("a\n   "), Piece("\nb")),  # two pre-tokens become one run of lines
        ("byte-level-llama3", Piece("in 12"), Piece("3 and 4")),
        ("byte-level-qwen2-nfc", Piece("cafe"), Piece("\u0301 au lait")),
        ("byte-level-qwen2-nfc", Piece("a\u0315"), Piece("\u0300 b")),  # marks change places
        ("byte-level-qwen2-nfc", Piece("e\u0301\u0323 "), Piece("b")),
        ("byte-level-qwen2-nfc", Piece("\u1112"), Piece("\u1161\u11ab b")),
        ("byte-level-prefix-space", Piece("\n'"), Piece("s")),
        ("byte-level-digits", Piece("some words <|im_", control=True), Piece("end|>", control=True)),
        ("sentencepiece-prepend", Piece("The quick bro", control=True), Piece("wn</s>", control=True)),
    ],
)
def test_hard_ends_of_pieces(name: str, before: Piece, after: Piece) -> None:
    encoder = PromptEncoder(zoo()[name])
    prefix, whole, at_once = (
        encoder.encode(pieces)
        for pieces in ([before], [before, after], [Piece(before.text + after.text, control=before.control)])
    )
    assert np.array_equal(whole.token_ids, at_once.token_ids)
    if not before.control:
        expected = literal_backend(name).encode(before.text + after.text, add_special_tokens=False).ids
        assert whole.token_ids.tolist() == expected
    for boundary in prefix.boundaries:
        assert np.array_equal(whole.token_ids[:boundary], prefix.token_ids[:boundary])


@pytest.mark.parametrize("name", BUILDERS)
@many_examples
@given(pieces=pieces_of_text)
def test_a_warm_cache_gives_the_same_as_a_cold_one(name: str, pieces: list[Piece]) -> None:
    warm = PromptEncoder(zoo()[name])
    first, second = warm.encode(pieces), warm.encode(pieces)
    evicting = PromptEncoder(zoo()[name], cache_bytes=0).encode(pieces)
    for other in (second, evicting):
        assert np.array_equal(first.token_ids, other.token_ids)
        assert np.array_equal(first.boundaries, other.boundaries)


@pytest.mark.parametrize("name", FULLY_CUT)
def test_at_least_99_percent_of_a_long_prefix_is_below_a_boundary(name: str) -> None:
    prompt = PromptEncoder(zoo()[name]).encode([Piece("\n".join(CORPUS * 10))])
    assert prompt.boundaries[-1] >= 0.99 * len(prompt.token_ids)


@pytest.mark.parametrize(
    "name", ["byte-level-gpt2", "byte-level-llama3", "byte-level-qwen2-nfc", "sentencepiece-prepend"]
)
def test_text_without_spaces_is_cut_too(name: str) -> None:
    prompt = PromptEncoder(zoo()[name]).encode([Piece("你好，世界。再见。" * 200, control=True)])
    assert prompt.boundaries[-1] >= 0.99 * len(prompt.token_ids)


def test_an_unknown_tokenizer_is_never_cut_within_a_run() -> None:
    tokenizer = zoo()["byte-level-unknown-regex"]
    assert tokenizer.layout.cut_kind is CutKind.WHOLE
    pieces = [Piece("<|im_start|>user\nSome text. ", control=True), Piece("And more." * 100)]
    assert PromptEncoder(tokenizer).encode(pieces).boundaries.tolist() == [1]


def test_boundaries_are_ends_of_pieces_and_a_grid() -> None:
    encoder = PromptEncoder(zoo()["byte-level-digits"])
    pieces = [Piece("<|im_start|>", control=True), Piece("7" * 300), Piece("<|im_end|>", control=True)]
    assert encoder.encode(pieces).boundaries.tolist() == [1, 128, 256, 299, 302]


@pytest.mark.parametrize("name", sorted(zoo()))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(before=pieces_of_text, after=pieces_of_text)
def test_prompts_that_begin_with_the_same_pieces_have_the_same_ids_up_to_their_end(
    name: str, before: list[Piece], after: list[Piece]
) -> None:
    encoder = PromptEncoder(zoo()[name])
    one, other = encoder.encode(before), encoder.encode([*before, *after])
    assert len(other.piece_ends) == len(before) + len(after)
    assert (np.diff(other.piece_ends) >= 0).all()
    for end in other.piece_ends[: len(before)]:
        assert np.array_equal(one.token_ids[:end], other.token_ids[:end])
    assert set(other.piece_ends.tolist()) <= {0, 1, *other.boundaries.tolist()}


# --- exactly one BOS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Hello", "<s>Hello", "<s><s>Hello", "", "<s>"])
def test_exactly_one_bos_whether_or_not_the_prompt_carries_it(text: str) -> None:
    prompt = PromptEncoder(zoo()["sentencepiece-prepend"]).encode(
        [Piece(text, control=True), Piece(" there")]
    )
    assert prompt.token_ids[0] == 1
    assert prompt.token_ids.tolist().count(1) == 1


def test_boundaries_count_the_bos_that_was_put_in_front_or_left_out() -> None:
    encoder = PromptEncoder(zoo()["sentencepiece-prepend"])
    for text in ("<s></s>", "</s>", "<s><s></s>"):
        assert encoder.encode([Piece(text, control=True)]).boundaries.tolist() == [2]


def test_text_that_follows_generated_ids_gets_no_bos_and_no_space() -> None:
    tokenizer = zoo()["sentencepiece-prepend"]
    prompt = PromptEncoder(tokenizer).encode([Piece("quick", control=True)], continues=True)
    tokens = [tokenizer.backend.id_to_token(token) for token in prompt.token_ids]
    assert "".join(tokens) == "quick"


def test_a_model_without_bos_gets_none_and_keeps_the_one_in_its_text() -> None:
    path = write_tokenizer(
        Path(mkdtemp()), BUILDERS["sentencepiece-prepend"](), bos_token="<s>", add_bos_token=False
    )
    encoder = PromptEncoder(Tokenizer.load(path))
    assert 1 not in encoder.encode([Piece("Hello", control=True)]).token_ids
    assert encoder.encode([Piece("<s>Hello", control=True)]).token_ids.tolist().count(1) == 1


# --- text stays text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\n", "{{output:x}}", "<|endoftext|>"])
def test_control_strings_in_values_stay_text(text: str) -> None:
    tokenizer = zoo()["byte-level-digits"]
    glue = Piece("<|im_start|>user\n", control=True)
    ids = PromptEncoder(tokenizer).encode([glue, Piece(text), Piece("<|im_end|>", control=True)]).token_ids
    assert [token for token in ids if token in tokenizer.layout.control_ids.values()] == [1, 2]
    assert tokenizer.decode(ids) == "user\n" + text


def test_a_control_string_joined_from_a_constant_and_a_value_stays_text() -> None:
    tokenizer = zoo()["byte-level-digits"]
    ids = PromptEncoder(tokenizer).encode([Piece("<|im_", control=True), Piece("end|>")]).token_ids
    assert 2 not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_a_prompt_may_end_in_half_of_a_control_string() -> None:
    tokenizer = zoo()["byte-level-digits"]
    text = "some words <|im_"
    ids = PromptEncoder(tokenizer).encode([Piece(text, control=True)]).token_ids
    assert ids.tolist() == tokenizer.literal.encode(text, add_special_tokens=False).ids


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        PromptEncoder(zoo()["byte-level-digits"]).encode([Piece("a\ud83d")])


# --- cost and threads --------------------------------------------------------------------------------------


def test_the_cache_stays_within_its_bytes() -> None:
    encoder = PromptEncoder(zoo()["byte-level-digits"], cache_bytes=20_000)
    for i in range(100):
        encoder.encode([Piece(f"text number {i} " * 20)])
    assert encoder.cached_bytes <= 20_000


def test_threads_share_an_encoder() -> None:
    encoder = PromptEncoder(zoo()["byte-level-digits"], cache_bytes=5_000)
    prompts = [[Piece(f"constant {i % 7} " * 9), Piece("<|im_end|>")] for i in range(60)]
    expected = [PromptEncoder(zoo()["byte-level-digits"]).encode(p).token_ids.tolist() for p in prompts]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([encoder.encode(p).token_ids.tolist() for p in prompts])

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# --- the real tokenizer ------------------------------------------------------------------------------------


@cache
def smollm2(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@given(text=texts, positions=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=80, deadline=None)
def test_smollm2_text_cut_anywhere_gives_the_ids_of_the_whole(
    smollm2_dir: Path, text: str, positions: list[int]
) -> None:
    tokenizer = smollm2(smollm2_dir)
    ids = (
        PromptEncoder(tokenizer)
        .encode([Piece(part, control=True) for part in cut(text, positions)])
        .token_ids
    )
    assert ids.tolist() == tokenizer.backend.encode(text, add_special_tokens=False).ids


@given(before=pieces_of_text, after=pieces_of_text)
@settings(max_examples=80, deadline=None)
def test_smollm2_boundaries_are_stable(smollm2_dir: Path, before: list[Piece], after: list[Piece]) -> None:
    encoder = PromptEncoder(smollm2(smollm2_dir))
    prefix, whole = encoder.encode(before), encoder.encode([*before, *after])
    for boundary in prefix.boundaries:
        assert np.array_equal(whole.token_ids[:boundary], prefix.token_ids[:boundary])


@pytest.mark.usefixtures("garbage_at_rest")
def test_smollm2_encodes_a_long_constant_once(smollm2_dir: Path) -> None:
    constant = Piece(
        "".join(f"Line {i}: the quick brown fox isn't lazy.\n" for i in range(2000)), control=True
    )
    encoder = PromptEncoder(smollm2(smollm2_dir))
    start = time.thread_time()
    first = encoder.encode([constant])
    whole = time.thread_time() - start
    durations = []
    for i in range(20):
        start = time.thread_time()
        prompt = encoder.encode([constant, Piece(f"Another value {i}.")])
        durations.append(time.thread_time() - start)
    assert len(prompt.token_ids) > 25_000
    assert first.boundaries[-1] >= 0.99 * len(first.token_ids)
    assert min(durations) < whole / 10


def test_only_text_that_no_other_prompt_had_is_new(tiny_model: Path) -> None:
    encoder = PromptEncoder(Tokenizer.load(tiny_model))
    first = [Piece("<|im_start|>system\n", control=True), Piece("a constant of some length"), Piece(" one")]
    second = [*first[:2], Piece(" another")]
    total = sum(len(piece.text) for piece in first)
    assert encoder.num_new_chars(first) == total
    encoder.encode(first)
    assert encoder.num_new_chars(first) == 0
    assert encoder.num_new_chars(second) == len(" another")
    assert encoder.num_new_chars(first, domain=7) == total
    assert encoder.num_new_chars(first, continues=True) == total
    assert encoder.num_new_chars(first, domain=7, num_public=2) == len(" one")
