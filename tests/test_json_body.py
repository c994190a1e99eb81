"""What JSON has in it is counted before it is read, since reading it may take seconds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from parrot.manager import json_body
from parrot.manager.json_body import num_values


def marks(value: Any) -> int:
    """Commas, colons and opening brackets of a value's JSON, those in its texts left out."""
    if isinstance(value, dict):
        inner = sum(map(marks, value.values())) + len(value)
    elif isinstance(value, list):
        inner = sum(map(marks, value))
    else:
        return 0
    return 1 + max(0, len(value) - 1) + inner


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 2:
        return "".join(rng.choice('\\",:[{}\n\u20ac ax') for _ in range(rng.randrange(8)))
    if kind == 2:
        return rng.choice((0, -1.5, True, None))
    items = [some_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return items if kind == 3 else {f'{i}"\\,': item for i, item in enumerate(items)}


def test_what_is_in_texts_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    monkeypatch.setattr(json_body, "MAX_VALUES", 10_000)
    for _ in range(500):
        padded = [some_value(rng), ",[{:" * 10_000]  # so that it is looked at
        assert num_values(json.dumps(padded).encode()) == marks(padded)


def test_many_texts_are_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_VALUES", 10)
    assert num_values(json.dumps([""] * 12).encode()) > 10
    assert num_values(json.dumps({str(i): 1 for i in range(6)}).encode()) > 10
