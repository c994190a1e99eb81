"""Does a test notice a wrong native core? `python tests/mutants.py CORE` asks for each fault of mutants.h.

CORE is a build with -DPARROT_MUTANTS=ON. The tests named here must pass as it is, and each must fail with its
fault switched on. `make mutants` runs it on the build that the sanitizers use.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# fault -> the tests of which each must fail
MUTANTS: dict[str, tuple[str, ...]] = {
    "hash_ignores_last_token": ("test_prefix_index_hashes.py::test_hashes_differ_in_the_last_token_alone",),
    "stale_entry_kept": (
        "test_prefix_index.py::test_shorten_drops_only_the_boundaries_beyond",
        "test_scheduler_placement.py::test_the_newest_context_is_the_parent_and_evictions_are_followed",
    ),
    "cow_skipped": (
        "test_context_tree.py::test_four_forks_diverging_inside_one_partial_block_each_read_their_own_text",
        "test_context_tree.py::test_a_parent_that_goes_on_after_its_fork_wrote_gets_the_copy",
    ),
    "all_text_public": (
        "test_prefix_domains.py::test_a_published_prefix_is_shared_and_nothing_behind_it",
        "test_prefix_domains.py::test_a_longer_claim_finds_no_more_than_what_was_published",
    ),
    "seam_ignored": (
        "test_prefix_index.py::test_published_text_matches_in_every_domain_and_what_follows_only_in_its_own",
        "test_scheduler_placement.py::"
        "test_a_finished_context_of_another_tenant_serves_published_text_and_no_more",
    ),
    "group_never_split": (
        "test_scheduler_placement.py::test_a_group_without_a_common_prefix_is_split_when_it_finishes_sooner",
    ),
    "aging_off": (
        "test_scheduler_order.py::test_an_application_that_never_ends_does_not_shut_out_a_stranger",
        "test_scheduler_order.py::test_a_flood_of_calls_that_share_a_prefix_does_not_starve_a_cold_one",
    ),
    "uses_ignored": (
        "test_prefix_eviction.py::test_no_use_goes_before_a_far_use_before_a_near_one_whatever_their_age",
    ),
    "blocks_not_compared": (
        "test_attention_plan.py::test_who_shares_what_is_looked_for_only_when_it_may_have_changed",
    ),
}


def run_tests(core: Path, tests: tuple[str, ...], mutant: str) -> tuple[int, int]:
    """How many of the tests passed and failed; neither when Python did not live to say."""
    environment = os.environ | {"PARROT_CORE": str(core), "PARROT_MUTANT": mutant}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "tests.native_build",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"tests/{test}" for test in tests]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", ran.stdout)}
    return counts.get("passed", 0), counts.get("failed", 0)


def main() -> None:
    """Print a line per fault; exit status 1 if one went unnoticed."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: {sys.argv[0]} CORE, the extension module of a build with -DPARROT_MUTANTS=ON")
    core = Path(sys.argv[1]).resolve()
    every = tuple(test for tests in MUTANTS.values() for test in tests)
    runs = {"": every, **MUTANTS}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {mutant: pool.submit(run_tests, core, tests, mutant) for mutant, tests in runs.items()}
    passed, failed = futures[""].result()
    if passed < len(every) or failed:
        sys.exit("without a fault the tests do not pass; run them by themselves first")
    missed = 0
    for mutant, tests in MUTANTS.items():
        passed, failed = futures[mutant].result()
        noticed = failed >= len(tests) and not passed
        missed += not noticed
        verdict = (
            "noticed" if noticed else f"NOT NOTICED: of {len(tests)} tests {passed} passed, {failed} failed"
        )
        print(f"    {mutant:<26}{verdict}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
