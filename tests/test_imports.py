"""Dependencies point one way: read from the sources, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "parrot"
# manager and engine
SHARED = {"wire", "config", "curve", "errors", "template", "api", "tokenizer", "models", "grammars", "_core"}
SHARED |= {"cpu_isa", "garbage", "huge_pages", "parent_death"}

# layer -> the other parts of the package that it may import
ALLOWED = {
    "frontend": {"api", "config", "errors", "models", "template"},
    "manager": SHARED,
    "engine": SHARED | {"kernels"},
    "simulation": SHARED | {"manager", "engine"},
    "kernels": {"config", "errors", "_core", "_kernels"},
    "tokenizer": {"config", "errors", "wire"},
    "api": set(),
    "config": {"errors"},
    "cpu_isa": {"errors", "_core"},
    "curve": {"errors"},
    "errors": set(),
    "garbage": set(),
    "huge_pages": set(),
    "parent_death": set(),
    "template": {"errors"},
    "wire": {"errors"},
    "grammars": {"errors", "wire"},
    "models": {"config", "errors", "gguf_model", "tokenizer"},
    "gguf_model": {"errors", "tokenizer"},
    "timeline": {"api"},
}


def imports_of(source: str, module: str) -> set[str]:
    """Absolute names of everything that the source of ``module`` imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def sources_of(layer: str) -> list[Path]:
    files = [*sorted((PACKAGE / layer).rglob("*.py")), PACKAGE / f"{layer}.py"]
    return [file for file in files if file.exists()]


def own_parts(imports: set[str]) -> set[str]:
    """Parts of the package that are imported: the word after ``parrot.``."""
    return {name.split(".")[1] for name in imports if name.startswith("parrot.")} - {"__version__"}


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_it_may(layer: str) -> None:
    sources = sources_of(layer)
    assert sources, f"{layer} has no sources"
    for path in sources:
        parts = own_parts(imports_of(path.read_text(), module_name(path))) - {layer}
        assert parts <= ALLOWED[layer], f"{path} imports {parts - ALLOWED[layer]}"


def test_only_engine_and_kernels_import_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {name.split(".")[0] for name in imports_of(path.read_text(), module_name(path))}
        if path.relative_to(PACKAGE).parts[0] not in ("engine", "kernels"):
            assert not names & {"torch", "triton"}, f"{path} imports torch"


def test_nothing_imports_pickle() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {name.split(".")[0] for name in imports_of(path.read_text(), module_name(path))}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


def test_the_reader_of_imports_sees_every_form() -> None:
    source = "import torch.nn\ndef f():\n    from ..manager import graph\n    from . import x\n"
    assert imports_of(source, "parrot.frontend.client") == {
        "torch.nn",
        "parrot.manager.graph",
        "parrot.frontend.x",
    }


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("parrot", r"torch|parrot\.(manager|engine|kernels)|fastapi|zmq"),
        ("parrot.manager.server", r"torch|parrot\.(engine|kernels|frontend)"),
        ("parrot.cli.main", r"torch|fastapi|httpx|pydantic|tokenizers|parrot\.(manager|engine|frontend)"),
    ],
)
def test_importing_a_module_loads_nothing_it_should_not(module: str, kept_out: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    loaded = output.split()
    assert module in loaded
    assert not [name for name in loaded if re.match(rf"(?:{kept_out})(?:\.|$)", name)]


@pytest.mark.parametrize(("layer", "other"), [("kvcache", "scheduler"), ("scheduler", "kvcache")])
def test_native_layers_do_not_include_each_other(layer: str, other: str) -> None:
    sources = [path for path in (ROOT / "csrc" / layer).rglob("*") if path.suffix in (".cpp", ".h")]
    assert sources
    for path in sources:
        includes = re.findall(r'#include\s+[<"]([^>"]+)[>"]', path.read_text())
        assert not [name for name in includes if other in name or "pybind11" in name or "Python.h" in name], (
            path
        )
