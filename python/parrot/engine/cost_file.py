"""cost.json: a cost model on disk, as an engine measured it or as it was derived for one that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..wire import CostModel

_BLOCK_SIZE = 16  # as in batch.py, which needs torch; a manager that reads such a file does not


class CostFile(msgspec.Struct, frozen=True):
    """The file: the cost model's fields, and ``source``, where its numbers come from."""

    base_us: float
    per_sequence_us: float
    per_prefill_token_us: float
    per_kv_token_us: float
    capacity_tokens: int
    num_blocks: int
    source: str = ""

    @property
    def cost(self) -> CostModel:
        """Without the source."""
        return CostModel(*(getattr(self, name) for name in CostModel.__struct_fields__))


def read_cost(path: Path) -> CostModel:
    """Raises :class:`ConfigError` that names the field, its value and its range."""
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=CostFile).cost
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", param="simulate") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a cost model ({error}); `parrot engine --write-cost FILE` writes one",
            param="simulate",
        ) from None
    for name in CostModel.__struct_fields__:
        value, least = getattr(cost, name), {"capacity_tokens": _BLOCK_SIZE, "num_blocks": 2}.get(name, 0)
        if not least <= value < 2**31:
            raise ConfigError(f"{path}: {name} = {value} is outside [{least}, 2^31)", param=name)
    return cost


def write_cost(path: Path, cost: CostModel, source: str) -> None:
    """Raises :class:`ConfigError` if it cannot."""
    fields = {**msgspec.structs.asdict(cost), "source": source}
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})", param="write_cost") from None
