"""How good the scheduler's placements are, in figures: `python -m bench placement` (docs/scheduling.md)."""

from __future__ import annotations

from .run import run as run
