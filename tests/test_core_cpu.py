"""What the CPU kernels have in common: instruction sets by name, and parallel regions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from parrot import _core

ALL = ["scalar", "avx2", "avx512", "avx512bf16"]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = _core.cpu_threads()
    yield
    _core.set_cpu_isa("")
    _core.set_cpu_threads(threads)


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``program`` in an interpreter of its own, on the same build of the core."""
    preload = "import tests.native_build\n" if "PARROT_CORE" in os.environ else ""
    return subprocess.run(
        [sys.executable, "-c", preload + program],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


def test_supported_sets_are_named_from_the_least() -> None:
    supported = _core.cpu_isas()
    assert supported == ALL[: len(supported)]
    assert supported


def test_a_set_is_used_until_the_start_is_asked_for_again() -> None:
    at_start = _core.cpu_isa()
    for name in _core.cpu_isas():
        _core.set_cpu_isa(name)
        assert _core.cpu_isa() == name
    _core.set_cpu_isa("")
    assert _core.cpu_isa() == at_start


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(ValueError, match='isa = "sse9" is none of scalar, avx2'):
        _core.set_cpu_isa("sse9")


def test_a_set_this_cpu_lacks_is_refused() -> None:
    lacking = ALL[len(_core.cpu_isas()) :]
    if not lacking:
        pytest.skip("this CPU supports every set")
    with pytest.raises(ValueError, match=f'"{lacking[0]}": this CPU supports no more than'):
        _core.set_cpu_isa(lacking[0])


def test_the_environment_chooses_the_set() -> None:
    program = "from parrot import _core; print(_core.cpu_isa())"
    assert python(program, PARROT_CPU_ISA="scalar").stdout.strip() == "scalar"
    wrong = python(program, PARROT_CPU_ISA="neon")
    assert 'PARROT_CPU_ISA = "neon" is none of' in wrong.stderr


def test_the_number_of_threads_is_kept_and_checked() -> None:
    _core.set_cpu_threads(3)
    assert _core.cpu_threads() == 3
    for wrong in (0, -1, 1025):
        with pytest.raises(ValueError, match=f"num_threads = {wrong} is outside"):
            _core.set_cpu_threads(wrong)


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7, 64, 2000])
def test_every_part_runs_once(parts: int) -> None:
    assert _core.count_cpu_parts(parts) == [1] * parts
    assert _core.count_cpu_parts(parts, repeats=50) == [50] * parts


def test_callers_on_several_threads_do_not_mix() -> None:
    results: list[list[int]] = []

    def call() -> None:
        results.append(_core.count_cpu_parts(4, repeats=2000))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2000] * 4] * 5


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = """
import os
from parrot import _core
assert _core.count_cpu_parts(4, repeats=100) == [100] * 4
child = os.fork()
if child == 0:
    os._exit(0 if _core.count_cpu_parts(4, repeats=100) == [100] * 4 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert _core.count_cpu_parts(4, repeats=100) == [100] * 4
"""
    result = python(program)
    assert result.returncode == 0, result.stderr


def test_words_are_summed_on_any_number_of_threads_and_other_arrays_refused() -> None:
    words = np.arange(-3, 1000)
    assert [_core.sum_cpu_words(words, threads) for threads in (1, 2, 7)] == [int(words.sum())] * 3
    assert _core.sum_cpu_words(words[:0], 2) == 0
    for bad in (words[::2], words.astype(np.int32), [1, 2], 64):
        with pytest.raises(ValueError, match=r"words = .*expected a C-contiguous numpy array of int64"):
            _core.sum_cpu_words(bad, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_threads = 0"):
        _core.sum_cpu_words(words, 0)
