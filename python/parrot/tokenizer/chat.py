"""Chat templates, rendered in a sandbox around messages whose contents are not known yet."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest
from .tokenizer import Tokenizer

# Private-use characters, and no white space: a template may trim contents, split or compare them.
_SENTINEL = "\ue000parrot-message-{}\ue001"
_SENTINEL_PATTERN = re.compile("\ue000parrot-message-([0-9]+)\ue001")


def render_chat(
    tokenizer: Tokenizer, roles: Sequence[str], *, add_generation_prompt: bool
) -> list[str | int]:
    """The chat as control text (str) and places of contents (int: index of the message).

    A content goes into its place as it is: a template that would trim it is not followed in that. Raises
    :class:`InvalidRequest` if the model has no chat template, the template refuses these roles or fails, or
    it leaves a message out.
    """
    if tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template; send a prompt without roles", param="messages")
    messages = [{"role": role, "content": _SENTINEL.format(i)} for i, role in enumerate(roles)]
    try:
        text = _compile(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **tokenizer.special_tokens
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"the model's chat template does not take the roles {list(roles)}: {error}", param="messages"
        ) from error
    return _split(text, roles)


def _split(text: str, roles: Sequence[str]) -> list[str | int]:
    parts = _SENTINEL_PATTERN.split(text)
    chat: list[str | int] = []
    for index, part in enumerate(parts):
        if index % 2:
            chat.append(int(part))
        elif part:
            chat.append(part)
    missing = sorted(set(range(len(roles))) - {part for part in chat if isinstance(part, int)})
    if missing:
        raise InvalidRequest(
            f"the model's chat template leaves out message {missing[0] + 1} ({roles[missing[0]]})",
            param="messages",
        )
    return chat


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own escapes HTML characters, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
