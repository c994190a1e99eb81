"""An engine's clock beside the manager's."""

from __future__ import annotations

from parrot.manager.clock import ClockOffset


def test_engine_times_are_shifted_by_the_frame_that_was_fastest() -> None:
    clock = ClockOffset()
    for delay_us in (900, 50, 4000):
        clock.observe(1_000_000, 6_000_000 + delay_us)
    assert clock.to_manager_us(1_000_000) == 6_000_050
    # Drift: minima older than two windows no longer count.
    for minute in (2, 4, 6):
        clock.observe(1_000_000 + minute * 60_000_000, 6_000_700 + minute * 60_000_000)
    assert clock.offset_us == 5_000_700
