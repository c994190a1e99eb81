"""Tenants while a manager runs: who a key belongs to, what each may use, and what each has used.

A service without keys has one tenant, who may do everything. With keys, tenants are those of the key file;
each has a number, by which the scheduler and the KV cache tell them apart, for the life of the manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import AuthenticationError, InternalError, RateLimited, RequestTooLarge
from .call import Call
from .clock import now_s
from .key_file import RESERVED, KeyFile, KeyRing, TenantLimits
from .value_bytes import Held

DEFAULT_TENANT = RESERVED
_NO_LIMITS = TenantLimits()
_WANTED = "this service wants an API key: send it as 'Authorization: Bearer pk-parrot-...'"
_UNKNOWN = "this API key is not known here, or was revoked; ask the operator of the service for another"
_GIVEN_UP = ("cancelled", "session_closed")  # errors of calls that their client stopped


class Bucket:
    """A token bucket that holds one minute's worth, full at first. It may be overdrawn: what work takes is
    known only when it has been done."""

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute or 0)
        self._filled_at = now_s()

    def resize(self, per_minute: int | None) -> None:
        """Another limit from now on; what is used up stays used up."""
        if per_minute == self._per_minute:
            return
        self._fill()
        used = (self._per_minute or 0) - self._level
        self._per_minute = per_minute
        self._level = (per_minute or 0) - used

    def take(self, amount: int) -> None:
        """So much is used."""
        self._fill()
        if self._per_minute is not None:
            self._level -= amount

    def wait_s(self) -> float:
        """Seconds until one is there; 0 when it is."""
        if self._per_minute is None:
            return 0.0
        self._fill()
        return max(0.0, (1.0 - self._level) * 60.0 / self._per_minute)

    def _fill(self) -> None:
        now = now_s()
        if self._per_minute is not None:
            grown = self._level + (now - self._filled_at) * self._per_minute / 60.0
            self._level = min(float(self._per_minute), grown)
        self._filled_at = now


@dataclass(slots=True)
class Usage:
    """Counters of a tenant, since the manager started."""

    requests: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the name of the limit


class Tenant:
    """One tenant. ``num_unfinished`` are its calls that were submitted and have not ended."""

    def __init__(self, name: str, number: int, limits: TenantLimits) -> None:
        self.name = name
        self.number = number
        self.limits = limits
        self.usage = Usage()
        self.num_unfinished = 0
        self.held = Held()
        self._requests = Bucket(limits.requests_per_minute)
        self._tokens = Bucket(limits.tokens_per_minute)

    def change_limits(self, limits: TenantLimits) -> None:
        """Other limits from now on."""
        self.limits = limits
        self._requests.resize(limits.requests_per_minute)
        self._tokens.resize(limits.tokens_per_minute)

    def take_request(self) -> None:
        """One more HTTP request; raises :class:`RateLimited`."""
        self.usage.requests += 1
        wait_s = self._requests.wait_s()
        if wait_s > 0:
            self._refuse("requests_per_minute", self.limits.requests_per_minute, wait_s)
        self._requests.take(1)

    def check_calls(self, num_calls: int) -> None:
        """Raise :class:`RateLimited` if so many more calls are too many now, and :class:`RequestTooLarge` if
        they always would be."""
        limit = self.limits.max_concurrent_calls
        if limit is not None and num_calls > limit:
            raise RequestTooLarge(
                f"{num_calls} calls at once, tenant {self.name} has max_concurrent_calls = {limit}; "
                "submit fewer at a time",
                param="max_concurrent_calls",
            )
        if limit is not None and self.num_unfinished + num_calls > limit:
            self._refuse("max_concurrent_calls", limit, 1.0)
        wait_s = self._tokens.wait_s()
        if num_calls and wait_s > 0:
            self._refuse("tokens_per_minute", self.limits.tokens_per_minute, wait_s)

    def submitted(self, num_calls: int) -> None:
        """Calls were taken."""
        self.usage.calls += num_calls
        self.num_unfinished += num_calls

    def ended(self, call: Call) -> None:
        """One of its calls has ended."""
        self.num_unfinished -= 1
        self.usage.prompt_tokens += call.prompt_tokens
        self.usage.cached_tokens += call.cached_tokens
        self.usage.output_tokens += call.output_tokens
        self._tokens.take(call.prompt_tokens + call.output_tokens + _num_abandoned(call))

    def _refuse(self, name: str, limit: int | None, wait_s: float) -> None:
        self.usage.refused[name] = self.usage.refused.get(name, 0) + 1
        raise RateLimited(
            f"tenant {self.name}: {name} = {limit} is used up; try again in {wait_s:.1f} s",
            param=name,
            retry_after_s=wait_s,
        )


def _num_abandoned(call: Call) -> int:
    """Tokens that an engine may have generated for a call that its client stopped. They count in full: else
    whoever leaves just before the end would pay for no output."""
    if call.error is None or call.error.code not in _GIVEN_UP:
        return 0
    steps = call.steps[call.next_step : call.num_dispatched]
    return sum(step.output.binding.sampling.max_tokens for step in steps)


def _ignore_weight(number: int, weight: float) -> None:
    """For a manager without a scheduler."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a tenant, or the operator, or both where there are no keys."""

    tenant: Tenant | None
    is_operator: bool


class Tenants:
    """All tenants of a manager. ``on_weight`` is told a tenant's number and weight, when it first appears and
    whenever the weight changes. Used on the loop only."""

    def __init__(
        self, keys: KeyFile | None = None, on_weight: Callable[[int, float], None] = _ignore_weight
    ) -> None:
        self.num_unknown_keys = 0  # requests without a key, or with one that is not in the file
        self._on_weight = on_weight
        self._by_name: dict[str, Tenant] = {}
        self._ring: KeyRing | None = None
        self._anybody: Caller | None = None
        if keys is None:
            self._anybody = Caller(self._add(DEFAULT_TENANT, _NO_LIMITS), is_operator=True)
        else:
            self._ring = KeyRing(keys)

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self._ring is not None

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Tenant:
        """The tenant of this name. A service with keys has none that asks without a key: whatever forgot to
        say for whom it acts fails here, and acts for nobody."""
        tenant = self._by_name.get(name)
        if tenant is not None:
            return tenant
        if self._ring is None or name == DEFAULT_TENANT:
            raise InternalError(f"there is no tenant {name!r}")
        return self._add(name, self._ring.tenants.get(name, _NO_LIMITS))

    def caller(self, key: bytes | None) -> Caller:
        """Whose key it is; raises :class:`AuthenticationError`."""
        if self._ring is None:
            assert self._anybody is not None
            return self._anybody
        entry = None if key is None else self._ring.find(key)
        if entry is None:
            self.num_unknown_keys += 1
            raise AuthenticationError(_WANTED if key is None else _UNKNOWN)
        return Caller(None if entry.tenant is None else self.get(entry.tenant), entry.operator)

    def replace_keys(self, keys: KeyFile) -> None:
        """The file has changed. Tenants that are not in it any more keep their sessions and lose their limits
        and weight; nobody has a key for them."""
        self._ring = KeyRing(keys)
        for tenant in self._by_name.values():
            limits = keys.tenants.get(tenant.name, _NO_LIMITS)
            if limits.weight != tenant.limits.weight:
                self._on_weight(tenant.number, limits.weight)
            tenant.change_limits(limits)

    def _add(self, name: str, limits: TenantLimits) -> Tenant:
        tenant = self._by_name[name] = Tenant(name, len(self._by_name) + 1, limits)
        if limits.weight != _NO_LIMITS.weight:
            self._on_weight(tenant.number, limits.weight)
        return tenant


def internal_id(session_id: str, tenant: str) -> str:
    """What the manager calls a session. With keys it begins with the tenant, so that nobody learns from an id
    whether another tenant has it, and nobody can take it first."""
    return session_id if tenant == DEFAULT_TENANT else f"{tenant}/{session_id}"


def public_id(session_id: str) -> str:
    """What the session's own client calls it."""
    return session_id.rpartition("/")[2]
