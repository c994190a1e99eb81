"""Changing the file of API keys: one change at a time, seen whole or not at all, readable by its owner."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, NotFound
from .key_file import (
    ID_CHARS,
    KeyEntry,
    KeyFile,
    TenantLimits,
    digest_of,
    new_key,
    parse_key_file,
    read_key_file,
    render_key_file,
)

_MODE = 0o600


def add_tenant_key(path: Path, tenant: str, limits: dict[str, float], note: str = "") -> str:
    """A new key of a tenant; ``limits`` change those that it has. Returns the key; nobody keeps it."""
    with _changed(path) as change:
        change.set_limits(tenant, limits)
        return change.add_key(tenant, note)


def add_operator_key(path: Path, note: str = "") -> str:
    """A new key of the operator."""
    with _changed(path) as change:
        return change.add_key(None, note)


def set_limits(path: Path, tenant: str, limits: dict[str, float]) -> None:
    """Change limits of a tenant; raises :class:`NotFound` for one that is not in the file."""
    with _changed(path) as change:
        if tenant not in change.tenants:
            raise NotFound(f"{path} has no tenant {tenant!r}", param="tenant")
        change.set_limits(tenant, limits)


def revoke_key(path: Path, key_id: str) -> KeyEntry:
    """Take out a key, named by the first digits of its digest. Raises :class:`NotFound`."""
    if len(key_id) < ID_CHARS:
        raise NotFound(f"{key_id!r} is no key id; `parrot key list` shows them", param="key_id")
    with _changed(path) as change:
        return change.remove_key(key_id)


class _Change:
    """A file's content while it is changed."""

    def __init__(self, path: Path, file: KeyFile) -> None:
        self._path = path
        self.tenants = dict(file.tenants)
        self._keys = list(file.keys)

    def set_limits(self, tenant: str, limits: dict[str, float]) -> None:
        known = self.tenants.get(tenant, TenantLimits())
        # Not validated here: the whole file is, before it is written.
        self.tenants[tenant] = known.model_copy(update=limits)

    def add_key(self, tenant: str | None, note: str) -> str:
        known = {entry.key_id for entry in self._keys}
        key = new_key()
        while digest_of(key)[:ID_CHARS] in known:
            key = new_key()
        entry = KeyEntry.model_construct(
            sha256=digest_of(key), tenant=tenant, operator=tenant is None, created=_now(), note=note
        )
        self._keys.append(entry)
        return key

    def remove_key(self, key_id: str) -> KeyEntry:
        for entry in self._keys:
            if entry.sha256.startswith(key_id):
                self._keys.remove(entry)
                return entry
        raise NotFound(f"{self._path} has no key {key_id}; `parrot key list` shows them", param="key_id")

    def rendered(self) -> bytes:
        content = render_key_file(KeyFile.model_construct(tenants=self.tenants, keys=self._keys))
        parse_key_file(self._path, content)
        return content


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[_Change]:
    """The file's content, to be changed in the block and written at its end; an error changes nothing."""
    path = path.resolve()
    with _locked(path.parent):
        change = _Change(path, read_key_file(path) if path.exists() else KeyFile())
        yield change
        _replace(path, change.rendered())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One change at a time: of all files in a directory, so that no lock file is left behind."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"file: {directory} cannot be opened ({error.strerror})", param="file") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with os.fdopen(descriptor, "wb") as target:
            os.fchmod(descriptor, _MODE)
            _keep_owner(path, descriptor)
            target.write(content)
            target.flush()
            os.fsync(descriptor)
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise ConfigError(f"file = {path} cannot be written ({error.strerror})", param="file") from None
    finally:
        temporary.unlink(missing_ok=True)


def _keep_owner(path: Path, descriptor: int) -> None:
    """A change made by root must not take the file away from the service's user."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        before = path.stat()
        os.fchown(descriptor, before.st_uid, before.st_gid)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
