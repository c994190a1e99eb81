"""The cyclic garbage collector of a manager: out of the way of requests.

Left alone it stops the loop for as long as it takes to look at every live object, some 50 ns each, whenever
their number has grown by a quarter. What the manager makes is freed by reference counts instead: a graph's
cycles are cut when its session closes (:meth:`parrot.manager.graph.Graph.releasing`). The young generations
are still looked at, for the cycles of libraries and exceptions; everything else is when nothing runs.
"""

from __future__ import annotations

import gc

# Allocations less deallocations between two looks. What survives is looked at twice, however often that is,
# and a look takes as long as what has come since the last one: 2 ms, and 6 ms at every third.
_YOUNG = 5_000
_MIDDLE = 2
_NEVER = 1_000_000


def keep_out_of_the_way() -> None:
    """Call once, when everything that lives as long as the process is there. Takes as long as it takes to
    look at all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


def keep_what_is_there() -> None:
    """Nothing that was made so far is looked at again. Takes no time. Closed graphs are freed."""
    gc.freeze()


class IdleCollector:
    """Looks at everything once after work, when a whole interval has passed without any."""

    def __init__(self) -> None:
        self._seen = 0  # calls that had ended at the last sweep
        self._collected = 0  # and when everything was looked at

    def sweep(self, num_ended: int, num_busy: int) -> None:
        """Called now and then with the calls that have ended so far and the work that is under way."""
        rested = num_busy == 0 and num_ended == self._seen
        self._seen = num_ended
        if rested and num_ended != self._collected:
            self._collected = num_ended
            gc.collect()
