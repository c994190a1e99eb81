"""From reserved slots to the batch that the model sees, and from there to logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_harness import load
from parrot._core import ContextTree, OutOfBlocks
from parrot.engine.call import EngineCall
from parrot.engine.runner import ModelRunner, Work, reserve
from parrot.wire import CallId, ContextId, Dispatch, Fill, Generate, Sampling, pack_ids


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> ModelRunner:
    return ModelRunner(load(tiny_model)[0], 16, torch.float32, torch.device("cpu"))


def opened(tree: ContextTree, number: int, ids: list[int]) -> EngineCall:
    context_id = ContextId(number)
    verbs = (Fill(pack_ids(ids), context_id), Generate(Sampling(), context_id))
    call = EngineCall(Dispatch(CallId(number), 1, 0, "LATENCY", verbs), received_us=1)
    call.advance(lambda _ids: "")
    call.num_computed = tree.open(number, 0, call.ids.view(), len(ids) - 1)
    return call


def run(runner: ModelRunner, tree: ContextTree, *work: Work) -> torch.Tensor:
    wants = [w.wants_logits for w in work]
    step = reserve(tree, work)
    logits = runner.forward(tree, step, wants).logits
    tree.commit(step.context_ids)
    for w in work:
        w.call.num_computed += w.count
    return logits


def test_a_mixed_step_has_rows_positions_and_slots_of_each_sequence(runner: ModelRunner) -> None:
    tree = ContextTree(16)
    first, second = opened(tree, 1, list(range(3, 23))), opened(tree, 2, [50, 51, 52])
    run(runner, tree, Work(first, 18))
    step = reserve(tree, [Work(first, 2), Work(second, 3)])
    batch = runner._build(tree, step, [True, False])
    tree.rollback(step.context_ids)
    assert batch.token_ids.tolist() == [21, 22, 50, 51, 52]
    assert batch.positions.tolist() == [18, 19, 0, 1, 2]
    assert batch.query_start == [0, 2, 5]
    assert batch.seq_lens == [20, 3]
    assert batch.logit_rows.tolist() == [1]
    tables = batch.block_tables
    assert tables.shape == (2, 2)
    assert tables[1, 1] == -1
    blocks = [tables[0, 1], tables[0, 1], tables[1, 0], tables[1, 0], tables[1, 0]]
    assert batch.slots.tolist() == [
        int(b) * 16 + p % 16 for b, p in zip(blocks, [18, 19, 0, 1, 2], strict=True)
    ]


def test_a_fork_inside_a_block_computes_what_a_fresh_context_does(runner: ModelRunner) -> None:
    prompt = list(range(5, 26))
    tree = ContextTree(16)
    alone = run(runner, tree, Work(opened(tree, 1, [*prompt, 99]), 22))
    tree = ContextTree(16)
    for cache in (*runner.kv.k, *runner.kv.v):
        cache.fill_(float("nan"))
    first = opened(tree, 1, [*prompt, 98])
    run(runner, tree, Work(first, 22))
    fork = opened(tree, 2, [*prompt, 99])
    assert fork.num_computed == len(prompt)
    torch.testing.assert_close(run(runner, tree, Work(fork, 1)), alone, rtol=1e-5, atol=1e-5)


def test_a_reservation_that_does_not_fit_changes_nothing(runner: ModelRunner) -> None:
    tree = ContextTree(2)
    call = opened(tree, 1, list(range(3, 43)))
    with pytest.raises(OutOfBlocks):
        reserve(tree, [Work(call, 40)])
    assert tree.num_free_blocks == 2
    tree.check_invariants()


def test_only_the_end_of_a_generate_wants_logits() -> None:
    tree = ContextTree(4)
    call = opened(tree, 1, list(range(3, 13)))
    assert not Work(call, 9).wants_logits
    assert Work(call, 10).wants_logits
    assert not Work(call, 10).is_decode
    call.num_computed = 9
    assert call.output is not None
    call.output.num_generated = 1
    assert Work(call, 1).is_decode
    assert np.array_equal(call.ids.view(), np.arange(3, 13))
