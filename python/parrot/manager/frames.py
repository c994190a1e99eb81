"""Whether all that an engine said has come: its StepReplies are numbered, and a number that is missing means
that the manager may believe in contexts that the engine no longer has."""

from __future__ import annotations

_PATIENCE_BEATS = 2  # heartbeats that a frame which was asked for may take
MAX_LOSSES = 16  # in a row; 8 were too few where 30 % of all frames are lost, both ways, for a minute


class FrameOrder:
    """Numbers of one life of an engine. Numbers of 0 are no numbers and change nothing.

    Frames that come late, or twice, do no harm: what they say of contexts only ever shortens them.
    """

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self.current = 0  # the frame that is being handled
        self.is_complete = True
        self.num_losses = 0  # of frames of either side, since one last came in order
        self._lost_before = 0  # what was missing has a smaller number
        self._last_report = 0
        self._seen = newest  # the largest number that has come or was announced
        self._beats_asked: int | None = None  # since the missing frames were asked for; None: none are

    def arrived(self, number: int) -> bool:
        """A frame has come; whether it is to be handled. One that is ahead of a missing one is left alone: it
        comes again behind that one, or counts as lost with it."""
        self._seen = max(self._seen, number)
        if number > self.newest + 1:
            return False
        self.current = number
        if number > self.newest:
            self.newest = number
            self._beats_asked = None
            self.num_losses = 0
        return True

    def asks(self) -> bool:
        """Whether the frames from ``newest + 1`` on are to be asked for, which is said once."""
        if self._beats_asked is not None:
            return False
        self._beats_asked = 0
        return True

    def beats(self, number: int) -> bool:
        """A heartbeat says that ``number`` was the engine's last frame; whether one is missing."""
        self._seen = max(self._seen, number)
        if self._beats_asked is not None:
            self._beats_asked += 1
        return self._seen > self.newest

    def gives_up(self) -> bool:
        """Whether the missing frames have been waited for long enough; they are lost then."""
        if self._beats_asked is None or self._beats_asked <= _PATIENCE_BEATS:
            return False
        self._beats_asked = None
        self.lose_up_to(self._seen)
        return True

    def lose_up_to(self, number: int) -> None:
        """The frames up to this one will not come any more."""
        if number > self.newest:
            self.newest = number
            self._lost_before = number
            self.is_complete = False

    def reported(self) -> None:
        """The present frame tells everything anew."""
        self._last_report = max(self._last_report, self.current)
        if self.current >= self._lost_before:
            self.is_complete = True

    @property
    def is_outdated(self) -> bool:
        """Whether the present frame was sent before one that told everything."""
        return 0 < self.current < self._last_report
