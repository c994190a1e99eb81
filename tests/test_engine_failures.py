"""What an engine refuses, and what fails inside it, without harm to other calls."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch

from engine_harness import Harness, MakeHarness, Oracle, greedy_oracle, load, prompt_of
from parrot.engine.batch import StepLogits
from parrot.engine.engine import Engine
from parrot.engine.overlap import OverlappingEngine
from parrot.errors import DuplicateRequest
from parrot.wire import CallId, ContextId, Dispatch, Fill, FreeContext, Generate, Sampling, pack_ids


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> MakeHarness:
    loaded = load(tiny_model)
    return lambda **options: Harness(*loaded, **options)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return greedy_oracle(tiny_model)


def test_logits_that_are_not_finite_fail_their_call_alone(
    make: MakeHarness, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    forward = harness.runner.forward

    def poisoned(*args: object) -> StepLogits:
        logits = forward(*args).logits.clone()  # type: ignore[arg-type]
        if len(logits) == 2:
            logits[0, 5] = float("nan")
        return StepLogits(logits)

    prompts = [prompt_of(10, seed=1), prompt_of(10, seed=2)]
    calls = [harness.submit(prompt) for prompt in prompts]
    monkeypatch.setattr(harness.runner, "forward", poisoned)
    bad, good = harness.run(*calls)
    assert bad.error is not None
    assert bad.error.code == "engine_error"
    assert good.ids == oracle(prompts[1], 8)


def test_a_step_that_raises_fails_its_calls_and_the_engine_lives_on(
    make: MakeHarness, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(max_batch_size=2)
    calls = [harness.submit(prompt_of(10, seed=i)) for i in range(3)]
    harness.step()

    def broken(*args: object) -> StepLogits:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(harness.runner, "forward", broken)
        harness.step()
    first, second, third = harness.run(*calls)
    for result in (first, second):
        assert result.error is not None
        assert result.error.code == "engine_error"
        assert "device lost" in result.error.message
    assert third.ids == oracle(prompt_of(10, seed=2), 8)


@pytest.mark.parametrize("engine_type", [Engine, OverlappingEngine])
def test_what_hangs_in_the_traceback_of_a_failed_step_is_freed(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch, engine_type: type[Engine]
) -> None:
    harness = make(engine_type=engine_type)
    held: list[weakref.ref[torch.Tensor]] = []

    def broken(*args: object) -> StepLogits:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        error = RuntimeError("device lost")
        error.args += (error, tensor)  # a cycle
        raise error

    call = harness.submit(prompt_of(10))
    gc.disable()
    logging.disable()  # pytest keeps what is logged, tracebacks too
    try:
        with monkeypatch.context() as patch:
            patch.setattr(harness.runner, "forward", broken)
            harness.step()
        assert [tensor() for tensor in held] == [None]
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    assert harness.run(call)[0].error is not None


@pytest.mark.parametrize(
    ("verbs", "param"),
    [
        ((Fill(pack_ids([1, 999_999]), ContextId(7)),), "token_ids"),
        ((Fill(pack_ids([1, -1]), ContextId(7)),), "token_ids"),
        ((Fill(b"abc", ContextId(7)),), "token_ids"),
        ((Fill(pack_ids([1]), ContextId(7)), Generate(Sampling(), ContextId(8))), "verbs"),
        ((), "verbs"),
        ((Fill(pack_ids([1]), ContextId(7)), Generate(Sampling(top_p=2.0), ContextId(7))), "top_p"),
    ],
)
def test_a_program_that_cannot_run_is_refused_by_name(
    make: MakeHarness, verbs: tuple[Fill | Generate, ...], param: str
) -> None:
    harness = make()
    (result,) = harness.run(harness.submit_verbs(verbs))
    assert result.error is not None
    assert (result.error.code, result.error.param) == ("invalid_request", param)


def test_ids_in_use_are_refused(make: MakeHarness) -> None:
    harness = make()
    call = harness.submit(prompt_of(5), max_tokens=2)
    dispatch = Dispatch(CallId(call), 1, 0, "LATENCY", (Fill(pack_ids([4]), ContextId(50)),))
    with pytest.raises(DuplicateRequest):
        harness.engine.submit(dispatch)
    reuse = harness.submit_verbs([Fill(pack_ids([4]), ContextId(call))])
    assert harness.run(call, reuse)[1].error is not None
    assert harness.results[call].error is None


def test_a_context_id_is_in_use_until_its_call_is_gone_and_no_longer(make: MakeHarness) -> None:
    harness = make()
    call = harness.submit(prompt_of(5), max_tokens=4)
    program = [Fill(pack_ids([4, 5]), ContextId(call)), FreeContext(ContextId(call))]
    refused = [harness.submit_verbs(program) for _ in range(2)]
    harness.engine.abort([CallId(call)])
    third = harness.submit_verbs(program)
    *others, last = harness.run(*refused, third)
    assert all(result.error for result in others)
    assert last.error is None
    wrong = harness.submit_verbs([Fill(pack_ids([-1]), ContextId(call))])
    assert harness.run(wrong)[0].error is not None
    assert harness.run(harness.submit_verbs(program))[0].error is None


def test_reset_forgets_calls_and_contexts_so_that_ids_may_start_again(
    make: MakeHarness, oracle: Oracle
) -> None:
    harness = make()
    harness.generate(prompt_of(20), max_tokens=3)
    harness.submit(prompt_of(30), max_tokens=30)
    harness.step()
    harness.engine.reset()
    assert not harness.engine.has_work
    harness.results.clear()
    harness.next_id = 1
    prompt = prompt_of(20, seed=3)
    assert harness.generate(prompt, max_tokens=3).ids == oracle(prompt, 3)
