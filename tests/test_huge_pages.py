"""Memory of this process in huge pages: what is in use, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from parrot import huge_pages

HUGE = 2**21
NUM_BYTES = 32 * HUGE


def mapped() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # small pages, whatever this machine is set to
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mapping(address: int) -> list[str]:
    """What the kernel says of the mapping in which the address lies."""
    lines: list[str] = []
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            begin, end = (int(border, 16) for border in name.split("-"))
            is_inside = begin <= address < end
        if is_inside:
            lines.append(line)
    return lines


def in_use(address: int) -> dict[str, int]:
    """Bytes of that mapping, by name."""
    fields = (line.split() for line in mapping(address)[1:])
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in fields if value.isdigit()}


def gather_only(address: int, monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    """As if nothing else were mapped: a process of many tests has more than is moved."""
    (directory / "smaps").write_text("\n".join(mapping(address)))
    monkeypatch.setattr(huge_pages, "_SMAPS", directory / "smaps")
    return huge_pages.gather()


def test_memory_in_use_moves_and_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory, address = mapped()
    memory[:] = bytes(range(256)) * (NUM_BYTES // 256)
    before = in_use(address)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if gather_only(address, monkeypatch, tmp_path) == 0:
        pytest.skip("this kernel moves nothing (MADV_COLLAPSE is of Linux 6.1)")
    assert before["AnonHugePages"] == 0
    assert in_use(address)["AnonHugePages"] >= NUM_BYTES - 2 * HUGE
    assert memory[:] == bytes(range(256)) * (NUM_BYTES // 256)


def test_memory_that_is_hardly_used_takes_no_more_than_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, address = mapped()
    for offset in range(0, NUM_BYTES, HUGE):
        memory[offset] = 1
    memory.madvise(mmap.MADV_HUGEPAGE)
    gather_only(address, monkeypatch, tmp_path)
    assert in_use(address)["Rss"] < NUM_BYTES // 4


def test_no_more_than_so_many_pages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_PAGES", 0)
    assert huge_pages.gather() == 0


def test_a_mapped_file_may_have_any_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "smaps").write_bytes(b"1000-2000 r--p 00000000 fe:00 7 /lib/v\xff.so\nRss: 4 kB\n")
    monkeypatch.setattr(huge_pages, "_SMAPS", tmp_path / "smaps")
    assert huge_pages.gather() == 0


def test_where_the_kernel_does_not_say_what_is_mapped_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "_SMAPS", tmp_path / "none")
    assert huge_pages.gather() == 0
