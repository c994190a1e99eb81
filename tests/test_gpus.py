"""Choosing GPUs, with a stand-in for the driver's tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from parrot.cli import gpus
from parrot.cli.gpus import check_device, gpu_devices, num_gpus
from parrot.errors import ConfigError, SetupError


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with three GPUs, by what nvidia-smi says."""
    tool = tmp_path / "nvidia-smi"
    lines = "\n".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'" for i in range(3))
    tool.write_text(f"#!/bin/sh\n{lines}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


@pytest.mark.usefixtures("three_gpus")
def test_all_of_them_or_those_named() -> None:
    assert gpu_devices("all") == ["cuda:0", "cuda:1", "cuda:2"]
    assert gpu_devices("2,0") == ["cuda:2", "cuda:0"]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("3", "no GPU 3, only 3"),
        ("0,0", "names a GPU twice"),
        ("0,00", "names a GPU twice"),
        ("0,\u0660", "neither 'all' nor"),  # a zero in another script
        ("9" * 5000, "neither 'all' nor"),
        ("", "neither 'all' nor"),
        ("0,", "neither 'all' nor"),
        ("-1", "neither 'all' nor"),
        ("cuda:0", "neither 'all' nor"),
    ],
)
def test_another_selection_is_refused(selection: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_devices(selection)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1", 2),
        ("GPU-1", 1),
        ("GPU-1,GPU-2", 2),
        ("GPU-,1", 0),  # the beginning of several
        ("2,GPU-9,1", 1),
        ("MIG-1, GPU-2", 2),
        ("0,1,2,3", 3),
        ("", 0),
        ("-1", 0),
        (" -1 ", 0),
        ("0,-1,2", 1),
        ("NoDevFiles", 0),
        ("9" * 5000, 0),
    ],
)
def test_those_that_cuda_may_not_see_do_not_count(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == count


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("visible", ["0,0", "1, 01", "0,1,2,0", "GPU-1,GPU-1", "1,GPU-1", "MIG-1,MIG-1"])
def test_one_named_twice_leaves_none_and_is_said(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for ask in (num_gpus, lambda: gpu_devices("all"), lambda: check_device("cuda")):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice"):
            ask()


@pytest.mark.usefixtures("three_gpus")
def test_what_follows_a_name_of_no_gpu_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9,0")
    assert num_gpus() == 1


def test_a_machine_without_any_says_so(three_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_gpus.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    with pytest.raises(SetupError, match="no GPU"):
        gpu_devices("all")
    monkeypatch.setenv("PATH", "/nowhere")
    assert num_gpus() == 0


@pytest.mark.usefixtures("three_gpus")
def test_a_device_that_is_not_here_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda", "cuda:0", "cuda:2"):
        check_device(device)
    with pytest.raises(SetupError, match="cuda:3 is not here: this machine shows only cuda:0 to cuda:2"):
        check_device("cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(SetupError, match="shows only cuda:0; check nvidia-smi and CUDA_VISIBLE_DEVICES"):
        check_device("cuda:1")


def test_without_its_tools_a_driver_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "nvidiactl")
    with pytest.raises(SetupError, match="shows no GPU"):
        check_device("cuda")
    (tmp_path / "nvidiactl").touch()
    check_device("cuda")
