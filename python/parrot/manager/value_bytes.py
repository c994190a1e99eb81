"""What the values of a session, and of all sessions of a tenant, may take of the manager's memory.

Values stay until their session ends, and transforms make long ones of short ones: without a bound a body of
400 KB could fill the memory. Counted are values, constants of inputs, and texts of inputs that a transform
made; what is the same string as one that is there already costs nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..config import ManagerConfig
from ..errors import RateLimited, RequestTooLarge, ValueTooLarge

_RETRY_S = 1.0


@dataclass(slots=True)
class Held:
    """Bytes of the values of a tenant's live sessions."""

    num_bytes: int = 0


class ValueBytes:
    """Bytes of the values of one session, which count for its tenant too. Used on the loop only."""

    def __init__(self, config: ManagerConfig, tenant: Held) -> None:
        self.num_bytes = 0
        self._tenant = tenant
        self._session_limit = config.max_session_value_bytes
        self._tenant_limit = config.max_tenant_value_bytes

    def count(self, num_bytes: int) -> None:
        """So many more are there, whatever the limits say."""
        self.num_bytes += num_bytes
        self._tenant.num_bytes += num_bytes

    def check_given(self, num_bytes: int) -> None:
        """Raise :class:`RequestTooLarge` or, where other sessions could make room, :class:`RateLimited` if so
        many more from a request are too many."""
        if self.num_bytes + num_bytes > self._session_limit:
            raise RequestTooLarge(self._explain_session(), param="value")
        if self._tenant.num_bytes + num_bytes > self._tenant_limit:
            raise RateLimited(self._explain_tenant(), param="value", retry_after_s=_RETRY_S)

    def add(self, text: str, *, where: str) -> None:
        """One more that a call or a transform made; raises :class:`ValueTooLarge` if it is too much."""
        num_bytes = size_of(text)
        if self.num_bytes + num_bytes > self._session_limit:
            raise ValueTooLarge(f"{where}: {self._explain_session()}")
        if self._tenant.num_bytes + num_bytes > self._tenant_limit:
            raise ValueTooLarge(f"{where}: {self._explain_tenant()}")
        self.count(num_bytes)

    def release(self) -> None:
        """The session has ended."""
        self.count(-self.num_bytes)

    def _explain_session(self) -> str:
        return (
            f"the values of the session would take more than {self._session_limit} bytes "
            "(max_session_value_bytes); use several sessions, and delete those that are done"
        )

    def _explain_tenant(self) -> str:
        return (
            f"the values of all sessions would take more than {self._tenant_limit} bytes "
            "(max_tenant_value_bytes); delete sessions that are done"
        )


def size_of(text: str) -> int:
    """Bytes that a text takes in memory; known without looking at its characters."""
    return sys.getsizeof(text)
