"""The cyclic garbage collector of a manager: out of the way of requests.

Left alone it stops the loop for as long as it takes to look at every live object, some 50 ns each, whenever
their number has grown by a quarter. What the manager makes is freed by reference counts instead: a graph's
cycles are cut when its session closes (:meth:`parrot.manager.graph.Graph.release`). The young generations are
still looked at, for the cycles of libraries and exceptions; everything else is when nothing runs.
"""

from __future__ import annotations

import gc

_YOUNG = 10_000  # allocations less deallocations between two looks, half a millisecond each
_MIDDLE = 10
_NEVER = 1_000_000


def keep_out_of_the_way() -> None:
    """Call once, when everything that lives as long as the process is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


def collect_when_idle() -> None:
    """A look at everything; the caller knows that nobody waits."""
    gc.collect()
