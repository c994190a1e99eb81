"""Scheduler: Algorithm 1: which calls go together, and where (task groups, shared prefixes)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bench.placement.driver import Cost, Driver, text
from bench.placement.small_cases import split_of_group

SLOW_PREFILL = Cost(per_prefill_token_us=500.0)


def test_a_group_with_a_long_prefix_is_placed_together() -> None:
    driver = Driver.with_engines([SLOW_PREFILL] * 3)
    driver.submit(99)
    assert driver.engines_of() == {99: 0}
    prefix = text(1, 7_000)
    driver.submit(98, prefix, new=1)
    assert driver.engines_of() == {98: 1}
    driver.finish(98, context=5, tokens=7_001)
    for call_id in range(8):
        prompt = np.concatenate([prefix, text(10 + call_id, 20)])
        driver.submit(call_id, prompt, boundaries=[7_000, 7_020], app=1, group=3)
    placed = driver.schedule()
    assert {placement.engine_id for placement in placed.values()} == {1}
    assert {placement.reason for placement in placed.values()} == {"group"}
    assert placed[0].prefix_len == 7_000
    assert placed[0].parent_context_id == 5
    assert driver.load(1) == (8, 7_000 + 8 * 70)
    assert driver.scheduler.counters()["splits"] == 0


def test_a_group_without_a_common_prefix_is_split_when_it_finishes_sooner() -> None:
    driver = Driver.with_engines([Cost()] * 4)
    for call_id in range(16):
        driver.submit(call_id, app=1, group=0)
    assert Counter(driver.engines_of().values()) == {0: 4, 1: 4, 2: 4, 3: 4}
    counters = driver.scheduler.counters()
    assert counters["placed_group"] == 16
    assert counters["splits"] == 1


@pytest.mark.parametrize(
    ("cost", "is_split"),
    [
        (Cost(), False),
        (Cost(per_sequence_us=400), False),
        (Cost(per_prefill_token_us=2, per_sequence_us=2_000), True),
        (Cost(per_prefill_token_us=0.5, per_sequence_us=600), True),
    ],
)
def test_a_group_with_a_long_prefix_is_split_only_when_that_ends_it_sooner(
    cost: Cost, is_split: bool
) -> None:
    """One engine has the 7,000 tokens; on the other they have to be computed first."""
    for step_tokens in (512, 2_048, 16_384):
        split = split_of_group(cost, step_tokens)
        assert (split.best_apart_us < split.together_us) == is_split
        assert not split.is_wrong
    assert split.is_split == is_split  # with steps in which a prompt fits whole


def test_a_group_that_fits_no_engine_is_split_and_the_rest_waits() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=3), Cost(max_batch_size=2)])
    for call_id in range(8):
        driver.submit(call_id, app=1, group=0)
    assert Counter(driver.engines_of().values()) == {0: 3, 1: 2}
    assert driver.scheduler.num_queued == 3
    assert driver.scheduler.counters()["deferred"] == 3
    driver.finish(0)
    assert list(driver.schedule()) == [5]


def test_without_splitting_a_set_goes_to_one_engine_unless_none_takes_it_whole() -> None:
    def engines_of(costs: list[Cost], num_calls: int, group: int) -> Counter[int]:
        driver = Driver.with_engines(costs, splitting=False)
        for call_id in range(num_calls):
            prompt = np.concatenate([text(1, 40), text(10 + call_id, 200)])
            driver.submit(call_id, prompt, boundaries=[40, 240], app=1, group=group)
        engines = Counter(driver.engines_of().values())
        assert driver.scheduler.counters()["splits"] == int(len(engines) > 1)
        return engines

    for group in (0, -1):
        assert engines_of([Cost()] * 4, 16, group) == {0: 16}
        assert engines_of([Cost(max_batch_size=3), Cost(max_batch_size=2)], 8, group) == {0: 3, 1: 2}


@pytest.mark.parametrize("num_engines", [2, 40])
def test_without_replication_a_crowded_engine_still_draws_calls_by_its_prefix(num_engines: int) -> None:
    engines = {}
    for replication in (True, False):
        driver = Driver.with_engines([Cost(per_sequence_us=1)] * num_engines, replication=replication)
        driver.submit(99, text(1, 2_000))
        driver.schedule()
        driver.finish(99, context=1, tokens=2_000)
        for call_id in range(24):
            prompt = np.concatenate([text(1, 2_000), text(10 + call_id, 20)])
            driver.submit(call_id, prompt, boundaries=[2_000, 2_020], now=1_000_000)
            driver.schedule(1_000_000)
        engines[replication] = {driver.scheduler.explain(call_id)[0].engine_id for call_id in range(24)}
        assert (driver.scheduler.counters()["replications"] > 0) == replication
    assert len(engines[True]) > 1
    assert len(engines[False]) == 1


def test_groups_of_two_applications_with_one_number_are_two_groups() -> None:
    driver = Driver.with_engines([SLOW_PREFILL] * 2)
    prefixes = {1: text(1, 4_000), 2: text(2, 4_000)}
    for call_id in range(8):
        app = 1 + call_id % 2
        prompt = np.concatenate([prefixes[app], text(10 + call_id, 10)])
        driver.submit(call_id, prompt, boundaries=[4_000], app=app, arrival=0, group=0)
    engines = driver.engines_of()
    assert {engines[call_id] for call_id in (0, 2, 4, 6)} != {engines[call_id] for call_id in (1, 3, 5, 7)}
    assert driver.load(0)[1] + driver.load(1)[1] == 2 * 4_000 + 8 * 60


def test_without_group_placement_members_are_placed_one_by_one() -> None:
    driver = Driver.with_engines([Cost()] * 2, group_placement=False)
    for call_id in range(4):
        driver.submit(call_id, app=1, group=0)
    assert {placement.reason for placement in driver.schedule().values()} == {"alone"}


def test_queued_calls_that_share_a_long_prefix_go_together() -> None:
    driver = Driver.with_engines([Cost(per_kv_token_us=3.0)] * 4)
    for engine_id in range(4):
        driver.submit(100 + engine_id, text(900 + engine_id, 3_000))
    assert set(driver.engines_of().values()) == {0, 1, 2, 3}
    prefix = text(1, 6_000)
    for call_id in range(4):
        prompt = np.concatenate([prefix, text(10 + call_id, 10)])
        driver.submit(call_id, prompt, boundaries=[6_000, 6_010])
    placed = driver.schedule()
    assert len({placement.engine_id for placement in placed.values()}) == 1
    assert {placement.reason for placement in placed.values()} == {"sharers"}


def test_a_call_goes_where_a_finished_context_has_its_prefix() -> None:
    driver = Driver.with_engines([Cost()] * 3)
    prefix = text(1, 2_000)
    driver.submit(1, text(2, 500))
    driver.submit(2, prefix)
    engines = driver.engines_of()
    driver.finish(1)
    driver.finish(2, context=7, tokens=2_050)
    driver.submit(3, np.concatenate([prefix, text(3, 30)]), boundaries=[2_000, 2_030])
    placement = driver.schedule()[3]
    assert placement.engine_id == engines[2] == 1
    assert (placement.parent_context_id, placement.prefix_len, placement.reason) == (7, 2_000, "prefix")


def test_a_call_goes_where_a_prompt_in_flight_has_its_prefix() -> None:
    driver = Driver.with_engines([Cost()] * 3)
    driver.submit(1)
    driver.submit(2, text(1, 2_000))
    assert driver.engines_of(0) == {1: 0, 2: 1}
    driver.submit(3, np.concatenate([text(1, 2_000), text(3, 30)]), boundaries=[2_000, 2_030], now=100_000)
    placement = driver.schedule(100_000)[3]
    assert (placement.engine_id, placement.parent_context_id, placement.prefix_len) == (1, 0, 2_000)


def test_the_newest_context_is_the_parent_and_evictions_are_followed() -> None:
    driver = Driver.with_engines([Cost()])
    prefix = text(1, 400)
    for call_id in (1, 2):
        driver.submit(call_id, prefix, boundaries=[100, 400])
        driver.schedule()
        driver.finish(call_id, context=10 + call_id, tokens=450)

    def parent_of(call_id: int) -> tuple[int, int]:
        driver.submit(call_id, np.concatenate([prefix, text(call_id, 9)]), boundaries=[100, 400, 409])
        placement = driver.schedule()[call_id]
        driver.finish(call_id)
        return placement.parent_context_id, placement.prefix_len

    assert parent_of(3) == (12, 400)
    driver.scheduler.forget_context(0, 12, 399)
    assert parent_of(4) == (11, 400)
    driver.scheduler.forget_context(0, 11, 0)
    assert parent_of(5) == (12, 100)
    driver.scheduler.forget_context(0, 12, 50)
    assert parent_of(6) == (0, 0)
    driver.scheduler.forget_context(0, 12, 0)
    driver.scheduler.check_invariants()


def test_a_context_holds_no_more_than_its_tokens() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, text(1, 400), boundaries=[100, 300, 400])
    driver.schedule()
    driver.finish(1, context=1, tokens=350)
    driver.submit(2, text(1, 400), boundaries=[100, 300, 400])
    assert driver.schedule()[2].prefix_len == 300


def test_domains_share_nothing() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, text(1, 400), domain=1)
    driver.submit(2, text(1, 400), domain=2)
    assert {placement.prefix_len for placement in driver.schedule().values()} == {0}
    assert driver.load(0) == (2, 900)
    driver.finish(1, context=1, tokens=450)
    driver.submit(3, text(1, 400), domain=3)
    assert driver.schedule()[3].prefix_len == 0


def test_calls_of_two_tenants_that_share_published_text_are_placed_together() -> None:
    """Though each on its own tenant's turn, and with the template counted once on the engine."""
    driver = Driver.with_engines([Cost()] * 2)
    for call_id in range(1, 9):
        template, tenant = 1 + call_id % 2, (call_id + 1) // 2
        prompt = np.concatenate([text(template, 8_000), text(100 + call_id, 100)])
        driver.submit(call_id, prompt, boundaries=[8_000, 8_100], domain=tenant, public_len=8_000)
    placements = driver.schedule()
    num_homes = len({(1 + c % 2, placement.engine_id) for c, placement in placements.items()})
    assert num_homes <= 3
    assert sum(placement.prefix_len == 0 for placement in placements.values()) == num_homes
    assert driver.scheduler.counters()["placed_prefix"] == 8 - num_homes
    assert sum(driver.load(engine)[1] for engine in (0, 1)) == 8_000 * num_homes + 8 * 150


def test_a_finished_context_of_another_tenant_serves_published_text_and_no_more() -> None:
    driver = Driver.with_engines([Cost()] * 2)
    prompt, cut = text(1, 2_100), [2_000, 2_050, 2_100]
    driver.submit(1, prompt, boundaries=cut, domain=1, public_len=2_000)
    home = driver.engines_of()[1]
    driver.finish(1, context=11, tokens=2_150)
    # Busy with a stranger: only the prefix makes it the better engine.
    driver.submit(2, text(9, 200), domain=9)
    driver.schedule()
    driver.submit(3, prompt, boundaries=cut, domain=2, public_len=2_000)
    placement = driver.schedule()[3]
    assert (placement.engine_id, placement.prefix_len, placement.parent_context_id) == (home, 2_000, 11)
    driver.submit(4, prompt, boundaries=cut, domain=2)
    assert driver.schedule()[4].prefix_len == 0
    driver.submit(5, prompt, boundaries=cut, domain=1, public_len=2_000)
    assert driver.schedule()[5].prefix_len == 2_100


def test_without_prefix_affinity_a_prefix_does_not_draw_calls() -> None:
    driver = Driver.with_engines([Cost()] * 2, prefix_affinity=False)
    driver.submit(1, text(1, 2_000))
    driver.submit(2)
    assert driver.engines_of() == {1: 0, 2: 1}
    driver.finish(2)
    driver.submit(3, text(1, 2_000))
    placement = driver.schedule()[3]
    assert (placement.engine_id, placement.prefix_len, placement.reason) == (1, 0, "alone")


def test_with_every_hash_equal_placements_stay_the_same() -> None:
    def placements(constant_hash: bool) -> list[tuple[int, int, int, int, str]]:
        driver = Driver.with_engines([Cost()] * 3, constant_hash=constant_hash)
        result = []
        for call_id in range(60):
            prompt = np.concatenate([text(call_id % 5, 300), text(100 + call_id, 40)])
            driver.submit(call_id, prompt, boundaries=[128, 300, 340], now=call_id)
            for placed in driver.schedule(call_id).values():
                result.append(
                    (
                        placed.call_id,
                        placed.engine_id,
                        placed.parent_context_id,
                        placed.prefix_len,
                        placed.reason,
                    )
                )
            if call_id % 3 == 2:
                driver.finish(call_id - 2, context=call_id + 1, tokens=390)
        return result

    assert placements(True) == placements(False)
