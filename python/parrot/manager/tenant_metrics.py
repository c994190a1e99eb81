"""Tenants on the page of metrics.

A name is a label because the operator gave it, in the key file; those beyond ``MAX_TENANTS`` count together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from .families import Row, counter, gauge, single
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


def tenant_families(tenants: Tenants, key_watch: KeyWatch | None) -> Iterator[Metric]:
    """What each tenant has used and was refused, and requests that nobody's key came with."""
    every = list(tenants)
    for name, text in _USAGE.items():
        used = _by_tenant((tenant, (), getattr(tenant.usage, name)) for tenant in every)
        yield counter(f"tenant_{name}", text, used, "tenant")
    unfinished = _by_tenant((tenant, (), tenant.num_unfinished) for tenant in every)
    yield gauge("tenant_unfinished_calls", "Calls that were taken and have not ended.", unfinished, "tenant")
    refused = _by_tenant(
        (tenant, (limit,), count) for tenant in every for limit, count in tenant.usage.refused.items()
    )
    yield counter(
        "tenant_refused", "Requests refused, by the limit that was used up.", refused, "tenant", "limit"
    )
    yield counter("unknown_keys", "Requests without a known key.", single(tenants.num_unknown_keys))
    num_failures = 0 if key_watch is None else key_watch.num_failures
    yield counter("key_file_failures", "Changed key files that could not be used.", single(num_failures))


def _by_tenant(numbers: Iterable[tuple[Tenant, tuple[str, ...], float]]) -> list[Row]:
    sums: dict[tuple[str, ...], float] = {}
    for tenant, labels, number in numbers:
        name = tenant.name if tenant.number <= MAX_TENANTS else OTHER_TENANTS
        key = (name, *labels)
        sums[key] = sums.get(key, 0.0) + number
    return list(sums.items())
