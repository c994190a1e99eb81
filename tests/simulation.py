"""Clusters of simulated engines for tests: a tokenizer of words, cheap costs, calls in a few words."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from parrot import api, wire
from parrot.dummy_model import num_control_tokens, word, write_dummy_model
from parrot.engine.made_up import MadeUpText
from parrot.tokenizer import Tokenizer

# Whole microseconds, so that steps add up exactly.
COST = wire.CostModel(4000, 10, 20, 1, 64_000, 4000)


@cache
def words_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(write_dummy_model(Path(directory), "tiny"))


@cache
def made_up_text() -> MadeUpText:
    return MadeUpText(words_tokenizer())


def text(start: int, num_words: int) -> str:
    """``num_words`` words, each one token."""
    return " ".join(word(num_control_tokens() + (start + i) % 1000) for i in range(num_words))


def call(
    prompt: str, output: str, inputs: Sequence[str] = (), *, max_tokens: int = 20, **sampling: object
) -> dict[str, Any]:
    """A call whose prompt is this text, then its inputs, then its output."""
    holes = "".join(f" {{{{input:i{n}}}}}" for n in range(len(inputs)))
    placeholders: list[dict[str, Any]] = [
        {"name": f"i{n}", "kind": "input", "semantic_var_id": var} for n, var in enumerate(inputs)
    ]
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
    placeholders.append({"name": "o", "kind": "output", "semantic_var_id": output, "sampling": sampling})
    return {"prompt": f"{prompt}{holes}{{{{output:o}}}}", "placeholders": placeholders}


def body(
    session_id: str, calls: Sequence[dict[str, Any]], labels: Sequence[tuple[str, str]] = ()
) -> api.SubmitBody:
    """A submit of these calls and labels (variable, criteria)."""
    marks = [{"semantic_var_id": var, "criteria": criteria} for var, criteria in labels]
    return api.SubmitBody.model_validate({"session_id": session_id, "calls": calls, "labels": marks})
