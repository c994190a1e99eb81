"""Numbers of an engine's frames: what is missing and asked for, and since when all is known again."""

from __future__ import annotations

from parrot.engine import sent_frames
from parrot.engine.sent_frames import SentFrames
from parrot.manager.frames import FrameOrder


def lose(frames: FrameOrder, newest: int) -> None:
    """The frames up to this one are asked for, and do not come."""
    assert frames.beats(newest)
    assert frames.asks()
    for _ in range(2):
        frames.beats(newest)
        assert not frames.gives_up()
    frames.beats(newest)
    assert frames.gives_up()


def test_frames_in_order_are_complete_and_late_ones_change_nothing() -> None:
    frames = FrameOrder()
    assert all(frames.arrived(number) for number in (1, 2, 2, 1, 3))
    assert not frames.beats(3)
    assert not frames.beats(2)
    assert frames.arrived(0), "an engine that does not count"
    assert (frames.newest, frames.is_complete) == (3, True)


def test_what_is_ahead_of_a_missing_frame_waits_for_it_and_is_asked_for_once() -> None:
    frames = FrameOrder()
    assert frames.arrived(1)
    assert not frames.arrived(3)
    assert frames.asks()
    assert not frames.arrived(4)
    assert not frames.asks()
    assert [frames.arrived(number) for number in (2, 3, 4)] == [True] * 3
    assert not frames.beats(4)
    assert not frames.gives_up()
    assert frames.is_complete
    assert not frames.arrived(6)
    assert frames.asks(), "another gap is another question"


def test_the_next_heartbeat_tells_of_a_last_frame_that_is_missing() -> None:
    frames = FrameOrder()
    assert frames.beats(1)
    assert frames.asks()
    assert frames.arrived(1)
    assert not frames.beats(1)


def test_frames_that_do_not_come_again_are_lost_with_those_that_came_ahead_of_them() -> None:
    frames = FrameOrder()
    frames.arrived(1)
    frames.arrived(5)
    lose(frames, 3)
    assert (frames.newest, frames.is_complete) == (5, False)
    assert frames.arrived(6)
    assert not frames.gives_up()


def test_only_a_report_sent_after_the_gap_makes_up_for_it() -> None:
    frames = FrameOrder()
    frames.arrived(1)
    lose(frames, 7)
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


def test_an_engine_keeps_its_last_frames_within_bounds() -> None:
    sent = SentFrames()
    assert sent.since(1) == []
    for number in range(1, sent_frames.MAX_FRAMES + 3):
        sent.add(number, b"%d" % number)
    assert sent.since(2) == []
    assert len(sent.since(3)) == sent_frames.MAX_FRAMES
    assert sent.since(sent_frames.MAX_FRAMES + 2) == [b"%d" % (sent_frames.MAX_FRAMES + 2)]
    big = bytes(sent_frames.MAX_BYTES // 2)
    for number in (5000, 5001, 5002):
        sent.add(number, big)
    assert sent.since(5000) == []
    assert sent.since(5001) == [big, big]
