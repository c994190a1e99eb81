"""The file of API keys: what is taken, what is refused with which words, and whose a key is."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.errors import ConfigError
from parrot.manager.key_file import (
    ID_CHARS,
    KeyEntry,
    KeyFile,
    KeyRing,
    TenantLimits,
    digest_of,
    new_key,
    parse_key_file,
    read_key_file,
    render_key_file,
)

DIGEST = "ab" * 32
PATH = Path("keys.json")


def parse(content: Any) -> KeyFile:
    return parse_key_file(PATH, content if isinstance(content, bytes) else json.dumps(content).encode())


def test_keys_are_recognisable_and_hold_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"pk-parrot-[A-Za-z0-9_-]{43}", key) for key in keys)  # 43 * 6 bits >= 256
    assert digest_of("pk-parrot-x") == hashlib.sha256(b"pk-parrot-x").hexdigest()


def test_a_key_finds_its_entry_and_nothing_like_it_does() -> None:
    mine, operators = new_key(), new_key()
    entries = [
        KeyEntry(sha256=digest_of(mine), tenant="acme"),
        KeyEntry(sha256=digest_of(operators), operator=True),
    ]
    ring = KeyRing(KeyFile(tenants={"acme": TenantLimits()}, keys=entries))
    assert ring.find(mine.encode()) == entries[0]
    assert ring.find(operators.encode()) == entries[1]
    wrong = [new_key(), mine[:-1], mine + "A", mine + "\n", mine.upper(), "", "none", digest_of(mine)]
    assert [ring.find(key.encode()) for key in wrong] == [None] * len(wrong)


def test_a_key_whose_digest_only_begins_like_a_known_one_is_refused() -> None:
    key = new_key()
    begins_alike = digest_of(key)[:ID_CHARS] + "0" * (64 - ID_CHARS)
    ring = KeyRing(KeyFile(tenants={"a": TenantLimits()}, keys=[KeyEntry(sha256=begins_alike, tenant="a")]))
    assert ring.find(key.encode()) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not the JSON of a key file"),
        (b"\xff", "not the JSON of a key file"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"tenants": {"a": {}, "a": {}}}', "'a' is there twice"),
        ([], "valid dictionary"),
        ({"tenant": {}}, "tenant: Extra inputs"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight: "),
        ({"tenants": {"a": {"weight": "3"}}}, "tenants.a.weight: "),
        ({"tenants": {"a": {"rpm": 3}}}, "tenants.a.rpm: Extra inputs"),
        ({"tenants": {"a": {"requests_per_minute": 0}}}, "tenants.a.requests_per_minute: "),
        ({"tenants": {"a": {"tokens_per_minute": 1.5}}}, "tenants.a.tokens_per_minute: "),
        ({"tenants": {"a": {"max_concurrent_calls": True}}}, "tenants.a.max_concurrent_calls: "),
        ({"tenants": {"a b": {}}}, "tenants.a b: "),
        ({"tenants": {"default": {}}}, "'default' is no name for a tenant"),
        ({"keys": [{"sha256": "AB" * 32, "operator": True}]}, "keys.0.sha256: "),
        ({"keys": [{"sha256": DIGEST}]}, "keys.0: a key has either a tenant or operator"),
        ({"keys": [{"sha256": DIGEST, "tenant": "a"}]}, "keys.0.tenant: 'a' is not among the tenants"),
        ({"keys": [{"sha256": DIGEST, "operator": True}] * 2}, "keys.1.sha256: .* as keys.0"),
    ],
)
def test_a_wrong_file_is_refused_with_file_entry_and_field(content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^api_keys = keys.json: .*{words}") as error:
        parse(content)
    assert error.value.param == "api_keys"


def test_a_key_pasted_where_its_digest_belongs_is_not_repeated() -> None:
    key = new_key()
    with pytest.raises(ConfigError, match="sha256") as error:
        parse({"keys": [{"sha256": key, "operator": True}]})
    assert key not in error.value.message


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*parrot key new TENANT --file"):
        read_key_file(tmp_path / "none.json")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"{}")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o} lets other users add keys; chmod 600"):
        read_key_file(path)
    path.chmod(0o644)
    assert read_key_file(path) == KeyFile()


NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z").filter(lambda name: name != "default")
COUNTS = st.none() | st.integers(1, 2**31 - 1)
LIMITS = st.builds(
    TenantLimits,
    weight=st.floats(0.001, 1000),
    requests_per_minute=COUNTS,
    tokens_per_minute=COUNTS,
    max_concurrent_calls=COUNTS,
)


@given(st.dictionaries(NAMES, LIMITS, max_size=4), st.sets(st.binary(min_size=32, max_size=32), max_size=6))
def test_what_is_rendered_is_read_back(tenants: dict[str, TenantLimits], digests: set[bytes]) -> None:
    unlike = {digest[: ID_CHARS // 2]: digest for digest in digests}.values()
    names = [*tenants, None]
    keys = [
        KeyEntry(sha256=digest.hex(), tenant=name, operator=name is None, note="ä")
        for digest, name in zip(unlike, names * len(digests), strict=False)
    ]
    file = KeyFile(tenants=tenants, keys=keys)
    assert parse_key_file(PATH, render_key_file(file)) == file
