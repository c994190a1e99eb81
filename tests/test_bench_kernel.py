"""``python -m bench kernel`` without a GPU: rows, floors, what peers are given, a run of the torch arm."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench import kernel, kernel_planning, kernel_report, kernel_rows  # noqa: E402
from bench.kernel_arms import SCALE, measure_arm, reference  # noqa: E402
from bench.kernel_rows import Batch, Problem, Row, all_rows, plan_costs  # noqa: E402
from bench.peers import attention_gpu, stored_attention  # noqa: E402

CPU = torch.device("cpu")
TINY = [
    Row("grid", 2, 1, ((96, 3),), 20, "3x96"),
    Row("groups", 2, 2, ((64, 1), (80, 2)), 16, "2 groups"),
    Row("deep", 2, 1, ((64, ((64, 2), (32, ((64, 1),)))),), 5, "levels"),
]


def test_the_rows_are_those_of_the_evaluation_and_have_its_floors() -> None:
    floors = {row.name: Batch(row).floor_us for row in all_rows()}
    assert len(floors) == 26
    assert floors["32/32 8x6000 +256"] == pytest.approx(31.4, abs=0.1)
    assert floors["32/8 128x6000 +256"] == pytest.approx(38.3, abs=0.1)
    assert floors["32/32 16 unequal groups +256"] == pytest.approx(408, abs=0.5)
    assert set(stored_attention._TIMES) == {row.name for row in all_rows() if row.part == "grid"}


def test_requests_of_a_node_share_its_blocks_and_no_others() -> None:
    batch = Batch(TINY[2])
    assert [[(n.first, n.count, len(n.blocks)) for n in level] for level in batch.levels] == [
        [(0, 3, 4)],
        [(0, 2, 4), (2, 1, 2)],
        [(0, 1, 4)],
    ]
    assert batch.seq_lens.tolist() == [133, 133, 165]
    tables = batch.block_tables
    assert (tables[0, :8] == tables[1, :8]).all()
    assert len(np.unique(tables[tables >= 0])) == batch.num_blocks == 17
    assert batch.tokens == (4 + 4 + 2 + 4) * 16 + 3 * 5


def test_what_a_plan_moves_and_multiplies_is_counted() -> None:
    batch = Batch(Row("grid", 2, 2, ((128, 4),), 64, "4x128"))
    alone = np.array([[r, 0, 192, r, 1, -1, 0, 0] for r in range(4)], np.int32)
    costs = plan_costs(batch, alone, 0)
    rows = 2 * 2 * 4 * 2 * 128
    assert costs["bytes_over_floor"] == round((4 * 4 * 192 * 2 * 128 + rows) / batch.bytes, 3)
    assert costs["flops_over_floor"] == 64  # a row of 64
    shared = [[0, 0, 128, 0, 4, 0, 0, 0]] + [[r, 128, 192, 4 + r, 1, 4 + r, 0, 0] for r in range(4)]
    assert plan_costs(batch, np.array(shared, np.int32), 0)["bytes_over_floor"] == 1
    assert plan_costs(batch, np.array(shared, np.int32), 8)["bytes_over_floor"] > 1


def test_a_run_on_the_cpu_keeps_every_row_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[dict[str, object]] = []
    result = kernel.run(
        True, device=CPU, rows=TINY, min_bytes=1, save=lambda result: kept.append(copy.deepcopy(result))
    )
    assert [len(state["rows"]) for state in kept[:3]] == [1, 2, 3]  # type: ignore[arg-type]
    for row in result["rows"].values():
        assert row["arms"]["torch"]["us"] > 0
        assert row["arms"]["torch"]["error"] == 0
        assert row["plan"]["entries"] > 0
    assert result["planning"].keys() == result["rows"].keys()
    assert all(planning["grown_us"] > 0 for planning in result["planning"].values())
    assert result["slower_than_a_peer"] == []
    lines = capsys.readouterr().out.splitlines()
    assert sum("torch" in line and "error" in line for line in lines) == 3


def test_parts_choose_rows() -> None:
    result = kernel.run(True, ["deep"], device=CPU, rows=TINY, min_bytes=1)
    assert list(result["rows"]) == [TINY[2].name]
    assert "planning" not in result


def test_an_arm_that_fails_or_cannot_run_a_row_ends_nothing() -> None:
    problem = Problem(TINY[0], torch.float16, CPU, 1)
    expected = reference(problem)(*problem.caches[0])

    def breaks(problem):
        raise RuntimeError("no such kernel")

    def cannot(problem):
        return attention_gpu.groups_of(problem, several=True)

    assert measure_arm(breaks, problem, expected, 1) == {"not run": "RuntimeError: no such kernel"}
    assert "one group" in measure_arm(cannot, problem, expected, 1)["not run"]


class OneLevel:
    """FlashInfer's wrapper of one level, on the CPU."""

    def __init__(self, workspace, layout, *, backend):
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(
        self, starts, offsets, pages, last, heads, kv_heads, head_dim, page_size, *, q_data_type, sm_scale
    ):
        assert (head_dim, page_size, q_data_type) == (128, 16, torch.float16)
        self.group, self.scale = heads // kv_heads, sm_scale
        self.parts = [
            (slice(starts[i], starts[i + 1]), pages[offsets[i] : offsets[i + 1]].long(), int(last[i]))
            for i in range(len(last))
        ]

    def run(self, query, caches, *, return_lse):
        assert return_lse
        output, sums = torch.zeros_like(query), torch.zeros(query.shape[:2])
        for rows, pages, last in self.parts:
            tokens = len(pages) * 16 - 16 + last
            keys, values = (
                cache[pages].flatten(0, 1)[:tokens].float().repeat_interleave(self.group, 1)
                for cache in caches
            )
            scores = torch.einsum("rhd,thd->rht", query[rows].float(), keys) * self.scale
            output[rows] = torch.einsum("rht,thd->rhd", scores.softmax(-1), values).half()
            sums[rows] = scores.logsumexp(-1)
        return output, sums


def merge_state_in_place(output, sums, other, other_sums):
    weight = torch.sigmoid(other_sums - sums)[:, :, None]
    output.copy_(output * (1 - weight) + other * weight)
    sums.copy_(torch.logaddexp(sums, other_sums))


@pytest.mark.parametrize("row", [TINY[1], Row("deep", 4, 2, ((64, ((64, 2), (32, 1))),), 5, "levels")])
def test_a_cascade_of_one_kind_of_kernels_runs_every_level_and_merges_them(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=OneLevel, merge_state_in_place=merge_state_in_place
    )
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(attention_gpu, "find_spec", lambda name: name == "flashinfer" or None)
    arms = dict(attention_gpu.installed_arms(SCALE))
    assert list(arms) == ["paged", "cascade", "cascade fa2"]
    problem = Problem(row, torch.float16, CPU, 1)
    measured = measure_arm(arms["cascade fa2"], problem, reference(problem)(*problem.caches[0]), 1)
    assert measured["error"] < 1e-3
    assert "AttributeError" in measure_arm(arms["cascade"], problem, problem.query, 1)["not run"]


def test_peers_get_the_tree_in_their_own_terms() -> None:
    one, groups, deep = (Problem(row, torch.float16, CPU, 1) for row in TINY)
    offsets, pages = attention_gpu.page_lists(attention_gpu.own_pages(one))
    assert offsets.tolist() == [0, 8, 16, 24]
    assert pages[8:16].tolist() == one.block_tables[1].tolist()
    (starts, shared, _), (own_starts, own, last) = attention_gpu.cascade_levels(one)
    assert starts.tolist() == [0, 3]
    assert len(shared[0]) == 6
    assert own_starts.tolist() == [0, 1, 2, 3]
    assert [len(row) for row in own] == [2, 2, 2]
    assert last.tolist() == [4, 4, 4]
    with pytest.raises(attention_gpu.CannotRun, match="different depth"):
        attention_gpu.cascade_levels(deep)
    assert [node.count for node in attention_gpu.groups_of(groups, several=True)] == [1, 2]
    for problem, several in ((groups, False), (deep, True), (one, True)):
        with pytest.raises(attention_gpu.CannotRun):
            attention_gpu.groups_of(problem, several)
    assert attention_gpu.padded([np.array([5, 6], np.int32), np.array([7], np.int32)]).tolist() == [
        [5, 6],
        [7, 0],
    ]


def test_stored_peers_hold_where_bandwidth_and_rows_agree() -> None:
    rows = {"32/8 16x6000 +256": {"paged": {"us": 55.0}, "cascade": {"us": 119.0}, "fa3": {"not run": "-"}}}
    assert stored_attention.holds(4.2e12, rows)
    assert not stored_attention.holds(4.0e12, rows)
    assert not stored_attention.holds(4.2e12, {})
    assert not stored_attention.holds(4.2e12, {"32/8 16x6000 +256": {"paged": {"us": 60.0}}})


def test_the_summary_names_what_is_slower_than_a_peer_and_takes_stored_ones_where_none_ran() -> None:
    def row(part, floor, **arms):
        return {"part": part, "floor_us": floor, "arms": {name: {"us": us} for name, us in arms.items()}}

    result = {
        "copy_bandwidth": 4.25e12,
        "rows": {
            "32/8 8x6000 +256": row("grid", 8.0, ours=16.0, **{"ours, half the costs": 8.0}),
            "32/8 64x16 +1024": row("grid", 60.0, ours=80.0, paged=70.0),
            "32/8 4 groups of 16x6000 +256": row(
                "groups", 40.0, ours=50.0, paged=150.0, **{"cascade fa2": 125.0}
            ),
        },
    }
    result["rows"]["32/8 64x16 +1024"]["arms"] |= {"cascade": {"not run": "-"}, "triton": {"not run": "-"}}
    summary = kernel_report.summarize(result)
    assert summary["not_run"] == ["triton, 32/8 64x16 +1024"]
    assert summary["geometric_mean_over_floor"] == summary["most_over_floor"] == 2.0
    assert summary["slower_than_a_peer"] == ["32/8 64x16 +1024"]
    against = summary["against"]
    assert against["32/8 8x6000 +256"]["best_peer"] == {
        "arm": "fa3 prefix+suffix",
        "us": 28.7,
        "measured": False,
    }
    assert against["32/8 4 groups of 16x6000 +256"]["flashinfer_over_ours"] == 2.5
    assert summary["balances"] == {"ours, half the costs": 0.5}


def test_rows_are_chosen_by_name_and_launched_once_for_a_profiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[Row] = []
    monkeypatch.setattr(kernel, "_gpu", lambda: CPU)
    monkeypatch.setattr(kernel, "launch_once", lambda rows, _: launched.extend(rows))
    name = "32/32 32 on 4096, 2048 or 512, 64-1024 +256"
    assert kernel.main(["--row", name, "--once"]) == 0
    assert [row.name for row in launched] == [name]
    with pytest.raises(SystemExit):
        kernel.main(["--row", "32/32 1x1"])
    assert "no such row: 32/32 1x1; there are 32/32 8x6000 +256; " in capsys.readouterr().err


def test_the_command_fails_where_an_arm_of_ours_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for failed, code in (([], 0), (["ours, a row"], 1)):
        monkeypatch.setattr(kernel, "run", lambda *_, failed=failed, **__: {"not_run": failed})
        assert kernel.main([]) == code


def test_a_step_of_more_requests_takes_longer() -> None:
    assert kernel_planning.step_ms(32) == 6.5
    assert kernel_planning.step_ms(128) == pytest.approx(9.5)
    assert kernel_rows.HEAD_DIM == 128
