"""Lines of the log that a peer can cause as often as it likes."""

from __future__ import annotations

import logging

from .clock import now_s

EVERY_S = 60.0


class LimitedLog:
    """``most`` lines a minute go into ``log``; how many were left out is said before the next one."""

    def __init__(self, log: logging.Logger, *, most: int) -> None:
        self._log = log
        self._most = most
        self._num_logged = 0  # in this minute
        self._num_left_out = 0
        self._ends_s = float("-inf")

    def line(self, level: int, message: str, *arguments: object) -> None:
        """As ``log.log``, if there is room."""
        if now_s() >= self._ends_s:
            if self._num_left_out:
                self._log.log(level, "%d lines like the following one were left out", self._num_left_out)
            self._num_logged = self._num_left_out = 0
            self._ends_s = now_s() + EVERY_S
        if self._num_logged < self._most:
            self._num_logged += 1
            self._log.log(level, message, *arguments)
        else:
            self._num_left_out += 1
