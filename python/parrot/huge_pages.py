"""A process's own memory in huge pages.

What comes after a rest finds the caches of the processor cold, that of page addresses too. A hop from one
call to the next touches some hundred small pages, each of which costs a walk through the page tables then,
and a longer one on a virtual machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_PAGE_BYTES = 2**21
_MOST_PAGES = 256  # weights and KV cache, which may come to far more, do not wait for addresses
_MADV_COLLAPSE = 25  # of Linux 6.1; others refuse it
_SMAPS = Path("/proc/self/smaps")


def gather() -> int:
    """Move what is there into huge pages; returns their number, 0 where the kernel cannot. Takes some
    milliseconds for each, and no more memory than there is already but for what rounding takes."""
    try:
        mappings = _SMAPS.read_text(errors="replace")  # names of files are bytes
    except OSError:
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    addresses = islice(_pages(mappings), _MOST_PAGES)
    return sum(madvise(address, _PAGE_BYTES, _MADV_COLLAPSE) == 0 for address in addresses)


def _pages(mappings: str) -> Iterator[int]:
    """Addresses of huge pages within memory of no file, of which at least half is in use: no stacks."""
    begin = end = 0
    for line in mappings.splitlines():
        name, *fields = line.split()
        if name == "Rss:":
            if int(fields[0]) * 1024 >= (end - begin) / 2:
                yield from range(-(-begin // _PAGE_BYTES) * _PAGE_BYTES, end - _PAGE_BYTES + 1, _PAGE_BYTES)
        elif not name.endswith(":"):
            is_own = fields[0] == "rw-p" and (len(fields) == 4 or fields[4].startswith(("[heap", "[anon")))
            begin, end = (int(address, 16) for address in name.split("-")) if is_own else (0, 0)
