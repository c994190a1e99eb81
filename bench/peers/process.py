"""A peer in a process of its own, with the interpreter that has it.

It reads a line of options from standard input and answers ``{"ready": true, "version": ...}``; then one line
for each workload, answered by one line. The last line of standard input ends it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PeerProcess:
    """A peer that has been started; ``log`` gets what it writes to standard error."""

    def __init__(self, name: str, command: Sequence[str], options: object, log: Path) -> None:
        self._name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.version = str(self.ask(options)["version"])

    def ask(self, message: object) -> dict[str, Any]:
        """Send a line and wait for the answer. Raises RuntimeError with the end of its log if it ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._child.wait()
            raise RuntimeError(f"{self._name} ended:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it: by the end of its input, by force if that takes long."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, and what it was asked last is still on its way
            self._child.stdin.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
