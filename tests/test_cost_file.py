"""cost.json: what an engine measured comes back as it was; anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parrot.engine.cost_file import read_cost, write_cost
from parrot.errors import ConfigError
from parrot.wire import CostModel

COST = CostModel(4560.0, 12.8, 21.1, 0.1234, 230_400, 14_400)
SHIPPED = sorted((Path(__file__).parents[1] / "bench" / "costs").glob("*.json"))


def test_a_cost_model_comes_back(tmp_path: Path) -> None:
    write_cost(tmp_path / "cost.json", COST, "measured")
    assert read_cost(tmp_path / "cost.json") == COST
    assert json.loads((tmp_path / "cost.json").read_text())["source"] == "measured"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_us": -1}, "base_us = -1.0 is outside"),
        ({"num_blocks": 1}, "num_blocks = 1 is outside"),
        ({"capacity_tokens": 15}, "capacity_tokens = 15 is outside"),
        ({"per_kv_token_us": "fast"}, "not a cost model.*per_kv_token_us"),
        ({"num_blocks": None}, "not a cost model.*num_blocks"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    write_cost(path, COST, "")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        read_cost(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        read_cost(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_cost(tmp_path / "no" / "cost.json", COST, "")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_costs_are_readable_and_say_where_they_come_from(path: Path) -> None:
    cost = read_cost(path)
    assert cost.capacity_tokens <= cost.num_blocks * 16
    assert len(json.loads(path.read_text())["source"]) > 40
