"""Which instruction set the native kernels on the CPU use."""

from __future__ import annotations

from ._core import cpu_isa
from .errors import ConfigError


def checked_cpu_isa() -> str:
    """The best set of this CPU, or what ``PARROT_CPU_ISA`` asks for.

    Raises :class:`ConfigError` if that names no set, or one that this CPU lacks: no engine starts then, on a
    GPU neither."""
    try:
        return cpu_isa()
    except ValueError as error:
        raise ConfigError(f"{error}; correct or unset it", param="PARROT_CPU_ISA") from None
