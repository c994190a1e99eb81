"""The cyclic garbage collector of a manager or an engine: out of the way of requests.

Left alone it stops the process for as long as it takes to look at the objects of a generation, 50 ns to 1 us
each. How many those are is not what its thresholds say: they count allocations less deallocations, and while
as many old objects go as new ones come, everything that lives for a second may be young. What a service makes
is freed by reference counts instead: a graph's cycles are cut when its session closes
(:meth:`parrot.manager.graph.Graph.releasing`). The cycles of libraries and exceptions are looked for when
nothing runs, and when far more is there than at the last look.
"""

from __future__ import annotations

import gc

# Allocations less deallocations between two looks: some 100 MB more than at the last one, and a pause of 0.1
# to 0.5 s. Each fifth look takes in what survived the ones before.
_GROWTH = 500_000
_OLDER = 4


def keep_out_of_the_way() -> None:
    """Call once, when everything that lives as long as the process is there. Takes as long as it takes to
    look at all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GROWTH, _OLDER, _OLDER)


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
