"""The file of API keys: which tenants there are, their limits, and the digests of their keys.

A key is 256 random bits behind a prefix by which scanners of source code recognise it. The file has only its
SHA-256. A slow hash, as passwords need, would add nothing: nobody can try 2^256 keys at any speed, and every
request pays for the hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError

KEY_PREFIX = "pk-parrot-"
ID_CHARS = 12  # hexadecimal digits of a key's digest: what names it in messages and to `parrot key revoke`
_KEY_PATTERN = re.compile(rb"pk-parrot-[A-Za-z0-9_-]{43}")
_MAX_FILE_BYTES = 16 * 2**20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ABSENT = bytes(32)

RESERVED = "default"  # who asks a service without keys


def _not_reserved(name: str) -> str:
    if name == RESERVED:
        raise ValueError(f"{name!r} is no name for a tenant: a service without keys uses it")
    return name


TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
TenantName = Annotated[str, Field(pattern=TENANT_PATTERN), AfterValidator(_not_reserved)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Entry(BaseModel):
    """Base of what the file has: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TenantLimits(Entry):
    """A tenant's share of the engines while others wait too, and what it may use; None: no limit."""

    weight: float = Field(default=1.0, ge=0.001, le=1000.0)
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None  # prompts and outputs
    max_concurrent_calls: Count | None = None  # submitted and not finished


class KeyEntry(Entry):
    """One key: of a tenant, or an operator's, which sees how the service does and runs nothing."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: TenantName | None = None
    operator: bool = False
    created: str = ""
    note: str = Field(default="", max_length=256)

    @model_validator(mode="after")
    def _of_somebody(self) -> KeyEntry:
        if (self.tenant is None) != self.operator:
            raise ValueError("a key has either a tenant or operator = true")
        return self

    @property
    def key_id(self) -> str:
        """What names the key without giving it away."""
        return self.sha256[:ID_CHARS]

    @property
    def owner(self) -> str:
        """How messages and logs call whose key it is."""
        return "the operator" if self.tenant is None else f"tenant {self.tenant}"


class KeyFile(Entry):
    """What is in the file."""

    tenants: dict[TenantName, TenantLimits] = Field(default_factory=dict)
    keys: list[KeyEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole(self) -> KeyFile:
        seen: dict[str, int] = {}
        for index, key in enumerate(self.keys):
            if key.tenant is not None and key.tenant not in self.tenants:
                raise ValueError(f"keys.{index}.tenant: {key.tenant!r} is not among the tenants")
            other = seen.setdefault(key.key_id, index)
            if other != index:
                raise ValueError(f"keys.{index}.sha256: a key of this id is there already, as keys.{other}")
        return self


class KeyRing:
    """Finds who a key belongs to. Immutable: a changed file makes another one."""

    def __init__(self, file: KeyFile) -> None:
        self.tenants = dict(file.tenants)
        self._by_id = {entry.key_id: (bytes.fromhex(entry.sha256), entry) for entry in file.keys}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, key: bytes) -> KeyEntry | None:
        """The entry of a key. How long a refusal takes says nothing about the keys that there are: a digest
        cannot be steered, and it is compared in constant time, with zeros when no entry has its id."""
        if _KEY_PATTERN.fullmatch(key) is None:
            return None
        digest = hashlib.sha256(key).digest()
        known, entry = self._by_id.get(digest[: ID_CHARS // 2].hex(), (_ABSENT, None))
        return entry if hmac.compare_digest(digest, known) else None


def new_key() -> str:
    """A key that nobody has; only its owner may keep it."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(path: Path | None) -> KeyFile | None:
    """The file's content; None without a file: then nobody needs a key."""
    return None if path is None else read_key_file(path)


def read_key_file(path: Path) -> KeyFile:
    """Raises :class:`ConfigError` that names the file, the entry and the field."""
    try:
        # A pipe that nobody writes would keep a plain open() for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            found = os.fstat(source.fileno()).st_mode
            raw = source.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(found) else None
    except OSError as error:
        _refuse(path, f"it cannot be read ({error.strerror}); `parrot key new TENANT --file {path}` makes it")
    if raw is None:
        _refuse(path, "it is not a regular file")
    mode = stat.S_IMODE(found)
    if mode & _WRITABLE_BY_OTHERS:
        _refuse(path, f"its mode {mode:04o} lets other users add keys; chmod 600 {path}")
    if len(raw) > _MAX_FILE_BYTES:
        _refuse(path, f"it is larger than {_MAX_FILE_BYTES} bytes")
    return parse_key_file(path, raw)


def parse_key_file(path: Path, raw: bytes) -> KeyFile:
    """The content of a file as :func:`read_key_file` takes it."""
    try:
        return KeyFile.model_validate(json.loads(raw, object_pairs_hook=_without_repeats))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]")
        message = str(first["msg"]).removeprefix("Value error, ")
        _refuse(path, f"{where}: {message}" if where else message)
    except RecursionError:
        _refuse(path, "it is nested too deeply")
    except ValueError as error:  # not JSON, not UTF-8, or a name twice
        _refuse(path, f"it is not the JSON of a key file: {error}")


def render_key_file(file: KeyFile) -> bytes:
    """The file's content, for :func:`parse_key_file`."""
    content = file.model_dump(mode="json", exclude_defaults=True)
    whole = {"tenants": content.get("tenants", {}), "keys": content.get("keys", [])}
    return (json.dumps(whole, indent=2) + "\n").encode()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a later entry of a name replace an earlier one in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ConfigError(f"api_keys = {path}: {problem}", param="api_keys") from None
