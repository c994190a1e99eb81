"""Steps that compute nothing although calls are there: logged once, with what the engine knows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_harness import Harness, load
from parrot import wire
from parrot.engine.live_cost import LiveCost
from parrot.engine.watchdog import StepWatchdog


def test_a_loop_that_turns_and_computes_nothing_is_told_once_and_so_is_its_end(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(*load(tiny_model))
    engine, watchdog = harness.engine, StepWatchdog(stall_after_s=0.0)

    def stalls() -> int:
        return sum("nothing was computed" in record.message for record in caplog.records)

    call = harness.submit(list(range(3, 40)))
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(engine._waiting, "admit", lambda *_: [])
        for _ in range(5):
            harness.step()
            watchdog.stepped(engine, engine.stats())
        assert stalls() == 1
        assert f"1 calls: {call} (0 of 37 tokens)" in caplog.text
        patch.undo()
        harness.step()
        watchdog.stepped(engine, engine.stats())
        assert "steps compute again" in caplog.text
        harness.run(call)
        watchdog.stepped(engine, engine.stats())
        for _ in range(3):
            watchdog.stepped(engine, engine.stats())  # idle
    assert stalls() == 1


def test_busy_time_is_compared_with_what_the_cost_model_expects(tiny_model: Path) -> None:
    harness = Harness(*load(tiny_model))
    cost = wire.CostModel(1000.0, 100.0, 10.0, 1.0, 4096, 256)
    harness.engine._cost_model = cost
    harness.engine._live_cost = live = LiveCost(cost)
    harness.generate(list(range(3, 100)), max_tokens=30)
    stats = harness.engine.stats()
    assert stats.calls_ended == 1
    assert stats.busy_us > 0
    steps = 1100 * stats.num_steps + 10 * 97
    assert steps < stats.expected_us < steps + 2 * 127 * stats.num_steps
    assert live._num_steps == stats.num_steps
