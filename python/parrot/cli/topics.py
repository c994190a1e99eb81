"""Help of commands with many options: under headings, one for each topic."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from typer.core import TyperCommand


class Topic(StrEnum):
    """Headings, in the order in which they are shown; an option names its own as ``rich_help_panel``."""

    REQUIRED = "Required"
    MODEL = "Model and devices"
    API = "HTTP API"
    JOINING = "Where engines join"
    SESSIONS = "Sessions"
    SCHEDULING = "Scheduling"
    FAULTS = "Faults and ending"
    TUNING = "Memory and steps of an engine"
    PROCESS = "Process"


class TopicCommand(TyperCommand):
    """Prints the headings as plain text: rich's tables cut option names off where a terminal is narrow."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by :meth:`format_help`."""
        rows: dict[str, list[tuple[str, str]]] = {topic: [] for topic in Topic}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None:
                rows[getattr(param, "rich_help_panel", None) or Topic.PROCESS].append(row)
        for topic, records in rows.items():
            if records:
                with formatter.section(topic):
                    formatter.write_dl(records)
