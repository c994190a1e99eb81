"""The engine benchmark's own judgement, and its protocol with an arm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench import engine_cpu
from bench.engine_cpu import OURS, SHARED, UNSHARED, VLLM, WORKLOADS, Arm, Process, Spread
from bench.timing import spread

STUB = """
import json, sys
options = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True, "version": options["version"]}), flush=True)
for line in sys.stdin:
    workload = json.loads(line)
    if not workload["prompts"]:
        sys.exit("no prompts")
    tokens = (workload["max_tokens"] - 1) * len(workload["prompts"])
    print(json.dumps({"fill_s": 2.0, "decode_s": 4.0, "decode_tokens": tokens}), flush=True)
"""


def figures(ours: float, vllm: float | None, unshared: float | None) -> dict[str, dict[str, Spread]]:
    """The same figure for every workload."""
    rows: dict[str, dict[str, Spread]] = {}
    for workload in WORKLOADS:
        arms = {OURS: ours, VLLM: vllm, UNSHARED: unshared if workload is SHARED else None}
        rows[workload.name] = {arm: spread([value]) for arm, value in arms.items() if value is not None}
    return rows


def test_more_tokens_per_second_and_fewer_milliseconds_are_better() -> None:
    passed = list(engine_cpu.judge(figures(ours=10, vllm=11, unshared=14)).values())
    assert passed == [True, True, True, True, False, True]  # 11 ms over 10 ms is not 1.3
    passed = list(engine_cpu.judge(figures(ours=10, vllm=14, unshared=9.9)).values())
    assert passed == [False, False, False, False, True, False]


def test_what_is_aimed_at_and_not_reached_is_said_with_the_reason_and_fails_no_run() -> None:
    found = figures(ours=10, vllm=None, unshared=11.8)
    assert all(engine_cpu.judge(found).values())
    (text,) = engine_cpu.known_misses(found)
    assert "1.18x per-request attention, 1.3 is aimed at" in text
    assert "docs/cpu.md" in text
    assert engine_cpu.known_misses(figures(ours=10, vllm=None, unshared=13)) == []
    assert engine_cpu.known_misses(figures(ours=10, vllm=14, unshared=None)) == []


def test_a_peer_that_is_not_there_is_not_judged() -> None:
    assert engine_cpu.judge(figures(ours=10, vllm=None, unshared=None)) == {}


@pytest.fixture
def stub(tmp_path: Path) -> Arm:
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    return Arm(OURS, sys.executable, (str(script),), {"version": "1.2"})


def test_figures_come_from_what_an_arm_answers(stub: Arm, tmp_path: Path) -> None:
    process = Process(stub, tmp_path / "log")
    try:
        assert process.version == "1.2"
        found = {w.name: dict(engine_cpu._draw([process], w, w.outputs, seed="0")) for w in WORKLOADS}
    finally:
        process.close()
    assert [row[OURS] for row in found.values()] == [16.0, 128.0, 256.0, 512.0, 125.0]


def test_all_arms_get_the_same_prompts_of_a_draw_and_others_of_the_next(
    stub: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Recorder:
        arm = stub

        def ask(self, message: object) -> dict[str, float]:
            asked.append(json.dumps(message))
            return {"fill_s": 1.0, "decode_s": 1.0, "decode_tokens": 1}

    processes = [Recorder(), Recorder()]
    for seed in ("0 0", "0 1"):
        list(engine_cpu._draw(processes, WORKLOADS[1], 3, seed))  # type: ignore[arg-type]
    assert asked[0] == asked[1] != asked[2] == asked[3]


def test_an_arm_that_ends_is_named_with_its_last_words(stub: Arm, tmp_path: Path) -> None:
    process = Process(stub, tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"parrot ended:\n.*no prompts"):
        process.ask({"prompts": [], "max_tokens": 1})
    with pytest.raises(RuntimeError, match=r"parrot ended:\n.*no prompts"):
        process.ask({"prompts": [], "max_tokens": 1})
    process.close()


def test_a_peer_that_its_interpreter_does_not_have_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER", sys.executable)
    assert engine_cpu._interpreter("PEER", "json") == sys.executable
    assert engine_cpu._interpreter("PEER", "no_such_module") is None
    monkeypatch.setenv("PEER", "/nowhere/python")
    assert engine_cpu._interpreter("PEER", "json") is None
    monkeypatch.setenv("PEER", "")
    assert engine_cpu._interpreter("PEER", "json", sys.executable) is None
    monkeypatch.delenv("PEER")
    assert engine_cpu._interpreter("PEER", "json") is None
    assert engine_cpu._interpreter("PEER", "json", sys.executable) == sys.executable
