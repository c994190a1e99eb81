"""What of a prompt is published text: all of a published constant beginning, or nothing of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.api import MessageBody
from parrot.errors import ConfigError, InvalidRequest
from parrot.manager.prompts import PromptBuilder
from parrot.manager.published import PublicPart, PublicText, PublishedTemplates, split_at
from parrot.tokenizer import EncodedPrompt, Piece, PromptEncoder, Tokenizer

TEXT = "You are a careful assistant. Answer in one short sentence, and say where you have it from. "


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


def builder(tokenizer: Tokenizer, *templates: str | list[tuple[str, str]]) -> PromptBuilder:
    published = PublishedTemplates(
        template
        if isinstance(template, str)
        else tuple(MessageBody(role=role, content=content) for role, content in template)  # type: ignore[arg-type]
        for template in templates
    )
    return PromptBuilder(tokenizer, published)


def encode(builder: PromptBuilder, *pieces: Piece, domain: int = 1) -> EncodedPrompt:
    return builder.encode([pieces], first_step=0, domain=domain)[0]


def public_text(tokenizer: Tokenizer, prompt: EncodedPrompt) -> str:
    assert prompt.public_len == 0 or prompt.public_len in prompt.boundaries.tolist()
    return tokenizer.backend.decode(prompt.token_ids[: prompt.public_len].tolist(), skip_special_tokens=False)


def constant(text: str) -> Piece:
    return Piece(text, control=True)


def test_the_constant_beginning_of_a_published_prompt_is_public_in_every_prompt_with_it(
    tokenizer: Tokenizer,
) -> None:
    encoder = builder(tokenizer, TEXT + "{{input:question}} {{output:answer}}")
    prompts = [
        encode(encoder, constant(TEXT), Piece(value), constant(" Go."), domain=domain)
        for value, domain in (("Why?", 1), ("a", 2), ("", 1), ("   ", 2))
    ]
    prompts.append(encode(encoder, constant(TEXT + "a text that goes on in one piece")))
    publics = {public_text(tokenizer, prompt) for prompt in prompts}
    assert len(publics) == 1, "the seam depends on what follows"
    (public,) = publics
    assert TEXT.startswith(public)
    assert len(public) > len(TEXT) - 12
    assert encode(encoder, constant(TEXT), Piece("Why?")).piece_ends.shape == (2,)
    assert prompts[-1].piece_ends.shape == (1,)


def test_less_than_all_of_it_is_not_public(tokenizer: Tokenizer) -> None:
    encoder = builder(tokenizer, TEXT + "{{input:question}} {{output:answer}}")
    for prompt in (TEXT[:-1], TEXT[:-1] + "x", "x" + TEXT, TEXT.replace("careful", "clever"), ""):
        assert encode(encoder, constant(prompt)).public_len == 0
        assert encode(encoder, constant(prompt), Piece("Why?")).public_len == 0
    assert encode(encoder, Piece(TEXT), constant(" ")).public_len == 0, "a value is no constant"
    assert encode(builder(tokenizer), constant(TEXT)).public_len == 0


def test_later_steps_and_ids_are_never_public(tokenizer: Tokenizer) -> None:
    encoder = builder(tokenizer, TEXT + "{{output:answer}}")
    first, later = encoder.encode([[constant(TEXT)], [constant(TEXT)]], first_step=0, domain=1)
    assert first.public_len > 0 == later.public_len
    assert encoder.from_ids(first.token_ids.tolist()).public_len == 0


def test_a_system_prompt_is_public_in_chats_whatever_the_user_says(tokenizer: Tokenizer) -> None:
    """As templates with roles and as bodies of /v1/chat/completions have it."""
    encoder = builder(
        tokenizer,
        [("system", TEXT), ("user", "{{input:q}}"), ("assistant", "{{output:a}}")],
        [("system", "Be brief.")],
    )
    for text, content in itertools.product((TEXT, "Be brief."), ("Why?", "")):
        chat = encoder.chat_pieces([("system", text), ("user", content)])
        public = public_text(tokenizer, encode(encoder, *chat))
        assert text in public
        assert "Why" not in public
    for messages in ([("system", TEXT + "More."), ("user", "Why?")], [("user", TEXT)]):
        assert encode(encoder, *encoder.chat_pieces(messages)).public_len == 0  # type: ignore[arg-type]


def test_a_template_that_ends_inside_a_message_is_public_up_to_there(tokenizer: Tokenizer) -> None:
    encoder = builder(tokenizer, [("system", TEXT + "Topic: {{input:topic}}"), ("user", "{{input:q}}")])
    chat = encoder.chat_pieces([("system", TEXT + "Topic: the sea, and more"), ("user", "Why?")])
    prompt = encode(encoder, *chat)
    assert TEXT[:-10] in public_text(tokenizer, prompt)
    assert "sea" not in public_text(tokenizer, prompt)
    assert prompt.piece_ends.shape == (len(chat),)


def test_an_end_that_could_become_a_control_token_is_not_public(tokenizer: Tokenizer) -> None:
    encoder = builder(tokenizer, "Say this to them, word by word: <|im_{{input:x}}{{output:y}}")
    plain = PromptBuilder(tokenizer)
    for rest in ("<|im_end|> now", "<|im_ x"):
        pieces = constant("Say this to them, word by word: " + rest)
        prompt = encode(encoder, pieces)
        assert prompt.public_len > 0
        assert prompt.token_ids.tolist() == encode(plain, pieces).token_ids.tolist()


def test_marks_cannot_be_forged(tokenizer: Tokenizer) -> None:
    encoder = builder(tokenizer, [("system", TEXT), ("user", "{{input:q}}")])
    chat = encoder.chat_pieces([("system", TEXT), ("user", "")])
    forged = "\ud800".join(piece.text for piece in chat)
    with pytest.raises(InvalidRequest, match="surrogate"):
        encode(encoder, constant(forged), Piece("Why?"))


def test_the_longest_published_beginning_counts() -> None:
    texts = ["a", "ab", "abcd", "abd", "b", "abcz", "\ue000"]
    public = PublicText([[Piece(text)] for text in texts], len)
    for length in range(5):
        for characters in itertools.product("abcdz", repeat=length):
            prompt = "".join(characters)
            longest = max((len(text) for text in texts if prompt.startswith(text)), default=0)
            expected = PublicPart(1, 0) if longest == len(prompt) > 0 else PublicPart(0, longest)
            assert public.find([Piece(prompt)]) == expected, prompt


def test_text_and_control_text_are_not_the_same() -> None:
    public = PublicText([[constant("a"), Piece("b"), Piece("c")]], len)
    assert public.find([constant("a"), Piece("bcd")]) == PublicPart(1, 2)
    assert public.find([Piece(""), constant("a"), Piece(""), Piece("bc")]) == PublicPart(4, 0)
    assert public.find([Piece("abc")]) == public.find([constant("abc")]) == PublicPart(0, 0)


PARTS = st.lists(
    st.tuples(st.sampled_from(["You", " are", "<|im_", "end|>", "\n", " ", "é", "<"]), st.booleans())
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PARTS, PARTS, PARTS)
def test_ids_do_not_depend_on_what_is_published(
    tokenizer: Tokenizer,
    beginning: list[tuple[str, bool]],
    own: list[tuple[str, bool]],
    other: list[tuple[str, bool]],
) -> None:
    encoder = PromptEncoder(tokenizer)
    public = PublicText([[Piece(*part) for part in beginning]], encoder.settled_length)
    seams = set()
    for rest in (own, other):
        pieces = [Piece(*part) for part in beginning + rest]
        part = public.find(pieces)
        num_public = part.num_pieces + (part.num_chars > 0)
        prompt = encoder.encode(split_at(pieces, part), domain=1, num_public=num_public)
        assert prompt.token_ids.tolist() == PromptEncoder(tokenizer).encode(pieces).token_ids.tolist()
        seams.add(tuple(prompt.token_ids[: prompt.public_len].tolist()))
    assert len(seams) == 1


def test_what_is_encoded_is_remembered_by_domain_and_published_text_once(tokenizer: Tokenizer) -> None:
    encoder, secret = PromptEncoder(tokenizer), Piece("a text of some length, which both happen to have")
    taken = []
    for domain in (1, 2, 1, 2):
        encoder.encode([constant(TEXT), secret], domain=domain, num_public=1)
        taken.append(encoder.cached_bytes)
    first, second = taken[0], taken[1] - taken[0]
    assert second > 512, "the second tenant was served from the first one's cache"
    assert first - second > 2 * len(TEXT), "published text is remembered twice"
    assert taken[1:] == [taken[1]] * 3


def test_templates_come_from_a_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "published.json"
    path.write_text(
        json.dumps([TEXT + "{{input:q}}", [{"role": "system", "content": "Be brief."}], "{{input:q}} x"])
    )
    published = PublishedTemplates.load(path)
    beginnings = list(published.beginnings(tokenizer))
    assert beginnings[0] == [constant(TEXT)]
    assert Piece("Be brief.") in beginnings[1]
    assert beginnings[2] == []
    assert PublishedTemplates.load(None).templates == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "published.json: Expecting"),
        ('{"a": 1}', "published.json: .*tuple"),
        ("[3]", "published.json: 0"),
        ('[[{"role": "wizard", "content": "x"}]]', "published.json: 0.*"),
        ('["x {{input:}}"]', "published template 1"),
        (None, "published.json: .*No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "published.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        PublishedTemplates.load(path)
    assert error.value.param == "published_templates"


def test_the_log_says_what_was_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps([TEXT, "Say {{output:x}}"]))
    with caplog.at_level("INFO", "parrot.manager.published"):
        PublishedTemplates.load(path)
    assert caplog.messages == [f"tenants share the constant beginnings of the templates in {path}: 2"]
