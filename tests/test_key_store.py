"""Changes of the key file: each whole, none lost, and readable by the owner alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parrot.cli import main as cli
from parrot.errors import ConfigError, NotFound
from parrot.manager import key_store
from parrot.manager.key_file import KeyRing, TenantLimits, read_key_file
from parrot.manager.key_store import add_operator_key, add_tenant_key, revoke_key, set_limits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_the_file_has_no_key_and_only_its_owner_may_read_it(path: Path) -> None:
    key = add_tenant_key(path, "acme", {"weight": 3.0}, "ci")
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    entry = KeyRing(read_key_file(path)).find(key.encode())
    assert entry is not None
    assert (entry.tenant, entry.operator, entry.note) == ("acme", False, "ci")
    path.chmod(0o644)
    add_operator_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]


def test_a_second_key_of_a_tenant_keeps_limits_that_are_not_given(path: Path) -> None:
    add_tenant_key(path, "acme", {"weight": 3.0, "requests_per_minute": 60})
    add_tenant_key(path, "acme", {"requests_per_minute": 30})
    set_limits(path, "acme", {"max_concurrent_calls": 5})
    expected = TenantLimits(weight=3.0, requests_per_minute=30, max_concurrent_calls=5)
    assert read_key_file(path).tenants == {"acme": expected}


def test_a_revoked_key_is_gone_and_others_stay(path: Path) -> None:
    old, new = (add_tenant_key(path, "acme", {}) for _ in range(2))
    ring = KeyRing(read_key_file(path))
    entry = ring.find(old.encode())
    assert entry is not None
    assert revoke_key(path, entry.key_id) == entry
    ring = KeyRing(read_key_file(path))
    assert ring.find(old.encode()) is None
    assert ring.find(new.encode()) is not None
    with pytest.raises(NotFound, match=f"no key {entry.key_id}"):
        revoke_key(path, entry.key_id)
    with pytest.raises(NotFound, match="is no key id"):
        revoke_key(path, "")


def test_a_new_key_never_has_the_id_of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["one", "one", "other"])
    monkeypatch.setattr(key_store, "new_key", lambda: next(drawn))
    assert [add_operator_key(path) for _ in range(2)] == ["one", "other"]


def test_a_refused_change_leaves_the_file_as_it_was(path: Path) -> None:
    add_tenant_key(path, "acme", {})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"tenants\.acme\.weight"):
        add_tenant_key(path, "acme", {"weight": -1.0})
    with pytest.raises(ConfigError, match=r"tenants\.a/b"):
        add_tenant_key(path, "a/b", {})
    with pytest.raises(NotFound, match="no tenant 'other'"):
        set_limits(path, "other", {"weight": 2.0})
    assert path.read_bytes() == before
    path.write_text("{")
    with pytest.raises(ConfigError, match="not the JSON of a key file"):
        add_operator_key(path)
    assert path.read_text() == "{"


def test_changes_at_the_same_time_are_all_there(path: Path) -> None:
    threads = [threading.Thread(target=add_tenant_key, args=(path, f"t{i}", {})) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = read_key_file(path)
    assert len(content.keys) == len(content.tenants) == 12


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    target = tmp_path / "secrets" / "real.json"
    path.symlink_to(target)
    add_operator_key(path)
    assert path.is_symlink()
    assert len(read_key_file(target).keys) == 1


def test_a_write_that_fails_is_a_typed_error_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tenant_key(path, "acme", {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written .No space left"):
        add_operator_key(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]
    with pytest.raises(ConfigError, match="missing cannot be opened"):
        add_operator_key(path.parent / "missing" / "keys.json")


def test_the_command_prints_a_key_alone_on_standard_output(path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(cli.app, ["key", "new", "acme", "--file", str(path), "--weight", "3"])
    assert made.exit_code == 0, made.output
    key = made.stdout.removesuffix("\n")
    entry = KeyRing(read_key_file(path)).find(key.encode())
    assert entry is not None
    runner.invoke(cli.app, ["key", "operator", "--file", str(path), "--note", "prometheus"])
    runner.invoke(cli.app, ["key", "limits", "acme", "--file", str(path), "--tokens-per-minute", "900"])
    listed = runner.invoke(cli.app, ["key", "list", "--file", str(path)]).output
    assert listed.startswith("tenant acme: weight 3, tokens_per_minute 900\n")
    assert f"key {entry.key_id}: tenant acme, made 20" in listed
    assert ": the operator, made 20" in listed
    assert listed.endswith(", prometheus\n")
    assert key not in listed
    revoked = runner.invoke(cli.app, ["key", "revoke", entry.key_id, "--file", str(path)])
    assert revoked.output == f"key {entry.key_id} of tenant acme is revoked\n"
    assert "acme, made" not in runner.invoke(cli.app, ["key", "list", "--file", str(path)]).output


def test_limits_are_shown_as_they_are_after_a_change_and_looking_changes_nothing(path: Path) -> None:
    runner = CliRunner()
    add_tenant_key(path, "acme", {"tokens_per_minute": 1_234_567})
    changed = runner.invoke(cli.app, ["key", "limits", "acme", "--file", str(path), "--weight", "2"])
    assert changed.output == "tenant acme: weight 2, tokens_per_minute 1234567\n"
    before = path.stat()
    looked = runner.invoke(cli.app, ["key", "limits", "acme", "--file", str(path)])
    assert looked.output == changed.output
    assert path.stat().st_ino == before.st_ino
    missing = runner.invoke(cli.app, ["key", "limits", "other", "--file", str(path)])
    assert isinstance(missing.exception, NotFound)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b"], "tenant 'a b': only letters, digits, '.', '_' and '-'"),
        (["acme\n"], "tenant 'acme\\n': "),
        (["acme", "--weight", "-1"], "--weight = -1.0 is outside "),
        (["acme", "--requests-per-minute", "0"], "--requests-per-minute = 0 is outside "),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_of_the_argument(
    path: Path, arguments: list[str], message: str
) -> None:
    made = CliRunner().invoke(cli.app, ["key", "new", *arguments, "--file", str(path)])
    assert isinstance(made.exception, ConfigError)
    assert message in str(made.exception)
    assert not path.exists()


def test_a_change_by_root_leaves_the_file_to_its_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_operator_key(path)
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(key_store.os, "fchown", lambda _, uid, gid: given.append((uid, gid)))
    add_operator_key(path)
    assert given == [(path.stat().st_uid, path.stat().st_gid)]
