"""Numbers of an engine's frames: what is missing, and since when all is known again."""

from __future__ import annotations

from parrot.manager.frames import FrameOrder


def test_frames_in_order_are_complete_and_late_ones_change_nothing() -> None:
    frames = FrameOrder()
    assert not any(frames.arrived(number) for number in (1, 2, 2, 1, 3))
    frames.announced(3)
    frames.announced(2)
    assert frames.is_complete
    assert not frames.arrived(0), "an engine that does not count"
    assert (frames.newest, frames.is_complete) == (3, True)


def test_a_gap_is_seen_by_the_next_frame_or_the_next_heartbeat() -> None:
    by_frame, by_heartbeat = FrameOrder(), FrameOrder()
    by_frame.arrived(1)
    assert by_frame.arrived(3)
    assert not by_frame.is_complete
    by_heartbeat.announced(1)
    assert not by_heartbeat.is_complete


def test_only_a_report_sent_after_the_gap_makes_up_for_it() -> None:
    frames = FrameOrder()
    frames.arrived(1)
    frames.arrived(7)
    frames.arrived(5)
    frames.reported()
    assert not frames.is_complete, "frame 6 may have come after what 5 reports"
    frames.arrived(8)
    frames.reported()
    assert frames.is_complete
    frames.arrived(6)
    assert frames.is_outdated
    frames.arrived(9)
    assert not frames.is_outdated
