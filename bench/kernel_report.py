"""What ``python -m bench kernel`` prints, and what its rows say together."""

from __future__ import annotations

from typing import Any

import numpy as np

from .peers.stored_attention import holds, stored

OURS = "ours"
OUR_ARMS = ("ours", "triton", "torch")  # what their names begin with
FLASHINFER = ("paged", "cascade", "cascade fa2")


def show_measurement(row: str, arm: str, kept: dict[str, Any]) -> None:
    """One line for one arm of one row."""
    measured = kept["arms"][arm]
    if "not run" in measured:
        text = f"not run: {measured['not run']}"
    else:
        over = measured["us"] / kept["floor_us"]
        text = (
            f"{measured['us']:9.1f} us ({measured['least']:.1f} to {measured['most']:.1f})  x{over:5.2f} of "
            f"{kept['floor_us']:.1f}  error {measured['error']:.1e}"
        )
    print(f"{row:<40}{arm:<26}{text}", flush=True)


def show_planning(row: str, planning: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{row:<40}plan + upload: {planning['changed_us']:7.1f} us changed, "
        f"{planning['grown_us']:7.1f} us grown, {planning['of_budget']:.2f} of 5 % of a 7B step",
        flush=True,
    )


def best_peer(row: str, arms: dict[str, Any]) -> tuple[str, float, bool] | None:
    """(name, microseconds, whether it was measured here) of the fastest peer; stored times stand for arms
    that were not measured."""
    times = {name: (us, False) for name, us in stored(row).items()}
    for name, measured in arms.items():
        if "us" in measured and not name.startswith(OUR_ARMS):
            times[name] = (measured["us"], True)
    if not times:
        return None
    name = min(times, key=lambda arm: times[arm][0])
    return name, *times[name]


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """The targets: every row against the best peer, the mean and the largest time over the floor of the rows
    with a prefix, groups and deep trees against FlashInfer, no sharing against it; and which arms of ours
    were not run."""
    arms = {name: row["arms"] for name, row in result["rows"].items()}
    ours = {name: made[OURS]["us"] for name, made in arms.items() if "us" in made.get(OURS, {})}
    over = {name: us / result["rows"][name]["floor_us"] for name, us in ours.items()}
    grid = [name for name in ours if result["rows"][name]["part"] == "grid" and "x16 " not in name]
    against: dict[str, Any] = {}
    for name, us in ours.items():
        peer = best_peer(name, arms[name])
        flashinfer = [arms[name][arm]["us"] for arm in FLASHINFER if "us" in arms[name].get(arm, {})]
        against[name] = {
            "over_floor": round(over[name], 3),
            "best_peer": None if peer is None else {"arm": peer[0], "us": peer[1], "measured": peer[2]},
            "of_best_peer": None if peer is None else round(us / peer[1], 3),
            "flashinfer_over_ours": round(min(flashinfer) / us, 2) if flashinfer else None,
        }
    summary: dict[str, Any] = {"against": against}
    if grid:
        summary["geometric_mean_over_floor"] = round(
            float(np.exp(np.mean([np.log(over[n]) for n in grid]))), 3
        )
        summary["most_over_floor"] = round(max(over[name] for name in grid), 3)
        print(
            f"geometric mean over the floor, {len(grid)} rows with a prefix: "
            f"{summary['geometric_mean_over_floor']} (most {summary['most_over_floor']})"
        )
    slower = [name for name, row in against.items() if row["of_best_peer"] and row["of_best_peer"] > 1]
    summary["slower_than_a_peer"] = slower
    print(f"rows slower than the best peer: {', '.join(slower) or 'none'}")
    summary["not_run"] = [
        f"{arm}, {name}"
        for name, made in arms.items()
        for arm, measured in made.items()
        if "not run" in measured and arm.startswith(OUR_ARMS)
    ]
    print(f"arms of ours that were not run: {'; '.join(summary['not_run']) or 'none'}")
    summary["balances"] = _balances(arms, grid)
    if "copy_bandwidth" in result:
        summary["stored_peers_hold"] = holds(result["copy_bandwidth"], arms)
        print(f"stored rows of peers hold here: {summary['stored_peers_hold']}")
    return summary


def _balances(arms: dict[str, Any], grid: list[str]) -> dict[str, float]:
    """Geometric mean of the time with each balance over that with the default one."""
    ratios: dict[str, list[float]] = {}
    for name in grid:
        for arm, measured in arms[name].items():
            if arm.startswith("ours,") and "us" in measured:
                ratios.setdefault(arm, []).append(measured["us"] / arms[name][OURS]["us"])
    means = {arm: round(float(np.exp(np.mean(np.log(values)))), 4) for arm, values in ratios.items()}
    for arm, mean in means.items():
        print(f"{arm}: {mean} of the time of the default")
    return means
