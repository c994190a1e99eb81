"""Which GPUs of this machine engines run on: ``--gpus all``, ``--gpus 0,2`` or ``--device cuda:1``."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

from ..errors import ConfigError, SetupError

_DRIVER = Path("/dev/nvidiactl")
_DIGITS = 4  # of the number of a GPU


def gpu_devices(selection: str) -> list[str]:
    """``cuda:N`` for each GPU chosen, numbered as torch numbers them (``CUDA_VISIBLE_DEVICES`` counts).

    Raises :class:`ConfigError` for a selection that is neither ``all`` nor distinct numbers of GPUs that are
    here, :class:`SetupError` where there is none.
    """
    count = num_gpus()
    if count == 0:
        raise SetupError(
            "--gpus: this machine has no GPU that is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
            "take --engines for engines on the CPU",
            param="gpus",
        )
    if selection == "all":
        return [f"cuda:{number}" for number in range(count)]
    names = selection.split(",")
    if not all(name.isascii() and name.isdecimal() and len(name) <= _DIGITS for name in names):
        raise ConfigError(
            f"--gpus {selection[:80]!r} is neither 'all' nor numbers such as '0,2'", param="gpus"
        )
    numbers = [int(name) for name in names]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--gpus {selection[:80]} names a GPU twice", param="gpus")
    for number in numbers:
        if number >= count:
            raise ConfigError(
                f"--gpus {selection[:80]}: there is no GPU {number}, only {count}", param="gpus"
            )
    return [f"cuda:{number}" for number in numbers]


def check_device(device: str) -> None:
    """Raise :class:`SetupError` for a ``cuda`` or ``cuda:N`` that is not here. Of a driver without its tools
    nothing is known: the engine will find out."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (shutil.which("nvidia-smi") is None and _DRIVER.exists()):
        return
    count = num_gpus()
    if int(number or 0) >= count:
        here = f"only cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0" if count else "no GPU"
        raise SetupError(
            f"device {device} is not here: this machine shows {here}; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or choose another --device, such as cpu",
            param="device",
        )


def num_gpus() -> int:
    """GPUs that a CUDA program started from here sees, as far as the driver's tools tell.

    Raises :class:`ConfigError` if ``CUDA_VISIBLE_DEVICES`` names one twice: CUDA then shows none at all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = shutil.which("nvidia-smi")
    if command is None or visible == "":
        return 0
    done = subprocess.run([command, "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    uuids = [line.rpartition("(UUID: ")[2].rstrip(")") for line in lines if line.startswith("GPU ")]
    if visible is None:
        return len(uuids)
    # As CUDA reads it: what follows a name of no GPU, such as -1, is not seen.
    names = (_gpu_named(name.strip(), uuids) for name in visible.split(","))
    named = list(itertools.takewhile(lambda gpu: gpu is not None, names))
    if len(set(named)) < len(named):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible[:80]} names a GPU twice, and CUDA then shows none; name each once"
        )
    return min(len(uuids), len(named))


def _gpu_named(name: str, uuids: list[str]) -> int | str | None:
    """The number of the GPU of this number or beginning of a UUID; of a part of a GPU (MIG) its own name."""
    if name.startswith("MIG-"):
        return name
    if name.isascii() and name.isdecimal():
        return int(name) if len(name) <= _DIGITS and int(name) < len(uuids) else None
    found = [number for number, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
    return found[0] if len(found) == 1 else None
