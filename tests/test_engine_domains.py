"""Hard case 2 in an engine: tenants share the KV of published text and of nothing else, both ways round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_harness import Harness, Result, load, prompt_of
from parrot.wire import Sampling

ONE, OTHER = 1, 2
TEMPLATE = prompt_of(53, seed=1)  # ends inside its fourth block
SEAM = len(TEMPLATE)
SECRET = prompt_of(40, seed=2)
Make = Callable[..., Harness]


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> Make:
    loaded = load(tiny_model)
    return lambda **options: Harness(*loaded, **options)


@pytest.fixture(scope="module")
def alone(make: Make) -> Callable[[list[int], int], list[int]]:
    """The ids of a call that has an engine to itself."""
    return lambda prompt, max_tokens: make().generate(prompt, max_tokens=max_tokens).ids


def cached(result: Result) -> int:
    return result.fills[0].cached_tokens


@pytest.mark.parametrize(("first", "second"), [(ONE, OTHER), (OTHER, ONE)])
def test_published_text_is_a_hit_for_another_tenant_and_what_follows_is_not(
    make: Make, alone: Callable[[list[int], int], list[int]], first: int, second: int
) -> None:
    harness, prompt = make(), TEMPLATE + SECRET
    results = [
        harness.generate(prompt, domain=domain, public_len=SEAM) for domain in (first, second, first, second)
    ]
    assert [cached(result) for result in results] == [0, SEAM, len(prompt) - 1, len(prompt) - 1]
    assert harness.engine.stats().cached_tokens == SEAM + 2 * (len(prompt) - 1)
    assert [result.ids for result in results] == [alone(prompt, 8)] * 4


@pytest.mark.parametrize("claim", [0, SEAM, SEAM + len(SECRET)])
def test_a_guess_of_a_private_prompt_is_no_hit(make: Make, claim: int) -> None:
    harness, prompt = make(), TEMPLATE + SECRET
    harness.generate(prompt, domain=ONE)
    assert cached(harness.generate(prompt, domain=OTHER, public_len=claim)) == 0
    assert harness.engine.stats().cached_tokens == 0
    assert cached(harness.generate(prompt, domain=ONE)) == len(prompt) - 1


def test_generated_text_is_a_hit_for_nobody_else(make: Make) -> None:
    harness = make()
    answer = harness.generate(TEMPLATE, domain=ONE, public_len=SEAM, max_tokens=20).ids
    follow_up = [*TEMPLATE, *answer, 7]
    assert cached(harness.generate(follow_up, domain=OTHER, public_len=SEAM)) == SEAM
    assert cached(harness.generate(follow_up, domain=ONE, public_len=SEAM)) > SEAM


def test_tenants_that_start_together_compute_published_text_once_and_write_on_apart(
    make: Make, alone: Callable[[list[int], int], list[int]]
) -> None:
    harness = make(max_batch_tokens=8192)
    prompts = [[*TEMPLATE, 40 + tenant] for tenant in range(1, 7)]
    calls = [
        harness.submit(prompt, domain=tenant, public_len=SEAM, max_tokens=30)
        for tenant, prompt in enumerate(prompts, start=1)
    ]
    results = harness.run(*calls)
    stats = harness.engine.stats()
    assert stats.prefill_tokens == SEAM + len(prompts)
    assert [cached(result) for result in results] == [0] + [SEAM] * 5
    assert stats.cow_copies == 5
    assert [result.ids for result in results] == [alone(prompt, 30) for prompt in prompts]


def test_tenants_in_a_small_pool_are_preempted_and_evicted_and_stay_right(
    make: Make, alone: Callable[[list[int], int], list[int]]
) -> None:
    prompts = {tenant: [*TEMPLATE[:21], *prompt_of(tenant % 9, seed=tenant)] for tenant in range(1, 25)}
    harness = make(num_blocks=12)
    calls = [
        harness.submit(prompt, domain=1 + tenant % 4, public_len=21, max_tokens=40)
        for tenant, prompt in prompts.items()
    ]
    results = harness.run(*calls)
    stats = harness.engine.stats()
    assert min(stats.preemptions, stats.evicted_blocks, stats.cached_tokens, stats.cow_copies) > 0
    assert [result.ids for result in results] == [alone(prompt, 40) for prompt in prompts.values()]


@pytest.mark.parametrize("public_len", [16, 17, 33, 54])
def test_a_program_of_several_fills_is_public_up_to_its_seam_only(make: Make, public_len: int) -> None:
    harness = make(max_batch_tokens=32)
    verbs = [TEMPLATE + SECRET, Sampling(max_tokens=4, ignore_eos=True), [5, 6, 7], Sampling(max_tokens=2)]
    first, other, again = (
        harness.run(harness.submit_verbs(verbs, domain=domain, public_len=public_len))[0]
        for domain in (ONE, OTHER, ONE)
    )
    assert [cached(result) for result in (first, other, again)] == [0, public_len, len(verbs[0]) - 1]
    assert (
        [o.text for o in first.outputs] == [o.text for o in other.outputs] == [o.text for o in again.outputs]
    )


def test_an_early_fill_of_published_text_serves_every_tenant(make: Make) -> None:
    harness = make()
    harness.run(harness.submit_verbs([TEMPLATE + SECRET], domain=ONE, early_fill=True, public_len=SEAM))
    assert cached(harness.generate([*TEMPLATE, *SECRET, 9], domain=OTHER, public_len=SEAM)) == SEAM
    assert cached(harness.generate([*TEMPLATE, *SECRET, 9], domain=ONE, public_len=SEAM)) == SEAM + len(
        SECRET
    )
