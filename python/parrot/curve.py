"""CURVE keys for the wire between a manager and engines of other machines: encrypted, and known at both ends.

A directory has ZeroMQ certificates: ``manager.key`` and ``manager.key_secret``; ``engine.key_secret``, with
which an engine shows who it is; and in ``engines/`` the public key of each engine that the manager admits.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate

from .errors import ConfigError

log = logging.getLogger(__name__)
_MANAGER = "manager"
_ENGINE = "engine"
_ADMITTED = "engines"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_SECRET_TO = stat.S_IRWXO | stat.S_IWGRP  # others must not read a secret key, nor the group change it


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys of one end, in the 40 characters of Z85."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"  # no trace shows a secret


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What an engine needs: its own pair, and the manager that it talks to."""

    own: KeyPair
    manager: bytes


class AdmittedEngines:
    """Says of a public key whether it is among those of ``engines/``; read at each handshake, so that a file
    that comes or goes counts from the next connection on. Called by ZeroMQ's authenticator."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / _ADMITTED

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the engine may join."""
        for path in sorted(self._directory.glob("*.key")):
            try:
                if load_certificate(path)[0] == key:
                    return True
            except (OSError, ValueError) as error:
                log.error("%s is no certificate: %s", path, error)
        log.warning(
            "an engine with the public key %s is not admitted: it is not in %s",
            key.decode("ascii", "replace"),
            self._directory,
        )
        return False


def make_curve_keys(directory: Path, engine: str = _ENGINE) -> list[Path]:
    """Keys of a manager, unless there are, and of one more engine. Returns the files that are new; raises
    :class:`ConfigError` if the engine has keys."""
    _check_curve()
    if engine == _MANAGER or not _NAME.fullmatch(engine):
        raise ConfigError(f"engine = {engine!r} is no name of an engine's key", param="engine")
    admitted = directory / _ADMITTED
    made: list[Path] = []
    with _private_files(), _named(directory):
        admitted.mkdir(mode=0o755, parents=True, exist_ok=True)
        if (directory / f"{engine}.key_secret").exists() or (admitted / f"{engine}.key").exists():
            raise ConfigError(f"{directory} has keys of {engine} already", param="engine")
        if not (directory / f"{_MANAGER}.key_secret").exists():
            made += map(Path, create_certificates(directory, _MANAGER))
        public, secret = create_certificates(directory, engine)
        made += [Path(public).replace(admitted / f"{engine}.key"), Path(secret)]
    return made


def load_manager_keys(directory: Path) -> KeyPair:
    """Raises :class:`ConfigError` that names the file."""
    _check_curve()
    return _pair(directory, _MANAGER)


def load_engine_keys(directory: Path) -> EngineKeys:
    """Raises :class:`ConfigError` that names the file."""
    _check_curve()
    with _named(directory / f"{_MANAGER}.key"):
        manager, _ = load_certificate(directory / f"{_MANAGER}.key")
    return EngineKeys(_pair(directory, _ENGINE), manager)


def _pair(directory: Path, name: str) -> KeyPair:
    path = directory / f"{name}.key_secret"
    with _named(path):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _SECRET_TO:
            raise ConfigError(
                f"curve_keys: the mode {mode:04o} of {path} gives the key away; chmod 600", param="curve_keys"
            )
        public, secret = load_certificate(path)
        if secret is None or not len(public) == len(secret) == 40:
            raise ValueError("it has no pair of keys")
        return KeyPair(public, secret)


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "this pyzmq is built without CURVE; pip install pyzmq brings it", param="curve_keys"
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the block as a :class:`ConfigError` about this file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"curve_keys: {path} cannot be used ({reason}); `parrot key curve DIR` makes keys",
            param="curve_keys",
        ) from None


@contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
