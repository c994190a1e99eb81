"""Scheduler: the same events give the same placements, also when they are read back from a log."""

from __future__ import annotations

import io
from typing import cast

import pytest
from bench.placement.driver import KEY, Driver

from parrot._core import Scheduler
from parrot.errors import InvalidRequest
from parrot.manager.event_log import RecordedScheduler, replay
from test_scheduler_incremental import Story, new_story

OTHER_KEY = bytes(range(100, 116))


def recorded_story(log: io.BytesIO, num_events: int) -> None:
    recorder = RecordedScheduler(log, hash_key=KEY, aging_us=150_000, latency_capacity_tokens=400)
    story: Story = new_story(11, Driver(cast(Scheduler, recorder)), 5)
    for step in range(num_events):
        if step % 97 == 96:
            story.lose_an_engine()
        story.step()
        story.place()


@pytest.mark.parametrize("changed", [{}, {"constant_hash": True}, {"full_scan": True}])
def test_a_recorded_log_replays_to_the_same_placements_under_another_hash_key(
    changed: dict[str, bool],
) -> None:
    log = io.BytesIO()
    recorded_story(log, 500)
    log.seek(0)
    passes = list(replay(log, hash_key=OTHER_KEY, **changed))
    assert sum(len(recorded) for recorded, _ in passes) > 500
    assert all(recorded == replayed for recorded, replayed in passes)


def test_a_replay_with_a_switch_off_shows_the_difference() -> None:
    log = io.BytesIO()
    recorded_story(log, 100)
    log.seek(0)
    recorded, replayed = next(pair for pair in replay(log, hash_key=KEY, aging=False) if pair[0] != pair[1])
    assert recorded != replayed


def test_a_log_that_is_cut_off_says_so() -> None:
    log = io.BytesIO()
    recorded_story(log, 20)
    cut = io.BytesIO(log.getvalue()[:-3])
    with pytest.raises(InvalidRequest, match="ends within a frame"):
        list(replay(cut, hash_key=KEY))
