"""Finding a model's files: a name, a GGUF file or a Hugging Face directory -> a directory ready to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, float], None]  # (what is being done, fraction done in [0, 1])


def resolve_model(name: str) -> Path:
    """Directory of a model given as ``smollm2``, a Hugging Face directory or a .gguf file.

    Raises :class:`ModelPackageMissing` if the package that carries the model is not installed, and
    :class:`ModelFileError` naming file and fix for a missing, truncated or malformed file."""


def install_model(name: str, progress: Progress | None = None) -> Path:
    """Like :func:`resolve_model`, reporting progress of a first conversion."""


def install_package(name: str) -> None:
    """Install the package that carries model ``name``."""
