"""Tenants: whose a key is, weights that reach the scheduler, and limits against a model of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from graph_builder import SESSION_ID, flow_call, submit
from parrot.errors import (
    AuthenticationError,
    Cancelled,
    EngineLost,
    InternalError,
    RateLimited,
    RequestTooLarge,
)
from parrot.manager.call import Call
from parrot.manager.clock import simulated_clock
from parrot.manager.graph import Graph
from parrot.manager.key_file import KeyEntry, KeyFile, TenantLimits, digest_of, new_key
from parrot.manager.tenants import Bucket, Tenant, Tenants


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        return round(self.now_s * 1e6)


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    clock = Clock()
    with simulated_clock(clock):
        yield clock


def key_file(**limits: TenantLimits) -> tuple[KeyFile, dict[str, bytes]]:
    keys = {name: new_key() for name in limits}
    entries = [KeyEntry(sha256=digest_of(key), tenant=name) for name, key in keys.items()]
    return KeyFile(tenants=limits, keys=entries), {name: key.encode() for name, key in keys.items()}


def ended_call(*, num_dispatched: int = 0, error: object = None) -> Call:
    call = submit(Graph(SESSION_ID), flow_call("A", [], ["x"])).calls[0]
    call.prompt_tokens, call.num_dispatched = 30, num_dispatched
    call.error = error  # type: ignore[assignment]
    return call


def test_without_keys_everybody_is_one_tenant_and_the_operator() -> None:
    tenants = Tenants()
    caller = tenants.caller(None)
    assert (caller.tenant, caller.is_operator) == (tenants.get("default"), True)
    assert tenants.caller(b"anything") == caller
    assert not tenants.has_keys
    with pytest.raises(InternalError):
        tenants.get("acme")


def test_with_keys_a_caller_is_whose_key_it_is() -> None:
    file, keys = key_file(a=TenantLimits(), b=TenantLimits())
    operator = new_key()
    file = file.model_copy(update={"keys": [*file.keys, KeyEntry(sha256=digest_of(operator), operator=True)]})
    tenants = Tenants(file)
    a, b, op = (tenants.caller(key) for key in (keys["a"], keys["b"], operator.encode()))
    assert a.tenant is not None
    assert b.tenant is not None
    assert (a.tenant.name, b.tenant.name, op.tenant) == ("a", "b", None)
    assert [caller.is_operator for caller in (a, b, op)] == [False, False, True]
    assert a.tenant.number != b.tenant.number
    for wrong in (None, b"", b"none", new_key().encode()):
        with pytest.raises(AuthenticationError) as error:
            tenants.caller(wrong)
        assert not wrong or wrong.decode() not in error.value.message
    assert tenants.num_unknown_keys == 4


def test_weights_reach_the_scheduler_when_a_tenant_appears_and_when_they_change() -> None:
    told: list[tuple[int, float]] = []
    file, keys = key_file(a=TenantLimits(), b=TenantLimits(weight=3.0), c=TenantLimits(weight=9.0))
    tenants = Tenants(file, lambda number, weight: told.append((number, weight)))
    a, b = (tenants.caller(keys[name]).tenant for name in "ab")
    assert a is not None
    assert b is not None
    assert told == [(b.number, 3.0)]  # 1 is the scheduler's own default
    tenants.replace_keys(KeyFile(tenants={"a": TenantLimits(weight=2.0), "b": TenantLimits(weight=3.0)}))
    assert told[1:] == [(a.number, 2.0)]
    tenants.replace_keys(KeyFile())
    assert set(told[2:]) == {(a.number, 1.0), (b.number, 1.0)}


def test_a_replaced_file_revokes_and_admits() -> None:
    file, keys = key_file(a=TenantLimits())
    tenants = Tenants(file)
    before = tenants.caller(keys["a"]).tenant
    replaced, new_keys = key_file(a=TenantLimits(requests_per_minute=1))
    tenants.replace_keys(replaced)
    with pytest.raises(AuthenticationError):
        tenants.caller(keys["a"])
    assert tenants.caller(new_keys["a"]).tenant is before
    assert before is not None
    assert before.limits.requests_per_minute == 1


def test_requests_are_refused_until_the_bucket_has_one_again(clock: Clock) -> None:
    tenant = Tenant("a", 1, TenantLimits(requests_per_minute=2))
    tenant.take_request()
    tenant.take_request()
    with pytest.raises(
        RateLimited, match=r"requests_per_minute = 2 is used up; try again in 30\.0 s"
    ) as error:
        tenant.take_request()
    assert (error.value.param, error.value.retry_after_s) == ("requests_per_minute", 30.0)
    clock.now_s += 29.9
    with pytest.raises(RateLimited):
        tenant.take_request()
    clock.now_s += 0.1
    tenant.take_request()
    assert tenant.usage.requests == 5
    assert tenant.usage.refused == {"requests_per_minute": 2}


def test_unfinished_calls_are_bounded_and_a_submit_is_refused_whole() -> None:
    tenant = Tenant("a", 1, TenantLimits(max_concurrent_calls=3))
    tenant.check_calls(3)
    tenant.submitted(2)
    with pytest.raises(RateLimited, match="max_concurrent_calls = 3"):
        tenant.check_calls(2)
    tenant.check_calls(1)
    with pytest.raises(RequestTooLarge, match="4 calls at once") as error:
        tenant.check_calls(4)
    assert error.value.param == "max_concurrent_calls"
    tenant.ended(ended_call())
    tenant.check_calls(2)


def test_tokens_are_paid_for_afterwards(clock: Clock) -> None:
    tenant = Tenant("a", 1, TenantLimits(tokens_per_minute=60))
    for _ in range(3):
        tenant.check_calls(1)
        tenant.submitted(1)
    for _ in range(3):
        tenant.ended(ended_call())
    with pytest.raises(RateLimited, match="tokens_per_minute = 60") as error:
        tenant.check_calls(1)
    assert error.value.retry_after_s == pytest.approx(31.0)
    tenant.check_calls(0)  # variables and labels use no tokens
    clock.now_s += 31.0
    tenant.check_calls(1)
    assert tenant.usage.prompt_tokens == 90


def test_a_call_that_its_client_stopped_pays_for_what_it_asked_for() -> None:
    stopped = ended_call(num_dispatched=1, error=Cancelled("the client left").to_info())
    lost = ended_call(num_dispatched=1, error=EngineLost("gone").to_info())
    waiting = ended_call(error=Cancelled("the client left").to_info())
    most = stopped.steps[0].output.binding.sampling.max_tokens
    paid = []
    for call in (stopped, lost, waiting):
        tenant = Tenant("a", 1, TenantLimits(tokens_per_minute=10))
        tenant.submitted(1)
        tenant.ended(call)
        with pytest.raises(RateLimited) as error:
            tenant.check_calls(1)
        paid.append(round(10 + error.value.retry_after_s / 6 - 1))
    assert paid == [30 + most, 30, 30]


class BucketModel(RuleBasedStateMachine):
    """A bucket in whole tokens and milliseconds, written down as a list of what was taken when."""

    @initialize(per_minute=st.integers(1, 600))
    def begin(self, per_minute: int) -> None:
        self.clock = Clock()
        self.context = simulated_clock(self.clock)
        self.context.__enter__()
        self.per_minute, self.level_ms = per_minute, per_minute * 60_000  # a token is 60,000 units
        self.bucket = Bucket(per_minute)

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.context.__exit__(None, None, None)

    @rule(ms=st.integers(0, 90_000))
    def wait(self, ms: int) -> None:
        self.clock.now_s = round(self.clock.now_s + ms / 1000, 3)
        self.level_ms = min(self.per_minute * 60_000, self.level_ms + ms * self.per_minute)

    @rule(amount=st.integers(0, 700))
    def take(self, amount: int) -> None:
        self.bucket.take(amount)
        self.level_ms -= amount * 60_000

    @rule(per_minute=st.integers(1, 600))
    def resize(self, per_minute: int) -> None:
        self.bucket.resize(per_minute)
        self.level_ms += (per_minute - self.per_minute) * 60_000
        self.per_minute = per_minute

    @rule()
    def check(self) -> None:
        expected_s = max(0, 60_000 - self.level_ms) / self.per_minute / 1000
        assert self.bucket.wait_s() == pytest.approx(expected_s, abs=1e-3)


TestBucket = BucketModel.TestCase
