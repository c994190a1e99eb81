"""The benchmark of the manager's parts, on graphs too small to say anything but that it runs."""

from __future__ import annotations

import json

import pytest
from bench.http_api import largest_body
from bench.manager_parts import PARTS, Sizes, measure
from bench.service_load import TEMPLATE, TEMPLATE_BYTES, VALUE_BYTES, batch_body, chain_body, new_session_id

from parrot import api
from parrot.config import ManagerConfig


@pytest.mark.model
def test_every_part_of_a_calls_life_has_its_time() -> None:
    found = measure(Sizes(((2, 3),), repeats=1, chain=50, constant_tokens=300))
    (row,) = found["shapes"]
    assert (row["width"], row["depth"]) == (2, 3)
    assert all(row["us"][part]["median"] > 0 for part in PARTS)
    assert found["label"]["median"] > 0
    assert found["constant"]["reused"] > 0.9


def test_the_bodies_are_legal_and_as_large_as_they_say() -> None:
    for body in (batch_body(new_session_id(), 3), chain_body(new_session_id(), 3)):
        assert len(api.SubmitBody.model_validate(body).calls) == 3
    assert abs(len(TEMPLATE) - TEMPLATE_BYTES) < 64
    value = batch_body(new_session_id(), 1)["calls"][0]["placeholders"][0]["value"]
    assert len(value) == VALUE_BYTES
    limits, largest = ManagerConfig(), largest_body(new_session_id())
    assert 0.95 * limits.max_body_bytes < len(largest) <= limits.max_body_bytes
    assert len(json.loads(largest)["calls"]) == limits.max_calls_per_submit
