"""The checks of ``parrot doctor``: each looks at one thing and, if it is wrong, says what mends it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, ParrotError

Status = Literal["ok", "optional", "broken"]
TORCH_RANGE = ((2, 11), (2, 14))  # half-open, as in the extra "torch"
_NEEDED_MEMORY_MIB = 1536  # SmolLM2 in float32, its KV cache, and two Python processes
_HEALTH_TIMEOUT_S = 2.0
_MODULES = ("fastapi", "gguf", "httpx", "jinja2", "jsonpath_ng", "msgspec", "numpy", "pydantic", "zmq")
_MORE_MODULES = ("httptools", "rich", "safetensors", "tokenizers", "typer", "uvicorn", "uvloop")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``optional``: absent, and Parrot works without it."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run_checks(model: str, port: int) -> list[Check]:
    """All checks in order; one that fails unexpectedly is reported as broken, never raised."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("native core", check_native_core),
        ("torch", check_torch),
        ("cuda", check_cuda),
        ("model", lambda: check_model(model)),
        ("port", lambda: check_port(port)),
        ("memory", check_memory),
        ("openai client", check_openai),
    ]
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(
            name, "broken", f"the check failed: {type(error).__name__}: {error}", "report this as a bug"
        )


def check_python() -> Check:
    """CPython 3.11 or 3.12, which the wheels are built for."""
    detail = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Check("python", "ok", detail)
    return Check("python", "broken", detail, "create the environment with python3.11 or python3.12")


def check_packages() -> Check:
    """Every run-time dependency can be found."""
    missing = [name for name in _MODULES + _MORE_MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        return Check("packages", "ok", f"{len(_MODULES + _MORE_MODULES)} run-time dependencies found")
    return Check("packages", "broken", f"missing: {', '.join(missing)}", "pip install parrot-serve")


def check_native_core() -> Check:
    """``parrot._core`` loads and does a round of work; no compiler is needed for it."""
    fix = "pip install --force-reinstall --no-deps parrot-serve, or `make setup` in a clone"
    try:
        core = importlib.import_module("parrot._core")
        tree = core.ContextTree(4, 16)
        tree.check_invariants()
        isa = importlib.import_module("parrot.cpu_isa").checked_cpu_isa()
    except ConfigError as error:
        return Check("native core", "broken", error.message, "correct or unset PARROT_CPU_ISA")
    except Exception as error:
        return Check("native core", "broken", f"parrot._core does not work: {error}", fix)
    return Check(
        "native core",
        "ok",
        f"parrot._core loads, CPU kernels use {isa}; no compiler is needed at run time",
    )


def check_torch() -> Check:
    """PyTorch of the supported range, which engines need; a manager or a client alone does without."""
    low, high = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    fix = f"pip install 'torch>={low},<{high}' (on a machine without GPU: torch==2.13.0)"
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Check("torch", "broken", f"not importable: {error}", fix)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if TORCH_RANGE[0] <= version < TORCH_RANGE[1]:
        return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    return Check("torch", "broken", f"{torch.__version__} is outside >={low},<{high}", fix)


def check_cuda() -> Check:
    """The CUDA module and a GPU for it, both optional."""
    has_module = importlib.util.find_spec("parrot._kernels") is not None
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        detail = "no GPU in use; engines run on the CPU"
        return Check(
            "cuda", "optional", detail + ("" if has_module else ", and the CUDA module is not built")
        )
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    if not has_module:
        fix = "put nvcc on PATH and reinstall with PARROT_CUDA=ON"
        return Check("cuda", "optional", f"{name} is here, but parrot._kernels is not built", fix)
    importlib.import_module("parrot._kernels")
    if capability < (8, 0):
        return Check("cuda", "optional", f"{name} has compute capability {capability}, 8.0 is needed")
    return Check("cuda", "ok", f"{name}, compute capability {capability[0]}.{capability[1]}")


def check_model(model: str) -> Check:
    """The model resolves to a complete directory, and its tokenizer loads."""
    from ..models import resolve_model
    from ..tokenizer import Tokenizer

    try:
        directory = resolve_model(model)
        tokenizer = Tokenizer.load(directory)
    except ParrotError as error:
        fix = f"parrot model install {model}"
        return Check("model", "broken", error.message.removesuffix(f"; run: {fix}"), fix)
    size_mib = sum(file.stat().st_size for file in directory.iterdir()) // 2**20
    return Check("model", "ok", f"{model}: {size_mib} MiB, vocabulary of {tokenizer.vocab_size}, {directory}")


def check_port(port: int) -> Check:
    """The service's port can be bound on the loopback interface, or Parrot serves there already."""
    if _serves_parrot(port):
        return Check("port", "ok", f"parrot is serving on 127.0.0.1:{port}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "stop what listens there, or serve with another --port (0 takes a free one)"
            return Check("port", "broken", f"127.0.0.1:{port}: {error.strerror}", fix)
    return Check("port", "ok", f"127.0.0.1:{port} is free")


def _serves_parrot(port: int) -> bool:
    import httpx

    try:
        health = httpx.get(
            f"http://127.0.0.1:{port}/health", timeout=_HEALTH_TIMEOUT_S, trust_env=False
        ).json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(health, dict) and health.get("service") == "parrot"


def check_memory() -> Check:
    """Enough memory for the default model with one engine."""
    free_mib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free_mib = int(fields["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError):
        pass
    if free_mib >= _NEEDED_MEMORY_MIB:
        return Check("memory", "ok", f"{free_mib} MiB available, {os.cpu_count()} cores")
    fix = f"free memory: the default model needs about {_NEEDED_MEMORY_MIB} MiB, less with --dtype bfloat16"
    return Check("memory", "broken", f"{free_mib} MiB available", fix)


def check_openai() -> Check:
    """The client that the client-orchestrated examples use."""
    if importlib.util.find_spec("openai") is not None:
        return Check("openai client", "ok", "found; the demo can run its client-orchestrated twin")
    detail = "not installed; only `parrot demo` and the examples' twins need it"
    return Check("openai client", "optional", detail, "pip install openai")
