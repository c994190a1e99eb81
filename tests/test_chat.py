"""Chat templates around contents that are not known yet, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parrot.errors import InvalidRequest
from parrot.tokenizer import Piece, PromptEncoder, Tokenizer, render_chat
from tiny_models import CHATML, byte_level_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STRICT = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set offset = 1 %}
{%- else %}
    {%- set offset = 0 %}
{%- endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == offset) %}
        {{ raise_exception('Roles must alternate user/assistant') }}
    {% endif %}
    {% if loop.first %}{{ bos_token or '' }}{% endif %}
[{{ message['role'] | upper }}] {{ message['content'] | trim }} {{ {'last': loop.last} | tojson }}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
"""
CONVERSATIONS = [
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant"],
]


def make(directory: Path, template: str | None) -> Tokenizer:
    config = {} if template is None else {"chat_template": template}
    return Tokenizer.load(
        write_tokenizer(directory, byte_level_tokenizer(), eos_token="<|im_end|>", **config)
    )


def fill(chat: list[str | int], contents: list[str]) -> str:
    return "".join(contents[part] if isinstance(part, int) else part for part in chat)


def contents_of(roles: list[str]) -> list[str]:
    return [f"Content {i} of {role}, {{{{input:x}}}} <b>." for i, role in enumerate(roles)]


@pytest.fixture(scope="module")
def both(smollm2_dir: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Ours and that of transformers, for SmolLM2."""
    from transformers import AutoTokenizer

    return Tokenizer.load(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.model
@pytest.mark.parametrize("roles", CONVERSATIONS, ids="-".join)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equals_transformers(
    both: tuple[Tokenizer, PreTrainedTokenizerFast], roles: list[str], add_generation_prompt: bool
) -> None:
    tokenizer, theirs = both
    contents = contents_of(roles)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    options = {"add_generation_prompt": add_generation_prompt}
    chat = render_chat(tokenizer, roles, **options)
    assert fill(chat, contents) == theirs.apply_chat_template(messages, tokenize=False, **options)
    pieces = [Piece(contents[p]) if isinstance(p, int) else Piece(p, control=True) for p in chat]
    ids = PromptEncoder(tokenizer).encode(pieces).token_ids.tolist()
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("template", [CHATML, STRICT], ids=["chatml", "strict"])
@pytest.mark.parametrize("roles", CONVERSATIONS[:3], ids="-".join)
def test_other_templates_equal_transformers(tmp_path: Path, template: str, roles: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = make(tmp_path, template)
    contents = contents_of(roles)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = render_chat(tokenizer, roles, add_generation_prompt=True)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert fill(chat, contents) == expected


def test_roles_that_the_template_refuses_are_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        render_chat(make(tmp_path, STRICT), ["user", "user"], add_generation_prompt=True)


def test_a_model_without_template_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat(make(tmp_path, None), ["user"], add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ messages[0].missing.attribute }}",
        "{{ messages | length + 'x' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_broken_or_unsafe_template_is_a_typed_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(make(tmp_path, template), ["user"], add_generation_prompt=True)


def test_a_message_that_the_template_drops_is_a_typed_error(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, "{{ messages[-1]['content'] }}")
    with pytest.raises(InvalidRequest, match=r"message 1 \(system\)"):
        render_chat(tokenizer, ["system", "user"], add_generation_prompt=True)
