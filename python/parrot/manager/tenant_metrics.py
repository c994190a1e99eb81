"""Tenants on the page of metrics.

A name is a label because the operator gave it, in the key file; those beyond ``MAX_TENANTS`` count together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .exposition import Sample, counter, gauge
from .key_watch import KeyWatch
from .tenants import Tenant, Tenants

MAX_TENANTS = 1000
OTHER_TENANTS = "(others)"
_USAGE = {
    "requests": "HTTP requests of the tenant, refused ones too.",
    "calls": "Calls that were taken.",
    "prompt_tokens": "Prompt tokens of ended calls.",
    "cached_tokens": "Prompt tokens of ended calls that were found in a cache.",
    "output_tokens": "Tokens that ended calls generated.",
}


def tenant_families(tenants: Tenants, key_watch: KeyWatch | None) -> Iterator[str]:
    """What each tenant has used and was refused, and requests that nobody's key came with."""
    every = list(tenants)
    for name, text in _USAGE.items():
        samples = _by_tenant((tenant, {}, getattr(tenant.usage, name)) for tenant in every)
        yield counter(f"tenant_{name}", text, samples)
    unfinished = _by_tenant((tenant, {}, tenant.num_unfinished) for tenant in every)
    yield gauge("tenant_unfinished_calls", "Calls that were taken and have not ended.", unfinished)
    refused = _by_tenant(
        (tenant, {"limit": limit}, count) for tenant in every for limit, count in tenant.usage.refused.items()
    )
    yield counter("tenant_refused", "Requests refused, by the limit that was used up.", refused)
    yield counter("unknown_keys", "Requests without a known key.", [({}, tenants.num_unknown_keys)])
    num_failures = 0 if key_watch is None else key_watch.num_failures
    yield counter("key_file_failures", "Changed key files that could not be used.", [({}, num_failures)])


def _by_tenant(rows: Iterable[tuple[Tenant, dict[str, str], float]]) -> list[Sample]:
    sums: dict[tuple[str, str], tuple[dict[str, str], float]] = {}
    for tenant, labels, value in rows:
        name = tenant.name if tenant.number <= MAX_TENANTS else OTHER_TENANTS
        key = (name, str(labels))
        known = sums.get(key, ({}, 0.0))[1]
        sums[key] = ({"tenant": name, **labels}, known + value)
    return list(sums.values())
