"""Faults by the dozen against a real service, and whether its promises hold: `python -m bench chaos`."""

from __future__ import annotations

from .run import OPTIONS as OPTIONS
from .run import run as run
from .run import run_chaos as run_chaos
