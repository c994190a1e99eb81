"""Whether all that an engine said has come: its StepReplies are numbered, and a number that is missing means
that the manager may believe in contexts that the engine no longer has."""

from __future__ import annotations


class FrameOrder:
    """Numbers of one life of an engine. Numbers of 0 are no numbers and change nothing.

    Frames that come late, or twice, do no harm: what they say of contexts only ever shortens them.
    """

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self.current = 0  # the frame that is being handled
        self.is_complete = True
        self._lost_before = 0  # what was missing has a smaller number
        self._last_report = 0

    def arrived(self, number: int) -> bool:
        """A frame has come; whether it shows that one before it was lost."""
        self.current = number
        if number <= self.newest:
            return False
        has_gap = number > self.newest + 1
        self.newest = number
        if has_gap:
            self._lost(number)
        return has_gap

    def announced(self, number: int) -> None:
        """The engine says that this was its last frame."""
        if number > self.newest:
            self.newest = number
            self._lost(number)

    def reported(self) -> None:
        """The present frame tells everything anew."""
        self._last_report = max(self._last_report, self.current)
        if self.current >= self._lost_before:
            self.is_complete = True

    @property
    def is_outdated(self) -> bool:
        """Whether the present frame was sent before one that told everything."""
        return 0 < self.current < self._last_report

    def _lost(self, before: int) -> None:
        self._lost_before = before
        self.is_complete = False
